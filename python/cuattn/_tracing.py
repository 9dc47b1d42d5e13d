# SPDX-License-Identifier: Apache-2.0
"""Tells torch.compile what to trace in place of cuattn's builtins, once torch.compile is loaded.

torch._dynamo is loaded seconds after torch, by the first use of torch.compile, and only then can be
told; so a finder waits for its import. Next: torch/tracing.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from typing import Any

COMPILER = "torch._dynamo"


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch._dynamo as the others do, and has cuattn's functions told when it is loaded.

    It stays in sys.meta_path: other threads that import walk that list, and would miss a finder
    where one before it leaves.
    """

    has_found = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != COMPILER or self.has_found:
            return None
        self.has_found = True
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_tell(module: Any) -> None:
            load(module)
            tell()

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


waiting: list[Callable[[], None]] = []  # until torch.compile is loaded


def tell() -> None:
    """Have the builtins replaced in graphs; torch.compile itself must work in any case."""
    try:
        from .torch import tracing

        tracing.substitute()
    except Exception as error:
        warnings.warn(
            f"cuattn: torch.compile breaks the graph at cuattn.attention, as this torch cannot be "
            f"told what to trace ({error}); call cuattn.torch.attention in compiled code",
            stacklevel=2,
        )
    while waiting:
        waiting.pop()()


def tell_torch_compile() -> None:
    """Tell torch.compile now where it is loaded, else when it is."""
    if COMPILER in sys.modules:
        tell()
    else:
        sys.meta_path.insert(0, Finder())


def when_torch_compiles(function: Callable[[], None]) -> None:
    """Call a function now where torch.compile is loaded, else when it is."""
    if COMPILER in sys.modules:
        function()
    else:
        waiting.append(function)


def refuse_jit_trace(op: str) -> None:
    """Raise within torch.jit.trace, which would record the memory of a result without the call."""
    # What another thread still imports lacks names, and has made no arrays yet.
    core = getattr(sys.modules.get("torch"), "_C", None)
    if core is not None and core._is_tracing():
        raise NotImplementedError(
            f"{op}: torch.jit.trace cannot record it; use torch.compile or torch.export, or trace "
            "cuattn.torch.attention"
        )


def refuse_captured_tangents(op: str, captured: Iterable[Any]) -> None:
    """Raise for captured tensors of torch's forward mode, whose tangents nobody would carry on."""
    torch = sys.modules.get("torch")
    autograd = getattr(torch, "autograd", None)  # not there while another thread imports torch
    if torch is None or autograd is None or autograd.forward_ad._current_level < 0:
        return
    for x in captured:
        is_tensor = isinstance(x, torch.Tensor)
        if is_tensor and autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op}: a captured array has a tangent of forward-mode differentiation, which no "
                "op of cuattn carries on; use reverse mode (backward, torch.func.vjp)"
            )


def keep_out_of_graphs(names: dict[str, Any], name: str) -> None:
    """Have a function of a module, by its globals, run as it stands under torch.compile.

    torch.compiler.disable does so, but loads torch.compile, which takes as long as torch itself.
    """

    def disable() -> None:
        names[name] = sys.modules["torch"].compiler.disable(names[name])

    when_torch_compiles(disable)
