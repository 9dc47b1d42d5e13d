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

from .._gradients import FORWARD
from .gradients import keep, keep_nothing, make_refusal, make_way_back
from .lookup import FUNCTIONAL


def make_function(op: str, save: Any, way_back: Any) -> Any:
    """Make an op anew as a Function, whose last input holds the options by name."""

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

    def function(*arguments: Any, **options: Any) -> Any:
        return Op.apply(*arguments, MappingProxyType(options))

    return function


for backward, forward in FORWARD.items():
    FUNCTIONAL[forward] = make_function(forward, keep, make_way_back(backward))
    FUNCTIONAL[backward] = make_function(backward, keep_nothing, make_refusal(backward))
