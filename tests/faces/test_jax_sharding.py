# SPDX-License-Identifier: Apache-2.0
"""Over a mesh batch and heads stay where they lie, both ways; on 4 and 8 CPU devices, or 4 GPUs."""

from __future__ import annotations

import pytest

import frameworks

frameworks.require("jax")
from cuattn.jax import sharding  # noqa: E402  after what it needs

pytestmark = pytest.mark.skipif(not sharding.SPREADS, reason="JAX before 0.7 gathers")

OWN = ("sinks", "slopes", "bias")  # cases with a gradient of an array that lies on every device


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def lines(request):
    if request.param == "gpu":
        frameworks.require_gpus_of_jax(4)
    return frameworks.run_of_jax("sharded_calls.py", request.param)


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


NONE, SUM, GATHER = [], ["all-reduce"], ["all-gather"]
TABLE = {  # what forward and backward together may send; sums are gradients of shared heads
    "4": {
        "two axes": NONE,
        "sequence": GATHER,
        "sequence of keys": GATHER,
        "8/2 over 2x2": SUM,
        "8/2 over 4": SUM,
        "8/1 over 4": SUM,
        "12/4 over 4": NONE,
        "12/6 over 2x2": GATHER,
        "12/6 over 4": GATHER,
        "6/3 over 2": GATHER,
        "scan": NONE,
        "vmap": NONE,
        "vmap of shared keys": [*SUM, "collective-permute"],
        "tensor-parallel layer": SUM,
        "ragged": SUM,
        "ragged, cut rows": [*GATHER, "collective-permute"],
        "pages, heads": GATHER,
        "pages, batch": GATHER,
    },
    "8": {
        "8/4 over 2x4": SUM,
        "8/4 over 4x2": SUM,
        "8/4 over 8": SUM,
        "8/2, batch": SUM,
        "24/6 over 8": GATHER,
    },
}


@pytest.mark.parametrize("devices", TABLE)
def test_heads_and_sequences_however_they_are_spread(devices):
    found = {name: rest for name, *rest in frameworks.run_of_jax("sharded_table.py", devices)}
    assert list(found) == list(TABLE[devices])
    for name, (apart, kept, collectives) in found.items():
        assert apart <= 1e-4, (name, apart)  # of units; a wrong head or row is off by 1 and more
        assert set(collectives) <= set(TABLE[devices][name]), (name, collectives)
        assert all(kept) or "all-gather" in collectives, (name, kept)
