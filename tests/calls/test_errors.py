# SPDX-License-Identifier: Apache-2.0
"""Every refusal, word for word; afterwards nothing has changed and the next call is right.

A message names the function, the argument, the rule, the value given and the way out.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
from harness import Arena, Cpu, Cuda, why_no_cuda
from refusals import COPY, CPU_REFUSALS, F32, I32, REFUSALS


def dense():
    """Positional arrays of a good call to attention."""
    shapes = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 8)}
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape, F32) for name, shape in shapes.items()}


def ragged():
    """Positional arguments of a good call to attention_varlen."""
    arrays = dense()
    rows = {"q": 5, "k": 7, "v": 7}
    packed = {
        name: np.ascontiguousarray(x.reshape(-1, *x.shape[2:])[: rows[name]])
        for name, x in arrays.items()
    }
    cu_seqlens = {
        "cu_seqlens_q": np.array([0, 2, 5], I32),
        "cu_seqlens_k": np.array([0, 3, 7], I32),
    }
    return {**packed, **cu_seqlens, "max_seqlen_q": 3, "max_seqlen_k": 4}


def parts():
    """Positional arguments of a good call to merge_states."""
    rng = np.random.default_rng(2)
    out, lse = (
        rng.standard_normal((2, 2, 5, 3, 8), F32),
        rng.standard_normal((2, 2, 3, 5)).astype(F32),
    )
    return {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]}


CALLS = {
    "attention": (cuattn.attention, dense, (2, 5, 4, 8), (2, 4, 5)),
    "attention_varlen": (cuattn.attention_varlen, ragged, (5, 4, 8), (4, 5)),
    "merge_states": (cuattn.merge_states, parts, (2, 5, 3, 8), (2, 3, 5)),
}


# Arguments whose last axis has stride 2: function, rule, strides.
LAST_AXIS = "must be contiguous in its last axis"
STRIDED = {
    "q": ("attention", LAST_AXIS, "(640, 128, 32, 2) in elements"),
    "out": ("attention", LAST_AXIS, "(320, 64, 16, 2) in elements"),
    "out_b": ("merge_states", LAST_AXIS, "(240, 48, 16, 2) in elements"),
    "cu_seqlens_q": ("attention_varlen", "must be contiguous", "(2,)"),
}


class Refused:
    """A call about to be refused, and the checks afterwards."""

    def __init__(self, device, function):
        self.device = device
        self.name = function
        self.call, make, out_shape, lse_shape = CALLS[function]
        self.arena = Arena(device)
        self.good = {name: self.place(x, name) for name, x in make().items()}
        self.outputs = {
            "out": self.arena.output(out_shape, F32, name="out"),
            "lse_out": self.arena.output(lse_shape, F32, name="lse_out", align=4),
        }
        self.options = {} if function == "merge_states" else {"return_lse": True}
        self.before = [device.copy(held[1]) for held in self.arena.held]

    def place(self, value, name="array"):
        return self.arena.put(value, name=name, align=4) if isinstance(value, np.ndarray) else value

    def check(self, changes, exception, message):
        """The call with `changes` raises exactly this; nothing was written; a good call works."""
        held = len(self.before)
        arguments = {**self.good, **self.outputs, **changes}
        with pytest.raises(exception) as caught:
            self.call(**arguments)
        assert str(caught.value) == f"{self.name}: {message}"
        assert type(caught.value) is exception
        self.device.synchronize()
        for before, (name, buffer, *_) in zip(self.before, self.arena.held[:held], strict=True):
            assert self.device.same_bytes(before, buffer), f"{name} was changed by a refused call"
        # Without the mistake the same arrays and outputs serve a good call.
        self.call(**self.good, **self.outputs)
        expected = self.call(**self.good, **self.options)
        self.device.synchronize()
        for name, want in zip(("out", "lse_out"), expected, strict=True):
            got = self.device.numpy(self.outputs[name])
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, self.device.numpy(want))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(device, name):
    function, changes, exception, message = REFUSALS[name]
    refused = Refused(device, function)
    changes = {key: refused.place(value, key) for key, value in changes.items()}
    refused.check(changes, exception, message)


@pytest.mark.parametrize("name", CPU_REFUSALS)
def test_refusal_on_the_cpu(name):
    function, changes, exception, message = CPU_REFUSALS[name]
    Refused(Cpu(), function).check(changes, exception, message)


@pytest.mark.parametrize("argument", STRIDED)
def test_last_axis_must_be_contiguous(device, argument):
    function, rule, strides = STRIDED[argument]
    message = f"{argument} {rule}, got strides {strides}; {COPY}"
    refused = Refused(device, function)
    if argument == "out":
        wide = refused.arena.output((2, 5, 4, 16), F32, name="wide")
    else:
        wide = refused.place(np.repeat(device.numpy(refused.good[argument]), 2, axis=-1))
    refused.check({argument: wide[..., ::2]}, ValueError, message)


@pytest.mark.parametrize(
    ("argument", "shape", "strides"),
    [("out", (2, 5, 4, 8), (40, 0, 8, 1)), ("lse_out", (2, 4, 5), (20, 0, 1))],
)
def test_outputs_must_not_overlap_themselves(device, argument, shape, strides):
    view = device.view(device.buffer(4096), F32, 0, shape, strides)
    message = (
        f"{argument} is written, so no stride may be zero, got {strides}; "
        "pass an array with own memory"
    )
    Refused(device, "attention").check({argument: view}, ValueError, message)


@pytest.mark.parametrize("argument", ["out", "lse_out", "workspace"])
def test_outputs_must_be_writable(argument):
    array = np.zeros(
        {"out": (2, 5, 4, 8), "lse_out": (2, 4, 5), "workspace": (4096,)}[argument], F32
    )
    array.flags.writeable = False
    message = f"{argument} is read-only; pass a writable array"
    Refused(Cpu(), "attention").check({argument: array}, ValueError, message)


class Foreign:
    """A float32 array of another library on a CUDA device, of which only DLPack is known."""

    class DLTensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64),
            ("manager_ctx", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    def __init__(self, shape, device_type=2):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        where = ctypes.addressof(self.shape)
        self.managed = self.DLTensor(4096, device_type, 0, len(shape), 2, 32, 1, where)

    def __dlpack_device__(self):
        return (self.managed.device_type, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return make(ctypes.addressof(self.managed), b"dltensor", None)


def test_arrays_of_two_devices():
    message = "k must be on cpu like q, got cuda:0; move it there"
    Refused(Cpu(), "attention").check({"k": Foreign((2, 7, 2, 16))}, ValueError, message)
    message = "sinks must be on cpu like q, got cuda:0; move it there"
    Refused(Cpu(), "attention").check({"sinks": Foreign((4,))}, ValueError, message)


def test_device_of_another_kind():
    message = (
        "q must be on the CPU or a CUDA device, got DLPack device type 10; copy it to one of these"
    )
    Refused(Cpu(), "attention").check({"q": Foreign((2, 5, 4, 16), 10)}, ValueError, message)


def test_unknown_library_on_cuda_must_pass_its_stream():
    message = (
        "stream must be given, because the current stream of Foreign (q) is not known; "
        "pass stream= and out="
    )
    Refused(Cpu(), "attention").check({"q": Foreign((2, 5, 4, 16))}, ValueError, message)


@pytest.mark.skipif(cuattn.info()["cuda"] is not None, reason="this build has CUDA")
def test_cuda_array_in_a_build_without_cuda():
    q, k, v = (Foreign(shape) for shape in ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)))
    message = (
        "the arrays are on cuda:0 but this build of cuattn has no CUDA kernels; "
        "rebuild with CUATTN_CUDA=ON, or move them to the CPU"
    )
    changes = {"q": q, "k": k, "v": v, "stream": 1}
    Refused(Cpu(), "attention").check(changes, RuntimeError, message)


on_cuda = pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}")


@pytest.mark.gpu
@on_cuda
def test_rows_on_cuda_start_on_16_bytes():
    device = Cuda()
    view = device.view(device.buffer(65536), F32, 0, (2, 7, 2, 16), (252, 36, 18, 1))
    message = (
        "k must have rows that start on 16 bytes, got strides (252, 36, 18, 1) in elements "
        f"of 4 bytes; {COPY}"
    )
    Refused(device, "attention").check({"k": view}, ValueError, message)
    view = device.view(device.buffer(65536), F32, 4, (2, 7, 2, 16), (224, 32, 16, 1))
    message = f"k must start on 16 bytes, got an address with remainder 4; {COPY}"
    Refused(device, "attention").check({"k": view}, ValueError, message)


@pytest.mark.gpu
@on_cuda
def test_arrays_of_host_and_cuda():
    import torch

    device = Cuda()
    message = "k must be on cuda:0 like q, got cpu; move it there"
    Refused(device, "attention").check({"k": torch.ones(2, 7, 2, 16)}, ValueError, message)
    message = "sinks must be on cuda:0 like q, got cpu; move it there"
    Refused(device, "attention").check({"sinks": torch.ones(4)}, ValueError, message)
    message = "workspace must be on the device of q; allocate it there"
    changes = {"workspace": torch.ones(4096), "backend": "naive"}
    Refused(device, "attention").check(changes, ValueError, message)


CHECKED = """
import torch, cuattn
def lengths(*values): return torch.tensor(values, dtype=torch.int32, device="cuda")
q = torch.ones(5, 2, 16, device="cuda", dtype=torch.float16)
for cu_seqlens in ((0, 3, 2), (1, 2, 5), (0, 2, 9)):
    try:
        cuattn.attention_varlen(q, q, q, lengths(*cu_seqlens), lengths(0, 2, 5), 9, 9)
    except ValueError as error:
        print(error)
out = cuattn.attention_varlen(q, q, q, lengths(0, 2, 5), lengths(0, 2, 5), 3, 3)
print(bool((out == 1).all()))
"""


@pytest.mark.gpu
@on_cuda
def test_lengths_on_the_device_are_checked_on_request():
    """CUATTN_CHECK=1 reads cu_seqlens back; without it they are clamped and nothing breaks."""
    for checked in ("1", "0"):
        environment = {**os.environ, "CUATTN_CHECK": checked}
        command = [sys.executable, "-c", CHECKED]
        lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines = lines.stdout.splitlines()
        assert lines[-1] == "True"
        if checked == "1":
            assert lines[:-1] == [
                "attention_varlen: cu_seqlens_q must not decrease, got 2 after 3 at index 2; "
                "pass the running sum of the sequence lengths",
                "attention_varlen: cu_seqlens_q must start at 0, got 1; "
                "element i is where sequence i begins",
                "attention_varlen: cu_seqlens_q must end within the rows of q, got 9 with 5 rows; "
                "the last element is the total length",
            ]
