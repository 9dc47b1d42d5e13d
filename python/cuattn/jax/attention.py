# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on JAX arrays. Next: backward.py, their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import _core
from .._arrays import find_cublas
from .._checks import check_ragged
from .._gradients import GRADIENTS, POSITIONAL, SOURCES, forward_options
from .._options import PLACES, XLA_OPS, options_of
from .call import (
    Static,
    attributes,
    check_arrays,
    compiled,
    int64_of,
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
    given |= shapes_of(arrays)

    def workspace_bytes(device: int) -> int:
        return _core.explain(given, "float32", device, None)["workspace_bytes"]

    return most_workspace(options["devices"], workspace_bytes)


def shapes_of(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Reduce arrays to dtypes and shapes, as explain takes them."""
    shapes = {name: shape_of(array) for name, array in arrays.items()}
    if "dropout_state" in arrays:
        shapes["dropout_state"] = ("int64", *arrays["dropout_state"].shape)
    return shapes


def optional_operands(arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """List the optional arrays as a handler reads them."""
    return [
        int64_of(arrays[name]) if name == "dropout_state" else arrays[name]
        for name in ARRAYS
        if name in arrays
    ]


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
        *(arrays[name] for name in "qkv"),
        *optional_operands(arrays),
        present=present(ARRAYS, arrays),
        ragged=np.int64(ragged),
        paged=np.int64(paged),
        **attributes(NUMBERS, options),
    )
    return list(outputs)[: 1 + options["return_lse"]]


def forward(arrays: dict[str, Any], static: Static) -> tuple[list[jax.Array], Any]:
    """Run a call whose gradient is wanted, and keep what the way back needs.

    Which arrays want one is kept as the keys of a dict without leaves.
    """
    options = dict(static)
    wanted = {name: None for name, array in arrays.items() if array.perturbed}
    given = {name: array.value for name, array in arrays.items()}
    if "block_tables" in given:
        raise NotImplementedError(
            f"{options['op']}: block_tables must be None for a gradient, which goes through rows; "
            "call cuattn.gather_cache first"
        )
    out, lse = run_attention(given, tuple({**options, "return_lse": True}.items()))
    results = [out, lse] if options["return_lse"] else [out]
    return results, (given, out, lse, wanted)


def way_back(static: Static, kept: Any, gradients: list[Any]) -> tuple[dict[str, Any]]:
    """Give the gradients of the arrays that want one."""
    arrays, out, lse, wanted = kept
    dout, dlse = (
        None if isinstance(x, SymbolicZero) else x for x in (*gradients, None)[:2]
    )
    if dout is None:
        dout = jnp.zeros_like(out)
    need = tuple(name for name, source in SOURCES.items() if source in wanted)
    options = {**dict(static), "op": f"{dict(static)['op']}_backward", "need": need}
    given = {**arrays, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    found = run_backward(given, tuple(options.items()))
    by_source = {SOURCES[name]: x for name, x in zip(need, found, strict=True)}
    return ({name: by_source.get(name) for name in arrays},)


_attention = jax.custom_vjp(run_attention, nondiff_argnums=(1,))
_attention.defvjp(forward, way_back, symbolic_zeros=True)
differentiable_attention = jax.jit(_attention, static_argnums=1)


@compiled
def run_backward(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the backward handler; results what `need` names."""
    options = dict(static)
    need = options["need"]
    named = {o.name: options.get(o.name, o.default) for o in forward_options(options["op"])}
    given = {**named, **shapes_of(arrays), "need": need, "deterministic": None}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        given[name] = options.get(name)

    def workspace_bytes(device: int) -> int:
        return _core.explain_backward(given, "float32", device, None)["workspace_bytes"]

    sources = [arrays[SOURCES[name]] for name in need]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sources]
    if size := most_workspace(options["devices"], workspace_bytes):
        results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))
    function = jax.ffi.ffi_call("cuattn_attention_backward", results, vmap_method="sequential")
    last = [arrays["dlse"]] if "dlse" in arrays else []
    outputs = function(
        *(arrays[name] for name in POSITIONAL[options["op"]][:6]),
        *optional_operands(arrays),
        *last,
        present=present(ARRAYS, arrays),
        has_dlse=np.int64(len(last)),
        need=np.int64(sum(1 << GRADIENTS.index(name) for name in need)),
        deterministic=np.int64(-1),
        **attributes(NUMBERS, {**options, "return_lse": False}),
    )
    return list(outputs)[: len(need)]


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Check what is Python's to check, then run."""
    refuse(op, **{name: arguments[name] for name in PLACES})
    qkv = {name: arguments[name] for name in ("q", "k", "v")}
    given = check_arrays(op, qkv, **{name: arguments.get(name) for name in ARRAYS})
    if arguments["backend"] == "cublas":
        find_cublas()
    options = {option.name: arguments.get(option.name, option.default) for option in NUMBERS}
    options["window"] = plain_window(options["window"])
    static = static_of(op, **options, devices=possible_devices(op, given))
    register()
    results = differentiable_attention(given, static)
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
    """`cuattn.attention` on JAX arrays; traceable by jax.jit, jax.vmap and jax.grad.

    Gradients reach q, k, v, alibi_slopes, sinks and bias, those that jax.grad asks for.

    Parameters
    ----------
    q, k, v, layout, causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q, seqused_k
        As in `cuattn.attention`; the numbers are static under jax.jit.
    num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention`.
    dropout_p, dropout_seed, dropout_offset
        As in `cuattn.attention`; static under jax.jit.
    dropout_state : array, [2], optional
        Seed and offset, traced: int64, int32 or uint32, as the data of a key of jax.random.
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
        A combination without kernel, a gradient of a gradient, or an argument that belongs to XLA.
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
    """`cuattn.attention_varlen` on JAX arrays; traceable by jax.jit, jax.vmap and jax.grad.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_tables, kv_layout
        As in `cuattn.attention_varlen`; the lengths max_seqlen_* are static under jax.jit.
    causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q, seqused_k
        As in `cuattn.attention_varlen`; the numbers are static under jax.jit.
    num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention_varlen`.
    dropout_p, dropout_seed, dropout_offset
        As in `cuattn.attention_varlen`; static under jax.jit.
    dropout_state : array, [2], optional
        Seed and offset, traced: int64, int32 or uint32, as the data of a key of jax.random.
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
