# SPDX-License-Identifier: Apache-2.0
"""Split keys in the Hopper kernel, of dense batches and of packed ones. Those of the portable
kernels are in test_splits.py.
"""

from __future__ import annotations

import pytest

import cuattn
from cases import Case, make_problem
from harness import Cuda, has_hopper, judge, run
from split_cases import SPLIT, plan_of, same_bits, tile_of, with_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not has_hopper(), reason="needs a GPU of compute capability 9.0"),
]
CUDA = Cuda()
HALF = ("float16", "bfloat16")


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("dtype", HALF)
def test_any_number_of_splits_is_right_and_gives_the_same_bits_each_time(dtype, name, rng):
    case = Case(dtype, **SPLIT[name])
    problem = make_problem(case, rng)
    whole = run(CUDA, "sm90", with_options(problem, batch_invariant=True))
    judge(problem, *whole)
    for num_splits in (1, 2, 3, 4, 5, 7, 64):
        forced = with_options(problem, num_splits=num_splits)
        result = run(CUDA, "sm90", forced)
        judge(problem, *result)
        for _ in range(3):
            assert same_bits(run(CUDA, "sm90", forced), result)
        if num_splits == 1 and tile_of(case) == tile_of(case, batch_invariant=True):
            assert same_bits(result, whole)


def test_the_planner_splits_as_if_it_were_told_to(rng):
    case = Case("bfloat16", 1, 8, 2, 3, 5000, 128)
    problem = make_problem(case, rng)
    plan = plan_of(case, backend="sm90")
    assert plan.num_splits > 1
    chosen = run(CUDA, "sm90", problem)
    judge(problem, *chosen)
    forced = run(CUDA, "sm90", with_options(problem, num_splits=plan.num_splits))
    assert same_bits(chosen, forced)


def make_packed(torch, lens_q, lens_k, heads, dim, rows=(3, 5)):
    """q, k, v, cu_seqlens_q and cu_seqlens_k; `rows` of q in front of the first and behind the last
    sequence are nobody's."""
    ends = [
        torch.tensor([first, *lens], device="cuda").cumsum(0).int()
        for first, lens in ((rows[0], lens_q), (0, lens_k))
    ]
    counts = (sum(lens_q) + sum(rows), sum(lens_k), sum(lens_k))
    arrays = [
        torch.randn(n, h, dim, device="cuda", dtype=torch.bfloat16)
        for n, h in zip(counts, (heads[0], heads[1], heads[1]), strict=True)
    ]
    return [*arrays, *ends]


@pytest.mark.parametrize("used", [None, (100, 0, 7)])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_split_keys_leave_rows_of_nobody_alone(torch, num_splits, used):
    """Keys of a packed batch are split where its tiles are few; rows that no sequence has stay."""
    lens = (130, 1, 64), (8000, 3, 500)
    arrays = make_packed(torch, *lens, (8, 2), 128)
    options = {"causal": True, "backend": "sm90"}
    if used is not None:
        options["seqused_q"] = torch.tensor(used, device="cuda", dtype=torch.int32)
    plan = cuattn.explain("attention_varlen", *arrays, 130, 8000, **options)
    assert plan.num_splits > 1
    out = torch.full_like(arrays[0], 7.0)
    lse = torch.full((8, out.shape[0]), 7.0, device="cuda")
    keywords = dict(out=out, lse_out=lse, num_splits=num_splits)
    cuattn.attention_varlen(*arrays, 130, 8000, **options, **keywords)
    whole = torch.full_like(out, 7.0)
    cuattn.attention_varlen(*arrays, 130, 8000, **options, num_splits=1, out=whole)
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-3)
    for rows in (slice(0, 3), slice(-5, None)):
        assert (out[rows] == 7).all()
        assert (lse[:, rows] == 7).all()
    assert not (lse[:, 3:-5] == 7).any()


@pytest.mark.parametrize("queries", [65, 200])
@pytest.mark.parametrize("ends", [[0, 2**31 - 1], [-5, 9000], [20000, 3], [8999, 9100]], ids=str)
def test_wrong_lengths_of_split_keys_are_clamped(torch, ends, queries):
    """The sequence whose lengths are right stays right."""
    q, k, v, begins, right = make_packed(torch, [queries] * 3, [9000] * 3, (4, 1), 64, (0, 0))
    wrong = torch.tensor([0, 9000, *ends], device="cuda", dtype=torch.int32)

    lengths = queries, 9000
    plan = cuattn.explain("attention_varlen", q, k, v, begins, wrong, *lengths, backend="sm90")
    assert plan.num_splits > 1

    def call(ends):
        return cuattn.attention_varlen(q, k, v, begins, ends, *lengths, backend="sm90")

    assert torch.equal(call(wrong)[:queries], call(right)[:queries])
