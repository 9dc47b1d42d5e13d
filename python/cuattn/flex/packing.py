# SPDX-License-Identifier: Apache-2.0
"""What a functor of `sm90` is compiled for beside its functions: packed heads, and keys in blocks.

Few queries of a head leave most of a tile's rows empty. Packed, the heads of a group lie in one
tile (row = token * heads + head), which reads their keys once. Next:
cuda/attention/sm90/functor.cuh (where a row asks for its token and head), emit.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._kv_shapes import BLOCK_SIZE_AXIS
from .trace import dtype_name

TILE_ROWS = 128  # of sm90_functor_tile
MOST_PACKED = 64  # heads, by cuattn_flex_add_functor
MIN_BOX_ROWS = 16  # kMinPageRows of tiles.h


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the extents of an array or a stand-in, a shape that may follow a dtype."""
    shape = tuple(getattr(x, "shape", x))
    return shape[1:] if shape and isinstance(shape[0], str) else shape


def is_paged(arguments: dict[str, Any]) -> bool:
    """Whether the keys lie in blocks of a cache."""
    return arguments.get("block_tables") is not None


def heads_kv(arguments: dict[str, Any]) -> int:
    """Return the number of key heads; 0 where shapes are wrong."""
    shape = shape_of(arguments["k"])
    if is_paged(arguments):
        axis = 2 if arguments.get("kv_layout", "nhd") == "nhd" else 1
    elif arguments.get("cu_seqlens_q") is not None:
        axis = 1
    else:
        axis = 1 if arguments.get("layout", "bshd") == "bhsd" else 2
    return shape[axis] if axis < len(shape) else 0


def queries_and_heads(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the queries of the longest sequence and the query heads; 0 where shapes are wrong."""
    shape = shape_of(arguments["q"])
    if arguments.get("cu_seqlens_q") is not None:
        most = arguments.get("max_seqlen_q")
        heads = shape[1] if len(shape) == 3 else 0
        # Not a tensor, which would be read from its device.
        return (int(most), heads) if isinstance(most, (int, np.integer)) else (0, heads)
    if len(shape) != 4:
        return 0, 0
    is_heads_first = arguments.get("layout", "bshd") == "bhsd"
    return (shape[2], shape[1]) if is_heads_first else (shape[1], shape[2])


def filled(rows: int) -> float:
    """Return the share of the rows of tiles that are in use."""
    return rows / (-(-rows // TILE_ROWS) * TILE_ROWS)


def packed_heads(arguments: dict[str, Any], found: dict[str, Any]) -> int:
    """Return how many query heads share a tile, by the rule of src/attention/sm90_tile.cpp.

    Lists and row ranges in `found` must be the same for the heads of a group.
    """
    queries, heads = queries_and_heads(arguments)
    of_keys = heads_kv(arguments)
    if queries < 1 or of_keys < 1 or heads % of_keys:
        return 1
    group = heads // of_keys
    axes = {"row_begin": -2, "row_end": -2, "block_starts": 1}
    if any(found[name].shape[axis] > 1 for name, axis in axes.items() if name in found):
        return 1
    if group > MOST_PACKED or TILE_ROWS % group or filled(queries) >= 0.9 * filled(queries * group):
        return 1
    return group


def reads_blocks(arguments: dict[str, Any], found: dict[str, Any], tile_n: int) -> bool:
    """Whether the kernel brings keys from their blocks, as src/attention/plan.cpp decides it.

    Other caches are gathered first.
    """
    if not is_paged(arguments) or "row_begin" in found:
        return False
    layout = arguments.get("kv_layout", "nhd")
    if layout not in ("nhd", "hnd"):
        return False
    return math.gcd(tile_n, shape_of(arguments["k"])[BLOCK_SIZE_AXIS[layout]]) >= MIN_BOX_ROWS


def as_packed(given: dict[str, Any], packed: int, dtype: str) -> dict[str, Any]:
    """Return the call whose plan is that of packed rows: the rows of one head for each group.

    Its arrays are shapes; dtype is that of q where it is one already.
    """
    if packed == 1:
        return given
    given = {n: (dtype_name(x), *x.shape) if hasattr(x, "shape") else x for n, x in given.items()}
    q = given["q"]
    dtype = q[0] if isinstance(q[0], str) else dtype
    *front, heads, dim = shape_of(q)
    is_heads_first = given.get("cu_seqlens_q") is None and given.get("layout", "bshd") == "bhsd"
    if is_heads_first:  # batch, heads, rows, dim
        front, heads = [front[0], front[1] // packed], heads * packed
    else:
        front, heads = [*front[:-1], front[-1] * packed], heads // packed
    more: dict[str, Any] = {"q": (dtype, *front, heads, dim), "sinks": None}
    left, right = given.get("window", (-1, -1))
    if left >= 0:  # as many keys as the rows of a tile see, whose rows are fewer queries
        right = 0 if given.get("causal") else right
        behind = queries_and_heads(given)[0] if right < 0 else right + TILE_ROWS // packed
        more["window"] = (max(left + behind - TILE_ROWS, 0), 0)
    if given.get("cu_seqlens_q") is not None:
        more["max_seqlen_q"] = given["max_seqlen_q"] * packed
    return {**given, **more}
