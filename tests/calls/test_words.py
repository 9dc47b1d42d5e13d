# SPDX-License-Identifier: Apache-2.0
"""Flags and words that Python functions compare: arrays there, which compare by element."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import flex

X = np.zeros((1, 4, 2, 8), np.float32)
LATENT, PROJ = np.zeros((1, 4, 16), np.float32), np.zeros((2, 16, 8), np.float32)
LSE = np.zeros((1, 2, 4), np.float32)
LOGITS = np.zeros((2, 5), np.float32)
CACHE, TABLES = np.zeros((2, 16, 2, 8), np.float32), np.zeros((4, 1), np.int32)
LENS, ENDS = np.full(4, 3, np.int32), np.int32([0, 4])
TWO = np.array([True, False])


def causal(b, h, q, k):
    return k <= q


def latents(**words):
    return cuattn.mla_attention(X.swapaxes(1, 2), LATENT, LATENT, PROJ, PROJ, **words)


def back(**words):
    return cuattn.attention_backward(X, X, X, X, X, LSE, **words)


def ragged(**words):
    lengths = {"max_seqlen_q": 4, "max_seqlen_k": 4}
    return cuattn.attention_varlen(X[0], X[0], X[0], ENDS, ENDS, **lengths, **words)


def cascade(**words):
    return cuattn.cascade_attention(X[0], X[0], X[0], CACHE, CACHE, TABLES, LENS, **words)


REFUSED = {
    "cascade return_lse": (
        lambda: cascade(return_lse=1),
        "return_lse must be True or False, got 1",
    ),
    "cascade of arrays": (lambda: cascade(return_lse=TWO), "return_lse must be True or False"),
    "exact": (
        lambda: flex.create_block_mask(causal, None, None, 128, 128, exact="no"),
        "create_block_mask: exact must be True or False, got 'no'",
    ),
    "mla causal": (lambda: latents(causal=TWO), "mla_attention: causal must be True or False"),
    "mla return_lse": (lambda: latents(return_lse=1), "return_lse must be True or False, got 1"),
    "mla form": (lambda: latents(form=TWO), "form must be 'explicit', 'absorbed' or None, got arr"),
    "order": (lambda: cuattn.sample(LOGITS, seed=1, order=TWO), "order must be 'top_k_first' or"),
    "mode": (lambda: cuattn.quantize(X, X, X, mode=TWO), "mode must be one of .*, got arr"),
    "kv_layout": (lambda: ragged(kv_layout=TWO), "kv_layout belongs to paged caches .*, got arr"),
    "need of no hash": (lambda: back(need={}), r"need must name one or more of .*, got \{\}"),
    "need of lists": (lambda: back(need=[["dq"]]), "need must name one or more of"),
    "arrays": (
        lambda: cuattn.flex_attention_backward(X, X, X, X, X, LSE, arrays=None),
        r"arrays must be a tuple or list of .*, got NoneType; \(\) is none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_word_or_flag_is_refused_by_name(name):
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
