# SPDX-License-Identifier: Apache-2.0
"""The registered ops ``torch.ops.cuattn.attention`` and ``attention_varlen``, and who calls them.

Eager code calls the library at once; while torch traces (torch.compile, fake tensors) or looks on,
it calls the op. Next: eager.py (gradients of eager code), gradients.py (of the ops), shapes.py,
sdpa.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as count_early_modes
from torch.utils import _python_dispatch as dispatch

from .. import attention as run_attention
from .. import attention_varlen as run_attention_varlen
from .._gradients import DIFFERENTIABLE
from .._options import OPS, OUTSIDE, ROWS, Option, options_of
from .._rope import TURNED, turned
from .eager import (
    CODES,
    DEFAULTS,
    WIDEST,
    attend,
    observed,
    on_16_bytes,
    out_dtype,
    refuse_float8,
    refuse_lost_gradients,
    refuse_wide,
)
from .eager import empty_out as empty_out
from .lookup import op_of
from .shapes import check

RUN: dict[str, Any] = {"attention": run_attention, "attention_varlen": run_attention_varlen}
SCHEMAS = {
    "flag": "bool {name}={default}",
    "count": "int {name}={default}",
    "length": "int {name}={default}",
    "number": "float {name}={default}",
    "pair": "SymInt[2] {name}={default}",
    "word": 'str {name}="{default}"',
    "text": 'str {name}="{default}"',
}


TRACED = {
    op: [o for o in options_of(op, face="torch") if o.name not in OPS[op].positional] for op in ROWS
}
IN_TENSORS = ("array", "scale")  # kinds of options that ops take as tensors
TENSORS = {op: tuple(o.name for o in TRACED[op] if o.kind in IN_TENSORS) for op in ROWS}
NO_TRUTH = {  # what numbers are, in the words of bindings/call/parse.h
    o.name: ("a number", "a float") if o.kind in ("number", "scale") else ("an integer", "an int")
    for o in options_of(*ROWS, kinds=("number", "scale", "count", "length", "pair"))
}
UNTRACED = {
    op: {o.name: o.default for o in options_of(op) if o not in TRACED[op]}
    | {o.name: None for o in options_of(op, kinds=OUTSIDE)}
    for op in ROWS
}
NAMED = {
    op: {o.name for o in TRACED[op]} | {"return_lse", "deterministic", "physical_layout"}
    for op in ROWS
}
SMALL = DIFFERENTIABLE[3:]  # beside q, k and v
AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast converts
# What the builtins of the library do not take themselves, or mean otherwise.
APART = {"deterministic", *(o.name for o in options_of(*ROWS, kinds=("refused", "rope")))}


def schema(options: Iterable[Option]) -> str:
    """Spell options of an op: tensors first, as one with autograd takes them by place only."""
    options = tuple(options)
    words = [f"Tensor? {o.name}=None" for o in options if o.kind in IN_TENSORS] + ["*"]
    for option in options:
        if option.kind in IN_TENSORS:
            continue
        default = list(option.default) if option.kind == "pair" else option.default
        word = SCHEMAS[option.kind].format(name=option.name, default=default)
        words.append(word if default is not None else word.replace(" ", "? ", 1))
    return ", ".join(words)


library = torch.library.Library("cuattn", "DEF")
library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {schema(TRACED['attention'])}, "
    "int[]? physical_layout=None, bool? deterministic=None) -> (Tensor, Tensor)"
)
library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {schema(TRACED['attention_varlen'])}, "
    "bool? deterministic=None) -> (Tensor, Tensor)"
)


def with_lse(result: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """Complete the results of an op, whose number is fixed: without lse, an empty one."""
    return result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))


def attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Any,
    physical_layout: Sequence[int] | None = None,
    deterministic: bool | None = None,
    **options: Any,
) -> Any:
    """Run the op on tensors with memory; `deterministic` is for the way back.

    Who traces does not know where they begin: no guard of torch.compile asks for offsets.
    """
    options.update(zip(TENSORS["attention"], tensors, strict=False))
    if physical_layout is not None:
        options["out"] = empty_out(q, v, physical_layout)
    q, k, v = on_16_bytes(q), on_16_bytes(k), on_16_bytes(v)
    return with_lse(run_attention(q, k, v, **options), q)


def attention_varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *tensors: Any,
    deterministic: bool | None = None,
    **options: Any,
) -> Any:
    """Run the op on tensors with memory; `deterministic` is for the way back."""
    options.update(zip(TENSORS["attention_varlen"], tensors, strict=False))
    q, k, v = on_16_bytes(q), on_16_bytes(k), on_16_bytes(v)
    result = run_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return with_lse(result, q)


def attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Any,
    layout: str = "bshd",
    physical_layout: Sequence[int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    options.update(zip(TENSORS["attention"], tensors, strict=False))
    check({"q": q, "k": k, "v": v, "layout": layout, **options})
    batch, second, third = q.shape[:3]
    lse = (batch, third, second) if layout == "bshd" else (batch, second, third)
    return (
        empty_out(q, v, physical_layout),
        q.new_empty(lse if return_lse else (0,), dtype=torch.float32),
    )


def attention_varlen_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Any,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    names = (*OPS["attention_varlen"].positional[3:], *TENSORS["attention_varlen"])
    options.update(zip(names, others, strict=False))
    check({"q": q, "k": k, "v": v, **options})
    lse = (q.shape[1], q.shape[0]) if return_lse else (0,)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype(q)),
        q.new_empty(lse, dtype=torch.float32),
    )


for name, kernel, shapes in (
    ("attention", attention_kernel, attention_shapes),
    ("attention_varlen", attention_varlen_kernel, attention_varlen_shapes),
):
    library.impl(name, kernel, "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"cuattn::{name}", shapes, lib=library)


def traced(q: Tensor) -> bool:
    """Whether torch wants to see an op: it compiles, watches, or q is a tensor without memory."""
    if torch.compiler.is_compiling() or type(q) not in (Tensor, torch.nn.Parameter) or q.is_meta:
        return True
    state = torch._C
    return bool(
        state._are_functorch_transforms_active()
        or state._len_torch_dispatch_stack()
        or state._is_tracing()
        or (dispatch._is_in_torch_dispatch_mode and count_early_modes())
    )


def differentiated(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether autograd wants the way back of a call."""
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    for name in SMALL:
        x = options.get(name)
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def tracked(x: Any) -> bool:
    """Whether autograd or a transform but vmap follows a tensor, at any level.

    A tensor that vmap maps over does not tell what of it requires grad beneath.
    """
    functorch = torch._C._functorch
    while isinstance(x, Tensor) and not x.requires_grad:
        if functorch.is_gradtrackingtensor(x) or functorch.is_functionaltensor(x):
            return True
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return isinstance(x, Tensor)


def differentiated_within(*arrays: Any) -> bool:
    """Whether a transform of torch.func around a call wants its way back, or autograd beneath it.

    What is not known counts as wanted.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return torch.is_grad_enabled() and any(map(tracked, arrays))


def autocasts(q: Tensor) -> bool:
    """Whether a region of autocast is around a call on q's device."""
    return bool(torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"))


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert q, k and v as torch's own attention does: in autocast's regions to its dtype.

    Codes and float64 stay as they are.
    """
    if q.is_meta or not autocasts(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.dtype in AUTOCAST else x for x in (q, k, v))
    return q, k, v


def with_dropout_state(q: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Draw the seed of a dropout that has none from torch's generator, on the device of q.

    So torch.manual_seed repeats it, a CUDA graph draws anew in every replay, and checkpointing
    finds the same.
    """
    if not options.get("dropout_p") or options.get("dropout_seed") is not None:
        return options
    kept = ("dropout_state", "stream")  # a stream of the caller's would not wait for the draw
    if options.get("dropout_offset") or any(options.get(name) is not None for name in kept):
        return options
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    return {**options, "dropout_state": torch.nn.functional.pad(seed, (0, 1))}


def without_untraced(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the options that ops lack, which must be at their defaults."""
    rest = dict(options)
    for name, default in UNTRACED[op].items():
        given = rest.pop(name, default)
        if given is None or (isinstance(given, str) and given == default):
            continue
        why = "ops own their results and streams"
        how = "leave it out, or call cuattn outside the compiled region and under torch.no_grad()"
        if name in ("block_tables", "kv_layout"):
            why = "ops take rows, not pages, and no gradient goes through a cache"
            how = f"call cuattn.gather_cache first, {how[14:]}"
        if name == "residual":
            why = "the pass that adds it is no op"
            how = f"write {op}(...) + residual"
        raise NotImplementedError(
            f"{op}: {name} must be {default!r} while torch traces or differentiates, because {why};"
            f" {how}"
        )
    return rest


def refuse_truths(op: str, options: dict[str, Any]) -> None:
    """Raise for True and False in the place of a number, which a schema takes for 1 and 0."""
    for name, value in options.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        for x in parts if name in NO_TRUTH else ():
            if isinstance(x, bool):
                what, instead = NO_TRUTH[name]
                raise TypeError(f"{op}: {name} must be {what}, got {x!r}; pass {instead}")


def as_tensor(value: Any, q: Tensor) -> Tensor | None:
    """Make a scale that is a number a tensor, which an op takes."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((1,), float(value), dtype=torch.float32, device=q.device)


def check_tensors(op: str, q: Any, k: Any, v: Any) -> None:
    """Refuse queries, keys and values of another library."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        return
    given = {"q": q, "k": k, "v": v}
    name, x = next((name, x) for name, x in given.items() if not isinstance(x, Tensor))
    raise TypeError(
        f"{op}: {name} must be a torch tensor, got {type(x).__name__}; pass "
        f"torch.as_tensor({name}), or arrays of one library to cuattn.{op}"
    )


def run_op(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any], wants_gradient: bool
) -> Any:
    """Call a registered op, or for a gradient that nobody looks on at what costs less.

    lse is made where a gradient is wanted, which starts from it.
    """
    q = arguments[0]
    if wants_gradient and q.dtype in CODES:
        refuse_float8(op)
    # Asked by a trace of torch.jit, sizes would be recorded, and by the check of the trace not.
    asks = wants_gradient and not torch.jit.is_tracing()
    if asks and (q.size(-1) > WIDEST or arguments[2].size(-1) > WIDEST):
        refuse_wide(op, q, arguments[2])
    if wants_gradient and not observed(arguments[0], (*arguments[1:3], *options.values())):
        if not UNTRACED[op].keys().isdisjoint(options):
            options = without_untraced(op, options)
        return attend(op, arguments, options)
    if torch.is_grad_enabled():
        refuse_lost_gradients(op, options)
    rest = without_untraced(op, options)
    unknown = [name for name in rest if name not in NAMED[op]]
    if unknown:
        raise TypeError(
            f"{op}: there is no argument {unknown[0]}; help(cuattn.{op}) lists what there is"
        )
    refuse_truths(op, rest)
    tensors = [as_tensor(rest.pop(name, None), q) for name in TENSORS[op]]
    wants_lse = rest.pop("return_lse", False)
    # A trace of torch.jit is checked by one without grad mode, and may be trained where it was not.
    recorded = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    watched = wants_gradient or recorded
    out, lse = op_of(op)(*arguments, *tensors, return_lse=wants_lse or watched, **rest)
    return (out, lse) if wants_lse else out


def is_plain(q: Tensor, options: dict[str, Any]) -> bool:
    """Whether the library itself may be called, which hands back what wants a gradient."""
    if traced(q) or autocasts(q):
        return False
    return not options or (APART.isdisjoint(options) and not options.get("dropout_p"))


def with_rotation(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Rotate q where that is asked for; no op does, so that torch.compile breaks its graph."""
    if not any(name in options for name in TURNED[op]):
        return arguments, options
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    names = OPS[op].positional
    given = {**DEFAULTS[op], **dict(zip(names, arguments, strict=True)), **options}
    q = turned(op, given)["q"]
    return (q, *arguments[1:]), {n: x for n, x in options.items() if n not in TURNED[op]}


def call(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do what the functions below do; of the options, `deterministic` is for the way back alone."""
    check_tensors(op, *arguments[:3])
    arguments = (*autocast(*arguments[:3]), *arguments[3:])
    arguments, options = with_rotation(op, arguments, options)
    q, k, v = arguments[:3]
    options = with_dropout_state(q, options)
    wants_gradient = differentiated(q, k, v, options)
    if wants_gradient or traced(q):
        wants_gradient |= differentiated_within(q, k, v, *map(options.get, SMALL))
        return run_op(op, arguments, options, wants_gradient)
    options.pop("deterministic", None)
    return RUN[op](*arguments, **options)


def differentiate(op: str, q: Tensor, k: Tensor, v: Tensor, *sizes: Any, **options: Any) -> Any:
    """Do what `cuattn.attention` cannot: run an op whose gradient autograd wants, or for a trace.

    Autocast's regions change nothing here, as they change nothing of the calls that it can.
    """
    check_tensors(op, q, k, v)
    if not options and not observed(q, (k, v)):
        return attend(op, (q, k, v, *sizes), options)
    arrays = (q, k, v, *map(options.get, SMALL))
    wants_gradient = differentiated(q, k, v, options) or differentiated_within(*arrays)
    return run_op(op, (q, k, v, *sizes), with_dropout_state(q, options), wants_gradient)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`cuattn.attention` for torch tensors: with gradients, and without a break in torch.compile.

    Gradients reach q, k, v, bias, sinks and alibi_slopes, from out and from lse. In autocast's
    regions q, k and v are converted to its dtype.

    Parameters
    ----------
    q, k, v, **options
        As in `cuattn.attention`; out, lse_out, workspace and stream only outside traced code and
        without a gradient. dropout_p without a seed draws one from torch's generator.
        deterministic=True asks for the same bits of the gradients each time, as in
        `cuattn.attention_backward`.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention`.
    """
    if is_plain(q, options):
        return run_attention(q, k, v, **options)
    return call("attention", (q, k, v), options)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Any:
    """`cuattn.attention_varlen` for torch tensors, as `attention` above is `cuattn.attention`.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
        As in `cuattn.attention_varlen`; out, lse_out, workspace, stream and block_tables only
        outside traced code and without a gradient. deterministic as above.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention_varlen`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention_varlen`.
    """
    arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_plain(q, options):
        return run_attention_varlen(*arguments, **options)
    return call("attention_varlen", arguments, options)
