# SPDX-License-Identifier: Apache-2.0
"""Keys and values travel: in step i this rank has those of the rank i places before it.

Ring: arXiv:2310.01889; zigzag: arXiv:2407.21783. Next: exchange.py and peers.py, which move them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import cuattn

from .attend import attend, tokens_of
from .exchange import Shift, most_rows
from .layout import Layout
from .pairs import Window, find_pieces
from .peers import Message, Peers
from .schemes import Gradients, Scheme, empty_result, halves, labelled

MOST_LAST = 8  # calls of the last step, of which each looks at those behind it


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


def lies_well(x: Tensor) -> bool:
    """Whether every kernel can read an array as it lies."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def overlaps(rows: slice, others: list[slice]) -> bool:
    """Whether some rows are among others."""
    return any(rows.start < x.stop and x.start < rows.stop for x in others)


def rest_of(found: list[slice], count: int) -> list[slice]:
    """List the rows of so many that are in none of some slices, which have none in common."""
    begins = [0, *(x.stop for x in sorted(found, key=lambda x: x.start))]
    ends = [*sorted(x.start for x in found), count]
    return [slice(b, e) for b, e in zip(begins, ends, strict=True) if b < e]


class Ring(Scheme):
    """Keys and values travel: in step i this rank holds those of the rank i places before it."""

    def arrivals(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Pass keys and values on: (step, whose they are, keys, values)."""
        assert self.team is not None
        axis, size = self.problem.axis, self.team.size
        last = last_step(self.layout, self.problem.window)
        pair = (k.movedim(axis, 0), v.movedim(axis, 0))
        peers = self.peers_for([pair]) if last > 0 else None
        if peers is not None:
            for step, owner, rows in self.read_arrivals(peers, pair, last):
                is_own = owner == self.rank and lies_well(k) and lies_well(v)  # two views fewer
                keys, values = (k, v) if is_own else halves(rows.movedim(0, axis), k, v)
                with labelled(f"cuattn.parallel.ring.{step}"):
                    yield step, owner, keys, values
            return
        rows = torch.cat(pair, -1).contiguous()
        for step in range(last + 1):
            shift = None
            if step < last:
                count = self.layout.rows((self.rank - step - 1) % size)
                shift = Shift(self.team, rows, rows.new_empty(count, *rows.shape[1:]))
            if step == 0:
                self.beside()
            keys, values = halves(rows.movedim(0, axis), k, v)
            with labelled(f"cuattn.parallel.ring.{step}"):
                yield step, (self.rank - step) % size, keys, values
            if shift is not None:
                rows = shift.wait()

    def read_arrivals(
        self, peers: Peers, pair: tuple[Tensor, Tensor], last: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Read from each rank what it began with; `pair`: own keys and values.

        The host asks for the next when it has asked for the attention, beside which it comes: of a
        short call what shows is the host.
        """
        size = self.layout.size
        message = Message(peers, self.rank, [pair], most_rows(self.layout))
        try:
            here = message.of(self.rank, 0, (0, len(pair[0])))
            for step in range(last + 1):
                owner = (self.rank - step - 1) % size
                rows = self.layout.rows(owner) if step < last else 0
                following, free = message.empty(0, rows), peers.now()
                if step == 0:
                    self.beside()  # behind the mark from which on the copy may begin
                yield step, (self.rank - step) % size, here
                if step < last:
                    peers.wait(message.fetch([(following, owner, 0, (0, rows))], free))
                    here = following
        finally:
            message.close()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend in steps, and merge what they find: the own rows first, then back in the ring.

        What is found first of a row is written where it stays until the last step, which rounds.
        """
        wide = torch.float32 if self.problem.widens else q.dtype
        sums, lse = empty_result(self.problem, q, v, torch.float32)
        out = sums if q.dtype == torch.float32 else torch.empty_like(sums, dtype=q.dtype)
        last = last_step(self.layout, self.problem.window)
        written: list[slice] = []
        rounded: list[slice] = []
        for step, owner, keys, values in self.arrivals(k, v):
            calls = list(self.forward_calls(q, keys, values, owner))
            for index, (call, rows, _, is_own) in enumerate(calls):
                own = sinks if is_own else None
                found, found_lse = tokens_of(self.problem, sums, rows), lse[..., rows]
                if not written and rows != slice(0, q.shape[self.problem.axis]):
                    sums.zero_()
                    lse.fill_(-torch.inf)  # rows that see nothing yet
                is_new = not overlaps(rows, written)
                written.append(rows)
                to = found
                rounds = step == last and len(calls) <= MOST_LAST and out is not sums
                if rounds and not overlaps(rows, [later[1] for later in calls[index + 1 :]]):
                    to = tokens_of(self.problem, out, rows)
                    rounded.append(rows)
                if is_new and (to is not found or wide == torch.float32):
                    attend(call, own, to, found_lse)
                    continue
                part = torch.empty_like(found, dtype=wide)
                part_lse = torch.empty_like(found_lse)
                attend(call, own, part, part_lse)
                if is_new:
                    found.copy_(part)
                    found_lse.copy_(part_lse)
                else:
                    self.merge((found, found_lse), (part.float(), part_lse), to)
        for rows in rest_of(rounded, q.shape[self.problem.axis]) if out is not sums else ():
            tokens_of(self.problem, out, rows).copy_(tokens_of(self.problem, sums, rows))
        return out, lse

    def merge(self, sums: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], to: Tensor) -> None:
        """Merge a part into the sums of its rows, lse in place."""
        layout: Any = "bshd" if self.problem.axis else "thd"
        cuattn.merge_states(*sums, *part, layout=layout, out=to, lse_out=sums[1])

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
