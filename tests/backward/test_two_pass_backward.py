# SPDX-License-Identifier: Apache-2.0
"""backend="sm80" and "sm90" of the backward pass: two passes on tensor cores, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
from backward_cases import (
    FACTORS,
    NEED,
    BackwardCase,
    assert_case,
    case_of,
    judge,
    make_problem,
    run,
)
from harness import bits, target_params

DTYPES = ("float16", "bfloat16")
BASE = BackwardCase(dtype="bfloat16", seqlen_q=70, seqlen_kv=90, causal=True, dlse=True)


def targets(*values, **names):
    return target_params(values or ((),), cpu=(), cuda=("sm80", "sm90"), **names)


def rows():
    """Every two options together, of what the two serve."""
    for number, row in enumerate(cases.pairwise(FACTORS)):
        case = case_of(row)
        dtype = DTYPES[number % 2] if case.dtype == "float32" else case.dtype
        yield dataclasses.replace(case, dtype=dtype, dropout=0.0)


CASES = tuple(rows())


@pytest.mark.parametrize(("device", "backend", "number"), targets(*range(len(CASES))))
def test_every_two_options_together(device, backend, number, rng):
    assert_case(device, backend, CASES[number], rng, need=NEED)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 20)},
    "left": {"window": (30, -1)},
    "softcap": {"softcap": 5.0},
    "softcap, window": {"softcap": 2.0, "window": (50, 20)},
    "alibi": {"alibi": "head", "causal": True},
    "alibi, left": {"alibi": "head", "window": (30, -1)},
    "bias": {"bias": "full", "causal": True, "alibi": "head"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("device", "backend", "dim", "dim_v"),
    targets((8, 8), (32, 32), (64, 64), (96, 96), (104, 104), (128, 128), (192, 192), (192, 128),
            (256, 256)),
)  # fmt: skip
def test_head_dims(device, backend, dim, dim_v, mask, dtype, rng):
    """Several tiles of queries and keys, ends that fill none, and a group of heads."""
    case = BackwardCase(
        **{"batch": 1, "num_heads_q": 2, "num_heads_kv": 1, "dtype": dtype},
        **{"head_dim": dim, "head_dim_v": dim_v, "seqlen_q": 135, "seqlen_kv": 150},
        **MASKS[mask],
    )
    assert_case(device, backend, case, rng, need=NEED)


@pytest.mark.parametrize(("device", "backend", "dim"), targets(64, 192))
@pytest.mark.parametrize("need", [("dq",), ("dk",), ("dv",), ("dq", "dv"), ("dk", "dv")])
def test_what_is_not_needed_does_not_change_the_rest(device, backend, dim, need, rng):
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim), rng)
    full = run(device, backend, problem, NEED)
    for name, x in run(device, backend, problem, need).items():
        assert np.array_equal(bits(x), bits(full[name])), name


@pytest.mark.parametrize(("device", "backend", "dim"), targets(40, 64, 256))
def test_float32_sums_of_16_bit_keys(device, backend, dim, rng):
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim), rng)
    rounded = run(device, backend, problem, NEED)
    unrounded = run(device, backend, problem, NEED, dkv_dtype=np.float32)
    judge(problem, unrounded)
    for name in ("dk", "dv"):
        assert unrounded[name].dtype == np.float32
        assert np.array_equal(unrounded[name].astype(rounded[name].dtype), rounded[name])


@pytest.mark.parametrize(("device", "backend"), targets())
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "ragged"])
def test_dead_rows(device, backend, layout, sinks, rng):
    """More queries than keys under a causal mask: the first rows see nothing."""
    case = dataclasses.replace(
        BASE, batch=3, layout=layout, seqlen_q=150, seqlen_kv=40, sinks=sinks
    )
    problem = make_problem(case, rng)
    found = run(device, backend, problem, NEED)
    judge(problem, found)
    dead = problem.arrays["lse"] == -np.inf
    assert sinks or dead.any()
    if layout == "bshd":
        assert (found["dq"].swapaxes(1, 2)[dead] == 0).all()


@pytest.mark.parametrize(("device", "backend"), targets())
def test_what_the_workspace_held(device, backend, rng):
    """NaN in the places of rows that take no part."""
    problem = make_problem(dataclasses.replace(BASE, batch=3, seqused="both", head_dim=64), rng)
    heads, rows = problem.case.num_heads_q, problem.arrays["lse"].size
    size = 8 * (rows + heads * 128 * (problem.case.batch + 3))  # enough for either
    buffer = device.buffer(size + 256)
    at = buffer.data_ptr() if hasattr(buffer, "data_ptr") else buffer.ctypes.data
    start = -at % 256
    workspace = device.view(buffer, np.uint8, start, (size,), (1,))
    judge(problem, run(device, backend, problem, NEED, workspace=workspace))


@pytest.mark.parametrize(("device", "backend"), targets())
def test_our_own_forward_pass(device, backend, rng):
    case = dataclasses.replace(BASE, own_forward=True, softcap=5.0, sinks=True)
    assert_case(device, backend, case, rng, need=NEED)


@pytest.mark.parametrize(("device", "backend"), targets())
def test_a_sequence_alone_and_in_a_batch(device, backend, rng):
    """The same bits in every call."""
    problem = make_problem(dataclasses.replace(BASE, batch=3), rng)
    together = run(device, backend, problem, NEED)
    for b in range(3):
        alone = dataclasses.replace(
            problem,
            forward=dataclasses.replace(
                problem.forward,
                arrays={n: x[b : b + 1] for n, x in problem.forward.arrays.items()},
            ),
            arrays={n: x[b : b + 1] for n, x in problem.arrays.items()},
        )
        for name, x in run(device, backend, alone, NEED).items():
            assert np.array_equal(bits(x), bits(together[name][b : b + 1])), name
