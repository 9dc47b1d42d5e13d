# SPDX-License-Identifier: Apache-2.0
"""JAX arrays over the paged KV cache: the bits of numpy eagerly, under jit and under vmap. Unused
slots hold NaN, tables junk past the contexts. The CUDA side is in test_streams.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import cases
import cuattn
import frameworks
import paged_cases
import paged_prefill_cases
from paged_cases import PagedCase

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402
from jax_cases import assert_same_bits, eager_and_jitted, to_jax  # noqa: E402

POSITIONAL = ("q", "k_cache", "v_cache", "block_tables", "context_lens")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


CASES = [
    PagedCase(dtype=dtype, kv_layout=layout, head_dim=dim, block_size=size)
    for dtype in cases.DTYPES
    for layout, dim, size in (("nhd", 64, 16), ("hnd", 72, 5), ("vllm", 128, 8))
]
CASES += [
    PagedCase(q_len=3, lens=(40, 3, 9)),
    PagedCase(q_len=2, causal=False, window=(20, 1), alibi="batch", lens=(64, 65, 2)),
    PagedCase(sinks=True, softcap=5.0, alibi="head"),
    PagedCase(options=(("scale", 0.3), ("num_splits", 3)), lens=(300, 7)),
    PagedCase(options=(("batch_invariant", True),), lens=(2000, 3), dtype="float32"),
    PagedCase(lens=(5000, 1), dtype="bfloat16"),  # more than one split: the workspace
    PagedCase(lens=()),
]
CASES += [
    PagedCase(fp8=True, scales=scales, kv_layout=layout, dtype=dtype)
    for scales, layout, dtype in (
        ("none", "nhd", "float16"),
        ("float", "hnd", "bfloat16"),
        ("head", "vllm", "float16"),
        ("batch", "nhd", "bfloat16"),
    )
]


def split(problem):
    """Positional arrays, arrays by name, and the rest of a problem."""
    arrays = dict(problem.arrays)
    return [arrays.pop(name) for name in POSITIONAL], arrays, problem.options


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_gives_the_bits_of_numpy(case, rng):
    problem = paged_cases.make(case, rng)
    positional, arrays, options = split(problem)
    want = cuattn.paged_attention(*positional, **arrays, **options, return_lse=True)
    call = lambda p, a: cuattn.paged_attention(*p, **a, **options, return_lse=True)  # noqa: E731
    for function in eager_and_jitted(call):
        got = function(to_jax(positional), to_jax(arrays))
        assert_same_bits(got, want)
    if case.lens:
        paged_cases.judge(problem, *map(np.asarray, got))
    out = cuattn.paged_attention(*to_jax(positional), **to_jax(arrays), **options)
    assert_same_bits([out], want[:1])


def test_float8_caches_say_so_themselves(rng):
    problem = paged_cases.make(PagedCase(fp8=True, scales="head"), rng)
    positional, arrays, options = split(problem)
    want = cuattn.paged_attention(*positional, **arrays, **options)
    positional[1:3] = problem.caches()
    del options["kv_dtype"]
    for function in eager_and_jitted(lambda p, a: cuattn.paged_attention(*p, **a, **options)):
        assert_same_bits([function(to_jax(positional), to_jax(arrays))], [want])


def test_attention_under_vmap_is_a_loop(rng):
    problem = paged_cases.make(PagedCase(), rng)
    positional, _, _ = split(problem)
    queries = rng.standard_normal((3, *positional[0].shape), np.float32).astype(np.float16)
    shared = to_jax(positional[1:])
    got = jax.vmap(lambda q: cuattn.paged_attention(q, *shared))(jnp.asarray(queries))
    want = [cuattn.paged_attention(q, *positional[1:]) for q in queries]
    assert_same_bits([got], [np.stack(want)])


@pytest.mark.parametrize("window", [(-1, -1), (40, -1)], ids=["all", "window"])
@pytest.mark.parametrize("has_slopes", [False, True], ids=["plain", "alibi"])
def test_cascade_takes_jax_arrays(window, has_slopes, rng):
    problem = paged_cases.make(PagedCase(q_len=2, lens=(16, 17, 200)), rng)
    positional, _, _ = split(problem)
    shared = [rng.standard_normal((50, 2, 64), np.float32).astype(np.float16) for _ in "kv"]
    given = [positional[0], *shared, *positional[1:]]
    slopes = rng.random(8, np.float32) if has_slopes else None

    def call(slopes, *arrays):
        options = {"window": window, "alibi_slopes": slopes, "return_lse": True}
        return cuattn.cascade_attention(*arrays, **options)

    want = call(slopes, *given)
    for function in eager_and_jitted(call):
        got = function(None if slopes is None else jnp.asarray(slopes), *to_jax(given))
        if slopes is None:
            assert_same_bits(got, want)
            continue
        for one, other in zip(got, want, strict=True):  # XLA may contract slope * distance
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2e-3, atol=2e-3
            )


def test_explain_takes_jax_arrays(rng):
    positional, arrays, options = split(
        paged_cases.make(PagedCase(fp8=True, scales="head", lens=(5000, 1)), rng)
    )
    plan = cuattn.explain("paged_attention", *to_jax(positional), **to_jax(arrays), **options)
    assert plan == cuattn.explain("paged_attention", *positional, **arrays, **options)
    assert plan.kernel == "cpu"
    assert plan.workspace_bytes > 0


# ---- attention_varlen


@pytest.mark.parametrize("lengths", ["seqused_k", "cu_seqlens_k", "both"])
@pytest.mark.parametrize("batch", paged_prefill_cases.BATCHES)
@pytest.mark.parametrize(("kv_layout", "block_size"), [("nhd", 16), ("hnd", 5), ("vllm", 8)])
def test_prefill_gives_the_bits_of_numpy(kv_layout, block_size, batch, lengths, rng):
    lens, queries = paged_prefill_cases.BATCHES[batch]
    case = PagedCase(kv_layout=kv_layout, block_size=block_size, lens=lens)
    problem = paged_prefill_cases.make(case, queries, rng)
    lens = np.array(lens, np.int32)
    arrays = {name: problem.arrays[name] for name in ("block_tables",)}
    ends = None
    if lengths != "seqused_k":
        ends = np.cumsum((0, *(lens + (lengths == "both")))).astype(np.int32)
    if lengths != "cu_seqlens_k":
        arrays["seqused_k"] = lens
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q")
    positional = [*(problem.arrays[name] for name in names), ends]

    def call(p, a):
        return cuattn.attention_varlen(
            *p, max(queries), max(lens) + 1, **a, kv_layout=kv_layout, causal=True, return_lse=True
        )

    want = call(positional, arrays)
    for function in eager_and_jitted(call):
        assert_same_bits(function(to_jax(positional), to_jax(arrays)), want)
