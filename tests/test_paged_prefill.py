# SPDX-License-Identifier: Apache-2.0
"""attention_varlen over caches in blocks: chunked prefill, and mixed batches of prefill and decode,
against float64; unused slots hold NaN and tables junk past the contexts.
"""

from __future__ import annotations

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import reference
from paged_cases import PagedCase

# Tokens in the cache, and queries of each sequence: prompts, chunks, decode, nothing.
BATCHES = {
    "chunks": ((130, 64, 257), (33, 64, 100)),
    "mixed": ((200, 1, 0, 40, 77), (50, 1, 0, 1, 77)),
    "decode": ((65, 64, 1000), (1, 1, 1)),
    "few": ((200, 64, 0, 2, 7, 1000), (3, 1, 0, 4, 0, 2)),
    "more_queries_than_keys": ((5, 40), (9, 41)),
}
OPTIONS = [
    {},
    {"causal": False},
    {"window": (20, -1)},
    {"softcap": 5.0, "alibi": "head"},
    {"sinks": True, "window": (63, 0)},
]
LAYOUT_SIZES = [("nhd", 1), ("nhd", 16), ("nhd", 33), ("hnd", 8), ("hnd", 256)]
LAYOUT_SIZES += [("vllm", 8), ("vllm", 16), ("vllm", 32)]


def make(case, queries, rng):
    """A paged problem whose q is packed, [total_q, num_heads_q, head_dim]."""
    problem = paged_cases.make(case, rng)
    q = rng.standard_normal((sum(queries), case.num_heads_q, case.head_dim), np.float32)
    problem.arrays["q"] = q.astype(cases.DTYPES[case.dtype])
    problem.arrays["cu_seqlens_q"] = np.cumsum((0, *queries)).astype(np.int32)
    return problem


def oracle(problem, rounded_to=None):
    """The reference over keys gathered by the reference."""
    case, arrays = problem.case, problem.arrays
    k, v = (
        np.concatenate([rows[:n] for rows, n in zip(gathered, case.lens, strict=True)])
        for gathered in (
            reference._gather(
                reference.unpaged(arrays[name], case.kv_layout, is_k),
                arrays["block_tables"],
                case.lens,
                None,
            )
            for name, is_k in (("k_cache", True), ("v_cache", False))
        )
    )
    options = {k: v for k, v in problem.options.items() if k in ("causal", "window", "softcap")}
    options |= {k: arrays[k] for k in ("alibi_slopes", "sinks") if k in arrays}
    cu_seqlens_q = arrays["cu_seqlens_q"]
    cu_seqlens_k = np.cumsum((0, *case.lens))
    longest = [int(np.diff(x).max(initial=0)) for x in (cu_seqlens_q, cu_seqlens_k)]
    return reference.attention_varlen(
        arrays["q"], k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options, rounded_to=rounded_to
    )


def run(device, backend, problem, lengths, spare=0):
    """Call attention_varlen; `lengths`: "cu_seqlens_k", "seqused_k" or both."""
    case, arena = problem.case, harness.Arena(device)
    arrays = {k: v for k, v in problem.arrays.items() if k != "context_lens"}
    options = {k: v for k, v in problem.options.items() if k in ("causal", "window", "softcap")}
    lens = np.array(case.lens, np.int32)
    if lengths == "both":  # half of the last block is stored and not in use
        arrays["cu_seqlens_k"] = np.cumsum((0, *(lens + 1))).astype(np.int32)
    elif lengths == "cu_seqlens_k":
        arrays["cu_seqlens_k"] = np.cumsum((0, *lens)).astype(np.int32)
    if lengths != "cu_seqlens_k":
        arrays["seqused_k"] = lens
    placed = {name: arena.put(x, name=name) for name, x in arrays.items()}
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q")
    positional = [placed.pop(name) for name in names] + [placed.pop("cu_seqlens_k", None)]
    longest_q = int(np.diff(arrays["cu_seqlens_q"]).max(initial=0))
    longest_k = int(lens.max(initial=0)) + (lengths == "both")
    out, lse = cuattn.attention_varlen(
        *positional,
        longest_q + spare,
        longest_k + spare,
        kv_layout=case.kv_layout,
        **placed,
        **options,
        return_lse=True,
        backend=backend,
    )
    device.synchronize()
    assert device.is_array(out)
    arena.verify()
    return device.numpy(out), device.numpy(lse)


def assert_case(device, backend, case, queries, rng, lengths="seqused_k", spare=0):
    def attempt():
        problem = make(case, queries, rng)
        try:
            out, lse = run(device, backend, problem, lengths, spare)
        except NotImplementedError as refusal:
            if f"backend '{backend}' cannot run this" not in str(refusal):
                raise
            pytest.skip(str(refusal))
        expected, expected_lse = oracle(problem)
        plain, plain_lse = oracle(problem, cases.DTYPES[case.dtype])
        cases.check_lse(lse, expected_lse, plain_lse)
        cases.check(out, expected, plain, case.dtype)

    harness.assert_by_draws(case.dtype, attempt)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("device", "backend"), harness.target_params())
def test_batches(device, backend, dtype, batch, option, rng):
    lens, queries = BATCHES[batch]
    assert_case(device, backend, PagedCase(dtype=dtype, lens=lens, **option), queries, rng)


@pytest.mark.parametrize("lengths", ["cu_seqlens_k", "seqused_k", "both"])
@pytest.mark.parametrize(("kv_layout", "block_size"), LAYOUT_SIZES)
@pytest.mark.parametrize(("device", "backend"), harness.target_params())
def test_layouts_and_lengths(device, backend, kv_layout, block_size, lengths, rng):
    lens, queries = BATCHES["mixed"]
    case = PagedCase(kv_layout=kv_layout, block_size=block_size, lens=lens, dtype="bfloat16")
    assert_case(device, backend, case, queries, rng, lengths, spare=3)


@pytest.mark.parametrize("head_dim", [8, 32, 80, 128, 192, 256])
@pytest.mark.parametrize(("device", "backend"), harness.target_params())
def test_head_dims(device, backend, head_dim, rng):
    lens, queries = BATCHES["chunks"]
    case = PagedCase(head_dim=head_dim, lens=lens, num_heads_q=4, num_heads_kv=4)
    assert_case(device, backend, case, queries, rng)


def test_a_chunk_after_a_chunk_is_the_whole_prompt(device, rng):
    """Two chunks of a prompt, the second over pages that hold both, give what one call gives."""
    problem = make(PagedCase(lens=(150,), dtype="bfloat16"), (150,), rng)
    whole, _ = run(device, "auto", problem, "seqused_k")
    problem.arrays["q"] = problem.arrays["q"][100:]
    problem.arrays["cu_seqlens_q"] = np.array([0, 50], np.int32)
    chunk, _ = run(device, "auto", problem, "seqused_k")
    a, b = (np.asarray(x, np.float32) for x in (chunk, whole[100:]))
    np.testing.assert_allclose(a, b, atol=2e-2)


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
    assert clause(1, batch_invariant=True) == prefill
    assert clause(1, bias=(1, 128)) == prefill
    assert clause(1, seqused_q=(4,)) == prefill
    assert clause(1, cu_seqlens_k=(5,)) == prefill
    assert clause(1, backend={"cpu": "cpu", "a100": "sm80", "h200": "sm90"}[device]) == prefill


def test_explain_counts_the_gathered_keys():
    assert explain("a100", 40).workspace_bytes == 2 * 4 * 128 * 2 * 64 * 2
    assert explain("h200", 40).workspace_bytes <= 256
    assert explain("a100", 1).kernel == "sm80"
    assert explain("a100", 1).ladder.count("* sm80") == 1


REFUSALS = {
    "float8": (
        {"k": np.ones((5, 8, 2, 64), np.uint8).view(paged_cases.E4M3)},
        NotImplementedError,
        "k is float8_e4m3fn, which chunked prefill has no kernel for yet; use paged_attention, or "
        "a cache of q's dtype",
    ),
    "dtype": (
        {"k": np.ones((5, 8, 2, 64), np.float16)},
        ValueError,
        "k must be float32 like q, got float16; cast it",
    ),
    "axes": (
        {"v": np.ones((5, 8, 64), np.float32)},
        ValueError,
        "v must have 4 axes [num_blocks, block_size, num_heads_kv, head_dim], got 3 with shape "
        "(5, 8, 64); reshape it",
    ),
    "table_rows": (
        {"block_tables": np.zeros((3, 4), np.int32)},
        ValueError,
        "block_tables must have num_seqs 2 like cu_seqlens_q, got 3; make them equal",
    ),
    "no_lengths": (
        {"cu_seqlens_k": None},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must both be given, got one; pass int32 [batch + 1] for "
        "each, or seqused_k [batch]",
    ),
    "id": (
        {"block_tables": np.array([[0, 5], [0, 0]], np.int32)},
        ValueError,
        "block_tables must name blocks in [0, 5), got 5 at (0, 1); entries past the sequence may "
        "hold anything",
    ),
    "too_narrow": (
        {"block_tables": np.zeros((2, 1), np.int32)},
        ValueError,
        "block_tables must have room for every sequence, got a length of 9 for sequence 0 with 1 "
        "blocks of 8; widen the table",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    changes, exception, message = REFUSALS[name]
    given = {
        "q": np.ones((5, 4, 64), np.float32),
        "k": np.ones((5, 8, 2, 64), np.float32),
        "v": np.ones((5, 8, 2, 64), np.float32),
        "cu_seqlens_q": np.array([0, 2, 5], np.int32),
        "cu_seqlens_k": np.array([0, 9, 12], np.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 9,
        "block_tables": np.zeros((2, 2), np.int32),
    }
    cuattn.attention_varlen(**given)
    with pytest.raises(exception) as caught:
        cuattn.attention_varlen(**{**given, **changes})
    assert str(caught.value) == f"attention_varlen: {message}"
