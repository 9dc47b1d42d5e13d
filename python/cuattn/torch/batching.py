# SPDX-License-Identifier: Apache-2.0
"""The ops under torch.func.vmap: the mapped axis becomes part of the batch, or a loop.

It is a loop where each example has a random mask, sinks or a gradient of a bias of its own, and for
ragged batches. Next: ops.py, gradients.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._gradients import FORWARD, POSITIONAL
from .._options import OPS
from . import gradients  # noqa: F401  defines the ops of the way back
from .eager import OPTIONAL
from .ops import TENSORS, library

OF_HEADS = ("sinks", "dropout_state")  # no axis of theirs is the batch
SMALL_GRADIENTS = ("dbias", "dsinks", "dslopes")

Arguments = tuple[tuple[Any, ...], tuple[int | None, ...]]


def closed_up(x: Tensor) -> Tensor:
    """Copy rows, lengths and states whose last axis vmap leaves with gaps: calls take none."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def one_by_one(op: Any, size: int, given: Arguments, options: dict[str, Any]) -> Any:
    """Call the op for each example and stack the results."""
    parts = [
        op(
            *(
                x if dim is None else closed_up(x.select(dim, i))
                for x, dim in zip(given[0], given[1], strict=True)
            ),
            **options,
        )
        for i in range(size)
    ]
    return tuple(map(torch.stack, zip(*parts, strict=True))), (0,) * len(parts[0])


def fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Make the mapped axis part of the first one."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return closed_up(x.reshape(-1, *x.shape[2:]))


def fold_broadcast(x: Tensor, dim: int | None, size: int, batch: int, axes: int) -> Tensor:
    """Do so where the batch may be missing, or be 1 of a bias; `axes` is the count with a batch."""
    if dim is not None:
        x = x.movedim(dim, 0)
        shape = (1,) * (axes - x.dim() + 1) + tuple(x.shape[1:])
        return fold(x.reshape(size, *shape).expand(size, batch, *shape[1:]), 0, size)
    if x.dim() < axes or (x.shape[0] == 1 and axes > 2):
        return x
    return fold(x, None, size)


def fold_scale(x: Tensor, dim: int | None, size: int, batch: int, heads: int) -> Tensor:
    """Do so with a scale: one number or one for each of `heads` is of all sequences."""
    if x.dim() - (dim is not None) > 1:
        return fold(x, dim, size)
    if dim is None:
        return x
    return x.movedim(dim, 0).reshape(size, 1, -1).expand(size, batch, heads).reshape(-1, heads)


def make_rule(op: str, names: tuple[str, ...]) -> Any:
    """Make the rule of a dense op, whose tensors are `names` by place."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
        function, size = getattr(torch.ops.cuattn, op), info.batch_size
        dims = tuple(in_dims[: len(arguments)])
        given = dict(zip(names, zip(arguments, dims, strict=True), strict=False))
        loops = any(given.get(name, (None, None))[1] is not None for name in OF_HEADS)
        loops |= bool(options.get("dropout_p")) or not {*options.get("need", ())}.isdisjoint(
            SMALL_GRADIENTS
        )
        if loops and size:
            return one_by_one(function, size, (arguments, dims), options)
        q, q_dim = given["q"]
        batch = q.movedim(q_dim, 0).shape[1] if q_dim is not None else q.shape[0]
        k, k_dim = given["k"]
        extents = [n for axis, n in enumerate(k.shape) if axis != k_dim]
        heads = extents[1 if options.get("layout") == "bhsd" else 2]
        folded = []
        for name, (x, dim) in given.items():
            if x is None or name in OF_HEADS:
                folded.append(x)
            elif name in ("bias", "alibi_slopes"):
                axes = 4 if name == "bias" else 2
                folded.append(fold_broadcast(x, dim, size, batch, axes))
            elif name.endswith("_scale"):
                folded.append(fold_scale(x, dim, size, batch, heads))
            else:
                folded.append(fold(x, dim, size))
        found = function(*folded, **options)
        unfold = [x.shape[:1] != (0,) or x.dim() > 1 for x in found]
        return tuple(
            x.reshape(size, batch, *x.shape[1:]) if apart else x
            for x, apart in zip(found, unfold, strict=True)
        ), tuple(0 if apart else None for apart in unfold)

    return rule


def make_loop(op: str) -> Any:
    """Make the rule of a ragged op."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
        dims = tuple(in_dims[: len(arguments)])
        function = getattr(torch.ops.cuattn, op)
        return one_by_one(function, info.batch_size, (arguments, dims), options)

    return rule


for name, forward in FORWARD.items():
    if forward == "attention":
        forward_names = (*OPS[forward].positional, *TENSORS[forward])
        rules = (
            make_rule(forward, forward_names),
            make_rule(name, (*POSITIONAL[name], *OPTIONAL[name])),
        )
    else:
        rules = make_loop(forward), make_loop(name)
    for op, rule in zip((forward, name), rules, strict=True):
        torch.library.register_vmap(f"cuattn::{op}", rule, lib=library)
