# SPDX-License-Identifier: Apache-2.0
"""Named workloads of the cache operations: writing, reading and moving blocks.

They only move bytes, so the peer is a plain copy of as many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .workloads import ITEMSIZE

BYTES = {**ITEMSIZE, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class CacheWorkload:
    """One call of reshape_and_cache, gather_cache, copy_blocks or swap_blocks.

    Tokens lie in blocks drawn at random, "in order" within each block, the same "from place 5" of
    the first, or "scattered" one by one (swap_blocks: blocks as one run, or each elsewhere). A call
    of copy_blocks is over all layers.
    """

    name: str
    op: str
    tokens: int
    kv_layout: str = "nhd"
    order: str = "in order"
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    rope: bool = False
    layers: int = 1
    to_host: bool = False
    num_heads_kv: int = 8
    head_dim: int = 128
    block_size: int = 16
    jit: bool = False
    bars: tuple[Bar, ...] = ()

    flops = 0.0

    def draw(self, device: str) -> Any:
        from .cache_inputs import CacheInputs

        return CacheInputs(self, device)

    @property
    def bytes(self) -> int:
        """Bytes read and written in K and V caches; swap_blocks: sent, of one cache."""
        elements = self.tokens * self.num_heads_kv * self.head_dim
        if self.op == "swap_blocks":
            return elements * BYTES[self.cache_dtype]
        other = self.dtype if self.op == "reshape_and_cache" else self.cache_dtype
        return 2 * self.layers * elements * (BYTES[self.cache_dtype] + BYTES[other])

    @property
    def series(self) -> str:
        return f"{self.op}, {self.kv_layout}, {self.order}"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        return f"{self.tokens} tokens, {self.bytes / 2**20:.0f} MiB"


def cache() -> Iterable[CacheWorkload]:
    """Cache operations (write, gather, copy, swap blocks) beside a plain copy of as many bytes."""
    large, bars = 65536, (Bar("cuattn:auto", "memcpy", 0.9),)
    dtypes: dict[str, dict[str, str]] = {
        "bf16": {},
        "bf16 to e4m3": {"cache_dtype": "float8_e4m3fn"},
        "fp32": {"dtype": "float32", "cache_dtype": "float32"},
    }
    for layout in ("nhd", "hnd", "vllm"):
        for words, choice in dtypes.items():
            options: dict[str, Any] = {"kv_layout": layout, **choice}
            name = f"write {layout}, {words}"
            yield CacheWorkload(name, "reshape_and_cache", large, bars=bars, **options)
        yield CacheWorkload(f"gather {layout}", "gather_cache", large, kv_layout=layout, bars=bars)
    write = ("reshape_and_cache", large)
    for layout in ("nhd", "vllm"):
        options = {"kv_layout": layout, "bars": bars}
        yield CacheWorkload(f"write {layout}, RoPE", *write, rope=True, **options)
        narrow = {**options, "cache_dtype": "float8_e4m3fn"}
        yield CacheWorkload(f"write {layout}, RoPE, bf16 to e4m3", *write, rope=True, **narrow)
    options = {"kv_layout": "vllm", "order": "from place 5", "bars": bars}
    yield CacheWorkload("write vllm, from place 5", *write, **options)
    yield CacheWorkload("write nhd, scattered", *write, order="scattered", bars=bars)
    yield CacheWorkload("write vllm, scattered", *write, kv_layout="vllm", order="scattered")
    for layout in ("nhd", "vllm"):  # a decode step: no bar, a launch takes most of it
        options = {"kv_layout": layout, "order": "scattered"}
        yield CacheWorkload(f"write {layout}, 64 tokens", "reshape_and_cache", 64, **options)
    yield CacheWorkload("copy 256 blocks", "copy_blocks", 256 * 16, layers=32, bars=bars)
    for to_host in (True, False):
        name = f"swap 1024 blocks to {'host' if to_host else 'device'}"
        swap: dict[str, Any] = {"op": "swap_blocks", "tokens": 1024 * 16, "to_host": to_host}
        yield CacheWorkload(f"{name}, one run", bars=bars, **swap)
        yield CacheWorkload(f"{name}, scattered", order="scattered", **swap)


def cache_smoke() -> Iterable[CacheWorkload]:
    """One small case of each cache operation."""
    small: dict[str, Any] = {"num_heads_kv": 2, "head_dim": 64}
    small |= {"dtype": "float32", "cache_dtype": "float32"}
    for layout in ("nhd", "hnd", "vllm"):
        options = {**small, "kv_layout": layout}
        yield CacheWorkload(f"write {layout}", "reshape_and_cache", 48, **options)
        yield CacheWorkload(f"gather {layout}", "gather_cache", 48, **options)
    yield CacheWorkload("write, RoPE", "reshape_and_cache", 48, rope=True, **small)
    yield CacheWorkload("write, scattered", "reshape_and_cache", 33, order="scattered", **small)
    narrow = {**small, "cache_dtype": "float8_e4m3fn", "kv_layout": "vllm"}
    yield CacheWorkload("write e4m3", "reshape_and_cache", 48, **narrow)
    yield CacheWorkload("copy", "copy_blocks", 48, layers=2, **small)
    for to_host in (True, False):
        name = f"swap to {'host' if to_host else 'device'}"
        yield CacheWorkload(name, "swap_blocks", 48, to_host=to_host, order="scattered", **small)
