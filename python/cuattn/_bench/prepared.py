# SPDX-License-Identifier: Apache-2.0
"""A call that a contestant made ready for a workload, or its refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


class Unsupported(Exception):
    """The contestant does not serve this workload."""


@dataclasses.dataclass
class Prepared:
    """A call ready to be timed, inside `context()`."""

    call: Callable[[], Any]
    canonical: Callable[[Any], Any] = lambda out: out
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    kernel: str | None = None
    memory_bytes: int | None = None  # known without measuring: result and workspace
    repeats: int = 0  # timed as a graph of so many calls; 0: alone
    bytes: int | None = None  # that the call moves, where they are not the workload's
    has_host_time: bool = False  # the host's time is measured too


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


def module(*names: str) -> Any:
    """Import the first of these modules that can be imported."""
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise Unsupported("; ".join(reasons))
