# SPDX-License-Identifier: Apache-2.0
"""Writing the paged KV cache on JAX arrays, and reading it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .call import (
    Static,
    check_arrays,
    code,
    compiled,
    int64_of,
    possible_devices,
    present,
    refuse,
    register,
    shape_of,
    split_scales,
    static_of,
)

WRITE_POSITIONAL = ("k", "v", "k_cache", "v_cache", "slot_mapping")
WRITE_OPTIONAL = ("k_scale", "v_scale", "cos", "sin")
GATHER_POSITIONAL = ("k_cache", "v_cache", "block_tables", "cu_seqlens")


@compiled
def run_write(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler, whose results lie on the caches."""
    options = dict(static)
    shapes = {name: shape_of(array) for name, array in arrays.items()}
    for name in ("slot_mapping", "positions"):
        if name in arrays and arrays[name].dtype == jnp.int32:
            shapes[name] = ("int64", *arrays[name].shape)
    numbers = {name: options[name] for name in ("k_scale", "v_scale")}
    _core.check_reshape_and_cache(
        shapes,
        options["kv_layout"],
        *numbers.values(),
        options["rope_interleaved"],
        options["devices"][0],
    )
    caches = [jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in WRITE_POSITIONAL[2:4]]
    function = jax.ffi.ffi_call(
        "cuattn_reshape_and_cache",
        caches,
        vmap_method="sequential",
        input_output_aliases={2: 0, 3: 1},
    )
    operands = [arrays[name] for name in WRITE_POSITIONAL[:4]]
    operands.append(int64_of(options["op"], "slot_mapping", arrays["slot_mapping"]))
    operands += [arrays[name] for name in WRITE_OPTIONAL if name in arrays]
    if "positions" in arrays:
        operands.append(int64_of(options["op"], "positions", arrays["positions"]))
    return function(
        *operands,
        present=present(WRITE_OPTIONAL, arrays),
        kv_layout=code("kv_layout", options["kv_layout"]),
        rope_interleaved=np.int64(options["rope_interleaved"]),
        **{f"has_{name}": np.int64(value is not None) for name, value in numbers.items()},
        **{name: np.float64(value or 0.0) for name, value in numbers.items()},
    )


def reshape_and_cache(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_layout: str = "nhd",
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    rope_interleaved: bool = False,
    stream: None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cuattn.reshape_and_cache` on JAX arrays: the caches given stay as they are.

    Under jax.jit that donates the caches (``donate_argnums``) the new ones lie in their memory and
    only the slots are written; without, each call copies both caches first.

    Parameters
    ----------
    k, v, k_cache, v_cache
        As in `cuattn.reshape_and_cache`.
    slot_mapping, positions
        As in `cuattn.reshape_and_cache`, and int32 too, since JAX has no int64 by default.
    kv_layout, k_scale, v_scale, cos, sin, rope_interleaved
        As in `cuattn.reshape_and_cache`; numbers are static under jax.jit.
    stream
        None: it belongs to XLA.

    Returns
    -------
    k_cache, v_cache : jax.Array
        New arrays.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `paged_attention`. A slot that cannot be is an error of the run, on the CPU.
    """
    op = "reshape_and_cache"
    refuse(op, stream=stream)
    scale_arrays, scales = split_scales(k_scale, v_scale)
    arrays = check_arrays(
        op,
        dict(zip(WRITE_POSITIONAL, (k, v, k_cache, v_cache, slot_mapping), strict=True)),
        cos=cos,
        sin=sin,
        positions=positions,
        **scale_arrays,
    )
    static = static_of(
        op,
        kv_layout=kv_layout,
        rope_interleaved=rope_interleaved,
        devices=possible_devices(op, arrays),
        **scales,
    )
    register()
    return tuple(run_write(arrays, static))


@compiled
def run_gather(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler; where rows may stay unwritten, the results lie on zeros."""
    options = dict(static)
    operands = [arrays[name] for name in GATHER_POSITIONAL]
    shapes = _core.check_gather_cache(
        *map(shape_of, operands), options["kv_layout"], options["total"], options["devices"][0]
    )
    dtype = arrays["k_cache"].dtype
    zeros = [jnp.zeros(shape, dtype) for shape in shapes] if options["has_spare_rows"] else []
    function = jax.ffi.ffi_call(
        "cuattn_gather_cache",
        [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        vmap_method="sequential",
        input_output_aliases={len(operands) + i: i for i in range(len(zeros))},
    )
    return function(*operands, *zeros, kv_layout=code("kv_layout", options["kv_layout"]))


def gather_cache(
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    cu_seqlens: jax.Array,
    *,
    kv_layout: str = "nhd",
    total: int | None = None,
    k_out: None = None,
    v_out: None = None,
    stream: None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cuattn.gather_cache` on JAX arrays; traceable by jax.jit and jax.vmap with `total`.

    Parameters
    ----------
    k_cache, v_cache, block_tables, cu_seqlens, kv_layout
        As in `cuattn.gather_cache`.
    total : int, optional
        Rows of the result, at least ``cu_seqlens[-1]``; those beyond are 0. None reads
        ``cu_seqlens[-1]`` on the host, which a traced array does not let.
    k_out, v_out, stream
        None: memory and stream belong to XLA.

    Returns
    -------
    k, v : jax.Array, [total, num_heads_kv, head_dim]
        Of the dtype of k_cache.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `reshape_and_cache`.
    """
    op = "gather_cache"
    refuse(op, k_out=k_out, v_out=v_out, stream=stream)
    arrays = check_arrays(
        op,
        dict(zip(GATHER_POSITIONAL, (k_cache, v_cache, block_tables, cu_seqlens), strict=True)),
    )
    static = static_of(
        op,
        kv_layout=kv_layout,
        total=total_of(cu_seqlens) if total is None else total,
        has_spare_rows=total is not None,
        devices=possible_devices(op, arrays),
    )
    register()
    return tuple(run_gather(arrays, static))


def total_of(cu_seqlens: jax.Array) -> int:
    """Read the number of rows to gather."""
    if isinstance(cu_seqlens, jax.core.Tracer):
        raise TypeError(
            "gather_cache: total must be given where cu_seqlens is traced, because the shape of "
            "the result is static; call cuattn.jax.gather_cache(..., total=)"
        )
    total = int(np.asarray(cu_seqlens)[-1]) if cu_seqlens.ndim == 1 and cu_seqlens.size else 0
    if total < 0:
        raise ValueError(
            f"gather_cache: cu_seqlens must not decrease, got {total} as its last element; pass "
            "the running sum of the sequence lengths"
        )
    return total
