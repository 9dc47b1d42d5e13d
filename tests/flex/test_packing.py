# SPDX-License-Identifier: Apache-2.0
"""Heads of a group that share tiles of a functor: when, and what explain says of it."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import made_up_gpus
from cuattn.flex.packing import as_packed, packed_heads, reads_blocks

ODD = lambda b, h, q, k: (q + k) % 3 != 1  # noqa: E731


def call(queries, heads, heads_kv, **more):
    """The shapes of a call of two sequences."""
    q, k = (2, queries, heads, 128), (2, 900, heads_kv, 128)
    if more.get("layout") == "bhsd":
        q, k = ((x[0], x[2], x[1], x[3]) for x in (q, k))
    return {"q": q, "k": k, **more}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_share_a_tile_that_they_fill_better(layout):
    def of(*shape):
        return packed_heads(call(*shape, layout=layout), {})

    assert [of(1, 8, n) for n in (8, 4, 2, 1)] == [1, 2, 4, 8]
    assert [of(n, 8, 2) for n in (32, 64, 100, 128, 129, 200, 900)] == [4, 4, 1, 1, 4, 4, 1]
    assert of(1, 6, 2) == 1  # 3 does not divide 128
    assert [of(1, n, 1) for n in (64, 128, 256)] == [64, 1, 1]  # no functor has more than 64
    assert [of(*n) for n in ((0, 8, 2), (1, 8, 3), (1, 8, 0))] == [1, 1, 1]


def test_lists_and_rows_of_each_head_are_not_shared():
    given = call(1, 8, 2)
    for name, axis in (("block_starts", 1), ("row_begin", 1)):
        for heads, want in ((1, 4), (8, 1)):
            shape = [2, 2, 2]
            shape[axis] = heads
            assert packed_heads(given, {name: np.zeros(shape, np.int32)}) == want
    packed = {"q": (20, 8, 64), "k": (900, 2, 64), "cu_seqlens_q": (3,), "max_seqlen_q": 10}
    assert packed_heads(packed, {"row_begin": np.zeros((1, 20), np.int32)}) == 4
    assert packed_heads(packed, {"row_begin": np.zeros((8, 20), np.int32)}) == 1
    assert packed_heads({**packed, "max_seqlen_q": 128}, {}) == 1


def test_blocks_of_16_keys_are_read_where_they_lie():
    def of(block_size, layout="nhd", found=(), tile_n=128):
        k = (9, 2, block_size, 64) if layout == "hnd" else (9, block_size, 2, 64)
        given = {"k": k, "kv_layout": layout, "block_tables": (2, 5)}
        return reads_blocks(given, dict.fromkeys(found), tile_n)

    assert [n for n in (1, 8, 16, 24, 32, 48, 64, 100, 256) if of(n)] == [16, 32, 48, 64, 256]
    assert of(16, "hnd")
    assert not of(16, "vllm")
    assert not of(16, found=("row_begin",))
    assert not reads_blocks({"k": (9, 16, 2, 64)}, {}, 128)


def test_the_plan_of_packed_rows_is_that_of_their_groups():
    dense = as_packed(call(3, 8, 2, sinks=(8,)), 4, "float16")
    assert (dense["q"], dense["sinks"]) == (("float16", 2, 12, 2, 128), None)
    assert as_packed(call(3, 8, 2, layout="bhsd"), 4, "float16")["q"] == ("float16", 2, 2, 12, 128)
    rows = {"q": ("float16", 20, 8, 64), "cu_seqlens_q": (3,), "max_seqlen_q": 10}
    assert as_packed(rows, 4, "float16")["q"] == ("float16", 80, 2, 64)
    assert as_packed(rows, 4, "bfloat16")["max_seqlen_q"] == 40
    assert as_packed(rows, 4, "bfloat16")["q"][0] == "float16"
    array = {n: np.zeros((2, 3, h, 64), np.float32) for n, h in zip("qkv", (8, 2, 2), strict=True)}
    assert as_packed(array, 4, "float16")["q"] == ("float32", 2, 12, 2, 64)
    assert as_packed(rows, 1, "float16") is rows
    rows["max_seqlen_q"] = np.int64(10)
    assert packed_heads({**rows, "k": (900, 2, 64)}, {}) == 4


def test_explain_names_what_shares_a_tile():
    def of(queries, heads, heads_kv, **more):
        shapes = (2, queries, heads, 128), *[(2, 9000, heads_kv, 128)] * 2
        return cuattn.explain("flex_attention", *shapes, device="h100", mask_mod=ODD, **more)

    plan, alone = of(1, 8, 2), of(1, 2, 2)
    assert (plan.kernel, plan.packed_heads, plan.tile_m) == ("sm90", 4, 128)
    assert alone.packed_heads == 1
    assert plan.num_splits == alone.num_splits > 8
    assert plan.workspace_bytes == 4 * alone.workspace_bytes  # of as many rows
    assert of(1, 8, 2, num_splits=3).num_splits == 3
    assert of(900, 8, 2).packed_heads == 1
    by_head = lambda b, h, q, k: (q + h + k) % 3 != 1  # noqa: E731
    shapes = (2, 1, 8, 128), *[(2, 9000, 2, 128)] * 2
    plan = cuattn.explain("flex_attention", *shapes, device="h100", mask_mod=by_head)
    assert plan.packed_heads == (1 if "blocks" in plan.reason else 4)


@pytest.mark.parametrize(
    ("batch", "queries", "heads", "keys", "window"),
    [
        (3, 29, (16, 1), 18062, (3927, -1)),
        (1, 40, (4, 1), 21973, (6001, -1)),
        (1, 64, (64, 2), 32768, (200, -1)),
        (2, 20, (8, 2), 9000, (5000, 30)),
        (2, 9, (32, 2), 30000, (20000, 0)),
    ],
)
def test_explain_counts_the_keys_of_a_window_once(batch, queries, heads, keys, window):
    """As the plan of the call: the rows of a tile are few queries of all heads of a group."""
    shapes = (batch, queries, heads[0], 128), *[(batch, keys, heads[1], 128)] * 2
    call = {"device": "h100", "window": window, "dtype": "bfloat16"}
    plan = cuattn.explain("flex_attention", *shapes, mask_mod=ODD, **call)
    want = cuattn.explain("attention", *shapes, backend="sm90", **call)
    assert plan.packed_heads == want.packed_heads == heads[0] // heads[1]
    assert (plan.num_splits, plan.workspace_bytes) == (want.num_splits, want.workspace_bytes)


@pytest.mark.parametrize("functions", [{}, {"mask_mod": ODD}], ids=["plain", "mask"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_a_workspace_as_explain_says_holds_gathered_keys(layout, functions, rng):
    shape = (40, 8, 2, 16) if layout == "nhd" else (40, 2, 8, 16)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((20, 4, 16), shape, shape))
    call = {
        "block_tables": rng.permutation(40)[:20].reshape(2, 10).astype(np.int32),
        "cu_seqlens_q": np.array([0, 10, 20], np.int32),
        "seqused_k": np.array([70, 33], np.int32),
        "max_seqlen_q": 10,
        "max_seqlen_k": 80,
        "kv_layout": layout,
        **functions,
    }
    plan = cuattn.explain("flex_attention", q, k, v, **call)
    assert "gathered" in plan.reason
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    got = cuattn.flex_attention(q, k, v, workspace=workspace, **call)
    np.testing.assert_array_equal(got, cuattn.flex_attention(q, k, v, **call))
    with pytest.raises(MemoryError, match="workspace"):
        cuattn.flex_attention(q, k, v, workspace=workspace[:-1], **call)


@pytest.mark.parametrize(
    ("gpu", "layout", "block", "want"),
    [("A100", "nhd", 16, 1 << 25), ("H200", "nhd", 16, 256), ("H200", "nhd", 8, (1 << 25) + 256)],
)
def test_explain_counts_gathered_keys_on_a_gpu(gpu, layout, block, want):
    shapes = (3200, 32, 128), *[(600, block, 8, 128)] * 2
    tables = ("int32", 16, 512 // block)
    call = {"cu_seqlens_q": ("int32", 17), "seqused_k": ("int32", 16), "block_tables": tables}
    call |= {"max_seqlen_q": 200, "max_seqlen_k": 512, "kv_layout": layout, "mask_mod": ODD}
    plan = cuattn.explain(
        "flex_attention", *shapes, device=made_up_gpus.GPUS[gpu], dtype="bfloat16", **call
    )
    assert plan.workspace_bytes == want


def test_a_functor_for_no_group_is_refused():
    with pytest.raises((ValueError, NotImplementedError), match=r"packed_heads|no CUDA"):
        cuattn._core.add_functor(b"x", 3, False)
