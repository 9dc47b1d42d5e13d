# SPDX-License-Identifier: Apache-2.0
"""Packed documents: dealt whole where that can be, and those that are cut go apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import frameworks

frameworks.require("torch")
import document_jobs  # noqa: E402
from layouts import draw_documents, draw_layout  # noqa: E402

from cuattn.parallel import Layout  # noqa: E402
from cuattn.parallel.deal import SLACKS, Deal  # noqa: E402
from cuattn.parallel.documents import split_of  # noqa: E402
from cuattn.parallel.schemes import fold_of_documents  # noqa: E402


@pytest.mark.parametrize("size", [2, 4])
def test_both_ways_by_every_layout(size, pool, seed):
    pool.run(size, document_jobs.both_ways_by_every_layout, seed)


def test_what_is_dropped_is_counted_by_documents(pool, seed):
    pool.run(2, document_jobs.dropped_by_document, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_moves_where_no_document_is_cut(size, pool, seed):
    pool.run(size, document_jobs.whole_documents_alone, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_keys_of_cut_documents_are_read_where_they_lie(size, pool, seed):
    pool.run(size, document_jobs.by_buffers, seed)


def test_two_levels_of_documents(pool, seed):
    pool.run(4, document_jobs.two_levels, seed, [])


def test_a_split_has_every_token_once(rng):
    """Rows of cut documents are those of the layout that the split makes of them."""
    splits = 0
    for _ in range(2000):
        layout = draw_layout(rng, 600)
        while layout.inner > 1:
            layout = draw_layout(rng, 600)
        begins = draw_documents(rng, layout.seqlen)
        owner = np.zeros(layout.seqlen, int)
        for rank in range(layout.size):
            owner[layout.positions(rank)] = rank
        documents = [owner[b:e] for b, e in itertools.pairwise(begins.tolist())]
        is_cut = [len(set(x.tolist())) > 1 for x in documents]
        tokens = np.repeat(is_cut, np.diff(begins)).astype(bool)
        among = np.cumsum(tokens) - 1  # the place of a token among those of cut documents
        for rank in range(layout.size):
            split = split_of(layout, begins.astype(np.int64).tobytes(), rank)
            if split is None:
                assert all(cut or not len(x) for cut, x in zip(is_cut, documents, strict=True))
                continue
            splits += 1
            mine = layout.positions(rank)
            own = np.concatenate([np.zeros(0, int), *(mine[rows] for rows in split.rows)])
            assert np.array_equal(own, mine[tokens[mine]])
            assert np.array_equal(split.layout.positions(rank), among[own])
            assert split.layout.seqlen == tokens.sum() == split.cut_begins[-1]
            assert np.array_equal(np.diff(split.cut_begins) + split.whole_lengths, np.diff(begins))
            for counts, in_use in (split.documents, split.sequences):
                assert sum(counts) == len(mine)
                used = np.repeat(in_use, counts) > 0  # all rows of a sequence, or none
                assert np.array_equal(np.flatnonzero(~used), np.flatnonzero(tokens[mine]))
                assert all(n in (0, count) for n, count in zip(in_use, counts, strict=True))
            counts, in_use = split.sequences
            assert [n for n in in_use if n] == [n for n in split.documents.in_use if n]
            assert 0 not in counts
            assert max(counts, default=0) <= max(*in_use, 128, 0)
    assert splits > 100


def test_chunks_between_shorter_ones_go_into_one_call():
    """Those of a cut document that begins and ends within chunks of as many tokens."""
    ends = range(128, 1537, 128)
    layout = Layout._of("by turns", 2, [i % 2 for i in range(12)], ends)
    begins = np.array([0, 70, 1500, 1536])
    folds = []
    for rank in range(2):
        split = split_of(layout, begins.tobytes(), rank)
        folds.append(fold_of_documents(split.layout, rank, split.cut_begins.tobytes()))
    first_ends, second_ends = (314, 570, 826, 1082, 1338), (186, 442, 698, 954, 1210)
    assert folds[0] == (slice(58, 698), (0,) * 5, first_ends, ((0, 0, 58),))
    assert folds[1] == (slice(0, 640), (0,) * 5, second_ends, ((1338, 640, 92),))


def dealt(lengths, size):
    """A layout, the most pairs of a rank as those of the mean, and the share of cut documents."""
    begins = np.concatenate([[0], np.cumsum(lengths)])
    layout = Layout.balanced(begins, size)
    place = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
    pairs = [int((place[layout.positions(rank)] + 1).sum()) for rank in range(size)]
    split = split_of(layout, begins.astype(np.int64).tobytes(), 0)
    cut = 1.0 if split is None else split.layout.seqlen / begins[-1]
    return layout, max(pairs) * size / sum(pairs), cut


@pytest.mark.parametrize("size", [2, 4])
def test_few_documents_are_cut(size, rng):
    """Of long and short ones less than a twentieth of the tokens; ranks have as many tokens."""
    shares = []
    for _ in range(10):
        layout, uneven, cut = dealt(rng.integers(64, 32768, 40), size)
        assert uneven <= 1.03
        shares.append(cut)
        counts = [layout.rows(rank) for rank in range(size)]
        assert max(counts) - min(counts) < size
    assert np.mean(shares) <= 0.05


def test_no_rank_has_more_tokens_than_its_share(rng):
    """Of any documents, down to fewer tokens than ranks; every rank gets some of many tokens."""
    for _ in range(2000):
        lengths = np.exp(rng.normal(*rng.choice([(1, 1), (5, 1.5), (8, 2)]), rng.integers(0, 30)))
        begins = np.concatenate([[0], np.cumsum(lengths.astype(int))])
        size, chunk = int(rng.integers(1, 10)), int(rng.choice([1, 128, 1024, 10**9]))
        for heavy, slack in itertools.product((np.inf, 0.25, 0.0), SLACKS):
            runs = sorted(Deal(begins, size, max(chunk, 16), slack, heavy).runs)
            counts = np.zeros(size, int)
            for run in runs:
                counts[run.rank] += run.end - run.begin
            assert counts.max() <= -(-begins[-1] // size)
            assert [run.begin for run in runs[1:]] == [run.end for run in runs[:-1]]
            assert counts.sum() == begins[-1]
        layout = Layout.balanced(begins, size, chunk=chunk)
        if begins[-1] >= 4 * size:
            assert min(layout.rows(rank) for rank in range(size)) > 0, (lengths, size, chunk)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_ranks_work_alike_whatever_the_documents(size, rng):
    """Few of them hold most of all pairs: these are cut, by chunks where that evens ranks out."""
    for _ in range(10):
        lengths = np.exp(rng.normal(8, 1.5, 8 * size)).astype(int) + 1
        assert dealt(lengths, size)[1] <= 1.05
    for lengths in ([131072], [100000, 31072], [4096] * 2 * size) if size <= 8 else ():
        layout, uneven, _ = dealt(lengths, size)
        assert uneven <= 1.05
        assert layout.rows(0) <= 1.02 * layout.seqlen / size + 1024


def test_documents_that_fit_are_not_cut():
    for size in (2, 4, 8):
        layout, uneven, cut = dealt([4096, 1024, 1024, 2048] * size, size)
        assert (uneven, cut) == (1.0, 0.0), layout
