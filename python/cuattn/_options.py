# SPDX-License-Identifier: Apache-2.0
"""The table of options: what each attention takes beside its arrays.

A row is one option. From the table are made: the arguments, parsing and XLA attributes of the
bindings and a table of docs/layouts.md (by cmake/generate_options.py), the attributes that JAX
passes, the schema of torch's ops, what explain takes. Written by hand and held against the table by
tests/house/test_options.py: the signatures and docstrings of the functions, the structs of c_api.h
and attention.h. docs/add_an_option.md says how a row is added. This module imports nothing of
cuattn, because the generator runs it alone.

Kinds, and what each is in the options of the C ABI, cuattn_attention_options or
cuattn_paged_options:

    flag     bool                     int32_t NAME
    count    int                      int32_t NAME
    length   int                      int64_t NAME
    number   float                    double NAME; if the default is None, int32_t has_NAME too
    pair     (int, int)               int64_t NAME_left, NAME_right
    word     one of WORDS[NAME]       int32_t NAME, the place among these
    text     str                      const char* NAME
    array    array, of a dtype        const DLTensor* NAME
    buffer   array that is written    const DLTensor* NAME
    scale    float or float32 array   double NAME, const DLTensor* NAMEs
    place    where a call writes and runs; nothing: it is given to `run`
    turned   how q is rotated before the call; nothing: apply_rope has it
    added    array, added to the result after the call; nothing: add_residual has it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

CACHES = ("k_cache", "v_cache", "block_tables", "context_lens")
VLLM_CALL = ("out", "q", "key_cache", "value_cache", "block_tables", "context_lens", "scale")


class Op(NamedTuple):
    """A function: whose options it has in C, what it takes by place, and by name alone."""

    struct: str | None  # None: it is made of other functions
    positional: tuple[str, ...]
    extents: tuple[str, ...] = ()


# fmt: off
OPS = {
    "attention": Op("attention", ("q", "k", "v")),
    "attention_varlen": Op("attention", ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k",
                                         "max_seqlen_q", "max_seqlen_k")),
    "paged_attention": Op("paged", ("q", *CACHES)),
    "paged_attention_v1": Op("paged", VLLM_CALL),
    "paged_attention_v2": Op("paged", VLLM_CALL),
    "paged_plan": Op("paged", ("block_tables", "context_lens"),
                     ("num_heads_q", "num_heads_kv", "head_dim", "block_size", "q_len", "dtype")),
    "cascade_attention": Op(None, ("q", "shared_k", "shared_v", *CACHES)),
    "append_attention": Op(None, ("q", "k", "v", *CACHES),
                           ("rope", "rope_positions", "rope_interleaved")),
}
DENSE, VARLEN, V1, V2, PLAN = ((name,) for name in (
    "attention", "attention_varlen", "paged_attention_v1", "paged_attention_v2", "paged_plan"))
ROWS = DENSE + VARLEN
PAGED = ("paged_attention", "cascade_attention", "append_attention")
VLLM = V1 + V2
ALL = ROWS + PAGED
CODES = (*ROWS, "paged_attention", "append_attention")  # that take float8 queries

WORDS: dict[str, tuple[str | None, ...]] = {  # in the order of the enums of c_api.h
    "layout": ("bshd", "bhsd", "nhd", "thd"),
    "kv_layout": ("nhd", "hnd", "vllm"),
    "kv_dtype": (None, "float8_e4m3fn"),
    "dtype": (None, "float8_e4m3fn"),
    "accumulate": ("exact", "fast"),
}
OTHER_DEFAULTS: dict[str, dict[str, Any]] = {  # of some ops
    "causal": dict.fromkeys(PAGED + PLAN, True),
    "kv_layout": dict.fromkeys(VLLM, "vllm"),
}
PASSES = ("turned", "added")  # kinds that a pass of its own has, before the call or after it
OUTSIDE = ("place", *PASSES)  # kinds that no C struct has
XLA_OPS = {"attention": ROWS, "paged": PAGED[:1]}  # of one XLA handler, which fills this struct
NOT_TRACED = {  # by these faces
    "jax": ("plan",),
    "torch": ("block_tables", "kv_layout"),
}
NO_FIELD = {"attention": (), "paged": ("return_lse",)}  # in this struct


class Option(NamedTuple):
    """One row."""

    name: str
    type: str  # the kind; of an array also the dtype, if it is not that of q
    default: Any
    ops: tuple[str, ...]
    about: str

    @property
    def kind(self) -> str:
        """One of the kinds above."""
        return self.type.split()[0]

    def default_of(self, op: str) -> Any:
        """Return what is meant where `op` is not given the option."""
        return OTHER_DEFAULTS.get(self.name, {}).get(op, self.default)


TABLE = tuple(Option(*row) for row in (
    ("layout", "word", "bshd", DENSE, "order of the axes of q, k, v and out"),
    ("causal", "flag", False, ALL + PLAN, "query i sees keys `j <= i + seqlen_kv - seqlen_q`"),
    ("window", "pair", (-1, -1), ALL + PLAN, "keys left and right of that diagonal; -1: all"),
    ("scale", "number", None, ALL + VLLM, "factor of the scores; None is `1 / sqrt(head_dim)`"),
    ("softcap", "number", 0.0, ALL, "scores become `softcap * tanh(scores / softcap)`; 0 is off"),
    ("alibi_slopes", "array float32", None, ALL + VLLM, "`[num_heads_q]`, `[batch, num_heads_q]`"),
    ("sinks", "array float32", None, ALL, "`[num_heads_q]`: a logit more in the denominator"),
    ("bias", "array", None, ROWS, "added to the scores; bool: True keeps the key"),
    ("seqused_q", "array int32", None, ROWS, "`[batch]`: rows of q in use"),
    ("seqused_k", "array int32", None, ROWS, "`[batch]`: rows of k and v in use"),
    ("kv_start", "array int32", None, DENSE, "`[batch]`: the first key in use, after left padding"),
    ("cu_seqlens_q", "array int32", None, VARLEN, "`[batch + 1]`: where queries begin"),
    ("cu_seqlens_k", "array int32", None, VARLEN, "`[batch + 1]`: where keys begin"),
    ("max_seqlen_q", "length", None, VARLEN, "upper bound of the queries of a sequence"),
    ("max_seqlen_k", "length", None, VARLEN, "upper bound of the keys of a sequence"),
    ("block_tables", "array int32", None, VARLEN, "`[batch, max_blocks_per_seq]`: k, v are caches"),
    ("kv_layout", "word", "nhd", VARLEN + PAGED + VLLM + PLAN, "order of the axes of the caches"),
    ("kv_dtype", "word", None, PAGED + PLAN, "what uint8 caches, and q, hold"),
    ("plan", "array int32", None, PAGED, "of `paged_plan`"),
    ("dropout_p", "number", 0.0, ROWS, "share of the probabilities that are dropped"),
    ("dropout_seed", "length", None, ROWS, "of the random bits, from 0 to 2^63 - 1"),
    ("dropout_offset", "length", 0, ROWS, "the same, from 0 to 2^32 - 1"),
    ("dropout_state", "array int64", None, ROWS, "`[2]`: seed and offset, instead of both"),
    ("dropout_row", "length", 0, ROWS, "of a part of a greater call: its first row there"),
    ("dropout_key", "length", 0, ROWS, "the same of keys"),
    ("dropout_head", "length", 0, ROWS, "the same of heads, with those of sequences before"),
    ("dropout_heads", "length", 0, ROWS, "heads of a sequence there; 0: num_heads_q"),
    ("dtype", "word", None, ROWS, "what uint8 q, k and v hold"),
    ("q_scale", "scale", None, CODES, "of float8 queries: query = stored * scale; None is 1"),
    ("k_scale", "scale", None, ALL + VLLM, "of float8 keys: key = stored * scale; None is 1"),
    ("v_scale", "scale", None, ALL + VLLM, "of float8 values: value = stored * scale; None is 1"),
    ("accumulate", "word", "exact", ROWS, "sums of float8 products: two levels, or one"),
    ("rope", "turned", None, ROWS + PAGED[:1], "`(cos, sin)`: q is rotated first"),
    ("rope_positions", "turned", None, ROWS + PAGED[:1], "int64, the row of the tables of each q"),
    ("rope_interleaved", "turned", False, ROWS + PAGED[:1], "pairs are `(2 i, 2 i + 1)`"),
    ("residual", "added", None, DENSE, "like out: is added to it in float32, before the rounding"),
    ("num_splits", "count", 0, ALL, "parts of the keys, a wish; 0 is chosen"),
    ("batch_invariant", "flag", False, ALL, "a sequence's bits do not depend on the others"),
    ("return_lse", "flag", False, ALL, "also return the log-sum-exp of the scores"),
    ("partition_size", "length", 512, V2, "keys of a partition: 256, 512 or 1024"),
    ("max_context_len", "length", None, V2, "upper bound of context_lens"),
    ("exp_sums", "buffer", None, V2, "float32 `[num_seqs, num_heads_q, partitions]`, written"),
    ("max_logits", "buffer", None, V2, "float32 `[num_seqs, num_heads_q, partitions]`, written"),
    ("tmp_out", "buffer", None, V2, "`[num_seqs, num_heads_q, partitions, head_dim]`, written"),
    ("out", "place", None, ALL + VLLM + PLAN, "the result, written in place"),
    ("lse_out", "place", None, ALL, "lse, written in place; implies return_lse"),
    ("workspace", "place", None, ALL, "memory of `explain(...).workspace_bytes`"),
    ("backend", "text", "auto", ALL + PLAN, "one named rung of the ladder"),
    ("stream", "place", None, ALL + VLLM + PLAN, "None is the current stream of q's library"),
))
# fmt: on


def options_of(*ops: str, kinds: tuple[str, ...] = (), face: str = "") -> Iterator[Option]:
    """List the options of functions: all, those of some kinds, those that a face can trace."""
    untraced = NOT_TRACED.get(face, ())
    for option in TABLE:
        is_kind = option.kind in kinds if kinds else not face or option.kind not in OUTSIDE
        if is_kind and not set(ops).isdisjoint(option.ops) and option.name not in untraced:
            yield option


def fields_of(struct: str, *kinds: str) -> Iterator[Option]:
    """List the options that "attention" or "paged" has in C: all, or those of some kinds."""
    ops = tuple(name for name, op in OPS.items() if op.struct == struct)
    for option in options_of(*ops, kinds=kinds):
        if option.kind not in OUTSIDE and option.name not in NO_FIELD[struct]:
            yield option


def code_of(name: str, word: str | None) -> int:
    """Return the number that stands for a word in C; KeyError where it is none."""
    return {known: code for code, known in enumerate(WORDS[name])}[word]


PLACES = tuple(option.name for option in TABLE if option.kind == "place")
