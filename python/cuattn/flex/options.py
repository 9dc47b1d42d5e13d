# SPDX-License-Identifier: Apache-2.0
"""Finds scale, softcap and ALiBi in a score function: kernels of CUDA have them without a compiler.

    score_mod  ==  softcap(factor * score) - slope * |q_idx + kv_len - q_len - kv_idx|

where slope hangs on b and h alone, and each of the three may be missing. Under a causal mask the
distance may stand without its bars.
"""

from __future__ import annotations

import contextlib
from numbers import Real
from typing import Any

import numpy as np

from .evaluate import Host, evaluate
from .expression import SCORE, Expr
from .rows import linear_in_k

SCALE, SOFTCAP, ALIBI = "scale", "softcap", "alibi_slopes"


def number_of(host: Host, e: Expr) -> float | None:
    """Return the value of what hangs on no index and no score; None of all else."""
    return None if e.free else float(evaluate(host, e, {}, np.float64))


def factors(e: Expr) -> list[tuple[Expr, Expr]]:
    """List the ways to read a product, each side first."""
    return [e.args, e.args[::-1]] if e.op == "mul" else []


def factor_of(host: Host, e: Expr) -> float | None:
    """Return a of ``a * score`` with a > 0."""
    if e is SCORE:
        return 1.0
    for x, number in factors(e):
        if x is SCORE:
            return positive(number_of(host, number))
    if e.op == "div" and e.args[0] is SCORE:
        divisor = positive(number_of(host, e.args[1]))
        return None if divisor is None else positive(1 / divisor)
    return None


def positive(number: float | None) -> float | None:
    """Return a number above 0 that float32 holds, also times a scale of such a size."""
    return number if number is not None and 2.0**-60 <= number <= 2.0**60 else None


def cap_of(host: Host, e: Expr) -> tuple[float, float] | None:
    """Return c and a of ``c * tanh(a * score / c)``."""
    for number, tanh in factors(e):
        cap = positive(number_of(host, number))
        if cap is None or tanh.op != "tanh":
            continue
        ratio = factor_of(host, tanh.args[0])
        factor = None if ratio is None else positive(ratio * cap)
        if factor is not None:
            return cap, 1.0 if abs(factor - 1) < 1e-6 else factor
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
    """Return a score function as options, scale as a factor of the call's; None if it is more.

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
    factor = factor_of(host, e)
    if factor is None:
        capped = cap_of(host, e)
        if capped is None:
            return None
        found[SOFTCAP], factor = capped
    if factor != 1:
        found[SCALE] = factor
    return found


def softcap_of(arguments: dict[str, Any]) -> float:
    """Return the softcap of a call; 0 where it has none, or none that a score function can hold."""
    cap = arguments.get(SOFTCAP)
    with contextlib.suppress(OverflowError):  # of an int, which the compiled module refuses
        return (positive(float(cap)) or 0.0) if isinstance(cap, Real) else 0.0
    return 0.0


def join_options(arguments: dict[str, Any], found: dict[str, Any]) -> None:
    """Give a call the options that its score function became; a factor multiplies its scale."""
    arguments.update(beside_scale(found))
    if SCALE in found:
        scale = arguments.get(SCALE)
        scale = arguments["q"].shape[-1] ** -0.5 if scale is None else float(scale)
        arguments[SCALE] = scale * found[SCALE]


def beside_scale(found: dict[str, Any]) -> dict[str, Any]:
    """Leave the factor of the scale out: it is above 0, so a plan does not hang on it."""
    return {name: option for name, option in found.items() if name != SCALE}
