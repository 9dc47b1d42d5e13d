# SPDX-License-Identifier: Apache-2.0
"""What tests of functors share."""

from __future__ import annotations

from pathlib import Path

import pytest

import cuattn
import harness
from cuattn.flex import functors
from emulated_functor import machine_code


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
