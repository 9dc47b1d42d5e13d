# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of JAX arrays, alone and of the queries of a call; with a gradient.

Next: bindings/xla/fused.cpp.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._rope import Turn
from .call import check_arrays, refuse
from .fused import call, flag, number

TABLES = ("cos", "sin", "positions")  # in the order of the handler
Static = tuple[str, int, int, int]  # op, interleaved, inverse, offset


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def turn(x: jax.Array, tables: dict[str, jax.Array], static: Static) -> jax.Array:
    """Rotate x [n, num_heads, head_dim] by cos, sin and positions [n]."""
    op, interleaved, inverse, offset = static
    arrays = {"x": x, **{name: tables[name] for name in TABLES}}  # JAX sorts a dict
    (found,) = call(
        op, "apply_rope", arrays, [(x.shape, x.dtype)], interleaved=interleaved, inverse=inverse,
        offset=offset,
    )  # fmt: skip
    return found


def forward(x: Any, tables: dict[str, Any], static: Static) -> tuple[jax.Array, Any]:
    """Rotate x whose gradient is wanted, and keep the tables."""
    for name in ("cos", "sin"):
        if tables[name].perturbed:
            raise NotImplementedError(
                f"{static[0]}: no gradient goes through {name}; pass jax.lax.stop_gradient of it"
            )
    kept = {name: table.value for name, table in tables.items()}
    return turn(x.value, kept, static), kept


def way_back(static: Static, tables: dict[str, jax.Array], gradient: Any) -> tuple[Any, None]:
    """Turn the gradient back: the transpose of a rotation."""
    op, interleaved, inverse, offset = static
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype), None
    return turn(gradient, tables, (op, interleaved, 1 - inverse, offset)), None


turn.defvjp(forward, way_back, symbolic_zeros=True)


def rotate(
    turning: Turn,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array | None,
    out: Any,
    stream: Any,
) -> jax.Array:
    """Rotate an array of a call; a gradient reaches it. positions may be int32."""
    op, name, interleaved, inverse, offset, lengths = turning
    refuse(op, out=out, stream=stream)
    check_arrays(op, {name: x, "cos": cos, "sin": sin}, positions=positions)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{op}: x must have axes [n, num_heads, head_dim] or [batch, seqlen, num_heads, "
            f"head_dim], got shape {x.shape}; reshape it"
        )
    if lengths.get("one_token"):
        places_of = None if positions is None else positions[:, None]
        one = turning._replace(lengths={**lengths, "one_token": False})
        return rotate(one, x[:, None], cos, sin, places_of, None, None)[:, 0]
    heads_first = lengths.get("layout") == "bhsd"
    rows = x.swapaxes(1, 2) if heads_first else x
    tokens, count = rows.shape[:-2], math.prod(rows.shape[:-2])
    if positions is None:
        positions = places(op, cos, tokens, lengths)
    elif positions.shape != tokens:
        raise ValueError(
            f"{op}: positions must have shape {tokens} like the tokens of x, got "
            f"{positions.shape}; give each token its own"
        )
    static = (
        op, flag(op, "interleaved", interleaved), flag(op, "inverse", inverse),
        number(op, "offset", offset, int),
    )  # fmt: skip
    tables = {"cos": cos, "sin": sin, "positions": positions.reshape(count)}
    found = turn(rows.reshape(count, *rows.shape[-2:]), tables, static).reshape(rows.shape)
    return found.swapaxes(1, 2) if heads_first else found


def places(op: str, cos: jax.Array, tokens: tuple[int, ...], lengths: dict[str, Any]) -> jax.Array:
    """Compute where tokens stand: at the end of the keys of their sequence.

    Rows that no query in use has stand at 0, so that they are never beyond the tables.
    """
    rows = jnp.arange(tokens[-1], dtype=jnp.int32)
    starts = vector(op, "cu_seqlens_q", lengths, None)
    if starts is None:
        keys = int(lengths.get("seqlen_k", tokens[-1]))
        if cos.ndim == 2 and lengths.get("seqused_k") is None and keys > cos.shape[0]:
            raise ValueError(
                f"{op}: cos must have a row for each of the {keys} tokens of a sequence, got "
                f"{cos.shape[0]}; make it longer, or give positions"
            )
        batch = tokens[0] if len(tokens) == 2 else 1
        queries = used(op, "seqused_q", lengths, jnp.full(batch, tokens[-1], jnp.int32))
        last = used(op, "seqused_k", lengths, jnp.full(batch, keys, jnp.int32))
        found = rows + (last - queries)[:, None]
        found = jnp.where(rows < queries[:, None], jnp.maximum(found, 0), 0)
        return found.reshape(tokens)
    batch = len(starts) - 1
    if batch == 0:
        return jnp.zeros(tokens, jnp.int32)
    queries = used(op, "seqused_q", lengths, jnp.diff(starts))
    starts_k = vector(op, "cu_seqlens_k", lengths, batch + 1)
    if starts_k is None:  # keys in blocks, whose lengths in use are given
        stored = jnp.full(batch, jnp.iinfo(jnp.int32).max, jnp.int32)
    else:
        stored = jnp.diff(starts_k)
    last = used(op, "seqused_k", lengths, stored)
    sequence = jnp.clip(jnp.searchsorted(starts[:-1], rows, side="right") - 1, 0, batch - 1)
    row = rows - starts[sequence]
    found = row + last[sequence] - queries[sequence]
    in_use = (row >= 0) & (row < queries[sequence])
    return jnp.where(in_use, jnp.maximum(found, 0), 0)


def used(op: str, name: str, lengths: dict[str, Any], stored: jax.Array) -> jax.Array:
    """Take the rows in use of each sequence, within those stored."""
    given = vector(op, name, lengths, len(stored))
    return stored if given is None else jnp.clip(given, 0, stored)


def vector(op: str, name: str, lengths: dict[str, Any], extent: int | None) -> jax.Array | None:
    """Take an array of lengths, or None; refuse one of another shape."""
    array = lengths.get(name)
    if array is None:
        return None
    if array.ndim != 1 or (extent is not None and array.shape[0] != extent):
        raise ValueError(
            f"{op}: {name} must have shape ({'n' if extent is None else extent},), got "
            f"{array.shape}; give each sequence its own"
        )
    return jnp.asarray(array, jnp.int32)
