# SPDX-License-Identifier: Apache-2.0
"""Layouts and documents, drawn."""

from __future__ import annotations

import numpy as np

from cuattn.parallel import Layout


def draw_layout(rng, most=3000):
    kind = rng.choice(["contiguous", "zigzag", "balanced", "levels"])
    seqlen, size = int(rng.integers(0, most)), int(rng.integers(1, 9))
    parts = size * (2 if kind == "zigzag" else 1)
    chunk = None if rng.random() < 0.5 else -(-seqlen // parts) + int(rng.integers(0, 9))
    if kind == "balanced":
        return Layout.balanced(draw_documents(rng, seqlen), size, chunk=int(rng.integers(1, 400)))
    if kind == "levels":
        outer = int(rng.integers(1, 4))
        name = str(rng.choice(["contiguous", "zigzag"]))
        return Layout(name, seqlen, (size, outer))
    return Layout(str(kind), seqlen, size, chunk=chunk)


def draw_documents(rng, seqlen):
    count = int(rng.integers(0, 9)) if seqlen else 0
    cuts = np.sort(rng.integers(0, seqlen + 1, count))
    return np.concatenate([[0], cuts, [seqlen]])
