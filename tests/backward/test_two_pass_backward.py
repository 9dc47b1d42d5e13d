# SPDX-License-Identifier: Apache-2.0
"""backend="sm80", "sm90" and "simt" of the backward pass: two passes, against float64. sm80 and
simt have every option; of sm90 test_option_gradients_backward.py has dbias and dslopes. It takes
two passes where the sums of a sequence must not depend on its batch.
"""

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


def every_option(*values, **names):
    return target_params(values or ((),), cpu=(), cuda=("sm80", "simt"), **names)


def all_targets(*values, **names):
    return target_params(values or ((),), cpu=(), cuda=("sm80", "sm90", "simt"), **names)


def served(backend, case):
    """The case in a dtype that the kernel takes."""
    if backend == "simt":
        return dataclasses.replace(case, dtype="float32")
    dtype = DTYPES[case.seqlen_q % 2] if case.dtype == "float32" else case.dtype
    return dataclasses.replace(case, dtype=dtype)


def two_passes(backend):
    return {"batch_invariant": True} if backend == "sm90" else {}


CASES = tuple(case_of(row) for row in cases.pairwise(FACTORS))


@pytest.mark.parametrize(("device", "backend", "number"), all_targets(*range(len(CASES))))
def test_every_two_options_together(device, backend, number, rng):
    case = served(backend, CASES[number])
    if backend == "sm90":
        is_plain = not case.scored and (case.scale is None or case.scale > 0)
        dropout = case.dropout if is_plain else 0.0
        case = dataclasses.replace(case, dropout=dropout)
        assert_case(device, backend, case, rng, need=NEED)
        assert_case(device, backend, case, rng, need=NEED, **two_passes(backend))
        return
    no_dbias = case.kv_start and case.bias  # of keys after kv_start
    assert_case(device, backend, case, rng, without=("dbias",) if no_dbias else ())


OPTIONS = {
    "dropout": {"dropout": 0.1, "causal": True},
    "dropout_window": {"dropout": 0.5, "window": (50, 20), "sinks": True, "dlse": True},
    "bias": {"bias": "full", "causal": True, "softcap": 5.0},
    "bias_keys": {"bias": "rows", "alibi": "batch", "dropout": 0.2},
    "ragged": {"layout": "ragged", "batch": 3, "alibi": "head", "sinks": True, "causal": True},
    "used": {"seqused": "both", "batch": 3, "alibi": "batch", "bias": "heads", "dropout": 0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("device", "backend", "dim", "dim_v"),
    every_option((32, 32), (64, 64), (104, 104), (128, 128), (192, 128), (256, 256)),
)
def test_options_by_head_dim(device, backend, dim, dim_v, name, rng):
    """Several tiles of queries and keys, ends that fill none, and a group of heads."""
    case = BackwardCase(
        **{"batch": 1, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": dim, "head_dim_v": dim_v},
        **{"dtype": DTYPES[dim // 32 % 2], "seqlen_q": 135, "seqlen_kv": 150},
    )
    assert_case(device, backend, served(backend, dataclasses.replace(case, **OPTIONS[name])), rng)


@pytest.mark.parametrize(("device", "backend"), every_option())
def test_option_gradients_alone_and_again(device, backend, rng):
    """The same bits with and without the other gradients, and in every call."""
    case = BackwardCase(
        seqlen_q=150, seqlen_kv=200, sinks=True, alibi="head", bias="rows", dropout=0.1
    )
    problem = make_problem(served(backend, case), rng)
    full = run(device, backend, problem)
    for need in (("dbias",), ("dsinks",), ("dslopes",), ("dk", "dslopes"), problem.need):
        for name, x in run(device, backend, problem, need).items():
            assert np.array_equal(bits(x), bits(full[name])), name


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
    "dropout": {"dropout": 0.1, "causal": True},
    "dropout, window": {"dropout": 0.6, "window": (50, 20), "dlse": True},
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
    assert_case(device, backend, case, rng, need=NEED, **two_passes(backend))


@pytest.mark.parametrize(("device", "backend", "dim"), targets(64, 192))
@pytest.mark.parametrize("need", [("dq",), ("dk",), ("dv",), ("dq", "dv"), ("dk", "dv")])
def test_what_is_not_needed_does_not_change_the_rest(device, backend, dim, need, rng):
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim), rng)
    full = run(device, backend, problem, NEED, **two_passes(backend))
    for name, x in run(device, backend, problem, need).items():
        assert np.array_equal(bits(x), bits(full[name])), name


@pytest.mark.parametrize(("device", "backend", "dim"), targets(40, 64, 256))
def test_float32_sums_of_16_bit_keys(device, backend, dim, rng):
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim), rng)
    options = two_passes(backend)
    rounded = run(device, backend, problem, NEED, **options)
    unrounded = run(device, backend, problem, NEED, dkv_dtype=np.float32, **options)
    judge(problem, unrounded)
    for name in ("dk", "dv"):
        assert unrounded[name].dtype == np.float32
        assert np.array_equal(unrounded[name].astype(rounded[name].dtype), rounded[name])


@pytest.mark.parametrize(("device", "backend"), all_targets())
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "ragged"])
def test_dead_rows(device, backend, layout, sinks, rng):
    """More queries than keys under a causal mask: the first rows see nothing."""
    case = dataclasses.replace(
        BASE, batch=3, layout=layout, seqlen_q=150, seqlen_kv=40, sinks=sinks
    )
    problem = make_problem(served(backend, case), rng)
    found = run(device, backend, problem, NEED, **two_passes(backend))
    judge(problem, found)
    dead = problem.arrays["lse"] == -np.inf
    assert sinks or dead.any()
    if layout == "bshd":
        assert (found["dq"].swapaxes(1, 2)[dead] == 0).all()


@pytest.mark.parametrize(("device", "backend"), all_targets())
def test_what_the_workspace_held(device, backend, rng):
    """NaN in the places of rows that take no part."""
    problem = make_problem(
        served(backend, dataclasses.replace(BASE, batch=3, seqused="both", head_dim=64)), rng
    )
    heads, rows = problem.case.num_heads_q, problem.arrays["lse"].size
    size = 8 * (rows + heads * 128 * (problem.case.batch + 3))  # enough for either
    buffer = device.buffer(size + 256)
    at = buffer.data_ptr() if hasattr(buffer, "data_ptr") else buffer.ctypes.data
    start = -at % 256
    workspace = device.view(buffer, np.uint8, start, (size,), (1,))
    options = two_passes(backend)
    judge(problem, run(device, backend, problem, NEED, workspace=workspace, **options))


@pytest.mark.parametrize(("device", "backend"), all_targets())
def test_our_own_forward_pass(device, backend, rng):
    case = dataclasses.replace(BASE, own_forward=True, softcap=5.0, sinks=True)
    assert_case(device, backend, served(backend, case), rng, need=NEED, **two_passes(backend))


@pytest.mark.parametrize(("device", "backend"), all_targets())
def test_a_sequence_alone_and_in_a_batch(device, backend, rng):
    """The same bits in every call."""
    problem = make_problem(served(backend, dataclasses.replace(BASE, batch=3)), rng)
    options = two_passes(backend)
    together = run(device, backend, problem, NEED, **options)
    for b in range(3):
        alone = dataclasses.replace(
            problem,
            forward=dataclasses.replace(
                problem.forward,
                arrays={n: x[b : b + 1] for n, x in problem.forward.arrays.items()},
            ),
            arrays={n: x[b : b + 1] for n, x in problem.arrays.items()},
        )
        for name, x in run(device, backend, alone, NEED, **options).items():
            assert np.array_equal(bits(x), bits(together[name][b : b + 1])), name
