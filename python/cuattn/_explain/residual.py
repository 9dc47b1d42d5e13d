# SPDX-License-Identifier: Apache-2.0
"""What residual= adds to the plan of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _core
from .._residual import ROUNDING, refuse_jax
from .devices import place, without_memory
from .plan import Plan

LINE = "  residual: is added to a float32 result of the kernel, then rounded once\n"


def with_residual(
    plan: Plan,
    op: str,
    arrays: tuple[Any, ...],
    residual: Any,
    device: int | str | dict[str, Any] | None,
    dtype: str,
) -> Plan:
    """Refuse a residual that the call refuses, and say what is added after the kernel."""
    word, q, v = f"{op}(residual=)", arrays[0], arrays[2]
    if without_memory(q) is not q:
        refuse_jax(word, op)
    number, made_up = place(device, q)
    _core.check_residual_shape(word, q, v, residual, dtype, number)
    is_cuda = number >= 0 if made_up is None else made_up["is_cuda"]
    kind = str(q.dtype) if hasattr(q, "dtype") else q[0] if isinstance(q[0], str) else dtype
    if is_cuda and plan.kernel in ROUNDING and kind.endswith("float16"):  # or bfloat16
        raise NotImplementedError(
            f"{word}: residual is added to a result in float32, which backend "
            f"{plan.kernel!r} does not write from 16-bit inputs; use 'auto', or float32"
        )
    words = "; after it residual is added to its result in float32, rounded once"
    return dataclasses.replace(plan, reason=plan.reason + words, ladder=plan.ladder + LINE)
