# SPDX-License-Identifier: Apache-2.0
"""Named workloads: what is measured, with the shapes of real models.

A workload says shapes and options only, in the words of the library; who runs it is chosen in
runner.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any, Protocol, cast

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
SHORT_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class AnyWorkload(Protocol):
    """What a row of the report needs of a workload, whatever it calls."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def jit(self) -> bool: ...
    @property
    def flops(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    @property
    def series(self) -> str: ...
    @property
    def extent(self) -> str: ...
    def draw(self, device: str) -> Any: ...


class AttentionWorkload(AnyWorkload, Protocol):
    """What the reference needs of a workload of attention, over pages or not."""

    @property
    def sequences(self) -> list[tuple[int, int]]: ...
    @property
    def num_heads_q(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int, int]: ...
    @property
    def softcap(self) -> float: ...
    @property
    def alibi(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of ``attention``, or of ``attention_varlen`` where ``lengths`` is given.

    ``jit`` marks the rows on which peers that compile for each shape are measured as well.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    bias: bool = False
    lengths: tuple[int, ...] = ()
    jit: bool = False

    def draw(self, device: str) -> Any:
        from .devices import torch_inputs

        return torch_inputs(self, device)

    @property
    def op(self) -> str:
        return "attention_varlen" if self.lengths else "attention"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(seqlen_q, seqlen_kv) of every sequence of the batch."""
        if self.lengths:
            return [(length, length) for length in self.lengths]
        return [(self.seqlen_q, self.seqlen_kv)] * self.batch

    @property
    def flops(self) -> float:
        """4 * heads * visible pairs * head_dim over the batch.

        Plain causal over equal lengths counts as exactly half, as in published figures.
        """
        pairs: float = 0
        for seqlen_q, seqlen_kv in self.sequences:
            if self.causal and self.window == (-1, -1) and seqlen_q == seqlen_kv:
                pairs += seqlen_q * seqlen_kv / 2
            else:
                pairs += visible_pairs(seqlen_q, seqlen_kv, self.causal, self.window)
        return 4.0 * self.num_heads_q * self.head_dim * pairs

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v, out (and bias), each touched once."""
        tokens_q = sum(q for q, _ in self.sequences)
        tokens_kv = sum(kv for _, kv in self.sequences)
        elements = 2 * tokens_q * self.num_heads_q + 2 * tokens_kv * self.num_heads_kv
        bias = self.num_heads_q * self.seqlen_q * self.seqlen_kv if self.bias else 0
        return (elements * self.head_dim + bias) * ITEMSIZE[self.dtype]

    @property
    def series(self) -> str:
        """What stays the same along a curve over the sequence length; groups rows into plots."""
        heads = f"{self.num_heads_q}"
        if self.num_heads_kv != self.num_heads_q:
            heads += f"/{self.num_heads_kv}"
        return f"{SHORT_DTYPE[self.dtype]}, {heads} heads, d{self.head_dim}, {self.mask}"

    @property
    def mask(self) -> str:
        words = ["causal" if self.causal else "full"]
        if self.window != (-1, -1):
            words.append(f"window {self.window[0]},{self.window[1]}")
        if self.softcap:
            words.append(f"softcap {self.softcap:g}")
        words += ["alibi"] * self.alibi + ["bias"] * self.bias
        return " ".join(words)

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        return f"batch {len(self.sequences)}, seqlen {self.seqlen_q} x {self.seqlen_kv}"


def as_json(w: AnyWorkload) -> dict[str, Any]:
    """Return the fields of a workload, and what follows from them."""
    derived = ("op", "head_dim", "series", "flops", "bytes")
    return {
        **dataclasses.asdict(cast(Any, w)),
        **{n: getattr(w, n) for n in derived if hasattr(w, n)},
    }


def visible_pairs(seqlen_q: int, seqlen_kv: int, causal: bool, window: tuple[int, int]) -> int:
    """Count the (query, key) pairs that the bottom-right aligned mask keeps."""
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    offset = seqlen_kv - seqlen_q
    pairs = 0
    for row in range(seqlen_q):
        begin = max(0, row + offset - left) if left >= 0 else 0
        end = min(seqlen_kv, row + offset + right + 1) if right >= 0 else seqlen_kv
        pairs += max(0, end - begin)
    return pairs


def dense(
    name: str, batch: int, seqlen: int, heads: int | tuple[int, int], head_dim: int, **options: Any
) -> Workload:
    """Make a workload with seqlen_q = seqlen_kv; heads is a number or (query, key) numbers."""
    heads_q, heads_kv = heads if isinstance(heads, tuple) else (heads, heads)
    return Workload(name, batch, seqlen, seqlen, heads_q, heads_kv, head_dim, **options)


def mission() -> Iterable[Workload]:
    """Naive against flash in time and memory: 32 heads of 128, full attention, half precision."""
    for seqlen in (128, 512, 2048, 4096):
        yield dense(f"s{seqlen}", 32, seqlen, 32, 128, dtype="float16", jit=seqlen == 2048)


def forward() -> Iterable[Workload]:
    """16384 tokens, heads * head_dim = 2048, full and causal: the table attention papers print."""
    for head_dim in (64, 128, 256):
        for seqlen in (512, 2048, 8192, 16384):
            for causal in (False, True):
                name = f"d{head_dim} s{seqlen} {'causal' if causal else 'full'}"
                jit = seqlen in (2048, 16384)
                yield dense(
                    name,
                    16384 // seqlen,
                    seqlen,
                    2048 // head_dim,
                    head_dim,
                    causal=causal,
                    jit=jit,
                )


def gqa() -> Iterable[Workload]:
    """32 query heads on 8 key heads, causal, 32768 tokens."""
    for seqlen in (512, 2048, 8192):
        yield dense(
            f"32/8 heads s{seqlen}",
            32768 // seqlen,
            seqlen,
            (32, 8),
            128,
            causal=True,
            jit=seqlen == 2048,
        )


def fp16() -> Iterable[Workload]:
    """Half precision, 16384 tokens, heads * head_dim = 2048."""
    for head_dim in (128, 64):
        for causal in (False, True):
            name = f"fp16 d{head_dim} s8192 {'causal' if causal else 'full'}"
            yield dense(name, 2, 8192, 2048 // head_dim, head_dim, dtype="float16", causal=causal)


def ragged() -> Iterable[Workload]:
    """Packed sequences of unequal lengths, causal."""
    draw = random.Random(0)
    mixed = tuple(draw.randint(64, 4096) for _ in range(32))
    chat = tuple(draw.randint(16, 512) for _ in range(128))
    for name, lengths in (("32 of 64..4096", mixed), ("128 of 16..512", chat)):
        longest = max(lengths)
        for heads in ((16, 16), (32, 8)):
            label = f"{name}, {heads[0]}/{heads[1]} heads"
            yield Workload(
                label,
                len(lengths),
                longest,
                longest,
                *heads,
                128,
                causal=True,
                lengths=lengths,
                jit=heads == (16, 16),
            )


def pack_documents(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Draw lengths of 128 to 2048 that fill a sequence of `tokens`; the last takes what is left."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw.randint(128, 2048)))
    return tuple(lengths)


def masks() -> Iterable[Workload]:
    """Windows, documents, score options: 16384 tokens, 16 heads of 128; and plain causal."""
    base: dict[str, Any] = {"batch": 2, "seqlen": 8192, "heads": 16, "head_dim": 128, "jit": True}
    yield dense("causal", **base, causal=True)
    yield dense("window 256", **base, window=(256, 256))
    yield dense("causal window 256", **base, causal=True, window=(256, 0))
    yield dense("causal window 1024", **base, causal=True, window=(1024, 0))
    documents = pack_documents(8192) + pack_documents(8192, seed=1)
    for name, causal in (("documents", False), ("causal documents", True)):
        longest = max(documents)
        shape = (len(documents), longest, longest, 16, 16, 128)
        yield Workload(name, *shape, causal=causal, lengths=documents, jit=True)
    yield dense("causal softcap 30", **base, causal=True, softcap=30.0)
    yield dense("causal alibi", **base, causal=True, alibi=True)
    yield dense("bias [1, H, s, s]", **base, bias=True)


def ladder() -> Iterable[Workload]:
    """Rungs from naive to tensor cores over the sequence length, float32 and float16."""
    for dtype in ("float32", "float16"):
        for seqlen in (256, 512, 1024, 2048, 4096, 8192, 16384):
            yield dense(f"{SHORT_DTYPE[dtype]} s{seqlen}", 1, seqlen, 16, 128, dtype=dtype)


def split() -> Iterable[Workload]:
    """Few queries over many keys, 8 heads on 1: the keys are cut to fill the GPU."""
    for seqlen_kv in (32768, 131072):
        for seqlen_q in (64, 128):
            for causal in (False, True):
                name = f"{seqlen_q} of {seqlen_kv}, {'causal' if causal else 'full'}"
                yield Workload(name, 1, seqlen_q, seqlen_kv, 8, 1, 128, causal=causal)


def models() -> Iterable[Workload]:
    """Attention layers of real models at lengths they are used with."""
    yield dense("BERT-base, 32 x 512", 32, 512, 12, 64, dtype="float16")
    yield dense("BERT-base, 64 x 128", 64, 128, 12, 64, dtype="float16")
    yield dense("MiniLM-L6, 64 x 128", 64, 128, 12, 32, dtype="float16")
    yield dense("ModernBERT, 4 x 8192, window 64", 4, 8192, 12, 64, window=(64, 64), jit=True)
    yield dense("ViT-B/16, 64 x 197", 64, 197, 12, 64)
    yield dense("SigLIP-so400m (d72), 16 x 729", 16, 729, 16, 72)
    yield dense("CLIP text, 256 x 77", 256, 77, 12, 64, dtype="float16", causal=True)
    yield dense("Whisper encoder, 8 x 1500", 8, 1500, 20, 64, dtype="float16")
    yield dense("GPT-2, 8 x 1024", 8, 1024, 12, 64, dtype="float16", causal=True)
    yield dense("Llama-2-7B, 2 x 4096", 2, 4096, 32, 128, dtype="float16", causal=True)
    yield dense("Llama-3-8B, 1 x 8192", 1, 8192, (32, 8), 128, causal=True)
    yield dense("Llama-3-70B, 1 x 8192", 1, 8192, (64, 8), 128, causal=True)
    yield dense("Qwen2.5-7B, 1 x 8192", 1, 8192, (28, 4), 128, causal=True)
    yield dense(
        "Mistral-7B, 1 x 16384, window 4096", 1, 16384, (32, 8), 128, causal=True, window=(4096, 0)
    )
    yield dense(
        "Gemma-2-9B, 1 x 8192, softcap 50", 1, 8192, (16, 8), 256, causal=True, softcap=50.0
    )
    yield dense("Phi-3-mini (d96), 2 x 4096", 2, 4096, 32, 96, causal=True)
    yield dense("Stable Diffusion XL, 2 x 4096", 2, 4096, 10, 64, dtype="float16")
    yield Workload("SDXL, 2 x 4096 on 77 words", 2, 4096, 77, 10, 10, 64, dtype="float16")
    yield Workload("Llama-3-8B, chunk 512 of 8192", 1, 512, 8192, 32, 8, 128, causal=True)


def cpu() -> Iterable[Workload]:
    """Shapes for two to sixteen cores."""
    for batch, heads, seqlen, head_dim in (
        (1, 8, 2048, 64),
        (1, 8, 2048, 128),
        (1, 8, 512, 64),
        (4, 8, 128, 64),
    ):
        for causal in (False, True):
            name = f"{batch}x{heads} s{seqlen} d{head_dim} {'causal' if causal else 'full'}"
            yield dense(name, batch, seqlen, heads, head_dim, dtype="float32", causal=causal)
    yield dense("MiniLM-L6, 16 x 64", 16, 64, 12, 32, dtype="float32")
    yield dense("GPT-2, 1 x 1024", 1, 1024, 12, 64, dtype="float32", causal=True)
    yield dense("Llama-3-8B, 1 x 1024", 1, 1024, (32, 8), 128, dtype="float32", causal=True)
    yield dense("GPT-2, 1 x 1024, bf16", 1, 1024, 12, 64, causal=True)
    yield dense("GPT-2, 1 x 1024, fp16", 1, 1024, 12, 64, dtype="float16", causal=True)


def cpu_ladder() -> Iterable[Workload]:
    """Naive against flash on the CPU over the sequence length: time and memory."""
    for seqlen in (128, 256, 512, 1024, 2048, 4096):
        yield dense(f"s{seqlen}", 1, seqlen, 8, 64, dtype="float32")


def smoke() -> Iterable[Workload]:
    """Seconds on any machine: one small case of each kind."""
    yield dense("full", 1, 128, 4, 64, dtype="float32")
    yield dense("causal", 1, 256, 4, 64, dtype="float32", causal=True)
    yield dense(
        "window, softcap",
        1,
        256,
        (4, 2),
        64,
        dtype="float32",
        causal=True,
        window=(64, 0),
        softcap=20.0,
    )
    yield dense("alibi, bias", 2, 96, 4, 64, dtype="float32", alibi=True, bias=True)
    few: dict[str, Any] = {"dtype": "float32", "causal": True}
    yield Workload("few queries over many keys", 1, 8, 2048, 8, 1, 64, **few)
    yield Workload(
        "ragged", 3, 100, 100, 4, 4, 64, dtype="float32", causal=True, lengths=(100, 17, 64)
    )
