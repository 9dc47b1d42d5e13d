# SPDX-License-Identifier: Apache-2.0
"""Plans of the backward pass."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._gradients import GRADIENTS, POSITIONAL, check_need, forward_options
from .devices import place, without_memory
from .plan import Plan

OWN = {"dlse": None, "deterministic": None, "need": GRADIENTS[:3]}


def explain_backward(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say it for attention_backward and attention_varlen_backward."""
    names = POSITIONAL[op]
    if len(arrays_or_shapes) != len(names):
        raise TypeError(
            f"explain: {op} takes {', '.join(names)}, got {len(arrays_or_shapes)} arguments"
        )
    known = OWN | {option.name: option.default for option in forward_options(op)}
    ignored = (*GRADIENTS, "workspace", "stream")  # they do not enter the choice
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - set(known)
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    arguments = {**known, **given, **dict(zip(names, arrays_or_shapes, strict=True))}
    arguments["need"] = check_need(op, arguments["need"])
    where = place(device, arguments["q"])
    arguments = {name: without_memory(value) for name, value in arguments.items()}
    return Plan(**_core.explain_backward(arguments, dtype, *where))
