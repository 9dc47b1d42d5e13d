# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention in cuattn's hands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention as run_attention
from .ops import differentiated, empty_out, run_op, traced, with_dropout_state
from .sdpa_arguments import STEP, autocast, check, fall_back, fit, is_usual, pad, readable, why_not


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
        float32, float16 or bfloat16, with 2 axes or more and any strides. The leading axes of
        query, key and value broadcast. A head_dim that is no multiple of 8 costs padded copies, one
        whose rows no kernel reads (a strided last axis; on CUDA, rows off 16 bytes) a copy.
    key : tensor, [..., num_heads, seqlen_kv, head_dim]
        Of query's dtype.
    value : tensor, [..., num_heads, seqlen_kv, head_dim_v]
        Of query's dtype.
    attn_mask : tensor, optional
        Added to the scores, float32 or of query's dtype, or bool (True keeps the key);
        broadcastable to [..., num_heads, seqlen_q, seqlen_kv].
    dropout_p : float
        Share of the probabilities that are dropped, at random bits of torch's generator; from 0 to
        below 1. Which are dropped differs from torch's own function.
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
        is_causal together with attn_mask; shapes that do not broadcast; different numbers of heads
        without enable_gqa.
    NotImplementedError
        Nested and sparse tensors, and what `cuattn.attention` refuses.

    Notes
    -----
    Gradients reach query, key, value and a float attn_mask; torch.func.vmap and grad go through. In
    autocast's regions all floats but float64 are converted to its dtype. For float64, and for a
    head_dim above 512, with a gradient above 256, torch's own function runs, and a warning says so
    once.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    masked_twice = is_causal and attn_mask is not None
    try:
        usual = not masked_twice and is_usual(query, key, value, attn_mask, enable_gqa)
    except AttributeError:  # no tensors, as will be said
        usual = False
    if usual:
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
        order = None if query.is_contiguous() else stride_order(query)
        try:
            return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, order, False)
        except (TypeError, ValueError):  # strides, or what has to be said in torch's words
            pass
    return run_unusual(*given)


def run_unusual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Run a call whose arrays have to be broadcast, padded, copied or refused."""
    check(query, key, value, attn_mask, is_causal)
    reason = why_not(query, key, value, attn_mask)
    if reason is not None:
        own = {"dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        return fall_back(reason, (query, key, value, attn_mask), {**own, "scale": scale})
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    order = stride_order(query) if query.dim() == 4 and not query.is_contiguous() else None
    query, key, value, bias, rows = fit(query, key, value, attn_mask, enable_gqa)
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    if head_dim % STEP:
        query, key = pad(query), pad(key)
        scale = head_dim**-0.5 if scale is None else scale
    query, key, value = readable(query), readable(key), readable(pad(value))
    bias = None if bias is None else bias.resolve_neg()
    out = attend(query, key, value, bias, dropout_p, is_causal, scale, order, traced(query))
    if head_dim_v % STEP:
        out = dense(out[..., :head_dim_v], order)
    return out if len(rows) == 3 else out.reshape(*rows, head_dim_v)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    order: tuple[int, ...] | None,
    is_traced: bool,
) -> Tensor:
    """Call the library, or the op where torch wants to see one, for a result in an axis order."""
    options: dict[str, Any] = {"layout": "bhsd"}
    if scale is not None:
        options["scale"] = scale
    if bias is not None:
        options["bias"] = bias
    if is_causal:
        # Top-left alignment in bottom-right terms: no key from seqlen_q on is seen by anyone, and
        # the diagonal moves right by the queries in excess.
        seqlen_q, seqlen_kv = query.shape[2], key.shape[2]
        if value.dim() != 4 or value.shape[2] != seqlen_kv:
            raise ValueError("value must have the rows of key")  # check() says it in full
        if seqlen_kv > seqlen_q:
            seqlen_kv = seqlen_q
            key, value = key[:, :, :seqlen_kv], value[:, :, :seqlen_kv]
        right = seqlen_q - seqlen_kv
        # torch.jit.trace makes tensors of sizes, and fails at one in a list.
        options["window"] = (-1, int(right) if torch.jit.is_tracing() else right)
    if dropout_p:
        options = with_dropout_state(query, {**options, "dropout_p": dropout_p})
    wants_gradient = differentiated(query, key, value, options)
    if wants_gradient or is_traced:
        if order is not None:
            options["physical_layout"] = order
        return run_op("attention", (query, key, value), options, wants_gradient)
    if order is not None:
        options["out"] = empty_out(query, value, order)
    return run_attention(query, key, value, **options)


def dense(out: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Copy a slice of the padded result into memory of its own, in the same order of axes."""
    if order is None:
        return out.contiguous()
    back = tuple(order.index(axis) for axis in range(4))
    return out.permute(order).contiguous().permute(back)


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
