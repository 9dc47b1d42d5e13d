# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by an array library's own operations, with the bits of reshape_and_cache.

Products and sums are float32, each rounded, and the result is rounded to the array's dtype.
"""

from __future__ import annotations

from typing import Any

from ._arrays import Operations


def angles(library: Operations, cos: Any, sin: Any, places: Any) -> tuple[Any, Any]:
    """Read the rows of both tables for places of any shape, in float32; past an end, the last."""
    places = places.clip(0, max(0, cos.shape[0] - 1))
    return library.cast(cos[places], "float32"), library.cast(sin[places], "float32")


def rotated(library: Operations, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate x [batch, n, heads, dim] by rows [batch, n or 1, r / 2] of the tables."""
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = (library.cast(x[..., side], "float32") for side in (first, second))
    cos, sin = cos[:, :, None], sin[:, :, None]
    out = library.namespace.empty_like(x)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
