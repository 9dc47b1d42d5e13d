# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention: attention_backward, attention_varlen_backward.

Both are plain functions of arrays; frameworks that differentiate by themselves call them with what
their forward pass kept.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from ._arrays import Array, ArrayT
from ._call import jax_face
from ._gradients import check_need

if TYPE_CHECKING:
    from ._types import Backend, Layout


def attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    *,
    layout: Layout = "bshd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    kv_start: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: Array | None = None,
    dropout_row: int = 0,
    dropout_key: int = 0,
    dropout_head: int = 0,
    dropout_heads: int = 0,
    batch_invariant: bool = False,
    dlse: Array | None = None,
    deterministic: bool | None = None,
    need: Sequence[str] = ("dq", "dk", "dv"),
    dq: ArrayT | None = None,
    dk: ArrayT | None = None,
    dv: ArrayT | None = None,
    dbias: ArrayT | None = None,
    dsinks: ArrayT | None = None,
    dslopes: ArrayT | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Differentiate a loss through `attention`, given its gradient with respect to the output.

    Sums are float32, whatever the dtype; the formulas are those of docs/backward.md.

    Parameters
    ----------
    dout : array, [batch, seqlen_q, num_heads_q, head_dim_v]
        Gradient of the loss with respect to out, of its shape and dtype.
    q, k, v : array
        As in the forward call.
    out : array, [batch, seqlen_q, num_heads_q, head_dim_v]
        What the forward call gave.
    lse : float32 array, [batch, num_heads_q, seqlen_q]
        What it gave with return_lse=True.
    layout, causal, window, scale, softcap, alibi_slopes, sinks, bias
        As in the forward call.
    seqused_q, seqused_k, kv_start
        As in the forward call.
    dropout_p, dropout_seed, dropout_offset, dropout_state
        As in the forward call.
    dropout_row, dropout_key, dropout_head, dropout_heads
        As in the forward call.
    batch_invariant : bool
        The bits of a sequence's gradients do not depend on the rest of the batch, but for those
        that are summed over it.
    dlse : float32 array, [batch, num_heads_q, seqlen_q], optional
        Gradient of the loss with respect to lse; None is 0.
    deterministic : bool, optional
        True: the same bits each time; None: where that costs little; False: the fastest. On Hopper
        "sm90" adds up dq in any order where it is fused, and in that of the keys, or in two passes,
        where the same bits are asked for, which `explain` says; all else has them each time.
    need : sequence of {"dq", "dk", "dv", "dbias", "dsinks", "dslopes"}
        The gradients to compute, in the order in which they are returned; what is left out saves
        time. "dbias", "dsinks" and "dslopes" need bias (not of bool), sinks and alibi_slopes.
    dq, dk, dv, dbias, dsinks, dslopes : array, optional
        Written in place and returned; need has to name them. dk and dv may be float32 where the
        rest is not, to add up gradients. They share no memory with each other or another argument.
    workspace : array, optional
        Contiguous memory on the device of q: ``explain(...).workspace_bytes``, of any dtype. By
        default it comes from q's library.
    backend : str
        "auto", or one named rung: "cpu", "naive", "simt", "sm80", "sm90".
    stream : optional
        As in `attention`.

    Returns
    -------
    named tuple
        What `need` names, each of the shape and dtype of what it is the gradient of, in the library
        of q. Rows that take no part (beyond seqused, before kv_start, or without a visible key)
        get 0.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or number that no kernel can take; a name in `need` that is
        none, or whose option is not given.
    TypeError
        An argument of the wrong kind, such as a list for an array.
    NotImplementedError
        float8; a torch tensor that requires grad, while grad mode is on.
    MemoryError
        The workspace cannot be had, or the given one is too small.

    References
    ----------
    FlashAttention-2, arXiv:2307.08691; Philox (dropout), Salmon et al., SC 2011.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuattn.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv[0, :, 0, 0].round(2).tolist()
    [2.08, 1.08, 0.58, 0.25]
    """
    return differentiate("attention_backward", locals())


def attention_varlen_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: Array | None = None,
    dropout_row: int = 0,
    dropout_key: int = 0,
    dropout_head: int = 0,
    dropout_heads: int = 0,
    batch_invariant: bool = False,
    dlse: Array | None = None,
    deterministic: bool | None = None,
    need: Sequence[str] = ("dq", "dk", "dv"),
    dq: ArrayT | None = None,
    dk: ArrayT | None = None,
    dv: ArrayT | None = None,
    dbias: ArrayT | None = None,
    dsinks: ArrayT | None = None,
    dslopes: ArrayT | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Differentiate a loss through `attention_varlen`.

    Parameters
    ----------
    dout : array, [total_q, num_heads_q, head_dim_v]
        Gradient of the loss with respect to out.
    q : array, [total_q, num_heads_q, head_dim]
        As in the forward call.
    k : array, [total_kv, num_heads_kv, head_dim]
        As in the forward call; rows, not pages.
    v : array, [total_kv, num_heads_kv, head_dim_v]
        As in the forward call.
    out : array, [total_q, num_heads_q, head_dim_v]
        What the forward call gave.
    lse : float32 array, [num_heads_q, total_q]
        What it gave with return_lse=True.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in the forward call.
    causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q, seqused_k
        As in the forward call.
    dlse : float32 array, [num_heads_q, total_q], optional
        Gradient of the loss with respect to lse; None is 0.
    dropout_p, dropout_seed, dropout_offset, dropout_state
        As in the forward call.
    dropout_row, dropout_key, dropout_head, dropout_heads
        As in the forward call.
    batch_invariant, deterministic, need
        As in `attention_backward`.
    dq, dk, dv, dbias, dsinks, dslopes, workspace, backend, stream
        As in `attention_backward`.

    Returns
    -------
    named tuple
        What `need` names. Rows that belong to no sequence get 0 too.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, MemoryError
        As in `attention_backward`.

    References
    ----------
    FlashAttention-2, arXiv:2307.08691.
    """
    arguments = locals()
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        if arguments[name] is None:
            raise TypeError(
                f"attention_varlen_backward: {name} must be given, got None; pass what the forward "
                "call got"
            )
    return differentiate("attention_varlen_backward", arguments)


def differentiate(op: str, arguments: dict[str, Any]) -> Any:
    """Run a backward pass of arguments by name."""
    arguments["need"] = check_need(op, arguments["need"], arguments)
    results = _core.attention_backward(arguments)
    if results is NotImplemented:
        return getattr(jax_face(), op)(**arguments)
    return result_type(arguments["need"])(*results)


@functools.cache
def result_type(names: tuple[str, ...]) -> Any:
    """Make the named tuple of some gradients."""
    return collections.namedtuple("Gradients", names)
