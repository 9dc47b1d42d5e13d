# SPDX-License-Identifier: Apache-2.0
"""Calls a handler of XLA without XLA: numpy arrays in a frame of its C API (bindings/xla/ffi.h).

On an emulated build the memory of its CUDA device is numpy's, so that the handlers for CUDA run on
a machine without GPU: `ffi_call` stands in for jax.ffi.ffi_call.
"""

from __future__ import annotations

import ctypes as c

import numpy as np

import frameworks
from cuattn import _core

jax = frameworks.require("jax")

DTYPES = {"bool": 1, "int32": 4, "int64": 5, "uint8": 6, "float16": 10, "float32": 11}
DTYPES["bfloat16"] = 16
EXECUTE, ARRAY_TYPE, SCALAR, STRING = 3, 1, 3, 4


class Header(c.Structure):
    _fields_ = [("size", c.c_size_t), ("extensions", c.c_void_p)]


class Buffer(c.Structure):
    _fields_ = [("header", Header), ("dtype", c.c_int32), ("data", c.c_void_p)]
    _fields_ += [("rank", c.c_int64), ("extents", c.POINTER(c.c_int64))]


class Buffers(c.Structure):
    _fields_ = [("header", Header), ("size", c.c_int64), ("types", c.POINTER(c.c_int32))]
    _fields_ += [("items", c.POINTER(c.POINTER(Buffer)))]


class Text(c.Structure):
    _fields_ = [("data", c.c_char_p), ("size", c.c_size_t)]


class Scalar(c.Structure):
    _fields_ = [("dtype", c.c_int32), ("value", c.c_void_p)]


class Attributes(c.Structure):
    _fields_ = [("header", Header), ("size", c.c_int64), ("types", c.POINTER(c.c_int32))]
    _fields_ += [("names", c.POINTER(c.POINTER(Text))), ("values", c.POINTER(c.c_void_p))]


class ErrorArgs(c.Structure):
    _fields_ = [("header", Header), ("message", c.c_char_p), ("code", c.c_int32)]


class StreamArgs(c.Structure):
    _fields_ = [("header", Header), ("context", c.c_void_p), ("stream", c.c_void_p)]


class OrdinalArgs(c.Structure):
    _fields_ = [("header", Header), ("context", c.c_void_p), ("ordinal", c.c_int32)]


CREATE_ERROR = c.CFUNCTYPE(c.c_void_p, c.POINTER(ErrorArgs))
GET_STREAM = c.CFUNCTYPE(c.c_void_p, c.POINTER(StreamArgs))
GET_ORDINAL = c.CFUNCTYPE(c.c_void_p, c.POINTER(OrdinalArgs))


class Api(c.Structure):
    _fields_ = [("header", Header), ("version", c.c_byte * 24), ("internal", c.c_void_p)]
    _fields_ += [("create_error", CREATE_ERROR), ("between", c.c_void_p * 3)]
    _fields_ += [("get_stream", GET_STREAM), ("rest", c.c_void_p * 12)]
    _fields_ += [("get_device_ordinal", GET_ORDINAL)]


class Frame(c.Structure):
    _fields_ = [("header", Header), ("api", c.POINTER(Api)), ("context", c.c_void_p)]
    _fields_ += [("stage", c.c_int32), ("arguments", Buffers), ("results", Buffers)]
    _fields_ += [("attributes", Attributes)]


def pointers(kind, items):
    return (c.POINTER(kind) * len(items))(*map(c.pointer, items))


def buffers(arrays):
    found = []
    for x in arrays:
        extents = (c.c_int64 * max(x.ndim, 1))(*x.shape)
        found.append(Buffer(Header(), DTYPES[x.dtype.name], x.ctypes.data, x.ndim, extents))
    types = (c.c_int32 * len(found))(*[ARRAY_TYPE] * len(found))
    return Buffers(Header(), len(found), types, pointers(Buffer, found))


def attributes(given):
    names = [Text(name.encode(), len(name)) for name in given]
    values = []
    for x in given.values():
        if isinstance(x, str):
            values.append(Text(x.encode(), len(x)))
        else:
            number = (c.c_int64 if x.dtype == np.int64 else c.c_double)(x.item())
            kind = 5 if x.dtype == np.int64 else 12
            values.append(Scalar(kind, c.cast(c.pointer(number), c.c_void_p)))
            values[-1].number = number  # which lives as long
    types = [STRING if isinstance(x, Text) else SCALAR for x in values]
    raw = (c.c_void_p * len(values))(*[c.cast(c.pointer(x), c.c_void_p) for x in values])
    listed = Attributes(Header(), len(names), (c.c_int32 * len(types))(*types))
    listed.names, listed.values = pointers(Text, names), raw
    listed.kept = values
    return listed


def aligned(shape, dtype):
    """Memory as XLA aligns it, which holds NaN in every float."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(size + 256, 0xFF, np.uint8)
    first = -raw.ctypes.data % 256
    return raw[first : first + size].view(dtype).reshape(shape)


def call(target, results, arrays, given, platform="CUDA"):
    """Run a handler; raises RuntimeError with what it says."""
    capsule = _core.xla_handlers()[platform][target]
    address = c.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
    handler = c.CFUNCTYPE(c.c_void_p, c.POINTER(Frame))(address(capsule, None))
    said = []

    def create_error(args):
        said.append(args.contents.message.decode())
        return 1

    api = Api(create_error=CREATE_ERROR(create_error), get_stream=GET_STREAM(lambda args: None))
    api.get_device_ordinal = GET_ORDINAL(lambda args: None)
    inputs = []
    for x in arrays:
        inputs.append(aligned(x.shape, x.dtype))
        inputs[-1][...] = x
    outputs = [aligned(x.shape, x.dtype) for x in results]
    frame = Frame(Header(), c.pointer(api), None, EXECUTE, buffers(inputs), buffers(outputs))
    frame.attributes = attributes(given)
    if handler(c.byref(frame)):
        raise RuntimeError(said[0])
    for x, y in zip(inputs, arrays, strict=True):
        np.testing.assert_array_equal(x, y)  # which nobody writes
    return outputs


def ffi_call(target, results, vmap_method):
    """Stand in for jax.ffi.ffi_call, by a callback on the host."""

    def function(*operands, **given):
        def on_host(*arrays):
            arrays = [np.asarray(x) for x in arrays]
            return tuple(call(target, results, arrays, given))

        return jax.pure_callback(on_host, tuple(results), *operands, vmap_method=vmap_method)

    return function
