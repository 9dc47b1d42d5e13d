# SPDX-License-Identifier: Apache-2.0
"""A problem that ranks share, and the attention of a piece of it.

Rows are tokens: axis 1 of the arrays of a dense call, [batch, tokens, heads, dim], axis 0 of packed
documents, the last axis of lse, [..., heads, tokens]. Next: schemes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cuattn

from .layout import Span
from .pairs import Piece, Window


class Dropout(NamedTuple):
    """What is dropped, by the places of the whole."""

    options: dict[str, Any]  # dropout_p, and seed and offset or dropout_state
    heads: int  # of the whole
    first_head: int = 0  # which of them is the first here


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
    dbias: Tensor | None = None  # like bias, float32: where its gradient is added up
    dslopes: Tensor | None = None  # like slopes, the same
    used: Tensor | None = None  # int32 [batch]: tokens of each sequence that are in use
    dropout: Dropout | None = None

    @property
    def axis(self) -> int:
        """The axis of tokens."""
        return 1 if self.begins is None else 0

    def of_heads(self, heads: slice) -> Problem:
        """Return the problem of some query heads."""
        both = (self.slopes, self.dslopes)
        slopes, dslopes = (x if x is None else x[..., heads] for x in both)
        biases = (self.bias, self.dbias)
        bias, dbias = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in biases)
        dropout = self.dropout
        if dropout is not None:
            dropout = dropout._replace(first_head=dropout.first_head + heads.start)
        return dataclasses.replace(
            self, slopes=slopes, dslopes=dslopes, bias=bias, dbias=dbias, dropout=dropout
        )

    def options(self) -> dict[str, Any]:
        """Return what every call is given."""
        words = {"scale": self.scale, "softcap": self.softcap}
        words["batch_invariant"] = self.batch_invariant
        return {name: x for name, x in words.items() if x}  # each costs the host a moment


def heads_of(x: Tensor, heads: slice) -> Tensor:
    """Return some heads of an array."""
    return x[..., heads, :]


def tokens_of(problem: Problem, x: Tensor, rows: slice) -> Tensor:
    """Return some tokens of an array, itself for all of them: a view costs the host a moment."""
    axis = problem.axis
    if rows.start == 0 and rows.stop == x.shape[axis]:
        return x
    return x[rows] if axis == 0 else x[:, rows]


@dataclasses.dataclass
class Call:
    """A piece as a call: its arrays, its options, and the constant that ALiBi adds to its lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    offset: Tensor | None  # [batch or 1, heads, rows]: lse of the sequence is that of the call - it
    lengths: tuple[Any, ...]
    dbias: Tensor | None = None  # the part of the problem's that is the bias's
    places: tuple[Tensor, Tensor] | None = None  # of keys and rows from the last key, with offset
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
    offset = dbias = places = None
    if problem.bias is not None:
        options["bias"] = bias_of(problem.bias, piece, row, keys[0])
    if problem.dbias is not None:
        dbias = bias_of(problem.dbias, piece, row, keys[0])
    first = queries[0] + piece.q.start, keys[0] + piece.k.start
    if problem.dropout is not None:
        options |= dropout_of(problem.dropout, piece, first)
    if problem.used is not None:
        counts = zip(first, (q.shape[1], k.shape[1]), strict=True)
        in_use = [(problem.used - start).clamp(0, count) for start, count in counts]
        options["seqused_q"], options["seqused_k"] = in_use
    if problem.slopes is not None:
        if piece.shift == 0:
            options["alibi_slopes"] = problem.slopes.contiguous()
        else:
            places = places_of_left(piece, first, q.device)
            options["bias"], offset = alibi_of_left(problem.slopes, *places)
    lengths: tuple[Any, ...] = ()
    if piece.q_lengths:
        both = (piece.q_lengths, piece.k_lengths)
        lengths = (*(offsets(x, q.device) for x in both), *(max(x) for x in both))
    return Call(q, k, v, options, offset, lengths, dbias, places)


def dropout_of(dropout: Dropout, piece: Piece, first: Span) -> dict[str, Any]:
    """Return the options of a piece whose first row and first key are these of the sequence."""
    row, key = (place - piece.begin for place in first)
    head = piece.document * dropout.heads + dropout.first_head
    places = {"dropout_row": row, "dropout_key": key, "dropout_head": head}
    return dropout.options | places | {"dropout_heads": dropout.heads}


def make_folded_call(
    problem: Problem,
    lengths: tuple[int, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: tuple[int, ...] = (),
) -> Call:
    """Make one call of runs of as many queries, each against so many of the keys: causal.

    Short runs fill a device together, where one after the other would not. `begins`: the first key
    of each run, of packed documents.
    """
    options = problem.options() | {"window": problem.window}
    runs = len(lengths)
    if runs == 1:
        return Call(q, k[:, : lengths[0]], v[:, : lengths[0]], options, None, ())
    options["seqused_k"] = on_device(lengths, q.device)
    if begins:
        options["kv_start"] = on_device(begins, q.device)
    q = q.view(runs, -1, *q.shape[-2:])  # of one sequence
    k, v = (tokens_of(problem, x, slice(0, max(lengths))).expand(runs, -1, -1, -1) for x in (k, v))
    return Call(q, k, v, options, None, (), runs=runs)


@functools.lru_cache(maxsize=256)
def on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return lengths in a device's memory."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=1024)
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


def places_of_left(piece: Piece, first: Span, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of the keys of a piece, and of its rows, from the last key on."""
    q0, k0 = first
    num_q, num_k = piece.q.stop - piece.q.start, piece.k.stop - piece.k.start
    last = k0 + num_k - 1
    spans = (1 - num_k, 1), (q0 - last, q0 - last + num_q)
    keys, rows = (torch.arange(*x, dtype=torch.float32, device=device) for x in spans)
    return keys, rows


def alibi_of_left(slopes: Tensor, keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """ALiBi of keys that all lie left of the queries, as a bias of keys and a constant of rows.

    With e the place of the last key, -slope (i - j) = slope (j - e) - slope (i - e). The first term
    is a bias [batch or 1, heads, 1, keys], the second the same for all keys of a query.
    """
    slopes = slopes.reshape(-1, slopes.shape[-1], 1)
    return (slopes * keys).unsqueeze(2), slopes * rows


def attend(call: Call, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Write the result of a call."""
    run = getattr(cuattn, call.name)
    options = call.options if sinks is None else {**call.options, "sinks": sinks}
    if call.runs > 1:
        out = out.view(call.runs, -1, *out.shape[-2:])
        lse = lse.view(lse.shape[-2], call.runs, -1).transpose(0, 1)
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
    where `widens`. The gradients of a bias and of slopes are added where they are kept.
    """
    dout, out, lse, dlse = result
    if call.offset is not None:
        lse = lse + (call.offset if call.name == "attention" else call.offset[0])
    wide = torch.float32 if widens else call.k.dtype
    dk, dv = (torch.empty(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
    has_slopes = problem.dslopes is not None
    is_left = has_slopes and call.offset is not None
    wanted = {
        "dsinks": sinks is not None,
        "dbias": call.dbias is not None or is_left,
        "dslopes": has_slopes and not is_left,
    }
    need = ("dq", "dk", "dv", *(name for name, is_wanted in wanted.items() if is_wanted))
    run = getattr(cuattn, f"{call.name}_backward")
    found = run(
        dout, call.q, call.k, call.v, out, lse, *call.lengths,
        **call.options, sinks=sinks, dlse=dlse, need=need, dk=dk, dv=dv,
        deterministic=problem.deterministic,
    )  # fmt: skip
    by_name = dict(zip(need, found, strict=True))
    if call.dbias is not None:
        call.dbias.add_(by_name["dbias"])
    if problem.dslopes is not None:
        dslopes = by_name.get("dslopes")
        if dslopes is None:
            dslopes = dslopes_of_left(problem, call, by_name["dbias"], result)
        problem.dslopes.add_(dslopes)
    return tuple(found[: 4 if sinks is not None else 3])


def dslopes_of_left(
    problem: Problem,
    call: Call,
    dbias: Tensor,
    result: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Tensor:
    """Differentiate alibi_of_left: the sum of -(i - j) dx_ij, of each batch and head or of heads.

    That of j - e follows from the gradient of the bias, that of -(i - e) from the sums of the rows
    of dx = P (dP - delta + dlse), which the attention of the piece gives: its share of P, and out.
    """
    dout, out, lse, dlse = (x if x is None else x.float() for x in result)
    part = torch.empty_like(out, dtype=torch.float32 if problem.widens else call.q.dtype)
    part_lse = torch.empty_like(lse)
    attend(call, None, part, part_lse)
    sums = (dout * (part.float() - out)).sum(-1).transpose(-1, -2)  # [.., heads, rows]
    if dlse is not None:
        sums = sums + dlse
    sums = torch.where(part_lse.isneginf(), 0.0, (part_lse - lse).exp() * sums)
    assert problem.slopes is not None
    assert call.places is not None
    keys, rows = call.places
    of_keys = (dbias * keys).sum((-1, -2))
    of_rows = (sums * rows).sum(-1).view(-1, of_keys.shape[-1])
    if problem.slopes.ndim == 1:
        of_keys, of_rows = of_keys.sum(0), of_rows.sum(0)
    return of_keys - of_rows
