# SPDX-License-Identifier: Apache-2.0
"""flex_attention on CUDA, or the emulator: options and row ranges; the rest is refused."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import flex_cases
import harness
from cuattn import flex

TOLERANCE = {"float32": 5e-5, "float16": 6e-3}


def to_device(device, x):
    if harness.is_emulated():
        import cupy

        return cupy.asarray(x)
    import torch

    return torch.from_numpy(x).to("cuda")


def to_host(x):
    return np.asarray(x.values if hasattr(x, "values") else x.cpu().numpy(), np.float64)


def masks(rng, n):
    ids = np.sort(rng.integers(0, 4, n))
    limit = rng.integers(0, n, 2)
    return {
        "documents": lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        "prefix": lambda b, h, q, k: (k <= q) | (k < limit[b]),
        "chunks": lambda b, h, q, k: q // 50 == k // 50,
        "heads, and rows that see nothing": lambda b, h, q, k: (k <= q - 20 * h) & (q % 3 != 0),
        "causal": flex.masks.causal(),
    }


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("naive", "cublas", "simt", "sm80"))
)
def test_row_ranges_equal_the_dense_formula(rng, device, backend):
    dtype = "float16" if backend == "sm80" else "float32"
    for case, (name, mask) in enumerate(masks(rng, 200).items()):
        dims = ((64, 64), (64, 64) if harness.is_emulated() else (128, 128))[case % 2]
        queries = (2, 150 + 50 * (case % 2), 4, dims[0])
        shapes = (queries, (2, 200, 2, dims[0]), (2, 200, 2, dims[1]))
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        options = {}
        if case % 2:
            options = {"softcap": 4.0, "sinks": rng.standard_normal(4).astype(np.float32)}
        want, lse = flex_cases.attention(
            *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), mask=mask, **options
        )
        given = {
            n: to_device(device, x) if isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        arrays = [to_device(device, x) for x in (q, k, v)]
        out, got = cuattn.flex_attention(
            *arrays, mask_mod=mask, backend=backend, return_lse=True, **given
        )
        out, got = to_host(out).transpose(0, 2, 1, 3), to_host(got)
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance, err_msg=name)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(lse), err_msg=name)
        some = np.isfinite(lse)
        np.testing.assert_allclose(got[some], lse[some], atol=2e-3, err_msg=name)


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_programs_are_refused_with_the_way_out(rng, device, backend):
    q = to_device(device, np.zeros((1, 8, 1, 64), np.float32))
    for given in (
        {"mask_mod": lambda b, h, i, j: (i + j) % 2 == 0},
        {"score_mod": lambda s, b, h, i, j: s * 2.0},
    ):
        with pytest.raises(NotImplementedError, match="move the arrays to the CPU"):
            cuattn.flex_attention(q, q, q, **given)
