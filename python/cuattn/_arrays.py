# SPDX-License-Identifier: Apache-2.0
"""What the binding asks of array libraries without a C interface for it; imports none of them.

Every function here is called with arrays of the library in question, so that library is already
loaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Protocol, TypeVar


class Array(Protocol):
    """Any array with DLPack: numpy, PyTorch, CuPy, JAX, or another library's."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


ArrayT = TypeVar("ArrayT", bound=Array)


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
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device)):
            return torch.empty(shape, **options)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        kind = like.dtype if dtype == "bfloat16" else dtype
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


def find_cublas() -> None:
    """Point CUATTN_CUBLAS_PATH, unless it is set, at the cuBLAS of NVIDIA's wheels."""
    if "CUATTN_CUBLAS_PATH" in os.environ:
        return
    for folder in sys.path:
        for release in ("cu13", "cublas"):
            for version in ("13", "12"):
                path = os.path.join(folder, "nvidia", release, "lib", f"libcublas.so.{version}")
                if os.path.exists(path):
                    os.environ["CUATTN_CUBLAS_PATH"] = path
                    return
