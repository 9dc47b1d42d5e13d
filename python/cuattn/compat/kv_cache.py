# SPDX-License-Identifier: Apache-2.0
"""What flash_attn_with_kvcache is made of: new tokens written, rotated on the way, then attention.

`reshape_and_cache` writes, and rotates k, and q in an array of its own: no kernel rotates it inside
attention yet. Nothing here waits for the device.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention, attention_varlen, paged_attention, reshape_and_cache
from .._rope import rotated
from .arguments import are_looked_at, check_ints, check_range, check_tensors, cut, in_eights
from .pages import LARGEST, Pages, can_be_cut

FEW_ROWS = 64  # queries x heads of a group that the kernels for decoding take
COARSE = 16  # tokens of a page from which on they read rows as pages


class Cache(NamedTuple):
    """The arguments of flash_attn_with_kvcache that say where the keys and values lie."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None


class Rotary(NamedTuple):
    """Those that say how k and q are rotated."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


def append_and_attend(
    op: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache,
    rotary: Rotary,
    options: dict[str, Any],
) -> Any:
    """Write k and v behind the first `cache.seqlens` tokens, then attend to all of them."""
    check_cache(op, q, cache)
    check_new(op, q, k, v, cache)
    capacity = cache.k.shape[1]
    if cache.block_table is not None:
        capacity *= cache.block_table.shape[1]
    check_rotary(op, q, k, rotary, capacity)
    new = 0 if k is None else k.shape[1]
    seqlens = lengths_of(op, q, cache, capacity, new)
    head_dim = q.shape[-1]
    padded = cache._replace(k=in_eights(cache.k), v=in_eights(cache.v)) if head_dim % 8 else cache
    pages = pages_of(op, q, padded, needed=k is not None or is_indirect(cache))
    total = seqlens + new if new else seqlens.contiguous()
    check_pages(op, cache, total)
    if k is not None and v is not None:
        assert pages is not None
        moves = options["causal"] or options["window"] != (-1, -1)
        written = pages
        if cache.leftpad is not None:  # pages of one token name every token of the cache
            written = Pages(op, padded.k, padded.v, pages.table)
        if written.alternate():
            raise NotImplementedError(
                f"{op}: k_cache and v_cache are written, so that entries of more than {LARGEST} "
                f"tokens must not lie k, v, k, v in memory, got {cache.k.shape[1]} tokens; pass "
                "caches of their own, or shorter pages"
            )
        q = write(in_eights(q), in_eights(k), in_eights(v), written, seqlens, total, rotary, moves)
    if cache.leftpad is not None:
        total = total.clamp(max=capacity) - cache.leftpad
    result = attend(in_eights(q), padded, pages, total, options)
    if new and head_dim % 8:
        cache.k.copy_(padded.k[..., :head_dim])
        cache.v.copy_(padded.v[..., :head_dim])
    return cut(result, head_dim)


def check_cache(op: str, q: Tensor, cache: Cache) -> None:
    """Refuse caches that do not fit q or each other, and indices that do not fit them."""
    batch, heads, head_dim = q.shape[0], cache.k.shape[2], q.shape[-1]
    if cache.k.shape != cache.v.shape or cache.k.shape[-1] != head_dim:
        raise ValueError(
            f"{op}: k_cache and v_cache must have the same shape, with the head_dim {head_dim} of "
            f"q, got {tuple(cache.k.shape)} and {tuple(cache.v.shape)}; pass [batch_cache, "
            "seqlen_cache, num_heads_k, head_dim]"
        )
    if heads == 0 or q.shape[2] % heads:
        raise ValueError(
            f"{op}: q must have a multiple of the {heads} heads of k_cache, got {q.shape[2]}; "
            "repeat or drop heads"
        )
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must be {q.dtype} on {q.device} like q, got {x.dtype} on "
                f"{x.device}; convert it with .to()"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name} must be contiguous in its last axis, got strides {x.stride()}; pass "
                f"{name}.contiguous()"
            )
    if cache.block_table is not None:
        check_ints(op, "block_table", cache.block_table, (batch, -1), q)
        for name, x in (("cache_batch_idx", cache.batch_idx), ("cache_leftpad", cache.leftpad)):
            if x is not None:
                raise NotImplementedError(
                    f"{op}: {name} must be None with block_table, as in flash-attn; put it into "
                    "the table, or use a contiguous cache"
                )
        return
    entries = cache.k.shape[0]
    if cache.batch_idx is not None:
        check_ints(op, "cache_batch_idx", cache.batch_idx, (batch,), q)
        rule = f"from 0 to {entries - 1}, the rows of k_cache"
        check_range(op, "cache_batch_idx", cache.batch_idx, 0, entries - 1, rule)
    elif entries < batch:
        raise ValueError(
            f"{op}: k_cache must have the {batch} sequences of q, got {entries}; pass "
            "cache_batch_idx where sequences share a row"
        )


def check_new(op: str, q: Tensor, k: Tensor | None, v: Tensor | None, cache: Cache) -> None:
    """Refuse new keys and values that do not fit the cache, or one without the other."""
    if (k is None) != (v is None):
        raise ValueError(f"{op}: k and v must be given together; pass both or neither")
    if k is None or v is None:
        return
    check_tensors(op, 4, k=k, v=v)
    if cache.seqlens is None:
        raise ValueError(
            f"{op}: cache_seqlens must be given with k and v, got None; pass the tokens that the "
            "cache already has"
        )
    wanted = (q.shape[0], k.shape[1], *cache.k.shape[2:])
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != wanted or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must be {q.dtype} {list(wanted)} on {q.device} like q and k_cache, "
                f"got {x.dtype} {list(x.shape)} on {x.device}; reshape or convert it"
            )
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.shape[1] > 1 and x.shape[2] > 1 and x.stride(2) >= x.stride(1):
            raise NotImplementedError(
                f"{op}: {name} is written, so the heads of a token must lie side by side, got "
                f"strides {x.stride()}; keep the cache as [batch, seqlen, heads, head_dim]"
            )


def check_rotary(op: str, q: Tensor, k: Tensor | None, rotary: Rotary, capacity: int) -> None:
    """Refuse tables that cannot rotate every place of the cache."""
    if rotary.cos is None and rotary.sin is None:
        return
    if rotary.cos is None or rotary.sin is None or k is None:
        raise ValueError(
            f"{op}: rotary_cos and rotary_sin must be given together, and with k and v; pass all "
            "or none of them"
        )
    shape = tuple(rotary.cos.shape)
    fits = len(shape) == 2 and shape[0] >= capacity and 2 * shape[1] <= q.shape[-1]
    if not fits:
        raise ValueError(
            f"{op}: rotary_cos must be [seqlen_ro, rotary_dim / 2], seqlen_ro at least the "
            f"{capacity} tokens of the cache, rotary_dim at most {q.shape[-1]}, got {shape}; make "
            "the tables longer, or the cache shorter"
        )
    for name, x in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        if tuple(x.shape) != shape or not x.dtype.is_floating_point or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must be a float tensor {list(shape)} on {q.device}, got {x.dtype} "
                f"{list(x.shape)} on {x.device}; make both tables alike"
            )


def lengths_of(op: str, q: Tensor, cache: Cache, capacity: int, new: int) -> Tensor:
    """Return the tokens of each sequence before the new ones: int32 [batch], on the device."""
    batch, given = q.shape[0], cache.seqlens
    if not isinstance(given, Tensor):
        try:
            length = capacity if given is None else operator.index(given)
        except TypeError:
            raise TypeError(
                f"{op}: cache_seqlens must be an int or an int32 tensor, got {given!r}; pass "
                "torch.tensor(lengths, dtype=torch.int32, device=q.device)"
            ) from None
        if not 0 <= length <= capacity - new:
            raise ValueError(
                f"{op}: cache_seqlens must be from 0 to {capacity - new}, so that the {new} new "
                f"tokens fit into the cache of {capacity}, got {length}; make the cache larger"
            )
        seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    else:
        check_ints(op, "cache_seqlens", given, (batch,), q)
        rule = f"from 0 to {capacity - new}, the cache of {capacity} less {new} new tokens"
        check_range(op, "cache_seqlens", given, 0, capacity - new, rule)
        seqlens = given
    if cache.leftpad is not None:
        check_ints(op, "cache_leftpad", cache.leftpad, (batch,), q)
        rule = "from 0 to cache_seqlens"
        check_range(op, "cache_leftpad", cache.leftpad, 0, seqlens, rule)
    return seqlens


def check_pages(op: str, cache: Cache, total: Tensor) -> None:
    """Refuse pages that are not there, before anything is written to others."""
    if cache.block_table is None or not are_looked_at(cache.block_table):
        return
    entries, tokens = cache.k.shape[:2]
    begins = torch.arange(cache.block_table.shape[1], device=total.device) * tokens
    table = torch.where(begins < total[:, None], cache.block_table, 0)
    rule = f"from 0 to {entries - 1}, the pages of k_cache, where a sequence has tokens"
    check_range(op, "block_table", table, 0, entries - 1, rule)


def is_indirect(cache: Cache) -> bool:
    """Whether sequences do not simply begin where the rows of a contiguous cache do."""
    return any(x is not None for x in (cache.block_table, cache.batch_idx, cache.leftpad))


def is_few(q: Tensor, cache: Cache) -> bool:
    """Whether the kernels for decoding, which read pages, take these queries."""
    return q.shape[1] * (q.shape[2] // cache.k.shape[2]) <= FEW_ROWS


def pages_of(op: str, q: Tensor, cache: Cache, needed: bool) -> Pages | None:
    """View the cache as pages: its own, or the row of each sequence cut into some.

    None where they are not needed and the rows do not lie so that they can be cut.
    """
    if cache.block_table is not None:
        return Pages(op, cache.k, cache.v, cache.block_table.contiguous())
    rows = cache.batch_idx
    if rows is None:
        if not needed and not can_be_cut(cache.k, cache.v):
            return None
        rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    table = rows.contiguous()[:, None]
    return Pages(op, cache.k, cache.v, table, cache.leftpad is not None)


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    seqlens: Tensor,
    total: Tensor,
    rotary: Rotary,
    moves: bool,
) -> Tensor:
    """Write k and v behind the first seqlens tokens, up to `total`, k rotated; return q alike.

    Token i of q stands at place seqlens + i where `moves`, else all at seqlens.
    """
    count = k.shape[1]
    turning: dict[str, Any] = {}
    if rotary.cos is not None:
        turning = rows_of(rotary, places_of(seqlens, count))
        wanted = q.shape[1] if moves else 1
        others = turning if wanted == count else rows_of(rotary, places_of(seqlens, wanted))
        if wanted != q.shape[1]:  # one place for all tokens of a sequence
            same = others["positions"][:, None].expand(q.shape[:2])
            others = {**others, "positions": same.flatten()}
        q = rotated(q, **others, interleaved=rotary.interleaved)
        turning["rope_interleaved"] = rotary.interleaved
    if k.shape[0] * count:  # caches and tables have a row at least
        reshape_and_cache(
            k.flatten(0, 1),
            v.flatten(0, 1),
            pages.k,
            pages.v,
            block_tables=pages.tables(),
            context_lens=total,
            **turning,
        )
    return q


def rows_of(rotary: Rotary, places: Tensor) -> dict[str, Tensor]:
    """Read the rows of both tables for places [batch, n], in float32; past the end, the last."""
    assert rotary.cos is not None
    assert rotary.sin is not None
    places = places.flatten().clamp(0, rotary.cos.shape[0] - 1)
    return {
        "cos": rotary.cos[places].float(),
        "sin": rotary.sin[places].float(),
        "positions": torch.arange(places.shape[0], device=places.device),
    }


def places_of(seqlens: Tensor, count: int) -> Tensor:
    """Return the places of the tokens behind the first `seqlens`, int64 [batch, count]."""
    return seqlens[:, None] + torch.arange(count, device=seqlens.device)


def attend(
    q: Tensor, cache: Cache, pages: Pages | None, total: Tensor, options: dict[str, Any]
) -> Any:
    """Attend to the first `total` tokens of each sequence, in pages or in rows."""
    batch, length, heads, _ = q.shape
    if cache.leftpad is not None and cache.batch_idx is None:
        first = cache.leftpad.contiguous()
        keys = {"kv_start": first, "seqused_k": total + first}
        return attention(q, cache.k[:batch], cache.v[:batch], **keys, **options)
    coarse = pages is not None and pages.size >= COARSE and len(pages.k) and is_few(q, cache)
    if pages is None or not (coarse or is_indirect(cache)):
        return attention(q, cache.k[:batch], cache.v[:batch], seqused_k=total, **options)
    tables = pages.tables(cache.leftpad)
    if is_few(q, cache):
        return paged_attention(q, pages.k, pages.v, tables, total, **options)
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    result = attention_varlen(
        q.flatten(0, 1),
        pages.k,
        pages.v,
        ends,
        None,
        length,
        pages.capacity,
        block_tables=tables,
        seqused_k=total,
        **options,
    )
    if not isinstance(result, tuple):
        return result.unflatten(0, (batch, length))
    out, lse = result
    return out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1)
