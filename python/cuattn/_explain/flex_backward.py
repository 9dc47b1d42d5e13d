# SPDX-License-Identifier: Apache-2.0
"""Plans of flex_attention_backward: what its functions become, and the kernel that runs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._gradients import GRADIENTS, POSITIONAL
from .._options import PLACES
from ..flex.attention import OPTIONS, find, problem_of, refuse_unknown
from ..flex.backward import TAKES, slots_of
from ..flex.device import BACKWARD, compiles_rows, free_options, portable, require_backward
from ..flex.options import beside_scale
from ..flex.rows import narrowed
from ..flex.trace import dtype_name, trace
from .backward import explain_backward
from .devices import place
from .flex import (
    FUNCTIONS,
    plan_elsewhere,
    plan_on_hopper,
    refuse_traced,
    shapes_of_arrays,
    stand_in,
    words_of_tiles,
)
from .plan import Plan

NAMES = POSITIONAL["attention_backward"]
EVERYTHING = 2**30  # a window that hides nothing, and runs as row ranges do


def explain_flex_backward(
    arrays: tuple[Any, ...], device: Any, dtype: str, options: dict[str, Any]
) -> Plan:
    """Say what a mask and a score function become, and why, and which kernel differentiates."""
    if len(arrays) != len(NAMES):
        names = ", ".join(NAMES)
        raise TypeError(f"explain: {BACKWARD} takes {names}, got {len(arrays)} arguments")
    score_mod, mask_mod, block_mask = (options.pop(name, None) for name in FUNCTIONS)
    wanted = options.pop("arrays", ())
    need = options.pop("need", GRADIENTS[:3])
    refuse_unknown(BACKWARD, options, TAKES)
    if "cu_seqlens_q" in options:
        raise NotImplementedError(f"explain: {BACKWARD} must be of padded arrays, got cu_seqlens_q")
    options = {name: x for name, x in options.items() if name not in (*PLACES, *GRADIENTS)}
    q, k, v = (x if hasattr(x, "shape") else stand_in(x) for x in arrays[1:4])
    problem = problem_of(q, k, options)
    if hasattr(arrays[1], "dtype"):
        dtype = dtype_name(arrays[1])
    else:
        options = shapes_of_arrays(options)
    number, made_up = place(device, arrays[1])
    on_cuda = number >= 0 if made_up is None else made_up["is_cuda"]
    score = None if score_mod is None else trace(score_mod, is_score=True)
    slots_of(score, wanted, options, on_cuda)

    def plan_of(**changes: Any) -> Plan:
        given = {"need": need, **options, **changes}
        return explain_backward("attention_backward", arrays, device, dtype, given)

    if problem is None:
        return plan_of()  # says what is wrong
    takes = free_options(options) if on_cuda and not wanted else frozenset()
    found = find(problem, score_mod, mask_mod, block_mask, takes)
    if on_cuda:
        refuse_traced(found)
    given = dict(options)
    if found.window is not None:
        options["window"] = narrowed(options.get("window", (-1, -1)), found.window)
    options |= shapes_of_arrays(beside_scale(found.options))
    words = found.words
    kind = dtype, int(q.shape[-1]), int(v.shape[-1])
    if not on_cuda or not found.arrays:
        plan = plan_of()
    elif found.functions or "block_starts" in found.arrays or compiles_rows(options, *kind):
        require_backward(*kind[1:])
        words += "; passes compiled by NVRTC at the first call"
        words += ", sums of captured arrays by atomics" if wanted else ""
        name = portable(dtype)
        if (backend := options.get("backend", "auto")) not in ("auto", name):
            raise NotImplementedError(
                f"flex_attention_backward: backend '{backend}' cannot run this call: gradients of "
                f"functions that are compiled run in {name} alone in {dtype}; use "
                f"backend='{name}' or 'auto'"
            )
        plan = plan_of(softcap=options.get("softcap") or 1.0, backend=name)
        if block_mask is not None and "block_starts" in found.arrays:
            # of a forward call, which shares them
            tiles = forward_plan(arrays, device, dtype, given, problem.seqlen_kv)
            functions = (problem, score_mod, mask_mod, block_mask)
            joined = words_of_tiles(tiles, *functions, frozenset(found.options))
            words = words.replace(found.words, joined)
    else:
        plan = plan_of_rows(plan_of, options)
    line = f"  functions: {words}\n"
    return dataclasses.replace(plan, reason=f"{plan.reason}; {words}", ladder=plan.ladder + line)


def forward_plan(
    arrays: tuple[Any, ...], device: Any, dtype: str, options: dict[str, Any], keys: int
) -> Plan:
    """Return the plan of the forward call, in whose tiles blocks are joined."""
    given = dict(
        zip("qkv", (x if hasattr(x, "shape") else tuple(x) for x in arrays[1:4]), strict=True)
    )
    given |= {name: x for name, x in options.items() if name in OPTIONS}
    call = given, dtype, place(device, arrays[1]), True
    return plan_on_hopper(*call, keys) or plan_elsewhere(*call)


def plan_of_rows(plan_of: Any, options: dict[str, Any]) -> Plan:
    """Return the plan of row ranges on CUDA, which scores share with naive and simt alone."""
    window = narrowed(options.get("window", (-1, -1)), (EVERYTHING, EVERYTHING))
    plan = plan_of(window=window)
    if options.get("backend", "auto") != "auto" or plan.kernel == "simt":
        return dataclasses.replace(plan, mask="rows")
    if plan.score != "identity":
        plan = plan_of(window=window, backend="naive")
    elif plan.kernel == "sm90" and max(plan.head_dim, plan.head_dim_v) > 128:
        plan = plan_of(window=window, backend="sm80")
    return dataclasses.replace(plan, mask="rows")
