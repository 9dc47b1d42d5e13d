# SPDX-License-Identifier: Apache-2.0
"""Sequences of up to 2^31 - 1024 keys, the most there may be, without memory for them: all keys are
one row that is broadcast, and a window keeps the work small.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn

MOST = 2**31 - 1024
REASON = "(2^31 - 1024, so that the end of the last tile is an int32)"
WAY_OUT = "; split the call, for keys with merge_states"
F32, I32 = np.float32, np.int32


def keys(count, heads=1):
    """Keys of which only the last few are looked at: one row, as often as it takes."""
    row = np.arange(8, dtype=F32) / 8
    return np.broadcast_to(row, (1, count, heads, 8))


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("count", [MOST - 200, MOST - 127, MOST - 1, MOST])
def test_the_last_keys_of_the_longest_sequences(count, queries, heads):
    k = keys(count)
    q = np.ones((1, queries, heads, 8), F32)
    for window in ((0, 0), (5, -1), (100, 3)):
        out, lse = cuattn.attention(q, k, k, window=window, scale=1.0, return_lse=True)
        assert np.allclose(out, k[0, 0], rtol=1e-6)
        first = np.arange(count - queries - window[0], count - window[0])
        last = np.arange(count - queries, count) + (window[1] if window[1] >= 0 else count)
        seen = np.minimum(last, count - 1) - np.maximum(first, 0) + 1
        score = float(np.arange(8).sum() / 8)
        assert np.allclose(lse, score + np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("count", [MOST - 127, MOST])
def test_slopes_and_bias_at_the_last_keys(count):
    """Distances are counted from the end; a row in use is not the last one stored."""
    k = keys(count)
    q = np.ones((1, 3, 1, 8), F32)
    out, lse = cuattn.attention(
        q, k, k, window=(2, 0), alibi_slopes=np.array([0.5], F32), scale=0.0, return_lse=True
    )
    want = np.log(np.exp(-0.5 * np.arange(3)).sum())
    assert np.allclose(lse, want, rtol=1e-6)
    used = np.array([1], I32)
    out, lse = cuattn.attention(
        q, k, k, window=(2, 0), alibi_slopes=np.array([0.5], F32), scale=0.0, return_lse=True,
        seqused_q=used,
    )  # fmt: skip
    assert np.allclose(lse[0, 0], [want, -np.inf, -np.inf], rtol=1e-6)
    assert not out[0, 1:].any()


@pytest.mark.parametrize("length", [MOST - 127, MOST])
def test_the_last_tokens_of_the_longest_contexts(length):
    """A table of 33 MB names one block of 256 tokens over and over."""
    cache = np.broadcast_to(keys(1)[0], (1, 256, 1, 8)).copy()
    tables = np.zeros((1, MOST // 256), I32)
    lens = np.array([length], I32)
    q = np.ones((1, 2, 1, 8), F32)
    for window in ((0, 0), (300, -1)):
        for options in ({}, {"num_splits": 7}):
            out, lse = cuattn.paged_attention(
                q, cache, cache, tables, lens, window=window, scale=1.0, return_lse=True, **options
            )
            assert np.allclose(out, cache[0, 0], rtol=1e-6)
            assert np.allclose(lse, 3.5 + np.log(window[0] + 1), rtol=1e-6)


@pytest.mark.parametrize("count", [MOST + 1, 2**31 - 128, 2**31 - 1, 2**31, 2**40])
def test_longer_sequences_are_refused(count):
    q, k = np.ones((1, 1, 1, 8), F32), keys(count)
    many = np.broadcast_to(q, (1, count, 1, 8))
    rule = f"from 0 to {MOST} {REASON}, got {count}{WAY_OUT}"
    calls = {
        "attention: k must have seqlen_kv": lambda: cuattn.attention(q, k, k, window=(0, 0)),
        "attention: q must have seqlen_q": lambda: cuattn.attention(many, q, q),
        "attention_varlen: k must have max_seqlen_k": lambda: cuattn.attention_varlen(
            q[0], k[0], k[0], *[np.zeros(2, I32)] * 2, 1, count
        ),
        "paged_attention: q must have q_len": lambda: cuattn.paged_attention(
            many, q, q, np.zeros((1, 1), I32), np.zeros(1, I32)
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match="must have") as caught:
            call()
        assert str(caught.value) == f"{message} {rule}"


def test_a_table_that_names_more_tokens_is_refused():
    cache, tables = np.ones((1, 256, 1, 8), F32), np.zeros((1, 2**23), I32)
    with pytest.raises(ValueError, match="block_tables must have") as caught:
        cuattn.paged_attention(np.ones((1, 1, 8), F32), cache, cache, tables, np.zeros(1, I32))
    assert str(caught.value) == (
        "paged_attention: block_tables must have max_blocks_per_seq * block_size from 0 to "
        f"{MOST} {REASON}, got {2**31}{WAY_OUT}"
    )


def test_a_generous_bound_of_few_rows_is_no_length():
    """max_seqlen is cut to the rows that there are."""
    q, ends = np.ones((3, 1, 8), F32), np.array([0, 3], I32)
    out = cuattn.attention_varlen(q, q, q, ends, ends, 2**31 - 1, 2**40)
    assert np.allclose(out, 1)
