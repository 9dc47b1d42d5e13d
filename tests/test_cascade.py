# SPDX-License-Identifier: Apache-2.0
"""cascade_attention against float64 attention over prefix and pages together."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import reference
from paged_cases import PagedCase

CASES = [
    PagedCase(),
    PagedCase(dtype="float32", lens=(5, 100, 33)),
    PagedCase(dtype="bfloat16", q_len=3, lens=(40, 3, 9)),
    PagedCase(kv_layout="vllm", sinks=True, head_dim=128, lens=(70, 1)),
    PagedCase(q_len=2, sinks=True, softcap=4.0, lens=(16, 17, 200), num_heads_q=2),
    PagedCase(q_len=4, causal=False, kv_layout="hnd", lens=(16, 4)),
    PagedCase(fp8=True, scales="head", lens=(16, 1, 0, 65)),
]


def whole(problem, shared_k, shared_v, rounded_to=None):
    """The oracle over the keys of the prefix and behind it, in one dense batch."""
    case, arrays = problem.case, problem.arrays
    lens, tables = arrays["context_lens"], arrays["block_tables"]
    keys = []
    for cache, is_k, name, shared in zip(
        problem.caches(), (True, False), ("k_scale", "v_scale"), (shared_k, shared_v), strict=True
    ):
        scale = arrays.get(name, problem.options.get(name))
        own = reference._gather(reference.unpaged(cache, case.kv_layout, is_k), tables, lens, scale)
        shared = np.broadcast_to(shared.astype(np.float32), (len(lens), *shared.shape))
        keys.append(np.concatenate([shared, own], axis=1))
    q = arrays["q"] if case.q_len is not None else arrays["q"][:, None]
    out, lse = reference.attention(
        q,
        *keys,
        causal=case.causal,
        softcap=case.softcap,
        sinks=arrays.get("sinks"),
        seqused_k=lens + len(shared_k),
        rounded_to=rounded_to,
    )
    return (out, lse) if case.q_len is not None else (out[:, 0], lse[:, :, 0])


@pytest.mark.parametrize("shared_len", [0, 1, 130])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cascade(device, case, shared_len, rng):
    def attempt():
        problem = paged_cases.make(case, rng)
        shape = (shared_len, case.num_heads_kv, case.head_dim)
        dtype = cases.DTYPES[case.dtype]
        shared = [rng.standard_normal(shape, np.float32).astype(dtype) for _ in "kv"]
        arena = harness.Arena(device)
        placed = paged_cases.place(arena, problem)
        options = {k: v for k, v in problem.options.items() if k != "window"}
        names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
        q, *paged = [placed.pop(name) for name in names]
        prefix = [arena.put(x, name=f"shared_{i}") for i, x in zip("kv", shared, strict=True)]
        out, lse = cuattn.cascade_attention(
            q, *prefix, *paged, **placed, **options, return_lse=True
        )
        device.synchronize()
        assert device.is_array(out)
        arena.verify()
        expected, expected_lse = whole(problem, *shared)
        plain, plain_lse = whole(problem, *shared, rounded_to=dtype)
        cases.check_lse(device.numpy(lse), expected_lse, plain_lse)
        cases.check(device.numpy(out), expected, plain, case.dtype)

    harness.assert_by_draws(case.dtype, attempt)


def test_into_given_outputs(device, rng):
    case = PagedCase(q_len=2, lens=(30, 7))
    problem = paged_cases.make(case, rng)
    arena = harness.Arena(device)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    q, *paged = [paged_cases.place(arena, problem)[name] for name in names]
    shared = [arena.put(rng.standard_normal((9, 2, 64)).astype(np.float16)) for _ in "kv"]
    out = arena.output(problem.arrays["q"].shape, np.float16)
    lse_out = arena.output((2, 8, 2), np.float32, align=4)
    result = cuattn.cascade_attention(q, *shared, *paged, out=out, lse_out=lse_out)
    assert result[0] is out
    assert result[1] is lse_out
    expected = cuattn.cascade_attention(q, *shared, *paged, return_lse=True)
    device.synchronize()
    arena.verify()
    for got, want in zip(result, expected, strict=True):
        assert np.array_equal(harness.bits(device.numpy(got)), harness.bits(device.numpy(want)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_k": np.ones((1, 9, 2, 64), np.float16)}, "shared_k must have 3 axes"),
        ({"shared_v": 3.0}, "shared_v must have 3 axes"),
        ({"q": np.ones((2, 64), np.float16)}, "q must have axes"),
    ],
)
def test_refusals(changes, message):
    given = {
        "q": np.ones((2, 8, 64), np.float16),
        "shared_k": np.ones((9, 2, 64), np.float16),
        "shared_v": np.ones((9, 2, 64), np.float16),
        "k_cache": np.ones((3, 16, 2, 64), np.float16),
        "v_cache": np.ones((3, 16, 2, 64), np.float16),
        "block_tables": np.zeros((2, 2), np.int32),
        "context_lens": np.ones(2, np.int32),
    }
    cuattn.cascade_attention(**given)
    with pytest.raises(ValueError, match="cascade_attention: " + message):
        cuattn.cascade_attention(**{**given, **changes})


def test_bfloat16_of_ml_dtypes():
    given = [np.ones((2, 8, 64)), np.ones((9, 2, 64)), np.ones((9, 2, 64))]
    given += [np.ones((3, 16, 2, 64))] * 2
    given = [x.astype(ml_dtypes.bfloat16) for x in given]
    out = cuattn.cascade_attention(*given, np.zeros((2, 2), np.int32), np.ones(2, np.int32))
    assert out.dtype == ml_dtypes.bfloat16
    assert (out.astype(np.float32) == 1).all()
