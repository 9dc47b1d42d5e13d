# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen over a sequence that is cut across ranks.

A call is read and checked on every rank (plan.py), held against what the others call (check.py),
and run: by a scheme (schemes.py), behind an exchange of rows for heads where heads are dealt out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import keep_out_of_graphs
from .attend import Problem
from .autograd import Attend, HeadsToRows, RowsToHeads
from .check import Said, agree
from .cost import Choice
from .documents import Apart
from .gather import Gather
from .layout import Layout
from .plan import Plan, kept_plan, limit_memory, plan_of
from .ring import Ring
from .schemes import Local
from .team import teams_of

SCHEMES: dict[str, type[Local] | type[Gather] | type[Ring]] = {
    "local": Local,
    "gather": Gather,
    "ring": Ring,
}

traced: Any = None  # puts a call into a graph of torch.compile, where that is loaded


def trace_by(function: Any) -> None:
    """Have calls that torch.compile sees put into its graphs by a function, that of ops.py."""
    global traced
    traced = function


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    seqused: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    partial_dtype: str = "float32",
    memory_limit: int | None = None,
    check: bool | None = None,
) -> Any:
    """Attend over a sequence whose tokens lie on the ranks of a group; all ranks call it together.

    The formula, masks and options are those of `cuattn.attention` over the whole sequence. Torch
    differentiates it.

    Parameters
    ----------
    q : tensor, [batch, tokens of this rank, num_heads_q, head_dim]
        Queries of this rank, in the order of the layout.
    k, v : tensor, [batch, tokens of this rank, num_heads_kv, head_dim or head_dim_v]
        Keys and values of the same tokens.
    group : torch.distributed.ProcessGroup, or (inner, outer), optional
        None is the default group. Two groups are two levels: heads are exchanged within the inner
        one, the sequence is cut over the outer one.
    layout : {"contiguous", "zigzag"} or Layout
        Which tokens a rank has. A word is for ranks that have equally many, in chunks of all they
        have, for "zigzag" of half; a `Layout` takes any length.
    scheme : {"auto", "gather", "heads", "ring"}
        "gather": keys and values of all ranks come by groups of heads. "heads": each rank attends
        with some heads over all tokens. "ring": keys and values travel, and results are merged.
        "auto": the fastest by the model of docs/parallel.md that is possible. Of two levels it is
        the scheme of the outer group, "gather" or "ring".
    causal, window, scale, softcap
        As in `cuattn.attention`.
    alibi_slopes : float32 tensor, [num_heads_q] or [batch, num_heads_q], optional
        The same on all ranks. gather and ring take it with a causal mask, ring without bias. Its
        gradient is what the rows or heads of this rank contribute, like that of sinks.
    sinks : float32 tensor, [num_heads_q], optional
        The same on all ranks. Its gradient is what the rows or heads of this rank contribute; the
        sum over the ranks is the whole.
    bias : tensor, [batch, num_heads_q, tokens of this rank, tokens of the sequence], optional
        For the rows of this rank; each axis may be 1. In order of the sequence along the last.
        heads and two levels take it where the axis of rows is 1. Its gradient is what the rows or
        heads of this rank contribute.
    seqused : int32 tensor, [batch], optional
        Tokens of each sequence of a padded batch that are in use, the same on all ranks. Rows
        beyond give out 0 and lse -inf, keys beyond are not seen. ring takes it without a window,
        gather with one that looks left alone.
    dropout_p, dropout_seed, dropout_offset, dropout_state
        As in `cuattn.attention`, the same on all ranks: what one process drops is dropped. On CUDA
        a ring takes it where the keys of each rank begin at multiples of 16 of their sequence.
    batch_invariant : bool
        With it "gather" and "heads" give the bits of one process, if chunks begin at multiples of
        128 (docs/parallel.md).
    return_lse : bool
        Also return the log-sum-exp of the scores.
    deterministic : bool, optional
        As in `cuattn.attention_backward`. Sums over ranks are always in order of ranks.
    partial_dtype : {"float32", "input"}
        What a ring merges. "input": parts were rounded to q's dtype, 1.4 times the error.
    memory_limit : int, optional
        Bytes that gather may take for keys on their way; None is a quarter of the least memory that
        was free on any rank at the first call. The same on all ranks.
    check : bool, optional
        Compare the calls of all ranks before anything is sent: always, never, or (None) the first
        100 calls of a group, then every 16th and those of 20 ms and more. The same on all ranks.

    Returns
    -------
    out : tensor, [batch, tokens of this rank, num_heads_q, head_dim_v]
        Of q's dtype.
    lse : float32 tensor, [batch, num_heads_q, tokens of this rank]
        With return_lse only.

    Raises
    ------
    ValueError
        A shape, dtype, option or layout that is none, on this rank or another; calls that differ
        between the ranks: the same message on all of them. Too small a memory_limit.
    NotImplementedError
        A scheme that cannot run the call, with those that can.
    RuntimeError
        A rank did not answer.

    References
    ----------
    Ring Attention, arXiv:2310.01889; striped and zigzag orders, arXiv:2311.09431; heads for tokens,
    arXiv:2309.14509; both levels, arXiv:2405.07719; gathering by groups of heads, arXiv:2407.21783.
    """
    is_held = (
        seqused is None
        and dropout_p == 0
        and not any(  # by the op
            isinstance(x, Tensor) and x.requires_grad for x in (bias, alibi_slopes)
        )
    )
    if is_held and traced is not None and torch.compiler.is_compiling():
        return traced(
            group, (q, k, v, alibi_slopes, sinks, bias), layout,
            scheme=scheme, causal=causal, window=window, scale=scale, softcap=softcap,
            batch_invariant=batch_invariant, deterministic=deterministic,
            partial_dtype=partial_dtype, memory_limit=memory_limit, check=check,
            return_lse=return_lse,
        )  # fmt: skip
    given = locals()
    start = run if torch.compiler.is_compiling() else run_planned
    return start("parallel.attention", given, None)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Any,
    *,
    group: Any = None,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    partial_dtype: str = "float32",
    memory_limit: int | None = None,
    check: bool | None = None,
) -> Any:
    """Attend within documents that are packed into one sequence, which is cut across ranks.

    Documents may lie on any number of ranks; lengths are not rounded.

    Parameters
    ----------
    q : tensor, [tokens of this rank, num_heads_q, head_dim]
        Queries of this rank, in the order of the layout.
    k, v : tensor, [tokens of this rank, num_heads_kv, head_dim or head_dim_v]
        Keys and values of the same tokens.
    cu_seqlens : int array in host memory, [documents + 1]
        Where documents begin in the whole sequence, from 0 to its length: the same on all ranks.
    alibi_slopes : float32 tensor, [num_heads_q], optional
        As in `attention`.
    group, layout, scheme, causal, window, scale, softcap, sinks, batch_invariant, return_lse
        As in `attention`; documents that `Layout.balanced` leaves whole need no keys of others.
    dropout_p, dropout_seed, dropout_offset, dropout_state
        As in `attention`.
    deterministic, partial_dtype, memory_limit, check
        As in `attention`.

    Returns
    -------
    out : tensor, [tokens of this rank, num_heads_q, head_dim_v]
        Of q's dtype.
    lse : float32 tensor, [num_heads_q, tokens of this rank]
        With return_lse only.

    Raises
    ------
    ValueError, NotImplementedError, RuntimeError
        As in `attention`.

    References
    ----------
    As of `attention`.
    """
    given = locals() | {"bias": None, "seqused": None}
    start = run if torch.compiler.is_compiling() else run_planned
    return start("parallel.attention_varlen", given, () if cu_seqlens is None else cu_seqlens)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused: Tensor | None = None,
    dropout_p: float = 0.0,
    partial_dtype: str = "float32",
    memory_limit: int | None = None,
) -> Choice:
    """Say which scheme `attention` would take, what each would cost, and why some cannot be.

    Parameters
    ----------
    q, k, v, group, layout, scheme, causal, window, alibi_slopes, bias, seqused, dropout_p
        As in `attention`.
    partial_dtype, memory_limit
        As in `attention`. The first call on a group asks all ranks, so all
        have to make it.

    Returns
    -------
    Choice
        str() of it is the table.

    Raises
    ------
    ValueError, NotImplementedError
        As `attention` would.
    """
    rest = {"scale": None, "softcap": 0.0, "sinks": None, "batch_invariant": False}
    rest |= {"return_lse": False, "deterministic": None, "check": None}
    rest |= {"dropout_seed": 0 if dropout_p else None, "dropout_offset": 0, "dropout_state": None}
    given = locals() | rest
    inner, outer = teams_of("parallel.explain", group)
    limit_memory("parallel.explain", given, inner, outer)
    return plan_of("parallel.explain", given, None, inner, outer).choice


def run(function: str, given: dict[str, Any], cu_seqlens: Any) -> Any:
    """Run a call; a graph of torch.compile breaks here."""
    return run_planned(function, given, cu_seqlens)


def run_planned(function: str, given: dict[str, Any], cu_seqlens: Any) -> Any:
    """Check a call on all ranks, and run it."""
    inner, outer = teams_of(function, given["group"])
    limit_memory(function, given, inner, outer)
    plans: list[Plan] = []
    refusal: Exception | None = None

    def contract() -> Said:
        if refusal is not None:
            raise refusal
        plans.append(kept_plan(function, given, cu_seqlens, inner, outer))
        assert plans[-1].said is not None
        return plans[-1].said

    for team in (outer, inner):  # what one team finds out the other is told
        if team is not None:
            try:
                agree(function, team, given["check"], contract)
            except Exception as error:
                refusal = error
    if refusal is not None:
        raise refusal
    plan = plans[0]
    q, k, v, sinks = (given[name] for name in ("q", "k", "v", "sinks"))
    out, lse = spread(plan, q, k, v, sinks, given["return_lse"])
    return (out, lse) if given["return_lse"] else out


def spread(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    """Run a scheme, behind the exchange of rows for heads where there is one.

    Unless it is wanted lse is that of some heads then.
    """
    problem, inner = plan.problem, plan.inner
    if inner is None:
        return run_scheme(plan, problem, q, k, v, sinks)
    assert plan.inner_layout is not None
    where = inner, plan.inner_layout, problem.axis
    share = q.shape[-2] // inner.size
    heads = slice(inner.rank * share, (inner.rank + 1) * share)
    if k.shape[-2] % inner.size != 0:  # fewer heads than ranks: each goes to several
        copies = inner.size // k.shape[-2]
        k, v = (x.repeat_interleave(copies, -2) for x in (k, v))
    q, k, v = (RowsToHeads.apply(x, *where) for x in (q, k, v))
    own = None if sinks is None else sinks[heads].contiguous()
    out, lse = run_scheme(plan, problem.of_heads(heads), q, k, v, own)
    out = HeadsToRows.apply(out, *where)
    if not wants_lse:
        return out, lse
    as_rows = lse.transpose(-1, -2).unsqueeze(-1)  # [..., rows, heads, 1]
    lse = HeadsToRows.apply(as_rows, *where).squeeze(-1).transpose(-1, -2)
    return out, lse.contiguous()


def run_scheme(
    plan: Plan, problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the scheme of a plan on the rows that it has."""
    kind = SCHEMES[plan.scheme]
    scheme: Any
    if plan.split is None:
        scheme = kind(plan.outer, plan.layout, problem)
    else:
        assert plan.outer is not None
        scheme = Apart(kind, plan.split, plan.outer, plan.layout, problem)
    arrays = (q, k, v, sinks, problem.bias, problem.slopes)
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in arrays):
        return scheme.forward(q, k, v, sinks)
    result: tuple[Tensor, Tensor] = Attend.apply(scheme, *arrays)
    return result


keep_out_of_graphs(globals(), "run")
