# SPDX-License-Identifier: Apache-2.0
"""The source of kernels that differentiate attention through a user's functions.

One source has every pass: dq and the gradients of captured arrays, dk and dv, and dbias where it is
asked for. Next: include/cuattn/device/functor_gradient.cuh (what the source calls), emit.py.
"""

from __future__ import annotations

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
#include "cuda/backward/sm80/keys.cuh"
#include "cuda/backward/sm80/queries.cuh"
#include "cuda/backward/sm80/bias.cuh"
namespace cuattn::backward {
%(functor)s
using Policy = device::GradientPolicy<DType::%(dtype)s, Functor>;
using Queries = QueriesPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
using Keys = KeysPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
using Bias = BiasPass<DType::%(dtype)s, %(qk)d, %(v)d, Policy>;
}
"""
PASS = """\
extern "C" __global__ void __launch_bounds__(cuattn::backward::kThreads, %(ctas)d)
    cuattn_%(name)s(const __grid_constant__ cuattn::FunctorBackwardParams params, %(takes)s) {
  extern __shared__ __align__(1024) char memory[];
  cuattn::backward::%(pass)s::run(params, %(gives)s, memory);
}
"""
MEMORY = "const __grid_constant__ cuattn::backward::Memory rows, int count"
STATES = "const cuattn::backward::RowState* rows, int count, int results"
PASSES = (
    ("queries", "Queries", MEMORY, "rows, count"),
    ("keys", "Keys", STATES, "rows, count, results"),
    ("bias", "Bias", MEMORY, "rows, count"),
)


def gives(score: Function, slots: frozenset[int]) -> str:
    """Return the statements that add to the gradients of arrays what each read of them gives."""
    read = [n for n in loads(score.expr) if n.args[0] in slots]
    by_load = [derivative(score.expr, n) for n in read]
    names, lines = statements([*by_load, *(a for n in read for a in n.args[2:])], score, 0, True)
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
    parts, first = [], 0
    if "score" in functions:
        score = functions["score"]
        parts.append(SCORE % body(score, 0, True))
        by_score = score._replace(expr=derivative(score.expr, SCORE_NODE))
        parts.append(DERIVATIVE % body(by_score, 0, True))
        parts.append(GIVE % gives(score, slots) if slots else "")
        first = len(score.scalars)
    if "mask" in functions:
        parts.append(SEES % body(functions["mask"], first, True))
    functor = f"struct Functor {{\n  static constexpr bool {given};\n{''.join(parts)}}};"
    shape = {"dtype": DTYPES[kernel.dtype], "qk": kernel.head_dim, "v": kernel.head_dim_v}
    text = SOURCE % {"functor": functor, **shape}
    for name, of, takes, arguments in PASSES[: 3 if has_dbias else 2]:
        text += PASS % {"name": name, "pass": of, "takes": takes, "gives": arguments, "ctas": 2}
    return text
