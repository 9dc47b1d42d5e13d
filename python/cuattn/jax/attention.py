# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._arrays import find_cublas
from .._checks import check_ragged
from .._options import OPTIONS
from .call import (
    LAYOUTS,
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
    static_of,
)

# Optional arrays in the order of their bits in the attribute `present`.
OPTIONAL = (
    "alibi_slopes",
    "sinks",
    "bias",
    "seqused_q",
    "seqused_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "block_tables",
)


def workspace_of(arrays: dict[str, jax.Array], options: dict[str, Any]) -> int:
    """Validate by the library's own rules, from shapes alone; return the bytes of workspace."""
    shapes = {name: shape_of(array) for name, array in arrays.items()}
    given = {name: options.get(name, default) for name, default in OPTIONS.items()}
    given.update({name: shapes.get(name) for name in OPTIONAL})

    def workspace_bytes(device: int) -> int:
        plan = _core.explain(shapes["q"], shapes["k"], shapes["v"], given, "float32", device, None)
        return plan["workspace_bytes"]

    return most_workspace(options["devices"], workspace_bytes)


@compiled
def run_attention(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the attention handler; results out, and lse if asked for."""
    options = dict(static)
    workspace_bytes = workspace_of(arrays, options)
    q, v = arrays["q"], arrays["v"]
    ragged, paged = options["op"] == "attention_varlen", "block_tables" in arrays
    head_dim_v = v.shape[-2] if paged and options["kv_layout"] == "vllm" else v.shape[-1]
    results = [jax.ShapeDtypeStruct((*q.shape[:-1], head_dim_v), q.dtype)]
    if options["return_lse"]:
        total, heads = q.shape[:2]
        sequence, head = (1, 2) if options["layout"] == "bshd" else (2, 1)
        shape = (heads, total) if ragged else (q.shape[0], q.shape[head], q.shape[sequence])
        results.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if workspace_bytes:
        results.append(jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8))
    # Only plain dense attention can take more axes in front; the rest runs one batch entry of vmap
    # after the other.
    plain = not ragged and len(arrays) == 3 and not workspace_bytes
    function = jax.ffi.ffi_call(
        "cuattn_attention", results, vmap_method="broadcast_all" if plain else "sequential"
    )
    outputs = function(
        *(arrays[name] for name in ("q", "k", "v", *OPTIONAL) if name in arrays),
        present=present(OPTIONAL, arrays),
        ragged=np.int64(ragged),
        paged=np.int64(paged),
        layout=np.int64(LAYOUTS[options["layout"]]),
        max_seqlen_q=np.int64(options["max_seqlen_q"] or 0),
        max_seqlen_k=np.int64(options["max_seqlen_k"] or 0),
        **score_attributes(options),
    )
    return list(outputs)[: 1 + options["return_lse"]]


def call(
    op: str,
    qkv: dict[str, Any],
    optional: dict[str, Any],
    outside: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Check what is Python's to check, then run."""
    refuse(op, **outside)
    given = check_arrays(op, qkv, **optional)
    if options["backend"] == "cublas":
        find_cublas()
    options["window"] = plain_window(options["window"])
    static = static_of(op, **options, devices=possible_devices(op, given))
    register()
    results = run_attention(given, static)
    return tuple(results) if options["return_lse"] else results[0]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: None = None,
    lse_out: None = None,
    workspace: None = None,
    backend: str = "auto",
    stream: None = None,
) -> Any:
    """`cuattn.attention` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    q, k, v, layout, causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q, seqused_k
        As in `cuattn.attention`; the numbers are static under jax.jit.
    num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention`.
    out, lse_out, workspace, stream
        None: memory and stream belong to XLA.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention`.

    Raises
    ------
    ValueError, TypeError
        As in `cuattn.attention`, while tracing.
    NotImplementedError
        A combination without kernel, a gradient, or an argument that belongs to XLA.
    """
    optional = {
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "bias": bias,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    options = {
        "layout": layout,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "backend": backend,
        "kv_layout": "nhd",
        "max_seqlen_q": None,
        "max_seqlen_k": None,
    }
    outside = {"out": out, "lse_out": lse_out, "workspace": workspace, "stream": stream}
    return call("attention", {"q": q, "k": k, "v": v}, optional, outside, options)


def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_tables: jax.Array | None = None,
    kv_layout: str = "nhd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: None = None,
    lse_out: None = None,
    workspace: None = None,
    backend: str = "auto",
    stream: None = None,
) -> Any:
    """`cuattn.attention_varlen` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_tables, kv_layout
        As in `cuattn.attention_varlen`; the lengths max_seqlen_* are static under jax.jit.
    causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q, seqused_k
        As in `cuattn.attention_varlen`; the numbers are static under jax.jit.
    num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention_varlen`.
    out, lse_out, workspace, stream
        None: memory and stream belong to XLA.

    Returns
    -------
    out, or (out, lse) with return_lse
        As in `cuattn.attention_varlen`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `attention`.
    """
    check_ragged(cu_seqlens_q, cu_seqlens_k, block_tables, kv_layout)
    optional = {
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "bias": bias,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "block_tables": block_tables,
    }
    options = {
        "layout": "bshd",
        "kv_layout": kv_layout,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "backend": backend,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    outside = {"out": out, "lse_out": lse_out, "workspace": workspace, "stream": stream}
    return call("attention_varlen", {"q": q, "k": k, "v": v}, optional, outside, options)
