# SPDX-License-Identifier: Apache-2.0
"""The handlers of attention and of its backward pass as functions that jax.grad differentiates.

Next: attention.py and backward.py, which call them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._gradients import GRADIENTS, POSITIONAL, SOURCES, forward_options
from .._kv_shapes import head_dim_of_values
from .._options import XLA_OPS, options_of
from .call import (
    WIDENED,
    Static,
    attributes,
    compiled,
    int64_of,
    most_workspace,
    present,
    shape_of,
)
from .sharding import spread

OPS = XLA_OPS["attention"]
ARRAYS = tuple(option.name for option in options_of(*OPS, kinds=("array", "scale"), face="jax"))
NUMBERS = tuple(o for o in options_of(*OPS, face="jax") if o.kind != "array")
# Those of ARRAYS that may be numbers instead.
SCALES = tuple(option.name for option in options_of(*OPS, kinds=("scale",), face="jax"))
CODES = ("float8_e4m3fn", "uint8", "int8")


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
    if "dropout_state" in arrays and arrays["dropout_state"].dtype in WIDENED:
        shapes["dropout_state"] = ("int64", *arrays["dropout_state"].shape)
    return shapes


def optional_operands(arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """List the optional arrays as a handler reads them."""
    return [
        int64_of("attention", name, arrays[name]) if name == "dropout_state" else arrays[name]
        for name in ARRAYS
        if name in arrays
    ]


def result_shapes(
    q: Any, v: Any, layout: str = "bshd", kv_layout: str | None = None
) -> tuple[Any, Any]:
    """Return the shapes of out and lse; `kv_layout` is that of keys in pages."""
    dtype = jnp.bfloat16 if str(q.dtype) in CODES else q.dtype
    out = jax.ShapeDtypeStruct((*q.shape[:-1], head_dim_of_values(v.shape, kv_layout)), dtype)
    if len(q.shape) == 3:
        return out, jax.ShapeDtypeStruct(q.shape[1::-1], jnp.float32)
    rows, heads = q.shape[1:3] if layout == "bshd" else q.shape[2:0:-1]
    return out, jax.ShapeDtypeStruct((q.shape[0], heads, rows), jnp.float32)


def run_attention(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call, spread over a mesh where there is one; results out, and lse if asked for."""
    results = ["out", "lse"] if dict(static)["return_lse"] else ["out"]
    return spread(attend, arrays, static, results)


def attend(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the attention handler."""
    options = dict(static)
    workspace_bytes = workspace_of(arrays, options)
    q, v = arrays["q"], arrays["v"]
    ragged, paged = options["op"] == "attention_varlen", "block_tables" in arrays
    shapes = result_shapes(q, v, options["layout"], options["kv_layout"] if paged else None)
    results = list(shapes[: 1 + options["return_lse"]])
    if workspace_bytes:
        results.append(jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8))
    # Only plain dense attention can take more axes in front; the rest runs one batch entry of vmap
    # after the other. Dropout counts the sequences of a call: folded, it would drop other elements
    # than the gradient, which runs one by one.
    plain = not ragged and len(arrays) == 3 and not workspace_bytes and not options["dropout_p"]
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


def forward(arrays: dict[str, jax.Array], static: Static) -> tuple[list[jax.Array], Any]:
    """Run a call whose gradient is wanted, and keep what the way back needs."""
    options = dict(static)
    if "block_tables" in arrays:
        raise NotImplementedError(
            f"{options['op']}: block_tables must be None for a gradient, which goes through rows; "
            "call cuattn.gather_cache first"
        )
    out, lse = run_once(arrays, tuple({**options, "return_lse": True}.items()))
    results = [out, lse] if options["return_lse"] else [out]
    return results, (arrays, out, lse)


def way_back(static: Static, kept: Any, gradients: list[jax.Array]) -> tuple[dict[str, Any]]:
    """Give the gradients of all arrays that can have one.

    Note: which of them jax.grad wants is not asked for, because JAX keeps what this function is
    traced with for calls that want others. That of a bias is a call of its own, which XLA leaves
    out where nobody reads it.
    """
    arrays, out, lse = kept
    given = {**arrays, "dout": gradients[0], "out": out, "lse": lse}
    if len(gradients) == 2:
        given["dlse"] = gradients[1]
    needed = [name for name, source in SOURCES.items() if source in arrays]
    if "dbias" in needed and not jnp.issubdtype(arrays["bias"].dtype, jnp.floating):
        needed.remove("dbias")
    found: dict[str, Any] = {}
    for need in ([n for n in needed if n != "dbias"], [n for n in needed if n == "dbias"]):
        options = {**dict(static), "op": f"{dict(static)['op']}_backward"}
        options |= {"need": tuple(need), "deterministic": None}
        results = run_backward(given, tuple(options.items())) if need else []
        found |= {SOURCES[name]: x for name, x in zip(need, results, strict=True)}
    return ({name: found.get(name) for name in arrays},)


run_once = compiled(run_attention, "gradient of a gradient")
_attention = jax.custom_vjp(run_attention, nondiff_argnums=(1,))
_attention.defvjp(forward, way_back)
differentiable_attention = jax.jit(_attention, static_argnums=1)


@functools.partial(compiled, what="gradient of a gradient")
def run_backward(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the backward pass, spread as the forward one; results what `need` names."""
    return spread(go_back, arrays, static, list(dict(static)["need"]))


def go_back(arrays: dict[str, jax.Array], static: Static) -> list[jax.Array]:
    """One call of the backward handler."""
    options = dict(static)
    need = options["need"]
    named = {o.name: options.get(o.name, o.default) for o in forward_options(options["op"])}
    given = {**named, **shapes_of(arrays), "need": need}
    given |= {name: options[name] for name in ("deterministic", "max_seqlen_q", "max_seqlen_k")}

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
        deterministic=np.int64(
            -1 if options["deterministic"] is None else options["deterministic"]
        ),
        **attributes(NUMBERS, {**options, "return_lse": False}),
    )
    return list(outputs)[: len(need)]
