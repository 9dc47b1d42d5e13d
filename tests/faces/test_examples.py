# SPDX-License-Identifier: Apache-2.0
"""Every Python example runs as it stands, or says what it lacks."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # a process that aborts says where
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_or_says_what_it_lacks(path):
    few = {"train_jax": ["4"]}  # steps, each compiled program being what takes the time
    text = run(str(path), *few.get(path.stem, []))
    assert text.strip()
    lines = {
        "continuous_batching": 280,
        "train_gpt": 80,
        "train_numpy": 70,
        "train_jax": 100,
        "train_over_ranks": 90,
    }  # whole programs
    assert len(path.read_text(encoding="utf-8").splitlines()) < lines.get(path.stem, 60)
    if text.startswith("skipped"):
        required = os.environ.get("CUATTN_REQUIRE_FRAMEWORKS") == "1"
        needed = ("torch_module", "train_gpt", "jax_attention", "train_jax", "train_over_ranks")
        assert not (required and path.stem in needed), text
        pytest.skip(text.strip())
    if path.stem == "continuous_batching" and os.environ.get("CUATTN_REQUIRE_CUDA") == "1":
        assert text.startswith("torch on cuda")  # whole steps as one CUDA graph


def test_sentence_search_reads_a_file_of_the_user(tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    text = tmp_path / "lines.txt"
    text.write_text("A cat sleeps on the sofa.\nThe bank raised its rates.\n", encoding="utf-8")
    out = run(str(EXAMPLES / "sentence_embeddings.py"), "Interest on loans went up.", str(text))
    if out.startswith("skipped"):
        pytest.skip(out.strip())
    first, second = out.splitlines()[1:3]
    assert "bank" in first
    assert "cat" in second
