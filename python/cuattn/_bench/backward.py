# SPDX-License-Identifier: Apache-2.0
"""Named workloads of the gradients: `attention_backward` alone, and a step of training.

The bars are those the library holds itself to; `benchmarks/aims.py` gathers them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .workloads import ITEMSIZE, Workload, ragged

OURS, ALWAYS_ALIKE = "cuattn:auto", "cuattn:deterministic"
DETERMINISTIC = Bar(ALWAYS_ALIKE, OURS, 0.9)
STEP = "training_step"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 192), (192, 128))
TOKENS, WIDTH = 16384, 2048  # heads x head_dim; 96 gets the next number of heads below
FA4_ROWS = (64, 128)  # of these FlashAttention-4's figures at TOKENS are held to be reached
PLAIN, SEQLEN = "causal", 2048  # the row that score options are compared with
PLAIN_OF_64 = "d64 s2048 causal"  # the same of heads of 64


@dataclasses.dataclass(frozen=True)
class BackwardWorkload(Workload):
    """One call of ``attention_backward`` or ``attention_varlen_backward``; or forward and backward.

    `head_dim_v` is 0 where it is head_dim. `need` names the gradients.
    """

    head_dim_v: int = 0
    sinks: bool = False
    dropout_p: float = 0.0
    step: bool = False
    need: tuple[str, ...] = ("dq", "dk", "dv")
    bars: tuple[Bar, ...] = ()

    def draw(self, device: str) -> Any:
        from .backward_inputs import BackwardInputs

        return BackwardInputs(self, device)

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def op(self) -> str:
        if self.step:
            return STEP
        return "attention_varlen_backward" if self.lengths else "attention_backward"

    @property
    def flops(self) -> float:
        """2.5 times the forward's: five products for its two; a step has all seven.

        Three of the five are as wide as q and k, two as v; of the forward's one each.
        """
        per_width = super().flops / (2 * self.head_dim)  # of a product, per unit of its width
        backward = per_width * (3 * self.head_dim + 2 * self.width_v)
        return backward + per_width * (self.head_dim + self.width_v) * self.step

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v, out and dout read, dq, dk, dv written, each once; bias and dbias."""
        tokens_q, tokens_kv = (sum(side) for side in zip(*self.sequences, strict=True))
        elements = tokens_q * self.num_heads_q * 2 * (self.head_dim + self.width_v)
        elements += tokens_kv * self.num_heads_kv * 2 * (self.head_dim + self.width_v)
        if self.bias:
            elements += 2 * self.num_heads_q * self.seqlen_q * self.seqlen_kv
        return elements * ITEMSIZE[self.dtype]

    @property
    def series(self) -> str:
        width = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        words = super().series.replace(f"d{self.head_dim}", width, 1)
        words += ", sinks" * self.sinks + f", dropout {self.dropout_p:g}" * bool(self.dropout_p)
        extra = [name for name in self.need if name not in ("dq", "dk", "dv")]
        return ", ".join([words, *extra, *["forward + backward"] * self.step])


def whole(
    name: str, seqlen: int, heads: tuple[int, int], head_dim: int, **options: Any
) -> BackwardWorkload:
    """Make a dense workload of TOKENS tokens."""
    return BackwardWorkload(name, TOKENS // seqlen, seqlen, seqlen, *heads, head_dim, **options)


def bars_of_row(head_dim: int, seqlen: int, causal: bool, square: bool) -> tuple[Bar, ...]:
    """Return what a row of the table by head_dim and length must reach."""
    bars = [Bar(OURS, "best peer", 1.1 if seqlen == 512 else 1.0, 1.1), DETERMINISTIC]
    if seqlen == TOKENS and head_dim in FA4_ROWS:
        bars.append(Bar(OURS, "fa4", 1.0))
    if seqlen == TOKENS and head_dim == 256 and square:
        bars.append(Bar(ALWAYS_ALIKE, "TFLOP/s", 500.0 if causal else 530.0))
    return tuple(bars)


def lengths_and_widths() -> Iterable[BackwardWorkload]:
    """Every head_dim and length, full and causal."""
    for head_dim, width_v in HEAD_DIMS:
        square = width_v == head_dim
        for seqlen in (512, 2048, 8192, TOKENS):
            for causal in (False, True):
                name = f"d{head_dim}{'' if square else f'/{width_v}'} s{seqlen}"
                yield whole(
                    f"{name} {'causal' if causal else 'full'}",
                    seqlen,
                    (WIDTH // head_dim,) * 2,
                    head_dim,
                    head_dim_v=0 if square else width_v,
                    causal=causal,
                    bars=bars_of_row(head_dim, seqlen, causal, square),
                )


DEAR_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dropout 0.1", {"dropout_p": 0.1}),
    ("bias, dbias", {"bias": True, "need": ("dq", "dk", "dv", "dbias")}),
)


def may_cost(plain: str, options: dict[str, Any]) -> Bar:
    """Return what a row with options may cost beside the plain one."""
    return Bar(OURS, f"time of row {plain}", 0.5 if "bias" in options else 0.8)


def score_options(
    heads: tuple[int, int], head_dim: int, seqlen: int, dtype: str = "bfloat16", batch: int = 8
) -> Iterable[BackwardWorkload]:
    """Make a causal row, and the same with each option; a bar says what it may cost."""
    plain: dict[str, Any] = {"batch": batch, "seqlen_q": seqlen, "seqlen_kv": seqlen}
    plain |= {"num_heads_q": heads[0], "num_heads_kv": heads[1], "head_dim": head_dim}
    plain |= {"causal": True, "dtype": dtype}
    yield BackwardWorkload(PLAIN, **plain, bars=(DETERMINISTIC,))
    named: tuple[tuple[str, dict[str, Any]], ...] = (
        ("softcap 30", {"softcap": 30.0}),
        ("alibi", {"alibi": True}),
        ("sinks", {"sinks": True}),
        ("sinks, dsinks", {"sinks": True, "need": ("dq", "dk", "dv", "dsinks")}),
        *DEAR_OPTIONS,
    )
    for words, options in named:
        bars = (may_cost(PLAIN, options),)
        yield BackwardWorkload(f"{PLAIN} {words}", **plain, **options, bars=bars)


def narrow_heads() -> Iterable[BackwardWorkload]:
    """Take the options that cost most again with heads of 64, whose products hide less."""
    for words, options in DEAR_OPTIONS:
        heads = (WIDTH // 64,) * 2
        bars = (may_cost(PLAIN_OF_64, options),)
        name = f"{PLAIN} d64 {words}"
        yield whole(name, SEQLEN, heads, 64, causal=True, **options, bars=bars)


def packed() -> Iterable[BackwardWorkload]:
    """Take the unequal sequences of `ragged`, of 64 to 4096 tokens."""
    wanted = (Bar(OURS, "best peer", 1.1), DETERMINISTIC)
    for w in ragged():
        if "64..4096" in w.name:
            fields = {field.name: getattr(w, field.name) for field in dataclasses.fields(Workload)}
            yield BackwardWorkload(**{**fields, "jit": False}, bars=wanted)


def backward() -> Iterable[BackwardWorkload]:
    """Gradients alone: 16384 tokens, heads * head_dim = 2048, 2.5 times the forward's FLOPs."""
    heads = (WIDTH // 128,) * 2
    wanted = (Bar(OURS, "best peer", 1.1), DETERMINISTIC)
    rows = list(lengths_and_widths())
    first = [w for w in rows if w.head_dim in (64, 128, 256)]
    yield from first
    for causal in (False, True):
        name = f"fp16 d128 s8192 {'causal' if causal else 'full'}"
        bars = (Bar(OURS, "best peer", 1.0), DETERMINISTIC)
        yield whole(name, 8192, heads, 128, dtype="float16", causal=causal, bars=bars)
    yield whole("32/8 heads s8192 causal", 8192, (32, 8), 128, causal=True, bars=wanted)
    for left in (256, 1024):
        name = f"causal window {left}"
        yield whole(name, 8192, heads, 128, causal=True, window=(left, 0), bars=wanted)
    yield from score_options(heads, 128, SEQLEN)
    yield from narrow_heads()
    host = (Bar(OURS, "host time", 1.0),)
    for causal in (False, True):
        name = f"step s512 {'causal' if causal else 'full'}"
        yield whole(name, 512, heads, 128, causal=causal, step=True, bars=host)
    yield from packed()
    yield from (w for w in rows if w not in first)  # last, should the time run out


def backward_smoke() -> Iterable[BackwardWorkload]:
    """One small case of each kind of gradient."""
    few: dict[str, Any] = {"dtype": "float32"}
    shape = (2, 96, 96)
    yield BackwardWorkload("full", *shape, 4, 4, 32, **few)
    yield BackwardWorkload("d32/16", *shape, 4, 4, 32, head_dim_v=16, **few)
    yield BackwardWorkload("grouped", *shape, 4, 2, 32, causal=True, **few)
    yield BackwardWorkload("window", *shape, 4, 4, 32, causal=True, window=(20, 0), **few)
    yield from score_options((4, 4), 32, 96, "float32", 2)
    yield BackwardWorkload("16 bits", *shape, 4, 4, 32, causal=True, dtype="bfloat16")
    host = (Bar(OURS, "host time", 1.0),)
    yield BackwardWorkload("step", *shape, 4, 4, 32, causal=True, step=True, bars=host, **few)
    lengths = (100, 17, 64)
    yield BackwardWorkload("ragged", 3, 100, 100, 4, 2, 32, causal=True, lengths=lengths, **few)
