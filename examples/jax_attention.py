# SPDX-License-Identifier: Apache-2.0
"""cuattn inside jax.jit: sliding-window attention, checked against jax.nn.dot_product_attention."""

import sys

import cuattn

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    print("skipped: this example needs JAX (pip install jax)")
    sys.exit()

WINDOW = 64


@jax.jit
def step(q, k, v):
    """One call among other operations of the same compiled function."""
    return jnp.tanh(cuattn.attention(q, k, v, causal=True, window=(WINDOW, 0)))


@jax.jit
def reference(q, k, v):
    return jnp.tanh(
        jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(WINDOW, 0))
    )


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 256, 8, 64))
    k, v = (jax.random.normal(key, (2, 256, 2, 64)) for key in keys[1:])
    eager = cuattn.attention(q, k, v, causal=True, window=(WINDOW, 0))
    assert float(jnp.abs(jnp.tanh(eager) - step(q, k, v)).max()) < 1e-6
    with jax.default_matmul_precision("highest"):
        error = float(jnp.abs(step(q, k, v) - reference(q, k, v)).max())
    assert error < 1e-5, error
    print(f"on {q.device}: eager and jit agree, max difference from jax.nn {error:.1e}")


if __name__ == "__main__":
    main()
