# SPDX-License-Identifier: Apache-2.0
"""What the ways to attend over rows of several ranks share, and the one of a single rank.

local: the whole sequence is here. gather (gather.py): keys and values of all ranks come, by groups
of heads, and each row attends to them in one call: no merge, the bits of one process. ring
(ring.py): keys and values come rank by rank and what each step finds is merged in float32. Every
scheme gives (out, lse) of the rows of this rank, and (dq, dk, dv, dsinks) for the way back.
Next: autograd.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from .attend import (
    Call,
    Problem,
    attend,
    gradients,
    make_call,
    make_folded_call,
    tokens_of,
)
from .exchange import most_rows
from .layout import Layout, Span
from .pairs import Piece, Window, find_pieces
from .peers import Peers, places_of, shape_of
from .team import Team

Gradients = tuple[Tensor, Tensor, Tensor, "Tensor | None"]


def labelled(name: str) -> contextlib.AbstractContextManager[Any]:
    """Name what is done inside for the profiler, where one looks on."""
    is_seen = torch.autograd._profiler_enabled()
    return record_function(name) if is_seen else contextlib.nullcontext()


def empty_result(problem: Problem, q: Tensor, v: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Make (out, lse) whose rows are all to be written: a query sees its own key at least."""
    rows = q.shape[problem.axis]
    shape = (*q.shape[: problem.axis], q.shape[-2], rows)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    return [out, q.new_empty(shape, dtype=torch.float32)]


def halves(here: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that lie beside each other, as wide as these."""
    keys, values = here.split_with_sizes((k.shape[-1], v.shape[-1]), -1)
    return keys, values


class Pair(NamedTuple):
    """A piece of the rows of this rank and those of an owner."""

    piece: Piece
    runs: tuple[Span, Span, int]  # of queries, of keys, and the first row of the queries
    k_row: int  # the first row of the keys
    rows: slice
    keys: slice
    is_own: bool


@functools.lru_cache(maxsize=256)
def pairs_of(
    layout: Layout,
    rank: int,
    owner: int | None,
    window: Window,
    begins: bytes | None,
    counts: bool = False,
) -> tuple[Pair, ...]:
    """List what `Scheme.calls` pairs; a training step asks for the same again and again."""
    ends = None if begins is None else np.frombuffer(begins, np.int64)
    places = [(0, 0, layout.seqlen)] if owner is None else layout.places(owner)
    found = []
    for token, row, count in layout.places(rank):
        for k_token, k_row, k_count in places:
            runs: tuple[Span, Span, int] = ((token, count), (k_token, k_count), row)
            for piece in find_pieces(*runs[:2], window, ends, counts):
                rows = slice(row + piece.q.start, row + piece.q.stop)
                keys = slice(k_row + piece.k.start, k_row + piece.k.stop)
                is_own = owner is None or k_token == token
                found.append(Pair(piece, runs, k_row, rows, keys, is_own))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def fold_of(layout: Layout, rank: int, owner: int | None, window: Window) -> tuple[int, ...] | None:
    """Say how many keys each run of queries sees, where all runs go into one call; None: not so.

    That is without a mask; and with a causal one where the runs are as long, and the keys are in
    the order of the sequence: all of them, or for the own ones those up to the run's end.
    """
    places = layout.places(rank)
    if not places:
        return None
    if window == (-1, -1):
        return (layout.seqlen if owner is None else layout.rows(owner),)
    counts = {count for _, _, count in places}
    is_own = owner == rank and window == (-1, 0)
    if window[1] != 0 or len(counts) > 1 or not (owner is None or is_own):
        return None
    return tuple(row + count if is_own else token + count for token, row, count in places)


class Fold(NamedTuple):
    """Chunks of packed documents as a batch over all keys: each with the last document in it.

    `rest`: what of a chunk lies in documents before, and other chunks, as (first token, its row on
    the rank, tokens).
    """

    rows: slice  # of the rank
    begins: tuple[int, ...]  # of the keys of each chunk
    ends: tuple[int, ...]
    rest: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=256)
def fold_of_documents(layout: Layout, rank: int, begins: bytes) -> Fold | None:
    """Fold most chunks of a rank that follow each other, as long, causal; None: no two do."""
    chunks = layout.chunks(rank)
    stretches = (list(x) for _, x in itertools.groupby(enumerate(chunks), lambda x: x[1][1]))
    longest = max(stretches, key=len, default=[])
    indices = range(longest[0][0], longest[0][0] + len(longest)) if longest else range(0)
    if len(indices) < 2:
        return None
    starts = np.frombuffer(begins, np.int64)
    firsts, ends, rest, row, at = [], [], [], 0, 0
    for index, (token, count) in enumerate(chunks):
        if index == indices[0]:
            at = row
        left = count
        if index in indices:
            first = int(starts[np.searchsorted(starts, token + count - 1, side="right") - 1])
            firsts.append(first)
            ends.append(token + count)
            left = first - token
        if left > 0:
            rest.append((token, row, left))
        row += count
    rows = slice(at, at + len(indices) * chunks[indices[0]][1])
    return Fold(rows, tuple(firsts), tuple(ends), tuple(rest))


class Scheme:
    """What a scheme needs beside its arrays: the ranks, who holds what, the problem."""

    def __init__(self, team: Team | None, layout: Layout, problem: Problem) -> None:
        self.team, self.layout, self.problem = team, layout, problem
        self.rank = 0 if team is None else team.rank
        self.beside: Callable[[], None] = lambda: None  # what is done when first keys are asked for

    def calls(
        self, q: Tensor, k: Tensor, v: Tensor, owner: int | None
    ) -> Iterator[tuple[Call, slice, slice, bool]]:
        """List the calls of the rows of this rank against those of an owner; None: of all.

        With each the rows of q and of k that it pairs, and whether it is a query's own run of keys,
        which takes the sink.
        """
        problem = self.problem
        begins = None if problem.begins is None else problem.begins.astype(np.int64).tobytes()
        counts = problem.dropout is not None
        for pair in pairs_of(self.layout, self.rank, owner, problem.window, begins, counts):
            k_row, k_count = pair.k_row, pair.runs[1][1]
            row, count = pair.runs[2], pair.runs[0][1]
            q_run = tokens_of(problem, q, slice(row, row + count))
            k_run, v_run = (tokens_of(problem, x, slice(k_row, k_row + k_count)) for x in (k, v))
            call = make_call(problem, pair.piece, q_run, k_run, v_run, pair.runs)
            yield call, pair.rows, pair.keys, pair.is_own

    def forward_calls(
        self, q: Tensor, k: Tensor, v: Tensor, owner: int | None
    ) -> Iterator[tuple[Call, slice, slice, bool]]:
        """List the calls of the way forth: one for all runs of queries where that can be."""
        problem = self.problem
        apart = (problem.slopes, problem.bias, problem.used, problem.dropout)
        is_plain = all(x is None for x in apart)
        if problem.begins is not None and is_plain and owner is None:
            yield from self.calls_of_documents(q, k, v)
            return
        is_plain = is_plain and problem.axis == 1
        lengths = fold_of(self.layout, self.rank, owner, problem.window) if is_plain else None
        if lengths is None or max(lengths) == 0 or (q.shape[0] != 1 and len(lengths) > 1):
            yield from self.calls(q, k, v, owner)
            return
        rows, keys = slice(0, q.shape[problem.axis]), slice(0, max(lengths))
        call = make_folded_call(problem, lengths, q, k, v)
        yield call, rows, keys, owner in (None, self.rank)

    def calls_of_documents(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Call, slice, slice, bool]]:
        """List the calls against all keys: one for all runs, then what it left out."""
        problem = self.problem
        assert problem.begins is not None
        begins = problem.begins.astype(np.int64)
        fold = None
        if problem.window[1] == 0 and not problem.batch_invariant:
            fold = fold_of_documents(self.layout, self.rank, begins.tobytes())
        if fold is None:
            yield from self.calls(q, k, v, None)
            return
        folded = tokens_of(problem, q, fold.rows)
        call = make_folded_call(problem, fold.ends, folded, k, v, fold.begins)
        yield call, fold.rows, slice(0, len(k)), True
        for token, row, count in fold.rest:
            runs: tuple[Span, Span, int] = ((token, count), (0, len(k)), row)
            for piece in find_pieces(*runs[:2], problem.window, begins):
                call = make_call(problem, piece, q[row : row + count], k, v, runs)
                rows = slice(row + piece.q.start, row + piece.q.stop)
                yield call, rows, piece.k, True

    def peers_for(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Peers | None:
        """Return the buffers by which rows of all ranks travel; None: torch.distributed moves."""
        keys = pairs[0][0]
        if self.team is None or not self.team.reads_on(keys.device):
            return None
        shapes = [shape_of(*pair) for pair in pairs]
        size = places_of(shapes, most_rows(self.layout), keys.dtype)[1]
        found: Peers | None = self.team.peers_with(size) if size > 0 else None
        return found

    def keep_keys_whole(self, call: Call) -> None:
        """Have a forward call not split its keys, as the whole, of more rows or heads, does not."""
        if self.problem.batch_invariant and call.name == "attention":
            call.options["num_splits"] = 1

    def differentiate(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        result: tuple[Tensor, Tensor, Tensor, Tensor | None],
        owner: int | None,
        into: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ) -> None:
        """Add the gradients of these rows against those of an owner to float32 sums."""
        for call, rows, keys, is_own in self.calls(q, k, v, owner):
            dout, out, lse, dlse = result
            mine = (
                *(tokens_of(problem, x, rows) for x in (dout, out)),
                lse[..., rows],
                None if dlse is None else dlse[..., rows].contiguous(),
            )
            own_sinks = sinks if is_own else None
            found = gradients(problem, call, mine, own_sinks, q.dtype != torch.float32)
            for whole, part, place in zip(into, found, (rows, keys, keys), strict=False):
                tokens_of(problem, whole, place).add_(part)
            if own_sinks is not None and into[3] is not None:
                into[3].add_(found[3])


class Local(Scheme):
    """The whole sequence is here."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend in one call."""
        out, lse = empty_result(self.problem, q, v, q.dtype)
        for call, rows, _, _ in self.calls(q, k, v, None):
            self.keep_keys_whole(call)
            attend(call, sinks, tokens_of(self.problem, out, rows), lse[..., rows])
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, result: Any
    ) -> Gradients:
        """Differentiate in one call."""
        dsinks = None
        for call, _, _, _ in self.calls(q, k, v, None):
            dq, dk, dv, *rest = gradients(self.problem, call, result, sinks, False)
            return dq, dk, dv, rest[0] if rest else None
        if sinks is not None:
            dsinks = torch.zeros_like(sinks)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dsinks
