# SPDX-License-Identifier: Apache-2.0
"""Which lengths a mask or score function asks for.

Apart from trace.py, which torch.compile skips, as compiled code may join masks.
"""

from __future__ import annotations

import functools
from typing import Any


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of the lengths that a function asks for beside its indices."""
    given: set[str] = set()
    while isinstance(function, functools.partial):
        given |= set(function.keywords)
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called
        code = getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return ()
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return tuple(name for name in ("q_len", "kv_len") if name in names and name not in given)
