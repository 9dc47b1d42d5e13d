# SPDX-License-Identifier: Apache-2.0
"""The derivative of an expression by the score, or by an element of a captured array."""

from __future__ import annotations

from .expression import FLOAT, Expr, is_const, ordered, read, where

ZERO, ONE = read(0.0), read(1.0)
LEAVES = ("const", "scalar", "index", "load", "float")


def derivative(expr: Expr, by: Expr) -> Expr:
    """Return d expr / d by; at a corner of abs, minimum or maximum the one of a side."""
    found: dict[int, Expr] = {}  # by id of the node
    for node in ordered(expr):
        parts = [found.get(id(a), ZERO) for a in node.nodes()]
        if node is by:
            found[id(node)] = ONE
        elif node.type != FLOAT or node.op in LEAVES or all(is_const(p, 0.0) for p in parts):
            found[id(node)] = ZERO
        else:
            found[id(node)] = rule(node, parts)
    return found[id(expr)]


def times(x: Expr, y: Expr) -> Expr:
    """Return x y, without a product where one is 0."""
    return ZERO if is_const(x, 0.0) or is_const(y, 0.0) else x * y


def rule(node: Expr, d: list[Expr]) -> Expr:
    """Return the derivative of an operation from those of its arguments."""
    a = node.args
    match node.op:
        case "add" | "sub":
            return d[0] + d[1] if node.op == "add" else d[0] - d[1]
        case "mul":
            return times(d[0], a[1]) + times(a[0], d[1])
        case "div":
            return (d[0] - times(node, d[1])) / a[1]
        case "neg":
            return -d[0]
        case "abs":
            return where(a[0] < 0.0, -d[0], d[0])
        case "exp":
            return times(node, d[0])
        case "log":
            return d[0] / a[0]
        case "tanh":
            return times(1.0 - node * node, d[0])
        case "sqrt":
            return times(0.5 / node, d[0])
        case "min":
            return where(a[0] <= a[1], d[0], d[1])
        case "max":
            return where(a[0] >= a[1], d[0], d[1])
        case "where":
            return where(a[0], d[1], d[2])
    raise AssertionError(node.op)


def loads(expr: Expr) -> list[Expr]:
    """List the float elements of captured arrays that an expression reads."""
    return [n for n in ordered(expr) if n.op == "load" and n.type == FLOAT]
