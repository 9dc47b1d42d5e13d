# SPDX-License-Identifier: Apache-2.0
"""flex_attention under jax.jit and jax.grad, captured arrays among what is traced."""

from __future__ import annotations

import types

import numpy as np
import pytest

import cuattn
import frameworks
from cuattn import flex

jax = frameworks.require("jax")


def test_jit_and_grad_with_captured_arrays(rng):
    """On the CPU, also where GPUs are what JAX takes by itself."""
    with jax.default_device(jax.devices("cpu")[0]):
        check_jit_and_grad(rng)


def check_jit_and_grad(rng):
    jnp = jax.numpy
    shapes = (2, 40, 4, 32), (2, 50, 2, 32), (2, 50, 2, 24), (4, 21)
    q, k, v, table = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    ids = np.sort(rng.integers(0, 3, 50)).astype(np.int32)
    i, j = np.arange(40)[:, None], np.arange(50)[None, :]

    def ours(q, k, v, table, ids):
        out, lse = cuattn.flex_attention(
            q,
            k,
            v,
            mask_mod=lambda b, h, i, j: (ids[i] == ids[j]) | (j < 4),
            score_mod=lambda s, b, h, i, j: 0.5 * s + table[h, (i - j) % 21],
            return_lse=True,
        )
        return (out**2).sum() + lse.sum()

    def dense(q, k, v, table, ids):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        s = 0.5 * jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / np.sqrt(32)
        s = jnp.where((ids[i] == ids[j]) | (j < 4), s + table[:, (i - j) % 21], -jnp.inf)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v, precision="highest")
        return (out**2).sum() + jax.nn.logsumexp(s, axis=3).sum()

    want = jax.jit(jax.value_and_grad(dense, (0, 1, 2, 3)))(q, k, v, table, ids)
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.value_and_grad(ours, (0, 1, 2, 3)))(q, k, v, table, ids)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4 * max(1, float(abs(y).max())), rtol=0)
    plain = cuattn.flex_attention(q, k, v, score_mod=flex.scores.relative_bias(table[:, :21]))
    mapped = jax.vmap(
        lambda q: cuattn.flex_attention(
            q[None], k[:1], v[:1], score_mod=flex.scores.relative_bias(table)
        )[0]
    )(jnp.asarray(q))
    np.testing.assert_allclose(mapped[0], plain[0], atol=1e-5)


def test_numbers_that_jax_traces_are_refused_as_their_gradients_would_be_lost():
    q = jax.numpy.ones((1, 8, 2, 16))
    for name in ("scale", "softcap"):
        message = rf"^flex_attention: {name} must be a Python value, which is static under jax"
        with pytest.raises(TypeError, match=message):
            jax.grad(lambda s, n=name: cuattn.flex_attention(q, q, q, **{n: s}).sum())(0.5)
    v = jax.random.normal(jax.random.key(0), q.shape)
    loss = lambda s: (cuattn.flex_attention(v, v, v, score_mod=lambda x, *_: x * s) ** 2).sum()  # noqa: E731
    step = 1e-2
    want = (loss(0.5 + step) - loss(0.5 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(loss)(0.5), want, rtol=1e-2)


def test_a_learned_number_behind_an_attribute_is_refused_and_not_lost():
    """Under grad alone it has a value, which became a constant with the gradient 0."""
    q, owner = jax.numpy.ones((1, 9, 2, 8)), types.SimpleNamespace()

    def loss(gain):
        owner.gain = gain
        return cuattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * owner.gain).sum()

    for transform in (jax.grad, jax.jit):
        with pytest.raises(NotImplementedError, match="not reach an array that JAX traces"):
            transform(loss)(1.5)
    assert loss(jax.numpy.float32(1.5)) == loss(1.5)


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_block_mask_beside_a_mask_function_under_jit(of_torch, rng):
    q = rng.standard_normal((1, 200, 2, 16)).astype(np.float32)
    ids = np.arange(200) // 70
    causal, same = lambda b, h, i, j: j <= i, lambda b, h, i, j: ids[i] == ids[j]
    if of_torch:
        frameworks.require("torch")
        from torch.nn.attention.flex_attention import create_block_mask

        blocks = create_block_mask(causal, None, None, 200, 200, device="cpu")
    else:
        blocks = cuattn.create_block_mask(causal, None, None, 200, 200)
    call = lambda q, mask=same: cuattn.flex_attention(q, q, q, block_mask=blocks, mask_mod=mask)  # noqa: E731
    x = jax.numpy.asarray(q)
    np.testing.assert_allclose(jax.jit(call)(x), call(q), atol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: call(x, causal))(x), call(q, causal), atol=1e-6)
    both = lambda q: cuattn.flex_attention(  # noqa: E731
        q, q, q, mask_mod=lambda b, h, i, j: (j <= i) & (ids[i] == ids[j])
    )
    got, want = (jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (call, both))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_block_mask_of_one_head_beside_a_mask_that_reads_heads_under_jit(rng):
    """Its blocks hang on no head, and are for all of them."""
    q = rng.standard_normal((1, 64, 2, 16)).astype(np.float32)
    blocks = cuattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64)
    call = lambda q: cuattn.flex_attention(  # noqa: E731
        q, q, q, block_mask=blocks, mask_mod=lambda b, h, i, j: (h > 0) | (j < 4)
    )
    np.testing.assert_allclose(jax.jit(call)(jax.numpy.asarray(q)), call(q), atol=1e-6)


def test_captured_ids_beyond_32_bits_are_refused_and_not_cut():
    q = jax.numpy.ones((1, 4, 1, 16))
    ids = np.array([0, 0, 2**32, 2**32])
    call = lambda q: cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: ids[i] == ids[j])  # noqa: E731
    with pytest.raises(ValueError, match=r"a captured array (must fit 32 bits|of int64 must hold)"):
        jax.jit(call)(q)
    with pytest.raises(ValueError, match="must hold numbers within int32"):
        call(q)


def test_dropout_state_of_32_bits():
    """JAX has no int64 unless told so; the data of its keys are uint32."""
    q = jax.random.normal(jax.random.key(0), (1, 9, 2, 16))
    call = lambda q, state: cuattn.flex_attention(q, q, q, dropout_p=0.5, dropout_state=state)  # noqa: E731
    want = cuattn.attention(*[np.asarray(q)] * 3, dropout_p=0.5, dropout_state=np.array([7, 3]))
    for state in (np.array([7, 3]), jax.numpy.array([7, 3]), jax.numpy.array([7, 3], "uint32")):
        np.testing.assert_allclose(call(q, state), want, atol=1e-6)
        np.testing.assert_allclose(jax.jit(call)(q, state), want, atol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda q, s=state: call(q, s))(q), want, atol=1e-6)


def test_a_block_mask_of_traced_ids_is_refused_by_its_own_name():
    def call(q, ids):
        blocks = cuattn.create_block_mask(
            lambda b, h, i, j: ids[i] == ids[j], None, None, 64, 64, block_size=64
        )
        return cuattn.flex_attention(q, q, q, block_mask=blocks)

    with pytest.raises(NotImplementedError, match=r"^create_block_mask: a captured array is trac"):
        jax.jit(call)(jax.numpy.ones((1, 64, 2, 16)), jax.numpy.zeros(64, int))


@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd])
def test_a_gradient_of_a_gradient_is_refused(second):
    q = jax.numpy.ones((1, 8, 2, 16))
    loss = lambda q: (cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: j <= i) ** 2).sum()  # noqa: E731
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match=r"^flex_attention: no gradient of a gradient"),
    ):
        second(lambda q: jax.grad(loss)(q).sum())(q)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"causal": 1}, "causal must be True or False, got 1; pass a bool"),
        # Traced, JAX may have asked before whether it can be a static argument.
        ({"causal": np.True_.reshape(1)}, "causal must be (True or False|a Python value)"),
        ({"batch_invariant": 0}, "batch_invariant must be True or False, got 0; pass a bool"),
        ({"num_splits": 2.0}, "num_splits must be"),
        ({"softcap": -1.0}, "softcap must be"),
    ],
)
def test_options_are_refused_while_jax_traces(wrong, message):
    """Called back they had been refused, too, in an error of XLA's."""
    q = jax.device_put(jax.numpy.ones((1, 8, 2, 16)), jax.devices("cpu")[0])
    for transform in (lambda f: f, jax.jit, lambda f: jax.grad(lambda q: f(q).sum())):
        with pytest.raises((TypeError, ValueError), match=f"^flex_attention: {message}"):
            transform(lambda q: cuattn.flex_attention(q, q, q, **wrong))(q)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_what_fits_no_call_is_refused_by_name(transform):
    """Eager calls returned NotImplemented, traced ones an error of XLA's."""
    q = jax.numpy.ones((1, 8, 2, 16))
    call = lambda q, k=q, **given: cuattn.flex_attention(q, k, k, **given)  # noqa: E731
    with pytest.raises(TypeError, match=r"^flex_attention: seqused_k must be .* got list"):
        transform(lambda q: call(q, seqused_k=[8]))(q)
    with pytest.raises(ValueError, match=r"^flex_attention: k must have 4 axes"):
        transform(lambda q: call(q, q[0]))(q)
