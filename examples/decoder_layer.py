# SPDX-License-Identifier: Apache-2.0
"""A decoder layer token by token over a paged cache (numpy): norms, rotary embedding, a gated
feed-forward part and sampling around attention; checked against the layer over all tokens at once.
"""

import numpy as np

import cuattn

HIDDEN, HEADS, HEADS_KV, DIM, VOCABULARY, BLOCK, SEQUENCES, STEPS = 64, 4, 2, 16, 100, 8, 3, 20
RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))


EMBED, W_HEAD = weight(VOCABULARY, HIDDEN), 3 * weight(HIDDEN, VOCABULARY)
W_QKV = weight(HIDDEN, (HEADS + 2 * HEADS_KV) * DIM)
W_OUT, W_UP, W_DOWN = weight(HEADS * DIM, HIDDEN), weight(HIDDEN, 256), weight(128, HIDDEN)
ONES = np.ones(HIDDEN, np.float32)
ROPE = cuattn.rope_table(STEPS, DIM, theta=10000.0)


def layer(tokens: np.ndarray, attend) -> np.ndarray:
    """Logits of the next token at each of tokens [..., n]."""
    hidden = EMBED[tokens]
    qkv = cuattn.rms_norm(hidden, ONES) @ W_QKV
    heads = qkv.reshape(*tokens.shape, HEADS + 2 * HEADS_KV, DIM)
    q, k, v = np.split(heads, [HEADS, HEADS + HEADS_KV], axis=-2)
    out = attend(q, k, v).reshape(*tokens.shape, HEADS * DIM) @ W_OUT
    normed, hidden = cuattn.rms_norm(out, ONES, residual=hidden)  # hidden += out
    hidden = hidden + cuattn.act_mul(normed @ W_UP, act="silu") @ W_DOWN
    return cuattn.rms_norm(hidden, ONES) @ W_HEAD


def main() -> None:
    blocks = -(-STEPS // BLOCK)
    caches = np.zeros((2, SEQUENCES * blocks, BLOCK, HEADS_KV, DIM), np.float32)
    tables = RNG.permutation(SEQUENCES * blocks).reshape(SEQUENCES, blocks).astype(np.int32)
    seeds = np.arange(SEQUENCES) + 42  # of each request its own
    tokens, logits = np.zeros((SEQUENCES, STEPS), np.int32), []
    for step in range(STEPS):
        lens = np.full(SEQUENCES, step + 1, np.int32)
        logits.append(
            layer(tokens[:, step], lambda q, k, v, lens=lens: cuattn.append_attention(
                q, k, v, *caches, tables, lens, rope=ROPE))
        )  # fmt: skip
        drawn = cuattn.sample(logits[-1], seed=seeds, offset=step, temperature=0.9, top_p=0.95)
        tokens[:, step + 1 :] = drawn[:, None]
    whole = layer(tokens, lambda q, k, v: cuattn.rope_attention(q, k, v, *ROPE, causal=True))
    error = np.abs(np.stack(logits, 1) - whole).max() / np.abs(whole).max()
    print(f"{SEQUENCES} sequences of {STEPS} tokens; sequence 0: {tokens[0].tolist()}")
    print(f"step by step and all at once differ by {error:.1e} of the largest logit")
    assert error < 1e-5


if __name__ == "__main__":
    main()
