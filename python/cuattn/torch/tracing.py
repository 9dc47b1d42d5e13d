# SPDX-License-Identifier: Apache-2.0
"""What torch.compile traces in place of the builtins `cuattn.attention` and `attention_varlen`.

A call that the ops cannot hold (results given with `out=`, arrays of another library) breaks the
graph, as it did without this file, and runs as it stands. Next: ../_tracing.py, ops.py.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from .. import flex

# Not of cuattn itself, where ranges may be around them.
from ..attention import attention as attention_builtin
from ..attention import attention_varlen as attention_varlen_builtin
from ..flex.attention import flex_attention as flex_builtin
from ..flex.block_mask import create_block_mask
from . import flex_ops, ops

# Of cuattn.flex, what graphs may hold; the rest runs where one is broken, as torch.compile cannot
# trace what makes symbols of functions and numbers.
IN_GRAPHS = ("masks", "scores", "lengths")


def fits(op: str, q: Any, options: dict[str, Any]) -> bool:
    """Whether a registered op can hold a call."""
    if not isinstance(q, torch.Tensor):
        return False
    for name, default in ops.UNTRACED[op].items():
        if options.get(name, default) is not default and options[name] != default:
            return False
    return True


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Stand for `cuattn.attention`."""
    if not fits("attention", q, options):
        torch._dynamo.graph_break()
    return ops.differentiate("attention", q, k, v, **options)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    **options: Any,
) -> Any:
    """Stand for `cuattn.attention_varlen`."""
    if not fits("attention_varlen", q, options):
        torch._dynamo.graph_break()
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return ops.differentiate("attention_varlen", q, k, v, *sizes, **options)


def substitute() -> None:
    """Tell torch.compile, which is loaded."""
    for builtin, function in (
        (attention_builtin, attention),
        (attention_varlen_builtin, attention_varlen),
        (flex_builtin, flex_ops.attend),
        (create_block_mask, flex_ops.create_block_mask),
    ):
        torch.compiler.substitute_in_graph(builtin, skip_signature_check=True)(function)
    for constant in flex_ops.CONSTANT:
        torch._dynamo.assume_constant_result(constant)  # marks it
    for module in pkgutil.iter_modules(flex.__path__):
        if module.name not in IN_GRAPHS:
            torch._dynamo.trace_rules.add(f"{flex.__name__}.{module.name}")
