# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen against the float64 reference: every backend, dtype, option, shape
and storage.

Rows that take no part hold NaN, outputs given by us start as NaN, and every array lies between
guard bands. NaN, large logits and low biases: test_prefill_values.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
from cases import (
    DTYPES,
    FACTORS,
    HEAD_DIMS,
    LENGTHS,
    TENSOR_CORE_BACKENDS,
    Case,
    case_of,
    check,
    make_problem,
    pairwise,
    random_case,
)
from harness import (
    Arena,
    assert_case,
    bits,
    devices,
    judge,
    run,
    serves,
    storages,
    target_params,
)
from strides import STORAGES

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (7, 3)}}


def claims(named_cases):
    """Parameters device, backend, case for a list or dict of cases."""
    cases = list(named_cases.values()) if isinstance(named_cases, dict) else list(named_cases)
    names = (
        list(named_cases) if isinstance(named_cases, dict) else [str(i) for i in range(len(cases))]
    )
    return pytest.mark.parametrize(("device", "backend", "case"), target_params(cases, ids=names))


def test_seed_of_the_mission():
    """Batch 2, heads 4, sequence 128, head 64, float32: within 1e-5 of the plain formula."""
    rng = np.random.default_rng(0)
    problem = make_problem(Case(num_heads_kv=4, seqlen_q=128, seqlen_kv=128, layout="bhsd"), rng)
    q, k, v = (problem.arrays[name] for name in "qkv")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    plain = weights / weights.sum(axis=-1, keepdims=True) @ v
    for device in (d for d in devices() if hasattr(d, "name")):
        out, _ = run(device, "auto", problem)
        assert np.abs(out - plain).max() < 1e-5


@claims([case_of(row) for row in pairwise(FACTORS)])
def test_every_pair_of_options(device, backend, case, rng):
    assert_case(device, backend, case, rng)


@pytest.mark.parametrize(("device", "backend", "number"), target_params(range(500)))
def test_random_configurations(device, backend, number, rng):
    case = random_case(rng)
    print(case)  # shown when the test fails
    assert_case(device, backend, case, rng)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend", "number"), target_params(range(100)))
def test_random_configurations_in_bulk(device, backend, number, rng):
    for _ in range(100):
        case = random_case(rng)
        print(case)
        assert_case(device, backend, case, rng)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend", "seed"), target_params(range(1, 11)))
def test_every_pair_of_options_in_other_company(device, backend, seed, rng):
    for row in pairwise(FACTORS, seed):
        print(case_of(row))
        assert_case(device, backend, case_of(row), rng)


@claims(
    {
        f"{name}-{mask}-{dtype}": Case(dtype, seqlen_q=sq, seqlen_kv=sk, head_dim=40, **options)
        for name, (sq, sk) in LENGTHS.items()
        for mask, options in MASKS.items()
        for dtype in DTYPES
    }
)
def test_lengths(device, backend, case, rng):
    assert_case(device, backend, case, rng)


LONG = {(1, 4096): 128, (129, 2048): 256, (513, 511): 64, (1023, 1025): 128, (2048, 300): 192,
        (300, 3131): 64, (777, 1): 40}  # fmt: skip
LONG_MASKS = {**MASKS, "window": {"window": (257, 100)}, "local": {"window": (64, 0)}}


@claims(
    {
        f"{sq}-{sk}-{mask}-{dtype}": Case(dtype, 1, 2, 1, sq, sk, dim, **options)
        for (sq, sk), dim in LONG.items()
        for mask, options in LONG_MASKS.items()
        for dtype in DTYPES
    }
)
def test_many_tiles(device, backend, case, rng):
    """Sequences of many tiles, so that every stage of a pipeline is used again."""
    if device.name == "cpu" and backend == "naive" and case.dtype != "float32":
        pytest.skip("the CPU's plain loop has no tiles; test_lengths has every dtype")
    assert_case(device, backend, case, rng)


@claims(
    {
        f"{dim}-{dtype}": Case(dtype, 1, 2, 1, seqlen_q=37, seqlen_kv=70, head_dim=dim, causal=True)
        for dim in HEAD_DIMS
        for dtype in DTYPES
    }
)
def test_head_dims(device, backend, case, rng):
    assert_case(device, backend, case, rng)


DIM_PAIRS = [
    (192, 128),
    (64, 8),
    (8, 64),
    (8, 256),
    (256, 8),
    (128, 136),
    (136, 128),
    (96, 104),
    (72, 56),
    (184, 120),
    (192, 136),
    (200, 128),
    (32, 40),
]


@claims(
    {
        f"{dim}-{dim_v}-{dtype}": Case(dtype, 2, 2, 1, 70, 90, dim, dim_v, window=(30, 4))
        for dim, dim_v in DIM_PAIRS
        for dtype in DTYPES
    }
)
def test_value_head_dim_may_differ(device, backend, case, rng):
    assert_case(device, backend, case, rng)


@claims(
    {
        f"{n}": Case(num_heads_q=n * 2, num_heads_kv=2, head_dim=32)
        for n in (1, 2, 3, 4, 5, 7, 8, 16)
    }
)
def test_grouped_heads(device, backend, case, rng):
    assert_case(device, backend, case, rng)


@claims(
    {
        f"{sq}-{sk}-{left}-{right}-{causal}": Case(
            "float32", 1, 2, 2, sq, sk, 16, window=(left, right), causal=causal, layout="bhsd"
        )
        for sq, sk in ((1, 70), (70, 70), (70, 1), (40, 130), (130, 40))
        for left, right in (
            (0, 0),
            (0, -1),
            (-1, 0),
            (1, 2),
            (63, 64),
            (64, 0),
            (200, 3),
            (3, 200),
            (300, 300),
        )
        for causal in (False, True)
    }
)
def test_windows_are_inclusive_on_both_sides(device, backend, case, rng):
    assert_case(device, backend, case, rng)


ALONE = [
    (storage, moved)
    for storage in STORAGES[1:]
    for moved in (("k", "v") if storage == "expanded" else ("q", "k", "v", "out", "lse_out"))
]  # the same memory for several heads makes sense for k and v only


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "ragged"])
@pytest.mark.parametrize(("device", "backend", "storage", "moved"), target_params(ALONE))
def test_each_array_alone_in_each_storage(device, backend, storage, moved, layout, rng):
    dtype = "float32" if backend == "simt" else "bfloat16"
    case = Case(dtype, 2, 4, 4, 33, 65, 64, layout=layout, causal=True, storage=storage)
    places = dict.fromkeys(("q", "k", "v", "out", "lse_out"), "contiguous")
    places[moved] = storages(case).get(moved, storage)
    assert_case(device, backend, case, rng, places=places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_slices_of_one_qkv_array(device, backend, dtype, rng):
    case = Case(dtype, 2, 3, 3, 50, 50, 32, causal=True)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    problem = make_problem(case, rng)
    # [batch, seqlen, 3, heads, dim]
    joined = np.stack([problem.arrays[name] for name in "qkv"], axis=2)
    arena = Arena(device)
    qkv = arena.put(joined)
    slices = (qkv[:, :, i] for i in range(3))
    out, lse = cuattn.attention(*slices, causal=True, backend=backend, return_lse=True)
    device.synchronize()
    arena.verify()
    apart, apart_lse = run(device, backend, problem)
    assert np.array_equal(bits(device.numpy(out)), bits(apart))
    assert np.array_equal(bits(device.numpy(lse)), bits(apart_lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_rows_without_keys_are_zero_with_minus_infinite_lse(device, backend, dtype, rng):
    for options in (
        {"causal": True, "seqlen_q": 130, "seqlen_kv": 66},
        {"seqlen_kv": 0},
        {"window": (-1, 0), "seqlen_kv": 5},
    ):
        case = Case(dtype, 2, 2, 2, head_dim=32, **options)
        assert_case(device, backend, case, rng)
        if not serves(backend, device, case):
            continue
        out, lse = run(device, backend, make_problem(case, rng))
        dead = max(0, case.seqlen_q - case.seqlen_kv)
        assert not np.asarray(out[:, :dead], np.float32).any()
        assert (lse[:, :, :dead] == -np.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 7, 2**31 - 1])
@pytest.mark.parametrize("layout", ["bshd", "ragged"])
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_a_number_of_splits_is_a_wish(device, backend, layout, num_splits, rng):
    dtype = "float32" if backend == "simt" else "float16"
    case = Case(dtype, 2, 4, 2, 9, 700, 64, layout=layout)
    if not serves(backend, device, case):
        pytest.skip("refused, as every case of its kind")
    problem = make_problem(case, rng)
    wished = dataclasses.replace(problem, options={**problem.options, "num_splits": num_splits})
    judge(problem, *run(device, backend, wished))


@pytest.mark.parametrize(("device", "backend"), target_params())
def test_more_sequences_than_a_grid_axis_holds(device, backend, rng):
    batch = 70_000 if device.name == "cuda" else 700  # the CPU has no grid
    case = Case("float16" if backend in TENSOR_CORE_BACKENDS else "float32", batch, 1, 1, 1, 3, 8)
    assert_case(device, backend, case, rng)
    ragged = dataclasses.replace(case, layout="ragged")
    assert_case(device, backend, ragged, rng)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_the_same_call_gives_the_same_bits(device, backend, dtype, ragged, rng):
    case = Case(
        dtype,
        60 if device.name == "cuda" else 7,
        4,
        2,
        100,
        130,
        64,
        causal=True,
        layout="ragged" if ragged else "bshd",
        give_out=False,
    )
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this call")
    problem = make_problem(case, rng)
    first = [bits(x) for x in run(device, backend, problem)]
    rows = int(problem.arrays["cu_seqlens_q"][-1]) if ragged else None
    for _ in range(30 if device.name == "cuda" else 4):
        again = run(device, backend, problem)
        for a, b in zip(first, again, strict=True):
            b = bits(b)
            if ragged:  # rows behind the last sequence are not written
                a, b = (x[:rows] if x.ndim == 3 else x[:, : rows * 4] for x in (a, b))
            assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_lse_does_not_change_out(device, backend, dtype, rng):
    case = Case(dtype, 2, 4, 2, 65, 70, 64, causal=True)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    problem = make_problem(case, rng)
    q, k, v = (Arena(device).put(problem.arrays[name]) for name in "qkv")
    out = cuattn.attention(q, k, v, causal=True, backend=backend)
    with_lse, _ = cuattn.attention(q, k, v, causal=True, backend=backend, return_lse=True)
    device.synchronize()
    assert np.array_equal(bits(device.numpy(out)), bits(device.numpy(with_lse)))


@pytest.mark.parametrize(
    "shape",
    [(0, 5, 2, 8), (2, 0, 2, 8), (0, 0, 2, 8), (2, 5, 0, 8)],
    ids=["batch", "queries", "both", "heads"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_zero_sizes_return_empty_results(device, backend, dtype, shape, rng):
    case = Case(dtype, shape[0], shape[2], shape[2], shape[1], 7, shape[3], give_out=False)
    if not serves(backend, device, case):
        pytest.skip("the rung does not take this dtype")
    q, k = np.zeros(shape, DTYPES[dtype]), np.zeros((shape[0], 7, *shape[2:]), DTYPES[dtype])
    arena = Arena(device)
    out, lse = cuattn.attention(
        arena.put(q), arena.put(k), arena.put(k), backend=backend, return_lse=True
    )
    device.synchronize()
    assert device.numpy(out).shape == shape
    assert device.numpy(lse).shape == (
        shape[0],
        shape[2],
        shape[1],
    )


@pytest.mark.parametrize(
    "lengths", [([], []), ([0], [0]), ([0, 5], [0, 0]), ([0, 0], [0, 3]), ([2, 0, 3], [0, 4, 70])]
)
@pytest.mark.parametrize(("device", "backend"), target_params())
def test_empty_sequences_in_a_ragged_batch(device, backend, lengths, rng):
    dtype = "bfloat16" if backend in TENSOR_CORE_BACKENDS else "float32"
    queries, keys = lengths
    case = Case(
        dtype,
        len(queries),
        2,
        1,
        max(queries, default=0),
        max(keys, default=0),
        16,
        layout="ragged",
    )

    def pack(problem):
        arrays = problem.arrays
        for name, n, heads in (("q", queries, 2), ("k", keys, 1), ("v", keys, 1)):
            arrays[name] = rng.standard_normal((sum(n), heads, 16)).astype(DTYPES[dtype])
        arrays["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        arrays["cu_seqlens_k"] = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)

    assert_case(device, backend, case, rng, pack)


def test_the_rule_measures_against_the_plain_formula():
    """A result twice as far from the truth as the plain formula passes, three times fails."""
    truth, plain = np.ones(100), np.ones(100) + 1e-3
    for dtype in ("float32", "float16"):
        check(np.ones(100) + 2e-3, truth, plain, dtype)
        with cases.drawn_again(), pytest.raises(AssertionError, match="max error"):
            check(np.ones(100) + 3e-3, truth, plain, dtype)
    check(np.ones(100) + 3e-3, truth, plain, "float32")  # one draw alone: this may be chance
    with pytest.raises(AssertionError, match="max error"):
        check(np.ones(100) + 5e-3, truth, plain, "float32")
