# SPDX-License-Identifier: Apache-2.0
"""Masks of the kernel for Hoppers as CUDA C++: what hangs on the key or the row alone, once.

A thread there has 64 scores of a tile: 2 rows and 32 keys, and 7 other threads of its warp have the
same keys. So a lane computes what hangs on a key for 4 of 128, and the warp shares it by shuffles.
Next: cuda/attention/sm90/seen.cuh (who asks), emit.py.
"""

from __future__ import annotations

from typing import Any

from .emit import CALLS, FLOAT_CALLS, TYPES, Function, statements
from .expression import Expr, K, ordered

MAX_AHEAD = 2  # values of a key and of a row that registers hold beside S, O and P
AT_ONCE, WITHOUT_AHEAD = 8, 4  # parts of 8 scores that load, asked without a branch
FEW_LOADS = 64  # keys of an element: two loads of a row in a tile

MEMBERS = """\
  static constexpr bool kLoads = %(loads)s;
  static constexpr int kAtOnce = %(at_once)d;
  struct Keys {
%(key_members)s  };
  struct Rows {
%(row_members)s  };
  static __device__ __forceinline__ void of_key(Keys& to, const TilePlace<kKeys>& at,
                                                const FunctorParams& p) {
%(key_lines)s  }
  static __device__ __forceinline__ void of_row(Rows& to, const TilePlace<kKeys>& at,
                                                const FunctorParams& p) {
%(row_lines)s  }
  static __device__ __forceinline__ Keys of_lane(const Keys& own, int lane) {
    return {%(shuffles)s};
  }
  static __device__ __forceinline__ bool sees(const TilePlace<kKeys>& at, const FunctorParams& p,
                                              const Keys& key, const Rows& row) {
%(lines)s  }
"""


def is_natural(node: Expr) -> bool:
    """Whether a whole number is never negative, by its form: a sum of indices, say."""
    if node.op in ("const", "index"):
        return node.op == "index" or node.args[0] >= 0
    if node.op in ("add", "mul", "min", "floordiv"):  # of a positive number
        return all(is_natural(a) for a in node.nodes() if a.op != "scalar" or node.op != "floordiv")
    if node.op == "max":
        return any(map(is_natural, node.nodes()))
    return node.op in ("mod", "abs")


def unsigned(node: Expr, args: list[str]) -> str | None:
    """Return what divides a number that is never negative; None for other nodes."""
    if node.op not in CALLS or not is_natural(node.args[0]):
        return None
    if node.op == "floordiv" and node.args[0] is K and node.args[1].op == "const":
        return f"key_quotient<{node.args[1].args[0]}>(at)"
    sign = "/" if node.op == "floordiv" else "%"
    return f"static_cast<uint32_t>({args[0]}) {sign} static_cast<uint32_t>({args[1]})"


def is_coarse(node: Expr, keys: int = 8) -> bool:
    """Whether so many neighbouring keys have one value, which is computed once for them."""
    if node.op == "floordiv" and node.args[0] is K and node.args[1].op == "const":
        return bool(node.args[1].args[0] % keys == 0)
    return node is not K and all(is_coarse(a, keys) for a in node.nodes())


def is_dear(node: Expr) -> bool:
    """Whether a node is worth computing ahead, by itself."""
    if node.op in CALLS and node.args[1].op == "const":
        return bool(node.args[1].args[0].bit_count() != 1)
    return node.op in ("load", "div", *CALLS, *FLOAT_CALLS)


def computed_ahead(root: Expr, is_packed: bool) -> tuple[list[Expr], list[Expr]]:
    """Return the largest parts of a mask that hang on the key, and on the row, alone.

    Where heads are packed, a row is of one of them.
    """
    of_row = {"q", "h"} if is_packed else {"q"}
    order, dear = ordered(root), set()
    for node in order:
        if is_dear(node) or any(id(a) in dear for a in node.nodes()):
            dear.add(id(node))
    keys, rows, needed = [], [], {id(root)}
    for node in reversed(order):
        if id(node) not in needed or id(node) not in dear:
            continue
        if "k" not in node.free:
            rows.append(node)
        elif of_row.isdisjoint(node.free) and not is_coarse(node):
            keys.append(node)
        else:
            needed.update(map(id, node.nodes()))
    count = 1 if max(len(keys), len(rows)) > MAX_AHEAD else MAX_AHEAD  # fewer where many are left
    return keys[:count], rows[:count]


def members(function: Function, first_number: int, is_packed: bool = False) -> str:
    """Return the members of a mask in `sm90`; all of it is exact."""
    given = function, first_number, False
    parts: dict[str, Any] = {}
    known: dict[int, str] = {}
    for name, nodes in zip(("key", "row"), computed_ahead(function.expr, is_packed), strict=True):
        names, lines = statements(nodes, *given, form=unsigned)
        fields = [f"    {TYPES[node.type]} e{i};\n" for i, node in enumerate(nodes)]
        lines += [f"    to.e{i} = {names[id(node)]};\n" for i, node in enumerate(nodes)]
        known |= {id(node): f"{name}.e{i}" for i, node in enumerate(nodes)}
        parts |= {f"{name}_members": "".join(fields), f"{name}_lines": "".join(lines)}
        if name == "key":
            shuffles = (f"of_lane_value(own.e{i}, lane)" for i in range(len(nodes)))
            parts["shuffles"] = ", ".join(shuffles)
    names, lines = statements([function.expr], *given, known, unsigned)
    lines.append(f"    return {names[id(function.expr)]};\n")
    parts["lines"] = "".join(lines)
    left = [e for e in ordered(function.expr) if id(e) in names and id(e) not in known]
    # All at once, as a loop holds what hangs on no score in registers. Two rounds where nothing is
    # held ahead: the addresses of 64 loads in flight would spill.
    parts["at_once"] = AT_ONCE if known else WITHOUT_AHEAD
    loads = any(e.op == "load" and not is_coarse(e, FEW_LOADS) for e in left)
    return MEMBERS % {**parts, "loads": "true" if loads else "false"}
