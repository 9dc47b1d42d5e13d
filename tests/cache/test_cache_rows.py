# SPDX-License-Identifier: Apache-2.0
"""reshape_and_cache and gather_cache: every byte of a cache after each call, against numpy.

Caches begin as 0xFF bytes (NaN), so a write to the wrong place shows; the expected bytes come from
plain numpy in the order [block, token, head, dim].
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import cuattn
from cache_cases import (
    CACHE_DTYPES,
    E4M3,
    F32,
    I32,
    I64,
    LAYOUTS,
    PAIRS,
    Write,
    cache_shape,
    shifted,
    tables,
    to_nhd,
    untouched,
    write,
)
from cases import DTYPES, normals
from harness import Arena, bits


def block_sizes(layout):
    return (8, 16, 32) if layout == "vllm" else (1, 5, 16, 256)


# Rows (tokens x heads) from which on a call on CUDA is cut into larger tiles. The CPU has one loop
# for every number of rows, which it spreads over threads: there float32 alone has large calls.
MANY_ROWS, MOST_ROWS = 4096, 32768


def large(device, *sizes, dtype=None):
    """The sizes of large calls that find something on the device."""
    return sizes if device.name == "cuda" or dtype == "float32" else ()


# -- reshape_and_cache


@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize(("dtype", "cache_dtype"), PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_go_to_their_slots(device, layout, dtype, cache_dtype, dim, rng):
    for block_size in block_sizes(layout):
        case = Write(layout, dtype, cache_dtype, dim=dim, block_size=block_size)
        case.blocks = max(3, -(-50 // block_size))
        write(device, rng, case)
    for rows in large(device, MANY_ROWS, *[MOST_ROWS] * (dim == 16), dtype=dtype):
        case.heads = -(-rows // case.tokens)
        write(device, rng, case)


@pytest.mark.parametrize("dim", [8, 24, 40, 112, 120, 192, 256, 512, 1024])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_dims(device, layout, dim, rng):
    for dtype in ("float32", "bfloat16"):
        write(device, rng, Write(layout, dtype, dim=dim, tokens=11))
    if dim % 16 == 0:
        write(device, rng, Write(layout, "float16", "float8_e4m3fn", dim=dim, tokens=11))
    for rows in large(device, MANY_ROWS):
        write(device, rng, Write(layout, "float16", dim=dim, heads=-(-rows // 37)))


@pytest.mark.parametrize("heads", [1, 2, 7, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads(device, layout, heads, rng):
    for dtype, cache_dtype in (("float16", "float16"), ("bfloat16", "float8_e4m3fn")):
        write(device, rng, Write(layout, dtype, cache_dtype, heads=heads))


@pytest.mark.parametrize("dtype_pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_consecutive_slots_from_any_start(device, layout, dtype_pair, rng):
    """Prompts of several sequences, as prefill writes them: runs of slots that begin anywhere."""
    blocks, block_size = 40, 16
    order = rng.permutation(blocks)
    slots, table = [], 0
    for length, start in ((97, 0), (1, 3), (130, 5), (16, 0), (64, 8)):
        positions = np.arange(start, start + length)
        slots.append(order[table + positions // block_size] * block_size + positions % block_size)
        table += positions[-1] // block_size + 1
    slots = np.concatenate(slots).astype(I64)
    slots[[40, 41, 200]] = -1
    for heads in (3, *(-(-rows // 308) for rows in large(device, MANY_ROWS, MOST_ROWS))):
        case = Write(layout, *dtype_pair, blocks=blocks, slots=slots, heads=heads, dim=80)
        write(device, rng, case)


@pytest.mark.parametrize("start", range(9))
def test_prompts_begin_anywhere_in_a_block(device, start, rng):
    """V of the vLLM layout by pieces: their first token may lie anywhere in a tile."""
    order = rng.permutation(160)
    for length, heads in ((rng.integers(100, 140), 3), *large(device, (2053, 2), (2053, 16))):
        positions = np.arange(start, start + length)
        slots = (order[positions // 16] * 16 + positions % 16).astype(I64)
        for pair in (("float16", None), ("bfloat16", "float8_e4m3fn"), ("float32", None)):
            write(device, rng, Write("vllm", *pair, blocks=160, slots=slots, heads=heads, dim=16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wide_rows_of_a_large_call(device, dtype, rng):
    """V of the vLLM layout by pieces: a head in several parts."""
    places = np.arange(5, 5 + 2053)
    slots = (rng.permutation(130)[places // 16] * 16 + places % 16).astype(I64)
    write(
        device,
        rng,
        Write("vllm", dtype, "float8_e4m3fn", blocks=130, slots=slots, heads=16, dim=192),
    )


@pytest.mark.parametrize("storage", ["transposed", "padded", "packed", "expanded", "odd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_rows(device, layout, storage, rng):
    if storage == "expanded":
        rows = rng.standard_normal((37, 1, 64), F32).repeat(3, axis=1)
        case = Write(layout, "float32", heads=3, storage="contiguous")
        write(device, rng, case, k=rows)
        return
    write(device, rng, Write(layout, "bfloat16", storage=storage))


@pytest.mark.parametrize("storage", ["transposed", "padded", "packed", "odd"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_strided_caches(device, layout, storage, rng):
    for pair in (("float16", "float16"), ("float32", "float8_e4m3fn")):
        write(device, rng, Write(layout, *pair, cache_storage=storage))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_of_one_array(device, layout, rng):
    """k_cache and v_cache as the two halves of each block: blocks lie apart."""
    shape = cache_shape(layout, 5, 16, 2, 32, np.float16, False)
    both = np.zeros((5, 2, *shape[1:]), np.float16)
    arena = Arena(device)
    place = arena.output(both.shape, np.float16)
    k_cache, v_cache = place[:, 0], place[:, 1]
    if layout == "vllm":
        k_cache = k_cache.reshape(5, 2, 4, 16, 8)
    k, v = (rng.standard_normal((20, 2, 32)).astype(np.float16) for _ in range(2))
    slots = rng.permutation(80)[:20].astype(I64)
    arrays = [arena.put(x, align=8) for x in (k, v, slots)]
    cuattn.reshape_and_cache(*arrays[:2], k_cache, v_cache, arrays[2], kv_layout=layout)
    device.synchronize()
    arena.verify()
    for cache, rows, is_k in ((k_cache, k, True), (v_cache, v, False)):
        got = to_nhd(device.numpy(cache), layout, is_k).reshape(80, 2, 32)
        assert np.array_equal(bits(got[slots]), bits(rows))
        assert np.isnan(np.delete(got, slots, axis=0)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_may_be_narrower_than_keys(device, layout, rng):
    write(device, rng, Write(layout, "bfloat16", dim=192, dim_v=128))
    write(device, rng, Write(layout, "float16", "float8_e4m3fn", dim=64, dim_v=512))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantising_scales(device, layout, dtype, rng):
    """value = stored * scale: a number, one for each head, and one element for all."""
    case = Write(layout, dtype, "float8_e4m3fn", magnitude=30.0)
    write(device, rng, case, k_scale=0.37, v_scale=2)
    per_head = rng.uniform(0.05, 20, (2, 3)).astype(F32)
    write(device, rng, case, k_scale=per_head[0], v_scale=per_head[1])
    write(device, rng, case, k_scale=np.array([1.7], F32), v_scale=np.array(0.3, F32))
    write(device, rng, case, k_scale=per_head[0])


def test_quantising_rounds_to_even_and_saturates(device, rng):
    """Every representable value, every tie, and their neighbours; infinity, NaN, both zeros."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3).astype(F32)
    codes = codes[np.isfinite(codes)]
    ties = (codes[1:] + codes[:-1]) / 2
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 448, 449, 464, 1e30, 2**-10], F32)
    near = [np.nextafter(ties, F32(to)) for to in (-1e9, 1e9)]
    drawn = rng.standard_normal(3000, F32) * np.exp2(rng.uniform(-14, 12, 3000)).astype(F32)
    values = np.concatenate([codes, ties, *near, special, drawn]).astype(F32)
    k = np.resize(values, (-(-values.size // 64), 1, 64))
    case = Write("nhd", "float32", "float8_e4m3fn", heads=1, blocks=16, block_size=256)
    case.slots = rng.permutation(16 * 256)[: len(k)].astype(I64)
    write(device, rng, case, k=k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "half"), [(64, 32), (80, 16), (64, 12), (64, 10), (96, 1), (128, 64)]
)
@pytest.mark.parametrize(("dtype", "cache_dtype"), PAIRS)
def test_keys_are_rotated_on_the_way(device, dtype, cache_dtype, dim, half, interleaved, rng):
    for layout in LAYOUTS:
        case = Write(layout, dtype, cache_dtype, dim=dim)
        positions = rng.integers(0, 50, case.tokens)
        rope = {**tables(rng, half), "positions": positions, "interleaved": interleaved}
        scale = 0.5 if cache_dtype == "float8_e4m3fn" else None
        write(device, rng, case, rope=rope, k_scale=scale)
        for rows in large(device, MANY_ROWS):
            case.heads = -(-rows // case.tokens)
            write(device, rng, case, rope=rope, k_scale=scale)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(32, 16), (48, 12), (32, 6)])
@pytest.mark.parametrize(("dtype", "cache_dtype"), PAIRS)
def test_keys_of_a_large_call_are_rotated(device, dtype, cache_dtype, dim, half, interleaved, rng):
    """Heads that fill no tile, and a prompt that begins within a block."""
    tokens, heads, start = 3301 if large(device, MOST_ROWS, dtype=dtype) else 331, 10, 3
    assert 3301 * heads >= MOST_ROWS
    places = np.arange(start, start + tokens)
    slots = (rng.permutation(210)[places // 16] * 16 + places % 16).astype(I64)
    slots[[40, 41, 200]] = -1
    rope = {**tables(rng, half), "positions": rng.integers(0, 50, tokens)}
    for layout in LAYOUTS:
        case = Write(layout, dtype, cache_dtype, dim=dim, heads=heads, blocks=210, slots=slots)
        write(device, rng, case, rope={**rope, "interleaved": interleaved})


def test_rotation_turns_the_plane(device):
    """Angle 90 degrees: (a, b) becomes (-b, a); pairs as the docstring says."""
    for interleaved in (False, True):
        k = np.arange(1, 9, dtype=F32).reshape(1, 1, 8)
        arena = Arena(device)
        cache = [arena.output((1, 1, 1, 8), F32) for _ in range(2)]
        arrays = [arena.put(x, align=8) for x in (k, k, np.zeros(1, I64), np.zeros((1, 2), F32))]
        options = {"sin": arena.put(np.ones((1, 2), F32), align=8), "positions": arrays[2]}
        cuattn.reshape_and_cache(
            *arrays[:2], *cache, arrays[2], cos=arrays[3], **options, rope_interleaved=interleaved
        )
        device.synchronize()
        want = [-2, 1, -4, 3, 5, 6, 7, 8] if interleaved else [-3, -4, 1, 2, 5, 6, 7, 8]
        assert device.numpy(cache[0]).ravel().tolist() == want
        assert device.numpy(cache[1]).ravel().tolist() == k.ravel().tolist()


@pytest.mark.parametrize("storage", ["padded", "packed"])
def test_rotation_tables_may_be_strided(device, storage, rng):
    case = Write("nhd", "float16", dim=64)
    rope = {**tables(rng, 32), "positions": rng.integers(0, 50, 37), "interleaved": False}
    wide = {name: np.zeros((50, 33), F32) for name in ("cos", "sin")}
    for name, table in wide.items():
        table[:, :32] = rope[name]
    arena = Arena(device)
    k, v = (rng.standard_normal((37, 3, 64)).astype(np.float16) for _ in range(2))
    slots = rng.permutation(7 * 16)[:37].astype(I64)
    caches = [[arena.output((7, 16, 3, 64), np.float16) for _ in "kv"] for _ in range(2)]
    rows = [arena.put(x, align=8) for x in (k, v)]
    places = [arena.put(x, align=8) for x in (slots, rope["positions"])]
    for pair, strided in zip(caches, (False, True), strict=True):
        placed = {
            name: arena.put(wide[name], align=4)[:, :32] if strided else arena.put(rope[name])
            for name in ("cos", "sin")
        }
        cuattn.reshape_and_cache(*rows, *pair, places[0], **placed, positions=places[1])
    device.synchronize()
    assert case.dim == 64
    for a, b in zip(*caches, strict=True):
        assert np.array_equal(bits(device.numpy(a)), bits(device.numpy(b)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_write(device, layout, rng):
    write(device, rng, Write(layout, slots=np.zeros(0, I64)))
    write(device, rng, Write(layout, slots=np.full(5, -1, I64)))
    write(device, rng, Write(layout, blocks=0, slots=np.full(5, -1, I64)))
    write(device, rng, Write(layout, heads=0, tokens=4))


def test_more_tokens_than_a_grid_axis_holds(device, rng):
    case = Write("vllm", "float16", blocks=2200, block_size=32, heads=1, dim=16)
    case.slots = rng.permutation(70_000).astype(I64)
    write(device, rng, case)
    case.layout = "nhd"
    write(device, rng, case)


# -- gather_cache


def filled(rng, layout, dtype, blocks, block_size, heads, dim, is_k):
    """A cache of random bytes without NaN codes, in layout and as [block, token, head, dim]."""
    shape = cache_shape(layout, blocks, block_size, heads, dim, dtype, is_k)
    cache = np.clip(normals(rng, shape) * F32(8), -400, 400).astype(dtype)
    return cache, to_nhd(cache, layout, is_k)


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_come_out_of_their_blocks(device, layout, dtype, give_out, rng):
    name, dtype = dtype, CACHE_DTYPES[dtype]
    for block_size in block_sizes(layout):
        lengths = np.minimum([0, 1, 5 * block_size, 17, 0, 33], 6 * block_size)
        many, most = (-(-rows // lengths.sum()) for rows in (MANY_ROWS, MOST_ROWS))
        sizes = ((3, 64, 64), (1, 80, 80), (2, 192, 128))
        larger = large(device, (many, 16, 32), (most, 16, 16), dtype=name)
        for heads, dim, dim_v in (*sizes, *larger):
            blocks = 30
            k_cache, k_nhd = filled(rng, layout, dtype, blocks, block_size, heads, dim, True)
            v_cache, v_nhd = filled(rng, layout, dtype, blocks, block_size, heads, dim_v, False)
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(I32)
            table = rng.integers(0, blocks, (6, 6)).astype(I32)  # blocks may be shared
            for row, length in enumerate(lengths):
                table[row, -(-int(length) // block_size) :] = 2147480000  # never read
            arena = Arena(device)
            arrays = [arena.put(x, align=a) for x, a in ((k_cache, 16), (v_cache, 16), (table, 4))]
            options = {"kv_layout": layout}
            total = int(ends[-1])
            if give_out:  # two rows more than needed, which stay as they are
                options["k_out"] = arena.output((total + 2, heads, dim), dtype, "padded", "k_out")
                options["v_out"] = arena.output((total + 2, heads, dim_v), dtype, "padded", "v_out")
            k, v = cuattn.gather_cache(*arrays, arena.put(ends, align=4), **options)
            device.synchronize()
            assert device.is_array(k)
            assert device.is_array(v)
            got = [device.numpy(x) for x in (k, v)]
            arena.verify()
            rows = [
                (table[b, i // block_size], i % block_size)
                for b, length in enumerate(lengths)
                for i in range(length)
            ]
            for x, cache in zip(got, (k_nhd, v_nhd), strict=True):
                want = np.array([cache[row] for row in rows], dtype)
                assert np.array_equal(bits(x[:total]), bits(want.reshape(total, *x.shape[1:])))
                assert len(x) == total + 2 * give_out
                assert (bits(x[total:]) == 0xFF).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_sequences_are_what_was_cached(device, layout, rng):
    k, v = (rng.standard_normal((100, 2, 64)).astype(np.float16) for _ in range(2))
    lengths, block_size = (33, 50, 17), 16
    table = rng.permutation(12).astype(I32).reshape(3, 4)
    slots = [
        table[b, i // block_size] * block_size + i % block_size
        for b, length in enumerate(lengths)
        for i in range(length)
    ]
    arena = Arena(device)
    caches = [
        arena.output(cache_shape(layout, 12, 16, 2, 64, np.float16, is_k), np.float16)
        for is_k in (True, False)
    ]
    rows = [arena.put(x) for x in (k, v)]
    cuattn.reshape_and_cache(
        *rows, *caches, arena.put(np.array(slots, I64), align=8), kv_layout=layout
    )
    ends = arena.put(np.array([0, 33, 83, 100], I32), align=4)
    out = cuattn.gather_cache(*caches, arena.put(table, align=4), ends, kv_layout=layout)
    device.synchronize()
    for got, want in zip(out, (k, v), strict=True):
        assert np.array_equal(bits(device.numpy(got)), bits(want))


@pytest.mark.parametrize("by", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_start_on_any_element(device, layout, dtype, by, rng):
    """Odd sizes of heads and blocks, and of starts: everything is moved by a narrower unit."""
    dtype = np.dtype(CACHE_DTYPES[dtype])
    x = 16 // dtype.itemsize
    dims = [(x, 5), (2 * x, x)] if layout == "vllm" else [(1, 3), (12, 20), (40, 36), (64, 64)]
    block_size, lengths = (8, (3, 0, 17)) if layout == "vllm" else (5, (3, 0, 17))
    for (dim, dim_v), heads in itertools.product(dims, (1, 3)):
        k_cache, k_nhd = filled(rng, layout, dtype, 9, block_size, heads, dim, True)
        v_cache, v_nhd = filled(rng, layout, dtype, 9, block_size, heads, dim_v, False)
        table = rng.permutation(9)[:4].astype(I32).reshape(1, 4).repeat(3, 0)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(I32)
        arena = Arena(device)
        (k_place, _), (v_place, _) = (shifted(arena, cache, by) for cache in (k_cache, v_cache))
        outs, before = zip(
            *(shifted(arena, np.zeros((22, heads, d), k_cache.dtype), by) for d in (dim, dim_v)),
            strict=True,
        )
        cuattn.gather_cache(
            k_place,
            v_place,
            arena.put(table, align=4),
            arena.put(ends, align=4),
            kv_layout=layout,
            k_out=outs[0],
            v_out=outs[1],
        )
        device.synchronize()
        arena.verify()
        rows = [(table[b, i // block_size], i % block_size) for b, n in enumerate(lengths)
                for i in range(n)]  # fmt: skip
        for out, cache, start in zip(outs, (k_nhd, v_nhd), before, strict=True):
            got = device.numpy(out)
            want = np.array([cache[row] for row in rows], cache.dtype)
            assert np.array_equal(bits(got[:20]), bits(want))
            assert not bits(got[20:]).any()
            assert untouched(device, start)


def test_caches_that_lie_apart_by_odd_strides(device, rng):
    """Blocks, tokens and heads with gaps of a few elements."""
    whole = rng.standard_normal((9, 6, 4, 70)).astype(np.float16)
    arena = Arena(device)
    place, _ = shifted(arena, whole, 3)
    table, ends = np.array([[7, 2, 0]], I32), np.array([0, 13], I32)
    for heads, dims in ((slice(0, 3), slice(1, 33)), (slice(1, 4), slice(0, 64)),
                        (slice(2, 3), slice(3, 10))):  # fmt: skip
        k, v = place[:, :5, heads, dims], place[:, 1:, heads, dims]
        out = cuattn.gather_cache(k, v, arena.put(table, align=4), arena.put(ends, align=4))
        device.synchronize()
        for got, tokens in zip(out, (whole[:, :5], whole[:, 1:]), strict=True):
            want = tokens[table[0]].reshape(15, 4, 70)[:13, heads, dims]
            assert np.array_equal(bits(device.numpy(got)), bits(want))


def test_nothing_to_gather(device):
    cache = np.zeros((3, 4, 2, 8), F32)
    for table, ends in (((0, 3), [0]), ((2, 3), [0, 0, 0]), ((2, 0), [0, 0, 0])):
        arena = Arena(device)
        arrays = [arena.put(x, align=4) for x in (np.zeros(table, I32), np.array(ends, I32))]
        k, v = cuattn.gather_cache(arena.put(cache), arena.put(cache), *arrays)
        assert tuple(k.shape) == tuple(v.shape) == (0, 2, 8)


@pytest.mark.parametrize("given", ["k_out", "v_out"])
@pytest.mark.parametrize("rows", [11, 13])
def test_a_lone_result_of_other_rows_is_refused_by_its_own_name(given, rows):
    cache, table = np.ones((3, 8, 2, 16), np.float32), np.zeros((2, 2), np.int32)
    ends, other = np.array([0, 3, 12], np.int32), {"k_out": "v_out", "v_out": "k_out"}[given]
    rule = re.escape(f"{given} must have cu_seqlens[-1] = 12 rows where {other} is left out")
    with pytest.raises(ValueError, match=f"^gather_cache: {rule}, got {rows}; pass both"):
        cuattn.gather_cache(cache, cache, table, ends, **{given: np.ones((rows, 2, 16), "f4")})


@pytest.mark.parametrize("kind", [F32, np.float64, np.float16, np.int64, int])
def test_a_scale_may_be_a_number_of_numpy(kind, rng):
    k, v = rng.standard_normal((2, 3, 2, 16), F32)
    slots = np.arange(3)
    want, got = (np.zeros((2, 1, 8, 2, 16), E4M3) for _ in range(2))
    for caches, scale in ((want, 2.0), (got, kind(2))):
        cuattn.reshape_and_cache(k, v, *caches, slots, k_scale=scale, v_scale=scale)
    assert np.array_equal(want.view(np.uint8), got.view(np.uint8))
