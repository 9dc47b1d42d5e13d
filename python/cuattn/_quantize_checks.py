# SPDX-License-Identifier: Apache-2.0
"""What `quantize` refuses before it looks at an element. Next: float8.py."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ._checks import check_flag
from ._rope_scaling import is_number

MODES = ("tensor", "head", "block", "int8")
V_MODES = ("tensor", "head", "channel")


def check_layout(layout: Any) -> None:
    """Refuse a layout before axes are read by it."""
    if not isinstance(layout, str):
        raise TypeError(f"quantize: layout must be a string, got {layout!r}; pass a str")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(
            f"quantize: layout must be 'bshd' or 'bhsd', got {layout!r}; choose one of these"
        )


def check_modes(mode: str, v_mode: str | None, q: Any) -> None:
    """Refuse words that are none, and what packed arrays have no scales for."""
    for name, word, known in (("mode", mode, MODES), ("v_mode", v_mode, V_MODES)):
        if word is None and name == "v_mode":
            continue
        if not (isinstance(word, str) and word in known):
            raise ValueError(
                f"quantize: {name} must be one of {', '.join(map(repr, known))}, got {word!r}; "
                "choose one of these"
            )
        if word in ("block", "int8", "channel") and len(getattr(q, "shape", ())) == 3:
            raise NotImplementedError(
                f"quantize: {name} must be 'head' or 'tensor' for packed arrays, got {word!r}, "
                "whose scales belong to sequences; quantise them one by one"
            )


def check_smoothing(smooth_k: Any, key_mean: Any, scale: Any) -> None:
    """Refuse what says how keys are smoothed and is not of its kind."""
    check_flag("quantize", "smooth_k", smooth_k)
    if key_mean is not None and not hasattr(key_mean, "shape"):
        raise TypeError(
            "quantize: key_mean must be a float32 array [num_heads_kv, head_dim], got "
            f"{type(key_mean).__name__}; make an array of it, in the library of k"
        )
    shape = getattr(key_mean, "shape", (1, 1))
    if len(shape) not in (2, 3):
        raise ValueError(
            "quantize: key_mean must have shape (num_heads_kv, head_dim), got "
            f"{tuple(shape)}; reshape it"
        )
    is_scalar = getattr(scale, "shape", None) == () and not isinstance(scale, np.bool_)
    if scale is None or is_scalar:
        return
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise TypeError(f"quantize: scale must be a number, got {scale!r}; pass that of attention")
    if not is_number(scale):
        raise ValueError(f"quantize: scale must be finite, got {scale!r}; pass that of attention")


def check_mean(mean: Any, batch: int, heads: int, dim: int) -> None:
    """Refuse a mean of the keys of another shape."""
    shape = (heads, dim) if mean is None else tuple(mean.shape)
    if shape[-2:] != (heads, dim) or (len(shape) == 3 and shape[0] not in (1, batch)):
        raise ValueError(
            f"quantize: key_mean must have shape (num_heads_kv, head_dim) = ({heads}, {dim}), got "
            f"{shape}; pass the mean of these keys"
        )


def check_agreement(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Refuse sizes of q, k and v that `attention` would refuse."""
    if q[2] % max(k[2], 1) != 0 or (k[2] == 0) != (q[2] == 0):
        raise ValueError(
            "quantize: q must have a multiple of the heads of k, got "
            f"{q[2]} for {k[2]}; pass keys whose heads divide those of q"
        )
    for name, what, sizes, axis in (
        ("k", "head_dim", (q, k), 3), ("k", "batch", (q, k), 0),
        ("v", "batch", (k, v), 0), ("v", "seqlen", (k, v), 1), ("v", "heads", (k, v), 2),
    ):  # fmt: skip
        wanted, got = (x[axis] for x in sizes)
        if wanted != got:
            raise ValueError(
                f"quantize: {name} must have {what} {wanted} like {'q' if name == 'k' else 'k'}, "
                f"got {got}; pass arrays of one call of attention"
            )


def sizes_of(name: str, x: Any, layout: str) -> tuple[int, int, int, int]:
    """Batch, rows, heads and dim of an array."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) == 3:
        return (1, *shape)
    if len(shape) != 4:
        raise ValueError(
            f"quantize: {name} must have 3 or 4 axes, got shape {shape}; pass [total, heads, dim] "
            "or the axes of layout"
        )
    batch, second, third, dim = shape
    return (batch, second, third, dim) if layout == "bshd" else (batch, third, second, dim)
