# SPDX-License-Identifier: Apache-2.0
"""sm90 with a scale for each 128 rows of float8 or int8 q and k, which changes by the tile."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
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
FACTORS = {
    **float8_cases.SM90_FACTORS,
    "layout": ("bshd", "bhsd"),
    "kv_start": (False,),
    "accumulate": ("exact",),
    "scales": ("one", "head", "batch", "channel", "parts"),
    "dims": tuple(d for d in float8_cases.SM90_FACTORS["dims"] if max(d) > 64),
}
ROWS = cases.pairwise(FACTORS)
PARTS = 4
COARSE = np.log(2) / 128  # a unit of products from which on scores are as they are


def columns(x):
    """[batch, rows, heads, dim] with the rows contiguous."""
    made = np.zeros((*x.transpose(0, 2, 3, 1).shape[:3], -(-x.shape[1] // 16) * 16), x.dtype)
    made[..., : x.shape[1]] = x.transpose(0, 2, 3, 1)
    return made[..., : x.shape[1]].transpose(0, 3, 1, 2)


def unit_of(case, given):
    """What one of a product of codes is at most, as a score."""
    largest = [
        np.max(given.arrays.get(name, given.options.get(name, 1.0)), initial=0.0)
        for name in ("q_scale", "k_scale")
    ]
    return min(float(np.prod(largest)) * (case.scale or case.head_dim**-0.5), COARSE)


def judge(device, backend, case, kind, int8, rng):
    given, numbers = float8_cases.make(case, kind, rng, int8)
    case = dataclasses.replace(case, dtype="float32" if case.give_out else "bfloat16")
    place = "columns_bhsd" if case.layout == "bhsd" else "columns"
    out, lse = harness.run(device, backend, given, {"v": place})
    assert out.dtype == cases.DTYPES[case.dtype]
    unit = unit_of(case, given) if int8 else 0.0
    float8_cases.judge_products(case, numbers, out, lse, unit=unit)


def both(*others):
    """Parameters of a test: int8 or float8, and others, on a Hopper."""
    kinds = tuple(itertools.product((False, True), *others))
    return target_params(kinds, cpu=(), cuda=("sm90",))


@pytest.mark.parametrize(("device", "backend", "int8", "part"), both(range(PARTS)))
def test_every_option_with_every_other(device, backend, int8, part, rng):
    for row in ROWS[part::PARTS]:
        row = dict(row)
        kind, _ = row.pop("scales"), row.pop("accumulate")
        kind = kind if int8 else "parts"  # float8 has other kernels without
        case = dataclasses.replace(cases.case_of(row), dtype="float32")
        judge(device, backend, case, kind, int8, rng)


LONG = [
    Case(batch=1, seqlen_q=385, seqlen_kv=1027, head_dim=128, causal=True, num_heads_q=2,
         num_heads_kv=2),
    Case(batch=2, seqlen_q=300, seqlen_kv=300, head_dim=128, causal=True, num_heads_q=24,
         num_heads_kv=8),
    Case(batch=4, seqlen_q=700, seqlen_kv=700, head_dim=96, num_heads_q=16, num_heads_kv=16),
    Case(batch=4, seqlen_q=700, seqlen_kv=700, head_dim=256, causal=True, num_heads_q=16,
         num_heads_kv=8),  # more items than multiprocessors
    Case(batch=2, seqlen_q=3, seqlen_kv=4099, head_dim=128, num_heads_q=8, num_heads_kv=2),
    Case(batch=3, seqlen_q=300, seqlen_kv=900, head_dim=128, seqused="both", causal=True),
    Case(batch=1, seqlen_q=300, seqlen_kv=1301, head_dim=112, window=(300, 7), num_heads_q=2,
         num_heads_kv=1),
    Case(batch=2, seqlen_q=3, seqlen_kv=4099, head_dim=256, num_heads_q=8, num_heads_kv=2),
    Case(batch=1, seqlen_q=700, seqlen_kv=900, head_dim=240, causal=True),
]  # fmt: skip


@pytest.mark.parametrize(("device", "backend", "int8", "magnitude"), both((0.0, 2.0)))
def test_many_tiles(device, backend, int8, magnitude, rng):
    for case in LONG:
        for kind in ("parts", "head") if int8 else ("parts",):
            case = dataclasses.replace(case, dtype="float32", magnitude=magnitude)
            judge(device, backend, case, kind, int8, rng)


@pytest.mark.parametrize(("device", "backend", "int8", "seqused"), both(("none", "both")))
def test_rows_that_see_few_keys_or_none(device, backend, int8, seqused, rng):
    for lengths in ((1, 2), (40, 3), (63, 65), (70, 15), (300, 31), (140, 200), (5, 1500)):
        for dim, heads in ((96, (7, 7)), (128, (4, 2)), (256, (4, 2))):
            case = Case(
                seqused=seqused, seqlen_q=lengths[0], seqlen_kv=lengths[1],
                head_dim=dim, causal=bool(rng.random() < 0.5), sinks=bool(rng.random() < 0.5),
                batch=3, num_heads_q=heads[0], num_heads_kv=heads[1], head_dim_v=dim // 2,
                magnitude=float(rng.choice([1, 4])), give_out=bool(rng.random() < 0.5),
            )  # fmt: skip
            judge(device, backend, case, "parts", int8, rng)


def attend(device, backend, q, k, v, **scales):
    """The library, and float64 of what codes and scales of 128 rows mean: one batch, one head."""
    arena = harness.Arena(device)
    given = [arena.put(q), arena.put(k), arena.put(v, "columns")]
    put = {name: arena.put(np.float32(x)[None, None]) for name, x in scales.items()}
    out, lse = cuattn.attention(*given, **put, backend=backend, return_lse=True)
    device.synchronize()
    wide = [x[0, :, 0].astype(np.float64) for x in (q, k, v)]
    for i, name in ((0, "q_scale"), (1, "k_scale")):
        wide[i] *= np.repeat(scales[name], 128)[: len(wide[i]), None]
    scores = wide[0] @ wide[1].T / q.shape[-1] ** 0.5
    top = scores.max(-1, keepdims=True)
    probs = np.exp(scores - top)
    total = probs.sum(-1, keepdims=True)
    out, lse = (np.asarray(device.numpy(x), np.float64) for x in (out, lse))
    return (out[0, :, 0], lse[0, 0]), (probs / total @ wide[2], (top + np.log(total))[:, 0])


@pytest.mark.parametrize(("device", "backend", "int8", "dim"), both((80, 128, 256)))
def test_scales_that_differ_a_thousand_times(device, backend, int8, dim, rng):
    """And scores that are all negative, or large, or 0, or of -128 times -128."""
    for size, shift in ((1e-4, 0), (1e-2, 0), (1e-4, 100), (1e-4, -100), (1.0, 0), (30.0, 0)):
        q, k = (rng.integers(-128, 128, (1, n, 1, dim)) for n in (300, 1000))
        if shift:
            q, k = abs(q), np.sign(shift) * np.maximum(abs(k), 1)
        q[0, 0], k[0, 3] = -128, -128
        q, k = (x.astype(np.int8 if int8 else F8) for x in (q, k))
        v = rng.standard_normal((1, 1000, 1, dim)).astype(F8)
        scales = {
            "q_scale": np.float32(size * 10.0 ** rng.uniform(-3, 0, 3)),
            "k_scale": np.float32(10.0 ** rng.uniform(-3, 0, 8) * (rng.random(8) < 0.9)),
        }
        found, wanted = attend(device, backend, q, k, v, **scales)
        unit = scales["q_scale"].max() * scales["k_scale"].max() / dim**0.5
        largest = 128 * 128 * dim * unit
        allowed = 1e-4 + 2e-6 * np.abs(wanted[1])
        allowed += min(unit, COARSE) if int8 else 2.0**-12 * largest
        assert (np.abs(found[1] - wanted[1]) <= allowed).all(), (size, shift)
        if np.max(allowed) > 0.2:  # sums of float8 products say no more of such scores
            continue
        error = np.linalg.norm(found[0] - wanted[0], axis=-1)
        within = error <= (0.08 + 2 * allowed) * np.linalg.norm(wanted[0], axis=-1) + 0.05
        assert within.all(), (size, shift)


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=(), cuda=("sm90",)))
def test_what_quantize_makes_has_less_error_than_float8(device, backend, torch, rng):
    q, k, v = (
        torch.from_numpy(rng.standard_normal((2, 1500, heads, 128), np.float32)).cuda()
        for heads in (8, 2, 2)
    )
    wide = [x.double() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide), enable_gqa=True, is_causal=True
    ).transpose(1, 2)
    errors = {}
    for mode in ("int8", "block"):
        made = cuattn.quantize(*(x.bfloat16() for x in (q, k, v)), mode=mode)
        options = {"causal": True, **made.scales}
        assert "codes become" not in cuattn.explain("attention", *made.arrays, **options).ladder
        options["backend"] = backend
        out = cuattn.attention(*made.arrays, **options)
        again = [cuattn.attention(*made.arrays, **options) for _ in range(20)]
        assert all(torch.equal(out, x) for x in again)
        errors[mode] = float((out.double() - exact).norm() / exact.norm())
    assert errors["int8"] < 0.06, errors
    assert errors["int8"] < 1.05 * errors["block"], errors


def codes_of(dtype):
    kinds = ((4, dtype), (2, dtype), (2, F8))
    return [np.zeros((1, 300, heads, 128), kind) for heads, kind in kinds]


BLOCKS = {"q_scale": (1, 4, 3), "k_scale": (1, 2, 3), "v_scale": (1, 2)}
SCALES = {name: np.ones(shape, np.float32) for name, shape in BLOCKS.items()}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 3)}], ids=str)
@pytest.mark.parametrize("dtype", ["int8", F8], ids=str)
def test_a_hopper_multiplies_codes_with_scales_of_rows(dtype, options):
    q, k, v = codes_of(dtype)
    for scales in (SCALES, {}) if dtype == "int8" else (SCALES,):
        plan = cuattn.explain("attention", q, k, columns(v), device=H100, **options, **scales)
        assert plan.kernel == "sm90"
        assert "probabilities are rounded to float8, sums have two levels" in plan.ladder
        assert "codes become" not in plan.ladder
    of_keys = {"k_scale": np.ones((1, 2, 3), np.float32)}
    few = (q[:, :1], k, columns(v))
    plan = cuattn.explain("attention", *few, device=H100, **options, **of_keys)
    assert plan.packed_heads == 2  # of one scale each
    of_queries = {"q_scale": np.ones((1, 4, 1), np.float32)}
    plan = cuattn.explain("attention", *few, device=H100, **options, **of_queries)
    assert plan.packed_heads == 1


REFUSED = {
    "rows": ({}, "with scales of 128 rows, or int8, it takes values by columns alone"),
    "softcap": ({"softcap": 3.0}, "over float8 it has no softcap"),
    "start": (
        {"kv_start": np.zeros(1, np.int32)},
        "with scales of 128 rows, or int8, sequences begin where their array does",
    ),
    "head_dim 64": ({}, "with scales of 128 rows, or int8, numbers are as fast at head_dim 64"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", ["int8", F8], ids=str)
def test_what_it_does_not_take_naive_or_numbers_take(dtype, name):
    options, why = REFUSED[name]
    q, k, v = (x[..., :64] if name == "head_dim 64" else x for x in codes_of(dtype))
    options = {**options, **SCALES}
    v = v if name == "rows" else columns(v)
    plan = cuattn.explain("attention", q, k, v, device=H100, **options)
    taken = ("naive", False) if name == "start" else ("sm90", True)
    assert (plan.kernel, "codes become numbers" in plan.ladder) == taken
    with pytest.raises(NotImplementedError, match=why):
        cuattn.explain("attention", q, k, v, device=H100, backend="sm90", **options)


def test_quantize_makes_what_it_takes():
    x = np.random.default_rng(0).standard_normal((1, 200, 2, 128), np.float32)
    for mode, dtype in (("int8", np.int8), ("block", ml_dtypes.float8_e4m3fn)):
        made = cuattn.quantize(x, x, x, mode=mode)
        assert (made.q.dtype, made.v.dtype) == (dtype, ml_dtypes.float8_e4m3fn)
        plan = cuattn.explain("attention", *made.arrays, device=H100, **made.scales)
        assert (plan.kernel, "codes become" in plan.ladder) == ("sm90", False)
