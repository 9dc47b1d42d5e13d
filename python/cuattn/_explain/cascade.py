# SPDX-License-Identifier: Apache-2.0
"""Plans of cascade attention: of its prefix and of its pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._options import OPS, V2, options_of
from .._prefix import bias_shape, check_shapes, keys_in_window, shape_of
from .devices import place, without_memory
from .paged import explain_paged
from .plan import Plan
from .rows import explain_rows

POSITIONAL = OPS["cascade_attention"].positional


def explain_cascade(
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for both parts of cascade attention, which use one workspace in turn."""
    if len(arrays_or_shapes) != len(POSITIONAL):
        raise TypeError(
            f"explain: cascade_attention takes {', '.join(POSITIONAL)}, got "
            f"{len(arrays_or_shapes)} arguments"
        )
    unknown = {option.name for option in options_of(*V2, kinds=("length",))} & set(options)
    if unknown:
        raise TypeError(f"explain: cascade_attention has no option {', '.join(sorted(unknown))}")
    where = place(device, arrays_or_shapes[0])
    q, shared_k, shared_v = map(without_memory, arrays_or_shapes[:3])
    shape = shape_of(q)
    check_shapes("explain", shape, shape_of(shared_k), shape_of(shared_v))
    paged = (arrays_or_shapes[0], *arrays_or_shapes[3:])
    pages = explain_paged("paged_attention", paged, device, dtype, options)
    num_seqs, *queries, heads, head_dim = shape
    q_len = queries[0] if queries else 1
    window, slopes = (options.get(name) for name in ("window", "alibi_slopes"))
    window = window or (-1, -1)
    keys = keys_in_window(shape_of(shared_k)[0], window)
    bias = None
    if window[0] >= 0 or slopes is not None:
        axes = len(shape_of(without_memory(slopes))) if slopes is not None else 0
        bias = bias_shape(num_seqs, q_len, heads, keys, window[0] >= 0, axes)
    qkv = [reshaped(q, (1, num_seqs * q_len, heads, head_dim))]
    for array in (shared_k, shared_v):
        qkv.append(reshaped(array, (1, *shape_of(array)), keys))
    given: dict[str, Any] = {
        name: options[name] for name in ("scale", "softcap", "batch_invariant") if name in options
    }
    given |= {**dict(zip("qkv", qkv, strict=True)), "bias": bias, "return_lse": True}
    prefix = explain_rows(given, dtype, where)
    words = f"prefix, {keys} keys: {prefix.reason}"
    if bias is not None:
        words += (
            f"; its window and ALiBi are a {bias[0]} bias {list(bias[1:])} that q's library makes"
        )
    return dataclasses.replace(
        pages,
        kernel=f"{prefix.kernel} + {pages.kernel}",
        workspace_bytes=max(prefix.workspace_bytes, pages.workspace_bytes),
        reason=f"{words}; pages: {pages.reason}",
        ladder=f"prefix, {keys} keys\n{prefix.ladder}\npages\n{pages.ladder}",
    )


def reshaped(array: Any, shape: tuple[int, ...], rows: int | None = None) -> Any:
    """Give an array, or what stands for one, another shape; and keep its last rows of axis 1."""
    if not isinstance(array, tuple):
        array = array.reshape(*shape)
        return array if rows is None else array[:, shape[1] - rows :]
    if rows is not None:
        shape = (shape[0], rows, *shape[2:])
    return (*array[: len(array) - len(shape_of(array))], *shape)
