# SPDX-License-Identifier: Apache-2.0
"""attention_varlen over caches of float8 in blocks: which kernel reads them, and what is refused.
Next: test_float8_pages.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from float8_cases import F8


def explain(device, q_len, q="bfloat16", **options):
    pages = ("float8_e4m3fn", 9, 16, 2, 64)
    given = {"block_tables": (4, 8), "seqused_k": (4,), "k_scale": ("float32", 2), **options}
    arrays = ((q, 100, 8, 64), pages, pages, (5,), None)
    return cuattn.explain("attention_varlen", *arrays, q_len, 128, device=device, **given)


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "cpu"), ("a100", "sm80"), ("h200", "sm90")])
def test_how_the_keys_are_reached(device, kernel):
    plan = explain(device, 40)
    assert plan.kernel == kernel
    assert "keys are gathered from their blocks first, as numbers of q's dtype" in plan.reason
    assert plan.workspace_bytes >= 2 * 4 * 128 * 2 * 64 * 2
    assert "few queries a sequence: a kernel of paged_attention" in explain(device, 4).reason


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize(("device", "kernel"), [("cpu", "cpu"), ("a100", "sm80"), ("h200", "sm90")])
def test_what_runs_float8_queries(device, kernel, q_len):
    """On CUDA what runs 16-bit queries, after a pass over q, and naive where that lacks a scale.

    Where queries are many on Hopper, products of codes.
    """
    plain, plan = explain(device, q_len), explain(device, q_len, q="float8_e4m3fn")
    if device == "cpu":
        assert plan.kernel == kernel
        assert plan.reason.endswith("keys are gathered from their blocks first")
        return
    of_parts = ({"q_scale": ("float32", 4, 8, 1)}, {"backend": "naive"})
    if (device, q_len) == ("h200", 40):
        assert plan.kernel == "sm90"
        assert "; keys are gathered from their blocks first; " in plan.reason
        assert "; values are turned into columns as they come" in plan.ladder
        assert 2 * 4 * 128 * 2 * 64 <= plan.workspace_bytes < plain.workspace_bytes
        for more in ({"q_scale": ("float32", 4, 2)}, {"v_scale": ("float32", 4, 2, 64)}):
            assert explain(device, q_len, q="float8_e4m3fn", **more).kernel == "sm90"
        for more in of_parts:
            assert explain(device, q_len, q="float8_e4m3fn", **more).kernel == "naive"
        scored = explain(device, q_len, q="float8_e4m3fn", softcap=3.0)
        assert (scored.kernel, "q's codes become numbers" in scored.reason) == ("sm90", True)
        return
    assert plan.kernel == plain.kernel == (kernel if q_len == 40 else "sm80")
    assert plan.reason == f"{plain.reason}; q's codes become numbers"
    line = "* dequantize: runs: codes of q become numbers of 16 bits first"
    assert plan.ladder == f"{plain.ladder}{line}\n"
    assert plan.workspace_bytes == -(-plain.workspace_bytes // 256) * 256 + 100 * 8 * 64 * 2
    more = ({"q_scale": ("float32", 4, 2)}, {"v_scale": ("float32", 4, 2, 64)})
    for options in (*of_parts, *more):
        found = explain(device, q_len, q="float8_e4m3fn", **options).kernel
        assert found == ("sm90" if device == "h200" and options in more else "naive")
    assert explain(device, q_len, q="float8_e4m3fn", k_scale=("float32", 4, 2)).kernel != "naive"


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("scales", ["q", "k", "v", "k parts"])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("paged", [True, False])
def test_the_batch_does_not_choose_the_arithmetic_of_invariant_calls(paged, q_len, scales, device):
    """A scale for each sequence, or part of one: a lone or short sequence has one as heads have."""
    plans = []
    for batch, longest in ((1, 100), (4, 300)):
        shape = (batch, 2, -(-longest // 128))[: 3 if "parts" in scales else 2]
        options = {f"{scales[0]}_scale": ("float32", *shape), "batch_invariant": True}
        rows = ("float8_e4m3fn", 100 * batch, 2, 64)
        starts = None if paged else (batch + 1,)
        if paged:
            rows = ("float8_e4m3fn", 9, 16, 2, 64)
            options |= {"block_tables": (batch, 20), "seqused_k": (batch,)}
        q = ("float8_e4m3fn", 40 * batch, 8, 64)
        plan = cuattn.explain("attention_varlen", q, rows, rows, (batch + 1,), starts, q_len,
                              longest, device=device, **options)  # fmt: skip
        plans.append((plan.kernel, "numbers" in plan.reason))
    assert plans[0] == plans[1]


CODES = np.ones((5, 8, 2, 64), np.uint8).view(F8)
BF16 = np.ones((5, 4, 64), ml_dtypes.bfloat16)
REFUSALS = {
    "q_of_float32": ({"q": np.ones((5, 4, 64), np.float32)},
        "q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; cast it"),
    "caches_of_16_bits_under_float8_q": (
        {"q": BF16.astype(F8), "k": np.ones(CODES.shape, ml_dtypes.bfloat16)},
        "k must be float8_e4m3fn like q, got bfloat16; give q in the dtype of the caches"),
    "v_of_another_dtype": ({"v": np.ones(CODES.shape, ml_dtypes.bfloat16)},
        "v must be float8_e4m3fn like k, got bfloat16; cast it"),
    "q_scale": ({"q_scale": 2.0},
        "q_scale belongs to float8_e4m3fn arrays, these are bfloat16; leave it out, or make float8 "
        "arrays with cuattn.quantize"),
    "fast_sums": ({"accumulate": "fast"},
        "accumulate must be 'exact' for bfloat16 q, got 'fast'; leave it out, or quantise q, k and "
        "v with cuattn.quantize"),
    "scales_of_blocks": ({"k_scale": np.ones((2, 2, 1), np.float32)},
        "k_scale must be a number or have shape (1,), (num_heads_kv,) = (2,) or (batch, "
        "num_heads_kv) = (2, 2), got (2, 2, 1); make such a scale with cuattn.quantize"),
    "scale_of_query_heads": ({"v_scale": np.ones(4, np.float32)},
        "v_scale must be a number or have shape (1,), (num_heads_kv,) = (2,) or (batch, "
        "num_heads_kv) = (2, 2), got (4,); make such a scale with cuattn.quantize"),
    "scale_nan": ({"k_scale": np.array([1, np.nan], np.float32)},
        "k_scale must hold finite numbers that are not negative, got nan at (0, 1, 0), axes that "
        "it lacks counted as 0; value = stored * scale"),
    "scale_negative": ({"v_scale": -2.0},
        "v_scale must be finite in float32 and not negative, got -2; value = stored * scale"),
    "head_dim_24": (
        {"q": BF16[..., :24].copy(), "k": CODES[..., :24].copy(), "v": CODES[..., :24].copy()},
        "q must have head_dim a multiple of 16 up to 256 for float8, got 24; pad it with zeros and "
        "pass scale= of the true head_dim"),
    "dtype_of_caches_that_are_not": ({"k": np.ones(CODES.shape, np.float16),
                                      "v": np.ones(CODES.shape, np.float16),
                                      "dtype": "float8_e4m3fn"},
        "dtype float8_e4m3fn asks for arrays of that dtype or of uint8, got k of float16; leave it "
        "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    changes, message = REFUSALS[name]
    given = {
        **{"q": BF16, "k": CODES, "v": CODES},
        "cu_seqlens_q": np.array([0, 2, 5], np.int32),
        "cu_seqlens_k": np.array([0, 9, 12], np.int32),
        **{"max_seqlen_q": 3, "max_seqlen_k": 9, "block_tables": np.zeros((2, 2), np.int32)},
    }
    cuattn.attention_varlen(**given, k_scale=2.0, v_scale=np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"^attention_varlen: ") as refused:
        cuattn.attention_varlen(**{**given, **changes})
    assert str(refused.value) == f"attention_varlen: {message}"
