# SPDX-License-Identifier: Apache-2.0
"""flex_attention under jax.jit and jax.grad, captured arrays among what is traced."""

from __future__ import annotations

import numpy as np

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
