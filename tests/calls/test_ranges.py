# SPDX-License-Identifier: Apache-2.0
"""CUATTN_RANGES=1: public calls as ranges of the profilers that are there."""

import os
import subprocess
import sys

import pytest

import cuattn
from cuattn import _ranges
from frameworks import require

# A stand-in for the nvtx package, which writes down what it is told.
NVTX = """
import sys, types
events = []
nvtx = types.ModuleType("nvtx")
nvtx.__spec__ = types.SimpleNamespace(name="nvtx")
nvtx.push_range, nvtx.pop_range = events.append, lambda: events.append("pop")
sys.modules["nvtx"] = nvtx
import numpy as np, cuattn
x = np.ones((1, 3, 2, 8), np.float32)
"""


def printed(code, value="1"):
    environment = {**os.environ, "CUATTN_RANGES": value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


# They tell something and compute nothing on arrays.
TELLING = {"cmake_dir", "explain", "info", "kernels", "kv_cache_bytes"}


def test_every_public_call_has_a_range():
    public = {name: getattr(cuattn, name) for name in cuattn.__all__}
    calls = {name for name, x in public.items() if callable(x) and not isinstance(x, type)}
    assert set(_ranges.OPS) == calls - TELLING
    assert calls >= TELLING
    assert list(_ranges.OPS) == sorted(set(_ranges.OPS))


def test_a_call_of_several_steps_is_one_range():
    code = NVTX + (
        "x = x.repeat(2, -1)\n"
        "cuattn.dequantize(cuattn.quantize_like(x, 0.5), 0.5)\n"
        "cuattn.rope_attention(x, x, x, *cuattn.rope_table(3, 8))\n"
        "cuattn.flex_attention(x, x, x)\n"
        "print(*[event for event in events if event != 'pop'])"
    )
    names = ("quantize_like", "dequantize", "rope_table", "rope_attention", "flex_attention")
    assert printed(code) == [f"cuattn.{name}" for name in names]


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_wrapped_when_it_is_off(value):
    code = NVTX + (
        "from cuattn.attention import attention\n"
        "cuattn.attention(x, x, x)\n"
        "print(cuattn.attention is attention, events)"
    )
    assert printed(code, value) == ["True", "[]"]


def test_calls_push_and_pop():
    code = NVTX + (
        "out, lse = cuattn.attention(x, x, x, return_lse=True)\n"
        "cuattn.merge_states(out, lse, out, lse)\n"
        "print(*events)"
    )
    assert printed(code) == ["cuattn.attention", "pop", "cuattn.merge_states", "pop"]


def test_a_call_that_raises_pops():
    code = NVTX + (
        "try:\n    cuattn.attention(x, x, x, scale='no')\n"
        "except TypeError:\n    print('refused', *events)"
    )
    assert printed(code) == ["refused", "cuattn.attention", "pop"]


def test_names_and_docs_stay():
    code = (
        "import inspect, cuattn\n"
        "from cuattn.attention import attention\n"
        "assert cuattn.attention is not attention\n"
        "assert cuattn.attention.__name__ == 'attention'\n"
        "assert cuattn.attention.__doc__ == attention.__doc__\n"
        "print(inspect.signature(cuattn.attention) == inspect.signature(attention))"
    )
    assert printed(code) == ["True"]


@pytest.mark.parametrize("call", ["cuattn.attention", "cuattn.torch.attention"])
def test_torch_profiler_sees_each_call(call):
    require("torch")
    code = (
        "import torch, cuattn\n"
        "x = torch.ones(1, 3, 2, 8)\n"
        "with torch.profiler.profile() as profile:\n"
        f"    {call}(x, x, x)\n"
        "print(*[e.count for e in profile.key_averages() if e.key == 'cuattn.attention'])"
    )
    assert printed(code) == ["1"]


def test_torch_compile_traces_beneath_the_range():
    require("torch")
    code = (
        "import torch, cuattn\n"
        "x = torch.randn(1, 3, 2, 8)\n"
        "step = torch.compile(lambda x: cuattn.attention(x, x, x) * 2, backend='eager',"
        " fullgraph=True)\n"
        "torch.testing.assert_close(step(x), cuattn.attention(x, x, x) * 2)\n"
        "print('traced')"
    )
    assert printed(code) == ["traced"]
