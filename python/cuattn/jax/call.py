# SPDX-License-Identifier: Apache-2.0
"""What the functions on JAX arrays share: registration, what is refused, where a call may run.

Next: attention.py and paged.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._options import Option, code_of

WIDENED = (jnp.int32, jnp.uint32)  # taken for int64
NOT_GIVEN = {"dropout_seed": -1}  # lengths whose default in C is not 0
Static = tuple[tuple[str, Any], ...]  # what a traced function is compiled for, as pairs


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


def is_array(value: Any) -> bool:
    """Tell an array that JAX takes from a number."""
    return isinstance(value, jax.Array | np.ndarray)


def split_scales(k_scale: Any, v_scale: Any) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Scales that are arrays, and those that are numbers."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    arrays = {name: value for name, value in given.items() if is_array(value)}
    return arrays, {name: None if name in arrays else value for name, value in given.items()}


def check_arrays(op: str, required: dict[str, Any], **optional: Any) -> dict[str, jax.Array]:
    """Keep the arrays that are given and refuse what is not a JAX (or numpy) array."""
    given = {name: array for name, array in optional.items() if array is not None}
    arrays = {**required, **given}
    first = next(iter(arrays))
    for name, array in arrays.items():
        if not is_array(array):
            raise TypeError(
                f"{op}: {name} must be a JAX array like {first}, got {type(array).__name__}"
            )
        check_int32(op, name, array)
    return arrays


def check_int32(op: str, name: str, array: Any) -> None:
    """Raise for numbers that JAX would cut off: it has no int64 unless told so."""
    if not isinstance(array, np.ndarray) or array.dtype not in (np.int64, np.uint64):
        return
    limits = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
    if jax.config.jax_enable_x64 or array.size == 0:
        return
    for value in (array.min(), array.max()):
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"{op}: {name} must fit 32 bits while jax_enable_x64 is off, got {value}; "
                "turn it on"
            )


def static_of(op: str, **options: Any) -> Static:
    """Options as jax.jit takes them: hashable, and with their types.

    Those of other types are others: 1 is refused, but equal to True, for which jax.jit may know a
    program.
    """
    for name, value in options.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{op}: {name} must be a Python value, which is static under jax.jit, got "
                f"{type(value).__name__}; pass a plain one"
            ) from None
    return (("op", op), *options.items(), ("types", tuple(map(type_of, options.values()))))


def type_of(value: Any) -> Any:
    """Return the type of an option, or those of a pair."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return tuple(map(type, value)) if is_pair else type(value)


def device_text(devices: Iterable[Any]) -> str:
    """Name the devices of an array."""
    names = (f"{d.platform}:{d.id}" if d.platform == "cpu" else str(d) for d in devices)
    return ", ".join(sorted(names))


def possible_devices(op: str, arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """Where the call may run, the likeliest first: a CUDA device number, or -1 for the CPU.

    Arrays that were put on different devices are refused; others follow these, or go to JAX's
    default device.
    """
    traced, first, place, home = False, "", None, None
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer):
            traced = True
        elif isinstance(array, jax.Array) and array.committed and array.sharding is not place:
            place, devices = array.sharding, array.devices()
            if home is None:
                first, home = name, devices
            elif devices != home:
                raise ValueError(
                    f"{op}: {name} must be on {device_text(home)} like {first}, got "
                    f"{device_text(devices)}; move it with jax.device_put"
                )
    device = min(home, key=lambda d: d.id) if home else default_device()
    here = -1 if device.platform == "cpu" else device.local_hardware_id or 0
    if not traced or jax.default_backend() == "cpu":
        return (here,)
    return (here, 0 if here == -1 else -1)  # XLA decides after tracing


def default_device() -> Any:
    """Return the device of arrays that were put on none."""
    default = jax.config.jax_default_device
    if default is None:
        return jax.devices()[0]
    return jax.devices(default)[0] if isinstance(default, str) else default


def most_workspace(devices: tuple[int, ...], workspace_bytes: Callable[[int], int]) -> int:
    """Bytes that suffice on every device that can run the call; raises for the likeliest."""
    likeliest, *others = devices
    most = workspace_bytes(likeliest)
    for device in others:
        with contextlib.suppress(ValueError, RuntimeError):
            most = max(most, workspace_bytes(device))
    return most


def shape_of(array: Any) -> tuple[Any, ...]:
    """Reduce an array to dtype and shape, as explain takes it."""
    if not all(isinstance(n, int) for n in array.shape):
        raise NotImplementedError(
            f"shapes must be known while JAX traces, got {array.shape}; export a program for each"
        )
    return (str(array.dtype), *array.shape)


def structs_of(arrays: Iterable[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes and dtypes of arrays, which may be traced, as JAX takes them."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)


def int64_of(op: str, name: str, array: jax.Array) -> jax.Array:
    """Widen 32-bit numbers to the two halves of int64, which JAX may not have: [n, 2]."""
    if array.dtype == jnp.int64:
        return array
    if array.dtype not in WIDENED:
        raise ValueError(f"{op}: {name} must be int64, int32 or uint32, got {array.dtype}; cast it")
    high = array >> 31 if array.dtype == jnp.int32 else jnp.zeros_like(array)
    return jnp.stack([array.astype(jnp.int32), high.astype(jnp.int32)], axis=-1)


def present(names: Iterable[str], arrays: Mapping[str, Any]) -> np.int64:
    """Bits that tell a handler which optional arrays follow."""
    return np.int64(sum(1 << bit for bit, name in enumerate(names) if name in arrays))


def code(name: str, word: str | None) -> np.int64:
    """Return the number of a word as an attribute."""
    return np.int64(code_of(name, word))


def attributes(options: Iterable[Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Say options, those that are no arrays, as the attributes that bindings/xla/options.h reads.

    Where one is not given, or is an array, its default is said.
    """
    found: dict[str, Any] = {}
    for option in options:
        name, value = option.name, given.get(option.name, option.default)
        match option.kind:
            case "flag" | "count":
                found[name] = np.int64(value)
            case "length":
                found[name] = np.int64(NOT_GIVEN.get(name, 0) if value is None else value)
            case "number" if option.default is None:
                found[f"has_{name}"] = np.int64(value is not None)
                found[name] = np.float64(0.0 if value is None else value)
            case "number":
                found[name] = np.float64(value)
            case "pair":
                found |= {f"{name}_left": np.int64(value[0]), f"{name}_right": np.int64(value[1])}
            case "word":
                found[name] = code(name, value)
            case "text":
                found[name] = value
            case "scale":
                found[name] = np.float64(1.0 if value is None else value)
    return found


def plain_window(window: Any) -> Any:
    """Make a list a tuple, because static arguments are hashed."""
    return tuple(window) if isinstance(window, list) else window


def as_varying(results: Any, arrays: Any) -> Any:
    """Say that results differ between devices where arrays do, in a shard_map that checks it.

    XLA is not told so by a foreign function.
    """
    given = arrays.values() if isinstance(arrays, dict) else arrays
    traced = [x for x in given if isinstance(x, jax.core.Tracer)]
    every = frozenset().union(*map(_varying, traced)) if traced else frozenset()
    if not every:
        return results

    def cast(x: jax.Array) -> jax.Array:
        more = tuple(sorted(every - _varying(x)))
        return jax.lax.pcast(x, more, to="varying") if more else x

    return jax.tree.map(cast, results)


def _varying(x: Any) -> frozenset[str]:
    """Return the axes of a shard_map along which an array differs; none before JAX 0.10."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def no_gradient(op: str, what: str) -> NotImplementedError:
    """Return what refuses a gradient that there is none of."""
    return NotImplementedError(
        f"{op}: no {what} goes through {op}; pass jax.lax.stop_gradient of the arrays"
    )


def compiled(
    function: Callable[[Any, Static], Any], what: str = "gradient"
) -> Callable[[Any, Static], Any]:
    """Compile ``function(arrays, static)`` for each `static`; a gradient of it is refused."""

    @functools.wraps(function)
    def run(arrays: Any, static: Static) -> Any:
        return as_varying(function(arrays, static), arrays)

    primal = jax.custom_jvp(run, nondiff_argnums=(1,))

    def refuse_gradient(static: Static, primals: Any, tangents: Any) -> Any:
        raise no_gradient(dict(static)["op"], what)

    primal.defjvp(refuse_gradient)
    return jax.jit(primal, static_argnums=1)
