# SPDX-License-Identifier: Apache-2.0
"""Tells what JAX traces, and stands for it: nothing that outlives a trace may hold its tracers.

Next: trace.py, which captures arrays.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any


class Unknown:
    """Stands for a captured array that JAX traces: kernels read its numbers, the host cannot.

    It does not keep the tracer alive: what is kept with functions outlives a trace, and so does a
    call that JAX differentiates.
    """

    def __init__(self, array: Any):
        self.reference, self.shape = weakref.ref(array), tuple(array.shape)
        self.dtype, self.ndim = array.dtype, array.ndim


def is_jax_tracer(x: Any) -> bool:
    """Whether something stands for an array while JAX traces."""
    jax = sys.modules.get("jax")
    return isinstance(x, Unknown) or (jax is not None and isinstance(x, jax.core.Tracer))


def original(x: Any) -> Any:
    """Return the tracer that something stands for, while there is one; itself for all else."""
    return x.reference() if isinstance(x, Unknown) else x


def runs_in_xla(x: Any) -> bool:
    """Whether JAX traces an array, or it is one of JAX that lies on no CPU."""
    if is_jax_tracer(x):
        return True
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(x, jax.Array):
        return False
    return any(device.platform != "cpu" for device in x.devices())
