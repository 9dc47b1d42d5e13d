# SPDX-License-Identifier: Apache-2.0
"""paged_attention on JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import _core
from .._options import OPS, PLACES, XLA_OPS, options_of
from .call import (
    Static,
    attributes,
    check_arrays,
    compiled,
    is_array,
    most_workspace,
    plain_window,
    possible_devices,
    present,
    refuse,
    register,
    shape_of,
    static_of,
)

POSITIONAL = OPS["paged_attention"].positional
ARRAYS = tuple(options_of(*XLA_OPS["paged"], kinds=("array", "scale"), face="jax"))
NAMES = tuple(option.name for option in ARRAYS)  # scales may be numbers
CODES = ("float8_e4m3fn", "uint8")  # of queries, whose out is bfloat16
NUMBERS = tuple(o for o in options_of(*XLA_OPS["paged"], face="jax") if o.kind != "array")


def decode_results(
    q: jax.Array, options: Mapping[str, Any], workspace_bytes: Callable[[int], int]
) -> list[jax.ShapeDtypeStruct]:
    """Shapes of what a handler of decode writes: out, lse if asked for, workspace if it has one."""
    dtype = jnp.bfloat16 if str(q.dtype) in CODES else q.dtype
    results = [jax.ShapeDtypeStruct(q.shape, dtype)]
    if options["return_lse"]:
        shape = (q.shape[0], q.shape[-2], *q.shape[1:-2])
        results.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if memory := most_workspace(options["devices"], workspace_bytes):
        results.append(jax.ShapeDtypeStruct((memory,), jnp.uint8))
    return results


@compiled
def run_paged(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler; results out, and lse if asked for."""
    options = dict(static)
    given = {option.name: option.default_of("paged_attention") for option in (*NUMBERS, *ARRAYS)}
    given |= {name: value for name, value in options.items() if name in given}
    given |= {name: shape_of(array) for name, array in arrays.items()}

    def workspace_bytes(device: int) -> int:
        return _core.explain_paged(0, given, "float32", device, None)["workspace_bytes"]

    results = decode_results(arrays["q"], options, workspace_bytes)
    function = jax.ffi.ffi_call("cuattn_paged_attention", results, vmap_method="sequential")
    outputs = function(
        *(arrays[name] for name in (*POSITIONAL, *NAMES) if name in arrays),
        present=present(NAMES, arrays),
        **attributes(NUMBERS, options),
    )
    return list(outputs)[: 1 + options["return_lse"]]


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    kv_layout: str = "nhd",
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    kv_dtype: str | None = None,
    plan: None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: None = None,
    lse_out: None = None,
    workspace: None = None,
    backend: str = "auto",
    stream: None = None,
) -> Any:
    """`cuattn.paged_attention` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, context_lens, kv_layout
        As in `cuattn.paged_attention`.
    scale, causal, window, softcap, alibi_slopes, sinks, q_scale, k_scale, v_scale, kv_dtype
        As in `cuattn.paged_attention`; the numbers are static under jax.jit, where a scale that
        changes is better an array.
    plan
        None: it is made inside the call.
    num_splits, batch_invariant, return_lse, backend
        As in `cuattn.paged_attention`.
    out, lse_out, workspace, stream
        None: memory and stream belong to XLA.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.paged_attention`.

    Raises
    ------
    ValueError, TypeError
        As in `cuattn.paged_attention`, while tracing.
    NotImplementedError
        A combination without kernel, a gradient, or an argument that belongs to XLA.
    """
    op, arguments = "paged_attention", locals()
    if plan is not None:
        raise NotImplementedError(
            f"{op}: plan must be None for JAX arrays, for which it is made inside the call; leave "
            "it out"
        )
    refuse(op, **{name: arguments[name] for name in PLACES})
    optional = {name: arguments[name] for name in NAMES}
    numbers = {o.name for o in ARRAYS if o.kind == "scale" and not is_array(optional[o.name])}
    required = {name: arguments[name] for name in POSITIONAL}
    given = {name: value for name, value in optional.items() if name not in numbers}
    arrays = check_arrays(op, required, **given)
    options = {o.name: arguments[o.name] for o in NUMBERS}
    options |= {name: None for name in given if name in options}
    options["window"] = plain_window(options["window"])
    static = static_of(op, **options, devices=possible_devices(op, arrays))
    register()
    results = run_paged(arrays, static)
    return tuple(results) if return_lse else results[0]
