# SPDX-License-Identifier: Apache-2.0
"""How the public functions reach the compiled module, and JAX arrays cuattn.jax."""

from __future__ import annotations

from typing import Any


def signature_and_doc(function: Any) -> str:
    """Return the docstring of a builtin: the signature in front, where Python reads it."""
    code = function.__code__
    positional = ", ".join(code.co_varnames[: code.co_argcount])
    defaults = ", ".join(f"{name}={value!r}" for name, value in function.__kwdefaults__.items())
    return f"{function.__name__}({positional}, *, {defaults})\n--\n\n{function.__doc__}"


def jax_face() -> Any:
    """Import cuattn.jax, which needs JAX."""
    from . import jax

    return jax
