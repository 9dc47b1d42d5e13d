# SPDX-License-Identifier: Apache-2.0
"""The steps of a call as torch differentiates them: rows for heads, heads for rows, a scheme.

Next: attention.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .exchange import by_rank, exchange, in_order
from .layout import Layout
from .schemes import Scheme
from .team import Team


def rows_to_heads(x: Tensor, team: Team, layout: Layout) -> Tensor:
    """Give away rows of all heads for all rows of some: [rows, ..., heads, dim]."""
    share = x.shape[-2] // team.size
    sent = [x[..., r * share : (r + 1) * share, :] for r in range(team.size)]
    width = math.prod(sent[0].shape[1:])
    counts = [layout.rows(rank) for rank in range(team.size)]
    found = exchange(team, sent, [count * width for count in counts])
    box = torch.cat(found).view(sum(counts), *sent[0].shape[1:])
    begins = [sum(counts[:rank]) for rank in range(team.size)]
    return in_order(layout, box, begins)


def heads_to_rows(x: Tensor, team: Team, layout: Layout) -> Tensor:
    """Give away all rows of some heads for own rows of all heads."""
    counts = [layout.rows(rank) for rank in range(team.size)]
    sent = list(by_rank(layout, x).split(counts))
    shape = (counts[team.rank], *x.shape[1:])
    size = sent[team.rank].numel()
    found = exchange(team, sent, [size] * team.size)
    return torch.cat([part.view(shape) for part in found], -2)


class RowsToHeads(torch.autograd.Function):  # type: ignore[misc]
    """rows_to_heads, and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, layout: Layout, axis: int) -> Tensor:
        """Exchange."""
        ctx.where = team, layout, axis
        return rows_to_heads(x.movedim(axis, 0), team, layout).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Exchange gradients the other way."""
        team, layout, axis = ctx.where
        found = heads_to_rows(gradient.movedim(axis, 0), team, layout)
        return found.movedim(0, axis), None, None, None


class HeadsToRows(torch.autograd.Function):  # type: ignore[misc]
    """heads_to_rows, and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, layout: Layout, axis: int) -> Tensor:
        """Exchange."""
        ctx.where = team, layout, axis
        return heads_to_rows(x.movedim(axis, 0), team, layout).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Exchange gradients the other way."""
        team, layout, axis = ctx.where
        found = rows_to_heads(gradient.movedim(axis, 0), team, layout)
        return found.movedim(0, axis), None, None, None


class Attend(torch.autograd.Function):  # type: ignore[misc]
    """A scheme: (out, lse) of the rows of this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        scheme: Scheme,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend, and keep what the way back needs; bias and slopes are the scheme's problem's."""
        out, lse = scheme.forward(q, k, v, sinks)  # type: ignore[attr-defined]
        ctx.scheme = scheme
        problem = scheme.problem
        state = None if problem.dropout is None else problem.dropout.options.get("dropout_state")
        # The last two so that torch refuses a way back after they were written.
        ctx.save_for_backward(q, k, v, sinks, bias, slopes, out, lse, problem.used, state)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        """Differentiate by the same scheme."""
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError(
                "cuattn.parallel: a gradient of a gradient does not go through ranks; "
                "differentiate once, without create_graph=True"
            )
        q, k, v, sinks, bias, slopes, out, lse, *_ = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dlse = None if dlse is None else dlse.contiguous()
        result = dout.to(out.dtype).contiguous(), out, lse, dlse
        dbias = dslopes = None
        if ctx.needs_input_grad[5]:
            dbias = torch.zeros_like(bias, dtype=torch.float32)
        if ctx.needs_input_grad[6]:
            dslopes = torch.zeros_like(slopes)
        ctx.scheme.problem = dataclasses.replace(
            ctx.scheme.problem, bias=bias, dbias=dbias, slopes=slopes, dslopes=dslopes
        )
        dq, dk, dv, dsinks = ctx.scheme.backward(q, k, v, sinks, result)
        if dbias is not None:
            dbias = dbias.to(bias.dtype)
        return None, dq, dk, dv, dsinks if ctx.needs_input_grad[4] else None, dbias, dslopes
