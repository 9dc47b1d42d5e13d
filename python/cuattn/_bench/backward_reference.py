# SPDX-License-Identifier: Apache-2.0
"""Are gradients right? Those of two key heads against float64, with torch on the device itself.

The rule is the library's own: of each gradient the error may be twice that of the plain formula in
the dtype, plus one rounding of its largest number. `Error.max_error` is in units of that.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .reference import EPS, Error

if TYPE_CHECKING:
    from .backward import BackwardWorkload
    from .backward_inputs import BackwardInputs

CHUNK = 2048  # query rows whose scores are in memory at once
Gradients = dict[str, torch.Tensor]


def multiplied(product: torch.Tensor, factor: int) -> torch.Tensor:
    """Split a product below 2^64 into its lower 32 bits and those above, each in int64."""
    low, high = product & 0xFFFF, product >> 16
    partial = high * factor + ((low * factor) >> 16)
    return ((partial & 0xFFFF) << 16) | ((low * factor) & 0xFFFF), partial >> 16


def philox(counter: tuple[Any, ...], seed: int, device: Any) -> list[torch.Tensor]:
    """Philox-4x32-10 (Salmon et al., SC 2011): four words of 32 bits, in int64."""
    counted = (torch.as_tensor(x, dtype=torch.int64, device=device) for x in counter)
    c0, c1, c2, c3 = torch.broadcast_tensors(*counted)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        (low0, high0), (low2, high2) = multiplied(c0, 0xD2511F53), multiplied(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def kept(
    p: float, seed: int, heads: torch.Tensor, rows: torch.Tensor, keys: int
) -> torch.Tensor | float:
    """Give the factor of each probability under dropout, [heads, rows, keys]."""
    if not p:
        return 1.0
    threshold = max(1, math.floor(256 * (1 - p) + 0.5))
    chunks = torch.arange(-(-keys // 16), device=rows.device)
    counter = (chunks, rows[:, None], heads[:, None, None].to(rows.device), 0)
    words = philox(counter, seed, rows.device)
    drawn = torch.stack([(w >> (8 * x)) & 0xFF for w in words for x in range(4)], dim=-1)
    return (drawn.flatten(-2)[..., :keys] < threshold).double() * (256 / threshold)


class KeyHead:
    """The gradients of one sequence and key head, and of the query heads that share it."""

    def __init__(self, w: BackwardWorkload, x: BackwardInputs, seed: int, b: int, group: int):
        self.w, self.seed = w, seed
        shared = w.num_heads_q // w.num_heads_kv
        self.heads = slice(group * shared, (group + 1) * shared)
        self.places = torch.arange(w.num_heads_q)[self.heads] + b * w.num_heads_q
        self.q, self.dout = (x.sequence(a, b)[:, self.heads].transpose(0, 1) for a in (x.q, x.dout))
        self.k, self.v = (x.sequence(a, b)[:, group] for a in (x.k, x.v))
        self.slopes, self.sinks = (a if a is None else a[self.heads] for a in (x.slopes, x.sinks))
        self.bias = None if x.bias is None else x.bias[0, self.heads]

    def gradients(self, dtype: torch.dtype, rounded: torch.dtype | None = None) -> Gradients:
        """Add up in `dtype`; round what the plain formula keeps, where that is asked."""

        def cut(a: torch.Tensor) -> torch.Tensor:
            return a if rounded is None else a.to(rounded).to(dtype)

        k, v = self.k.to(dtype), self.v.to(dtype)
        found: dict[str, list[torch.Tensor]] = {"dq": [], "dbias": []}
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dsinks = torch.zeros(self.q.shape[0], dtype=dtype, device=k.device)
        scale = self.w.head_dim**-0.5
        for begin in range(0, self.q.shape[1], CHUNK):
            rows = torch.arange(begin, min(begin + CHUNK, self.q.shape[1]), device=k.device)
            q, dout = (a[:, begin : begin + CHUNK].to(dtype) for a in (self.q, self.dout))
            scores, slope = self.scores(cut(q @ k.T * scale), rows)
            lse = scores.logsumexp(-1, keepdim=True)
            if self.sinks is not None:
                lse = torch.logaddexp(lse, self.sinks.to(dtype)[:, None, None])
            weights = cut((scores - lse).exp())
            drop = kept(self.w.dropout_p, self.seed, self.places, rows, k.shape[0])
            drop = drop.to(dtype) if isinstance(drop, torch.Tensor) else drop
            delta = (dout * cut(cut(weights * drop) @ v)).sum(-1, keepdim=True)
            dscores = weights * (drop * cut(dout @ v.T) - delta)
            dx = cut(dscores * slope)
            found["dq"].append(cut(scale * (dx @ k)))
            dk += scale * (dx.flatten(0, 1).T @ q.flatten(0, 1))
            dv += cut(weights * drop).flatten(0, 1).T @ dout.flatten(0, 1)
            if self.sinks is not None:
                logits = self.sinks.to(dtype)[:, None, None]
                dsinks -= ((logits - lse).exp() * delta).sum((1, 2))
            if self.bias is not None:
                found["dbias"].append(dscores)
        result = {name: torch.cat(parts, 1) for name, parts in found.items() if parts}
        result |= {"dk": cut(dk), "dv": cut(dv), "dsinks": dsinks}
        return {name: a for name, a in result.items() if name in self.w.need}

    def scores(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Options and mask on scaled products [heads, rows, keys], and the softcap's slope."""
        w, slope = self.w, 1.0
        if w.softcap:
            x = w.softcap * torch.tanh(x / w.softcap)
            slope = 1 - (x / w.softcap) ** 2
        keys = torch.arange(x.shape[-1], device=x.device)
        position = (rows + x.shape[-1] - self.q.shape[1])[:, None]
        if self.slopes is not None:
            x = x - self.slopes.to(x.dtype)[:, None, None] * (position - keys).abs()
        if self.bias is not None:
            x = x + self.bias[:, rows].to(x.dtype)
        left, right = w.window
        right = 0 if w.causal else right
        hidden = torch.zeros(position.shape[0], len(keys), dtype=torch.bool, device=x.device)
        if left >= 0:
            hidden |= keys < position - left
        if right >= 0:
            hidden |= keys > position + right
        return x.masked_fill(hidden, -torch.inf), slope


class GradientSample:
    """Gradients of two key heads; dbias and dsinks, sums over the batch, of one of them."""

    def __init__(self, w: BackwardWorkload, x: BackwardInputs, seed: int):
        self.w, self.x = w, x
        self.expected: dict[tuple[int, int], Gradients] = {}
        self.summed: Gradients = {}
        plain_error: dict[str, float] = {}
        largest: dict[str, float] = {}
        last = (len(w.sequences) - 1, w.num_heads_kv - 1)
        places = {(0, 0), last}
        if {"dbias", "dsinks"} & set(w.need):
            places |= {(b, last[1]) for b in range(len(w.sequences))}
        plain_sums: Gradients = {}
        for b, group in sorted(places):
            head = KeyHead(w, x, seed, b, group)
            exact = head.gradients(torch.float64)
            plain = head.gradients(torch.float32, getattr(torch, w.dtype))
            for name in ("dbias", "dsinks"):
                if name in w.need and group == last[1]:
                    self.summed[name] = self.summed.get(name, 0) + exact[name]
                    plain_sums[name] = plain_sums.get(name, 0) + plain[name]
                exact.pop(name, None)
            if (b, group) in ((0, 0), last):
                self.expected[b, group] = exact
                for name, a in exact.items():
                    error = (plain[name] - a).abs().max().item()
                    plain_error[name] = max(plain_error.get(name, 0.0), error)
                    largest[name] = max(largest.get(name, 0.0), a.abs().max().item())
        for name, a in self.summed.items():
            plain_error[name] = (plain_sums[name] - a).abs().max().item()
            largest[name] = a.abs().max().item()
        eps = EPS[w.dtype]
        self.allowed = {name: 2 * plain_error[name] + eps * largest[name] for name in plain_error}

    def error(self, got: Gradients) -> Error:
        """Compare gradients by name, in the layouts of q, k and v."""
        shared = self.w.num_heads_q // self.w.num_heads_kv
        worst = 0.0
        for (b, group), expected in self.expected.items():
            heads = slice(group * shared, (group + 1) * shared)
            for name, a in expected.items():
                part = self.x.sequence(got[name], b)
                part = part[:, heads].transpose(0, 1) if name == "dq" else part[:, group]
                worst = self.worse(worst, name, part, a)
        heads = slice((self.w.num_heads_kv - 1) * shared, None)
        for name, a in self.summed.items():
            part = got[name][0, heads] if name == "dbias" else got[name][heads]
            worst = self.worse(worst, name, part, a)
        return Error(worst, 1.0)

    def worse(self, worst: float, name: str, part: torch.Tensor, a: torch.Tensor) -> float:
        error = (part.double() - a).abs().max().item() / self.allowed[name]
        return error if error > worst or error != error else worst  # NaN stays
