# SPDX-License-Identifier: Apache-2.0
"""Arrays and calls of attention that rotates its queries, and of append_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cuattn

from . import reference
from .devices import Inputs, torch_inputs
from .fused import AppendWorkload, RopeWorkload
from .paged_inputs import PagedInputs, in_turn
from .prepared import Prepared, require


def on_device(table: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.from_numpy(part).to(device) for part in table)
    return cos, sin


class RopeInputs:
    """Arrays of attention, the tables, and the queries as they are once they were rotated."""

    def __init__(self, w: RopeWorkload, device: str):
        self.workload = w
        drawn = torch_inputs(w, device)
        self.q, self.k, self.v = drawn.q, drawn.k, drawn.v
        table = cuattn.rope_table(w.seqlen_kv, w.head_dim)
        self.rope = on_device(table, device)
        self.rotated = cuattn.apply_rope(self.q, *self.rope)

    def sample(self) -> reference.Sample:
        w = self.workload
        return reference.Sample(w, Inputs(w, q=self.rotated, k=self.k, v=self.v))


class AppendInputs(PagedInputs):
    """Arrays over pages, and the key and value that each sequence gets.

    The caches hold these already while the sample is taken; `forget` takes them out again, so that
    a call that does not write them is wrong.
    """

    workload: AppendWorkload

    def __init__(self, w: AppendWorkload, device: str):
        super().__init__(w, device)
        batch = len(w.context_lens)
        table = cuattn.rope_table(max(w.context_lens), w.head_dim)
        self.rope = on_device(table, device)
        shape = (batch, 1, w.num_heads_kv, w.head_dim)
        generator = torch.Generator(device).manual_seed(1)
        self.new = [
            torch.randn(shape, generator=generator, device=device).to(self.q.dtype)
            for _ in range(2)
        ]
        self.positions = self.context_lens.long() - 1
        block = self.positions // w.block_size
        ids = self.block_tables.gather(1, block[:, None])[:, 0].long()
        self.slots = ids * w.block_size + self.positions % w.block_size
        for caches in self.caches:
            self.write(*caches)
        self.raw = self.q
        self.q = cuattn.apply_rope(self.raw[:, None], *self.rope, self.positions[:, None])[:, 0]

    def write(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        cos, sin = self.rope
        words = {"cos": cos, "sin": sin, "positions": self.positions}
        k, v = (new[:, 0] for new in self.new)
        cuattn.reshape_and_cache(k, v, k_cache, v_cache, self.slots, **words)

    def forget(self) -> None:
        size = self.workload.block_size
        for cache in self.caches[0]:
            cache[self.slots // size, self.slots % size] = torch.nan


def ours(backend: str) -> Callable[[Any, Any], Prepared]:
    """Prepare "auto": one call; "unfused": a call for each step; "plain": rotated beforehand."""

    def prepare(w: Any, x: Any) -> Prepared:
        require(backend in ("auto", "unfused", "plain"), "auto, unfused or plain")
        return append(w, x, backend) if w.op == "append_attention" else rotated(w, x, backend)

    return prepare


def rotated(w: RopeWorkload, x: RopeInputs, backend: str) -> Prepared:
    """Attention whose queries are rotated within the call, by a call before, or were before."""
    words: dict[str, Any] = {"causal": w.causal}

    def apart() -> Any:
        return cuattn.attention(cuattn.apply_rope(x.q, *x.rope), x.k, x.v, **words)

    calls: dict[str, Callable[[], Any]] = {
        "auto": lambda: cuattn.attention(x.q, x.k, x.v, rope=x.rope, **words),
        "unfused": apart,
        "plain": lambda: cuattn.attention(x.rotated, x.k, x.v, **words),
    }
    return Prepared(calls[backend])


def append(w: AppendWorkload, x: AppendInputs, backend: str) -> Prepared:
    """Write and attend in one call, or in two."""
    require(backend != "plain", "the writing is part of it")
    x.forget()
    tail = (x.block_tables, x.context_lens)
    q, (k, v) = x.raw[:, None], x.new

    def together(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        out = cuattn.append_attention(q, k, v, k_cache, v_cache, *tail, rope=x.rope)
        return out[:, 0]

    def apart(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        x.write(k_cache, v_cache)
        turned = cuattn.apply_rope(q, *x.rope, x.positions[:, None])[:, 0]
        return cuattn.paged_attention(turned, k_cache, v_cache, *tail)

    call = together if backend == "auto" else apart
    return Prepared(in_turn(x.caches, call), repeats=x.repeats)
