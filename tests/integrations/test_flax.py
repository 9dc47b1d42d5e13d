# SPDX-License-Identifier: Apache-2.0
"""cuattn.integrations.flax: attention_fn beside flax's formula, and inside its layers."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import frameworks

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

from cuattn.integrations.flax import attention_fn  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        yield


def formula(q, k, v, bias, mask, is_causal):
    """What flax computes, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = np.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1]) + bias
    seen = np.broadcast_to(mask != 0, scores.shape)
    if is_causal:
        seen = seen & np.tri(*scores.shape[-2:], dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("...hqk,...khd->...qhd", weights, v)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_formula_with_any_number_of_batch_axes(batch, is_causal, rng):
    q, k, v = (rng.standard_normal((*batch, 7, h, 12), np.float32) for h in (4, 2, 2))
    bias = rng.standard_normal((4, 7, 7), np.float32)
    mask = np.float32(rng.random((*batch, 1, 7, 7)) > 0.3)  # flax's masks may be numbers
    mask[..., 0] = 1  # every row sees a key
    found = attention_fn(q, k, v, bias, mask, is_causal=is_causal)
    assert found.shape == q.shape
    np.testing.assert_allclose(found, formula(q, k, v, bias, mask, is_causal), atol=2e-5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dropout_rate": 0.1}, "dropout_rate must be left.*deterministic=True"),
        ({"module": object()}, "module must be left.*sow_weights=False"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum must be left"),
    ],
)
def test_what_it_cannot_do_is_refused(asked, message):
    x = jnp.zeros((1, 3, 2, 8))
    with pytest.raises(NotImplementedError, match=f"attention_fn: {message}"):
        attention_fn(x, x, x, **asked)
    assert attention_fn(x, x, x, dropout_rate=0.1, deterministic=True, dtype="bfloat16").dtype == (
        jnp.bfloat16
    )


def test_layers_of_linen_and_nnx(rng):
    frameworks.require("flax")
    from flax import linen, nnx

    for own in (linen.dot_product_attention, nnx.dot_product_attention):  # linen drops others
        missing = set(inspect.signature(own).parameters) - set(
            inspect.signature(attention_fn).parameters
        )
        assert missing <= {"promote_dtype", "einsum_dot_general"}, (own, missing)  # no layer's
    x = jnp.asarray(rng.standard_normal((2, 9, 24), np.float32))
    mask = linen.make_causal_mask(x[..., 0])
    layers = [
        linen.MultiHeadDotProductAttention(num_heads=3, qkv_features=24, attention_fn=function)
        for function in (attention_fn, linen.dot_product_attention)
    ]
    weights = layers[0].init(jax.random.key(0), x)
    results = [
        jax.value_and_grad(lambda w, one=one: (one.apply(w, x, mask=mask) ** 2).sum())(weights)
        for one in layers
    ]
    made = [
        nnx.MultiHeadAttention(3, 24, decode=False, rngs=nnx.Rngs(0), attention_fn=function)
        for function in (attention_fn, nnx.dot_product_attention)
    ]
    results += [nnx.value_and_grad(lambda m: (m(x, mask=mask) ** 2).sum())(one) for one in made]
    for found, wanted in (results[:2], results[2:]):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=1e-4 * max(1, float(jnp.abs(b).max())))
