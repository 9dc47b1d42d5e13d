# SPDX-License-Identifier: Apache-2.0
"""quantize, quantize_like and dequantize on a CUDA device, the emulator too, against the CPU: the
same codes and scales bit for bit, for every head_dim, odd numbers of rows and views of every kind.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cuattn
import harness
from cases import DTYPES
from cuattn import float8
from float8_cases import F8

DIMS = range(16, 257, 16)
ROWS = (1, 15, 127, 129, 143, 257)
MODES = [
    ("tensor", None),
    ("head", None),
    ("block", None),
    ("head", "channel"),
    ("block", "tensor"),
    ("int8", None),
    ("int8", "channel"),
]
TARGETS = harness.target_params(cpu=(), cuda=("auto",))
on_devices = pytest.mark.parametrize(("device", "backend"), TARGETS)

VIEWS = {  # of memory of [3, 2 rows, 6, 2 dim] elements: [2, rows, 3, dim]
    "contiguous": lambda x, rows, dim: np.ascontiguousarray(x[:2, :rows, :3, :dim]),
    "every other row and head": lambda x, rows, dim: x[1:, : 2 * rows : 2, ::2, :dim],
    "every other channel": lambda x, rows, dim: x[:2, :rows, 3:, : 2 * dim : 2],
    "off 16 bytes": lambda x, rows, dim: x[:2, :rows, :3, 1 : dim + 1],
    "on 4 channels": lambda x, rows, dim: x[:2, :rows, 2:5, 4 : dim + 4],
    "one batch": lambda x, rows, dim: np.broadcast_to(
        x[:1, :rows, :3, :dim], (2, rows, 3, dim)
    ),
    "columns": lambda x, rows, dim: np.ascontiguousarray(
        x[:2, :rows, :3, :dim].transpose(0, 2, 3, 1)
    ).transpose(0, 3, 1, 2),
}  # fmt: skip


def drawn(rng, rows, dim, dtype):
    """Memory for views: biased, with zeros in a head and numbers that are not finite."""
    x = rng.standard_normal((3, 2 * rows, 6, 2 * dim), np.float32) * 3 + rng.standard_normal()
    x[:, :, 2] = 0
    return x.astype(DTYPES[dtype])


def placed(device, view):
    """The same memory, strides and all, on the device."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    shifts = [n // view.itemsize for n in view.strides]
    begin, start = (x.__array_interface__["data"][0] for x in (base, view))
    flat = np.lib.stride_tricks.as_strided(base, (base.size,), (base.itemsize,))
    buffer = device.buffer(flat.nbytes + 64)
    whole = device.view(buffer, flat.dtype, 0, flat.shape, (1,))
    device.write(whole, flat)
    return device.view(buffer, view.dtype, start - begin, view.shape, shifts)


def same(device, ours, theirs, name):
    """Bits and strides; a NaN has the bits of a NaN."""
    got = np.asarray(device.numpy(ours))
    word = np.uint8 if theirs.itemsize == 1 else np.uint32
    bits = [np.ascontiguousarray(x).view(word) for x in (got, theirs)]
    assert got.shape == theirs.shape, name
    different = np.argwhere(bits[0] != bits[1])
    assert len(different) == 0, f"{name}: {len(different)} differ, first at {different[0]}"


def some(rng, *axes, most=None):
    """All combinations, or as many as `most`, at random; of them a third on the emulator."""
    every = list(itertools.product(*axes))
    count = min(len(every), most or len(every))
    if harness.is_emulated():  # its threads take turns on one core
        count = -(-count // 3)
    return [every[i] for i in rng.permutation(len(every))[:count]]


@pytest.mark.parametrize("dim", DIMS)
@on_devices
def test_codes_and_scales_are_those_of_the_cpu(device, backend, dim, rng):
    axes = MODES, (True, False), VIEWS, ("none", "given"), DTYPES
    for (mode, v_mode), hadamard, view, mean, dtype in some(rng, *axes, most=14):
        rows, keys = rng.choice(ROWS, 2)
        q, k, v = (VIEWS[view](drawn(rng, n, dim, dtype), n, dim) for n in (rows, keys, keys))
        v = v[..., : int(rng.choice(range(16, dim + 1, 16)))]
        means = rng.standard_normal((3, dim), np.float32)
        given = {"mode": mode, "v_mode": v_mode, "hadamard": hadamard, "smooth_k": False}
        note = f"{mode}, {v_mode}, {hadamard}, {view}, {mean}, {dtype}, {q.shape}, {v.shape}"
        on_cpu, on_device = ([x for x in (q, k, v)], [placed(device, x) for x in (q, k, v)])
        key_mean = (means, placed(device, means)) if mean == "given" else (None, None)
        theirs = cuattn.quantize(*on_cpu, **given, key_mean=key_mean[0])
        ours = cuattn.quantize(*on_device, **given, key_mean=key_mean[1])
        device.synchronize()
        for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
            same(device, getattr(ours, name), getattr(theirs, name), f"{name}: {note}")
        if mean == "given":  # a sum of doubles in another order
            shifts = device.numpy(ours.lse_shift), theirs.lse_shift
            np.testing.assert_allclose(*shifts, rtol=1e-6, atol=1e-6, err_msg=note)


@pytest.mark.parametrize("dim", [16, 80, 128, 176, 256])
@on_devices
def test_all_that_one_array_may_ask_for(device, backend, dim, rng):
    """Scales of every part beside a mean, a rotation and a shift, as the C ABI takes them."""
    parts = ((1,), False), ((2, 3), False), ((2, 3, 2), False), ((2, 3, dim), True)
    for (shape, channels), hadamard, has_mean, has_shift in some(
        rng, parts, (True, False), (True, False), (True, False)
    ):
        view, dtype = str(rng.choice(list(VIEWS))), str(rng.choice(list(DTYPES)))
        x = VIEWS[view](drawn(rng, 143, dim, dtype), 143, dim)
        means = rng.standard_normal((2, 3, dim), np.float32)
        given = {"layout": "bshd", "hadamard": hadamard, "scale": shape, "channels": channels,
                 "int8": bool(rng.integers(2))}  # fmt: skip
        named = [n for n, has in (("mean", has_mean), ("shift_mean", has_shift)) if has]
        theirs = float8.run(x, **given, **dict.fromkeys(named, means))
        on_device = placed(device, means)
        ours = float8.run(placed(device, x), **given, **dict.fromkeys(named, on_device))
        note = f"{shape}, {given}, {named}, {view}, {dtype}"
        for index, name in enumerate(("codes", "scale")):
            same(device, ours[index], theirs[index], f"{name}: {note}")
        if has_shift:
            shifts = device.numpy(ours[3]), theirs[3]
            np.testing.assert_allclose(*shifts, rtol=1e-6, atol=1e-5, err_msg=note)


@pytest.mark.parametrize("dim", DIMS)
@on_devices
def test_given_scales_and_back(device, backend, dim, rng):
    shapes = {"one": (1,), "heads": (3,), "batch": (2, 3), "rows": None}
    for view, kind in some(rng, VIEWS, shapes):
        rows, dtype = int(rng.choice(ROWS)), str(rng.choice(list(DTYPES)))
        x = VIEWS[view](drawn(rng, rows, dim, dtype), rows, dim)
        shape = shapes[kind] or (2, 3, -(-rows // 128))
        scale = rng.uniform(0.005, 0.05, shape).astype(np.float32)
        on_device, its_scale = placed(device, x), placed(device, scale)
        hadamard, int8 = (bool(flag) for flag in rng.integers(2, size=2))
        if int8:
            theirs = float8.run(x, "bshd", hadamard, scale, int8=True)[0]
            ours = float8.run(on_device, "bshd", hadamard, its_scale, int8=True)[0]
        else:
            theirs = cuattn.quantize_like(x, scale, hadamard=hadamard)
            ours = cuattn.quantize_like(on_device, its_scale, hadamard=hadamard)
        note = f"{view}, {kind}, {dtype}, {hadamard}, {int8}, {x.shape}"
        same(device, ours, theirs, note)
        for to in DTYPES:
            back = cuattn.dequantize(ours, its_scale, dtype=to)
            want = cuattn.dequantize(theirs, scale, dtype=to)
            got = np.asarray(device.numpy(back))
            assert np.array_equal(harness.bits(got), harness.bits(want)), f"{to}: {note}"


@pytest.mark.parametrize("dim", [16, 48, 112, 128, 144, 192, 256])
@on_devices
def test_what_is_not_finite_counts_for_no_scale(device, backend, dim, rng):
    kinds = MODES, ("contiguous", "every other channel"), DTYPES
    for (mode, v_mode), view, dtype in some(rng, *kinds, most=10):
        memory = drawn(rng, 131, dim, dtype)
        places = rng.random(memory.shape)
        memory[places < 0.02] = np.inf
        memory[places > 0.98] = np.nan
        memory[(places > 0.5) & (places < 0.52)] = -np.inf
        x = VIEWS[view](memory, 131, dim)
        given = {"mode": mode, "v_mode": v_mode, "hadamard": False, "smooth_k": False}
        theirs = cuattn.quantize(x, x, x, **given)
        on_device = placed(device, x)
        ours = cuattn.quantize(on_device, on_device, on_device, **given)
        for name in ("q_scale", "k_scale", "v_scale"):
            same(device, getattr(ours, name), getattr(theirs, name), f"{name} {mode} {v_mode}")
        for name in "qkv":
            codes = [np.asarray(device.numpy(getattr(ours, name))), getattr(theirs, name)]
            nans = [np.isnan(c.astype(np.float32)) for c in codes]
            assert np.array_equal(*nans)
            bits = [np.where(n, 0, np.ascontiguousarray(c).view(np.uint8))
                    for c, n in zip(codes, nans, strict=True)]  # fmt: skip
            assert np.array_equal(*bits)


@pytest.mark.parametrize("dim", [16, 80, 128, 176, 256])
@on_devices
def test_the_mean_of_the_keys(device, backend, dim, rng):
    """A sum of doubles in another order: float32 means that may differ in the last place."""
    for rows, view, dtype in some(rng, (1, 130, 700), VIEWS, ("float32", "bfloat16")):
        x = VIEWS[view](drawn(rng, rows, dim, dtype), rows, dim)
        theirs = cuattn.quantize(x, x, x)
        on_device = placed(device, x)
        ours = cuattn.quantize(on_device, on_device, on_device)
        note = f"{rows}, {view}, {dtype}"
        shifts = device.numpy(ours.lse_shift), theirs.lse_shift
        np.testing.assert_allclose(*shifts, rtol=1e-5, atol=1e-5, err_msg=note)
        scales = device.numpy(ours.k_scale), theirs.k_scale
        if rows > 1:  # one key less its mean is what the sum was rounded by
            np.testing.assert_allclose(*scales, rtol=1e-5, err_msg=note)
            codes = [np.asarray(x, np.float32) for x in (device.numpy(ours.k), theirs.k)]
            near = np.abs(codes[0] - codes[1]) <= 0.126 * np.abs(codes[1]) + 0.01
            assert near.all(), note


@on_devices
def test_int8_codes_of_ties_and_of_what_is_too_large(device, backend, rng):
    """Ties go to even, sizes above 127 become 127, NaN becomes 0, at every place of a row."""
    wanted = {
        0.0: 0, 0.5: 0, -0.5: 0, 1.5: 2, -1.5: -2, 2.5: 2, -2.5: -2, 1e-42: 0, 63.5: 64,
        126.5: 126, -126.5: -126, 127.5: 127, -127.5: -127, -128.0: -127, 200.0: 127, -3e4: -127,
        6e4: 127, np.nan: 0, np.inf: 127, -np.inf: -127,
    }  # fmt: skip
    numbers, codes = np.float32(list(wanted)), np.int8(list(wanted.values()))
    chosen = rng.integers(len(codes), size=(1, 130, 2, 80))
    for dtype, size in itertools.product(DTYPES, (1.0, 0.25)):  # exact in all
        x, scale = (numbers[chosen] * np.float32(size)).astype(DTYPES[dtype]), np.float32([size])
        on_device, its_scale = placed(device, x), placed(device, scale)
        ours = float8.run(on_device, "bshd", False, its_scale, int8=True)[0]
        same(device, ours, codes[chosen], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@on_devices
def test_int8_codes_become_what_they_mean(device, backend, dtype, rng):
    codes = rng.permuted(np.tile(np.arange(-128, 128, dtype=np.int8), 30)).reshape(2, 12, 5, 64)
    scale = rng.uniform(0.01, 2, (2, 5)).astype(np.float32)
    back = cuattn.dequantize(placed(device, codes), placed(device, scale), dtype=dtype)
    wanted = (codes.astype(np.float32) * scale[:, None, :, None]).astype(DTYPES[dtype])
    assert np.array_equal(harness.bits(np.asarray(device.numpy(back))), harness.bits(wanted))


@pytest.mark.parametrize("dim", DIMS)
@on_devices
def test_codes_by_columns_become_what_they_mean(device, backend, dim, rng):
    """Channels that begin on 16 bytes, and channels that do not; all codes, NaN too."""
    parts = ((), (2, 3), (2, 3, None), (2, 3, dim))
    for part, rows, pitch in some(rng, parts, ROWS, (16, 17), most=9):
        room = -(-rows // pitch) * pitch
        memory = rng.integers(256, size=(2, 3, dim, room), dtype=np.uint8)
        dtype = (F8, np.int8)[rng.integers(2)]
        codes = memory.view(dtype)[..., :rows].transpose(0, 3, 1, 2)
        shape = tuple(-(-rows // 128) if n is None else n for n in part) or (1,)
        scale = rng.uniform(0.01, 2, shape).astype(np.float32)
        channels = {"channels": True} if part == (2, 3, dim) else {}
        on_device, its_scale = placed(device, codes), placed(device, scale)
        for to in DTYPES:
            back = device.numpy(cuattn.dequantize(on_device, its_scale, dtype=to, **channels))
            want = cuattn.dequantize(codes, scale, dtype=to, **channels)
            note = f"{to}, {part}, {rows}, {pitch}, {np.dtype(dtype)}"
            assert np.array_equal(np.isnan(back), np.isnan(want)), note
            back, want = (np.where(np.isnan(x), 0, x) for x in (back, want))
            assert np.array_equal(harness.bits(back), harness.bits(want)), note


def test_a_code_of_every_size(rng):
    """The views themselves: of the right shapes, and not all alike."""
    memory = drawn(rng, 5, 32, "float32")
    strides = {VIEWS[name](memory, 5, 32).strides for name in VIEWS}
    assert len(strides) >= len(VIEWS) - 2
    assert all(VIEWS[name](memory, 5, 32).shape == (2, 5, 3, 32) for name in VIEWS)
    assert F8.itemsize == 1
