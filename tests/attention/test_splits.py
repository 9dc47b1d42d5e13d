# SPDX-License-Identifier: Apache-2.0
"""Split keys in the portable kernels: every block of a second axis of the grid takes its part, and
a second kernel merges them. Those of sm90 are in test_splits_sm90.py, but for rows of low biases.
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
DTYPES = {
    "sm90": ("bfloat16", "float16"),
    "sm80": ("float16", "bfloat16"),
    "simt": ("float32", "float32"),
}


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


def mean_of_means(values, tile_n, num_splits):
    """Of float64 values [batch, keys, heads, head_dim]: the mean of the means of the parts."""
    tiles = np.arange(-(-values.shape[1] // tile_n))
    ends = [(part[-1] + 1) * tile_n for part in np.array_split(tiles, num_splits)[:-1]]
    return np.mean([part.mean(1) for part in np.split(values, ends, axis=1)], axis=0)


@pytest.mark.parametrize("num_splits", [2, 3, 5])
@pytest.mark.parametrize("value", [-1e9, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("sm90", "sm80", "simt"))
)
def test_a_row_of_nothing_but_a_low_bias_is_the_mean_of_its_parts_means(
    device, backend, value, num_splits, rng
):
    """The lse of a part is the bias, without room for its number of keys: all weigh the same."""
    case = cases.Case(DTYPES[backend][0], 1, 2, 2, 20, 650, 64, bias="float32")
    problem = cases.make_problem(case, rng)
    arrays = problem.arrays
    arrays["bias"][:, :, 3] = value
    # The last part is the shortest; what its keys weigh shows.
    arrays["v"] += np.linspace(-4, 4, 650).astype(arrays["v"].dtype)[:, None, None]
    plan = plan_of(case, backend=backend, num_splits=num_splits, bias=arrays["bias"].shape)
    assert plan.num_splits == num_splits

    out, lse = harness.run(device, backend, with_options(problem, num_splits=num_splits))
    values = arrays["v"].astype(np.float64)
    expected = mean_of_means(values, plan.tile_n, num_splits)
    atol = 4 * max(cases.EPS[case.dtype], 20 * cases.EPS["float32"])
    assert np.abs(expected - values.mean(1)).min() > 3 * atol
    np.testing.assert_allclose(np.asarray(out, np.float64)[:, 3], expected, atol=atol)
    # Note: CUDA kernels take a score that is no float in base 2 for the lowest that is.
    nearest = max(value, float(np.finfo(np.float32).min) * np.log(2))
    for number in lse[:, :, 3].flat:
        assert np.isclose(number, [value, nearest], rtol=1e-6).any()


@pytest.mark.parametrize("gpu", ["A100", "L4", "B200"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_keys_are_split_where_tiles_are_few(gpu, dtype):
    def plan(queries, keys, batch=1, **options):
        q, kv = (batch, queries, 32, 128), (batch, keys, 8, 128)
        backend = "simt" if dtype == "float32" else "sm80"
        return made_up_gpus.explain(gpu, shape=q, kv=kv, dtype=dtype, backend=backend, **options)

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
