# SPDX-License-Identifier: Apache-2.0
"""The aten ops of torch's flash backend, run by cuattn: arguments, refusals, shapes of results.

A function here takes what the op of its name takes, and raises `Refused` for what it leaves to
torch's kernel. Next: torch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention, attention_backward, attention_varlen, attention_varlen_backward
from ..torch.sdpa_arguments import readable


class Refused(Exception):
    """What goes to torch's own kernel, with the rule as its text."""


def refuse(dropout_p: float, return_debug_mask: bool = False, **others: Any) -> None:
    """Raise for options that cuattn has no kernel for."""
    if dropout_p:
        raise Refused("dropout_p must be 0: torch draws in an order that no kernel here follows")
    if return_debug_mask:
        raise Refused("return_debug_mask must be False: the probabilities are never in memory")
    unknown = sorted(name for name, value in others.items() if value is not None)
    if unknown:
        raise Refused(f"{', '.join(unknown)} must be None: not known when cuattn was written")


def rules(is_causal: bool, scale: float | None, left: int | None, right: int | None) -> Any:
    """Say the masks in cuattn's words, which count from the last key as the flash ops do."""
    window = (-1 if left is None else left, -1 if right is None else right)
    return {"causal": is_causal, "scale": scale, "window": window}


def like(x: Tensor, head_dim: int) -> Tensor:
    """Allocate a result whose axes lie in memory as those of `x`, as torch's kernels do."""
    if x.shape[-1] == head_dim:
        return torch.empty_like(x)
    order = sorted(range(x.dim() - 1), key=x.stride, reverse=True)
    shape = (*x.shape[:-1], head_dim)
    return torch.empty_permuted(shape, (*order, x.dim() - 1), dtype=x.dtype, device=x.device)


def random_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make the state of a dropout that there is none of, and the empty debug mask."""
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return seed, offset, query.new_empty(0)


def attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    options: dict[str, Any],
    block_table: Tensor | None,
) -> Tensor:
    """Write `out` and return lse, of a dense batch, a ragged one, or one over a paged cache."""
    target = out if out.stride(-1) == 1 else out.contiguous()
    q, k, v = readable(query), readable(key), readable(value)
    options = {**options, "out": target, "return_lse": True}
    if cum_seq_q is None:
        if block_table is not None:
            raise Refused("block_table must be None without cum_seq_q")
        _, lse = attention(q, k, v, **options)
    else:
        _, lse = attention_varlen(
            q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, block_tables=block_table, **options
        )
    if target is not out:
        out.copy_(target)
    return lse


def flash_forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> Tensor:
    """Run `_flash_attention_forward_no_dropout_inplace`."""
    refuse(dropout_p, return_debug_mask, **others)
    if alibi_slopes is not None and any(x.requires_grad for x in (query, key, value)):
        raise Refused("alibi_slopes must be None with gradients, whose op is not told of them")
    options = {
        **rules(is_causal, scale, window_size_left, window_size_right),
        "seqused_k": seqused_k,
        "alibi_slopes": alibi_slopes,
        "num_splits": num_splits or 0,
    }
    ends = (cum_seq_q, cum_seq_k, max_q, max_k)
    return attend(out, query, key, value, *ends, options, block_table)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Run `_flash_attention_forward`."""
    paged = options.get("block_table") is not None
    out = like(query, value.shape[-1])
    if paged and value.dim() != 4:
        raise Refused("key and value must have 4 axes with block_table")
    lse = flash_forward_into(out, query, key, value, *rest, **options)
    return (out, lse, *random_state(query))


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Run `_flash_attention_backward`."""
    refuse(dropout_p, **others)
    options = rules(is_causal, scale, window_size_left, window_size_right)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    dout, q, k, v, o = (readable(x) for x in (grad_out, query, key, value, out))
    lse = logsumexp.contiguous()
    if cum_seq_q is None or cum_seq_k is None:
        found = attention_backward(dout, q, k, v, o, lse, **options)
    else:
        ends = (cum_seq_q, cum_seq_k, max_q, max_k)
        found = attention_varlen_backward(dout, q, k, v, o, lse, *ends, **options)
    return tuple(
        laid_out(x, torch.empty_like(of)) for x, of in zip(found, (query, key, value), strict=True)
    )


def laid_out(x: Tensor, place: Tensor) -> Tensor:
    """Give a gradient the strides that torch's shapes promise for it."""
    return x if x.stride() == place.stride() else place.copy_(x)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> Any:
    """Run `_scaled_dot_product_flash_attention`, whose arrays have the heads first."""
    refuse(dropout_p, return_debug_mask, **others)
    out = like(query, value.shape[-1])
    rows = [x.transpose(1, 2) for x in (out, query, key, value)]
    options = rules(is_causal, scale, None, None)
    extents = (query.shape[2], key.shape[2])
    lse = attend(rows[0], rows[1], rows[2], rows[3], None, None, *extents, options, None)
    return (out, lse, None, None, *extents, *random_state(query))


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Run `_scaled_dot_product_flash_attention_backward`."""
    rows = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in flash_backward(*rows, *rest, **options))


KERNELS: dict[str, Any] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
