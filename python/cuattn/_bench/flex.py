# SPDX-License-Identifier: Apache-2.0
"""Named workloads of flex_attention: masks and scores as functions, and lists of blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .bars import Bar
from .workloads import ITEMSIZE, SHORT_DTYPE

OURS, FLEX = "cuattn:auto", "flex"
CHUNK = 512  # rows of a mask that are counted at a time
Functions = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclasses.dataclass(frozen=True)
class FlexWorkload:
    """One call with the score and mask functions of a kind, which `functions` makes."""

    name: str
    kind: str
    seqlen: int = 8192
    seqlen_q: int = 0  # 0: seqlen
    batch: int = 2
    num_heads_q: int = 16
    num_heads_kv: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    jit: bool = True
    backends: tuple[str, ...] = ("auto", "sm80")
    bars: tuple[Bar, ...] = ()

    op = "flex_attention"

    @property
    def queries(self) -> int:
        return self.seqlen_q or self.seqlen

    def draw(self, device: str) -> Any:
        from .flex_inputs import FlexInputs

        return FlexInputs(self, device)

    def captured(self) -> dict[str, np.ndarray[Any, Any]]:
        """Draw the arrays that functions capture."""
        rng, n, heads = np.random.default_rng(7), self.seqlen, self.num_heads_q
        pieces = -(-n // 64)
        blocks = -(-n // 128)
        share = {"blocks 10 %": 0.1}.get(self.kind, 0.5)
        return {
            "sorted": (np.arange(n) * 8 // n).astype(np.int32),
            "mixed": rng.integers(0, 8, pieces).repeat(64)[:n].astype(np.int32),
            "ends": np.arange(1, n + 1, dtype=np.int32),
            "slopes": np.exp2(-8.0 * np.arange(1, heads + 1) / heads).astype(np.float32),
            "table": rng.standard_normal((heads, 2 * n + 1)).astype(np.float32),
            "blocks": rng.random((blocks, blocks)) < share,
            "valid": rng.random(n) < 0.9,
        }

    @functools.cached_property  # a pass over all scores
    def pairs(self) -> int:
        """Count the scores that the mask leaves, of one head."""
        n = self.seqlen
        mask = functions(self, self.captured())[1]
        if mask is None:
            return self.queries * n
        k, count = np.arange(n)[None, :], 0
        for begin in range(0, self.queries, CHUNK):
            q = np.arange(begin, min(self.queries, begin + CHUNK))[:, None]
            seen = np.broadcast_to(mask(0, 0, q, k), (len(q), n))
            count += int(np.count_nonzero(seen))
        return count

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.num_heads_q * self.head_dim * self.pairs

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and out, each touched once."""
        rows = self.num_heads_q * self.queries + self.num_heads_kv * self.seqlen
        return 2 * rows * self.batch * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def series(self) -> str:
        return f"{self.op}, {SHORT_DTYPE[self.dtype]}, head_dim {self.head_dim}"

    @property
    def extent(self) -> str:
        """Say how large a call is, for lists."""
        queries = f"{self.seqlen_q} of " if self.seqlen_q else ""
        return f"batch {self.batch}, seqlen {queries}{self.seqlen}"


PLAIN: dict[str, Callable[[FlexWorkload], dict[str, Any]]] = {  # options that are the functions
    "scaled": lambda w: {"scale": 1.5 * w.head_dim**-0.5},
    "shifted": lambda w: {},
    "causal rows": lambda w: {"causal": True},
}


def functions(w: FlexWorkload, x: dict[str, Any]) -> Functions:
    """Return the score and the mask function of a kind, which capture arrays of `x`."""
    n, near, first = w.seqlen, w.seqlen // 8, 64
    ids, mixed, ends, slopes, table, blocks, valid = (
        x[name] for name in ("sorted", "mixed", "ends", "slopes", "table", "blocks", "valid")
    )
    tanh: Any = np.tanh
    if not isinstance(ids, np.ndarray):
        import torch

        tanh = torch.tanh

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    def in_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
        return blocks[q // 128, k // 128]

    kinds: dict[str, Functions] = {
        "causal": (None, causal),
        "documents": (None, lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q)),
        "unsorted documents": (None, lambda b, h, q, k: mixed[q] == mixed[k]),
        "window": (None, lambda b, h, q, k: (k <= q) & (q - k < near)),
        "causal rows": (None, lambda b, h, q, k: k < ends[q]),
        "streaming": (None, lambda b, h, q, k: (k <= q) & ((q - k < near) | (k < first))),
        "blocks 50 %": (None, in_blocks),
        "blocks 10 %": (None, in_blocks),
        "scaled": (lambda s, b, h, q, k: s * 1.5, None),
        "shifted": (lambda s, b, h, q, k: s + 0.5, None),  # compiled, and of no effect
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), causal),
        "alibi, a function": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k) + 0.5, causal),
        "softcap": (lambda s, b, h, q, k: 20.0 * tanh(s / 20.0), causal),
        "softcap, a function": (lambda s, b, h, q, k: 20.0 * tanh(s / 20.0) + 0.5, causal),
        "relative bias": (lambda s, b, h, q, k: s + table[h, q - k + n], causal),
        "a table of heads and keys": (lambda s, b, h, q, k: s + table[h, k], None),
        "keys in use": (None, lambda b, h, q, k: valid[k]),
    }
    for function in kinds[w.kind]:
        if function is not None:
            function.__module__ = "a_user"  # whose functions are traced; cuattn's run as they are
    return kinds[w.kind]


def flex() -> Iterable[FlexWorkload]:
    """Masks and scores as functions, beside torch's FlexAttention."""
    with_plain = ("auto", "sm80", "plain")
    for kind, least, backends in (
        ("causal", 1.5, ("auto",)),
        ("documents", 1.8, ("auto", "sm80")),
        ("window", 1.7, ("auto",)),
        ("streaming", 1.5, ("auto", "sm80")),
        ("unsorted documents", 1.3, ("auto", "sm80")),
        ("alibi", 1.5, ("auto",)),
        ("softcap", 1.8, ("auto",)),
        ("relative bias", 1.2, ("auto", "sm80")),
    ):
        yield FlexWorkload(kind, kind, backends=backends, bars=(Bar(OURS, FLEX, least),))
    for kind, name, least in (
        ("scaled", "a score times 1.5", 0.98),
        ("shifted", "a score plus 0.5, a function", 0.98),
        ("causal rows", "causal, as row ranges", 0.97),
    ):
        bars = (Bar(OURS, FLEX, 1.0), Bar(OURS, "cuattn:plain", least))
        yield FlexWorkload(name, kind, backends=with_plain, bars=bars)
    for kind in ("blocks 50 %", "blocks 10 %"):
        yield FlexWorkload(kind, kind, bars=(Bar(OURS, FLEX, 1.0),))
    for kind, least in (("alibi, a function", 1.5), ("softcap, a function", 1.8)):
        yield FlexWorkload(kind, kind, bars=(Bar(OURS, FLEX, least),))
    for kind in ("a table of heads and keys", "keys in use"):
        one = FlexWorkload(f"one query, {kind}", kind, seqlen_q=1, batch=16, backends=("auto",))
        ahead = (Bar(OURS, FLEX, 1.0),)
        yield dataclasses.replace(one, num_heads_q=32, num_heads_kv=8, bars=ahead)
    yield FlexWorkload("streaming, head_dim 64", "streaming", head_dim=64)
    yield FlexWorkload("relative bias, head_dim 64", "relative bias", head_dim=64)


def flex_smoke() -> Iterable[FlexWorkload]:
    """Make the rows of `flex` small and float32."""
    for w in flex():
        small: dict[str, Any] = {"seqlen": 300, "num_heads_q": 4, "num_heads_kv": 2, "batch": 2}
        yield dataclasses.replace(w, dtype="float32", head_dim=w.head_dim // 4, bars=(), **small)
