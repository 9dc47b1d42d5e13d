# SPDX-License-Identifier: Apache-2.0
"""Finds what fast paths serve in a mask: limits around the diagonal, else the keys of each row.

A mask is a conjunction. Each part that bounds kv_idx from a side, or from both, by something free
of kv_idx goes into the begin and the end of a row's keys; what is left over is the rest:

    mask  ==  (begin <= kv_idx) & (kv_idx < end) & rest

The causal option counts from the bottom right, kv_idx <= q_idx from the top left; limits are given
back relative to the bottom-right diagonal, as the options are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .evaluate import Host, evaluate
from .expression import (
    COMPARISONS,
    INT,
    INT32_MAX,
    KV_LEN,
    Q_LEN,
    Expr,
    K,
    Q,
    TraceError,
    apply,
    is_const,
    maximum,
    minimum,
    ordered,
    read,
    where,
)

NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}  # of the sides of a comparison


class Interval(NamedTuple):
    """Keys begin <= kv_idx < end, expressions of the row; None is no limit."""

    begin: Expr | None
    end: Expr | None


class Split(NamedTuple):
    """A mask as the keys of a row and a condition on them; None is what does not limit."""

    begin: Expr | None
    end: Expr | None
    rest: Expr | None


def linear_in_k(e: Expr) -> tuple[int, Expr] | None:
    """Return (c, r) with e = c kv_idx + r and r free of kv_idx; None where there are none."""
    if "k" not in e.free:
        return 0, e
    if e is K:
        return 1, read(0)
    if e.op in ("add", "sub"):
        x, y = (linear_in_k(a) for a in e.args)
        if x and y:
            sign = 1 if e.op == "add" else -1
            return x[0] + sign * y[0], apply(e.op, x[1], y[1])
    if e.op == "neg":
        x = linear_in_k(e.args[0])
        return x and (-x[0], apply("neg", x[1]))
    return None


def one_sided(op: str, at: Expr) -> Interval | None:
    """Return the keys with kv_idx (op) at."""
    after = at + 1
    limits: dict[str, Any] = {
        "lt": (None, at),
        "le": (None, after),
        "gt": (after, None),
        "ge": (at, None),
    }
    limits["eq"] = (at, after)
    return Interval(*limits[op]) if op in limits else None


def of_quotient(op: str, quotient: Expr, at: Expr) -> Interval | None:
    """Return the keys with (kv_idx + e) // c (op) at: whole blocks of c."""
    inner, c = linear_in_k(quotient.args[0]), quotient.args[1]
    if inner is None or inner[0] != 1:
        return None
    first = at * c - inner[1]
    if op == "eq":
        return Interval(first, first + c)
    return one_sided(
        "ge" if op in ("ge", "gt") else "lt", first + c if op in ("gt", "le") else first
    )


def of_comparison(e: Expr) -> Interval | None:
    """Return the keys of a comparison."""
    op, (x, y) = e.op, e.args
    if x.type != INT or y.type != INT:
        return None
    if "k" in y.free and "k" not in x.free and (y.op in ("floordiv", "abs")):
        op, x, y = MIRRORED.get(op, op), y, x
    if x.op == "abs" and op in ("lt", "le"):  # |x| <= c
        inner = x.args[0]
        return interval(apply(op, inner, y) & apply(op, -inner, y))
    if x.op == "floordiv" and "k" in x.free and "k" not in y.free:
        return of_quotient(op, x, y) if op != "ne" else None
    sides = linear_in_k(apply("sub", x, y))
    if sides is None or sides[0] not in (1, -1):
        return None
    if sides[0] == 1:  # kv_idx + r (op) 0
        return one_sided(op, apply("neg", sides[1]))
    return one_sided(MIRRORED.get(op, op), sides[1])


def of_either(x: Interval | None, y: Interval | None) -> Interval | None:
    """Return the keys of two one-sided intervals that are open on one side together."""
    if x is None or y is None:
        return None
    if x.begin is None and y.begin is None and x.end is not None and y.end is not None:
        return Interval(None, maximum(x.end, y.end))
    if x.end is None and y.end is None and x.begin is not None and y.begin is not None:
        return Interval(minimum(x.begin, y.begin), None)
    return None


def of_both(x: Interval, y: Interval) -> Interval:
    """Return the keys of two intervals that lie in both."""
    begin = [e for e in (x.begin, y.begin) if e is not None]
    end = [e for e in (x.end, y.end) if e is not None]
    return Interval(
        maximum(*begin) if len(begin) == 2 else begin[0] if begin else None,
        minimum(*end) if len(end) == 2 else end[0] if end else None,
    )


def interval(e: Expr) -> Interval | None:
    """Return the keys of a condition where they are one interval of each row."""
    if "k" not in e.free:  # a row that sees all, or nothing
        return Interval(None, where(e, INT32_MAX, 0))
    if e.op == "not":
        x = e.args[0]
        if x.op in COMPARISONS:
            return interval(apply(NEGATED[x.op], *x.args)) if x.args[0].type == INT else None
        if x.op in ("and", "or"):
            return interval(apply("or" if x.op == "and" else "and", ~x.args[0], ~x.args[1]))
        return None
    if e.op in ("and", "or"):
        x, y = (interval(a) for a in e.args)
        if e.op == "or":
            return of_either(x, y)
        return of_both(x, y) if x and y else None
    return of_comparison(e) if e.op in COMPARISONS else None


MOST_NODES = 1 << 14  # of a condition, where each is counted as often as it is used


def is_small(e: Expr) -> bool:
    """Whether a condition may be walked as a tree; each further use of a large part doubles it."""
    count: dict[int, int] = {}
    for node in ordered(e):
        count[id(node)] = 1 + sum(count[id(x)] for x in node.nodes())
    return count[id(e)] <= MOST_NODES


def conjuncts(e: Expr) -> list[Expr]:
    """List the conditions that must all hold."""
    return parts_of(e) if is_small(e) else [e]


def parts_of(e: Expr) -> list[Expr]:
    """Do what `conjuncts` does, whatever that takes."""
    if e.op == "and":
        return [*parts_of(e.args[0]), *parts_of(e.args[1])]
    if e.op == "not" and e.args[0].op == "or":
        return parts_of(~e.args[0].args[0] & ~e.args[0].args[1])
    return [e]


def keys_of(part: Expr) -> Interval | None:
    """Return the interval of a condition that is not too large to look for one."""
    return interval(part) if is_small(part) else None


def split(e: Expr) -> Split:
    """Return the begin and end of each row's keys, and the condition that is left."""
    try:
        return split_parts(e)
    except TraceError:  # a limit beyond int32
        return Split(None, None, e)


def split_parts(e: Expr) -> Split:
    """Do what `split` does, where every limit is an int32."""
    found, rest = Interval(None, None), None
    for part in conjuncts(e):
        keys = None if is_const(part, True) else keys_of(part)
        if is_const(part, True):
            continue
        if keys is None:
            rest = part if rest is None else rest & part
        else:
            found = of_both(found, keys)
    return Split(simplified(found.begin), simplified(found.end), rest)


def simplified(e: Expr | None) -> Any:
    """Return a sum of indices and numbers collected: q - (q - k) is k."""
    if e is None or e.type != INT:
        return e
    if e.op in ("min", "max"):
        return apply(e.op, *(simplified(a) for a in e.args))
    terms: dict[int, tuple[Expr, int]] = {}  # by id of the node
    number = 0

    def collect(x: Expr, sign: int) -> None:
        nonlocal number
        if x.op in ("add", "sub"):
            collect(x.args[0], sign)
            collect(x.args[1], sign if x.op == "add" else -sign)
        elif x.op == "neg":
            collect(x.args[0], -sign)
        elif x.op == "const":
            number += sign * x.args[0]
        else:
            terms[id(x)] = x, terms.get(id(x), (x, 0))[1] + sign

    collect(e, 1)
    out = None
    for x, c in sorted(terms.values(), key=lambda term: -term[1]):
        if c != 0:
            y = x if abs(c) == 1 else read(abs(c)) * x
            out = (y if c > 0 else -y) if out is None else out + y if c > 0 else out - y
    if out is None or number == 0:
        return read(number) if out is None else out
    return out + number if number > 0 else out - (-number)


def from_diagonal(e: Expr, by: Expr) -> Expr:
    """Return e - by, inside min and max."""
    if e.op in ("min", "max"):
        return apply(e.op, *(from_diagonal(a, by) for a in e.args))
    return simplified(apply("sub", e, by))


def limits(host: Host, keys: Split, lengths: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (left, right) of a window around the bottom-right diagonal that a mask is.

    -1 is unlimited. `lengths` are those of the queries and keys of every sequence; None where they
    differ or are not known, when only a mask that names q_len and kv_len counts from the bottom
    right. None for a mask that is no such window.
    """
    if keys.rest is not None:
        return None
    found = []
    for e in (keys.begin, keys.end):
        offset = None if e is None else offset_of(host, e, lengths)
        if e is not None and offset is None:
            return None
        found.append(offset)
    left = -1 if found[0] is None else -found[0]
    right = -1 if found[1] is None else found[1] - 1
    if (found[0] is not None and left < 0) or (found[1] is not None and right < 0):
        return None  # options reach the diagonal
    return left, right


def window_within(
    host: Host, e: Expr, lengths: tuple[int, int] | None
) -> tuple[tuple[int, int] | None, Expr | None]:
    """Return a window that a mask lies in, if any, and the condition that is left; see `limits`."""
    window, rest = None, None
    for part in conjuncts(e):
        try:
            keys = keys_of(part)
            found = None
            if keys is not None:
                begin, end = map(simplified, keys)
                found = limits(host, Split(begin, end, None), lengths)
        except TraceError:  # a limit beyond int32
            found = None
        if found is None:
            rest = part if rest is None else rest & part
        else:
            window = found if window is None else narrowed(window, found)
    return window, rest


def narrowed(given: Any, found: tuple[int, int]) -> tuple[int, int]:
    """Return a window within two windows, -1 being unlimited."""
    pairs = zip(given, found, strict=True)
    return tuple(max(pair) if -1 in pair else min(pair) for pair in pairs)


def offset_of(host: Host, e: Expr, lengths: tuple[int, int] | None) -> int | None:
    """Return e - (q_idx + kv_len - q_len) where that is one number for all rows."""
    diagonal = Q + (KV_LEN - Q_LEN)
    x = from_diagonal(e, Q if lengths is not None else diagonal)
    known = {"q_len", "kv_len"} if lengths is not None else set()
    if x.free - known or reads_arrays(x):
        return None
    q_len, kv_len = lengths or (0, 0)
    return int(evaluate(host, x, {"q_len": q_len, "kv_len": kv_len})) - (kv_len - q_len)


def reads_arrays(e: Expr) -> bool:
    """Whether an expression reads a captured array."""
    return e.op == "load" or any(reads_arrays(a) for a in e.nodes())


def runs(keys: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...] | None:
    """Return the values of an array and where each begins and ends, if each is one run."""
    changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    begins = np.concatenate([[0], changes]) if len(keys) else np.empty(0, np.int64)
    values = keys[begins]
    order = np.argsort(values, kind="stable")
    values = values[order]
    if np.any(values[1:] == values[:-1]):
        return None
    ends = np.concatenate([changes, [len(keys)]])
    return values, begins[order], ends[order]


def document_parts(rest: Expr | None) -> tuple[list[tuple[Expr, Expr]], Expr | None]:
    """Return the parts x == array[kv_idx] of a rest, x free of kv_idx, and what is left of it."""
    found, left = [], None
    for part in conjuncts(rest) if rest is not None else ():
        pair = None
        if part.op == "eq" and all(a.type == INT for a in part.args):
            for x, y in (part.args, part.args[::-1]):
                if "k" not in x.free and y.op == "load" and y.args[-1] is K:
                    pair = (x, y) if not any("k" in i.free for i in y.args[2:-1]) else None
        if pair is not None and "q" not in frozenset().union(*(i.free for i in pair[1].args[2:])):
            found.append(pair)
        else:
            left = part if left is None else left & part
    return found, left
