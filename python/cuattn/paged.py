# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: paged_attention, its plan, and PagedAttention V1 and V2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ._arrays import Array, ArrayT
from ._call import call, front

if TYPE_CHECKING:
    from ._types import Backend, KvDtype, KvLayout, PagedOptions, Unpack


@overload
def paged_attention(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    return_lse: Literal[False] = ...,
    lse_out: None = ...,
    **options: Unpack[PagedOptions],
) -> ArrayT: ...
@overload
def paged_attention(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    return_lse: Literal[True],
    lse_out: Array | None = ...,
    **options: Unpack[PagedOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def paged_attention(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    return_lse: bool = ...,
    lse_out: Array,
    **options: Unpack[PagedOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def paged_attention(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    return_lse: bool,
    lse_out: Array | None = ...,
    **options: Unpack[PagedOptions],
) -> ArrayT | tuple[ArrayT, Any]: ...
@front
def paged_attention(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    kv_layout: KvLayout = "nhd",
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: KvDtype | None = None,
    plan: Array | None = None,
    rope: tuple[Array, Array] | None = None,
    rope_positions: Array | None = None,
    rope_interleaved: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Attend with the newest tokens of each sequence to its keys and values in a paged cache.

    ``out = softmax(mask(alibi + softcap(scale * q @ k.T))) @ v`` for each sequence and head. Token
    t of sequence b lies in block ``block_tables[b, t // block_size]`` at ``t % block_size``.

    Parameters
    ----------
    q : array, [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim]
        One query a sequence (decode) or a few (speculative decoding): float32, float16, bfloat16 or
        float8_e4m3fn (codes become numbers of 16 bits in the workspace first), head_dim a multiple
        of 8 up to 256. The queries are the last q_len tokens of the context.
    k_cache, v_cache : array
        Caches of q's dtype, or float8_e4m3fn under 16-bit queries (head_dim a multiple of 16).
        "nhd": [num_blocks, block_size, num_heads_kv, head_dim]; "hnd": [num_blocks, num_heads_kv,
        block_size, head_dim], block_size 1 to 256. "vllm": K [num_blocks, num_heads_kv, head_dim /
        x, block_size, x] with x = 16 bytes / itemsize, V [num_blocks, num_heads_kv, head_dim,
        block_size], block_size 8, 16 or 32. num_heads_q is a multiple of num_heads_kv.
    block_tables : int32 array, [num_seqs, max_blocks_per_seq]
        The block of each piece of block_size tokens. Entries past the context are never read.
    context_lens : int32 array, [num_seqs]
        Tokens in the cache, the queries' own included; 0 gives out 0 and lse -inf.
    kv_layout : {"nhd", "hnd", "vllm"}
        Order of the axes of the caches.
    scale : float, optional
        Factor of the scores; None is ``1 / sqrt(head_dim)``.
    causal : bool
        Query i sees key j when ``j <= i + context_len - q_len``.
    window : (int, int)
        (left, right) around that diagonal; -1 is unlimited.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``; 0 is off.
    alibi_slopes : float32 array, [num_heads_q] or [num_seqs, num_heads_q], optional
        Adds ``-slope * abs(i + context_len - q_len - j)``.
    sinks : float32 array, [num_heads_q], optional
        One more logit per head in the softmax denominator, without a value; lse includes it.
    q_scale : float or float32 array, [1], [num_heads_kv] or [num_seqs, num_heads_kv]
        Of float8 queries: query = stored * scale; None is 1.
    k_scale, v_scale : float or float32 array, [1], [num_heads_kv] or [num_seqs, num_heads_kv]
        Of float8 caches: value = stored * scale; None is 1.
    kv_dtype : str, optional
        "float8_e4m3fn" where the caches, or q too, are uint8 arrays that hold it.
    plan : int32 array, optional
        From `paged_plan`, for these context_lens. None: made inside the call, where one is needed.
    rope : (array, array), optional
        cos and sin, float32 [max_position, rotary_dim / 2], of `rope_table`: q is rotated first, by
        `apply_rope` into memory of its library; the keys are rotated already, as those of a cache
        are (by `reshape_and_cache`).
    rope_positions : int64 array, [num_seqs] or [num_seqs, q_len], optional
        The row of the tables of each query, or None: its place, ``i + context_len - q_len``.
    rope_interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    num_splits : int
        Parts that the keys of each sequence are cut into, at most one for each tile of keys; 0 lets
        the library choose. `explain` says how many there are.
    batch_invariant : bool
        Splits of fixed length: the bits of a sequence's result do not depend on the rest of the
        batch.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Written in place and returned; giving lse_out implies return_lse. They share no memory with
        each other or another argument. out may be float32 where q is not: the result before
        it is rounded; over float8 queries bfloat16, float16 or float32.
    workspace : array, optional
        Contiguous memory of ``explain("paged_attention", ...).workspace_bytes``.
    backend : str
        "auto", "cpu" on the CPU; on CUDA one of the rungs that `explain` lists.
    stream : optional
        As in `attention`.

    Returns
    -------
    out : array like q
        In the library of q, of its dtype; of float8 queries bfloat16, or as `out` says. A query
        without visible key gives 0.
    lse : float32 array, [num_seqs, num_heads_q] or [num_seqs, num_heads_q, q_len]
        With return_lse only: natural logarithm; -inf for a query without visible key.

    Notes
    -----
    JAX arrays are taken eagerly and under jax.jit and jax.vmap, without plan, out, lse_out,
    workspace and stream, which are XLA's to provide.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention`. Block ids out of range and impossible context_lens raise ValueError on
        the CPU, and on CUDA under CUATTN_CHECK=1; without it ids and lengths are clamped.

    References
    ----------
    PagedAttention, arXiv:2309.06180; split keys: Flash-Decoding (Dao et al., 2023).

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> k_cache = v_cache = np.ones((10, 16, 2, 64), np.float32)  # 10 blocks of 16 tokens
    >>> tables = np.array([[7, 2], [4, 0]], np.int32)
    >>> lens = np.array([20, 3], np.int32)
    >>> q = np.ones((2, 8, 64), np.float32)
    >>> cuattn.paged_attention(q, k_cache, v_cache, tables, lens).shape
    (2, 8, 64)
    """
    return call("paged_attention", locals())


@front
def paged_plan(
    block_tables: ArrayT,
    context_lens: ArrayT,
    *,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    block_size: int,
    q_len: int = 1,
    dtype: str = "bfloat16",
    kv_layout: KvLayout = "nhd",
    kv_dtype: KvDtype | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    out: ArrayT | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Cut the keys of a decode step into equal work, on the device, for all layers of the step.

    The plan depends on context_lens: make it anew in every step, into the same ``out=`` under a
    CUDA graph. Its size depends on the other arguments alone.

    Parameters
    ----------
    block_tables : int32 array, [num_seqs, max_blocks_per_seq]
        Only its shape counts.
    context_lens : int32 array, [num_seqs]
        Tokens in the cache.
    num_heads_q, num_heads_kv, head_dim, block_size, q_len : int
        Extents of the calls that will use the plan.
    dtype : str
        The dtype of q; under float8_e4m3fn the caches are of it, too.
    kv_layout, kv_dtype, causal, window, backend, stream
        As in `paged_attention`; kv_dtype also for caches of a float8 dtype.
    out : int32 array, optional
        A plan of the same size, written in place and returned.

    Returns
    -------
    plan : int32 array, [n]
        In the library of context_lens.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `paged_attention`.

    References
    ----------
    Balanced ranges of work for ragged batches: FlashInfer, arXiv:2501.01005.
    """
    return call("paged_plan", locals())


@front
def paged_attention_v1(
    out: ArrayT,
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    scale: float,
    *,
    kv_layout: KvLayout = "vllm",
    alibi_slopes: Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    stream: Any = None,
) -> Any:
    """PagedAttention V1: one pass over all keys of a sequence, one query each.

    `paged_attention` is faster where sequences are few or long; the mathematics is the same.

    Parameters
    ----------
    out : array like q
        Written in place and returned.
    q, key_cache, value_cache, block_tables, context_lens, scale
        As in `paged_attention`; q is [num_seqs, num_heads_q, head_dim].
    kv_layout, alibi_slopes, k_scale, v_scale, stream
        As in `paged_attention`.

    Returns
    -------
    out : array
        The given one.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `paged_attention`.

    References
    ----------
    PagedAttention, arXiv:2309.06180; vLLM's paged_attention_v1.
    """
    return call("paged_attention_v1", locals())


@front
def paged_attention_v2(
    out: ArrayT,
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    scale: float,
    *,
    exp_sums: ArrayT | None = None,
    max_logits: ArrayT | None = None,
    tmp_out: ArrayT | None = None,
    partition_size: int = 512,
    max_context_len: int | None = None,
    kv_layout: KvLayout = "vllm",
    alibi_slopes: Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    stream: Any = None,
) -> Any:
    """PagedAttention V2: partitions of the keys side by side, then a stable reduction over them.

    With partitions = ceil(min(max_context_len, max_blocks_per_seq * block_size) / partition_size),
    and one at least, partition p of a query head holds ``max_logits = max(scores)``, ``exp_sums =
    sum(exp(scores - max_logits))`` and ``tmp_out = softmax(scores) @ v`` of its own keys; ``out =
    sum(tmp_out * w) / sum(w)`` with ``w = exp_sums * exp(max_logits - max(max_logits))``.

    Parameters
    ----------
    out, q, key_cache, value_cache, block_tables, context_lens, scale
        As in `paged_attention_v1`.
    exp_sums, max_logits : float32 array, [num_seqs, num_heads_q, partitions], optional
        Written: see above. Partitions past the context keep what they held.
    tmp_out : array of q's dtype, [num_seqs, num_heads_q, partitions, head_dim], optional
        Written: see above.
    partition_size : {256, 512, 1024}
        Keys of a partition.
    max_context_len : int, optional
        An upper bound of context_lens; None is max_blocks_per_seq * block_size.
    kv_layout, alibi_slopes, k_scale, v_scale, stream
        As in `paged_attention`.

    Returns
    -------
    out : array
        The given one.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `paged_attention`.

    References
    ----------
    PagedAttention, arXiv:2309.06180; vLLM's paged_attention_v2.
    """
    return call("paged_attention_v2", locals())
