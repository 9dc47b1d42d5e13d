# SPDX-License-Identifier: Apache-2.0
"""What paged attention refuses of float8 queries and their scale, and in which words."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
import harness
from float8_cases import F8

CODES = np.ones((5, 8, 2, 32), np.uint8).view(F8)
Q = np.ones((3, 4, 32), np.uint8).view(F8)
BF16 = np.ones(Q.shape, ml_dtypes.bfloat16)
WIDE = np.ones(CODES.shape, ml_dtypes.bfloat16)
SHAPES = "q_scale must be a number or have shape (1,), (num_heads_kv,) = (2,) or (batch, "
SHAPES += "num_heads_kv) = (3, 2), got "
MAKE = "; make such a scale with cuattn.quantize"
# fmt: off
REFUSALS = {
    "caches_of_16_bits": ({"k_cache": WIDE, "v_cache": WIDE}, ValueError,
        "k_cache must be float8_e4m3fn like q, got bfloat16; give q in the dtype of the caches"),
    "values_of_16_bits": ({"v_cache": WIDE}, ValueError,
        "v_cache must be float8_e4m3fn like k_cache, got bfloat16; cast it"),
    "scale_of_query_heads": ({"q_scale": np.ones(4, np.float32)}, ValueError,
        f"{SHAPES}(4,){MAKE}"),
    "scale_of_another_batch": ({"q_scale": np.ones((2, 2), np.float32)}, ValueError,
        f"{SHAPES}(2, 2){MAKE}"),
    "scale_of_blocks": ({"q_scale": np.ones((3, 4, 1), np.float32)}, ValueError,
        f"{SHAPES}(3, 4, 1){MAKE}"),
    "scale_of_float64": ({"q_scale": np.ones(2)}, ValueError,
        "q_scale must be float32, got float64; cast it"),
    "scale_negative": ({"q_scale": -2.0}, ValueError,
        "q_scale must be finite in float32 and not negative, got -2; value = stored * scale"),
    "scale_that_holds_nan": ({"q_scale": np.array([1, np.nan], np.float32)}, ValueError,
        "q_scale must hold finite numbers that are not negative, got nan at (0, 1, 0), axes that "
        "it lacks counted as 0; value = stored * scale"),
    "scale_under_16_bits": ({"q": BF16, "q_scale": 2.0}, ValueError,
        "q_scale belongs to float8_e4m3fn queries, these are bfloat16; leave it out, or make such "
        "queries with cuattn.quantize"),
    "scales_under_16_bits": ({"q": BF16, "q_scale": np.ones(1, np.float32)}, ValueError,
        "q_scale belongs to float8_e4m3fn queries, these are bfloat16; leave it out, or make such "
        "queries with cuattn.quantize"),
    "out_of_codes": ({"out": Q.copy()}, ValueError,
        "out must be bfloat16, float16 or float32 for float8_e4m3fn q, got float8_e4m3fn; allocate "
        "it so, or leave it out"),
    "bytes_that_nobody_explains": ({"q": Q.view(np.uint8)}, ValueError,
        "q must be float32, float16 or bfloat16, got uint8; cast it first"),
    "q_of_float32": ({"q": np.ones(Q.shape, np.float32)}, ValueError,
        "q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; cast it"),
    "head_dim_24": (
        {"q": Q[..., :24].copy(), "k_cache": CODES[..., :24].copy(),
         "v_cache": CODES[..., :24].copy()}, ValueError,
        "q must have head_dim a multiple of 16 up to 256 for float8, got 24; pad it with zeros and "
        "pass scale= of the true head_dim"),
    "rotated": ({"rope": cuattn.rope_table(30, 32)}, NotImplementedError,
        "q is float8_e4m3fn, for which no kernel is built yet; cast to bfloat16"),
}
# fmt: on
TABLES = np.array([[0, 1], [2, 3], [4, 0]], np.int32)
LENS = np.array([16, 9, 0], np.int32)


def valid():
    given = {"q": Q, "k_cache": CODES, "v_cache": CODES, "block_tables": TABLES}
    return {**given, "context_lens": LENS}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    changes, error, message = REFUSALS[name]
    cuattn.paged_attention(**valid(), q_scale=np.ones((3, 2), np.float32))
    given = {**valid(), **changes}
    kept = {name: x.copy() for name, x in changes.items() if name == "out"}
    with pytest.raises(error, match=r"^paged_attention: ") as refused:
        cuattn.paged_attention(**given)
    assert str(refused.value) == f"paged_attention: {message}"
    for name, x in kept.items():
        assert np.array_equal(harness.bits(given[name]), harness.bits(x))


@pytest.mark.parametrize("version", [1, 2])
def test_v1_and_v2_name_the_way_out(version):
    given = valid()
    given |= {"key_cache": given.pop("k_cache"), "value_cache": given.pop("v_cache")}
    function = getattr(cuattn, f"paged_attention_v{version}")
    with pytest.raises(NotImplementedError) as refused:
        function(BF16.copy(), **given, scale=1.0, kv_layout="nhd")
    assert str(refused.value) == (
        f"paged_attention_v{version}: q is float8_e4m3fn, which V1 and V2 have no kernel for; use "
        "paged_attention, or cast q to bfloat16"
    )


def test_a_shared_prefix_has_no_scales():
    shared = np.ones((4, 2, 32), F8)
    given = valid()
    with pytest.raises(NotImplementedError) as refused:
        cuattn.cascade_attention(given.pop("q"), shared, shared, **given)
    assert str(refused.value) == (
        "cascade_attention: q is float8_e4m3fn, and prefix and pages have no scales in common; "
        "pass cuattn.dequantize(q, q_scale), or call paged_attention over block_tables that name "
        "the prefix's blocks"
    )


def test_results_over_codes_and_scales_are_refused():
    """What is written shares no memory with q or its scale."""
    memory = np.ones(3 * 4 * 32 * 4, np.uint8)
    q = memory[: Q.size].view(F8).reshape(Q.shape)
    with pytest.raises(ValueError, match=r"out .*share.* q"):
        cuattn.paged_attention(**{**valid(), "q": q}, out=memory.view(np.float32).reshape(Q.shape))
    scale = memory.view(np.float32)[:2]
    with pytest.raises(ValueError, match=r"out .*share.* q_scale"):
        cuattn.paged_attention(
            **valid(), q_scale=scale, out=memory.view(np.float32).reshape(Q.shape)
        )
