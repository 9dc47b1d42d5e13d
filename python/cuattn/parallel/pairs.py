# SPDX-License-Identifier: Apache-2.0
"""One run of queries against one run of keys, as calls of the library.

Both runs are places in one sequence, whose query i sees the keys from i - left to i + right, of its
own document where documents are packed. The library counts its window from the last query and the
last key of a call (bottom right), so the window of a pair is that of the sequence, shifted by where
the two runs end. Next: attend.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .layout import Span

Window = tuple[int, int]  # keys left and right of a query's own; -1: all


class Piece(NamedTuple):
    """Rows of a run of queries and of a run of keys that one call pairs, and its window."""

    q: slice
    k: slice
    window: Window
    shift: int  # how far the last query stands behind the last key, as tokens of the sequence
    q_lengths: tuple[int, ...] = ()  # of packed documents
    k_lengths: tuple[int, ...] = ()
    document: int = 0  # the first of these
    begin: int = 0  # the token of the sequence at which it begins


def window_of(causal: bool, window: Window) -> Window:
    """Return a window that says the causal mask as well."""
    left, right = (-1 if side < 0 else side for side in window)
    return left, 0 if causal else right


def find_piece(queries: Span, keys: Span, window: Window) -> Piece | None:
    """Cut two runs to what sees each other; None where nothing does."""
    (q0, nq), (k0, nk), (left, right) = queries, keys, window
    q1, k1 = q0 + nq, k0 + nk
    if right >= 0:
        k1 = min(k1, q1 + right)  # keys behind the right edge of the last query
        q0 = max(q0, k0 - right)  # queries before the first that sees the first key
    if left >= 0:
        q1 = min(q1, k1 + left)  # queries whose left edge is behind the last key
        if right >= 0:
            k1 = min(k1, q1 + right)
    if q0 >= q1 or k0 >= k1:
        return None
    # Query q0 + i sees key k0 + j when i + q0 - k0 - left <= j <= i + q0 - k0 + right, and in the
    # library's terms when i + sk - sq - L <= j <= i + sk - sq + R: shifted by where they end.
    shift = q1 - k1
    to_left = -1 if left < 0 or q1 - 1 - left <= k0 else left - shift
    to_right = -1 if right < 0 or q0 + right >= k1 - 1 else right + shift
    rows = slice(q0 - queries[0], q1 - queries[0]), slice(0, k1 - keys[0])
    return Piece(*rows, (to_left, to_right), shift)


def find_pieces(
    queries: Span,
    keys: Span,
    window: Window,
    begins: np.ndarray | None = None,
    counts: bool = False,
) -> list[Piece]:
    """List the calls that pair two runs; `begins`: where the documents of the sequence begin.

    Where places count, the documents of a call have all rows and keys from their begin on.
    """
    if begins is None:
        piece = find_piece(queries, keys, window)
        return [] if piece is None else [piece]
    found: list[Piece] = []
    for piece in document_pieces(queries, keys, window, begins):
        if found and joins(found[-1], piece) and not (counts and is_cut(found[-1], queries, keys)):
            last = found[-1]
            between = (0,) * (piece.document - last.document - len(last.q_lengths))
            found[-1] = last._replace(
                q=slice(last.q.start, piece.q.stop),
                k=slice(last.k.start, piece.k.stop),
                q_lengths=last.q_lengths + between + piece.q_lengths,
                k_lengths=last.k_lengths + between + piece.k_lengths,
            )
        else:
            found.append(piece)
    return found


def document_pieces(
    queries: Span, keys: Span, window: Window, begins: np.ndarray
) -> Iterator[Piece]:
    """Cut the runs at the documents that both touch."""
    low = max(queries[0], keys[0])  # the first document that both may touch holds no more than this
    first = max(int(np.searchsorted(begins, min(queries[0], keys[0]), side="right")) - 1, 0)
    first = max(first, int(np.searchsorted(begins, low, side="right")) - 1)
    spans = zip(begins[first:-1].tolist(), begins[first + 1 :].tolist(), strict=True)
    for document, (begin, end) in enumerate(spans, first):
        if begin >= sum(queries) or begin >= sum(keys):
            return
        own_q, own_k = (common((begin, end - begin), run) for run in (queries, keys))
        piece = find_piece(own_q, own_k, window)
        if piece is None:
            continue
        q, k = (
            slice(x.start + own[0] - run[0], x.stop + own[0] - run[0])
            for x, own, run in ((piece.q, own_q, queries), (piece.k, own_k, keys))
        )
        left, right = window
        own_window = (
            -1 if left < 0 else left - piece.shift,
            -1 if right < 0 else right + piece.shift,
        )
        lengths = (q.stop - q.start,), (k.stop - k.start,)
        yield Piece(q, k, own_window, piece.shift, *lengths, document, begin)


def common(a: Span, b: Span) -> Span:
    """Return what two runs share; of length 0 where nothing is."""
    begin, end = max(a[0], b[0]), min(sum(a), sum(b))
    return begin, max(end - begin, 0)


def joins(a: Piece, b: Piece) -> bool:
    """Whether two documents go into one call: whole ones, and one behind the other."""
    return a.shift == b.shift == 0 and a.q.stop == b.q.start and a.k.stop == b.k.start


def is_cut(piece: Piece, queries: Span, keys: Span) -> bool:
    """Whether the first document of a piece begins before its rows or its keys."""
    return not (queries[0] + piece.q.start == keys[0] + piece.k.start == piece.begin)
