# SPDX-License-Identifier: Apache-2.0
"""Split keys in the portable kernels: every block of a second axis of the grid takes its part, and
a second kernel merges them. Those of sm90 are in test_prefill_sm90.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import cases
import cuattn
import harness
import made_up_gpus
from split_cases import SPLIT, plan_of, with_options

TARGETS = harness.target_params([(name,) for name in SPLIT], cpu=(), cuda=("sm80", "simt"))
DTYPES = {"sm80": ("float16", "bfloat16"), "simt": ("float32", "float32")}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("device", "backend", "name"), TARGETS)
def test_any_number_of_parts_is_right_and_gives_the_same_bits(device, backend, name, number, rng):
    case = cases.Case(DTYPES[backend][number], **SPLIT[name])

    def attempt():
        problem = cases.make_problem(case, rng)
        for num_splits in (1, 2, 3, 7, 64):
            plan = plan_of(case, backend=backend, num_splits=num_splits)
            assert plan.num_splits == max(1, min(num_splits, -(-case.seqlen_kv // plan.tile_n)))
            forced = with_options(problem, num_splits=num_splits)
            result = harness.run(device, backend, forced)
            harness.judge(problem, *result)
            again = harness.run(device, backend, forced)
            for first, second in zip(result, again, strict=True):
                assert np.array_equal(harness.bits(first), harness.bits(second))

    harness.assert_by_draws(case.dtype, attempt)


@pytest.mark.parametrize("gpu", ["A100", "L4", "B200"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_keys_are_split_where_tiles_are_few(gpu, dtype):
    def plan(queries, keys, batch=1, **options):
        q, kv = (batch, queries, 32, 128), (batch, keys, 8, 128)
        return made_up_gpus.explain(gpu, shape=q, kv=kv, dtype=dtype, **options)

    decode = plan(1, 32768)
    assert decode.num_splits > 2
    assert decode.workspace_bytes == 4 * decode.num_splits * 32 * (128 + 1)
    assert plan(1, 32768, num_splits=1).workspace_bytes == 0
    assert plan(1, 32768, batch_invariant=True).num_splits == 1
    assert plan(1, 100).num_splits == 1
    assert plan(1, 32768, window=(127, 0)).num_splits == 1
    assert plan(4096, 4096).num_splits == 1
    assert plan(1, 32768, batch=64).num_splits == 1


def test_row_ranges_and_other_kernels_take_no_parts():
    def plan(gpu="A100", **options):
        shape, kv = (1, 1, 8, 64), (1, 32768, 8, 64)
        return made_up_gpus.explain(gpu, shape=shape, kv=kv, num_splits=5, **options)

    assert plan().num_splits == 5
    for backend in ("tiled", "naive", "cublas"):
        assert plan(backend=backend).num_splits == 1
    ranges = cuattn.explain(
        "flex_attention", *[(1, 512, 8, 64)] * 3, device=made_up_gpus.GPUS["A100"],
        dtype="float16", mask_mod=cuattn.flex.masks.chunked(50), num_splits=5,
    )  # fmt: skip
    assert "row ranges" in ranges.ladder
    assert (ranges.kernel, ranges.num_splits) == ("sm80", 1)
