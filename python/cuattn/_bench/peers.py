# SPDX-License-Identifier: Apache-2.0
"""Who is measured: our backends, and other implementations where they are importable.

A contestant turns the inputs of a workload into a call with nothing left to prepare; its
`canonical` brings the result to q's layout for the check. `Unsupported` says that it does not serve
the workload: no fault, no row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import cuattn

from . import reference
from .devices import Inputs
from .ops import AROUND, ATTENTION, CACHE, DIFFERENTIATED, LATENT, OTHER_OPS, other_calls
from .prepared import Prepared, Unsupported, first, module, require
from .workloads import AnyWorkload, Workload

# ---- ours ----


def our_call(w: Workload, x: Inputs, backend: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of cuattn.attention or attention_varlen."""
    options: dict[str, Any] = {"causal": w.causal, "window": w.window, "softcap": w.softcap}
    if backend == "invariant":
        options["batch_invariant"] = True
    else:
        options["backend"] = backend
    if w.alibi:
        options["alibi_slopes"] = x.slopes
    if w.bias:
        options["bias"] = x.bias
    if w.lengths:
        longest = max(w.lengths)
        return (x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest), options
    return (x.q, x.k, x.v), options


def ours(backend: str) -> Callable[[Workload, Inputs], Prepared]:
    def prepare(w: Workload, x: Inputs) -> Prepared:
        if w.op in OTHER_OPS:
            return other_calls(w.op).ours(backend)(w, x)
        arguments, options = our_call(w, x, backend)
        function = getattr(cuattn, w.op)
        try:
            plan = cuattn.explain(w.op, *arguments, **options)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        out_elements = int(np.prod(x.q.shape[:-1])) * w.head_dim
        out_bytes = out_elements * (4 if w.dtype == "float32" else 2)
        return Prepared(
            lambda: function(*arguments, **options),
            kernel=plan.kernel,
            memory_bytes=out_bytes + plan.workspace_bytes,
        )

    return prepare


# ---- torch scaled_dot_product_attention, on transposed views of the same memory ----


def sdpa(backend: str | None) -> Callable[[Workload, Inputs], Prepared]:
    """Name a member of torch.nn.attention.SDPBackend, or None for torch's own choice."""

    def prepare(w: Workload, x: Inputs) -> Prepared:
        require(hasattr(x.q, "detach"), "torch is not installed")
        if w.op in OTHER_OPS:
            return other_calls(w.op).sdpa(backend)(w, x)
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        require(not w.lengths, "no ragged batches")
        require(
            w.window == (-1, -1) and not w.softcap and not w.alibi, "no window, softcap or ALiBi"
        )
        require(not w.causal or w.seqlen_q == w.seqlen_kv, "its causal mask is aligned top left")
        require(not (w.bias and backend == "FLASH_ATTENTION"), "no bias")
        on_cpu = backend in (None, "MATH", "FLASH_ATTENTION")
        require(x.q.is_cuda or on_cpu, "needs CUDA tensors")
        require(
            not (x.q.is_cuda and backend == "FLASH_ATTENTION" and w.dtype == "float32"),
            "no float32",
        )
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        options: dict[str, Any] = {"is_causal": w.causal}
        if w.bias:
            options["attn_mask"] = x.bias
        if w.num_heads_q != w.num_heads_kv:
            options["enable_gqa"] = True
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if backend is not None:
            kind = getattr(SDPBackend, backend, None)
            require(kind is not None, f"this torch has no {backend}")

            def context() -> Any:
                return sdpa_kernel(kind)

        if backend == "MATH":
            q, k, v = (t.contiguous() for t in (q, k, v))
        return Prepared(
            lambda: scaled_dot_product_attention(q, k, v, **options),
            canonical=lambda out: out.transpose(1, 2),
            context=context,
        )

    return prepare


def torch_varlen(w: Workload, x: Inputs) -> Prepared:
    """FlashAttention-2 of torch.nn.attention.varlen; a dense batch with a window is packed."""
    if w.op in OTHER_OPS:
        return other_calls(w.op).varlen(w, x)
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    require(bool(w.lengths) or w.window != (-1, -1), "only for ragged batches and windows")
    require(w.dtype != "float32" and not (w.softcap or w.alibi or w.bias), "no such options")
    import torch

    varlen_attn = module("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(varlen_attn).parameters
    require(w.window == (-1, -1) or "window_size" in names, "this torch has no window")
    options: dict[str, Any] = {}
    if "window_size" in names:
        options["window_size"] = (w.window[0], 0) if w.causal else w.window
    else:
        options["is_causal"] = w.causal
    if w.num_heads_q != w.num_heads_kv and "enable_gqa" in names:
        options["enable_gqa"] = True
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in (x.q, x.k, x.v))
    packed_q, packed_kv = (torch.from_numpy(ends).to(q.device) for ends in packed_ends(w))
    longest_q, longest_kv = (max(lengths) for lengths in zip(*w.sequences, strict=True))
    return Prepared(
        lambda: varlen_attn(q, k, v, packed_q, packed_kv, longest_q, longest_kv, **options),
        canonical=lambda out: first(out).view(x.q.shape),
    )


def packed_ends(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Where the sequences of q and of k begin and end when the batch is packed."""
    lengths = zip(*w.sequences, strict=True)
    ends_q, ends_kv = (np.concatenate([[0], np.cumsum(one)]).astype(np.int32) for one in lengths)
    return ends_q, ends_kv


def flex(w: Workload, x: Inputs) -> Prepared:
    """FlexAttention of torch, compiled for the shape."""
    if w.op in OTHER_OPS:
        return other_calls(w.op).flex(w, x)
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # each shape is compiled anew; the recompile limit would end the run
    arrays, options = flex_arguments(w, x)
    compiled = torch.compile(flex_attention, dynamic=False)
    return Prepared(lambda: compiled(*arrays, **options), canonical=lambda out: from_flex(w, out))


def flex_arguments(w: Workload, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays and options of flex_attention; a ragged batch is one sequence of documents."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    offset = w.seqlen_kv - w.seqlen_q
    left, right = w.window
    right = 0 if w.causal else right

    document = None
    if w.lengths:
        numbers, counts = torch.arange(len(w.lengths)), torch.tensor(w.lengths)
        document = torch.repeat_interleave(numbers, counts).to(x.q.device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        keep = q_idx >= 0
        if document is not None:
            keep = keep & (document[q_idx] == document[kv_idx])
        if left >= 0:
            keep = keep & (kv_idx >= q_idx + offset - left)
        if right >= 0:
            keep = keep & (kv_idx <= q_idx + offset + right)
        return keep

    slopes, bias, softcap = x.slopes, x.bias, w.softcap

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * torch.abs(q_idx + offset - kv_idx)
        if bias is not None:
            score = score + bias[0, h, q_idx, kv_idx]
        return score

    q, k, v = ((t[None] if w.lengths else t).transpose(1, 2) for t in (x.q, x.k, x.v))
    block_mask = None
    if left >= 0 or right >= 0 or document is not None:
        lengths = q.shape[2], k.shape[2]
        block_mask = create_block_mask(mask_mod, None, None, *lengths, device=x.q.device)
    scored = bool(softcap) or slopes is not None or bias is not None
    options = {
        "score_mod": score_mod if scored else None,
        "block_mask": block_mask,
        "enable_gqa": w.num_heads_q != w.num_heads_kv,
    }
    return (q, k, v), options


def from_flex(w: Workload, out: Any) -> Any:
    """Bring flex_attention's result to q's layout."""
    out = out.transpose(1, 2)
    return out[0] if w.lengths else out


# ---- other packages ----


def fa3(w: Workload, x: Inputs) -> Prepared:
    """FlashAttention-3 (package fa3-fwd, or a build of flash-attention's hopper folder)."""
    if w.op in OTHER_OPS:
        require("FP8" not in fa3_built_without() or w.op in LATENT, "this build has no float8")
        return other_calls(w.op).fa3(w, x)
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    require(
        w.dtype != "float32" and not (w.alibi or w.bias),
        "float16 and bfloat16 without ALiBi or bias",
    )
    library = module(
        "fa3_fwd_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface"
    )
    without = fa3_built_without()
    require(w.dtype != "float16" or "FP16" not in without, "this build has no float16")
    require(w.window == (-1, -1) or "LOCAL" not in without, "this build has no window")
    options: dict[str, Any] = {"causal": w.causal, "softcap": w.softcap}
    if w.window != (-1, -1):
        options["window_size"] = (w.window[0], 0) if w.causal else w.window
    is_dense = not w.lengths
    if is_dense and w.seqlen_q < w.seqlen_kv and takes(library.flash_attn_func, "num_splits"):
        options["num_splits"] = 0  # its own choice; by default it does not split
    return _flash_attn(library, w, x, options)


def takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def fa3_built_without() -> set[str]:
    """Return what fa3-fwd was built without, as it says itself; nothing for other builds."""
    try:
        flags = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
    except ImportError:
        return set()
    prefix = "FLASHATTENTION_DISABLE_"
    return {name.removeprefix(prefix) for name, off in flags.items() if off}


def fa3_bf16(w: Workload, x: Inputs) -> Prepared:
    """FlashAttention-3 on the same numbers in bfloat16, for float16 rows where it has none."""
    require(w.dtype == "float16", "for float16 rows")
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    q, k, v = (t.bfloat16() for t in (x.q, x.k, x.v))
    rounded = Inputs(w, q=q, k=k, v=v, cu_seqlens=x.cu_seqlens)
    return fa3(dataclasses.replace(w, dtype="bfloat16"), rounded)


def fa3_columns(w: AnyWorkload, x: Any) -> Prepared:
    """FlashAttention-3 in float8 with v by columns, which it need not turn."""
    return other_calls(w.op).fa3(w, x, columns=True)


def fa4(w: Workload, x: Inputs) -> Prepared:
    """FlashAttention-4 (flash_attn.cute)."""
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    require(
        w.dtype != "float32" and not (w.alibi or w.bias),
        "float16 and bfloat16 without ALiBi or bias",
    )
    library = module("flash_attn.cute")
    options: dict[str, Any] = {"causal": w.causal, "softcap": w.softcap}
    if w.window != (-1, -1):
        left, right = w.window
        options["window_size"] = (
            left if left >= 0 else None,
            0 if w.causal else right if right >= 0 else None,
        )
    return _flash_attn(library, w, x, options)


def fa2(w: Workload, x: Inputs) -> Prepared:
    """FlashAttention-2 (package flash-attn); torch's flash backend is the same kernel."""
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    require(w.dtype != "float32" and not w.bias, "float16 and bfloat16 without bias")
    library = module("flash_attn")
    require(hasattr(library, "flash_attn_func"), "flash_attn is not installed")
    options = {
        "causal": w.causal,
        "softcap": w.softcap,
        "window_size": w.window,
        "alibi_slopes": x.slopes,
    }
    return _flash_attn(library, w, x, options)


def _flash_attn(library: Any, w: Workload, x: Inputs, options: dict[str, Any]) -> Prepared:
    if w.lengths:
        function, longest = library.flash_attn_varlen_func, max(w.lengths)
        sizes = {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
        sizes |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return Prepared(lambda: function(x.q, x.k, x.v, **sizes, **options), canonical=first)
    function = library.flash_attn_func
    return Prepared(lambda: function(x.q, x.k, x.v, **options), canonical=first)


def flashinfer(w: Workload, x: Inputs) -> Prepared:
    """FlashInfer: decode over pages, else ragged prefill with a dense batch as packed sequences."""
    if w.op in OTHER_OPS:
        return other_calls(w.op).flashinfer(w, x)
    require(hasattr(x.q, "is_cuda") and x.q.is_cuda, "needs CUDA tensors")
    require(
        w.dtype != "float32" and not (w.alibi or w.bias),
        "float16 and bfloat16 without ALiBi or bias",
    )
    require(w.window[1] < 0 or w.causal, "its window has a left side only")
    import torch

    library = module("flashinfer")
    ends_q, ends_kv = packed_ends(w)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.from_numpy(ends_q).cuda(),
        torch.from_numpy(ends_kv).cuda(),
        w.num_heads_q,
        w.num_heads_kv,
        w.head_dim,
        causal=w.causal,
        window_left=w.window[0],
        logits_soft_cap=w.softcap,
        q_data_type=x.q.dtype,
    )
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in (x.q, x.k, x.v))
    return Prepared(lambda: wrapper.run(q, k, v), canonical=lambda out: out.view(x.q.shape))


def memcpy(w: AnyWorkload, x: Any) -> Prepared:
    return other_calls(w.op).memcpy(w, x)


def eager(w: AnyWorkload, x: Any) -> Prepared:
    """Run the formula in torch's own operations, one after another."""
    return other_calls(w.op).torch_calls(w, x, lambda function: function)


def compiled(w: AnyWorkload, x: Any) -> Prepared:
    """Run the same through torch.compile, which fuses what it can."""
    import torch

    torch._dynamo.reset()
    return other_calls(w.op).torch_calls(w, x, lambda f: torch.compile(f, dynamic=False))


# ---- the plain formula in numpy ----


def plain_numpy(w: Workload, x: Inputs) -> Prepared:
    """softmax(q k^T) v with numpy's matrix products, one head at a time."""
    require(not getattr(x.q, "is_cuda", False), "needs arrays on the CPU")
    require(w.dtype == "float32", "float32 only")
    q, k, v = (np.asarray(t) for t in (x.q, x.k, x.v))
    slopes = None if x.slopes is None else np.asarray(x.slopes)
    bias = None if x.bias is None else np.asarray(x.bias)
    scale = np.float32(w.head_dim**-0.5)
    group = w.num_heads_q // w.num_heads_kv
    begins = np.concatenate([[0], np.cumsum(w.lengths)]).astype(int)

    def call() -> np.ndarray:
        out = np.empty_like(q)
        for b, seqlens in enumerate(w.sequences):
            at = slice(begins[b], begins[b + 1]) if w.lengths else b
            rows = np.arange(seqlens[0])
            for h in range(w.num_heads_q):
                slope = np.float32(0 if slopes is None else slopes[h])
                scores = scale * (q[at][:, h] @ k[at][:, h // group].T)
                extra = None if bias is None else bias[0, h]
                p = reference.softmax(reference.score_rows(w, scores, rows, seqlens, slope, extra))
                out[at][:, h] = p.astype(np.float32) @ v[at][:, h // group]
        return out

    return Prepared(call)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One column of the comparison. `packages` are looked up for the versions in the report."""

    name: str
    prepare: Callable[[Any, Any], Prepared]  # of a workload and its arrays
    is_ours: bool = False
    backend: str = ""  # of ours
    has_our_sums: bool = False  # cublas adds up as cuBLAS does, fast as tensor cores
    is_jit: bool = False
    in_bfloat16: bool = False  # also on float16 rows
    ops: tuple[str, ...] = ATTENTION
    packages: tuple[str, ...] = ()


def over_ranks(name: str) -> Callable[[Any, Any], Prepared]:
    """Name a peer of parallel_inputs.py."""

    def prepare(w: Any, x: Any) -> Prepared:
        prepared: Prepared = getattr(other_calls("parallel"), name)(w, x)
        return prepared

    return prepare


PEERS: dict[str, Contestant] = {
    peer.name: peer
    for peer in (
        Contestant("torch", sdpa(None), ops=DIFFERENTIATED, packages=("torch",)),
        Contestant("math", sdpa("MATH"), packages=("torch",)),
        Contestant("efficient", sdpa("EFFICIENT_ATTENTION"), packages=("torch",)),
        Contestant("flash", sdpa("FLASH_ATTENTION"), ops=DIFFERENTIATED, packages=("torch",)),
        Contestant(
            "cudnn",
            sdpa("CUDNN_ATTENTION"),
            ops=DIFFERENTIATED,
            packages=("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        ),
        Contestant("varlen", torch_varlen, ops=DIFFERENTIATED, packages=("torch",)),
        Contestant(
            "flex",
            flex,
            is_jit=True,
            ops=(*ATTENTION, "flex_attention"),
            packages=("torch", "triton"),
        ),
        Contestant("fa2", fa2, packages=("flash-attn",)),
        Contestant(
            "fa3",
            fa3,
            ops=(*ATTENTION, "mla_decode", "float8_attention"),
            packages=("fa3-fwd", "flash-attn-3"),
        ),
        Contestant("fa3_columns", fa3_columns, ops=("float8_attention",), packages=("fa3-fwd",)),
        Contestant("fa3_bf16", fa3_bf16, in_bfloat16=True, packages=("fa3-fwd", "flash-attn-3")),
        Contestant("fa4", fa4, is_jit=True, packages=("flash-attn-4", "nvidia-cutlass-dsl")),
        Contestant(
            "flashinfer",
            flashinfer,
            is_jit=True,
            packages=("flashinfer-python",),
            ops=(*ATTENTION, "paged_attention", "mla_decode"),
        ),
        Contestant("eager", eager, ops=(*AROUND, *LATENT), packages=("torch",)),
        Contestant(
            "compiled", compiled, is_jit=True, ops=(*AROUND, *LATENT), packages=("torch", "triton")
        ),
        Contestant("memcpy", memcpy, ops=(*CACHE, *AROUND, "quantize")),
        *(
            Contestant(name, over_ranks(name), ops=("parallel",), packages=("torch", "yunchang"))
            for name in ("context_parallel", "context_cudnn", "context_ring", "yunchang")
        ),
        Contestant("numpy", plain_numpy, packages=("numpy",)),
    )
}


def our_contestant(backend: str) -> Contestant:
    return Contestant(
        f"cuattn:{backend}",
        ours(backend),
        is_ours=True,
        backend=backend,
        has_our_sums=backend not in ("cublas", "fast"),
        ops=(*ATTENTION, *OTHER_OPS),
    )


def versions(contestants: Iterable[Contestant]) -> dict[str, str]:
    """Installed versions of the packages behind the contestants."""
    found = {"numpy": np.__version__}
    for contestant in contestants:
        for package in contestant.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
    return found
