# SPDX-License-Identifier: Apache-2.0
"""Where numbers end: values that a row does not see hold NaN or infinity, scales and softcaps at
the edges of float32.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import paged_cases
from cases import DTYPES, Case, make_problem
from harness import Cpu, assert_by_draws, assert_case, judge, run, target_params
from paged_cases import E4M3, PagedCase

# The rungs that keep a row apart from values it does not see, even where a neighbour in its tile
# sees them: the third row of the table in docs/numerics.md.
APART = {"cpu": ("cpu", "naive"), "cuda": ("naive",)}
APART_PAGED = {"cpu": ("auto",), "cuda": ("simt",)}

# Keys hidden from some rows of a tile and seen by others, in every way there is.
HIDDEN = {
    "causal": {"causal": True},
    "left": {"window": (9, -1)},
    "right": {"window": (-1, 3)},
    "window": {"causal": True, "window": (20, -1)},
    "itself": {"window": (0, 0)},
    "scored": {"causal": True, "softcap": 2.0, "alibi": "head"},
    "bias": {"bias": "bool"},
    "negative_scale": {"causal": True, "scale": -0.3},
}
# Rows of a kv head: in one vector or less, as in decoding; some vectors; several units.
ROWS = {"one": (1, 4), "few": (2, 2), "some": (7, 2), "many": (150, 2)}
JUNK = (np.nan, np.inf, -np.inf)


def spoil_values(v, rng, junk):
    """One value row in twenty gets junk in one of its columns: most results stay finite."""
    rows = v.reshape(-1, v.shape[-1])
    for row in rng.choice(len(rows), max(len(rows) // 20, 1), replace=False):
        rows[row, rng.integers(v.shape[-1])] = rng.choice(junk)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(
    ("device", "backend", "dtype", "head_dim"),
    target_params(
        [
            *(("float32", head_dim) for head_dim in (8, 40, 128, 256)),
            ("float16", 96),
            ("bfloat16", 192),
        ],
        cpu=APART["cpu"],
        cuda=APART["cuda"],
    ),
)
def test_values_that_other_rows_see_have_no_influence(
    device, backend, dtype, head_dim, hidden, rows, rng
):
    queries, group = ROWS[rows]
    options = HIDDEN[hidden]
    case = Case(dtype, 1, 2 * group, 2, queries, 170, head_dim, **options)
    if rows == "one" and hidden not in ("bias", "left", "itself", "window"):
        case = dataclasses.replace(case, seqlen_q=4)  # some key must be hidden

    def spoil(problem):
        spoil_values(problem.arrays["v"], rng, JUNK)

    assert_case(device, backend, case, rng, spoil)


@pytest.mark.parametrize("layout", ["ragged", "bhsd"])
@pytest.mark.parametrize("hidden", ["causal", "window", "bias"])
@pytest.mark.parametrize(("device", "backend"), target_params(cpu=APART["cpu"], cuda=APART["cuda"]))
def test_values_of_other_rows_in_other_layouts(device, backend, hidden, layout, rng):
    case = Case("float32", 3, 4, 2, 40, 140, 64, layout=layout, **HIDDEN[hidden])
    assert_case(
        device, backend, case, rng, lambda problem: spoil_values(problem.arrays["v"], rng, JUNK)
    )


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("options", [{}, {"window": (40, -1)}, {"causal": False, "window": (5, 2)}])
@pytest.mark.parametrize("queries", [(2, 4), (5, 8), (33, 2)], ids=str)
@pytest.mark.parametrize(
    ("device", "backend", "dtype", "fp8", "head_dim"),
    target_params(
        [
            ("float32", False, 8),
            ("float32", False, 64),
            ("float32", False, 256),
            ("float16", False, 128),
            ("bfloat16", True, 96),
        ],
        cpu=APART_PAGED["cpu"],
        cuda=APART_PAGED["cuda"],
    ),
)
def test_values_that_other_queries_see_over_pages(
    device, backend, dtype, fp8, head_dim, queries, options, kv_layout, rng
):
    """Also across chunks of 512 keys and splits; float8 has a NaN, but no infinity."""
    q_len, group = queries
    for more in ((), (("num_splits", 3),)):
        case = PagedCase(
            dtype=dtype,
            fp8=fp8,
            kv_layout=kv_layout,
            head_dim=head_dim,
            num_heads_q=2 * group,
            num_heads_kv=2,
            q_len=q_len,
            lens=(q_len, 77, 530),
            options=more,
            **options,
        )
        problem = paged_cases.make(case, rng)
        v = problem.arrays["v_cache"]
        as_float = v.view(E4M3) if fp8 else v
        slots = {"nhd": (0, 1, 2), "hnd": (0, 2, 1), "vllm": (0, 3, 1)}[kv_layout]
        order = np.moveaxis(as_float, slots, (0, 1, 2))  # [blocks, tokens, heads, dim], a view
        junk = (np.nan,) if fp8 else JUNK
        for b, length in enumerate(case.lens):
            last = range(max(length - q_len - 3, 0), length)
            for token in rng.choice(last, min(len(last), 3), replace=False):
                block = problem.arrays["block_tables"][b, token // case.block_size]
                row = order[block, token % case.block_size, rng.integers(2)]
                row[rng.integers(head_dim)] = rng.choice(junk)
        paged_cases.judge(problem, *paged_cases.run(device, backend, problem))


# Scales with which scores are ordinary, because q and k make up for them.
SCALES = (1e-45, 1e-40, 1e-37, 3e-37, 1e-36, 1e-20, 1e30, 2e38, 3e38)
SOFTCAPS = (0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("device", "backend"), target_params(cuda=()))
def test_scales_at_the_edges_of_float32(device, backend, scale, sign, rows, rng):
    queries, group = ROWS[rows]
    size = np.sqrt(0.3) * max(scale, 1e-36) ** -0.5
    options = {"scale": sign * scale, "magnitude": size}
    for more in ({}, {"causal": True}, {"softcap": 1.5}, {"bias": "full"}, {"sinks": True}):
        case = Case("float32", 1, 2 * group, 2, queries, 170, 64, **options, **more)
        assert_case(device, backend, case, rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-37, 3e-37, 1e-30])
@pytest.mark.parametrize(("device", "backend"), target_params(cuda=()))
def test_scales_that_make_all_keys_equal(device, backend, scale, dtype, rng):
    """Ordinary q and k: the mean of the values that a row sees, for either sign."""
    for sign, (queries, group) in itertools.product((1, -1), ROWS.values()):
        case = Case(dtype, 1, 2 * group, 2, queries, 170, 64, scale=sign * scale, causal=True)
        assert_case(device, backend, case, rng)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, -1e-37, 0.125, 1e10])
@pytest.mark.parametrize(("device", "backend"), target_params(cuda=()))
def test_softcaps_at_the_edges_of_float32(device, backend, scale, softcap, rng):
    for queries, group in ROWS.values():
        case = Case("float32", 1, 2 * group, 2, queries, 170, 64, scale=scale, softcap=softcap)

        def attempt(case=case):
            problem = make_problem(case, rng)
            problem.arrays["q"][:, 0] = 0  # a score of 0 is 0 under every softcap
            judge(problem, *run(device, backend, problem))

        # Of large scores two may nearly tie: see small_excess() in test_score_extremes.py.
        assert_by_draws("float32", attempt, np.inf if scale > 1 else None)


def test_both_backends_of_the_cpu_agree_on_infinite_keys(rng):
    """A key whose score is -inf has no weight, whatever the scale."""
    for scale in (1e-45, 1e-37, 0.125, 1e30):
        case = Case("float32", 1, 2, 2, 30, 60, 16, scale=scale)
        problem = make_problem(case, rng)
        problem.arrays["q"][:] = np.abs(problem.arrays["q"])
        problem.arrays["k"][0, 3] = -np.inf
        for backend in ("cpu", "naive"):
            out, lse = run(Cpu(), backend, problem)
            assert np.isfinite(out).all()
            assert np.isfinite(lse).all()
        judge(problem, out, lse)
