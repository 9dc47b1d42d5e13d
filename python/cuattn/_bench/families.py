# SPDX-License-Identifier: Apache-2.0
"""The families of workloads by name, and who is measured on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .backward import backward, backward_smoke
from .cache import cache, cache_smoke
from .flex import flex, flex_smoke
from .float8 import fp8, fp8_smoke, quantize
from .fused import fused, fused_smoke, rope
from .mla import mla, mla_smoke
from .paged import (
    cascade,
    chunked,
    chunked_fp8,
    paged,
    paged_blocks,
    paged_fp8,
    paged_invariant,
    paged_ragged,
    paged_smoke,
    paged_vllm,
)
from .parallel import parallel, parallel_smoke
from .variants import variants, variants_smoke
from .workloads import (
    AnyWorkload,
    cpu,
    cpu_ladder,
    forward,
    fp16,
    gqa,
    ladder,
    masks,
    mission,
    models,
    ragged,
    smoke,
    split,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A table of workloads, and who is measured on it unless told otherwise."""

    workloads: tuple[AnyWorkload, ...]
    about: str
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ("cudnn", "flash", "fa3", "fa4")
    device: str = "any"  # or cpu: meant for the CPU backend, also where there is a GPU
    quantity: str = "tflops"  # what speed is: or gbps
    heat_s: float = 0.4  # how long the chip is heated before each row
    budget_s: float = 150.0  # unless the command line says another
    over_ranks: bool = False  # measured by processes of their own, ranks.py


Make = Callable[[], Iterable[AnyWorkload]]


def _family(make: Make, **choices: Any) -> Family:
    about = (make.__doc__ or "").split("\n", maxsplit=1)[0]
    return Family(tuple(make()), about, **choices)


def _decode(make: Make, *, peers: tuple[str, ...] = (), **choices: Any) -> Family:
    """Make a family bound by memory: its rows follow one another too fast for the chip to cool."""
    return _family(make, peers=peers, quantity="gbps", heat_s=0.1, **choices)


FAMILIES: dict[str, Family] = {
    "mission": _family(
        mission,
        backends=("auto", "naive", "cublas"),
        peers=("math", "efficient", "flash", "cudnn", "fa3", "fa3_bf16"),
    ),
    "forward": _family(forward),
    "gqa": _family(gqa, peers=("cudnn", "flash", "fa3", "fa4", "flashinfer")),
    "fp16": _family(fp16, peers=("cudnn", "flash", "fa3", "fa3_bf16", "fa4")),
    "ragged": _family(ragged, peers=("varlen", "fa3", "fa4", "flashinfer")),
    "masks": _family(
        masks, peers=("flex", "fa3", "fa4", "varlen", "efficient", "cudnn", "flashinfer")
    ),
    "split": _family(split, peers=("cudnn", "flash", "fa3")),
    "models": _family(models),
    "ladder": _family(
        ladder,
        backends=("naive", "cublas", "tiled", "simt", "sm80", "sm90"),
        peers=("math", "flash"),
    ),
    "cpu": _family(cpu, peers=("torch", "numpy"), device="cpu"),
    "cpu_ladder": _family(
        cpu_ladder, backends=("cpu", "naive"), peers=("torch", "numpy"), device="cpu"
    ),
    "smoke": _family(smoke, backends=("auto", "naive"), peers=("torch", "numpy", "varlen")),
    "backward": _family(
        backward,
        backends=("auto", "deterministic"),
        peers=("cudnn", "flash", "varlen"),
        heat_s=0.1,
        budget_s=100.0,
    ),
    "backward_smoke": _family(
        backward_smoke,
        backends=("auto", "deterministic"),
        peers=("torch", "flash", "cudnn", "varlen"),
    ),
    "paged": _decode(paged, backends=("auto", "replan"), peers=("flashinfer",)),
    "paged_vllm": _decode(paged_vllm, backends=("auto", "v1", "v2")),
    "paged_blocks": _decode(paged_blocks),
    "paged_fp8": _decode(paged_fp8, backends=("auto", "wide", "codes")),
    "paged_ragged": _decode(paged_ragged, backends=("auto", "replan"), peers=("flashinfer",)),
    "paged_invariant": _decode(paged_invariant, backends=("auto", "invariant")),
    "cascade": _decode(cascade, backends=("auto", "cascade"), peers=("flashinfer",)),
    "paged_smoke": _decode(paged_smoke, backends=("auto", "v1", "v2", "dense", "cascade")),
    "chunked": _family(chunked, backends=("auto", "dense"), peers=()),
    "chunked_fp8": _family(chunked_fp8, backends=("auto", "wide", "codes"), peers=()),
    "parallel": _family(
        parallel,
        backends=("auto", "one", "unchecked", "gather", "heads", "ring"),
        peers=("context_parallel", "context_cudnn", "context_ring", "yunchang"),
        over_ranks=True,
    ),
    "parallel_smoke": _family(
        parallel_smoke,
        backends=("auto", "one", "unchecked", "gather", "heads", "ring"),
        peers=("context_parallel", "context_cudnn", "context_ring", "yunchang"),
        over_ranks=True,
    ),
    "cache": _decode(cache, peers=("memcpy",)),
    "cache_smoke": _decode(cache_smoke, peers=("memcpy",)),
    "mla": _decode(
        mla, backends=("auto", "explicit", "absorbed"), peers=("eager", "fa3", "flashinfer")
    ),
    "rope": _decode(
        rope,
        backends=("auto", "unfused", "plain"),
        peers=("eager", "compiled", "memcpy"),
    ),
    "fused": _decode(fused, backends=("auto", "unfused"), peers=("eager", "compiled", "memcpy")),
    "variants": _family(
        variants,
        backends=("auto", "v2", "v1", "sm80", "simt", "tiled", "cublas", "naive", "unfused"),
        peers=("flash", "cudnn", "efficient", "eager"),
        heat_s=0.1,
        budget_s=100.0,
    ),
    "flex": _family(flex, backends=("auto", "sm80", "plain"), peers=("flex",), heat_s=0.2),
    "flex_smoke": _family(flex_smoke, backends=("auto", "naive", "plain"), peers=("flex",)),
    "fp8": _family(
        fp8,
        backends=(
            "auto",
            "rows",
            "fast",
            "bf16",
            "quantised",
            "blocks",
            "int8",
            "quantised_blocks",
        ),
        peers=("fa3", "fa3_columns"),
    ),
    "quantize": _decode(quantize, peers=("memcpy",)),
    "fp8_smoke": _family(
        fp8_smoke,
        backends=("auto", "naive", "rows", "fast", "bf16", "quantised", "blocks", "int8"),
        peers=("fa3", "fa3_columns", "memcpy"),
    ),
    "mla_smoke": _decode(
        mla_smoke, backends=("auto", "invariant", "explicit", "absorbed"), peers=("eager",)
    ),
    "fused_smoke": _decode(
        fused_smoke, backends=("auto", "unfused", "plain"), peers=("eager", "memcpy")
    ),
    "variants_smoke": _family(
        variants_smoke,
        backends=("auto", "v2", "v1", "naive", "unfused"),
        peers=("torch", "eager"),
    ),
}
