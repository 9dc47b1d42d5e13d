# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions (version 2.8), signature for signature, on cuattn's kernels.

``from cuattn.compat.flash_attn import flash_attn_func`` instead of ``from flash_attn import
flash_attn_func``; docs/migrate.md says what differs. They take torch tensors on the CPU and CUDA,
of float16, bfloat16 and also float32. Next: kv_cache.py, what flash_attn_with_kvcache is made of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._tracing import keep_out_of_graphs
from ..torch.ops import call
from .arguments import (
    check_ints,
    check_packed,
    check_slopes,
    check_tensors,
    cut,
    in_eights,
    refuse_gradients,
    refuse_probabilities,
    scores_of,
    whole_number,
)
from .kv_cache import Cache, Rotary, append_and_attend
from .pages import Pages

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend with a batch of sequences of one length; gradients reach q, k, v and alibi_slopes.

    Parameters
    ----------
    q : tensor, [batch, seqlen_q, num_heads, head_dim]
        Queries. A head_dim that is no multiple of 8 is padded with zeros, which costs a copy.
    k, v : tensor, [batch, seqlen_k, num_heads_k, head_dim]
        Keys and values; num_heads is a multiple of num_heads_k.
    dropout_p : float
        Share of the probabilities that are dropped. Which ones is drawn from torch's generator, but
        not as flash-attn draws: the same seed drops others.
    softmax_scale : float, optional
        None is ``1 / sqrt(head_dim)``.
    causal : bool
        Query i sees key j when ``j <= i + seqlen_k - seqlen_q``.
    window_size : (int, int)
        Keys left and right of that diagonal that are seen; negative: all.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``; 0 or less is off.
    alibi_slopes : float32 tensor, [num_heads] or [batch, num_heads], optional
        Adds ``-slope * abs(i + seqlen_k - seqlen_q - j)``.
    deterministic : bool
        The gradients have the same bits each time.
    return_attn_probs : bool
        Return (out, softmax_lse, S_dmask). S_dmask is empty, as flash-attn's is without dropout;
        together with dropout it is refused, because no kernel writes the probabilities.

    Returns
    -------
    out : tensor, [batch, seqlen_q, num_heads, head_dim]
        A query without visible key gives 0.
    softmax_lse : float32 tensor, [batch, num_heads, seqlen_q]
        With return_attn_probs only; -inf for a query without visible key. A gradient goes through.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention`.

    References
    ----------
    FlashAttention-2, arXiv:2307.08691.
    """
    op = "flash_attn_func"
    check_tensors(op, 4, q=q, k=k, v=v)
    refuse_probabilities(op, return_attn_probs, dropout_p)
    options = scores_of(op, q.shape[-1], softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"dropout_p": dropout_p, "deterministic": True if deterministic else None}
    result = attend_padded("attention", (q, k, v), (), options, return_attn_probs)
    return cut(result, v.shape[-1])


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_func` does, of keys and values in one tensor.

    Parameters
    ----------
    q
        As in `flash_attn_func`.
    kv : tensor, [batch, seqlen_k, 2, num_heads_k, head_dim]
        Keys and values, read where they lie.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`.
    return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out, or (out, softmax_lse, S_dmask)
        As in `flash_attn_func`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention`.
    """
    check_packed("flash_attn_kvpacked_func", "kv", kv, 5, 2, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_func` does, of queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : tensor, [batch, seqlen, 3, num_heads, head_dim]
        Queries, keys and values, read where they lie.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`.
    return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out, or (out, softmax_lse, S_dmask)
        As in `flash_attn_func`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention`.
    """
    check_packed("flash_attn_qkvpacked_func", "qkv", qkv, 5, 2, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend within sequences of different lengths, packed end to end.

    Parameters
    ----------
    q : tensor, [total_q, num_heads, head_dim]
        Queries of all sequences.
    k, v : tensor, [total_k, num_heads_k, head_dim]
        Keys and values of all sequences; with block_table caches [num_blocks, page_block_size,
        num_heads_k, head_dim], of any page_block_size.
    cu_seqlens_q, cu_seqlens_k : int32 tensor, [batch + 1]
        Where each sequence begins; with block_table their differences are the lengths.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`.
    return_attn_probs
        As in `flash_attn_func`.
    block_table : int32 tensor, [batch, max_num_blocks_per_seq], optional
        The pages of each sequence. No gradient goes through pages.

    Returns
    -------
    out : tensor, [total_q, num_heads, head_dim]
        A query without visible key gives 0.
    softmax_lse : float32 tensor, [num_heads, total_q]
        With return_attn_probs only, and S_dmask behind it.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention_varlen`.
    """
    op = "flash_attn_varlen_func"
    paged = block_table is not None
    check_tensors(op, 3, q=q)
    check_tensors(op, 4 if paged else 3, k=k, v=v)
    check_ints(op, "cu_seqlens_q", cu_seqlens_q, (-1,), q)
    check_ints(op, "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), q)
    refuse_probabilities(op, return_attn_probs, dropout_p)
    options = scores_of(op, q.shape[-1], softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"dropout_p": dropout_p, "deterministic": True if deterministic else None}
    head_dim_v = v.shape[-1]
    if paged:
        refuse_gradients(op, "block_table", "gather the pages first", q, k, v, alibi_slopes)
        check_ints(op, "block_table", block_table, (cu_seqlens_q.shape[0] - 1, -1), q)
        pages = Pages(op, in_eights(k), in_eights(v), block_table)
        k, v = pages.k, pages.v
        options |= {"block_tables": pages.tables(), "seqused_k": cu_seqlens_k.diff()}
    others = (cu_seqlens_q, None if paged else cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    attend = attend_outside_graphs if paged else attend_padded
    result = attend("attention_varlen", (q, k, v), others, options, return_attn_probs)
    return cut(result, head_dim_v)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_varlen_func` does, of keys and values in one tensor.

    Parameters
    ----------
    q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `flash_attn_varlen_func`.
    kv : tensor, [total_k, 2, num_heads_k, head_dim]
        Keys and values, read where they lie.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`.
    return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out, or (out, softmax_lse, S_dmask)
        As in `flash_attn_varlen_func`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention_varlen`.
    """
    check_packed("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 1, 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_varlen_func` does, of queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : tensor, [total, 3, num_heads, head_dim]
        Queries, keys and values, read where they lie.
    cu_seqlens : int32 tensor, [batch + 1]
        Where each sequence begins.
    max_seqlen : int
        Upper bound of the lengths.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`.
    return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out, or (out, softmax_lse, S_dmask)
        As in `flash_attn_varlen_func`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.attention_varlen`.
    """
    op = "flash_attn_varlen_qkvpacked_func"
    check_packed(op, "qkv", qkv, 4, 1, 3)
    check_ints(op, "cu_seqlens", cu_seqlens, (-1,), qkv)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values into a cache and attend to all of it; there is no gradient.

    Parameters
    ----------
    q : tensor, [batch, seqlen_q, num_heads, head_dim]
        Queries.
    k_cache, v_cache : tensor, written where k and v are given
        [batch_cache, seqlen_cache, num_heads_k, head_dim], or with block_table [num_blocks,
        page_block_size, num_heads_k, head_dim] of any page_block_size. A head_dim that is no
        multiple of 8 copies the whole cache in every call, as flash-attn does.
    k, v : tensor, [batch, seqlen_new, num_heads_k, head_dim], optional
        Written behind the first cache_seqlens tokens of each sequence, which they lengthen.
    rotary_cos, rotary_sin : tensor, [seqlen_ro, rotary_dim / 2], optional
        Rotates k and q, from position cache_seqlens on; without causal and window_size all of q
        stands at cache_seqlens. k must be given.
    cache_seqlens : int, or int32 tensor [batch], optional
        Tokens in the cache, without k; None is all. A tensor stays on the device: lengths beyond
        the cache raise on the CPU, and on CUDA under CUATTN_CHECK=1; else what has no place is not
        written, and lengths are clamped.
    cache_batch_idx : int32 tensor, [batch], optional
        The row of the cache of each sequence; not with block_table.
    cache_leftpad : int32 tensor, [batch], optional
        The first token of each sequence; not with block_table. Read token by token: slower.
    block_table : int32 tensor, [batch, max_num_blocks_per_seq], optional
        The pages of each sequence.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, over the keys in use.
    rotary_interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    num_splits : int
        Parts that the keys are cut into: a wish; 0 lets the library choose.
    return_softmax_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    out : tensor, [batch, seqlen_q, num_heads, head_dim]
        A query without visible key gives 0.
    softmax_lse : float32 tensor, [batch, num_heads, seqlen_q]
        With return_softmax_lse only.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `cuattn.paged_attention`.
    """
    op = "flash_attn_with_kvcache"
    check_tensors(op, 4, q=q, k_cache=k_cache, v_cache=v_cache)
    check_slopes(op, alibi_slopes, q)
    given = (q, k_cache, v_cache, k, v, alibi_slopes)
    refuse_gradients(op, "the cache", "call it under torch.no_grad()", *given)
    options = scores_of(op, q.shape[-1], softmax_scale, causal, window_size, softcap, alibi_slopes)
    splits = min(max(0, whole_number(op, "num_splits", num_splits)), 2**31 - 1)
    options |= {"num_splits": splits, "return_lse": bool(return_softmax_lse)}
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    turn = Rotary(rotary_cos, rotary_sin, bool(rotary_interleaved))
    return append_and_attend(op, q, k, v, cache, turn, options)


def attend_padded(
    op: str,
    rows: tuple[Tensor, Tensor, Tensor],
    others: tuple[Any, ...],
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Any:
    """Call `op` with heads padded to a multiple of 8; with lse, an empty S_dmask stands behind."""
    padded = (in_eights(x) for x in rows)
    result = call(op, (*padded, *others), {**options, "return_lse": bool(return_attn_probs)})
    return (*result, rows[0].new_empty(0)) if return_attn_probs else result


def attend_outside_graphs(*arguments: Any) -> Any:
    """Do what `attend_padded` does, as it stands: over pages, which no op holds."""
    return attend_padded(*arguments)


keep_out_of_graphs(globals(), "attend_outside_graphs")
