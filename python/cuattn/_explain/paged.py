# SPDX-License-Identifier: Apache-2.0
"""Plans of paged attention, V1 and V2."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._options import OPS, PLACES, V2, fields_of, options_of
from .._other_names import told
from .devices import place, without_memory
from .plan import Plan

PAGED_VERSIONS = {"paged_attention": 0, "paged_attention_v1": 1, "paged_attention_v2": 2}
POSITIONAL = OPS["paged_attention"].positional
BUFFERS = tuple(option.name for option in options_of(*V2, kinds=("buffer",)))
KNOWN = {option.name: option for option in fields_of("paged") if option.kind != "buffer"}


def explain_paged(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for paged attention."""
    if len(arrays_or_shapes) != len(POSITIONAL):
        raise TypeError(
            f"explain: {op} takes {', '.join(POSITIONAL)}, got {len(arrays_or_shapes)} arguments"
        )
    # These do not enter the choice; the V2 buffers not given would be workspace.
    ignored: tuple[str, ...] = (*PLACES, "return_lse")
    if op == "paged_attention_v2":
        ignored += BUFFERS
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - set(KNOWN)
    if op != "paged_attention":
        unknown |= {"plan", "q_scale"} & set(given)
    if unknown:
        raise TypeError(f"explain: {op} has no option {told(op, unknown)}")
    shapes_on, asked = place(device, arrays_or_shapes[0])
    arguments = {option.name: option.default_of(op) for option in KNOWN.values()}
    arguments |= {**dict(zip(POSITIONAL, arrays_or_shapes, strict=True)), **given}
    arguments = {name: without_memory(value) for name, value in arguments.items()}
    return Plan(**_core.explain_paged(PAGED_VERSIONS[op], arguments, dtype, shapes_on, asked))
