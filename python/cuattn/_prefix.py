# SPDX-License-Identifier: Apache-2.0
"""The prefix of cascade attention: its shapes, and window and ALiBi as a bias over it."""

from __future__ import annotations

import math
from typing import Any

INT32_MAX = 2**31 - 1


def require_library(**arrays: Any) -> None:
    """Refuse what has no methods of an array: it is to be reshaped and sliced."""
    for name, array in arrays.items():
        if hasattr(array, "reshape"):
            continue
        is_bare = hasattr(array, "__dlpack__")
        raise (NotImplementedError if is_bare else TypeError)(
            f"cascade_attention: {name} must be an array that can be reshaped, got "
            f"{type(array).__name__}; pass numpy, torch, CuPy or JAX arrays, or call "
            "paged_attention over block_tables that name the prefix's blocks"
        )


def refuse_codes(op: str, q: Any) -> None:
    """Refuse float8 queries: the prefix has no scales of its own."""
    dtype = str(q.dtype).rpartition(".")[2]
    if dtype in ("float8_e4m3fn", "uint8"):
        raise NotImplementedError(
            f"{op}: q is {dtype}, and prefix and pages have no scales in common; pass "
            "cuattn.dequantize(q, q_scale), or call paged_attention over block_tables that name "
            "the prefix's blocks"
        )


def shape_of(array: Any) -> Any:
    """Return the extents of an array or of a tuple that stands for one; () for what is neither."""
    if isinstance(array, tuple):
        return array[1:] if array and isinstance(array[0], str) else array
    return getattr(array, "shape", ())


def check_shapes(op: str, q: Any, shared_k: Any, shared_v: Any) -> None:
    """Refuse numbers of axes that cannot be meant."""
    for name, shape in (("shared_k", shared_k), ("shared_v", shared_v)):
        if len(shape) != 3:
            raise ValueError(
                f"{op}: {name} must have 3 axes [shared_len, num_heads_kv, head_dim], got "
                f"{tuple(shape)}; reshape it"
            )
    if tuple(shared_k[:1]) != tuple(shared_v[:1]):
        raise ValueError(
            f"{op}: shared_k and shared_v must have equally many tokens, got {shared_k[0]} and "
            f"{shared_v[0]}; slice the longer one"
        )
    if tuple(shared_k[1:]) != tuple(shared_v[1:]):
        raise ValueError(
            f"{op}: shared_v must have shape {tuple(shared_k)} like shared_k, got "
            f"{tuple(shared_v)}; pages have values of head_dim columns, too"
        )
    if len(q) not in (3, 4):
        raise ValueError(
            f"{op}: q must have axes [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, "
            f"num_heads_q, head_dim], got {tuple(q)}; reshape it"
        )


def keys_in_window(shared_len: int, window: tuple[int, int]) -> int:
    """Count the tokens at the end of the prefix that a query may see: none stands before it."""
    return shared_len if window[0] < 0 else min(shared_len, window[0] + 1)


def bias_shape(
    num_seqs: int, q_len: int, heads: int, keys: int, has_window: bool, slopes: int
) -> tuple[Any, ...]:
    """Say dtype and extents of the prefix's bias; `slopes` is the axes of alibi_slopes, or 0."""
    if not slopes:
        return ("bool", 1, 1, num_seqs * q_len, keys)
    varies = has_window or slopes == 2
    return ("float32", 1, heads, num_seqs * q_len if varies else 1, keys)


def tokens_behind(library: Any, context_lens: Any, capacity: int, q_len: int) -> Any:
    """Measure how far each query stands behind the prefix's last token, int32 [num_seqs, q_len]."""
    lens = library.own(context_lens).clip(0, capacity)  # as the kernels read them
    return (lens.reshape(-1, 1) + library.arange(1 - q_len, 1)).clip(0, capacity)


def prefix_bias(
    library: Any, behind: Any, keys: int, left: int, alibi_slopes: Any, heads: int
) -> tuple[Any, Any]:
    """Make the prefix's bias of window and ALiBi, and what is to be subtracted from its lse.

    A key `back` tokens before the prefix's end is ``behind + back`` tokens from a query. As nobody
    stands before that end, -slope * behind is the same for all keys of a query: the softmax does
    not see it, so it is left to the lse, and -slope * back is the same for all queries.
    """
    xp, (num_seqs, q_len) = library.namespace, behind.shape
    visible: Any = None
    if left >= 0:
        back = library.arange(keys - 1, -1, -1)
        visible = behind[:, :, None] + back <= min(left, INT32_MAX)
    if alibi_slopes is None:
        shape = bias_shape(num_seqs, q_len, heads, keys, True, 0)[1:]
        return visible.reshape(*shape), None
    slopes = library.own(alibi_slopes)
    axes = slopes.ndim
    shape = bias_shape(num_seqs, q_len, heads, keys, left >= 0, axes)[1:]
    slopes = slopes.reshape(-1, heads).swapaxes(0, 1)[:, :, None]  # [heads, num_seqs or 1, 1]
    bias = slopes[..., None] * library.arange(1 - keys, 1, dtype="float32")
    if visible is not None:
        bias = xp.where(visible, bias, -math.inf)
    elif axes == 2:
        bias = xp.broadcast_to(bias, (heads, num_seqs, q_len, keys))
    return bias.reshape(*shape), slopes * behind
