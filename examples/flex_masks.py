# SPDX-License-Identifier: Apache-2.0
"""Ten masks of the field, each checked against a dense one and drawn by blocks of 64 x 64 scores.

    python examples/flex_masks.py

'#' is seen whole, '+' in part, '.' skipped.
"""

from typing import Any

import numpy as np

import cuattn
from cuattn.flex import masks

LENGTH = 512
IDS = np.repeat([0, 1, 2, 3], [100, 250, 12, 150])
SHUFFLED = np.arange(LENGTH) % 4


def checkerboard(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 64 + kv_idx // 64) % 2 == 0


def shuffled_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (SHUFFLED[q_idx] == SHUFFLED[kv_idx]) & (kv_idx <= q_idx)


MASKS = {
    "causal": masks.causal(),
    "a window of 100 keys": masks.sliding_window(100),
    "documents in one sequence": masks.and_masks(masks.document(IDS), masks.causal()),
    "a prefix that all see": masks.prefix_lm(150),
    "chunks of 128": masks.chunked(128),
    "every fourth key": masks.dilated(4, 256),
    "first tokens and a window": masks.streaming(100, sinks=4),
    "a tree of guesses": masks.tree(np.maximum(np.arange(LENGTH) - 3, -1)),
    "documents, tokens mixed": shuffled_documents,
    "a checkerboard of blocks": checkerboard,
}


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, 2, 64)).astype(np.float32) for _ in range(3))
    row, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    for name, mask in MASKS.items():
        out = cuattn.flex_attention(q, k, v, mask_mod=mask)
        dense = masks.with_lengths(mask)(0, 0, row, key, LENGTH, LENGTH)
        error = np.abs(out - cuattn.attention(q, k, v, bias=dense, backend="naive")).max()
        assert error < 1e-5, (name, error)
        blocks = cuattn.create_block_mask(mask, None, None, LENGTH, LENGTH, block_size=64)
        print(f"{name}: {100 * blocks.sparsity():.0f} % of the blocks skipped, error {error:.0e}")
        print("\n".join(f"    {line}" for line in blocks.rows()))


if __name__ == "__main__":
    main()
