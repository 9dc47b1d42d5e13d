# SPDX-License-Identifier: Apache-2.0
"""Writing, reading and moving the blocks of a paged KV cache; the layouts are in docs/layouts.md.

Every function works in place on arrays of the caller: numpy on the CPU, any library with DLPack on
CUDA. JAX arrays, which only XLA may write, give new arrays instead (cuattn.jax).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._arrays import Array, ArrayT
from ._call import jax_face, refuse_tables_of_jax
from ._kv_shapes import whole

if TYPE_CHECKING:
    from ._types import KvLayout


def reshape_and_cache(
    k: ArrayT,
    v: ArrayT,
    k_cache: ArrayT,
    v_cache: ArrayT,
    slot_mapping: Array | None = None,
    *,
    block_tables: Array | None = None,
    context_lens: Array | None = None,
    kv_layout: KvLayout = "nhd",
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    rope_interleaved: bool = False,
    stream: Any = None,
) -> tuple[ArrayT, ArrayT]:
    """Write new keys and values into their slots of a paged cache, in one launch.

    Row i goes to slot ``slot_mapping[i]``, which is token ``slot % block_size`` of block ``slot //
    block_size``. On the way k may be rotated (RoPE), and both may be quantised: a float8_e4m3fn
    cache holds ``value * (1 / scale)``, saturated at 448 and rounded to nearest even, so that
    ``value = stored * scale``.

    Parameters
    ----------
    k : array, [num_tokens, num_heads_kv, head_dim]
        New keys: float32, float16 or bfloat16. head_dim is a multiple of 8 (float8_e4m3fn caches:
        16) up to 1024. Any strides that are not negative, if the last axis is contiguous (and rows
        start on 16 bytes, on CUDA).
    v : array, [num_tokens, num_heads_kv, head_dim_v]
        New values, of k's dtype; head_dim_v may differ from head_dim.
    k_cache, v_cache : array, written
        The caches in `kv_layout`, of k's dtype or float8_e4m3fn, for which uint8 may stand. Blocks
        may lie apart.
    slot_mapping : int64 array, [num_tokens], optional
        The slot of each row; -1 skips the row. Another number that is no slot raises on the CPU,
        and on CUDA under CUATTN_CHECK=1; without it the row is skipped. Of two rows with one slot,
        which is kept is not said.
    block_tables : int32 array, [num_seqs, max_blocks_per_seq], optional
        With context_lens and instead of slot_mapping, where the rows are the newest of their
        sequences, as many of each: the blocks of each sequence. Not of JAX.
    context_lens : int32 array, [num_seqs], optional
        Tokens of each sequence, those of this call included. Of a sequence with fewer tokens than
        rows the last rows are written. Impossible lengths and blocks are refused as slots are.
    kv_layout : {"nhd", "hnd", "vllm"}
        "nhd" ``[num_blocks, block_size, num_heads_kv, head_dim]``, "hnd" ``[num_blocks,
        num_heads_kv, block_size, head_dim]``, "vllm" k ``[num_blocks, num_heads_kv, head_dim / x,
        block_size, x]`` with x = 16 bytes / itemsize and v ``[num_blocks, num_heads_kv, head_dim,
        block_size]``. block_size is 1 to 256, in "vllm" 8, 16 or 32.
    k_scale, v_scale : float or float32 array, [num_heads_kv] or one element, optional
        Scales of a float8_e4m3fn cache, positive; arrays lie on the device of k. Default 1.
    cos, sin : float32 array, [max_position, rotary_dim / 2], optional
        Rotates the first rotary_dim elements of each key by its row of the tables: the pair (a, b)
        becomes ``(a * cos - b * sin, b * cos + a * sin)``, computed in float32.
    positions : int64 array, [num_tokens], optional
        The row of cos and sin of each token; out of range it raises like a slot, or is clamped.
        cos, sin and positions are given together or not at all; with block_tables, positions may
        be left out, for the place of each token in its sequence.
    rope_interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    stream : optional
        As in `attention`; k's library decides.

    Returns
    -------
    k_cache, v_cache : array
        The arrays given; of JAX new ones, in the same memory where jax.jit donates the caches.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, number or slot that cannot be; nothing was written.
    TypeError
        An argument of the wrong kind.
    NotImplementedError
        A torch tensor that requires grad, in grad mode; JAX caches for copy_blocks and swap_blocks.
    CudaError
        A CUDA call failed.

    References
    ----------
    PagedAttention, arXiv:2309.06180; rotary embedding, arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 8), np.float32)  # 4 blocks of 16 tokens
    >>> k = v = np.ones((3, 2, 8), np.float32)
    >>> slots = np.array([18, 19, -1])  # tokens 2 and 3 of block 1; the last row is skipped
    >>> _ = cuattn.reshape_and_cache(k, v, k_cache, v_cache, slots)
    >>> k_cache[1, :5, 0, 0]
    array([0., 0., 1., 1., 0.], dtype=float32)
    """
    result = _core.reshape_and_cache(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        block_tables,
        context_lens,
        kv_layout,
        k_scale,
        v_scale,
        cos,
        sin,
        positions,
        rope_interleaved,
        stream,
    )
    if result is not NotImplemented:
        return result
    refuse_tables_of_jax("reshape_and_cache", block_tables, context_lens)
    return jax_face().reshape_and_cache(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        cos=cos,
        sin=sin,
        positions=positions,
        rope_interleaved=rope_interleaved,
        stream=stream,
    )


def gather_cache(
    k_cache: ArrayT,
    v_cache: ArrayT,
    block_tables: Array,
    cu_seqlens: Array,
    *,
    kv_layout: KvLayout = "nhd",
    k_out: ArrayT | None = None,
    v_out: ArrayT | None = None,
    stream: Any = None,
) -> tuple[ArrayT, ArrayT]:
    """Read sequences out of a paged cache into packed rows, as `attention_varlen` takes them.

    Row ``cu_seqlens[b] + i`` becomes token i of sequence b, which lies in block ``block_tables[b, i
    // block_size]``. The bytes are copied: a float8_e4m3fn cache gives float8_e4m3fn rows. Blocks,
    heads and rows may start on any element; on CUDA a call is slower where they do not all start on
    16 bytes.

    Parameters
    ----------
    k_cache, v_cache : array
        The caches in `kv_layout`, see `reshape_and_cache`.
    block_tables : int32 array, [num_seqs, max_blocks_per_seq]
        The block of each block_size tokens; entries past a sequence are never read. Ids out of
        range raise on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped.
    cu_seqlens : int32 array, [num_seqs + 1]
        Offsets of the sequences in the result, beginning with 0; checked like the block ids.
    kv_layout : {"nhd", "hnd", "vllm"}
        As in `reshape_and_cache`.
    k_out, v_out : array, [num_tokens, num_heads_kv, head_dim], optional
        Written in place and returned; rows beyond ``cu_seqlens[-1]`` are left as they are. Where
        one is missing, it is allocated with ``cu_seqlens[-1]`` rows, and on CUDA the call waits for
        the stream to read that number; under graph capture both must be given. For JAX arrays both
        are None, and under jax.jit ``cuattn.jax.gather_cache(..., total=)`` says the rows.
    stream : optional
        As in `attention`; k_cache's library decides.

    Returns
    -------
    k, v : array, [num_tokens, num_heads_kv, head_dim]
        In the library and of the dtype of k_cache.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `reshape_and_cache`.
    """
    result = _core.gather_cache(
        k_cache, v_cache, block_tables, cu_seqlens, kv_layout, k_out, v_out, stream
    )
    if result is not NotImplemented:
        return result
    return jax_face().gather_cache(
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens,
        kv_layout=kv_layout,
        k_out=k_out,
        v_out=v_out,
        stream=stream,
    )


def copy_blocks(
    k_caches: Sequence[Array] | Array,
    v_caches: Sequence[Array] | Array | None,
    block_mapping: Array,
    *,
    stream: Any = None,
) -> None:
    """Copy blocks within each cache, such as a shared block that is about to be written.

    All pairs and all layers are copied at once, on CUDA by one launch for up to 128 layers. So a
    destination must be named once, and must not be the source of another pair.

    Parameters
    ----------
    k_caches, v_caches : list of arrays, written
        One cache for each layer, with blocks on the first axis: any layout. Those of a list are
        alike in shape, dtype and strides, and every block is contiguous. On CUDA, blocks that all
        start on 16 bytes are copied faster than others. v_caches may be empty or None.
    block_mapping : int64 array, [n, 2]
        Rows (source, destination), on the host or on the device of the caches. On the host a bad
        row raises: a block that does not exist, a destination named twice, or one that is also a
        source. On the device the same holds under CUATTN_CHECK=1; without it, rows with a block
        that does not exist (such as -1, for padding) are skipped, and of the others every one
        writes its destination in whatever order.
    stream : optional
        As in `attention`; the library of the first cache decides.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `reshape_and_cache`; nothing was copied.
    """
    _core.copy_blocks(k_caches, v_caches, block_mapping, stream)


def swap_blocks(
    src: Sequence[Array] | Array,
    dst: Sequence[Array] | Array,
    block_mapping: Array,
    *,
    stream: Any = None,
) -> None:
    """Copy blocks of one array into another: between device and host, or within one of them.

    Between device and host the call returns at once if the host array is pinned (`pinned_empty`,
    or pinned by its library), and the copies overlap with kernels of other streams. The host array
    must then live, and not be read or written, until the stream has passed. Neighbours that stay
    neighbours travel in one copy. Copy engines do the work; but where the pieces are small, and the
    host array is pinned, 32 thread blocks do, because an engine needs microseconds for each piece.

    Parameters
    ----------
    src : array, or list of arrays
        Blocks on the first axis; a list has one cache for each layer, all alike.
    dst : array, or list of arrays, written
        As many as src, with blocks of the same shape and dtype; their number may differ.
    block_mapping : int64 array, [n, 2]
        Rows (block of src, block of dst), on the host; every destination once.
    stream : optional
        As in `attention`; the library of the arrays on CUDA decides.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `reshape_and_cache`.
    """
    _core.swap_blocks(src, dst, block_mapping, stream)


def pinned_empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Make a numpy array for `swap_blocks` in pinned host memory, its contents undefined.

    The memory is given back with the last array that views it. Without a CUDA device it is plain
    memory; either begins on a page.

    Parameters
    ----------
    shape : int or tuple of int
        Extents.
    dtype : numpy dtype, or its name
        "bfloat16" and "float8_e4m3fn" are those of ml_dtypes.

    Returns
    -------
    array : numpy.ndarray
        Row-major.

    Raises
    ------
    ValueError
        A negative extent.
    MemoryError
        The host cannot give that much.

    Examples
    --------
    >>> cuattn.pinned_empty((4, 16, 2, 8), "float16").nbytes
    2048
    """
    if isinstance(dtype, str) and dtype in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        dtype = getattr(ml_dtypes, dtype)
    try:
        plain = np.dtype(dtype)
    except TypeError:
        plain = np.dtype(object)
    if plain.hasobject:
        raise TypeError(
            f"pinned_empty: dtype must be one of numpy's numbers, or its name, got {dtype!r}; "
            "choose one of these"
        )
    shape = shape if isinstance(shape, Sequence | np.ndarray) else (shape,)
    extents = tuple(whole("pinned_empty", "shape", x) for x in shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(
            f"pinned_empty: shape must not be negative, got {extents}; pass the extents"
        )
    memory = _core.HostMemory(math.prod(extents) * plain.itemsize)
    return np.asarray(memory).view(plain).reshape(extents)
