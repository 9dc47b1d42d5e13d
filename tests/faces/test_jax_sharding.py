# SPDX-License-Identifier: Apache-2.0
"""Over a mesh batch and heads stay where they lie, in both directions; on four CPU devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import frameworks

frameworks.require("jax")
from cuattn.jax import sharding  # noqa: E402  after what it needs

pytestmark = pytest.mark.skipif(not sharding.SPREADS, reason="JAX before 0.7 gathers")

SCRIPT = Path(__file__).resolve().parents[1] / "sharded_calls.py"
OWN = ("sinks", "slopes", "bias")  # cases with a gradient of an array that lies on every device


@pytest.fixture(scope="module")
def lines():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_values_and_gradients_are_those_of_one_device(lines):
    assert len(lines) > 40
    for mesh, case, *found in lines:
        right = found[:1] if mesh == "other" else found[1:3]
        assert all(right), (mesh, case, found)


def test_nothing_is_gathered(lines):
    calls = [line for line in lines if line[0] != "other" and line[1] != "dropout"]
    assert {kind for _, _, kind, *_ in calls} == {"Auto", "Explicit"}
    for mesh, case, kind, _, _, kept, forward, backward in calls:
        assert kept, (mesh, case, kind)
        assert forward == [], (mesh, case, kind)
        allowed = set()
        if case.startswith((*OWN, "mqa")):
            allowed.add("all-reduce")  # what several devices have a share of
        if kind == "Explicit" and case.startswith(OWN):
            allowed.add("all-gather")  # its type says that it lies on every device
        assert set(backward) <= allowed, (mesh, case, kind)


def test_dropout_is_gathered_because_its_bits_count_places(lines):
    found = [line for line in lines if line[1] == "dropout"]
    assert found
    assert all("all-gather" in line[6] for line in found)
