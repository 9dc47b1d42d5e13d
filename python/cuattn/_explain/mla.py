# SPDX-License-Identifier: Apache-2.0
"""Plans of latent attention: of mla_decode, and of both forms of mla_attention with their costs."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _core
from .._mla_costs import FORMS, choose, cost_of, crossover, read_extents, refusal
from .._options import PLACES
from .._prefix import shape_of
from .devices import place
from .plan import Plan
from .rows import explain_rows

DECODE = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "block_tables", "context_lens")
DECODE_OPTIONS = {
    "scale", "causal", "window", "softcap", "sinks", "indices", "topk_lens", "num_splits",
    "batch_invariant",
}  # fmt: skip
ATTENTION = ("q", "k_latent", "v_latent", "k_proj", "v_proj")
ATTENTION_OPTIONS = {"q_rope", "k_rope", "causal", "scale", "form"}
MLA = ("mla_decode", "mla_attention")
PACKED_BYTES = 656  # of a token


def with_packed(given: dict[str, Any]) -> dict[str, Any]:
    """Say of a shape that it is one of packed latents, which alone come without kpe_cache."""
    cache = given["ckv_cache"]
    is_shape = isinstance(cache, tuple) and not isinstance(next(iter(cache), None), str)
    has_rope = given["q_pe"] is not None and given["kpe_cache"] is None
    if is_shape and has_rope and cache[-1:] == (PACKED_BYTES,):
        return {**given, "ckv_cache": ("uint8", *cache)}
    return given


def read(
    op: str,
    arrays: tuple[Any, ...],
    names: tuple[str, ...],
    options: dict[str, Any],
    known: set[str],
) -> dict[str, Any]:
    """Give the arguments their names; refuse what the op does not have."""
    if len(arrays) != len(names):
        raise TypeError(f"explain: {op} takes {', '.join(names)}, got {len(arrays)} arguments")
    ignored = {*PLACES, "return_lse"} - {"backend"}
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - known - {"backend"}
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    return {**dict(zip(names, arrays, strict=True)), **given}


def explain_mla(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for mla_decode and mla_attention."""
    where = place(device, arrays_or_shapes[0] if arrays_or_shapes else ())
    if op == "mla_decode":
        given = read(op, arrays_or_shapes, DECODE, options, DECODE_OPTIONS)
        return Plan(**_core.explain_mla(with_packed(given), dtype, *where))
    given = read(op, arrays_or_shapes, ATTENTION, options, ATTENTION_OPTIONS)
    names = (*ATTENTION, "q_rope", "k_rope")
    shapes = {n: None if given.get(n) is None else tuple(shape_of(given[n])) for n in names}
    causal = given.get("causal", True)
    same = given["v_latent"] is given["k_latent"]
    e = read_extents(op, shapes, causal, same)
    word = dtype if isinstance(given["q"], tuple) else str(given["q"].dtype).split(".")[-1]
    itemsize = 4 if word == "float32" else 2
    backend = given.get("backend", "auto")
    form = choose(op, given.get("form"), e, itemsize, backend)

    costs = [f"{'form':10} {'GFLOP':>12} {'MB moved':>10} {'MB between':>11} {'H200, us':>9}"]
    for name in FORMS:
        cost = cost_of(name, e, itemsize)
        why = refusal(name, e, backend)
        mark = "-> " if name == form else "   "
        costs.append(
            f"{mark}{name:9} {cost.flops / 1e9:10.3f} {cost.bytes / 1e6:10.2f} "
            f"{cost.between / 1e6:11.2f} {cost.seconds * 1e6:9.1f}"
            + (f"  cannot: {why}" if why else "")
        )
    limit = f"{crossover(e):.1f}"
    costs.append(f"crossover on a long cache: explicit has fewer products from {limit} queries on")

    batch, heads, queries, keys = e.batch, e.heads, e.queries, e.keys
    if form == "explicit":
        width = e.head_dim + e.rope_dim
        arguments: dict[str, Any] = {
            "q": (word, batch, heads, queries, width),
            "k": (word, batch, heads, keys, width),
            "v": (word, batch, heads, keys, e.head_dim_v),
            "layout": "bhsd", "causal": causal, "scale": 1.0, "backend": backend,
        }  # fmt: skip
        plan = explain_rows(arguments, word, where)
    else:
        arguments = {
            "q_nope": (word, batch, queries, heads, e.latent_k),
            "ckv_cache": (word, batch, keys, e.latent_k),
            "causal": causal, "scale": 1.0, "backend": backend,
        }  # fmt: skip
        if not same:
            arguments["v_cache"] = (word, batch, keys, e.latent_v)
        if e.rope_dim:
            arguments["q_pe"] = (word, batch, queries, heads, e.rope_dim)
            arguments["kpe_cache"] = (word, batch, keys, e.rope_dim)
        plan = Plan(**_core.explain_mla(arguments, word, *where))
    asked = "asked for" if given.get("form") else "the smaller estimate"
    return dataclasses.replace(
        plan,
        kernel=f"project + {plan.kernel}",
        workspace_bytes=plan.workspace_bytes + cost_of(form, e, itemsize).between,
        reason=f"{form}: {asked}; {plan.reason}",
        ladder="\n".join(costs) + "\n" + plan.ladder,
    )
