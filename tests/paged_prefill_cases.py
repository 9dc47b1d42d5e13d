# SPDX-License-Identifier: Apache-2.0
"""Problems of attention_varlen over caches in blocks, their reference, and the call."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import reference

# Tokens in the cache, and queries of each sequence: prompts, chunks, decode, nothing.
BATCHES = {
    "chunks": ((130, 64, 257), (33, 64, 100)),
    "mixed": ((200, 1, 0, 40, 77), (50, 1, 0, 1, 77)),
    "decode": ((65, 64, 1000), (1, 1, 1)),
    "few": ((200, 64, 0, 2, 7, 1000), (3, 1, 0, 4, 0, 2)),
    "more_queries_than_keys": ((5, 40), (9, 41)),
}


def make(case, queries, rng):
    """A paged problem whose q is packed, [total_q, num_heads_q, head_dim]."""
    problem = paged_cases.make(case, rng)
    q = rng.standard_normal((sum(queries), case.num_heads_q, case.head_dim), np.float32)
    problem.arrays["q"] = q.astype(cases.DTYPES[case.dtype])
    problem.arrays["cu_seqlens_q"] = np.cumsum((0, *queries)).astype(np.int32)
    return problem


def tokens_of(problem, name, dtype):
    """The tokens of a cache end to end; of codes the numbers, rounded to `dtype`."""
    case, arrays = problem.case, problem.arrays
    cache = dict(zip("kv", problem.caches(), strict=True))[name]
    scale = arrays.get(f"{name}_scale", problem.options.get(f"{name}_scale"))
    rows = reference.unpaged(cache, case.kv_layout, name == "k")
    gathered = reference._gather(rows, arrays["block_tables"], case.lens, scale)
    tokens = [rows[:n] for rows, n in zip(gathered, case.lens, strict=True)]
    return np.concatenate(tokens).astype(dtype or np.float32)


def oracle(problem, rounded_to=None):
    """The reference over keys gathered by the reference."""
    case, arrays = problem.case, problem.arrays
    k, v = (tokens_of(problem, name, rounded_to if case.fp8 else None) for name in "kv")
    options = {k: v for k, v in problem.options.items() if k in ("causal", "window", "softcap")}
    options |= {k: arrays[k] for k in ("alibi_slopes", "sinks") if k in arrays}
    cu_seqlens_q = arrays["cu_seqlens_q"]
    cu_seqlens_k = np.cumsum((0, *case.lens))
    longest = [int(np.diff(x).max(initial=0)) for x in (cu_seqlens_q, cu_seqlens_k)]
    return reference.attention_varlen(
        arrays["q"], k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options, rounded_to=rounded_to
    )


def run(
    device, backend, problem, lengths, spare=0, used=None, storage=None, workspace=None, given=None
):
    """Call attention_varlen; `lengths`: "cu_seqlens_k", "seqused_k" or both. `used`: seqused_k in
    place of the right one. `given`: arrays that are on the device already.
    """
    case, arena = problem.case, harness.Arena(device)
    arrays = {k: v for k, v in problem.arrays.items() if k != "context_lens"}
    passed = ("causal", "window", "softcap", "num_splits", "batch_invariant", "accumulate")
    passed += ("k_scale", "v_scale")
    options = {k: v for k, v in problem.options.items() if k in passed}
    if case.fp8:
        options["dtype"] = "float8_e4m3fn"
    lens = np.array(case.lens, np.int32)
    if lengths == "both":  # half of the last block is stored and not in use
        arrays["cu_seqlens_k"] = np.cumsum((0, *(lens + 1))).astype(np.int32)
    elif lengths == "cu_seqlens_k":
        arrays["cu_seqlens_k"] = np.cumsum((0, *lens)).astype(np.int32)
    if lengths != "cu_seqlens_k":
        arrays["seqused_k"] = lens if used is None else np.array(used, np.int32)
    storage = storage or {}
    placed = {
        name: arena.put(x, storage.get(name, "contiguous"), name=name)
        for name, x in arrays.items()
        if name not in (given or {})
    }
    placed |= given or {}
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
        workspace=workspace,
        backend=backend,
    )
    device.synchronize()
    assert device.is_array(out)
    arena.verify()
    return device.numpy(out), device.numpy(lse)


def serves(backend, device, case):
    """Whether a rung takes a case; the others must refuse it."""
    if device.name == "cpu" or backend in ("auto", "naive"):
        return True
    if backend == "tiled":
        return case.head_dim <= 128 and not (case.softcap or case.sinks or case.alibi != "none")
    if backend == "simt":
        return case.dtype == "float32"
    return backend != "cublas" and case.dtype != "float32"


def assert_right(device, backend, problem, lengths="seqused_k", spare=0):
    out, lse = run(device, backend, problem, lengths, spare)
    expected, expected_lse = oracle(problem)
    plain, plain_lse = oracle(problem, cases.DTYPES[problem.case.dtype])
    cases.check_lse(lse, expected_lse, plain_lse)
    cases.check(out, expected, plain, problem.case.dtype)


def assert_case(device, backend, case, queries, rng, lengths="seqused_k", spare=0, change=None):
    def attempt():
        problem = make(case, queries, rng)
        if change is not None:
            change(problem)
        if not serves(backend, device, case):
            refusal = f"attention_varlen: backend '{backend}' cannot run this call"
            with pytest.raises(NotImplementedError, match=f"^{refusal}"):
                run(device, backend, problem, lengths, spare)
            pytest.skip(f"refused: {refusal}")
        assert_right(device, backend, problem, lengths, spare)

    harness.assert_by_draws(case.dtype, attempt)
