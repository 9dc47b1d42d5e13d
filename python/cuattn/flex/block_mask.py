# SPDX-License-Identifier: Apache-2.0
"""BlockMask: which blocks of queries and keys a mask leaves, found without a score in memory.

A block is hidden, asked (the mask decides score by score) or seen. Blocks are classified by bounds
of the mask over each block: work and memory grow with the number of blocks, not of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .._checks import check_flag
from . import masks
from .evaluate import Host, bounds, evaluate, on_host
from .trace import Traced, trace
from .tracers import is_jax_tracer

HIDDEN, ASKED, SEEN = 0, 1, 2
IntArray = np.ndarray[Any, Any]
MAX_BLOCKS = 2**28  # more would not fit where they are classified


class Lists(NamedTuple):
    """Of each row of blocks those that are not hidden, from the last to the first.

    starts : int32 [batch or 1, heads or 1, rows + 1]
    entries : int32, 2 * block, and 1 more where the mask is to be asked; those of row i are
        entries[starts[i]:starts[i + 1]].
    """

    starts: IntArray
    entries: IntArray


def lists_of(states: np.ndarray[Any, Any]) -> Lists:
    """Return the lists of states [batch or 1, heads or 1, rows, columns]."""
    rows, columns = states.shape[2:]
    flipped = states[..., ::-1]
    place = np.nonzero(flipped)
    asked = flipped[place] == ASKED
    entries = (2 * (columns - 1 - place[3]) + asked).astype(np.int32)
    counts = np.count_nonzero(states, axis=3).reshape(-1)
    running = np.concatenate([[0], np.cumsum(counts)])
    first = np.arange(states.shape[0] * states.shape[1])[:, None] * rows
    starts = running[first + np.arange(rows + 1)].astype(np.int32)
    return Lists(starts.reshape(*states.shape[:2], rows + 1), entries)


def ranges(length: int, block: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last index of each block."""
    first = np.arange(0, length, block)
    return first, np.minimum(first + block, length) - 1


class Shape(NamedTuple):
    """What a mask is for."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_kv: int


def cells(traced: Traced, shape: Shape) -> tuple[int, int]:
    """Return for how many sequences and heads a mask differs."""
    batch = shape.batch if "b" in traced.expr.free else 1
    return batch, shape.num_heads if "h" in traced.expr.free else 1


def classify(traced: Traced, shape: Shape, block: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Return the states [batch or 1, heads or 1, query blocks, key blocks], by bounds."""
    host = Host(traced)
    (q_first, q_last), (k_first, k_last) = (
        ranges(n, m) for n, m in zip(shape[2:], block, strict=True)
    )
    batch, heads = cells(traced, shape)
    if batch * heads * len(q_first) * len(k_first) > MAX_BLOCKS:
        raise ValueError(
            f"create_block_mask: blocks must be at most 2^28 in all, got {batch} x {heads} x "
            f"{len(q_first)} x {len(k_first)}; take a larger block_size"
        )
    states = np.zeros((batch, heads, len(q_first), len(k_first)), np.uint8)
    if states.size == 0:
        return states
    lengths = {"q_len": shape.seqlen_q, "kv_len": shape.seqlen_kv}
    boxes: dict[str, Any] = {name: (np.int64(n), np.int64(n)) for name, n in lengths.items()}
    boxes["q"] = q_first[:, None], q_last[:, None]
    boxes["k"] = k_first[None, :], k_last[None, :]
    for b in range(batch):
        for h in range(heads):
            boxes["b"], boxes["h"] = (np.int64(b),) * 2, (np.int64(h),) * 2
            surely, possibly = bounds(host, traced.expr, boxes)
            states[b, h] = np.where(surely, SEEN, np.where(possibly, ASKED, HIDDEN))
    return states


def refine(
    traced: Traced, shape: Shape, block: tuple[int, int], states: np.ndarray[Any, Any]
) -> None:
    """Evaluate every score of the blocks that bounds leave to be asked."""
    host = Host(traced)
    lengths = {"q_len": shape.seqlen_q, "kv_len": shape.seqlen_kv}
    for b, h, i, j in np.argwhere(states == ASKED):
        q = np.arange(i * block[0], min((i + 1) * block[0], shape.seqlen_q))[:, None]
        k = np.arange(j * block[1], min((j + 1) * block[1], shape.seqlen_kv))[None, :]
        seen = evaluate(host, traced.expr, {**lengths, "b": b, "h": h, "q": q, "k": k})
        seen = np.broadcast_to(seen, (len(q), k.shape[1]))
        states[b, h, i, j] = SEEN if seen.all() else ASKED if seen.any() else HIDDEN


class BlockMask:
    """A mask for given lengths, and which blocks of it hold a visible pair.

    Made by `create_block_mask`, `from_dense`, `from_csr` or `from_torch`; ``a & b``, ``a | b`` and
    ``~a`` are masks of the same lengths.

    Attributes
    ----------
    mask_mod : function
        The mask, score by score.
    shape : (batch, num_heads, seqlen_q, seqlen_kv)
    block_size : (int, int)
        Queries and keys of a block.
    states : uint8 array, [batch or 1, num_heads or 1, query blocks, key blocks]
        0 hidden, 1 to be asked, 2 seen.
    """

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        shape: Shape,
        block_size: tuple[int, int],
        states: np.ndarray[Any, Any],
    ):
        self.mask_mod, self.shape, self.block_size = mask_mod, shape, block_size
        self.states = states
        self._within: tuple[Any, BlockMask] | None = None
        self._free: frozenset[str] | None = None  # where mask_mod hides more than states tell
        self._applied: Callable[..., Any] | None = None  # a function that mask_mod hides by

    @cached_property
    def by_query(self) -> Lists:
        """Return the key blocks of each query block."""
        return lists_of(self.states)

    @cached_property
    def by_key(self) -> Lists:
        """Return the query blocks of each key block, as a backward pass reads them."""
        return lists_of(self.states.swapaxes(2, 3))

    def sparsity(self) -> float:
        """Return the share of the blocks that are skipped, from 0 to 1."""
        return float(np.mean(self.states == HIDDEN)) if self.states.size else 0.0

    def to_dense(self) -> np.ndarray[Any, Any]:
        """Return which blocks hold a visible pair, as bool."""
        return self.states != HIDDEN

    @classmethod
    def from_dense(
        cls,
        blocks: Any,
        seqlen_q: int,
        seqlen_kv: int,
        *,
        block_size: int | tuple[int, int] = 128,
        mask_mod: Callable[..., Any] | None = None,
        batch: int | None = None,
        num_heads: int | None = None,
    ) -> BlockMask:
        """Return the mask of the blocks that an array marks.

        Parameters
        ----------
        blocks : bool array, [batch or 1, num_heads or 1, query blocks, key blocks], or the last two
            True keeps a block.
        seqlen_q, seqlen_kv : int
            Lengths of the queries and keys.
        block_size : int or (int, int)
            Queries and keys of a block.
        mask_mod : function, optional
            Hides more, within the blocks.
        batch, num_heads : int, optional
            Where the array has extent 1.

        Raises
        ------
        ValueError
            If the array has not a row and a column for each block.
        """
        block = block_pair("BlockMask.from_dense", block_size)
        dense = np.asarray(blocks)
        dense = dense[None, None] if dense.ndim == 2 else dense
        want = tuple(-(-n // m) for n, m in zip((seqlen_q, seqlen_kv), block, strict=True))
        if dense.ndim != 4 or dense.shape[2:] != want or dense.dtype != np.bool_:
            raise ValueError(
                f"BlockMask.from_dense: blocks must be bool of shape (batch or 1, num_heads or 1, "
                f"{want[0]}, {want[1]}), got {dense.dtype} of shape {dense.shape}; it has an "
                f"element for each {block[0]} queries and {block[1]} keys"
            )
        shape = Shape(batch or dense.shape[0], num_heads or dense.shape[1], seqlen_q, seqlen_kv)
        for name, got, n in zip(("batch", "num_heads"), dense.shape, shape[:2], strict=False):
            if got not in (1, n):
                raise ValueError(
                    f"BlockMask.from_dense: {name} must be {got} for blocks of shape "
                    f"{dense.shape}, got {n}; leave it out"
                )
        mod = dense_mask(dense, block)
        if mask_mod is None:
            states = np.where(dense, SEEN, HIDDEN).astype(np.uint8)
            return cls(mod, shape, block, states)
        states = create_block_mask(mask_mod, *shape, block_size=block).states
        states = np.where(dense, states, np.uint8(HIDDEN))
        made = cls(masks.and_masks(mod, mask_mod), shape, block, states)
        made._applied = mask_mod
        return made

    @classmethod
    def from_csr(
        cls,
        starts: Any,
        columns: Any,
        seqlen_q: int,
        seqlen_kv: int,
        *,
        block_size: int | tuple[int, int] = 128,
        mask_mod: Callable[..., Any] | None = None,
    ) -> BlockMask:
        """Return the mask of blocks in lists, the same for all sequences and heads.

        Parameters
        ----------
        starts : int array, [query blocks + 1]
            Where the list of each query block begins.
        columns : int array
            Key blocks, rising within a list, each once.

        Raises
        ------
        ValueError
            If a list has a block twice, out of order or out of range, or a count beyond the row.
        """
        name, block = "BlockMask.from_csr", block_pair("BlockMask.from_csr", block_size)
        starts, columns = np.asarray(starts), np.asarray(columns)
        rows, blocks = (-(-n // m) for n, m in zip((seqlen_q, seqlen_kv), block, strict=True))
        if starts.shape != (rows + 1,) or columns.ndim != 1 or starts.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: starts must be whole numbers of shape ({rows + 1},), columns of one "
                f"axis, got {starts.dtype} {starts.shape} and {columns.shape}; seqlen_q "
                f"{seqlen_q} has {rows} query blocks of {block[0]}"
            )
        if starts[0] != 0 or np.any(starts[1:] < starts[:-1]) or starts[-1] != len(columns):
            raise ValueError(
                f"{name}: starts must rise from 0 to the {len(columns)} columns, got {starts}; it "
                "is the running sum of the counts"
            )
        if columns.dtype.kind not in "iu" and columns.size:
            raise ValueError(
                f"{name}: columns must be whole numbers, got {columns.dtype}; they number key "
                "blocks"
            )
        if np.any((columns < 0) | (columns >= blocks)):
            wrong = columns[(columns < 0) | (columns >= blocks)][0]
            raise ValueError(
                f"{name}: columns must lie within [0, {blocks}), got {wrong}; seqlen_kv "
                f"{seqlen_kv} has {blocks} key blocks of {block[1]}"
            )
        row = np.repeat(np.arange(rows), np.diff(starts))
        falls = (row[1:] == row[:-1]) & (columns[1:] <= columns[:-1])
        if np.any(falls):
            at = int(np.flatnonzero(falls)[0])
            raise ValueError(
                f"{name}: columns must rise within a query block, each once, got {columns[at]} and "
                f"then {columns[at + 1]} in block {row[at]}; sort them"
            )
        dense = np.zeros((rows, blocks), bool)
        dense[row, columns] = True
        return cls.from_dense(dense, seqlen_q, seqlen_kv, block_size=block, mask_mod=mask_mod)

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """Return the mask of a BlockMask of torch.nn.attention.flex_attention.

        Raises
        ------
        ValueError
            If its lists name a block that there is none of, or count beyond a row.
        """
        name = "BlockMask.from_torch"
        given: Any = tuple(int(n) for n in block_mask.BLOCK_SIZE)
        block = block_pair(name, given)
        lengths = tuple(int(n) for n in block_mask.seq_lengths)
        count = tuple(-(-n // m) for n, m in zip(lengths, block, strict=True))

        def dense(counts: Any, columns: Any) -> Any:
            if counts is None:
                return None
            counts, columns = on_host(counts), on_host(columns)
            most = columns.shape[-1]
            is_used = np.arange(most) < counts[..., None]
            for what, x, n in (
                ("kv_num_blocks", counts, most + 1),
                ("kv_indices", columns[is_used], count[1]),
            ):
                if np.any((x < 0) | (x >= n)):
                    raise ValueError(
                        f"{name}: {what} must lie within [0, {n}), got {x[(x < 0) | (x >= n)][0]}; "
                        f"{lengths[1]} keys have {count[1]} blocks of {block[1]}"
                    )
            out = np.zeros((*counts.shape, count[1]), bool)
            place = np.nonzero(is_used)
            out[(*place[:-1], columns[place])] = True
            return out[..., : count[0], :]

        asked = dense(block_mask.kv_num_blocks, block_mask.kv_indices)
        seen = dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        made = cls.from_dense(asked, *lengths, block_size=block, mask_mod=block_mask.mask_mod)
        if seen is not None:  # where torch does not ask its mask_mod either
            made = made | cls.from_dense(seen, *lengths, block_size=block)
            made._applied = block_mask.mask_mod
        return made

    def __and__(self, other: Any) -> BlockMask:
        return self.joined(other, "&", masks.and_masks, np.minimum)

    def __or__(self, other: Any) -> BlockMask:
        return self.joined(other, "|", masks.or_masks, np.maximum)

    def __invert__(self) -> BlockMask:
        states = (SEEN - self.states).astype(np.uint8)
        return BlockMask(masks.not_mask(self.mask_mod), self.shape, self.block_size, states)

    def joined(self, other: Any, sign: str, mods: Any, states: Any) -> BlockMask:
        """Return a mask of two: their functions and their blocks joined."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.shape != other.shape or self.block_size != other.block_size:
            raise ValueError(
                f"BlockMask: {sign} takes masks of the same (batch, num_heads, seqlen_q, "
                f"seqlen_kv) and block_size, got {tuple(self.shape)}, {self.block_size} and "
                f"{tuple(other.shape)}, {other.block_size}; make them anew"
            )
        mod = mods(self.mask_mod, other.mask_mod)
        return BlockMask(mod, self.shape, self.block_size, states(self.states, other.states))

    def free(self) -> frozenset[str]:
        """Return the indices that its states hang on."""
        return trace(self.mask_mod).expr.free if self._free is None else self._free

    def within(self, mask_mod: Callable[..., Any]) -> BlockMask:
        """Return the mask that hides also what a function hides: no block of it is surely seen.

        The same one as last time, if the function is: plans of calls are kept with it, but no
        function that captures what JAX traces. Itself for the function that it was made of: seen
        blocks are those of the arrays that this captured then.
        """
        if mask_mod is self.mask_mod or mask_mod is self._applied:
            return self
        kept = self._within
        if kept is None or kept[0] is not mask_mod:
            mod = masks.and_masks(self.mask_mod, mask_mod)
            made = BlockMask(mod, self.shape, self.block_size, np.minimum(self.states, ASKED))
            made._free = self.free()
            kept = (mask_mod, made)
            if not any(map(is_jax_tracer, trace(mask_mod).arrays)):
                self._within = kept
        return kept[1]

    def of_tiles(self, tile: tuple[int, int]) -> BlockMask:
        """Return the same mask in blocks that are whole tiles; those of both kinds are asked."""
        block = tuple(math.lcm(n, m) for n, m in zip(self.block_size, tile, strict=True))
        if block == self.block_size:
            return self
        states = self.states
        for axis, (n, m) in enumerate(zip(self.block_size, block, strict=True), 2):
            first = np.arange(0, states.shape[axis], m // n)
            least, most = (f.reduceat(states, first, axis) for f in (np.minimum, np.maximum))
            states = np.where(least == most, least, np.uint8(ASKED))
        return BlockMask(self.mask_mod, self.shape, (block[0], block[1]), states)

    def rows(self, b: int = 0, h: int = 0, width: int = 64) -> Iterator[str]:
        """List the rows of a picture: '#' seen, '+' asked, '.' hidden."""
        states = self.states[b % self.states.shape[0], h % self.states.shape[1]]
        step = max(1, -(-max(states.shape, default=1) // width))
        for i in range(0, states.shape[0], step):
            line = ""
            for j in range(0, states.shape[1], step):
                part = states[i : i + step, j : j + step]
                line += "#" if (part == SEEN).all() else "+" if part.any() else "."
            yield line

    def __str__(self) -> str:
        head = (
            f"BlockMask of {tuple(self.shape)} (batch, num_heads, seqlen_q, seqlen_kv), blocks of "
            f"{self.block_size}, {100 * self.sparsity():.1f} % skipped"
        )
        return "\n".join([head, *self.rows()])

    __repr__ = __str__


def dense_mask(blocks: np.ndarray[Any, Any], block: tuple[int, int]) -> Callable[..., Any]:
    """Return the mask function of an array of blocks [batch or 1, heads or 1, rows, columns]."""
    batch, heads, rows, _ = blocks.shape
    flat = np.ascontiguousarray(blocks.reshape(-1, blocks.shape[3]))
    per_batch, per_head = (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)
    query_block, key_block = block
    if flat.size == 0:
        return lambda b, h, q_idx, kv_idx: q_idx < 0

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = q_idx // query_block  # b or h times 0 would name an axis that the mask has not
        row = row + b * per_batch if per_batch else row
        return flat[row + h * per_head if per_head else row, kv_idx // key_block]

    def mask_of_all(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return flat[q_idx // query_block, kv_idx // key_block]

    return mask if per_batch or per_head else mask_of_all


def block_pair(name: str, block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the queries and keys of a block."""
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2 or any(
        isinstance(n, bool) or not hasattr(n, "__index__") or n < 64 or n % 64 for n in pair
    ):
        raise ValueError(
            f"{name}: block_size must be a multiple of 64, or a pair of them, got {block_size}; "
            "kernels compute tiles of so many queries and keys"
        )
    return int(pair[0]), int(pair[1])


def create_block_mask(
    mask_mod: Callable[..., Any],
    batch: int | None,
    num_heads: int | None,
    seqlen_q: int,
    seqlen_kv: int,
    *,
    block_size: int | tuple[int, int] = 128,
    exact: bool = False,
) -> BlockMask:
    """Find which blocks of a mask hold a visible pair.

    By bounds over blocks: no array of seqlen_q x seqlen_kv is made, and a block that is called
    hidden or seen is so. Masks that `flex_attention` serves as options or as row ranges need none.

    Parameters
    ----------
    mask_mod : function
        ``mask_mod(b, h, q_idx, kv_idx)`` returns a condition; see `flex_attention`.
    batch, num_heads : int or None
        Of the call (query heads); None is 1, for masks that depend on neither.
    seqlen_q, seqlen_kv : int
        Lengths of the queries and keys.
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 64.
    exact : bool
        Evaluate every score of the blocks that the bounds leave open.

    Raises
    ------
    TypeError
        If the function cannot be traced.
    ValueError
        If a length is negative or block_size is no multiple of 64.
    """
    name = "create_block_mask"
    block = block_pair(name, block_size)
    given = (1 if batch is None else batch, 1 if num_heads is None else num_heads)
    shape = Shape(*given, seqlen_q, seqlen_kv)
    for field, n in zip(Shape._fields, shape, strict=True):
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n < 2**31 - 1024:
            raise ValueError(
                f"{name}: {field} must be a whole number from 0 to 2^31 - 1025, got {n!r}; pass "
                "that of the arrays"
            )
    check_flag(name, "exact", exact)
    traced = trace(mask_mod)
    if any(map(is_jax_tracer, traced.arrays)):
        raise NotImplementedError(
            "create_block_mask: a captured array is traced by JAX, and the host reads its numbers; "
            "make the block mask outside of jit, or give the function as mask_mod="
        )
    states = classify(traced, shape, block)
    if exact:
        refine(traced, shape, block, states)
    return BlockMask(mask_mod, shape, block, states)
