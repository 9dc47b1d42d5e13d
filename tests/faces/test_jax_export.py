# SPDX-License-Identifier: Apache-2.0
"""Programs with cuattn's calls go through jax.export, over a mesh too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import frameworks

jax = frameworks.require("jax")
import cuattn.jax  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "exported_calls.py"
needs_types = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="an older JAX")


@needs_types
def test_an_exported_program_gives_the_same_on_one_device_and_on_four():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    devices = {"one device": 1, "shard_map": 4, "explicit axes": 4}
    assert {name: count for name, _, count, _ in found} == devices
    for name, apart, _, gathers in found:
        assert apart <= 1e-5, (name, apart)
        assert not gathers, name


def test_without_the_list_jax_refuses():
    x = np.zeros((1, 4, 2, 16), np.float32)
    function = jax.jit(lambda x: cuattn.jax.attention(x, x, x))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        jax.export.export(function)(x)
    assert {"cuattn_attention", "cuattn_paged_attention"} <= set(cuattn.jax.export_targets())


@needs_types
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda found: found.pop("dropout_row"), "attribute dropout_row is missing from"),
        (lambda found: found.pop("backend"), "attribute backend is missing from"),
        (
            lambda found: found.update(causal=np.float64(1)),
            "attribute causal of the XLA call has another dtype",
        ),
        (lambda found: found.update(present=np.int64(1)), "another number of arguments"),
    ],
)
def test_a_program_of_another_version_says_so(change, what, monkeypatch):
    """Of attributes as an older or a newer version would have written them down."""
    x = np.zeros((1, 4, 2, 16), np.float32)
    real = jax.ffi.ffi_call

    def ffi_call(*target, **given):
        def called(*arrays, **found):
            change(found)
            return real(*target, **given)(*arrays, **found)

        return called

    jax.clear_caches()
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    checks = [jax.export.DisabledSafetyCheck.custom_call(x) for x in cuattn.jax.export_targets()]
    function = jax.jit(lambda x: cuattn.jax.attention(x, x, x))
    exported = jax.export.export(function, disabled_checks=checks)(x)
    monkeypatch.undo()
    jax.clear_caches()
    version = re.escape(cuattn.__version__)
    way_out = f"this is version {version}; trace or export the program again with it"
    with pytest.raises(Exception, match=f"cuattn: .*{what}.*{way_out}"):
        np.asarray(exported.call(x))
    assert np.asarray(cuattn.jax.attention(x, x, x)).shape == x.shape
