# SPDX-License-Identifier: Apache-2.0
"""What moves between ranks: rows gathered, heads exchanged for tokens, keys around a ring.

Messages are rows of tokens, [tokens, ...], so that the rows of a rank are one piece of memory. All
lengths follow from the layout, which every rank knows. Next: schemes.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arrays import wants_gradient
from .layout import Layout, Span
from .team import Team, gather_into, teams_of


class Gathered:
    """Rows of all ranks on their way; `wait` gives them in the order of the sequence."""

    def __init__(self, team: Team, layout: Layout, rows: Tensor) -> None:
        self.layout = layout
        self.most = most_rows(layout)
        self.rows = rows.contiguous()
        if len(rows) < self.most:  # messages are of equal length
            self.rows = rows.new_zeros(self.most, *rows.shape[1:])
            self.rows[: len(rows)] = rows
        self.box = rows.new_empty(team.size * self.most, *rows.shape[1:])
        self.work = gather_into(self.box, self.rows, team.group, async_op=True)

    def wait(self) -> Tensor:
        """Return [seqlen, ...]; a copy, unless ranks hold the sequence in order."""
        self.work.wait()
        return in_order(self.layout, self.box, [r * self.most for r in range(self.layout.size)])


@functools.lru_cache(maxsize=256)
def most_rows(layout: Layout) -> int:
    """Return the rows of the longest rank."""
    return max(layout.rows(rank) for rank in range(layout.size))


def in_order(layout: Layout, box: Tensor, begins: list[int]) -> Tensor:
    """Return the rows of a box in the order of the sequence; `begins`: where each rank's lie."""
    runs = runs_in_order(layout, tuple(begins))
    if not runs:
        return box[: layout.seqlen]
    return torch.cat([box[begin:end] for begin, end in runs])


@functools.lru_cache(maxsize=256)
def runs_in_order(layout: Layout, begins: tuple[int, ...]) -> tuple[Span, ...]:
    """List the rows of a box, from and to, in the order of the sequence; none if they are so."""
    runs = sorted(
        (token, begins[rank] + row, count)
        for rank in range(layout.size)
        for token, row, count in layout.places(rank)
    )
    if all(token == row for token, row, _ in runs):
        return ()
    return tuple((row, row + count) for _, row, count in runs)


def by_rank(layout: Layout, rows: Tensor) -> Tensor:
    """Put rows in the order of the sequence end to end as rank 0, 1, .. holds them."""
    runs = [span for rank in range(layout.size) for span in layout.spans(rank)]
    begin = 0
    for token, count in runs:
        if token != begin:
            return torch.cat([rows[token : token + count] for token, count in runs])
        begin += count
    return rows


def gather_parts(x: Tensor, layout: Layout, group: Any, axis: int) -> list[Tensor]:
    """Give every rank the rows of all, as a list in order of ranks; for Layout.unshard."""
    if wants_gradient(x):
        raise NotImplementedError(
            "Layout.unshard: x requires grad, but no gradient goes through the gather; compute the "
            "loss on this rank's rows, or pass x.detach()"
        )
    inner, outer = teams_of("Layout.unshard", group)
    sizes = (1 if inner is None else inner.size, outer.size)
    if sizes != (layout.inner, layout.outer):
        raise ValueError(
            f"Layout.unshard: group must have the ranks of {layout}, got {sizes} as inner and "
            "outer; pass the group that the layout was made for"
        )
    mine = layout.rows(outer.rank * sizes[0] + (0 if inner is None else inner.rank))
    if x.shape[axis] != mine:
        raise ValueError(
            f"Layout.unshard: x must hold the {mine} tokens of this rank on axis {axis}, got shape "
            f"{tuple(x.shape)}; give what shard gave, and the group of the layout"
        )
    most = max(layout.rows(rank) for rank in range(layout.size))
    rows = x.movedim(axis, 0)
    box = rows.new_zeros(most, *rows.shape[1:])
    box[: len(rows)] = rows
    for team in (inner, outer):
        if team is not None:
            whole = box.new_empty(team.size * len(box), *box.shape[1:])
            gather_into(whole, box, team.group)
            box = whole
    parts = box.view(layout.size, most, *box.shape[1:])
    return [parts[rank, : layout.rows(rank)].movedim(0, axis) for rank in range(layout.size)]


def exchange(team: Team, sent: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Give piece r to rank r, and return what each rank gave: of counts[r] elements, flat."""
    message = torch.cat([x.reshape(-1) for x in sent])
    box = message.new_empty(sum(counts))
    dist.all_to_all_single(box, message, counts, [x.numel() for x in sent], team.group)
    return list(box.split(counts))


class Shift:
    """A message on its way to the rank `step` places on, and one from as far before.

    All messages of a group go in the order in which they are posted, the same on every rank.
    """

    def __init__(self, team: Team, sent: Tensor, received: Tensor, step: int = 1) -> None:
        self.received = received
        self.sent = sent = sent.contiguous()  # kept until it has left
        posts = []
        if sent.numel() > 0:
            posts.append(dist.P2POp(dist.isend, sent, team.peer(step), team.group))
        if received.numel() > 0:
            posts.append(dist.P2POp(dist.irecv, received, team.peer(-step), team.group))
        self.works = dist.batch_isend_irecv(posts) if posts else []

    def wait(self) -> Tensor:
        """Return what came."""
        for work in self.works:
            work.wait()
        return self.received
