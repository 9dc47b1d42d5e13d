# SPDX-License-Identifier: Apache-2.0
"""Latent attention on JAX arrays: the call on numpy arrays or, on a GPU, on torch tensors; eagerly,
under jax.jit and jax.vmap.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks
import mla_cases
from cases import DTYPES, EPS
from harness import bits, numpy_call, on
from mla_cases import MlaCase

jax = frameworks.require("jax")
jnp = jax.numpy

import jax_cases  # noqa: E402

CASES = {
    "decode": MlaCase(dtype="bfloat16", heads=5, block_size=16),
    "queries": MlaCase(dtype="float32", latent=64, rope=16, heads=3, q_len=4, window=(20, -1)),
    "sinks": MlaCase(dtype="float16", latent=128, heads=4, sinks=True, softcap=9.0),
    "no rope": MlaCase(dtype="float32", latent=64, rope=0, heads=3),
}


@pytest.fixture(autouse=True)
def on_the_device(device):
    with jax.default_device(jax_cases.device_of(device)):
        yield


def decode_arguments(case, rng):
    """Arrays by name; what no sequence owns is 0, since JAX copies it."""
    arrays = mla_cases.make(case, rng)
    latent, cache = case.latent, np.nan_to_num(arrays["cache"].astype(np.float32))
    q, cache = arrays["q"], cache.astype(arrays["q"].dtype)
    found = {"q_nope": q[..., :latent], "ckv_cache": cache[..., :latent],
             "q_pe": q[..., latent:] if case.rope else None,
             "kpe_cache": cache[..., latent:] if case.rope else None,
             "block_tables": arrays["block_tables"], "context_lens": arrays["context_lens"],
             "sinks": arrays.get("sinks")}  # fmt: skip
    return {n: np.ascontiguousarray(a) for n, a in found.items() if a is not None}


def as_jax(arrays):
    return {name: jnp.asarray(a) for name, a in arrays.items()}


@pytest.mark.parametrize("name", CASES)
def test_decode_is_the_call_on_other_arrays(device, name, rng):
    case = CASES[name]
    arrays = decode_arguments(case, rng)
    none = {} if case.rope else {"q_pe": None, "kpe_cache": None}
    options = {"scale": 0.1, "window": case.window, "softcap": case.softcap, "return_lse": True}
    run = lambda given: cuattn.mla_decode(**given, **none, **options)  # noqa: E731
    expected = numpy_call(device, cuattn.mla_decode, **arrays, **none, **options)
    given = as_jax(arrays)
    for found in (run(given), jax.jit(run)(given)):
        for got, want in zip(found, expected, strict=True):
            assert (bits(np.asarray(got)) == bits(want)).all()
    twice = {**given, "q_nope": jnp.stack([given["q_nope"]] * 2)}
    axes = {n: 0 if n == "q_nope" else None for n in twice}
    stacked = jax.vmap(run, in_axes=(axes,))(twice)
    for got, want in zip(stacked, expected, strict=True):
        assert (bits(np.asarray(got[1])) == bits(want)).all()


@pytest.mark.parametrize("has_lens", [False, True])
def test_decode_of_lists_is_the_call_on_other_arrays(device, has_lens, rng):
    draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(np.float16)  # noqa: E731
    arrays = {"q_nope": draw(2, 3, 5, 128), "q_pe": draw(2, 3, 5, 16), "ckv_cache": draw(6, 8, 128),
              "kpe_cache": draw(6, 8, 16),
              "indices": rng.integers(-1, 49, (2, 3, 40)).astype(np.int32)}  # fmt: skip
    if has_lens:
        arrays["topk_lens"] = rng.integers(0, 41, (2, 3)).astype(np.int32)
        arrays["sinks"] = rng.standard_normal(5).astype(np.float32)
    none = {"block_tables": None, "context_lens": None}
    options = {"scale": 0.1, "return_lse": True}
    run = lambda given: cuattn.mla_decode(**given, **none, **options)  # noqa: E731
    expected = numpy_call(device, cuattn.mla_decode, **arrays, **none, **options)
    given = as_jax(arrays)
    for found in (run(given), jax.jit(run)(given)):
        for got, want in zip(found, expected, strict=True):
            assert (bits(np.asarray(got)) == bits(want)).all()


def test_packed_latents_are_read_and_not_written(device, rng):
    draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(DTYPES["bfloat16"])  # noqa: E731
    ckv, kpe, cache = draw(24, 512), draw(24, 64), np.zeros((3, 8, 656), np.uint8)
    cuattn.mla_write(ckv, kpe, cache, None, np.arange(24))
    arrays = {"q_nope": draw(2, 4, 512), "q_pe": draw(2, 4, 64), "ckv_cache": cache,
              "block_tables": np.array([[2, 0], [1, 1]], np.int32),
              "context_lens": np.array([13, 4], np.int32)}  # fmt: skip
    run = lambda given: cuattn.mla_decode(**given, kpe_cache=None, scale=0.1)  # noqa: E731
    expected = numpy_call(device, cuattn.mla_decode, **arrays, kpe_cache=None, scale=0.1)
    for found in (run(as_jax(arrays)), jax.jit(run)(as_jax(arrays))):
        assert (bits(np.asarray(found)) == bits(expected)).all()
    with pytest.raises(NotImplementedError, match="packed latents, is not written as a JAX array"):
        cuattn.mla_write(*map(jnp.asarray, (ckv, kpe, cache)), None, jnp.arange(24))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_is_the_call_on_other_arrays(device, dtype, rng):
    draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])  # noqa: E731
    ckv, kpe, cache, ropes = draw(5, 48), draw(5, 16), draw(4, 8, 48), draw(4, 8, 16)
    slots = np.array([5, 31, -1, 0, 17])
    cos, sin = cuattn.rope_table(40, 16)
    turn = {"cos": cos, "sin": sin, "positions": np.array([3, 9, 1, 0, 39])}
    for words in ({}, turn, {**turn, "rope_interleaved": False}):
        theirs = on(device, ckv, kpe, cache, ropes, slots)
        put = lambda x: on(device, x)[0] if isinstance(x, np.ndarray) else x  # noqa: E731
        cuattn.mla_write(*theirs, **{name: put(x) for name, x in words.items()})
        device.synchronize()
        copies = [device.numpy(x) for x in theirs[2:4]]
        run = lambda *a, w=words: cuattn.mla_write(*a, **w)  # noqa: E731
        for call in (run, jax.jit(run), jax.jit(run, donate_argnums=(2, 3))):
            written = call(*map(jnp.asarray, (ckv, kpe, cache, ropes, slots)))
            for got, want in zip(written, copies, strict=True):
                assert (bits(np.asarray(got)) == bits(want)).all()
    alone = cache.copy()
    cuattn.mla_write(ckv, None, alone, None, slots)
    got, none = cuattn.mla_write(jnp.asarray(ckv), None, jnp.asarray(cache), None, slots)
    assert none is None
    assert (bits(np.asarray(got)) == bits(alone)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["explicit", "absorbed"])
def test_both_forms_and_the_projection_are_near_the_numpy_call(form, dtype, rng):
    def draw(*shape, size=1.0):
        return (rng.standard_normal(shape, np.float32) * size).astype(DTYPES[dtype])

    arrays = {"q": draw(2, 3, 5, 16), "k_latent": draw(2, 9, 32),
              "k_proj": draw(3, 32, 16, size=0.2), "v_proj": draw(3, 32, 24, size=0.2),
              "q_rope": draw(2, 3, 5, 8), "k_rope": draw(2, 9, 8)}  # fmt: skip
    run = lambda a: cuattn.mla_attention(  # noqa: E731
        **a, v_latent=a["k_latent"], form=form, return_lse=True
    )
    expected = run(arrays)
    for found in (run(as_jax(arrays)), jax.jit(run)(as_jax(arrays))):
        for got, want in zip(found, expected, strict=True):
            got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
            assert np.abs(got - want).max() <= 4 * EPS[dtype] * np.abs(want).max() + 1e-5
    for x, transpose in ((draw(2, 3, 32), False), (draw(3, 16), True)):
        want = cuattn.mla_project(x, arrays["k_proj"], transpose=transpose).astype(np.float32)
        got = cuattn.mla_project(jnp.asarray(x), arrays["k_proj"], transpose=transpose)
        assert got.dtype == x.dtype
        assert (
            np.abs(np.asarray(got, np.float32) - want).max() <= 4 * EPS[dtype] * np.abs(want).max()
        )


def test_what_is_refused(rng):
    given = as_jax(decode_arguments(CASES["queries"], rng))
    with pytest.raises(NotImplementedError, match="mla_decode: out must be None for JAX arrays"):
        cuattn.mla_decode(**given, scale=1.0, out=given["q_nope"])
    wrong = {**given, "kpe_cache": given["kpe_cache"][:, :, :8]}
    for run in (cuattn.mla_decode, jax.jit(cuattn.mla_decode, static_argnames="scale")):
        with pytest.raises(ValueError, match="kpe_cache must have"):
            run(**wrong, scale=1.0)
    with pytest.raises(NotImplementedError, match="mla_decode: no gradient goes through"):
        jax.grad(lambda q: cuattn.mla_decode(**{**given, "q_nope": q}, scale=1.0).sum())(
            given["q_nope"]
        )
    ckv, cache, slots = jnp.ones((3, 16)), jnp.ones((2, 4, 16)), jnp.arange(3)
    for change, message in (
        ({"kpe": jnp.ones((2, 8))}, r"kpe must have shape \(3, 8\)"),
        ({"kpe": jnp.ones((3, 8), jnp.float16)}, "kpe must have 2 axes and be float32"),
        ({"kpe_cache": jnp.ones((2, 5, 8))}, "kpe_cache must have num_blocks and block_size"),
        ({"slot_mapping": jnp.arange(4)}, "slot_mapping must be int32 or int64 of shape"),
        ({"cos": jnp.ones((4, 4))}, "cos, sin and positions must be given together"),
        ({"kpe": None, "kpe_cache": None, "cos": jnp.ones((4, 4)), "sin": jnp.ones((4, 4)),
          "positions": slots}, "must not be given without kpe"),
    ):  # fmt: skip
        call = {"ckv": ckv, "kpe": jnp.ones((3, 8)), "ckv_cache": cache,
                "kpe_cache": jnp.ones((2, 4, 8)), "slot_mapping": slots, **change}  # fmt: skip
        with pytest.raises(ValueError, match=f"mla_write: .*{message}"):
            cuattn.mla_write(**call)
    with pytest.raises(ValueError, match="mla_project: x must have heads and columns"):
        cuattn.mla_project(jnp.ones((2, 3, 16)), jnp.ones((3, 24, 16)))


def test_the_explicit_form_has_gradients(rng):
    q, latent = (
        jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((1, 2, 4, 8), (1, 6, 16))
    )
    proj = jnp.asarray(rng.standard_normal((2, 16, 8), np.float32)) * 0.3
    run = lambda p: cuattn.mla_attention(q, latent, latent, p, p, form="explicit").sum()  # noqa: E731
    gradient, step = jax.grad(run)(proj), 1e-2 * jnp.sign(proj)
    along = (run(proj + step) - run(proj - step)) / 2
    assert abs((gradient * step).sum() - along) < 2e-2 * abs(along) + 1e-3
