# SPDX-License-Identifier: Apache-2.0
"""Masks of the kernel for Hoppers as CUDA C++: what hangs on the key or the row alone, once.

A thread there has 64 scores of a tile: 2 rows and 32 keys, and 7 other threads of its warp have the
same keys. So a lane computes what hangs on a key for 4 of 128, and the warp shares it by shuffles.
A source declares functions that the kernel prefers to those of sm90/functor.cuh and
sm90/scores.cuh, as their constraints are narrower. Next: emit.py.
"""

from __future__ import annotations

from .emit import CALLS, FLOAT_CALLS, TYPES, Function, statements
from .expression import Expr, K, ordered

MAX_AHEAD = 2  # values of a key and of a row that registers hold beside S, O and P

MEMBERS = """\
  struct Keys {
%(key_members)s  };
  struct Rows {
%(row_members)s  };
  template <class Place>
  static __device__ __forceinline__ void of_key(Keys& to, const Place& at, const FunctorParams& p) {
%(key_lines)s  }
  template <class Place>
  static __device__ __forceinline__ void of_row(Rows& to, const Place& at, const FunctorParams& p) {
%(row_lines)s  }
  static __device__ __forceinline__ Keys of_lane(const Keys& own, int lane) {
    return {%(shuffles)s};
  }
  template <class Place>
  static __device__ __forceinline__ bool sees(const Place& at, const FunctorParams& p,
                                              const Keys& key, const Rows& row) {
%(lines)s  }
"""

HELPERS = """\
constexpr int kTileN = 128;

// A place in a tile: its number, and its keys counted in eights.
struct TilePlace : device::ScorePlace {
  uint32_t tile, eight;
};
__device__ __forceinline__ TilePlace tile_place(const TilePlace& first, int i) {
  TilePlace at = first;
  const int row = (i >> 1 & 1) * 8, key = (i >> 2) * 8 + (i & 1);
  at.q += row;
  at.k += key;
  at.ahead += static_cast<float>(row - key);
  at.eight += i >> 2;
  return at;
}

// at.k / kDivisor: of a multiple of 128 that of the tile, of 8 that of eight keys.
template <int kDivisor>
__device__ __forceinline__ int32_t key_quotient(const TilePlace& at) {
  if constexpr (kDivisor % kTileN == 0) {
    return at.tile / (kDivisor / kTileN);
  } else if constexpr (kDivisor % 8 == 0 && kTileN % kDivisor == 0) {
    return at.tile * (kTileN / kDivisor) + at.eight / (kDivisor / 8);
  } else if constexpr (kDivisor % 8 == 0) {
    return (at.tile * (kTileN / 8) + at.eight) / (kDivisor / 8);
  } else {
    return static_cast<uint32_t>(at.k) / kDivisor;
  }
}

template <class Value>
__device__ __forceinline__ Value of_lane_value(Value own, int lane) {
  return __shfl_sync(0xffffffffu, own, lane);
}
__device__ __forceinline__ bool of_lane_value(bool own, int lane) {
  return __shfl_sync(0xffffffffu, static_cast<int>(own), lane) != 0;
}
"""

CALLED = """\
// Instead of sm90/functor.cuh's. A lane has keys 16 * (lane / 4) + 2 * (lane % 4) + {0, 1, 8, 9}.
template <class Given, int kCount>
  requires(Given::kMask && kCount == kTileN / 2)
__device__ __forceinline__ void call_mask(float (&scores)[kCount], const device::ScorePlace& first,
                                          const FunctorParams& p) {
  const int lane = threadIdx.x % 32;
  TilePlace at{first, static_cast<uint32_t>(first.k) / kTileN, 0}, own = at;
  own.eight = lane / 4 * 2;
  own.k += lane / 4 * 16;
  typename Given::Keys keys[4];
  typename Given::Rows rows[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) Given::of_key(keys[j], tile_place(own, j / 2 * 4 + j % 2), p);
#pragma unroll
  for (int half = 0; half < 2; ++half) Given::of_row(rows[half], tile_place(at, 2 * half), p);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {  // 2 rows of each key
#pragma unroll
    for (int j = i; j < i + 2; ++j) {
      const auto key = Given::of_lane(keys[i / 4 % 2 * 2 + j % 2], i / 8 * 4 + lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!Given::sees(tile_place(at, j + 2 * half), p, key, rows[half]))
          scores[j + 2 * half] = device::negative_infinity();
      }
    }
  }
}

// Instead of sm90/scores.cuh's: a tile that is asked may lie within what all rows see.
template <MaskKind kMask, int kCount>
  requires(kCount == kTileN / 2)
__device__ __forceinline__ void mask_scores(float (&scores)[kCount], const KeyRange (&visible)[2],
                                            int32_t first) {
  const int32_t begin = first - static_cast<int32_t>(threadIdx.x % 4) * 2, end = begin + kTileN;
  const bool whole = max(visible[0].begin, visible[1].begin) <= begin &&
                     min(visible[0].end, visible[1].end) >= end;
  if (__all_sync(0xffffffffu, whole)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const KeyRange& keys = visible[i >> 1 & 1];
    const int column = (i >> 2) * 8 + (i & 1);
    const bool seen = column < keys.end - first && column >= keys.begin - first;
    scores[i] = seen ? scores[i] : device::negative_infinity();
  }
}
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


def is_coarse(node: Expr) -> bool:
    """Whether eight neighbouring keys have one value, which is computed once for them."""
    if node.op == "floordiv" and node.args[0] is K and node.args[1].op == "const":
        return bool(node.args[1].args[0] % 8 == 0)
    return node is not K and all(map(is_coarse, node.nodes()))


def is_dear(node: Expr) -> bool:
    """Whether a node is worth computing ahead, by itself."""
    if node.op in CALLS and node.args[1].op == "const":
        return bool(node.args[1].args[0].bit_count() != 1)
    return node.op in ("load", "div", *CALLS, *FLOAT_CALLS)


def computed_ahead(root: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the largest parts of a mask that hang on the key, and on the row, alone."""
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
        elif "q" not in node.free and not is_coarse(node):
            keys.append(node)
        else:
            needed.update(map(id, node.nodes()))
    count = 1 if max(len(keys), len(rows)) > MAX_AHEAD else MAX_AHEAD  # fewer where many are left
    return keys[:count], rows[:count]


def members(function: Function, first_number: int) -> str:
    """Return the members of a mask in `sm90`; all of it is exact."""
    given = function, first_number, False
    parts: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, nodes in zip(("key", "row"), computed_ahead(function.expr), strict=True):
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
    return MEMBERS % {**parts, "lines": "".join(lines)}
