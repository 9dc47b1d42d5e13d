# SPDX-License-Identifier: Apache-2.0
"""JAX arrays over the paged KV cache: the bits of numpy eagerly, under jit and under vmap, caches
written where they lie once they are donated, and what is refused. Unused slots hold NaN, tables
junk past the contexts. The CUDA side is in test_streams.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import cache_cases
import cases
import cuattn
import frameworks
import paged_cases
import paged_prefill_cases
from cache_cases import CACHE_DTYPES, LAYOUTS, cache_shape
from harness import bits
from paged_cases import PagedCase

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402

POSITIONAL = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
WHAT_XLA_OWNS = r"must be None for JAX arrays, whose memory and stream belong to XLA; leave it out"


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def to_jax(values):
    """The numpy arrays of a dict, tuple or list as JAX arrays; anything else as it is."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, values)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, jax.Array)
        a = np.asarray(a)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def eager_and_jitted(function):
    return function, jax.jit(function)


# ---- paged_attention

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


# ---- reshape_and_cache


def writing(rng, layout="nhd", dtype="float32", cache_dtype=None, tokens=37):
    """Arguments of a good call; the caches hold random bytes, a few slots are -1."""
    rows = [rng.standard_normal((tokens, 3, 64), np.float32).astype(cases.DTYPES[dtype])] * 2
    cache_dtype = np.dtype(CACHE_DTYPES[cache_dtype or dtype])
    caches = [
        rng.integers(
            0, 256, (*cache_shape(layout, 7, 16, 3, 64, cache_dtype, is_k), cache_dtype.itemsize)
        )
        .astype(np.uint8)
        .view(cache_dtype)[..., 0]
        for is_k in (True, False)
    ]
    slots = cache_cases.Write(tokens=tokens).draw_slots(rng)
    return [rows[0], rows[1][::-1].copy(), *caches, slots]


def with_numpy(given, **options):
    """The caches after the call, in arrays of their own."""
    copies = [x.copy() for x in given[2:4]]
    cuattn.reshape_and_cache(*given[:2], *copies, given[4], **options)
    return copies


def rope(rng, tokens):
    angles = rng.uniform(-3, 3, (50, 16)).astype(np.float32)
    positions = rng.integers(0, 50, tokens)
    return {"cos": np.cos(angles), "sin": np.sin(angles), "positions": positions}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), cache_cases.PAIRS)
def test_writing_gives_the_bits_of_numpy_in_new_arrays(layout, dtype, cache_dtype, rng):
    given = writing(rng, layout, dtype, cache_dtype)
    want = with_numpy(given, kv_layout=layout)
    arrays = to_jax(given)
    call = lambda *a: cuattn.reshape_and_cache(*a, kv_layout=layout)  # noqa: E731
    for function in eager_and_jitted(call):
        assert_same_bits(function(*arrays), want)
    assert_same_bits(arrays[2:4], given[2:4])  # the caller's own stay as they were


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scales", ["float", "one", "head"])
def test_rotation_and_scales_travel_along(scales, interleaved, rng):
    given = writing(rng, "nhd", "bfloat16", "float8_e4m3fn")
    shape = {"one": (1,), "head": (3,)}.get(scales)
    drawn = rng.uniform(0.01, 0.1, (2, *(shape or ()))).astype(np.float32)
    scale = {"k_scale": drawn[0], "v_scale": drawn[1]}
    if shape is None:
        scale = {name: float(value) for name, value in scale.items()}
    turns = rope(rng, 37)
    want = with_numpy(given, **scale, **turns, rope_interleaved=interleaved)
    arrays = {**turns, **{n: x for n, x in scale.items() if shape is not None}}
    numbers = {n: x for n, x in scale.items() if shape is None}

    def call(p, a):
        return cuattn.reshape_and_cache(*p, **a, **numbers, rope_interleaved=interleaved)

    for function in eager_and_jitted(call):
        assert_same_bits(function(to_jax(given), to_jax(arrays)), want)


def test_uint8_holds_float8(rng):
    given = writing(rng, "vllm", "float16", "float8_e4m3fn")
    want = with_numpy(given, kv_layout="vllm", k_scale=0.5)
    given[2:4] = (x.view(np.uint8) for x in given[2:4])
    got = cuattn.reshape_and_cache(*to_jax(given), kv_layout="vllm", k_scale=0.5)
    assert_same_bits(got, [x.view(np.uint8) for x in want])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
def test_donated_caches_are_written_in_place(layout, cache_dtype, rng):
    given = writing(rng, layout, "float32", cache_dtype)
    want = with_numpy(given, kv_layout=layout)
    step = jax.jit(lambda *a: cuattn.reshape_and_cache(*a, kv_layout=layout), donate_argnums=(2, 3))
    compiled = step.lower(*to_jax(given)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in given[2:4])
    cache_copy = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not cache_copy
    # A copy makes the memory XLA's own: it may not donate what it borrows from numpy.
    k_cache, v_cache = (jnp.array(x, copy=True) for x in given[2:4])
    places = [k_cache.unsafe_buffer_pointer(), v_cache.unsafe_buffer_pointer()]
    got = step(*to_jax(given[:2]), k_cache, v_cache, jnp.asarray(given[4]))
    assert [x.unsafe_buffer_pointer() for x in got] == places
    assert k_cache.is_deleted()
    assert v_cache.is_deleted()
    assert_same_bits(got, want)


def test_without_donation_jit_leaves_the_caches_as_they_were(rng):
    given = writing(rng)
    arrays = to_jax(given)
    got = jax.jit(cuattn.reshape_and_cache)(*arrays)
    for new, old in zip(got, arrays[2:4], strict=True):
        assert new.unsafe_buffer_pointer() != old.unsafe_buffer_pointer()
    assert_same_bits(arrays[2:4], given[2:4])
    assert_same_bits(got, with_numpy(given))


def test_writing_under_vmap_is_a_loop(rng):
    calls = [writing(rng) for _ in range(3)]
    stacked = [jnp.asarray(np.stack(x)) for x in zip(*calls, strict=True)]
    got = jax.vmap(cuattn.reshape_and_cache)(*stacked)
    want = [with_numpy(given) for given in calls]
    assert_same_bits(got, [np.stack(x) for x in zip(*want, strict=True)])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_of_numpy_may_have_32_or_64_bits(dtype, rng):
    given = writing(rng)
    want = with_numpy(given)
    given[4] = given[4].astype(dtype)
    assert_same_bits(cuattn.reshape_and_cache(*to_jax(given[:4]), given[4]), want)


def test_steps_of_a_compiled_loop_give_the_bits_of_numpy(rng):
    """Write and attend, 20 tokens one after another, the caches carried by the loop."""
    q, k, v = rng.standard_normal((3, 20, 2, 4, 64), np.float32)
    caches = [np.full((6, 8, 4, 64), np.nan, np.float32) for _ in "kv"]
    tables = np.array([[3, 1, 4], [0, 5, 2]], np.int32)

    def slots_of(step):
        return tables[:, step // 8] * 8 + step % 8

    @jax.jit
    def loop(q, k, v, k_cache, v_cache, tables):
        def step(caches, now):
            i, q, k, v = now
            caches = cuattn.reshape_and_cache(k, v, *caches, tables[:, i // 8] * 8 + i % 8)
            lens = jnp.full(2, i + 1, jnp.int32)
            return caches, cuattn.paged_attention(q, *caches, tables, lens)

        return jax.lax.scan(step, (k_cache, v_cache), (jnp.arange(20), q, k, v))

    got_caches, got = loop(*to_jax([q, k, v, *caches, tables]))
    want = []
    for i in range(20):
        cuattn.reshape_and_cache(k[i], v[i], *caches, slots_of(i).astype(np.int64))
        lens = np.full(2, i + 1, np.int32)
        want.append(cuattn.paged_attention(q[i], *caches, tables, lens))
    assert_same_bits([got], [np.stack(want)])
    assert_same_bits(got_caches, caches)


# ---- gather_cache


def gathering(rng, layout="nhd", dtype="float32"):
    """Caches of random bytes, and sequences of 20, 0 and 33 tokens; junk past them."""
    dtype = np.dtype(CACHE_DTYPES[dtype])
    caches = writing(rng, layout, "float32", dtype.name)[2:4]
    tables = rng.choice(np.array(paged_cases.JUNK, np.int64), (3, 4)).astype(np.int32)
    tables[0, :2], tables[2, :3] = (6, 1), (0, 1, 5)
    return [*caches, tables, np.array([0, 20, 20, 53], np.int32)]


@pytest.mark.parametrize("total", [None, 53, 60])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_gathering_gives_the_bits_of_numpy(layout, dtype, total, rng):
    given = gathering(rng, layout, dtype)
    spare = np.zeros(((total or 53) - 53, 3, 64), CACHE_DTYPES[dtype])
    want = [np.concatenate([x, spare]) for x in cuattn.gather_cache(*given, kv_layout=layout)]
    if total is None:
        return assert_same_bits(cuattn.gather_cache(*to_jax(given), kv_layout=layout), want)
    call = lambda *a: cuattn.jax.gather_cache(*a, kv_layout=layout, total=total)  # noqa: E731
    for function in eager_and_jitted(call):
        assert_same_bits(function(*to_jax(given)), want)


def test_gathering_under_jit_needs_the_total(rng):
    arrays = to_jax(gathering(rng))
    message = "gather_cache: total must be given where cu_seqlens is traced"
    with pytest.raises(TypeError, match=message):
        jax.jit(cuattn.gather_cache)(*arrays)
    fixed = lambda *caches: cuattn.gather_cache(*caches, *arrays[2:])  # noqa: E731
    assert jax.jit(fixed)(*arrays[:2])[0].shape == (53, 3, 64)  # known, so it need not


@pytest.mark.parametrize(
    ("total", "error", "message"),
    [
        (-1, ValueError, "total must be >= 0, got -1"),
        (2.5, TypeError, "total must be an integer, got 2.5"),
        ([53], TypeError, "total must be a Python value"),
    ],
)
def test_a_total_that_cannot_be_is_refused(total, error, message, rng):
    with pytest.raises(error, match=f"^gather_cache: {message}"):
        cuattn.jax.gather_cache(*to_jax(gathering(rng)), total=total)


def test_lengths_that_cannot_be_are_refused(rng):
    caches = to_jax(gathering(rng))
    with pytest.raises(ValueError, match="gather_cache: cu_seqlens must not decrease, got -3"):
        cuattn.gather_cache(*caches[:3], jnp.array([0, 1, 2, -3], jnp.int32))
    with pytest.raises(Exception, match="cu_seqlens must end within the rows of k_out, got 53"):
        jax.block_until_ready(cuattn.jax.gather_cache(*caches, total=52))


# ---- refusals


def attending():
    return {
        "q": jnp.ones((2, 4, 64)),
        "k_cache": jnp.ones((5, 8, 2, 64)),
        "v_cache": jnp.ones((5, 8, 2, 64)),
        "block_tables": jnp.zeros((2, 2), jnp.int32),
        "context_lens": jnp.array([3, 9], jnp.int32),
    }


def prefilling():
    q, k_cache, v_cache, tables, lens = attending().values()
    ends = jnp.arange(3, dtype=jnp.int32)
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": None,
        "max_seqlen_q": 1,
        "max_seqlen_k": 9,
        "block_tables": tables,
        "seqused_k": lens,
    }


def storing():
    return dict(
        zip(
            ("k", "v", "k_cache", "v_cache", "slot_mapping"),
            to_jax(writing(np.random.default_rng(0))),
            strict=True,
        )
    )


def reading():
    return dict(
        zip(
            ("k_cache", "v_cache", "block_tables", "cu_seqlens"),
            to_jax(gathering(np.random.default_rng(0))),
            strict=True,
        )
    )


CALLS = {
    "paged_attention": attending,
    "attention_varlen": prefilling,
    "reshape_and_cache": storing,
    "gather_cache": reading,
}
OWNED = [("paged_attention", n) for n in ("out", "lse_out", "workspace", "stream")]
OWNED += [("attention_varlen", n) for n in ("out", "lse_out", "workspace", "stream")]
OWNED += [("reshape_and_cache", "stream")]
OWNED += [("gather_cache", n) for n in ("k_out", "v_out", "stream")]


@pytest.mark.parametrize(("op", "name"), OWNED)
def test_what_xla_owns_is_refused(op, name):
    given = CALLS[op]()
    with pytest.raises(NotImplementedError, match=f"^{op}: {name} {WHAT_XLA_OWNS}$"):
        getattr(cuattn, op)(**given, **{name: jnp.zeros(3)})


def test_a_plan_is_refused():
    message = "^paged_attention: plan must be None for JAX arrays, .* leave it out$"
    with pytest.raises(NotImplementedError, match=message):
        cuattn.paged_attention(**attending(), plan=jnp.zeros(9, jnp.int32))


f16, i32 = jnp.float16, jnp.int32
REFUSALS = {
    "q_rank": ("paged_attention", {"q": lambda x: x[0]}, ValueError, "q must have"),
    "q_dtype": ("paged_attention", {"q": lambda x: x.astype(i32)}, ValueError, "q must be float32"),
    "complex": ("paged_attention", {"q": lambda x: x + 1j}, ValueError,
        "q must be float32, float16 or bfloat16, got complex64; cast it"),
    "cache_dtype": ("paged_attention", {"v_cache": lambda x: x.astype(f16)}, ValueError,
        "v_cache must be float32 like k_cache, got float16"),
    "tables": ("paged_attention", {"block_tables": lambda x: x.astype(f16)}, ValueError,
        "block_tables must be int32, got float16"),
    "unsigned": ("paged_attention", {"block_tables": lambda x: x.astype(jnp.uint32)}, ValueError,
        "block_tables must be int32, got uint32"),
    "lens": ("paged_attention", {"context_lens": lambda x: x[:1]}, ValueError,
        "context_lens must have"),
    "layout": ("paged_attention", {"kv_layout": "bshd"}, ValueError,
        "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'bshd'"),
    "other_layout": ("paged_attention", {"kv_layout": "vllm"}, ValueError,
        "k_cache must have 5 axes"),
    "kv_dtype": ("paged_attention", {"kv_dtype": "float16"}, ValueError,
        "kv_dtype must be None or 'float8_e4m3fn', got 'float16'"),
    "list": ("paged_attention", {"k_cache": [1.0]}, TypeError,
        "k_cache must be a JAX array like q, got list"),
    "scale_number": ("paged_attention", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to float8_e4m3fn caches, these are float32; leave it out"),
    "scale_array": ("paged_attention", {"v_scale": jnp.ones(2)}, ValueError,
        "v_scale belongs to float8_e4m3fn caches"),
    "scale_list": ("paged_attention", {"k_scale": [2.0]}, TypeError,
        "k_scale must be a Python value, which is static under jax.jit, got list"),
    "softcap": ("paged_attention", {"softcap": jnp.ones(())}, TypeError,
        "softcap must be a Python value, which is static under jax.jit"),
    "window": ("paged_attention", {"window": 3}, TypeError, "window must be a pair"),
    "backend": ("paged_attention", {"backend": "sm90"}, NotImplementedError,
        "backend 'sm90' cannot run this call"),
    "slopes": ("paged_attention", {"alibi_slopes": jnp.ones(3)}, ValueError,
        "alibi_slopes must have shape"),
    "splits": ("paged_attention", {"num_splits": -1}, ValueError,
        "num_splits must be >= 0, got -1"),
    "varlen_layout": ("attention_varlen", {"block_tables": None, "kv_layout": "hnd"}, ValueError,
        "kv_layout belongs to paged caches and must be 'nhd' without block_tables"),
    "varlen_ends": ("attention_varlen", {"cu_seqlens_q": None}, TypeError,
        r"cu_seqlens_q must be an int32 array \[batch \+ 1\], got None"),
    "varlen_tables": ("attention_varlen", {"block_tables": lambda x: x[:1]}, ValueError,
        "block_tables must have num_seqs"),
    "varlen_lengths": ("attention_varlen", {"seqused_k": None}, ValueError,
        "cu_seqlens_q and cu_seqlens_k must both be given, got one"),
    "slots_dtype": ("reshape_and_cache", {"slot_mapping": lambda x: x.astype(f16)}, ValueError,
        "slot_mapping must be int64, got float16; cast it"),
    "slots_shape": ("reshape_and_cache", {"slot_mapping": lambda x: x[:, None]}, ValueError,
        r"slot_mapping must have shape \(num_tokens,\) = \(37,\), got \(37, 1\)"),
    "slots_wide": ("reshape_and_cache", {"slot_mapping": np.full(37, 2**31)}, ValueError,
        "slot_mapping must fit 32 bits while jax_enable_x64 is off, got 2147483648; turn it on"),
    "v": ("reshape_and_cache", {"v": lambda x: x[:3]}, ValueError, "v must have num_tokens"),
    "cache": ("reshape_and_cache", {"k_cache": lambda x: x.astype(f16)}, ValueError,
        "k_cache must be float32 like k, or float8_e4m3fn, got float16"),
    "cos": ("reshape_and_cache", {"cos": jnp.ones((9, 4))}, ValueError,
        "cos, sin and positions must be given together, got 1 of them"),
    "write_scale": ("reshape_and_cache", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to a float8_e4m3fn cache"),
    "interleaved": ("reshape_and_cache", {"rope_interleaved": True}, ValueError,
        "rope_interleaved must be False without cos and sin"),
    "none": ("reshape_and_cache", {"v_cache": None}, TypeError,
        "v_cache must be a JAX array like k, got NoneType"),
    "gather_rank": ("gather_cache", {"k_cache": lambda x: x[0]}, ValueError,
        "k_cache must have 4 axes"),
    "gather_dtype": ("gather_cache", {"v_cache": lambda x: x.astype(f16)}, ValueError,
        "v_cache must be float32 like k_cache, got float16"),
    "gather_tables": ("gather_cache", {"block_tables": lambda x: x[:1]}, ValueError,
        "cu_seqlens must have shape"),
    "gather_ends": ("gather_cache", {"cu_seqlens": lambda x: x[:, None]}, ValueError,
        "cu_seqlens must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_come_while_tracing(name):
    op, changes, error, message = REFUSALS[name]
    given = CALLS[op]()
    for key, change in changes.items():
        given[key] = change(given[key]) if callable(change) else change
    with pytest.raises(error, match=f"^{op}: {message}"):
        getattr(cuattn, op)(**given)
    first = next(iter(given))
    with pytest.raises(error, match=f"^{op}: {message}"):
        jax.eval_shape(lambda x: getattr(cuattn, op)(**{**given, first: x}), given[first])


BAD_DATA = {
    "slots": ("reshape_and_cache", {"slot_mapping": jnp.full(37, -2, i32)},
        r"slot_mapping must lie within \[-1, 112\), got -2 at index 0"),
    "tables": ("paged_attention", {"block_tables": jnp.array([[0, 1], [7, 0]], i32)},
        r"block_tables must hold block ids within \[0, 4\], got 7 at \(1, 0\)"),
    "lens": ("paged_attention", {"context_lens": jnp.array([3, 17], i32)},
        "context_lens must lie within"),
    "gather": ("gather_cache", {"cu_seqlens": jnp.array([1, 2, 3, 4], i32)},
        "cu_seqlens must start at 0, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DATA)
def test_what_only_the_data_tells_is_an_error_of_the_run(name):
    op, changes, message = BAD_DATA[name]
    given = {**CALLS[op](), **changes}
    with pytest.raises(Exception, match=f"{op}: {message}"):
        jax.block_until_ready(getattr(cuattn, op)(**given))


@pytest.mark.parametrize("op", ["paged_attention", "attention_varlen", "reshape_and_cache"])
def test_gradients_are_refused(op):
    given = CALLS[op]()
    first = next(iter(given))

    def loss(x):
        return jax.tree.leaves(getattr(cuattn, op)(**{**given, first: x}))[0].sum()

    refusal = f"{op}: (no gradient goes through|block_tables must be None for a gradient)"
    with pytest.raises(NotImplementedError, match=refusal):
        jax.grad(loss)(given[first])


def test_functions_that_write_in_place_name_the_way_out():
    q, k_cache, v_cache, tables, lens = attending().values()
    sizes = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 64, "block_size": 8}
    taken = "is a JAX array, which this function does not take; use paged_attention"
    for version in (cuattn.paged_attention_v1, cuattn.paged_attention_v2):
        with pytest.raises(NotImplementedError, match=f"^{version.__name__}: q {taken}, which"):
            version(q, q, k_cache, v_cache, tables, lens, 1.0)
    with pytest.raises(
        NotImplementedError, match=f"^paged_plan: context_lens {taken} without plan"
    ):
        cuattn.paged_plan(tables, lens, **sizes)
    with pytest.raises(NotImplementedError, match=r"use cache.at\[destinations\].set"):
        cuattn.copy_blocks([k_cache], None, np.zeros((0, 2), np.int64))
    with pytest.raises(NotImplementedError, match=r"use cache.at\[destinations\].set"):
        cuattn.swap_blocks(k_cache, v_cache, np.zeros((0, 2), np.int64))
    moved = k_cache.at[jnp.array([1])].set(2 * k_cache[jnp.array([3])])  # the way out
    assert np.asarray(moved[1] == 2).all()


def test_numpy_arrays_become_jax_arrays_and_others_are_refused(rng):
    torch = frameworks.require("torch")
    given = {name: np.asarray(x) for name, x in attending().items()}
    want = cuattn.paged_attention(**given)
    got = cuattn.paged_attention(**{**given, "q": jnp.asarray(given["q"])})
    assert_same_bits([got], [want])
    with pytest.raises(ValueError, match="paged_attention: k_cache is a JAX array but the first"):
        cuattn.paged_attention(**{**given, "k_cache": jnp.asarray(given["k_cache"])})
    with pytest.raises(
        TypeError, match="paged_attention: v_cache must be a JAX array like q, got T"
    ):
        cuattn.paged_attention(**{**attending(), "v_cache": torch.ones(5, 8, 2, 64)})


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, cuattn
first, second = jax.devices("cpu")
ones = jnp.ones((5, 2, 16), "f4")
k, far = jax.device_put(ones, first), jax.device_put(ones, second)
cache = jnp.zeros((4, 8, 2, 16), "f4")
slots = jnp.arange(5)
assert slots.dtype == jnp.int64
near = cuattn.reshape_and_cache(k, k, cache, cache, slots)  # `cache` was put nowhere
assert near[0].devices() == {first} and float(near[0].sum()) == 160
moved = cuattn.reshape_and_cache(far, far, cache, cache, slots)
assert moved[0].devices() == {second} and float(moved[0].sum()) == 160
for call in (
    lambda: cuattn.reshape_and_cache(k, far, cache, cache, slots),
    lambda: cuattn.gather_cache(near[0], moved[0], jnp.zeros((1, 1), "i4"), np.array([0, 1], "i4")),
    lambda: cuattn.attention(k[None], far[None], far[None]),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_arrays_of_two_devices_are_refused_and_int64_is_taken():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{op}: {name} must be on cpu:0 like {like}, got cpu:1; move it with jax.device_put"
        for op, name, like in (
            ("reshape_and_cache", "v", "k"),
            ("gather_cache", "v_cache", "k_cache"),
            ("attention", "k", "q"),
        )
    ]
