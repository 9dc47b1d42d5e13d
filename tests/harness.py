# SPDX-License-Identifier: Apache-2.0
"""Puts numpy arrays on a device between guard bands, runs a case there, and judges what comes back.

Every array lies in a buffer of 0xFF bytes (NaN in every float type, -1 in int32) that is 512
elements wider on both sides. `Arena.verify` then asserts that inputs and everything outside the
outputs are bitwise what they were.
"""

from __future__ import annotations

import collections
import functools
import gc
import hashlib
import os

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
from strides import element_strides, geometry

GUARD = 512  # elements on each side
ROW_BYTES = 16  # rows of q, k, v and out start at multiples of this


@functools.cache
def why_no_cuda():
    """None when CUDA cases can run, else the reason to skip them; CUATTN_REQUIRE_CUDA=1 makes that
    an error.
    """
    reason = _why_no_cuda()
    if reason is not None and os.environ.get("CUATTN_REQUIRE_CUDA") == "1":
        pytest.exit(f"CUATTN_REQUIRE_CUDA=1, but {reason}", returncode=2)
    return reason


def capturing(graph):
    """Return torch's capture; in its default mode threads of another library may break it."""
    import torch

    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def _why_no_cuda():
    info = cuattn.info()
    if not info["cuda"]:
        return "this build has no CUDA"
    if not info["cuda"]["devices"]:
        return "no CUDA device"
    if is_emulated():
        return None
    try:
        import torch
    except ImportError:
        return "torch is not installed; the CUDA cases use its tensors"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@functools.cache
def is_emulated():
    """Whether the CUDA device of this build is the emulator (docs/emulator.md)."""
    cuda = cuattn.info()["cuda"]
    return bool(cuda) and [d["name"] for d in cuda["devices"]] == ["emulated"]


def cuda_device():
    return Emulated() if is_emulated() else Cuda()


def free_bytes(torch):
    """Free memory of the device; beside other test processes, what this one's allocator holds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return -torch.cuda.memory_reserved()
    return torch.cuda.mem_get_info()[0]


@functools.cache
def has_hopper():
    """Whether CUDA cases run on a GPU of compute capability 9.0 that has its machine code."""
    if why_no_cuda() is not None:
        return False
    first = cuattn.info()["cuda"]["devices"][0]
    if first["compute_capability"] != "9.0":
        return False
    if first["code"] != "native" and os.environ.get("CUATTN_REQUIRE_CUDA") == "1":
        pytest.exit("CUATTN_REQUIRE_CUDA=1, but the build has no code for 9.0", returncode=2)
    return first["code"] == "native"


def need_memory(gigabytes):
    """Skip a test for which the GPU has too little free memory; CUATTN_REQUIRE_CUDA=1 fails it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests held, so that their sizes do not add up
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        give_up = pytest.fail if os.environ.get("CUATTN_REQUIRE_CUDA") == "1" else pytest.skip
        give_up(f"needs {gigabytes} GiB of device memory, {free:.0f} are free")


def devices():
    """Parameters for a `device` argument: cpu, and cuda or the reason why not."""
    return [Cpu(), cuda_device() if why_no_cuda() is None else skipped_cuda()]


def skipped_cuda(*values):
    reason = f"CUDA: {why_no_cuda()}"
    return pytest.param(
        *(values or (None,)), marks=[pytest.mark.gpu, pytest.mark.skip(reason=reason)], id="cuda"
    )


def targets(cpu=cases.CPU_BACKENDS, cuda=cases.CUDA_BACKENDS):
    """(device, backend) for every backend of every device that is here."""
    listed = [(Cpu(), name) for name in cpu]
    if why_no_cuda() is None:
        missing = {"cublas", "sm90"} if is_emulated() else set() if has_hopper() else {"sm90"}
        listed += [(cuda_device(), name) for name in cuda if name not in missing]
    return listed


def target_params(values=((),), cpu=cases.CPU_BACKENDS, cuda=cases.CUDA_BACKENDS, ids=None):
    """Parameters (device, backend, *value) of a test: every target with every value."""
    params = []
    for i, value in enumerate(values):  # backends side by side share one reference
        value = value if isinstance(value, tuple) else (value,)
        name = ids[i] if ids else "-".join(map(str, value))
        for device, backend in targets(cpu, cuda):
            marks = [pytest.mark.gpu] if type(device) is Cuda else []
            where = "-".join(part for part in (str(device), backend, name) if part)
            params.append(pytest.param(device, backend, *value, id=where, marks=marks))
    if why_no_cuda() is not None:
        value = values[0] if isinstance(values[0], tuple) else (values[0],)
        params.append(skipped_cuda(None, None, *value))
    return params


class Cpu:
    """numpy arrays, bfloat16 by ml_dtypes."""

    name = "cpu"

    def __repr__(self):
        return self.name

    __str__ = __repr__

    def buffer(self, num_bytes):
        raw = np.empty(num_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        buffer = raw[start : start + num_bytes]
        buffer[:] = 0xFF
        return buffer

    def view(self, buffer, dtype, offset_bytes, shape, strides):
        dtype = np.dtype(dtype)
        strides = [s * dtype.itemsize for s in strides]
        return np.ndarray(shape, dtype, buffer=buffer, offset=offset_bytes, strides=strides)

    def write(self, view, values):
        view[...] = values

    def numpy(self, array):
        return np.asarray(array)

    def same_bytes(self, a, b):
        return np.array_equal(a, b)

    def copy(self, buffer):
        return buffer.copy()

    def is_array(self, x):
        return type(x) is np.ndarray

    def synchronize(self):
        pass


class Cuda(Cpu):
    """torch tensors on the current CUDA device."""

    name = "cuda"

    @staticmethod
    def torch_dtype(dtype):
        import torch

        table = {
            np.dtype(np.float32): torch.float32,
            np.dtype(np.float16): torch.float16,
            np.dtype(np.int32): torch.int32,
            np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
            np.dtype(np.bool_): torch.bool,
            np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn,
            np.dtype(np.uint8): torch.uint8,
            np.dtype(np.int8): torch.int8,
            np.dtype(np.int64): torch.int64,
            np.dtype(np.float64): torch.float64,
        }
        return table[np.dtype(dtype)]

    def buffer(self, num_bytes):
        import torch

        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cuda")

    def view(self, buffer, dtype, offset_bytes, shape, strides):
        typed = buffer.view(self.torch_dtype(dtype))
        return typed.as_strided(
            tuple(shape), tuple(strides), offset_bytes // np.dtype(dtype).itemsize
        )

    def write(self, view, values):
        import torch

        values = np.broadcast_to(values, tuple(view.shape))
        for axis, stride in enumerate(view.stride()):
            if stride == 0:  # one memory under many indices, which torch does not write
                view, values = view.narrow(axis, 0, 1), values.take([0], axis)
        values = np.array(values, order="C")  # ascontiguousarray would add an axis to a scalar
        if values.dtype == ml_dtypes.bfloat16:
            host = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        elif values.dtype == ml_dtypes.float8_e4m3fn:
            host = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        else:
            host = torch.from_numpy(values)
        view.copy_(host.to(view.dtype))

    def numpy(self, array):
        import torch

        if array.dtype == torch.bfloat16:
            return array.contiguous().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if array.dtype == torch.float8_e4m3fn:
            return array.contiguous().cpu().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return array.cpu().numpy()

    def same_bytes(self, a, b):
        import torch

        return torch.equal(a, b)

    def copy(self, buffer):
        return buffer.clone()

    def is_array(self, x):
        import torch

        return type(x) is torch.Tensor and x.is_cuda

    def synchronize(self):
        import torch

        torch.cuda.synchronize()


class Emulated(Cpu):
    """numpy memory under the name of CUDA, on which kernels run as C++."""

    name = "cuda"

    def __repr__(self):
        return "emulated"

    __str__ = __repr__

    def view(self, buffer, dtype, offset_bytes, shape, strides):
        import cupy  # tests/emulated/modules/cupy.py

        return cupy.ndarray(super().view(buffer, dtype, offset_bytes, shape, strides))

    def numpy(self, array):
        return getattr(array, "values", array)

    def is_array(self, x):
        return hasattr(x, "values")


def on(device, *arrays):
    """Each array on the device."""
    arena = Arena(device)
    return [arena.put(x) for x in arrays]


def numpy_call(device, function, *arrays, **options):
    """What a function of the library gives for numpy arrays that are put on the device first."""
    place = lambda x: on(device, x)[0] if isinstance(x, np.ndarray) else x  # noqa: E731
    options = {name: place(x) for name, x in options.items()}
    found = function(*map(place, arrays), **options)
    device.synchronize()
    if not isinstance(found, tuple):
        return device.numpy(found)
    values = map(device.numpy, found)
    return type(found)(*values) if hasattr(found, "_fields") else tuple(values)


def bits(array):
    """The bytes of a numpy array, for exact comparison (NaN equals itself)."""
    return np.ascontiguousarray(array).view(np.uint8)


class Arena:
    """The arrays of one call on one device, each between its guard bands."""

    def __init__(self, device):
        self.device = device
        self.held = []  # name, buffer, copy or None for outputs, view

    def put(self, values, storage="contiguous", name="array", align=ROW_BYTES):
        """An input: `values` at `storage`."""
        values = np.asarray(values)
        buffer, view = self._place(values.shape, values.dtype, storage, align)
        self.device.write(view, values)
        self.held.append((name, buffer, self.device.copy(buffer), view))
        return view

    def output(self, shape, dtype, storage="contiguous", name="out", align=ROW_BYTES):
        """A poisoned output: every byte 0xFF."""
        buffer, view = self._place(tuple(shape), np.dtype(dtype), storage, align)
        self.held.append((name, buffer, None, view))
        return view

    def _place(self, shape, dtype, storage, align):
        itemsize = dtype.itemsize
        unit = max(1, align // itemsize)
        strides, extent = element_strides(shape, storage, unit)
        guard = -(-GUARD // unit) * unit
        num_bytes = -(-(extent + 2 * guard) * itemsize // 16) * 16
        buffer = self.device.buffer(num_bytes)
        return buffer, self.device.view(buffer, dtype, guard * itemsize, shape, strides)

    def verify(self):
        """Inputs are what they were, and nothing was written outside the outputs."""
        for name, buffer, copy, view in self.held:
            if copy is not None:
                assert self.device.same_bytes(buffer, copy), (
                    f"{name}: the input or memory beside it was changed"
                )
                continue
            raw = np.array(self.device.numpy(buffer))
            itemsize, shape, strides = geometry(view)
            if 0 not in shape:
                written = np.ndarray(
                    shape,
                    f"u{itemsize}",
                    raw,
                    offset=_offset_bytes(self.device, buffer, view),
                    strides=[n * itemsize for n in strides],
                )
                written[...] = 2 ** (8 * itemsize) - 1  # what the output holds is its own affair
            assert (raw == 0xFF).all(), f"{name}: memory beside the output was written"


def _offset_bytes(device, buffer, view):
    if type(device) is Cuda:
        return view.data_ptr() - buffer.data_ptr()
    return view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]


def run(device, backend, problem, places=None):
    """Call the library for `problem`; returns out and lse as numpy arrays, every buffer checked.

    `places` gives single arrays a storage other than the case's.
    """
    case, arena = problem.case, Arena(device)
    places = {**storages(case), **(places or {})}
    placed = {
        name: arena.put(values, places.get(name, "contiguous"), name)
        for name, values in problem.arrays.items()
    }
    positional = [placed.pop(name) for name in ("q", "k", "v")]
    function = cuattn.attention
    if case.layout == "ragged":
        function = cuattn.attention_varlen
        positional += [placed.pop("cu_seqlens_q"), placed.pop("cu_seqlens_k"), *problem.lengths]
    keywords = {**placed, **problem.options, "backend": backend, "return_lse": True}
    if case.give_out:
        out_shape, lse_shape = output_shapes(problem)
        keywords["out"] = arena.output(out_shape, cases.DTYPES[case.dtype], places["out"], "out")
        place = places.get("lse_out", "contiguous")
        keywords["lse_out"] = arena.output(lse_shape, np.float32, place, "lse_out", align=4)
    out, lse = function(*positional, **keywords)
    device.synchronize()
    if case.give_out:
        assert out is keywords["out"]
        assert lse is keywords["lse_out"]
    assert device.is_array(out), f"out is a {type(out)}"
    assert device.is_array(lse), f"lse is a {type(lse)}"
    arena.verify()
    return device.numpy(out), device.numpy(lse)


def storages(case):
    """The storage of each array; the same memory for all heads makes sense for k and v only."""
    places = dict.fromkeys(("q", "k", "v", "out"), case.storage)
    if case.storage == "expanded":
        places["q"] = places["out"] = "contiguous"
        places["k"] = places["v"] = "expanded_bhsd" if case.layout == "bhsd" else "expanded"
    if case.bias == "transposed":
        places["bias"] = "reversed"
    return places


def output_shapes(problem):
    q, case = problem.arrays["q"], problem.case
    if case.layout == "ragged":
        return (*q.shape[:2], case.dim_v), (q.shape[1], q.shape[0])
    return (*q.shape[:3], case.dim_v), (case.batch, case.num_heads_q, case.seqlen_q)


def serves(backend, device, case):
    """Whether a rung takes a case, by decisions.md; the others must raise NotImplementedError."""
    if device.name == "cpu":
        return True
    if backend == "cublas":
        return case.layout != "ragged" and case.seqused == "none" and not case.kv_start
    if backend == "tiled":
        return max(case.head_dim, case.dim_v) <= 128 and not case.scored and not case.sinks
    if backend == "simt":
        return case.dtype == "float32"
    if backend == "sm90" and max(case.head_dim, case.dim_v) > 256:
        return False
    if backend in cases.TENSOR_CORE_BACKENDS:
        return case.dtype != "float32"
    return True


def assert_by_draws(dtype, attempt, small=None):
    """Run `attempt`, which draws its inputs anew each time, and judge it by the tolerance rule.

    A small excess (less than `small` times the limit) counts when three of five draws show it, any
    other in the first. Infinities and NaN must be right in every draw. `small` is CHANCE of
    cases.py where it is not given.
    """
    if small is None:
        small = cases.CHANCE[dtype]
    misses = 0
    for draw in range(5):
        try:
            with cases.drawn_again():
                attempt()
        except cases.ToleranceExceeded as miss:
            misses += 1
            if miss.excess > small or misses == 3:
                raise
        if misses == 0 or draw + 1 - misses == 3:
            return


def assert_case(device, backend, case, rng, change=None, places=None, small=None):
    """The library against the reference for one case; a rung that does not serve it must say so.

    `change(problem)` alters the random inputs, `places` is that of run(), `small` that of
    assert_by_draws().
    """

    def attempt():
        problem = cases.make_problem(case, rng)
        if change is not None:
            change(problem)
        if serves(backend, device, case):
            judge(problem, *run(device, backend, problem, places))
            return
        with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot run this"):
            run(device, backend, problem, places)

    assert_by_draws(case.dtype, attempt, small)


def judge(problem, out, lse):
    """The tolerance rule, over the rows that belong to a sequence."""
    (expected, expected_lse), (plain, plain_lse) = _references(problem)
    if problem.case.layout == "ragged":
        rows = int(problem.arrays["cu_seqlens_q"][-1])
        out, expected, plain = out[:rows], expected[:rows], plain[:rows]
        lse, expected_lse, plain_lse = lse[:, :rows], expected_lse[:, :rows], plain_lse[:, :rows]
    cases.check_lse(lse, expected_lse, plain_lse)
    cases.check(out, expected, plain, problem.case.dtype)


_recent = collections.OrderedDict()  # the last few references: backends run one after another


def _references(problem):
    """Exact and plain result of a problem, computed once for all backends."""
    digest = hashlib.blake2b(repr((problem.case, problem.options, problem.lengths)).encode())
    for name, array in problem.arrays.items():
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(bits(array) if array.size else b"")
    key = digest.digest()
    if key not in _recent:
        dtype = cases.DTYPES[problem.case.dtype]
        _recent[key] = problem.reference(), problem.reference(dtype)
        if len(_recent) > 4:
            _recent.popitem(last=False)
    return _recent[key]
