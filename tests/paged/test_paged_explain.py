# SPDX-License-Identifier: Apache-2.0
"""What explain() says of paged_attention: kernel, stages, splits, clusters and workspace."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn


def test_a_block_has_its_multiprocessor_alone_where_the_grid_is_one_wave():
    def stages(batch, context, head_dim=128, group=4, **options):
        blocks = context // 16
        cache = (batch * blocks, 16, 8, head_dim)
        shapes = ((batch, 8 * group, head_dim), cache, cache, (batch, blocks), (batch,))
        plan = cuattn.explain(
            "paged_attention", *shapes, device="h100", dtype="bfloat16", backend="sm90", **options
        )
        return plan.stages

    assert [stages(batch, 1024) for batch in (16, 64)] == [4] * 2
    assert [stages(1, context) for context in (512, 1024, 2048, 4096)] == [2, 2, 2, 4]  # clusters
    assert [stages(1, 8192, num_splits=n) for n in (16, 17, 32)] == [4, 3, 3]
    assert stages(16, 8192, head_dim=64) == 8
    assert stages(16, 8192, head_dim=64, num_splits=2) == 6
    assert stages(16, 8192, head_dim=256) == stages(16, 8192, group=32) == 3


def test_a_cluster_merges_splits_where_they_are_few_and_short():
    def plan(batch, context, heads_kv=8, rows=4, head_dim=128, **options):
        blocks = context // 16
        cache = (batch * blocks, 16, heads_kv, head_dim)
        shapes = ((batch, rows * heads_kv, head_dim), cache, cache, (batch, blocks), (batch,))
        where = {"device": "h100", "dtype": "bfloat16", "backend": "sm90"}
        return cuattn.explain("paged_attention", *shapes, **where, **options)

    def splits(*arguments, **options):
        found = plan(*arguments, **options)
        clusters = found.cluster > 1
        assert clusters == ("cluster" in found.reason)
        assert not clusters or (2 <= found.cluster <= 8 and found.num_splits == 1)
        assert not clusters or found.workspace_bytes == 0
        return found.cluster if clusters else -found.num_splits

    # More splits than 8 make up for a second kernel where a block would have three tiles more.
    assert [splits(1, context) for context in (128, 512, 2048, 4096)] == [2, 8, 8, -16]
    assert [splits(1, context, 4) for context in (512, 1024, 2048)] == [8, 8, -32]
    assert [splits(1, context, 32, 1) for context in (64, 1024, 4096, 4112)] == [-1, 4, 4, -4]
    assert [splits(1, 1024, rows=rows) for rows in (1, 8, 16, 17)] == [8, 8, 8, -16]
    assert splits(1, 1024, head_dim=64) == 8
    assert splits(1, 1024, head_dim=256) == -16
    # Several sequences: nobody may have many keys, for contexts may be unequal.
    assert [splits(batch, 1024) for batch in (2, 4, 8, 16)] == [8, 4, 2, 0]
    assert [splits(4, context) for context in (2048, 2064)] == [4, 0]
    # Forced; and where something else says how keys are cut.
    assert [splits(64, 4096, num_splits=n) for n in (1, 3, 4, 8, 9)] == [-1, -3, 4, 8, -9]

    # Batch invariant: parts of 128 keys are a block's each where a call has few.
    def invariant(*arguments, **options):
        found = plan(*arguments, batch_invariant=True, **options)
        assert (found.workspace_bytes == 0) == (found.num_splits == 1)
        return found.num_splits, found.cluster, found.reason.split(", ")[-1]

    one_by_one, cluster = "parts of 128 keys merged in order", "by a cluster"
    assert [invariant(1, n) for n in (64, 1024)] == [(1, 1, one_by_one), (1, 8, cluster)]
    assert [invariant(1, n) for n in (4096, 8192)] == [(4, 8, cluster), (8, 1, one_by_one)]
    assert [invariant(n, 1024) for n in (4, 5)] == [(1, 8, cluster), (1, 1, one_by_one)]
    for options in ({"rows": 17}, {"head_dim": 256}):
        assert invariant(1, 1024, **options) == (2, 1, "pages through TMA")

    # An axis of the grid holds the sequences.
    assert [splits(n, 16, 1, num_splits=2) for n in (65535, 65536)] == [-1, -1]
    assert [splits(n, 128, 1, num_splits=2) for n in (65535, 65536)] == [2, -2]


def test_explain_counts_more_units_than_32_bits_hold():
    cache = (16, 16, 16, 64)
    shapes = ((2**28, 16, 64), cache, cache, (2**28, 16), (2**28,))
    plan = cuattn.explain("paged_attention", *shapes, device="h100", dtype="bfloat16")
    assert plan.num_splits == 0


def test_explain(device, rng):
    shapes = [(64, 32, 128), (1000, 16, 8, 128), (1000, 16, 8, 128), (64, 512), (64,)]
    where = "cpu" if device.name == "cpu" else 0
    plan = cuattn.explain("paged_attention", *shapes, device=where)
    assert plan.mask == "none"  # one query sees every key
    assert plan.workspace_bytes > 0
    assert f"* {plan.kernel}: runs" in plan.ladder
    forced = cuattn.explain("paged_attention", *shapes, device=where, num_splits=7)
    assert forced.num_splits == 7
    shapes[1] = shapes[2] = (1000, 8, 16, 16, 8)
    shapes[2] = (1000, 8, 128, 16)
    assert cuattn.explain("paged_attention_v1", *shapes, device=where).num_splits == 1
    plan = cuattn.explain("paged_attention_v2", *shapes, device=where, max_context_len=5000)
    assert plan.num_splits == 10


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_explain_counts_the_workspace_of_a_call_with_a_plan(num_seqs):
    q, cache = np.ones((num_seqs, 8, 64), np.float32), np.ones((100, 16, 2, 64), np.float32)
    tables, lens = np.zeros((num_seqs, 32), np.int32), np.full(num_seqs, 500, np.int32)
    plan = cuattn.paged_plan(
        tables, lens, num_heads_q=8, num_heads_kv=2, head_dim=64, block_size=16, dtype="float32"
    )
    arrays = (q, cache, cache, tables, lens)
    needed = cuattn.explain("paged_attention", *arrays, plan=plan).workspace_bytes
    assert needed > cuattn.explain("paged_attention", *arrays).workspace_bytes  # one part each
    out = cuattn.paged_attention(*arrays, plan=plan, workspace=np.empty(needed, np.uint8))
    assert np.allclose(out, 1)
    with pytest.raises(MemoryError, match="workspace"):
        cuattn.paged_attention(*arrays, plan=plan, workspace=np.empty(needed - 1, np.uint8))


def test_explain_takes_the_buffers_of_v2():
    shapes = [(64, 32, 128), (1000, 8, 16, 16, 8), (1000, 8, 128, 16), (64, 512), (64,)]
    options = {"device": "h100", "max_context_len": 5000}
    bare = cuattn.explain("paged_attention_v2", *shapes, **options)
    buffers = {"exp_sums": (64, 32, 10), "max_logits": (64, 32, 10), "tmp_out": (64, 32, 10, 128)}
    assert cuattn.explain("paged_attention_v2", *shapes, **options, **buffers) == bare
    for version, name in (("v1", "plan"), ("v1", "tmp_out"), ("v2", "plan")):
        with pytest.raises(TypeError, match=f"paged_attention_{version} has no option {name}"):
            cuattn.explain(f"paged_attention_{version}", *shapes, device="h100", **{name: (8,)})


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 48, 64])
def test_hopper_runs_the_kernel_that_is_faster_for_the_block_size(block_size):
    q, cache = ("bfloat16", 4, 32, 128), ("bfloat16", 100, block_size, 8, 128)
    arguments = ("paged_attention", q, cache, cache, ("int32", 4, 20), ("int32", 4))
    expected = "sm90" if block_size % 16 == 0 else "sm80"
    assert cuattn.explain(*arguments, device="h100").kernel == expected
    if block_size % 8 == 0:
        assert cuattn.explain(*arguments, device="h100", backend="sm90").kernel == "sm90"
