# SPDX-License-Identifier: Apache-2.0
"""What other libraries call the arguments, for whoever brings a call from there.

Looked at when a call is refused, and by `explain`; never by a call that is right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ._options import OPS, options_of

# Name there: our names, of which the first that the op has is meant, and what differs in meaning.
BOTTOM_RIGHT = "it counts from the last key, where torch's counts from the first"
ADDED = "floats are added to the scores, and of a bool True keeps the key"
PAIR = "a pair (left, right), -1 for no limit"
REPEATED = "leave it out: fewer key heads than query heads are always taken"
OTHER_NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "is_causal": (("causal",), BOTTOM_RIGHT),
    "attn_mask": (("bias",), ADDED),
    "attention_mask": (("bias",), ADDED),
    "mask": (("bias",), ADDED),
    "attn_bias": (("bias",), ADDED),
    "score_bias": (("bias",), ADDED),
    "key_padding_mask": (("seqused_k", "context_lens"), "the number of keys in use, not a mask"),
    "leftpad_k": (("kv_start",), ""),
    "cache_leftpad": (("kv_start",), ""),
    "enable_gqa": ((), REPEATED),
    "softmax_scale": (("scale",), ""),
    "sm_scale": (("scale",), ""),
    "scaling": (("scale",), ""),
    "window_size": (("window",), PAIR),
    "sliding_window": (("window",), PAIR + "; a window of n keys is (n - 1, 0)"),
    "local_window_size": (("window",), PAIR),
    "window_left": (("window",), PAIR),
    "soft_cap": (("softcap",), ""),
    "logits_soft_cap": (("softcap",), ""),
    "softcapping": (("softcap",), ""),
    "alibi": (("alibi_slopes",), ""),
    "s_aux": (("sinks",), ""),
    "sink": (("sinks",), ""),
    "learnable_sink": (("sinks",), ""),
    "q_descale": (("q_scale",), ""),
    "k_descale": (("k_scale",), ""),
    "v_descale": (("v_scale",), ""),
    "dropout": (("dropout_p",), ""),
    "deterministic": ((), "leave it out: the same call gives the same bits"),
    "return_softmax_lse": (("return_lse",), ""),
    "return_attn_probs": (("return_lse",), "the probabilities are never in memory"),
    "need_weights": (("return_lse",), "the probabilities are never in memory"),
    "softmax_lse": (("lse_out",), ""),
    "output": (("out",), ""),
    "cu_seqlens_kv": (("cu_seqlens_k",), ""),
    "cu_seq_lens_q": (("cu_seqlens_q",), ""),
    "cu_seq_lens_k": (("cu_seqlens_k",), ""),
    "cum_seq_q": (("cu_seqlens_q",), ""),
    "cum_seq_k": (("cu_seqlens_k",), ""),
    "max_seqlen_kv": (("max_seqlen_k",), ""),
    "max_q": (("max_seqlen_q",), ""),
    "max_k": (("max_seqlen_k",), ""),
    "max_length_q": (("max_seqlen_q",), ""),
    "max_length_k": (("max_seqlen_k",), ""),
    "seqused_kv": (("seqused_k",), ""),
    "seqlens_k": (("seqused_k", "context_lens"), ""),
    "query_seq_lengths": (("seqused_q",), ""),
    "key_value_seq_lengths": (("seqused_k",), ""),
    "cache_seqlens": (("context_lens", "seqused_k"), ""),
    "seq_lens": (("context_lens", "seqused_k"), ""),
    "block_table": (("block_tables",), ""),
    "page_table": (("block_tables",), ""),
    "key_cache": (("k_cache", "k"), ""),
    "value_cache": (("v_cache", "v"), ""),
    "k_cache": (("key_cache", "k"), ""),
    "v_cache": (("value_cache", "v"), ""),
    "kv_cache_dtype": (("kv_dtype",), ""),
    "tensor_layout": (("layout",), ""),
    "qkv_format": (("layout",), ""),
    "implementation": (("backend",), ""),
    "query": (("q",), ""),
    "key": (("k", "k_cache", "key_cache"), ""),
    "value": (("v", "v_cache", "value_cache"), ""),
}


def names_of(op: str) -> tuple[str, ...]:
    """List all arguments of an op, in their order."""
    options = (option.name for option in options_of(op))
    return (*OPS[op].positional, *OPS[op].extents, *options)


def way_out(op: str, name: str) -> str:
    """Say what an op has instead of an argument that it does not have."""
    known = names_of(op)
    ours, note = OTHER_NAMES.get(name, ((), ""))
    meant = next((candidate for candidate in ours if candidate in known), None)
    if meant is not None:
        return f"here it is called {meant}" + f" ({note})" * bool(note)
    if note and not ours:
        return note
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"help(cuattn.{op}) lists what there is"


def told(op: str, unknown: Iterable[str]) -> str:
    """List arguments that an op does not have, each with what it has instead."""
    return ", ".join(f"{name}: {way_out(op, name)}" for name in sorted(unknown))


def refuse(op: str, given: Iterable[str]) -> None:
    """Raise for the first name that an op does not have."""
    known = names_of(op)
    for name in given:
        if name not in known:
            raise TypeError(f"{op}: there is no argument {name}; {way_out(op, name)}")
