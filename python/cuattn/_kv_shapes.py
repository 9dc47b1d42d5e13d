# SPDX-License-Identifier: Apache-2.0
"""Shapes of caches in blocks, and the sizes that they may have."""

from __future__ import annotations

import operator
from typing import Any

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
BLOCK_SIZE_AXIS = {"nhd": 1, "hnd": 2, "vllm": 3}  # of k_cache
KV_LAYOUTS = tuple(BLOCK_SIZE_AXIS)


def whole(op: str, name: str, value: Any) -> int:
    """Read an argument that must be an integer."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{op}: {name} must be an integer, got {value!r}; pass an int")


def dtype_name(op: str, dtype: Any) -> str:
    """Name a dtype given as a word or as the object of numpy, torch or CuPy."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = name or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(
            f"{op}: dtype must be one of {', '.join(ITEM_BYTES)}, got {name}; choose one of these"
        )
    return name


def cache_shapes(
    num_blocks: int, block_size: int, num_heads_kv: int, head_dim: int, dtype: str, kv_layout: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer."""
    if kv_layout == "nhd":
        shape: tuple[int, ...] = (num_blocks, block_size, num_heads_kv, head_dim)
        return shape, shape
    if kv_layout == "hnd":
        shape = (num_blocks, num_heads_kv, block_size, head_dim)
        return shape, shape
    x = 16 // ITEM_BYTES[dtype]
    return (
        (num_blocks, num_heads_kv, head_dim // x, block_size, x),
        (num_blocks, num_heads_kv, head_dim, block_size),
    )


def check_positive(op: str, sizes: dict[str, int]) -> None:
    """Raise for sizes that nothing can have."""
    for name, size in sizes.items():
        if whole(op, name, size) < 1:
            raise ValueError(f"{op}: {name} must be >= 1, got {size}; give the real number")


def check_blocks(op: str, block_size: int, head_dim: int, dtype: str, kv_layout: str) -> None:
    """Raise for blocks that no kernel takes."""
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(
            f"{op}: kv_layout must be 'nhd', 'hnd' or 'vllm', got {kv_layout!r}; choose one "
            "of these"
        )
    multiple = 16 if dtype == "float8_e4m3fn" else 8
    if head_dim % multiple != 0:
        raise ValueError(
            f"{op}: head_dim must be a multiple of {multiple} for {dtype}, got {head_dim}; "
            "pad the heads with zeros"
        )
    if block_size > 256:
        raise ValueError(
            f"{op}: block_size must be at most 256, got {block_size}; that is what the kernels take"
        )
    if kv_layout == "vllm" and block_size not in (8, 16, 32):
        raise ValueError(
            f"{op}: block_size must be 8, 16 or 32 for kv_layout 'vllm', got {block_size}; "
            "or use 'nhd'"
        )


def head_dim_of_values(shape: Any, kv_layout: str | None) -> Any:
    """Return head_dim of v, rows (kv_layout None) or a cache; vllm's ends with a block's tokens."""
    return shape[-2 if kv_layout == "vllm" else -1]
