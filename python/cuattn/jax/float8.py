# SPDX-License-Identifier: Apache-2.0
"""quantize and dequantize of JAX arrays, in jax.numpy: XLA fuses the passes, on any device.

The protocol is that of `_core.quantize`; the formulas are those of docs/fp8.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST, MOST_INT8 = 448.0, 127.0
BLOCK = 128
LEAST = float(np.finfo(np.float32).tiny)


def signs(dim: int) -> np.ndarray:
    """Return the signs of the rotation, by the hash of params/quantize.h."""
    mask = 0xFFFFFFFF
    found = []
    for i in range(dim):
        x = (i + 1) * 0x9E3779B1 & mask
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        found.append(-1.0 if (x ^ x >> 16) & 1 else 1.0)
    return np.array(found, np.float32)


def rotated(x: jax.Array) -> jax.Array:
    """Multiply rows by the rotation."""
    dim = x.shape[-1]
    size = dim & -dim
    x, half = x * signs(dim), 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(*x.shape)
        half *= 2
    return x * np.float32(size**-0.5)


def heads_first(x: jax.Array, layout: str) -> jax.Array:
    """Order an array [batch, heads, rows, dim]."""
    if x.ndim == 3:
        return x.swapaxes(0, 1)[None]
    return x.swapaxes(1, 2) if layout == "bshd" else x


def as_given(x: jax.Array, ndim: int, layout: str) -> jax.Array:
    """Undo `heads_first`."""
    if ndim == 3:
        return x[0].swapaxes(0, 1)
    return x.swapaxes(1, 2) if layout == "bshd" else x


def largest(x: jax.Array, shape: tuple[int, ...], channels: bool) -> jax.Array:
    """Return the largest finite size of each part that has a scale."""
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    batch, heads, rows, dim = sizes.shape
    if shape == (1,):
        return jnp.max(sizes, initial=0.0).reshape(1)
    if len(shape) == 3 and channels:
        return jnp.max(sizes, axis=2, initial=0.0)
    if len(shape) == 3:
        sizes = jnp.pad(sizes, ((0, 0), (0, 0), (0, -rows % BLOCK), (0, 0)))
        return jnp.max(sizes.reshape(batch, heads, -1, BLOCK * dim), axis=3, initial=0.0)
    sizes = jnp.max(sizes, axis=(2, 3), initial=0.0).reshape(batch, shape[-1], -1).max(axis=2)
    return sizes if len(shape) == 2 else jnp.max(sizes, axis=0)


def spread(scale: Any, shape: tuple[int, ...], channels: bool) -> jax.Array:
    """Broadcast a scale against [batch, heads, rows, dim]."""
    scale = jnp.asarray(scale, jnp.float32)
    batch, heads, rows, _ = shape
    if scale.size == 1:
        return scale.reshape(1, 1, 1, 1)
    if scale.ndim == 3 and channels:
        return scale[:, :, None]
    if scale.ndim == 3:
        return jnp.repeat(scale, BLOCK, axis=2)[:, :, :rows, None]
    scale = jnp.broadcast_to(scale, (batch, scale.shape[-1]))
    return jnp.repeat(scale, heads // scale.shape[-1], axis=1)[:, :, None, None]


def quantize(
    x: jax.Array,
    layout: str,
    hadamard: bool,
    scale: Any,
    channels: bool,
    mean: Any,
    shift_mean: Any,
    int8: bool,
) -> tuple[Any, Any, Any, Any]:
    """Quantise one array: codes, scale, mean and shift; a tuple for scale or mean is a shape."""
    wide = heads_first(x, layout).astype(jnp.float32)
    shift = made_mean = made_scale = None
    most = MOST_INT8 if int8 else LARGEST
    if shift_mean is not None:
        group = wide.shape[1] // shift_mean.shape[1]
        shift = jnp.sum(wide * jnp.repeat(shift_mean, group, axis=1)[:, :, None], axis=-1)
    if isinstance(mean, tuple):
        finite = jnp.isfinite(wide)
        count = jnp.maximum(jnp.sum(finite, axis=2), 1)
        mean = made_mean = jnp.sum(jnp.where(finite, wide, 0.0), axis=2) / count
    if mean is not None:
        wide = wide - mean[:, :, None]
    if hadamard:
        wide = rotated(wide)
    if isinstance(scale, tuple):
        sizes = largest(wide, scale, channels)
        scale = made_scale = jnp.where(sizes == 0, 1.0, jnp.maximum(sizes / most, LEAST))
    codes = jnp.clip(wide / spread(scale, wide.shape, channels), -most, most)
    if int8:
        codes = jnp.round(jnp.where(jnp.isnan(codes), 0.0, codes))
    codes = as_given(codes.astype(jnp.int8 if int8 else jnp.float8_e4m3fn), x.ndim, layout)
    return codes, made_scale, made_mean, shift


def dequantize(x: jax.Array, scale: Any, layout: str, channels: bool, dtype: str) -> jax.Array:
    """Make numbers of codes."""
    if x.dtype == jnp.uint8:
        x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    wide = heads_first(x, layout).astype(jnp.float32)
    found = wide * spread(scale, wide.shape, channels)
    return as_given(found.astype(dtype), x.ndim, layout)
