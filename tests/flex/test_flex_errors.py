# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of flex_attention: each names function, argument, rule, value and way out."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cuattn
from cuattn import _core, flex

Q = np.zeros((2, 20, 4, 16), np.float32)
K = np.zeros((2, 30, 2, 16), np.float32)
CAUSAL = flex.masks.causal()


def call(**options):
    return cuattn.flex_attention(Q, K, K, **options)


def of_array(array):
    return lambda: call(mask_mod=lambda b, h, q, k: array[q] == array[k])


def block_mask(*shape):
    return cuattn.create_block_mask(lambda b, h, q, k: (q + h) % 2 == k % 2, *shape)


REFUSED = {
    "unknown": (TypeError, lambda: call(cuasal=True), "no argument cuasal; did you mean causal"),
    "torch": (TypeError, lambda: call(enable_gqa=True), "no argument enable_gqa; leave it out"),
    "varlen": (TypeError, lambda: call(cum_seq_q=0), "cum_seq_q; here it is called cu_seqlens_q"),
    "nothing": (TypeError, lambda: call(kernel_options={}), r"help\(cuattn.flex_attention\)"),
    "no function": (TypeError, lambda: call(mask_mod=3), "mask_mod must be a function"),
    "no score": (TypeError, lambda: call(score_mod="a"), "score_mod must be a function"),
    "uncalled": (
        TypeError,
        lambda: call(mask_mod=flex.masks.causal),
        r"mask_mod causal: makes such a function and is none; pass flex\.masks\.causal\(\)",
    ),
    "uncalled score": (
        TypeError,
        lambda: call(score_mod=flex.scores.alibi),
        r"score_mod alibi: makes .*; pass flex\.scores\.alibi\(\)",
    ),
    "no return": (TypeError, lambda: call(mask_mod=lambda b, h, q, k: None), "a return missing"),
    "rank": (
        ValueError,
        lambda: cuattn.flex_attention(Q[0], K, K, mask_mod=CAUSAL),
        r"flex_attention: q must have (rank )?4",
    ),
    "heads": (
        ValueError,
        lambda: cuattn.flex_attention(Q[:, :, :3], K, K, mask_mod=CAUSAL),
        "flex_attention: .*num_heads",
    ),
    "used": (
        ValueError,
        lambda: call(mask_mod=CAUSAL, seqused_k=np.array([31, 1], np.int32)),
        r"flex_attention: seqused_k must lie within \[0, 30\], got 31",
    ),
    "used list": (
        TypeError,
        lambda: call(mask_mod=CAUSAL, seqused_k=[30, 1]),
        "flex_attention: seqused_k must be an array .*, got list; convert it first",
    ),
    "ends list": (
        TypeError,
        lambda: cuattn.flex_attention(
            *(x[0] for x in (Q, K, K)),
            mask_mod=CAUSAL,
            cu_seqlens_q=[0, 20],
            cu_seqlens_k=[0, 30],
            max_seqlen_q=20,
            max_seqlen_k=30,
        ),
        "flex_attention: cu_seqlens_q must be an array .*, got list; convert it first",
    ),
    "lengths": (
        ValueError,
        lambda: call(block_mask=block_mask(2, 4, 20, 31)),
        "block_mask must be made for seqlen_kv 30, got one for 31",
    ),
    "mask heads": (
        ValueError,
        lambda: call(block_mask=block_mask(1, 3, 20, 30)),
        "block_mask must be made for num_heads 4, got one for 3",
    ),
    "one head": (
        ValueError,
        lambda: call(block_mask=block_mask(None, None, 20, 30)),
        "block_mask must be made for num_heads 4, got one for 1",
    ),
    "no mask": (TypeError, lambda: flex.masks.or_masks(CAUSAL, None), "or_masks: a mask must be"),
    "no block mask": (TypeError, lambda: call(block_mask=CAUSAL), "must be a BlockMask, got func"),
    "int64": (ValueError, of_array(np.array([0, 2**40])), r"within int32, got 0 to 1099511627776"),
    "dtype": (TypeError, of_array(np.zeros(4, np.uint64)), "must hold int8.*got uint64"),
    "axes": (TypeError, of_array(np.zeros((2, 2, 2))), "has 0 to 2 axes"),
    "empty": (TypeError, of_array(np.zeros(0)), "of 1 to 2.31 - 1 elements"),
    "overflow": (
        ValueError,
        lambda: call(score_mod=lambda s, b, h, q, k: s + (q + 100) * 2**30),
        r"`\(\(q_idx \+ 100\) \* 1073741824\)` may reach 107374182400 to .* beyond int32",
    ),
    "arrays": (
        ValueError,
        lambda: call(score_mod=many_arrays()),
        "may capture 16 arrays together, got 17",
    ),
}


def many_arrays():
    arrays = [np.zeros(2, np.float32) + i for i in range(17)]

    def mod(score, b, h, q, k):
        for array in arrays:
            score = score + array[h]
        return score

    return mod


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_calls_are_refused(name):
    error, function, words = REFUSED[name]
    with pytest.raises(error, match=words):
        function()


GOOD = {
    "mask_program": np.array(
        [[1, 0, 0, 0, 0, 0], [7, 1, 0, 0, 0, 3], [19, 0, 0, 1, 0, 0]], np.int32
    )
}
LISTS = {
    "block_starts": np.array([[[0, 1]]], np.int32),
    "block_entries": np.array([1], np.int32),
    "query_block": 64,
    "key_block": 64,
}
BROKEN = {
    "code": ({"mask_program": GOOD["mask_program"] + 99}, "holds no operation at row 0"),
    "unset": ({"mask_program": GOOD["mask_program"][2:]}, "holds no operation at row 0"),
    "register": ({"mask_program": np.array([[1, 24, 0, 0, 0, 0]], np.int32)}, "no operation"),
    "slot": ({"mask_program": np.array([[8, 0, 0, 0, 0, 0]], np.int32)}, "no operation"),
    "score": ({"mask_program": np.array([[6, 0, 0, 0, 0, 0]], np.int32)}, "no operation"),
    "divisor": (
        {"mask_program": np.array([[1, 0, 0, 0, 0, 0], [16, 1, 0, 0, 0, 0]], np.int32)},
        "no operation at row 1",
    ),
    "shape": ({"mask_program": np.zeros((1, 5), np.int32)}, r"must have shape \(n, 6\)"),
    "long": ({"mask_program": np.zeros((5000, 6), np.int32)}, "n from 1 to 4096"),
    "one side": ({"row_begin": np.zeros((1, 1, 20), np.int32)}, "must both be given"),
    "rows": (
        dict.fromkeys(("row_begin", "row_end"), np.zeros((1, 1, 19), np.int32)),
        r"must have the shape of lse \(2, 4, 20\), got \(1, 1, 19\)",
    ),
    "starts": ({**LISTS, "block_starts": np.array([[[0, 1, 1]]], np.int32)}, "block_starts must"),
    "count": ({**LISTS, "block_starts": np.array([[[0, 2]]], np.int32)}, r"within \[0, 1\]"),
    "entry": ({**LISTS, "block_entries": np.array([2], np.int32)}, "must name one of 1 key blocks"),
    "negative": ({**LISTS, "block_entries": np.array([-1], np.int32)}, "must name one of 1"),
    "order": (
        {
            **LISTS,
            "key_block": 16,
            "block_starts": np.array([[[0, 2]]], np.int32),
            "block_entries": np.array([0, 2], np.int32),
        },
        "must fall within a query block, got 0 and then 1",
    ),
    "block": ({**LISTS, "query_block": 0}, "must be > 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_compiled_module_takes_no_program_or_list_that_could_leave_its_arrays(name):
    found, words = BROKEN[name]
    _core.flex_attention({"q": Q, "k": K, "v": K}, GOOD)
    with pytest.raises(ValueError, match=re.compile(f"flex_attention: .*{words}")):
        _core.flex_attention({"q": Q, "k": K, "v": K}, found)


def test_jax_refuses_what_it_cannot_do():
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((1, 4, 2, 16))
    with pytest.raises(ValueError, match="out must not be given"):
        cuattn.flex_attention(x, x, x, mask_mod=CAUSAL, out=x)
