# SPDX-License-Identifier: Apache-2.0
"""merge_states: two parts and many, four layouts, parts without keys, lse from -1e4 to 1e4."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import reference
from cases import DTYPES, check, check_lse
from harness import Arena, assert_by_draws, bits
from strides import STORAGES

LAYOUTS = {
    "bshd": (2, 5, 3),
    "bhsd": (2, 3, 5),
    "nhd": (7, 3),
    "thd": (7, 3),
}  # the shape of out without head_dim


def lse_shape(layout, extents):
    return (*extents[:-2], extents[-1], extents[-2]) if layout in ("bshd", "thd") else extents


def make_parts(rng, layout, parts, dtype, head_dim=32, spread=3.0):
    extents = LAYOUTS[layout]
    outs = rng.standard_normal((parts, *extents, head_dim), np.float32).astype(DTYPES[dtype])
    lses = (rng.standard_normal((parts, *lse_shape(layout, extents))) * spread).astype(np.float32)
    return outs, lses


def judge(outs, lses, layout, dtype, out, lse):
    expected, expected_lse = reference.merge_states(outs, lses, layout=layout)
    plain, plain_lse = reference.merge_states(outs, lses, layout=layout, rounded_to=DTYPES[dtype])
    check_lse(lse, expected_lse, plain_lse)
    check(out, expected, plain, dtype)


def merge(
    device,
    outs,
    lses,
    layout,
    *,
    stacked=False,
    give_out=False,
    out_dtype=None,
    storage="contiguous",
    default_layout=False,
):
    arena = Arena(device)
    options = {} if default_layout else {"layout": layout}
    if give_out:
        options["out"] = arena.output(outs.shape[1:], out_dtype or outs.dtype, storage, "out")
        options["lse_out"] = arena.output(lses.shape[1:], np.float32, storage, "lse_out", align=4)
    if stacked:
        placed = [arena.put(outs, storage, "outs"), arena.put(lses, storage, "lses", align=4)]
    else:
        placed = []
        for i in range(2):
            placed += [
                arena.put(outs[i], storage, f"out{i}"),
                arena.put(lses[i], storage, f"lse{i}", align=4),
            ]
    out, lse = cuattn.merge_states(*placed, **options)
    device.synchronize()
    assert device.is_array(out)
    assert device.is_array(lse)
    assert not give_out or (out is options["out"] and lse is options["lse_out"])
    arena.verify()
    return device.numpy(out), device.numpy(lse)


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_parts(device, layout, dtype, give_out, rng):
    outs, lses = make_parts(rng, layout, 2, dtype)
    judge(outs, lses, layout, dtype, *merge(device, outs, lses, layout, give_out=give_out))


@pytest.mark.parametrize("parts", [2, 3, 17])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_parts_are_rounded_once(device, layout, dtype, parts, rng):
    """What a ring over ranks ends with: out is the float32 result, rounded, and lse the same."""
    outs, lses = make_parts(rng, layout, parts, "float32")
    options = {"stacked": parts > 2, "give_out": True}
    wide, wide_lse = merge(device, outs, lses, layout, **options)
    out, lse = merge(device, outs, lses, layout, out_dtype=DTYPES[dtype], **options)
    assert out.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(bits(out), bits(wide.astype(DTYPES[dtype])))
    np.testing.assert_array_equal(bits(lse), bits(wide_lse))


def test_16_bit_parts_are_not_widened(device, rng):
    outs, lses = make_parts(rng, "nhd", 2, "bfloat16")
    for wrong in ("float32", "float16"):
        with pytest.raises(ValueError, match="out must be bfloat16"):
            merge(device, outs, lses, "nhd", give_out=True, out_dtype=DTYPES[wrong])


@pytest.mark.parametrize("parts", [1, 2, 3, 17, 133])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_parts(device, layout, dtype, parts, rng):
    def attempt():
        outs, lses = make_parts(rng, layout, parts, dtype)
        result = merge(device, outs, lses, layout, stacked=True, give_out=parts == 3)
        judge(outs, lses, layout, dtype, *result)

    assert_by_draws(dtype, attempt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_without_keys_change_no_bit(device, dtype, rng):
    """What batch_invariant counts on: a sequence has as many parts as the longest in its batch."""
    for parts in (1, 2, 31, 40):
        outs, lses = make_parts(rng, "bhsd", parts, dtype)
        outs[0, 0] = -0.0
        more = int(rng.integers(1, 70))
        padded = np.concatenate([outs, np.full((more, *outs.shape[1:]), np.nan, outs.dtype)])
        padded_lses = np.concatenate([lses, np.full((more, *lses.shape[1:]), -np.inf, np.float32)])
        alone = merge(device, outs, lses, "bhsd", stacked=True)
        among = merge(device, padded, padded_lses, "bhsd", stacked=True)
        lone = (outs[0], lses[0]) if parts == 1 else alone
        for x, y, z in zip(alone, among, lone, strict=True):
            np.testing.assert_array_equal(bits(x), bits(y))
            np.testing.assert_array_equal(bits(x), bits(z))


def test_default_layout_is_bshd_for_4d_and_nhd_for_3d(device, rng):
    for layout in ("bshd", "nhd"):
        outs, lses = make_parts(rng, layout, 2, "float32")
        judge(
            outs, lses, layout, "float32", *merge(device, outs, lses, layout, default_layout=True)
        )
        judge(
            outs,
            lses,
            layout,
            "float32",
            *merge(device, outs, lses, layout, default_layout=True, stacked=True),
        )


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 128, 200, 256, 512, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(device, dtype, head_dim, rng):
    outs, lses = make_parts(rng, "bshd", 2, dtype, head_dim)
    judge(outs, lses, "bshd", dtype, *merge(device, outs, lses, "bshd"))


@pytest.mark.parametrize("storage", [s for s in STORAGES if s != "expanded"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storages(device, layout, stacked, storage, rng):
    outs, lses = make_parts(rng, layout, 2, "float16")
    result = merge(device, outs, lses, layout, stacked=stacked, give_out=True, storage=storage)
    judge(outs, lses, layout, "float16", *result)


# How a row without keys is written: by cuattn, and by FlashAttention-2 and vLLM.
EMPTY = [-np.inf, np.inf]


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_without_keys_changes_nothing(device, layout, dtype, empty, rng):
    """lse = -inf or inf: the other part comes back bit for bit, whatever the empty one holds."""
    outs, lses = make_parts(rng, layout, 2, dtype)
    outs[0], lses[0] = np.nan, empty
    out, lse = merge(device, outs, lses, layout)
    assert np.array_equal(bits(out), bits(outs[1]))
    assert np.array_equal(lse, lses[1])
    out, lse = merge(device, outs[::-1], lses[::-1], layout)
    assert np.array_equal(bits(out), bits(outs[1]))
    assert np.array_equal(lse, lses[1])


@pytest.mark.parametrize("empty", [*EMPTY, "mixed"])
@pytest.mark.parametrize("parts", [2, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_part_with_keys_gives_zero_and_minus_infinity(device, dtype, parts, empty, rng):
    outs, lses = make_parts(rng, "bshd", parts, dtype)
    hidden = np.zeros(lses.shape, bool)
    hidden[:, 1] = hidden[0, 0, 1] = True
    lses[hidden] = rng.choice(EMPTY, hidden.sum()) if empty == "mixed" else empty
    out, lse = merge(device, outs, lses, "bshd", stacked=parts > 2)
    assert (lse[1] == -np.inf).all()
    assert not np.asarray(out[1], np.float32).any()
    judge(outs, np.where(hidden, -np.inf, lses), "bshd", dtype, out, lse)


@pytest.mark.parametrize("spread", [1e-3, 100.0, 1e4])
@pytest.mark.parametrize("parts", [2, 9])
def test_lse_of_any_size(device, parts, spread, rng):
    outs, lses = make_parts(rng, "bhsd", parts, "float32", spread=spread)
    judge(outs, lses, "bhsd", "float32", *merge(device, outs, lses, "bhsd", stacked=parts > 2))


def test_equal_parts_weigh_the_same(device):
    """Natural logarithm: two parts of equal lse give their mean and lse + ln 2."""
    outs = np.stack([np.full((1, 1, 1, 8), x, np.float32) for x in (1, 3)])
    out, lse = merge(device, outs, np.full((2, 1, 1, 1), 5, np.float32), "bshd")
    assert (out == 2).all()
    assert lse.item() == pytest.approx(5 + np.log(2), rel=1e-6)


def test_nan_propagates(device, rng):
    outs, lses = make_parts(rng, "bshd", 2, "float32")
    outs[0, 0, 0, 0, 3] = np.nan
    lses[1, 1, 2, 4] = np.nan
    out, lse = merge(device, outs, lses, "bshd")
    assert np.isnan(out[0, 0, 0, 3])
    assert np.isnan(out[0, 0, 0]).sum() == 1
    assert np.isnan(out[1, 4, 2]).all()
    assert np.isnan(lse[1, 2, 4])
    assert np.isnan(out).sum() == 1 + 32
    assert np.isnan(lse).sum() == 1


def test_merging_is_associative(device, rng):
    outs, lses = make_parts(rng, "nhd", 3, "float32")
    left = merge(
        device,
        *(
            np.stack(x)
            for x in zip(merge(device, outs[:2], lses[:2], "nhd"), (outs[2], lses[2]), strict=True)
        ),
        "nhd",
    )
    right = merge(
        device,
        *(
            np.stack(x)
            for x in zip((outs[0], lses[0]), merge(device, outs[1:], lses[1:], "nhd"), strict=True)
        ),
        "nhd",
    )
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_zero_sizes(device, shape):
    outs = np.zeros((2, *shape, 8), np.float32)
    lses = np.zeros((2, *lse_shape("bshd", shape)), np.float32)
    for stacked in (False, True):
        out, lse = merge(device, outs, lses, "bshd", stacked=stacked)
        assert out.shape == outs.shape[1:]
        assert lse.shape == lses.shape[1:]


def test_more_than_65535_rows(device, rng):
    outs = rng.standard_normal((2, 70_000, 1, 8), np.float32)
    lses = rng.standard_normal((2, 70_000, 1)).astype(np.float32)
    judge(outs, lses, "nhd", "float32", *merge(device, outs, lses, "nhd"))


def test_in_place_into_the_first_part(device, rng):
    """out may be out_a itself: each row is read before it is written."""
    outs, lses = make_parts(rng, "bshd", 2, "float32")
    arena = Arena(device)
    parts = [arena.put(x) for x in (outs[0], lses[0], outs[1], lses[1])]
    out, lse = cuattn.merge_states(*parts, out=parts[0], lse_out=parts[1])
    device.synchronize()
    judge(outs, lses, "bshd", "float32", device.numpy(out), device.numpy(lse))
