# SPDX-License-Identifier: Apache-2.0
"""Plans of flex_attention: what its functions become, and the kernel that runs the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from .._options import PLACES
from ..flex.attention import OPTIONS, find, problem_of, refuse_unknown, traced
from ..flex.device import (
    SM90_DIM,
    SM90_ROWS_DIM,
    compiles_wide_rows,
    free_options,
    may_take_sm90,
)
from ..flex.form import Form, best_form
from ..flex.options import beside_scale
from ..flex.packing import as_packed, is_paged, packed_heads, reads_blocks
from ..flex.plan import Found
from ..flex.plan import plan as plan_functions
from ..flex.rows import narrowed
from ..flex.trace import dtype_name, refuse_int64, trace
from ..flex.tracers import is_jax_tracer
from .devices import place
from .plan import Plan
from .rows import explain_rows

NAME = "flex_attention"
CODES = ("float8_e4m3fn", "int8", "uint8")
FUNCTIONS = ("score_mod", "mask_mod", "block_mask")
GATHERED = "; keys are gathered from their blocks first"
PIECE = 256  # bytes; whole_pieces of plan.h


def explain_flex(arrays: tuple[Any, ...], device: Any, dtype: str, options: dict[str, Any]) -> Plan:
    """Say what a mask and a score function become, and why, and which kernel runs."""
    if len(arrays) != 3:
        raise TypeError(f"explain: {NAME} takes q, k, v, got {len(arrays)} arguments")
    score_mod, mask_mod, block_mask = (options.pop(name, None) for name in FUNCTIONS)
    refuse_unknown(NAME, options, OPTIONS)
    refuse_codes(arrays[:2], dtype)
    options = {name: x for name, x in options.items() if name not in PLACES}
    q, k = (x if hasattr(x, "shape") else stand_in(x) for x in arrays[:2])
    problem = problem_of(q, k, {name: readable(x) for name, x in options.items()})
    known = options if hasattr(arrays[0], "shape") else shapes_of_arrays(options)
    given = {**dict(zip("qkv", arrays, strict=True)), **known}
    where = place(device, arrays[0])
    if problem is None:
        return explain_rows(given, dtype, where)  # says what is wrong
    number, made_up = where
    on_cuda = number >= 0 if made_up is None else made_up["is_cuda"]
    takes = free_options(options) if on_cuda else frozenset()
    keys = problem.seqlen_kv
    score = None if score_mod is None else trace(score_mod, is_score=True)

    def planned(form: Form) -> Found:
        return find(problem, form.score, mask_mod, block_mask, form.takes)

    def on_hopper(arguments: dict[str, Any]) -> bool:
        with contextlib.suppress(NotImplementedError):
            rows = gathered(arguments, dtype, keys)
            return plan_on_hopper(rows, dtype, where, True, keys) is not None
        return False

    form = Form(score, takes, given)
    form, found = best_form(form, planned, on_hopper) if on_cuda else (form, planned(form))
    if on_cuda:
        refuse_traced(found)
    functions = (problem, form.score, mask_mod, block_mask, form.takes)
    if found.window is not None:
        given["window"] = narrowed(options.get("window", (-1, -1)), found.window)
    given |= shapes_of_arrays(beside_scale(found.options))
    words = found.words
    in_blocks = False
    if found.arrays and is_paged(given):
        tile_n = 128 if head_dims_of(given)[1] <= 128 else 64
        in_blocks = on_cuda and reads_blocks(given, found.arrays, tile_n)
        given = gathered(given, dtype, keys)
    if found.arrays and on_cuda:
        is_compiled = bool(found.functions) or "block_starts" in found.arrays
        if not is_compiled and "row_begin" in found.arrays:
            word = "float32" if is_float32(given["q"], dtype) else "float16"
            is_wide = compiles_wide_rows(given, word, head_dims_of(given))
            is_compiled = is_wide and on_hopper(given)
        words += "; a functor, compiled by NVRTC at the first call" if is_compiled else ""
        packed = packed_heads(given, found.arrays)
        plan = plan_on_hopper(given, dtype, where, is_compiled, keys, packed)
        if plan is None:
            plan = plan_elsewhere(given, dtype, where, is_compiled)
            words += why_not_sm90(given, plan) if is_compiled else ""
        in_blocks &= is_compiled and plan.kernel == "sm90"
        if block_mask is not None and "block_starts" in found.arrays:
            words = words.replace(found.words, words_of_tiles(plan, *functions))
    else:
        plan = explain_rows(given, dtype, where)
    if is_paged(options) and (found.arrays or not on_cuda):
        words += "; keys are read in their blocks" if in_blocks else GATHERED
        if not in_blocks:
            more = gathered_bytes(gathered(given, dtype, keys))
            plan = dataclasses.replace(plan, workspace_bytes=plan.workspace_bytes + more)
    line = f"  functions: {words}\n"
    return dataclasses.replace(plan, reason=f"{plan.reason}; {words}", ladder=plan.ladder + line)


def refuse_codes(q_and_k: tuple[Any, ...], dtype: str) -> None:
    """Refuse float8 and int8, also in caches, as the call does."""
    for name, x in zip("qk", q_and_k, strict=True):
        word = dtype_name(x) if hasattr(x, "dtype") else dtype
        if word in CODES:
            raise NotImplementedError(
                f"{NAME}: {name} is {word}, over which masks and scores written by the user have "
                "no kernel yet; cast it to float16 or bfloat16"
            )


def refuse_traced(found: Found) -> None:
    """Refuse captured arrays that JAX traces as the call on a GPU does."""
    for x in (x for f in found.functions.values() for x in f.arrays):
        if is_jax_tracer(x):
            refuse_int64(x)


def words_of_tiles(
    plan: Plan, problem: Any, score_mod: Any, mask_mod: Any, block_mask: Any, takes: Any
) -> str:
    """Say what functions become where the kernel joins blocks into tiles."""
    score, mask, blocks = traced(problem, score_mod, mask_mod, block_mask)
    tiles = blocks and blocks.of_tiles((plan.tile_m, plan.tile_n))
    return plan_functions(problem, score, mask, tiles, takes).words


Where = tuple[int, dict[str, Any] | None]
NOT_IN_SM90 = "ALiBi, bias, dropout or scale up to 0"


def head_dims_of(given: dict[str, Any]) -> tuple[int, int]:
    """Return head_dim and head_dim_v of arrays or shapes."""
    q, v = (tuple(getattr(given[name], "shape", given[name]))[-1] for name in "qv")
    return q, v


def plan_on_hopper(
    given: dict[str, Any],
    dtype: str,
    where: Where,
    is_compiled: bool,
    keys: int,
    packed: int = 1,
) -> Plan | None:
    """Return the plan of row ranges or a functor in sm90, as of a window; None if others do.

    So the module plans them, whose tiles differ in weight. Of `keys` it hides one at most, for one
    that hides nothing is planned as no window. `packed`: heads that share a tile.
    """
    if is_compiled and not may_take_sm90(given, head_dims_of(given)):
        why = f"functions of a user it has no {NOT_IN_SM90}, softcaps from 2**-60 to 2**60"
        refuse_if_named(given, why)
        return None
    window = narrowed(given.get("window", (-1, -1)), (max(keys - 2, 0), -1))
    plan = explain_rows({**given, "window": window}, dtype, where)
    most = max(plan.head_dim, plan.head_dim_v)
    if plan.kernel != "sm90" or plan.score != "identity":
        refuse_if_named(given, f"row ranges it has no softcap, {NOT_IN_SM90}")
        return None
    # Both have the tiles of dropout (tiles.h), and with them its splits and workspace.
    drops = {"dropout_p": 0.5, "dropout_seed": 0}
    rows = as_packed({**given, **drops, "window": window}, packed, dtype)
    tiles = explain_rows(rows, dtype, where)
    tiles = dataclasses.replace(tiles, mask=plan.mask, score=plan.score, ladder=plan.ladder)
    if is_compiled:
        return dataclasses.replace(tiles, warps=12, packed_heads=packed)
    if most > SM90_ROWS_DIM:
        refuse_if_named(given, f"row ranges without NVRTC head_dim is at most {SM90_ROWS_DIM}")
        return None
    dim = 64 if most <= 64 else 128  # of the instances, which differ from a window's (tiles.h)
    plan = dataclasses.replace(tiles, mask="rows", head_dim=dim, head_dim_v=dim)
    return dataclasses.replace(plan, tile_m=128, warps=12, packed_heads=packed)


def refuse_if_named(given: dict[str, Any], why: str) -> None:
    """Refuse a call that names sm90; others go elsewhere."""
    if given.get("backend") == "sm90":
        raise NotImplementedError(
            f"{NAME}: backend 'sm90' cannot run this call: beside {why}; head_dim is at most "
            f"{SM90_DIM}; use backend='sm80' or 'auto'"
        )


def gathered(given: dict[str, Any], dtype: str, capacity: int) -> dict[str, Any]:
    """Return a call over caches as one over the rows that their keys are gathered into."""
    if given.get("block_tables") is None:
        return given
    given = dict(given)
    tables, layout = given.pop("block_tables"), given.pop("kv_layout", "nhd")
    batch = tuple(getattr(tables, "shape", tables))[-2]
    name = dtype_name(given["q"]) if hasattr(given["q"], "dtype") else dtype
    for side in "kv":
        shape = tuple(getattr(given[side], "shape", given[side]))
        head_dim = shape[2] * shape[4] if len(shape) == 5 else shape[2 if layout == "vllm" else 3]
        heads = shape[2 if layout == "nhd" else 1]
        given[side] = (name, batch * capacity, heads, head_dim)
    given["q"] = (name, *tuple(getattr(given["q"], "shape", given["q"])))
    given["cu_seqlens_k"] = ("int32", batch + 1)
    return given


def gathered_bytes(rows: dict[str, Any]) -> int:
    """Return the bytes of gathered keys and values, in the pieces of a workspace."""
    bytes_of = [math.prod(rows[n][1:]) * (4 if rows[n][0] == "float32" else 2) for n in "kv"]
    return sum(-(-size // PIECE) * PIECE for size in bytes_of)


def shapes_of_arrays(options: dict[str, Any]) -> dict[str, Any]:
    """Reduce the arrays among options, which may lie elsewhere, to dtypes and shapes."""
    return {
        name: (str(x.dtype), *x.shape) if isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }


def why_not_sm90(given: dict[str, Any], plan: Plan) -> str:
    """Say what keeps a functor from the kernel of Hoppers, if it is a matter of the call."""
    asked = given.get("backend", "auto") != "auto"
    if asked or plan.kernel != "sm80" or may_take_sm90(given, head_dims_of(given)):
        return ""
    return (
        f", not in sm90, which takes them up to head_dim {SM90_DIM} and has no {NOT_IN_SM90} "
        "beside them"
    )


def plan_elsewhere(given: dict[str, Any], dtype: str, where: Where, is_compiled: bool) -> Plan:
    """Return the plan of row ranges or a functor in kernels of scores, which split no keys."""
    given = {**given, "softcap": given.get("softcap") or 1.0, "num_splits": 1}
    is_wide = max(head_dims_of(given)) > 256
    if given.get("backend", "auto") == "auto":  # what serves them
        given["backend"] = "simt" if is_float32(given["q"], dtype) else "sm80"
        if is_wide and not is_compiled:  # alone reads the row ranges of such heads
            given["backend"] = "naive"
    return explain_rows(given, dtype, where)


def is_float32(q: Any, dtype: str) -> bool:
    """Whether a call is of float32: of an array's dtype, or as `dtype` says."""
    return (dtype_name(q) if hasattr(q, "dtype") else dtype) == "float32"


class Unread:
    """An array of which the shape is known alone, as of lengths on a GPU."""

    is_cuda = True

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


def readable(option: Any) -> Any:
    """Return an option; a dtype and a shape, which stand for an array, as one that is not read."""
    is_array = isinstance(option, tuple) and option and isinstance(option[0], str)
    return Unread(option[1:]) if is_array else option


def stand_in(shape: Any) -> Any:
    """Return an array of a shape that takes no memory."""
    return np.broadcast_to(np.float32(0), tuple(shape))
