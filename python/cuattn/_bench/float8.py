# SPDX-License-Identifier: Apache-2.0
"""Named workloads of float8: attention over codes of q, k and v, and `quantize` alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .workloads import ITEMSIZE, SHORT_DTYPE, Workload

OURS, FAST, ROWS = "cuattn:auto", "cuattn:fast", "cuattn:rows"
BF16, QUANTISED = "cuattn:bf16", "cuattn:quantised"
BEST = "best peer"  # FlashAttention-3's float8, by the faster of its two layouts of v
TOKENS, WIDTH = 16384, 2048  # heads x head_dim


@dataclasses.dataclass(frozen=True)
class Float8Workload(Workload):
    """One call of ``attention`` on float8_e4m3fn q, k and v that `quantize` makes of `dtype`."""

    bars: tuple[Bar, ...] = ()

    def draw(self, device: str) -> Any:
        from .float8_inputs import Float8Inputs

        return Float8Inputs(self, device)

    @property
    def op(self) -> str:
        return "float8_attention"

    @property
    def bytes(self) -> int:
        """Bytes of codes of q, k and v read and a 16-bit out written, each once."""
        rows_q, rows_kv = self.batch * self.seqlen_q, self.batch * self.seqlen_kv
        elements = 3 * rows_q * self.num_heads_q + 2 * rows_kv * self.num_heads_kv
        return elements * self.head_dim

    @property
    def series(self) -> str:
        return super().series.replace(SHORT_DTYPE[self.dtype], "e4m3", 1)


@dataclasses.dataclass(frozen=True)
class QuantizeWorkload:
    """One call of ``quantize`` on q, k and v, [batch, seqlen, num_heads, head_dim]."""

    name: str
    mode: str = "head"
    hadamard: bool = True
    smooth_k: bool = True
    batch: int = 2
    seqlen: int = 8192
    num_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    jit: bool = False
    bars: tuple[Bar, ...] = ()

    op = "quantize"
    flops = 0.0

    def draw(self, device: str) -> Any:
        from .float8_inputs import QuantizeInputs

        return QuantizeInputs(self, device)

    @property
    def bytes(self) -> int:
        """Bytes of q, k and v read and of their codes written, each once."""
        elements = 3 * self.batch * self.seqlen * self.num_heads * self.head_dim
        return elements * (ITEMSIZE[self.dtype] + 1)

    @property
    def series(self) -> str:
        return f"{self.op}, {SHORT_DTYPE[self.dtype]}, d{self.head_dim}"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        return f"batch {self.batch}, seqlen {self.seqlen}, {self.bytes / 2**20:.0f} MiB"


def bars_of_row(head_dim: int, seqlen: int) -> tuple[Bar, ...]:
    """Return what a row must reach.

    FlashAttention-3 adds up as `fast` does, in the accumulators of the tensor cores alone.
    """
    least = 1.1 if seqlen == 2048 or head_dim == 128 else 1.05
    bars = [Bar(FAST, BEST, least), Bar(OURS, FAST, 0.9), Bar(ROWS, OURS, 0.96)]
    if head_dim == 128 and seqlen > 2048:
        bars.append(Bar(OURS, BEST, 1.0))
    if head_dim == 256:
        bars.append(Bar(OURS, BF16, 1.0))
    if seqlen == 8192:
        bars.append(Bar(QUANTISED, BF16, 1.12))
    return tuple(bars)


def row(
    name: str, seqlen: int, heads: tuple[int, int], head_dim: int, causal: bool
) -> Float8Workload:
    bars = bars_of_row(head_dim, seqlen)
    shape = (TOKENS // seqlen, seqlen, seqlen, *heads, head_dim)
    return Float8Workload(name, *shape, causal=causal, bars=bars)


def fp8() -> Iterable[Float8Workload]:
    """Attention on float8 q, k and v: 16384 tokens, heads * head_dim = 2048; and grouped heads."""
    for head_dim in (64, 128, 256):
        for seqlen in (2048, 8192, TOKENS):
            for causal in (False, True):
                name = f"d{head_dim} s{seqlen} {'causal' if causal else 'full'}"
                yield row(name, seqlen, (WIDTH // head_dim,) * 2, head_dim, causal)
    yield row("32/8 heads s8192 causal", 8192, (32, 8), 128, True)


def quantize() -> Iterable[QuantizeWorkload]:
    """Quantisation of q, k and v alone, beside a plain copy of as many bytes."""
    bars = (Bar(OURS, "memcpy", 0.85),)
    yield QuantizeWorkload("by head, rotated, smoothed", bars=bars)
    plain: dict[str, Any] = {"hadamard": False, "smooth_k": False}
    yield QuantizeWorkload("by blocks, as they are", "block", **plain, bars=bars)


def fp8_smoke() -> Iterable[Any]:
    """Make the rows of `fp8` and `quantize` small."""
    for w in fp8():
        heads = (4, 4 if w.num_heads_q == w.num_heads_kv else 2)
        seqlen = w.seqlen_q // 128 + 5  # no multiple of 16, to which v is padded
        shape = (min(2, w.batch), seqlen, seqlen, *heads, w.head_dim // 4)
        yield Float8Workload(w.name, *shape, causal=w.causal)
    for each in quantize():
        small: dict[str, Any] = {"seqlen": 300, "num_heads": 2, "head_dim": 32}
        yield dataclasses.replace(each, bars=(), **small)
