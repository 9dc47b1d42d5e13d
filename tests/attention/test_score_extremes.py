# SPDX-License-Identifier: Apache-2.0
"""Scales, softcaps and sinks at the ends of float32, on every rung of both ladders."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import harness
import paged_cases
from cases import Case
from paged_cases import PagedCase

INF = np.inf
# With q and k of magnitude 1: all keys alike, the usual, one key alone; either sign.
SCALES = (0.0, 1e-45, 1e-38, 1e-20, -1e-20, -0.125, 1e4, 1e10, -1e10, 1e30, -1e30)
# With q and k that make up for them; the CPU's are in test_numerics_edges.py.
BALANCED = (1e-45, 1e-38, 1e-37, 1e-30, 1e-20, 1e20, 1e30)
SOFTCAPS = (1e-45, 1e-38, 1e-30, 1e-3, 255.0, 257.0, 1e4, 1e6, 1e30)


def rungs(cpu=cases.CPU_BACKENDS, cuda=cases.CUDA_BACKENDS, over_pages=False):
    """Parameters (device, backend, dtype) of all that take the dtype."""
    params = [] if harness.why_no_cuda() is None else [harness.skipped_cuda(None, None, None)]
    for device, backend in harness.targets(cpu=cpu, cuda=cuda):
        for dtype in cases.DTYPES:
            serves = harness.serves(backend, device, Case(dtype))
            if over_pages:
                serves = paged_cases.serves(backend, PagedCase(dtype))
            if not serves:
                continue
            marks = [pytest.mark.gpu] if device.name == "cuda" else []
            name = f"{device}-{backend}-{dtype}"
            params.append(pytest.param(device, backend, dtype, id=name, marks=marks))
    return pytest.mark.parametrize(("device", "backend", "dtype"), params)


RUNGS = rungs()
PAGED_RUNGS = rungs(("cpu",), paged_cases.CUDA_BACKENDS, over_pages=True)


def small_excess(scale, head_dim=64, softcap=INF):
    """Which excess over the limit chance alone may give a draw, with q and k of magnitude 1.

    Where scores are far apart a row has one key, but where two nearly tie the rounding of their
    scores divides it. That one row is then the error of the draw, and the plain error, as large on
    average, may be any fraction of ours; in float16 it is NaN, the scores being infinite. At
    scale 1 one draw in a hundred is beyond the limit, one in a thousand beyond twice it.
    """
    if abs(scale) > 1:
        return INF
    return 64.0 if min(abs(scale) * np.sqrt(head_dim), softcap) > 4 else None


def assert_served(device, backend, case, rng, **options):
    """As assert_case; a rung that refuses the case has its test in test_prefill.py."""
    if backend == "tiled" and case.scale is not None and case.scale <= 0:
        pytest.skip("tiled refuses scales that are not positive")
    if not harness.serves(backend, device, case):
        pytest.skip(f"backend '{backend}' refuses this call")
    if device.name == "cpu" and backend == "naive" and case.head_dim != 64:
        pytest.skip("the CPU's plain loop has one code for all head sizes")
    harness.assert_case(device, backend, case, rng, **options)


@RUNGS
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(device, backend, dtype, scale, head_dim, options, rng):
    case = Case(dtype, 1, 4, 2, 70, 190, head_dim, scale=scale, **options)
    assert_served(device, backend, case, rng, small=small_excess(scale))


@rungs(cpu=())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", BALANCED)
def test_scales_that_q_and_k_make_up_for(device, backend, dtype, scale, causal, rng):
    if dtype == "float16":
        pytest.skip("float16 has no such q and k")
    size = np.sqrt(0.3) * float(np.clip(scale, 1e-36, 1e37)) ** -0.5
    case = Case(dtype, 1, 4, 2, 70, 190, 64, scale=scale, causal=causal, magnitude=size)
    assert_served(device, backend, case, rng)


@rungs(cpu=(), cuda=("naive", "simt", "sm80", "sm90", "auto"))
def test_the_largest_scale(device, backend, dtype, rng):
    """Times log2 e it is no float: a kernel for scores takes it."""
    if dtype == "float16":
        pytest.skip("float16 has no such q and k")
    size = np.sqrt(0.3) * 1e37**-0.5
    case = Case(dtype, 1, 4, 2, 70, 190, 64, scale=3e38, magnitude=size)
    assert_served(device, backend, case, rng)


@RUNGS
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcaps(device, backend, dtype, head_dim, softcap, rng):
    def change(problem):
        problem.arrays["q"][:, 3] = 0  # a score of 0 is 0 under every softcap

    for scale in (0.125, 1.0, -0.125):
        case = Case(dtype, 1, 4, 2, 70, 190, head_dim, scale=scale, softcap=softcap)
        assert_served(device, backend, case, rng, change=change)


@RUNGS
@pytest.mark.parametrize("softcap", [1e-45, 1e-30, 1.0, 1e3])
def test_softcaps_of_large_scores(device, backend, dtype, softcap, rng):
    """All scores are the softcap, or less it."""

    def change(problem):
        q, k = problem.arrays["q"], problem.arrays["k"].astype(np.float64)
        while True:  # of a sum that cancels the sign is anybody's
            rows = q.astype(np.float64).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
            sums = np.abs(np.einsum("bikgd,bjkd->bikgj", rows, k)).min(-1).reshape(q.shape[:3])
            if sums.min() > 1e-3:
                break
            near = sums <= 1e-3
            q[near] = rng.standard_normal((near.sum(), q.shape[3])).astype(q.dtype)
        q[:, 3] = 0

    for scale in (1e10, -1e30):
        case = Case(dtype, 1, 4, 2, 70, 190, 64, scale=scale, softcap=softcap)
        assert_served(device, backend, case, rng, change=change)


@RUNGS
@pytest.mark.parametrize("softcap", [30.0, 50.0, 51.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_scores_at_either_end_of_a_softcap(device, backend, dtype, head_dim, softcap, rng):
    """P is 2^-80 or 2^64 where a kernel takes its reference from a softcap of 50."""

    def change(problem):
        q, k = problem.arrays["q"], problem.arrays["k"]
        k[:, :] = np.abs(k)
        k[:, 40:150] *= -1
        q[:, 4:20] = -1
        q[:, 30:50] = 1

    for options in ({}, {"causal": True}, {"causal": True, "window": (30, -1)}):
        case = Case(dtype, 1, 4, 2, 70, 190, head_dim, scale=5.0, softcap=softcap, **options)
        assert_served(device, backend, case, rng, change=change)


@PAGED_RUNGS
@pytest.mark.parametrize("cut", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", SCALES)
def test_scales_over_pages(device, backend, dtype, scale, head_dim, cut, rng):
    for q_len in (None, 3):
        options = (("scale", scale), *cut.items())
        case = PagedCase(dtype, head_dim=head_dim, q_len=q_len, lens=(700, 33, 0), options=options)
        paged_cases.assert_case(device, backend, case, rng, small=small_excess(scale))


@PAGED_RUNGS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_softcaps_over_pages(device, backend, dtype, softcap, head_dim, rng):
    for scale in (0.125, 1.0, -0.125):
        case = PagedCase(
            dtype,
            head_dim=head_dim,
            lens=(700, 33, 0),
            softcap=softcap,
            options=(("scale", scale),),
        )

        def attempt(case=case):
            problem = paged_cases.make(case, rng)
            problem.arrays["q"][0] = 0
            paged_cases.judge(problem, *paged_cases.run(device, backend, problem))

        small = small_excess(scale, head_dim, softcap)
        harness.assert_by_draws(dtype, attempt, small=small)


# Sinks. Out and lse of each head; a sink beyond what base 2 holds ends at 2.36e38 on CUDA.

SINKS = np.array([INF, 3e38, 2.4e38, -2.4e38, -3e38, -INF], np.float32)


def check_sinks(dtype, result, without, has_keys):
    """`result` and `without` sinks: out with heads last but one, lse with heads second."""
    out, lse = (np.asarray(x, np.float64) for x in result)
    same_out, same_lse = (np.asarray(x, np.float64) for x in without)
    eps = cases.EPS[dtype]
    for head, sink in enumerate(SINKS):
        ours, ours_lse = out[..., head, :], np.moveaxis(lse, 1, 0)[head]
        if sink > 0:
            assert (ours == 0).all(), sink
            assert ((ours_lse >= 2.3e38) & (ours_lse < INF)).all(), sink
        elif has_keys:
            np.testing.assert_allclose(ours, same_out[..., head, :], rtol=0, atol=8 * eps)
            want = np.moveaxis(same_lse, 1, 0)[head]
            np.testing.assert_allclose(ours_lse, want, rtol=1e-5, atol=1e-5)
        else:
            assert (ours == 0).all(), sink
            low = ours_lse == -INF if sink == -INF else (ours_lse <= -2.3e38) & (ours_lse > -INF)
            assert low.all(), sink


@RUNGS
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}], ids=str)
@pytest.mark.parametrize("keys", [0, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks(device, backend, dtype, head_dim, keys, options, rng):
    """A sink of +inf, or one that outweighs all keys: out is 0; one far below changes nothing."""
    case = Case(dtype, 2, len(SINKS), 2, 40, keys, head_dim, sinks=True, **options)
    if not harness.serves(backend, device, case):
        pytest.skip(f"backend '{backend}' refuses this call")
    problem = cases.make_problem(case, rng)
    problem.arrays["sinks"] = SINKS
    result = harness.run(device, backend, problem)
    del problem.arrays["sinks"]
    check_sinks(dtype, result, harness.run(device, backend, problem), keys > 0)


@PAGED_RUNGS
@pytest.mark.parametrize("cut", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("keys", [0, 700])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks_over_pages(device, backend, dtype, head_dim, keys, cut, rng):
    case = PagedCase(
        dtype,
        head_dim=head_dim,
        num_heads_q=len(SINKS),
        lens=(keys, keys),
        sinks=True,
        options=tuple(cut.items()),
    )
    problem = paged_cases.make(case, rng)
    problem.arrays["sinks"] = SINKS
    result = paged_cases.run(device, backend, problem)
    bare = dataclasses.replace(problem, arrays={**problem.arrays})
    del bare.arrays["sinks"]
    check_sinks(dtype, result, paged_cases.run(device, backend, bare), keys > 0)


@RUNGS
def test_a_sink_that_is_nan_reaches_out_and_lse(device, backend, dtype, rng):
    case = Case(dtype, 1, 2, 2, 40, 100, 64, sinks=True)
    if not harness.serves(backend, device, case):
        pytest.skip(f"backend '{backend}' refuses this call")
    problem = cases.make_problem(case, rng)
    problem.arrays["sinks"] = np.array([np.nan, 0.0], np.float32)
    out, lse = (np.asarray(x, np.float64) for x in harness.run(device, backend, problem))
    assert np.isnan(out[:, :, 0]).all()
    assert np.isnan(lse[:, 0]).all()
    assert np.isfinite(out[:, :, 1]).all()
    assert np.isfinite(lse[:, 1]).all()
