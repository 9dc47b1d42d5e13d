# SPDX-License-Identifier: Apache-2.0
"""The op ``torch.ops.cuattn.parallel_attention``: attention over ranks in graphs of torch.compile.

Loaded with torch.compile. Groups go by name and layouts by their numbers; what the ranks exchange
stays within the op, in the order of the code. Eager code does not come here. Next: attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .attention import SCHEMES, run_planned, trace_by
from .autograd import heads_to_rows, rows_to_heads
from .layout import Layout
from .plan import Plan, kept_plan, limit_memory
from .team import teams_of

FUNCTION = "parallel.attention"
WORDS = (
    "scheme", "causal", "window", "scale", "softcap", "batch_invariant", "deterministic",
    "partial_dtype", "memory_limit", "check", "return_lse",
)  # fmt: skip
SHARED = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? bias, str[] groups, str kind, SymInt[] layout, "
    "str scheme, bool causal, SymInt[] window, float? scale, float softcap, bool batch_invariant, "
    "bool? deterministic, str partial_dtype, SymInt? memory_limit, bool? check, bool return_lse"
)
library = torch.library.Library("cuattn", "FRAGMENT")
library.define(
    f"parallel_attention(Tensor q, Tensor k, Tensor v, {SHARED}) -> (Tensor out, Tensor lse)"
)
library.define(
    "parallel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, "
    f"Tensor k, Tensor v, {SHARED}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)


def numbers_of(layout: Any) -> tuple[str, list[int]]:
    """Spell a layout: a word, and the numbers of one that is not just a word."""
    if isinstance(layout, str):
        return layout, []
    sizes = layout.inner, layout.outer
    return layout.kind, [layout.seqlen, *sizes, layout.chunk, *layout.owners, *layout.ends]


def traced(group: Any, arrays: tuple[Tensor | None, ...], layout: Any, **words: Any) -> Any:
    """Put a call into a graph: q, k, v, alibi_slopes, sinks and bias, and what WORDS names."""
    pair = group if isinstance(group, (tuple, list)) else (group,)
    names = [(dist.group.WORLD if one is None else one).group_name for one in pair]
    is_differentiated = any(x is not None and x.requires_grad for x in arrays)
    keeps_lse = words["return_lse"] or (torch.is_grad_enabled() and is_differentiated)
    kind, numbers = numbers_of(layout)
    options = [keeps_lse if name == "return_lse" else words[name] for name in WORDS]
    out, lse = torch.ops.cuattn.parallel_attention(*arrays, names, kind, numbers, *options)
    return (out, lse) if words["return_lse"] else out


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    groups: Sequence[str],
    kind: str,
    layout: Sequence[int],
    *words: Any,
) -> dict[str, Any]:
    """Return what attention was given."""
    pair = tuple(_resolve_process_group(name) for name in groups)
    where: Any = kind
    if layout:
        where = Layout.__new__(Layout)
        seqlen, inner, outer, chunk, *rest = layout
        owners, ends = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        where._fill(kind, seqlen, (inner, outer), chunk, owners, ends)
    given = dict(zip(WORDS, words, strict=True))
    given["window"] = tuple(given["window"])
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks, "bias": bias}
    options = {"group": pair if len(pair) > 1 else pair[0], "layout": where}
    absent = {"seqused": None, "dropout_p": 0.0, "dropout_offset": 0}
    absent |= dict.fromkeys(("dropout_seed", "dropout_state"))
    return arrays | absent | given | options


def kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Attend; all ranks. lse is empty unless it is wanted."""
    given = read(*arguments)
    with torch.no_grad():
        found = run_planned(FUNCTION, given, None)
    out, lse = found if given["return_lse"] else (found, found.new_empty(0, dtype=torch.float32))
    return out.contiguous(), lse.contiguous()


def shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    batch, rows, heads, _ = q.shape
    lse = (batch, heads, rows) if rest[-1] else (0,)
    return q.new_empty(batch, rows, heads, v.shape[-1]), q.new_empty(lse, dtype=torch.float32)


def way_back(plan: Plan, given: dict[str, Any], result: Any) -> Any:
    """Differentiate what a plan ran: (dq, dk, dv, dsinks) from dout, out, lse and dlse."""
    q, k, v, sinks = (given[name] for name in ("q", "k", "v", "sinks"))
    problem, inner = plan.problem, plan.inner
    if inner is None:
        scheme = SCHEMES[plan.scheme](plan.outer, plan.layout, problem)
        return scheme.backward(q, k, v, sinks, result)
    team, layout = inner, plan.inner_layout
    assert layout is not None

    def to_heads(x: Tensor) -> Tensor:
        return rows_to_heads(x.movedim(1, 0), team, layout).movedim(0, 1)

    def lse_to_heads(x: Tensor) -> Tensor:
        return to_heads(x.mT.unsqueeze(-1)).squeeze(-1).mT.contiguous()

    heads_kv, share = k.shape[-2], q.shape[-2] // team.size
    copies = max(team.size // heads_kv, 1) if heads_kv % team.size != 0 else 1
    heads = slice(team.rank * share, (team.rank + 1) * share)
    k, v = (x.repeat_interleave(copies, -2) for x in (k, v))
    dout, out, lse, dlse = result
    dlse = None if dlse is None else lse_to_heads(dlse)
    result = (*map(to_heads, (dout, out)), lse_to_heads(lse), dlse)
    own = None if sinks is None else sinks[heads].contiguous()
    scheme = SCHEMES[plan.scheme](plan.outer, plan.layout, problem.of_heads(heads))
    q, k, v = map(to_heads, (q, k, v))
    *found, dsinks = scheme.backward(q, k, v, own, result)
    dq, dk, dv = (heads_to_rows(x.movedim(1, 0), team, layout).movedim(0, 1) for x in found)
    dk, dv = (x.unflatten(-2, (heads_kv, copies)).sum(-2) for x in (dk, dv))
    if dsinks is not None:
        whole = torch.zeros_like(sinks)
        whole[heads] = dsinks
        dsinks = whole
    return dq, dk, dv, dsinks


def backward_kernel(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiate by the scheme of the way forth; all ranks."""
    given = read(*arguments)
    inner, outer = teams_of(FUNCTION, given["group"])
    limit_memory(FUNCTION, given, inner, outer)
    with torch.no_grad():
        plan = kept_plan(FUNCTION, given, None, inner, outer)
        dq, dk, dv, dsinks = way_back(plan, given, (dout.contiguous(), out, lse, dlse))
    return (*(x.contiguous() for x in (dq, dk, dv)), dq.new_empty(0) if dsinks is None else dsinks)


def backward_shapes(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Tell what the op returns, from shapes alone."""
    q, k, v, _, sinks = arguments[:5]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dsinks)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep for the way back what the op was given and gave."""
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.rest = inputs[6:]
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the op: q, k, v and sinks."""
    *arrays, out, lse = ctx.saved_tensors
    if any(ctx.needs_input_grad[i] for i in (3, 5)):
        raise NotImplementedError(
            f"{FUNCTION}: alibi_slopes and bias must not require a gradient, which its op does not "
            "hold; detach them, or leave the call out of the graph"
        )
    dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
    dq, dk, dv, dsinks = torch.ops.cuattn.parallel_attention_backward(
        dout, dlse, out, lse, *arrays, *ctx.rest
    )
    sinks = dsinks if ctx.needs_input_grad[4] else None
    return (dq, dk, dv, None, sinks, None, *(None for _ in ctx.rest))


for name, function, tell in (
    ("parallel_attention", kernel, shapes),
    ("parallel_attention_backward", backward_kernel, backward_shapes),
):
    library.impl(name, function, "CPU")
    library.impl(name, function, "CUDA")
    torch.library.register_fake(f"cuattn::{name}", tell, lib=library)
torch.library.register_autograd(
    "cuattn::parallel_attention", differentiate, setup_context=keep, lib=library
)
trace_by(traced)
