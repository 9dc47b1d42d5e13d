# SPDX-License-Identifier: Apache-2.0
"""Packed documents that lie whole on a rank, apart from those that are cut.

The whole ones need no keys of others: one call attends to those of a rank, while keys of the cut
ones come, by gather or ring over a sequence that holds nothing else. Next: gather.py, ring.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attend import Call, Problem, attend, dropout_of, gradients, offsets, on_device
from .deal import TILE, counts_of
from .layout import Layout
from .pairs import Piece
from .schemes import Gradients, Local, Scheme, empty_result, labelled
from .team import Team


class Sequences(NamedTuple):
    """The rows of a rank as packed sequences; those of cut documents are not in use."""

    counts: tuple[int, ...]
    in_use: tuple[int, ...]


class Split(NamedTuple):
    """The documents of a layout in two parts; those of the other part count as empty."""

    layout: Layout  # of the tokens of cut documents
    cut_begins: np.ndarray  # where documents begin among these
    whole_lengths: np.ndarray  # of the others
    rows: tuple[slice, ...]  # of this rank, of cut documents
    documents: Sequences  # of this rank: all of the whole, by number
    sequences: Sequences  # the same rows, as few and as short as can be


@functools.lru_cache(maxsize=256)
def split_of(layout: Layout, begins: bytes, rank: int) -> Split | None:
    """Split packed documents as a rank has them; None where all are cut."""
    ends = np.frombuffer(begins, np.int64)
    lengths = np.diff(ends)
    own, is_cut = counts_of(ends, layout.ends, layout.owners, rank)
    whole = np.where(is_cut, 0, lengths)
    if not whole.any():
        return None
    begins_of_cut = np.concatenate([[0], np.cumsum(lengths - whole)])
    # A chunk holds what of its tokens is of cut documents.
    chunk_ends = np.interp(layout.ends, ends, begins_of_cut).astype(np.int64).tolist()
    row, rows = 0, list[slice]()
    for count, is_here in zip(own.tolist(), is_cut.tolist(), strict=True):
        if is_here and count > 0:
            begin = rows.pop().start if rows and rows[-1].stop == row else row
            rows.append(slice(begin, row + count))
        row += count
    documents = Sequences(tuple(own.tolist()), tuple(np.where(is_cut, 0, own).tolist()))
    return Split(
        Layout._of("cut", layout.size, layout.owners, chunk_ends),
        *(begins_of_cut, whole, tuple(rows), documents, compact(documents)),
    )


def compact(documents: Sequences) -> Sequences:
    """Leave out documents without rows here, and cut what is not in use as short as the others.

    Kernels make as many blocks for each sequence as the longest has tiles.
    """
    most = max(*documents.in_use, TILE, 0)
    counts, in_use = list[int](), list[int]()
    idle = 0

    def add_idle() -> None:
        cut = [most] * (idle // most) + [idle % most] * (idle % most > 0)
        counts.extend(cut)
        in_use.extend(0 for _ in cut)

    for count, used in zip(*documents, strict=True):
        if used == 0:
            idle += count
            continue
        add_idle()
        counts.append(count)
        in_use.append(used)
        idle = 0
    add_idle()
    return Sequences(tuple(counts), tuple(in_use))


class Apart(Scheme):
    """Whole documents here, cut ones by a scheme."""

    def __init__(
        self, kind: type[Any], split: Split, team: Team, layout: Layout, problem: Problem
    ) -> None:
        super().__init__(team, layout, problem)
        self.kind, self.split = kind, split

    def scheme(self) -> Any:
        """Return the scheme of the cut documents."""
        problem = dataclasses.replace(self.problem, begins=self.split.cut_begins)
        return self.kind(self.team, self.split.layout, problem)

    def of_cut(self, x: Tensor, axis: int = 0) -> Tensor:
        """Return the rows of cut documents: a view where they lie together."""
        parts = [x.narrow(axis, rows.start, rows.stop - rows.start) for rows in self.split.rows]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0)

    def put(self, into: Tensor, rows: Tensor, axis: int = 0) -> None:
        """Write the rows of cut documents."""
        first = 0
        for place in self.split.rows:
            count = place.stop - place.start
            to = into.narrow(axis, place.start, count)
            to.copy_(rows.narrow(axis, first, count))
            first += count

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
        """Make the call of whole documents, in which rows of cut ones are not in use."""
        problem = self.problem
        is_numbered = problem.dropout is not None  # documents, by the whole
        counts, in_use = self.split.documents if is_numbered else self.split.sequences
        if max(in_use, default=0) == 0:
            return None
        options = problem.options() | {"window": problem.window}
        if self.split.rows:
            options["seqused_q"] = options["seqused_k"] = on_device(in_use, q.device)
        if problem.slopes is not None:
            options["alibi_slopes"] = problem.slopes.contiguous()
        if problem.dropout is not None:
            piece = Piece(slice(0, 0), slice(0, 0), problem.window, 0)
            options |= dropout_of(problem.dropout, piece, (0, 0))
        begins, most = offsets(counts, q.device), max(counts)
        return Call(q, k, v, options, None, (begins, begins, most, most))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to whole documents when keys of the others are on their way."""
        call = self.call(q, k, v)
        is_any_cut = self.split.layout.seqlen > 0
        if is_any_cut and call is None:  # all rows here are of cut documents
            result: tuple[Tensor, Tensor] = self.scheme().forward(q, k, v, sinks)
            return result
        out, lse = empty_result(self.problem, q, v, q.dtype)

        def attend_to_whole() -> None:
            if call is not None:
                with labelled("cuattn.parallel.whole"):
                    attend(call, sinks, out, lse)

        if is_any_cut:
            scheme = self.scheme()
            scheme.beside = attend_to_whole
            part, part_lse = scheme.forward(*(self.of_cut(x) for x in (q, k, v)), sinks)
            self.put(out, part)
            self.put(lse, part_lse, -1)
        else:
            attend_to_whole()
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, result: Any
    ) -> Gradients:
        """Differentiate whole documents when keys of the others are on their way."""
        call = self.call(q, k, v)
        is_any_cut = self.split.layout.seqlen > 0
        if call is None:  # all rows here are of cut documents, or there is none
            kind = self.scheme() if is_any_cut else Local(None, self.split.layout, self.problem)
            gradient: Gradients = kind.backward(q, k, v, sinks, result)
            return gradient
        found: list[Tensor] = []

        def differentiate_whole() -> None:
            with labelled("cuattn.parallel.whole"):
                found.extend(gradients(self.problem, call, result, sinks, False))

        if is_any_cut:
            dout, out, lse, dlse = result
            mine = (
                *(self.of_cut(x) for x in (dout, out)),
                self.of_cut(lse, -1).contiguous(),
                None if dlse is None else self.of_cut(dlse, -1).contiguous(),
            )
            scheme = self.scheme()
            scheme.beside = differentiate_whole
            *parts, dsinks = scheme.backward(*(self.of_cut(x) for x in (q, k, v)), sinks, mine)
            for whole, part in zip(found, parts, strict=False):
                self.put(whole, part)
            if sinks is not None:
                found[3] = found[3] + dsinks
        else:
            differentiate_whole()
        return found[0], found[1], found[2], found[3] if sinks is not None else None
