# SPDX-License-Identifier: Apache-2.0
"""Plans of paged attention, V1 and V2."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._options import PAGED_OPTIONS, PAGED_POSITIONAL, PAGED_VERSIONS
from .devices import place, without_memory
from .plan import Plan


def explain_paged(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for paged attention."""
    if len(arrays_or_shapes) != len(PAGED_POSITIONAL):
        raise TypeError(
            f"explain: {op} takes {', '.join(PAGED_POSITIONAL)}, got "
            f"{len(arrays_or_shapes)} arguments"
        )
    # These do not enter the choice; the V2 buffers not given would be workspace.
    ignored = ("out", "lse_out", "workspace", "stream", "return_lse")
    if op == "paged_attention_v2":
        ignored += ("exp_sums", "max_logits", "tmp_out")
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - set(PAGED_OPTIONS)
    if op != "paged_attention":
        unknown |= {"plan"} & set(given)
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    layout = {} if op == "paged_attention" else {"kv_layout": "vllm"}
    shapes_on, asked = place(device, arrays_or_shapes[0])
    merged = {**PAGED_OPTIONS, **layout, **given}
    merged = {name: without_memory(value) for name, value in merged.items()}
    arrays = tuple(without_memory(array) for array in arrays_or_shapes)
    version = PAGED_VERSIONS[op]
    return Plan(**_core.explain_paged(version, arrays, merged, dtype, shapes_on, asked))
