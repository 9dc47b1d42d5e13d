# SPDX-License-Identifier: Apache-2.0
"""Arrays of a paged workload, and the calls of those who are measured on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cuattn

from . import reference
from .cache import CacheWorkload
from .devices import to_host
from .paged import PagedWorkload
from .prepared import Prepared, Unsupported, module, require
from .reference import LEAST_TOP

COLD_BYTES = 256 << 20  # calls take sets of caches in turn, so that none finds its own in the L2
GRAPH_S = 1e-3  # what one graph of calls takes at least
LIKELY_BYTES_PER_S, LIKELY_LATENCY_S = 4e12, 6e-6


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to float8_e4m3fn and back to float32."""
    return torch.from_numpy(np.float32(x)).to(torch.float8_e4m3fn).float().numpy()


def calls_in_graph(num_bytes: int, sets: int) -> int:
    """How many calls one graph holds: every set of arrays as often as another."""
    seconds = max(num_bytes / LIKELY_BYTES_PER_S, LIKELY_LATENCY_S)
    return sets * math.ceil(GRAPH_S / seconds / sets)


def num_sets(num_bytes: int, is_cuda: bool) -> int:
    """How many sets of arrays the calls take in turn."""
    return max(2, math.ceil(COLD_BYTES / max(1, num_bytes))) if is_cuda else 2


def cache_shapes(
    w: PagedWorkload | CacheWorkload, num_blocks: int, itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache."""
    heads, dim, size, x = w.num_heads_kv, w.head_dim, w.block_size, 16 // itemsize
    if w.kv_layout == "vllm":
        return (num_blocks, heads, dim // x, size, x), (num_blocks, heads, dim, size)
    order = (heads, size) if w.kv_layout == "hnd" else (size, heads)
    return ((num_blocks, *order, dim),) * 2


class PagedInputs:
    """q, and several sets of K and V caches that share block_tables and context_lens."""

    def __init__(self, w: PagedWorkload, device: str):
        self.workload = w
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, w.dtype)

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        shared, uneven = divmod(w.shared_len, w.block_size)
        if uneven:
            raise ValueError(f"{w.name}: a shared prefix of {w.shared_len} tokens ends in a block")
        needed = [math.ceil(length / w.block_size) - shared for length in w.context_lens]
        num_blocks = shared + sum(needed)
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        tables = np.zeros((len(needed), shared + max(needed)), np.int32)
        tables[:, :shared] = order[:shared]
        ends = shared + np.cumsum(needed)
        for row, end, count in zip(tables, ends, needed, strict=True):
            row[shared : shared + count] = order[end - count : end]
        self.block_tables = torch.from_numpy(tables).to(device)
        self.context_lens = torch.tensor(w.context_lens, dtype=torch.int32, device=device)
        queries = [count for count, _ in w.sequences]
        self.starts = [0, *itertools.accumulate(queries)]
        self.q = draw((sum(queries), w.num_heads_q, w.head_dim))
        is_cuda = self.q.is_cuda
        sets = 1 if w.query_lens else num_sets(w.bytes, is_cuda)
        self.repeats = calls_in_graph(w.bytes, sets) if is_cuda and not w.query_lens else 0
        shapes = cache_shapes(w, num_blocks * sets, self.q.element_size())
        caches = [draw(shape) for shape in shapes]
        if w.e4m3:
            self.q = self.q.to(torch.float8_e4m3fn).to(dtype)
            caches = [cache.to(torch.float8_e4m3fn).to(dtype) for cache in caches]
        self.caches = list(zip(*(cache.split(num_blocks) for cache in caches), strict=True))

    def head(self, b: int, h: int, rows: np.ndarray) -> reference.Head:
        """Copy one sequence and query head to the host: q, k, v, no slope, no bias."""
        w = self.workload
        group = h // (w.num_heads_q // w.num_heads_kv)
        length = w.context_lens[b]
        ids = self.block_tables[b, : math.ceil(length / w.block_size)].long()
        k, v = self.caches[0]
        if w.kv_layout == "vllm":
            k, v = k[ids, group].transpose(1, 2), v[ids, group].transpose(1, 2)
        elif w.kv_layout == "hnd":
            k, v = k[ids, group], v[ids, group]
        else:
            k, v = k[ids, :, group], v[ids, :, group]
        k, v = (to_host(x.reshape(-1, w.head_dim)[:length]) for x in (k, v))
        return self.out_head(self.q, b, h, rows), k, v, 0.0, None

    def out_head(self, out: torch.Tensor, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        return to_host(out[self.starts[b] : self.starts[b + 1], h])[rows]

    def sample(self) -> reference.Sample:
        return (CodesSample if self.workload.e4m3 else reference.Sample)(self.workload, self)


class Products(tuple[torch.Tensor]):
    """The result of products of codes, in which P is rounded to float8."""


class CodesSample(reference.Sample):
    """As reference.Sample; of products of codes more is allowed: twice what rounding P errs."""

    def __init__(self, w: PagedWorkload, inputs: PagedInputs):
        super().__init__(w, inputs)
        worst = 0.0
        for (b, h), rows in self.rows.items():
            q, k, v, slope, bias = inputs.head(b, h, rows)
            s = w.head_dim**-0.5 * (q.astype(np.float64) @ k.T.astype(np.float64))
            p = reference.softmax(reference.score_rows(w, s, rows, w.sequences[b], slope, bias))
            top = LEAST_TOP / p.max(axis=-1, keepdims=True)
            plain = reference.round_to(to_e4m3(top * p) @ v / np.float32(top), w.dtype)
            worst = max(worst, float(np.abs(plain - self.expected[b, h]).max()))
        self.of_products = self.allowed + 2 * worst

    def error(self, out: Any) -> reference.Error:
        if not isinstance(out, Products):
            return super().error(out)
        return dataclasses.replace(super().error(out[0]), allowed=self.of_products)


def in_turn(caches: list[Any], call: Callable[..., Any]) -> Callable[[], Any]:
    """Call with the sets of caches in turn, the first one first."""
    turns = itertools.cycle(caches)
    return lambda: call(*next(turns))


def as_e4m3(
    w: PagedWorkload, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store caches as float8_e4m3fn; the x-split layout has 16 elements side by side then."""
    if w.kv_layout == "vllm":
        blocks, heads, _, size, _ = k.shape
        k = k.transpose(2, 3).reshape(blocks, heads, size, w.head_dim // 16, 16).transpose(2, 3)
    return k.contiguous().to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)


def ours(backend: str) -> Callable[[PagedWorkload, PagedInputs], Prepared]:
    """Prepare a call of ours by its word.

    "auto" or a rung: paged_attention, its plan made beforehand where it needs one. "replan": the
    plan made in every call. "invariant": batch_invariant=True. "wide": the numbers of float8 caches
    kept in q's dtype. "codes": q in float8, too. "v1", "v2": PagedAttention. "cascade":
    cascade_attention, its prefix apart.
    Of prefill: "auto" or a rung over pages, "dense" over the same keys packed, "wide", "codes".
    """

    def prepare(w: PagedWorkload, x: PagedInputs) -> Prepared:
        if w.query_lens:
            return prefill(w, x, backend)
        require(backend != "dense", "for prefill only")
        require(w.e4m3 or backend not in ("wide", "codes"), "for float8 caches only")
        if backend == "cascade":
            return cascade(w, x)
        is_narrow = w.e4m3 and backend != "wide"
        caches = [as_e4m3(w, *pair) for pair in x.caches] if is_narrow else x.caches
        version = backend if backend in ("v1", "v2") else None
        op = f"paged_attention_{version}" if version else "paged_attention"
        options: dict[str, Any] = {"kv_layout": w.kv_layout}
        if not version:
            words = ("replan", "invariant", "wide", "codes")
            options["backend"] = "auto" if backend in words else backend
            options["batch_invariant"] = backend == "invariant"
        tail, q = (x.block_tables, x.context_lens), x.q
        if backend == "codes":
            q = q.to(torch.float8_e4m3fn)
            options["q_scale"] = torch.ones(w.num_heads_kv, device=q.device)
        try:
            plan = cuattn.explain(op, q, *caches[0], *tail, **options)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        planned = version is None and plan.num_splits == 0
        require(planned or backend != "replan", "no plan: keys are cut evenly")
        if planned and backend != "replan":
            options["plan"] = made_plan(w, tail, is_narrow, options["backend"])
        out = torch.empty_like(x.q)
        function, scale = getattr(cuattn, op), w.head_dim**-0.5

        def call(k: torch.Tensor, v: torch.Tensor) -> Any:
            if version:
                return function(out, q, k, v, *tail, scale, **options)
            return function(q, k, v, *tail, out=out, **options)

        return Prepared(
            in_turn(caches, call),
            kernel=plan.kernel,
            memory_bytes=out.nbytes + plan.workspace_bytes,
            repeats=x.repeats,
            bytes=w.bytes if is_narrow or not w.e4m3 else w.bytes * x.q.element_size(),
        )

    return prepare


def cascade(w: PagedWorkload, x: PagedInputs) -> Prepared:
    """cascade_attention: the prefix in arrays of its own, the blocks behind it in pages."""
    require(w.shared_len > 0, "for a shared prefix only")
    require(not w.e4m3, "its prefix has q's dtype")
    ends = torch.tensor([0, w.shared_len], dtype=torch.int32, device=x.q.device)
    skipped = w.shared_len // w.block_size
    tables = x.block_tables[:, skipped:].contiguous()
    tail = (tables, x.context_lens - w.shared_len)
    options: dict[str, Any] = {"kv_layout": w.kv_layout}
    sets = [
        (*cuattn.gather_cache(k, v, x.block_tables[:1, :skipped], ends, **options), k, v)
        for k, v in x.caches
    ]
    plan = cuattn.explain("cascade_attention", x.q, *sets[0], *tail, **options)
    if plan.num_splits == 0:
        options["plan"] = made_plan(w, tail, False, "auto")
    out = torch.empty_like(x.q)

    def call(*arrays: torch.Tensor) -> Any:
        return cuattn.cascade_attention(x.q, *(*arrays, *tail), out=out, **options)

    return Prepared(
        in_turn(sets, call),
        kernel=plan.kernel,
        memory_bytes=2 * out.nbytes + plan.workspace_bytes,
        repeats=x.repeats,
    )


def prefill(w: PagedWorkload, x: PagedInputs, backend: str) -> Prepared:
    """attention_varlen over pages, or over the same keys in packed arrays."""
    require(backend not in ("v1", "v2", "replan", "cascade"), "for decode only")
    require(w.e4m3 or backend not in ("wide", "codes"), "for float8 caches only")
    require(not w.e4m3 or backend != "dense", "for 16-bit caches only")
    cu_seqlens = (torch.tensor(x.starts), torch.tensor([0, *itertools.accumulate(w.context_lens)]))
    cu_seqlens_q, cu_seqlens_k = (ends.to(x.q.device, torch.int32) for ends in cu_seqlens)
    longest = (max(w.query_lens), max(w.context_lens))
    q, (k, v) = x.q, x.caches[0]
    if w.e4m3 and backend != "wide":
        k, v = as_e4m3(w, k, v)
    words = ("invariant", "dense", "wide", "codes")
    options: dict[str, Any] = {"causal": True, "backend": "auto" if backend in words else backend}
    options["batch_invariant"] = backend == "invariant"
    if backend == "codes":
        q = q.to(torch.float8_e4m3fn)
        options["q_scale"] = torch.ones(w.num_heads_kv, device=q.device)
    if backend == "dense":
        k, v = cuattn.gather_cache(k, v, x.block_tables, cu_seqlens_k, kv_layout=w.kv_layout)
        arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, *longest)
    else:
        options |= {"block_tables": x.block_tables, "kv_layout": w.kv_layout}
        options["seqused_k"] = x.context_lens
        arguments = (q, k, v, cu_seqlens_q, None, *longest)
    try:
        plan = cuattn.explain("attention_varlen", *arguments, **options)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from error
    multiplies_codes = backend == "codes" and "numbers" not in plan.reason
    return Prepared(
        lambda: cuattn.attention_varlen(*arguments, **options),
        kernel=plan.kernel,
        memory_bytes=x.q.nbytes + plan.workspace_bytes,
        canonical=(lambda out: Products((out,))) if multiplies_codes else (lambda out: out),
    )


def made_plan(
    w: PagedWorkload, tables_and_lens: tuple[Any, Any], is_narrow: bool, rung: str
) -> Any:
    words: dict[str, Any] = {"kv_layout": w.kv_layout, "backend": rung}
    return cuattn.paged_plan(
        *tables_and_lens,
        num_heads_q=w.num_heads_q,
        num_heads_kv=w.num_heads_kv,
        head_dim=w.head_dim,
        block_size=w.block_size,
        dtype=w.dtype,
        kv_dtype="float8_e4m3fn" if is_narrow else None,
        **words,
    )


def flashinfer(w: PagedWorkload, x: PagedInputs) -> Prepared:
    """FlashInfer's decode over pages, on tensor cores where heads share keys; its plan outside."""
    require(x.q.is_cuda, "needs CUDA tensors")
    require(w.kv_layout != "vllm", "another layout")
    require(w.dtype != "float32" and not w.e4m3, "float16 and bfloat16 caches")
    library = module("flashinfer")
    is_grouped = w.num_heads_q != w.num_heads_kv
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
        w.kv_layout.upper(),
        use_tensor_cores=is_grouped,
        backend="fa2" if is_grouped else "auto",
    )
    lens = np.asarray(w.context_lens)
    needed = -(-lens // w.block_size)
    tables = x.block_tables.cpu().numpy()
    ids = np.concatenate([row[:count] for row, count in zip(tables, needed, strict=True)])
    starts = np.concatenate([[0], np.cumsum(needed)])
    last = lens - (needed - 1) * w.block_size
    wrapper.plan(
        *(torch.from_numpy(a.astype(np.int32)).cuda() for a in (starts, ids, last)),
        w.num_heads_q,
        w.num_heads_kv,
        w.head_dim,
        w.block_size,
        q_data_type=x.q.dtype,
        kv_data_type=x.q.dtype,
    )
    out = torch.empty_like(x.q)

    def call(k: torch.Tensor, v: torch.Tensor) -> Any:
        return wrapper.run(x.q, (k, v), out=out)

    return Prepared(in_turn(x.caches, call), repeats=x.repeats)
