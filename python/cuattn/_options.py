# SPDX-License-Identifier: Apache-2.0
"""The options of the attentions, with their defaults."""

from __future__ import annotations

from typing import Any

VARLEN_POSITIONAL = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPTIONS: dict[str, Any] = {
    "layout": "bshd",
    "causal": False,
    "window": (-1, -1),
    "scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "bias": None,
    "seqused_q": None,
    "seqused_k": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "block_tables": None,
    "kv_layout": "nhd",
    "num_splits": 0,
    "batch_invariant": False,
    "return_lse": False,
    "backend": "auto",
}
PAGED_POSITIONAL = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
PAGED_OPTIONS: dict[str, Any] = {
    "kv_layout": "nhd",
    "scale": None,
    "causal": True,
    "window": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "k_scale": None,
    "v_scale": None,
    "kv_dtype": None,
    "plan": None,
    "num_splits": 0,
    "batch_invariant": False,
    "partition_size": 512,
    "max_context_len": None,
    "backend": "auto",
}
CASCADE_POSITIONAL = ("q", "shared_k", "shared_v", *PAGED_POSITIONAL[1:])
PAGED_VERSIONS = {"paged_attention": 0, "paged_attention_v1": 1, "paged_attention_v2": 2}
