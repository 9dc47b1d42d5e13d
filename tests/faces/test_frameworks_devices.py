# SPDX-License-Identifier: Apache-2.0
"""The border on CUDA as far as it shows without a GPU: streams, devices, what cuBLAS is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import dlpack

SHAPE = (2, 9, 4, 32)  # [batch, seqlen, num_heads, head_dim]


def inputs(rng, dtype=np.float32, shape=SHAPE):
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def fake_device_array(device=(dlpack.CUDA, 0)):
    """An array that says it is on a GPU; no kernel ever sees it, since k is refused before."""
    return dlpack.zeros(SHAPE, device=device)


def test_an_unknown_library_on_cuda_must_bring_its_stream():
    q = fake_device_array()
    with pytest.raises(ValueError, match=r"attention: stream must be given.*pass stream= and out="):
        cuattn.attention(q, q, q)


@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (1, 1), (2, 2), (4096, 4096)])
def test_an_unknown_library_on_cuda_orders_itself_behind_the_given_stream(stream, asked):
    q = fake_device_array()
    with pytest.raises(TypeError, match="attention: k must be an array"):
        cuattn.attention(q, None, q, stream=stream)
    assert q.requests == [{"stream": asked, "max_version": (1, 1)}]
    assert q.open_exports == 0


def test_stream_objects_are_read():
    class Torch:
        cuda_stream = 4096

    class Cupy:
        ptr = 4096

    class Protocol:
        def __cuda_stream__(self):
            return (0, 4096)

    for stream in (Torch(), Cupy(), Protocol()):
        q = fake_device_array()
        with pytest.raises(TypeError, match="attention: k must be an array"):
            cuattn.attention(q, None, q, stream=stream)
        assert q.requests[0]["stream"] == 4096


def test_cupy_is_asked_not_to_synchronise_and_for_its_current_stream(monkeypatch):
    """With a module in CuPy's place: the protocol, without a GPU."""
    asked = []

    class Fake(type(sys)):
        class ndarray(dlpack.Array):
            pass

        class cuda:
            @staticmethod
            def get_current_stream(device):
                asked.append(device)
                return type("Stream", (), {"ptr": 4096})

    fake = Fake("cupy")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    q = fake.ndarray(np.zeros(SHAPE, np.float32), device=(dlpack.CUDA, 3))
    other = fake_device_array((dlpack.CUDA, 3))
    with pytest.raises(TypeError, match="attention: v must be an array"):
        cuattn.attention(q, other, None)
    assert q.requests == [{"stream": -1, "max_version": (1, 1)}]
    assert asked == [3]
    assert other.requests == [{"stream": 4096, "max_version": (1, 1)}]


def test_devices_may_not_be_mixed(rng):
    q, _, v = inputs(rng)
    with pytest.raises(ValueError, match="attention: k must be on cpu like q, got cuda:0"):
        cuattn.attention(q, fake_device_array(), v)


FIND_CUBLAS = """
import os, sys
sys.path[:0] = ["", "relative", None, sys.argv[1]]
from cuattn import _arrays
assert _arrays.calls_cublas() == any(k["kernel"] == "cublas" for k in _arrays._core.kernels())
_arrays.calls_cublas = lambda: True  # as in a build with CUDA
_arrays.find_cublas()
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libcublas" in line})
"""


@pytest.mark.parametrize("chosen", [False, True])
def test_cublas_is_loaded_from_the_wheels_and_not_from_the_current_folder(tmp_path, chosen):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    wheels = tmp_path / "wheels"
    for place in (tmp_path, tmp_path / "relative", wheels):
        library = place / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
        library.parent.mkdir(parents=True)
        words = ["-shared", "-xc++", "/dev/null", f"-Wl,-soname,{library.name}", "-o", library]
        subprocess.run([compiler, *words], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "CUATTN_CUBLAS_PATH"}
    if chosen:
        environment["CUATTN_CUBLAS_PATH"] = "/nonexistent"
    done = subprocess.run(
        [sys.executable, "-c", FIND_CUBLAS, wheels],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ([] if chosen else [str(library)])


def test_naming_cublas_leaves_the_environment_as_it_was(monkeypatch, tmp_path, rng):
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.delenv("CUATTN_CUBLAS_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    before = dict(os.environ)
    with pytest.raises(NotImplementedError, match="backend 'cublas' cannot run this call"):
        cuattn.attention(*inputs(rng), backend="cublas")
    assert dict(os.environ) == before
