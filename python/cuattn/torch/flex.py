# SPDX-License-Identifier: Apache-2.0
"""Gradients of flex_attention of torch tensors: an autograd.Function around both of its passes.

Next: ../flex/attention.py, which comes here where a gradient is wanted; ../flex/backward.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._gradients import GRADIENT_OF
from .._options import PLACES
from ..flex.memo import TENSORS, mark_of
from ..flex.trace import Traced, is_array, trace
from .eager import observed, refuse_lost_gradients, refuse_tangents

NAME = "flex_attention"


class Call(NamedTuple):
    """A call apart from the tensors that it is differentiated by."""

    functions: dict[str, Any]  # score_mod, mask_mod, block_mask
    options: dict[str, Any]
    names: tuple[str, ...]  # of the tensors, which captured arrays follow
    arrays: tuple[Tensor, ...]  # captured, as the functions hold them
    read: tuple[Tensor, ...]  # without a gradient, by both passes
    held: tuple[tuple[Any, bytes], ...]  # captured arrays that may be written, and what they held
    masks: tuple[tuple[Any, Traced], ...]  # mask functions, and as they were traced


class Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients as they were computed, of which there is none by the tensors they were made of.

    torch's `once_differentiable` lets them pass for constants where dout is one.
    """

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *tensors: Tensor | None) -> Any:
        """Hand them on."""
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(
            f"{NAME}_backward: a gradient of a gradient does not go through cuattn; differentiate "
            "once, or use torch's own flex_attention where create_graph=True is wanted"
        )


class FlexAttention(torch.autograd.Function):  # type: ignore[misc]
    """flex_attention of plain tensors, with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        """Run the call, and keep its tensors."""
        from ..flex.attention import flex_attention

        given = dict(zip(call.names, tensors, strict=False))
        options = {**call.options, "return_lse": True}
        out, lse = flex_attention(**given, **call.functions, **options)
        ctx.call = call
        ctx.save_for_backward(out, lse, *tensors, *call.read)  # which refuses what was written
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        """Give the gradients that are wanted, which are constants to nobody."""
        call, (out, lse, *saved) = ctx.call, ctx.saved_tensors
        require_the_same(call)
        tensors = saved[: len(saved) - len(call.read)]
        if dout is None and dlse is None:
            return (None,) * (1 + len(tensors))
        with torch.no_grad():
            found = FlexAttention.gradients(ctx, dout, dlse, out, lse, tensors)
        if not torch.is_grad_enabled():
            return (None, *found)
        there = tuple(x for x in found if x is not None)
        each = iter(Once.apply(there, dout, dlse, *tensors))
        return (None, *(None if x is None else next(each) for x in found))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> None:
        """Refuse forward mode."""
        refuse_tangents(NAME, ctx.call.names, tangents)

    @staticmethod
    def gradients(
        ctx: Any, dout: Any, dlse: Any, out: Tensor, lse: Tensor, tensors: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Compute those that are wanted."""
        from ..flex.backward import flex_attention_backward

        call = ctx.call
        for x in (dout, dlse):
            if x is not None and torch._C._functorch.is_legacy_batchedtensor(x):
                raise NotImplementedError(
                    f"{NAME}_backward: is_grads_batched must be False; call autograd.grad in a loop"
                )
        given: dict[str, Any] = dict(zip(call.names, tensors, strict=False))
        wanted = ctx.needs_input_grad[1 : 1 + len(call.names)]
        need = tuple(GRADIENT_OF[n] for n, want in zip(call.names, wanted, strict=True) if want)
        options = {n: x for n, x in call.options.items() if n not in ("return_lse", "num_splits")}
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = not torch.is_deterministic_algorithms_warn_only_enabled()
        found = flex_attention_backward(
            torch.zeros_like(out) if dout is None else dout.contiguous(),
            out=out,
            lse=lse,
            need=need or ("dv",),
            arrays=call.arrays,
            dlse=dlse,
            **given,
            **call.functions,
            **options,
        )
        each = iter(found)
        return (
            *(next(each) if want else None for want in wanted),
            *(found.darrays if call.arrays else ()),
        )


def require_the_same(call: Call) -> None:
    """Refuse a way back over other arrays and numbers than the forward pass had.

    Autograd says so of tensors; numbers are within the functions, which are traced already, but
    for a block mask's and the mask function beside it, which are known by what they are.
    """
    for array, then in call.held:
        if mark_of(array) != then:
            library = type(array).__module__.partition(".")[0]
            raise RuntimeError(
                f"{NAME}: captured arrays must be on the way back what they were in the forward "
                f"pass, got one of {library} of shape {tuple(array.shape)} that was written since; "
                "capture a new array in each call"
            )
    for function, before in call.masks:
        now = trace(function)
        if (now.key(), now.scalars) != (before.key(), before.scalars):
            raise RuntimeError(
                f"{NAME}: mask_mod must be on the way back what it was in the forward pass, got "
                "other numbers; bind them as its defaults"
            )


def attend(arguments: dict[str, Any], functions: dict[str, Any], score: Any) -> Any:
    """Run a call of which a gradient is wanted; its functions are traced, for both passes.

    Raises
    ------
    NotImplementedError
        If out, lse_out, workspace, stream or block_tables is given, or torch traces or transforms
        the call.
    """
    for name in PLACES:
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f"{NAME}: {name} must not be given where a gradient is wanted, as autograd keeps "
                "what it points to; leave it out, or call it under torch.no_grad()"
            )
    if arguments.get("block_tables") is not None:
        raise NotImplementedError(
            f"{NAME}: block_tables must not be given where a gradient is wanted, as keys in pages "
            "have none; pass k and v in rows, or call it under torch.no_grad()"
        )
    if observed(arguments["q"], arguments.values()):
        raise NotImplementedError(
            f"{NAME}: gradients are of plain tensors in eager code, got a call that torch.compile, "
            "torch.func or a tensor subclass looks on; call it outside, or under torch.no_grad()"
        )
    captured = [] if score is None else score.arrays
    refuse_lost_gradients(NAME, arguments)
    names = tuple(n for n in GRADIENT_OF if isinstance(arguments.get(n), Tensor))
    arrays = tuple(x for x in captured if isinstance(x, Tensor) and x.requires_grad)
    options = {n: x for n, x in arguments.items() if n not in names}
    tensors = [arguments[name] for name in names]
    blocks = functions["block_mask"]
    given = (functions["mask_mod"], getattr(blocks, "mask_mod", None))
    masks = tuple((f, trace(f)) for f in given if f is not None)
    lists = (getattr(blocks, name, None) for name in TENSORS)
    of_masks = (x for _, mask in masks for x in mask.arrays)
    others = (*options.values(), *captured, *of_masks, *lists)
    read = tuple(x for x in others if isinstance(x, Tensor) and not x.requires_grad)
    held = tuple((x, mark_of(x)) for x in others if is_array(x) and not isinstance(x, Tensor))
    call = Call(functions, options, names, arrays, read, held, masks)
    out, lse = FlexAttention.apply(call, *tensors, *arrays)
    return (out, lse) if arguments.get("return_lse") else out
