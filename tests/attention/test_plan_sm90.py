# SPDX-License-Identifier: Apache-2.0
"""How sm90 cuts its work: tiles, splits and draws on GPUs that are not here."""

from __future__ import annotations

import re

import pytest

import cuattn
from made_up_gpus import GPUS, cut, explain


def test_heads_of_a_group_share_tiles_that_would_stay_empty():
    def packed(seqlen_q, heads, kv_heads, head_dim=128, **options):
        shape, kv = (1, seqlen_q, heads, head_dim), (1, 4096, kv_heads, head_dim)
        return explain("H100", shape=shape, kv=kv, backend="sm90", **options).packed_heads

    assert packed(1, 32, 8) == 4
    assert packed(1, 64, 1) == 64
    assert packed(5, 16, 2) == 8
    assert packed(1, 8, 8) == 1  # no group
    assert packed(4096, 32, 8) == 1  # its tiles are full
    rows = explain("H100", shape=(1, 1, 8, 128), backend="sm90").tile_m
    assert rows % 5 != 0  # rows of a group of five do not end with the tile
    assert packed(1, 5, 1) == 1
    assert packed(1, 2 * rows, 1) == 1
    # A softcap is the same for the heads of a group; ALiBi and bias differ.
    assert packed(1, 32, 8, softcap=30.0) == packed(1, 32, 8, scale=-1.0) == 4
    assert packed(1, 32, 8, alibi_slopes=(32,)) == packed(1, 32, 8, bias=(1, 32, 1, 4096)) == 1
    assert packed(1, 32, 8, dropout_p=0.5, dropout_seed=1) == 1


def test_keys_that_lie_together_have_one_tile_at_128_columns():
    """Longer ones, for long rows, gained nothing any more; over pages they do."""
    tiles = {
        explain("H100", shape=(2, seqlen, 16, 128), **options).tile_n
        for seqlen in (128, 512, 2048, 4096, 16384)
        for options in ({}, {"causal": True}, {"batch_invariant": True}, {"softcap": 30.0})
    }
    assert tiles == {128}


def test_small_tiles_of_64_columns_where_large_ones_stay_empty_or_masked():
    """What was measured: docs/notes/20261201-small-tiles.md."""

    def tile_m(batch, seqlen_q, seqlen_kv=None, heads=12, **options):
        shape, kv = ((batch, n, heads, 64) for n in (seqlen_q, seqlen_kv or seqlen_q))
        return explain("H200", shape=shape, kv=kv, **options).tile_m

    def tiles(*lengths, batch=64, **options):
        return [tile_m(batch, n, **options) for n in lengths]

    assert tiles(50, 64, 77, 128, 197, 256, 320, 448) == [64] * 8
    assert tiles(384, 512, 768, 1024) == [192] * 4  # full, or nearly
    assert tiles(1, 128, 256, 512, batch=1) == [64] * 4  # they fill more of the GPU
    assert tiles(128, 512, 1024, 2048, 4096, causal=True) == [64, 64, 64, 192, 192]
    windows = (127, 0), (64, 64), (511, 0), (4095, 0)
    assert [tile_m(4, 8192, window=w) for w in windows] == [64, 64, 64, 192]
    assert [tile_m(16, n, 2048) for n in (64, 256, 1024)] == [64, 64, 192]
    assert [tile_m(8, 1024, 77), tile_m(2, 4096, 77)] == [64, 192]
    assert tile_m(1, 100, 16384) == 192  # whose keys are split
    options = {"batch_invariant": True}, {"softcap": 5.0}, {"dropout_p": 0.1, "dropout_seed": 1}
    assert [tile_m(64, 100, **o) for o in options] == [192, 64, 128]


def test_a_ragged_batch_has_tiles_for_its_longest_sequence_and_the_mean_of_others():
    def tile_m(rows, longest=768):
        shape = (rows, 12, 64)
        return cuattn.explain(
            *("attention_varlen", shape, shape, shape, (33,), (33,), longest, longest),
            **{"device": GPUS["H200"], "dtype": "float16"},
        ).tile_m

    assert [tile_m(32 * n) for n in (60, 200, 768)] == [64, 64, 192]
    assert tile_m(8192 + 31 * 16, 8192) == 192  # nearly all work is of one
    assert tile_m(8000, 8192) == 64  # a bound that none reaches


def test_keys_are_split_where_tiles_do_not_fill_the_gpu():
    def splits(batch=1, seqlen_q=1, seqlen_kv=16384, heads=8, gpu="H100", **options):
        shape, kv = (batch, seqlen_q, heads, 128), (batch, seqlen_kv, heads, 128)
        plan = explain(gpu, shape=shape, kv=kv, backend="sm90", **options)
        assert 1 <= plan.num_splits <= max(1, -(-seqlen_kv // plan.tile_n) // 2)
        if plan.num_splits > 1:  # out and lse of each part
            rows = plan.num_splits * batch * heads * seqlen_q
            assert plan.workspace_bytes == 4 * rows * (128 + 1)
        return plan.num_splits

    assert splits() * 8 > 100  # 132 multiprocessors
    assert splits(heads=1) > 32
    assert splits(seqlen_kv=130) == 1
    assert splits(seqlen_kv=0) == 1
    assert splits(seqlen_q=0) == 1
    assert splits(batch=64) == 1
    assert splits(seqlen_q=4096) == 1
    assert splits(batch_invariant=True) == 16384 // 1024
    assert splits(seqlen_q=4096, batch_invariant=True) == 1
    for seqlen_kv in range(1, 3000, 77):
        for batch in range(1, 20):
            splits(batch, seqlen_kv=seqlen_kv)
            splits(batch, seqlen_q=batch, seqlen_kv=seqlen_kv, causal=True)


def test_a_forced_number_of_splits_is_taken_up_to_one_tile_a_part():
    kv = (1, 1000, 8, 128)
    tiles = -(-1000 // explain("H100", shape=(1, 70, 8, 128), kv=kv).tile_n)
    for asked in (*range(1, tiles + 2), 2**31 - 1):
        plan = explain("H100", shape=(1, 70, 8, 128), kv=kv, num_splits=asked)
        assert plan.num_splits == min(asked, tiles)
        invariant = explain(
            "H100", shape=(1, 70, 8, 128), kv=kv, num_splits=asked, batch_invariant=True
        )
        assert cut(invariant) == cut(plan)


@pytest.mark.parametrize("asked", [1, 2, 5, 128, 2**31 - 1])
def test_a_kernel_that_splits_no_keys_takes_the_wish_and_says_so(asked):
    calls = [("H100", dict(backend=name)) for name in ("tiled", "naive", "cublas")]
    for gpu, options in (*calls, ("A100", dict(backend="tiled"))):
        plain = explain(gpu, **options)
        wished = explain(gpu, num_splits=asked, **options)
        assert wished.num_splits == 1
        assert cut(wished) == cut(plain)
        assert (wished.kernel, wished.workspace_bytes) == (plain.kernel, plain.workspace_bytes)


def test_as_many_splits_over_pages_as_can_be_counted():
    shapes = [(2**20, 32, 8), *[(9, 16, 32, 8)] * 2, (2**20, 2**16), (2**20,)]
    plan = cuattn.explain("paged_attention", *shapes, device="h100", num_splits=2**10)
    assert plan.num_splits == (2**31 - 1) // 2**25


def places(plan, keys):
    """Where the keys of a sequence are cut, of a batch whose longest has as many or more."""
    found = re.search("keys in parts of (\\d+) or more, at most (\\d+)", plan.reason)
    if not found:
        assert plan.num_splits == 1
        return range(0, keys, keys)
    least, most = int(found[1]), int(found[2])
    assert least % plan.tile_n == 0
    assert least >= 1024
    assert most >= 2
    tiles = -(-keys // plan.tile_n)
    every = max(least, -(-tiles // most) * plan.tile_n)
    parts = range(0, keys, every)
    assert len(parts) <= min(most, plan.num_splits)
    return parts


def test_batch_invariant_cuts_a_sequence_the_same_way_in_every_batch():
    def plan(batch, seqlen_q, seqlen_kv, **options):
        shapes = dict(shape=(batch, seqlen_q, 16, 128), kv=(batch, seqlen_kv, 2, 128))
        return explain("H100", **shapes, **options, batch_invariant=True)

    for causal in (False, True):
        for seqlen_q, keys in ((17, 9000), (100, 1000), (600, 40000), (17, 100000), (5000, 9000)):
            alone = plan(1, seqlen_q, keys, causal=causal)
            cuts = places(alone, keys)
            for batch in (1, 2, 7, 64, 3000):
                for longest in (keys, keys + 1, 3 * keys):
                    mates = plan(batch, seqlen_q, longest, causal=causal)
                    assert cut(mates)[:2] == cut(alone)[:2]
                    assert places(mates, keys) == cuts
    assert plan(1, 17, 9000).num_splits == 9
    assert plan(1, 17, 10**6).num_splits == 32  # of four items: no more than fill a GPU
    assert plan(1, 17, 1024).num_splits == plan(1, 5000, 9000).num_splits == 1


def test_batch_invariant_cuts_no_packed_sequence():
    for queries, keys in ((1, 100000), (17, 9000), (5000, 9000)):
        shapes = (3 * queries, 16, 128), *[(2 * keys + 37, 2, 128)] * 2, (4,), (4,)
        plan = cuattn.explain(
            *("attention_varlen", *shapes, queries, keys),
            **{"device": GPUS["H100"], "dtype": "float16", "batch_invariant": True},
        )
        assert plan.num_splits == 1
        assert "in parts" not in plan.reason


def test_batch_invariant_fills_the_gpu_with_one_sequence():
    """At most twice as many steps one after another as it could be, or 8."""
    for heads, kv_heads in ((8, 1), (8, 8), (32, 8), (64, 8)):
        for seqlen_q in (1, 16, 64, 128, 200, 512, 700):
            for keys in (1000, 4096, 8192, 32768, 131072):
                shapes = dict(shape=(1, seqlen_q, heads, 128), kv=(1, keys, kv_heads, 128))
                free, plan = (
                    explain("H100", **shapes, batch_invariant=flag) for flag in (False, True)
                )
                items = -(-seqlen_q * plan.packed_heads // plan.tile_m)
                items *= heads // plan.packed_heads
                steps, free_steps = (
                    -(-items * p.num_splits // 132) * -(-keys // p.tile_n // p.num_splits)
                    for p in (plan, free)
                )
                assert steps <= max(8, 2 * free_steps), (shapes, plan.num_splits)
                assert items * plan.num_splits <= max(128, items)
                assert plan.workspace_bytes <= 128 * plan.tile_m * 4 * 129


def test_keys_of_packed_sequences_are_split_where_tiles_are_few():
    def plan(queries, keys, batch=1, total=None, heads=(32, 8), **options):
        q = (queries * batch if total is None else total, heads[0], 128)
        kv, ends = (keys * batch, heads[1], 128), (batch + 1,)
        return cuattn.explain(
            "attention_varlen", q, kv, kv, ends, ends, queries, keys, device="h100", causal=True,
            **options,
        )  # fmt: skip

    chunk = plan(128, 32768)  # 32 tiles on 132 multiprocessors
    assert (chunk.num_splits, chunk.packed_heads) == (4, 1)
    assert chunk.workspace_bytes == 4 * 4 * 32 * 128 * (128 + 1)
    assert plan(128, 32768, num_splits=1).workspace_bytes <= 256
    assert plan(128, 32768, batch_invariant=True).num_splits == 1
    assert plan(32, 32768, backend="sm90").num_splits == 16  # 8 tiles: heads of a group share one
    # Nothing to gain: tiles enough, or few keys.
    assert plan(512, 32768).num_splits == 1
    assert plan(128, 32768, batch=4).num_splits == 1
    assert plan(128, 512).num_splits == 1
    assert plan(128, 32768, window=(127, 0)).num_splits == 1
    # A longest query that is a bound: as many tiles as its rows leave room for.
    assert plan(8192, 32768, batch=2, total=128).num_splits == 2


def test_tiles_of_unlike_weight_are_drawn():
    many = (8, 4096, 16, 128)
    fixed, drawn = explain("H100", shape=many), explain("H100", shape=many, causal=True)
    assert (fixed.schedule, fixed.workspace_bytes) == ("persistent CTAs, fixed order", 0)
    assert drawn.schedule == "persistent CTAs, tiles drawn"
    assert 4 <= drawn.workspace_bytes <= 256  # the counter
    few = explain("H100", shape=(1, 512, 4, 128), causal=True)
    assert few.schedule == "persistent CTAs, fixed order"
    assert explain("A100", shape=many, causal=True).schedule == "one CTA per tile"
    assert explain("H100", shape=many, backend="naive").schedule == "one kernel after another"
    assert cuattn.explain("attention", *[many] * 3, device="cpu").schedule == "threads of the pool"
    ragged = cuattn.explain(
        "attention_varlen", *[(9000, 16, 64)] * 3, (65,), (65,), 900, 900, device="h100"
    )
    assert ragged.schedule == "persistent CTAs, tiles drawn"
