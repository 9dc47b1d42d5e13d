# SPDX-License-Identifier: Apache-2.0
"""cuattn on JAX arrays, eagerly, under jax.jit and jax.vmap: XLA calls the library by itself.

XLA owns the memory and the stream, so ``out=``, ``lse_out=``, ``workspace=`` and ``stream=`` are
refused here.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._arrays import find_cublas
from ._plan import OPTIONS

LAYOUTS = {"bshd": 0, "bhsd": 1, "nhd": 2, "thd": 3}  # the codes of c_api.h
# Optional arrays in the order of their bits in the attribute `present`.
OPTIONAL = (
    "alibi_slopes",
    "sinks",
    "bias",
    "seqused_q",
    "seqused_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
)


@functools.cache
def register() -> None:
    """Make the handlers known to XLA."""
    for platform, handlers in _core.xla_handlers().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


def refuse(op: str, **arguments: Any) -> None:
    """Raise for arguments that have no meaning where XLA owns memory and stream."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{op}: {name} must be None for JAX arrays, whose memory and stream belong to XLA; "
                "leave it out"
            )


def check_arrays(op: str, **arrays: Any) -> dict[str, jax.Array]:
    """Keep the arrays that are given and refuse what is not a JAX (or numpy) array."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{op}: {name} must be a JAX array like q, got {type(array).__name__}")
    return given


def possible_devices(arrays: dict[str, jax.Array]) -> tuple[int, ...]:
    """Where the call may run, the likeliest first: a CUDA device number, or -1 for the CPU."""
    q = arrays["q"]
    if isinstance(q, jax.Array) and not isinstance(q, jax.core.Tracer):
        return (-1,) if next(iter(q.devices())).platform == "cpu" else (0,)
    default = getattr(jax.config, "jax_default_device", None)
    platform = getattr(default, "platform", default) or jax.default_backend()
    return (-1,) if platform == "cpu" else (0, -1)  # XLA decides after tracing


def check_and_plan(arrays: dict[str, jax.Array], options: dict[str, Any]) -> int:
    """Validate by the library's own rules, from shapes alone; return the bytes of workspace."""
    shapes = {name: (str(array.dtype), *array.shape) for name, array in arrays.items()}
    given = {name: options.get(name, default) for name, default in OPTIONS.items()}
    given.update({name: shapes.get(name) for name in OPTIONAL})

    def workspace_bytes(device: int) -> int:
        plan = _core.explain(shapes["q"], shapes["k"], shapes["v"], given, "float32", device, None)
        return plan["workspace_bytes"]

    likeliest, *others = options["devices"]
    most = workspace_bytes(likeliest)
    for device in others:
        with contextlib.suppress(NotImplementedError):
            most = max(most, workspace_bytes(device))
    return most


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def call_attention(
    arrays: dict[str, jax.Array], static: tuple[tuple[str, Any], ...]
) -> list[jax.Array]:
    """One call of the attention handler; results out, and lse if asked for."""
    options = dict(static)
    workspace_bytes = check_and_plan(arrays, options)
    q, v = arrays["q"], arrays["v"]
    ragged = options["op"] == "attention_varlen"
    results = [jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)]
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
        present=np.int64(sum(1 << bit for bit, name in enumerate(OPTIONAL) if name in arrays)),
        ragged=np.int64(ragged),
        layout=np.int64(LAYOUTS[options["layout"]]),
        causal=np.int64(options["causal"]),
        window_left=np.int64(options["window"][0]),
        window_right=np.int64(options["window"][1]),
        has_scale=np.int64(options["scale"] is not None),
        scale=np.float64(0.0 if options["scale"] is None else options["scale"]),
        softcap=np.float64(options["softcap"]),
        num_splits=np.int64(options["num_splits"]),
        batch_invariant=np.int64(options["batch_invariant"]),
        return_lse=np.int64(options["return_lse"]),
        max_seqlen_q=np.int64(options["max_seqlen_q"] or 0),
        max_seqlen_k=np.int64(options["max_seqlen_k"] or 0),
        backend=options["backend"],
    )
    return list(outputs)[: 1 + options["return_lse"]]


@call_attention.defjvp
def refuse_gradient(static: Any, primals: Any, tangents: Any) -> Any:
    """Raise under jax.grad and jax.jvp."""
    raise NotImplementedError(
        f"{dict(static)['op']}: cuattn has no gradient yet; pass jax.lax.stop_gradient of the "
        "arrays"
    )


run_attention = jax.jit(call_attention, static_argnums=1)


def call(op: str, arrays: dict[str, Any], outside: dict[str, Any], options: dict[str, Any]) -> Any:
    """Check what is Python's to check, then run."""
    refuse(op, **outside)
    given = check_arrays(op, **arrays)
    register()
    if options["backend"] == "cublas":
        find_cublas()
    if isinstance(options["window"], list):
        options["window"] = tuple(options["window"])  # static arguments are hashed
    static = {**options, "op": op, "devices": possible_devices(given)}
    results = run_attention(given, tuple(static.items()))
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
    arrays = {
        "q": q,
        "k": k,
        "v": v,
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
        "max_seqlen_q": None,
        "max_seqlen_k": None,
    }
    outside = {"out": out, "lse_out": lse_out, "workspace": workspace, "stream": stream}
    return call("attention", arrays, outside, options)


def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
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
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `cuattn.attention_varlen`.
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
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "bias": bias,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    options = {
        "layout": "bshd",
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
    return call("attention_varlen", arrays, outside, options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def call_merge(arrays: list[jax.Array], layout: str) -> list[jax.Array]:
    """One call of the merge handler; stacked parts if there are two arrays."""
    skip = 1 if len(arrays) == 2 else 0
    results = [
        jax.ShapeDtypeStruct(arrays[0].shape[skip:], arrays[0].dtype),
        jax.ShapeDtypeStruct(arrays[1].shape[skip:], jnp.float32),
    ]
    function = jax.ffi.ffi_call("cuattn_merge_states", results, vmap_method="sequential")
    return list(function(*arrays, layout=np.int64(LAYOUTS[layout])))


@call_merge.defjvp
def refuse_merge_gradient(layout: Any, primals: Any, tangents: Any) -> Any:
    """Raise under jax.grad and jax.jvp."""
    raise NotImplementedError(
        "merge_states: cuattn has no gradient yet; pass jax.lax.stop_gradient of the arrays"
    )


run_merge = jax.jit(call_merge, static_argnums=1)


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
    refuse("merge_states", out=out, lse_out=lse_out, stream=stream)
    given = check_arrays("merge_states", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if len(given) not in (2, 4):
        raise TypeError(
            "merge_states: out_b and lse_b must be given together; leave out both for stacks"
        )
    axes = out_a.ndim - (out_b is None)
    layout = layout or ("bshd" if axes == 4 else "nhd")
    if layout not in LAYOUTS or axes != (4 if layout in ("bshd", "bhsd") else 3):
        raise ValueError(
            "merge_states: layout must be 'bshd' or 'bhsd' for 4 axes, 'nhd' or 'thd' for 3, "
            f"got {layout!r} for {axes}; choose one of these"
        )
    register()
    return tuple(run_merge(list(given.values()), layout))
