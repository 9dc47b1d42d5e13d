# SPDX-License-Identifier: Apache-2.0
"""paged_attention on JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._options import PAGED_OPTIONS, PAGED_POSITIONAL
from .call import (
    Static,
    check_arrays,
    compiled,
    most_workspace,
    plain_window,
    possible_devices,
    present,
    refuse,
    register,
    score_attributes,
    shape_of,
    split_scales,
    static_of,
)

# Optional arrays in the order of their bits in the attribute `present`.
PAGED_OPTIONAL = ("alibi_slopes", "sinks", "k_scale", "v_scale")


@compiled
def run_paged(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler; results out, and lse if asked for."""
    options = dict(static)
    shapes = {name: shape_of(array) for name, array in arrays.items()}
    positional = tuple(shapes[name] for name in PAGED_POSITIONAL)
    given = {name: options.get(name, default) for name, default in PAGED_OPTIONS.items()}
    given.update({name: shapes[name] for name in PAGED_OPTIONAL if name in shapes})

    def workspace_bytes(device: int) -> int:
        plan = _core.explain_paged(0, positional, given, "float32", device, None)
        return plan["workspace_bytes"]

    memory = most_workspace(options["devices"], workspace_bytes)
    q = arrays["q"]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if options["return_lse"]:
        shape = (q.shape[0], q.shape[-2], *q.shape[1:-2])
        results.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if memory:
        results.append(jax.ShapeDtypeStruct((memory,), jnp.uint8))
    function = jax.ffi.ffi_call("cuattn_paged_attention", results, vmap_method="sequential")
    outputs = function(
        *(arrays[name] for name in (*PAGED_POSITIONAL, *PAGED_OPTIONAL) if name in arrays),
        present=present(PAGED_OPTIONAL, arrays),
        kv_dtype=np.int64(options["kv_dtype"] is not None),
        k_scale=np.float64(1.0 if options["k_scale"] is None else options["k_scale"]),
        v_scale=np.float64(1.0 if options["v_scale"] is None else options["v_scale"]),
        **score_attributes(options),
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
    scale, causal, window, softcap, alibi_slopes, sinks, k_scale, v_scale, kv_dtype
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
    op = "paged_attention"
    if plan is not None:
        raise NotImplementedError(
            f"{op}: plan must be None for JAX arrays, for which it is made inside the call; leave "
            "it out"
        )
    refuse(op, out=out, lse_out=lse_out, workspace=workspace, stream=stream)
    scale_arrays, scales = split_scales(k_scale, v_scale)
    arrays = check_arrays(
        op,
        dict(zip(PAGED_POSITIONAL, (q, k_cache, v_cache, block_tables, context_lens), strict=True)),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        **scale_arrays,
    )
    static = static_of(
        op,
        kv_layout=kv_layout,
        scale=scale,
        causal=causal,
        window=plain_window(window),
        softcap=softcap,
        kv_dtype=kv_dtype,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        backend=backend,
        devices=possible_devices(op, arrays),
        **scales,
    )
    register()
    results = run_paged(arrays, static)
    return tuple(results) if return_lse else results[0]
