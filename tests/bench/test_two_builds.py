# SPDX-License-Identifier: Apache-2.0
"""benchmarks/two_builds.py calls the C ABI by structs of its own, and is right on the CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import cuattn
import frameworks

torch = frameworks.require("torch")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "two_builds.py"
LIBRARY = Path(cuattn.__file__).parent / "lib" / "libcuattn.so"


@pytest.mark.parametrize(("rows", "count"), [("paged", 24), ("forward", 24), ("backward", 12)])
def test_a_build_beside_itself_gives_the_same_bits_and_a_file_of_all_rounds(tmp_path, rows, count):
    words = [LIBRARY, LIBRARY, "--seconds", "1000", "--rows", rows, "-o", tmp_path / "two.json"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "CUATTN_NUM_THREADS": "2", "PATH": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))["rows"]
    assert len(found) == count
    assert all(row["same_bits"] for row in found)
    assert all(len(times) == 9 for row in found for times in row["ms"])
    assert "all rows: before / after" in done.stdout
    assert f"the same bits in {count}" in done.stdout


def load(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = importlib.util.spec_from_file_location("two_builds", SCRIPT)
    two = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(two)
    if two.IS_CUDA:
        pytest.skip("reads arrays of the CPU")
    return two


def test_its_result_is_that_of_attention(monkeypatch):
    two = load(monkeypatch)
    for score, causal in (("softcap", True), ("bias", False), ("none", True)):
        row = two.ForwardRow(16, 5, 9, 4, 2, score=score, causal=causal)
        x = two.Arrays(row)
        run, (out, *_) = two.Build(LIBRARY).prepare(row, x)
        run()
        options = {"softcap": 30.0} if score == "softcap" else {}
        if score == "bias":
            options["bias"] = x.views[0][0]
        q, k, v = x.sets[0]
        expected = cuattn.attention(q, k, v, causal=causal, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_its_gradients_are_those_of_attention_backward(monkeypatch):
    two = load(monkeypatch)
    x = two.Arrays(two.BackwardRow(16, 9, True, "cpu", heads=2))
    run, outs = two.Build(LIBRARY).prepare(two.BackwardRow(16, 9, True, "cpu", heads=2), x)
    run()
    for got, want in zip(outs, cuattn.attention_backward(*x.sets[0], causal=True), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_its_result_is_that_of_paged_attention(monkeypatch):
    two = load(monkeypatch)
    for planned in (True, False):
        row = two.Row(8, 2, 3, 64, 16, planned=planned, softcap=3.0)
        x = two.Arrays(row)
        run, outs = two.Build(LIBRARY).prepare(row, x)
        run()
        tables, lens = (a for a, _ in x.views[:2])
        for (q, k, v), out in zip(x.sets, outs, strict=True):
            expected = cuattn.paged_attention(q, k, v, tables, lens, softcap=3.0)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
