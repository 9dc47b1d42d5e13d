# SPDX-License-Identifier: Apache-2.0
"""cuattn inside torch.compile, and torch's scaled_dot_product_attention in cuattn's hands.

In eager code these functions call the library at once; while torch traces (torch.compile, fake
tensors) they become the registered ops ``torch.ops.cuattn.attention`` and ``attention_varlen``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import attention as run_attention
from .. import attention_varlen as run_attention_varlen

TENSORS = ("alibi_slopes", "sinks", "bias", "seqused_q", "seqused_k")
OPTIONS = (  # tensors first: an op with autograd takes them by position only
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? bias=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, *, bool causal=False, SymInt[2] window=[-1, -1], float? scale=None, "
    "float softcap=0.0, int num_splits=0, bool batch_invariant=False, bool return_lse=False, "
    'str backend="auto"'
)

library = torch.library.Library("cuattn", "DEF")
library.define(
    f'attention(Tensor q, Tensor k, Tensor v, {OPTIONS}, str layout="bshd", '
    "int[]? physical_layout=None) -> (Tensor, Tensor)"
)
library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {OPTIONS}) -> (Tensor, Tensor)"
)


def with_lse(result: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """Complete the results of an op, whose number is fixed: without lse, an empty one."""
    return result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))


def empty_out(q: Tensor, v: Tensor, physical_layout: Sequence[int] | None) -> Tensor:
    """Allocate what attention returns, its axes in memory as torch.empty_permuted takes them."""
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty_permuted(
        shape, physical_layout or tuple(range(len(shape))), dtype=q.dtype, device=q.device
    )


def attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Any,
    physical_layout: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Run the op on tensors with memory."""
    options.update(zip(TENSORS, tensors, strict=False))
    if physical_layout is not None:
        options["out"] = empty_out(q, v, physical_layout)
    return with_lse(run_attention(q, k, v, **options), q)


def attention_varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *tensors: Any,
    **options: Any,
) -> Any:
    """Run the op on tensors with memory."""
    options.update(zip(TENSORS, tensors, strict=False))
    result = run_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return with_lse(result, q)


def attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Any,
    layout: str = "bshd",
    physical_layout: Sequence[int] | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    batch, second, third = q.shape[:3]
    lse = (batch, third, second) if layout == "bshd" else (batch, second, third)
    return (
        empty_out(q, v, physical_layout),
        q.new_empty(lse if return_lse else (0,), dtype=torch.float32),
    )


def attention_varlen_shapes(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, return_lse: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    lse = (q.shape[1], q.shape[0]) if return_lse else (0,)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse, dtype=torch.float32),
    )


def no_gradient(*args: Any, **kwargs: Any) -> None:
    """Refuse, when the forward pass is recorded for a backward pass that does not exist."""
    raise NotImplementedError(
        "cuattn has no backward pass yet; call it under torch.no_grad() or pass detached tensors"
    )


for name, kernel, shapes in (
    ("attention", attention_kernel, attention_shapes),
    ("attention_varlen", attention_varlen_kernel, attention_varlen_shapes),
):
    library.impl(name, kernel, "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"cuattn::{name}", shapes, lib=library)
    torch.library.register_autograd(
        f"cuattn::{name}", no_gradient, setup_context=no_gradient, lib=library
    )


def traced(q: Tensor) -> bool:
    """Whether torch wants to see an op: it compiles, or q stands for a tensor without memory."""
    return torch.compiler.is_compiling() or type(q) not in (Tensor, torch.nn.Parameter)


def op_arguments(op: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Sort keyword arguments into the op's optional tensors and the rest; refuse what ops lack."""
    rest = dict(options)
    for name in ("q_scale", "k_scale", "v_scale", "out", "lse_out", "workspace", "stream"):
        if rest.pop(name, None) is not None:
            raise NotImplementedError(
                f"{op}: {name} must be None while torch traces, because ops own their results and "
                "streams; leave it out or call cuattn outside the compiled region"
            )
    tensors = [rest.pop(name, None) for name in TENSORS]
    return tensors, rest


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`cuattn.attention` for torch tensors, traceable by torch.compile without a graph break.

    Parameters
    ----------
    q, k, v, **options
        As in `cuattn.attention`; out, lse_out, workspace and stream only outside traced code.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention`.
    """
    if not traced(q):
        return run_attention(q, k, v, **options)
    tensors, rest = op_arguments("attention", options)
    out, lse = torch.ops.cuattn.attention(q, k, v, *tensors, **rest)
    return (out, lse) if rest.get("return_lse") else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Any:
    """`cuattn.attention_varlen` for torch tensors, traceable by torch.compile.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
        As in `cuattn.attention_varlen`; out, lse_out, workspace and stream only outside traced
        code.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention_varlen`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention_varlen`.
    """
    arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not traced(q):
        return run_attention_varlen(*arguments, **options)
    tensors, rest = op_arguments("attention_varlen", options)
    out, lse = torch.ops.cuattn.attention_varlen(*arguments, *tensors, **rest)
    return (out, lse) if rest.get("return_lse") else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what torch.nn.functional.scaled_dot_product_attention does, with cuattn's kernels.

    Parameters
    ----------
    query : tensor, [..., num_heads, seqlen_q, head_dim]
        float32, float16 or bfloat16; any number of leading axes.
    key : tensor, [..., num_heads, seqlen_kv, head_dim]
        Of query's dtype.
    value : tensor, [..., num_heads, seqlen_kv, head_dim_v]
        Of query's dtype.
    attn_mask : tensor, optional
        Added to the scores, or bool (True keeps the key); broadcastable to [..., num_heads,
        seqlen_q, seqlen_kv].
    dropout_p : float
        Must be 0.
    is_causal : bool
        As torch defines it: query i sees key j when j <= i, counted from the top left, unlike
        `cuattn.attention`.
    scale : float, optional
        None is ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        key and value may have fewer heads than query.

    Returns
    -------
    tensor, [..., num_heads, seqlen_q, head_dim_v]
        A query without visible key gives 0. With 4 axes they lie in memory in the order of query's
        axes, as torch's do: a transposed query gives a result that transposes back to a contiguous
        one. Otherwise it is contiguous.

    Raises
    ------
    ValueError
        is_causal together with attn_mask; different numbers of heads without enable_gqa.
    NotImplementedError
        dropout_p > 0, a gradient, or what `cuattn.attention` refuses.
    """
    op = "scaled_dot_product_attention"
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"{op}: dropout_p must be 0, got {dropout_p}; cuattn has no dropout"
        )
    if is_causal and attn_mask is not None:
        raise ValueError(
            f"{op}: attn_mask must be None with is_causal=True; put both into the mask"
        )
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(
            f"{op}: query, key and value must have the same number of axes, at least 3, got "
            f"{query.dim()}, {key.dim()} and {value.dim()}; add axes of extent 1"
        )
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{op}: key must have the {query.shape[-3]} heads of query, got {key.shape[-3]}; pass "
            "enable_gqa=True to share them"
        )
    leading = query.shape[:-3]
    seqlen_q, seqlen_kv = query.shape[-2], key.shape[-2]
    window = (-1, -1)
    if is_causal:
        # Top-left alignment in bottom-right terms: no key from seqlen_q on is seen by anyone, and
        # the diagonal moves right by the queries in excess.
        seqlen_kv = min(seqlen_q, seqlen_kv)
        key, value = key[..., :seqlen_kv, :], value[..., :seqlen_kv, :]
        window = (-1, seqlen_q - seqlen_kv)
    bias, order = attn_mask, None
    if len(leading) != 1:
        if bias is not None:
            full = (*leading, query.shape[-3], seqlen_q, seqlen_kv)
            bias = bias.expand(full).reshape(-1, *full[-3:])
        query = query.reshape(-1, *query.shape[-3:])
        key = key.reshape(-1, *key.shape[-3:])
        value = value.reshape(-1, *value.shape[-3:])
    elif not query.is_contiguous():
        order = stride_order(query)
    options: dict[str, Any] = {"layout": "bhsd", "window": window, "scale": scale}
    if traced(query):
        out, _ = torch.ops.cuattn.attention(
            query, key, value, None, None, bias, physical_layout=order, **options
        )
    else:
        given = None if order is None else empty_out(query, value, order)
        out = run_attention(query, key, value, bias=bias, out=given, **options)
    return out if len(leading) == 1 else out.reshape(*leading, *out.shape[-3:])


def stride_order(query: Tensor) -> tuple[int, ...]:
    """Sort the axes of a tensor of 4 by their strides, the largest first; head_dim is the last."""
    strides = query.stride()
    order: list[int] = []
    for axis in range(3):  # by hand: torch.compile cannot sort by strides that are symbols
        place = 0
        while place < len(order) and strides[order[place]] >= strides[axis]:
            place += 1
        order.insert(place, axis)
    return (*order, 3)
