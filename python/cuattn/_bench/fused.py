# SPDX-License-Identifier: Apache-2.0
"""Named workloads around attention: norms, activations, sampling, rotary embedding.

Most of them only move bytes, so a plain copy of as many stands beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .bars import Bar
from .paged import PagedWorkload
from .workloads import ITEMSIZE, SHORT_DTYPE, Workload

if TYPE_CHECKING:
    from .._types import Act

ACTS: tuple[Act, ...] = ("silu", "gelu", "gelu_tanh")
OURS, UNFUSED, PLAIN = "cuattn:auto", "cuattn:unfused", "cuattn:plain"
COPY = Bar(OURS, "memcpy", 0.95)
# Arrays of rows x columns that an op reads and writes; a residual is read, and its sum written.
TOUCHED = dict.fromkeys(("rms_norm", "layer_norm", "bias_act", "apply_rope"), 2)
TOUCHED |= {"act_mul": 3, "sample": 1}


@dataclasses.dataclass(frozen=True)
class FusedWorkload:
    """One call on `rows` of `columns` elements; act_mul reads twice as many columns.

    apply_rope has rows of heads x 128, so many tokens in one sequence.
    """

    name: str
    op: str
    rows: int
    columns: int
    dtype: str = "bfloat16"
    residual: bool = False
    act: Act = "silu"
    interleaved: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    jit: bool = False
    backends: tuple[str, ...] = ()
    use: str = ""
    bars: tuple[Bar, ...] = ()

    flops = 0.0
    head_dim = 128

    def draw(self, device: str) -> Any:
        from .fused_inputs import FusedInputs

        return FusedInputs(self, device)

    @property
    def bytes(self) -> int:
        """Bytes read and written, each once."""
        arrays = TOUCHED[self.op] + 2 * self.residual
        return arrays * self.rows * self.columns * ITEMSIZE[self.dtype]

    @property
    def series(self) -> str:
        return f"{self.op}, {SHORT_DTYPE[self.dtype]}"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        return f"{self.rows} x {self.columns}, {self.bytes / 2**20:.0f} MiB"


@dataclasses.dataclass(frozen=True)
class RopeWorkload(Workload):
    """One call of ``attention(rope=)``: queries are rotated on the way, keys are already."""

    bars: tuple[Bar, ...] = ()

    op = "attention_rope"

    def draw(self, device: str) -> Any:
        from .rope_inputs import RopeInputs

        return RopeInputs(self, device)


@dataclasses.dataclass(frozen=True)
class AppendWorkload(PagedWorkload):
    """One call of ``append_attention``: a new key and value of each sequence are written first."""

    op = "append_attention"

    def draw(self, device: str) -> Any:
        from .rope_inputs import AppendInputs

        return AppendInputs(self, device)


def norm_rows() -> Iterable[FusedWorkload]:
    for columns, tokens in ((1024, 65536), (4096, 16384), (8192, 8192), (16384, 4096)):
        for op in ("rms_norm", "layer_norm"):
            jit = op == "rms_norm" and columns in (4096, 8192)
            shape = (op, tokens, columns)
            yield FusedWorkload(f"{op} {columns}", *shape, jit=jit, bars=(COPY,))
            if op == "rms_norm" or columns == 4096:
                name = f"{op} {columns}, residual"
                yield FusedWorkload(name, *shape, residual=True, jit=jit, bars=(COPY,))
    latency = (Bar(OURS, "microseconds", 3.0),)
    yield FusedWorkload("rms_norm 1 x 8192", "rms_norm", 1, 8192, bars=latency)


def fused() -> Iterable[FusedWorkload]:
    """Norms, activations and sampling beside torch's own, compiled, and a copy of as many bytes."""
    yield from norm_rows()
    for act in ACTS:
        name = f"act_mul {act} 14336"
        yield FusedWorkload(name, "act_mul", 8192, 14336, act=act, jit=act == "silu", bars=(COPY,))
    yield FusedWorkload("bias_act gelu 16384", "bias_act", 8192, 16384, act="gelu", bars=(COPY,))
    choices: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "no filter": {},
        "top_k 50": {"top_k": 50},
        "top_p 0.9": {"top_p": 0.9},
    }
    for words, choice in choices.items():
        for batch in (1, 128):
            name = f"sample {words}, {batch} x 128256"
            yield FusedWorkload(name, "sample", batch, 128256, dtype="float32", **choice)


def rope() -> Iterable[Any]:
    """Rotation alone, within attention, and with the write into the cache."""
    for heads in (8, 32):
        for interleaved in (False, True):
            words = "pairs" if interleaved else "halves"
            shape = ("apply_rope", 32768, heads * 128)
            name = f"apply_rope {words}, {heads} heads"
            jit = heads == 32 and not interleaved
            yield FusedWorkload(name, *shape, interleaved=interleaved, jit=jit, bars=(COPY,))
    for seqlen, least in ((512, 0.95), (2048, 0.98), (8192, 0.98)):
        both = (Bar(OURS, PLAIN, least), Bar(OURS, UNFUSED, 1.0))
        extents = (16384 // seqlen, seqlen, seqlen, 16, 16, 128)
        yield RopeWorkload(f"attention s{seqlen} causal", *extents, causal=True, bars=both)
    for batch, context in ((1, 8192), (16, 4096), (128, 1024)):
        name = f"append_attention {batch} x {context}"
        bars = (Bar(OURS, UNFUSED, 1.0),)
        yield AppendWorkload(name, (context,) * batch, 32, 8, bars=bars)


def fused_smoke() -> Iterable[Any]:
    """One small case of each call around attention."""
    small: dict[str, Any] = {"dtype": "float32"}
    for op in ("rms_norm", "layer_norm"):
        yield FusedWorkload(op, op, 33, 96, **small)
        yield FusedWorkload(f"{op}, residual", op, 33, 96, residual=True, **small)
    for act in ACTS:
        yield FusedWorkload(f"act_mul {act}", "act_mul", 17, 80, act=act, **small)
    yield FusedWorkload("bias_act", "bias_act", 17, 80, act="gelu", **small)
    yield FusedWorkload("apply_rope halves", "apply_rope", 29, 256, **small)
    yield FusedWorkload("apply_rope pairs", "apply_rope", 29, 256, interleaved=True, **small)
    for words, choice in (("greedy", {"temperature": 0.0}), ("top_k", {"top_k": 3})):
        yield FusedWorkload(f"sample {words}", "sample", 5, 300, **choice, **small)
    yield FusedWorkload("sample top_p", "sample", 5, 300, top_p=0.5, **small)
    yield RopeWorkload("attention", 2, 96, 96, 4, 2, 32, causal=True, **small)
    yield AppendWorkload("append", (70, 33, 1), 4, 2, head_dim=64, **small)
