# SPDX-License-Identifier: Apache-2.0
"""Which rank has which tokens of packed documents: few documents are cut, and all ranks work alike.

A document that lies on one rank needs no keys of others. So documents are dealt whole, the largest
first, each to the rank that has fewest visible pairs so far, as long as its work and its tokens
leave room for that. One that does not fit is cut: a short one to fill what room ranks have, else
into one run for each of as few ranks as hold it, or where that gives a rank too many tokens, into
chunks. Where ranks then differ much, heavy documents are cut in chunks from the first, and at last
chunks of the whole sequence are dealt. Next: layout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SLACKS = (1 / 64, 1 / 256)  # more pairs than the mean that a rank may have
HEAVY = (1, 1 / 4, 1 / 16, 1 / 64)  # of the pairs of a rank: documents beyond are cut in chunks
UNEVEN = 1.03  # times the mean of pairs, of the rank that has most: what ranks may differ
CUT = 0.1  # what a token of a cut document costs, as the share of pairs beyond the mean
KEEP = 0.7  # of the tokens that the work still to come has on the mean
TILE = 128  # of rows of kernels: what is cut at multiples of it they cut as they cut the whole
MOST_CHUNKS = 8  # of a rank, of a document that is cut into equal ones


class Run(NamedTuple):
    """Tokens of the packed sequence and the rank that has them."""

    begin: int
    end: int
    rank: int


def places_of(begins: np.ndarray) -> np.ndarray:
    """Return the place of each token in its document."""
    return np.arange(begins[-1]) - np.repeat(begins[:-1], np.diff(begins))


def counts_of(
    begins: np.ndarray, ends: Sequence[int], owners: Sequence[int], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of each document on a rank; and say whether it lies on several ranks.

    `ends`, `owners`: of the chunks of the sequence.
    """
    documents = len(begins) - 1
    # Between two cuts all tokens are of one document and one owner.
    cuts = np.unique(np.concatenate([begins, np.array(ends, np.int64)]))
    document = np.searchsorted(begins, cuts[:-1], side="right") - 1
    owner = np.array(owners, np.int64)[np.searchsorted(ends, cuts[:-1], side="right")]
    first, last = np.full(documents, np.iinfo(np.int64).max), np.full(documents, -1)
    np.minimum.at(first, document, owner)
    np.maximum.at(last, document, owner)
    counts = np.zeros(documents, np.int64)
    np.add.at(counts, document, np.diff(cuts) * (owner == rank))
    return counts, first < last


def visible_pairs(begin: float, end: float) -> float:
    """Count the visible pairs of the rows of a document from one to another, causal."""
    return (end * (end + 1) - begin * (begin + 1)) / 2


def unevenness(load: Sequence[float]) -> float:
    """Return the pairs of the rank that has most, as those of the mean."""
    return max(load) * len(load) / max(sum(load), 1)


class Deal:
    """Documents dealt to ranks, of which each has room for equally many tokens."""

    def __init__(
        self, begins: np.ndarray, size: int, chunk: int, slack: float, heavy: float = np.inf
    ) -> None:
        self.begins, self.size, self.chunk = begins, size, chunk
        lengths = np.diff(self.begins).tolist()
        work = float(sum(visible_pairs(0, length) for length in lengths))
        self.limit = work / size * (1 + slack)
        self.heavy = heavy * self.limit
        self.room = [-(-int(self.begins[-1]) // size)] * size
        self.load = [0.0] * size
        self.runs: list[Run] = []
        self.rest = [float(sum(lengths)), work]  # tokens, pairs
        for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
            self.rest[0] -= lengths[document]
            self.rest[1] -= visible_pairs(0, lengths[document])
            self.place(document, lengths[document])

    def give(self, document: int, begin: int, end: int, rank: int) -> None:
        """Give rows of a document to a rank."""
        if begin < end:
            first = int(self.begins[document])
            self.runs.append(Run(first + begin, first + end, rank))
            self.load[rank] += visible_pairs(begin, end)
            self.room[rank] -= end - begin

    def give_all(self, document: int, runs: list[Run]) -> None:
        """Give runs of the rows of a document to their ranks."""
        for begin, end, rank in runs:
            self.give(document, begin, end, rank)

    def place(self, document: int, length: int) -> None:
        """Give a document to the rank that has least to do, whole where that can be."""
        work = visible_pairs(0, length)
        if work > self.heavy:
            self.give_all(document, self.cut_in_chunks(length))
            return
        if min(self.load) + work <= self.limit:
            rank = self.load.index(min(self.load))
            if self.room[rank] < length:
                has_room = [r for r in range(self.size) if self.room[r] >= length]
                rank = min(has_room, key=lambda r: (self.load[r], r), default=rank)
            if self.room[rank] >= length and self.load[rank] + work <= self.limit:
                self.give(document, 0, length, rank)
                return
        cuts = self.cut_by_room(length) or self.cut_by_work(length) or self.cut_in_chunks(length)
        self.give_all(document, cuts)

    def holds(self, run: Run) -> bool:
        """Whether a rank has room for rows of a document, and then for as much work as is left."""
        room = self.room[run.rank] - (run.end - run.begin)
        work = self.limit - self.load[run.rank] - visible_pairs(run.begin, run.end)
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
            if shares[-1] < visible_pairs(0, length):
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
        if visible_pairs(0, length) > self.limit / 64:
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
            load[rank] += visible_pairs(begin, end)
            room[rank] -= end - begin
            end = begin
        return runs

    def cost(self) -> float:
        """Return what a deal is chosen by: unevenness, and the share of cut documents' tokens."""
        runs = sorted(self.runs)
        ends, ranks = [run.end for run in runs], [run.rank for run in runs]
        _, is_cut = counts_of(self.begins, ends, ranks, 0)
        share = np.diff(self.begins)[is_cut].sum() / max(int(self.begins[-1]), 1)
        return unevenness(self.load) + CUT * float(share)


def deal_chunks(begins: np.ndarray, size: int, chunk: int) -> tuple[list[Run], list[int]]:
    """Deal chunks of the sequence, those with most pairs first, to the rank that has least to do.

    No rank gets more chunks than if all had equally many. With the runs the pairs of each rank.
    """
    seqlen = int(begins[-1])
    count = -(-seqlen // chunk)
    weights = np.zeros(count, np.int64)
    np.add.at(weights, np.arange(seqlen) // chunk, places_of(begins) + 1)
    room, load, owned = -(-count // size), [0] * size, [0] * size
    runs = []
    for index in np.argsort(-weights, kind="stable").tolist():
        rank = min((r for r in range(size) if owned[r] < room), key=lambda r: (load[r], r))
        runs.append(Run(index * chunk, min((index + 1) * chunk, seqlen), rank))
        owned[rank] += 1
        load[rank] += int(weights[index])
    return runs, load


def deal_documents(begins: np.ndarray, size: int, chunk: int) -> list[Run]:
    """Deal packed documents to ranks: the runs of all, in the order of the sequence."""
    begins = begins.astype(np.int64)
    chunk = max(min(chunk, -(-int(begins[-1]) // (2 * size))), 1)  # each rank has some
    found = [Deal(begins, size, chunk, slack) for slack in SLACKS]
    best = min(found, key=Deal.cost)
    for heavy in HEAVY:
        if unevenness(best.load) <= UNEVEN:
            break
        best = min(
            best, Deal(begins, size, chunk, SLACKS[0], heavy), key=lambda x: unevenness(x.load)
        )
    if unevenness(best.load) > UNEVEN:
        runs, load = deal_chunks(begins, size, chunk)
        if unevenness(load) < unevenness(best.load):
            return sorted(runs)
    return sorted(best.runs)
