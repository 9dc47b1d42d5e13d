# SPDX-License-Identifier: Apache-2.0
"""Layouts hold every token once; the calls of two runs pair what the mask of the whole pairs."""

from __future__ import annotations

import numpy as np
import pytest

import frameworks

frameworks.require("torch")
from layouts import draw_documents, draw_layout  # noqa: E402

from cuattn.parallel import Layout  # noqa: E402
from cuattn.parallel.pairs import find_pieces, window_of  # noqa: E402


def test_every_token_lies_on_one_rank(rng):
    for _ in range(1000):
        layout = draw_layout(rng)
        places = [layout.positions(rank) for rank in range(layout.size)]
        found = np.concatenate(places)
        assert np.array_equal(np.sort(found), np.arange(layout.seqlen)), layout
        for rank, mine in enumerate(places):
            chunks = layout.chunks(rank)
            assert np.array_equal(mine, np.concatenate([np.zeros(0), *map(run, chunks)])), layout
            assert len(mine) == layout.rows(rank)


def run(span):
    return np.arange(span[0], span[0] + span[1])


def test_shard_then_unshard_is_the_identity_and_shard_follows_positions(rng):
    for _ in range(200):
        layout = draw_layout(rng)
        dim = int(rng.integers(-2, 2))
        x = rng.random(
            (layout.seqlen, layout.seqlen and 3) if dim in (0, -2) else (3, layout.seqlen)
        )
        parts = [layout.shard(x, rank, dim) for rank in range(layout.size)]
        assert np.array_equal(layout.unshard(parts, dim=dim), x), layout
        rank = int(rng.integers(layout.size))
        assert np.array_equal(parts[rank], np.take(x, layout.positions(rank), dim))


def test_positions_within_documents_begin_again_with_each():
    layout = Layout("contiguous", 7, 2, chunk=4)
    assert layout.positions(0, [0, 3, 3, 7]).tolist() == [0, 1, 2, 0]
    assert layout.positions(1, [0, 3, 3, 7]).tolist() == [1, 2, 3]


def dense_mask(seqlen, window, begins):
    place = np.arange(seqlen)
    apart = place[None] - place[:, None]  # key - query
    seen = np.ones((seqlen, seqlen), bool)
    if window[0] >= 0:
        seen &= apart >= -window[0]
    if window[1] >= 0:
        seen &= apart <= window[1]
    if begins is not None:
        document = np.searchsorted(begins, place, side="right")
        seen &= document[:, None] == document[None]
    return seen


def add_call(count, piece, queries, keys):
    """Count what the library's own definition of a window pairs in a call."""
    q_begin, k_begin = piece.q.start, piece.k.start
    q_lengths = piece.q_lengths or (piece.q.stop - piece.q.start,)
    k_lengths = piece.k_lengths or (piece.k.stop - piece.k.start,)
    left, right = piece.window
    assert left >= -1
    assert right >= -1
    for sq, sk in zip(q_lengths, k_lengths, strict=True):
        i, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None]
        seen = np.ones((sq, sk), bool)
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        rows, columns = queries[0] + q_begin, keys[0] + k_begin
        count[rows : rows + sq, columns : columns + sk] += seen
        q_begin, k_begin = q_begin + sq, k_begin + sk
    assert q_begin == piece.q.stop
    assert k_begin == piece.k.stop


@pytest.mark.parametrize("packed", [False, True])
def test_calls_of_all_runs_pair_exactly_what_the_mask_pairs(packed, rng):
    for _ in range(400):
        layout = draw_layout(rng, 60)
        while layout.inner > 1:
            layout = draw_layout(rng, 60)
        window = window_of(bool(rng.integers(2)), tuple(int(x) for x in rng.integers(-1, 30, 2)))
        begins = draw_documents(rng, layout.seqlen) if packed else None
        by_ring, by_gather = (np.zeros((layout.seqlen,) * 2, int) for _ in range(2))
        runs = [span for rank in range(layout.size) for span in layout.spans(rank)]
        for queries in runs:
            for keys in runs:
                for piece in find_pieces(queries, keys, window, begins):
                    add_call(by_ring, piece, queries, keys)
            whole = (0, layout.seqlen)
            for piece in find_pieces(queries, whole, window, begins):
                add_call(by_gather, piece, queries, whole)
        want = dense_mask(layout.seqlen, window, begins)
        assert np.array_equal(by_ring, want), (layout, window, begins)
        assert np.array_equal(by_gather, want), (layout, window, begins)


def test_balanced_layouts_are_balanced(rng):
    lengths = rng.integers(64, 32768, 40)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    place = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
    for size in (2, 4, 8):
        layout = Layout.balanced(begins, size)
        pairs = [int((place[layout.positions(rank)] + 1).sum()) for rank in range(size)]
        assert max(pairs) / (sum(pairs) / size) <= 1.05


REFUSED = {
    "kind": (lambda: Layout("striped", 8, 2), "kind must be 'contiguous' or 'zigzag', got 'strip"),
    "length": (lambda: Layout("zigzag", -1, 2), "seqlen must be >= 0, got -1"),
    "size": (lambda: Layout("zigzag", 8, 0), "size must be >= 1, got 0"),
    "chunk": (lambda: Layout("zigzag", 9, 2, chunk=2), "chunk must be at least 3 for seqlen 9"),
    "rank": (lambda: Layout("zigzag", 8, 2).rows(2), r"rank must lie in \[0, 2\), got 2"),
    "shard": (lambda: Layout("zigzag", 8, 2).shard(np.ones((1, 7)), 0), "x must have 8 tokens on"),
    "unshard": (
        lambda: Layout("contiguous", 8, 2, chunk=4).unshard([np.ones(4), np.ones(3)], dim=0),
        r"x must hold \[4, 4\] tokens on axis 0, got \[4, 3\]",
    ),
    "offsets": (lambda: Layout.balanced([0, 5, 3], 2), "cu_seqlens must not decrease"),
    "first": (lambda: Layout.balanced([1, 5], 2), "cu_seqlens must be integers .* begin with 0"),
    "floats": (lambda: Layout.balanced([0.0, 5.0], 2), "cu_seqlens must be integers"),
    "end": (lambda: Layout("zigzag", 8, 2).positions(0, [0, 7]), "must end with the 8 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_layout_is_refused_by_name(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_counts_are_integers():
    for name, seqlen, chunk in (("seqlen", 10.5, None), ("chunk", 10, 5.5)):
        with pytest.raises(TypeError, match=f"Layout: {name} must be an integer, got .*; pass an"):
            Layout("zigzag", seqlen, 1, chunk=chunk)
    with pytest.raises(TypeError, match=r"Layout.balanced: size must be an integer, got 2.0"):
        Layout.balanced([0, 5], 2.0)
    assert Layout("zigzag", np.int64(10), 1).rows(0) == 10
