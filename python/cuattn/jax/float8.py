# SPDX-License-Identifier: Apache-2.0
"""quantize and dequantize of JAX arrays, in jax.numpy: XLA fuses the passes, on any device.

The protocol is that of `_core.quantize`; the formulas are those of docs/fp8.md.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..float8 import NUMBERS
from .call import is_array, no_gradient, refuse
from .fused import flag, number

MOST_DIM, DIM_STEP = 256, 16
LARGEST, MOST_INT8 = 448.0, 127.0
BLOCK = 128
LEAST = float(np.finfo(np.float32).tiny)
NUMBERS_TEXT = "float32, float16 or bfloat16"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def undifferentiated(op: str, x: Any) -> Any:
    """Return an array as it is; a gradient of it is refused."""
    return x


def refuse_gradient(op: str, primals: Any, tangents: Any) -> Any:
    """Refuse a gradient, which would be rounded to float8 on its way."""
    raise no_gradient(op, "gradient")


undifferentiated.defjvp(refuse_gradient)


def constant(op: str, *given: Any) -> tuple[Any, ...]:
    """Return arguments of which those that JAX traces have no gradient."""
    return tuple(undifferentiated(op, x) if isinstance(x, jax.core.Tracer) else x for x in given)


def check_rows(op: str, x: jax.Array, layout: str) -> None:
    """Raise for an array of rows that the compiled module would not take either."""
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{op}: x must have 3 or 4 axes, got {x.ndim}; pass [total, heads, dim] or the axes of "
            "layout"
        )
    if not isinstance(layout, str):
        raise TypeError(f"{op}: layout must be a string, got {layout!r}; pass a str")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(
            f"{op}: layout must be 'bshd' or 'bhsd', got {layout!r}; choose one of these"
        )
    dim = x.shape[-1]
    if not DIM_STEP <= dim <= MOST_DIM or dim % DIM_STEP != 0:
        raise ValueError(
            f"{op}: x must have dim a multiple of {DIM_STEP} up to {MOST_DIM}, got {dim}; pad it "
            "with zeros"
        )


def checked_scale(op: str, scale: Any, sizes: tuple[int, ...], channels: bool) -> Any:
    """Return a scale of [batch, heads, rows, dim] that is given; refuse what it cannot be."""
    if not is_array(scale):
        with np.errstate(over="ignore"):
            scale = np.float32(number(op, "scale", scale))
    elif scale.dtype != jnp.float32:
        raise ValueError(f"{op}: scale must be float32, got {scale.dtype}; cast it")
    batch, heads, rows, dim = sizes
    parts, shape = dim if channels else -(-rows // BLOCK), tuple(scale.shape)
    if shape not in ((), (1,)):
        first = len(shape) > 1
        of_heads = shape[first] if len(shape) <= 3 else 0
        if (
            of_heads < 1
            or heads % of_heads != 0
            or (first and shape[0] != batch)
            or shape[2:] not in ((), (parts,))
        ):
            part = "dim" if channels else f"ceil(rows / {BLOCK})"
            way_out = "allocate it so"
            if op == "dequantize" and not channels and len(shape) == 3 and shape[2] == dim:
                way_out = "pass channels=True for scales of channels, (batch, heads, dim)"
            raise ValueError(
                f"{op}: scale must have shape (1,), (heads,), (batch, heads), each with {heads} "
                f"heads or a divisor of it, or (batch, heads, {part}) = ({batch}, {heads}, "
                f"{parts}), got {shape}; {way_out}"
            )
    if not isinstance(scale, jax.core.Tracer) and is_on_host(scale):
        values = np.asarray(scale).reshape(-1)
        wrong = values[~(np.isfinite(values) & (values > 0))]
        if wrong.size:
            raise ValueError(
                f"{op}: scale must hold finite numbers above 0, got {wrong[0]:g}; value = stored * "
                "scale"
            )
    return scale


def is_on_host(x: Any) -> bool:
    """Whether the numbers of an array can be read without waiting for a device."""
    return not isinstance(x, jax.Array) or all(d.platform == "cpu" for d in x.devices())


def check_mean(op: str, mean: Any, sizes: tuple[int, ...]) -> None:
    """Raise for a mean of keys, given, that does not belong to [batch, heads, rows, dim]."""
    if mean.dtype != jnp.float32:
        raise ValueError(f"{op}: mean must be float32, got {mean.dtype}; cast it")
    batch, heads, _, dim = sizes
    shape = tuple(mean.shape)
    if shape[1:] != (heads, dim) or shape[0] not in (1, batch):
        raise ValueError(
            f"{op}: mean must have shape (batch, heads, dim) = ({batch}, {heads}, {dim}), got "
            f"{shape}; allocate it so"
        )


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
    if scale.ndim == 3:
        scale = jnp.repeat(scale, heads // scale.shape[1], axis=1)
        if channels:
            return scale[:, :, None]
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
    stream: Any,
) -> tuple[Any, Any, Any, Any]:
    """Quantise one array: codes, scale, mean and shift; a tuple for scale or mean is a shape."""
    op = "quantize"
    refuse(op, stream=stream)
    check_rows(op, x, layout)
    if str(x.dtype) not in NUMBERS:
        raise ValueError(f"{op}: x must be {NUMBERS_TEXT}, got {x.dtype}; cast it")
    flag(op, "hadamard", hadamard)
    x, scale, mean, shift_mean = constant(op, x, scale, mean, shift_mean)
    wide = heads_first(x, layout).astype(jnp.float32)
    if not isinstance(scale, tuple):
        scale = checked_scale(op, scale, wide.shape, channels)
    if mean is not None and not isinstance(mean, tuple):
        check_mean(op, mean, wide.shape)
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
    # XLA makes of a quotient by what is only broadcast a product with its reciprocal, which is a
    # rounding apart: here and there another code.
    divisor = jnp.where(jnp.isnan(wide), jnp.nan, spread(scale, wide.shape, channels))
    codes = jnp.clip(wide / divisor, -most, most)
    if int8:
        codes = jnp.round(jnp.where(jnp.isnan(codes), 0.0, codes))
    codes = as_given(codes.astype(jnp.int8 if int8 else jnp.float8_e4m3fn), x.ndim, layout)
    return codes, made_scale, made_mean, shift


def dequantize(
    x: jax.Array, scale: Any, layout: str, channels: bool, dtype: str, out: Any, stream: Any
) -> jax.Array:
    """Make numbers of codes."""
    op = "dequantize"
    refuse(op, out=out, stream=stream)
    check_rows(op, x, layout)
    flag(op, "channels", channels)
    x, scale = constant(op, x, scale)
    if x.dtype == jnp.uint8:
        x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    if x.dtype not in (jnp.float8_e4m3fn, jnp.int8):
        raise ValueError(f"{op}: x must be float8_e4m3fn, got {x.dtype}; cast it")
    wide = heads_first(x, layout).astype(jnp.float32)
    scale = checked_scale(op, scale, wide.shape, channels)
    found = wide * spread(scale, wide.shape, channels)
    return as_given(found.astype(dtype), x.ndim, layout)
