# SPDX-License-Identifier: Apache-2.0
"""paged_attention, its plans and splits against float64; every cache has NaN in what no sequence
owns and junk in its tables past the contexts.

PagedAttention V1 and V2: test_paged_versions.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
from paged_cases import CUDA_BACKENDS, HEAD_DIMS, HEADS, PagedCase

LAYOUT_SIZES = [("nhd", n) for n in (1, 2, 7, 8, 16, 48, 64, 128, 256)]
LAYOUT_SIZES += [("hnd", n) for n in (1, 8, 16, 33, 64, 256)]
LAYOUT_SIZES += [("vllm", n) for n in (8, 16, 32)]
LENGTHS = [(37, 1, 0, 130), (1,), (513, 64, 65), (2049, 16, 8, 8), (0, 0)]
OPTIONS = [
    {},
    {"window": (20, -1)},
    {"window": (0, 0)},
    {"softcap": 5.0},
    {"alibi": "head"},
    {"alibi": "batch", "window": (63, 0)},
    {"sinks": True},
    {"sinks": True, "softcap": 2.0, "alibi": "head"},
    {"causal": False},
    {"causal": False, "window": (9, 2)},
    {"options": (("scale", -0.3),)},
]


def target_params(values=((),), ids=None):
    return harness.target_params(values, cpu=("cpu",), cuda=CUDA_BACKENDS, ids=ids)


def covering_array():
    factors = {
        "layout": LAYOUT_SIZES,
        "dtype": ["float32", "float16", "bfloat16", "float16-fp8", "bfloat16-fp8"],
        "head_dim": HEAD_DIMS,
        "heads": HEADS,
        "lens": LENGTHS,
        "q_len": [None, 1, 2, 5],
        "option": OPTIONS,
        "scales": ["float", "head", "batch"],
        "split": [(), (("num_splits", 3),), (("batch_invariant", True),)],
    }
    listed = []
    for row in cases.pairwise(factors):
        option = dict(row["option"])
        dtype, _, fp8 = row["dtype"].partition("-")
        head_dim = row["head_dim"] // 16 * 16 if fp8 else row["head_dim"]
        option["options"] = option.get("options", ()) + row["split"]
        listed.append(
            PagedCase(
                dtype=dtype,
                fp8=bool(fp8),
                kv_layout=row["layout"][0],
                block_size=row["layout"][1],
                head_dim=head_dim,
                num_heads_q=row["heads"][0],
                num_heads_kv=row["heads"][1],
                lens=row["lens"],
                q_len=row["q_len"],
                scales=row["scales"] if fp8 else "none",
                **option,
            )
        )
    return listed


COVERING = covering_array()


@pytest.mark.parametrize(
    ("device", "backend", "case"),
    target_params([(c,) for c in COVERING], ids=[f"{i}" for i in range(len(COVERING))]),
)
def test_covering_array(device, backend, case, rng):
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_layouts_and_dtypes(device, backend, kv_layout, dtype, rng):
    case = PagedCase(kv_layout=kv_layout, dtype=dtype, lens=(100, 17, 0, 31))
    paged_cases.assert_case(device, backend, case, rng, give_out=True)


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_head_dims(device, backend, head_dim, kv_layout, rng):
    case = PagedCase(kv_layout=kv_layout, head_dim=head_dim, dtype="bfloat16", lens=(77, 200))
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("kv_layout", "block_size"), LAYOUT_SIZES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_block_sizes(device, backend, kv_layout, block_size, fp8, rng):
    """Contexts that end at, before and behind the end of a block."""
    edges = {1, block_size - 1, block_size, block_size + 1, 3 * block_size, 150}
    case = PagedCase(kv_layout=kv_layout, block_size=block_size, fp8=fp8, lens=tuple(sorted(edges)))
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 71])
@pytest.mark.parametrize("q_len", [None, 1, 4, 17])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_groups_and_query_lengths(device, backend, q_len, group, rng):
    """More rows than a tile has, and contexts shorter than the queries: those see no key."""
    case = PagedCase(num_heads_q=2 * group, num_heads_kv=2, q_len=q_len, lens=(200, 9, 2))
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("length", [2047, 4096, 10_001])
@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_long_contexts(device, backend, kv_layout, length, rng):
    for lens in ((length,), (length, 3, 0, length // 2)):
        case = PagedCase(kv_layout=kv_layout, lens=lens, dtype="bfloat16", num_heads_q=4)
        paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_more_short_tasks_than_a_gpu_holds(device, backend, kv_layout, fp8, rng):
    """640 thread blocks without a plan: sm80 then gives each of them less shared memory."""
    case = PagedCase(
        kv_layout=kv_layout,
        head_dim=128,
        num_heads_kv=8,
        lens=tuple(int(n) for n in rng.integers(0, 200, 80)),
        fp8=fp8,
        options=(("num_splits", 1),),
    )
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("lens", [(1000,), (65, 3000, 0, 1)])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_forced_splits(device, backend, lens, num_splits, rng):
    case = PagedCase(lens=lens, sinks=True, options=(("num_splits", num_splits),))
    paged_cases.assert_case(device, backend, case, rng)


SHORT = [  # of some splits no key is left
    PagedCase(lens=(1000, 0, 1, 64, 65, 513), num_heads_q=32, num_heads_kv=8),
    PagedCase(lens=(300,), sinks=True, alibi="batch", softcap=5.0, num_heads_q=16, num_heads_kv=1),
    PagedCase(lens=(900, 3), q_len=3, window=(200, -1), sinks=True, head_dim=120),
    PagedCase(lens=(130, 700), q_len=2, head_dim=64, kv_layout="hnd", block_size=64),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_splits", [2, 5, 8])
@pytest.mark.parametrize("case", SHORT, ids=str)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_splits_of_short_contexts(device, backend, case, num_splits, dtype, rng):
    """On sm90 a cluster merges them; the same call gives the same bits."""
    case = dataclasses.replace(case, dtype=dtype, options=(("num_splits", num_splits),))
    problem = paged_cases.make(case, rng)
    first = paged_cases.run(device, backend, problem)
    paged_cases.judge(problem, *first)
    for again, once in zip(paged_cases.run(device, backend, problem), first, strict=True):
        assert again.tobytes() == once.tobytes()


@pytest.mark.parametrize("options", [{"num_splits": 9}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_more_splits_than_run_at_a_time(device, backend, head_dim, options, rng):
    lens = (900, 0, 1, 513, 64) * (9 if device.name == "cuda" else 2)  # the CPU has no waves
    case = PagedCase(dtype="bfloat16", lens=lens, head_dim=head_dim, num_heads_q=16, num_heads_kv=8)
    case = dataclasses.replace(case, sinks=True, options=tuple(options.items()))
    paged_cases.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("climb", [3.0, 30.0])  # for each 64 keys, natural units
@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_scores_that_climb_along_the_keys(device, backend, options, climb, rng):
    """Later keys outweigh all before them, by less and by more than exponentials may grow."""
    lens = (700, 65, 3)
    options = (("scale", 0.125), *options.items())
    case = PagedCase(head_dim=128, lens=lens, num_heads_kv=4, options=options)
    problem = paged_cases.make(case, rng)
    problem.arrays["q"][..., 0] = 1
    for b, length in enumerate(lens):
        at = np.arange(length)
        blocks = problem.arrays["block_tables"][b, at // case.block_size]
        scores = climb * (at // 64)
        problem.arrays["k_cache"][blocks, at % case.block_size, :, 0] = 8 * scores[:, None]
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem))


PLANNED = [
    PagedCase(lens=(1000, 1, 0, 333)),
    PagedCase(lens=(1,) * 9, sinks=True),
    PagedCase(lens=(5000, 4999, 3), q_len=3, window=(700, -1)),
    PagedCase(lens=(300, 4000), kv_layout="vllm", fp8=True, scales="head"),
    PagedCase(lens=(0, 0, 0)),
    PagedCase(lens=(64, 128, 192, 70) * 20, num_heads_q=2, block_size=64),
    PagedCase(lens=(900, 20), q_len=9, num_heads_q=32, num_heads_kv=1),
]


@pytest.mark.parametrize("case", PLANNED, ids=str)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_with_a_plan(device, backend, case, rng):
    """A plan serves every layer: several calls with other caches use the same one."""
    problem = paged_cases.make(case, rng)
    if device.name == "cuda" and backend != "auto":
        paged_cases.run(device, backend, problem)  # skips where the rung does not serve it
    plan = paged_cases.plan_of(device, backend, problem)
    for _ in range(2):
        result = paged_cases.run(device, backend, problem, plan=plan)
        paged_cases.judge(problem, *result)
        problem.arrays["q"] = problem.arrays["q"][::-1].copy()


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_a_plan_gives_each_tile_to_one_worker(device, case, rng):
    """Header, workers and first tiles say the same as a walk over all tiles."""
    problem = paged_cases.make(case, rng)
    plan = device.numpy(paged_cases.plan_of(device, "auto", problem))
    tiles, step, tile, workers, tracks = plan[:5]
    first = plan[5 + 4 * workers :]
    assert len(first) == len(case.lens) + 1
    span = np.array(case.lens)
    begin = np.zeros_like(span)
    if case.window[0] >= 0:
        begin = np.maximum(span - (case.q_len or 1) - case.window[0], 0) // tile * tile
    want = np.maximum(-(-(span - begin) // tile), 1)
    assert np.array_equal(np.diff(first), want)
    assert first[0] == 0
    assert first[-1] == tiles
    entries = plan[5 : 5 + 4 * workers].reshape(workers, 4)
    groups = entries[:, 3].sum() // tiles  # head groups: each has the same tiles
    heads = groups // tracks
    assert heads * tracks == groups >= case.num_heads_kv
    for track in range(tracks):
        at = 0
        for head, seq, within, count in entries[track::tracks]:
            assert count == max(min(step, heads * tiles - at), 0)
            if count:
                assert first[seq] * heads + (head - track * heads) * want[seq] + within == at
                assert 0 <= within < want[seq]
                assert track * heads <= head < (track + 1) * heads
            at += count
        assert at == heads * tiles


def test_a_plan_is_made_again_in_place(device, rng):
    problem = paged_cases.make(PagedCase(lens=(100, 900)), rng)
    plan = paged_cases.plan_of(device, "auto", problem)
    before = device.numpy(plan).copy()
    problem.arrays["context_lens"] = np.array([900, 100], np.int32)
    problem.arrays["block_tables"] = problem.arrays["block_tables"][::-1].copy()
    assert paged_cases.plan_of(device, "auto", problem, out=plan) is plan
    assert not np.array_equal(device.numpy(plan), before)
    paged_cases.judge(problem, *paged_cases.run(device, "auto", problem, plan=plan))


INVARIANT = [
    PagedCase(),
    PagedCase(q_len=4, dtype="bfloat16"),
    PagedCase(head_dim=128, window=(900, -1), sinks=True, dtype="bfloat16"),
    PagedCase(head_dim=128, num_heads_kv=8, softcap=5.0, alibi="head"),
    PagedCase(head_dim=112, num_heads_q=24, num_heads_kv=2, block_size=48),
    PagedCase(q_len=2, num_heads_q=16, window=(436, 0), softcap=9.0, alibi="head", sinks=True),
    PagedCase(head_dim=128, num_heads_q=40, num_heads_kv=1),  # too many rows for a cluster
]


@pytest.mark.parametrize("case", INVARIANT, ids=str)
@pytest.mark.parametrize("longest", [5000, 1500])  # many parts, and few for many rows
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_batch_invariant(device, backend, longest, case, rng):
    """The bits of a sequence depend neither on what else is in the batch nor on its table's width.

    On sm90 clusters serve small calls and single thread blocks large ones.
    """
    lens = (1, 700, longest, 64, 2048, 0, 513)
    case = dataclasses.replace(case, lens=lens, options=(("batch_invariant", True),))
    problem = paged_cases.make(case, rng)
    out, lse = paged_cases.run(device, backend, problem)
    paged_cases.judge(problem, out, lse)
    for batch, narrow in itertools.product(
        ([1], [3], [2, 0], [6, 5, 4, 3, 2, 1, 0], [2] * 80), (False, True)
    ):
        part = dataclasses.replace(problem, arrays=dict(problem.arrays))
        for name in ("q", "block_tables", "context_lens"):
            part.arrays[name] = problem.arrays[name][batch]
        if narrow:
            width = max(-(-lens[b] // case.block_size) for b in batch)
            part.arrays["block_tables"] = part.arrays["block_tables"][:, :width]
        part_out, part_lse = paged_cases.run(device, backend, part)
        assert np.array_equal(harness.bits(part_out), harness.bits(out[batch]))
        assert np.array_equal(harness.bits(part_lse), harness.bits(lse[batch]))


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_sequences_may_share_blocks(device, backend, rng):
    """One prefix in several tables, and one block twice in the same table."""
    problem = paged_cases.make(PagedCase(lens=(96, 96, 96), block_size=16), rng)
    tables = problem.arrays["block_tables"]
    tables[1, :4] = tables[0, :4]
    tables[2, 1:6] = tables[2, 0]
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem))


@pytest.mark.parametrize("draw", range(8))
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_fuzzed_tables(device, backend, draw, rng):
    """Random lengths, block sizes and tables with any sharing."""
    layout, size = LAYOUT_SIZES[rng.integers(len(LAYOUT_SIZES))]
    lens = tuple(int(n) for n in np.exp(rng.uniform(0, 7.5, rng.integers(1, 12))))
    problem = paged_cases.make(PagedCase(kv_layout=layout, block_size=size, lens=lens), rng)
    tables = problem.arrays["block_tables"]
    full = [tables[b, i] for b, n in enumerate(lens) for i in range(n // size)]
    for b, n in enumerate(lens):
        if full:
            tables[b, : n // size] = rng.choice(np.array(full, np.int32), n // size)
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem))


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_empty_contexts_give_zero_and_minus_infinity(device, backend, rng):
    for sinks in (False, True):
        problem = paged_cases.make(PagedCase(lens=(0, 5, 0), sinks=sinks), rng)
        out, lse = paged_cases.run(device, backend, problem)
        assert not np.asarray(out[[0, 2]], np.float32).any()
        if sinks:
            assert np.allclose(lse[0], problem.arrays["sinks"], rtol=1e-6)
        else:
            assert np.isneginf(lse[[0, 2]]).all()


@pytest.mark.parametrize("changes", [{"lens": ()}, {"num_heads_q": 0}, {"q_len": 0}], ids=str)
def test_zero_sizes(device, changes, rng):
    problem = paged_cases.make(PagedCase(**changes), rng)
    out, lse = paged_cases.run(device, "auto", problem)
    assert out.shape == problem.arrays["q"].shape
    assert lse.size == 0


@pytest.mark.parametrize("lens", [(), (0,), (0, 0, 0)], ids=str)
def test_a_plan_of_nothing(device, lens, rng):
    problem = paged_cases.make(PagedCase(lens=lens), rng)
    plan = paged_cases.plan_of(device, "auto", problem)
    paged_cases.judge(problem, *paged_cases.run(device, "auto", problem, plan=plan))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_nan_of_a_visible_key_propagates(device, backend, value, rng):
    """And reaches no sequence, head or column that does not see the key; on tensor cores the other
    queries of its sequence and head may become NaN in that column (0 * NaN in a matrix product).
    """
    problem = paged_cases.make(PagedCase(lens=(40, 40), q_len=2, dtype="float32"), rng)
    if device.name == "cuda" and backend not in ("auto", "simt"):
        problem = paged_cases.make(PagedCase(lens=(40, 40), q_len=2), rng)
    block = problem.arrays["block_tables"][1, 39 // 16]
    problem.arrays["v_cache"][block, 39 % 16, 1, 3] = value  # the last key: seen by query 1 alone
    out, lse = paged_cases.run(device, backend, problem)
    expected, _ = problem.reference()
    finite = np.isfinite(np.asarray(out, np.float32))
    assert (~np.isfinite(expected)).sum() == 4
    if backend in ("sm80", "sm90"):
        assert not finite[1, 1, 4:, 3].any()
        finite[1, 0, 4:, 3] = True
    assert np.array_equal(finite, np.isfinite(expected))
    assert np.isfinite(lse).all()
    problem.arrays["k_cache"][block, 39 % 16, 1, 3] = np.nan
    out, lse = paged_cases.run(device, backend, problem)
    assert np.array_equal(np.isnan(lse), np.isnan(problem.reference()[1]))
    assert np.isnan(np.asarray(out[1, 1, 4:], np.float32)).all()


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_k_and_v_interleaved_in_one_allocation(device, backend, kv_layout, rng):
    """Caches may be views: [num_blocks, 2, ...] holds K and V side by side, as engines lay it."""
    problem = paged_cases.make(PagedCase(kv_layout=kv_layout, lens=(70, 20)), rng)
    storage = {"k_cache": "gapped", "v_cache": "gapped", "q": "packed"}
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem, storage=storage))


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_lent_workspace(device, backend, rng):
    problem = paged_cases.make(PagedCase(lens=(3000, 10)), rng)
    arrays = [problem.arrays[n] for n in ("q", "k_cache", "v_cache")]
    shapes = [a.shape for a in arrays] + [(2, problem.arrays["block_tables"].shape[1]), (2,)]
    paged_cases.run(device, backend, problem)  # skips where the rung does not serve it
    plan = cuattn.explain(
        "paged_attention", *shapes, device="cpu" if device.name == "cpu" else 0, backend=backend
    )
    arena = harness.Arena(device)
    workspace = arena.output((plan.workspace_bytes,), np.uint8, name="workspace", align=256)
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem, workspace=workspace))
    arena.verify()
    with pytest.raises(MemoryError, match="paged_attention: workspace must hold"):
        paged_cases.run(device, backend, problem, workspace=workspace[:-1])
