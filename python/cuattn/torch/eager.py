# SPDX-License-Identifier: Apache-2.0
"""Gradients of eager calls: an autograd.Function that calls the library itself, both ways.

A registered op with a gradient costs more on the host than all that cuattn does in a step: torch
looks up its schema and fills in its defaults in Python, call by call. So ops are for those who look
on, which `observed` tells. Next: ops.py, gradients.py (the same for the ops).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as count_early_modes
from torch.utils import _python_dispatch as dispatch

from .. import _core
from .. import attention as run_attention
from .. import attention_varlen as run_attention_varlen
from .._gradients import DIFFERENTIABLE, FORWARD, GRADIENTS, POSITIONAL, forward_options
from .._options import OPS, options_of
from .lookup import op_of

RUN: dict[str, Any] = {"attention": run_attention, "attention_varlen": run_attention_varlen}
BACKWARD = {forward: op for op, forward in FORWARD.items()}
SIZES = {op: OPS[op].positional[3:] for op in RUN}
TAKEN = {op: {o.name for o in forward_options(BACKWARD[op])} | {*SIZES[op]} for op in RUN}
NUMBERS = {o.name for op in RUN for o in options_of(op) if o.kind in ("number", "scale")}
DEFAULTS = {op: {o.name: o.default_of(op) for o in options_of(op)} for op in RUN}
ROWS = GRADIENTS[:3]
ALL_ROWS = (True, True, True, False)  # ctx.needs_input_grad: q, k, v, call
SAVED = ("q", "k", "v", "out", "lse")
PLAIN = (Tensor, torch.nn.Parameter)
CODES = (torch.float8_e4m3fn, torch.int8)  # of queries, with scales
WIDEST = 256  # columns of a head that has a backward pass
# By place in the schema of a backward op: the arrays among the options, dlse behind them.
OPTIONAL = {
    op: (*(o.name for o in forward_options(op) if o.kind == "array"), "dlse") for op in FORWARD
}


def observed(q: Any, others: Iterable[Any] = ()) -> bool:
    """Whether torch wants to see an op: it traces, a mode or transform looks on, or a subclass."""
    if torch.compiler.is_compiling() or type(q) not in PLAIN or not (q.is_cuda or q.is_cpu):
        return True
    for x in others:
        if isinstance(x, Tensor) and type(x) not in PLAIN:
            return True
    state = torch._C
    return bool(
        state._len_torch_dispatch_stack()
        or state._are_functorch_transforms_active()
        or state._is_tracing()
        or (dispatch._is_in_torch_dispatch_mode and count_early_modes())  # of any thread; of this
    )


def refuse_float8(op: str) -> None:
    """Raise for a gradient that is wanted of float8 arrays."""
    raise NotImplementedError(
        f"{op}: no gradient goes through float8_e4m3fn; compute with bfloat16 where one is wanted, "
        "or call it under torch.no_grad()"
    )


def refuse_lost_gradients(op: str, options: dict[str, Any]) -> None:
    """Raise for a number or scale of codes that requires grad, as it would get none."""
    for name, x in options.items():
        if name in NUMBERS and isinstance(x, Tensor) and x.requires_grad:
            instead = "multiply q by it, or pass" if name == "scale" else "pass"
            plain = "detach" if name.endswith("_scale") else "item"
            raise NotImplementedError(
                f"{op}: {name} requires grad, but no gradient goes through it; {instead} "
                f"{name}.{plain}()"
            )


def refuse_wide(op: str, q: Tensor, v: Tensor) -> None:
    """Raise for a gradient that is wanted of wide heads."""
    raise NotImplementedError(
        f"{op}: no gradient goes through heads of more than {WIDEST} columns, got head_dim "
        f"{q.size(-1)} and head_dim_v {v.size(-1)}; call it under torch.no_grad()"
    )


def refuse_tangents(op: str, names: Iterable[str], tangents: Iterable[Any]) -> None:
    """Raise for an array of torch's forward mode, whose tangent no op carries on."""
    for name, tangent in zip(names, tangents, strict=False):
        if tangent is not None:
            raise NotImplementedError(
                f"{op}: {name} has a tangent of forward-mode differentiation, which no op of "
                "cuattn carries on; use reverse mode (backward, torch.func.vjp), or pass "
                f"torch.autograd.forward_ad.unpack_dual({name}).primal"
            )


def out_dtype(q: Tensor) -> torch.dtype:
    """Tell the dtype of a result; codes as queries, and bytes that hold them, give bfloat16."""
    is_code = q.dtype in (*CODES, torch.uint8)
    return torch.bfloat16 if is_code else q.dtype


def empty_out(q: Tensor, v: Tensor, physical_layout: Sequence[int] | None) -> Tensor:
    """Allocate what attention returns, its axes in memory as torch.empty_permuted takes them."""
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty_permuted(
        shape, physical_layout or tuple(range(len(shape))), dtype=out_dtype(q), device=q.device
    )


def rows_in_order(x: Tensor) -> Tensor:
    """Copy what no kernel reads: a gradient that was expanded or lies across its rows."""
    if x.data_ptr() % 16 != 0:
        return x.contiguous()
    if x.is_contiguous():
        return x
    step = max(1, 16 // x.element_size())
    aligned = all(stride % step == 0 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and aligned else x.contiguous()


def on_16_bytes(x: Tensor) -> Tensor:
    """Copy rows that begin off 16 bytes, which no CUDA kernel reads."""
    if not x.is_cuda or x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run_backward_op(
    op: str, arrays: dict[str, Any], need: Sequence[str], options: dict[str, Any]
) -> list[Tensor]:
    """Call a registered backward op; returns what `need` names, in the order of GRADIENTS."""
    found = op_of(op)(
        *(arrays[name] for name in POSITIONAL[op]),
        *(arrays.get(name) for name in OPTIONAL[op]),
        need=need,
        **options,
    )
    return [x for name, x in zip(GRADIENTS, found, strict=True) if name in need]


def run_forward(ctx: Any, q: Any, k: Any, v: Any, call: tuple[Any, ...]) -> Any:
    """Run an op, and keep all that the way back needs."""
    op, sizes, options, wants_lse, deterministic = call
    out, lse = RUN[op](q, k, v, *sizes, return_lse=True, **options)
    names, tensors, numbers = list(SAVED), [q, k, v, out, lse], {}
    if deterministic is not None:
        numbers["deterministic"] = deterministic
    taken = TAKEN[op]
    for name, x in (*options.items(), *zip(SIZES[op], sizes, strict=True)):
        if name in taken:
            if isinstance(x, Tensor):
                names.append(name)
                tensors.append(x)
            else:
                numbers[name] = x
    ctx.call = BACKWARD[op], names, numbers
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    return (out, lse) if wants_lse else out


def run_backward(ctx: Any, dout: Any, dlse: Any, need: Sequence[str]) -> Sequence[Tensor]:
    """Give the gradients that are named."""
    op, names, numbers = ctx.call
    arguments = dict(zip(names, ctx.saved_tensors, strict=True))
    arguments["dout"] = torch.zeros_like(arguments["out"]) if dout is None else dout
    arguments["dlse"] = dlse
    arguments["need"] = need
    return differentiate(op, arguments, numbers)


class CuattnAttention(torch.autograd.Function):  # type: ignore[misc]
    """attention or attention_varlen of plain tensors, with the gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: tuple[Any, ...]) -> Any:
        """Run the call."""
        return run_forward(ctx, q, k, v, call)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        """Give the gradients that are wanted."""
        if dout is None and dlse is None:
            return None, None, None, None
        wanted = ctx.needs_input_grad
        if wanted == ALL_ROWS:
            dq, dk, dv = run_backward(ctx, dout, dlse, ROWS)
            return dq, dk, dv, None
        found = iter(run_backward(ctx, dout, dlse, tuple(itertools.compress(ROWS, wanted))))
        return tuple(next(found) if want else None for want in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """Refuse forward mode."""
        refuse_tangents(FORWARD[ctx.call[0]], DIFFERENTIABLE, tangents)


class CuattnScored(torch.autograd.Function):  # type: ignore[misc]
    """The same with bias, sinks and alibi_slopes, each a tensor or None, and their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, b: Any, s: Any, a: Any, call: Any) -> Any:
        """Run the call, whose options have the three by name."""
        return run_forward(ctx, q, k, v, call)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        """Give the gradients that are wanted."""
        wanted = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(wanted)
        found = iter(run_backward(ctx, dout, dlse, tuple(itertools.compress(GRADIENTS, wanted))))
        return tuple(next(found) if want else None for want in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """Refuse forward mode."""
        refuse_tangents(FORWARD[ctx.call[0]], DIFFERENTIABLE, tangents)


def differentiate(op: str, arguments: dict[str, Any], numbers: dict[str, Any]) -> Sequence[Tensor]:
    """Run a backward pass: by the op for who looks on, and for who differentiates it again."""
    if torch.are_deterministic_algorithms_enabled():
        numbers = {**numbers, "deterministic": True}
    dout, dlse = arguments["dout"], arguments["dlse"]
    batched = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched=True makes these
    looked_at = observed(dout) or batched(dout) or (dlse is not None and batched(dlse))
    if torch.is_grad_enabled() or looked_at:
        options = {name: x for name, x in numbers.items() if name not in POSITIONAL[op]}
        return run_backward_op(op, numbers | arguments, arguments["need"], options)
    arguments["dout"] = rows_in_order(dout)
    arguments["dlse"] = None if dlse is None else dlse.contiguous()
    arguments.update(numbers)
    found: Sequence[Tensor] = _core.attention_backward(arguments)
    return found


# As torch.autograd.Function.apply, but for functorch, which `observed` looks for.
apply = super(torch.autograd.Function, CuattnAttention).apply
apply_scored = super(torch.autograd.Function, CuattnScored).apply


def attend(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an op whose gradient autograd wants, and nobody else looks on."""
    q, k, v, *sizes = arguments
    if q.dtype in CODES:
        refuse_float8(op)
    if q.size(-1) > WIDEST or v.size(-1) > WIDEST:
        refuse_wide(op, q, v)
    if not options:
        return apply(q, k, v, (op, sizes, options, False, None))
    refuse_lost_gradients(op, options)
    defaults = DEFAULTS[op]  # cuattn.attention hands on every option it has
    given = {n: x for n, x in options.items() if x is not None and x is not defaults.get(n)}
    find, wants_lse = given.get, given.pop("return_lse", False)
    deterministic = given.pop("deterministic", None)
    layout = given.pop("physical_layout", None)
    if layout is not None:
        given["out"] = empty_out(q, v, layout)
    call = op, sizes, given, wants_lse, deterministic
    bias, sinks, slopes = find("bias"), find("sinks"), find("alibi_slopes")
    if bias is None and sinks is None and slopes is None:
        return apply(q, k, v, call)
    return apply_scored(q, k, v, bias, sinks, slopes, call)
