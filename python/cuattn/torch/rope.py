# SPDX-License-Identifier: Apache-2.0
"""The gradient of a rotation of torch tensors: its transpose, which turns back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._rope import Turn
from .eager import rows_in_order


class Rotation(torch.autograd.Function):  # type: ignore[misc]
    """A rotation of x, turned back on the way back; of any order, as it is linear."""

    @staticmethod
    def forward(
        x: Tensor, turn: Turn, names: tuple[str, ...], copies: bool, *arrays: Any
    ) -> Tensor:
        """Rotate; `names` are those of the lengths behind the tables and positions.

        copies: x may lie as no kernel reads it, as gradients may.
        """
        cos, sin, positions, *lengths = arrays
        turn = turn._replace(lengths=turn.lengths | dict(zip(names, lengths, strict=True)))
        found: Tensor = turn.run(rows_in_order(x) if copies else x, cos, sin, positions)
        return found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, turn: Turn, *others: Any) -> Any:
        """Refuse what is mapped over, as without a gradient."""
        op = turn.op
        raise NotImplementedError(
            f"{op}: {turn.name} is batched by torch.func.vmap, which has no rule for {op}; make "
            f"the mapped axis a part of the batch, or call {op} in a loop"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the way back reads: no x."""
        _, ctx.turn, ctx.names, _, *arrays = inputs
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in arrays))
        ctx.others = [None if isinstance(a, Tensor) else a for a in arrays]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Turn the gradient back."""
        arrays = [o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        if not ctx.needs_input_grad[0]:
            return (None,) * len(ctx.needs_input_grad)
        turn = ctx.turn._replace(inverse=not ctx.turn.inverse)
        found = Rotation.apply(gradient, turn, ctx.names, True, *arrays)
        return found, *[None] * (len(ctx.needs_input_grad) - 1)


def rotate(
    turn: Turn, x: Tensor, cos: Any, sin: Any, positions: Any, out: Any, stream: Any
) -> Tensor:
    """Rotate a tensor whose gradient autograd wants."""
    for word, given in (("out", out), ("stream", stream)):
        if given is not None:
            raise NotImplementedError(
                f"{turn.op}: {word} must be None while torch differentiates {turn.name}; leave it "
                "out, or call it under torch.no_grad()"
            )
    arrays = {key: a for key, a in turn.lengths.items() if hasattr(a, "__dlpack__")}
    turn = turn._replace(lengths={k: a for k, a in turn.lengths.items() if k not in arrays})
    found: Tensor = Rotation.apply(
        x, turn, tuple(arrays), False, cos, sin, positions, *arrays.values()
    )
    return found
