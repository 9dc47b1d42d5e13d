# SPDX-License-Identifier: Apache-2.0
"""Where a KV cache lives: arrays that numpy, torch or CuPy allocate and that are written in place.

The few things that PagedKVCache asks of an array library, in its words. Work on a GPU goes to the
library's current stream, and nothing waits for it except where that is said.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# Content is moved as integers of 8 bytes, which every library can index whatever the dtype is.
WORD = np.dtype(np.int64)


def ml_dtype(name: str) -> np.dtype:
    """Find a dtype that numpy has by ml_dtypes."""
    try:
        import ml_dtypes
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"cuattn: numpy arrays of {name} need ml_dtypes, which is not installed; pip install "
            "ml_dtypes, or pass arrays of torch",
            name=missing.name,
        ) from None
    return np.dtype(getattr(ml_dtypes, name))


class NumpyMemory:
    """Arrays of numpy; the base of the others."""

    def __init__(self, like: Any):
        self.device: Any = getattr(like, "device", None)

    @staticmethod
    def dtype(name: str) -> np.dtype:
        """Find numpy's dtype of that name."""
        return ml_dtype(name) if name in ("bfloat16", "float8_e4m3fn") else np.dtype(name)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate on the device."""
        return np.empty(shape, self.dtype(dtype))

    def words(self, array: Any) -> Any:
        """View an array as WORDs."""
        return array.view(WORD)

    def upload(self, values: np.ndarray) -> Any:
        """Copy host values to the device; they may change as soon as this returns."""
        return values

    def host_empty(self, shape: tuple[int, ...]) -> Any:
        """Allocate WORDs on the host; for a GPU pinned, so that they are copied fast."""
        return np.empty(shape, WORD)

    def fetch(self, array: Any) -> np.ndarray:
        """Copy an array that nobody else holds to numpy, and wait for it."""
        return array

    def download(self, host: Any, array: Any) -> None:
        """Copy an array to host memory that only `restore` will read."""
        host[...] = array

    def restore(self, host: Any) -> Any:
        """Copy host memory that `download` filled to the device."""
        return host


class TorchMemory(NumpyMemory):
    """Tensors of torch on the device of `like`."""

    def __init__(self, like: Any):
        super().__init__(like)
        self.torch = sys.modules["torch"]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def words(self, array: Any) -> Any:
        return array.view(self.torch.int64)

    def upload(self, values: np.ndarray) -> Any:
        # CUDA reads memory that is not pinned before the call returns.
        return self.torch.from_numpy(values).to(self.device, non_blocking=True)

    def host_empty(self, shape: tuple[int, ...]) -> Any:
        return self.torch.empty(
            shape, dtype=self.torch.int64, pin_memory=self.device.type == "cuda"
        )

    def fetch(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def download(self, host: Any, array: Any) -> None:
        # torch hands out pinned memory anew only after the copies that use it are done.
        host.copy_(array, non_blocking=host.is_pinned())

    def restore(self, host: Any) -> Any:
        return host.to(self.device, non_blocking=host.is_pinned())


class CupyMemory(NumpyMemory):
    """Arrays of CuPy on the device of `like`; `download` and `restore` wait for the device."""

    def __init__(self, like: Any):
        super().__init__(like)
        self.cupy = sys.modules["cupy"]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self.device:
            return self.cupy.empty(shape, self.dtype(dtype))

    def upload(self, values: np.ndarray) -> Any:
        with self.device:
            return self.cupy.asarray(values)

    def host_empty(self, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape))
        pinned = self.cupy.cuda.alloc_pinned_memory(max(count, 1) * WORD.itemsize)
        return np.frombuffer(pinned, WORD)[:count].reshape(shape)

    def fetch(self, array: Any) -> np.ndarray:
        return array.get()

    def download(self, host: Any, array: Any) -> None:
        host[...] = array.get()

    def restore(self, host: Any) -> Any:
        array = self.upload(host)
        self.cupy.cuda.get_current_stream().synchronize()
        return array


def memory_of(op: str, like: Any) -> NumpyMemory:
    """Find the memory that arrays like `like` are in; `op` is who asks."""
    for library, kind, memory in (
        ("torch", "Tensor", TorchMemory),
        ("cupy", "ndarray", CupyMemory),
        ("numpy", "ndarray", NumpyMemory),
    ):
        # A library that another thread still imports has no class yet, and no arrays.
        if isinstance(like, getattr(sys.modules.get(library), kind, ())):
            return memory(like)
    raise TypeError(
        f"{op}: like must be an array of numpy, torch or CuPy, which can be written in place, got "
        f"{type(like).__name__}; pass one on the device where the cache is to be"
    )
