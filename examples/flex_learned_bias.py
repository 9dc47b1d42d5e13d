# SPDX-License-Identifier: Apache-2.0
"""Learn a relative bias, a table that a score function of flex_attention captures, in NumPy.

Each token is asked for the one three places before it. Nothing in q and k says where that is; the
bias of the distance alone can, and its gradients find it.

    python examples/flex_learned_bias.py
"""

import numpy as np

import cuattn
from cuattn import flex

rng = np.random.default_rng(0)
BATCH, LENGTH, HEADS, DIM, REACH, WANTED = 4, 200, 2, 16, 8, 3

table = np.zeros((HEADS, 2 * REACH + 1), np.float32)  # of distances -8 to 8
bias, causal = flex.scores.relative_bias(table), flex.masks.causal()
losses = []
for _ in range(120):
    q, k, v = (rng.standard_normal((BATCH, LENGTH, HEADS, DIM), np.float32) for _ in range(3))
    q *= 0.1
    call = {"score_mod": bias, "mask_mod": causal}
    out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **call)
    error = out[:, WANTED:] - v[:, :-WANTED]
    losses.append(float(np.mean(error**2)))
    dout = np.zeros_like(out)
    dout[:, WANTED:] = error / (BATCH * LENGTH)
    found = cuattn.flex_attention_backward(
        dout, q, k, v, out, lse, need=("dv",), arrays=[table], **call
    )
    table -= 0.1 * found.darrays[0]  # in place: the function reads it at each call

for step in range(0, 120, 20):
    print(f"step {step:3d}  loss {losses[step]:.3f}")
best = table.argmax(axis=1) - REACH
print(f"the last ten: {np.mean(losses[-10:]):.3f}; each head looks {best.tolist()} tokens back")
assert best.tolist() == [WANTED] * HEADS, "nothing was learned"
