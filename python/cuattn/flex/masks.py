# SPDX-License-Identifier: Apache-2.0
"""Ready masks: each function returns a mask function for `flex_attention` or `create_block_mask`.

They count from the bottom right, as `causal=True` and `window=` do: query i stands at key
``i + kv_len - q_len``. Captured arrays may be of any library on the device of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .lengths import parameters

MaskMod = Callable[..., Any]


def causal() -> MaskMod:
    """Return the mask of keys up to the query's own place."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        return kv_idx <= q_idx + kv_len - q_len

    return mask


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """Return the mask of `left` keys before the query's own place to `right` keys after it."""
    require("sliding_window", left=left, right=right)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        distance = q_idx + kv_len - q_len - kv_idx
        return (distance <= left) & (distance >= -right)

    return mask


def document(ids: Any = None, *, cu_seqlens: Any = None) -> MaskMod:
    """Return the mask of keys in the query's own document, of packed sequences.

    Parameters
    ----------
    ids : int array, [seqlen_kv] or [batch, seqlen_kv], optional
        The document of each key's token; the queries are the last tokens, and those before the
        first key count to its document. Where each document is one run of tokens, every row's keys
        are an interval, which costs no more than a window; others are taken too.
    cu_seqlens : int array, [documents + 1], optional
        Where documents begin, instead.

    Raises
    ------
    ValueError
        If not one of the two is given.
    """
    if (ids is None) == (cu_seqlens is None):
        raise ValueError(
            "document: ids or cu_seqlens must be given, got "
            f"{'none' if ids is None else 'both'}; pass the document of each token, or where "
            "documents begin"
        )
    if cu_seqlens is not None:
        begins = np.asarray(cu_seqlens)
        if begins.ndim != 1 or len(begins) < 2 or np.any(begins[1:] < begins[:-1]) or begins[0]:
            raise ValueError(
                f"document: cu_seqlens must rise from 0 in one axis of 2 or more, got shape "
                f"{begins.shape}; pass the running sum of the lengths"
            )
        ids = np.repeat(np.arange(len(begins) - 1, dtype=np.int32), np.diff(begins))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        return ids[q_idx + kv_len - q_len] == ids[kv_idx]

    def mask_of_each(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        return ids[b, q_idx + kv_len - q_len] == ids[b, kv_idx]

    return mask_of_each if len(ids.shape) == 2 else mask


def prefix_lm(prefix: Any) -> MaskMod:
    """Return causal with a prefix that all see: a number, or an int array [batch]."""
    is_array = hasattr(prefix, "shape") and len(prefix.shape) == 1

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        length = prefix[b] if is_array else prefix
        return (kv_idx <= q_idx + kv_len - q_len) | (kv_idx < length)

    return mask


def block_diagonal(size: int) -> MaskMod:
    """Return the mask of keys in the query's own block of `size`, counted from the first key."""
    require("block_diagonal", 1, size=size)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        return (q_idx + kv_len - q_len) // size == kv_idx // size

    return mask


def chunked(size: int) -> MaskMod:
    """Return causal within chunks of `size`."""
    return and_masks(block_diagonal(size), causal())


def dilated(step: int, window: int = -1) -> MaskMod:
    """Return causal at every `step`-th key, as far back as `window` keys; -1 is all.

    The query's own key is one: query at i sees j = i, i - step, ... with j >= i - window, which are
    ``window // step + 1``.
    """
    require("dilated", 1, step=step)
    require("dilated", -1, window=window)
    limit = 2**30 if window < 0 else window

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        distance = q_idx + kv_len - q_len - kv_idx
        return (distance >= 0) & (distance <= limit) & (distance % step == 0)

    return mask


def streaming(window: int, sinks: int = 4) -> MaskMod:
    """Return causal of `window` keys before the query's own place, and the first `sinks`.

    A query at i sees i - window <= j <= i, as `sliding_window` does: ``window + 1`` keys with its
    own. A cache of n recent tokens, as in arXiv:2309.17453, is window = n - 1.
    """
    require("streaming", window=window, sinks=sinks)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        distance = q_idx + kv_len - q_len - kv_idx
        return (distance >= 0) & ((distance <= window) | (kv_idx < sinks))

    return mask


def tree(parents: Any) -> MaskMod:
    """Return the mask of a tree of guesses, for speculative decoding.

    The queries are the nodes of the tree, the last keys are theirs; each sees all keys before, its
    ancestors and itself.

    Parameters
    ----------
    parents : int array, [q_len]
        The parent of each node, which comes before it; -1 has none.

    Raises
    ------
    ValueError
        If a parent does not come before its child.
    """
    parents = np.asarray(parents)
    nodes = np.arange(len(parents))
    if parents.ndim != 1 or not len(parents) or np.any((parents >= nodes) | (parents < -1)):
        raise ValueError(
            f"tree: parents must name earlier nodes, or -1, got {parents}; number the nodes from "
            "the root on"
        )
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        node = kv_idx - (kv_len - q_len)
        return (node < 0) | sees[q_idx, node]

    return mask


def and_masks(*masks: MaskMod) -> MaskMod:
    """Return what all of some masks see."""
    return joined(masks, lambda x, y: x & y)


def or_masks(*masks: MaskMod) -> MaskMod:
    """Return what any of some masks sees."""
    return joined(masks, lambda x, y: x | y)


def not_mask(mask: MaskMod) -> MaskMod:
    """Return what a mask does not see."""
    require_functions("not_mask", mask)
    asks = with_lengths(mask)
    return lambda b, h, q_idx, kv_idx, *, q_len, kv_len: ~asks(b, h, q_idx, kv_idx, q_len, kv_len)


def joined(masks: tuple[MaskMod, ...], join: Callable[[Any, Any], Any]) -> MaskMod:
    if not masks:
        raise ValueError("and_masks, or_masks: masks must be given, got none; pass functions")
    require_functions("and_masks, or_masks", *masks)
    asks = [with_lengths(mask) for mask in masks]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any) -> Any:
        seen = asks[0](b, h, q_idx, kv_idx, q_len, kv_len)
        for ask in asks[1:]:
            seen = join(seen, ask(b, h, q_idx, kv_idx, q_len, kv_len))
        return seen

    return mask


def require_functions(name: str, *masks: Any) -> None:
    """Refuse what is no mask function."""
    for mask in masks:
        if not callable(mask):
            raise TypeError(
                f"{name}: a mask must be a function (b, h, q_idx, kv_idx), got "
                f"{type(mask).__name__}; block masks join by & and |"
            )


def with_lengths(mask: MaskMod) -> Callable[..., Any]:
    """Return a mask function that takes both lengths by place, whether it names them or not."""
    asked = parameters(mask)

    def ask(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        lengths = {"q_len": q_len, "kv_len": kv_len}
        return mask(b, h, q_idx, kv_idx, **{name: lengths[name] for name in asked})

    return ask


def require(name: str, least: int = 0, /, **given: int) -> None:
    """Refuse numbers below `least`."""
    for argument, x in given.items():
        if isinstance(x, bool) or not hasattr(x, "__index__") or x < least:
            raise ValueError(
                f"{name}: {argument} must be a whole number >= {least}, got {x!r}; it counts keys"
            )


__all__ = [
    "and_masks",
    "block_diagonal",
    "causal",
    "chunked",
    "dilated",
    "document",
    "not_mask",
    "or_masks",
    "prefix_lm",
    "sliding_window",
    "streaming",
    "tree",
]
