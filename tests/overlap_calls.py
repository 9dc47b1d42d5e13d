# SPDX-License-Identifier: Apache-2.0
"""Calls whose arrays are placed in memory by a test: arguments of every function, and which of them
it writes.
"""

from __future__ import annotations

import itertools

import numpy as np

import cuattn

F32, I32, I64 = np.float32, np.int32, np.int64
HEADS, DIM = 2, 16


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def ends(*lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(I32)


def attention():
    return {
        "out": zeros(2, 4, HEADS, DIM),
        "lse_out": zeros(2, HEADS, 4),
        "q": zeros(2, 4, HEADS, DIM),
        "k": zeros(2, 6, HEADS, DIM),
        "v": zeros(2, 6, HEADS, DIM),
        "seqused_q": zeros(2, dtype=I32),
        "seqused_k": zeros(2, dtype=I32),
        "alibi_slopes": zeros(2, HEADS),
        "sinks": zeros(HEADS),
        "bias": zeros(HEADS, 4, 6),
    }


def attention_varlen():
    return {
        "out": zeros(7, HEADS, DIM),
        "lse_out": zeros(HEADS, 7),
        "q": zeros(7, HEADS, DIM),
        "k": zeros(9, HEADS, DIM),
        "v": zeros(9, HEADS, DIM),
        "cu_seqlens_q": ends(0, 0),
        "cu_seqlens_k": ends(0, 0),
        "max_seqlen_q": 4,
        "max_seqlen_k": 6,
    }


def attention_over_pages():
    arrays = attention_varlen()
    del arrays["cu_seqlens_k"]
    return {
        **arrays,
        "k": zeros(5, 8, HEADS, DIM),
        "v": zeros(5, 8, HEADS, DIM),
        "cu_seqlens_k": None,
        "block_tables": zeros(2, 3, dtype=I32),
        "seqused_k": zeros(2, dtype=I32),
    }


def paged_attention():
    return {
        "out": zeros(2, HEADS, DIM),
        "lse_out": zeros(2, HEADS),
        "q": zeros(2, HEADS, DIM),
        "k_cache": zeros(5, 8, HEADS, DIM),
        "v_cache": zeros(5, 8, HEADS, DIM),
        "block_tables": zeros(2, 3, dtype=I32),
        "context_lens": zeros(2, dtype=I32),
        "alibi_slopes": zeros(2, HEADS),
        "sinks": zeros(HEADS),
    }


def version():
    names = {"k_cache": "key_cache", "v_cache": "value_cache"}
    arrays = {names.get(name, name): x for name, x in paged_attention().items()}
    for name in ("lse_out", "sinks", "alibi_slopes"):
        del arrays[name]
    return {**arrays, "scale": 0.25, "kv_layout": "nhd"}


def version_2():
    return {
        **version(),
        "exp_sums": zeros(2, HEADS, 1),
        "max_logits": zeros(2, HEADS, 1),
        "tmp_out": zeros(2, HEADS, 1, DIM),
        "partition_size": 256,
    }


def paged_plan():
    return {
        "block_tables": zeros(2, 3, dtype=I32),
        "context_lens": zeros(2, dtype=I32),
        "out": zeros(72, dtype=I32),
        "num_heads_q": HEADS,
        "num_heads_kv": HEADS,
        "head_dim": DIM,
        "block_size": 8,
        "dtype": "float32",
    }


def merge_states():
    return {
        "out": zeros(2, 4, HEADS, DIM),
        "lse_out": zeros(2, HEADS, 4),
        "out_a": zeros(2, 4, HEADS, DIM),
        "lse_a": zeros(2, HEADS, 4),
        "out_b": zeros(2, 4, HEADS, DIM),
        "lse_b": zeros(2, HEADS, 4),
    }


def merge_many():
    return {
        "out": zeros(2, 4, HEADS, DIM),
        "lse_out": zeros(2, HEADS, 4),
        "outs": zeros(3, 2, 4, HEADS, DIM),
        "lses": zeros(3, 2, HEADS, 4),
    }


def reshape_and_cache():
    return {
        "k_cache": zeros(5, 8, HEADS, DIM),
        "v_cache": zeros(5, 8, HEADS, DIM),
        "k": zeros(7, HEADS, DIM),
        "v": zeros(7, HEADS, DIM),
        "slot_mapping": zeros(7, dtype=I64),
        "cos": zeros(9, DIM // 2),
        "sin": zeros(9, DIM // 2),
        "positions": zeros(7, dtype=I64),
    }


def reshape_and_cache_float8():
    return {
        **reshape_and_cache(),
        "k_cache": zeros(5, 8, HEADS, DIM, dtype=np.uint8),
        "v_cache": zeros(5, 8, HEADS, DIM, dtype=np.uint8),
        "k_scale": np.ones(HEADS, F32),
        "v_scale": np.ones(HEADS, F32),
    }


def gather_cache():
    return {
        "k_out": zeros(7, HEADS, DIM),
        "v_out": zeros(7, HEADS, DIM),
        "k_cache": zeros(5, 8, HEADS, DIM),
        "v_cache": zeros(5, 8, HEADS, DIM),
        "block_tables": zeros(2, 3, dtype=I32),
        "cu_seqlens": ends(0, 0),
    }


def merge_stacked(outs, lses, **results):
    return cuattn.merge_states(outs, lses, **results)


# Arguments of a call, and those that it writes, in the order in which they are compared.
CALLS = {
    "attention": (cuattn.attention, attention, ("out", "lse_out")),
    "varlen": (cuattn.attention_varlen, attention_varlen, ("out", "lse_out")),
    "pages": (cuattn.attention_varlen, attention_over_pages, ("out", "lse_out")),
    "paged": (cuattn.paged_attention, paged_attention, ("out", "lse_out")),
    "v1": (cuattn.paged_attention_v1, version, ("out",)),
    "v2": (cuattn.paged_attention_v2, version_2, ("out", "exp_sums", "max_logits", "tmp_out")),
    "plan": (cuattn.paged_plan, paged_plan, ("out",)),
    "merge": (cuattn.merge_states, merge_states, ("out", "lse_out")),
    "merge_many": (merge_stacked, merge_many, ("out", "lse_out")),
    "write": (cuattn.reshape_and_cache, reshape_and_cache, ("k_cache", "v_cache")),
    "write_float8": (cuattn.reshape_and_cache, reshape_and_cache_float8, ("k_cache", "v_cache")),
    "gather": (cuattn.gather_cache, gather_cache, ("k_out", "v_out")),
}
NEVER_READ = {("plan", "block_tables")}
IN_PLACE = {
    ("out", "out_a"),
    ("out", "out_b"),
    ("lse_out", "lse_a"),
    ("lse_out", "lse_b"),
    ("out", "outs"),
    ("lse_out", "lses"),
}


def pairs_of(name):
    """(written, other) for every pair of arrays of a call."""
    _, make, written = CALLS[name]
    arrays = [key for key, value in make().items() if isinstance(value, np.ndarray)]
    for one, other in itertools.product(written, arrays):
        both = other in written and written.index(other) <= written.index(one)
        if not both and (name, other) not in NEVER_READ:
            yield one, other


def contiguous(shape):
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides


def place(device, buffer, offset, values):
    view = device.view(buffer, values.dtype, offset, values.shape, contiguous(values.shape))
    device.write(view, values)
    return view


def call_of(device, name):
    """The function and its arguments; a plan is as large as the device wants it."""
    function, make, _ = CALLS[name]
    arguments = make()
    if name == "plan":
        placed = {
            key: place(device, device.buffer(64), 0, arguments[key])
            for key in ("block_tables", "context_lens")
        }
        plan = function(**{**arguments, **placed, "out": None})
        arguments["out"] = zeros(plan.shape[0], dtype=I32)
    return function, arguments
