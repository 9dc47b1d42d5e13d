# SPDX-License-Identifier: Apache-2.0
"""Ready score functions for `flex_attention`; distances count from the bottom right, as ALiBi's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .expression import maximum, minimum, tanh

ScoreMod = Callable[..., Any]


def alibi(slopes: Any) -> ScoreMod:
    """Return ALiBi: a head's slope times the distance is taken from the score.

    Parameters
    ----------
    slopes : float array, [num_heads_q], or int
        Slopes; for a number of heads those of the paper, ``2 ** (-8 (h + 1) / heads)``.
    """
    if isinstance(slopes, int):
        slopes = np.exp2(-8.0 * np.arange(1, slopes + 1) / slopes).astype(np.float32)

    def score_mod(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any
    ) -> Any:
        return score - slopes[h] * abs(q_idx + kv_len - q_len - kv_idx)

    return score_mod


def softcap(cap: float) -> ScoreMod:
    """Return ``cap * tanh(score / cap)``."""
    if not cap > 0:
        raise ValueError(f"softcap: cap must be > 0, got {cap}; leave the function out for none")
    return lambda score, b, h, q_idx, kv_idx: cap * tanh(score / cap)


def relative_bias(table: Any) -> ScoreMod:
    """Return a learned bias of the distance: ``table[h, q - kv + n]``, distances clamped to n.

    Parameters
    ----------
    table : float array, [num_heads_q, 2 n + 1]
        Of each head a number for each distance from -n to n.
    """
    n = (table.shape[1] - 1) // 2
    if len(table.shape) != 2 or table.shape[1] != 2 * n + 1:
        raise ValueError(
            f"relative_bias: table must have shape (num_heads_q, 2 n + 1), got "
            f"{tuple(table.shape)}; it has a number for each distance from -n to n"
        )

    def score_mod(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any
    ) -> Any:
        distance = q_idx + kv_len - q_len - kv_idx
        return score + table[h, minimum(maximum(distance, -n), n) + n]

    return score_mod


def t5_buckets(table: Any, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Return T5's bias: a number for each head and bucket of distances (arXiv:1910.10683).

    Parameters
    ----------
    table : float array, [num_buckets, num_heads_q]
        As the relative attention bias of T5 holds it.
    bidirectional : bool
        Half of the buckets are for keys behind the query; else these have bucket 0.
    max_distance : int
        Distances from here on share the last bucket.
    """
    bucket = np.array(
        [
            t5_bucket(d, table.shape[0], bidirectional, max_distance)
            for d in range(-max_distance, max_distance + 1)
        ],
        np.int32,
    )

    def score_mod(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, q_len: Any, kv_len: Any
    ) -> Any:
        distance = kv_idx - (q_idx + kv_len - q_len)
        near = minimum(maximum(distance, -max_distance), max_distance)
        return score + table[bucket[near + max_distance], h]

    return score_mod


def t5_bucket(distance: int, num_buckets: int, bidirectional: bool, max_distance: int) -> int:
    """Return the bucket of ``key - query``: one each for short distances, then by logarithm."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (num_buckets - exact)), num_buckets - 1)
