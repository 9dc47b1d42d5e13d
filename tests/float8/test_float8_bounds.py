# SPDX-License-Identifier: Apache-2.0
"""The bounds for products in float8, against a model of what the tensor cores keep: they hold for
it, and not for one that keeps four bits less. No GPU.
"""

from __future__ import annotations

import dataclasses

import pytest

import cases
import float8_cases
import float8_model

ROWS = [row for row in cases.pairwise(float8_cases.SM90_FACTORS) if row["layout"] != "ragged"]


def test_the_model_keeps_them(rng):
    for row in rng.permutation(len(ROWS))[:40]:
        chosen = dict(ROWS[row])
        kind = chosen.pop("scales")
        case = dataclasses.replace(cases.case_of(chosen), dtype="float32")
        if not 0 < case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_kv < 20_000:
            continue
        given, numbers = float8_cases.make(case, kind, rng)
        out, lse = float8_model.attention(given, numbers)
        float8_cases.judge_products(case, numbers, out, lse)


def test_four_bits_less_do_not(rng):
    case = cases.Case(seqlen_q=64, seqlen_kv=64, head_dim=128, magnitude=4.0, batch=1)
    given, numbers = float8_cases.make(case, "head", rng)
    out, lse = float8_model.attention(given, numbers, bits=float8_model.BITS - 4)
    with pytest.raises(AssertionError, match="off by"):
        float8_cases.judge_products(case, numbers, out, lse)
