# SPDX-License-Identifier: Apache-2.0
"""The array libraries of the framework tests: how numpy values become their arrays and back."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dlpack
import harness


def require(name):
    """Import a framework; where it is missing, skip the test, or at a module's top the module, or
    fail under CUATTN_REQUIRE_FRAMEWORKS=1.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CUATTN_REQUIRE_FRAMEWORKS") == "1":
            raise
        pytest.skip(f"{name} is not installed", allow_module_level=True)


JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def require_gpu_of_jax():
    """Skip where JAX sees no GPU; under CUATTN_REQUIRE_CUDA=1 fail, unless JAX is one of the CPU
    alone that CUATTN_REQUIRE_FRAMEWORKS=1 does not ask to be another.
    """
    if require("jax").default_backend() in ("gpu", "cuda"):
        return
    is_asked = os.environ.get("CUATTN_REQUIRE_FRAMEWORKS") == "1"
    is_expected = is_asked or any(map(importlib.util.find_spec, JAX_PLUGINS))
    if is_expected and os.environ.get("CUATTN_REQUIRE_CUDA") == "1":
        pytest.fail("CUATTN_REQUIRE_CUDA=1, but JAX sees no GPU", pytrace=False)
    pytest.skip("JAX sees no GPU")


def run_of_jax(script, *words):
    """Run a script of this folder in a process that sees all GPUs; return the lines of its JSON."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    gpus = os.environ.get("CUATTN_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    env = {**os.environ} if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_gpus_of_jax(count):
    """Skip where there are fewer GPUs, in all, than a script needs, or JAX sees none."""
    require_gpu_of_jax()
    gpus = os.environ.get("CUATTN_TEST_GPUS")
    here = len(gpus.split(",")) if gpus else len(require("jax").devices("gpu"))
    if here < count:
        pytest.skip(f"{count} GPUs, {here} here")


def require_transformers():
    """transformers, of a version that cuattn's integration takes."""
    module = require("transformers")
    from cuattn.integrations.transformers import register

    try:
        register()
    except ImportError as why:
        if os.environ.get("CUATTN_REQUIRE_FRAMEWORKS") == "1":
            raise
        pytest.skip(str(why), allow_module_level=True)
    return module


def bits_of(array):
    """A numpy array of raw integers, bfloat16 included, so that libraries without it can copy."""
    return array.view({1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize])


class OnlyDlpack:
    """A tensor of which no more than its DLPack export is seen, and what was asked of that."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.requests = []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **request):
        self.requests.append(request)
        return self.tensor.__dlpack__(**request)


class Numpy:
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16)

    def put(self, values):
        return np.array(values)

    def get(self, array):
        return np.asarray(array)

    def owns(self, array):
        return type(array) is np.ndarray


class Torch(Numpy):
    def __init__(self, device="cpu"):
        self.torch = require("torch")
        if device == "cuda" and harness.why_no_cuda() is not None:
            pytest.skip(harness.why_no_cuda())
        self.device = device

    def put(self, values):
        names = {ml_dtypes.bfloat16: "bfloat16", np.bool_: "bool"}
        dtype = getattr(self.torch, names.get(values.dtype.type, values.dtype.name))
        if values.dtype == np.bool_:
            return self.torch.from_numpy(values.copy()).to(self.device)
        return self.torch.from_numpy(bits_of(values).copy()).view(dtype).to(self.device)

    def get(self, array):
        array = array.detach().cpu()
        if array.dtype == self.torch.bfloat16:
            return array.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()

    def owns(self, array):
        return type(array) is self.torch.Tensor and array.device.type == self.device


class Jax(Numpy):
    def __init__(self):
        self.jax = require("jax")

    def put(self, values):
        return self.jax.device_put(values, self.jax.devices("cpu")[0])

    def owns(self, array):
        return isinstance(array, self.jax.Array)


class Cupy(Numpy):
    dtypes = (np.float32, np.float16)

    def __init__(self):
        if harness.why_no_cuda() is not None:
            pytest.skip(harness.why_no_cuda())
        self.cupy = pytest.importorskip("cupy")

    def put(self, values):
        return self.cupy.asarray(values)

    def get(self, array):
        return self.cupy.asnumpy(array)

    def owns(self, array):
        return type(array) is self.cupy.ndarray


class Foreign(Numpy):
    """Objects with `__dlpack__` alone; numpy arrays must be given as outputs."""

    dtypes = (np.float32, np.float16)

    def __init__(self, version=(1, 1)):
        self.version = version

    def put(self, values):
        return dlpack.Array(np.array(values), version=self.version)


CPU = {
    "numpy": Numpy,
    "torch": Torch,
    "jax": Jax,
    "dlpack": Foreign,
    "dlpack-0": lambda: Foreign((0, 8)),
}
CUDA = {"torch-cuda": lambda: Torch("cuda"), "cupy": Cupy}
