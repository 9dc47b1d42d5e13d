# SPDX-License-Identifier: Apache-2.0
"""The arrays of a workload over ranks, whole on each of them, and everybody's calls of them.

Imported by the processes of ranks.py, in which torch.distributed is initialised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import cuattn
import cuattn.parallel

from . import reference
from .devices import Inputs, cu_seqlens, torch_inputs
from .parallel import ParallelWorkload
from .prepared import Prepared, module, require

SCHEMES = ("gather", "heads", "ring")


class ParallelInputs(Inputs):
    """A sequence, whole, and what of it is this rank's."""

    def __init__(self, w: ParallelWorkload, device: str):
        whole = torch_inputs(w, device)
        super().__init__(w, q=whole.q, k=whole.k, v=whole.v, cu_seqlens=whole.cu_seqlens)
        self.w = w
        rank, size = dist.get_rank(), dist.get_world_size()
        self.axis = 0 if w.lengths else 1
        layout = cuattn.parallel.Layout
        if w.lengths:
            self.layout = layout.balanced(cu_seqlens(w), size)
        else:  # a narrow window is balanced as it is
            wide = w.causal and w.window == (-1, -1)
            self.layout = layout("zigzag" if wide else "contiguous", w.seqlen_q, size)
        self.mine = [self.shard(x, rank) for x in (self.q, self.k, self.v)]
        self.dout = torch.ones_like(self.q)

    def shard(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.layout.shard(x, rank, self.axis).contiguous()

    def sample(self) -> ParallelSample:
        """Make what results of this workload are checked with."""
        return ParallelSample(self)

    def whole(self, out: torch.Tensor) -> torch.Tensor:
        """Bring the rows of all ranks together, in the order of the sequence."""
        return self.layout.unshard(out.detach(), dim=self.axis)


class ParallelSample(reference.Sample):
    """Some rows in float64, and all rows as one rank finds them, which those rows check."""

    def __init__(self, x: ParallelInputs):
        super().__init__(x.workload, x)
        w = self.w = x.w
        masks = {"causal": w.causal, "window": w.window}
        with torch.no_grad():
            self.one = one_rank(dataclasses.replace(w, kind="forward"), x, masks).call()
        self.one_is_right = super().error(self.one).ok

    def error(self, out: torch.Tensor) -> reference.Error:
        """Compare the rows, and all with those of one rank by their root mean square."""
        found = super().error(out)
        total = difference = 0.0
        for mine, one in zip(out.split(8192, -3), self.one.split(8192, -3), strict=True):
            difference += float((mine.float() - one.float()).pow(2).sum())
            total += float(one.float().pow(2).sum())
        near = difference <= (4 * reference.EPS[self.w.dtype]) ** 2 * total
        return found if near and self.one_is_right else reference.Error(math.inf, found.allowed)


class DecodeInputs:
    """Contexts whose blocks are dealt to the ranks in turn, whole on each and its own part."""

    def __init__(self, w: ParallelWorkload, device: str):
        self.workload = w
        rank, size = dist.get_rank(), dist.get_world_size()
        g = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, w.dtype)
        columns = -(-w.seqlen_kv // (w.block_size * size)) * size
        shape = (w.batch, columns, w.block_size, w.num_heads_kv, w.head_dim)
        self.q = torch.randn(w.batch, w.num_heads_q, w.head_dim, generator=g, device=device)
        self.q = self.q.to(dtype)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        for x in (self.k, self.v):
            x.normal_(generator=g)
        self.lens = torch.full((w.batch,), w.seqlen_kv, dtype=torch.int32, device=device)
        self.caches = [x.flatten(0, 1) for x in (self.k, self.v)]
        self.tables = self.table(columns)
        self.own = [x[:, rank::size].flatten(0, 1).contiguous() for x in (self.k, self.v)]
        self.own_tables = self.table(columns // size)

    def table(self, columns: int) -> torch.Tensor:
        blocks = torch.arange(self.workload.batch * columns, dtype=torch.int32)
        return blocks.view(self.workload.batch, columns).to(self.q.device)

    def sample(self) -> DecodeInputs:
        return self

    def error(self, out: torch.Tensor) -> reference.Error:
        """Compare the heads that share the last keys of the last context with float64."""
        w = self.workload
        group = w.num_heads_q // w.num_heads_kv
        k, v = (x[-1].flatten(0, 1)[: w.seqlen_kv, -1].double() for x in (self.k, self.v))
        weights = torch.softmax(self.q[-1, -group:].double() @ k.T * w.head_dim**-0.5, -1)
        want = weights @ v
        error = float((out[-1, -group:].double() - want).abs().max())
        return reference.Error(error, 8 * reference.EPS[w.dtype] * float(want.abs().max()))


def draw(w: ParallelWorkload, device: str) -> ParallelInputs | DecodeInputs:
    """Make the arrays of a workload on this rank."""
    return DecodeInputs(w, device) if w.kind == "decode" else ParallelInputs(w, device)


def finish(w: ParallelWorkload, forward: Callable[..., Any], arrays: Any, dout: Any) -> Any:
    """Return a call of a forward pass, or of it and its gradients."""
    if w.kind != "training":
        return lambda: forward(*arrays)
    leaves = [x.detach().requires_grad_() for x in arrays]

    def step() -> Any:
        with torch.enable_grad():
            out = forward(*leaves)
            torch.autograd.grad(out, leaves, dout)
        return out

    return step


def ours(backend: str) -> Callable[[ParallelWorkload, Any], Prepared]:
    """Name a scheme, "auto", "unchecked" (without the comparison of calls), or "one" rank."""

    def prepare(w: ParallelWorkload, x: Any) -> Prepared:
        require(backend in ("auto", "unchecked", "one", *SCHEMES), "not over ranks")
        if isinstance(x, DecodeInputs):
            return our_decode(backend, x)
        masks: dict[str, Any] = {"causal": w.causal, "window": w.window}
        if backend == "one":
            return one_rank(w, x, masks)
        options = {**masks, "layout": x.layout}
        options["scheme"] = backend if backend in SCHEMES else "auto"
        with torch.set_grad_enabled(w.kind == "training"):
            choice = cuattn.parallel.explain(*seen(x), **options)
        asked = backend in SCHEMES or not w.lengths  # explain knows of no documents
        kernel = choice.scheme if asked else None
        options["check"] = None if backend == "auto" else False
        ends = [cu_seqlens(w)] if w.lengths else []
        run = cuattn.parallel.attention_varlen if w.lengths else cuattn.parallel.attention

        def forward(*arrays: Any) -> Any:
            return run(*arrays, *ends, **options)

        dout = x.shard(x.dout, dist.get_rank())
        call = finish(w, forward, x.mine, dout)
        return Prepared(call, canonical=x.whole, kernel=kernel)

    return prepare


def seen(x: ParallelInputs) -> list[torch.Tensor]:
    """Return the arrays of this rank as those of a dense call, which trains if it does."""
    trains = x.w.kind == "training"
    dense = [array.unsqueeze(0) if x.axis == 0 else array for array in x.mine]
    return [array.detach().requires_grad_(trains) for array in dense]


def one_rank(w: ParallelWorkload, x: ParallelInputs, masks: dict[str, Any]) -> Prepared:
    """Call one rank's attention of the whole, on each of them."""

    def forward(*arrays: Any) -> Any:
        if not w.lengths:
            return cuattn.attention(*arrays, **masks)
        q, k, v = arrays
        most = max(w.lengths)
        return cuattn.attention_varlen(q, k, v, x.cu_seqlens, x.cu_seqlens, most, most, **masks)

    return Prepared(finish(w, forward, (x.q, x.k, x.v), x.dout))


def our_decode(backend: str, x: DecodeInputs) -> Prepared:
    """One token of each sequence, out of all heads on every rank."""
    require(backend in ("auto", "unchecked", "one"), "not decode")
    if backend == "one":
        k, v = x.caches
        return Prepared(lambda: cuattn.paged_attention(x.q, k, v, x.tables, x.lens))
    check = None if backend == "auto" else False
    k, v = x.own
    return Prepared(
        lambda: cuattn.parallel.paged_attention(
            x.q, k, v, x.own_tables, x.lens, reduce="all", check=check
        )
    )


def torch_context(
    rotate: str, kernel: str
) -> Callable[[ParallelWorkload, ParallelInputs], Prepared]:
    """Torch's own, by an all-gather of keys or by a ring; its balancer cuts as our zigzag."""

    def prepare(w: ParallelWorkload, x: ParallelInputs) -> Prepared:
        plain = w.kind != "decode" and not w.lengths and w.window == (-1, -1)
        require(plain, "no decode, documents or windows")
        require(x.q.is_cuda, "needs CUDA tensors")
        experimental = module("torch.distributed.tensor.experimental._attention")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        arrays: list[torch.Tensor] = []
        options: dict[str, Any] = {"is_causal": w.causal}
        if w.num_heads_q != w.num_heads_kv:
            options["enable_gqa"] = True

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            arrays[:] = [t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v)]
            experimental.set_rotate_method(rotate)
            experimental._cp_options.enable_load_balance = w.causal
            cut = experimental.context_parallel(mesh, buffers=arrays, buffer_seq_dims=[2] * 3)
            with sdpa_kernel(getattr(SDPBackend, kernel)), cut:
                yield

        def forward(*arrays: Any) -> Any:
            attend = torch.nn.functional.scaled_dot_product_attention  # as it is patched here
            return attend(*arrays, **options)

        dout = x.shard(x.dout, dist.get_rank()).transpose(1, 2)
        return Prepared(
            lambda: finish(w, forward, arrays, dout)(),
            canonical=lambda out: x.whole(out.transpose(1, 2)),
            context=context,
        )

    return prepare


context_parallel = torch_context("allgather", "FLASH_ATTENTION")
context_cudnn = torch_context("allgather", "CUDNN_ATTENTION")
context_ring = torch_context("alltoall", "FLASH_ATTENTION")


def yunchang(w: ParallelWorkload, x: ParallelInputs) -> Prepared:
    """Its zigzag ring over torch's flash operator, which needs no flash-attn."""
    plain = w.kind != "decode" and not w.lengths and w.window == (-1, -1)
    require(plain, "no decode, documents or windows")
    require(x.q.is_cuda, "needs CUDA tensors")
    require(w.num_heads_q == w.num_heads_kv, "torch's flash operator has no grouped heads")
    ring, kernels = module("yunchang.ring"), module("yunchang.kernels")
    run = ring.zigzag_ring_flash_attn_func if w.causal else ring.ring_flash_attn_func

    def forward(*arrays: Any) -> Any:
        return run(
            *arrays, causal=w.causal, group=dist.group.WORLD, attn_type=kernels.AttnType.TORCH_FLASH
        )

    return Prepared(finish(w, forward, x.mine, x.shard(x.dout, dist.get_rank())), canonical=x.whole)
