# SPDX-License-Identifier: Apache-2.0
"""What this package asks of array libraries without a C interface for it; imports none of them.

Every function here is called with arrays of the library in question, so that library is already
loaded. Another one may be in sys.modules half imported, by another thread: it lacks names, and no
array is one of its, as none is an instance of ().
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from . import _core
from ._memory import NumpyMemory


class Array(Protocol):
    """Any array with DLPack: numpy, PyTorch, CuPy, JAX, or another library's.

    It has `__dlpack_device__` too, which the types of JAX do not say.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class ShapedArray(Array, Protocol):
    """One that can also be sliced and reshaped, as those of numpy, PyTorch, CuPy and JAX."""

    @property
    def shape(self) -> Any: ...

    @property
    def reshape(self) -> Any: ...  # a method of many signatures

    @property
    def __getitem__(self) -> Any: ...  # likewise


ArrayT = TypeVar("ArrayT", bound=Array)
ShapedT = TypeVar("ShapedT", bound=ShapedArray)


def current_stream(library: str, device: int) -> int:
    """Raw pointer of the library's current CUDA stream on a device."""
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return sys.modules["torch"].cuda.current_stream(device).cuda_stream


def empty(
    op: str,
    name: str,
    like: Any,
    library: str,
    shape: tuple[int, ...],
    dtype: str,
    device: int,
    stream: int | None,
) -> Any:
    """Allocate in the library and on the device of `like`, for use on `stream` where given."""
    if library == "torch":
        torch = sys.modules["torch"]
        options = {"dtype": getattr(torch, dtype), "device": like.device}
        if stream is None:
            return torch.empty(shape, **options)
        with torch.cuda.stream(torch_stream(torch, stream, like.device)):
            return torch.empty(shape, **options)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        kind = like.dtype if str(like.dtype) == dtype else NumpyMemory.dtype(dtype)
        if stream is None and cupy.cuda.runtime.getDevice() == device:
            return cupy.empty(shape, kind)
        where = None if stream is None else cupy.cuda.ExternalStream(stream, device)
        with cupy.cuda.Device(device), where or contextlib.nullcontext():
            return cupy.empty(shape, kind)
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None or stream is not None:
        raise ValueError(
            f"{op}: {name} must be given, because cuattn cannot allocate a {type(like).__name__}; "
            f"pass {name}= with shape {shape} and dtype {dtype}"
        )
    xp = namespace()
    return xp.empty(shape, dtype=getattr(xp, dtype), device=like.device)


def torch_stream(torch: Any, handle: int, device: Any) -> Any:
    """Return the stream behind a raw pointer; an ExternalStream of 0 would be a new one."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


class Operations:
    """Arithmetic in one array library, on the device of one of its arrays."""

    def __init__(self, namespace: Any, like: Any):
        self.namespace, self.like = namespace, like

    def own(self, array: Any) -> Any:
        """Take an array of any library on that device as one of this library."""
        if type(array) is type(self.like) or library_module(array) is self.namespace:
            return array
        return self.namespace.from_dlpack(array)

    def flat(self, array: Any) -> Any:
        """Return the elements of an array one behind the other, itself where they lie so."""
        row = self.own(array).reshape(-1)
        is_torch = self.namespace.__name__ == "torch"
        return row.contiguous() if is_torch else self.namespace.ascontiguousarray(row)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(self.namespace, dtype)
        where = {"device": self.like.device} if self.namespace.__name__ == "torch" else {}
        return self.namespace.empty(shape, dtype=kind, **where)

    def arange(self, start: int, stop: int, step: int = 1, dtype: str = "int32") -> Any:
        kind = getattr(self.namespace, dtype)
        where = {"device": self.like.device} if self.namespace.__name__ == "torch" else {}
        return self.namespace.arange(start, stop, step, dtype=kind, **where)


def is_jax(array: Any) -> bool:
    """Tell an array of JAX, or a tracer that stands for one."""
    return isinstance(array, getattr(sys.modules.get("jax"), "Array", ()))


def wants_gradient(array: Any) -> bool:
    """Whether torch's autograd wants a gradient of an array."""
    return getattr(array, "requires_grad", False) and sys.modules["torch"].is_grad_enabled()


def library_module(array: Any) -> Any:
    """Return the module whose functions compute with an array; None where it is not known."""
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray")):
        library = sys.modules.get(name)
        if isinstance(array, getattr(library, kind, ())):
            return library
    namespace = getattr(array, "__array_namespace__", None)
    return None if namespace is None else namespace()


def operations(
    op: str,
    like: Any,
    stream: Any,
    why: str = "window and alibi_slopes need arithmetic",
    way_out: str = "call paged_attention over block_tables that name the prefix's blocks",
) -> contextlib.AbstractContextManager[Operations]:
    """Compute in the library of `like`, on its device and on `stream` where given."""
    namespace = library_module(like)
    if namespace is None:
        raise NotImplementedError(
            f"{op}: {why} that cuattn does not know of a {type(like).__name__}; pass numpy, torch, "
            f"CuPy or JAX arrays, or {way_out}"
        )
    computing = Operations(namespace, like)
    if stream is None and namespace.__name__ != "cupy":
        return contextlib.nullcontext(computing)
    return placed(op, computing, stream)


@contextlib.contextmanager
def placed(op: str, computing: Operations, stream: Any) -> Iterator[Operations]:
    """Compute on the device of an array, for CuPy, and on a stream, if one is given."""
    namespace, like = computing.namespace, computing.like
    with contextlib.ExitStack() as stack:
        if namespace.__name__ == "cupy":
            stack.enter_context(namespace.cuda.Device(like.device.id))
        if stream is not None:
            handle = stream_handle(op, stream)
            if int(like.__dlpack_device__()[0]) == 1:
                raise ValueError(
                    f"{op}: stream must be None for arrays on the CPU, which run at once; leave "
                    "it out"
                )
            if namespace.__name__ == "cupy":
                stack.enter_context(namespace.cuda.ExternalStream(handle, like.device.id))
            else:
                external = torch_stream(namespace, handle, like.device)
                stack.enter_context(namespace.cuda.stream(external))
        yield computing


def stream_handle(op: str, stream: Any) -> int:
    """Raw pointer of a stream, read as the binding reads it."""
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return getattr(stream, name)
    if not hasattr(stream, "__cuda_stream__"):
        raise TypeError(
            f"{op}: stream must be None, an integer or an object with cuda_stream, ptr or "
            f"__cuda_stream__, got {type(stream).__name__}; pass the stream of your library"
        )
    return stream.__cuda_stream__()[1]


def find_cublas() -> None:
    """Load the cuBLAS of NVIDIA's wheels; the library looks among what is loaded first.

    Nothing is done where one is loaded, where CUATTN_CUBLAS_PATH names one, and without CUDA.
    """
    if "CUATTN_CUBLAS_PATH" in os.environ or not calls_cublas():
        return
    if any(load(f"libcublas.so.{version}", os.RTLD_NOLOAD) for version in ("13", "12")):
        return
    for folder in sys.path:
        if not (isinstance(folder, str) and os.path.isabs(folder)):
            continue  # the current folder may be anybody's
        for release in ("cu13", "cublas"):
            for version in ("13", "12"):
                path = os.path.join(folder, "nvidia", release, "lib", f"libcublas.so.{version}")
                if os.path.exists(path):
                    load(path.replace("libcublas.so", "libcublasLt.so"))  # which the other needs
                    load(path)
                    return


@functools.cache
def calls_cublas() -> bool:
    """Whether this build has the kernels that call cuBLAS."""
    return any(row["kernel"] == "cublas" for row in _core.kernels())


def load(library: str, mode: int = 0) -> bool:
    """Load a shared library for the life of the process, by name or path."""
    try:
        ctypes.CDLL(library, mode=mode | os.RTLD_NOW)
    except OSError:
        return False
    return True
