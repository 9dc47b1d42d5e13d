# SPDX-License-Identifier: Apache-2.0
"""Expressions as text: to read, and to know them by.

`show` writes what a person would have written. `listing` writes a line for each node, with names
for places alone: it is the same for the same function with other numbers, arrays and lengths.
"""

from __future__ import annotations

from .expression import ARITHMETIC, COMPARISONS, LOGIC, NAMES, Expr, ordered

SIGNS = {**ARITHMETIC, **COMPARISONS, **LOGIC}
LONGEST = 2000  # characters of a text; a graph with many common parts would have no end


def number(x: object) -> str:
    """Return a constant as Python writes it."""
    return repr(x)


def line(node: Expr, names: dict[int, str]) -> str:
    """Return a node, its arguments under their names, which are kept by their ids."""
    args = [names[id(a)] if isinstance(a, Expr) else a for a in node.args]
    match node.op:
        case "index":
            return NAMES.get(args[0], args[0])
        case "const":
            return number(args[0])
        case "scalar":
            return f"number{args[0]}"
        case "load":
            return f"array{args[0]}[{', '.join(args[2:])}]"
        case "neg":
            return f"-{args[0]}"
        case "not":
            return f"~{args[0]}"
    if node.op in SIGNS:
        return f"({args[0]} {SIGNS[node.op]} {args[1]})"
    return f"{node.op}({', '.join(args)})"


def show(node: Expr) -> str:
    """Return an expression as a person would write it; a long one is cut."""
    names: dict[int, str] = {}
    for part in ordered(node):
        text = line(part, names)
        names[id(part)] = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return names[id(node)]


def listing(*roots: Expr) -> str:
    """Return a line for each node below some, to be compared and hashed."""
    names: dict[int, str] = {}
    lines = []
    for part in ordered(*roots):
        kind = f" {part.args[1]}" if part.op == "load" else ""
        lines.append(f"{part.type} {line(part, names)}{kind}")
        names[id(part)] = f"t{len(names)}"
    return "\n".join([*lines, *(names[id(root)] for root in roots)])
