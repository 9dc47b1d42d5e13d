# SPDX-License-Identifier: Apache-2.0
"""The suite itself: it runs without torch and JAX, demands them when told, and finishes later."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import frameworks

TESTS = Path(__file__).resolve().parents[1]
WITHOUT = """
import sys
sys.modules.update(torch=None, jax=None)  # importing them now fails as on a machine without them
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(*command, folder=TESTS.parent, code=0, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "CUATTN_REQUIRE_CUDA": "0", **environment},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def collect_without_frameworks(*paths, **options):
    words = ("--collect-only", "-q", "-p", "no:cacheprovider")
    return run("-c", WITHOUT, *words, *paths, **options)


def test_suite_is_collected_without_torch_and_jax():
    text = collect_without_frameworks(TESTS, CUATTN_REQUIRE_FRAMEWORKS="0")
    assert "test_contract.py::" in text
    assert "test_jax.py::" not in text


def test_frameworks_that_are_required_and_missing_are_errors():
    needy = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if "= frameworks.require(" in source(path)
    }
    assert {"faces/test_jax.py", "faces/test_torch.py", "bench/test_bench_paged.py"} <= needy
    paths = (TESTS / name for name in sorted(needy))  # the others, which need none, take 8 s
    text = collect_without_frameworks(*paths, CUATTN_REQUIRE_FRAMEWORKS="1", code=2)
    for name in needy:
        assert f"ERROR tests/{name}" in text


def test_no_test_file_imports_another():
    """A room can be run alone; what several share stands beside the rooms."""
    lines = [line for path in TESTS.rglob("test_*.py") for line in path.read_text().splitlines()]
    assert not [line for line in lines if re.match(r"\s*(from|import) test_", line)]


def test_no_module_of_the_tests_takes_the_place_of_a_library():
    """pytest puts the folder of each test file on the path of the whole run."""
    folders = {TESTS, *(path.parent for path in TESTS.rglob("test_*.py"))}
    names = {path.stem for folder in folders for path in folder.glob("*.py")}
    libraries = {"cupy", "flash_attn", "flashinfer", "hypothesis", "jax", "ml_dtypes", "numpy"}
    libraries |= {"pytest", "torch", "transformers", *sys.stdlib_module_names}
    assert not names & libraries


def source(path):
    """The top level of a test file."""
    return "".join(line for line in path.read_text().splitlines(True) if not line.startswith(" "))


@pytest.mark.parametrize(("fails", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_skip_passed_runs_what_was_skipped_and_what_failed(tmp_path, fails, workers):
    if workers > 0:
        pytest.importorskip("xdist")
    (tmp_path / "test_three.py").write_text(
        "import os, pytest\n"
        "late = os.environ['LATE'] == '1'\n"
        "def test_runs(): assert not late\n"
        "def test_needs(): late or pytest.skip('not there yet')\n"
        f"def test_fails(): assert late or not {fails}\n"
    )
    words = ["-m", "pytest", "-p", "conftest", "--rootdir", tmp_path, "test_three.py"]
    words += ["-n", workers, "--dist", "worksteal"] if workers > 0 else []
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # cuattn may be on it
    place = {"folder": tmp_path, "PYTHONPATH": os.pathsep.join(paths)}
    first = run(*words, **place, LATE="0", code=int(fails))
    assert f"{2 - fails} passed, 1 skipped" in first
    again = run(*words, "--skip-passed", **place, LATE="1")
    left_out = "" if workers > 0 else f", {2 - fails} deselected"  # of workers nobody hears it
    assert f"{1 + fails} passed{left_out} in " in again
    run(*words, "--skip-passed", **place, LATE="1", code=5)  # nothing is left


DEMO = "    python3 -m venv .venv && .venv/bin/python -m cuattn demo\n"
SUITE = "    python3 -m venv .venv && .venv/bin/pytest -n auto\n"


@pytest.mark.parametrize("commands", [(), (DEMO,), (SUITE, DEMO), (DEMO, SUITE, SUITE)])
def test_ci_asks_for_the_two_commands_of_the_readme(commands, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(TESTS.parent / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text("# cuattn\n\n" + "\n".join(commands))
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"the demo and the tests; found {len(commands)}:\n" in done.stderr
    assert done.stdout == ""  # no step has begun


@pytest.mark.parametrize("cuda", ["0", "1"])
@pytest.mark.parametrize("asked", ["0", "1"])
@pytest.mark.parametrize("plugins", [(), ("numpy",)])
def test_a_gpu_that_jax_must_see_and_does_not_is_an_error(monkeypatch, cuda, asked, plugins):
    jax = frameworks.require("jax")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(frameworks, "JAX_PLUGINS", plugins)
    monkeypatch.setenv("CUATTN_REQUIRE_CUDA", cuda)
    monkeypatch.setenv("CUATTN_REQUIRE_FRAMEWORKS", asked)
    is_error = cuda == "1" and (asked == "1" or bool(plugins))
    with pytest.raises(pytest.fail.Exception if is_error else pytest.skip.Exception):
        frameworks.require_gpu_of_jax()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    frameworks.require_gpu_of_jax()
