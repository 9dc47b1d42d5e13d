# SPDX-License-Identifier: Apache-2.0
"""Tells what JAX traces, and stands for it: nothing that outlives a trace may hold its tracers.

What torch differentiates by is refused here where it would become a number.

Next: trace.py, which captures arrays.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import weakref
from collections.abc import Iterator
from typing import Any

in_score = contextvars.ContextVar("in_score", default=False)  # a score function runs on symbols


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
    core = getattr(sys.modules.get("jax"), "core", None)
    return isinstance(x, (Unknown, getattr(core, "Tracer", ())))


def is_batched(x: Any) -> bool:
    """Whether torch.func.vmap maps over a tensor, within other transforms too."""
    torch: Any = sys.modules.get("torch")
    if not isinstance(x, getattr(torch, "Tensor", ())):
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x) and not functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x)
    return bool(functorch.is_batchedtensor(x))


def refuse_batched(x: Any) -> None:
    """Refuse a tensor that torch.func.vmap maps over, whose numbers the host cannot read."""
    if is_batched(x):
        raise NotImplementedError(
            f"flex_attention: a captured array of shape {tuple(x.shape)} is batched by "
            "torch.func.vmap, which has no rule for flex_attention; make the mapped axis a part of "
            "the batch, or call flex_attention in a loop"
        )


@contextlib.contextmanager
def running(is_score: bool) -> Iterator[None]:
    """Say what is traced meanwhile: a score, or a mask, which has no gradient."""
    token = in_score.set(is_score)
    try:
        yield
    finally:
        in_score.reset(token)


def number_of(x: Any) -> Any:
    """Return the number that an array without axes is; all else as it is."""
    if getattr(x, "shape", None) != () or not hasattr(x, "item"):
        return x
    torch: Any = sys.modules.get("torch")
    is_learned = getattr(x, "requires_grad", False) and torch.is_grad_enabled()
    if in_score.get() and (is_learned or is_jax_tracer(x)):
        what, last = "a tensor that requires grad", ", or compute with its .item()"
        if is_jax_tracer(x):
            what, last = "an array that JAX traces", ""
        raise NotImplementedError(
            f"flex_attention: score_mod must not reach {what} through an attribute or a call, where"
            " it would be a number without a gradient, got one without axes; assign it to a local "
            f"before the function is defined{last}"
        )
    return x.item()


def original(x: Any) -> Any:
    """Return the tracer that something stands for, while there is one; itself for all else."""
    return x.reference() if isinstance(x, Unknown) else x


def runs_in_xla(x: Any) -> bool:
    """Whether JAX traces an array, or it is one of JAX that lies on no CPU."""
    if is_jax_tracer(x):
        return True
    array: Any = getattr(sys.modules.get("jax"), "Array", ())
    if not isinstance(x, array):
        return False
    return any(device.platform != "cpu" for device in x.devices())
