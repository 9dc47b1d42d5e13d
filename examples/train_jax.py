# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder in JAX on the manual that Python ships, by cuattn and by jax.nn.

python examples/train_jax.py [steps]
"""

import functools
import statistics
import sys
import time

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    print("skipped: this example needs JAX (pip install jax)")
    sys.exit()

import pydoc_data.topics

import numpy as np

import cuattn.jax

TEXT = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 128, 4


def parameters(rng):
    """Draw the weights; the blocks' are stacked, as lax.scan takes them."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    draw = lambda *shape: 0.08 * rng.standard_normal(shape, np.float32)  # noqa: E731
    blocks = {name: draw(LAYERS, *shape) for name, shape in shapes.items()}
    outer = {"tokens": (256, WIDTH), "places": (LENGTH, WIDTH), "head": (WIDTH, 256)}
    return {name: draw(*shape) for name, shape in outer.items()} | {"blocks": blocks}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(x, w, attend):
    q, k, v = jnp.moveaxis((norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    x = x + attend(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def loss(weights, tokens, attend):
    """Mean cross entropy; jax.checkpoint computes a block again on the way back."""
    x = weights["tokens"][tokens[:, :-1]] + weights["places"]
    layer = jax.checkpoint(functools.partial(block, attend=attend))
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights["blocks"])
    chances = jax.nn.log_softmax(norm(x) @ weights["head"])
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()


@functools.partial(jax.jit, static_argnames="attend")
def step(weights, momenta, tokens, count, attend):
    """Take one step of Adam."""
    value, slopes = jax.value_and_grad(loss)(weights, tokens, attend)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momenta[0], slopes)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, momenta[1], slopes)
    a, b = 1 - 0.9**count, 1 - 0.99**count
    move = lambda w, m, s: w - 3e-3 * (m / a) / (jnp.sqrt(s / b) + 1e-8)  # noqa: E731
    return jax.tree.map(move, weights, first, second), (first, second), value


def train(attend, steps):
    rng = np.random.default_rng(0)
    weights = parameters(rng)
    momenta = (jax.tree.map(np.zeros_like, weights),) * 2
    losses, times = [], []
    for count in range(1, steps + 1):
        starts = rng.integers(len(TEXT) - LENGTH - 1, size=(BATCH, 1))
        tokens = TEXT[starts + np.arange(LENGTH + 1)].astype(np.int32)
        begin = time.perf_counter()
        weights, momenta, value = step(weights, momenta, tokens, float(count), attend)
        losses.append(float(value))
        times.append(time.perf_counter() - begin)
    return losses, 1e3 * statistics.median(times)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
ours, ours_ms = train(cuattn.jax.dot_product_attention, steps)
jaxs, jaxs_ms = train(jax.nn.dot_product_attention, steps)
for count in range(0, steps, max(1, steps // 8)):
    print(f"step {count:4d}  loss {ours[count]:.4f} by cuattn, {jaxs[count]:.4f} by jax.nn")
print(f"{jax.default_backend()}: {ours_ms:.1f} ms a step by cuattn, {jaxs_ms:.1f} by jax.nn")
apart = max(abs(a - b) for a, b in zip(ours, jaxs, strict=True))
print(f"the curves lie {apart:.1e} apart at most")
assert apart < 0.05, "cuattn does not learn as jax.nn does"
assert steps < 40 or ours[-1] < ours[0] - 1, "nothing was learned"
