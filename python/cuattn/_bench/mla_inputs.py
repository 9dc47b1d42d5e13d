# SPDX-License-Identifier: Apache-2.0
"""Arrays over latents, the calls of those who are measured on them, and the check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import cuattn

from . import reference
from .devices import to_host
from .mla import PACKED, MlaWorkload
from .paged_inputs import calls_in_graph, in_turn, num_sets
from .prepared import Prepared, Unsupported, first, module, require
from .reference import EPS, Error

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
RUNGS = ("auto", "invariant", "cpu", "simt", "sm80", "sm90")
SUMS = 2  # sums of 576 products, in another order than those of numpy
ROUNDINGS = 2  # a prompt's keys and values, or its queries and sums, are rounded between the steps


class Drawn:
    """Random arrays of one workload."""

    def __init__(self, w: MlaWorkload, device: str):
        self.workload, self.device = w, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = getattr(torch, w.dtype)
        self.is_cuda = device != "cpu"

    def draw(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)


class DecodeInputs(Drawn):
    """q, and several sets of joined caches [blocks, block_size, latent + rope]."""

    def __init__(self, w: MlaWorkload, device: str):
        super().__init__(w, device)
        lens = np.asarray(w.context_lens)
        self.needed = -(-lens // w.block_size)
        num_blocks = int(self.needed.sum())
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        tables = np.zeros((len(lens), int(self.needed.max())), np.int32)
        for row, end, count in zip(tables, np.cumsum(self.needed), self.needed, strict=True):
            row[:count] = order[end - count : end]
        self.block_tables = torch.from_numpy(tables).to(device)
        self.context_lens = torch.from_numpy(lens.astype(np.int32)).to(device)
        count = num_sets(w.bytes, self.is_cuda)
        self.repeats = calls_in_graph(w.bytes, count) if self.is_cuda else 0
        columns = w.latent + w.rope
        self.caches = [(self.draw_cache(num_blocks, columns),) for _ in range(count)]
        self.q = self.draw(len(lens), w.q_len, w.num_heads_q, columns)

    def draw_cache(self, num_blocks: int, columns: int) -> torch.Tensor:
        return self.draw(num_blocks, self.workload.block_size, columns)

    def keys(self, b: int) -> torch.Tensor:
        ids = self.block_tables[b, : self.needed[b]].long()
        return self.caches[0][0][ids].flatten(0, 1)[: self.workload.context_lens[b]]

    def head(self, b: int, h: int, rows: np.ndarray) -> reference.Head:
        """Copy one sequence and head to the host: keys are whole latents, values their front."""
        w, keys = self.workload, to_host(self.keys(b))
        return to_host(self.q[b, :, h])[rows], keys, keys[:, : w.latent], 0.0, None

    def out_head(self, out: torch.Tensor, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        return to_host(out.reshape(*self.q.shape[:3], -1)[b, :, h])[rows]

    def sample(self) -> reference.Sample:
        sample = reference.Sample(self.workload, self)
        sample.allowed *= SUMS
        return sample


class ListInputs(DecodeInputs):
    """The same over packed latents, [blocks, block_size, 656], by lists of tokens."""

    def __init__(self, w: MlaWorkload, device: str):
        super().__init__(w, device)
        require(w.q_len == 1 and len(set(w.context_lens)) == 1, "single queries, equal lists")
        slots = self.caches[0][0].shape[0] * w.block_size
        drawn = np.random.default_rng(0).permutation(slots)[: sum(w.context_lens)]
        lists = torch.from_numpy(drawn.reshape(len(w.context_lens), -1).astype(np.int32))
        self.indices = lists.to(device)[:, None]

    def draw_cache(self, num_blocks: int, columns: int) -> torch.Tensor:
        w = self.workload
        shape = (num_blocks, w.block_size, PACKED)
        cache = torch.empty(shape, dtype=torch.uint8, device=self.device)
        slots = torch.arange(num_blocks * w.block_size, device=self.device)
        rows = self.draw(len(slots), columns)
        cuattn.mla_write(rows[:, : w.latent], rows[:, w.latent :], cache, None, slots)
        return cache

    def keys(self, b: int) -> torch.Tensor:
        rows = self.caches[0][0].flatten(0, 1)[self.indices[b, 0].long()]
        ends = self.workload.latent, self.workload.latent + 16
        codes, scales, rope = (part.contiguous() for part in rows.tensor_split(ends, 1))
        numbers = codes.view(torch.float8_e4m3fn).float().unflatten(1, (4, -1))
        latents = (numbers * scales.view(torch.float32)[..., None]).flatten(1).to(self.dtype)
        return torch.cat([latents, rope.view(self.dtype)], 1)


class PromptInputs(Drawn):
    """q, latents, projections and rotated columns of mla_attention."""

    repeats = 0

    def __init__(self, w: MlaWorkload, device: str):
        super().__init__(w, device)
        batch, heads, keys = len(w.context_lens), w.num_heads_q, w.context_lens[0]
        self.q = self.draw(batch, heads, w.q_len, w.nope)
        self.latent = self.draw(batch, keys, w.latent)
        self.k_proj, self.v_proj = (
            self.draw(heads, w.latent, w.nope) / math.sqrt(w.latent) for _ in range(2)
        )
        self.rope: dict[str, torch.Tensor] = {}
        if w.rope:
            self.rope["q_rope"] = self.draw(batch, heads, w.q_len, w.rope)
            self.rope["k_rope"] = self.draw(batch, keys, w.rope)

    def head(self, b: int, h: int, rows: np.ndarray) -> reference.Head:
        """Copy one sequence and head to the host, its keys and values projected in float32."""
        latent = to_host(self.latent[b])
        q = to_host(self.q[b, h])[rows]
        k, v = (latent @ to_host(proj[h]) for proj in (self.k_proj, self.v_proj))
        if self.rope:
            q = np.concatenate([q, to_host(self.rope["q_rope"][b, h])[rows]], axis=-1)
            k = np.concatenate([k, to_host(self.rope["k_rope"][b])], axis=-1)
        return q, k, v, 0.0, None

    def out_head(self, out: torch.Tensor, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        return to_host(out[b, h])[rows]

    def sample(self) -> reference.Sample:
        sample = reference.Sample(self.workload, self)
        sample.allowed *= ROUNDINGS
        return sample


class ProjectInputs(Drawn):
    """Rows of each head and a matrix of each head."""

    def __init__(self, w: MlaWorkload, device: str):
        super().__init__(w, device)
        count = num_sets(w.bytes, self.is_cuda)
        self.repeats = calls_in_graph(w.bytes, count) if self.is_cuda else 0
        rows = w.q_len * len(w.context_lens)
        shape = (1, rows, w.num_heads_q, w.latent)
        self.sets = [(self.draw(*shape),) for _ in range(count)]
        self.proj = self.draw(w.num_heads_q, w.latent, w.nope) / math.sqrt(w.latent)

    def sample(self) -> Any:
        x, proj = self.sets[0][0][:, :64].double(), self.proj.double()
        return Product(torch.einsum("brhl,hld->brhd", x, proj), EPS[self.workload.dtype])


class Product:
    """The first rows of a projection in float64."""

    def __init__(self, expected: torch.Tensor, eps: float):
        self.expected, self.eps = expected, eps

    def error(self, out: Any) -> Error:
        difference = (out[:, : self.expected.shape[1]].double() - self.expected).abs().max()
        allowed = (self.eps + 8 * EPS["float32"]) * self.expected.abs().max().item()  # sums of 512
        return Error(difference.item(), allowed)


# ---- ours ----


def ours(backend: str) -> Callable[[MlaWorkload, Any], Prepared]:
    """Prepare "auto", a rung, "invariant", or of mla_attention "explicit" or "absorbed"."""

    def prepare(w: MlaWorkload, x: Any) -> Prepared:
        forms = backend in ("explicit", "absorbed")
        if w.op == "mla_decode":
            require(backend in RUNGS, "a rung, auto or invariant")
            return our_decode(w, x, backend)
        require(forms or backend == "auto", "auto only")
        if w.op == "mla_project":
            require(backend == "auto", "auto only")
            return Prepared(
                in_turn(x.sets, lambda a: cuattn.mla_project(a, x.proj)), repeats=x.repeats
            )
        form = backend if forms else None
        arrays = (x.q, x.latent, x.latent, x.k_proj, x.v_proj)
        try:
            plan = cuattn.explain("mla_attention", *arrays, form=form, **x.rope)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        return Prepared(
            lambda: cuattn.mla_attention(*arrays, form=form, **x.rope), kernel=plan.kernel
        )

    return prepare


def our_decode(w: MlaWorkload, x: DecodeInputs, backend: str) -> Prepared:
    q = (x.q[..., : w.latent], x.q[..., w.latent :])
    tail: tuple[Any, Any] = (x.block_tables, x.context_lens)
    options: dict[str, Any] = {"scale": w.head_dim**-0.5}
    if isinstance(x, ListInputs):
        tail, options["indices"] = (None, None), x.indices
    options["backend"] = "auto" if backend == "invariant" else backend
    options["batch_invariant"] = backend == "invariant"

    def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if w.packed:
            return cache, None
        return cache[..., : w.latent], cache[..., w.latent :]

    caches = [halves(cache) for (cache,) in x.caches]
    try:
        plan = cuattn.explain("mla_decode", *q, *caches[0], *tail, **options)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from error
    out = torch.empty_like(q[0])

    def call(ckv: torch.Tensor, kpe: torch.Tensor | None) -> Any:
        return cuattn.mla_decode(*q, ckv, kpe, *tail, out=out, **options)

    return Prepared(
        in_turn(caches, call),
        kernel=plan.kernel,
        memory_bytes=out.nbytes + plan.workspace_bytes,
        repeats=x.repeats,
    )


# ---- peers ----


def in_rows(w: MlaWorkload, x: DecodeInputs) -> list[tuple[torch.Tensor]]:
    """Gather the latents of each set, [batch, context, latent + rope]."""
    require(len(set(w.context_lens)) == 1, "equal lengths")
    require(not w.packed, "numbers, no codes")
    ids = x.block_tables.long()
    return [(c[ids].flatten(1, 2)[:, : w.context_lens[0]].contiguous(),) for (c,) in x.caches]


def torch_calls(w: MlaWorkload, x: Any, wrap: Wrap) -> Prepared:
    """Torch's products and softmax; for decode over latents that are gathered beforehand."""
    if w.op == "mla_project":
        product = wrap(lambda a: torch.einsum("brhl,hld->brhd", a, x.proj))
        return Prepared(in_turn(x.sets, product), repeats=x.repeats)
    if w.op == "mla_attention":
        return torch_prompt(w, x, wrap)
    require(w.q_len == 1, "one query")
    scale = w.head_dim**-0.5
    dense = in_rows(w, x)
    q = x.q[:, 0]

    def attend(latents: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(torch.bmm(q, latents.mT) * scale, -1)
        return torch.bmm(p, latents[..., : w.latent])

    return Prepared(in_turn(dense, wrap(attend)), repeats=x.repeats)


def torch_prompt(w: MlaWorkload, x: PromptInputs, wrap: Wrap) -> Prepared:
    """Einsum for keys and values, then torch's scaled_dot_product_attention."""
    keys = w.context_lens[0]
    masked: dict[str, Any] = {"is_causal": True}
    if w.q_len != keys:
        rows = torch.arange(w.q_len, device=x.q.device)[:, None] + keys - w.q_len
        masked = {"attn_mask": torch.arange(keys, device=x.q.device) <= rows}

    def attend(q: torch.Tensor, latent: torch.Tensor, *rope: torch.Tensor) -> torch.Tensor:
        k, v = (torch.einsum("bsl,hld->bhsd", latent, proj) for proj in (x.k_proj, x.v_proj))
        if rope:
            q = torch.cat([q, rope[0]], -1)
            k = torch.cat([k, rope[1][:, None].expand(-1, w.num_heads_q, -1, -1)], -1)
        return functional.scaled_dot_product_attention(q, k, v, **masked)

    function = wrap(attend)
    return Prepared(lambda: function(x.q, x.latent, *x.rope.values()))


def flashinfer(w: MlaWorkload, x: DecodeInputs) -> Prepared:
    """FlashInfer's MLA over pages; its plan outside."""
    require(x.is_cuda and w.dtype != "float32", "float16 and bfloat16 on CUDA")
    require(w.op == "mla_decode" and not w.packed, "decode over numbers only")
    library = module("flashinfer.mla")
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchMLAPagedAttentionWrapper(space, backend="auto")
    batch = len(w.context_lens)
    tables = x.block_tables.cpu().numpy()
    ids = np.concatenate([row[:n] for row, n in zip(tables, x.needed, strict=True)])
    ends = np.concatenate([[0], np.cumsum(x.needed)])
    queries = np.arange(batch + 1) * w.q_len
    arrays = (torch.from_numpy(a.astype(np.int32)).cuda() for a in (queries, ends, ids))
    wrapper.plan(
        *arrays, x.context_lens, w.num_heads_q, w.latent, w.rope, w.block_size, True,
        w.head_dim**-0.5, x.q.dtype, x.q.dtype,
    )  # fmt: skip
    q = x.q.flatten(0, 1)
    q_nope, q_pe = q[..., : w.latent].contiguous(), q[..., w.latent :].contiguous()
    out = torch.empty_like(q_nope)

    def call(cache: torch.Tensor) -> Any:
        return wrapper.run(q_nope, q_pe, cache[..., : w.latent], cache[..., w.latent :], out=out)

    return Prepared(in_turn(x.caches, call), repeats=x.repeats)


def fa3(w: MlaWorkload, x: DecodeInputs) -> Prepared:
    """FlashAttention-3 with the latents as values (`qv=`)."""
    require(x.is_cuda and w.dtype != "float32", "float16 and bfloat16 on CUDA")
    require(not w.packed, "numbers, no codes")
    library = module("fa3_fwd_interface", "flash_attn_interface")
    q_nope, q_pe = x.q[..., : w.latent].contiguous(), x.q[..., w.latent :].contiguous()

    def call(cache: torch.Tensor, tables: torch.Tensor | None = x.block_tables) -> Any:
        shared = cache[:, :, None]
        return library.flash_attn_with_kvcache(
            q=q_pe, k_cache=shared[..., w.latent :], v_cache=shared[..., : w.latent], qv=q_nope,
            page_table=tables, cache_seqlens=x.context_lens,
            softmax_scale=w.head_dim**-0.5, causal=True, num_splits=0,
        )  # fmt: skip

    try:
        call(*x.caches[0])
    except RuntimeError as error:  # fa3-fwd has no pages for few rows: latents in rows then
        require("paged KV" in str(error), str(error))
        return Prepared(
            in_turn(in_rows(w, x), lambda cache: call(cache, None)),
            canonical=first,
            repeats=x.repeats,
        )
    return Prepared(in_turn(x.caches, call), canonical=first, repeats=x.repeats)
