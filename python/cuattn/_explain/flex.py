# SPDX-License-Identifier: Apache-2.0
"""Plans of flex_attention: what its functions become, and the kernel that runs the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..flex.attention import OPTIONS, find, problem_of, refuse_unknown
from ..flex.plan import narrowed
from ..flex.trace import dtype_name
from .devices import place
from .plan import Plan
from .rows import explain_rows

NAME = "flex_attention"
FUNCTIONS = ("score_mod", "mask_mod", "block_mask")
NOT_ASKED = ("out", "lse_out", "workspace", "stream")  # they do not enter the choice


def explain_flex(arrays: tuple[Any, ...], device: Any, dtype: str, options: dict[str, Any]) -> Plan:
    """Say what a mask and a score function become, and why, and which kernel runs."""
    if len(arrays) != 3:
        raise TypeError(f"explain: {NAME} takes q, k, v, got {len(arrays)} arguments")
    functions = [options.pop(name, None) for name in FUNCTIONS]
    refuse_unknown(NAME, options, OPTIONS)
    options = {name: x for name, x in options.items() if name not in NOT_ASKED}
    q, k = (x if hasattr(x, "shape") else stand_in(x) for x in arrays[:2])
    problem = problem_of(q, k, options)
    given = {**dict(zip("qkv", arrays, strict=True)), **options}
    where = place(device, arrays[0])
    if problem is None:
        return explain_rows(given, dtype, where)  # says what is wrong
    found = find(problem, *functions)
    if found.window is not None:
        given["window"] = narrowed(options.get("window", (-1, -1)), found.window)
    number, made_up = where
    words = found.words
    if found.arrays and (number >= 0 if made_up is None else made_up["is_cuda"]):
        if given.get("backend", "auto") == "auto":  # what serves them
            given["backend"] = "simt" if is_float32(arrays[0], dtype) else "sm80"
        given["softcap"] = given.get("softcap") or 1.0  # they run in the kernels of scores
        is_compiled = found.functions or "block_starts" in found.arrays
        words += "; a functor, compiled by NVRTC at the first call" if is_compiled else ""
    plan = explain_rows(given, dtype, where)
    line = f"  functions: {words}\n"
    return dataclasses.replace(plan, reason=f"{plan.reason}; {words}", ladder=plan.ladder + line)


def is_float32(q: Any, dtype: str) -> bool:
    """Whether a call is of float32: of an array's dtype, or as `dtype` says."""
    return (dtype_name(q) if hasattr(q, "dtype") else dtype) == "float32"


def stand_in(shape: Any) -> Any:
    """Return an array of a shape that takes no memory."""
    return np.broadcast_to(np.float32(0), tuple(shape))
