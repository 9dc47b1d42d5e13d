# SPDX-License-Identifier: Apache-2.0
"""attention_backward and attention_varlen_backward against float64, for every kernel: every two
options together, long sequences, poison, dead rows, dlse, and what `need` leaves out.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
import reference_backward
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
from harness import Cpu, bits, numpy_call, target_params

BASE = BackwardCase(seqlen_q=70, seqlen_kv=90, head_dim=32, causal=True, dlse=True)
ROWS = cases.pairwise(FACTORS)
TARGETS = target_params(cuda=("naive",))
WITH_SIMT = target_params(cuda=("naive", "simt"))


@pytest.mark.parametrize(
    ("device", "backend", "number"), target_params(range(len(ROWS)), cuda=("naive",))
)
def test_every_two_options_together(device, backend, number, rng):
    assert_case(device, backend, case_of(ROWS[number]), rng)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("device", "backend", "dim", "dim_v"),
    target_params(
        ((8, 8), (64, 64), (96, 96), (160, 160), (192, 128), (256, 256)), cuda=("naive",)
    ),
)
def test_head_dims(device, backend, dim, dim_v, dtype, rng):
    case = BackwardCase(
        dtype=dtype, head_dim=dim, head_dim_v=dim_v, seqlen_q=45, seqlen_kv=61, causal=True
    )
    assert_case(device, backend, case, rng)


LONG = {  # keys in several parts, and several tiles of a part
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "group": {"num_heads_q": 4, "causal": True},
    "bfloat16": {"dtype": "bfloat16", "causal": True, "sinks": True},
    "float16": {"dtype": "float16", "softcap": 20.0},
    "ragged": {"layout": "ragged", "batch": 3, "causal": True, "dtype": "float16"},
    "bias": {"bias": "float32", "causal": True},
    "bias_rows": {"bias": "rows", "num_heads_q": 2},
    "bias_heads": {"bias": "heads", "alibi": "batch", "num_heads_q": 2},
    "dropout": {"dropout": 0.1, "dlse": True},
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name, rng):
    case = BackwardCase(
        **{
            **{"batch": 1, "num_heads_q": 1, "num_heads_kv": 1, "head_dim": 16},
            **{"seqlen_q": 1000, "seqlen_kv": 1601},
            **LONG[name],
        }
    )
    shape = (1, 1601, 1, 16)
    row = (1, 1000, case.num_heads_q, 16)
    plan = cuattn.explain(
        "attention_backward", row, row, shape, shape, row, (1, case.num_heads_q, 1000), device="cpu"
    )
    assert "keys in 3 parts" in plan.ladder
    assert_case(Cpu(), "cpu", case, rng)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_our_own_forward_pass(device, backend, dtype, rng):
    case = dataclasses.replace(BASE, own_forward=True, dtype=dtype, softcap=5.0, sinks=True)
    assert_case(device, backend, case, rng)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_float32_sums_of_16_bit_keys(device, backend, rng):
    problem = assert_case(
        device, backend, dataclasses.replace(BASE, dtype="bfloat16"), rng, dkv_dtype=np.float32
    )
    rounded = run(device, backend, problem)
    unrounded = run(device, backend, problem, dkv_dtype=np.float32)
    for name in ("dk", "dv"):
        assert unrounded[name].dtype == np.float32
        assert np.array_equal(unrounded[name].astype(rounded[name].dtype), rounded[name])


@pytest.mark.parametrize(("device", "backend"), WITH_SIMT)
@pytest.mark.parametrize("left_out", reference_backward.NAMES)
def test_what_is_not_needed_does_not_change_the_rest(device, backend, left_out, rng):
    case = dataclasses.replace(BASE, sinks=True, alibi="head", bias="full", softcap=3.0)
    problem = make_problem(case, rng)
    full = run(device, backend, problem)
    need = tuple(name for name in reversed(reference_backward.NAMES) if name != left_out)
    for name, x in run(device, backend, problem, need).items():
        assert np.array_equal(bits(x), bits(full[name])), name
    alone = run(device, backend, problem, (left_out,))
    assert np.array_equal(bits(alone[left_out]), bits(full[left_out]))


@pytest.mark.parametrize(("device", "backend"), WITH_SIMT)
@pytest.mark.parametrize("layout", ["bshd", "ragged"])
def test_dead_rows_and_empty_sequences(device, backend, layout, rng):
    """More queries than keys under a causal mask, a sequence without queries or keys, a sink."""
    for sinks in (False, True):
        case = BackwardCase(
            batch=4, layout=layout, seqlen_q=90, seqlen_kv=40, causal=True, sinks=sinks, dlse=True
        )
        problem = make_problem(case, rng)
        if layout == "bshd":
            problem.forward.arrays["seqused_q"] = np.array([0, 90, 60, 90], np.int32)
            problem.forward.arrays["seqused_k"] = np.array([40, 0, 40, 11], np.int32)
            redone = make_problem_of(problem, rng)
        else:
            redone = problem
        found = run(device, backend, redone)
        judge(redone, found)
        dead = redone.arrays["lse"] == -np.inf
        assert sinks or dead.any()
        if layout == "bshd":
            assert (found["dq"][1] == 0).all()  # no keys
            assert (found["dk"][0] == 0).all()  # no queries
            assert (found["dq"].swapaxes(1, 2)[dead] == 0).all()


def make_problem_of(problem, rng):
    """The problem again after a change of its arrays."""
    from backward_cases import BackwardProblem, gradients, poison

    forward = problem.forward
    out, lse = forward.reference()
    exact = {**problem.arrays, "out": out, "lse": lse}
    for name in ("dout", "dlse"):
        exact[name] = rng.standard_normal(exact[name].shape, np.float32)
    arrays = {name: x.astype(np.float32) for name, x in exact.items()}
    poison(forward, arrays)
    plain = gradients(forward, arrays, np.float32)
    return BackwardProblem(problem.case, forward, arrays, gradients(forward, exact), plain)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_what_a_row_does_not_see_has_no_influence(device, backend, rng):
    """NaN and infinity in keys that the mask hides, and in rows that do not see a key."""
    case = BackwardCase(seqlen_q=40, seqlen_kv=70, head_dim=32, causal=True)
    problem = make_problem(case, rng)
    clean = run(device, backend, problem)
    for name, junk in (("k", np.nan), ("v", np.inf), ("k", -np.inf), ("v", np.nan)):
        q_rows, key = 40, 55  # queries from 25 on see it
        arrays = {**problem.forward.arrays}
        arrays[name] = arrays[name].copy()
        arrays[name][:, key] = junk
        forward = dataclasses.replace(problem.forward, arrays=arrays)
        found = run(device, backend, dataclasses.replace(problem, forward=forward), NEED)
        assert np.array_equal(bits(found["dq"][:, : q_rows - 15]), bits(clean["dq"][:, :25]))
        assert np.isnan(found["dq"][:, q_rows - 15 :]).all()
    for name in ("q", "dout"):  # query 3 sees keys up to 33
        arrays, given = {**problem.forward.arrays}, {**problem.arrays}
        holder = arrays if name == "q" else given
        holder[name] = holder[name].copy()
        holder[name][:, 3] = np.nan
        changed = dataclasses.replace(
            problem,
            forward=dataclasses.replace(problem.forward, arrays=arrays),
            arrays=given,
        )
        found = run(device, backend, changed, NEED)
        for gradient in ("dk", "dv"):
            assert np.array_equal(bits(found[gradient][:, 34:]), bits(clean[gradient][:, 34:]))
        assert np.isnan(found["dk"][:, :34]).all()
        assert np.array_equal(bits(found["dq"][:, 4:]), bits(clean["dq"][:, 4:]))


@pytest.mark.parametrize(("device", "backend"), WITH_SIMT)
def test_a_bias_that_hides_keys(device, backend, rng):
    case = BackwardCase(bias="full", seqlen_q=50, seqlen_kv=60)
    problem = make_problem(case, rng)
    bias = problem.forward.arrays["bias"]
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[:, :, 7] = -np.inf  # rows that see nothing
    bias[:, :, 9] = -1e9  # rows whose lse is as large as its bias
    problem = make_problem_of(problem_with_dlse(problem), rng)
    found = run(device, backend, problem)
    judge(problem, found)
    assert (found["dbias"][bias == -np.inf] == 0).all()
    assert (found["dq"][:, 7] == 0).all()


@pytest.mark.parametrize(("device", "backend"), target_params(cuda=("naive", "simt", "sm80")))
@pytest.mark.parametrize("used", [(70, 70, 70), (70, 0, 17)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_every_broadcast_of_a_bias(device, backend, used, softcap, rng):
    """dbias is that of a whole bias of the same values, summed over what is broadcast."""
    case = BackwardCase(batch=3, bias="full", softcap=softcap, dlse=True, seqlen_q=70, seqlen_kv=75)
    if backend == "sm80":
        case = dataclasses.replace(case, dtype="float16")
    problem = make_problem(case, rng)
    problem.forward.arrays["seqused_q"] = np.array(used, np.int32)
    shape = problem.forward.arrays["bias"].shape
    assert len(shape) == 4
    assert min(shape) > 1
    for pattern in range(16):
        kept = tuple(1 if pattern >> axis & 1 else n for axis, n in enumerate(shape))
        bias = rng.standard_normal(kept, np.float32)
        found = []
        for values in (bias, np.ascontiguousarray(np.broadcast_to(bias, shape))):
            arrays = {**problem.forward.arrays, "bias": values}
            forward = dataclasses.replace(problem.forward, arrays=arrays)
            given = dataclasses.replace(problem, forward=forward)
            found.append(run(device, backend, given, ("dbias",))["dbias"].astype(np.float64))
        broadcast = tuple(axis for axis, n in enumerate(kept) if n < shape[axis])
        want = found[1].sum(axis=broadcast, keepdims=True)
        sizes = np.abs(found[1]).sum(axis=broadcast, keepdims=True)
        assert (np.abs(found[0] - want) <= 1e-6 * (np.abs(want) + sizes) + 1e-12).all(), kept
        assert np.abs(want).max() > 1e-3


def problem_with_dlse(problem):
    return dataclasses.replace(
        problem, arrays={**problem.arrays, "dlse": np.zeros_like(problem.arrays["lse"])}
    )


@pytest.mark.parametrize(("device", "backend"), WITH_SIMT)
def test_a_sequence_alone_and_in_a_batch(device, backend, rng):
    case = BackwardCase(batch=3, seqlen_q=200, seqlen_kv=1200, num_heads_q=2, num_heads_kv=1)
    problem = make_problem(case, rng)
    together = run(device, backend, problem, NEED, batch_invariant=True)
    arrays = problem.forward.arrays
    given = [*(arrays[n] for n in "qkv"), problem.arrays["out"], problem.arrays["lse"]]
    for b in range(3):
        one = [x[b : b + 1] for x in (problem.arrays["dout"], *given)]
        alone = numpy_call(
            device, cuattn.attention_backward, *one, backend=backend, batch_invariant=True
        )
        for name in NEED:
            assert np.array_equal(bits(getattr(alone, name)), bits(together[name][b : b + 1])), name


@pytest.mark.parametrize(("device", "backend"), WITH_SIMT)
@pytest.mark.parametrize("sizes", [(0, 3, 5, 2), (2, 3, 5, 0), (2, 0, 5, 2), (2, 3, 0, 2)])
def test_nothing_at_all(device, backend, sizes, rng):
    batch, rows, keys, heads = sizes
    q = np.ones((batch, rows, heads, 8), np.float32)
    k = np.ones((batch, keys, heads, 8), np.float32)
    lse, bias = np.zeros((batch, heads, rows), np.float32), np.ones((rows, keys), np.float32)
    sinks = np.ones(heads, np.float32)
    lse[:] = np.log(keys + np.e)
    found = numpy_call(
        device,
        cuattn.attention_backward,
        np.ones_like(q),
        q,
        k,
        k,
        q,
        lse,
        bias=bias,
        sinks=sinks,
        alibi_slopes=sinks,
        need=reference_backward.NAMES,
        backend=backend,
    )
    for x, like in zip(found, (q, k, k, bias, sinks, sinks), strict=True):
        assert x.shape == like.shape
        if rows == 0 or batch == 0:
            assert (x == 0).all()


def test_every_kernel_is_listed():
    listed = {
        (row["kernel"], row["dtype"])
        for row in cuattn.kernels()
        if row["op"] == "attention_backward"
    }
    on_cuda = bool(cuattn.info()["cuda"])
    kernels = ("cpu", "cpu_naive", "naive") if on_cuda else ("cpu", "cpu_naive")
    expected = {(kernel, dtype) for kernel in kernels for dtype in cases.DTYPES}
    if on_cuda:
        hopper = any("90a" in row["arch"] for row in cuattn.kernels())
        expected.add(("simt", "float32"))
        kernels = ("sm80", "sm90") if hopper else ("sm80",)
        expected |= {(kernel, dtype) for kernel in kernels for dtype in ("float16", "bfloat16")}
    assert listed == expected


@pytest.mark.parametrize("heads_kv", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("device", "backend"), target_params(cuda=("auto", "naive")))
def test_without_query_heads_keys_get_zeros(device, backend, dtype, packed, heads_kv):
    need = ("dq", "dk", "dv", "dsinks", "dslopes", "dbias")
    shapes = {"q": (0, 16), "k": (heads_kv, 16), "v": (heads_kv, 8), "out": (0, 8)}
    rows = {name: 5 if name in ("q", "out") else 7 for name in shapes}
    lead = {name: (2 * rows[name],) if packed else (2, rows[name]) for name in shapes}
    q, k, v, out = (
        np.ones((*lead[name], *shape), cases.DTYPES[dtype]) for name, shape in shapes.items()
    )
    none, bias = np.zeros(0, np.float32), np.ones((1, 1, 5, 7), np.float32)
    ends = [np.array([0, n, 2 * n], np.int32) for n in (5, 7)]
    lse = np.zeros((0, 10) if packed else (2, 0, 5), np.float32)
    op = cuattn.attention_varlen_backward if packed else cuattn.attention_backward
    found = numpy_call(
        device, op, out, q, k, v, out, lse, *((*ends, 5, 7) if packed else ()),
        sinks=none, alibi_slopes=none, bias=bias, need=need, backend=backend, causal=True,
    )  # fmt: skip
    for name, like in zip(need, (q, k, v, none, none, bias), strict=True):
        got = getattr(found, name)
        assert got.shape == like.shape, name
        assert not got.any(), name


WITHOUT_HEADS = [
    *(("a100", x, y) for x in ("auto", "naive") for y in ("float32", "bfloat16")),
    ("a100", "simt", "float32"),
    ("a100", "sm80", "bfloat16"),
    ("h100", "auto", "bfloat16"),
    ("h100", "sm90", "float16"),
]


@pytest.mark.parametrize(("gpu", "backend", "dtype"), WITHOUT_HEADS)
def test_a_plan_without_query_heads(gpu, backend, dtype):
    row, keys, lse = (2, 600, 0, 64), (2, 700, 0, 64), (2, 0, 600)
    options = {"device": gpu, "dtype": dtype, "backend": backend, "sinks": (0,)}
    plan = cuattn.explain("attention_backward", row, row, keys, keys, row, lse, **options)
    assert plan.workspace_bytes >= 0
