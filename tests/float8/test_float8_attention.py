# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on float8_e4m3fn q, k and v: every option with every other, scales
of every shape, values by rows and by columns, every code, and mistakes that must show.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import float8_cases
import harness
import reference
from cases import Case
from float8_cases import F8, FACTORS, SCALES
from harness import target_params

PAIRS = cases.pairwise(FACTORS)[::5]  # the kernels' own options have all pairs in test_prefill.py
PARTS = 3
CUDA = ("naive",)  # auto: test_float8_sm90.py, test_float8_numbers.py


@pytest.mark.parametrize("int8", [False, True], ids=["float8", "int8"])  # q and k
@pytest.mark.parametrize(
    ("device", "backend", "part"), target_params(tuple(range(PARTS)), cuda=CUDA)
)
def test_every_option_with_every_other(device, backend, part, int8, rng):
    for row in PAIRS[part::PARTS]:
        row = dict(row)
        kind = row.pop("scales")
        float8_cases.assert_case(device, backend, cases.case_of(row), kind, rng, int8=int8)


def columns(v, layout):
    """The values with the sequence as their contiguous axis, padded to 16."""
    order = {"bshd": (0, 2, 3, 1), "bhsd": (0, 1, 3, 2), "ragged": (1, 2, 0)}[layout]
    stored = v.transpose(order)
    rows = stored.shape[-1]
    made = np.full((*stored.shape[:-1], -(-rows // 16) * 16), 0xFF, np.uint8).view(F8)
    made[..., :rows] = stored
    return made[..., :rows].transpose(np.argsort(order))


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "ragged"])
def test_values_by_columns_give_the_same_bits(backend, layout, rng):
    for rows, keys in ((1, 129), (5, 3), (40, 300), (130, 64)):
        case = Case(seqlen_q=rows, seqlen_kv=keys, head_dim=64, head_dim_v=80, layout=layout,
                    seqused="k", causal=True)  # fmt: skip
        given, _ = float8_cases.make(case, "parts", rng)
        turned = {**given.arrays, "v": columns(given.arrays["v"], layout)}
        assert keys == 1 or turned["v"].strides[-1] != 1
        results = []
        for arrays in (given.arrays, turned):
            named = dict(arrays)
            qkv = [named.pop(name) for name in "qkv"]
            function = cuattn.attention
            if layout == "ragged":
                function = cuattn.attention_varlen
                lens = [named.pop("cu_seqlens_q"), named.pop("cu_seqlens_k")]
                qkv += [*lens, *given.lengths]
            results.append(function(*qkv, **named, **given.options, backend=backend))
        first = [harness.bits(x) for x in results]
        stored = len(first[0])
        assert np.array_equal(first[0][:stored], first[1]) or layout == "ragged"
        if layout == "ragged":  # rows that belong to no sequence are not written
            used = int(given.arrays["cu_seqlens_q"][-1])
            assert np.array_equal(harness.bits(results[0][:used]), harness.bits(results[1][:used]))


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_every_code_is_read_as_what_it_means(backend):
    codes = np.arange(256, dtype=np.uint8).view(F8)
    finite = codes[np.isfinite(codes.astype(np.float32))]
    v = codes.reshape(1, 1, 1, 256)  # one key: out is its value
    q = np.zeros((1, 3, 1, 16), F8)
    out = np.empty((1, 3, 1, 256), np.float32)
    cuattn.attention(q, q[:, :1], v, v_scale=0.5, out=out, backend=backend)
    expected = np.broadcast_to(v.astype(np.float32) * np.float32(0.5), out.shape)
    np.testing.assert_array_equal(out, expected)
    for x in np.resize(finite, (16, 16)):  # as keys and as queries, by their scores
        k = np.resize(x, (1, 1, 1, 16)).astype(F8)
        one = np.ones((1, 1, 1, 16), F8)
        for q_codes, k_codes in ((one, k), (k, one)):
            given = {"scale": 1.0, "k_scale": 0.25, "return_lse": True, "backend": backend}
            _, lse = cuattn.attention(q_codes, k_codes, one, **given)
            assert lse[0, 0, 0] == pytest.approx(float(x.astype(np.float64).sum()) / 4, rel=1e-6)


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_every_int8_code_is_read_as_what_it_means(backend):
    """Scores are sums of products up to 127^2 x 256, which float32 has exactly."""
    codes = np.resize(np.arange(-128, 128, dtype=np.int8), (1, 1, 1, 256))
    q, v = np.full(codes.shape, 127, np.int8), np.ones((1, 1, 1, 16), F8)
    given = {"scale": 1.0, "k_scale": 2.0**-10, "return_lse": True, "backend": backend}
    for k in (codes, q, np.where(codes < 0, codes, 0).astype(np.int8)):
        out, lse = cuattn.attention(q, k, v, **given)
        assert lse[0, 0, 0] == np.float32(k.astype(np.float64).sum() * 127 / 1024)
        assert (out == 1).all()


def test_bytes_with_their_dtype_are_the_same_call(rng):
    q, k, v = (rng.standard_normal((2, 20, 4, 32)).astype(F8) for _ in range(3))
    options = {"k_scale": 0.5, "causal": True}
    as_bytes = [x.view(np.uint8) for x in (q, k, v)]
    told = cuattn.attention(*as_bytes, dtype="float8_e4m3fn", **options)
    assert told.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(told, cuattn.attention(q, k, v, **options))
    plan = cuattn.explain("attention", q, k, v, **options)
    assert plan.kernel == "cpu"
    shapes = [x.shape for x in (q, k, v)]
    assert cuattn.explain("attention", *shapes, dtype="float8_e4m3fn", device="cpu").kernel == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_out_is_of_the_dtype_that_is_given(dtype, rng):
    q, k, v = (rng.standard_normal((1, 33, 2, 64)).astype(F8) for _ in range(3))
    exact, _ = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    for backend in cases.CPU_BACKENDS:
        out = np.empty(q.shape, cases.DTYPES[dtype])
        assert cuattn.attention(q, k, v, out=out, backend=backend) is out
        error = np.abs(out.astype(np.float64) - exact).max()
        assert error <= max(cases.EPS[dtype], 1e-5) * np.abs(exact).max()


def test_a_scale_moves_neither_bits_nor_rows_when_it_is_a_power_of_two(rng):
    q, k, v = (rng.standard_normal((2, 150, 4, 64)).astype(F8) for _ in range(3))
    out = np.empty(q.shape, np.float32)
    cuattn.attention(q, k, v, scale=0.125, out=out)
    same = np.empty(q.shape, np.float32)
    cuattn.attention(q, k, v, scale=0.125, q_scale=4.0, k_scale=np.full((2, 4), 0.25, np.float32),
                     out=same)  # fmt: skip
    np.testing.assert_array_equal(out, same)


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_a_scale_of_zero_gives_what_zeros_give(backend, rng):
    q, k, v = (rng.standard_normal((1, 20, 2, 32)).astype(F8) for _ in range(3))
    out = cuattn.attention(q, k, v, k_scale=0.0, backend=backend)
    mean = v.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(mean, out.shape), atol=5e-3)
    assert not cuattn.attention(q, k, v, v_scale=0.0, backend=backend).astype(np.float32).any()


@pytest.mark.parametrize("int8", [False, True], ids=["float8", "int8"])  # q and k
@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "ragged"])
def test_fast_sums_are_the_same_bits_where_sums_are_float32(layout, backend, int8, rng):
    case = Case(batch=2, seqlen_q=40, seqlen_kv=300, head_dim=64, head_dim_v=80, layout=layout,
                causal=True)  # fmt: skip
    given, numbers = float8_cases.make(case, "parts", rng, int8)
    results = []
    for word in ("exact", "fast"):
        told = dataclasses.replace(given, options={**given.options, "accumulate": word})
        results.append(harness.run(harness.Cpu(), backend, told))
        bf16 = dataclasses.replace(case, dtype="bfloat16")
        harness.judge(dataclasses.replace(numbers, case=bf16), *results[-1])
    for exact, fast in zip(*results, strict=True):
        assert np.array_equal(harness.bits(exact), harness.bits(fast))


def test_torch_and_jax_take_fast_sums(rng):
    codes = [rng.standard_normal((2, 40, 4, 32)).astype(F8) for _ in range(3)]
    want = cuattn.attention(*codes, causal=True).view(np.int16)
    options = {"causal": True, "dtype": "float8_e4m3fn", "accumulate": "fast"}

    torch = pytest.importorskip("torch")
    call = lambda *x: cuattn.attention(*x, **options)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    tensors = [torch.from_numpy(x.view(np.uint8)) for x in codes]
    for function in (call, compiled):
        assert np.array_equal(function(*tensors).view(torch.int16).numpy(), want)

    jax = pytest.importorskip("jax")
    arrays = jax.device_put(codes, jax.devices("cpu")[0])
    for function in (call, jax.jit(call)):
        assert np.array_equal(np.asarray(function(*arrays)).view(np.int16), want)
    with pytest.raises(ValueError, match="accumulate must be 'exact' or 'fast', got 'slow'"):
        cuattn.attention(*arrays, accumulate="slow")
    floats = arrays[0].astype("float32")
    with pytest.raises(ValueError, match="accumulate must be 'exact' for float32 q, got 'fast'"):
        cuattn.attention(floats, floats, floats, accumulate="fast")


def test_kernels_lists_what_takes_float8():
    rows = [row for row in cuattn.kernels() if row["dtype"] == "float8_e4m3fn"]
    cpu = {row["kernel"] for row in rows if row["op"] == "attention" and row["arch"] != "cuda"}
    assert {"cpu", "cpu_naive"} <= cpu
    assert {"cpu", "cpu_naive"} <= {
        row["kernel"] for row in cuattn.kernels() if row["dtype"] == "int8"
    }


def test_a_gpu_says_why_other_kernels_do_not_take_it():
    shape = (1, 256, 8, 128)
    given = {"dtype": "float8_e4m3fn", "device": "h100"}
    plan = cuattn.explain("attention", shape, shape, shape, **given)
    assert plan.kernel == "sm90"
    plan = cuattn.explain("attention", shape, shape, shape, softcap=2.0, **given)
    assert plan.kernel == "sm90"
    assert "codes become numbers of 16 bits first" in plan.ladder
    assert plan.ladder.count("it does not take float8_e4m3fn") == 4
    codes = [(word, *shape) for word in ("int8", "int8", "float8_e4m3fn")]
    plan = cuattn.explain("attention", *codes, device="h100")  # shapes have v by rows
    assert plan.kernel == "sm90"
    assert "codes become numbers of 16 bits first" in plan.ladder
    assert plan.ladder.count("it does not take int8 q and k") == 4


# Mutants: the oracle reads scales wrongly; the rule must notice each.

BASE = Case(batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=200, seqlen_kv=300, head_dim=64,
            head_dim_v=32, causal=True)  # fmt: skip


def rolled(name, axis):
    def change(scales):
        return {**scales, name: np.roll(scales[name], 1, axis)}

    return change


MUTANTS = {
    "k_scale of the next block": rolled("k_scale", 2),
    "q_scale of the next block": rolled("q_scale", 2),
    "v_scale of the next channel": rolled("v_scale", 2),
    "k_scale of the next head": rolled("k_scale", 1),
    "q_scale of the next sequence": rolled("q_scale", 0),
    "no v_scale": lambda scales: {n: x for n, x in scales.items() if n != "v_scale"},
    "q_scale by key head": lambda scales: {
        **scales,
        "q_scale": np.repeat(scales["q_scale"][:, ::2], 2, axis=1),
    },
    "k_scale for q": lambda scales: {**scales, "k_scale": scales["k_scale"] * 1.03},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_scales_show(name, rng):
    given, numbers = float8_cases.make(BASE, "parts", rng)
    scales = {n: x for n, x in given.arrays.items() if n.endswith("_scale")}
    wrong = MUTANTS[name](scales)
    read = {
        n: float8_cases.meant(BASE, given, n, given.arrays[n], wrong.get(f"{n}_scale"))
        for n in "qkv"
    }
    mutant = dataclasses.replace(numbers, arrays={**numbers.arrays, **read})
    for dtype in ("float32", "bfloat16"):
        judged = dataclasses.replace(numbers, case=dataclasses.replace(BASE, dtype=dtype))
        harness.judge(judged, *numbers.reference(cases.DTYPES[dtype]))
        with pytest.raises(AssertionError):
            harness.judge(judged, *mutant.reference(cases.DTYPES[dtype]))


def test_the_grid_has_every_kind_of_scale():
    assert {row["scales"] for row in PAIRS} == set(SCALES)
