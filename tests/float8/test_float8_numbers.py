# SPDX-License-Identifier: Apache-2.0
"""Codes that become numbers of 16 bits before a kernel for these: when, and with what result."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
import float8_cases
import harness
from cases import Case
from float8_cases import F8
from harness import target_params

H100 = dict(major=9, minor=0, num_sms=132, smem_per_block_optin=232448, native=1)
A100 = dict(H100, major=8, num_sms=108, smem_per_block_optin=166912)
BECOME = "codes become numbers of 16 bits first"
PAIRS = cases.pairwise(float8_cases.FACTORS)[::3]
PARTS = 3


def plan_of(problem):
    """What the GPU that is here would run."""
    arrays = dict(problem.arrays)
    positional = [arrays.pop(name) for name in "qkv"]
    function = "attention"
    if problem.case.layout == "ragged":
        function = "attention_varlen"
        positional += [arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k"), *problem.lengths]
    gpu = H100 if harness.has_hopper() else A100
    return cuattn.explain(function, *positional, device=gpu, **arrays, **problem.options)


def rounded(numbers, dtype):
    """The numbers as the kernel reads them."""
    to = cases.DTYPES[dtype]
    arrays = {name: numbers.arrays[name].astype(to).astype(np.float32) for name in "qkv"}
    case = dataclasses.replace(numbers.case, dtype=dtype)
    return dataclasses.replace(numbers, case=case, arrays={**numbers.arrays, **arrays})


def assert_case(device, case, kind, rng, int8=False):
    """The rule of 16-bit kernels; whether there was anything to hold against it."""
    given, numbers = float8_cases.make(dataclasses.replace(case, dtype="float32"), kind, rng, int8)
    if BECOME not in plan_of(given).ladder:
        return False
    out, lse = harness.run(device, "auto", given)
    harness.judge(rounded(numbers, "bfloat16"), out, lse)
    return True


@pytest.mark.parametrize("int8", [False, True], ids=["float8", "int8"])  # q and k
@pytest.mark.parametrize(
    ("device", "backend", "part"), target_params(tuple(range(PARTS)), cpu=(), cuda=("auto",))
)
def test_every_option_with_every_other(device, backend, part, int8, rng):
    del backend
    held = 0
    for row in PAIRS[part::PARTS]:
        row = dict(row)
        kind = row.pop("scales")
        case = cases.case_of(row)
        held += assert_case(device, case, kind, rng, int8)
    assert held > 5


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=(), cuda=("auto",)))
def test_out_of_16_bits_says_of_which_they_are(device, backend, rng):
    """In bfloat16 the numbers of such scales would be off by more than float16 allows."""
    case = Case(seqlen_q=70, seqlen_kv=150, head_dim=256, causal=True, give_out=True)
    for dtype in ("float16", "bfloat16"):
        given, numbers = float8_cases.make(dataclasses.replace(case, dtype="float32"), "parts", rng)
        given = dataclasses.replace(given, case=dataclasses.replace(case, dtype=dtype))
        assert BECOME in plan_of(given).ladder
        harness.judge(rounded(numbers, dtype), *harness.run(device, backend, given))


Q, K = np.zeros((1, 100, 4, 256), F8), np.zeros((1, 300, 2, 256), F8)
SERVED = {
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": ("float32", 4)},
    "bias": {"bias": ("float32", 100, 300)},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
    "blocks": {"k_scale": np.ones((1, 2, 3), np.float32)},
    "window": {"window": (10, 0), "softcap": 3.0},
    "plain": {},
    "plain window": {"window": (10, 0)},
}
BECOMING = [
    (*gpu, name)
    for gpu in ((H100, "sm90"), (A100, "sm80"))
    for name in SERVED
    if gpu[0] is A100 or not name.startswith("plain")  # a Hopper multiplies the codes
]


@pytest.mark.parametrize(("gpu", "kernel", "name"), BECOMING)
def test_tensor_cores_serve_codes(gpu, kernel, name):
    plan = cuattn.explain("attention", Q, K, K, device=gpu, **SERVED[name])
    assert plan.kernel == kernel
    assert f"* {kernel}: runs: " in plan.ladder
    assert BECOME in plan.ladder
    numbers = cuattn.explain(
        "attention", *(x.shape for x in (Q, K, K)), dtype="bfloat16", device=gpu,
        **{k: v for k, v in SERVED[name].items() if k != "k_scale"},
    )  # fmt: skip
    made = 2 * (Q.size + 2 * K.size)
    assert plan.workspace_bytes == -(-numbers.workspace_bytes // 256) * 256 + made


def test_what_dequantize_does_not_count_stays_with_naive():
    starts = np.array([0, 40, 100], np.int32)
    x = np.zeros((100, 2, 256), F8)
    given = (x, x, x, starts, starts, 60, 60)
    for options, kernel in (
        ({}, "sm90"),
        ({"k_scale": np.ones(2, np.float32)}, "sm90"),  # a head
        ({"k_scale": np.ones((2, 2), np.float32)}, "naive"),  # a sequence and head
        ({"k_scale": np.ones((2, 2, 1), np.float32)}, "naive"),  # a block of rows
    ):
        plan = cuattn.explain("attention_varlen", *given, device=H100, softcap=3.0, **options)
        assert plan.kernel == kernel, options
    begins = np.zeros(1, np.int32)
    parts = {"kv_start": begins, "k_scale": np.ones((1, 2, 3), np.float32)}
    assert cuattn.explain("attention", Q, K, K, device=H100, **parts).kernel == "naive"
    del parts["k_scale"]
    assert BECOME in cuattn.explain("attention", Q, K, K, device=H100, softcap=3.0, **parts).ladder
