# SPDX-License-Identifier: Apache-2.0
"""Which kernel a call runs and why; nothing is computed. Next: rows.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._call import is_torch
from .._gradients import FORWARD
from .._options import OPS, PLACES, ROWS
from .._other_names import told
from .._rope import TURNED, has_rope
from .backward import explain_backward
from .cascade import explain_cascade
from .devices import place
from .flex import explain_flex
from .flex_backward import explain_flex_backward
from .mla import MLA, explain_mla
from .paged import PAGED_VERSIONS, explain_paged
from .plan import Plan
from .residual import with_residual
from .rows import DEFAULTS, explain_rows

ROPE_LINE = "  rope: apply_rope rotates q before the kernel, into memory of q's library\n"
FLEX = ("flex_attention", "flex_attention_backward")
KNOWN = (*ROWS, *FORWARD, *PAGED_VERSIONS, "cascade_attention", *MLA, *FLEX)


def explain(
    op: str,
    *arrays_or_shapes: Any,
    device: int | str | dict[str, Any] | None = None,
    dtype: str = "float16",
    **options: Any,
) -> Plan:
    """Say which kernel a call would run, on this or on another GPU, and why. Nothing is computed.

    Parameters
    ----------
    op : {"attention", "attention_varlen", "attention_backward", "attention_varlen_backward", \
"paged_attention", "paged_attention_v1", "paged_attention_v2", "cascade_attention", "mla_decode", \
"mla_attention", "flex_attention", "flex_attention_backward"}
        The function that would be called.
    *arrays_or_shapes
        Its positional arguments; of V1 and V2 q, the caches, block_tables and context_lens. Any
        array may be a tuple of extents instead, which stands for a contiguous array of `dtype`;
        optional arrays in `options` too.
    device : optional
        None for the device of the arrays (of shapes: the first GPU, else the CPU), "cpu", a CUDA
        device number, the name of a GPU ("a100", "l4", "h100", ...) or a dict with major, minor,
        num_sms, smem_per_block_optin.
    dtype : str
        The dtype of arrays given as shapes.
    **options
        The options of the call. exp_sums, max_logits and tmp_out of paged_attention_v2 are not
        looked at: with them, workspace_bytes is an upper bound.

    Returns
    -------
    Plan
        Kernel, tile, splits, workspace bytes, the reason, and the ladder of rungs that led there.

    Raises
    ------
    ValueError, NotImplementedError
        As the call itself would.
    """
    if not isinstance(op, str):
        raise TypeError(
            f"explain: op must be the name of a function, one of {', '.join(map(repr, KNOWN))}, "
            f"got {type(op).__name__}; pass it before the arrays"
        )
    passes = TURNED.get(op, ())
    is_turned = "rope" in passes and has_rope(op, options)
    for name in passes:
        options.pop(name, None)  # they do not enter the choice
    if is_turned:
        plan = explain(op, *arrays_or_shapes, device=device, dtype=dtype, **options)
        words = "; before it apply_rope rotates q, into memory of q's library"
        return dataclasses.replace(plan, reason=plan.reason + words, ladder=plan.ladder + ROPE_LINE)
    residual = options.pop("residual", None) if op == "attention" else None
    if residual is not None:
        plan = explain(op, *arrays_or_shapes, device=device, dtype=dtype, **options)
        return with_residual(plan, op, arrays_or_shapes, residual, device, dtype)
    if op in PAGED_VERSIONS:
        return explain_paged(op, arrays_or_shapes, device, dtype, options)
    if op == "cascade_attention":
        return explain_cascade(arrays_or_shapes, device, dtype, options)
    if op in MLA:
        return explain_mla(op, arrays_or_shapes, device, dtype, options)
    if op == "flex_attention":
        return explain_flex(arrays_or_shapes, device, dtype, options)
    if op == "flex_attention_backward":
        return explain_flex_backward(arrays_or_shapes, device, dtype, options)
    if op in FORWARD:
        return explain_backward(op, arrays_or_shapes, device, dtype, options)
    if op not in ROWS:
        raise ValueError(f"explain: op must be one of {', '.join(map(repr, KNOWN))}, got {op!r}")
    names = OPS[op].positional
    if len(arrays_or_shapes) != len(names):
        raise TypeError(
            f"explain: {op} takes {', '.join(names)}, got {len(arrays_or_shapes)} arguments"
        )
    for name in PLACES:
        options.pop(name, None)  # they do not enter the choice
    unknown = set(options) - set(DEFAULTS)
    if unknown:
        raise TypeError(f"explain: {op} has no option {told(op, unknown)}")
    given = {**dict(zip(names, arrays_or_shapes, strict=True)), **options}
    seeds = (given.get(name) for name in ("dropout_seed", "dropout_state", "dropout_offset"))
    if given.get("dropout_p") and is_torch(given["q"]) and not any(x is not None for x in seeds):
        given["dropout_state"] = ("int64", 2)  # the call draws one
    return explain_rows(given, dtype, place(device, arrays_or_shapes[0]))
