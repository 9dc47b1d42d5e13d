# SPDX-License-Identifier: Apache-2.0
"""Plans of attention and attention_varlen."""

from __future__ import annotations

from typing import Any

from .. import _arrays, _core
from .._options import fields_of
from .devices import without_memory
from .plan import Plan

DEFAULTS = {option.name: option.default for option in fields_of("attention")}


def explain_rows(
    arguments: dict[str, Any], dtype: str, where: tuple[int, dict[str, Any] | None]
) -> Plan:
    """Say it for attention and attention_varlen, with what `place` said of the device."""
    given = {name: without_memory(value) for name, value in {**DEFAULTS, **arguments}.items()}
    if where[1] is None and where[0] >= 0:  # a made-up GPU says itself whether it has one
        _arrays.find_cublas()
    return Plan(**_core.explain(given, dtype, *where))
