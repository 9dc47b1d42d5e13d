# SPDX-License-Identifier: Apache-2.0
"""Gradients of sequences of up to 128 keys with backend="sm90": the fused kernel has all keys of a
tile of dq in one block, so that it stores dq at once, with the same bits each time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cuattn
from backward_cases import NEED, BackwardCase, assert_case, make_problem, run
from harness import bits, target_params
from made_up_gpus import GPUS

MOST = 128  # keys of a block
ONE_BLOCK = "all keys in one block"
BASE = BackwardCase(
    dtype="bfloat16",
    batch=3,
    num_heads_q=4,
    num_heads_kv=2,
    seqlen_q=MOST,
    seqlen_kv=MOST,
    dlse=True,
)


def on_hopper(*values):
    return target_params(values or ((),), cpu=(), cuda=("sm90",))


def explain(*, batch=64, rows=64, keys=64, heads=12, heads_kv=12, dim=64, **options):
    q, lse = (batch, rows, heads, dim), (batch, heads, rows)
    k = (batch, keys, heads_kv, dim)
    options = {"device": GPUS["H200"], "dtype": "bfloat16", **options}
    return cuattn.explain("attention_backward", q, q, k, k, q, lse, **options)


TAKEN = {
    "a block": {"rows": 128, "keys": 128},
    "a key": {"rows": 1, "keys": 1},
    "words of an image": {"rows": 4096, "keys": 77},
    "causal": {"causal": True},
    "deterministic": {"deterministic": True},
    "groups": {"heads_kv": 3, "dim": 128},
    "96": {"dim": 96},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    "deterministic, dropout": {"dropout_p": 0.1, "dropout_seed": 3, "deterministic": True},
    "bias": {"bias": (1, 12, 64, 64), "dim": 128},
}
LEFT = {
    "a key more": {"keys": 129},
    "no key": {"keys": 0},
    "a window": {"window": (20, 0)},
    "batch_invariant": {"batch_invariant": True},
    "no dq": {"need": ("dk", "dv")},
    "192": {"dim": 192},
    "dropout, 96": {"dim": 96, "dropout_p": 0.1, "dropout_seed": 3},
    "dslopes": {"alibi_slopes": (12,), "need": (*NEED, "dslopes")},
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_plan_takes_one_block(name):
    plan = explain(**TAKEN[name])
    assert plan.kernel == "sm90"
    assert ONE_BLOCK in plan.reason
    # lse and delta of each row, and no sums
    call = {"batch": 64, "rows": 64, "heads": 12, **TAKEN[name]}
    rows = (call["batch"] * call["rows"] // 128 + call["batch"] + 3) * 128
    assert plan.workspace_bytes == 8 * call["heads"] * rows


@pytest.mark.parametrize("name", LEFT)
def test_the_plan_takes_two_passes(name):
    assert ONE_BLOCK not in explain(**LEFT[name]).reason


RAGGED = {"layout": "ragged", "seqlen_kv": MOST - 2}  # its bound may be two more than the longest
CASES = {
    "full": {},
    "causal": {"causal": True},
    "odd": {"seqlen_q": 77, "seqlen_kv": 49},
    "a row": {"seqlen_q": 1, "seqlen_kv": 128},
    "a key": {"seqlen_q": 130, "seqlen_kv": 1},
    "words of an image": {"seqlen_q": 900, "seqlen_kv": 77, "batch": 2},
    "dead rows": {"seqlen_q": 500, "seqlen_kv": 100, "causal": True},
    "late rows": {"seqlen_q": 30, "seqlen_kv": 120, "causal": True},
    "ragged": {**RAGGED, "batch": 9, "causal": True},
    "ragged full": {**RAGGED, "batch": 5, "seqlen_q": 300, "seqused": "k"},
    "used": {"seqused": "both", "batch": 9, "causal": True, "seqlen_q": 200},
    "used full": {"seqused": "q", "batch": 5},
    "bhsd": {"layout": "bhsd", "storage": "padded", "seqlen_q": 111},
    "packed": {"num_heads_kv": 4, "storage": "packed"},
    "strided": {"storage": "transposed"},
    "sinks": {"sinks": True, "scale": 0.25},
    "allocates": {"give_out": False},
    "large": {"magnitude": 8.0},
    "own forward": {"own_forward": True, "seqlen_q": 90},
    "softcap": {"softcap": 5.0, "causal": True, "seqused": "both"},
    "ALiBi": {"alibi": "head", "causal": True, "seqlen_q": 300},
    "dropout": {"dropout": 0.3, "seqlen_q": 190},
    "dropout ragged": {**RAGGED, "dropout": 0.3, "batch": 7, "causal": True},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128, 32, 104))
@pytest.mark.parametrize("name", CASES)
def test_gradients(device, backend, dim, name, dtype, rng):
    case = dataclasses.replace(BASE, head_dim=dim, dtype=dtype, **CASES[name])
    assert_case(device, backend, case, rng, need=NEED)


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 128))
@pytest.mark.parametrize("name", ["causal", "dead rows", "ragged", "dropout"])
def test_repeats(device, backend, dim, name, rng):
    """All gradients have the same bits each time, asked or not."""
    case = dataclasses.replace(BASE, head_dim=dim, **{**CASES[name], "batch": 20})
    problem = make_problem(case, rng)
    first = run(device, backend, problem, NEED)
    for deterministic in (False, True, None) * 5:
        again = run(device, backend, problem, NEED, deterministic=deterministic)
        for gradient, x in again.items():
            assert np.array_equal(bits(x), bits(first[gradient])), gradient
