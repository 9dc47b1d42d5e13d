# SPDX-License-Identifier: Apache-2.0
"""A decode step in one call: new keys and values go into a paged cache, then all is attended to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from . import _arrays, _core
from ._append import check_append, check_lengths, check_rope, refuse_gradient
from ._arrays import Array, ShapedArray, ShapedT
from ._rope import paged_lengths, rotation
from .kv_cache import reshape_and_cache

if TYPE_CHECKING:
    from ._types import Backend, KvDtype, KvLayout


def append_attention(
    q: ShapedT,
    k: ShapedArray,
    v: ShapedArray,
    k_cache: ShapedArray,
    v_cache: Array,
    block_tables: ShapedArray,
    context_lens: ShapedArray,
    *,
    rope: tuple[ShapedArray, ShapedArray] | None = None,
    rope_positions: ShapedArray | None = None,
    rope_interleaved: bool = False,
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
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ShapedT | None = None,
    lse_out: ShapedT | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Write the newest tokens of each sequence into its pages, then attend with them to all.

    `reshape_and_cache` writes, and rotates k where `rope` is given; `apply_rope` rotates q, and
    `paged_attention` attends. The write finds its slots itself, which takes no launch.

    Parameters
    ----------
    q : array, [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim]
        Queries of the newest token of each sequence, or of the last q_len.
    k, v : array, [num_seqs, num_heads_kv, head_dim] or [num_seqs, q_len, num_heads_kv, head_dim]
        Their keys and values, of q's dtype, or of 16 or 32 bits over caches of float8_e4m3fn.
    k_cache, v_cache : array, written
        As in `paged_attention`. NumPy, PyTorch and CuPy; JAX arrays cannot be written in place.
    block_tables : int32 array, [num_seqs, max_blocks_per_seq]
        As in `paged_attention`, with the blocks that the new tokens go to.
    context_lens : int32 array, [num_seqs]
        Tokens in the cache, the new ones included. Of a sequence with fewer than q_len the last
        context_len are written; 0 is a place in the batch that nobody has.
    rope : (array, array), optional
        cos and sin, float32 [max_position, rotary_dim / 2]: rotates the first rotary_dim elements
        of q and k, as in `reshape_and_cache`.
    rope_positions : int64 array, [num_seqs, q_len], optional
        The row of the tables of each token, or None: its place in the sequence. Rows that are not
        there raise on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped.
    rope_interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    kv_layout, scale, causal, window, softcap, alibi_slopes, sinks
        As in `paged_attention`.
    q_scale, k_scale, v_scale, kv_dtype, plan, num_splits, batch_invariant, return_lse, out, lse_out
        As in `paged_attention`; k_scale and v_scale also quantise what is written.
    workspace, backend, stream
        As in `paged_attention`.

    Returns
    -------
    out : array like q
        In the library of q. A query without visible key gives 0.
    lse : float32 array, [num_seqs, num_heads_q] or [num_seqs, num_heads_q, q_len]
        With return_lse only.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `reshape_and_cache` and `paged_attention`. What either refuses is refused before
        anything is written. Impossible context_lens and block ids are refused on the CPU, and on
        CUDA under CUATTN_CHECK=1.

    References
    ----------
    PagedAttention, arXiv:2309.06180; rotary embedding, arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> k_cache, v_cache = np.zeros((2, 10, 16, 2, 64), np.float32)  # 10 blocks of 16 tokens
    >>> tables = np.array([[7, 2], [4, 0]], np.int32)
    >>> lens = np.array([20, 3], np.int32)
    >>> q, k, v = np.ones((2, 8, 64), np.float32), *np.ones((2, 2, 2, 64), np.float32)
    >>> cuattn.append_attention(q, k, v, k_cache, v_cache, tables, lens).shape
    (2, 8, 64)
    >>> k_cache[2, :5, 0, 0]  # the 20th token of sequence 0
    array([0., 0., 0., 1., 0.], dtype=float32)
    """
    op = "append_attention"
    block_size = check_append(op, q, k, v, k_cache, block_tables, context_lens, kv_layout)
    with _arrays.operations(op, q, stream, *WAY_OUT) as library:
        refuse_gradient(op, library, q)
        check_lengths(op, library.own(context_lens), block_tables.shape[1] * block_size)
        turning: dict[str, Any] = {}
        if rope is None and rope_positions is not None:
            raise ValueError(
                f"{op}: rope_positions must be None without rope, which it belongs to; pass "
                "rope=(cos, sin)"
            )
        if rope is None and rope_interleaved:
            raise ValueError(
                f"{op}: rope_interleaved must be False without rope, which it belongs to; pass "
                "rope=(cos, sin)"
            )
        if rope is not None:
            tokens = (q.shape[0], q.shape[1] if len(q.shape) == 4 else 1)
            cos, sin = check_rope(op, library, rope, rope_positions, tokens, q)
            rows = None if rope_positions is None else library.flat(rope_positions)
            turning = {"cos": cos, "sin": sin, "positions": rows}
            turning["rope_interleaved"] = rope_interleaved
            q = turned_queries(q, cos, sin, rows, rope_interleaved, context_lens, stream)
        if len(k.shape) == 4:
            k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    options = {"kv_layout": kv_layout, "stream": stream, **scales}
    newest: dict[str, Any] = {"block_tables": block_tables, "context_lens": context_lens}
    write = partial(reshape_and_cache, k, v, k_cache, v_cache, **newest, **turning, **options)
    attended = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        **newest,
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "q_scale": q_scale,
        "kv_dtype": kv_dtype,
        "plan": plan,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "out": out,
        "lse_out": lse_out,
        "workspace": workspace,
        "backend": backend,
        **options,
    }
    return _core.write_and_attend(attended, write)


def turned_queries(
    q: Any, cos: Any, sin: Any, rows: Any, interleaved: bool, context_lens: Any, stream: Any
) -> Any:
    """Rotate the newest queries by their rows of the tables, or by their places."""
    if 0 in q.shape[:-1]:  # the tables may be empty too
        return q
    lengths = paged_lengths({"q": q, "context_lens": context_lens})
    rows = None if rows is None else rows.reshape(q.shape[:-2])
    op = "append_attention"
    return rotation(op, "q", q, cos, sin, rows, interleaved, False, 0, lengths, None, stream)


WAY_OUT = (
    "new tokens are brought into rows by a library",
    "call reshape_and_cache and paged_attention",
)
