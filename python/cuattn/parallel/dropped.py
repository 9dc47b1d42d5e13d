# SPDX-License-Identifier: Apache-2.0
"""Dropout of a rank that has some heads of the whole sequence: what one process would drop.

The library draws for (sequence, head, query, key), the first two as one number, sequence *
num_heads + head. A rank of R that has heads r * n to (r + 1) * n therefore attends to a packed
batch in which sequence b is number b * R + r, of n heads, and all others are empty: its numbers
are those of all heads. Next: schemes.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

import cuattn

from .attend import Problem, on_device


class Dropout(NamedTuple):
    """What is dropped, and which heads are here: the `rank`-th of `size` shares."""

    options: dict[str, Any]  # dropout_p and what the library takes beside it
    rank: int
    size: int


def packed(problem: Problem, q: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the offsets and bounds of the packed batch, twice, and the options of its calls."""
    dropout, batch = problem.dropout, 1 if problem.axis == 0 else q.shape[0]
    assert dropout is not None
    lengths = np.full(batch, q.shape[1]) if problem.begins is None else np.diff(problem.begins)
    each = np.zeros((len(lengths), dropout.size), np.int32)
    each[:, dropout.rank] = lengths
    begins = on_device((0, *each.ravel().cumsum().tolist()), q.device)
    options = problem.options() | {"window": problem.window} | dropout.options
    if problem.slopes is not None:
        slopes = problem.slopes
        if slopes.ndim == 2:
            slopes = slopes.repeat_interleave(dropout.size, 0)
        options["alibi_slopes"] = slopes.contiguous()
    if problem.used is not None:
        used = problem.used.new_zeros(batch, dropout.size)
        used[:, dropout.rank] = problem.used.clamp(0, q.shape[1])
        options["seqused_q"] = options["seqused_k"] = used.flatten()
    most = int(lengths.max(initial=0))
    return (begins, begins, most, most), options


def rows_in_line(problem: Problem, x: Tensor) -> Tensor:
    """Return [tokens, heads, dim]."""
    return x if problem.axis == 0 else x.flatten(0, 1)


def lse_in_line(problem: Problem, lse: Tensor) -> Tensor:
    """Return [heads, tokens]."""
    return (lse if problem.axis == 0 else lse.transpose(0, 1).flatten(1)).contiguous()


def attend_dropped(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend: (out, lse)."""
    lengths, options = packed(problem, q)
    arrays = (rows_in_line(problem, x) for x in (q, k, v))
    out, lse = cuattn.attention_varlen(*arrays, *lengths, **options, sinks=sinks, return_lse=True)
    if problem.axis == 0:
        return out, lse
    lse = lse.unflatten(-1, q.shape[:2]).transpose(0, 1).contiguous()
    return out.unflatten(0, q.shape[:2]), lse


def differentiate_dropped(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, result: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Differentiate: (dq, dk, dv, dsinks); the gradient of slopes is added to the problem's."""
    dout, out, lse, dlse = result
    lengths, options = packed(problem, q)
    optional = {"dsinks": sinks, "dslopes": problem.dslopes}
    need = ("dq", "dk", "dv", *(name for name, x in optional.items() if x is not None))
    arrays = (rows_in_line(problem, x) for x in (dout, q, k, v, out))
    run: Any = cuattn.attention_varlen_backward
    found = run(
        *arrays, lse_in_line(problem, lse), *lengths, **options, sinks=sinks,
        dlse=None if dlse is None else lse_in_line(problem, dlse), need=need,
        deterministic=problem.deterministic,
    )  # fmt: skip
    by_name = dict(zip(need, found, strict=True))
    if problem.dslopes is not None and problem.dropout is not None:
        dslopes = by_name["dslopes"]
        if dslopes.ndim == 2:
            dslopes = dslopes[problem.dropout.rank :: problem.dropout.size]
        problem.dslopes.add_(dslopes)
    pairs = zip(found[:3], (q, k, v), strict=True)
    dq, dk, dv = (x.view(of.shape) for x, of in pairs)
    return dq, dk, dv, by_name.get("dsinks")
