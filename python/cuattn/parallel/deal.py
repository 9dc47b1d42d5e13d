# SPDX-License-Identifier: Apache-2.0
"""Which rank has which tokens of packed documents: few documents are cut, and all ranks work alike.

A document that lies on one rank needs no keys of others. So documents are dealt whole, the largest
first, each to the rank that has fewest visible pairs so far, as long as its work and its tokens
leave room for that. One that does not fit is cut: into one run for each of as few ranks as hold
it, or where that gives a rank too many tokens, into equal chunks. Where ranks then differ much,
chunks of the whole sequence are dealt instead. Next: layout.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SLACKS = (1 / 64, 1 / 256)  # more pairs than the mean that a rank may have
UNEVEN = 1.03  # times the mean of pairs, of the rank that has most: chunks are dealt beyond
CUT = 0.1  # what a token of a cut document costs, as the share of pairs beyond the mean
KEEP = 0.7  # of the tokens that the work still to come has on the mean
TILE = 128  # documents are cut at multiples of so many of their tokens, where that can be
MOST_CHUNKS = 8  # of a rank, of a document that is cut into equal ones


class Run(NamedTuple):
    """Tokens of the packed sequence and the rank that has them."""

    begin: int
    end: int
    rank: int


def pairs_of(begin: float, end: float) -> float:
    """Count the visible pairs of the rows of a document from one to another, causal."""
    return (end * (end + 1) - begin * (begin + 1)) / 2


class Deal:
    """Documents dealt to ranks, of which each has room for equally many tokens."""

    def __init__(self, begins: np.ndarray, size: int, chunk: int, slack: float) -> None:
        self.begins, self.size, self.chunk = begins, size, chunk
        lengths = np.diff(self.begins).tolist()
        work = float(sum(pairs_of(0, length) for length in lengths))
        self.limit = work / size * (1 + slack)
        self.room = [-(-int(self.begins[-1]) // size)] * size
        self.load = [0.0] * size
        self.runs: list[Run] = []
        self.rest = [float(sum(lengths)), work]  # tokens, pairs
        for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
            self.rest[0] -= lengths[document]
            self.rest[1] -= pairs_of(0, lengths[document])
            self.deal(document, lengths[document])

    def give(self, document: int, begin: int, end: int, rank: int) -> None:
        """Give rows of a document to a rank."""
        if begin < end:
            first = int(self.begins[document])
            self.runs.append(Run(first + begin, first + end, rank))
            self.load[rank] += pairs_of(begin, end)
            self.room[rank] -= end - begin

    def deal(self, document: int, length: int) -> None:
        """Give a document to the rank that has least to do, whole where that can be."""
        work = pairs_of(0, length)
        fits = [
            rank
            for rank in range(self.size)
            if self.load[rank] + work <= self.limit and self.room[rank] >= length
        ]
        if fits:
            self.give(document, 0, length, min(fits, key=lambda rank: (self.load[rank], rank)))
            return
        cuts = self.cut_by_work(length) or self.cut_by_room(length) or self.cut_in_chunks(length)
        for begin, end, rank in cuts:
            self.give(document, begin, end, rank)

    def holds(self, run: Run) -> bool:
        """Whether a rank has room for rows of a document, and then for as much work as is left."""
        room = self.room[run.rank] - (run.end - run.begin)
        work = self.limit - self.load[run.rank] - pairs_of(run.begin, run.end)
        needed = KEEP * work * self.rest[0] / max(self.rest[1], 1.0)
        return room >= min(needed, self.rest[0]) and room >= 0

    def cut_by_work(self, length: int) -> list[Run]:
        """Cut into one run for each of as few ranks as have work left for it; [] if none fit.

        The last rows see most keys: who has room for most tokens gets the first ones.
        """
        left = [max(self.limit - load, 0.0) for load in self.load]
        order = sorted(range(self.size), key=lambda rank: (-left[rank], rank))
        order = [rank for rank in order if left[rank] > 0 and self.room[rank] > 0]
        for count in range(1, len(order) + 1):
            ranks = sorted(order[:count], key=lambda rank: (-self.room[rank], rank))
            shares = np.cumsum([left[rank] for rank in ranks])
            if shares[-1] < pairs_of(0, length):
                continue
            # The row before which a share of the pairs lies, at a tile.
            ends = np.sqrt(shares / shares[-1]) * length
            ends = np.minimum(np.round(ends / TILE) * TILE, length).astype(int).tolist()
            begins, ends = [0, *ends[:-1]], [*ends[:-1], length]
            runs = [Run(b, e, r) for b, e, r in zip(begins, ends, ranks, strict=True)]
            if all(self.holds(run) for run in runs):
                return runs
        return []

    def cut_by_room(self, length: int) -> list[Run]:
        """Cut what is little work into as few runs as have room for it; [] if it is much."""
        if pairs_of(0, length) > self.limit / 64:
            return []
        runs, begin = [], 0
        for rank in sorted(range(self.size), key=lambda rank: (-self.room[rank], rank)):
            end = min(begin + self.room[rank], length)
            runs.append(Run(begin, end, rank))
            begin = end
        return runs

    def cut_in_chunks(self, length: int) -> list[Run]:
        """Cut into chunks, the last first, each for the rank that has least to do."""
        least = -(-length // (MOST_CHUNKS * self.size * TILE)) * TILE
        chunk = max(self.chunk, least)
        load, room = list(self.load), list(self.room)
        runs, end = [], length
        while end > 0:
            rank = min((r for r in range(self.size) if room[r]), key=lambda r: (load[r], r))
            begin = max((end - 1) // chunk * chunk, end - room[rank])
            runs.append(Run(begin, end, rank))
            load[rank] += pairs_of(begin, end)
            room[rank] -= end - begin
            end = begin
        return runs

    def unevenness(self) -> float:
        """Return the pairs of the rank that has most, as those of the mean."""
        return max(self.load) * self.size / max(sum(self.load), 1.0)

    def tokens_of_cut_documents(self) -> float:
        """Return which share of all tokens lies in documents of several ranks."""
        begins = np.array([run.begin for run in self.runs])
        document = np.searchsorted(self.begins, begins, side="right") - 1
        ranks: dict[int, set[int]] = {}
        for index, run in zip(document.tolist(), self.runs, strict=True):
            ranks.setdefault(index, set()).add(run.rank)
        cut = [index for index, owners in ranks.items() if len(owners) > 1]
        return float(np.diff(self.begins)[cut].sum()) / max(int(self.begins[-1]), 1)


def deal_chunks(begins: np.ndarray, size: int, chunk: int) -> list[Run]:
    """Deal chunks of the sequence, those with most pairs first: as many to each, or one less."""
    seqlen = int(begins[-1])
    count = -(-seqlen // chunk)
    place = np.arange(seqlen) - np.repeat(begins[:-1], np.diff(begins))
    weights = np.zeros(count, np.int64)
    np.add.at(weights, np.arange(seqlen) // chunk, place + 1)
    room, load, owned = -(-count // size), [0] * size, [0] * size
    runs = []
    for index in np.argsort(-weights, kind="stable").tolist():
        rank = min((r for r in range(size) if owned[r] < room), key=lambda r: (load[r], r))
        runs.append(Run(index * chunk, min((index + 1) * chunk, seqlen), rank))
        owned[rank] += 1
        load[rank] += int(weights[index])
    return runs


def deal(begins: np.ndarray, size: int, chunk: int) -> list[Run]:
    """Deal packed documents to ranks: the runs of all, in the order of the sequence."""
    begins = begins.astype(np.int64)
    found = [Deal(begins, size, chunk, slack) for slack in SLACKS]
    best = min(found, key=lambda x: x.unevenness() + CUT * x.tokens_of_cut_documents())
    is_even = best.unevenness() <= UNEVEN
    return sorted(best.runs if is_even else deal_chunks(begins, size, chunk))
