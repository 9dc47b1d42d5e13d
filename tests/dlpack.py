# SPDX-License-Identifier: Apache-2.0
"""Array objects that know nothing but DLPack, built by hand: any device, flags, version and lie."""

from __future__ import annotations

import collections
import ctypes
import itertools

import numpy as np

READ_ONLY, IS_COPIED = 1, 2
CPU, CUDA = 1, 2
CODES = {"i": 0, "u": 1, "f": 2, "b": 6, "bfloat16": 4, "float8_e4m3fn": 10}  # DLDataTypeCode


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
has_name = ctypes.pythonapi.PyCapsule_IsValid
has_name.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

keys = itertools.count()
exports: dict[int, object] = {}  # what an open export keeps alive
# The same of those released lately: a release too many is counted, and does not crash.
released: collections.deque[object] = collections.deque(maxlen=64)


class Array:
    """A numpy array behind `__dlpack__` alone.

    `requests` are the keyword arguments it was asked with, `open_exports` the exports whose deleter
    has not run; below 0 where one has run twice. `change` spoils the Tensor of an export.
    """

    def __init__(
        self, values, device=(CPU, 0), flags=0, version=(1, 1), byte_offset=0, change=None
    ):
        self.values = values
        self.dl_device = device
        self.flags = flags
        self.version = version
        self.byte_offset = byte_offset
        self.change = change
        self.requests = []
        self.open_exports = 0

    def __dlpack_device__(self):
        return self.dl_device

    def __dlpack__(self, **request):
        self.requests.append(request)
        if self.version < (1, 0) and "max_version" in request:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        values = self.values
        code = CODES.get(values.dtype.name) or CODES[values.dtype.kind]
        axes = ctypes.c_int64 * max(values.ndim, 1)
        shape = axes(*values.shape)
        strides = axes(*(s // values.itemsize for s in values.strides))
        tensor = Tensor(
            values.ctypes.data - self.byte_offset,
            Device(*self.dl_device),
            values.ndim,
            DataType(code, values.itemsize * 8, 1),
            shape,
            strides,
            self.byte_offset,
        )
        if self.change is not None:
            self.change(tensor)
        key = next(keys)

        def release(_):
            self.open_exports -= 1
            if key in exports:
                released.append(exports.pop(key))

        def destroy(capsule):  # as every producer does: what nobody took over is released here
            if has_name(capsule, name):
                release(None)

        deleter, destructor = Deleter(release), Deleter(destroy)
        if self.version < (1, 0):
            managed, name = Managed(tensor, None, deleter), b"dltensor"
        else:
            managed = ManagedVersioned(*self.version, None, deleter, self.flags, tensor)
            name = b"dltensor_versioned"
        exports[key] = (managed, deleter, destructor, values, shape, strides, name)
        self.open_exports += 1
        return new_capsule(ctypes.addressof(managed), name, destructor)


def zeros(shape, dtype=np.float32, **options):
    return Array(np.zeros(shape, dtype), **options)
