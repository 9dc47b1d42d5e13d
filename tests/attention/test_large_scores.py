# SPDX-License-Identifier: Apache-2.0
"""Scores of any size: on every rung, head size and mask the largest has the weight it should have.

Scores here are small whole numbers times a power of two, so that every product is exact and the
float64 reference, the plain formula and the library see the same ones. No two keys of a row share a
score: what the largest of them weighs does not depend on how parts of the keys are merged.
"""

from __future__ import annotations

import numpy as np
import pytest

import paged_cases
from cases import Case
from harness import assert_by_draws, assert_case, target_params
from paged_cases import PagedCase

EXPONENTS = (5, 24, 27, 40, 115)  # of the step between scores
DIMS = ((64, 64), (40, 40), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
PLAIN_DIMS = ((40, 40), (192, 128))


def spread(rng, shape):
    """Powers of two of both signs: rows whose scores are small lie beside rows whose are large."""
    return rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.integers(-12, 1, shape)


def numbers(rng, count):
    """Distinct whole numbers, at random or so that the maximum is found step by step."""
    values = np.arange(count) - count // 2
    return {0: values, 1: values[::-1]}.get(int(rng.integers(4)), rng.permutation(values))


def with_large_scores(rng, exponent):
    def change(problem):
        arrays, case = problem.arrays, problem.case
        column = int(rng.integers(case.head_dim))
        for name in "qk":
            arrays[name][...] = 0
        q, k = arrays["q"], arrays["k"]
        q[..., column] = spread(rng, q.shape[:-1])
        rows = k[..., column] if case.layout == "bshd" else k[..., column].swapaxes(1, 2)
        for b in range(case.batch):
            for head in range(case.num_heads_kv):
                rows[b, :, head] = numbers(rng, case.seqlen_kv)
        problem.options["scale"] = np.copysign(2.0**exponent, case.scale or 1.0)

    return change


CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "sinks": {"sinks": True},
    "negative": {"scale": -1.0},
}


@pytest.mark.parametrize(
    ("device", "backend", "dims", "dtype", "options"),
    target_params(
        [
            (dims, dtype, options)
            for dims in DIMS
            for dtype in ("float32", "float16", "bfloat16")
            for options in CASES
        ],
        ids=[f"{d}x{v}-{t}-{o}" for d, v in DIMS for t in ("f32", "f16", "bf16") for o in CASES],
    ),
)
def test_attention(device, backend, dims, dtype, options, rng):
    case = Case(
        dtype, 1, 4, 2, 150, 250, dims[0], head_dim_v=dims[1], layout="bhsd", **CASES[options]
    )
    if backend == "tiled" and options == "negative":
        pytest.skip("refused: a scale that is not positive needs score options")
    if device.name == "cpu" and backend == "naive" and dims not in PLAIN_DIMS:
        pytest.skip("the CPU's plain loop has one code for all head sizes")
    for exponent in EXPONENTS:
        assert_case(device, backend, case, rng, with_large_scores(rng, exponent))


@pytest.mark.parametrize(
    ("device", "backend", "dtype"), target_params(["float32", "float16", "bfloat16"])
)
def test_equal_scores_are_a_mean(device, backend, dtype, rng):
    """1e11 everywhere in bfloat16, a case of torch's: an exponent that is one FFMA may be inf."""

    def change(problem):
        for name in "qk":
            problem.arrays[name][...] = 133120 if dtype != "float16" else 65504

    assert_case(device, backend, Case(dtype, 1, 2, 2, 100, 64), rng, change)


def paged_with_large_scores(case, rng, exponent):
    problem = paged_cases.make(case, rng)
    k = problem.caches()[0]
    nhd = paged_cases.reference.unpaged(k, case.kv_layout, True)
    nhd = np.where(np.isnan(nhd.astype(np.float32)), np.nan, 0.0)
    column = int(rng.integers(case.head_dim))
    size = case.block_size
    for b, length in enumerate(case.lens):
        for head in range(case.num_heads_kv):
            values = rng.integers(-7, 8, length)
            if length > 1:  # one largest, one smallest
                values[rng.permutation(length)[:2]] = -8, 8
            for at, value in enumerate(values):
                block = problem.arrays["block_tables"][b, at // size]
                nhd[block, at % size, head, column] = value
    new = paged_cases.paged(nhd.astype(k.dtype), case.kv_layout, True)
    problem.arrays["k_cache"] = new.view(np.uint8) if case.fp8 else new
    q = problem.arrays["q"]
    q[...] = 0
    q[..., column] = spread(rng, q.shape[:-1])
    problem.options["scale"] = 2.0**exponent
    return problem


PAGED = {
    "decode": PagedCase(lens=(37, 1, 0, 130)),
    "bf16": PagedCase("bfloat16", head_dim=128, lens=(700, 64)),
    "d256": PagedCase("bfloat16", head_dim=256, lens=(300,)),
    "long": PagedCase("bfloat16", head_dim=128, lens=(3000,)),
    "invariant": PagedCase(
        "bfloat16", head_dim=128, lens=(900, 30), options=(("batch_invariant", True),)
    ),
    "mha": PagedCase(num_heads_q=2, head_dim=128, lens=(500,)),
    "sixteen": PagedCase(num_heads_q=32, head_dim=64, lens=(500, 20)),
    "many_rows": PagedCase(num_heads_q=32, num_heads_kv=1, head_dim=128, lens=(300, 20)),
    "vllm": PagedCase(kv_layout="vllm", head_dim=128, lens=(300, 20)),
    "fp8": PagedCase(fp8=True, head_dim=128, lens=(300, 20)),
    "fp8_bf16": PagedCase("bfloat16", fp8=True, head_dim=64, lens=(300, 20)),
    "float32": PagedCase("float32", head_dim=128, lens=(300, 20)),
    "sinks": PagedCase("bfloat16", sinks=True, lens=(300, 20)),
}


@pytest.mark.parametrize(
    ("device", "backend", "case"),
    target_params(list(PAGED.values()), ("cpu",), paged_cases.CUDA_BACKENDS, ids=list(PAGED)),
)
def test_paged_attention(device, backend, case, rng):
    for exponent in EXPONENTS:

        def attempt(exponent=exponent):
            problem = paged_with_large_scores(case, rng, exponent)
            paged_cases.judge(problem, *paged_cases.run(device, backend, problem))

        assert_by_draws(case.dtype, attempt)
