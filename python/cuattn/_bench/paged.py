# SPDX-License-Identifier: Apache-2.0
"""Named workloads over a paged KV cache, and the bars that they must reach.

Speed is KV bytes / time: decode reads its cache once. As in workloads.py, a workload says shapes
and options only.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .bars import Bar
from .workloads import ITEMSIZE, SHORT_DTYPE, visible_pairs

if TYPE_CHECKING:
    from .._types import KvLayout


@dataclasses.dataclass(frozen=True)
class PagedWorkload:
    """One decode step: a query for each sequence, its keys and values in blocks drawn at random.

    With ``query_lens`` the sequences have so many queries each, packed: prefill in chunks. With
    ``e4m3`` the caches hold numbers that float8_e4m3fn has: contestants may store them so. With
    ``shared_len`` all begin with the same tokens, in the same blocks.
    """

    name: str
    context_lens: tuple[int, ...]
    num_heads_q: int
    num_heads_kv: int
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_layout: KvLayout = "nhd"
    e4m3: bool = False
    query_lens: tuple[int, ...] = ()
    shared_len: int = 0
    jit: bool = True
    bars: tuple[Bar, ...] = ()

    causal, window, softcap, alibi = True, (-1, -1), 0.0, False

    def draw(self, device: str) -> Any:
        from .paged_inputs import PagedInputs

        return PagedInputs(self, device)

    @property
    def op(self) -> str:
        return "paged_prefill" if self.query_lens else "paged_attention"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence."""
        queries = self.query_lens or (1,) * len(self.context_lens)
        return list(zip(queries, self.context_lens, strict=True))

    @property
    def flops(self) -> float:
        pairs = sum(visible_pairs(q, kv, self.causal, self.window) for q, kv in self.sequences)
        return 4.0 * self.num_heads_q * self.head_dim * pairs

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values, each read once."""
        itemsize = 1 if self.e4m3 else ITEMSIZE[self.dtype]
        repeated = self.shared_len * (len(self.context_lens) - 1)
        tokens = sum(self.context_lens) - repeated
        return 2 * tokens * self.num_heads_kv * self.head_dim * itemsize

    @property
    def series(self) -> str:
        heads = f"{self.num_heads_q}/{self.num_heads_kv} heads, d{self.head_dim}"
        dtype = "e4m3" if self.e4m3 else SHORT_DTYPE[self.dtype]
        return f"{dtype}, {heads}, {self.kv_layout}, block {self.block_size}"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        longest = max(self.context_lens, default=0)
        return f"batch {len(self.context_lens)}, context {longest}, {self.bytes / 2**20:.0f} MiB"


AUTO, INVARIANT, BEST = "cuattn:auto", "cuattn:invariant", "best peer"


def decode(batch: int, context: int, heads: tuple[int, int], **options: Any) -> PagedWorkload:
    """Make a step of equally long sequences."""
    name = f"{heads[0]}/{heads[1]} {batch} x {context}"
    return PagedWorkload(options.pop("name", name), (context,) * batch, *heads, **options)


def paged() -> Iterable[PagedWorkload]:
    """Decode over pages: KV of 4 MB to 2 GB; GQA 4:1, 8:1 and MHA; blocks of 16 and 64."""
    latency = Bar(AUTO, "microseconds", 8.0)
    yield decode(1, 1024, (32, 8), name="32/8 1 x 1024, block 16, bf16", bars=(latency,))
    grouped = (
        (1, 8192),
        (16, 1024),
        (16, 4096),
        (16, 8192),
        (64, 2048),
        (128, 1024),
        (1, 131072),
        (64, 8192),
    )
    single = ((1, 1024), (4, 1024), (16, 1024), (16, 2048), (16, 8192), (64, 2048))
    for dtype in ("bfloat16", "float16"):
        for heads in ((32, 8), (64, 8), (32, 32)):
            for batch, context in grouped if heads[1] == 8 else single:
                large = decode(batch, context, heads).bytes >= 256 << 20
                if dtype == "float16" and context not in (2048, 8192):
                    continue
                for block in (16, 64) if dtype == "bfloat16" else (16,):
                    name = f"{heads[0]}/{heads[1]} {batch} x {context}, block {block}"
                    yield decode(
                        batch,
                        context,
                        heads,
                        name=f"{name}, {SHORT_DTYPE[dtype]}",
                        block_size=block,
                        dtype=dtype,
                        bars=(Bar(AUTO, BEST, 1.0 if large else 1.2),),
                    )


def paged_vllm() -> Iterable[PagedWorkload]:
    """PagedAttention V1 and V2 in vLLM's layouts, beside the figures of vLLM 0.6.6."""
    shapes = ((1, 8192), (16, 8192), (32, 128), (32, 512), (32, 2048), (64, 8192), (128, 1024))
    for dtype in ("float16", "bfloat16"):
        for heads, least in (((32, 32), 1.0), ((32, 8), 2.0)):
            for batch, context in shapes:
                bars = [Bar(f"cuattn:{v}", f"vllm_{v}", least) for v in ("v1", "v2")]
                if batch == 1:
                    bars.append(Bar("cuattn:v2", AUTO, 0.95))
                yield decode(
                    batch,
                    context,
                    heads,
                    name=f"{SHORT_DTYPE[dtype]} {heads[0]}/{heads[1]} {batch} x {context}",
                    dtype=dtype,
                    kv_layout="vllm",
                    bars=tuple(bars),
                )


def paged_blocks() -> Iterable[PagedWorkload]:
    """Small blocks: 1 and 8 tokens, KV of 512 MB and 2 GB."""
    for block in (1, 8):
        for batch, context, heads in (
            (16, 8192, (32, 8)),
            (64, 8192, (32, 8)),
            (64, 2048, (64, 8)),
            (16, 8192, (32, 32)),
        ):
            name = f"block {block}, {heads[0]}/{heads[1]} {batch} x {context}"
            bars = (Bar(AUTO, "copy", 0.8),)
            yield decode(batch, context, heads, name=name, block_size=block, bars=bars)


def paged_fp8() -> Iterable[PagedWorkload]:
    """Float8 caches (e4m3fn) beside the same numbers in bfloat16, and under float8 queries."""
    for layout in ("nhd", "vllm"):
        for batch, context, heads in (
            (16, 8192, (32, 8)),
            (64, 8192, (32, 8)),
            (64, 8192, (64, 8)),
            (16, 8192, (32, 32)),
        ):
            name = f"{layout}, {heads[0]}/{heads[1]} {batch} x {context}"
            bars = (Bar(AUTO, "cuattn:wide", 1.7), Bar("cuattn:codes", AUTO, 0.9))
            yield decode(batch, context, heads, name=name, kv_layout=layout, e4m3=True, bars=bars)


def ragged_lengths(batch: int = 64, shortest: int = 128, longest: int = 32768) -> tuple[int, ...]:
    """Draw lengths evenly on a logarithmic scale."""
    draw = random.Random(0)
    low, high = math.log(shortest), math.log(longest)
    return tuple(round(math.exp(draw.uniform(low, high))) for _ in range(batch))


def paged_ragged() -> Iterable[PagedWorkload]:
    """64 sequences of 128 to 32768 tokens, beside as many tokens in equal sequences."""
    lengths = ragged_lengths()
    for heads in ((32, 8), (64, 8), (32, 32)):
        words = f"{heads[0]}/{heads[1]}"
        uniform = f"{words} uniform"
        yield decode(len(lengths), sum(lengths) // len(lengths), heads, name=uniform)
        bars = (Bar(AUTO, f"row {uniform}", 0.9),)
        yield PagedWorkload(f"{words} ragged", lengths, *heads, bars=bars)


def paged_invariant() -> Iterable[PagedWorkload]:
    """Decode with batch_invariant=True beside False: 1 to 64 sequences of 1024 to 32768 tokens."""
    bars = (Bar(INVARIANT, AUTO, 1 / 1.25, mean=1 / 1.1),)
    for heads in ((32, 8), (64, 8)):
        for batch, context in ((1, 1024), (1, 32768), (4, 8192), (16, 4096), (64, 1024)):
            yield decode(batch, context, heads, bars=bars)


def cascade() -> Iterable[PagedWorkload]:
    """Decode behind a shared prefix: cascade_attention beside pages that share its blocks."""
    bars = (Bar("cuattn:cascade", AUTO, 1.0),)
    own = 512
    for batch, shared in ((64, 8192), (16, 32768), (64, 2048)):
        name = f"64/8 {batch} x {own} behind {shared}"
        options: dict[str, Any] = {"name": name, "shared_len": shared, "bars": bars}
        yield decode(batch, shared + own, (64, 8), **options)


def chunked() -> Iterable[PagedWorkload]:
    """Prefill over pages, in chunks and beside decode, against the same keys packed."""
    bars = (Bar(AUTO, "cuattn:dense", 0.9),)
    batches = {
        "prompts 4 x 4096": ((4096,) * 4, (4096,) * 4),
        "chunks 8 x 1024 of 8192": ((8192,) * 8, (1024,) * 8),
        "chunks 4 x 512 of 32768": ((32768,) * 4, (512,) * 4),
        "chunk 2048 of 16384, decode 31 x 4096": ((16384, *(4096,) * 31), (2048, *(1,) * 31)),
    }
    for heads in ((32, 8), (32, 32)):
        for words, (contexts, queries) in batches.items():
            for block in (16, 64):
                name = f"{heads[0]}/{heads[1]} {words}, block {block}"
                options: dict[str, Any] = {"block_size": block, "query_lens": queries, "bars": bars}
                yield PagedWorkload(name, contexts, *heads, **options)


def chunked_fp8() -> Iterable[PagedWorkload]:
    """Prefill over float8 caches, of bfloat16 queries and of codes, and over the numbers."""
    bars = (Bar("cuattn:codes", "cuattn:wide", 1.0), Bar(AUTO, "cuattn:wide", 0.9))
    for w in chunked():
        if w.num_heads_kv == 8 and w.block_size == 16:
            yield dataclasses.replace(w, e4m3=True, bars=bars)


def paged_smoke() -> Iterable[PagedWorkload]:
    """Seconds on any machine: one small case of each kind of call over pages."""
    small: dict[str, Any] = {"head_dim": 64, "dtype": "float32"}
    yield decode(3, 100, (4, 2), name="decode", **small)
    yield PagedWorkload("ragged, hnd", (70, 1, 33), 4, 1, kv_layout="hnd", block_size=8, **small)
    yield decode(2, 90, (4, 4), name="vllm", kv_layout="vllm", **small)
    yield PagedWorkload("chunks", (70, 33, 5), 4, 2, query_lens=(20, 33, 1), **small)
    yield PagedWorkload("shared prefix", (70, 33, 48), 4, 2, shared_len=32, **small)
