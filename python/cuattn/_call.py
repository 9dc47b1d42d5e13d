# SPDX-License-Identifier: Apache-2.0
"""How a public function reaches the compiled module: the builtin in front of it, and its own way.

`front` puts a builtin of the same signature in front of a Python function. It touches what the
caller gave, while a Python function would first fill in its 20 defaults and pass them all on. What
is out of the ordinary it hands to the Python function: a wrong or missing name, which
`refuse_names` or Python refuses, a named cuBLAS, which has to be found first, and JAX arrays. Torch
tensors that want a gradient it hands, as they were given, to what `find_gradient` finds. The Python
function ends in `call`, which passes its arguments by name to the compiled module, JAX arrays to
cuattn.jax, and what autograd is to see to cuattn.torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core
from ._arrays import find_cublas
from ._options import OPS, ROWS
from ._residual import with_residual
from ._rope import turned

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def signature_and_doc(function: Any) -> str:
    """Return the docstring of a builtin: the signature in front, where Python reads it."""
    code, defaults = function.__code__, function.__kwdefaults__
    positional, end = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = [*code.co_varnames[:positional], "*", *code.co_varnames[positional:end]]
    words = [f"{name}={defaults[name]!r}" if name in defaults else name for name in names]
    return f"{function.__name__}({', '.join(words)})\n--\n\n{function.__doc__}"


def front(function: FunctionT) -> FunctionT:
    """Put the builtin of the same name in front of a function."""
    if TYPE_CHECKING:
        return function
    make = getattr(_core, f"{function.__name__}_front")
    return make(function, signature_and_doc(function), refuse_names, find_gradient)


def refuse_names(op: str, given: dict[str, Any]) -> None:
    """Raise for a name that an op does not have, and say what it has instead."""
    from ._other_names import refuse

    refuse(op, given)


def find_gradient(op: str) -> Callable[..., Any]:
    """Return what runs an op whose gradient torch's autograd wants."""
    return functools.partial(torch_face().ops.differentiate, op)


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Run an op on all that its Python function has been given, by name."""
    backend = arguments.get("backend")
    if isinstance(backend, str) and backend == "cublas":
        find_cublas()
    if arguments.get("residual") is not None:
        return with_residual(op, arguments, call)
    arguments = turned(op, arguments)
    arguments.pop("residual", None)
    if op in ROWS and arguments.get("dropout_p") and is_torch(arguments["q"]):
        arguments = torch_face().ops.with_dropout_state(arguments["q"], arguments)
    try:
        result = getattr(_core, op)(arguments)
        if result is not NotImplemented:
            return result
    except _core.GradientWanted:
        if op not in ROWS:
            raise
    else:
        return getattr(jax_face(), op)(**arguments)
    rows = [arguments.pop(name) for name in OPS[op].positional]
    return find_gradient(op)(*rows, **arguments)


def is_torch(array: Any) -> bool:
    """Whether an array is a tensor of torch."""
    return isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ()))


def torch_face() -> Any:
    """Import cuattn.torch, which needs torch."""
    from . import torch

    return torch


def jax_face() -> Any:
    """Import cuattn.jax, which needs JAX."""
    from . import jax

    return jax


def refuse_tables_of_jax(op: str, *tables: Any) -> None:
    """Refuse block tables and lengths in place of slots, which only XLA could make in a call."""
    if any(table is not None for table in tables):
        raise NotImplementedError(
            f"{op}: block_tables and context_lens must be None for JAX arrays; compute "
            "slot_mapping from them"
        )


def either(function: str, *arguments: Any) -> Any:
    """Run a function of the module, or of cuattn.jax.fused, which has the same arguments."""
    found = getattr(_core, function)(*arguments)
    if found is not NotImplemented:
        return found
    from .jax import fused

    return getattr(fused, function)(*arguments)
