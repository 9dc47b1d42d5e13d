# SPDX-License-Identifier: Apache-2.0
"""attention on numbers that are hard: NaN and junk, large and small logits, biases that mask; every
backend against the float64 reference.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cases import (
    DTYPES,
    EPS,
    TENSOR_CORE_BACKENDS,
    Case,
    lowest,
    make_problem,
)
from harness import (
    assert_case,
    run,
    serves,
    target_params,
)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_junk_beyond_the_lengths_has_no_influence(device, backend, dtype, junk, rng):
    case = Case(dtype, 4, 4, 2, 40, 100, 64, seqused="both", causal=True)

    def spoil(problem):
        arrays = problem.arrays
        arrays["seqused_q"][:] = [40, 7, 0, 1]
        arrays["seqused_k"][:] = [63, 0, 100, 1]
        for name, lengths in (("q", "seqused_q"), ("k", "seqused_k"), ("v", "seqused_k")):
            arrays[name] = rng.standard_normal(arrays[name].shape, np.float32).astype(DTYPES[dtype])
            for b, used in enumerate(arrays[lengths]):
                arrays[name][b, used:] = junk

    assert_case(device, backend, case, rng, spoil)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_nan_propagates_to_the_rows_that_see_it(device, backend, dtype, where, rng):
    # A flash kernel may multiply the zero probability of a masked key with its value inside one
    # tile, so for v the causal mask joins only where the backend computes row by row.
    case = Case(dtype, 2, 4, 2, 70, 70, 64, causal=where != "v" or backend == "naive")

    def spoil(problem):
        problem.arrays[where][1, 37, 1, 5] = np.nan

    assert_case(device, backend, case, rng, spoil)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_large_logits(device, backend, dtype, rng):
    """Scores up to 500; many rows, because the rows where two keys compete decide the error."""
    for options in ({}, {"causal": True}, {"bias": "full"}):
        case = Case(dtype, 4, 4, 4, 130, 129, 64, magnitude=10.0, **options)
        assert_case(device, backend, case, rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_scores_near_minus_half_a_million_are_not_taken_for_masked(device, backend, dtype):
    """q.k = -524,288 for every key: equal weights, so the mean of V, exactly."""
    case = Case(dtype, 1, 1, 1, 3, 32, 64, scale=1.0)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    problem = make_problem(case, np.random.default_rng(0))
    problem.arrays["q"][:] = 128
    problem.arrays["k"][:] = -64
    problem.arrays["v"][:] = np.arange(32)[None, :, None, None] % 4
    out, lse = run(device, backend, problem)
    assert (np.asarray(out, np.float32) == 1.5).all()
    np.testing.assert_allclose(lse, -524288 + np.log(32), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_values_near_the_largest_number_stay_finite(device, backend, dtype, rng):
    case = Case(dtype, 1, 2, 2, 20, 200, 64)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    problem = make_problem(case, rng)
    largest = 6e4 if dtype == "float16" else 1e36
    problem.arrays["v"][:] = largest
    out, _ = run(device, backend, problem)
    np.testing.assert_allclose(
        np.asarray(out, np.float64) / float(problem.arrays["v"].flat[0]), 1, atol=2.0**-7
    )


@pytest.mark.parametrize(("device", "backend"), target_params())
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("score", "size"), [(1, 1e16), (-1, 1e-11)])
def test_values_of_any_size_at_either_end_of_a_softcap(device, backend, head_dim, score, size, rng):
    """P may be 2^64 there or 2^-80 (docs/numerics.md)."""
    dtype = "bfloat16" if backend in TENSOR_CORE_BACKENDS else "float32"
    case = Case(dtype, 1, 2, 2, 20, 400, head_dim, softcap=50.0, scale=100.0, give_out=False)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    problem = make_problem(case, rng)
    problem.arrays["q"][:], problem.arrays["k"][:] = score, 1
    problem.arrays["v"][:] = size
    out, _ = run(device, backend, problem)
    np.testing.assert_allclose(
        np.asarray(out, np.float64) / float(problem.arrays["v"].flat[0]), 1, atol=2.0**-7
    )


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_lse_far_below_zero(device, backend, rng):
    case = Case(
        "float16" if backend in TENSOR_CORE_BACKENDS else "float32",
        1,
        2,
        2,
        65,
        66,
        32,
        bias="float32",
    )

    def lower(problem):
        problem.arrays["bias"] -= 120

    assert_case(device, backend, case, rng, lower)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-3, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_scale(device, backend, dtype, scale, rng):
    case = Case(dtype, 4, 4, 2, 70, 80, 32, scale=scale, causal=True)
    if scale <= 0 and backend == "tiled":
        pytest.skip("tiled takes positive scales")
    assert_case(device, backend, case, rng)


@pytest.mark.parametrize("kind", ["minus_infinity", "row_of_false"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_bias_may_mask(device, backend, dtype, kind, rng):
    """Keys with a bias of minus infinity or False are masked; a row of them is an empty row."""
    case = Case(dtype, 2, 2, 2, 40, 70, 32, bias="full" if kind == "minus_infinity" else "bool")

    def mask(problem):
        bias = problem.arrays["bias"]
        off = -np.inf if kind == "minus_infinity" else False
        bias[rng.random(bias.shape) < 0.5] = off
        bias[:, :, 3] = off
        bias[1, 0, :, 64:] = off

    assert_case(device, backend, case, rng, mask)


@pytest.mark.parametrize("kind", ["full", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_the_lowest_finite_bias_masks(device, backend, dtype, kind, rng):
    """Log2 e times it is no float any more; many fill their masks with it."""
    case = Case(dtype, 2, 2, 2, 40, 400, 32, bias=kind)

    def lower(problem):
        bias = problem.arrays["bias"]
        bias[rng.random(bias.shape) < 0.3] = lowest(bias)
        bias[:, :, 3, 100:] = lowest(bias)  # whichever tile comes first
        bias[:, :, 4, :300] = lowest(bias)
        bias[:, :, 5, :] = lowest(bias)
        bias[:, :, 5, 7] = 0

    assert_case(device, backend, case, rng, lower)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_large_biases_beside_sinks(device, backend, dtype, rng):
    """One key that takes all, and rows that leave all to the sink."""
    case = Case(dtype, 2, 2, 2, 20, 400, 32, bias="float32", sinks=True)

    def enlarge(problem):
        bias = problem.arrays["bias"]
        bias[:, :, 3, 11], bias[:, :, 4, 399], bias[:, :, 5, 200] = 1e9, 1e9, 2e38
        bias[:, :, 6:9] = -1e9
        bias[:, :, 8] = lowest(bias)

    assert_case(device, backend, case, rng, enlarge)


@pytest.mark.parametrize("value", [-1e9, -2e38, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_a_row_of_nothing_but_a_low_bias_is_the_mean(device, backend, dtype, value, rng):
    """As float32 adds, every score is the bias."""
    case = Case(dtype, 1, 2, 2, 20, 400, 32, bias="float32")
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this call")
    problem = make_problem(case, rng)
    problem.arrays["bias"][:, :, 3] = value
    # Parts would be weighed by an lse without room for the number of keys (test_splits.py).
    problem = dataclasses.replace(problem, options={**problem.options, "num_splits": 1})
    out, lse = run(device, backend, problem)
    mean = problem.arrays["v"].astype(np.float64).mean(1)
    # 400 additions of float32 in any order lose about the square root of as many roundings.
    atol = max(EPS[dtype], 20 * EPS["float32"])
    np.testing.assert_allclose(np.asarray(out, np.float64)[:, 3], mean, atol=atol)
    # Note: CUDA kernels take a score that is no float in base 2 for the lowest that is.
    nearest = max(value, float(np.finfo(np.float32).min) * np.log(2))
    for number in lse[:, :, 3].flat:
        assert np.isclose(number, value, rtol=1e-6) or np.isclose(number, nearest, rtol=1e-6)
