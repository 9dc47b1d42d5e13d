# SPDX-License-Identifier: Apache-2.0
"""Many sequences over one prompt: cascade_attention reads the prompt once, paged_attention for each
sequence. Same results, other times; on a GPU with torch, else on numpy with smaller sizes.
"""

import importlib.util
import time

import numpy as np

import cuattn

HEADS, HEADS_KV, DIM, BLOCK, OWN = 32, 8, 128, 16, 64


def place():
    """A function that puts arrays on the device, one that waits for it, its name, and sizes."""
    if importlib.util.find_spec("torch") and cuattn.info()["cuda"]:
        import torch

        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            return lambda x: torch.from_numpy(x).cuda(), torch.cuda.synchronize, name, 64, 8192
    return np.asarray, lambda: None, "the CPU", 8, 1024


def seconds(call, wait):
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def main() -> None:
    put, wait, where, seqs, prompt = place()
    rng = np.random.default_rng(0)
    shared, own = prompt // BLOCK, OWN // BLOCK
    shape = (shared + seqs * own, BLOCK, HEADS_KV, DIM)
    k, v = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in "kv")
    q = put(rng.standard_normal((seqs, HEADS, DIM), np.float32).astype(np.float16))
    own_blocks = shared + np.arange(seqs * own, dtype=np.int32).reshape(seqs, own)
    all_blocks = np.hstack([np.tile(np.arange(shared, dtype=np.int32), (seqs, 1)), own_blocks])
    prefix = [put(x[:shared].reshape(prompt, HEADS_KV, DIM)) for x in (k, v)]
    pages = [put(x) for x in (k, v, own_blocks, np.full(seqs, OWN, np.int32))]
    all_pages = [*pages[:2], put(all_blocks), put(np.full(seqs, prompt + OWN, np.int32))]

    calls = [
        lambda: cuattn.cascade_attention(q, *prefix, *pages),
        lambda: cuattn.paged_attention(q, *all_pages),
    ]
    error = float(abs(calls[0]() - calls[1]()).max())
    assert error < 2e-3, error
    a, b = (1e3 * min(seconds(call, wait) for _ in range(5)) for call in calls)
    print(f"{seqs} sequences over {prompt} + {OWN} tokens on {where}, differing by {error:.1e}:")
    print(f"cascade_attention {a:.3f} ms, paged_attention {b:.3f} ms: {b / a:.1f} times as fast")


if __name__ == "__main__":
    main()
