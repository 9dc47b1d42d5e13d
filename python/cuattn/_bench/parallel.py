# SPDX-License-Identifier: Apache-2.0
"""Named workloads of attention over two ranks, beside one of them alone.

The efficiency of a row is time of one / (2 x time), the slower rank counts: its bars say how many
times as fast as one GPU two are to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .workloads import Workload

AUTO, ONE = "cuattn:auto", "cuattn:one"
BACKWARD_FLOPS = 2.5  # of those of the forward


@dataclasses.dataclass(frozen=True)
class ParallelWorkload(Workload):
    """A call over ranks: "forward", "training" (with the gradients), or "decode" of one token."""

    kind: str = "forward"
    block_size: int = 16  # of the cache that decode reads
    bars: tuple[Bar, ...] = ()

    @property
    def op(self) -> str:
        return "parallel"

    @property
    def flops(self) -> float:
        return super().flops * (1 + BACKWARD_FLOPS if self.kind == "training" else 1)

    @property
    def series(self) -> str:
        return f"{self.kind}, {super().series}" + (", documents" if self.lengths else "")

    def draw(self, device: str) -> Any:
        from .parallel_inputs import draw

        return draw(self, device)


def twice(efficiency: float, *, against: str = ONE) -> Bar:
    """Make a bar: so much of twice the speed of one rank."""
    return Bar(AUTO, against, 2 * efficiency)


def document_lengths(total: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths between two bounds, as many short as long ones, that fill a sequence."""
    lengths: list[int] = []
    word = 12345
    while (left := total - sum(lengths)) > 0:
        word = word * 1103515245 % 2**31 + 12345  # the same everywhere
        lengths.append(min(left, round(least * (most / least) ** (word % 10**6 / 10**6))))
    return tuple(lengths)


def parallel() -> Iterable[ParallelWorkload]:
    """Two GPUs beside one of them: a sequence cut over both, packed documents, decode."""
    causal: dict[str, Any] = {"causal": True}
    peer = Bar(AUTO, "best peer", 1.10)
    for seqlen, least in ((32768, 0.92), (131072, 0.95), (8192, 0.75)):
        for words, heads in (("16/16", (16, 16)), ("32/8", (32, 8))):
            bars = (twice(least), *([peer] if seqlen == 131072 else []))
            if seqlen == 32768:
                bars = (*bars, Bar(AUTO, "cuattn:unchecked", 0.99))
            yield row(f"{words} s{seqlen} causal", seqlen, heads, bars=bars, **causal)
    for batch, context in ((1, 1 << 20), (16, 1 << 16)):
        bars = (Bar(AUTO, ONE, 1 / 0.55),)
        name = f"32/8 decode, {batch} x {context}"
        yield ParallelWorkload(name, batch, 1, context, 32, 8, 128, kind="decode", bars=bars)
    lengths = document_lengths(131072, 64, 32768)
    options: dict[str, Any] = {**causal, "lengths": lengths, "bars": (twice(0.9 * 0.95),)}
    yield row("16/16 documents in 131072", max(lengths), (16, 16), **options)
    yield row("32/8 s131072 window 4096", 131072, (32, 8), window=(4096, 0), **causal)
    yield row("16/16 s32768 full", 32768, (16, 16), bars=(twice(0.92),))
    training: dict[str, Any] = {**causal, "kind": "training"}
    yield row("16/16 s32768 causal, training", 32768, (16, 16), **training)
    yield row("16/16 s131072 full", 131072, (16, 16), bars=(twice(0.97),))
    bars = (twice(0.95), Bar(AUTO, "best peer", 1.05))
    yield row("16/16 s131072 causal, training", 131072, (16, 16), bars=bars, **training)


def row(name: str, seqlen: int, heads: tuple[int, int], **options: Any) -> ParallelWorkload:
    """Make a row of one sequence, head_dim 128."""
    return ParallelWorkload(name, 1, seqlen, seqlen, *heads, 128, **options)


def parallel_smoke() -> Iterable[ParallelWorkload]:
    """One small case of each call over ranks."""
    small: dict[str, Any] = {"dtype": "float32"}
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("causal", {"causal": True, "bars": (twice(0.5),)}),
        ("full", {}),
        ("window", {"causal": True, "window": (60, 0)}),
        ("training", {"causal": True, "kind": "training"}),
        ("documents", {"causal": True, "lengths": (100, 3, 250, 31)}),
    )
    for name, options in cases:
        yield ParallelWorkload(name, 1, 384, 384, 4, 2, 32, **small, **options)
    yield ParallelWorkload("decode", 2, 1, 100, 4, 2, 32, kind="decode", block_size=8, **small)
