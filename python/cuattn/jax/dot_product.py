# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention with the signature and the meaning of jax.nn's. Next: attention.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attention

OP = "dot_product_attention"
LARGEST_HEAD = 512  # of one that has a gradient 256


def four_axes(name: str, array: Any, least: int) -> jax.Array:
    """Put axes of length 1 in front, as jax.nn does."""
    array = jnp.asarray(array)
    if not least <= array.ndim <= 4:
        raise ValueError(
            f"{OP}: {name} must have {'3 or 4' if least == 3 else 'at most 4'} axes, got shape "
            f"{array.shape}; reshape it, or use jax.vmap"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def check_qkv(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Refuse arrays that do not fit together, by jax.nn's names."""
    if key.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise TypeError(
            f"{OP}: query, key and value must be float32, float16 or bfloat16, got {key.dtype}; "
            "cast them"
        )
    for name, array in (("query", query), ("value", value)):
        if array.dtype != key.dtype:
            raise ValueError(
                f"{OP}: {name} must be {key.dtype} like key, got {array.dtype}; cast one of them"
            )
    batch, _, heads, head_dim = key.shape
    if value.shape != key.shape:
        raise ValueError(
            f"{OP}: value must have the shape of key, {key.shape}, got {value.shape}; "
            "cuattn.attention takes values of another size"
        )
    if (query.shape[0], query.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"{OP}: query must have batch {batch} and head size {head_dim} like key, got shape "
            f"{query.shape}; the axes are batch, length, heads, head size"
        )
    if heads == 0 or query.shape[2] % heads:
        raise ValueError(
            f"{OP}: query must have a multiple of key's {heads} heads, got {query.shape[2]}; "
            "repeat the heads of key and value"
        )
    if head_dim > LARGEST_HEAD:
        raise NotImplementedError(
            f"{OP}: query must have a head size of at most {LARGEST_HEAD}, got {head_dim}; call "
            "jax.nn.dot_product_attention"
        )


def broadcastable(name: str, array: Any, full: tuple[int, ...]) -> jax.Array | None:
    """Check a bias or a mask, and give it four axes."""
    if array is None:
        return None
    array = four_axes(name, array, 0)
    if name == "mask" and array.dtype != jnp.bool_:
        raise ValueError(
            f"{OP}: mask must be bool, got {array.dtype}; pass an additive mask as bias"
        )
    if any(extent not in (1, most) for extent, most in zip(array.shape, full, strict=True)):
        raise ValueError(
            f"{OP}: {name} must broadcast to batch, heads, query length, key length, {full}, got "
            f"{array.shape}; each axis has this length or 1"
        )
    return array


def lengths_of(name: str, lengths: Any, batch: int, most: int) -> jax.Array | None:
    """Check lengths; those beyond the array mean all of it."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(
            f"{OP}: {name} must be int32 of shape ({batch},), got {lengths.dtype} {lengths.shape}; "
            "one length for each entry of the batch"
        )
    return jnp.clip(lengths, 0, most)


def scale_of(scale: Any) -> float | None:
    """Return the scale as a number, which is compiled in."""
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(
            f"{OP}: scale must be a Python number, which is static under jax.jit, got a traced "
            "array; multiply query by it and pass scale=1.0"
        )
    if isinstance(scale, bool):
        raise TypeError(f"{OP}: scale must be a number, got {scale!r}; pass a float")
    return None if scale is None else float(scale)


def edges_of(is_causal: bool, local_window_size: Any) -> tuple[int | None, int | None]:
    """Keys left and right of a query that it sees, from the top left; None is all."""
    left: int | None = None
    right: int | None = None
    if local_window_size is not None:
        sizes = local_window_size
        pair = (sizes, sizes) if isinstance(sizes, int | np.integer) else tuple(sizes)
        if len(pair) != 2 or not all(isinstance(x, int | np.integer) for x in pair):
            raise ValueError(
                f"{OP}: local_window_size must be an int or a pair (left, right), got {sizes!r}; "
                "pass Python numbers, which are static under jax.jit"
            )
        left, right = int(pair[0]), int(pair[1])
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def window_of(
    rows: int, keys: int, left: int | None, right: int | None
) -> tuple[int, tuple[int, int]] | None:
    """Keys to keep, and cuattn's window over them, whose diagonal ends in the bottom right corner.

    None where no window says it: then a mask does.
    """
    kept = keys if right is None else max(0, min(keys, rows + right))
    shift = kept - rows
    window = (-1 if left is None else left + shift, -1 if right is None else right - shift)
    if (left is not None and window[0] < 0) or (right is not None and window[1] < 0):
        return None
    return kept, window


def band(rows: int, keys: int, left: int | None, right: int | None) -> jax.Array:
    """Give the window as a mask."""
    distance = jnp.arange(keys) - jnp.arange(rows)[:, None]
    seen = jnp.ones((rows, keys), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen[None, None]


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Combine two masks."""
    return b if a is None else a if b is None else a & b


def bias_with(mask: jax.Array | None, bias: jax.Array | None, dtype: Any) -> jax.Array | None:
    """Make one bias of what jax.nn takes apart."""
    if bias is None:
        return mask
    bias = bias if bias.dtype == dtype else bias.astype(jnp.float32)
    return bias if mask is None else jnp.where(mask, bias, jnp.array(-jnp.inf, bias.dtype))


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """Compute what jax.nn.dot_product_attention does, by cuattn; traceable by jit, vmap and grad.

    A row that sees no key gives 0 and residual -inf, as cuDNN's does; jax.nn's "xla" gives the mean
    of all values.

    Parameters
    ----------
    query : array, [batch, length, heads, head size] or without batch
    key, value : array, [batch, key length, key heads, head size] or without batch
        float32, float16 or bfloat16, as query.
    bias : array, optional
        Added to the logits; at most 4 axes, that broadcast to [batch, heads, length, key length].
    mask : bool array, optional
        True keeps the key; shaped as a bias.
    scale : float, optional
        Of the logits, a Python number; None is 1 / sqrt(head size).
    is_causal : bool
        Query i sees the keys up to i, counted from the first: top left, unlike `attention`.
    query_seq_lengths, key_value_seq_lengths : int32 array, [batch], optional
        Rows in use; results beyond are 0.
    local_window_size : int or (int, int), optional
        Keys left and right of place i that query i sees.
    implementation : None
        The implementation is cuattn's.
    return_residual : bool
        Also return the log-sum-exp, [batch, length, heads], in the dtype of key; no gradient goes
        through it.

    Returns
    -------
    out, or (out, residual) with return_residual
        Shaped as query.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        By the argument's name here, while tracing.
    """
    if implementation is not None:
        raise NotImplementedError(
            f"{OP}: implementation must be None, which is cuattn's, got {implementation!r}; call "
            "jax.nn.dot_product_attention"
        )
    shape = jnp.shape(query)
    arrays = {"query": query, "key": key, "value": value}
    q, k, v = (four_axes(name, array, 3) for name, array in arrays.items())
    check_qkv(q, k, v)
    (batch, rows, heads, head_dim), keys = q.shape, k.shape[1]
    bias = broadcastable("bias", bias, (batch, heads, rows, keys))
    mask = broadcastable("mask", mask, (batch, heads, rows, keys))
    used_q = lengths_of("query_seq_lengths", query_seq_lengths, batch, rows)
    used_k = lengths_of("key_value_seq_lengths", key_value_seq_lengths, batch, keys)
    factor = scale_of(scale)
    left, right = edges_of(is_causal, local_window_size)

    options: dict[str, Any] = {"scale": head_dim**-0.5 if factor is None else factor}
    if left is None and right is None:
        options |= {"seqused_q": used_q, "seqused_k": used_k}
        hidden = None
    else:  # lengths would move cuattn's diagonal
        hidden = used_q
        if found := window_of(rows, keys, left, right):
            keys, window = found
            options |= {"window": window, "causal": window[1] == 0}
            k, v = k[:, :keys], v[:, :keys]
            bias, mask = (x if x is None else x[..., :keys] for x in (bias, mask))
        else:
            mask = both(mask, band(rows, keys, left, right))
        if used_k is not None:
            mask = both(mask, (jnp.arange(keys) < used_k[:, None])[:, None, None])
    if padding := -head_dim % 8:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) for x in (q, k, v))
    options["bias"] = bias_with(mask, bias, q.dtype)
    out, lse = attention(q, k, v, **options, return_lse=True)
    return shaped(out[..., :head_dim], lse, hidden, shape, return_residual)


def shaped(
    out: jax.Array, lse: jax.Array, used: jax.Array | None, shape: Any, return_residual: bool
) -> Any:
    """Hide rows that are not in use, and give the results jax.nn's shapes."""
    lse = lse.swapaxes(1, 2)
    if used is not None:
        seen = jnp.arange(lse.shape[1]) < used[:, None]
        out = jnp.where(seen[..., None, None], out, 0)
        lse = jnp.where(seen[..., None], lse, -jnp.inf)
    out = out.reshape(shape)
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(lse).astype(out.dtype).reshape(shape[:-1])
