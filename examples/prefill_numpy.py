# SPDX-License-Identifier: Apache-2.0
"""Prefill a prompt in chunks into a KV cache (numpy), checked against one call and the formula.

Chunked prefill works because the causal mask is aligned bottom right: the queries of a chunk see
every cached key.
"""

import numpy as np

import cuattn

NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM = 8, 2, 64  # grouped queries, as in Llama 3
PROMPT, CHUNK = 300, 128


def plain(q, k, v):
    """softmax(q k^T / sqrt(d)) v, causal, in float64, for q, k, v [seqlen, heads, dim]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


def main() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, PROMPT, NUM_HEADS_Q, HEAD_DIM), np.float32)
    k, v = (rng.standard_normal((1, PROMPT, NUM_HEADS_KV, HEAD_DIM), np.float32) for _ in "kv")

    whole = cuattn.attention(q, k, v, causal=True)

    k_cache, v_cache = (
        np.full_like(x, np.nan) for x in (k, v)
    )  # what is not yet cached must not matter
    chunked = np.empty_like(whole)
    for begin in range(0, PROMPT, CHUNK):
        end = min(begin + CHUNK, PROMPT)
        k_cache[:, begin:end], v_cache[:, begin:end] = k[:, begin:end], v[:, begin:end]
        cuattn.attention(
            np.ascontiguousarray(q[:, begin:end]),
            k_cache[:, :end],
            v_cache[:, :end],
            causal=True,
            out=chunked[:, begin:end],
        )

    expected = plain(q[0], k[0], v[0])
    error = np.abs(whole[0] - expected).max()
    assert error < 1e-5, error
    assert np.abs(chunked - whole).max() < 1e-5
    print(
        f"{PROMPT} tokens at once and in chunks of {CHUNK}: max error {error:.1e} against float64"
    )


if __name__ == "__main__":
    main()
