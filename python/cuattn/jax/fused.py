# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and sampling on JAX arrays, under jax.jit and jax.vmap.

They are called as functions of cuattn, whose docstrings say what they compute; arrays are new,
those given stay as they are. Next: bindings/xla/fused.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_flag
from .call import (
    Static,
    check_arrays,
    compiled,
    int64_of,
    is_array,
    possible_devices,
    present,
    refuse,
    register,
    static_of,
)

ACTS = ("silu", "gelu", "gelu_tanh")
WIDE = ("positions", "seed", "offset")  # int64


@compiled
def run(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of a handler."""
    options = dict(static)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in options["results"]]
    function = jax.ffi.ffi_call(options["target"], results, vmap_method="sequential")
    given = ((name, arrays[name]) for name in options["names"])  # JAX sorts a dict
    operands = [int64_of(options["op"], name, a) if name in WIDE else a for name, a in given]
    return list(
        function(*operands, present=present(options["optional"], arrays), **dict(options["said"]))
    )


def call(
    op: str,
    target: str,
    arrays: dict[str, jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    optional: tuple[str, ...] = (),
    **said: Any,
) -> list[jax.Array]:
    """Run a handler: `optional` arrays follow the others in this order, `said` are attributes."""
    possible_devices(op, arrays)
    register()
    numbers = tuple(
        (name, np.float64(x) if isinstance(x, float) else np.int64(x)) for name, x in said.items()
    )
    static = static_of(
        op, target=f"cuattn_{target}", names=tuple(arrays), results=tuple(results),
        optional=optional, said=numbers,
    )  # fmt: skip
    return run(arrays, static)


def number(op: str, name: str, value: Any, kind: type = float) -> Any:
    """Read a number that is static under jax.jit."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}; pass a plain one")
    if kind is int and not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}; pass an int")
    return kind(value)


def flag(op: str, name: str, value: Any) -> int:
    """Read True or False."""
    check_flag(op, name, value)
    return int(value)


def norm(
    centred: bool,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    eps: float,
    weight_offset: float,
    residual: jax.Array | None,
    out: None,
    residual_out: None,
    stream: None,
) -> Any:
    """`cuattn.layer_norm`, where centred, else `cuattn.rms_norm`, on JAX arrays."""
    op = "layer_norm" if centred else "rms_norm"
    refuse(op, out=out, residual_out=residual_out, stream=stream)
    arrays = check_arrays(op, {"x": x, "weight": weight}, bias=bias, residual=residual)
    results = [(x.shape, x.dtype)] * (1 if residual is None else 2)
    found = call(
        op, "norm", arrays, results, ("bias", "residual"), centred=int(centred),
        eps=number(op, "eps", eps), weight_offset=number(op, "weight_offset", weight_offset),
    )  # fmt: skip
    return found[0] if residual is None else tuple(found)


def activate(
    gated: bool, x: jax.Array, bias: jax.Array | None, act: str, out: None, stream: None
) -> jax.Array:
    """`cuattn.act_mul`, where gated, else `cuattn.bias_act`, on JAX arrays."""
    op = "act_mul" if gated else "bias_act"
    refuse(op, out=out, stream=stream)
    arrays = check_arrays(op, {"x": x}, bias=bias)
    if act not in ACTS:
        raise ValueError(
            f"{op}: act must be 'silu', 'gelu' or 'gelu_tanh', got {act!r}; choose one of these"
        )
    shape = (*x.shape[:-1], x.shape[-1] // 2) if gated and x.ndim > 0 else x.shape
    return call(
        op, "activation", arrays, [(shape, x.dtype)], ("bias",), gated=int(gated),
        act=ACTS.index(act),
    )[0]  # fmt: skip


def random_arrays(op: str, seed: Any, offset: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seed and offset that are arrays, and those that are numbers."""
    given = {"seed": seed, "offset": offset}
    arrays = {n: v.reshape(1) if v.ndim == 0 else v for n, v in given.items() if is_array(v)}
    if seed is None:
        raise ValueError(f"{op}: seed must be given, an integer from 0 on, got None; pass one")
    numbers = {n: 0 if n in arrays else number(op, n, v, int) for n, v in given.items()}
    return arrays, numbers


SAMPLED = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")


def sample(
    logits: jax.Array,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    joint: bool,
    seed: Any,
    offset: Any,
    out: None,
    stream: None,
) -> jax.Array:
    """`cuattn.sample` on JAX arrays; seeds and offsets may be int32, numbers are static."""
    op = "sample"
    refuse(op, out=out, stream=stream)
    given = {"temperature": temperature, "top_k": 0 if top_k is None else top_k,
             "top_p": 1.0 if top_p is None else top_p,
             "min_p": 0.0 if min_p is None else min_p}  # fmt: skip
    random, said = random_arrays(op, seed, offset)
    options = {name: value for name, value in given.items() if is_array(value)}
    for name, value in given.items():
        kind = int if name == "top_k" else float
        said[name] = kind(0) if name in options else number(op, name, value, kind)
    arrays = check_arrays(op, {"logits": logits}, **options, **random)
    return call(
        op, "sample", arrays, [(logits.shape[:1], jnp.int32)], SAMPLED, joint=int(joint), **said
    )[0]


def speculative_verify(
    draft_probs: jax.Array,
    target_probs: jax.Array,
    draft_tokens: jax.Array,
    seed: Any,
    offset: Any,
    out: None,
    accepted_out: None,
    stream: None,
) -> tuple[jax.Array, jax.Array]:
    """`cuattn.speculative_verify` on JAX arrays."""
    op = "speculative_verify"
    refuse(op, out=out, accepted_out=accepted_out, stream=stream)
    random, said = random_arrays(op, seed, offset)
    arrays = check_arrays(
        op,
        {"draft_probs": draft_probs, "target_probs": target_probs, "draft_tokens": draft_tokens},
        **random,
    )
    results = [(target_probs.shape[:2], jnp.int32), (target_probs.shape[:1], jnp.int32)]
    found = call(op, "speculative_verify", arrays, results, SAMPLED, **said)
    return found[0], found[1]
