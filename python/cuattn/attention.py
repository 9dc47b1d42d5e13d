# SPDX-License-Identifier: Apache-2.0
"""The public operations attention and attention_varlen.

The compiled module validates, allocates the result in the caller's own library and runs; how a call
gets there is said in _call.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ._arrays import Array, ArrayT
from ._call import call, front
from ._checks import check_ragged

if TYPE_CHECKING:
    from ._types import (
        Accumulate,
        Backend,
        DenseOptions,
        KvDtype,
        KvLayout,
        Layout,
        Unpack,
        VarlenOptions,
    )


@overload
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: Literal[False] = ...,
    lse_out: None = ...,
    **options: Unpack[DenseOptions],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: Literal[True],
    lse_out: Array | None = ...,
    **options: Unpack[DenseOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: bool = ...,
    lse_out: Array,
    **options: Unpack[DenseOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: bool,
    lse_out: Array | None = ...,
    **options: Unpack[DenseOptions],
) -> ArrayT | tuple[ArrayT, Any]: ...
@front
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    layout: Layout = "bshd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    dtype: KvDtype | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    accumulate: Accumulate = "exact",
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
    rope: tuple[Array, Array] | None = None,
    rope_positions: Array | None = None,
    rope_interleaved: bool = False,
    residual: ArrayT | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Attend with every query to the keys and average the values by softmax.

    ``out = softmax(mask(bias + alibi + softcap(scale * q @ k.T))) @ v`` for each batch entry and
    head, with scores, softmax and accumulation in float32.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim]
        Queries: float32, float16, bfloat16, or float8_e4m3fn or int8 with scales; on the CPU or a
        CUDA device, in any library with DLPack. head_dim is a multiple of 8 up to 512 (float8,
        int8: of 16 up to 256; above 256 without a gradient). Any strides that are not negative, if
        the last axis is contiguous (and rows start on 16 bytes, on CUDA).
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim]
        Keys, of q's dtype. num_heads_q is a multiple of num_heads_kv: query head h reads key head
        ``h // (num_heads_q // num_heads_kv)``.
    v : array, [batch, seqlen_kv, num_heads_kv, head_dim_v]
        Values, of q's dtype, or float8_e4m3fn under int8 q and k. In float8 the sequence may be
        the contiguous axis instead of the last.
    layout : {"bshd", "bhsd"}
        Order of the axes; "bhsd" has the heads before the sequence, in q, k, v and out alike.
    causal : bool
        Query i sees key j when ``j <= i + seqlen_kv - seqlen_q``: the last query sees every key.
    window : (int, int)
        (left, right): query i sees ``i + seqlen_kv - seqlen_q - left <= j <= i + seqlen_kv -
        seqlen_q + right``; -1 is unlimited. Composes with causal.
    scale : float, optional
        Factor of the scores; None is ``1 / sqrt(head_dim)``.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``, after scale, before bias and masks; 0 is
        off.
    alibi_slopes : float32 array, [num_heads_q] or [batch, num_heads_q], optional
        Adds ``-slope * abs(i + seqlen_kv - seqlen_q - j)``.
    sinks : float32 array, [num_heads_q], optional
        One more logit per head in the softmax denominator, without a value; lse includes it.
    bias : array, optional
        Added to the scores: float32 or q's dtype, or bool (True keeps the key); broadcastable to
        [batch, num_heads_q, seqlen_q, seqlen_kv]. Float8 queries take float32 and bool.
    dtype : {"float8_e4m3fn"}, optional
        What q, k and v hold where they are uint8 arrays, for libraries without the type.
    q_scale, k_scale, v_scale : float or float32 array, optional
        Of float8_e4m3fn and int8 arrays: value = stored * scale, by default 1. An array lies on
        the device of q and is [1], [num_heads_kv] or [batch, num_heads_kv]; q_scale may be [batch,
        num_heads_q, ceil(seqlen_q / 128)] and k_scale [batch, num_heads_kv, ceil(seqlen_kv / 128)],
        one for each 128 rows; v_scale may be [batch, num_heads_kv, head_dim_v] (docs/fp8.md).
    accumulate : {"exact", "fast"}
        Of float8_e4m3fn and int8 queries: how a kernel that multiplies float8 values sums the
        products. "exact": those of one tile of keys by the tensor cores, tiles in float32.
        "fast": all by the tensor cores, which keep about 13 bits: sooner done, with errors that
        grow with the number of keys, and lse that of rounded probabilities, in which keys below
        2^-13 of the likeliest do not count (docs/fp8.md). Other kernels sum in float32 either way.
    seqused_q, seqused_k : int32 array, [batch], optional
        Lengths in use of a padded batch; query rows beyond give out 0 and lse -inf, keys beyond are
        not seen, and causal and window count from the lengths in use.
    kv_start : int32 array, [batch], optional
        The first key in use of each sequence of a batch that is padded on the left: keys before it
        are not seen or read, and a query that is left without a key gives out 0 and lse -inf.
        Causal and window count from the end and stay as they are; a bias keeps its column for each
        key of k; dropout counts keys from kv_start.
    dropout_p : float
        Share of the probabilities that are dropped, in steps of 1 / 256; the others are divided by
        what remains. "tiled" and "cublas" have none.
    dropout_seed, dropout_offset : int
        Which are dropped: a function of these and of the place alone (docs/backward.md). A seed
        from 0 to 2^63 - 1, and the number of the call with this seed, from 0 to 2^32 - 1. A call
        on torch tensors without seed and state draws a seed from torch's generator.
    dropout_state : int64 array, [2], optional
        Seed and offset, on the device of q, instead of both.
    dropout_row, dropout_key, dropout_head, dropout_heads : int
        Of a call that is a part of a greater one, to drop what that drops: the places there of its
        first row, of its first key (on CUDA a multiple of 16) and of its first head, where `head`
        of sequence `b` counts ``b * dropout_heads + head``, 0 being num_heads_q.
    rope : (array, array), optional
        cos and sin, float32 [max_position, rotary_dim / 2], of `rope_table`: q is rotated first, by
        `apply_rope` into memory of its library; the keys are rotated already, as those of a cache
        are (else `rope_attention`). A gradient goes through, not to the tables.
    rope_positions : int64 array, [batch, seqlen_q], optional
        The row of the tables of each query, or None: its place, ``i + seqlen_kv - seqlen_q``.
    rope_interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    residual : array like out, optional
        Is added to the result in float32, which is then rounded once, in a pass after the kernel.
        `out` may be this array itself; lse does not change. No JAX arrays, no gradient.
    num_splits : int
        Parts that the keys are cut into; 0 lets the library choose. A wish: a kernel takes at most
        one for each tile of keys, and all but "sm90", "sm80" and "simt" take 1. `explain` says how
        many there are.
    batch_invariant : bool
        The bits of a sequence's result do not depend on the rest of the batch: keys are split at
        fixed places or not at all, unless num_splits says so (docs/numerics.md). Short rows at
        head_dim up to 64 may take up to 2.6 times as long on Hopper.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Written in place and returned; giving lse_out implies return_lse. They share no memory with
        each other or another argument, q included; slices of one packed array do not. out may be
        float32 where q is not, but for "naive", "cublas" and "tiled" on CUDA: the result before it
        is rounded, for `merge_states`.
    workspace : array, optional
        Contiguous device memory for kernels that need some: ``explain(...).workspace_bytes``, of
        any dtype. By default it comes from q's library.
    backend : str
        "auto", or one named rung of the ladder: "naive", "cublas", "tiled", "simt", "sm80", "sm90"
        on CUDA, "naive", "cpu" on the CPU. A rung that cannot run the call raises and says why.
    stream : optional
        None is the current stream of q's library; else a raw pointer (int) or an object with
        ``cuda_stream``, ``ptr`` or ``__cuda_stream__``, on which the inputs must already be
        ordered.

    Returns
    -------
    out : array like q, [batch, seqlen_q, num_heads_q, head_dim_v]
        In the library of q, of its dtype; of float8 queries bfloat16, or float16 or float32 as
        `out` has it. A query without visible key gives 0.
    lse : float32 array, [batch, num_heads_q, seqlen_q]
        With return_lse only: natural logarithm; -inf for a query without visible key.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or number that no kernel can take.
    TypeError
        An argument of the wrong kind, such as a list for an array.
    NotImplementedError
        A valid call that no kernel serves; for a torch tensor that requires grad, what autograd
        cannot own: `out`, `lse_out`, `workspace`, `stream`.
    CudaError
        A CUDA call failed.
    MemoryError
        The workspace cannot be had, or the given one is too small.

    References
    ----------
    Online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 4, 2, 8), (1, 2, 4))
    """
    return call("attention", locals())


@overload
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    lse_out: None = ...,
    **options: Unpack[VarlenOptions],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    lse_out: Array | None = ...,
    **options: Unpack[VarlenOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = ...,
    lse_out: Array,
    **options: Unpack[VarlenOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    lse_out: Array | None = ...,
    **options: Unpack[VarlenOptions],
) -> ArrayT | tuple[ArrayT, Any]: ...
@front
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_tables: Array | None = None,
    kv_layout: KvLayout = "nhd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    dtype: KvDtype | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    accumulate: Accumulate = "exact",
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
    """Attend within sequences of different lengths that are packed end to end, without padding.

    Sequence b owns the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; the formula is that of
    `attention`.

    Parameters
    ----------
    q : array, [total_q, num_heads_q, head_dim]
        Queries of all sequences; dtypes, devices and strides as in `attention`.
    k : array, [total_kv, num_heads_kv, head_dim]
        Keys of all sequences.
    v : array, [total_kv, num_heads_kv, head_dim_v]
        Values of all sequences.
    cu_seqlens_q, cu_seqlens_k : int32 array, [batch + 1]
        Offsets of the sequences, beginning with 0, on the device of q. Not monotonic offsets raise
        on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped to the rows there
        are, of which some may stay unwritten.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths, known on the host; query rows beyond are not written.
    block_tables : int32 array, [batch, max_blocks_per_seq], optional
        k and v are then caches in blocks, of q's dtype, or of float8_e4m3fn under q of 16 bits or
        float8, as `paged_attention` takes them, with scales by head (docs/fp8.md): chunked
        prefill, and mixed batches of prefill and decode. cu_seqlens_k may be None where seqused_k
        says the lengths. Few queries a sequence run paged_attention's kernels; sm90 reads blocks
        of a multiple of 16 tokens, "nhd" and "hnd", where they lie; else the keys are gathered
        into the workspace first, 2 * batch * max_seqlen_k rows of num_heads_kv heads
        (docs/layouts.md). Entries past a sequence are never read. Ids and lengths that do not
        exist raise on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped.
    kv_layout : {"nhd", "hnd", "vllm"}
        Order of the axes of these caches.
    causal, window, scale, softcap, alibi_slopes, sinks, bias, dtype, q_scale, k_scale, v_scale
        As in `attention`; bias broadcasts to [batch, num_heads_q, max_seqlen_q, max_seqlen_k], and
        scales of 128 rows are those of each sequence, counted to max_seqlen_q and max_seqlen_k.
    accumulate
        As in `attention`.
    seqused_q, seqused_k : int32 array, [batch], optional
        Rows in use of each sequence.
    dropout_p, dropout_seed, dropout_offset, dropout_state
        As in `attention`.
    dropout_row, dropout_key, dropout_head, dropout_heads
        As in `attention`.
    rope, rope_positions, rope_interleaved
        As in `attention`; positions are int64 [total_q].
    num_splits, batch_invariant, return_lse, out, lse_out, workspace, backend, stream
        As in `attention`; num_splits also of the kernels of `paged_attention` that take few queries
        over pages. batch_invariant splits no keys but those of single queries over pages.

    Returns
    -------
    out : array like q, [total_q, num_heads_q, head_dim_v]
        In the library of q. Rows of no sequence, as those behind ``cu_seqlens_q[-1]``, are not
        written, here and in lse: in a result that the call allocates they hold anything.
    lse : float32 array, [num_heads_q, total_q]
        With return_lse only.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention`.

    References
    ----------
    FlashAttention-2, arXiv:2307.08691.
    """
    check_ragged(cu_seqlens_q, cu_seqlens_k, block_tables, kv_layout)
    return call("attention_varlen", locals())
