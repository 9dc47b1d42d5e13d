# SPDX-License-Identifier: Apache-2.0
"""The ops under torch.func.grad and what is built on it.

torch.func goes through an autograd.Function with a `setup_context`, not through the gradient
formula of a registered op, so each op is such a Function too. Next: lookup.py (picks),
gradients.py (the formulas), batching.py (vmap).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from .._gradients import FORWARD, POSITIONAL
from .._options import OPS
from .eager import OPTIONAL, refuse_tangents
from .gradients import keep, keep_nothing, make_refusal, make_way_back
from .lookup import FUNCTIONAL
from .ops import TENSORS


def make_function(op: str, names: tuple[str, ...], save: Any, way_back: Any) -> Any:
    """Make an op anew as a Function, whose last input holds the options by name.

    `names` are those of the arguments in front of it, by place.
    """

    class Op(torch.autograd.Function):  # type: ignore[misc]
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            *arguments, options = inputs
            return getattr(torch.ops.cuattn, op)(*arguments, **options)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *arguments, options = inputs
            ctx.count = len(arguments)
            save(ctx, arguments, options, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = way_back(ctx, *gradients)
            return (*found[: ctx.count], None)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> None:
            refuse_tangents(op, names, tangents)

    def function(*arguments: Any, **options: Any) -> Any:
        return Op.apply(*arguments, MappingProxyType(options))

    return function


for backward, forward in FORWARD.items():
    names = (*OPS[forward].positional, *TENSORS[forward])
    FUNCTIONAL[forward] = make_function(forward, names, keep, make_way_back(backward))
    names = (*POSITIONAL[backward], *OPTIONAL[backward])
    FUNCTIONAL[backward] = make_function(backward, names, keep_nothing, make_refusal(backward))
