# SPDX-License-Identifier: Apache-2.0
"""The fused kernel of backend="sm90": when it is taken, what it needs, and its gradients against
float64. It sums dq in any order, so bits are compared of dk and dv alone; deterministic=True
gives it an order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cuattn
from backward_cases import NEED, BackwardCase, assert_case, judge, make_problem, run
from harness import bits, target_params
from made_up_gpus import GPUS

LENGTH = 512  # of queries and of keys, of several blocks
ORDERED_ROWS = 160  # from which on dq is summed in an order
BASE = BackwardCase(
    dtype="bfloat16",
    batch=1,
    num_heads_q=2,
    num_heads_kv=1,
    seqlen_q=600,
    seqlen_kv=700,
    causal=True,
    dlse=True,
)


def on_hopper(*values):
    return target_params(values or ((),), cpu=(), cuda=("sm90",))


def explain(*, batch=1, rows=LENGTH, keys=LENGTH, heads=2, heads_kv=1, dim=64, **options):
    q, lse = (batch, rows, heads, dim), (batch, heads, rows)
    k = (batch, keys, heads_kv, dim)
    options = {"device": GPUS["H200"], "dtype": "bfloat16", **options}
    return cuattn.explain("attention_backward", q, q, k, k, q, lse, **options)


def is_fused(plan):
    assert plan.kernel == "sm90"
    fused = "five products fused" in plan.ladder
    assert fused == ("five products fused" in plan.reason)
    return fused


def is_ordered(plan):
    return "in the order of the keys" in plan.reason


TAKEN = {
    "several blocks": {},
    "two blocks": {"rows": 129, "keys": 129},
    "a row": {"rows": 1},
    "causal": {"causal": True},
    "wide": {"dim": 128, "keys": 4096},
    "any order": {"deterministic": False, "dim": 120},
    "scale": {"scale": 0.3, "dtype": "float16"},
    "all, in another order": {"need": ("dv", "dq", "dk")},
    "96": {"dim": 96},
    "softcap": {"softcap": 30.0},
    "ALiBi": {"alibi_slopes": (2,), "causal": True},
    "dsinks": {"sinks": (2,), "need": (*NEED, "dsinks")},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    "dropout, wide": {"dim": 96, "dropout_p": 0.1, "dropout_seed": 3},
}
ORDERED = {"deterministic": True, "backend": "sm90"}  # by name: of few blocks as well
LEFT = {
    "one block, not stored": {"dim": 96, "keys": 128, "dropout_p": 0.1, "dropout_seed": 3},
    "deterministic, dropout": {**ORDERED, "dropout_p": 0.1, "dropout_seed": 3},
    "deterministic, softcap": {**ORDERED, "softcap": 30.0},
    "deterministic, few rows": {**ORDERED, "rows": ORDERED_ROWS - 1},
    "deterministic, window": {**ORDERED, "window": (100, 0)},
    "batch_invariant": {"batch_invariant": True},
    "both": {**ORDERED, "batch_invariant": True},
    "no dq": {"need": ("dk", "dv")},
    "dq alone": {"need": ("dq",)},
    "window": {"window": (100, 0)},
    "softcap and ALiBi": {"softcap": 30.0, "alibi_slopes": (2,)},
    "large softcap in float16": {"softcap": 300.0, "dtype": "float16"},
    "negative scale": {"scale": -0.3},
    "bias": {"bias": (1, 2, LENGTH, LENGTH)},
    "192": {"dim": 192},
    "256": {"dim": 256},
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_plan_takes_it(name):
    assert is_fused(explain(**TAKEN[name]))


FEW = {"two blocks", "a row"}
PLAIN = [name for name in TAKEN if name not in {"softcap", "ALiBi", *FEW} and "dropout" not in name]


@pytest.mark.parametrize("name", PLAIN)
def test_the_plan_orders_it(name):
    plan, any_order = explain(**{**TAKEN[name], **ORDERED}), explain(**TAKEN[name])
    assert is_fused(plan)
    assert is_ordered(plan)
    assert not is_ordered(any_order)
    assert 0 < plan.workspace_bytes - any_order.workspace_bytes < 8 * LENGTH  # counters


@pytest.mark.parametrize(
    ("options", "is_taken"),
    [
        ({"keys": 4096, "heads": 8, "heads_kv": 8}, True),  # 256 blocks of 128 keys
        ({"keys": 4096, "heads": 8, "heads_kv": 4}, False),
        ({"keys": 4096, "heads": 8, "heads_kv": 8, "causal": True}, False),
        ({"keys": 4096, "heads": 8, "heads_kv": 8, "causal": True, "batch": 2}, True),
        ({"keys": 4096, "heads": 8, "heads_kv": 8, "softcap": 3.0, "batch": 9}, False),
    ],
)
def test_two_passes_are_faster_than_an_order_of_few_blocks(options, is_taken):
    for dim in (64, 96, 128):
        plan = explain(**options, dim=dim, deterministic=True)
        assert is_ordered(plan) == is_fused(plan) == is_taken


@pytest.mark.parametrize(
    ("options", "is_taken"),
    [
        ({"rows": 2048, "keys": 154, "heads": 20}, False),  # 40 blocks of keys, 320 tiles of rows
        ({"rows": 2048, "keys": 154, "heads": 80}, True),
        ({"rows": 1024, "keys": 200, "heads": 32}, True),
        ({"rows": 4096, "keys": 77, "heads": 20}, False),
        ({"rows": 4096, "keys": 77, "heads": 80}, True),
        ({"rows": 33, "keys": 256, "heads": 256, "heads_kv": 64}, True),
    ],
)
def test_two_passes_are_faster_where_few_blocks_have_all_keys(options, is_taken):
    plan = explain(**{"heads_kv": options["heads"], **options})
    assert is_fused(plan) == is_taken


FREE = {"rows": 2048, "keys": 2048, "heads": 64, "heads_kv": 64}


@pytest.mark.parametrize(
    ("options", "is_free"),
    [
        ({}, True),
        ({"dim": 40}, True),
        ({"rows": 2047}, False),
        ({"heads_kv": 32}, False),
        ({"causal": True}, False),
        ({"dim": 96}, False),
        ({"softcap": 3.0}, False),
        ({"deterministic": False}, False),
    ],
)
def test_the_plan_orders_it_unasked_where_that_is_free(options, is_free):
    assert is_ordered(explain(**{**FREE, **options})) == is_free


@pytest.mark.parametrize("name", LEFT)
def test_the_plan_takes_two_passes(name):
    assert not is_fused(explain(**LEFT[name]))


def test_the_workspace_of_a_training_step():
    """131,072 tokens, 16 heads, head_dim 128: two numbers a row, or these and dq in float32."""
    long = {"batch": 1, "rows": 131072, "keys": 131072, "heads": 16, "heads_kv": 16, "dim": 128}
    rows = 16 * (131072 + 4 * 128)
    assert explain(**long, batch_invariant=True).workspace_bytes == 8 * rows < 17e6
    assert explain(**long).workspace_bytes == (8 + 4 * 128) * rows < 1.1e9
    ordered = explain(**long, deterministic=True).workspace_bytes
    assert ordered == (8 + 4 * 128) * rows + 16 * 4 * 32 + rows // 64 * 4


CASES = {
    "full": {"causal": False},
    "causal": {},
    "tiles": {"causal": False, "seqlen_q": 512, "seqlen_kv": 512},
    "few": {"seqlen_q": 135, "seqlen_kv": 150, "batch": 2},
    "few rows": {"seqlen_q": 5, "seqlen_kv": 300, "batch": 3, "dlse": False},
    "few keys": {"seqlen_q": 300, "seqlen_kv": 190, "causal": False, "num_heads_kv": 2},
    "few ragged": {"layout": "ragged", "batch": 5, "seqlen_q": 170, "seqlen_kv": 170},
    "odd": {"seqlen_q": 517, "seqlen_kv": 1031, "batch": 2},
    "dead rows": {"seqlen_q": 900, "seqlen_kv": 700},
    "heads": {"num_heads_q": 6, "num_heads_kv": 2, "batch": 2, "dlse": False},
    "ragged": {"layout": "ragged", "batch": 4},
    "ragged full": {"layout": "ragged", "batch": 3, "causal": False, "seqused": "k"},
    "used": {"seqused": "both", "batch": 3},
    "used full": {"seqused": "q", "batch": 2, "causal": False},
    "bhsd": {"layout": "bhsd", "storage": "padded"},
    "packed": {"num_heads_kv": 2, "storage": "packed", "seqlen_kv": 600},
    "strided": {"storage": "transposed", "batch": 2},
    "sinks": {"sinks": True, "scale": 0.25},
    "allocates": {"give_out": False},
    "large": {"magnitude": 8.0},
    "own forward": {"own_forward": True},
    "softcap": {"softcap": 5.0},
    "softcap full": {"softcap": 2.0, "causal": False, "seqused": "both", "batch": 2},
    "softcap odd": {"softcap": 1.0, "seqlen_q": 517, "seqlen_kv": 1031, "num_heads_q": 4},
    "softcap, own forward": {"softcap": 10.0, "own_forward": True, "layout": "ragged", "batch": 3},
    "ALiBi": {"alibi": "head", "num_heads_q": 4, "num_heads_kv": 2},
    "ALiBi full": {"alibi": "batch", "causal": False, "seqused": "both", "batch": 3},
    "ALiBi dead rows": {"alibi": "head", "seqlen_q": 900, "seqlen_kv": 700, "sinks": True},
    "dropout": {"dropout": 0.1, "num_heads_q": 6, "num_heads_kv": 2},
    "dropout full": {"dropout": 0.7, "causal": False, "seqused": "both", "batch": 2},
    "dropout ragged": {"dropout": 0.3, "layout": "ragged", "batch": 3, "sinks": True},
    "ALiBi, own forward": {"alibi": "head", "own_forward": True, "layout": "ragged", "batch": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_fused(name):
    """What the tests below compute; bounds of ragged ones are up to two rows more."""
    case = dataclasses.replace(BASE, **CASES[name])
    heads = case.num_heads_q
    options = {
        "softcap": {"softcap": case.softcap},
        "alibi": {"alibi_slopes": (heads,)} if case.alibi != "none" else {},
        "dropout": {"dropout_p": case.dropout, "dropout_seed": 3} if case.dropout else {},
    }
    plan = explain(
        **{"batch": case.batch, "rows": case.seqlen_q, "keys": case.seqlen_kv},
        **{"heads": heads, "heads_kv": case.num_heads_kv, "causal": case.causal},
        **{name: x for each in options.values() for name, x in each.items()},
        backend="sm90",
    )
    assert is_fused(plan)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128, 40, 72, 104))
@pytest.mark.parametrize("name", CASES)
def test_gradients(device, backend, dim, name, dtype, rng):
    case = dataclasses.replace(BASE, head_dim=dim, dtype=dtype, **CASES[name])
    assert_case(device, backend, case, rng, need=NEED)


UNSCORED = [name for name in CASES if not set(CASES[name]) & {"softcap", "alibi", "dropout"}]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128, 40, 72, 104))
@pytest.mark.parametrize("name", UNSCORED)
def test_gradients_in_order(device, backend, dim, name, dtype, rng):
    """Of groups of query heads, and where each has keys of its own, another kernel beyond 64."""
    case = dataclasses.replace(BASE, head_dim=dim, dtype=dtype, **CASES[name])
    assert_case(device, backend, case, rng, need=NEED, deterministic=True)
    case = dataclasses.replace(case, num_heads_kv=case.num_heads_q)
    assert_case(device, backend, case, rng, need=NEED, deterministic=True)


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
def test_lengths_that_contradict_each_other_end(device, backend, dim):
    """Sequences that share rows share the counters of turns: any result, but one."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(1200, 4, dim, device="cuda").bfloat16() for _ in range(4))
    wrong = torch.tensor([0, 1200, 0, 1200], dtype=torch.int32, device="cuda")
    out, lse = torch.randn_like(q), torch.randn(4, 1200, device="cuda")
    cuattn.attention_varlen_backward(
        dout, q, k, v, out, lse, wrong, wrong, 1200, 1200, deterministic=True, backend=backend
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("heads_kv", [12, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
def test_the_order_holds_beside_other_work(device, backend, dim, causal, heads_kv):
    """More CTAs than a GPU holds, while another stream takes a changing number of them."""
    torch = pytest.importorskip("torch")
    q, dout = (torch.randn(2, 2304, 12, dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 2304, heads_kv, dim, device="cuda").bfloat16() for _ in range(2))
    out, lse = cuattn.attention(q, k, v, causal=causal, return_lse=True)
    other, junk = torch.cuda.Stream(), torch.zeros(1 << 22, device="cuda")
    results = []
    for repeat in range(60):
        with torch.cuda.stream(other):
            for _ in range(repeat % 7):
                junk[: 1 << (10 + repeat % 12)] += 1
        results.append(
            cuattn.attention_backward(
                dout, q, k, v, out, lse, causal=causal, deterministic=True, backend=backend
            )
        )
    for again in results[1:]:
        for x, first in zip(again, results[0], strict=True):
            assert torch.equal(x, first)


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
def test_float32_sums_of_16_bit_keys(device, backend, dim, rng):
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim), rng)
    rounded = run(device, backend, problem, NEED)
    unrounded = run(device, backend, problem, NEED, dkv_dtype=np.float32)
    judge(problem, unrounded)
    for name in ("dk", "dv"):
        assert np.array_equal(unrounded[name].astype(rounded[name].dtype), rounded[name])


DSINKS = {
    "fused": {},
    "few": {"seqlen_q": 135, "seqlen_kv": 150},
    "ragged": {"layout": "ragged", "batch": 4, "num_heads_q": 4},
    "used": {"seqused": "both", "batch": 3, "softcap": 4.0},
    "dead rows": {"seqlen_q": 900, "seqlen_kv": 700},
    "dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 128, 256))
@pytest.mark.parametrize("name", DSINKS)
def test_dsinks(device, backend, dim, name, rng):
    """Beside the others, alone, and with the same bits each time."""
    case = dataclasses.replace(BASE, head_dim=dim, sinks=True, **DSINKS[name])
    need = (*NEED, "dsinks")
    assert_case(device, backend, case, rng, need=need)
    problem = make_problem(case, rng)
    first = run(device, backend, problem, need)["dsinks"]
    for again in (need, need, ("dsinks",)):
        assert np.array_equal(bits(run(device, backend, problem, again)["dsinks"]), bits(first))


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
def test_repeats(device, backend, dim, rng):
    """dk and dv have the same bits each time, dq too where that is asked."""
    problem = make_problem(dataclasses.replace(BASE, head_dim=dim, batch=2), rng)
    first = run(device, backend, problem, NEED)
    ordered = run(device, backend, problem, NEED, deterministic=True)
    for _ in range(10):
        again = run(device, backend, problem, NEED)
        for name in ("dk", "dv"):
            assert np.array_equal(bits(again[name]), bits(first[name])), name
        judge(problem, again)
        again = run(device, backend, problem, NEED, deterministic=True)
        for name, x in again.items():
            assert np.array_equal(bits(x), bits(ordered[name])), name


@pytest.mark.parametrize("junk", [0, 255])
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
def test_what_the_workspace_held(device, backend, dim, junk, rng):
    """Zeros, or NaN, also where rows take no part."""
    case = dataclasses.replace(BASE, batch=3, seqused="both", head_dim=dim)
    problem = make_problem(case, rng)
    size = 4 * (2 + dim) * case.num_heads_q * (problem.case.batch + 3) * 1024
    buffer = device.buffer(size + 256)
    at = buffer.data_ptr() if hasattr(buffer, "data_ptr") else buffer.ctypes.data
    workspace = device.view(buffer, np.uint8, -at % 256, (size,), (1,))
    device.write(workspace, np.full(size, junk, np.uint8))
    judge(problem, run(device, backend, problem, NEED, workspace=workspace))


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128))
@pytest.mark.parametrize("name", ["k", "v"])
def test_rows_that_see_no_nan_have_none(device, backend, dim, name, rng):
    """A key that nobody may see yet: docs/numerics.md keeps a tile of rows apart from it."""
    case = dataclasses.replace(BASE, head_dim=dim, seqlen_q=640, seqlen_kv=640)
    problem = make_problem(case, rng)
    clean = run(device, backend, problem, NEED)
    arrays = {**problem.forward.arrays, name: problem.forward.arrays[name].copy()}
    arrays[name][:, 639] = np.nan
    forward = dataclasses.replace(problem.forward, arrays=arrays)
    found = run(device, backend, dataclasses.replace(problem, forward=forward), NEED)
    assert np.isnan(found["dq"][:, 639]).all()
    assert np.isfinite(found["dq"][:, :512].astype(np.float32)).all()  # tiles before the last keys
    for other in ("dk", "dv"):
        assert np.array_equal(bits(found[other][:, :512]), bits(clean[other][:, :512])), other
