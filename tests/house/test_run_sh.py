# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/run.sh: what it says it would run, and what it does with programs that do nothing."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
parts = importlib.import_module("parts")
record = importlib.import_module("record")

RUN = ROOT / "tests" / "gpu" / "run.sh"


def run_sh(*words, **environment):
    keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment = {"CUATTN_GPU_OUT": "build/gpu", "PYTHON": sys.executable, **keep, **environment}
    command = ["bash", str(RUN), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_run_sh_has_every_stage():
    text = RUN.read_text()
    for name in ("build", *parts.STAGES):
        assert re.search(rf"^{name}\(\) {{", text, re.MULTILINE), name


def test_run_sh_refuses_unknown_parts():
    result = run_sh("fast")
    assert result.returncode == 2
    assert "unknown part or stage 'fast'; parts: forward-sm90" in result.stderr


def test_a_dry_run_prints_the_commands_of_the_parts_that_are_named():
    result = run_sh("--dry-run", "--all", "cache", "large")
    assert result.returncode == 0, result.stderr
    headings = re.findall(r"^(\S+) (\S+)$", result.stdout, re.MULTILINE)
    chosen = ("cache", "large")
    assert headings == [(name, stage) for name in chosen for stage in parts.PARTS[name].stages]
    for tool in parts.SANITIZERS:
        assert len(re.findall(rf"compute-sanitizer --tool {tool} .*--sanitize", result.stdout)) == 1
        assert len(re.findall(rf"--tool {tool} .* plant {tool}", result.stdout)) == 1
    assert "test --filter cuda_cache_,cuda_blocks_\n" in result.stdout
    assert re.search(r"-m slow .* tests/attention/test_limits.py", result.stdout)
    assert "watchdog" not in result.stdout


def test_the_watchdog_is_built_where_a_stage_asks_for_it():
    result = run_sh("--dry-run", "--all", "paged", "watchdog")
    assert "-DCUATTN_WATCHDOG=ON" in result.stdout
    assert re.search(r"8 times: \S+/watchdog/\S+ test --filter \S+ --filter sm90", result.stdout)


def test_the_list_names_every_part():
    result = run_sh("--list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(parts.PARTS)


def test_no_stage_begins_when_the_time_is_over():
    result = run_sh("--dry-run", "--all", "cache", CUATTN_GPU_SECONDS="10")
    assert "no time was left for cache/pytest cache/cpp" in result.stdout


FAKES = {
    "python": """
case "$1 $2" in
  "-m pip" | "-c "*xdist* | "-c "*cuattn*) [[ $2 != *xdist* ]] ;;
  "-m pytest")
    while [ "$1" != --junitxml ]; do shift; done
    echo '<testsuite><testcase classname="t" name="t[cuda]"/></testsuite>' >"$2" ;;
  *) exec {python} "$@" ;;
esac""",
    "nvidia-smi": "case $* in *index*) printf '{gpus}' ;; *) echo 'Some GPU, 580.1' ;; esac",
    "nvcc": "echo 'release 13.0, V13.0.1'",
    "cmake": "exit 0",
    "ninja": r"printf 'CMakeFiles/x.dir/cuda/cache/write.cu.o: # (VALID)\n {tree}/cuda/a.cu\n'",
    "compute-sanitizer": """
echo "========= COMPUTE-SANITIZER"
while [[ $1 != */cuattn_tests ]]; do shift; done
"$@" || exit
case $2 in plant) errors=1 ;; *) errors=0 ;; esac
echo "========= ERROR SUMMARY: $errors errors"
exit $errors""",
}


@pytest.fixture
def fake_machine(tmp_path):
    """A tree with run.sh, and programs that do nothing well; the function runs run.sh there."""
    tree = tmp_path / "tree"
    shutil.copytree(RUN.parent, tree / "tests" / "gpu")
    (tree / "README.md").write_text(f"# x\n{record.BEGIN}\n{record.END}\n")
    tests = ("tests/cache/test_cache_rows.py", "tests/attention/test_limits.py")
    for path in ("cuda/a.cu", "src/b.cpp", *tests):
        (tree / path).parent.mkdir(exist_ok=True, parents=True)
        (tree / path).write_text("")

    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    for build in ("tests", "watchdog/tests/cpp"):
        binary = tree / "build" / "gpu" / build / "cuattn_tests"
        program(binary, 'echo "3 passed, 0 failed, 1 skipped"; [ ! -e "$FAILS" ]')

    def run_there(*words, gpus="0"):
        for name, text in FAKES.items():
            for key, value in {"python": sys.executable, "gpus": gpus, "tree": tree}.items():
                text = text.replace(f"{{{key}}}", str(value))
            program(tmp_path / "bin" / name, text)
        environment = {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "FAILS": str(tmp_path / "fails"),
        }
        environment |= {"PYTHON": "python", "CUATTN_SOURCE_HASH": record.tree_hash(tree)}
        return subprocess.run(
            ["bash", tree / "tests" / "gpu" / "run.sh", *words],
            capture_output=True,
            text=True,
            env=environment,
        )

    (tree / "tests" / "gpu" / "record.json").unlink(missing_ok=True)
    return tree, run_there, tmp_path / "fails"


def test_run_sh_records_every_part_where_there_are_several_gpus(fake_machine):
    tree, run_there, _ = fake_machine
    done = run_there(gpus=r"0\n1")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tree / "tests" / "gpu" / "record.json").read_text())
    assert {name: set(stages) for name, stages in content["parts"].items()} == {
        name: set(part.stages) for name, part in parts.PARTS.items()
    }
    assert content["reach"] == {"cuda/a.cu": "cache"}
    counts = content["parts"]["forward-portable"]["memcheck"]
    assert (counts["passed"], counts["sanitizer_errors"]) == (9 * 3, 0)  # 8 shards, and cuBLAS
    assert counts["gpus"] == 2
    assert "**" not in (tree / "README.md").read_text()
    assert "all of it is current" in run_there(gpus=r"0\n1").stdout


def test_run_sh_runs_what_is_stale_and_what_failed_again(fake_machine):
    tree, run_there, fails = fake_machine

    def ran(*words, status):
        done = run_there(*words)
        assert done.returncode == status, done.stdout + done.stderr
        return re.findall(r"^(\S+ \S+): (ok|FAILED)", done.stdout, re.MULTILINE)

    def states():
        lines = run_there("--list").stdout.splitlines()
        return {line.split()[0]: re.split(r"\s{2,}", line)[1] for line in lines}

    stages = [f"cache {stage}" for stage in parts.PARTS["cache"].stages]
    assert ran("cache", "large", status=0) == [(x, "ok") for x in (*stages, "large limits")]
    (tree / "cuda" / "a.cu").write_text("changed")
    assert states()["cache"] == states()["large"] == "sources changed since"
    fails.touch()
    assert ran("cache", "pytest", "cpp", status=1) == [(stages[0], "ok"), (stages[1], "FAILED")]
    assert states()["cache"] == "failed: cpp"
    assert "| **not current**: failed: cpp |" in (tree / "README.md").read_text()
    fails.unlink()
    assert ran("cache", status=0) == [(x, "ok") for x in stages[1:]]
    assert states()["cache"] == "current"
    assert states()["large"] == "sources changed since"
    assert states()["paged"] == "not run"
