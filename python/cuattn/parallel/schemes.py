# SPDX-License-Identifier: Apache-2.0
"""The ways to attend over a sequence whose rows lie on several ranks, forward and backward.

local: the whole sequence is here. gather: keys and values of all ranks come, by groups of heads,
and each row attends to them in one call: no merge, the bits of one process. ring: keys and values
travel from rank to rank and what each step finds is merged in float32. Every scheme gives (out,
lse) of the rows of this rank, and (dq, dk, dv, dsinks) for the way back. Ring: arXiv:2310.01889;
zigzag and gather in groups of heads: arXiv:2407.21783. Next: autograd.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

import cuattn

from .attend import (
    Call,
    Problem,
    attend,
    gradients,
    heads_of,
    make_call,
    make_folded_call,
    tokens_of,
)
from .exchange import Gathered, Shift, exchange
from .layout import Layout, Span
from .pairs import Piece, Window, find_pieces
from .team import Team

Gradients = tuple[Tensor, Tensor, Tensor, "Tensor | None"]
MOST_GROUPS = 8  # of heads, where float32 sums of all keys go home


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


class Scheme:
    """What a scheme needs beside its arrays: the ranks, who holds what, the problem."""

    def __init__(self, team: Team | None, layout: Layout, problem: Problem) -> None:
        self.team, self.layout, self.problem = team, layout, problem
        self.rank = 0 if team is None else team.rank

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
        is_plain = problem.axis == 1 and all(
            x is None for x in (problem.slopes, problem.bias, problem.used, problem.dropout)
        )
        lengths = fold_of(self.layout, self.rank, owner, problem.window) if is_plain else None
        if lengths is None or max(lengths) == 0 or (q.shape[0] > 1 and len(lengths) > 1):
            yield from self.calls(q, k, v, owner)
            return
        rows, keys = slice(0, q.shape[problem.axis]), slice(0, max(lengths))
        call = make_folded_call(problem, lengths, q, k, v)
        yield call, rows, keys, owner in (None, self.rank)

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


class Gather(Scheme):
    """Keys and values of all ranks come, by groups of heads: the next while one is used."""

    def groups(self, q: Tensor, sizes: tuple[int, ...]) -> list[tuple[slice, slice]]:
        """Cut the heads into groups of so many: (query heads, key heads) of each."""
        share = q.shape[-2] // sum(sizes)
        ends = itertools.accumulate(sizes)
        cuts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return [(slice(c.start * share, c.stop * share), c) for c in cuts]

    def arrivals(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...]
    ) -> Iterator[tuple[slice, slice, Any]]:
        """Gather groups of so many key heads: their heads, keys and values of the whole sequence.

        The second is posted behind the first, so that it has begun when the attention of the first
        takes the device.
        """
        axis, dim = self.problem.axis, k.shape[-1]
        groups = self.groups(q, sizes)

        def post(heads: slice) -> Gathered:
            packed = torch.cat([heads_of(k, heads), heads_of(v, heads)], -1)
            assert self.team is not None
            return Gathered(self.team, self.layout, packed.movedim(axis, 0))

        coming = [post(kv_heads) for _, kv_heads in groups[:2]]
        for index, (q_heads, kv_heads) in enumerate(groups):
            with labelled(f"cuattn.parallel.gather.{index}"):
                whole = coming.pop(0).wait().movedim(0, axis)
            if index + 2 < len(groups):
                coming.append(post(groups[index + 2][1]))
            yield q_heads, kv_heads, (whole[..., :dim], whole[..., dim:])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the heads of each group when they are here."""
        out, lse = empty_result(self.problem, q, v, q.dtype)
        for heads, _, (keys, values) in self.arrivals(q, k, v, self.problem.groups):
            own = None if sinks is None else sinks[heads].contiguous()
            one = Gather(self.team, self.layout, self.problem.of_heads(heads))
            for call, rows, _, _ in one.forward_calls(heads_of(q, heads), keys, values, None):
                self.keep_keys_whole(call)
                to = tokens_of(self.problem, heads_of(out, heads), rows)
                attend(call, own, to, lse[..., heads, rows])
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, result: Any
    ) -> Gradients:
        """Gather again; gradients of all keys are sent home and added in order of ranks."""
        dout, out, lse, dlse = result
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        step, heads_kv = -(-k.shape[-2] // MOST_GROUPS), k.shape[-2]
        sizes = tuple(min(step, heads_kv - h) for h in range(0, heads_kv, step))
        for heads, kv_heads, (keys, values) in self.arrivals(q, k, v, sizes):
            one = Gather(self.team, self.layout, self.problem.of_heads(heads))
            own = None if sinks is None else sinks[heads].contiguous()
            sums = [torch.zeros(x.shape, device=x.device) for x in (keys, values)]
            mine = (
                heads_of(dout, heads),
                heads_of(out, heads),
                lse[..., heads, :],
                None if dlse is None else dlse[..., heads, :],
            )
            into = (
                heads_of(dq, heads),
                *sums,
                None if dsinks is None else dsinks[heads],
            )
            q_heads = heads_of(q, heads)
            one.differentiate(one.problem, q_heads, keys, values, own, mine, None, into)
            both = self.send_home(torch.cat(sums, -1))
            heads_of(dk, kv_heads).copy_(both[..., : k.shape[-1]])
            heads_of(dv, kv_heads).copy_(both[..., k.shape[-1] :])
        return dq.to(q.dtype), dk, dv, dsinks

    def send_home(self, sums: Tensor) -> Tensor:
        """Give each rank its rows of the sums of all, and add them up in order of ranks."""
        assert self.team is not None
        rows = sums.movedim(self.problem.axis, 0)
        spans = [self.layout.spans(rank) for rank in range(self.team.size)]
        sent = [torch.cat([rows[b : b + n] for b, n in s] or [rows[:0]]) for s in spans]
        mine = sent[self.rank]
        found = exchange(self.team, sent, [mine.numel()] * self.team.size)
        total = functools.reduce(torch.add, found).view(mine.shape)
        return total.movedim(0, self.problem.axis)


@functools.lru_cache(maxsize=256)
def last_step(layout: Layout, window: Window) -> int:
    """Return the last step of a ring in which any rank sees anything."""
    size = layout.size
    for step in range(size - 1, 0, -1):
        for rank in range(size):
            for queries in layout.spans(rank):
                for keys in layout.spans((rank - step) % size):
                    if find_pieces(queries, keys, window):
                        return step
    return 0


class Ring(Scheme):
    """Keys and values travel: in step i this rank holds those of the rank i places before it."""

    def arrivals(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Pass keys and values on: (step, whose they are, keys, values)."""
        assert self.team is not None
        axis, dim, size = self.problem.axis, k.shape[-1], self.team.size
        rows = torch.cat([k, v], -1).movedim(axis, 0).contiguous()
        last = last_step(self.layout, self.problem.window)
        for step in range(last + 1):
            shift = None
            if step < last:
                count = self.layout.rows((self.rank - step - 1) % size)
                shift = Shift(self.team, rows, rows.new_empty(count, *rows.shape[1:]))
            here = rows.movedim(0, axis)
            with labelled(f"cuattn.parallel.ring.{step}"):
                yield step, (self.rank - step) % size, here[..., :dim], here[..., dim:]
            if shift is not None:
                rows = shift.wait()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend in steps, and merge what they find: the own rows first, then back in the ring.

        What is found first of a row is written where it stays.
        """
        wide = torch.float32 if self.problem.widens else q.dtype
        out, lse = empty_result(self.problem, q, v, torch.float32)
        written: list[slice] = []
        layout: Any = "bshd" if self.problem.axis else "thd"
        for _, owner, keys, values in self.arrivals(k, v):
            for call, rows, _, is_own in self.forward_calls(q, keys, values, owner):
                own = sinks if is_own else None
                run, run_lse = tokens_of(self.problem, out, rows), lse[..., rows]
                if not written and rows != slice(0, q.shape[self.problem.axis]):
                    out.zero_()
                    lse.fill_(-torch.inf)  # rows that see nothing yet
                is_new = all(rows.stop <= x.start or x.stop <= rows.start for x in written)
                written.append(rows)
                if is_new and wide == torch.float32:
                    attend(call, own, run, run_lse)
                    continue
                part = run.new_empty(run.shape, dtype=wide)
                part_lse = run_lse.new_empty(run_lse.shape)
                attend(call, own, part, part_lse)
                if is_new:
                    run.copy_(part)
                    run_lse.copy_(part_lse)
                    continue
                cuattn.merge_states(
                    run, run_lse, part.float(), part_lse, layout=layout, out=run, lse_out=run_lse
                )
        return out.to(q.dtype), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, result: Any
    ) -> Gradients:
        """Pass keys on again; their gradients follow one step behind, and end at home."""
        assert self.team is not None
        axis, dim, size = self.problem.axis, k.shape[-1], self.team.size
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        last = last_step(self.layout, self.problem.window)
        coming: Shift | None = None
        sums = dq  # of the keys that are here, [rows, ...]
        for step, owner, keys, values in self.arrivals(k, v):
            shape = (keys.shape[axis], *k.movedim(axis, 0).shape[1:-1], dim + v.shape[-1])
            found = torch.zeros(shape, dtype=torch.float32, device=q.device)
            home = found.movedim(0, axis)
            into = (dq, home[..., :dim], home[..., dim:], dsinks)
            self.differentiate(self.problem, q, keys, values, sinks, result, owner, into)
            sums = found if coming is None else coming.wait().add_(found)
            if step < last:
                count = self.layout.rows((self.rank - step - 1) % size)
                coming = Shift(self.team, sums, sums.new_empty(count, *shape[1:]))
        if last > 0:
            count = self.layout.rows(self.rank)
            sums = Shift(self.team, sums, sums.new_empty(count, *sums.shape[1:]), -last).wait()
        both = sums.movedim(0, axis).to(k.dtype)
        return dq.to(q.dtype), both[..., :dim], both[..., dim:], dsinks


SCHEMES: dict[str, type[Local] | type[Gather] | type[Ring]] = {
    "local": Local,
    "gather": Gather,
    "ring": Ring,
}
