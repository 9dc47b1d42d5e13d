# SPDX-License-Identifier: Apache-2.0
"""merge_states on JAX arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._options import WORDS
from .call import (
    Static,
    check_arrays,
    code,
    compiled,
    possible_devices,
    refuse,
    register,
    static_of,
)


@compiled
def run_merge(arrays: list[jax.Array], static: Static) -> list[jax.Array]:
    """One call of the merge handler; stacked parts if there are two arrays."""
    skip = 1 if len(arrays) == 2 else 0
    results = [
        jax.ShapeDtypeStruct(arrays[0].shape[skip:], arrays[0].dtype),
        jax.ShapeDtypeStruct(arrays[1].shape[skip:], jnp.float32),
    ]
    function = jax.ffi.ffi_call("cuattn_merge_states", results, vmap_method="sequential")
    return list(function(*arrays, layout=code("layout", dict(static)["layout"])))


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array | None = None,
    lse_b: jax.Array | None = None,
    *,
    layout: str | None = None,
    out: None = None,
    lse_out: None = None,
    stream: None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cuattn.merge_states` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b, layout
        As in `cuattn.merge_states`.
    out, lse_out, stream
        None: memory and stream belong to XLA.

    Returns
    -------
    out, lse : jax.Array
        Like one part.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `attention`.
    """
    op = "merge_states"
    refuse(op, out=out, lse_out=lse_out, stream=stream)
    given = check_arrays(op, {"out_a": out_a, "lse_a": lse_a}, out_b=out_b, lse_b=lse_b)
    if len(given) not in (2, 4):
        raise TypeError(
            "merge_states: out_b and lse_b must be given together; leave out both for stacks"
        )
    axes = out_a.ndim - (out_b is None)
    layout = layout or ("bshd" if axes == 4 else "nhd")
    if layout not in WORDS["layout"] or axes != (4 if layout in ("bshd", "bhsd") else 3):
        raise ValueError(
            "merge_states: layout must be 'bshd' or 'bhsd' for 4 axes, 'nhd' or 'thd' for 3, "
            f"got {layout!r} for {axes}; choose one of these"
        )
    register()
    static = static_of(op, layout=layout, devices=possible_devices(op, given))
    return tuple(run_merge(list(given.values()), static))
