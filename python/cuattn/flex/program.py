# SPDX-License-Identifier: Apache-2.0
"""Expressions as programs for the kernels: int32 [n, 6], rows of code, to, a, b, c, number.

What an operation means stands in cpu/flex.cpp, the codes in include/cuattn/params/flex.h; a test
holds the two lists against each other. Operations that neither the key nor the score enters come
first, and keep their registers: a kernel runs them once for a tile of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .derivative import derivative, loads
from .expression import BOOL, FLOAT, SCORE, Expr, ordered
from .trace import Traced

CODES = (
    *("q", "k", "b", "h", "q_len", "kv_len", "score", "number", "load"),
    *("add", "sub", "mul", "min", "max", "neg", "abs", "floordiv", "mod", "lt", "le", "eq", "ne"),
    *("addf", "subf", "mulf", "divf", "minf", "maxf", "negf", "absf", "ltf", "lef", "eqf", "nef"),
    *("exp", "log", "tanh", "sqrt", "float", "and", "or", "xor", "not", "where", "give"),
)
CODE = {name: code for code, name in enumerate(CODES)}
MAX_REGISTERS = 24
MIRRORED = {"gt": "lt", "ge": "le"}


def number_bits(x: Any, kind: str) -> int:
    """Return what a register holds of a number."""
    if kind == FLOAT:
        with np.errstate(over="ignore"):
            return int(np.float32(x).view(np.int32))
    return -int(x) if kind == BOOL else int(x)


def operation(node: Expr, scalars: list[Any], first_slot: int) -> tuple[str, list[Expr], int]:
    """Return the name of a node's operation, its arguments and its number."""
    args = list(node.nodes())
    if node.op == "index":
        return node.args[0], [], 0
    if node.op in ("const", "scalar"):
        x = node.args[0] if node.op == "const" else scalars[node.args[0]]
        return "number", [], number_bits(x, node.type)
    if node.op == "load":
        return "load", args, node.args[0] + first_slot
    if node.op == "give":
        return "give", args, node.args[0]
    if node.op in MIRRORED:
        args.reverse()
    name = MIRRORED.get(node.op, node.op)
    is_float = args[0].type == FLOAT and f"{name}f" in CODE
    return (f"{name}f" if is_float else name), args, 0


class Registers:
    """Which registers are free; `fresh` ones were never written."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0

    def take(self) -> int:
        """Return a free register."""
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1


def written(order: list[Expr], num_rows: int, scalars: list[Any], slot: int) -> Any:
    """Return the rows of a program and how many registers it takes."""
    last = {id(a): i for i, node in enumerate(order) for a in node.nodes()}
    place = {id(node): i for i, node in enumerate(order)}
    registers, rows = Registers(), []
    at: dict[int, int] = {}  # registers by id of the node
    for i, node in enumerate(order):
        if i == num_rows:
            registers.free.clear()  # those of the first part are not written again
        name, args, number = operation(node, scalars, slot)
        ids = [id(a) for a in args]
        sources = [at[a] for a in ids] + [0] * (3 - len(args))
        for a in dict.fromkeys(ids):
            is_kept = i >= num_rows and place[a] < num_rows
            if last[a] == i and not is_kept:
                registers.free.append(at[a])
        at[id(node)] = registers.take()
        if id(node) not in last:  # what it gives is read by nobody, or is the result
            registers.free.append(at[id(node)])
        rows.append([CODE[name], at[id(node)], *sources, number])
    return rows, registers.count


def program(expr: Expr, scalars: list[Any], first_slot: int = 0) -> np.ndarray[Any, Any]:
    """Return an expression as a program.

    Raises
    ------
    NotImplementedError
        If it keeps more values at once than there are registers.
    """
    return program_of(ordered(expr), scalars, first_slot)


def gradient_program(score: Traced, slots: set[int]) -> np.ndarray[Any, Any]:
    """Return the derivative of a score function, which also gives the arrays of some slots theirs.

    Each read of such an array gives it the gradient of the score times the score's derivative by
    what was read; the last operation is the derivative by the score that the function takes.
    """
    gives = []
    for load in loads(score.expr):
        if load.args[0] in slots:
            by_load = derivative(score.expr, load)
            gives.append(Expr("give", (load.args[0], by_load, *load.args[2:]), FLOAT))
    by_score = Expr("give", (-1, derivative(score.expr, SCORE)), FLOAT)
    return program_of(ordered(*gives, by_score), score.scalars, 0)


def program_of(order: list[Expr], scalars: list[Any], first_slot: int) -> np.ndarray[Any, Any]:
    """Return nodes, arguments first, as a program whose result is the last one's."""
    of_rows = [n for n in order if n.op != "give" and n.free.isdisjoint(("k", "score"))]
    of_keys = [n for n in order if n.op == "give" or not n.free.isdisjoint(("k", "score"))]
    for front in (of_rows, []):
        rest = of_keys if front else order
        rows, count = written([*front, *rest], len(front), scalars, first_slot)
        if count <= MAX_REGISTERS:
            return np.array(rows, np.int32)
    raise NotImplementedError(
        f"flex_attention: a function may keep {MAX_REGISTERS} values at once, got {count} of "
        f"{len(order)}; put what does not depend on both indices into an array that it captures"
    )
