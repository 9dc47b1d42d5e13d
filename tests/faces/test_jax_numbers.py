# SPDX-License-Identifier: Apache-2.0
"""Numbers of other types than an argument takes, given with JAX arrays: refused, never rounded."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks

jax = frameworks.require("jax")
jnp = jax.numpy


@pytest.mark.parametrize(
    ("rows", "wrong", "right"),  # a number of rows that nobody else has: no program is known for it
    [
        (301, {"causal": 0}, {"causal": False}),
        (302, {"causal": 1}, {"causal": True}),
        (303, {"return_lse": 1}, {"return_lse": True}),
        (304, {"batch_invariant": 1}, {"batch_invariant": True}),
        (305, {"num_splits": 2.0}, {"num_splits": 2}),
        (306, {"window": (2.0, 0)}, {"window": (2, 0)}),
        (307, {"dropout_p": 0.5, "dropout_seed": 7.0}, {"dropout_p": 0.5, "dropout_seed": 7}),
    ],
)
def test_numbers_of_another_type_are_refused_before_and_after_equal_ones(rows, wrong, right):
    """Options that compare as equal had been one key."""
    q = jnp.ones((1, rows, 2, 16))
    packed, cu = [q[0]] * 3, [jnp.array([0, rows], jnp.int32)] * 2
    ragged = lambda **options: cuattn.attention_varlen(*packed, *cu, rows, rows, **options)  # noqa: E731
    for call in (lambda **options: cuattn.attention(q, q, q, **options), ragged):
        with pytest.raises(TypeError):
            call(**wrong)
        jax.tree.map(np.asarray, call(**right))
        with pytest.raises(TypeError):  # also where a program is known for the right one
            call(**wrong)


def test_seeds_beyond_32_bits_are_refused_and_not_cut():
    logits = np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32)
    large = 2**40 + np.arange(8)
    for options in (
        {"seed": large},
        {"seed": large.astype(np.uint64)},
        {"seed": 1, "offset": large},
        {"seed": np.array(2**40)},
    ):
        with pytest.raises(ValueError, match="must fit 32 bits while jax_enable_x64 is off"):
            cuattn.sample(jnp.asarray(logits), **options)
    small = {"seed": np.arange(8), "offset": np.array(3)}
    got = cuattn.sample(jnp.asarray(logits), **small)
    np.testing.assert_array_equal(got, cuattn.sample(logits, **small))
    probs = np.full((1, 2, 5), 0.2, np.float32)
    with pytest.raises(ValueError, match="seed must fit 32 bits"):
        cuattn.speculative_verify(
            jnp.asarray(probs[:, :1]), jnp.asarray(probs), jnp.zeros((1, 1), jnp.int32),
            seed=np.array([2**40]),
        )  # fmt: skip


Q, LOGITS = jnp.ones((1, 8, 2, 16)), jnp.zeros((3, 50))
TABLE = jnp.ones((9, 8))
CKV, LATENTS = jnp.ones((3, 16)), jnp.zeros((2, 4, 16))
KPE, PLACES = jnp.ones((3, 8)), jnp.zeros((2, 4, 8))


def drawn(state):
    return cuattn.attention(Q, Q, Q, dropout_p=0.5, dropout_state=state)


def written(positions):
    tables = {"cos": TABLE[:, :4], "sin": TABLE[:, :4], "positions": positions}
    return cuattn.mla_write(CKV, KPE, LATENTS, PLACES, jnp.arange(3), **tables)


# fmt: off
WRONG = {
    "state of floats": (lambda: drawn(jnp.array([5.9, 3.9])),
        "dropout_state must be int64, got float32"),
    "state of flags": (lambda: drawn(jnp.array([True, True])),
        "dropout_state must be int64, got bool"),
    "positions": (lambda: cuattn.apply_rope(Q, TABLE, TABLE, jnp.full((1, 8), 1.7)),
        "apply_rope: positions must be int64, int32 or uint32, got float32"),
    "short positions": (lambda: cuattn.apply_rope(Q, TABLE, TABLE, jnp.ones((1, 8), jnp.int16)),
        "apply_rope: positions must be int64, int32 or uint32, got int16"),
    "offset of rope": (lambda: cuattn.apply_rope(Q, TABLE[:, :4], TABLE[:, :4], offset=2.9),
        "apply_rope: offset must be an integer, got 2.9"),
    "seed": (lambda: cuattn.sample(LOGITS, seed=1.9), "sample: seed must be an integer, got 1.9"),
    "top_k": (lambda: cuattn.sample(LOGITS, seed=1, top_k=2.9),
        "sample: top_k must be an integer, got 2.9"),
    "seeds": (lambda: cuattn.sample(LOGITS, seed=jnp.arange(3) + 0.9),
        "sample: seed must be int64, int32 or uint32, got float32"),
    "latents": (lambda: written(jnp.array([1.5, 2.0, 3.0])),
        "mla_write: positions must be int64, int32 or uint32, got float32"),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_numbers_of_another_type_are_refused(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert message in str(raised.value)


def test_symbolic_shapes_are_refused_with_the_way_out():
    shape = jax.export.symbolic_shape("b, 8, 2, 16")
    with pytest.raises(NotImplementedError, match="export a program for each"):
        jax.export.export(jax.jit(lambda q: cuattn.attention(q, q, q)))(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
