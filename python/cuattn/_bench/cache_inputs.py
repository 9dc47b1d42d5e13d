# SPDX-License-Identifier: Apache-2.0
"""Arrays of a cache operation, the calls that are timed, and the check of what they moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cuattn

from .cache import CacheWorkload
from .paged_inputs import cache_shapes, calls_in_graph, in_turn, num_sets
from .prepared import Prepared, require
from .reference import EPS, Error

SEQUENCE = 1024  # tokens of a sequence that gather_cache reads
MAX_POSITION = 4096
PIECE_BYTES = 128 << 20  # copies of 512 MiB run at 0.6 of the speed in a CUDA graph

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # what was moved, what it had to be
Calls = tuple[Callable[[], Any], Callable[[Any], Pairs]]  # the call; the pairs of its result


class MovedBytes:
    """Compares what a call left with what it had to leave."""

    def __init__(self, w: CacheWorkload):
        self.eps = EPS[w.dtype] if w.rope else 0.0

    def error(self, pairs: Pairs) -> Error:
        largest, allowed = 0.0, 0.0
        for got, expected in pairs:
            difference = (got.float() - expected.float()).abs().max().item()
            largest = max(largest, difference) if difference == difference else difference
            allowed = max(allowed, self.eps * expected.float().abs().max().item())
        return Error(largest, allowed)


def rows_of(cache: torch.Tensor, slots: torch.Tensor, layout: str, size: int) -> torch.Tensor:
    """Read slots out of a K or V cache, [tokens, heads, dim]."""
    block, offset = slots // size, slots % size
    if layout == "nhd":
        return cache[block, offset]
    if layout == "hnd":
        return cache[block, :, offset]
    rows = cache[block, :, :, offset]  # V: [tokens, heads, dim]; K: [tokens, heads, dim / x, x]
    return rows.flatten(2)


def rotated(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE over halves, in float32, not rounded on the way; cos and sin [tokens, dim / 2]."""
    a, b = k.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class CacheInputs:
    """Several sets of arrays, so that a call finds none of its own in the L2."""

    def __init__(self, w: CacheWorkload, device: str):
        self.workload, self.device = w, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.rng = np.random.default_rng(0)
        self.is_cuda = device != "cpu"
        self.sets = num_sets(w.bytes, self.is_cuda)
        self.repeats = 0
        if self.is_cuda and w.op != "swap_blocks":  # whose copies are the host's to start
            self.repeats = calls_in_graph(w.bytes, self.sets)

    def draw(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        wide = torch.float32 if dtype == "float8_e4m3fn" else getattr(torch, dtype)
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=wide)
        return drawn.to(getattr(torch, dtype))

    def caches(self, num_blocks: int) -> list[torch.Tensor]:
        w = self.workload
        itemsize = getattr(torch, w.cache_dtype).itemsize
        return [self.draw(shape, w.cache_dtype) for shape in cache_shapes(w, num_blocks, itemsize)]

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def blocks(self) -> tuple[int, np.ndarray]:
        """Return the blocks of a cache, twice as many as the tokens fill, in random order."""
        count = 2 * -(-self.workload.tokens // self.workload.block_size)
        return count, self.rng.permutation(count)

    def slots(self) -> np.ndarray:
        """Return the slot of each token."""
        w = self.workload
        count, order = self.blocks()
        if w.order == "scattered":
            return self.rng.permutation(count * w.block_size)[: w.tokens]
        token = np.arange(w.tokens) + (5 if w.order == "from place 5" else 0)
        return order[token // w.block_size] * w.block_size + token % w.block_size

    def sample(self) -> MovedBytes:
        return MovedBytes(self.workload)


def writing(w: CacheWorkload, x: CacheInputs) -> Calls:
    """reshape_and_cache: the call, and what it has to leave behind."""
    shape = (w.tokens, w.num_heads_kv, w.head_dim)
    options: dict[str, Any] = {"kv_layout": w.kv_layout}
    if w.rope:
        angles = x.draw((MAX_POSITION, w.head_dim // 2), "float32")
        positions = x.on_device(np.arange(w.tokens) % MAX_POSITION)
        options |= {"cos": angles.cos(), "sin": angles.sin(), "positions": positions}
    sets = []
    for _ in range(x.sets):
        rows = [x.draw(shape, w.dtype) for _ in range(2)]
        sets.append((*rows, *x.caches(x.blocks()[0]), x.on_device(x.slots())))

    def pairs(caches: Any) -> Pairs:
        k, v, _, _, slots = sets[0]
        if w.rope:
            k = rotated(k, *(options[name][options["positions"]] for name in ("cos", "sin")))
        return [
            (rows_of(cache, slots, w.kv_layout, w.block_size), rows.to(cache.dtype))
            for cache, rows in zip(caches, (k, v), strict=True)
        ]

    call = in_turn(sets, lambda *arrays: cuattn.reshape_and_cache(*arrays, **options))
    return call, pairs


def gathering(w: CacheWorkload, x: CacheInputs) -> Calls:
    """gather_cache: the call, and the rows it has to give."""
    lengths = [SEQUENCE] * (w.tokens // SEQUENCE) or [w.tokens]
    cu_seqlens = x.on_device(np.cumsum([0, *lengths]).astype(np.int32))
    width = -(-lengths[0] // w.block_size)
    sets = []
    for _ in range(x.sets):
        count, order = x.blocks()
        tables = order[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
        shape = (w.tokens, w.num_heads_kv, w.head_dim)
        dtype = getattr(torch, w.cache_dtype)
        outs = [torch.empty(shape, dtype=dtype, device=x.device) for _ in range(2)]
        sets.append((*x.caches(count), x.on_device(tables), *outs))

    def gather(
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        tables: torch.Tensor,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> Any:
        options = {"kv_layout": w.kv_layout, "k_out": k_out, "v_out": v_out}
        return cuattn.gather_cache(k_cache, v_cache, tables, cu_seqlens, **options)

    def pairs(outs: Any) -> Pairs:
        *caches, tables, _, _ = sets[0]
        offset = torch.arange(w.block_size, device=x.device)
        slots = (tables.long()[:, :, None] * w.block_size + offset).flatten(1)
        slots = slots[:, : lengths[0]].flatten()
        return [
            (out, rows_of(cache, slots, w.kv_layout, w.block_size))
            for out, cache in zip(outs, caches, strict=True)
        ]

    return in_turn(sets, gather), pairs


def copying(w: CacheWorkload, x: CacheInputs) -> Calls:
    """copy_blocks over all layers: the call, and the blocks it has to make alike."""
    count, order = x.blocks()
    mapping = x.on_device(order.reshape(2, -1).T.astype(np.int64).copy())
    k_caches, v_caches = zip(*(x.caches(count) for _ in range(w.layers)), strict=True)

    def pairs(_: Any) -> Pairs:
        ends = (k_caches[0], v_caches[0], k_caches[-1], v_caches[-1])
        return [(cache[mapping[:, 1]], cache[mapping[:, 0]]) for cache in ends]

    return lambda: cuattn.copy_blocks(list(k_caches), list(v_caches), mapping), pairs


def swapping(w: CacheWorkload, x: CacheInputs) -> Calls:
    """swap_blocks of one cache: the call, and the blocks it has to send."""
    count, _ = x.blocks()
    shape = cache_shapes(w, count, getattr(torch, w.cache_dtype).itemsize)[0]
    bits = {2: "int16", 4: "int32"}[getattr(torch, w.cache_dtype).itemsize]
    near = x.draw(shape, w.cache_dtype).view(getattr(torch, bits))
    far = cuattn.pinned_empty(shape, bits)
    far[...] = x.draw(shape, w.cache_dtype).view(near.dtype).cpu().numpy()
    if not x.is_cuda:
        near = near.numpy()  # host to host: one library
    half = count // 2
    mapping = np.stack([np.arange(half), np.arange(half) + half], axis=1)
    if w.order == "scattered":
        mapping = np.stack([x.rng.permutation(count)[:half] for _ in range(2)], axis=1)
    source, target = (near, far) if w.to_host else (far, near)

    def pairs(_: Any) -> Pairs:
        if x.is_cuda:
            torch.cuda.synchronize()
        tensors = [torch.as_tensor(array).cpu() for array in (target, source)]
        return [(tensors[0][mapping[:, 1]], tensors[1][mapping[:, 0]])]

    return lambda: cuattn.swap_blocks(source, target, mapping), pairs


OPERATIONS = {
    "reshape_and_cache": writing,
    "gather_cache": gathering,
    "copy_blocks": copying,
    "swap_blocks": swapping,
}


def ours(backend: str) -> Callable[[CacheWorkload, CacheInputs], Prepared]:
    def prepare(w: CacheWorkload, x: CacheInputs) -> Prepared:
        require(backend == "auto", "cache operations have one kernel each")
        call, pairs = OPERATIONS[w.op](w, x)
        return Prepared(call, canonical=pairs, repeats=x.repeats)

    return prepare


def memcpy(w: CacheWorkload, x: CacheInputs) -> Prepared:
    """Copy as many bytes from one contiguous array to another (swap_blocks: the same way)."""
    count = w.bytes if w.op == "swap_blocks" else w.bytes // 2
    pin = x.is_cuda and w.op == "swap_blocks"
    sets = []
    for _ in range(1 if pin else x.sets):
        source = torch.ones(count, dtype=torch.int8, device=x.device)
        if pin:
            host = torch.ones(count, dtype=torch.int8).pin_memory()
            source, target = (source, host) if w.to_host else (host, source)
        else:
            target = torch.zeros_like(source)
        sets.append((source, target))

    def copy(source: torch.Tensor, target: torch.Tensor) -> Any:
        pieces = zip(source.split(PIECE_BYTES), target.split(PIECE_BYTES), strict=True)
        for piece, to in pieces:
            to.copy_(piece, non_blocking=True)
        return source, target

    def pairs(arrays: Any) -> Pairs:
        if x.is_cuda:
            torch.cuda.synchronize()
        source, target = arrays
        return [(target[-4096:], source[-4096:].to(target.device))]

    return Prepared(in_turn(sets, copy), canonical=pairs, repeats=x.repeats)
