# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/record.py, and the record of the last GPU run that it wrote."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("record", ROOT / "tests" / "gpu" / "record.py")
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)


@pytest.fixture
def last_run():
    if not record.RECORD.exists():
        pytest.skip("no GPU run is recorded")
    return json.loads(record.RECORD.read_text())


def test_record_has_every_field(last_run):
    assert set(last_run) == {"sources", "device", "driver", "cuda", "stages"}
    assert len(last_run["sources"]) == 40
    assert last_run["device"]
    assert last_run["driver"]
    assert set(last_run["stages"]) <= set(record.STAGES)
    for name, entry in last_run["stages"].items():
        wanted = {"passed", "failed", "skipped", "seconds", "gpus", "ok"}
        wanted |= {"passed_on_cuda"} if name == "pytest" else set()
        wanted |= {"sanitizer_errors"} if name in record.SANITIZERS else set()
        assert set(entry) == wanted, name


def test_record_shows_no_failure(last_run):
    for name, entry in last_run["stages"].items():
        assert entry["ok"], name
        assert entry["failed"] == 0
        assert entry["passed"] > 0
        assert entry.get("sanitizer_errors", 0) == 0


def test_record_is_of_these_sources(last_run):
    if last_run["sources"] != record.tree_hash():
        pytest.skip("the sources changed since the recorded GPU run: run tests/gpu/run.sh again")
    assert set(last_run["stages"]) == set(record.STAGES)


def test_tree_hash_is_what_git_computes(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name in record.SOURCES:
        path = tmp_path / name if "." in name else tmp_path / name / "a" / "file.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    (tmp_path / "cuda" / "a.cu").write_text("x")
    (tmp_path / "cuda" / "run.sh").write_text("y")
    (tmp_path / "cuda" / "run.sh").chmod(0o755)

    def git(*arguments, stdin=None):
        command = ["git", "-C", tmp_path, *arguments]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    listed = git("ls-files", "-s", *record.SOURCES)
    assert record.tree_hash(tmp_path) == git("hash-object", "--stdin", stdin=listed).strip()


def test_a_hash_that_was_passed_counts_more_than_git(monkeypatch):
    monkeypatch.setattr(record, "tree_hash", lambda: "a" * 40)
    monkeypatch.setattr(record, "committed_hash", lambda: "b" * 40)
    monkeypatch.setenv("CUATTN_SOURCE_HASH", "a" * 40)
    assert record.verified_hash() == "a" * 40
    monkeypatch.setenv("CUATTN_SOURCE_HASH", "c" * 40)
    with pytest.raises(record.SourcesChanged, match="the sources here hash to aaaa"):
        record.verified_hash()
    monkeypatch.delenv("CUATTN_SOURCE_HASH")
    monkeypatch.setattr(record, "has_commits", lambda: True)
    assert record.verified_hash() == "b" * 40


def test_counts_are_added_over_processes_and_summaries_must_be_complete():
    begin, counts = "========= COMPUTE-SANITIZER\n", "3 passed, 0 failed, 1 skipped\n"
    run = begin + counts + "========= ERROR SUMMARY: 0 errors\n"
    assert record.harness_counts(run + run) == {"passed": 6, "failed": 0, "skipped": 2}
    assert record.sanitizer_errors(run + run) == 0
    assert record.sanitizer_errors(run + run.replace("0 errors", "2 errors")) == 2
    assert record.sanitizer_errors(run + begin + "killed\n") is None
    assert record.sanitizer_errors("") is None
    race = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    assert record.sanitizer_errors(begin + race) == 1


JUNIT = """<testsuites><testsuite><testcase classname="tests.test_a" name="test_b[cuda-simt]"/>
<testcase classname="tests.test_a" name="test_b[cpu]"><skipped/></testcase>
<testcase classname="tests.test_a" name="test_c">%s</testcase></testsuite></testsuites>"""


@pytest.mark.parametrize("name", ["pytest", "limits"])
def test_a_stage_of_pytest_is_merged_with_the_others(name, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "none.json")
    monkeypatch.setattr(record, "verified_hash", lambda: "a" * 40)
    monkeypatch.setattr(record, "machine", lambda: {"device": "d", "driver": "1", "cuda": "13.0"})
    logs, out = tmp_path / "work" / "logs", tmp_path / "out"
    logs.mkdir(parents=True)
    out.mkdir()
    assert record.stage("build", 0, 2, "0", logs, out)
    for broken, expected in (("", (2, 0, True)), ("<failure/>", (1, 1, False))):
        (logs / f"{name}.xml").write_text(JUNIT % broken)
        assert record.stage(name, 0, 3, "0,1", logs, out) == expected[2]
        stages = json.loads((out / "record.json").read_text())["stages"]
        assert list(stages) == ["build", name]
        entry = stages[name]
        assert (entry["passed"], entry["failed"], entry["ok"]) == expected
        assert entry["skipped"] == 1
        assert entry.get("passed_on_cuda") == (1 if name == "pytest" else None)
        assert (out / f"{name}.xml").exists()


def test_every_stage_of_run_sh_is_one_of_the_record():
    text = (ROOT / "tests" / "gpu" / "run.sh").read_text()
    assert re.search(r'^all="(.*)"$', text, re.MULTILINE).group(1).split() == list(record.STAGES)
    for name in record.STAGES:
        assert re.search(rf"^{name}\(\) {{", text, re.MULTILINE), name


def test_run_sh_refuses_unknown_stages():
    result = subprocess.run(
        ["bash", ROOT / "tests" / "gpu" / "run.sh", "fast"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CUATTN_SOURCE_HASH": "0", "CUATTN_GPU_OUT": "build/gpu"},
    )
    assert result.returncode == 2
    assert "unknown stage 'fast'" in result.stderr
