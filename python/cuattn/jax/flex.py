# SPDX-License-Identifier: Apache-2.0
"""flex_attention of JAX arrays of the CPU.

Outside of jit numpy sees their memory; under jit and grad a callback runs the call on the host,
with captured arrays among its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._gradients import GRADIENT_OF
from .._kv_shapes import head_dim_of_values
from .._options import PLACES


def run_on_host(
    function: str, call: Callable[..., Any], arguments: dict[str, Any], found: dict[str, Any]
) -> Any:
    """Run on the memory of JAX arrays, and return JAX arrays that lie where q does.

    Raises
    ------
    NotImplementedError
        Under jit, vmap or grad, and for arrays of a GPU.
    ValueError
        If out, lse_out, workspace or stream is given: XLA owns these.
    """
    written = ("out",) if function == "flex_attention" else ("dq", "dk", "dv")
    for name in (*written, "lse_out", "workspace", "stream"):
        if arguments.get(name) is not None:
            raise ValueError(f"{function}: {name} must not be given with JAX arrays; XLA owns it")
    host = {name: on_host(function, name, x) for name, x in arguments.items()}
    result = call(host, found)
    q = next(x for x in (arguments["q"], *arguments.values()) if isinstance(x, jax.Array))
    return jax.tree.map(lambda x: jax.device_put(x, q.sharding), result)


def on_host(function: str, name: str, x: Any) -> Any:
    """Return an array as numpy's, over the same memory."""
    if isinstance(x, jax.core.Tracer):
        raise NotImplementedError(
            f"{function}: {name} is traced by JAX, which differentiates flex_attention by itself; "
            "call it outside of jit, vmap and grad"
        )
    if not isinstance(x, jax.Array):
        return x
    if any(device.platform != "cpu" for device in x.devices()):
        raise NotImplementedError(
            f"{function}: {name} lies on {x.devices()}, and JAX arrays are taken on the CPU alone; "
            "use a mask of cuattn.attention there"
        )
    return np.asarray(x)


# Under jit and grad


class TracedCall:
    """A call of which an array is traced: what is fixed, and which operands stand for what."""

    def __init__(self, arguments: dict[str, Any], score: Any, mask: Any, block_mask: Any):
        self.score, self.mask, self.block_mask = score, mask, block_mask
        is_operand = {n: isinstance(x, (jax.Array, np.ndarray)) for n, x in arguments.items()}
        self.names = tuple(n for n in arguments if is_operand[n])
        self.options = {n: x for n, x in arguments.items() if not is_operand[n]}
        self.options.pop("return_lse", None)
        captured = [*(score.arrays if score else ()), *(mask.arrays if mask else ())]
        self.operands = tuple(jnp.asarray(x) for x in (*map(arguments.get, self.names), *captured))

    def given(self, operands: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arrays by name and the functions, of operands on the host."""
        arrays = [np.asarray(x) for x in operands]
        named = dict(zip(self.names, arrays, strict=False))
        captured = arrays[len(self.names) :]
        count = len(self.score.arrays) if self.score else 0
        functions = {
            "score_mod": self.score and self.score.reading(captured[:count]),
            "mask_mod": self.mask and self.mask.reading(captured[count:]),
            "block_mask": self.block_mask,
        }
        return named, functions

    def forward(self, *operands: Any) -> Any:
        """Return out and lse, on the host."""
        from ..flex.attention import flex_attention

        named, functions = self.given(operands)
        return flex_attention(**named, **functions, **self.options, return_lse=True)

    def differentiable(self) -> list[int]:
        """List the operands that have a gradient: floats, apart from arrays of the mask."""
        last = len(self.names) + (len(self.score.arrays) if self.score else 0)
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in self.operands]
        names = {i: name in GRADIENT_OF for i, name in enumerate(self.names)}
        return [i for i in range(last) if is_float[i] and names.get(i, True)]

    def backward(self, operands: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Any:
        """Return the gradients of the differentiable operands, on the host."""
        from ..flex.backward import flex_attention_backward

        named, functions = self.given(operands)
        places = self.differentiable()
        need = tuple(GRADIENT_OF[self.names[i]] for i in places if i < len(self.names))
        score = functions["score_mod"]
        slots = [i - len(self.names) for i in places if i >= len(self.names)]
        found = flex_attention_backward(
            dout=np.asarray(dout),
            out=np.asarray(out),
            lse=np.asarray(lse),
            dlse=np.asarray(dlse),
            need=need,
            arrays=[score.arrays[slot] for slot in slots],
            **named,
            **functions,
            **{n: x for n, x in self.options.items() if n != "num_splits"},
        )
        return (*found[: len(need)], *(found.darrays if slots else ()))


def default_platform() -> str:
    """Return where JAX computes what lies nowhere yet."""
    device = jax.config.jax_default_device
    return jax.default_backend() if device is None else str(getattr(device, "platform", device))


def result_shapes(call: TracedCall) -> tuple[Any, Any]:
    """Return the shapes of out and lse."""
    shapes = dict(zip(call.names, call.operands, strict=False))
    q, v = shapes["q"], shapes["v"]
    kv_layout = call.options.get("kv_layout") if "block_tables" in call.names else None
    out = jax.ShapeDtypeStruct((*q.shape[:-1], head_dim_of_values(v.shape, kv_layout)), q.dtype)
    if q.ndim == 3:
        return out, jax.ShapeDtypeStruct(q.shape[1::-1], jnp.float32)
    is_bshd = call.options.get("layout", "bshd") == "bshd"
    rows, heads = q.shape[1:3] if is_bshd else q.shape[2:0:-1]
    return out, jax.ShapeDtypeStruct((q.shape[0], heads, rows), jnp.float32)


def attend_traced(arguments: dict[str, Any], score_mod: Any, mask_mod: Any, block_mask: Any) -> Any:
    """Attend under jit, grad and vmap: the host is called back.

    Raises
    ------
    NotImplementedError
        Where JAX's default devices are not CPUs.
    ValueError
        If out, lse_out, workspace or stream is given.
    """
    from ..flex.trace import trace

    for name in PLACES:
        if arguments.get(name) is not None:
            raise ValueError(f"flex_attention: {name} must not be given with JAX arrays")
    platform = default_platform()
    if platform != "cpu":
        raise NotImplementedError(
            f"flex_attention: JAX arrays are taken on the CPU alone, got {platform}; trace under "
            'jax.default_device("cpu"), or use a mask of cuattn.attention'
        )
    score = None if score_mod is None else trace(score_mod, is_score=True)
    call = TracedCall(arguments, score, None if mask_mod is None else trace(mask_mod), block_mask)
    out_shapes = result_shapes(call)

    def run(operands: Any) -> Any:
        return jax.pure_callback(call.forward, out_shapes, *operands, vmap_method="sequential")

    def run_and_keep(operands: Any) -> Any:
        if "block_tables" in call.names:
            raise NotImplementedError(
                "flex_attention: block_tables must not be given where a gradient is wanted, as "
                "keys in pages have none; pass k and v in rows"
            )
        out, lse = run(operands)
        return (out, lse), (operands, out, lse)

    def differentiate(kept: Any, gradients: Any) -> Any:
        operands, places = kept[0], call.differentiable()
        shapes = tuple(jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in places)
        found = jax.pure_callback(
            call.backward, shapes, *kept, *gradients, vmap_method="sequential"
        )
        by_place = dict(zip(places, found, strict=True))
        return (tuple(by_place.get(i) for i in range(len(operands))),)

    attend = jax.custom_vjp(run)
    attend.defvjp(run_and_keep, differentiate)
    out, lse = attend(call.operands)
    return (out, lse) if arguments.get("return_lse") else out
