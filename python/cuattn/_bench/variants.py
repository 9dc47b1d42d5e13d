# SPDX-License-Identifier: Apache-2.0
"""The table of variants: each kind of attention once, with its memory, time and use.

Its claims are bars: what a variant is said to gain over another, and what it gained here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .bars import Bar
from .fused import FusedWorkload
from .mla import MlaWorkload
from .paged import PagedWorkload
from .workloads import Workload

OURS, NAIVE = "cuattn:auto", "cuattn:naive"
LADDER = ("naive", "cublas", "tiled", "sm80", "auto")
VERSIONS = ("v1", "v2", "auto")
ONE = ("auto",)


@dataclasses.dataclass(frozen=True)
class Prefill(Workload):
    """A row of attention over whole sequences; `backends` are measured on it alone."""

    backends: tuple[str, ...] = ()
    use: str = ""
    bars: tuple[Bar, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decode(PagedWorkload):
    """A row of a decode step over pages."""

    backends: tuple[str, ...] = ()
    use: str = ""


def prefill(
    name: str, seqlen: int, heads_kv: int, backends: tuple[str, ...], use: str, **options: Any
) -> Prefill:
    """Make a row of 8192 tokens in float16, the mission's 32 heads of 128."""
    shape = (max(1, 8192 // seqlen), seqlen, seqlen, 32, heads_kv, 128)
    options = {"dtype": "float16", "backends": backends, "use": use, **options}
    return Prefill(name, *shape, **options)


def decode(
    name: str, batch: int, context: int, heads_kv: int, layout: str, use: str, **options: Any
) -> Decode:
    lens = (context,) * batch
    options = {"dtype": "float16", "kv_layout": layout, "use": use, **options}
    return Decode(name, lens, 32, heads_kv, **options)


def variants() -> Iterable[Any]:
    """Set the kinds of attention side by side: memory, time, and what each is for."""
    rungs = "naive: to read and to test; cublas: fast libraries, scores in memory; tiled, simt: "
    rungs += "float32 and odd shapes; sm80, auto: everything else"
    bars: tuple[Bar, ...] = (Bar(OURS, NAIVE, 2.0), Bar(OURS, "cuattn:cublas", 1.0))
    yield prefill("full fp32 s512", 512, 32, ("tiled", "simt", "auto"), rungs, dtype="float32")
    for seqlen in (512, 2048, 8192):
        backends = LADDER if seqlen == 512 else ("naive", "cublas", "sm80", "auto")
        yield prefill(f"full s{seqlen}", seqlen, 32, backends, rungs, bars=bars)
    causal: dict[str, Any] = {"causal": True}
    yield prefill("MHA causal s8192", 8192, 32, ONE, "training, prompts", **causal)
    for name, heads, use in (
        ("GQA 32/8", 8, "most models: a quarter of the cache"),
        ("MQA 32/1", 1, "the smallest cache of heads"),
    ):
        bars = (Bar(OURS, "time of row MHA causal s8192", 0.95),)
        yield prefill(f"{name} causal s8192", 8192, heads, ONE, use, bars=bars, **causal)
    long = "long texts: time grows with N x W"
    for seqlen in (2048, 8192, 32768):
        bars = (Bar(OURS, "time of row MHA causal s8192", 1.0),) if seqlen == 8192 else ()
        words = {**causal, "window": (1023, 0), "bars": bars}
        yield prefill(f"window 1024 s{seqlen}", seqlen, 32, ONE, long, **words)
    wide = "the middle of image decoders (VAE): one head of 512 columns, 64 x 64 places"
    shape = (4, 4096, 4096, 1, 1, 512, "float16")
    yield Prefill("head of 512 s4096", *shape, backends=ONE, use=wide)
    v2 = "V1: short contexts or many sequences; V2: long contexts and few sequences"
    for batch, context in ((1, 1024), (1, 8192), (8, 2048), (32, 2048)):
        bars = (Bar("cuattn:v2", "cuattn:v1", 1.5),) if context > 1024 else ()
        words = {"backends": VERSIONS, "bars": bars}
        yield decode(f"pages {batch} x {context}", batch, context, 32, "vllm", v2, **words)
    base = "decode MHA 32 x 4096"
    yield decode(base, 32, 4096, 32, "nhd", "the cache of every head", backends=ONE)
    for name, heads, least in (("GQA 32/8", 8, 3.0), ("MQA 32/1", 1, 10.0)):
        words = {"backends": ONE, "bars": (Bar(OURS, f"time of row {base}", least),)}
        yield decode(f"decode {name} 32 x 4096", 32, 4096, heads, "nhd", "the same", **words)
    use = "latents of 512 + 64 for all heads: DeepSeek's models"
    bars = (Bar(OURS, f"time of row {base}", 4.0),)
    words = {"dtype": "float16", "backends": ONE, "use": use, "bars": bars}
    yield MlaWorkload("decode MLA 32 heads 32 x 4096", (4096,) * 32, 32, **words)
    bars = (Bar(OURS, "cuattn:unfused", 1.5), Bar(OURS, "eager", 1.5))
    use = "between the layers: one pass over the hidden states instead of two"
    words = {"residual": True, "dtype": "float16", "bars": bars, "use": use}
    words["backends"] = ("auto", "unfused")
    yield FusedWorkload("residual + rms_norm", "rms_norm", 8192, 4096, **words)


def variants_smoke() -> Iterable[Any]:
    """Make the rows of `variants` small and float32."""
    for w in variants():
        changes: dict[str, Any] = {"dtype": "float32"}
        if isinstance(w, Prefill):
            seqlen = w.seqlen_q // 128
            changes |= {"batch": 1, "seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": 16}
            if w.window != (-1, -1):
                changes["window"] = (7, 0)
        elif isinstance(w, FusedWorkload):
            changes |= {"rows": 20, "columns": 64}
        else:
            changes["context_lens"] = tuple(n // 64 for n in w.context_lens[:2])
            if isinstance(w, Decode):
                changes["head_dim"] = 32
        yield dataclasses.replace(w, **changes)
