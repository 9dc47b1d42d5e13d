# SPDX-License-Identifier: Apache-2.0
"""What tests of functors share: arrays on CUDA, or the emulator, and a compiler for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cuattn
import harness
from cuattn.flex import functors
from emulated_functor import machine_code


def to_device(device, x):
    if harness.is_emulated():
        import cupy

        return cupy.asarray(x)
    import torch

    return torch.from_numpy(x).to("cuda")


def to_host(x):
    return np.asarray(x.cpu().numpy() if hasattr(x, "cpu") else x.values, np.float64)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Compile functors with NVRTC, on the emulator with g++."""
    if not harness.is_emulated():
        monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
        return
    build = Path(cuattn.__file__).parents[1]
    monkeypatch.setattr(
        functors, "machine_code", lambda source, _: machine_code(source, build, tmp_path)
    )
