# SPDX-License-Identifier: Apache-2.0
"""kv_start, the first key of each sequence of a batch that is padded on the left.

That it goes with every other option is shown by test_prefill.py and test_backward.py, whose cases
have it as one of theirs. Here: long sequences on every kernel, what it is the same as, refusals.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import backward_cases
import cuattn
import harness
from cases import Case, make_problem
from harness import target_params

LONG = {  # tiles that are skipped, tiles that are cut, queries that are left without a key
    "causal": {"causal": True, "seqlen_q": 300, "seqlen_kv": 300},
    "window": {"window": (90, 20), "seqlen_q": 200, "bias": "full"},
    "full": {"alibi": "batch", "sinks": True, "softcap": 20.0, "layout": "bhsd"},
    "decode": {"seqlen_q": 1, "causal": True, "seqused": "k"},
    "mask": {"bias": "bool", "seqused": "both", "causal": True},
}
LONG_BACKWARD = {
    "causal": {"causal": True, "seqlen_q": 300, "dlse": True},
    "bias": {"bias": "full", "sinks": True, "seqused": "k"},
    "keys": {"bias": "keys", "alibi": "head", "layout": "bhsd"},
    "window": {"window": (70, 0), "softcap": 20.0},
}
ALL_CUDA = ("naive", "tiled", "simt", "sm80", "sm90", "auto")


def case_of(kind, name, cases, dtype):
    sizes = {"num_heads_q": 4, "seqlen_q": 70, "seqlen_kv": 300, "kv_start": True, "dtype": dtype}
    return kind(**{**sizes, **cases[name]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("device", "backend", "name"), target_params(tuple(LONG), cuda=ALL_CUDA))
def test_forward(device, backend, name, dtype, rng):
    harness.assert_case(device, backend, case_of(Case, name, LONG, dtype), rng)


@pytest.mark.parametrize(
    ("device", "backend", "name", "dtype"),
    [
        *target_params([(n, "float32") for n in LONG_BACKWARD], cuda=("naive",)),
        *target_params([(n, "bfloat16") for n in LONG_BACKWARD], cpu=(), cuda=("sm80", "sm90")),
    ],
)
def test_gradients(device, backend, name, dtype, rng):
    case = case_of(backward_cases.BackwardCase, name, LONG_BACKWARD, dtype)
    options = {}
    if backend in ("sm80", "sm90"):  # the gradients of options are those of naive
        options["need"] = ("dq", "dk", "dv")
    backward_cases.assert_case(device, backend, case, rng, **options)


@pytest.mark.parametrize(("device", "backend"), target_params(cuda=ALL_CUDA))
def test_it_is_the_sequence_without_its_padding(device, backend, rng):
    case = Case(causal=True, seqlen_q=40, seqlen_kv=90, batch=3, kv_start=True)
    if not harness.serves(backend, device, case):
        case = dataclasses.replace(case, dtype="bfloat16")
    problem = make_problem(case, rng)
    out, lse = harness.run(device, backend, problem)
    for b, first in enumerate(problem.arrays["kv_start"]):
        q, k, v = (problem.arrays[name][b : b + 1] for name in "qkv")
        alone = [q, k[:, first:], v[:, first:]]
        words = {**problem.options, "backend": backend, "return_lse": True}
        if first == 90:
            assert not out[b].any()
            assert np.isneginf(lse[b]).all()
            continue
        wanted, wanted_lse = harness.numpy_call(device, cuattn.attention, *alone, **words)
        np.testing.assert_allclose(
            out[b].astype(np.float32),
            wanted[0].astype(np.float32),
            atol=2e-6 if case.dtype == "float32" else 2e-2,
        )
        np.testing.assert_allclose(lse[b], wanted_lse[0], rtol=1e-5, atol=1e-5)


def test_what_is_no_first_key_is_refused():
    q, k = np.ones((2, 3, 2, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
    call = lambda start: cuattn.attention(q, k, k, kv_start=start)  # noqa: E731
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=rf"kv_start must lie within \[0, 5\], got {wrong} at"):
            call(np.array([0, wrong], np.int32))
    with pytest.raises(ValueError, match=r"kv_start must have shape \(batch,\) = \(2,\)"):
        call(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="kv_start must be int32, got int64"):
        call(np.zeros(2, np.int64))
    assert not call(np.array([5, 5], np.int32)).any()
    starts = np.zeros(1, np.int32)
    ends = np.array([0, 3], np.int32)
    with pytest.raises(TypeError, match="kv_start"):
        cuattn.attention_varlen(q[0], k[0], k[0], ends, ends, 3, 3, kv_start=starts)
    with pytest.raises(TypeError, match=r"cache_leftpad.*kv_start"):
        cuattn.attention(q, k, k, cache_leftpad=starts)
