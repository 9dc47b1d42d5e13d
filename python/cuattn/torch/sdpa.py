# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention in cuattn's hands."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import attention as run_attention
from .ops import autocast, differentiated, empty_out, run_op, traced, with_dropout_state


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
        Share of the probabilities that are dropped, at random bits of torch's generator.
    is_causal : bool
        As torch defines it: query i sees key j when j <= i, counted from the top left, unlike
        `cuattn.attention`.
    scale : float, optional
        None is ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        key and value may have fewer heads than query.

    Gradients reach query, key, value and a float attn_mask. In autocast's regions query, key and
    value are converted to its dtype.

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
        What `cuattn.attention` refuses.
    """
    op = "scaled_dot_product_attention"
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
    query, key, value = autocast(query, key, value)
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
    options: dict[str, Any] = {"layout": "bhsd", "window": window, "scale": scale, "bias": bias}
    if dropout_p:
        options = with_dropout_state(query, {**options, "dropout_p": dropout_p})
    if traced(query) or differentiated(query, key, value, options):
        options["physical_layout"] = order
        out = run_op("attention", (query, key, value), options)
    else:
        given = None if order is None else empty_out(query, value, order)
        out = run_attention(query, key, value, out=given, **options)
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
