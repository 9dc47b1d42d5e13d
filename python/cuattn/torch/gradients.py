# SPDX-License-Identifier: Apache-2.0
"""The way back of the ops: ``torch.ops.cuattn.attention_backward``, ``attention_varlen_backward``.

They are ops of their own, functional and with shapes for tracing, so that torch.compile sees both
directions without a break. A gradient of a gradient is refused by name. Next: ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import attention_backward as run_attention_backward
from .. import attention_varlen_backward as run_attention_varlen_backward
from .._gradients import FORWARD, GRADIENTS, POSITIONAL, SOURCES, forward_options
from .._options import OPS
from .eager import OPTIONAL, on_16_bytes, rows_in_order, run_backward_op
from .ops import TENSORS, library, schema

RUN: dict[str, Any] = {
    "attention_backward": run_attention_backward,
    "attention_varlen_backward": run_attention_varlen_backward,
}
OPTIONS = {op: tuple(forward_options(op)) for op in FORWARD}


def declare(op: str) -> None:
    """Define the schema of a backward op, which gives six tensors, those not in `need` empty."""
    kinds = {name: "SymInt" if name.startswith("max_") else "Tensor" for name in POSITIONAL[op]}
    arguments = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
    options = schema(OPTIONS[op]).replace("*", "Tensor? dlse=None, *", 1)
    results = ", ".join(["Tensor"] * len(GRADIENTS))
    library.define(
        f"{op}({arguments}, {options}, str[] need, bool? deterministic=None) -> ({results})"
    )


def make_kernel(op: str) -> Any:
    """Make the function that runs an op on tensors with memory."""
    count = len(POSITIONAL[op])

    def kernel(*arguments: Any, need: Sequence[str] = (), **options: Any) -> tuple[Tensor, ...]:
        positional = list(arguments[:count])
        positional[0] = rows_in_order(positional[0])
        positional[1:4] = map(on_16_bytes, positional[1:4])
        options.update(zip(OPTIONAL[op], arguments[count:], strict=False))
        if options.get("dlse") is not None:
            options["dlse"] = options["dlse"].contiguous()
        found = RUN[op](*positional, need=tuple(need), **options)._asdict() if need else {}
        empty = positional[1].new_empty
        return tuple(found.get(name, empty(0)) for name in GRADIENTS)

    return kernel


def make_shapes(op: str) -> Any:
    """Make the function that tells what an op returns, from shapes alone."""
    names = (*POSITIONAL[op], *OPTIONAL[op])

    def shapes(*arguments: Any, need: Sequence[str] = (), **options: Any) -> tuple[Tensor, ...]:
        given = dict(zip(names, arguments, strict=False))
        q = given["q"]
        return tuple(
            given[SOURCES[name]].new_empty(given[SOURCES[name]].shape)
            if name in need
            else q.new_empty(0)
            for name in GRADIENTS
        )

    return shapes


def keep(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Keep for the way back what the forward pass was given and gave."""
    out, lse = output
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors, out, lse)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.options = dict(keyword_only_inputs)
    ctx.set_materialize_grads(False)


def make_way_back(op: str) -> Any:
    """Make the gradient formula of the forward op of `op`."""
    forward = FORWARD[op]
    names = (*OPS[forward].positional, *TENSORS[forward])
    taken = {o.name for o in OPTIONS[op] if o.kind != "array"}

    def way_back(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        inputs = [x if n is None else n for x, n in zip(tensors, ctx.numbers, strict=True)]
        given = dict(zip(names, inputs, strict=False))
        wanted = dict(zip(names, ctx.needs_input_grad, strict=False))
        need = [name for name, source in SOURCES.items() if wanted.get(source)]
        if not need or (dout is None and dlse is None):
            return (None,) * len(ctx.needs_input_grad)
        if not ctx.options.get("return_lse"):
            raise NotImplementedError(
                f"{forward}: return_lse must be True for a gradient, which starts from lse; call "
                f"cuattn.torch.{forward}, or pass return_lse=True to the op"
            )
        if dout is None:
            dout = torch.zeros_like(out)
        options = {name: value for name, value in ctx.options.items() if name in taken}
        if torch.are_deterministic_algorithms_enabled() or ctx.options.get("deterministic"):
            options["deterministic"] = True
        arrays = given | {"dout": dout.to(out.dtype), "out": out, "lse": lse, "dlse": dlse}
        found = run_backward_op(op, arrays, need, options)
        gradients = {SOURCES[name]: x for name, x in zip(need, found, strict=True)}
        return tuple(gradients.get(name) for name in names[: len(ctx.needs_input_grad)])

    return way_back


def make_refusal(op: str) -> Any:
    """Make the gradient formula of a backward op, which there is none of."""

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError(
            f"{op}: a gradient of a gradient does not go through cuattn; differentiate once, or "
            "use torch's own attention where create_graph=True is wanted"
        )

    return refuse


def keep_nothing(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Keep nothing: there is no way back."""


for name in FORWARD:
    declare(name)
    function = make_kernel(name)
    library.impl(name, function, "CPU")
    library.impl(name, function, "CUDA")
    torch.library.register_fake(f"cuattn::{name}", make_shapes(name), lib=library)
    torch.library.register_autograd(
        f"cuattn::{FORWARD[name]}", make_way_back(name), setup_context=keep, lib=library
    )
    torch.library.register_autograd(
        f"cuattn::{name}", make_refusal(name), setup_context=keep_nothing, lib=library
    )
