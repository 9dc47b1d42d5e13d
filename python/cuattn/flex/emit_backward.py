# SPDX-License-Identifier: Apache-2.0
"""The source of kernels that differentiate attention through a user's functions.

One source has every pass: dq and the gradients of captured arrays, dk and dv, and dbias where it is
asked for. Next: include/cuattn/device/functor_gradient.cuh (what the source calls), emit.py.
"""

from __future__ import annotations

from typing import NamedTuple

from .derivative import derivative, loads
from .emit import DTYPES, SCORE, SEES, Function, Kernel, body, statements
from .expression import SCORE as SCORE_NODE

DERIVATIVE = SCORE.replace("float score(", "float derivative(")
GIVE = """\
  static __device__ __forceinline__ void give(float ds, float score, const device::ScorePlace& at,
                                              const FunctorGradientParams& p) {
%s  }
"""
SOURCE = """\
#include "cuattn/device/functor_gradient.cuh"
%(includes)snamespace cuattn::backward {
%(functor)s
using Policy = device::GradientPolicy<DType::%(dtype)s, Functor>;
%(passes)s}
"""
INCLUDES = {
    "sm80": """\
#include "cuda/backward/sm80/keys.cuh"
#include "cuda/backward/sm80/queries.cuh"
#include "cuda/backward/sm80/bias.cuh"
""",
    "simt": '#include "cuda/backward/simt/passes.cuh"\n',
}
USING = {
    "sm80": """\
using Queries = QueriesPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
using Keys = KeysPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
using Bias = BiasPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
""",
    "simt": """\
static_assert(simt_keys_makes_one(%(qk)d) == %(makes_one)s);
using Queries = SimtQueriesPass<%(qk)d, Policy>;
using Keys = SimtKeysPass<%(qk)d, Policy, true, !%(makes_one)s>;
using Values = SimtKeysPass<%(qk)d, Policy, false, true>;
using Bias = SimtBiasPass<%(qk)d, Policy>;
constexpr int kThreads = Queries::kThreads;
""",
}
PASS = """\
extern "C" __global__ void __launch_bounds__(cuattn::backward::kThreads, 2)
    cuattn_%(name)s(const __grid_constant__ cuattn::FunctorBackwardParams params, %(takes)s) {
  extern __shared__ __align__(1024) char memory[];
  cuattn::backward::%(pass)s::run(params, %(gives)s);
}
"""
MEMORY = "const __grid_constant__ cuattn::backward::Memory rows, int count"
STATES = "const cuattn::backward::RowState* rows, int count, int results"
SIMT_BOTH = 128  # head_dim up to which a pass of simt makes dk and dv


class Pass(NamedTuple):
    """A kernel of a source."""

    name: str
    takes: str = MEMORY
    gives: str = "rows, count, memory"


def passes_of(kernel: Kernel, has_dbias: bool) -> list[Pass]:
    """Return the passes of a kernel, as cuda/backward/functor.cu launches them."""
    bias = ["bias"] if has_dbias else []
    if kernel.name == "sm80":
        keys = Pass("keys", STATES, "rows, count, results, memory")
        return [Pass("queries"), keys, *map(Pass, bias)]
    values = ["values"] if kernel.head_dim > SIMT_BOTH else []
    shared = "rows, count, *reinterpret_cast<cuattn::backward::%s::Shared*>(memory)"
    names = ["queries", "keys", *values, *bias]
    return [Pass(name, gives=shared % name.title()) for name in names]


def gives(score: Function, slots: frozenset[int], is_quick: bool) -> str:
    """Return the statements that add to the gradients of arrays what each read of them gives."""
    read = [n for n in loads(score.expr) if n.args[0] in slots]
    by_load = [derivative(score.expr, n) for n in read]
    wanted = [*by_load, *(a for n in read for a in n.args[2:])]
    names, lines = statements(wanted, score, 0, is_quick)
    for n, by in zip(read, by_load, strict=True):
        slot = score.first_array + n.args[0]
        value = f"ds == 0.0f ? 0.0f : ds * {names[id(by)]}"
        at = ", ".join([f"p.arrays[{slot}]", f"p.gradients[{slot}]", value])
        lines.append(f"    device::add({', '.join([at, *(names[id(a)] for a in n.args[2:])])});\n")
    return "".join(lines)


def backward_source(
    kernel: Kernel,
    functions: dict[str, Function],
    rows: bool,
    lists: bool,
    alone: bool,
    slots: frozenset[int],
    has_dbias: bool,
) -> str:
    """Return the source of the passes for functions, as `source` does of the forward kernel.

    `slots` are the places of the arrays among those of the score function that get gradients.
    """
    flags = {"kScore": "score" in functions, "kMask": "mask" in functions}
    flags |= {"kRows": rows, "kLists": lists, "kAlone": alone}
    # ptxas spills a mask in the passes of plain scores, and none in those of any scores.
    flags["kPlain"] = alone and not functions
    flags["kGives"] = bool(slots)
    given = ", ".join(f"{name} = {'true' if x else 'false'}" for name, x in flags.items())
    parts, first, is_quick = [], 0, kernel.dtype != "float32"
    if "score" in functions:
        score = functions["score"]
        parts.append(SCORE % body(score, 0, is_quick))
        by_score = score._replace(expr=derivative(score.expr, SCORE_NODE))
        parts.append(DERIVATIVE % body(by_score, 0, is_quick))
        parts.append(GIVE % gives(score, slots, is_quick) if slots else "")
        first = len(score.scalars)
    if "mask" in functions:
        parts.append(SEES % body(functions["mask"], first, is_quick))
    functor = f"struct Functor {{\n  static constexpr bool {given};\n{''.join(parts)}}};"
    shape = {"dtype": DTYPES[kernel.dtype], "qk": kernel.head_dim, "v": kernel.head_dim_v}
    shape["makes_one"] = "true" if kernel.head_dim > SIMT_BOTH else "false"
    passes = {"includes": INCLUDES[kernel.name], "passes": USING[kernel.name] % shape}
    text = SOURCE % {"functor": functor, **shape, **passes}
    for one in passes_of(kernel, has_dbias):
        text += PASS % {"pass": one.name.title(), **one._asdict()}
    return text
