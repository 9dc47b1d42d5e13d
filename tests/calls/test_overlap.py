# SPDX-License-Identifier: Apache-2.0
"""What a call writes shares no memory with what it reads or with what else it writes: refused by
name; arrays that only lie between each other's elements are taken.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cuattn
import reference
from cases import EPS
from harness import bits
from overlap_calls import (
    CALLS,
    DIM,
    F32,
    HEADS,
    I64,
    IN_PLACE,
    call_of,
    contiguous,
    merge_stacked,
    pairs_of,
    place,
    zeros,
)

PAIRS = [(name, *pair) for name in CALLS for pair in pairs_of(name)]


@pytest.mark.parametrize(("name", "written", "other"), PAIRS)
def test_shared_memory_is_refused(device, name, written, other):
    """Two arrays begin in one place, or one begins within the other: named, nothing is written."""
    function, arguments = call_of(device, name)
    op = "merge_states" if function is merge_stacked else function.__name__
    for shift in (0, 16):
        sizes = [arguments[key].nbytes for key in (written, other)]
        if shift >= min(sizes) or (shift == 0 and (written, other) in IN_PLACE):
            continue
        for first, second in ((written, other), (other, written)):
            buffer = device.buffer(sum(sizes) + 64)
            placed = {first: place(device, buffer, 0, arguments[first])}
            placed[second] = place(device, buffer, shift, arguments[second])
            for key, value in arguments.items():
                if isinstance(value, np.ndarray) and key not in placed:
                    placed[key] = place(device, device.buffer(value.nbytes + 64), 0, value)
            before = device.copy(buffer)
            with pytest.raises(ValueError, match="share memory") as caught:
                function(**{**arguments, **placed})
            assert str(caught.value) == (
                f"{op}: {written} must not share memory with {other}, got "
                "overlapping arrays; give it memory of its own"
            )
            assert device.same_bytes(before, buffer)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_side_by_side_are_taken(device, name):
    """All arrays of a call in one buffer, one behind the other, without a gap but for alignment."""
    function, arguments = call_of(device, name)
    buffer = device.buffer(2**17)
    offset = 0
    for key, value in arguments.items():
        if isinstance(value, np.ndarray):
            arguments[key] = place(device, buffer, offset, value)
            offset += -(-value.nbytes // 16) * 16
    function(**arguments)
    device.synchronize()


def test_a_lent_workspace_is_compared_too():
    """The workspace of the naive backend, of the pages that are gathered and of a V2 call."""
    q = zeros(1, 64, 1, 8)
    out = zeros(1, 64, 1, 8)
    memory = zeros(64 * 64 + 1024, dtype=F32)
    at = -memory.ctypes.data % 64 // 4
    for name in ("q", "out"):
        within = memory[at + 64 : at + 64 + 512].reshape(1, 64, 1, 8)
        arguments = {"q": q, "k": q, "v": q, "out": out, name: within}
        pair = "workspace must not share memory with q"
        if name == "out":
            pair = "out must not share memory with workspace"
        with pytest.raises(ValueError, match=pair):
            cuattn.attention(**arguments, workspace=memory[at:], backend="naive")
    # What a call does not use of it is nobody's.
    behind = memory[at + 64 * 64 : at + 64 * 64 + 512].reshape(1, 64, 1, 8)
    cuattn.attention(q, q, q, out=behind, workspace=memory[at:], backend="naive")


def test_a_short_workspace_ends_where_it_does():
    """What lies behind a workspace that is too small is not of it: its size is what is refused."""
    buffer = np.zeros(2**12, dtype=F32)
    buffer = buffer[-buffer.ctypes.data % 64 // 4 :]
    short, array = buffer[:16], buffer[16 : 16 + 512].reshape(1, 64, 1, 8)
    q, lse = zeros(1, 64, 1, 8), np.zeros((1, 1, 64), dtype=F32)
    cache, tables, lens = zeros(2, 64, 1, 8), np.int32([[0, 1]]), np.int32([128])
    said = r"workspace must hold [0-9]+ bytes.*, got 64"
    with pytest.raises(MemoryError, match=said):
        cuattn.attention(array, q, q, workspace=short, backend="naive")
    with pytest.raises(MemoryError, match=said):
        cuattn.attention_backward(array, q, q, q, q, lse, workspace=short)
    arrays = (array[:, 0], cache, cache, tables, lens)
    with pytest.raises(MemoryError, match=said):
        cuattn.paged_attention(*arrays, num_splits=2, workspace=short)


def packed(device, rng, *shape):
    values = rng.standard_normal(shape).astype(F32)
    return values, place(device, device.buffer(values.nbytes), 0, values)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_slices_of_one_packed_array_are_taken(device, axis, rng):
    """q, k, v and the place of out are slices of one array, whatever axis they are numbered on."""
    values, array = packed(device, rng, *np.insert((2, 9, HEADS, DIM), axis, 4))
    q, k, v, _ = np.moveaxis(values, axis, 0)
    views = [array[(slice(None),) * axis + (i,)] for i in range(4)]
    cuattn.attention(*views[:3], out=views[3], causal=True)
    device.synchronize()
    want, _ = reference.attention(q, k, v, causal=True)
    np.testing.assert_allclose(device.numpy(views[3]), want, rtol=1e-4, atol=1e-5)
    for view, held in zip(views, (q, k, v), strict=False):
        assert np.array_equal(device.numpy(view), held)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_k_and_v_caches_of_one_array_are_taken(device, axis, rng):
    shape = (4, 8, HEADS, DIM)
    _, caches = packed(device, rng, *np.insert(shape, axis, 2))
    k_cache, v_cache = (caches[(slice(None),) * axis + (i,)] for i in range(2))
    (k, k_place), (v, v_place) = (packed(device, rng, 7, HEADS, DIM) for _ in range(2))
    slots = np.array([3, 31, 8, 9, 16, 0, 25], I64)
    slots_place = place(device, device.buffer(64), 0, slots)
    cuattn.reshape_and_cache(k_place, v_place, k_cache, v_cache, slots_place)
    device.synchronize()
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert np.array_equal(device.numpy(cache).reshape(-1, HEADS, DIM)[slots], rows)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_of_one_array_are_taken(device, axis, rng):
    """copy_blocks and swap_blocks over the layers of [layers, blocks, ...] or [blocks, layers]."""
    values, array = packed(device, rng, *np.insert((6, 4, HEADS, DIM), axis, 10))
    layers = [array[(slice(None),) * axis + (i,)] for i in range(10)]
    pairs = np.array([[0, 3], [1, 5]], I64)
    cuattn.copy_blocks(layers[:5], layers[5:], pairs)
    cuattn.swap_blocks(layers[:5], layers[5:], np.array([[2, 2]], I64))
    device.synchronize()
    want = np.moveaxis(values, axis, 0)
    want[:, pairs[:, 1]] = want[:, pairs[:, 0]]
    want[5:, 2] = want[:5, 2]
    for layer, expected in zip(layers, want, strict=True):
        assert np.array_equal(device.numpy(layer), expected)


def test_caches_of_lists_that_overlap_are_refused(device, rng):
    _, array = packed(device, rng, 12, 4, HEADS, DIM)
    one, other = array[:6], array[6:]
    shifted = array[3:9]
    pairs = np.array([[0, 1]], I64)
    copy, swap = cuattn.copy_blocks, cuattn.swap_blocks
    once, outside = "list each cache once", "use copy_blocks within one cache"
    refused = [
        (copy, [one, shifted], None, "k_caches[0] must not share memory with k_caches[1]", once),
        (copy, [one, other], [shifted] * 2, "k_caches[0] must not share .* with v_caches[0]", once),
        (swap, [one], [shifted], "dst[0] must not share memory with src[0]", outside),
        (swap, [one, other], [other, one], "dst[1] must not share memory with src[0]", outside),
        (swap, [one.copy() if device.name == "cpu" else one.clone()] * 2, [other, shifted],
         "dst[0] must not share memory with dst[1]", outside),
    ]  # fmt: skip
    for function, first, second, message, way_out in refused:
        message = message.replace("[", r"\[").replace("]", r"\]")
        rule = f"^{function.__name__}: {message}, got overlapping arrays; {way_out}$"
        with pytest.raises(ValueError, match=rule):
            function(first, second, pairs)
    # Twice the same is copied twice, and sources may be one.
    copy([one, one], [other, other], pairs)
    swap([one, one[:4]][:1] * 2, [other[:3], other[3:]], np.array([[0, 1]], I64))


def test_a_mapping_within_a_cache_is_refused():
    cache = zeros(4, 8, dtype=I64)
    pairs = cache[3].reshape(4, 2)
    pairs[:] = [[0, 1]] * 4
    for call, name in (
        (lambda: cuattn.copy_blocks(cache, None, pairs[:1]), r"k_caches\[0\]"),
        (lambda: cuattn.swap_blocks(cache.copy(), cache, pairs[:1]), r"dst\[0\]"),
    ):
        with pytest.raises(ValueError, match=f"{name} must not share memory with block_mapping"):
            call()


STRIDES = {
    "nested": (96, 32, 8, 1),
    "heads_first": (8, 64, 16, 1),
    "gaps": (256, 40, 8, 1),
    "interleaved": (24, 16, 72, 1),  # no stride holds the span of the others
    "one_row_less": (64, 32, 8, 1),
    "heads_in_rows": (128, 16, 8, 1),
    "shifted": (8, 16, 40, 1),
    "equal": (96, 8, 8, 1),
}
APART = {"nested", "heads_first", "gaps", "interleaved"}


@pytest.mark.parametrize("name", STRIDES)
def test_an_output_that_overlaps_itself_is_refused(device, name):
    shape, strides, overlap = (2, 3, 4, 8), STRIDES[name], name not in APART
    out = device.view(device.buffer(2**15), F32, 0, shape, strides)
    # What the strides say, by enumeration.
    places = sum(np.indices(shape)[i] * n for i, n in enumerate(strides))
    assert overlap == (len(np.unique(places)) < places.size)
    q = place(device, device.buffer(2**10), 0, zeros(*shape))
    if not overlap:
        cuattn.attention(q, q, q, out=out)
        device.synchronize()
        assert not device.numpy(out).any()
        return
    with pytest.raises(ValueError, match="overlap") as caught:
        cuattn.attention(q, q, q, out=out)
    assert str(caught.value) == (
        f"attention: out is written, so its elements must not overlap, got strides {strides} for "
        f"shape {shape}; pass an array with own memory"
    )


def random_view(rng, memory):
    """[2 to 4 axes, 8] somewhere in memory, with strides that are often nested, or nearly so."""
    shape = [*rng.integers(1, 5, size=rng.integers(1, 4)), 8]
    order, strides, step = rng.permutation(len(shape) - 1), [0] * len(shape), 8
    strides[-1] = 1
    for axis in order:
        strides[axis] = int(step + rng.integers(-4, 9) * (rng.random() < 0.4))
        step = strides[axis] * int(shape[axis]) + int(rng.integers(0, 9) * (rng.random() < 0.3))
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if min(strides) < 1 or span > memory.size // 2:
        return random_view(rng, memory)
    offset = int(rng.integers(0, memory.size - span))
    view = np.lib.stride_tricks.as_strided(
        memory[offset:], shape, [s * memory.itemsize for s in strides]
    )
    return np.expand_dims(view, tuple(range(4 - view.ndim))) if view.ndim < 4 else view


def test_random_strides_are_judged_as_numpy_judges_them(rng):
    """out and one part of a merge, anywhere in 4 KB: refused exactly where an element is shared."""
    seen = {True: 0, False: 0}
    memory = zeros(1024)
    while min(seen.values()) < 300:
        out, part = (random_view(rng, memory) for _ in range(2))
        if out.shape != part.shape:
            part = np.lib.stride_tricks.as_strided(part, out.shape, part.strides)
            low, high = np.lib.array_utils.byte_bounds(part)
            if high > np.lib.array_utils.byte_bounds(memory)[1] or low < memory.ctypes.data:
                continue
        places = sum(np.indices(out.shape)[i] * n for i, n in enumerate(out.strides))
        overlaps_itself = len(np.unique(places)) < places.size
        shares = np.shares_memory(out, part, max_work=-1)
        other = zeros(*out.shape)
        lse = zeros(*np.moveaxis(other, 1, 2).shape[:3])
        is_same = out.ctypes.data == part.ctypes.data and all(
            n == 1 or a == b for n, a, b in zip(out.shape, out.strides, part.strides, strict=True)
        )
        refused = bool(overlaps_itself or (shares and not is_same))
        call = functools.partial(cuattn.merge_states, part, lse, other, lse, out=out)
        if refused:
            rule = "elements must not overlap" if overlaps_itself else "share memory with out_a"
            with pytest.raises(ValueError, match=rule):
                call()
        else:
            call()
        seen[refused] += 1


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_merging_in_place_is_allowed(device, which, rng):
    outs = rng.standard_normal((2, 2, 5, 3, DIM)).astype(F32)
    lses = rng.standard_normal((2, 2, 3, 5)).astype(F32)
    lses[0, 0, 0] = -np.inf
    parts = [
        place(device, device.buffer(x.nbytes), 0, x) for x in (outs[0], lses[0], outs[1], lses[1])
    ]
    want = [device.numpy(x).copy() for x in cuattn.merge_states(*parts)]
    out = parts[2] if which == "b" else parts[0]
    lse_out = parts[3] if which == "b" else parts[1]
    if which == "both":  # the merge of a part with itself
        parts[2:] = parts[:2]
        want = [device.numpy(x).copy() for x in cuattn.merge_states(*parts)]
    got = cuattn.merge_states(*parts, out=out, lse_out=lse_out)
    device.synchronize()
    assert got[0] is out
    assert got[1] is lse_out
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(bits(device.numpy(a)), bits(b))


@pytest.mark.parametrize("index", [0, 2])
def test_merging_into_one_part_of_a_stack_is_allowed(device, index, rng):
    """Exactly one part, of parts that lie apart."""
    outs = rng.standard_normal((3, 2, 5, 3, DIM)).astype(F32)
    lses = rng.standard_normal((3, 2, 3, 5)).astype(F32)
    parts = [place(device, device.buffer(x.nbytes + 64), 0, x) for x in (outs, lses)]
    want = [device.numpy(x).copy() for x in cuattn.merge_states(*parts)]
    got = cuattn.merge_states(*parts, out=parts[0][index], lse_out=parts[1][index])
    device.synchronize()
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(bits(device.numpy(a)), bits(b))
    rest = np.delete(np.arange(3), index)
    assert np.array_equal(device.numpy(parts[0])[rest], outs[rest])
    one = np.ones((2, 5, 3, DIM), F32)
    between = parts[0].reshape(-1)[16:][: one.size].reshape(one.shape)
    shapes = [(3, *one.shape)] * 2
    strides = [(step, *contiguous(one.shape)) for step in (0, 48)]  # one part, and shifted ones
    odd = [device.view(device.buffer(2**14), F32, 0, *x) for x in zip(shapes, strides, strict=True)]
    for stack, out in ((parts[0], between), *((stack, stack[0]) for stack in odd)):
        with pytest.raises(ValueError, match="out must not share memory with outs"):
            cuattn.merge_states(stack, parts[1], out=out)


def test_out_may_not_be_q():
    """Some kernels read a row of q again after its result was written."""
    q, k, v = (zeros(1, 5, 2, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"^attention: out must not share memory with q"):
        cuattn.attention(q, k, v, out=q)
    with pytest.raises(ValueError, match=r"^attention: out must not share memory with k"):
        cuattn.attention(q, k, v, out=k)


def test_a_buffer_of_its_own_is_all_that_is_asked():
    """Inputs may share memory with each other as they like."""
    x = np.random.default_rng(0).standard_normal((1, 6, 2, 8)).astype(F32)
    out = np.empty_like(x)
    cuattn.attention(x, x, x, out=out)
    want, _ = reference.attention(x, x, x)
    assert np.abs(out - want).max() < 1e2 * EPS["float32"]
