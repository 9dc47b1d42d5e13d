# SPDX-License-Identifier: Apache-2.0
"""Decode behind a prefix that all sequences share: the prefix is read once, not once a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _arrays
from ._arrays import Array, ShapedArray, ShapedT
from ._checks import check_flag
from ._kv_shapes import BLOCK_SIZE_AXIS
from ._overlap import refuse_shared
from ._prefix import (
    check_shapes,
    keys_in_window,
    prefix_bias,
    refuse_codes,
    require_library,
    shape_of,
    tokens_behind,
)
from .attention import attention
from .merge import merge_states
from .paged import paged_attention

if TYPE_CHECKING:
    from ._types import Backend, KvDtype, KvLayout


def cascade_attention(
    q: ShapedT,
    shared_k: ShapedT,
    shared_v: ShapedT,
    k_cache: ShapedArray,
    v_cache: Array,
    block_tables: ShapedArray,
    context_lens: Array,
    *,
    kv_layout: KvLayout = "nhd",
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
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
    """Attend with the newest tokens of each sequence to one shared prefix, then to its own pages.

    The queries of all sequences meet the prefix in one `attention` call; `paged_attention` runs
    over what each sequence has of its own; `merge_states` makes one result of both. It is that of
    `paged_attention` over pages that hold the prefix, too, for 1 / num_seqs of the reads.

    Positions count over both: the prefix's tokens are 0 to shared_len - 1, and query i stands at
    ``shared_len + context_len - q_len + i``. Where that is within the prefix, as of a sequence with
    fewer than q_len tokens, it meets the prefix from its end, and its own keys from there.

    Parameters
    ----------
    q : array, [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim]
        As in `paged_attention`, and contiguous if it has an axis of queries.
    shared_k, shared_v : array, [shared_len, num_heads_kv, head_dim]
        Keys and values of the prefix, of q's dtype.
    k_cache, v_cache, block_tables : array
        As in `paged_attention`.
    context_lens : int32 array, [num_seqs]
        Tokens of each sequence behind the prefix, the queries' own included.
    kv_layout, scale, softcap, k_scale, v_scale, kv_dtype, plan, num_splits, batch_invariant
        As in `paged_attention`; the scales are those of the caches. num_splits is for the pages;
        batch_invariant is held for them, and for the prefix where `attention` holds it.
    causal : bool
        Query i sees no key behind its own; the whole prefix is before it.
    window : (int, int)
        (left, right) around the query; -1 is unlimited. Of the prefix, its last left + 1 tokens are
        read.
    alibi_slopes : float32 array, [num_heads_q] or [num_seqs, num_heads_q], optional
        Adds ``-slope * abs(query's position - key's position)``.
    sinks : float32 array, [num_heads_q], optional
        One more logit per head in the softmax denominator.
    workspace : array, optional
        Contiguous memory of ``explain("cascade_attention", ...).workspace_bytes``.
    return_lse, out, lse_out, backend, stream
        As in `paged_attention`; `backend` chooses the kernel for the pages.

    Returns
    -------
    out, lse : array
        As those of `paged_attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention` and `paged_attention`, under their names. NotImplementedError also for
        window or alibi_slopes on arrays of a library that cuattn cannot compute with.

    Notes
    -----
    Where a query stands is known to the device alone, so window and ALiBi reach the prefix as a
    bias that q's library computes there: of 1 byte for each query and key under a window, 4 bytes
    for each head and key under ALiBi, 4 bytes for each head, query and key under both or under
    slopes of each sequence.

    References
    ----------
    Cascade inference: FlashInfer, arXiv:2501.01005, section 3.2; Hydragen, arXiv:2402.05099.
    """
    require_library(q=q, shared_k=shared_k, shared_v=shared_v)
    refuse_codes("cascade_attention", q)
    check_flag("cascade_attention", "return_lse", return_lse)
    check_shapes("cascade_attention", shape_of(q), shape_of(shared_k), shape_of(shared_v))
    refuse_shared_outputs(locals())
    *rows, heads, head_dim = q.shape
    num_seqs, q_len = rows[0], rows[1] if len(rows) == 2 else 1
    own, own_lse = paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        kv_layout=kv_layout,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        plan=plan,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=True,
        out=wide_part(q, q.shape, out, stream),
        workspace=workspace,
        backend=backend,
        stream=stream,
    )
    keys = keys_in_window(shared_k.shape[0], window)
    bias = lse_shift = None
    if window[0] >= 0 or alibi_slopes is not None:
        require_library(k_cache=k_cache, block_tables=block_tables)
        capacity = block_tables.shape[1] * k_cache.shape[BLOCK_SIZE_AXIS[kv_layout]]
        with _arrays.operations("cascade_attention", q, stream) as library:
            behind = tokens_behind(library, context_lens, capacity, q_len)
            bias, lse_shift = prefix_bias(library, behind, keys, window[0], alibi_slopes, heads)
    queries = q.reshape(1, num_seqs * q_len, heads, head_dim)
    prefix, prefix_lse = attention(
        queries,
        shared_k[None, shared_k.shape[0] - keys :],
        shared_v[None, shared_v.shape[0] - keys :],
        scale=scale,
        softcap=softcap,
        bias=bias,
        batch_invariant=batch_invariant,
        return_lse=True,
        out=wide_part(q, queries.shape, out, stream),
        workspace=workspace,
        stream=stream,
    )
    prefix_lse = prefix_lse.reshape(heads, *rows)
    if lse_shift is not None:
        with _arrays.operations("cascade_attention", q, stream):
            prefix_lse -= lse_shift.reshape(heads, *rows)
    # Rows by sequence, as `own` has them: [heads, rows] is turned, not copied.
    merged, lse = merge_states(
        prefix.reshape(*q.shape),
        prefix_lse.swapaxes(0, 1),
        own,
        own_lse,
        out=out,
        lse_out=lse_out,
        stream=stream,
    )
    return (merged, lse) if return_lse or lse_out is not None else merged


def refuse_shared_outputs(arguments: dict[str, Any]) -> None:
    """Refuse out and lse_out over what is read: the merge, which writes them, sees the parts."""
    written = {name: arguments[name] for name in ("lse_out", "out")}
    refuse_shared("cascade_attention", written, {
        name: array for name, array in arguments.items() if name not in written})  # fmt: skip


def wide_part(q: Any, shape: tuple[int, ...], out: Any, stream: Any) -> Any:
    """Allocate a part in float32 where out is and q is not, so that it is not rounded before."""
    wanted = str(getattr(out, "dtype", "")).rpartition(".")[2]
    if wanted != "float32" or str(q.dtype).rpartition(".")[2] == wanted:
        return None
    with _arrays.operations("cascade_attention", q, stream) as library:
        return library.empty(shape, wanted)
