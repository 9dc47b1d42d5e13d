# SPDX-License-Identifier: Apache-2.0
"""Problems of the cache operations: layouts, shapes, and what a write must leave."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

import cuattn
from cases import DTYPES, normals
from harness import Arena, bits

F32, I32, I64 = np.float32, np.int32, np.int64


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


LAYOUTS = ("nhd", "hnd", "vllm")


PAIRS = [(name, name) for name in DTYPES] + [(name, "float8_e4m3fn") for name in DTYPES]


CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": E4M3}


def cache_shape(layout, blocks, block_size, heads, dim, dtype, is_k):
    if layout == "nhd":
        return (blocks, block_size, heads, dim)
    if layout == "hnd":
        return (blocks, heads, block_size, dim)
    if not is_k:
        return (blocks, heads, dim, block_size)
    x = 16 // np.dtype(dtype).itemsize
    return (blocks, heads, dim // x, block_size, x)


def to_nhd(cache, layout, is_k):
    """The cache as [block, token, head, dim]."""
    if layout == "hnd":
        return cache.swapaxes(1, 2)
    if layout == "vllm" and is_k:
        blocks, heads, groups, block_size, x = cache.shape
        return cache.transpose(0, 3, 1, 2, 4).reshape(blocks, block_size, heads, groups * x)
    return cache.transpose(0, 3, 1, 2) if layout == "vllm" else cache


def rotated(x, cos, sin, positions, interleaved):
    """x in float32 with its first elements rotated; products and sums are rounded one by one."""
    x, half = x.astype(F32), cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].copy(), x[..., second].copy()
    c, s = cos[positions][:, None], sin[positions][:, None]
    x[..., first] = a * c - b * s
    x[..., second] = b * c + a * s
    return x


def stored(x, dtype, scale=None):
    """What a cache of dtype holds of x."""
    if dtype != E4M3:
        return x.astype(dtype)
    scale = np.broadcast_to(np.asarray(1 if scale is None else scale, F32), x.shape[1:2])
    scaled = x.astype(F32) * (F32(1) / scale)[:, None]
    return np.clip(scaled, -448, 448).astype(E4M3)


@dataclasses.dataclass
class Write:
    """One call of reshape_and_cache."""

    layout: str = "nhd"
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    tokens: int = 37
    blocks: int = 7
    block_size: int = 16
    heads: int = 3
    dim: int = 64
    dim_v: int | None = None
    storage: str = "contiguous"  # of k and v
    cache_storage: str = "contiguous"
    slots: np.ndarray | None = None  # None: drawn, a few of them -1
    magnitude: float = 1.0

    def draw_slots(self, rng):
        slots = rng.permutation(self.blocks * self.block_size)[: self.tokens].astype(I64)
        slots[rng.random(slots.size) < 0.1] = -1
        return slots


def write(device, rng, case, *, rope=None, k_scale=None, v_scale=None, k=None):
    """Run the case; the caches must hold exactly what numpy says."""
    dtype, cache_dtype = DTYPES[case.dtype], CACHE_DTYPES[case.cache_dtype or case.dtype]
    slots = case.slots if case.slots is not None else case.draw_slots(rng)
    dims = {"k": case.dim, "v": case.dim if case.dim_v is None else case.dim_v}
    rows = {
        name: normals(rng, (slots.size, case.heads, dim)) * F32(case.magnitude)
        for name, dim in dims.items()
    }
    if k is not None:
        rows["k"] = k
    rows = {name: x.astype(dtype) for name, x in rows.items()}
    arena = Arena(device)
    placed = [arena.put(rows[name], case.storage, name) for name in "kv"]
    caches = [
        arena.output(
            cache_shape(
                case.layout, case.blocks, case.block_size, case.heads, dim, cache_dtype, name == "k"
            ),
            cache_dtype,
            case.cache_storage,
            f"{name}_cache",
        )
        for name, dim in dims.items()
    ]
    options = {"kv_layout": case.layout}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            array = isinstance(scale, np.ndarray)
            options[name] = arena.put(scale, name=name, align=4) if array else scale
    if rope is not None:
        for name in ("cos", "sin", "positions"):
            options[name] = arena.put(rope[name], rope.get("storage", "contiguous"), name, align=8)
        options["rope_interleaved"] = rope["interleaved"]
    result = cuattn.reshape_and_cache(
        *placed, *caches, arena.put(slots, name="slots", align=8), **options
    )
    device.synchronize()
    assert result[0] is caches[0]
    assert result[1] is caches[1]
    held = [device.numpy(cache) for cache in caches]
    arena.verify()

    values = dict(rows)
    if rope is not None:
        names = ("cos", "sin", "positions", "interleaved")
        values["k"] = rotated(rows["k"], *(rope[name] for name in names))
    for name, got, scale in zip("kv", held, (k_scale, v_scale), strict=True):
        shape = (case.blocks * case.block_size, case.heads, dims[name])
        want = np.full((*shape[:2], shape[2] * cache_dtype.itemsize), 0xFF, np.uint8)
        want = want.view(cache_dtype)
        in_range = (slots >= 0) & (slots < shape[0])
        want[slots[in_range]] = stored(values[name], cache_dtype, scale)[in_range]
        want = want.reshape(case.blocks, case.block_size, *shape[1:])
        got = to_nhd(got, case.layout, name == "k")
        if want.size:
            different = (bits(got) != bits(want)).reshape(*want.shape[:3], -1).any(axis=3)
            where = np.argwhere(different)[:5].tolist()
            assert not where, f"{name}_cache differs at [block, token, head] {where}"
    return rows, held


def tables(rng, half, rows=50):
    angle = rng.uniform(0, 7, (rows, half))
    return {"cos": np.cos(angle).astype(F32), "sin": np.sin(angle).astype(F32)}


def copied(cache, mapping):
    want = cache.copy()
    want[mapping[:, 1]] = cache[mapping[:, 0]]
    return want


def shifted(arena, values, by):
    """An array that is written, `by` elements behind a start on 16 bytes; and what lies before."""
    whole = arena.output((values.size + by,), values.dtype, name="shifted", align=values.itemsize)
    view = whole[by:].reshape(values.shape)
    arena.device.write(view, values)
    return view, whole[:by]


def untouched(device, before):
    return (bits(device.numpy(before)) == 0xFF).all()
