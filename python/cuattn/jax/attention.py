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
from .._options import PLACES, XLA_OPS, options_of
from .call import (
    Static,
    attributes,
    check_arrays,
    compiled,
    most_workspace,
    plain_window,
    possible_devices,
    present,
    refuse,
    register,
    shape_of,
    static_of,
)

OPS = XLA_OPS["attention"]
ARRAYS = tuple(option.name for option in options_of(*OPS, kinds=("array",), face="jax"))
NUMBERS = tuple(o for o in options_of(*OPS, face="jax") if o.name not in ARRAYS)


def workspace_of(arrays: dict[str, jax.Array], options: dict[str, Any]) -> int:
    """Validate by the library's own rules, from shapes alone; return the bytes of workspace."""
    given = {option.name: options[option.name] for option in NUMBERS}
    given |= {name: shape_of(array) for name, array in arrays.items()}

    def workspace_bytes(device: int) -> int:
        return _core.explain(given, "float32", device, None)["workspace_bytes"]

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
        *(arrays[name] for name in ("q", "k", "v", *ARRAYS) if name in arrays),
        present=present(ARRAYS, arrays),
        ragged=np.int64(ragged),
        paged=np.int64(paged),
        **attributes(NUMBERS, options),
    )
    return list(outputs)[: 1 + options["return_lse"]]


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Check what is Python's to check, then run."""
    refuse(op, **{name: arguments[name] for name in PLACES})
    if arguments["dropout_p"] != 0:
        raise NotImplementedError(
            f"{op}: dropout_p must be 0 for JAX arrays so far, got {arguments['dropout_p']!r}; "
            "pass numpy arrays"
        )
    qkv = {name: arguments[name] for name in ("q", "k", "v")}
    given = check_arrays(op, qkv, **{name: arguments.get(name) for name in ARRAYS})
    if arguments["backend"] == "cublas":
        find_cublas()
    options = {option.name: arguments.get(option.name, option.default) for option in NUMBERS}
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
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: jax.Array | None = None,
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
    dropout_p, dropout_seed, dropout_offset, dropout_state
        0 and None: there is no dropout for JAX arrays yet.
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
    return call("attention", locals())


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
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: jax.Array | None = None,
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
    dropout_p, dropout_seed, dropout_offset, dropout_state
        0 and None: there is no dropout for JAX arrays yet.
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
    return call("attention_varlen", locals())
