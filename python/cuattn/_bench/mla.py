# SPDX-License-Identifier: Apache-2.0
"""Named workloads over latents (MLA): decode over pages, prompts in both forms, projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .workloads import ITEMSIZE, SHORT_DTYPE, visible_pairs

OURS, BEST = "cuattn:auto", "best peer"
PACKED = 656  # bytes of a packed latent


@dataclasses.dataclass(frozen=True)
class MlaWorkload:
    """One decode step over paged latents, or where `prompt` is set a prompt, or a projection.

    DeepSeek's layer: latents of 512 and 64 rotated columns, heads of 128 + 64 and 128. The
    mission's has no rotated columns. `packed`: lists of tokens, each as long as its context, over
    FlashMLA's float8 cache.
    """

    name: str
    context_lens: tuple[int, ...]
    num_heads_q: int
    q_len: int = 1
    op: str = "mla_decode"
    latent: int = 512
    rope: int = 64
    nope: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    packed: bool = False
    jit: bool = False
    backends: tuple[str, ...] = ()
    use: str = ""
    bars: tuple[Bar, ...] = ()

    causal, window, softcap, alibi = True, (-1, -1), 0.0, False

    def draw(self, device: str) -> Any:
        from . import mla_inputs

        kinds = {"mla_attention": mla_inputs.PromptInputs, "mla_project": mla_inputs.ProjectInputs}
        if self.packed:
            return mla_inputs.ListInputs(self, device)
        return kinds.get(self.op, mla_inputs.DecodeInputs)(self, device)

    @property
    def head_dim(self) -> int:
        """Of a head before the projection: it decides the scale."""
        return self.nope + self.rope

    @property
    def sequences(self) -> list[tuple[int, int]]:
        return [(self.q_len, length) for length in self.context_lens]

    @property
    def flops(self) -> float:
        """Of decode the two products with the latents; of a prompt those of the explicit form."""
        heads, tokens = self.num_heads_q, sum(self.context_lens)
        if self.op == "mla_project":
            return 2.0 * heads * self.q_len * len(self.context_lens) * self.latent * self.nope
        pairs = sum(visible_pairs(*sequence, True, (-1, -1)) for sequence in self.sequences)
        if self.op == "mla_decode":
            return 2.0 * heads * pairs * (2 * self.latent + self.rope)
        projected = 4.0 * tokens * heads * self.latent * self.nope
        return projected + 2.0 * heads * pairs * (2 * self.nope + self.rope)

    @property
    def bytes(self) -> int:
        """Bytes of the latents, each read once; of a projection, of all arrays."""
        if self.packed:
            return sum(self.context_lens) * PACKED
        if self.op == "mla_project":
            rows = self.num_heads_q * self.q_len * len(self.context_lens)
            count = rows * (self.latent + self.nope)
            count += self.num_heads_q * self.latent * self.nope
        else:
            count = sum(self.context_lens) * (self.latent + self.rope)
        return count * ITEMSIZE[self.dtype]

    @property
    def series(self) -> str:
        what = "packed lists" if self.packed else SHORT_DTYPE[self.dtype]
        return f"{self.op}, {what}, {self.num_heads_q} heads"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        longest = max(self.context_lens)
        return f"batch {len(self.context_lens)}, {self.q_len} queries, context {longest}"


def decode(heads: int, batch: int, context: int, **options: Any) -> MlaWorkload:
    """Make a step of equally long sequences."""
    name = options.pop("name", f"{heads} heads, {batch} x {context}")
    return MlaWorkload(name, (context,) * batch, heads, **options)


def mla() -> Iterable[MlaWorkload]:
    """Latent attention: decode over pages of latents, prompts in both forms, projections."""
    best = Bar(OURS, BEST, 1.0)
    figures = {(128, 64, 8192): "TFLOP/s", (16, 128, 4096): "copy"}
    for heads, batch, context in (
        (16, 128, 4096),
        (32, 128, 4096),
        (64, 128, 4096),
        (128, 128, 4096),
        (128, 64, 8192),
        (16, 1, 1024),
        (16, 1, 8192),
        (128, 1, 32768),
    ):
        wanted = [best]
        against = figures.get((heads, batch, context))
        if against:
            wanted.append(Bar(OURS, against, 605.0 if against == "TFLOP/s" else 0.9))
        yield decode(heads, batch, context, bars=tuple(wanted))
    name = "16 heads, 128 x 4096, 4 queries"
    yield decode(16, 128, 4096, name=name, q_len=4, bars=(best,))
    for block in (1, 16):
        bars = (Bar(OURS, "row 16 heads, 128 x 4096", 0.9),)
        yield decode(16, 128, 4096, name=f"16 heads, block {block}", block_size=block, bars=bars)
    for heads, batch in ((128, 128), (64, 64), (16, 128), (128, 1)):
        name = f"{heads} heads, {batch} packed lists of 2048"
        yield decode(heads, batch, 2048, name=name, packed=True)
    for name, heads, batch, seqlen, rope, dtype in (
        ("mission, 32 heads, prompt 4096", 32, 1, 4096, 0, "float16"),
        ("16 heads, prompt 2 x 2048", 16, 2, 2048, 64, "bfloat16"),
        ("16 heads, prompt 8192", 16, 1, 8192, 64, "bfloat16"),
    ):
        words: dict[str, Any] = {"op": "mla_attention", "q_len": seqlen, "rope": rope}
        yield decode(heads, batch, seqlen, name=name, dtype=dtype, bars=(best,), **words)
    words = {"op": "mla_attention", "q_len": 64}
    yield decode(16, 1, 8192, name="16 heads, 64 of 8192", bars=(best,), **words)
    words = {"op": "mla_project", "bars": (best,)}
    yield decode(128, 1, 1, name="project 128 heads, 4096 rows", q_len=4096, **words)


def mla_smoke() -> Iterable[MlaWorkload]:
    """One small case of each call over latents."""
    small: dict[str, Any] = {"dtype": "float32", "latent": 64, "rope": 16, "nope": 32}
    yield MlaWorkload("decode", (70, 1, 33), 5, block_size=16, **small)
    yield MlaWorkload("decode, equal", (70, 70), 4, block_size=8, **small)
    yield MlaWorkload("three queries", (70, 33), 3, q_len=3, **small)
    yield MlaWorkload("packed lists", (70, 70), 3, block_size=16, packed=True)
    prompt = {**small, "op": "mla_attention"}
    yield MlaWorkload("prompt", (40, 40), 3, q_len=40, **prompt)
    yield MlaWorkload("new tokens", (60,), 3, q_len=5, **prompt)
    yield MlaWorkload("prompt without rope", (40,), 3, q_len=40, **{**prompt, "rope": 0})
    yield MlaWorkload("project", (1,), 3, q_len=50, **{**small, "op": "mla_project"})
