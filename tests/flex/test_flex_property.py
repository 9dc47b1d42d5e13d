# SPDX-License-Identifier: Apache-2.0
"""Many generated masks and scores at small lengths, against dense float64 of the same functions.

CUATTN_FLEX_CASES=100000 asks for more of them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import cuattn
import flex_cases
from cuattn import flex
from flex_cases import heads_first

CASES = int(os.environ.get("CUATTN_FLEX_CASES", "1000"))


def problem(rng, case):
    """Arrays, a mask, a score function and options; some longer than a block of 64."""
    group, heads_kv = int(rng.choice((1, 2, 4))), int(rng.integers(1, 3))
    batch, heads = int(rng.integers(1, 3)), heads_kv * group
    longest = 200 if case % 25 == 0 else 24
    q_len, kv_len = (int(n) for n in rng.integers(1, longest, 2))
    make = flex_cases.Generator(rng, batch, heads, q_len, kv_len)
    mask = None if case % 5 == 4 else make.mask(case % 4)
    mod = make.score() if case % 3 else None
    dims = ((8, 8), (16, 24), (24, 8))[case % 3]
    shapes = (q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1])
    arrays = [rng.standard_normal((batch, *shape)).astype(np.float32) for shape in shapes]
    options = {}
    if case % 7 == 1:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if case % 7 == 2:
        options["bias"] = rng.standard_normal((heads, 1, kv_len)).astype(np.float32)
    if case % 7 == 3:
        options["softcap"] = 3.0
    return arrays, mask, mod, options


@pytest.mark.parametrize("part", range(2))
def test_generated_functions_equal_the_dense_formula(rng, part):
    for case in range(part, CASES, 2):
        arrays, mask, mod, options = problem(rng, case)
        backend = "naive" if case % 9 == 8 else "auto"
        out, lse = cuattn.flex_attention(
            *arrays, mask_mod=mask, score_mod=mod, backend=backend, return_lse=True, **options
        )
        want = flex_cases.attention(*map(heads_first, arrays), mask=mask, mod=mod, **options)
        text = f"{case}: {mask and flex.trace(mask)}, {mod and flex.trace(mod, True)}, {options}"
        np.testing.assert_allclose(heads_first(out), want[0], atol=5e-5, rtol=5e-5, err_msg=text)
        np.testing.assert_allclose(lse, want[1], atol=1e-4, rtol=1e-5, err_msg=text)


READY = {
    "causal": lambda n: flex.masks.causal(),
    "sliding_window": lambda n: flex.masks.sliding_window(n % 70, n % 9),
    "document": lambda n: flex.masks.document(np.sort(np.arange(500) * n % 7)),
    "document not sorted": lambda n: flex.masks.document(np.arange(500) * n % 5),
    "prefix_lm": lambda n: flex.masks.prefix_lm(n),
    "chunked": lambda n: flex.masks.chunked(1 + n % 90),
    "block_diagonal": lambda n: flex.masks.block_diagonal(1 + n % 90),
    "dilated": lambda n: flex.masks.dilated(1 + n % 5, n - 1),
    "streaming": lambda n: flex.masks.streaming(n % 60, n % 7),
    "tree": lambda n: flex.masks.tree([-1, *(i * n % (i + 1) for i in range(499))]),
}


@pytest.mark.parametrize("name", READY)
def test_blocks_of_ready_masks_are_called_what_they_are(rng, name):
    for _ in range(8):
        mask = READY[name](int(rng.integers(0, 200)))
        q_len, kv_len = (int(n) for n in rng.integers(1, 400, 2))
        if name.startswith("document"):  # numpy's negative indices are others
            q_len = min(q_len, kv_len)
        made = cuattn.create_block_mask(mask, None, None, q_len, kv_len, block_size=64)
        dense = flex_cases.dense_mask(mask, 1, 1, q_len, kv_len)[0, 0]
        for i, row in enumerate(made.states[0, 0]):
            for j, state in enumerate(row):
                block = dense[i * 64 : i * 64 + 64, j * 64 : j * 64 + 64]
                assert state == 1 or block.all() == block.any() == (state == 2), (i, j)
