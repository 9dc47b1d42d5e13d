# SPDX-License-Identifier: Apache-2.0
"""The gradient of a rotation of torch tensors: its transpose, which turns back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _core
from .eager import rows_in_order


class Turn(NamedTuple):
    """What a rotation is told beside its arrays."""

    op: str
    name: str  # of the array that is rotated
    interleaved: bool
    inverse: bool
    offset: int
    lengths: dict[str, Any]  # that are no arrays
    names: tuple[str, ...]  # of those that are
    copies: bool = False  # an array that no kernel reads, as gradients may be

    def run(self, x: Tensor, cos: Any, sin: Any, positions: Any, *lengths: Any) -> Tensor:
        """Rotate x, which is written nowhere."""
        given = {**self.lengths, **dict(zip(self.names, lengths, strict=True))}
        found: Tensor = _core.apply_rope(
            self.op, self.name, x, cos, sin, positions, self.interleaved, self.inverse,
            self.offset, given, None, None,
        )  # fmt: skip
        return found


class Rotation(torch.autograd.Function):  # type: ignore[misc]
    """A rotation of x, turned back on the way back; of any order, as it is linear."""

    @staticmethod
    def forward(x: Tensor, turn: Turn, *arrays: Any) -> Tensor:
        """Rotate."""
        return turn.run(rows_in_order(x) if turn.copies else x, *arrays)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, turn: Turn, *arrays: Any) -> Any:
        """Refuse what is mapped over, as without a gradient."""
        op = turn.op
        raise NotImplementedError(
            f"{op}: {turn.name} is batched by torch.func.vmap, which has no rule for {op}; make "
            f"the mapped axis a part of the batch, or call {op} in a loop"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the way back reads: no x."""
        _, ctx.turn, *arrays = inputs
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in arrays))
        ctx.others = [None if isinstance(a, Tensor) else a for a in arrays]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Turn the gradient back."""
        arrays = [o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        if not ctx.needs_input_grad[0]:
            return (None,) * (2 + len(arrays))
        turn = ctx.turn._replace(inverse=not ctx.turn.inverse, copies=True)
        return Rotation.apply(gradient, turn, *arrays), None, *[None] * len(arrays)


def rotate(
    op: str,
    name: str,
    x: Tensor,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: bool,
    inverse: bool,
    offset: int,
    lengths: dict[str, Any],
    out: Any,
    stream: Any,
) -> Tensor:
    """Rotate a tensor whose gradient autograd wants."""
    for word, given in (("out", out), ("stream", stream)):
        if given is not None:
            raise NotImplementedError(
                f"{op}: {word} must be None while torch differentiates {name}; leave it out, or "
                "call it under torch.no_grad()"
            )
    arrays = {key: a for key, a in lengths.items() if hasattr(a, "__dlpack__")}
    others = {key: a for key, a in lengths.items() if key not in arrays}
    turn = Turn(op, name, interleaved, inverse, offset, others, tuple(arrays))
    found: Tensor = Rotation.apply(x, turn, cos, sin, positions, *arrays.values())
    return found
