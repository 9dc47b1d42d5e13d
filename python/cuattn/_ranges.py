# SPDX-License-Identifier: Apache-2.0
"""CUATTN_RANGES=1: each public call as a named range in the profilers that are there.

torch's profiler sees a `record_function`, Nsight Systems an NVTX range, made by the `nvtx` package
or else by torch or CuPy. Without the variable nothing is wrapped, and calls cost what they did.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

OPS = (
    "act_mul",
    "append_attention",
    "apply_rope",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "bias_act",
    "cascade_attention",
    "copy_blocks",
    "create_block_mask",
    "dequantize",
    "flex_attention",
    "flex_attention_backward",
    "gather_cache",
    "layer_norm",
    "merge_states",
    "mla_attention",
    "mla_decode",
    "mla_project",
    "mla_write",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_plan",
    "pinned_empty",
    "quantize",
    "quantize_like",
    "reshape_and_cache",
    "rms_norm",
    "rope_attention",
    "rope_table",
    "sample",
    "sparse_attention",
    "speculative_verify",
    "swap_blocks",
)


class Pushed(AbstractContextManager[None]):
    """A range between a call that pushes and a call that pops."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any], name: str) -> None:
        self.push, self.pop, self.name = push, pop, name

    def __enter__(self) -> None:
        self.push(self.name)

    def __exit__(self, *error: object) -> None:
        self.pop()


@functools.cache
def nvtx_package() -> Any:
    """Import `nvtx`, if it is installed."""
    if importlib.util.find_spec("nvtx") is None:
        return None
    import nvtx

    return nvtx


def loaded(name: str) -> Any:
    """Return a module whose import has ended, in whatever thread it began; else None."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def makers() -> list[Callable[[str], AbstractContextManager[Any]]]:
    """List what makes ranges now; loads no framework that the program has not loaded."""
    found: list[Callable[[str], AbstractContextManager[Any]]] = []
    torch, cupy, nvtx = loaded("torch"), loaded("cupy"), nvtx_package()
    if torch is not None:
        found.append(torch.profiler.record_function)
    if nvtx is not None:
        found.append(functools.partial(Pushed, nvtx.push_range, nvtx.pop_range))
    elif torch is not None and torch.cuda.is_available():
        pair = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
        found.append(functools.partial(Pushed, *pair))
    elif cupy is not None:
        pair = cupy.cuda.nvtx.RangePush, cupy.cuda.nvtx.RangePop
        found.append(functools.partial(Pushed, *pair))
    return found


def ranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put a range around each call of a function."""
    name = f"cuattn.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        torch = loaded("torch")
        if torch is not None and torch.compiler.is_compiling():
            return function(*arguments, **options)  # a graph's ops have names of their own
        with ExitStack() as ranges:
            for make in makers():
                ranges.enter_context(make(name))
            return function(*arguments, **options)

    return call


def wrap_if_wanted(public: dict[str, Any]) -> None:
    """Wrap the functions of the package, given by name, if the environment asks for it."""
    if os.environ.get("CUATTN_RANGES", "") not in ("", "0"):
        public.update({name: ranged(public[name]) for name in OPS})
