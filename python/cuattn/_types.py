# SPDX-License-Identifier: Apache-2.0
"""What type checkers know of the options: their words, and those that overloads have in common.

A result depends on return_lse and lse_out. The overloads of a function name these two and take the
other options together. Held against the table of options by tests/house/test_options.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack

    from ._arrays import Array

Layout = Literal["bshd", "bhsd"]
MergeLayout = Literal["bshd", "bhsd", "nhd", "thd"]
KvLayout = Literal["nhd", "hnd", "vllm"]
KvDtype = Literal["float8_e4m3fn"]
Accumulate = Literal["exact", "fast"]
Act = Literal["silu", "gelu", "gelu_tanh"]
FilterOrder = Literal["top_k_first", "joint"]
Backend = Literal["auto", "naive", "cublas", "tiled", "simt", "sm80", "sm90", "cpu"]


class CommonOptions(TypedDict, total=False):
    """Of all attentions."""

    causal: bool
    window: tuple[int, int]
    scale: float | None
    softcap: float
    alibi_slopes: Array | None
    sinks: Array | None
    num_splits: int
    batch_invariant: bool
    out: Array | None
    workspace: Array | None
    backend: Backend
    stream: Any
    k_scale: Any
    v_scale: Any


class RowOptions(CommonOptions, total=False):
    """Of attention and attention_varlen."""

    bias: Array | None
    dtype: KvDtype | None
    q_scale: Any
    accumulate: Accumulate
    seqused_q: Array | None
    seqused_k: Array | None
    dropout_p: float
    dropout_seed: int | None
    dropout_offset: int
    dropout_state: Array | None
    dropout_row: int
    dropout_key: int
    dropout_head: int
    dropout_heads: int
    rope: tuple[Array, Array] | None
    rope_positions: Array | None
    rope_interleaved: bool


class DenseOptions(RowOptions, total=False):
    """Of attention."""

    layout: Layout
    kv_start: Array | None
    residual: Array | None


class VarlenOptions(RowOptions, total=False):
    """Of attention_varlen."""

    block_tables: Array | None
    kv_layout: KvLayout


class PagedOptions(CommonOptions, total=False):
    """Of paged_attention."""

    kv_layout: KvLayout
    kv_dtype: KvDtype | None
    q_scale: Any
    plan: Array | None
    rope: tuple[Array, Array] | None
    rope_positions: Array | None
    rope_interleaved: bool
