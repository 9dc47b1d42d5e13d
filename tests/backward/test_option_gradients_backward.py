# SPDX-License-Identifier: Apache-2.0
"""dbias and dslopes of backend="sm90", and its passes with a bias: which calls it takes, and the
gradients against float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
import harness
from backward_cases import NEED, SOURCES, BackwardCase, assert_case, make_problem, run
from harness import bits, target_params
from made_up_gpus import GPUS

BASE = BackwardCase(
    dtype="bfloat16",
    batch=2,
    num_heads_q=4,
    num_heads_kv=2,
    seqlen_q=135,
    seqlen_kv=300,
    causal=True,
    bias="full",
    dlse=True,
)
DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def rows_that_begin_at_16_bytes(monkeypatch):
    """Of a bias; and two more patterns of broadcast."""
    plain = harness.storages
    monkeypatch.setattr(harness, "storages", lambda case: {**plain(case), "bias": "padded"})
    monkeypatch.setitem(cases.BIASES, "per head", ("1hij", None))
    monkeypatch.setitem(cases.BIASES, "per batch", ("b1ij", None))


def on_hopper(*values):
    return target_params(values or ((),), cpu=(), cuda=("sm90",))


def explain(dim=64, keys=1024, **options):
    q, k, lse = (2, 1024, 4, dim), (2, keys, 4, dim), (2, 4, 1024)
    options = {"device": GPUS["H200"], "dtype": "bfloat16", **options}
    if "need" not in options:
        options = {"bias": (1, 4, 1024, keys), "need": (*NEED, "dbias"), **options}
    return cuattn.explain("attention_backward", q, q, k, k, q, lse, **options)


DBIAS_TAKEN = {
    "64": {},
    "40": {"dim": 40},
    "104": {"dim": 104, "causal": True},
    "128": {"dim": 128, "window": (50, 0), "dtype": "float16"},
    "sinks": {"sinks": (4,)},
    "scale": {"scale": -0.3},
}
DBIAS_LEFT = {
    "96": {"dim": 96},
    "256": {"dim": 256},
    "rows of 2 bytes more": {"keys": 1025},
    "for all rows": {"bias": (1, 4, 1, 1024)},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi_slopes": (4,)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
}


@pytest.mark.parametrize("name", DBIAS_TAKEN)
def test_who_makes_dbias(name):
    assert explain(**DBIAS_TAKEN[name]).kernel == "sm90"


@pytest.mark.parametrize("name", DBIAS_LEFT)
def test_who_makes_dbias_of_other_calls(name):
    assert explain(**DBIAS_LEFT[name]).kernel in ("sm80", "naive")


def test_who_makes_dslopes():
    options = {"alibi_slopes": (4,), "need": (*NEED, "dslopes")}
    assert explain(**options).kernel == explain(256, **options).kernel == "sm90"
    assert explain(**options, softcap=5.0).kernel == "sm80"
    assert "five products fused" not in explain(**options).reason
    assert "five products fused" in explain(**{**options, "need": NEED}).reason


def test_the_fused_kernel_has_a_bias_at_128_alone():
    assert "five products fused" in explain(128).reason
    assert "five products fused" not in explain(64).reason
    assert "five products fused" not in explain(128, deterministic=True).reason


def test_parts_of_few_tiles_want_workspace():
    """64 tiles of 128 x 128 in a plane of dbias, where 256 CTAs are wanted."""
    states = 2 * 4 * (2048 + 5 * 128) * 4
    whole = explain(bias=(2, 4, 1024, 1024), deterministic=True)
    assert whole.workspace_bytes == states
    one = explain(bias=(1, 1, 1024, 1024), deterministic=True)
    assert one.workspace_bytes == states + 4 * 1024 * 1024 * 4


BIASED = {
    "full": {},
    "per head": {"bias": "per head", "seqlen_q": 260, "seqlen_kv": 131},
    "per batch": {"bias": "per batch", "batch": 3, "causal": False},
    "one": {"bias": "rows", "batch": 3, "window": (50, 20), "causal": False},
    "group": {"bias": "per head", "num_heads_q": 6, "num_heads_kv": 1, "seqlen_kv": 129},
    "ragged": {"layout": "ragged", "batch": 4, "bias": "rows"},
    "ragged full": {"layout": "ragged", "batch": 3, "causal": False, "seqused": "both"},
    "used": {"seqused": "both", "batch": 3, "bias": "per head", "sinks": True},
    "dead rows": {"seqlen_q": 300, "seqlen_kv": 200, "bias": "per head"},
    "bhsd": {"layout": "bhsd", "storage": "transposed", "scale": -0.2, "give_out": False},
    "long": {"seqlen_q": 600, "seqlen_kv": 700, "batch": 1, "bias": "rows"},
    "long full": {"seqlen_q": 520, "seqlen_kv": 1031, "batch": 1, "causal": False},
    "long ragged": {"seqlen_q": 640, "seqlen_kv": 515, "batch": 3, "layout": "ragged",
                    "bias": "per head", "seqused": "k"},
    "long used": {"seqlen_q": 600, "seqlen_kv": 512, "seqused": "both", "bias": "rows"},
    "own forward": {"own_forward": True, "bias": "per head"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(40, 64, 104, 128))
@pytest.mark.parametrize("name", BIASED)
def test_bias(device, backend, dim, name, dtype, rng):
    """All gradients; and dbias has the same bits alone, in order and in any order."""
    case = dataclasses.replace(BASE, head_dim=dim, dtype=dtype, **BIASED[name])
    problem = assert_case(device, backend, case, rng)
    first = run(device, backend, problem)
    for need in (("dbias",), ("dq", "dbias"), problem.need):
        for _ in range(3):
            again = run(device, backend, problem, need, deterministic=True)
            assert np.array_equal(bits(again["dbias"]), bits(first["dbias"]))
    assert_case(device, backend, case, rng, deterministic=True)


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(96, 192, 256))
def test_bias_of_other_head_dims(device, backend, dim, rng):
    assert_case(device, backend, dataclasses.replace(BASE, head_dim=dim), rng, need=NEED)


@pytest.mark.parametrize("storage", ["padded", "transposed", "contiguous", "reversed"])
@pytest.mark.parametrize(("device", "backend"), on_hopper())
def test_where_dbias_goes(device, backend, storage, monkeypatch, rng):
    plain = harness.storages
    monkeypatch.setattr(harness, "storages", lambda case: {**plain(case), "dbias": storage})
    for keys in (304, 299):
        assert_case(device, backend, dataclasses.replace(BASE, seqlen_kv=keys), rng)


@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 128))
@pytest.mark.parametrize("rows", [135, 600])
def test_bias_that_hides(device, backend, dim, rows, rng):
    """-inf hides a key, of some rows or of all; beside `sm80`."""
    case = dataclasses.replace(BASE, head_dim=dim, seqlen_q=rows, seqlen_kv=rows, dlse=False)
    problem = make_problem(case, rng)
    bias = problem.forward.arrays["bias"]
    bias[rng.random(bias.shape) < 0.5] = -np.inf
    bias[:, :, 70] = -np.inf
    bias[..., 5] = -np.inf
    out, lse = problem.forward.reference()
    problem.arrays |= {
        "out": out.astype(problem.arrays["out"].dtype),
        "lse": lse.astype(np.float32),
    }
    found = run(device, backend, problem)
    for name, x in run(device, "sm80", problem).items():
        ours, theirs = found[name].astype(np.float64), x.astype(np.float64)
        assert np.isfinite(theirs).all()
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(theirs).max(), name
    for nothing in (found["dbias"][:, :, 70], found["dbias"][..., 5], found["dq"][:, 70]):
        assert not nothing.any()
    assert not found["dv"][:, 5].any()


SLOPES = {
    "head": {},
    "batch": {"alibi": "batch", "causal": False, "batch": 3},
    "window": {"window": (50, 20), "causal": False, "seqlen_q": 300},
    "ragged": {"layout": "ragged", "batch": 4},
    "used": {"seqused": "both", "batch": 3, "alibi": "batch", "sinks": True},
    "dead rows": {"seqlen_q": 300, "seqlen_kv": 200},
    "long": {"seqlen_q": 600, "seqlen_kv": 700, "batch": 1},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend", "dim"), on_hopper(64, 96, 128, 192, 256))
@pytest.mark.parametrize("name", SLOPES)
def test_dslopes(device, backend, dim, name, dtype, rng):
    case = {"alibi": "head", "bias": "none", "head_dim": dim, "dtype": dtype, **SLOPES[name]}
    case = dataclasses.replace(BASE, **case)
    problem = assert_case(device, backend, case, rng)
    first = run(device, backend, problem)
    for need in (("dslopes",), ("dk", "dslopes"), problem.need, problem.need):
        for key, x in run(device, backend, problem, need).items():
            assert np.array_equal(bits(x), bits(first[key])), key


@pytest.mark.parametrize(("device", "backend"), target_params(cuda=("sm90", "sm80", "naive")))
def test_dbias_is_whole_where_lengths_are_bounded_from_afar(device, backend, rng):
    """A bound above all rows together: the bias has rows and keys that no sequence has."""
    shape = {"batch": 3, "seqlen_q": 40, "seqlen_kv": 56}
    case = dataclasses.replace(BASE, **shape, layout="ragged", head_dim=64, give_out=True)
    problem = make_problem(case, rng)
    while not all(problem.forward.arrays[name].size for name in "qk"):
        problem = make_problem(case, rng)
    tight = run(device, backend, problem)["dbias"].astype(np.float32)
    given = problem.forward.arrays
    more = [(0, 0), (0, 0), *((0, 304 - n) for n in given["bias"].shape[2:])]
    far = dataclasses.replace(
        problem.forward, arrays={**given, "bias": np.pad(given["bias"], more)}, lengths=(304, 304)
    )
    wide = run(device, backend, dataclasses.replace(problem, forward=far))["dbias"]
    wide = wide.astype(np.float32)
    assert not wide[:, :, tight.shape[2] :].any()
    assert not wide[..., tight.shape[3] :].any()
    np.testing.assert_allclose(wide[:, :, : tight.shape[2], : tight.shape[3]], tight, atol=1e-2)


@pytest.mark.parametrize(
    ("device", "backend", "empty"),
    target_params(("qk", "q", "k"), cuda=("sm90", "sm80", "naive")),
)
def test_dbias_is_written_where_no_row_is(device, backend, empty, rng):
    """No query, no key or neither in all sequences together, under a bound of lengths above."""
    case = dataclasses.replace(BASE, layout="ragged", head_dim=64, causal=False, give_out=True)
    problem = make_problem(case, rng)
    forward, arrays = dict(problem.forward.arrays), dict(problem.arrays)
    if "q" in empty:
        forward |= {"q": forward["q"][:0], "cu_seqlens_q": np.zeros_like(forward["cu_seqlens_q"])}
        arrays |= {name: x[:0] for name, x in arrays.items() if x.ndim == 3}
        arrays |= {name: x[:, :0] for name, x in arrays.items() if x.ndim == 2}
    if "k" in empty:
        forward |= {name: forward[name][:0] for name in "kv"}
        forward["cu_seqlens_k"] = np.zeros_like(forward["cu_seqlens_k"])
        arrays["out"] = np.zeros_like(arrays["out"])
        arrays["lse"] = np.full_like(arrays["lse"], -np.inf)
    problem = dataclasses.replace(
        problem, arrays=arrays, forward=dataclasses.replace(problem.forward, arrays=forward)
    )
    for name, x in run(device, backend, problem).items():
        assert x.shape == forward[SOURCES[name]].shape
        assert not x.astype(np.float32).any(), name
    assert problem.forward.arrays["bias"].size > 0
