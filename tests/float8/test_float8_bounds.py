# SPDX-License-Identifier: Apache-2.0
"""The bounds for products in float8, against a model of what the tensor cores keep: they hold for
it, and neither for one that keeps four bits less nor for one level of sums where two are due. No
GPU.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import float8_cases
import float8_model

ROWS = [row for row in float8_cases.sm90_rows() if row["layout"] != "ragged"]


def test_the_model_keeps_them(rng):
    for row in rng.permutation(len(ROWS))[:40]:
        chosen = dict(ROWS[row])
        kind, accumulate = chosen.pop("scales"), chosen.pop("accumulate")
        case = dataclasses.replace(cases.case_of(chosen), dtype="float32")
        if not 0 < case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_kv < 20_000:
            continue
        given, numbers = float8_cases.make(case, kind, rng, accumulate=accumulate)
        out, lse = float8_model.attention(given, numbers)
        float8_cases.judge_products(case, numbers, out, lse, accumulate)


MANY = cases.Case(
    batch=1, seqlen_q=24, seqlen_kv=4099, head_dim=64, num_heads_q=2, num_heads_kv=1
)  # fmt: skip


@pytest.mark.parametrize("accumulate", ["exact", "fast"])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 4.0])
def test_the_model_keeps_them_over_many_keys(magnitude, accumulate, rng):
    case = dataclasses.replace(MANY, magnitude=magnitude)
    given, numbers = float8_cases.make(case, "head", rng, accumulate=accumulate)
    out, lse = float8_model.attention(given, numbers)
    float8_cases.judge_products(case, numbers, out, lse, accumulate)


@pytest.mark.parametrize("accumulate", ["exact", "fast"])
def test_four_bits_less_do_not(accumulate, rng):
    case = cases.Case(seqlen_q=64, seqlen_kv=64, head_dim=128, magnitude=4.0, batch=1)
    given, numbers = float8_cases.make(case, "head", rng, accumulate=accumulate)
    out, lse = float8_model.attention(given, numbers, bits=float8_model.BITS - 4)
    with pytest.raises(AssertionError, match="off by"):
        float8_cases.judge_products(case, numbers, out, lse, accumulate)


@pytest.mark.parametrize("accumulate", ["exact", "fast"])
def test_one_level_does_not_keep_those_of_two_where_values_have_a_mean(accumulate, rng):
    case = dataclasses.replace(MANY, magnitude=0.0)
    given, numbers = float8_cases.make(case, "head", rng, accumulate=accumulate)
    for problem in (given, numbers):
        problem.arrays["v"] = np.abs(problem.arrays["v"])
    judged = (case, numbers, *float8_model.attention(given, numbers))
    if accumulate == "exact":
        return float8_cases.judge_products(*judged)
    with pytest.raises(AssertionError, match="out off by"):
        float8_cases.judge_products(*judged)
