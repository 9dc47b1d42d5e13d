# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all ranks come, by groups of heads: the next while one is used.

In groups of heads: Llama 3, arXiv:2407.21783. Next: exchange.py and peers.py, which move them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .attend import attend, heads_of, tokens_of
from .cost import groups_of_sums
from .exchange import Gathered, exchange, in_order, most_rows
from .layout import Layout
from .peers import Message
from .schemes import Gradients, Scheme, empty_result, halves, labelled

MOST_RUNS = 16  # of all ranks, each of which is read to its place by itself


@functools.lru_cache(maxsize=256)
def places_in_box(layout: Layout) -> tuple[tuple[int, ...], tuple[tuple[int, int, int, int], ...]]:
    """Say how all rows come into a box: moves (rank, to, row, rows), each to its token.

    Many runs are put in order when they are here: then with where the rows of each rank begin.
    """
    runs = [(rank, *place) for rank in range(layout.size) for place in layout.places(rank)]
    if len(runs) <= MOST_RUNS:
        return (), tuple(runs)
    begins = tuple(rank * most_rows(layout) for rank in range(layout.size))
    return begins, tuple((r, begins[r], 0, layout.rows(r)) for r in range(layout.size))


class Read:
    """Rows of a group of heads that copy engines bring; `wait` as that of `Gathered`."""

    def __init__(self, message: Message, layout: Layout, group: int) -> None:
        self.peers, self.layout = message.peers, layout
        self.begins, moves = places_in_box(layout)
        rows = layout.size * most_rows(layout) if self.begins else layout.seqlen
        self.box = box = message.empty(group, rows)
        free = self.peers.now()
        of_others = []
        for rank, to, row, n in moves:
            if rank == message.rank:  # here: beside attention it would be slow
                box[to : to + n].copy_(message.of(rank, group, (row, n)))
            else:
                of_others.append((box[to : to + n], rank, group, (row, n)))
        self.mark = message.fetch(of_others, free)

    def wait(self) -> Tensor:
        """Return [seqlen, ...]; a copy where runs are many."""
        self.peers.wait(self.mark)
        return in_order(self.layout, self.box, list(self.begins)) if self.begins else self.box


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
        axis = self.problem.axis
        groups = self.groups(q, sizes)
        k_rows, v_rows = (x.movedim(axis, 0) for x in (k, v))
        pairs = [(heads_of(k_rows, heads), heads_of(v_rows, heads)) for _, heads in groups]
        peers = self.peers_for(pairs)
        message = None
        if peers is not None:
            message = Message(peers, self.rank, pairs, most_rows(self.layout))

        def post(group: int) -> Gathered | Read:
            if message is not None:
                return Read(message, self.layout, group)
            assert self.team is not None
            return Gathered(self.team, self.layout, torch.cat(pairs[group], -1))

        try:
            coming = [post(group) for group in range(len(groups[:2]))]
            self.beside()
            for index, (q_heads, kv_heads) in enumerate(groups):
                with labelled(f"cuattn.parallel.gather.{index}"):
                    whole = coming.pop(0).wait().movedim(0, axis)
                if index + 2 < len(groups):
                    coming.append(post(index + 2))
                yield q_heads, kv_heads, halves(whole, k, v)
        finally:
            if message is not None:
                message.close()

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
        heads_kv = k.shape[-2]
        batch = k.shape[0] if self.problem.axis == 1 else 1
        head_bytes = 4 * self.layout.seqlen * batch * (k.shape[-1] + v.shape[-1])
        step = -(-heads_kv // groups_of_sums(heads_kv, head_bytes))
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
