# SPDX-License-Identifier: Apache-2.0
"""Heads of more than 256 columns: the forward pass of every rung, and what refuses them."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import frameworks
import harness
from cases import Case
from harness import assert_case, target_params

PAIRS = ((512, 512), (264, 264), (512, 64), (64, 512), (320, 504), (256, 264))
OPTIONS = (
    {"causal": True},
    {"window": (30, 4), "sinks": True},
    {"softcap": 4.0, "alibi": "head", "layout": "bhsd"},
    {"bias": "full", "storage": "odd"},
    {"layout": "ragged", "seqused": "both", "causal": True},
    {"kv_start": True, "bias": "bool_keys", "scale": -0.03},
    {"magnitude": 12.0, "num_heads_kv": 1},
    {"seqlen_kv": 300, "seqlen_q": 3, "causal": True, "alibi": "batch"},
    {"seqlen_q": 0},
    {"seqlen_kv": 0, "sinks": True},
    {"batch": 1, "seqlen_q": 129, "seqlen_kv": 257, "causal": True},
)
EXTENTS = {"num_heads_q": 2, "num_heads_kv": 2, "seqlen_q": 37, "seqlen_kv": 70}
CASES = [
    Case(dtype, head_dim=d, head_dim_v=dv, **{**EXTENTS, **options})
    for (d, dv), dtype, options in zip(
        itertools.cycle(PAIRS),
        itertools.cycle(cases.DTYPES),
        [*OPTIONS, *OPTIONS[::-1], *OPTIONS[4:], *OPTIONS[:4]],
    )
]


@pytest.mark.parametrize(
    ("device", "backend", "case"), target_params(CASES, ids=[str(i) for i in range(len(CASES))])
)
def test_wide_heads(device, backend, case, rng):
    print(case)
    assert_case(device, backend, case, rng)


def arrays(*dims):
    return [np.ones((1, 4, 2, dim), np.float32) for dim in dims]


@pytest.mark.parametrize("dims", [(512, 512, 512), (16, 16, 264)])
def test_gradients_of_wide_heads_are_refused_by_name(dims):
    q, k, v = arrays(*dims)
    out, lse = cuattn.attention(q, k, v, return_lse=True)
    with pytest.raises(
        NotImplementedError,
        match=f"attention_backward: q and v must have head_dim and head_dim_v up to 256, got "
        f"{dims[0]} and {dims[2]}; wider heads have no backward pass",
    ):
        cuattn.attention_backward(out, q, k, v, out, lse)


def test_torch_refuses_the_gradient_before_anything_runs():
    torch = frameworks.require("torch")
    from cuattn.torch import attention

    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays(512, 512, 16))
    with pytest.raises(NotImplementedError, match="attention: no gradient goes through heads of "):
        attention(q, k, v)
    with torch.no_grad():
        assert attention(q, k, v).shape == (1, 4, 2, 16)


def test_pages_and_float8_stay_at_256():
    cache = np.ones((3, 8, 2, 264), np.float32)
    q, tables, lens = cache[:2, 0], np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match="multiple of 8 up to 256, got 264"):
        cuattn.paged_attention(q, cache, cache, tables, lens)
    narrow = [x.astype(ml_dtypes.float8_e4m3fn) for x in arrays(272, 272, 272)]
    with pytest.raises(ValueError, match="multiple of 16 up to 256 for float8, got 272"):
        cuattn.attention(*narrow)


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_dropout_of_wide_heads_drops_what_it_drops_of_others(device, backend, rng):
    """Of values in columns of their own: the rest of a wide head is zeros."""
    if backend in ("sm90", "tiled", "cublas"):
        pytest.skip("it has no dropout of wide heads")
    attention = functools.partial(harness.numpy_call, device, cuattn.attention)
    dtype = np.float16 if backend == "sm80" else np.float32
    q, k, v = (rng.standard_normal((2, 70, 2, 32), np.float32).astype(dtype) for _ in range(3))
    wide = [np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 480))) for x in (q, k, v)]
    options = {"dropout_p": 0.3, "dropout_seed": 5, "scale": 0.2, "backend": backend}
    out, expected = attention(*wide, **options), attention(q, k, v, **options)
    assert np.abs(out[..., :32].astype(np.float32) - expected).max() < 4e-3
    assert not out[..., 32:].any()
