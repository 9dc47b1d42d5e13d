# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence lie on which rank.

A sequence is cut into chunks, by name of equal length, the last ones shorter or empty, and each
chunk has an owner. A rank holds its chunks in the order of the sequence. With an inner group (two
levels) the owners are the ranks of the outer group, and what an owner holds is cut once more, in
order, into a part for each inner rank. Next: deal.py, pairs.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .deal import TILE, deal_documents, places_of

Span = tuple[int, int]  # where tokens begin in the sequence, and how many there are


class Layout:
    """The tokens of each rank of a group.

    Parameters
    ----------
    kind : {"contiguous", "zigzag"}
        "contiguous": rank r has the r-th of `size` chunks. "zigzag": of 2 * size chunks it has
        those numbered r and 2 * size - 1 - r, which balances causal masks.
    seqlen : int
        Tokens of the whole sequence, any number from 0 on.
    size : int or (int, int)
        Ranks of the group; for two levels those of the inner and of the outer group. Rank
        ``outer * size[0] + inner`` is then the inner rank of that outer rank.
    chunk : int, optional
        Tokens of a chunk; None: the least multiple of 128 that suffices.

    Raises
    ------
    ValueError
        An unknown kind, a negative length, no rank, or a chunk that is too short.

    Examples
    --------
    >>> from cuattn.parallel import Layout
    >>> Layout("zigzag", 1000, 2).chunks(0)
    [(0, 256), (768, 232)]
    >>> Layout("zigzag", 8, 2, chunk=2).positions(1).tolist()
    [2, 3, 4, 5]
    """

    def __init__(
        self, kind: str, seqlen: int, size: int | tuple[int, int], *, chunk: int | None = None
    ) -> None:
        inner, outer = size if isinstance(size, tuple) else (1, size)
        if kind not in ("contiguous", "zigzag"):
            raise ValueError(
                f"Layout: kind must be 'contiguous' or 'zigzag', got {kind!r}; choose one, or take "
                "Layout.balanced for documents"
            )
        if inner < 1 or outer < 1:
            raise ValueError(f"Layout: size must be >= 1, got {size}; count the ranks")
        owners = [*range(outer)]
        if kind == "zigzag":
            owners += owners[::-1]
        self._set(kind, seqlen, inner, outer, chunk, owners)

    def _set(
        self,
        kind: str,
        seqlen: int,
        inner: int,
        outer: int,
        chunk: int | None,
        owners: Sequence[int],
    ) -> None:
        for name, n in (("seqlen", seqlen), ("size", outer), ("size", inner), ("chunk", chunk)):
            if n is not None and not hasattr(n, "__index__"):
                raise TypeError(f"Layout: {name} must be an integer, got {n!r}; pass an int")
        if seqlen < 0:
            raise ValueError(f"Layout: seqlen must be >= 0, got {seqlen}; count the tokens")
        if chunk is None:
            parts = max(len(owners), 1)
            chunk = -(-seqlen // (parts * TILE)) * TILE
        if chunk < 0 or chunk * len(owners) < seqlen:
            raise ValueError(
                f"Layout: chunk must be at least {-(-seqlen // max(len(owners), 1))} for seqlen "
                f"{seqlen} in {len(owners)} chunks, got {chunk}; leave it out"
            )
        ends = [min((index + 1) * chunk, seqlen) for index in range(len(owners))]
        self._fill(kind, seqlen, (inner, outer), chunk, owners, ends)

    def _fill(
        self,
        kind: str,
        seqlen: int,
        sizes: tuple[int, int],
        chunk: int,
        owners: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.kind, self.seqlen, (self.inner, self.outer) = kind, seqlen, sizes
        self.chunk, self.owners, self.ends = chunk, tuple(owners), tuple(ends)
        self.size = self.inner * self.outer
        self._key = (seqlen, *sizes, self.ends, self.owners)
        self._hash = hash(self._key)  # a call asks for it often, and chunks may be many

    @classmethod
    def _of(cls, kind: str, size: int, owners: Sequence[int], ends: Sequence[int]) -> Layout:
        """Make a layout of chunks of any length, each given by its owner and where it ends."""
        layout = cls.__new__(cls)
        layout._fill(kind, ends[-1] if ends else 0, (1, size), 0, owners, ends)
        return layout

    @classmethod
    def balanced(cls, cu_seqlens: Any, size: int, *, chunk: int = 1024) -> Layout:
        """Deal packed documents so that each rank has as many tokens and as many visible pairs.

        Documents stay whole where that can be: what lies on one rank needs no keys of others. Pairs
        are those of a causal mask, of which no rank gets more than 1.03 of the mean but where
        chunks are too coarse for that.

        Parameters
        ----------
        cu_seqlens : int array, [documents + 1]
            Where documents begin in the packed sequence; from 0 to its length.
        size : int
            Ranks of the group.
        chunk : int
            Tokens of a chunk of a document that is cut, 1024 to 8192 for long sequences.

        Raises
        ------
        ValueError, TypeError
            Offsets that are none, no rank, or a chunk of no token.
        """
        begins = check_offsets("Layout.balanced", cu_seqlens)
        for name, n in (("size", size), ("chunk", chunk)):
            if not hasattr(n, "__index__"):
                raise TypeError(
                    f"Layout.balanced: {name} must be an integer, got {n!r}; pass an int"
                )
        if size < 1 or chunk < 1:
            raise ValueError(
                f"Layout.balanced: size and chunk must be >= 1, got {size} and {chunk}; count the "
                "ranks and the tokens of a chunk"
            )
        runs = deal_documents(begins, size, int(chunk))
        return cls._of("balanced", size, [run.rank for run in runs], [run.end for run in runs])

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        size = self.size if self.inner == 1 else (self.inner, self.outer)
        chunk = f"chunk={self.chunk}" if self.chunk else f"chunks={len(self.ends)}"
        return f"Layout({self.kind!r}, seqlen={self.seqlen}, size={size}, {chunk})"

    def outer_layout(self) -> Layout:
        """Return the layout of the outer group alone."""
        layout = Layout.__new__(Layout)
        layout._fill(self.kind, self.seqlen, (1, self.outer), self.chunk, self.owners, self.ends)
        return layout

    @functools.lru_cache(maxsize=1024)  # noqa: B019  small, and layouts are few
    def spans(self, rank: int) -> tuple[Span, ...]:
        """List the runs of tokens of a rank: its chunks, those that touch as one."""
        if not 0 <= rank < self.size:
            raise ValueError(f"Layout: rank must lie in [0, {self.size}), got {rank}")
        runs: list[Span] = []
        for begin, count in self._chunks_of(rank):
            if runs and sum(runs[-1]) == begin:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((begin, count))
        return tuple(runs)

    def _chunks_of(self, rank: int) -> list[Span]:
        outer, inner = divmod(rank, self.inner)
        chunks = zip((0, *self.ends), self.ends, self.owners, strict=False)
        spans = [(begin, end - begin) for begin, end, owner in chunks if owner == outer]
        spans = [(begin, count) for begin, count in spans if count > 0]
        if self.inner == 1:
            return spans
        total = sum(count for _, count in spans)
        part = -(-total // self.inner)
        return slice_spans(spans, inner * part, min((inner + 1) * part, total))

    def chunks(self, rank: int) -> list[Span]:
        """List the chunks of a rank as (first token, tokens), in the order in which it holds them.

        Parameters
        ----------
        rank : int
            From 0 to size - 1.
        """
        self.spans(rank)  # which refuses a rank that is none
        return self._chunks_of(rank)

    def rows(self, rank: int) -> int:
        """Count the tokens of a rank."""
        return sum(count for _, count in self.spans(rank))

    def positions(self, rank: int, cu_seqlens: Any = None) -> np.ndarray:
        """Return the place of each token of a rank in the sequence, or in its document.

        Parameters
        ----------
        rank : int
            From 0 to size - 1.
        cu_seqlens : int array, [documents + 1], optional
            Where documents begin: places are then counted from there, as rotary embedding needs it.

        Returns
        -------
        int32 array, [tokens of the rank]
        """
        spans = [np.arange(begin, begin + count) for begin, count in self.spans(rank)]
        rows = np.concatenate([np.zeros(0, np.int64), *spans])
        if cu_seqlens is not None:
            rows = places_of(check_offsets("Layout.positions", cu_seqlens, self.seqlen))[rows]
        return rows.astype(np.int32)

    def shard(self, x: Any, rank: int, dim: int = 1) -> Any:
        """Take the tokens of a rank out of a whole sequence.

        Parameters
        ----------
        x : array
            Of numpy or torch, with `seqlen` tokens on axis `dim`.
        rank : int
            From 0 to size - 1.
        dim : int
            The axis of tokens.

        Returns
        -------
        array like x
            A copy of the rows of the rank, in its order.

        Raises
        ------
        ValueError
            Another extent of that axis than seqlen.
        """
        if x.shape[dim] != self.seqlen:
            raise ValueError(
                f"Layout.shard: x must have {self.seqlen} tokens on axis {dim}, got shape "
                f"{tuple(x.shape)}; pass the whole sequence, or another dim"
            )
        axis = dim % x.ndim
        parts = [slice_of(x, axis, begin, begin + count) for begin, count in self.spans(rank)]
        return concatenate(parts or [slice_of(x, axis, 0, 0)], axis)

    def unshard(self, x: Any, group: Any = None, dim: int = 1) -> Any:
        """Put the whole sequence together again.

        Parameters
        ----------
        x : array, or a list of arrays
            The rows of this rank, a torch tensor: all ranks of `group` call this and each gets the
            whole. Or a list of what each rank has, in order of ranks, and no group.
        group : torch.distributed.ProcessGroup, or (inner, outer), optional
            None with a tensor is the default group.
        dim : int
            The axis of tokens.

        Returns
        -------
        array like x
            With `seqlen` tokens on that axis.

        Raises
        ------
        ValueError
            Other tokens than the layout gives a rank, or the group of another layout.
        NotImplementedError
            A tensor that requires grad, in grad mode: no gradient goes through the gather.
        """
        if isinstance(x, (list, tuple)):
            return self._joined(list(x), dim)
        from .exchange import gather_parts

        return self._joined(gather_parts(x, self, group, dim % x.ndim), dim)

    def _joined(self, parts: list[Any], dim: int) -> Any:
        if [x.shape[dim] for x in parts] != [self.rows(r) for r in range(self.size)]:
            raise ValueError(
                f"Layout.unshard: x must hold {[self.rows(r) for r in range(self.size)]} tokens on "
                f"axis {dim}, got {[x.shape[dim] for x in parts]}; give what shard gave each rank"
            )
        axis = dim % parts[0].ndim
        pieces = [
            (token, slice_of(parts[rank], axis, row, row + count))
            for rank in range(self.size)
            for token, row, count in self.places(rank)
        ]
        pieces.sort(key=lambda piece: piece[0])
        return concatenate([x for _, x in pieces] or parts[:1], axis)

    def places(self, rank: int) -> list[tuple[int, int, int]]:
        """List the runs of a rank as (first token, its row on the rank, tokens)."""
        found, row = [], 0
        for begin, count in self.spans(rank):
            found.append((begin, row, count))
            row += count
        return found


def slice_spans(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Cut out the rows from `begin` to `end` of spans that lie end to end."""
    found, row = [], 0
    for first, count in spans:
        low, high = max(begin - row, 0), min(end - row, count)
        if low < high:
            found.append((first + low, high - low))
        row += count
    return found


def check_offsets(function: str, cu_seqlens: Any, seqlen: int | None = None) -> np.ndarray:
    """Read where documents begin; ValueError where these are no offsets."""
    begins = np.asarray(cu_seqlens)
    if begins.ndim != 1 or begins.dtype.kind not in "iu" or len(begins) < 1 or begins[0] != 0:
        raise ValueError(
            f"{function}: cu_seqlens must be integers [documents + 1] that begin with 0, got "
            f"{begins.dtype} of shape {begins.shape}; pass the running sum of the lengths"
        )
    begins = begins.astype(np.int64)
    if (np.diff(begins) < 0).any():
        raise ValueError(
            f"{function}: cu_seqlens must not decrease, got {begins.tolist()[:20]}; pass the "
            "running sum of the lengths"
        )
    if seqlen is not None and begins[-1] != seqlen:
        raise ValueError(
            f"{function}: cu_seqlens must end with the {seqlen} tokens of the whole sequence, got "
            f"{begins[-1]}; it is the same on all ranks and counts all of them"
        )
    return begins


def slice_of(x: Any, axis: int, begin: int, end: int) -> Any:
    """Return a view of the rows from `begin` to `end`."""
    return x[(slice(None),) * axis + (slice(begin, end),)]


def concatenate(parts: list[Any], axis: int) -> Any:
    """Join arrays of numpy or torch in a new one."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    import torch

    return torch.cat(parts, axis)
