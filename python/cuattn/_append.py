# SPDX-License-Identifier: Apache-2.0
"""What the arguments of append_attention may be."""

from __future__ import annotations

from typing import Any

from ._arrays import Operations
from ._kv_shapes import BLOCK_SIZE_AXIS, KV_LAYOUTS
from ._rope import no_pair

array_types: set[type] = set()  # those that were found to be arrays


def check_append(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    block_tables: Any,
    context_lens: Any,
    kv_layout: str,
) -> int:
    """Refuse shapes that do not fit each other; return the tokens of a block."""
    given = {"q": q, "k": k, "v": v, "k_cache": k_cache}
    given |= {"block_tables": block_tables, "context_lens": context_lens}
    for name, array in given.items():
        if type(array) not in array_types:
            check_array(op, name, array)
            array_types.add(type(array))
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(
            f"{op}: kv_layout must be 'nhd', 'hnd' or 'vllm', got {kv_layout!r}; choose one of "
            "these"
        )
    if len(q.shape) not in (3, 4):
        raise ValueError(
            f"{op}: q must have axes [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, "
            f"num_heads_q, head_dim], got {tuple(q.shape)}; reshape it"
        )
    for name, array in (("k", k), ("v", v)):
        if array.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{op}: {name} must have the tokens of q, {list(q.shape[:-2])} before heads and "
                f"head_dim, got {tuple(array.shape)}; give each query its key and value"
            )
    if len(k_cache.shape) != (5 if kv_layout == "vllm" else 4):
        raise ValueError(
            f"{op}: k_cache must be a cache of kv_layout {kv_layout!r}, got shape "
            f"{tuple(k_cache.shape)}; say its layout, or reshape it"
        )
    for name, array, axes in (
        ("block_tables", block_tables, 2),
        ("context_lens", context_lens, 1),
    ):
        if len(array.shape) != axes or array.shape[0] != q.shape[0]:
            raise ValueError(
                f"{op}: {name} must have a row for each of the {q.shape[0]} sequences of q, got "
                f"shape {tuple(array.shape)}; reshape it"
            )
    return int(k_cache.shape[BLOCK_SIZE_AXIS[kv_layout]])


def check_array(op: str, name: str, array: Any) -> None:
    """Refuse what is no array, or cannot be written in place."""
    if not hasattr(array, "shape") or not hasattr(array, "reshape"):
        raise TypeError(
            f"{op}: {name} must be an array that can be reshaped, got {type(array).__name__}; "
            "pass numpy, torch or CuPy arrays"
        )
    if type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise NotImplementedError(
            f"{op}: {name} must not be a JAX array, which cannot be written in place; call "
            "reshape_and_cache, which returns new caches, and paged_attention"
        )


def refuse_gradient(op: str, library: Operations, q: Any) -> None:
    """Raise for a torch tensor that wants a gradient, before anything is written."""
    if library.namespace.__name__ != "torch":
        return
    if q.requires_grad and library.namespace.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: q requires grad, and no gradient goes through a cache; call it under "
            "torch.no_grad(), or pass q.detach()"
        )


def check_lengths(op: str, lens: Any, capacity: int) -> None:
    """Refuse lengths that lie apart, and on the CPU those that the tables cannot hold.

    What turns q by places and what attends read them, and would refuse them in other names.
    """
    is_torch = hasattr(lens, "is_contiguous")
    if not (lens.is_contiguous() if is_torch else lens.flags.c_contiguous):
        step = lens.stride(0) if is_torch else lens.strides[0] // lens.itemsize
        raise ValueError(
            f"{op}: context_lens must be contiguous, got strides ({step},); make a contiguous copy"
        )
    if int(lens.__dlpack_device__()[0]) != 1 or lens.shape[0] == 0:
        return
    if not 0 <= float(lens.min()) <= float(lens.max()) <= capacity:
        raise ValueError(
            f"{op}: context_lens must be from 0 to {capacity}, the tokens of block_tables, got "
            f"{lens.tolist()}; give the sequences more blocks"
        )


def check_rope(
    op: str, library: Operations, rope: Any, positions: Any, tokens: tuple[int, ...], q: Any
) -> tuple[Any, Any]:
    """Refuse tables and positions that cannot be meant; return cos and sin in q's library."""
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise TypeError(no_pair(op, rope))
    for table in rope:
        if not hasattr(table, "__dlpack__"):
            raise TypeError(
                f"{op}: rope must be two arrays (cos, sin), got {type(table).__name__} among them; "
                "convert it first"
            )
    cos, sin = (library.own(table) for table in rope)
    shape = tuple(cos.shape)
    fits = len(shape) == 2 and shape[0] > 0 and 2 * shape[1] <= q.shape[-1]
    if not fits or tuple(sin.shape) != shape:
        raise ValueError(
            f"{op}: rope must be cos and sin of one shape [max_position, rotary_dim / 2] with "
            f"rotary_dim at most {q.shape[-1]}, got {shape} and {tuple(sin.shape)}; slice them"
        )
    if positions is not None and tuple(positions.shape) != tokens:
        raise ValueError(
            f"{op}: rope_positions must be int64 {list(tokens)} like the tokens of q, got shape "
            f"{tuple(positions.shape)}; reshape it"
        )
    return cos, sin
