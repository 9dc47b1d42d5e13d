# SPDX-License-Identifier: Apache-2.0
"""Finds softcap and ALiBi in a score function: kernels of CUDA have them without a compiler.

    score_mod  ==  softcap(score) - slope * |q_idx + kv_len - q_len - kv_idx|

where slope hangs on b and h alone, and one of both may be missing. Under a causal mask the distance
may stand without its bars.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .evaluate import Host, evaluate
from .expression import SCORE, Expr
from .rows import linear_in_k

SOFTCAP, ALIBI = "softcap", "alibi_slopes"


def number_of(host: Host, e: Expr) -> float | None:
    """Return the value of what hangs on no index and no score; None of all else."""
    return None if e.free else float(evaluate(host, e, {}, np.float64))


def factors(e: Expr) -> list[tuple[Expr, Expr]]:
    """List the ways to read a product, each side first."""
    return [e.args, e.args[::-1]] if e.op == "mul" else []


def cap_of(host: Host, e: Expr) -> float | None:
    """Return c of ``c * tanh(score / c)``."""
    for number, tanh in factors(e):
        cap = number_of(host, number)
        if cap is None or tanh.op != "tanh" or not 0 < cap < np.inf:
            continue
        ratio = tanh.args[0]
        if ratio.op == "div" and ratio.args[0] is SCORE:
            return cap if number_of(host, ratio.args[1]) == cap else None
        for x, inverse in factors(ratio):
            value = number_of(host, inverse)
            if x is SCORE and value is not None and abs(value * cap - 1) < 1e-6:
                return cap
    return None


def is_distance(host: Host, e: Expr, lengths: tuple[int, int]) -> int:
    """Return 1 for the distance of a key before its query, -1 for its negative, 0 for all else."""
    line = linear_in_k(e)
    if line is None or line[0] not in (1, -1) or not line[1].free <= {"q", "q_len", "kv_len"}:
        return 0
    q = np.arange(lengths[0])
    found = evaluate(host, line[1], {"q": q, "q_len": lengths[0], "kv_len": lengths[1]})
    return -line[0] if np.all(-line[0] * found == q + lengths[1] - lengths[0]) else 0


def slopes_of(
    host: Host, e: Expr, lengths: tuple[int, int], causal: bool, shape: tuple[int, int]
) -> Any:
    """Return the slopes of ``-slope * distance``, [num_heads] or [batch, num_heads], or None."""
    for slope, way in factors(e):
        if way.op != "float" or not slope.free <= {"b", "h"}:
            continue
        inner, sign = (way.args[0].args[0], -1) if way.args[0].op == "neg" else (way.args[0], 1)
        is_absolute = inner.op == "abs"
        direction = is_distance(host, inner.args[0] if is_absolute else inner, lengths)
        if direction == 0 or not (is_absolute or causal):
            continue
        sign *= 1 if is_absolute else direction
        index = {"b": np.arange(shape[0])[:, None], "h": np.arange(shape[1])}
        slopes = np.broadcast_to(evaluate(host, slope, index), shape).astype(np.float32)
        return np.ascontiguousarray(-sign * (slopes if "b" in slope.free else slopes[0]))
    return None


def score_options(
    host: Host, e: Expr, lengths: tuple[int, int], causal: bool, shape: tuple[int, int]
) -> dict[str, Any] | None:
    """Return a score function as options; None if it is more than they are.

    Parameters
    ----------
    host : Host
        What it captures.
    e : Expr
        The function.
    lengths : (int, int)
        Queries and keys of every sequence.
    causal : bool
        No key behind its query is seen.
    shape : (int, int)
        Sequences and query heads.
    """
    found: dict[str, Any] = {}
    if e.op in ("add", "sub"):
        way = slopes_of(host, e.args[1], lengths, causal, shape)
        if way is None and e.op == "add":
            e = Expr("add", e.args[::-1], e.type)
            way = slopes_of(host, e.args[1], lengths, causal, shape)
        if way is None:
            return None
        found[ALIBI] = way if e.op == "add" else -way
        e = e.args[0]
    if e is not SCORE:
        cap = cap_of(host, e)
        if cap is None:
            return None
        found[SOFTCAP] = cap
    return found
