# SPDX-License-Identifier: Apache-2.0
"""flex_attention of JAX arrays, and its gradients.

On the CPU numpy sees their memory outside of jit; under jit and grad a callback runs the call on
the host, with captured arrays among its operands. Next: flex_ops.py (on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._gradients import GRADIENT_OF, GRADIENTS
from .._options import PLACES
from ..flex.backward import like, slots_of
from ..flex.block_mask import BlockMask
from ..flex.memo import of_torch
from ..flex.trace import dtype_name, trace
from ..flex.tracers import is_jax_tracer, original
from .call import (
    as_varying,
    check_arrays,
    check_int32,
    is_array,
    no_gradient,
    possible_devices,
    structs_of,
)
from .flex_ops import DeviceCall, shapes_in, with_mask
from .ops import ARRAYS, NUMBERS, SCALES, result_shapes
from .sharding import explicit_mesh


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
            f"{function}: {name} must be on the CPU like the others, got {x.devices()}; move it "
            "with jax.device_put"
        )
    return widened(name, np.asarray(x))


def widened(name: str, x: np.ndarray) -> np.ndarray:
    """Return a dropout_state as int64, which JAX may not have."""
    is_narrow = name == "dropout_state" and x.dtype in (np.int32, np.uint32)
    return x.astype(np.int64) if is_narrow else x


def refuse_traced_numbers(arguments: dict[str, Any]) -> None:
    """Refuse numbers that JAX traces: a gradient by one would be lost."""
    for name, x in arguments.items():
        if isinstance(x, jax.core.Tracer) and name not in TAKEN:
            raise TypeError(
                f"flex_attention: {name} must be a Python value, which is static under jax.jit, "
                "got a traced array; let a score_mod capture it"
            )


# Under jit and grad

TAKEN = ("q", "k", "v", *ARRAYS)  # what may be an operand


def call_host(function: Callable[..., Any], results: Any, operands: Any) -> Any:
    """Call a function on the host, through which no gradient goes."""

    def run(*operands: Any) -> Any:
        return jax.pure_callback(function, results, *operands, vmap_method="sequential")

    def refuse_gradient(primals: Any, tangents: Any) -> Any:
        raise no_gradient("flex_attention", "gradient of a gradient")

    primal = jax.custom_jvp(run)
    primal.defjvp(refuse_gradient)
    return primal(*operands)


class HostCall:
    """A call on the CPU of which an array is traced: what is fixed, and what operands stand for.

    It has `operands` until it is run (attend_by), and no other tracers.
    """

    def __init__(self, arguments: dict[str, Any], score: Any, mask: Any, block_mask: Any):
        self.is_joined = isinstance(block_mask, BlockMask) and mask is not None
        self.score, self.mask, self.block_mask = score, mask, block_mask
        if self.is_joined:  # its own function holds what it captures
            self.block_mask = with_mask(block_mask, mask)
        refuse_traced_numbers(arguments)
        self.names = tuple(n for n, x in arguments.items() if n in TAKEN and is_array(x))
        self.options = {n: x for n, x in arguments.items() if n not in self.names}
        self.options.pop("return_lse", None)
        captured = captured_by(score, mask)
        for name, x in (
            *((n, arguments[n]) for n in self.names),
            *(("a captured array", x) for x in captured),
        ):
            check_int32("flex_attention", name, x)
        self.operands = tuple(jnp.asarray(x) for x in (*map(arguments.get, self.names), *captured))
        self.shapes = structs_of(self.operands)
        self.check()

    def check(self) -> None:
        """Refuse what the library would when it is called back: there it is an error of XLA's."""
        for name, x in self.options.items():
            is_one = name in SCALES or hasattr(x, "__dlpack__")
            if name in TAKEN and x is not None and not is_one:
                raise TypeError(
                    f"flex_attention: {name} must be a JAX array like q, got {type(x).__name__}; "
                    "convert it first"
                )
        options = {o.name: self.options.get(o.name, o.default) for o in NUMBERS}
        arrays = dict(zip(self.names, self.shapes, strict=False))
        _core.flex_workspace(shapes_in(arrays, options), {}, -1)

    def given(self, operands: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arrays by name and the functions, of operands on the host."""
        arrays = [np.asarray(x) for x in operands]
        named = {n: widened(n, x) for n, x in zip(self.names, arrays, strict=False)}
        captured = arrays[len(self.names) :]
        count = len(self.score.arrays) if self.score else 0
        functions = {
            "score_mod": self.score and self.score.reading(captured[:count]),
            "mask_mod": self.mask and self.mask.reading(captured[count:]),
            "block_mask": self.block_mask,
        }
        if self.is_joined:  # with what the block mask was made of, which it knows by the function
            functions["block_mask"] = with_mask(self.block_mask, functions.pop("mask_mod"))
        return named, functions

    def run(self, operands: Any) -> Any:
        """Return out and lse."""
        arrays = dict(zip(self.names, self.shapes, strict=False))
        kv_layout = self.options.get("kv_layout") if "block_tables" in self.names else None
        layout = self.options.get("layout", "bshd")
        results = result_shapes(arrays["q"], arrays["v"], layout, kv_layout)
        return call_host(self.forward, results, operands)

    def forward(self, *operands: Any) -> Any:
        """Return out and lse, on the host."""
        from ..flex.attention import flex_attention

        named, functions = self.given(operands)
        return flex_attention(**named, **functions, **self.options, return_lse=True)

    def differentiable(self) -> list[int]:
        """List the operands that have a gradient: floats, apart from arrays of the mask."""
        last = len(self.names) + (len(self.score.arrays) if self.score else 0)
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in self.shapes]
        names = {i: name in GRADIENT_OF for i, name in enumerate(self.names)}
        return [i for i in range(last) if is_float[i] and names.get(i, True)]

    def differentiate(self, kept: Any, gradients: Any) -> Any:
        """Return the gradients of the differentiable operands."""
        results = tuple(self.shapes[i] for i in self.differentiable())
        return call_host(self.backward, results, (*kept, *gradients))

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


def captured_by(*functions: Any) -> list[Any]:
    """Return the arrays that traced functions capture, in their order."""
    return [original(x) for f in functions if f is not None for x in f.arrays]


def device_of(op: str, arguments: dict[str, Any], captured: list[Any]) -> int:
    """Return the CUDA device of a call, or -1 for the CPU: where its arrays are, else JAX's own."""
    given = {name: x for name, x in arguments.items() if is_array(x)}
    given |= {f"captured array {i}": x for i, x in enumerate(captured) if is_array(x)}
    return possible_devices(op, given)[0]


def refuse_places(op: str, arguments: dict[str, Any]) -> None:
    """Refuse what XLA owns."""
    for name in (*PLACES, *GRADIENTS):
        if arguments.get(name) is not None and not (name == "out" and "dout" in arguments):
            raise ValueError(f"{op}: {name} must not be given with JAX arrays; XLA owns it")


def attend(arguments: dict[str, Any], score_mod: Any, mask_mod: Any, block_mask: Any) -> Any:
    """Attend on a GPU, or under jit, grad and vmap: there the CPU's host is called back.

    Raises
    ------
    ValueError
        If out, lse_out, workspace or stream is given.
    """
    refuse_places("flex_attention", arguments)
    score = None if score_mod is None else trace(score_mod, is_score=True)
    mask = None if mask_mod is None else trace(mask_mod)
    device = device_of("flex_attention", arguments, captured_by(score, mask))
    call: HostCall | DeviceCall
    if device < 0:
        if block_mask is not None and mask is not None:
            if not isinstance(block_mask, BlockMask) and hasattr(block_mask, "kv_indices"):
                block_mask = of_torch(block_mask)
            if isinstance(block_mask, BlockMask):  # what is none is refused where it is read
                block_mask = block_mask.within(mask_mod)
                mask = trace(block_mask.mask_mod)
        call = HostCall(arguments, score, mask, block_mask)
    else:
        given = mask if block_mask is None else mask_mod  # which is joined with the block mask's
        call = DeviceCall(arguments, score, given, block_mask, device)
    out, lse = attend_by(call)
    return (out, lse) if arguments.get("return_lse") else out


def attend_by(call: HostCall | DeviceCall) -> Any:
    """Return out and lse of a call, which JAX differentiates.

    Note: JAX keeps the call with what it compiles, for longer than the tracers of a trace may live.
    """
    operands, call.operands = call.operands, ()

    def run(operands: Any) -> Any:
        return as_varying(call.run(operands), operands)

    def run_and_keep(operands: Any) -> Any:
        if "block_tables" in call.names:
            raise NotImplementedError(
                "flex_attention: block_tables must not be given where a gradient is wanted, as "
                "keys in pages have none; pass k and v in rows"
            )
        out, lse = run(operands)
        return (out, lse), (operands, out, lse)

    def differentiate(kept: Any, gradients: Any) -> Any:
        found = as_varying(call.differentiate(kept, gradients), kept[0])
        by_place = {
            i: placed_like(kept[0][i], x) for i, x in zip(call.differentiable(), found, strict=True)
        }
        return (tuple(by_place.get(i) for i in range(len(call.shapes))),)

    attend = jax.custom_vjp(run)
    attend.defvjp(run_and_keep, differentiate)
    return attend(as_varying(operands, operands))


def placed_like(array: Any, gradient: Any) -> Any:
    """Return a gradient that lies where its array does: over explicit axes that is its type."""
    if not explicit_mesh(array):
        return gradient
    return jax.sharding.reshard(gradient, jax.typeof(array).sharding)


def go_back(
    arguments: dict[str, Any], score_mod: Any, mask_mod: Any, block_mask: Any, arrays: Any
) -> Any:
    """Return what flex_attention_backward does on a GPU; None for arrays of the CPU."""
    name = "flex_attention_backward"
    score = None if score_mod is None else trace(score_mod, is_score=True)
    device = device_of(name, arguments, captured_by(score))
    if device < 0:
        return None
    refuse_places(name, arguments)
    slots = slots_of(score, arrays, arguments, True)
    inputs = {n: arguments[n] for n in ("dout", "out", "lse")}
    inputs = check_arrays(name, inputs, dlse=arguments.get("dlse"))
    need, deterministic = arguments["need"], arguments.get("deterministic")
    forward = {n: x for n, x in arguments.items() if n not in inputs}
    call = DeviceCall(forward, score, mask_mod, block_mask, device)
    found, sums = call.go_back(call.operands, inputs, need, tuple(slots), deterministic)
    return [*found, *(as_captured(x, y) for x, y in zip(arrays, sums, strict=True))]


def as_captured(array: Any, x: jax.Array) -> Any:
    """Return a gradient as the captured array is: of its dtype, and library unless it is traced."""
    return x.astype(jnp.dtype(dtype_name(array))) if is_jax_tracer(x) else like(array, x)
