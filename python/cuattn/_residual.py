# SPDX-License-Identifier: Apache-2.0
"""What is added to the result of attention, in a pass after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from . import _core
from ._arrays import wants_gradient

# On CUDA these write no float32 of 16-bit inputs.
ROUNDING = ("naive", "cublas", "tiled")


def with_residual(
    op: str, arguments: dict[str, Any], call: Callable[[str, dict[str, Any]], Any]
) -> Any:
    """Attend into float32, then add and round once; all that is refused is refused before."""
    word = f"{op}(residual=)"
    refuse_gradients(word, op, arguments)
    q, v, residual, stream = (arguments[name] for name in ("q", "v", "residual", "stream"))
    written = arguments["out"], arguments["lse_out"], arguments["workspace"]
    is_rounding = arguments["backend"] in ROUNDING
    places = _core.residual_places(word, q, v, residual, *written, is_rounding, stream)
    if places is NotImplemented:
        refuse_jax(word, op)
    attended, out = places
    result = call(op, {**arguments, "residual": None, "out": attended})
    _core.add_residual(word, attended, residual, out, stream)
    return (out, result[1]) if isinstance(result, tuple) else out


def refuse_jax(word: str, op: str) -> NoReturn:
    """Refuse JAX arrays, with the way out."""
    raise NotImplementedError(
        f"{word}: q is a JAX array, whose sum XLA makes; write {op}(...) + residual"
    )


def refuse_gradients(word: str, op: str, arguments: dict[str, Any]) -> None:
    """Refuse tensors of which autograd wants a gradient."""
    for name, x in arguments.items():
        if wants_gradient(x):
            raise NotImplementedError(
                f"{word}: {name} requires grad, but no gradient goes through the pass that adds; "
                f"write {op}(...) + residual"
            )
