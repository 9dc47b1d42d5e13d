# SPDX-License-Identifier: Apache-2.0
"""A layer of attention over float8: q, k and v of random projections with a few large channels, as
models have them, quantised and attended to; its error beside that of bfloat16, by choice.
"""

import time

import ml_dtypes
import numpy as np

import cuattn

TOKENS, HEADS, HEADS_KV, DIM = 512, 8, 2, 64
WIDTH = HEADS * DIM


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, TOKENS, WIDTH), np.float32)
    project = lambda heads: (  # noqa: E731
        x @ rng.standard_normal((WIDTH, heads * DIM), np.float32) * WIDTH**-0.5
    ).reshape(1, TOKENS, heads, DIM)
    q, k, v = project(HEADS), project(HEADS_KV), project(HEADS_KV)
    k[..., rng.choice(DIM, 3, replace=False)] += 12.0  # a bias that all keys share

    exact = cuattn.attention(q, k, v, causal=True)  # float32
    bf16 = [array.astype(ml_dtypes.bfloat16) for array in (q, k, v)]

    def report(name: str, out: np.ndarray, seconds: float) -> float:
        error = np.linalg.norm(out.astype(np.float32) - exact) / np.linalg.norm(exact)
        print(f"{name:36} relative error {error:.4f}, {1e3 * seconds:6.1f} ms")
        return float(error)

    begin = time.perf_counter()
    out = cuattn.attention(*bf16, causal=True)
    report("bfloat16", out, time.perf_counter() - begin)

    found = {}
    for name, options in {
        "float8, plain scales": {"hadamard": False, "smooth_k": False},
        "float8, rotated and smoothed": {},
        "float8, blocks, v by channel": {"mode": "block", "v_mode": "channel"},
    }.items():
        begin = time.perf_counter()
        qkv = cuattn.quantize(q, k, v, **options)  # its time counts
        out = qkv.attention(causal=True)
        found[name] = report(name, out, time.perf_counter() - begin)
    assert found["float8, rotated and smoothed"] < found["float8, plain scales"]

    keys = cuattn.dequantize(qkv.k, qkv.k_scale, dtype="float32")  # rotated, less their mean
    print(f"codes of k: {qkv.k.nbytes} bytes, {2 * k.size} in bfloat16; deviation {keys.std():.2f}")


if __name__ == "__main__":
    main()
