# SPDX-License-Identifier: Apache-2.0
"""Arrays of a backward pass, the calls that are timed, and the check of the gradients.

Nobody's forward pass is timed but that of a training step: each contestant differentiates what its
own forward pass kept. Next: backward_reference.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import cuattn

from .backward import ALWAYS_ALIKE, STEP, BackwardWorkload
from .backward_reference import GradientSample
from .devices import alibi_slopes, cu_seqlens
from .prepared import Prepared, require

SEED = 20261123  # of dropout
ATEN = torch.ops.aten


class BackwardInputs:
    """q, k, v, dout in bshd or packed, and the options that are arrays."""

    def __init__(self, w: BackwardWorkload, device: str):
        self.workload = w
        self.generator = torch.Generator(device).manual_seed(0)
        self.device, dtype = device, getattr(torch, w.dtype)
        lead_q = (sum(w.lengths),) if w.lengths else (w.batch, w.seqlen_q)
        lead_kv = (sum(w.lengths),) if w.lengths else (w.batch, w.seqlen_kv)
        self.q = self.drawn((*lead_q, w.num_heads_q, w.head_dim), dtype)
        self.k = self.drawn((*lead_kv, w.num_heads_kv, w.head_dim), dtype)
        self.v = self.drawn((*lead_kv, w.num_heads_kv, w.width_v), dtype)
        self.dout = self.drawn((*lead_q, w.num_heads_q, w.width_v), dtype)
        self.slopes = self.bias = self.sinks = self.cu_seqlens = None
        if w.alibi:
            self.slopes = torch.from_numpy(alibi_slopes(w.num_heads_q)).to(device)
        if w.bias:
            self.bias = self.drawn((1, w.num_heads_q, w.seqlen_q, w.seqlen_kv), dtype)
        if w.sinks:
            self.sinks = self.drawn((w.num_heads_q,), torch.float32)
        if w.lengths:
            self.cu_seqlens = torch.from_numpy(cu_seqlens(w)).to(device)

    def drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        random = torch.randn(shape, generator=self.generator, device=self.device)
        return random.to(dtype)

    def sequence(self, x: torch.Tensor, b: int) -> torch.Tensor:
        """One sequence of an array, [seqlen, heads, width]."""
        lengths = self.workload.lengths
        if not lengths:
            return x[b]
        begin = sum(lengths[:b])
        return x[begin : begin + lengths[b]]

    def sample(self) -> GradientSample:
        return GradientSample(self.workload, self, SEED)


# ---- ours ----


def our_options(w: BackwardWorkload, x: BackwardInputs) -> dict[str, Any]:
    """Return the options that both directions take."""
    options: dict[str, Any] = {"causal": w.causal, "window": w.window, "softcap": w.softcap}
    options |= {"alibi_slopes": x.slopes, "bias": x.bias, "sinks": x.sinks}
    if w.dropout_p:
        options |= {"dropout_p": w.dropout_p, "dropout_seed": SEED}
    return options


def ours(backend: str) -> Callable[[BackwardWorkload, BackwardInputs], Prepared]:
    def prepare(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
        if w.op == STEP:
            require(backend == "auto", "a step is measured as it is by default")
            from cuattn.torch import attention

            options = our_options(w, x)
            return step(w, x, lambda q, k, v: attention(q, k, v, **options))
        compared = backend != "deterministic" or any(bar.ours == ALWAYS_ALIKE for bar in w.bars)
        require(compared or not w.bars, "not compared on this row")
        forward = our_options(w, x)
        arguments: tuple[Any, ...] = (x.q, x.k, x.v)
        sizes: tuple[Any, ...] = ()
        if w.lengths:
            sizes = (x.cu_seqlens, x.cu_seqlens, max(w.lengths), max(w.lengths))
        function = cuattn.attention_varlen if w.lengths else cuattn.attention
        out, lse = function(*arguments, *sizes, return_lse=True, **forward)
        options = {**forward, "need": w.need}
        if backend == "deterministic":
            options["deterministic"] = True
        elif backend == "invariant":
            options["batch_invariant"] = True
        else:
            options["backend"] = backend
        call = getattr(cuattn, w.op)
        arguments = (x.dout, *arguments, out, lse, *sizes)
        plan = cuattn.explain(w.op, *arguments, **options)
        written = sum(a.numel() * a.element_size() for a in (x.q, x.k, x.v))
        return Prepared(
            lambda: call(*arguments, **options),
            canonical=lambda got: got._asdict(),
            kernel=plan.kernel,
            memory_bytes=written + plan.workspace_bytes,
        )

    return prepare


def step(w: BackwardWorkload, x: BackwardInputs, forward: Callable[..., Any]) -> Prepared:
    """Forward and backward through torch's autograd, from and to arrays in bshd."""
    leaves = [a.detach().clone().requires_grad_() for a in (x.q, x.k, x.v)]

    def call() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(forward(*leaves), leaves, x.dout)

    return Prepared(call, canonical=named, has_host_time=True)


# ---- torch scaled_dot_product_attention, its backward op alone ----


def named(gradients: Any) -> dict[str, torch.Tensor]:
    return dict(zip(("dq", "dk", "dv"), gradients, strict=False))


def transposed(gradients: Any) -> dict[str, torch.Tensor]:
    return named([gradient.transpose(1, 2) for gradient in gradients])


def require_plain(w: BackwardWorkload) -> None:
    scored = w.softcap or w.alibi or w.bias or w.sinks
    require(not scored, "no softcap, ALiBi, sinks; gradient of a bias not called here")
    require(not w.dropout_p, "its dropout is of its own bits, which the check does not know")
    require(not w.causal or w.seqlen_q == w.seqlen_kv, "its causal mask is aligned top left")


def sdpa(backend: str | None) -> Callable[[BackwardWorkload, BackwardInputs], Prepared]:
    """Name a member of torch.nn.attention.SDPBackend; None is torch's own choice."""

    def prepare(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
        require_plain(w)
        require(not w.lengths, "no ragged batches")
        if w.op == STEP:
            return sdpa_step(w, x, backend)
        on_cpu = not x.q.is_cuda
        if backend == "CUDNN_ATTENTION":
            require(not on_cpu, "needs CUDA tensors")
            require(w.window == (-1, -1), "no window")
            return cudnn(w, x)
        require(backend == "FLASH_ATTENTION", "its backward op is not called here")
        require(w.width_v == w.head_dim, "v must be as wide as q")
        if on_cpu:
            require(w.window == (-1, -1), "no window")
            return flash_for_cpu(w, x)
        require(w.dtype != "float32", "no float32")
        return flash(w, x) if w.window == (-1, -1) else flash_rows(w, x)

    return prepare


def views(x: BackwardInputs) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v with heads before rows, of the same memory."""
    return tuple(a.transpose(1, 2) for a in (x.dout, x.q, x.k, x.v))


def cudnn(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
    dout, q, k, v = views(x)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = (
        ATEN._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, w.causal, False)
    )
    kept = (out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, w.causal)
    function = ATEN._scaled_dot_product_cudnn_attention_backward.default
    return Prepared(lambda: function(dout, q, k, v, *kept), canonical=transposed)


def flash(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
    dout, q, k, v = views(x)
    out, lse, cu_q, cu_k, max_q, max_k, state, unused, _ = (
        ATEN._scaled_dot_product_flash_attention.default(q, k, v, 0.0, w.causal, False)
    )
    kept = (out, lse, cu_q, cu_k, max_q, max_k, 0.0, w.causal, state, unused)
    function = ATEN._scaled_dot_product_flash_attention_backward.default
    return Prepared(lambda: function(dout, q, k, v, *kept), canonical=transposed)


def flash_for_cpu(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
    require(w.num_heads_q == w.num_heads_kv, "no grouped heads")
    dout, q, k, v = views(x)
    forward = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = forward(q, k, v, 0.0, w.causal)
    function = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    kept = (out, lse, 0.0, w.causal)
    return Prepared(lambda: function(dout, q, k, v, *kept), canonical=transposed)


def flash_rows(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
    """FlashAttention-2 below scaled_dot_product_attention: windows, and packed sequences."""
    ends, longest_q, longest_kv = x.cu_seqlens, w.seqlen_q, w.seqlen_kv
    window: dict[str, int] = {}
    if w.window != (-1, -1):
        right = 0 if w.causal else w.window[1]
        window = {"window_size_left": w.window[0], "window_size_right": right}
    sizes = (ends, ends, longest_q, longest_kv, 0.0, w.causal)
    forward = ATEN._flash_attention_forward.default
    out, lse, state, unused, _ = forward(x.q, x.k, x.v, *sizes, False, **window)
    function = ATEN._flash_attention_backward.default
    arguments = (x.dout, x.q, x.k, x.v, out, lse, *sizes, state, unused)
    return Prepared(lambda: function(*arguments, **window), canonical=named)


def varlen(w: BackwardWorkload, x: BackwardInputs) -> Prepared:
    """FlashAttention-2 over packed sequences."""
    require_plain(w)
    require(bool(w.lengths), "only for ragged batches")
    require(x.q.is_cuda, "needs CUDA tensors")
    require(w.dtype != "float32" and w.width_v == w.head_dim, "16 bits, v as wide as q")
    return flash_rows(w, x)


def sdpa_step(w: BackwardWorkload, x: BackwardInputs, backend: str | None) -> Prepared:
    """Make a step through scaled_dot_product_attention, on transposed views, as in a model."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    require(w.window == (-1, -1), "no window")
    require(x.q.is_cuda or backend != "CUDNN_ATTENTION", "needs CUDA tensors")
    options = {"is_causal": w.causal, "enable_gqa": w.num_heads_q != w.num_heads_kv}

    def forward(q: Any, k: Any, v: Any) -> Any:
        heads_first = (a.transpose(1, 2) for a in (q, k, v))
        return scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

    prepared = step(w, x, forward)
    if backend is not None:
        kind = getattr(SDPBackend, backend)

        def context() -> contextlib.AbstractContextManager[Any]:
            return sdpa_kernel(kind)

        prepared.context = context
    return prepared
