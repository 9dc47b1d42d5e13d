# SPDX-License-Identifier: Apache-2.0
"""cuattn.jax: the same bits eagerly, under jit and under vmap; what XLA owns is refused."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402

SHAPE = (2, 9, 4, 32)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """The CUDA side is in test_streams.py."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def qkv(rng, shape=SHAPE, dtype=np.float32):
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def options(rng):
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": [3, 1]},
        "bhsd": {"layout": "bhsd"},
        "numbers": {"scale": 0.3, "softcap": 5.0},
        "naive": {"backend": "naive"},
        "arrays": {
            "alibi_slopes": rng.random(4, np.float32),
            "sinks": rng.random(4, np.float32),
            "bias": rng.standard_normal((1, 4, 9, 9), np.float32),
            "seqused_q": np.array([9, 3], np.int32),
            "seqused_k": np.array([5, 9], np.int32),
        },
        "mask": {"bias": rng.random((9, 9)) > 0.3},
    }


def to_jax(values):
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in values.items()}


@pytest.mark.parametrize("name", options(np.random.default_rng(0)))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_eager_and_jit_give_the_bits_of_numpy(name, dtype, rng):
    arrays = qkv(rng, dtype=jnp.dtype(dtype))
    given = options(rng)[name]
    want = cuattn.attention(*arrays, **given, return_lse=True)
    device_arrays = [jnp.asarray(x) for x in arrays]
    call = lambda q, k, v: cuattn.attention(q, k, v, **to_jax(given), return_lse=True)  # noqa: E731
    for function in (call, jax.jit(call)):
        for a, b in zip(want, function(*device_arrays), strict=True):
            assert isinstance(b, jax.Array)
            np.testing.assert_array_equal(a, np.asarray(b))


def test_optional_arrays_may_be_traced(rng):
    arrays = qkv(rng)
    given = options(rng)["arrays"]
    jitted = jax.jit(lambda a, o: cuattn.attention(*a, **o))
    got = jitted([jnp.asarray(x) for x in arrays], to_jax(given))
    np.testing.assert_array_equal(cuattn.attention(*arrays, **given), np.asarray(got))


def test_varlen_gives_the_bits_of_numpy(rng):
    arrays = qkv(rng, (11, 2, 16))
    cu_seqlens = np.array([0, 4, 4, 11], np.int32)
    want = cuattn.attention_varlen(*arrays, cu_seqlens, cu_seqlens, 7, 7, return_lse=True)
    call = lambda *a: cuattn.attention_varlen(*a, 7, 7, return_lse=True)  # noqa: E731
    device_arrays = [jnp.asarray(x) for x in (*arrays, cu_seqlens, cu_seqlens)]
    for function in (call, jax.jit(call)):
        for a, b in zip(want, function(*device_arrays), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.parametrize("name", ["plain", "causal", "arrays", "naive"])
def test_vmap_is_a_loop(name, rng):
    stacked = [jnp.asarray(x) for x in qkv(rng, (3, *SHAPE))]
    given = to_jax(options(rng)[name])
    call = lambda q, k, v: cuattn.attention(q, k, v, **given, return_lse=True)  # noqa: E731
    got = jax.vmap(call)(*stacked)
    shared = jax.vmap(call, in_axes=(0, None, None))(stacked[0], stacked[1][0], stacked[2][0])
    for i in range(3):
        want = call(*(x[i] for x in stacked))
        want_shared = call(stacked[0][i], stacked[1][0], stacked[2][0])
        for a, b, c, d in zip(want, got, want_shared, shared, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b[i]))
            np.testing.assert_array_equal(np.asarray(c), np.asarray(d[i]))


def test_merge_states_gives_the_bits_of_numpy(rng):
    out, lse = cuattn.attention(*qkv(rng), return_lse=True)
    parts = [out, lse, out[::-1].copy(), lse[::-1].copy()]
    want = cuattn.merge_states(*parts)
    call = lambda *p: cuattn.merge_states(*p)  # noqa: E731
    device_parts = [jnp.asarray(x) for x in parts]
    stacks = jnp.stack(device_parts[::2]), jnp.stack(device_parts[1::2])
    for got in (call(*device_parts), jax.jit(call)(*device_parts), call(*stacks)):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


def test_zero_sizes_pass(rng):
    for q_shape, k_shape in (((1, 0, 2, 8), (1, 5, 2, 8)), ((0, 3, 2, 8), (0, 3, 2, 8))):
        q, k = jnp.zeros(q_shape), jnp.zeros(k_shape)
        assert cuattn.attention(q, k, k).shape == q_shape
    k = jnp.zeros((1, 0, 2, 8))
    out, lse = cuattn.attention(jnp.ones((1, 3, 2, 8)), k, k, return_lse=True)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("name", ["out", "lse_out", "workspace", "stream"])
def test_what_xla_owns_is_refused(name, rng):
    q, k, v = (jnp.asarray(x) for x in qkv(rng))
    with pytest.raises(NotImplementedError, match=f"attention: {name} must be None for JAX arrays"):
        cuattn.attention(q, k, v, **{name: q})


def test_merge_states_has_no_gradient(rng):
    q = jnp.asarray(qkv(rng)[0])
    lse = jnp.zeros((2, 4, 9))
    with pytest.raises(NotImplementedError, match="no gradient goes through merge_states"):
        jax.grad(lambda o: cuattn.merge_states(o, lse, o, lse)[0].sum())(q)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": lambda x: x[0]}, ValueError, "k must have 4 axes"),
        (
            {"k": lambda x: x.astype(jnp.float16)},
            ValueError,
            "k must be float32 like q, got float16",
        ),
        ({"k": lambda x: [1]}, TypeError, "k must be a JAX array like q, got list"),
        ({"bias": lambda x: jnp.zeros((3, 3))}, ValueError, "bias must broadcast"),
        ({"seqused_k": lambda x: jnp.zeros(3, jnp.int32)}, ValueError, "seqused_k must have shape"),
        ({"layout": lambda x: "sbhd"}, ValueError, "layout must be 'bshd' or 'bhsd'"),
        ({"window": lambda x: 3}, TypeError, "window must be a pair"),
        ({"scale": lambda x: float("nan")}, ValueError, "scale must be a finite number"),
        ({"backend": lambda x: "sm80"}, NotImplementedError, "backend 'sm80' cannot run this call"),
        ({"backend": lambda x: "nope"}, ValueError, "backend must be 'auto'"),
    ],
)
def test_refusals_come_while_tracing(change, error, message, rng):
    arrays = dict(zip("qkv", (jnp.asarray(x) for x in qkv(rng)), strict=True))
    given = {**arrays, **{name: make(arrays.get(name)) for name, make in change.items()}}
    with pytest.raises(error, match=message):
        cuattn.attention(**given)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda q: cuattn.attention(**{**given, "q": q}), arrays["q"])


def test_what_only_the_data_tells_is_an_error_of_the_run(rng):
    arrays = [jnp.asarray(x) for x in qkv(rng, (11, 2, 16))]
    cu_seqlens = jnp.array([0, 7, 4, 11], jnp.int32)
    with pytest.raises(Exception, match="attention_varlen: cu_seqlens_q"):
        jax.block_until_ready(cuattn.attention_varlen(*arrays, cu_seqlens, cu_seqlens, 7, 7))


def test_jax_arrays_do_not_mix_with_others(rng):
    q, k, v = qkv(rng)
    with pytest.raises(ValueError, match="attention: k is a JAX array but the first argument is n"):
        cuattn.attention(q, jnp.asarray(k), v)
    got = cuattn.attention(
        jnp.asarray(q), k, v
    )  # numpy arrays become JAX arrays, as in any jax call
    np.testing.assert_array_equal(np.asarray(got), cuattn.attention(q, k, v))


def test_explain_takes_jax_arrays(rng):
    q, k, v = (jnp.asarray(x) for x in qkv(rng))
    assert cuattn.explain("attention", q, k, v).kernel == "cpu"
