# SPDX-License-Identifier: Apache-2.0
"""Latent attention on JAX arrays. Products with the projections are XLA's.

They are called as functions of cuattn, whose docstrings say what they compute; arrays are new,
those given stay as they are. Next: bindings/xla/mla.cpp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._checks import check_flag
from .._options import PLACES
from .call import (
    Static,
    attributes,
    check_arrays,
    compiled,
    int64_of,
    plain_window,
    possible_devices,
    present,
    refuse,
    register,
    shape_of,
    static_of,
)
from .paged import NUMBERS, decode_results

DECODE_OPTIONAL = (
    "q_pe", "kpe_cache", "v_cache", "block_tables", "context_lens", "indices", "topk_lens", "sinks",
)  # fmt: skip
DECODE_NUMBERS = (
    "scale", "causal", "window", "softcap", "num_splits", "batch_invariant", "return_lse",
    "backend",
)  # fmt: skip


@compiled
def run_decode(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler; out, and lse if asked for."""
    options = dict(static)
    given = {name: options[name] for name in DECODE_NUMBERS if name != "return_lse"}
    given |= {name: shape_of(array) for name, array in arrays.items()}

    def workspace_bytes(device: int) -> int:
        return _core.explain_mla(given, "float32", device, None)["workspace_bytes"]

    results = decode_results(arrays["q_nope"], options, workspace_bytes)
    function = jax.ffi.ffi_call("cuattn_mla_decode", results, vmap_method="sequential")
    outputs = function(
        *(arrays[n] for n in ("q_nope", "ckv_cache", *DECODE_OPTIONAL) if n in arrays),
        present=present(DECODE_OPTIONAL, arrays),
        **attributes(NUMBERS, {n: options[n] for n in DECODE_NUMBERS}),
    )
    return list(outputs)[: 1 + options["return_lse"]]


def mla_decode(**arguments: Any) -> Any:
    """`cuattn.mla_decode` on JAX arrays, without pages where there are no block_tables."""
    op = "mla_decode"
    refuse(op, **{name: arguments.get(name) for name in PLACES})
    required = {name: arguments[name] for name in ("q_nope", "ckv_cache")}
    optional = {name: arguments.get(name) for name in DECODE_OPTIONAL}
    arrays = check_arrays(op, required, **optional)
    options = {name: arguments[name] for name in DECODE_NUMBERS}
    options["window"] = plain_window(options["window"])
    static = static_of(op, **options, devices=possible_devices(op, arrays))
    register()
    results = run_decode(arrays, static)
    return tuple(results) if options["return_lse"] else results[0]


@compiled
def run_write(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the handler, whose results lie on the caches."""
    options = dict(static)
    ropes = [n for n in ("kpe", "kpe_cache") if n in arrays]
    caches = ["ckv_cache", *ropes[1:]]
    function = jax.ffi.ffi_call(
        "cuattn_mla_write",
        [jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in caches],
        vmap_method="sequential",
        input_output_aliases={1: 0, 4: 1} if ropes else {1: 0},
    )
    names = ["ckv", "ckv_cache", "slot_mapping", *ropes]
    names += [n for n in ("cos", "sin", "positions") if n in arrays]
    wide = ("slot_mapping", "positions")
    return function(
        *(int64_of("mla_write", n, arrays[n]) if n in wide else arrays[n] for n in names),
        present=np.int64(bool(ropes) + 2 * ("cos" in arrays)),
        rope_interleaved=np.int64(options["rope_interleaved"]),
    )


def check_sides(op: str, arrays: dict[str, Any]) -> None:
    """Refuse rows and caches that do not belong together, while JAX traces."""
    like = arrays["ckv"]
    for rows, cache in (("ckv", "ckv_cache"), ("kpe", "kpe_cache")):
        for name, ndim in ((rows, 2), (cache, 3)):
            x = arrays.get(name)
            if x is not None and (x.ndim != ndim or x.dtype != like.dtype):
                raise ValueError(
                    f"{op}: {name} must have {ndim} axes and be {like.dtype} like ckv, got "
                    f"{x.dtype} {x.shape}; reshape or cast it"
                )
        if rows in arrays and arrays[rows].shape != (like.shape[0], arrays[cache].shape[2]):
            wanted = (like.shape[0], arrays[cache].shape[2])
            raise ValueError(
                f"{op}: {rows} must have shape {wanted} (num_tokens of ckv, columns of {cache}), "
                f"got {arrays[rows].shape}; pass rows of one call"
            )
    caches = [arrays[name] for name in ("ckv_cache", "kpe_cache") if name in arrays]
    if len({cache.shape[:2] for cache in caches}) > 1:
        raise ValueError(
            f"{op}: kpe_cache must have num_blocks and block_size {caches[0].shape[:2]} like "
            f"ckv_cache, got {caches[1].shape[:2]}; allocate both alike"
        )
    slots = arrays["slot_mapping"]
    if slots.shape != like.shape[:1] or slots.dtype not in (jnp.int32, np.int64):
        raise ValueError(
            f"{op}: slot_mapping must be int32 or int64 of shape {like.shape[:1]}, got "
            f"{slots.dtype} {slots.shape}; give each row of ckv its slot"
        )


def mla_write(
    ckv: Any,
    kpe: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    slot_mapping: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    rope_interleaved: Any,
    stream: None,
) -> tuple[jax.Array, jax.Array | None]:
    """`cuattn.mla_write` on JAX arrays: new caches, in the memory of those that jit donates."""
    op = "mla_write"
    refuse(op, stream=stream)
    if str(getattr(ckv_cache, "dtype", "")) == "uint8":
        raise NotImplementedError(
            f"{op}: ckv_cache of uint8, packed latents, is not written as a JAX array; write it as "
            "a numpy, torch or CuPy array"
        )
    required = {"ckv": ckv, "ckv_cache": ckv_cache, "slot_mapping": slot_mapping}
    ropes = {} if kpe is None and kpe_cache is None else {"kpe": kpe, "kpe_cache": kpe_cache}
    turns = {"cos": cos, "sin": sin, "positions": positions}
    arrays = check_arrays(op, required | ropes, **turns)
    given = [name for name, array in turns.items() if array is not None]
    if given and len(given) < len(turns):
        raise ValueError(f"{op}: cos, sin and positions must be given together, got {given}")
    if given and not ropes:
        raise ValueError(
            f"{op}: cos, sin and positions must not be given without kpe, which they rotate; "
            "leave them out"
        )
    check_flag(op, "rope_interleaved", rope_interleaved)
    check_sides(op, arrays)
    static = static_of(op, rope_interleaved=rope_interleaved, devices=possible_devices(op, arrays))
    register()
    written = run_write(arrays, static)
    return written[0], written[1] if ropes else None


def projected(spec: str, x: jax.Array, proj: jax.Array) -> jax.Array:
    """Multiply in float32, and round once. On the CPU, XLA has no such product of 16 bits."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        words: Any = {"precision": "highest", "preferred_element_type": jnp.float32}
        return jnp.einsum(spec, a, b, **words).astype(x.dtype)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return product(a.astype(jnp.float32), b.astype(jnp.float32))

    return jax.lax.platform_dependent(x, proj, cpu=widened, default=product)


def mla_project(x: Any, proj: Any, transpose: Any, out: None, stream: None) -> jax.Array:
    """`cuattn.mla_project` on JAX arrays, with gradients."""
    op = "mla_project"
    refuse(op, out=out, stream=stream)
    check_flag(op, "transpose", transpose)
    arrays = check_arrays(op, {"x": x, "proj": proj})
    x, proj = arrays["x"], arrays["proj"]
    axis = 2 if transpose else 1
    if not 2 <= x.ndim <= 4 or proj.ndim != 3 or x.dtype != proj.dtype:
        raise ValueError(
            f"{op}: x must have 2 to 4 axes [..., heads, columns], and proj 3 of its dtype, got "
            f"{x.dtype} {x.shape} and {proj.dtype} {proj.shape}; reshape or cast one"
        )
    if x.shape[-2:] != (proj.shape[0], proj.shape[axis]):
        raise ValueError(
            f"{op}: x must have heads and columns {(proj.shape[0], proj.shape[axis])} like proj, "
            f"got {x.shape[-2:]}; pass arrays of one layer"
        )
    return projected("...hd,hld->...hl" if transpose else "...hl,hld->...hd", x, proj)


def explicit(arrays: dict[str, Any], **options: Any) -> Any:
    """Project keys and values of all heads, then attend."""
    from .attention import attention

    q = arrays["q"]
    keys = projected("bsl,hld->bhsd", arrays["k_latent"], arrays["k_proj"])
    values = projected("bsl,hld->bhsd", arrays["v_latent"], arrays["v_proj"])
    if arrays["q_rope"] is not None:
        shared = arrays["k_rope"][:, None]
        shape = (*keys.shape[:-1], shared.shape[-1])
        keys = jnp.concatenate([keys, jnp.broadcast_to(shared, shape)], axis=-1)
        q = jnp.concatenate([q, arrays["q_rope"]], axis=-1)
    return attention(q, keys, values, layout="bhsd", **options)


def absorbed(arrays: dict[str, Any], **options: Any) -> Any:
    """Project queries, attend to the latents, project what comes out."""
    same = arrays["v_latent"] is arrays["k_latent"]
    ropes = {}
    if arrays["q_rope"] is not None:
        ropes = {"q_pe": arrays["q_rope"].swapaxes(1, 2), "kpe_cache": arrays["k_rope"]}
    results = mla_decode(
        q_nope=projected("bhsd,hld->bshl", arrays["q"], arrays["k_proj"]),
        ckv_cache=arrays["k_latent"],
        v_cache=None if same else arrays["v_latent"],
        window=(-1, -1), softcap=0.0, num_splits=0, batch_invariant=False, **ropes, **options,
    )  # fmt: skip
    out, *lse = results if options["return_lse"] else (results,)
    out = projected("bshl,hld->bhsd", out, arrays["v_proj"])
    return (out, *lse) if lse else out


def mla_attention(chosen: str, arrays: dict[str, Any], **options: Any) -> Any:
    """`cuattn.mla_attention` on JAX arrays, in the form that was chosen."""
    op = "mla_attention"
    refuse(op, **{name: options.pop(name) for name in ("out", "lse_out", "stream")})
    optional = {name: arrays[name] for name in ("q_rope", "k_rope")}
    required = {name: x for name, x in arrays.items() if name not in optional}
    check_arrays(op, required, **optional)
    return (explicit if chosen == "explicit" else absorbed)(arrays, **options)
