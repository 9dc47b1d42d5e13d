# SPDX-License-Identifier: Apache-2.0
"""Decode behind a prefix that all sequences share: the prefix is read once, not once a sequence."""

from __future__ import annotations

from typing import Any

from ._arrays import Array, ArrayT
from .attention import attention, merge_states
from .paged import paged_attention


def cascade_attention(
    q: ArrayT,
    shared_k: ArrayT,
    shared_v: ArrayT,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    kv_layout: str = "nhd",
    scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    plan: Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Attend with the newest tokens of each sequence to one shared prefix, then to its own pages.

    The queries of all sequences meet the prefix in one `attention` call; `paged_attention` runs
    over what each sequence has of its own; `merge_states` makes one result of both. It is that of
    `paged_attention` over pages that hold the prefix, too, for 1 / num_seqs of the reads.

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
        As in `paged_attention`; the scales are those of the caches. batch_invariant is held for
        the pages, and for the prefix where `attention` holds it.
    causal : bool
        Among the tokens behind the prefix; the prefix is seen by every query.
    sinks : float32 array, [num_heads_q], optional
        One more logit per head in the softmax denominator.
    return_lse, out, lse_out, backend, stream
        As in `paged_attention`; `backend` chooses the kernel for the pages.

    Returns
    -------
    out, lse : array
        As those of `paged_attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention` and `paged_attention`, under their names.

    References
    ----------
    Cascade inference: FlashInfer, arXiv:2501.01005, section 3.2; Hydragen, arXiv:2402.05099.
    """
    for name, array in (("shared_k", shared_k), ("shared_v", shared_v)):
        if len(getattr(array, "shape", ())) != 3:
            raise ValueError(
                f"cascade_attention: {name} must have 3 axes [shared_len, num_heads_kv, head_dim], "
                f"got {getattr(array, 'shape', type(array).__name__)}; reshape it"
            )
    if len(getattr(q, "shape", ())) not in (3, 4):
        raise ValueError(
            "cascade_attention: q must have axes [num_seqs, num_heads_q, head_dim] or [num_seqs, "
            f"q_len, num_heads_q, head_dim], got {getattr(q, 'shape', type(q).__name__)}; "
            "reshape it"
        )
    *rows, heads, head_dim = q.shape
    num_seqs, q_len = rows[0], rows[1] if len(rows) == 2 else 1
    prefix, prefix_lse = attention(
        q.reshape(1, num_seqs * q_len, heads, head_dim),
        shared_k[None],
        shared_v[None],
        scale=scale,
        softcap=softcap,
        batch_invariant=batch_invariant,
        return_lse=True,
        stream=stream,
    )
    own, own_lse = paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        kv_layout=kv_layout,
        scale=scale,
        causal=causal,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        plan=plan,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=True,
        backend=backend,
        stream=stream,
    )
    # Rows by sequence, as `own` has them: [1, heads, rows] is turned, not copied.
    prefix_lse = prefix_lse.reshape(heads, *rows).swapaxes(0, 1)
    merged, lse = merge_states(
        prefix.reshape(*q.shape), prefix_lse, own, own_lse, out=out, lse_out=lse_out, stream=stream
    )
    return (merged, lse) if return_lse or lse_out is not None else merged
