# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on JAX arrays. Next: ops.py."""

from __future__ import annotations

import functools
from typing import Any

import jax

from .._arrays import find_cublas
from .._checks import check_ragged
from .._options import PLACES
from .call import (
    Static,
    as_varying,
    check_arrays,
    is_array,
    plain_window,
    possible_devices,
    refuse,
    register,
    static_of,
)
from .ops import ARRAYS, NUMBERS, SCALES, differentiable_attention

NUMBER_NAMES = tuple(option.name for option in NUMBERS)


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Check what is Python's to check, then run."""
    refuse(op, **{name: arguments[name] for name in PLACES})
    qkv = {name: arguments[name] for name in ("q", "k", "v")}
    optional = {name: arguments[name] for name in ARRAYS if name in arguments}
    numbers = {name for name in SCALES if not is_array(optional[name])}
    given = check_arrays(op, qkv, **{n: x for n, x in optional.items() if n not in numbers})
    if arguments["backend"] == "cublas":
        find_cublas()
    arguments["window"] = plain_window(arguments["window"])
    arguments |= {name: None for name in SCALES if name in given}
    values = tuple([arguments.get(option.name, option.default) for option in NUMBERS])
    devices = possible_devices(op, given)
    pair = arguments["window"] if isinstance(arguments["window"], tuple) else ()
    try:
        static = same_static(op, devices, values, tuple(map(type, (*values, *pair))))
    except TypeError:  # it cannot be hashed, which static_of says by name
        static = static_of(op, **dict(zip(NUMBER_NAMES, values, strict=True)), devices=devices)
    register()
    results = differentiable_attention(as_varying(given, given), static)
    return tuple(results) if arguments["return_lse"] else results[0]


@functools.lru_cache(maxsize=1024)
def same_static(
    op: str, devices: tuple[int, ...], values: tuple[Any, ...], types: tuple[type, ...]
) -> Static:
    """Return one object for equal options, by which jax.jit finds its program sooner.

    Those of other types are others: 0 is equal to False, and refused.
    """
    return static_of(op, **dict(zip(NUMBER_NAMES, values, strict=True)), devices=devices)


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
    dtype: str | None = None,
    q_scale: float | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    accumulate: str = "exact",
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    kv_start: jax.Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: jax.Array | None = None,
    dropout_row: int = 0,
    dropout_key: int = 0,
    dropout_head: int = 0,
    dropout_heads: int = 0,
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
    q, k, v, layout, causal, window, scale, softcap, alibi_slopes, sinks, bias
        As in `cuattn.attention`; the numbers are static under jax.jit.
    dtype, q_scale, k_scale, v_scale
        As in `cuattn.attention`; a scale that changes under jax.jit is better an array.
    seqused_q, seqused_k, kv_start
        As in `cuattn.attention`.
    accumulate, num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention`.
    dropout_p, dropout_seed, dropout_offset, dropout_row, dropout_key, dropout_head, dropout_heads
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
    dtype: str | None = None,
    q_scale: float | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    accumulate: str = "exact",
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    dropout_state: jax.Array | None = None,
    dropout_row: int = 0,
    dropout_key: int = 0,
    dropout_head: int = 0,
    dropout_heads: int = 0,
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
    dtype, q_scale, k_scale, v_scale
        As in `attention`.
    accumulate, num_splits, batch_invariant, return_lse, backend
        As in `cuattn.attention_varlen`.
    dropout_p, dropout_seed, dropout_offset, dropout_row, dropout_key, dropout_head, dropout_heads
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
