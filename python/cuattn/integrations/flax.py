# SPDX-License-Identifier: Apache-2.0
"""cuattn as the `attention_fn` of flax's attention layers, linen's and nnx's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..jax import dot_product_attention

OP = "attention_fn"


def refuse(**given: tuple[bool, str]) -> None:
    """Raise for what a layer asks and cuattn cannot do."""
    for name, (asked, way_out) in given.items():
        if asked:
            raise NotImplementedError(
                f"{OP}: {name} must be left as flax has it by default; {way_out}"
            )


def four_axes(x: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    """Give q, k, v, a bias or a mask one axis of batch; None stays."""
    if x is None or len(batch) < 2:
        return x
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    x = jnp.broadcast_to(x, batch + x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
) -> jax.Array:
    """Attend as flax.linen.dot_product_attention and flax.nnx's do; float32 inside.

    A row that sees no key gives 0, where flax gives the mean of all values.

    Parameters
    ----------
    query, key, value : array, [batch..., length, heads, head size]
        float32, float16 or bfloat16; key and value may have fewer heads.
    bias, mask : array, optional
        Broadcast to [batch..., heads, length, key length]; a mask keeps where it is not 0.
    dtype : optional
        Of the computation: query, key and value are cast to it.
    is_causal : bool
        Query i sees the keys up to i.
    broadcast_dropout, precision, force_fp32_for_softmax
        Without effect: there is no dropout, and sums are made in float32.
    dropout_rng, dropout_rate, deterministic, module
        As flax gives them; dropout that is on, and a module that wants the weights, are refused.
    qk_attn_weights_einsum, attn_weights_value_einsum
        None.

    Returns
    -------
    array
        Shaped as query.

    Raises
    ------
    NotImplementedError
        For dropout, weights to be sown, or einsums of the caller's.
    ValueError, TypeError
        As in `cuattn.jax.dot_product_attention`.
    """
    del broadcast_dropout, precision, force_fp32_for_softmax, dropout_rng
    einsums = qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None
    refuse(
        dropout_rate=(
            dropout_rate > 0 and not deterministic,
            "pass deterministic=True, or drop from the layer's result",
        ),
        module=(module is not None, "weights are never formed; pass sow_weights=False"),
        qk_attn_weights_einsum=(einsums, "the products are cuattn's; leave both einsums None"),
    )
    shape = jnp.shape(query)
    q, k, v = (four_axes(x, shape[:-3]) for x in (query, key, value))
    if dtype is not None:
        q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    bias, mask = (four_axes(x, shape[:-3]) for x in (bias, mask))
    if mask is not None:
        mask = jnp.asarray(mask).astype(bool)
    return jnp.asarray(dot_product_attention(q, k, v, bias, mask, is_causal=is_causal)).reshape(
        shape
    )
