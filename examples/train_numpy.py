# SPDX-License-Identifier: Apache-2.0
"""Train one layer of attention in NumPy: what a framework's autograd does around cuattn, by hand.

The layer learns to copy: it reads 16 random letters twice, and from the second time on it can look
up what followed each letter the first time.
"""

import numpy as np

import cuattn

rng = np.random.default_rng(0)
LETTERS, WIDTH, HEADS, LENGTH = 32, 64, 4, 16


def softmax_loss(logits, wanted):
    """The mean loss, and its gradient by the logits."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    loss = -np.log(np.take_along_axis(p, wanted[..., None], -1)).mean()
    np.put_along_axis(p, wanted[..., None], np.take_along_axis(p, wanted[..., None], -1) - 1, -1)
    return loss, (p / wanted.size).astype(np.float32)


def normal(*shape):
    return (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)


letters = normal(LETTERS, 2 * WIDTH)  # of a token and of the one before it: what, and behind what
weights = {"q": normal(2 * WIDTH, WIDTH), "k": normal(2 * WIDTH, WIDTH),
           "v": normal(2 * WIDTH, WIDTH), "out": normal(WIDTH, LETTERS)}  # fmt: skip
sums = {name: np.zeros_like(w) for name, w in weights.items()}
losses = []
for _ in range(150):
    half = np.stack([rng.permutation(LETTERS)[:LENGTH] for _ in range(32)])
    tokens = np.concatenate([half, half], axis=1)
    x = letters[tokens]
    x[:, 1:, WIDTH:], x[:, 0, WIDTH:] = letters[tokens[:, :-1], WIDTH:], 0
    q, k, v = ((x @ weights[n]).reshape(32, -1, HEADS, WIDTH // HEADS) for n in "qkv")
    out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
    rows = out.reshape(32, -1, WIDTH)[:, LENGTH:-1]  # the second time
    loss, dlogits = softmax_loss(rows @ weights["out"], tokens[:, LENGTH + 1 :])
    losses.append(loss)

    dout = np.zeros_like(out)
    dout.reshape(32, -1, WIDTH)[:, LENGTH:-1] = dlogits @ weights["out"].T
    gradients = {"out": np.einsum("bsi,bsj->ij", rows, dlogits)}
    dqkv = cuattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for n, d in zip("qkv", dqkv, strict=True):
        gradients[n] = np.einsum("bsi,bsj->ij", x, d.reshape(32, -1, WIDTH))
    for n, g in gradients.items():
        sums[n] = 0.95 * sums[n] + 0.05 * g * g
        weights[n] -= 0.01 * g / (np.sqrt(sums[n]) + 1e-6)
for step in range(0, 150, 25):
    print(f"step {step:3d}  loss {losses[step]:.3f}")
print(f"the last ten: {np.mean(losses[-10:]):.3f}")
assert np.mean(losses[-10:]) < 0.5 * losses[0], "nothing was learned"
