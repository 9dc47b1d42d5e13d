# SPDX-License-Identifier: Apache-2.0
"""Arrays on the emulated device: numpy memory that says by DLPack that it is on CUDA device 0.

It bears the name of a library that cuattn knows, so that streams and results are found without
being given. Only the tests of an emulated build have this folder on their path (docs/emulator.md).
It holds no test: pytest puts the folders of tests on the path, and this would take CuPy's place.
"""

from __future__ import annotations

import contextlib
import types

import numpy as np

import dlpack


class ndarray:
    """A numpy array, `values`, behind DLPack."""

    device = types.SimpleNamespace(id=0)

    def __init__(self, values):
        self.values = values

    def __getattr__(self, name):  # shape, dtype, strides
        return getattr(self.values, name)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, key):
        return ndarray(self.values[key])

    def __setitem__(self, key, value):
        self.values[key] = getattr(value, "values", value)

    def __mul__(self, number):
        return ndarray(self.values * np.float32(number))

    def transpose(self, axes):
        return ndarray(self.values.transpose(axes))

    def get(self):
        return self.values

    def view(self, dtype):
        return ndarray(self.values.view(dtype))

    def swapaxes(self, a, b):
        return ndarray(self.values.swapaxes(a, b))

    def reshape(self, *shape):
        return ndarray(self.values.reshape(*shape))

    def __dlpack_device__(self):
        return dlpack.CUDA, 0

    def __dlpack__(self, **request):
        return dlpack.Array(self.values, (dlpack.CUDA, 0)).__dlpack__(**request)


def empty(shape, dtype):
    """Memory of 0xFF bytes, as harness.Arena poisons its outputs."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return ndarray(np.full(count, 0xFF, np.uint8).view(dtype).reshape(shape))


def asarray(values):
    return ndarray(np.array(values))


def get_current_stream(device=None):
    return types.SimpleNamespace(ptr=0, synchronize=lambda: None)


cuda = types.SimpleNamespace(
    get_current_stream=get_current_stream,
    runtime=types.SimpleNamespace(getDevice=lambda: 0),
    Device=lambda device: contextlib.nullcontext(),
    ExternalStream=lambda stream, device: contextlib.nullcontext(),
)
