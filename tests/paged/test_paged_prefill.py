# SPDX-License-Identifier: Apache-2.0
"""attention_varlen over caches in blocks: chunked prefill, and mixed batches of prefill and decode,
against float64; unused slots hold NaN and tables junk past the contexts. What is refused is in
test_paged_prefill_errors.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import reference
from paged_cases import PagedCase
from paged_prefill_cases import BATCHES, assert_case, assert_right, make, oracle, run

OPTIONS = [
    {},
    {"causal": False},
    {"window": (20, -1)},
    {"softcap": 5.0, "alibi": "head"},
    {"sinks": True, "window": (63, 0)},
]
# "auto" is a way of its own: few queries a sequence run a kernel of paged_attention.
TARGETS = harness.target_params(cpu=("auto", *cases.CPU_BACKENDS))
LAYOUT_SIZES = [("nhd", 1), ("nhd", 16), ("nhd", 33), ("hnd", 8), ("hnd", 256)]
LAYOUT_SIZES += [("nhd", 48), ("hnd", 80), ("vllm", 8), ("vllm", 16), ("vllm", 32)]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_batches(device, backend, dtype, batch, option, rng):
    lens, queries = BATCHES[batch]
    assert_case(device, backend, PagedCase(dtype=dtype, lens=lens, **option), queries, rng)


@pytest.mark.parametrize("num_splits", [1, 2, 7, 2**31 - 1])
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 0, 2), (40, 7, 0)], ids=str)
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_a_number_of_splits_is_a_wish(device, backend, queries, num_splits, rng):
    """A step splits its keys so, other kernels of packed queries take 1."""
    dtype = "float32" if backend == "simt" else "float16"
    case = PagedCase(dtype=dtype, lens=(300, 41, 77), options=(("num_splits", num_splits),))
    assert_case(device, backend, case, queries, rng)


@pytest.mark.parametrize("lengths", ["cu_seqlens_k", "seqused_k", "both"])
@pytest.mark.parametrize(("kv_layout", "block_size"), LAYOUT_SIZES)
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_layouts_and_lengths(device, backend, kv_layout, block_size, lengths, rng):
    lens, queries = BATCHES["mixed"]
    case = PagedCase(kv_layout=kv_layout, block_size=block_size, lens=lens, dtype="bfloat16")
    assert_case(device, backend, case, queries, rng, lengths, spare=3)


@pytest.mark.parametrize("head_dim", [8, 32, 80, 128, 192, 256])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_head_dims(device, backend, head_dim, rng):
    lens, queries = BATCHES["chunks"]
    case = PagedCase(head_dim=head_dim, lens=lens, num_heads_q=4, num_heads_kv=4)
    assert_case(device, backend, case, queries, rng)


@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_values_of_another_head_dim(device, backend, kv_layout, rng):
    lens, queries = BATCHES["mixed"]
    case = PagedCase(head_dim=192, lens=lens, kv_layout=kv_layout, dtype="bfloat16")

    def narrow(problem):
        v = problem.arrays["v_cache"]
        problem.arrays["v_cache"] = v[:, :, :128] if kv_layout == "vllm" else v[..., :128]

    assert_case(device, backend, case, queries, rng, change=narrow)


def test_a_chunk_after_a_chunk_is_the_whole_prompt(device, rng):
    """Two chunks of a prompt, the second over pages that hold both, give what one call gives."""
    problem = make(PagedCase(lens=(150,), dtype="bfloat16"), (150,), rng)
    whole, _ = run(device, "auto", problem, "seqused_k")
    expected, plain = (oracle(problem, dtype)[0] for dtype in (None, cases.DTYPES["bfloat16"]))
    cases.check(whole, expected, plain, "bfloat16")
    problem.arrays["q"] = problem.arrays["q"][100:]
    problem.arrays["cu_seqlens_q"] = np.array([0, 50], np.int32)
    chunk, _ = run(device, "auto", problem, "seqused_k")
    cases.check(chunk, expected[100:], plain[100:], "bfloat16")


def test_prompts_in_chunks_through_a_kv_cache(device, rng):
    """Two prompts written and attended in uneven chunks, then a token each, over PagedKVCache."""
    heads, dtype, lengths = (8, 2, 64), cases.DTYPES["float16"], (150, 71)
    arena = harness.Arena(device)
    q, k, v = (
        [arena.put(rng.standard_normal((n, h, 64), np.float32).astype(dtype)) for n in lengths]
        for h in (heads[0], heads[1], heads[1])
    )
    cache = cuattn.PagedKVCache(
        *(1, 24, 16, heads[1], 64, "float16"), like=q[0], max_seqs=2, max_blocks_per_seq=12
    )
    seqs = [cache.add(), cache.add()]
    outs, at = [[], []], [0, 0]
    for chunk in ((64, 20), (37, 1), (48, 49), (1, 1)):  # the last step decodes
        parts = []
        for b, seq in enumerate(seqs):
            cache.append(seq, chunk[b])
            parts.append(slice(at[b], at[b] + chunk[b]))
            at[b] += chunk[b]
        packed = [
            arena.put(np.concatenate([device.numpy(x[b][parts[b]]) for b in range(2)]))
            for x in (q, k, v)
        ]
        caches = cache.k_cache(0), cache.v_cache(0)
        cuattn.reshape_and_cache(*packed[1:], *caches, cache.slot_mapping(seqs))
        ends = arena.put(np.cumsum((0, *chunk)).astype(np.int32))
        out = cuattn.attention_varlen(
            packed[0],
            *caches,
            ends,
            None,
            max(chunk),
            160,
            block_tables=cache.block_tables(seqs),
            seqused_k=cache.context_lens(seqs),
            causal=True,
        )
        device.synchronize()
        rows = device.numpy(out)
        outs[0].append(rows[: chunk[0]])
        outs[1].append(rows[chunk[0] :])
    for b in range(2):
        arrays = [device.numpy(x[b])[None] for x in (q, k, v)]
        expected, plain = (
            reference.attention(*arrays, causal=True, rounded_to=x)[0][0] for x in (None, dtype)
        )
        cases.check(np.concatenate(outs[b]), expected, plain, "float16")


def explain(device, q_len, dtype="float16", block_size=16, group=4, **options):
    shapes = ((100, 2 * group, 64), (9, block_size, 2, 64), (9, block_size, 2, 64), (5,), None)
    given = {"block_tables": (4, 8), "seqused_k": (4,), **options}
    return cuattn.explain(
        "attention_varlen", *shapes, q_len, 128, device=device, dtype=dtype, **given
    )


@pytest.mark.parametrize("device", ["cpu", "a100", "h200"])
def test_how_the_keys_are_reached(device):
    def clause(*args, **options):
        return explain(device, *args, **options).reason.split("; ", 1)[1]

    in_blocks = "keys are read in their blocks"
    gathered = "keys are gathered from their blocks first"
    step = "few queries a sequence: a kernel of paged_attention"
    prefill = in_blocks if device == "h200" else gathered
    assert clause(40) == prefill
    assert clause(16) == step  # 64 rows of a group
    assert clause(17) == prefill
    assert clause(1, softcap=3.0, alibi_slopes=(4, 8), sinks=(8,), window=(5, 0)) == step
    assert clause(40, dtype="float32") == gathered
    assert clause(40, block_size=12) == gathered
    one_query = "; single queries go by a kernel of paged_attention"
    apart = "" if device == "cpu" else one_query
    assert clause(1, batch_invariant=True) == (step if apart else prefill)
    assert clause(16, batch_invariant=True) == clause(40, batch_invariant=True) == prefill + apart
    assert clause(40, batch_invariant=True, num_splits=1) == prefill
    ladder = explain(device, 40, batch_invariant=True).ladder
    assert ("single queries, their bits do not depend on the batch" in ladder) == bool(apart)
    assert clause(1, batch_invariant=True, group=65) == prefill
    direct = "; threads read the bias" if device == "h200" else ""
    assert clause(1, bias=(1, 128)) == prefill + direct
    assert clause(1, seqused_q=(4,)) == prefill
    assert clause(1, cu_seqlens_k=(5,)) == prefill
    assert clause(1, backend={"cpu": "cpu", "a100": "sm80", "h200": "sm90"}[device]) == prefill


def test_explain_counts_the_gathered_keys():
    assert explain("a100", 40).workspace_bytes == 2 * 4 * 128 * 2 * 64 * 2
    assert explain("h200", 40).workspace_bytes <= 256
    assert explain("a100", 1).kernel == "sm80"
    assert explain("a100", 1).ladder.count("* sm80") == 1


def test_long_causal_rows_take_longer_tiles_only_over_pages():
    def tile_n(max_seqlen, block_size=16, paged=True, **options):
        blocks = (9, block_size, 2, 128)
        keys = (blocks, blocks, (5,), None) if paged else ((100, 2, 128),) * 2 + ((5,), (5,))
        tables = {"block_tables": (4, max_seqlen // block_size), "seqused_k": (4,)} if paged else {}
        return cuattn.explain(
            "attention_varlen",
            (100, 8, 128),
            *keys,
            512,
            max_seqlen,
            device="h200",
            dtype="float16",
            **{"causal": True, **tables, **options},
        ).tile_n

    assert tile_n(4096) == tile_n(8192) == tile_n(8192, block_size=64) == 160
    assert tile_n(8192, paged=False) == tile_n(8192, causal=False) == 128
    assert tile_n(2048) == tile_n(8192, batch_invariant=True) == 128
    assert tile_n(8192, window=(256, 0)) == tile_n(8192, softcap=30.0) == 128


INVARIANT = [
    PagedCase(),
    PagedCase(dtype="bfloat16", head_dim=128, num_heads_kv=8, softcap=5.0, alibi="head"),
    PagedCase(window=(900, 0), sinks=True, dtype="bfloat16", num_heads_q=16, block_size=48),
    PagedCase(dtype="bfloat16", kv_layout="hnd", block_size=8, num_heads_q=40, num_heads_kv=1),
]


@pytest.mark.parametrize("case", INVARIANT, ids=str)
@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_batch_invariant_single_queries(device, backend, case, rng):
    """Sequences with one query, with more and with none: alone, side by side, in any order."""
    queries = np.array((1, 70, 2, 0, 1, 1, 5, 1, 1, 0))
    lens = np.array((1300, 100, 1100, 9, 1, 700, 0, 1025, 0, 3))
    options = (("batch_invariant", True),)
    case = dataclasses.replace(case, lens=tuple(map(int, lens)), options=options)
    problem = make(case, queries, rng)
    assert_right(device, backend, problem)
    ends = problem.arrays["cu_seqlens_q"]
    rows = [np.arange(ends[b], ends[b + 1]) for b in range(len(lens))]
    out, lse = run(device, backend, problem, "seqused_k")
    single = np.flatnonzero(queries == 1)
    part = dataclasses.replace(problem, arrays=dict(problem.arrays))
    del part.arrays["cu_seqlens_q"]
    part.arrays["q"] = problem.arrays["q"][ends[single]]
    for name in ("block_tables", "context_lens"):
        part.arrays[name] = problem.arrays[name][single]
    step_out, step_lse = paged_cases.run(device, backend, part)
    assert np.array_equal(harness.bits(step_out), harness.bits(out[ends[single]]))
    assert np.array_equal(harness.bits(step_lse.T), harness.bits(lse[:, ends[single]]))
    for batch in ([0], [7, 5, 4], [1, 0], [*range(9, -1, -1)], [0, 1, 6, 2], [5, 8, 1], [0] * 9):
        part = dataclasses.replace(problem, arrays=dict(problem.arrays))
        part.case = dataclasses.replace(case, lens=tuple(int(lens[b]) for b in batch))
        taken = np.concatenate([rows[b] for b in batch])
        part.arrays["q"] = problem.arrays["q"][taken]
        part.arrays["block_tables"] = problem.arrays["block_tables"][batch]
        part.arrays["cu_seqlens_q"] = np.cumsum((0, *queries[batch])).astype(np.int32)
        part_out, part_lse = run(device, backend, part, "seqused_k", spare=len(batch) % 3)
        assert np.array_equal(harness.bits(part_out), harness.bits(out[taken]))
        assert np.array_equal(harness.bits(part_lse), harness.bits(lse[:, taken]))


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_more_sequences_with_one_query_than_a_block_has_threads(device, backend, rng):
    queries = rng.choice([0, 1, 2], 2300, p=[0.3, 0.4, 0.3])
    queries[900:1200] = 2  # none for a whole round of warps
    options = (("batch_invariant", True),)
    lens = tuple(int(n) for n in rng.integers(0, 6, len(queries)))
    case = PagedCase(dtype="float16", num_heads_q=2, num_heads_kv=2, lens=lens, options=options)
    assert_right(device, backend, make(case, queries, rng))


@pytest.mark.parametrize("q_len", [1, 40])
def test_nothing_to_read(device, q_len, rng):
    """No key, no column of the table, no sequence, no query."""
    case = PagedCase(lens=(0, 0))
    problem = make(case, (q_len, q_len), rng)
    out, lse = run(device, "auto", problem, "seqused_k")
    assert (np.asarray(out, np.float32) == 0).all()
    assert np.isneginf(lse).all()
    problem.arrays["block_tables"] = np.zeros((2, 0), np.int32)
    out, lse = run(device, "auto", problem, "seqused_k")
    assert (np.asarray(out, np.float32) == 0).all()
    assert np.isneginf(lse).all()
    for queries in ((), (0, 0)):
        problem = make(PagedCase(lens=(40,) * len(queries)), queries, rng)
        out, lse = run(device, "auto", problem, "seqused_k", spare=q_len)
        assert out.shape == (0, 8, 64)
        assert lse.shape == (8, 0)


def test_no_heads():
    caches = np.zeros((4, 16, 0, 64), np.float32)
    table, lens = np.zeros((2, 1), np.int32), np.array([3, 5], np.int32)
    ends, q = np.array([0, 1, 4], np.int32), np.zeros((4, 0, 64), np.float32)
    given = {"block_tables": table, "seqused_k": lens}
    out = cuattn.attention_varlen(q, caches, caches, ends, None, 3, 16, **given)
    assert out.shape == (4, 0, 64)


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("auto", "sm80"))
)
def test_more_tiles_than_multiprocessors(device, backend, rng):
    """Lengths that end anywhere in a block, queries of every kind side by side."""
    lens, queries = (1511, 777, 390, 4, 1024, 2), (700, 777, 100, 1, 512, 0)
    heads = {"num_heads_q": 16, "num_heads_kv": 4, "head_dim": 128}
    case = PagedCase(lens=lens, dtype="bfloat16", **heads)
    assert_case(device, backend, case, queries, rng)


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize(
    ("block", "length"), [(2**31 - 1, 40), (-(2**31), 40), (7, 2**31 - 1), (7, -5), (-1, 10**6)]
)
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_wrong_data_on_the_device_is_clamped(dtype, kv_layout, block, length, q_len, rng):
    """No access leaves the arrays, whatever tables and lengths hold; right sequences stay right."""
    device = harness.Cuda()
    lens, queries = (40, 40, 40), (q_len,) * 3
    problem = make(PagedCase(lens=lens, kv_layout=kv_layout, dtype=dtype), queries, rng)
    expected, _ = run(device, "auto", problem, "seqused_k")
    problem.arrays["block_tables"][1, :] = block
    out, _ = run(device, "auto", problem, "seqused_k", used=(40, length, 40))
    rows = np.r_[:q_len, 2 * q_len : 3 * q_len]
    np.testing.assert_allclose(
        *(np.asarray(x[rows], np.float32) for x in (out, expected)), rtol=2e-3, atol=2e-3
    )


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "sm80", "naive"])
@pytest.mark.parametrize("q_len", [1, 70])
def test_a_captured_call_follows_tables_and_lengths(backend, q_len, rng):
    """One graph serves a step whose sequences grow and move to other blocks."""
    import torch

    device, case = harness.Cuda(), PagedCase(lens=(300, 90, 177), dtype="bfloat16")
    problem = make(case, (q_len,) * 3, rng)
    arena = harness.Arena(device)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "block_tables")
    q, k, v, ends, table = (arena.put(problem.arrays[name], name=name) for name in names)
    used = arena.put(np.array(case.lens, np.int32), name="seqused_k")

    def call(table, used):
        options = {"seqused_k": used, "causal": True, "backend": backend}
        return cuattn.attention_varlen(
            q, k, v, ends, None, q_len, 320, block_tables=table, **options
        )

    call(table, used)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out = call(table, used)
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        lens = [case.lens[b] - step for step, b in enumerate(order)]
        new_table, new_used = table[list(order)].clone(), torch.tensor(lens).int().cuda()
        expected = call(new_table, new_used)
        kept = table.clone(), used.clone()
        table.copy_(new_table)
        used.copy_(new_used)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        table.copy_(kept[0])
        used.copy_(kept[1])


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_k_and_v_interleaved_in_one_allocation(device, kv_layout, q_len, rng):
    """Caches may be views of [num_blocks, 2, ...], as engines lay them."""
    case = PagedCase(lens=(70, 200), kv_layout=kv_layout, dtype="bfloat16")
    problem = make(case, (q_len, q_len), rng)
    expected, _ = run(device, "auto", problem, "seqused_k")
    storage = {"k_cache": "gapped", "v_cache": "gapped"}
    out, _ = run(device, "auto", problem, "seqused_k", storage=storage)
    assert np.array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("backend", ["auto", "named"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_lent_workspace(device, backend, q_len, rng):
    """explain() says what a call needs: the gathered keys and what its kernel wants."""
    backend = backend if backend == "auto" else {"cpu": "cpu", "cuda": "sm80"}[device.name]
    lens = (3000, 10)
    problem = make(PagedCase(lens=lens), (q_len, q_len), rng)
    expected, _ = run(device, backend, problem, "seqused_k")
    shapes = [problem.arrays[name].shape for name in ("q", "k_cache", "v_cache", "cu_seqlens_q")]
    plan = cuattn.explain(
        "attention_varlen",
        *shapes,
        None,
        q_len,
        3000,
        block_tables=problem.arrays["block_tables"].shape,
        seqused_k=(2,),
        causal=True,
        backend=backend,
        device="cpu" if device.name == "cpu" else 0,
    )
    arena = harness.Arena(device)
    workspace = arena.output((plan.workspace_bytes,), np.uint8, name="workspace", align=256)
    out, _ = run(device, backend, problem, "seqused_k", workspace=workspace)
    arena.verify()
    assert np.array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))
    if plan.workspace_bytes > 0:
        with pytest.raises(MemoryError, match="attention_varlen: workspace must hold"):
            run(device, backend, problem, "seqused_k", workspace=workspace[:-1])
