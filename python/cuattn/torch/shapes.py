# SPDX-License-Identifier: Apache-2.0
"""Holds tensors without memory (meta, fake) to the library's own rules. Next: ops.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .. import _core


def described(x: Any) -> Any:
    """Reduce a tensor to dtype and extents, which `_core.explain` takes for a dense array."""
    return (str(x.dtype).removeprefix("torch."), *x.shape) if isinstance(x, Tensor) else x


def is_symbolic(x: Any) -> bool:
    """Whether a number, or one of several, is not known yet."""
    parts = x if isinstance(x, (tuple, list)) else (x,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in parts)


def check(arguments: dict[str, Any]) -> None:
    """Raise what a call of attention or attention_varlen would, where its numbers are known.

    Which kernel would run depends on a device, so that there may be none is not said. Nor is
    anything while torch.compile makes a graph: it would say it in its words, and the graph in ours.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return
    given = {name: described(x) for name, x in arguments.items() if x is not None}
    if not any(map(is_symbolic, given.values())):
        with contextlib.suppress(NotImplementedError):
            _core.explain(given, "float32", -1, None)
