# SPDX-License-Identifier: Apache-2.0
"""flex_attention in graphs of torch.compile: a registered op that finds its functions by a number.

The functions of a call are constants of the graph: they are kept here, and the graph holds their
number and a guard on which they are. Next: tracing.py, which has torch.compile trace `attend`.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._gradients import DIFFERENTIABLE, SOURCES
from .._kv_shapes import head_dim_of_values
from ..flex.block_mask import BlockMask
from ..flex.block_mask import create_block_mask as block_mask_builtin
from .ops import with_dropout_state

NAME = "flex_attention"
TENSORS = (
    *("q", "k", "v", "bias", "sinks", "alibi_slopes", "seqused_q", "seqused_k"),
    *("cu_seqlens_q", "cu_seqlens_k", "dropout_state", "block_tables"),
)
CAPTURES = (
    f"{NAME}: a mask_mod or score_mod that is made in compiled code must not capture a tensor or a "
    "number that changes from call to call; make it outside of that code"
)
kept: list[dict[str, Any]] = []  # by number; compiled graphs hold numbers as long as they live
recipes: list[Callable[[], BlockMask]] = []  # by number; they make the block masks of graphs
OF_TORCH = (
    f"{NAME}: a BlockMask of torch must be made outside of compiled code; make it there, or call "
    "cuattn.flex.create_block_mask"
)
OUTSIDE = (
    f"{NAME}: a BlockMask of torch, or from outside of compiled code, is in no graph of torch "
    "below 2.12; let compiled code make one by cuattn.flex.create_block_mask"
)
HOLDS_OBJECTS = torch.__version__ >= (2, 12)  # by whose identity graphs may be guarded
marks = itertools.count()


def mark(function: types.FunctionType) -> None:
    """Give a function a text of its own, which a graph can be guarded by."""
    given = getattr(function, "cuattn_mark", "")  # a wrapper may have that of what it wraps
    if not given.endswith(f" {id(function)}"):
        function.cuattn_mark = f"{next(marks)} {id(function)}"  # type: ignore[attr-defined]


def guard(x: Any) -> None:
    """Have another function trace anew, even one of the same code.

    One that is made in the graph has no mark: torch.compile guards what it captures, which must be
    constants. Where it is not, torch.compile finds no __get__, and would raise at `mark`.
    """
    if isinstance(x, types.FunctionType):
        if not hasattr(x, "__get__"):
            torch._dynamo.graph_break(msg=CAPTURES)
        mark(x)
        if getattr(x, "cuattn_mark", None) == "":  # the comparison is the guard
            raise AssertionError


def keep(
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    recipe: int | None,
    options: tuple[tuple[str, Any], ...],
) -> int:
    """Keep what of a call is no tensor, while a graph is made, and return its number.

    torch.compile guards which object a block mask is; one that is made in the graph comes by the
    number of its recipe. One of torch that is made there is no object yet, and gives -1.

    Raises
    ------
    NotImplementedError
        If the score function captures a tensor that requires a gradient: the graph does not see it.
    """
    from ..flex.trace import trace

    if type(block_mask).__name__ == "BlockMask" and not hasattr(block_mask, "mask_mod"):
        return -1
    functions = {"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask}
    arrays = [] if score_mod is None else trace(score_mod, is_score=True).arrays
    if any(getattr(x, "requires_grad", False) for x in arrays):
        raise NotImplementedError(
            f"{NAME}: under torch.compile score_mod must not capture a tensor that requires a "
            "gradient; put torch.compiler.disable around the call, or detach the tensor"
        )
    kept.append({**functions, **dict(options)})
    if recipe is not None:
        kept[-1]["block_mask"] = recipes[recipe]
    return len(kept) - 1


library = torch.library.Library("cuattn", "FRAGMENT")
ARGUMENTS = ", ".join(f"Tensor{'' if n in 'qkv' else '?'} {n}" for n in TENSORS)
library.define(f"flex_attention({ARGUMENTS}, int number) -> (Tensor, Tensor)")
library.define(
    f"flex_attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor dlse, {ARGUMENTS}, "
    "int number, bool[] need) -> Tensor[]"
)


def given(tensors: tuple[Any, ...], number: int) -> dict[str, Any]:
    """Return the arguments of a call by name; a block mask of the graph is made anew."""
    call = {n: x for n, x in zip(TENSORS, tensors, strict=True) if x is not None} | kept[number]
    recipe = call["block_mask"]
    return {**call, "block_mask": recipe()} if isinstance(recipe, functools.partial) else call


def run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the op on tensors with memory."""
    from ..flex.attention import flex_attention

    with torch.no_grad():
        return flex_attention(**given(arguments[:-1], arguments[-1]), return_lse=True)


def shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return empty results."""
    q, v, options = arguments[0], arguments[2], kept[arguments[-1]]
    layout, is_paged = options.get("layout", "bshd"), arguments[len(TENSORS) - 1] is not None
    kv_layout = options.get("kv_layout") if is_paged else None
    out = q.new_empty((*q.shape[:-1], head_dim_of_values(v.shape, kv_layout)))
    if q.dim() == 3:
        return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    batch, rows, heads = (q.shape[i] for i in ((0, 1, 2) if layout == "bshd" else (0, 2, 1)))
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    return out, lse


def needed(tensors: tuple[Any, ...], need: list[bool]) -> list[Any]:
    """List the tensors whose gradients are wanted."""
    return [x for x, wanted in zip(tensors[: len(DIFFERENTIABLE)], need, strict=True) if wanted]


def run_backward(*arguments: Any) -> list[Tensor]:
    """Run the backward op on tensors with memory."""
    from ..flex.backward import flex_attention_backward

    (dout, out, lse, dlse), tensors = arguments[:4], arguments[4:-2]
    number, need = arguments[-2:]
    names = tuple(n for n, wanted in zip(SOURCES, need, strict=True) if wanted)
    call = {n: x for n, x in given(tensors, number).items() if n != "num_splits"}
    call |= {"dout": dout.contiguous(), "out": out, "lse": lse, "dlse": dlse.contiguous()}
    with torch.no_grad():
        return list(flex_attention_backward(**call, need=names))


def backward_shapes(*arguments: Any) -> list[Tensor]:
    """Return empty gradients."""
    return [x.new_empty(x.shape) for x in needed(arguments[4:-2], arguments[-1])]


def save(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what the way back reads."""
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*output, *tensors)


def differentiate(ctx: Any, dout: Any, dlse: Any) -> Any:
    """Give the gradients that are wanted."""
    out, lse, *tensors = ctx.saved_tensors
    need = list(ctx.needs_input_grad[: len(DIFFERENTIABLE)])
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    op = torch.ops.cuattn.flex_attention_backward
    each = iter(op(dout, out, lse, dlse, *tensors, ctx.number, need))
    found = [next(each) if wanted else None for wanted in need]
    return (*found, *(None,) * (len(TENSORS) - len(DIFFERENTIABLE)), None)


for op, kernel, fake in (
    ("flex_attention", run, shapes),
    ("flex_attention_backward", run_backward, backward_shapes),
):
    library.impl(op, kernel, "CPU")
    library.impl(op, kernel, "CUDA")
    torch.library.register_fake(f"cuattn::{op}", fake, lib=library)
torch.library.register_autograd(
    "cuattn::flex_attention", differentiate, setup_context=save, lib=library
)


class MadeInGraph(BlockMask):
    """A block mask of a graph, which makes it anew whenever it runs; elsewhere made once."""

    def __init__(self, number: int):
        self.number = number

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        if "number" in held and "states" not in held:
            held.update(recipes[self.number]().__dict__)
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        """Be copied and pickled as what it makes: its number says nothing to another process."""
        return BlockMask, (self.mask_mod, self.shape, self.block_size, self.states)


def keep_recipe(mask_mod: Any, lengths: tuple[Any, ...], options: tuple[Any, ...]) -> int:
    """Keep how a block mask is made, and return its number."""
    recipes.append(functools.partial(block_mask_builtin, mask_mod, *lengths, **dict(options)))
    return len(recipes) - 1


# What torch.compile runs while it traces. tracing.py marks them: a decorator of torch._dynamo here
# would load that, which asks for this very module.
CONSTANT = (mark, keep, keep_recipe)


def create_block_mask(mask_mod: Any, *lengths: Any, **options: Any) -> Any:
    """Stand for `cuattn.flex.create_block_mask` in a graph."""
    guard(mask_mod)
    return MadeInGraph(keep_recipe(mask_mod, lengths, tuple(options.items())))


def attend(
    q: Any, k: Any, v: Any, *, score_mod: Any = None, mask_mod: Any = None, block_mask: Any = None,
    return_lse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Stand for `cuattn.flex_attention` in a graph."""
    for x in (score_mod, mask_mod):
        guard(x)
    options = with_dropout_state(q, options)
    others = tuple((n, x) for n, x in options.items() if n not in TENSORS)
    for name, x in others:
        if isinstance(x, Tensor):
            raise NotImplementedError(f"{NAME}: {name} must not be given under torch.compile")
    given = (x for x in (q, k, v, *options.values()) if isinstance(x, Tensor))
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if wants and options.get("block_tables") is not None:
        raise NotImplementedError(
            f"{NAME}: block_tables must not be given where a gradient is wanted, as keys in pages "
            "have none; pass k and v in rows, or call it under torch.no_grad()"
        )
    if isinstance(block_mask, MadeInGraph):
        number = keep(score_mod, mask_mod, None, block_mask.number, others)
    elif block_mask is not None and not HOLDS_OBJECTS:
        torch._dynamo.graph_break(msg=OUTSIDE)
    else:
        number = keep(score_mod, mask_mod, block_mask, None, others)
    if number < 0:
        torch._dynamo.graph_break(msg=OF_TORCH)
    tensors = (q, k, v, *(options.get(n) for n in TENSORS[3:]))
    out, lse = torch.ops.cuattn.flex_attention(*tensors, number)
    return (out, lse) if return_lse else out
