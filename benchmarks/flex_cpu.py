# SPDX-License-Identifier: Apache-2.0
"""What masks and scores of a user cost the CPU kernel, in nanoseconds of CPU time a score.

    CUATTN_NUM_THREADS=1 python benchmarks/flex_cpu.py

One thread, float32, one head, 2048 queries and keys; the least of rounds in which all take turns.
The mask programs are asked of every block: a mask that lists skip or see costs less.
"""

import time

import numpy as np

import cuattn
from cuattn import flex

LENGTH, ROUNDS = 2048, 7
ids = np.random.default_rng(0).integers(0, 50, LENGTH).astype(np.int32)
table = np.zeros((1, 2 * 128 + 1), np.float32)
CASES = {
    "attention alone": {},
    "row ranges: documents": {"mask_mod": flex.masks.document(cu_seqlens=[0, 1, LENGTH])},
    "mask: ids of documents": {"mask_mod": lambda b, h, q, k: (ids[q] != ids[k]) | (q == k)},
    "mask: every third": {"mask_mod": lambda b, h, q, k: (q + k) % 3 != 0},
    "score: ALiBi": {"score_mod": flex.scores.alibi(1)},
    "score: softcap": {"score_mod": flex.scores.softcap(20.0)},
    "score: relative bias": {"score_mod": flex.scores.relative_bias(table)},
}


def seconds(call):
    """CPU seconds of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def calls(head_dim):
    """List forward and backward calls by name."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, LENGTH, 1, head_dim), np.float32) for _ in range(3))
    for name, given in CASES.items():
        out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **given)
        arrays = [table] if "relative" in name else []

        def forward(given=given):
            cuattn.flex_attention(q, k, v, **given)

        def backward(given=given, out=out, lse=lse, arrays=arrays):
            cuattn.flex_attention_backward(out, q, k, v, out, lse, arrays=arrays, **given)

        yield name, forward, backward


def main():
    """Print a table for two head sizes."""
    for head_dim in (64, 128):
        each = list(calls(head_dim))
        least = {}
        for _ in range(ROUNDS):
            for name, *both in each:
                for way, call in zip(("forward", "backward"), both, strict=True):
                    took = seconds(call) * 1e9 / LENGTH**2
                    least[name, way] = min(took, least.get((name, way), took))
        print(f"head_dim {head_dim:3d}             forward   more  backward   more")
        for name in CASES:
            ways = [least[name, way] for way in ("forward", "backward")]
            more = [
                x - least["attention alone", w]
                for x, w in zip(ways, ("forward", "backward"), strict=True)
            ]
            print(f"{name:24s} {ways[0]:7.2f} {more[0]:6.2f} {ways[1]:9.2f} {more[1]:6.2f}")


if __name__ == "__main__":
    main()
