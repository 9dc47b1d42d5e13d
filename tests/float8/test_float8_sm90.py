# SPDX-License-Identifier: Apache-2.0
"""sm90 over float8 arrays: whom the planner gives it, and what it computes on a Hopper."""

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
A100 = dict(H100, major=8, num_sms=108)
ROWS = float8_cases.sm90_rows()
PARTS = 4


def columns(x):
    """[batch, rows, heads, dim] with the rows contiguous."""
    made = np.zeros((*x.transpose(0, 2, 3, 1).shape[:3], -(-x.shape[1] // 16) * 16), x.dtype)
    made[..., : x.shape[1]] = x.transpose(0, 2, 3, 1)
    return made[..., : x.shape[1]].transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("device", "backend", "part"),
    target_params(tuple(range(PARTS)), cpu=(), cuda=("sm90",)),
)
def test_every_option_with_every_other(device, backend, part, rng):
    for row in ROWS[part::PARTS]:
        row = dict(row)
        kind, accumulate = row.pop("scales"), row.pop("accumulate")
        case = dataclasses.replace(cases.case_of(row), dtype="float32")
        given, numbers = float8_cases.make(case, kind, rng, accumulate=accumulate)
        case = dataclasses.replace(case, dtype="float32" if case.give_out else "bfloat16")
        place = "columns_bhsd" if case.layout == "bhsd" else "columns"
        places = {"v": place} if rng.random() < 0.6 else {}
        out, lse = harness.run(device, backend, given, places)
        assert out.dtype == cases.DTYPES[case.dtype]
        float8_cases.judge_products(case, numbers, out, lse, accumulate)


LONG = [
    Case(batch=1, seqlen_q=385, seqlen_kv=1027, head_dim=128, causal=True, num_heads_q=2,
         num_heads_kv=2),
    Case(batch=2, seqlen_q=300, seqlen_kv=300, head_dim=64, causal=True, num_heads_q=24,
         num_heads_kv=8),
    Case(batch=2, seqlen_q=3, seqlen_kv=4099, head_dim=128, num_heads_q=8, num_heads_kv=2),
    Case(batch=3, seqlen_q=300, seqlen_kv=900, head_dim=128, layout="ragged", causal=True),
    Case(batch=1, seqlen_q=300, seqlen_kv=1301, head_dim=112, window=(300, 7), kv_start=True,
         num_heads_q=2, num_heads_kv=1),
    Case(batch=2, seqlen_q=3, seqlen_kv=4099, head_dim=256, num_heads_q=8, num_heads_kv=2),
    Case(batch=3, seqlen_q=300, seqlen_kv=900, head_dim=240, layout="ragged", causal=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "accumulate", "magnitude"),
    target_params(tuple(itertools.product(("exact", "fast"), (0.0, 2.0))), cpu=(), cuda=("sm90",)),
)
def test_many_tiles(device, backend, accumulate, magnitude, rng):
    for case in LONG:
        case = dataclasses.replace(case, dtype="float32", magnitude=magnitude)
        given, numbers = float8_cases.make(case, "batch", rng, accumulate=accumulate)
        for places in ({"v": "columns"}, {}):
            out, lse = harness.run(device, backend, given, places)
            float8_cases.judge_products(case, numbers, out, lse, accumulate)


# Rows without keys beside rows with few: keys that begin and end within the 16 bytes of values that
# a tile begins on, parts of split keys that a row does not see, tiles without queries.
FEW = {
    "used": dict(seqused="both"),
    "used causal": dict(seqused="k", causal=True),
    "start": dict(kv_start=True),
    "start used": dict(kv_start=True, seqused="both"),
    "start window": dict(kv_start=True, window=(9, 2), seqused="q"),
    "ragged": dict(layout="ragged"),
    "ragged used": dict(layout="ragged", seqused="both"),
    "ragged window": dict(layout="ragged", seqused="k", window=(0, 3)),
}
FEW_HEADS = (  # head_dim, heads, sinks, sums
    (64, (7, 7), True, "exact"),
    (64, (7, 7), True, "fast"),
    (128, (4, 2), False, "exact"),
    (128, (4, 2), False, "fast"),
    (256, (4, 2), True, "exact"),
    (256, (4, 2), True, "fast"),
)
FEW_LENGTHS = ((1, 2), (2, 7), (40, 3), (63, 65), (70, 15), (300, 31), (140, 200), (5, 1500))


@pytest.mark.parametrize(
    ("device", "backend", "name"),
    target_params(tuple(FEW), cpu=(), cuda=("sm90",)),
)
def test_rows_that_see_few_keys_or_none(device, backend, name, rng):
    for lengths in FEW_LENGTHS:
        for dim, heads, sinks, accumulate in FEW_HEADS:
            case = Case(
                **FEW[name], seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim=dim, sinks=sinks,
                batch=3, num_heads_q=heads[0], num_heads_kv=heads[1], head_dim_v=dim // 2,
                magnitude=float(rng.choice([1, 4])), give_out=bool(rng.random() < 0.5),
            )  # fmt: skip
            given, numbers = float8_cases.make(case, "batch", rng, accumulate=accumulate)
            case = dataclasses.replace(case, dtype="float32" if case.give_out else "bfloat16")
            places = {"v": "columns"} if rng.random() < 0.5 else {}
            out, lse = harness.run(device, backend, given, places)
            float8_cases.judge_products(case, numbers, out, lse, accumulate)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize(("device", "backend"), target_params(cpu=(), cuda=("sm90",)))
def test_keys_may_lie_anywhere(device, backend, dtype, torch, rng):
    """Tensor maps are kept by a hash of their addresses, 512 of them: one that is in use must not
    give way to the next. At one of 512 addresses k falls on the place of q, so of 4,000 none does
    once in 2,000 runs.
    """
    made = torch.from_numpy(rng.standard_normal((3, 1, 130, 2, 64), np.float32)).cuda()
    q, k, v = made.to(getattr(torch, dtype))
    memory = torch.empty(8_000_000 + k.nbytes, dtype=torch.uint8, device="cuda")
    expected = cuattn.attention(q, k, v, backend=backend).clone()
    differs = []
    for place in 16 * rng.integers(0, 500_000, 4_000):
        moved = memory[place : place + k.nbytes].view(k.dtype).view(k.shape)
        moved.copy_(k)
        differs.append((cuattn.attention(q, moved, v, backend=backend) != expected).any())
    assert not torch.stack(differs).any(), torch.stack(differs).nonzero()[:9]


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=(), cuda=("sm90",)))
def test_scales_are_read_on_the_device_and_zero_gives_what_zeros_give(device, backend, rng):
    q, k, v = (rng.standard_normal((1, 200, 2, 64)).astype(F8) for _ in range(3))
    arena = harness.Arena(device)
    given = [arena.put(q), arena.put(k), arena.put(v, "columns")]
    for k_scale, v_scale in ((0.0, 1.0), (1.0, 0.0), (0.5, 2.0)):
        scale = arena.put(np.float32([[k_scale, k_scale]]))
        out = cuattn.attention(*given, k_scale=scale, v_scale=v_scale, backend=backend)
        device.synchronize()
        found = np.asarray(device.numpy(out), np.float64)
        numbers = (q.astype(np.float64), k.astype(np.float64) * k_scale, v.astype(np.float64))
        scores = np.einsum("bihd,bjhd->bhij", *numbers[:2]) / 8
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        expected = np.einsum("bhij,bjhd->bihd", probs, numbers[2]) * v_scale
        assert np.linalg.norm(found - expected) <= 0.08 * np.linalg.norm(expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 3)}], ids=str)
def test_a_hopper_takes_values_by_columns_and_turns_rows(options):
    for dim, compiled in ((64, 64), (32, 64), (80, 128), (128, 128)):
        q, k = np.zeros((2, 300, 8, dim), F8), np.zeros((2, 300, 2, dim), F8)
        given = {**options, "k_scale": np.ones((2, 2), np.float32), "v_scale": 0.5}
        plan = cuattn.explain("attention", q, k, columns(k), device=H100, **given)
        assert (plan.kernel, plan.head_dim) == ("sm90", compiled)
        assert "probabilities are rounded to float8, sums have two levels" in plan.ladder
        given["accumulate"] = "fast"
        fast = cuattn.explain("attention", q, k, columns(k), device=H100, **given)
        assert (fast.kernel, fast.packed_heads) == ("sm90", plan.packed_heads)
        assert fast.head_dim == compiled
        assert "probabilities are rounded to float8, sums have one level" in fast.ladder
        given["accumulate"] = "exact"
        by_rows = cuattn.explain("attention", q, k, k, device=H100, **given)
        assert by_rows.kernel == "sm90"
        assert "values are turned into columns as they come" in by_rows.ladder
        assert "turned" not in plan.ladder
        assert by_rows.workspace_bytes == plan.workspace_bytes
        assert cuattn.explain("attention", q, k, columns(k), device=A100, **given).kernel == "sm80"


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 3)}], ids=str)
def test_heads_above_128_have_both_kinds_of_sums(options):
    for dims in ((144, 144), (192, 128), (64, 160), (256, 256)):
        q, k, v = (
            np.zeros((2, 300, heads, d), F8)
            for heads, d in ((8, dims[0]), (2, dims[0]), (2, dims[1]))
        )
        for sums, levels in (("fast", "one level"), ("exact", "two levels")):
            plan = cuattn.explain("attention", q, k, v, device=H100, accumulate=sums, **options)
            assert (plan.kernel, plan.head_dim) == ("sm90", 256)
            assert f"sums have {levels}" in plan.ladder


NO_PARTS = "with scales of 128 rows, or int8, numbers are as fast at head_dim 64"
REFUSED = {
    "softcap": ({"softcap": 3.0}, "over float8 it has no softcap"),
    "blocks": ({"k_scale": np.ones((1, 2, 3), np.float32)}, NO_PARTS),
    "query heads": ({"q_scale": np.ones((1, 4, 1), np.float32)}, NO_PARTS),
    "bits": (
        {"batch_invariant": True, "kv_start": np.zeros(1, np.int32)},
        "over values by columns bits depend on where in its array a sequence begins",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_it_takes_as_numbers(name):
    options, why = REFUSED[name]
    q, k = np.zeros((1, 100, 4, 64), F8), np.zeros((1, 300, 2, 64), F8)
    v = columns(k)
    plan = cuattn.explain("attention", q, k, v, device=H100, **options)
    assert (plan.kernel, "codes become numbers" in plan.ladder) == ("sm90", True)
    with pytest.raises(NotImplementedError, match=why):
        cuattn.explain("attention", q, k, v, device=H100, backend="sm90", **options)


def test_bits_of_packed_sequences_by_columns_are_those_of_numbers():
    x, starts = np.zeros((300, 2, 64), F8), np.array([0, 7, 300], np.int32)
    by_columns = np.zeros((2, 64, 304), F8)[:, :, :300].transpose(2, 0, 1)
    for v in (x, by_columns):
        for invariant in (False, True):
            given = (x, x, v, starts, starts, 293, 293)
            options = {"batch_invariant": invariant, "device": H100}
            plan = cuattn.explain("attention_varlen", *given, **options)
            as_numbers = invariant and v is by_columns
            assert (plan.kernel, "codes become" in plan.ladder) == ("sm90", as_numbers)


def test_quantize_makes_what_it_takes():
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 64), np.float32)
    for options in ({}, {"mode": "tensor"}, {"v_mode": "channel"}):
        made = cuattn.quantize(x, x, x, **options)
        assert made.q.dtype == ml_dtypes.float8_e4m3fn
        plan = cuattn.explain("attention", *made.arrays, device=H100, **made.scales)
        assert plan.kernel == "sm90"
