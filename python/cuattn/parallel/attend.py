# SPDX-License-Identifier: Apache-2.0
"""A problem that ranks share, and the attention of a piece of it.

Rows are tokens: axis 1 of the arrays of a dense call, [batch, tokens, heads, dim], axis 0 of packed
documents, the last axis of lse, [..., heads, tokens]. Next: schemes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cuattn

from .layout import Span
from .pairs import Piece, Window


@dataclasses.dataclass(frozen=True)
class Problem:
    """What all calls of a problem have in common."""

    window: Window  # with the causal mask
    begins: np.ndarray | None = None  # where packed documents begin; None: a dense call
    scale: float | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None  # [heads] or [batch, heads]
    bias: Tensor | None = None  # [batch, heads, local rows, seqlen], each or 1
    batch_invariant: bool = False
    deterministic: bool | None = None
    widens: bool = True  # parts of a result are float32
    groups: tuple[int, ...] = ()  # the key heads that gather brings at a time

    @property
    def axis(self) -> int:
        """The axis of tokens."""
        return 1 if self.begins is None else 0

    def of_heads(self, heads: slice) -> Problem:
        """Return the problem of some query heads."""
        slopes = None if self.slopes is None else self.slopes[..., heads]
        bias = self.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, heads]
        return dataclasses.replace(self, slopes=slopes, bias=bias)

    def options(self) -> dict[str, Any]:
        """Return what every call is given."""
        words = {"scale": self.scale, "softcap": self.softcap}
        words["batch_invariant"] = self.batch_invariant
        return {name: x for name, x in words.items() if x}  # each costs the host a moment


def heads_of(x: Tensor, heads: slice) -> Tensor:
    """Return some heads of an array."""
    return x[..., heads, :]


def tokens_of(problem: Problem, x: Tensor, rows: slice) -> Tensor:
    """Return some tokens of an array."""
    return x[rows] if problem.axis == 0 else x[:, rows]


@dataclasses.dataclass
class Call:
    """A piece as a call: its arrays, its options, and the constant that ALiBi adds to its lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    offset: Tensor | None  # [batch or 1, heads, rows]: lse of the sequence is that of the call - it
    lengths: tuple[Any, ...]
    runs: int = 1  # of queries, which are the sequences of a batch over the same keys

    @property
    def name(self) -> str:
        """The function of the library, "attention" or "attention_varlen"."""
        return "attention_varlen" if self.lengths else "attention"


def make_call(
    problem: Problem, piece: Piece, q: Tensor, k: Tensor, v: Tensor, runs: tuple[Span, Span, int]
) -> Call:
    """Cut a piece out of two runs, of queries and of keys; with them the first row of queries."""
    q, k, v = (tokens_of(problem, x, s) for x, s in ((q, piece.q), (k, piece.k), (v, piece.k)))
    options = problem.options() | {"window": piece.window}
    queries, keys, row = runs
    offset = None
    if problem.bias is not None:
        options["bias"] = bias_of(problem.bias, piece, row, keys[0])
    if problem.slopes is not None:
        if piece.shift == 0:
            options["alibi_slopes"] = problem.slopes.contiguous()
        else:
            first = queries[0] + piece.q.start, keys[0] + piece.k.start
            options["bias"], offset = alibi_of_left(problem.slopes, piece, first)
    lengths: tuple[Any, ...] = ()
    if piece.q_lengths:
        both = (piece.q_lengths, piece.k_lengths)
        lengths = (*(offsets(x, q.device) for x in both), *(max(x) for x in both))
    return Call(q, k, v, options, offset, lengths)


def make_folded_call(
    problem: Problem, lengths: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
) -> Call:
    """Make one call of runs of as many queries, each against so many of the keys: causal.

    Short runs fill a device together, where one after the other would not.
    """
    options = problem.options() | {"window": problem.window}
    runs = len(lengths)
    if runs == 1:
        return Call(q, k[:, : lengths[0]], v[:, : lengths[0]], options, None, ())
    options["seqused_k"] = on_device(lengths, q.device)
    q = q[0].unflatten(0, (runs, -1))
    k, v = (x[:, : max(lengths)].expand(runs, -1, -1, -1) for x in (k, v))
    return Call(q, k, v, options, None, (), runs)


@functools.lru_cache(maxsize=256)
def on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return lengths in a device's memory."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences of these lengths begin when packed."""
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    return torch.from_numpy(begins).to(device)


def bias_of(bias: Tensor, piece: Piece, row: int, key: int) -> Tensor:
    """Return the part of a bias that a piece adds."""
    if bias.shape[2] > 1:
        bias = bias[:, :, row + piece.q.start : row + piece.q.stop]
    if bias.shape[3] > 1:
        bias = bias[..., key + piece.k.start : key + piece.k.stop]
    return bias


def alibi_of_left(slopes: Tensor, piece: Piece, first: Span) -> tuple[Tensor, Tensor]:
    """ALiBi of keys that all lie left of the queries, as a bias of keys and a constant of rows.

    With e the place of the last key, -slope (i - j) = slope (j - e) - slope (i - e). The first term
    is a bias [batch or 1, heads, 1, keys], the second the same for all keys of a query.
    """
    q0, k0 = first
    num_q, num_k = piece.q.stop - piece.q.start, piece.k.stop - piece.k.start
    last = k0 + num_k - 1
    slopes = slopes.reshape(-1, slopes.shape[-1], 1)
    keys = torch.arange(1 - num_k, 1, dtype=torch.float32, device=slopes.device)
    rows = torch.arange(q0 - last, q0 - last + num_q, dtype=torch.float32, device=slopes.device)
    return (slopes * keys).unsqueeze(2), slopes * rows


def attend(call: Call, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Write the result of a call."""
    run = getattr(cuattn, call.name)
    options = call.options if sinks is None else {**call.options, "sinks": sinks}
    if call.runs > 1:
        out = out[0].unflatten(0, (call.runs, -1))
        lse = lse[0].unflatten(-1, (call.runs, -1)).transpose(0, 1)
    run(call.q, call.k, call.v, *call.lengths, **options, out=out, lse_out=lse)
    if call.offset is not None:
        lse -= call.offset if call.name == "attention" else call.offset[0]


def gradients(
    problem: Problem,
    call: Call,
    result: tuple[Tensor, Tensor, Tensor, Tensor | None],
    sinks: Tensor | None,
    widens: bool,
) -> tuple[Tensor, ...]:
    """Differentiate a call: (dq, dk, dv), and dsinks where sinks are given.

    `result` is dout, out, lse and dlse of its rows, of the whole sequence. dk and dv are float32
    where `widens`.
    """
    dout, out, lse, dlse = result
    if call.offset is not None:
        lse = lse + (call.offset if call.name == "attention" else call.offset[0])
    wide = torch.float32 if widens else call.k.dtype
    dk, dv = (torch.empty(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
    need = ("dq", "dk", "dv") if sinks is None else ("dq", "dk", "dv", "dsinks")
    run = getattr(cuattn, f"{call.name}_backward")
    return tuple(
        run(
            dout, call.q, call.k, call.v, out, lse, *call.lengths,
            **call.options, sinks=sinks, dlse=dlse, need=need, dk=dk, dv=dv,
            deterministic=problem.deterministic,
        )
    )  # fmt: skip
