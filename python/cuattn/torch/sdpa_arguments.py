# SPDX-License-Identifier: Apache-2.0
"""The arguments of scaled_dot_product_attention, brought to what `cuattn.attention` takes.

Checks, broadcasting, padding, copies of what no kernel reads, and torch's own function for what
cuattn refuses. Next: sdpa.py.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .eager import WIDEST
from .ops import differentiated_within, traced

OP = "scaled_dot_product_attention"
LARGEST, STEP = 512, 8  # head_dim; of one that has a gradient WIDEST

warned: set[str] = set()


class Fitted(NamedTuple):
    """Four axes each, and the shape of the result without its last axis."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    rows: tuple[int, ...]


def check_kind(name: str, x: Tensor) -> None:
    """Refuse what is no tensor, and tensors that are no dense array, by name."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{OP}: {name} must be a torch tensor, got {type(x).__name__}; pass "
            f"torch.as_tensor({name})"
        )
    if x.is_nested:
        raise NotImplementedError(
            f"{OP}: {name} must be a dense tensor, got a nested one; pass its values and offsets "
            "to cuattn.torch.attention_varlen, or call torch's own function"
        )
    if x.layout is not torch.strided:
        raise NotImplementedError(
            f"{OP}: {name} must be a dense tensor, got layout {x.layout}; pass {name}.to_dense()"
        )


def is_usual(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> bool:
    """Whether `cuattn.attention` means the same by a call that it takes, as quickly as can be."""
    if query.layout is not torch.strided or query.is_nested or traced(query):
        return False
    if query.dim() != 4 or key.dim() != 4 or query.shape[-1] > WIDEST or value.size(-1) > WIDEST:
        return False
    if attn_mask is not None and type(attn_mask) not in (Tensor, torch.nn.Parameter):
        return False
    return enable_gqa or query.shape[1] == key.shape[1]


def check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    """Refuse what fits neither cuattn nor torch's own function."""
    named = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in named.items():
        if x is not None or name != "attn_mask":
            check_kind(name, x)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(
                f"{OP}: {name} must have at least 2 axes, got {x.dim()}; add axes of extent 1"
            )
        if x.dtype != query.dtype:
            raise ValueError(
                f"{OP}: {name} must be {query.dtype} like query, got {x.dtype}; cast one of them"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{OP}: key must have head_dim {query.shape[-1]} like query, got {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"{OP}: value must have the {key.shape[-2]} rows of key, got {value.shape[-2]}"
        )
    if attn_mask is not None:
        check_mask(attn_mask, query)
        if is_causal:
            raise ValueError(
                f"{OP}: attn_mask must be None with is_causal=True; put both into the mask"
            )


def check_mask(attn_mask: Tensor, query: Tensor) -> None:
    """Refuse a mask of a kind that torch does not take either, or that has no memory."""
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        narrow = "" if query.dtype == torch.float32 else f", {query.dtype} like query"
        raise ValueError(
            f"{OP}: attn_mask must be bool{narrow} or float32, got {attn_mask.dtype}; cast it"
        )
    if type(attn_mask).__name__ == "CausalBias":
        raise NotImplementedError(
            f"{OP}: attn_mask must be a plain tensor, got a CausalBias; pass is_causal=True for "
            "causal_upper_left, or call cuattn.torch.attention(causal=True) for causal_lower_right"
        )


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Convert as torch's own function does in autocast's regions: all floats but float64."""
    first = tensors[0]
    assert first is not None
    if not torch.is_autocast_enabled("cuda" if first.is_cuda else "cpu"):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    kept = (torch.float64, torch.bool)
    return tuple(x if x is None or x.dtype in kept else x.to(dtype) for x in tensors)


def why_not(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str | None:
    """Say what no kernel of cuattn takes and torch's own function does."""
    if query.dtype == torch.float64:
        return "float64"
    most, words = LARGEST, ""
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if wants_gradient or torch.compiler.is_compiling() or differentiated_within(*given):
        most, words = WIDEST, " with a gradient"
    for x in (query, value):
        if not 0 < x.shape[-1] <= most:
            return f"a head_dim outside 1 to {most}{words}"
    return None


def fall_back(reason: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Call torch's own function, and say so once for each reason."""
    if not torch.compiler.is_compiling() and reason not in warned:
        warned.add(reason)
        warnings.warn(
            f"{OP}: no kernel of cuattn takes {reason}; torch's own function runs instead (said "
            "once)",
            stacklevel=4,  # the caller of scaled_dot_product_attention
        )
    return torch.nn.functional.scaled_dot_product_attention(*arguments, **options)


def fit(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> Fitted:
    """Broadcast the leading axes against each other and fold them into one batch."""
    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value = (x if x.dim() > 2 else x[None] for x in (query, key, value))
    query, key, value = share_heads(query, key, value, enable_gqa)
    leading = (query.shape[:-3], key.shape[:-3], value.shape[:-3])
    batch = leading[0]
    if leading[1] != batch or leading[2] != batch:
        batch = broadcast("key and value", *leading)
    heads, seqlen_q, seqlen_kv = query.shape[-3], query.shape[-2], key.shape[-2]
    rows = (*batch, heads, seqlen_q)
    if attn_mask is not None:
        attn_mask = fold_mask(attn_mask, (*rows, seqlen_kv))
    folded = [fold(x, batch) for x in (query, key, value)]
    return Fitted(folded[0], folded[1], folded[2], attn_mask, rows[len(rows) + 1 - axes :])


def broadcast(name: str, *shapes: torch.Size) -> torch.Size:
    """Broadcast shapes, or say whose do not."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as mismatch:
        raise ValueError(
            f"{OP}: the leading axes of {name} must broadcast with those of query, got "
            f"{', '.join(str(tuple(shape)) for shape in shapes)}; expand them"
        ) from mismatch


def share_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the heads to what cuattn takes: as many in value as in key, a divisor of query's."""
    of_query, of_key, of_value = query.shape[-3], key.shape[-3], value.shape[-3]
    if of_query == of_key == of_value:
        return query, key, value
    if enable_gqa:
        for name, heads in (("key", of_key), ("value", of_value)):
            if heads == 0 or of_query % heads:
                raise ValueError(
                    f"{OP}: the {of_query} heads of query must be a multiple of those of {name}, "
                    f"got {heads}"
                )
        if of_key != of_value:
            key, value = (
                x.repeat_interleave(of_query // x.shape[-3], dim=-3) for x in (key, value)
            )
        return query, key, value
    heads = max(of_query, of_key, of_value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[-3] not in (1, heads):
            other = "query" if of_query == heads else "key" if of_key == heads else "value"
            raise ValueError(
                f"{OP}: {name} must have the {heads} heads of {other}, or 1, got {x.shape[-3]}; "
                "pass enable_gqa=True to share heads of key and value"
            )
    query = with_heads(query, heads)
    if of_key != of_value:
        key, value = with_heads(key, heads), with_heads(value, heads)
    return query, key, value


def with_heads(x: Tensor, heads: int) -> Tensor:
    """Show the one head of a tensor as many times."""
    return x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def fold(x: Tensor, batch: torch.Size) -> Tensor:
    """Expand the leading axes to `batch` and make them one."""
    if x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
    return x if len(batch) == 1 else x.reshape(batch.numel(), *x.shape[-3:])


def fold_mask(attn_mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """Make a mask one of 4 axes, whose extents of 1 stay where they can."""
    extra = attn_mask.dim() - len(scores)
    if extra > 0 and all(n == 1 for n in attn_mask.shape[:extra]):
        attn_mask = attn_mask.reshape(attn_mask.shape[extra:])
    shape = (1,) * (len(scores) - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != len(scores) or any(
        n not in (1, full) for n, full in zip(shape, scores, strict=False)
    ):
        raise ValueError(
            f"{OP}: attn_mask must broadcast to {list(scores)}, got {list(attn_mask.shape)}"
        )
    batch, last = scores[:-3], shape[-3:]
    attn_mask = attn_mask.reshape(shape)
    if len(batch) == 1:
        return attn_mask
    if all(n == 1 for n in shape[:-3]):
        return attn_mask.reshape(1, *last)
    return attn_mask.expand(*batch, *last).reshape(math.prod(batch), *last)


def pad(x: Tensor) -> Tensor:
    """Fill the last axis with zeros up to what kernels take."""
    missing = -x.shape[-1] % STEP
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def readable(x: Tensor) -> Tensor:
    """Copy what no kernel reads: negated views, strided last axes, on CUDA rows off 16 bytes.

    While torch compiles, it neither tells offsets (before 2.13) nor guards them; the op looks.
    """
    x = x.resolve_neg()
    strides = x.stride()
    if strides[-1] == 1:
        if not x.is_cuda:
            return x
        step = max(1, 16 // x.element_size())
        if all(stride % step == 0 for stride in strides[:-1]) and (
            torch.compiler.is_compiling() or x.storage_offset() % step == 0
        ):
            return x
    return x.clone(memory_format=torch.contiguous_format)
