# SPDX-License-Identifier: Apache-2.0
"""Expressions as CUDA C++: the source of a kernel of attention that calls them.

A source holds our own names, and numbers that a function has written down; what its closure holds,
lengths and arrays are read at run time, so that the same function with others is the same source.
Next: include/cuattn/device/functor.cuh (what the source calls), nvrtc.py (who compiles it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .expression import BOOL, COMPARISONS, FLOAT, INT, Expr, ordered
from .program import number_bits

TYPES = {FLOAT: "float", INT: "int32_t", BOOL: "bool"}
PLACES = {"score": "score", **{n: f"at.{n}" for n in ("b", "h", "q", "k", "q_len", "kv_len")}}
SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/"},
    **COMPARISONS,
    **{"and": "&&", "or": "||", "xor": "!="},
}
CALLS = {"floordiv": "device::floor_div", "mod": "device::floor_mod"}
FLOAT_CALLS = {"exp": "expf", "log": "logf", "tanh": "tanhf", "sqrt": "sqrtf"}
QUICK_CALLS = {
    **{"tanh": "device::score_tanh", "sqrt": "device::score_sqrt"},
    "div": "device::score_quotient",
}
MAX_NUMBERS = 32
DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


class Function(NamedTuple):
    """An expression, the numbers that it reads, and the place of its first captured array."""

    expr: Expr
    scalars: list[Any]
    first_array: int
    arrays: list[Any]  # as the function holds them


class Kernel(NamedTuple):
    """A kernel that a functor is compiled into."""

    name: str  # sm90, sm80 or simt
    dtype: str
    head_dim: int
    head_dim_v: int
    packed_heads: int = 1  # of sm90, see packing.py
    reads_blocks: bool = False


def constant(x: Any, kind: str) -> str:
    """Return a number as C++ writes it; a float by its bits."""
    if kind == FLOAT:
        return f"__int_as_float({number_bits(x, kind)})"
    return ("true" if x else "false") if kind == BOOL else f"({int(x)})"


def value(node: Expr, args: list[str], first_number: int, first_array: int) -> str:
    """Return what computes a node from its arguments, which are under their names."""
    op = node.op
    if op == "index":
        return PLACES[node.args[0]]
    if op == "const":
        return constant(node.args[0], node.type)
    if op == "scalar":
        bits = f"p.numbers[{first_number + node.args[0]}]"
        return {FLOAT: f"__int_as_float({bits})", INT: bits, BOOL: f"{bits} != 0"}[node.type]
    if op == "load":
        array = f"p.arrays[{first_array + node.args[0]}]"
        return f"device::load<{TYPES[node.type]}>({', '.join([array, *args])})"
    if op in ("min", "max"):
        return f"{args[0]} {'<' if op == 'min' else '>'} {args[1]} ? {args[0]} : {args[1]}"
    if op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if op == "abs":
        return f"fabsf({args[0]})" if node.type == FLOAT else f"abs({args[0]})"
    if op in ("neg", "not"):
        return ("-" if op == "neg" else "!") + args[0]
    if op == "float":
        if (ahead := distance(next(iter(node.nodes())))) is not None:
            return ahead
        return f"static_cast<float>({args[0]})"
    if op in SIGNS:
        return f"{args[0]} {SIGNS[op]} {args[1]}"
    return f"{(CALLS | FLOAT_CALLS)[op]}({', '.join(args)})"


def distance(node: Expr) -> str | None:
    """Return q - k, k - q or the abs of either as a float that kernels keep; None for others."""
    if node.op == "abs":
        inner = distance(next(iter(node.nodes())))
        return None if inner is None else "fabsf(at.ahead)"
    if node.op != "sub" or any(x.op != "index" for x in node.nodes()):
        return None
    return {("q", "k"): "at.ahead", ("k", "q"): "-at.ahead"}.get(
        tuple(x.args[0] for x in node.nodes())
    )


def decides(order: list[Expr]) -> set[int]:
    """Return the ids of the nodes that comparisons hang on: their last bit decides."""
    found: set[int] = set()
    for node in reversed(order):
        if node.op in COMPARISONS or id(node) in found:
            found.update(map(id, node.nodes()))
    return found


def quick(node: Expr, args: list[str]) -> str | None:
    """Return what computes a node of a score to 2e-6 of itself; None where nothing is quicker."""
    if node.op == "div" and node.args[1].free.isdisjoint(("k", "score")):
        return f"{args[0]} * (1.0f / {args[1]})"  # many are divided by the same number
    call = QUICK_CALLS.get(node.op)
    return None if call is None else f"{call}({', '.join(args)})"


def statements(
    exprs: list[Expr],
    function: Function,
    first_number: int,
    is_quick: bool,
    known: dict[int, str] | None = None,
    form: Callable[[Expr, list[str]], str | None] = lambda node, args: None,
) -> tuple[dict[int, str], list[str]]:
    """Return the names of nodes, by their ids, and the statements that compute them.

    Where it `is_quick`, what no comparison hangs on is right to 2e-6 of itself. `known`: what
    gives some nodes, by their ids; `form`: another form of a node.
    """
    names: dict[int, str] = dict(known or {})
    lines: list[str] = []
    order = ordered(*exprs)
    exact, needed = decides(order), {id(e) for e in exprs}
    for node in reversed(order):
        if id(node) in needed and id(node) not in names:
            needed.update(map(id, node.nodes()))
    for node in order:
        if id(node) in names or id(node) not in needed:
            continue
        args = [names[id(a)] for a in node.nodes()]
        names[id(node)] = name = f"t{len(lines)}"
        text = form(node, args) or value(node, args, first_number, function.first_array)
        if is_quick and id(node) not in exact:
            text = quick(node, args) or text
        lines.append(f"    const {TYPES[node.type]} {name} = {text};\n")
    return names, lines


def body(function: Function, first_number: int, is_quick: bool) -> str:
    """Return the statements that compute an expression and return it."""
    names, lines = statements([function.expr], function, first_number, is_quick)
    return "".join([*lines, f"    return {names[id(function.expr)]};\n"])


SCORE = """\
  static __device__ __forceinline__ float score(float score, const device::ScorePlace& at,
                                                const FunctorParams& p) {
%s  }
"""
SEES = """\
  static __device__ __forceinline__ bool sees(const device::ScorePlace& at,
                                              const FunctorParams& p) {
%s  }
"""
FORM = """\
  static constexpr int kKeys = sm90_functor_tile({%(qk)d, %(v)d}).n, kPacked = %(packed)d;
"""
KERNELS = {
    "sm90": """\
#include "cuda/attention/sm90/forward.cuh"
namespace cuattn {
%(functor)s
using Kernel = ForwardSm90<DType::%(dtype)s, %(qk)d, %(v)d,
                           Functor::kRows ? MaskKind::rows : MaskKind::window,
                           Functor::kScore ? ScoreKind::scored : ScoreKind::identity,
                           sm90_functor_tile({%(qk)d, %(v)d}), Functor>;
}
extern "C" __global__ void __launch_bounds__(cuattn::Kernel::kThreads, 1)
    cuattn_functor_sm90(const __grid_constant__ cuattn::FunctorParams params,
                        const __grid_constant__ cuattn::Sm90Schedule schedule,
                        const __grid_constant__ cuattn::Sm90Maps maps) {
  extern __shared__ __align__(1024) char memory[];
  cuattn::Kernel::run(params, schedule, maps, memory);
}
""",
    "sm80": """\
#include "cuda/attention/sm80/forward.cuh"
namespace cuattn {
%(functor)s
using Kernel = ForwardSm80<DType::%(dtype)s, %(qk)d, %(v)d,
                           device::FunctorPolicy<DType::%(dtype)s, Functor>,
                           sm80_tile({%(qk)d, %(v)d}, ScoreKind::scored)>;
}
extern "C" __global__ void __launch_bounds__(cuattn::Kernel::kThreads, cuattn::Kernel::kCtasPerSm)
    cuattn_functor(const __grid_constant__ cuattn::FunctorParams params,
                   const __grid_constant__ cuattn::Sm80Schedule schedule) {
  extern __shared__ __align__(1024) char memory[];
  cuattn::Kernel::run(params, schedule, memory);
}
""",
    "simt": """\
#include "cuda/attention/simt.cuh"
namespace cuattn {
%(functor)s
using Kernel = ForwardSimt<%(qk)d, device::FunctorPolicy<DType::f32, Functor>>;
}
extern "C" __global__ void __launch_bounds__(cuattn::Kernel::kThreads, cuattn::Kernel::kBlocksPerSm)
    cuattn_functor(const __grid_constant__ cuattn::FunctorParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  cuattn::Kernel::run(params, memory);
}
""",
}


def source(
    kernel: Kernel, functions: dict[str, Function], rows: bool, lists: bool, alone: bool = False
) -> str:
    """Return the source of a kernel that calls the functions "score" and "mask", if given."""
    from . import emit_sm90

    flags = {"kScore": "score" in functions, "kMask": "mask" in functions}
    flags |= {"kRows": rows, "kLists": lists, "kAlone": alone}
    flags["kPlain"] = alone and not flags["kScore"]
    flags |= {"kGiven": True}
    if kernel.name == "sm90":
        flags |= {"kPages": kernel.reads_blocks}
    given = ", ".join(f"{name} = {'true' if x else 'false'}" for name, x in flags.items())
    parts, first = [], 0
    shape = {"dtype": DTYPES[kernel.dtype], "qk": kernel.head_dim, "v": kernel.head_dim_v}
    if kernel.name == "sm90":
        parts.append(FORM % {**shape, "packed": kernel.packed_heads})
    for name, frame in (("score", SCORE), ("mask", SEES)):
        if name not in functions:
            continue
        if (kernel.name, name) == ("sm90", "mask"):
            parts.append(emit_sm90.members(functions[name], first, kernel.packed_heads > 1))
        else:
            parts.append(frame % body(functions[name], first, kernel.dtype != "float32"))
        first += len(functions[name].scalars)
    functor = f"struct Functor {{\n  static constexpr bool {given};\n{''.join(parts)}}};"
    text = KERNELS[kernel.name] % {"functor": functor, **shape}
    return f'#include "cuattn/device/functor.cuh"\n{text}'


def numbers(functions: dict[str, Function]) -> np.ndarray[Any, Any]:
    """Return the bits of the numbers that functions read, in the order of their sources.

    Raises
    ------
    NotImplementedError
        If there are more than a kernel takes.
    """
    bits: list[int] = []
    for name in ("score", "mask"):
        if name in functions:
            scalars = functions[name].scalars
            bits += [number_bits(x, FLOAT if isinstance(x, float) else INT) for x in scalars]
    if len(bits) > MAX_NUMBERS:
        raise NotImplementedError(
            f"flex_attention: functions on CUDA may read {MAX_NUMBERS} numbers together, got "
            f"{len(bits)}; put them into an array that they capture"
        )
    return np.array(bits, np.int32)
