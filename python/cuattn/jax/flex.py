# SPDX-License-Identifier: Apache-2.0
"""flex_attention of JAX arrays of the CPU, outside of jit: numpy sees their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def run_on_host(
    function: str, call: Callable[..., Any], arguments: dict[str, Any], found: dict[str, Any]
) -> Any:
    """Run on the memory of JAX arrays, and return JAX arrays.

    Raises
    ------
    NotImplementedError
        Under jit, vmap or grad, and for arrays of a GPU.
    ValueError
        If out, lse_out, workspace or stream is given: XLA owns these.
    """
    written = ("out",) if function == "flex_attention" else ("dq", "dk", "dv")
    for name in (*written, "lse_out", "workspace", "stream"):
        if arguments.get(name) is not None:
            raise ValueError(f"{function}: {name} must not be given with JAX arrays; XLA owns it")
    host = {name: on_host(function, name, x) for name, x in arguments.items()}
    result = call(host, found)
    return jax.tree.map(jax.numpy.asarray, result)


def on_host(function: str, name: str, x: Any) -> Any:
    """Return an array as numpy's, over the same memory."""
    if isinstance(x, jax.core.Tracer):
        raise NotImplementedError(
            f"{function}: {name} is traced by JAX, where the functions cannot be run yet; call it "
            "outside of jit, vmap and grad, or by jax.pure_callback"
        )
    if not isinstance(x, jax.Array):
        return x
    if any(device.platform != "cpu" for device in x.devices()):
        raise NotImplementedError(
            f"{function}: {name} lies on {x.devices()}, and JAX arrays are taken on the CPU alone; "
            "use a mask of cuattn.attention there"
        )
    return np.asarray(x)
