# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in reshape_and_cache and gather_cache: the bits of numpy, and caches written where
they lie once they are donated.
"""

from __future__ import annotations

import numpy as np
import pytest

import cache_cases
import cuattn
import frameworks
from cache_cases import CACHE_DTYPES, LAYOUTS

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402
from jax_cases import assert_same_bits, eager_and_jitted, gathering, to_jax, writing  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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
