# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries, by the kernel that rotates keys on their way into a cache."""

from __future__ import annotations

from typing import Any

from ._arrays import Operations
from .kv_cache import reshape_and_cache


def rotated(
    library: Operations,
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool,
    stream: Any = None,
) -> Any:
    """Rotate x [..., heads, dim], token i by row positions[i] of the float32 tables.

    `reshape_and_cache` writes x as keys of one token a block; for values it gets 8 elements of each
    head, which nobody reads.
    """
    rows = x.reshape(-1, *x.shape[-2:])
    if rows.shape[0] == 0:
        return x
    few, empty_like = rows[..., :8], library.namespace.empty_like
    out, unread = empty_like(rows), empty_like(few)
    reshape_and_cache(
        rows,
        few,
        out[:, None],
        unread[:, None],
        library.arange(0, rows.shape[0], dtype="int64"),
        cos=cos,
        sin=sin,
        positions=positions,
        rope_interleaved=interleaved,
        stream=stream,
    )
    return out.reshape(*x.shape)
