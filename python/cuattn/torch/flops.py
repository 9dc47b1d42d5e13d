# SPDX-License-Identifier: Apache-2.0
"""The operations that torch.utils.flop_counter counts of cuattn's ops.

As torch counts its own attention: two matrix products of the whole score matrix forward, five
backward, whatever a mask hides. Next: ops.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import gradients  # noqa: F401  defines the ops of the way back


def pairs_of(q: Tensor, k: Tensor, layout: str) -> int:
    """Count the scores of a dense batch, over all heads of q."""
    batch, second, third = q.shape[:3]
    keys = k.shape[1] if layout == "bshd" else k.shape[2]
    return int(batch * second * third * keys)


def lengths_of(cu_seqlens: Tensor, longest: int) -> Iterable[int]:
    """List the lengths of sequences; those of tensors without memory are the longest."""
    if cu_seqlens.is_meta or type(cu_seqlens) is not Tensor:
        return [longest] * (cu_seqlens.shape[0] - 1)
    return list(cu_seqlens.diff().tolist())


def ragged_pairs_of(q: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int]) -> int:
    """Count the scores of a ragged batch, over all heads of q."""
    lengths = (lengths_of(x, n) for x, n in zip(offsets, longest, strict=True))
    return q.shape[1] * sum(rows * keys for rows, keys in zip(*lengths, strict=True))


def forward(pairs: int, q: Tensor, v: Tensor) -> int:
    """Count q @ k and p @ v."""
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def backward(pairs: int, q: Tensor, v: Tensor) -> int:
    """Count q @ k once more, do @ v, p @ do, ds @ k and ds @ q."""
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


def attention(q: Tensor, k: Tensor, v: Tensor, *tensors: Any, **options: Any) -> int:
    """Count `cuattn::attention`."""
    return forward(pairs_of(q, k, options.get("layout", "bshd")), q, v)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *tensors: Any, **options: Any
) -> int:
    """Count `cuattn::attention_backward`."""
    return backward(pairs_of(q, k, options.get("layout", "bshd")), q, v)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *tensors: Any,
    **options: Any,
) -> int:
    """Count `cuattn::attention_varlen`."""
    longest = (max_seqlen_q, max_seqlen_k)
    return forward(ragged_pairs_of(q, (cu_seqlens_q, cu_seqlens_k), longest), q, v)


def attention_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    **options: Any,
) -> int:
    """Count `cuattn::attention_varlen_backward`."""
    cu_seqlens_q, cu_seqlens_k, *longest = rest[:4]
    pairs = ragged_pairs_of(q, (cu_seqlens_q, cu_seqlens_k), (longest[0], longest[1]))
    return backward(pairs, q, v)


for formula in (attention, attention_backward, attention_varlen, attention_varlen_backward):
    op = getattr(torch.ops.cuattn, formula.__name__)
    register_flop_formula(op, get_raw=True)(formula)
