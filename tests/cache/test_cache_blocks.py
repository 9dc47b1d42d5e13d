# SPDX-License-Identifier: Apache-2.0
"""copy_blocks and swap_blocks: every byte of a cache after each call, against numpy."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cache_cases import (
    CACHE_DTYPES,
    E4M3,
    F32,
    I32,
    I64,
    copied,
    shifted,
    untouched,
)
from harness import Arena, bits

# -- copy_blocks


def layers(rng, count, shape, dtype):
    whole = rng.standard_normal((count, *shape), F32)
    return [np.clip(x, -400, 400).astype(dtype) for x in whole]


def place_caches(arena, caches):
    """Caches that will be written, with their content, and no check that it stays."""
    places = [arena.output(x.shape, x.dtype, name="cache") for x in caches]
    for place, values in zip(places, caches, strict=True):
        arena.device.write(place, values)
    return places


@pytest.mark.parametrize("mapping_on", ["host", "device"])
@pytest.mark.parametrize(("num_layers", "num_pairs"), [(1, 1), (3, 5), (130, 3), (2, 450)])
def test_blocks_are_copied_in_every_layer(device, num_layers, num_pairs, mapping_on, rng):
    """More layers and pairs than one launch takes."""
    blocks = 2 * num_pairs + 3
    shape_k, shape_v = (blocks, 2, 3, 8), (blocks, 1, 2, 16)
    ks, vs = layers(rng, num_layers, shape_k, F32), layers(rng, num_layers, shape_v, np.float16)
    order = rng.permutation(blocks)
    mapping = np.stack([order[rng.integers(0, num_pairs, num_pairs)], order[num_pairs:-3]], axis=1)
    mapping = mapping.astype(I64)
    arena = Arena(device)
    k_places, v_places = place_caches(arena, ks), place_caches(arena, vs)
    given = mapping if mapping_on == "host" else arena.put(mapping, align=8)
    cuattn.copy_blocks(k_places, v_places, given)
    device.synchronize()
    for places, caches in ((k_places, ks), (v_places, vs)):
        for place, cache in zip(places, caches, strict=True):
            assert np.array_equal(bits(device.numpy(place)), bits(copied(cache, mapping)))
    arena.verify()


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_blocks_of_any_size(device, dtype, rng):
    for shape in ((9, 1, 1, 16), (9, 16, 8, 128), (9, 5, 3, 80), (9, 2, 4, 8, 16)):
        (k,) = layers(rng, 1, shape, CACHE_DTYPES[dtype])
        mapping = np.array([[1, 2], [1, 3], [8, 0], [5, 5]], I64)
        arena = Arena(device)
        (place,) = place_caches(arena, [k])
        cuattn.copy_blocks(place, None, mapping)
        device.synchronize()
        assert np.array_equal(bits(device.numpy(place)), bits(copied(k, mapping)))
        arena.verify()


# Shapes whose blocks have 1, 3, 6, 12, 40 and 20000 bytes for each byte of an element.
ODD_BLOCKS = [(9, 1), (9, 3), (9, 2, 3), (9, 3, 4), (9, 5, 1, 8), (9, 25, 5, 160)]


@pytest.mark.parametrize("by", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_blocks_of_odd_sizes_start_on_any_element(device, dtype, by, rng):
    """copy_blocks within two layers, of which one may be better aligned than the other."""
    mapping = np.array([[1, 2], [1, 3], [8, 0], [5, 5]], I64)
    for shape in ODD_BLOCKS:
        for mapping_on in ("host", "device"):
            caches = layers(rng, 3, shape, CACHE_DTYPES[dtype])
            arena = Arena(device)
            places, before = zip(
                *(shifted(arena, x, n) for x, n in zip(caches, (by, 0, by), strict=True)),
                strict=True,
            )
            given = mapping if mapping_on == "host" else arena.put(mapping, align=8)
            cuattn.copy_blocks(places[:2], [places[2]] * 2, given)
            device.synchronize()
            arena.verify()
            for place, cache, start in zip(places, caches, before, strict=True):
                assert np.array_equal(bits(device.numpy(place)), bits(copied(cache, mapping)))
                assert untouched(device, start)


def test_blocks_that_lie_apart_by_odd_strides(device, rng):
    whole = rng.standard_normal((9, 2, 7)).astype(np.float16)
    arena = Arena(device)
    place, _ = shifted(arena, whole, 1)
    cuattn.copy_blocks([place[:, 0]], [place[:, 1]], np.array([[0, 4], [8, 1]], I64))
    device.synchronize()
    want = whole.copy()
    want[[4, 1]] = whole[[0, 8]]
    assert np.array_equal(device.numpy(place), want)
    arena.verify()


def test_blocks_that_lie_apart(device, rng):
    both = rng.standard_normal((9, 2, 4, 2, 8), F32)
    arena = Arena(device)
    (place,) = place_caches(arena, [both])
    cuattn.copy_blocks([place[:, 0]], [place[:, 1]], np.array([[0, 4], [8, 1]], I64))
    device.synchronize()
    want = both.copy()
    want[[4, 1]] = both[[0, 8]]
    assert np.array_equal(device.numpy(place), want)
    cuattn.copy_blocks([place[:, 1]], None, np.array([[2, 3]], I64))
    device.synchronize()
    want[3, 1] = want[2, 1]
    assert np.array_equal(device.numpy(place), want)
    arena.verify()


def test_nothing_to_copy(device, rng):
    none = np.zeros((0, 2), I64)
    cuattn.copy_blocks([], [], none)
    arena = Arena(device)
    cache = arena.put(rng.standard_normal((4, 2, 2, 8), F32))
    cuattn.copy_blocks([cache], [cache], none)
    cuattn.swap_blocks([], [], none)
    cuattn.swap_blocks(cache, np.zeros((2, 2, 2, 8), F32), none)
    device.synchronize()
    arena.verify()


# -- swap_blocks


MAPPINGS = {
    "neighbours": [[2, 0], [3, 1], [4, 2], [7, 4], [8, 5]],
    "scattered": [[8, 1], [0, 6], [5, 2], [3, 3]],
    "backwards": [[4, 0], [3, 1], [2, 2], [1, 3]],
    "one_source": [[4, 0], [4, 1], [4, 2]],
    "single": [[0, 6]],
}


@pytest.mark.parametrize("host", ["pinned", "pageable"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_blocks_swap_between_host_and_device(device, name, host, rng):
    """Out to the host, and back to other blocks; several layers."""
    mapping = np.array(MAPPINGS[name], I64)
    caches = layers(rng, 3, (9, 4, 2, 16), np.float16)
    arena = Arena(device)
    places = place_caches(arena, caches)
    make = cuattn.pinned_empty if host == "pinned" else np.empty
    hosts = [make((7, 4, 2, 16), np.float16) for _ in caches]
    for array in hosts:
        array.view(np.uint8)[...] = 0xFF
    cuattn.swap_blocks(places, hosts, mapping)
    device.synchronize()
    wants = []
    for array, cache in zip(hosts, caches, strict=True):
        want = np.full((7, 4 * 2 * 16 * 2), 0xFF, np.uint8)
        want[mapping[:, 1]] = bits(cache).reshape(9, -1)[mapping[:, 0]]
        assert np.array_equal(bits(array).reshape(7, -1), want)
        wants.append(want)
    back = np.array([[d, 8 - i] for i, d in enumerate(mapping[:, 1])], I64)
    cuattn.swap_blocks(hosts, places, back)
    device.synchronize()
    for place, cache, want in zip(places, caches, wants, strict=True):
        whole = bits(cache).reshape(9, -1).copy()
        whole[back[:, 1]] = want[back[:, 0]]
        assert np.array_equal(bits(device.numpy(place)).reshape(9, -1), whole)
    arena.verify()


@pytest.mark.parametrize("blocks_apart", [False, True])
@pytest.mark.parametrize("shape", [(16, 2, 16), (3, 5, 80), (4, 32, 128), (256, 8, 128)])
def test_many_scattered_blocks_swap(device, shape, blocks_apart, rng):
    """More than one launch takes; small blocks and large, and those of an array of K and V."""
    blocks = 9 if shape[0] == 256 else 300
    values = rng.integers(0, 2**31, (blocks, 2, *shape), I32)
    order, count = rng.permutation(blocks), blocks - 2
    mapping = np.stack([order[:count], rng.permutation(blocks)[:count]], axis=1).astype(I64)
    mapping[1:2, 0] = mapping[0, 0]  # one block to two places
    arena = Arena(device)
    (place,) = place_caches(arena, [values])
    host, back = (cuattn.pinned_empty(values.shape, I32) for _ in range(2))
    host[...], back[...] = 7, 9

    def part(array):
        return array[:, 1] if blocks_apart else array

    cuattn.swap_blocks(part(place), part(host), mapping)
    device.synchronize()
    want = np.full_like(values, 7)
    part(want)[mapping[:, 1]] = part(values)[mapping[:, 0]]
    assert np.array_equal(host, want)
    back[...] = values
    cuattn.swap_blocks(part(host), part(place), mapping)
    device.synchronize()
    part(back)[mapping[:, 1]] = part(want)[mapping[:, 0]]
    assert np.array_equal(device.numpy(place), back)
    arena.verify()


def test_pinned_blocks_need_not_start_on_16_bytes(device, rng):
    values = rng.integers(0, 256, (9, 4, 8), np.uint8)
    arena = Arena(device)
    (place,) = place_caches(arena, [values])
    memory = cuattn.pinned_empty(9 * 32 + 5, np.uint8)
    memory[...] = 3
    host = memory[5:].reshape(9, 4, 8)
    mapping = np.array([[8, 1], [0, 6], [5, 2]], I64)
    cuattn.swap_blocks(place, host, mapping)
    device.synchronize()
    want = np.full_like(values, 3)
    want[mapping[:, 1]] = values[mapping[:, 0]]
    assert np.array_equal(host, want)
    assert (memory[:5] == 3).all()


@pytest.mark.parametrize("host", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("by", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
def test_odd_blocks_swap(device, dtype, by, host, rng):
    """Sizes and starts that no vector of 16 bytes divides, out and back; few blocks and many."""
    dtype = np.dtype(CACHE_DTYPES[dtype])
    for blocks, shape in ((9, (3,)), (9, (5, 1, 12)), (300, (3, 4)), (300, (7, 5, 2))):
        (values,) = layers(rng, 1, (blocks, *shape), dtype)
        arena = Arena(device)
        place, before = shifted(arena, values, by)
        other = np.zeros((blocks, *shape), dtype)
        if host == "device":
            other, _ = shifted(arena, other, 3)
        else:
            make = cuattn.pinned_empty if host == "pinned" else np.empty
            memory = make(values.size + 3, dtype.name)
            memory.view(np.uint8)[...] = 0
            other = memory[3:].reshape(other.shape)
        order = rng.permutation(blocks)
        out = np.stack([order[:-2], rng.permutation(blocks)[:-2]], axis=1).astype(I64)
        cuattn.swap_blocks(place, other, out)
        device.synchronize()
        want = np.zeros((blocks, *shape), dtype)
        want[out[:, 1]] = values[out[:, 0]]
        held = device.numpy(other) if host == "device" else other
        assert np.array_equal(bits(held), bits(want))
        back = out[:, ::-1][: blocks // 2].copy()
        back[:, 1] = order[::-1][: len(back)]
        cuattn.swap_blocks(other, place, back)
        device.synchronize()
        final = values.copy()
        final[back[:, 1]] = want[back[:, 0]]
        assert np.array_equal(bits(device.numpy(place)), bits(final))
        assert untouched(device, before)
        arena.verify()


def test_blocks_swap_within_a_device_and_may_lie_apart(device, rng):
    source, target = (rng.standard_normal((9, 2, 4, 2, 8), F32) for _ in range(2))
    arena = Arena(device)
    mapping = np.array([[0, 3], [1, 4], [2, 5], [8, 0]], I64)
    placed = arena.put(source)
    (place,) = place_caches(arena, [target])
    cuattn.swap_blocks(placed[:, 1], place[:, 0], mapping)
    device.synchronize()
    want = target.copy()
    want[mapping[:, 1], 0] = source[mapping[:, 0], 1]
    assert np.array_equal(device.numpy(place), want)
    cuattn.swap_blocks(placed, place, mapping)
    device.synchronize()
    want[mapping[:, 1]] = source[mapping[:, 0]]
    assert np.array_equal(device.numpy(place), want)
    arena.verify()


def test_pinned_memory_is_a_plain_array():
    for shape, dtype in (((3, 5), "float16"), (7, F32), ((2, 0, 4), "bfloat16"), ((), np.int8)):
        array = cuattn.pinned_empty(shape, dtype)
        assert type(array) is np.ndarray
        assert array.shape == np.empty(shape).shape
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 256 == 0
        array[...] = 1
        assert (array == 1).all()
    assert cuattn.pinned_empty(4, "float8_e4m3fn").dtype == E4M3
    assert cuattn.pinned_empty(4, "bfloat16").dtype == ml_dtypes.bfloat16
    for dtype in (ml_dtypes.bfloat16, E4M3):  # as a type, and as a cache has it
        assert cuattn.pinned_empty(4, dtype).dtype == dtype
        assert cuattn.pinned_empty(4, np.empty(0, dtype).dtype).dtype == dtype
    part = cuattn.pinned_empty((1000, 1000), F32)[10]  # a view keeps the memory
    part[...] = 3
    np.zeros((1000, 1000), F32).fill(7)
    assert (part == 3).all()
    assert cuattn.pinned_empty(np.array([3, 5])).shape == (3, 5)
    with pytest.raises(
        ValueError, match=r"^pinned_empty: shape must not be negative, got \(3, -1\)"
    ):
        cuattn.pinned_empty((3, -1))
    with pytest.raises(MemoryError, match=r"^pinned_empty: "):
        cuattn.pinned_empty(2**62, np.int8)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 2.5), F32, "shape must be an integer, got 2.5; pass an int"),
        (True, F32, "shape must be an integer, got True; pass an int"),
        (3, "nope", "dtype must be one of numpy's numbers, or its name, got 'nope'"),
        (3, object, "dtype must be one of numpy's numbers, or its name, got <class 'object'>"),
    ],
)
def test_pinned_memory_of_no_shape_or_dtype_is_refused(shape, dtype, message):
    with pytest.raises(TypeError, match=f"^pinned_empty: {re.escape(message)}"):
        cuattn.pinned_empty(shape, dtype)
