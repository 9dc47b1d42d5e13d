# SPDX-License-Identifier: Apache-2.0
"""The registered ops ``torch.ops.cuattn.attention`` and ``attention_varlen``, and who calls them.

Eager code calls the library at once; while torch traces (torch.compile, fake tensors) it calls the
op. Next: sdpa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import attention as run_attention
from .. import attention_varlen as run_attention_varlen
from .._options import OPS, OUTSIDE, ROWS, options_of

SCHEMAS = {
    "flag": "bool {name}={default}",
    "count": "int {name}={default}",
    "number": "float {name}={default}",
    "pair": "SymInt[2] {name}={default}",
    "word": 'str {name}="{default}"',
    "text": 'str {name}="{default}"',
}


TRACED = {
    op: [o for o in options_of(op, face="torch") if o.name not in OPS[op].positional] for op in ROWS
}
TENSORS = {op: tuple(o.name for o in TRACED[op] if o.kind == "array") for op in ROWS}
UNTRACED = {op: tuple(o.name for o in options_of(op, kinds=OUTSIDE)) for op in ROWS}


def schema(op: str) -> str:
    """Spell the options of an op: tensors first, as one with autograd takes them by place only."""
    words = [f"Tensor? {name}=None" for name in TENSORS[op]] + ["*"]
    for option in TRACED[op]:
        if option.kind == "array":
            continue
        default = list(option.default) if option.kind == "pair" else option.default
        word = SCHEMAS[option.kind].format(name=option.name, default=default)
        words.append(word if default is not None else word.replace(" ", "? ", 1))
    return ", ".join(words)


library = torch.library.Library("cuattn", "DEF")
library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {schema('attention')}, "
    "int[]? physical_layout=None) -> (Tensor, Tensor)"
)
library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {schema('attention_varlen')}) -> (Tensor, Tensor)"
)


def with_lse(result: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """Complete the results of an op, whose number is fixed: without lse, an empty one."""
    return result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))


def empty_out(q: Tensor, v: Tensor, physical_layout: Sequence[int] | None) -> Tensor:
    """Allocate what attention returns, its axes in memory as torch.empty_permuted takes them."""
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty_permuted(
        shape, physical_layout or tuple(range(len(shape))), dtype=q.dtype, device=q.device
    )


def attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Any,
    physical_layout: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Run the op on tensors with memory."""
    options.update(zip(TENSORS["attention"], tensors, strict=False))
    if physical_layout is not None:
        options["out"] = empty_out(q, v, physical_layout)
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
    **options: Any,
) -> Any:
    """Run the op on tensors with memory."""
    options.update(zip(TENSORS["attention_varlen"], tensors, strict=False))
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
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    batch, second, third = q.shape[:3]
    lse = (batch, third, second) if layout == "bshd" else (batch, second, third)
    return (
        empty_out(q, v, physical_layout),
        q.new_empty(lse if return_lse else (0,), dtype=torch.float32),
    )


def attention_varlen_shapes(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, return_lse: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tell what the op returns, from shapes alone."""
    lse = (q.shape[1], q.shape[0]) if return_lse else (0,)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse, dtype=torch.float32),
    )


def no_gradient(*args: Any, **kwargs: Any) -> None:
    """Refuse, when the forward pass is recorded for autograd, which has no way back."""
    raise NotImplementedError(
        "no autograd goes through cuattn yet; call it under torch.no_grad() or pass detached "
        "tensors"
    )


for name, kernel, shapes in (
    ("attention", attention_kernel, attention_shapes),
    ("attention_varlen", attention_varlen_kernel, attention_varlen_shapes),
):
    library.impl(name, kernel, "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"cuattn::{name}", shapes, lib=library)
    torch.library.register_autograd(
        f"cuattn::{name}", no_gradient, setup_context=no_gradient, lib=library
    )


def traced(q: Tensor) -> bool:
    """Whether torch wants to see an op: it compiles, or q stands for a tensor without memory."""
    return torch.compiler.is_compiling() or type(q) not in (Tensor, torch.nn.Parameter)


def op_arguments(op: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Sort keyword arguments into the op's optional tensors and the rest; refuse what ops lack."""
    rest = dict(options)
    for name in UNTRACED[op]:
        if rest.pop(name, None) is not None:
            raise NotImplementedError(
                f"{op}: {name} must be None while torch traces, because ops own their results and "
                "streams; leave it out or call cuattn outside the compiled region"
            )
    tensors = [rest.pop(name, None) for name in TENSORS[op]]
    return tensors, rest


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`cuattn.attention` for torch tensors, traceable by torch.compile without a graph break.

    Parameters
    ----------
    q, k, v, **options
        As in `cuattn.attention`; out, lse_out, workspace and stream only outside traced code.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention`.
    """
    if not traced(q):
        return run_attention(q, k, v, **options)
    tensors, rest = op_arguments("attention", options)
    out, lse = torch.ops.cuattn.attention(q, k, v, *tensors, **rest)
    return (out, lse) if rest.get("return_lse") else out


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
    """`cuattn.attention_varlen` for torch tensors, traceable by torch.compile.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
        As in `cuattn.attention_varlen`; out, lse_out, workspace and stream only outside traced
        code.

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
    if not traced(q):
        return run_attention_varlen(*arguments, **options)
    tensors, rest = op_arguments("attention_varlen", options)
    out, lse = torch.ops.cuattn.attention_varlen(*arguments, *tensors, **rest)
    return (out, lse) if rest.get("return_lse") else out
