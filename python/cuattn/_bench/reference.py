# SPDX-License-Identifier: Apache-2.0
"""Is a result right? A sample of its rows against float64, in numpy.

The rule is the library's own: the error may be twice that of the plain formula in the same dtype
(scores, then probabilities, then out, each rounded to the dtype), plus one rounding of the largest
output.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from .workloads import AttentionWorkload

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LEAST_TOP = 16.0  # what the largest P of a row is made, at least, before P becomes float8


# q rows, k, v on the host, ALiBi slope, bias rows: of one sequence and query head.
Head = tuple[np.ndarray, np.ndarray, np.ndarray, float, np.ndarray | None]


class Arrays(Protocol):
    """The arrays of a workload, read head by head."""

    def head(self, b: int, h: int, rows: np.ndarray) -> Head: ...

    def out_head(self, out: Any, b: int, h: int, rows: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Error:
    """Largest error of a sample of rows, and the largest that the rule allows."""

    max_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.max_error <= self.allowed  # False for NaN


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round x to the dtype and back to float32; bfloat16 on the bits, since numpy has none."""
    if dtype == "float32":
        return x.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def score_rows(
    w: AttentionWorkload,
    s: np.ndarray,
    rows: np.ndarray,
    seqlens: tuple[int, int],
    slope: Any,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Softcap, ALiBi, bias and mask on scaled scores s [len(rows), seqlen_kv]."""
    seqlen_q, seqlen_kv = seqlens
    position = rows[:, None] + (seqlen_kv - seqlen_q)
    key = np.arange(seqlen_kv)[None, :]
    if w.softcap:
        s = w.softcap * np.tanh(s / w.softcap)
    if w.alibi:
        s = s - slope * np.abs(position - key)
    if bias is not None:
        s = s + bias
    left, right = w.window
    right = 0 if w.causal else right
    visible = np.ones(s.shape, bool)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    return np.where(visible, s, -np.inf)


def softmax(s: np.ndarray) -> np.ndarray:
    peak = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(peak), peak, 0))
    total = p.sum(axis=-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total != 0)


def sample_rows(seqlen: int, rng: np.random.Generator) -> np.ndarray:
    """First and last rows, where masks begin and end, and some between."""
    if seqlen <= 64:
        return np.arange(seqlen)
    middle = rng.choice(np.arange(16, seqlen - 16), 32, replace=False)
    return np.concatenate([np.arange(16), np.sort(middle), np.arange(seqlen - 16, seqlen)])


class Sample:
    """Some rows of a workload's result in float64, and what the plain formula errs on them."""

    def __init__(self, w: AttentionWorkload, inputs: Arrays):
        rng = np.random.default_rng(1)
        self.inputs = inputs
        self.rows: dict[tuple[int, int], np.ndarray] = {}
        self.expected: dict[tuple[int, int], np.ndarray] = {}
        sequences = w.sequences
        places = {(0, 0), (len(sequences) - 1, w.num_heads_q - 1)}
        places.add((int(rng.integers(len(sequences))), int(rng.integers(w.num_heads_q))))
        plain_error = out_max = 0.0
        scale = w.head_dim**-0.5
        for b, h in sorted(places):
            rows = self.rows[b, h] = sample_rows(sequences[b][0], rng)
            q, k, v, slope, bias = inputs.head(b, h, rows)

            def scored(
                scores: np.ndarray,
                slope: Any,
                seqlens: tuple[int, int] = sequences[b],
                rows: np.ndarray = rows,
                bias: np.ndarray | None = bias,
            ) -> np.ndarray:
                return softmax(score_rows(w, scores, rows, seqlens, slope, bias))

            exact = scored(scale * (q.astype(np.float64) @ k.T.astype(np.float64)), slope)
            expected = self.expected[b, h] = exact @ v.astype(np.float64)
            p = scored(round_to(np.float32(scale) * (q @ k.T), w.dtype), np.float32(slope))
            plain = round_to(round_to(p.astype(np.float32), w.dtype) @ v, w.dtype)
            plain_error = max(plain_error, float(np.abs(plain - expected).max()))
            out_max = max(out_max, float(np.abs(expected).max()))
        self.allowed = 2 * plain_error + EPS[w.dtype] * out_max

    def error(self, out: Any) -> Error:
        """Compare a result in q's layout."""
        max_error = 0.0
        for (b, h), expected in self.expected.items():
            got = self.inputs.out_head(out, b, h, self.rows[b, h])
            max_error = float(np.maximum(max_error, np.abs(got - expected).max()))  # keeps NaN
        return Error(max_error, self.allowed)


def check(w: AttentionWorkload, inputs: Arrays, out: Any) -> Error:
    """Compare a sample of rows of out with float64; inputs is an Inputs of devices.py."""
    return Sample(w, inputs).error(out)
