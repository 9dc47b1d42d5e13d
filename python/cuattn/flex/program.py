# SPDX-License-Identifier: Apache-2.0
"""Expressions as programs for the kernels: int32 [n, 6], rows of code, to, a, b, c, number.

What an operation means stands in cpu/flex.cpp, the codes in include/cuattn/params/flex.h; a test
holds the two lists against each other. Operations that neither the key nor the score enters come
first, and keep their registers: a kernel runs them once for a tile of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .expression import BOOL, FLOAT, Expr, ordered

CODES = (
    *("q", "k", "b", "h", "q_len", "kv_len", "score", "number", "load"),
    *("add", "sub", "mul", "min", "max", "neg", "abs", "floordiv", "mod", "lt", "le", "eq", "ne"),
    *("addf", "subf", "mulf", "divf", "minf", "maxf", "negf", "absf", "ltf", "lef", "eqf", "nef"),
    *("exp", "log", "tanh", "sqrt", "float", "and", "or", "xor", "not", "where"),
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
    last = {a: i for i, node in enumerate(order) for a in node.nodes()}
    place = {node: i for i, node in enumerate(order)}
    registers, rows = Registers(), []
    at: dict[Expr, int] = {}
    for i, node in enumerate(order):
        if i == num_rows:
            registers.free.clear()  # those of the first part are not written again
        name, args, number = operation(node, scalars, slot)
        sources = [at[a] for a in args] + [0] * (3 - len(args))
        for a in dict.fromkeys(args):
            is_kept = i >= num_rows and place[a] < num_rows
            if last[a] == i and not is_kept:
                registers.free.append(at[a])
        at[node] = registers.take()
        rows.append([CODE[name], at[node], *sources, number])
    return rows, registers.count


def program(expr: Expr, scalars: list[Any], first_slot: int = 0) -> np.ndarray[Any, Any]:
    """Return an expression as a program.

    Raises
    ------
    NotImplementedError
        If it keeps more values at once than there are registers.
    """
    order = ordered(expr)
    of_rows = [node for node in order if node.free.isdisjoint(("k", "score"))]
    of_keys = [node for node in order if not node.free.isdisjoint(("k", "score"))]
    for front in (of_rows, []):
        rest = of_keys if front else order
        rows, count = written([*front, *rest], len(front), scalars, first_slot)
        if count <= MAX_REGISTERS:
            return np.array(rows, np.int32)
    raise NotImplementedError(
        f"flex_attention: a function may keep {MAX_REGISTERS} values at once, got {count} of "
        f"{len(order)}; put what does not depend on both indices into an array that it captures"
    )
