# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/record.py, and the record of the last GPU run that it wrote. run.sh: test_run_sh.py."""

import copy
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

SELECTIVE = {name for name, part in parts.PARTS.items() if not part.reaches_all}


@pytest.fixture(scope="module")
def last_run():
    return record.Record(record.read(record.RECORD))


@pytest.fixture
def builds():
    """Builds of this tree with CUDA that are younger than the sources.

    Not the emulator's, which another worker may be building: `ninja -t deps` mends what it finds
    half written.
    """
    if shutil.which("ninja") is None:
        pytest.skip("no ninja")
    logs = [
        log
        for log in (ROOT / "build").glob("**/.ninja_deps")
        if log.parent.name != "emulated"
        and any(re.fullmatch(r"cuda/.*\.cu", source) for source, _ in parts.objects_of(log.parent))
    ]
    if not logs:
        assert os.environ.get("CUATTN_CUDA") != "ON", "CUATTN_CUDA=ON, but build/ holds no build"
        pytest.skip("build/ holds no build with CUDA")
    sources = parts.files(("include", "cuda", "src", "cpu", "bindings", "cmake"))
    changed = max(file.stat().st_mtime for file in sources)
    found = [log.parent for log in logs if log.stat().st_mtime > changed]
    if not found:
        pytest.skip("the sources changed since build/ was built")
    return found


# The record ---------------------------------------------------------------------------------------


def test_record_has_every_field(last_run):
    assert set(last_run.parts) <= set(parts.PARTS)
    for name, stages in last_run.parts.items():
        assert set(stages) <= set(parts.STAGES)
        for stage, entry in stages.items():
            wanted = {"passed", "failed", "skipped", "ok", "seconds", "gpus", "machine"}
            wanted |= {"sources", "tree"}
            wanted |= {"passed_on_cuda"} if stage == "pytest" else set()
            wanted |= {"sanitizer_errors"} if stage in parts.SANITIZERS else set()
            assert set(entry) == wanted, (name, stage)
            assert len(entry["sources"]) == len(entry["tree"]) == 40
            assert re.fullmatch(r"\S.*, driver [\d.]+, CUDA [\d.]+", entry["machine"])
    assert all(found <= set(parts.PARTS) for found in last_run.reach.values())
    if last_run.parts:
        assert last_run.build["ok"]
        assert last_run.reach


def test_record_shows_no_failure(last_run):
    for name, stages in last_run.parts.items():
        for stage, entry in stages.items():
            assert entry["ok"], (name, stage)
            assert entry["failed"] == 0
            assert entry["passed"] > 0
            assert entry.get("sanitizer_errors", 0) == 0


@pytest.mark.parametrize("name", parts.PARTS)
def test_record_is_of_these_sources(name, last_run):
    state = last_run.state(name)
    if state != "current":
        pytest.skip(f"{state}: run tests/gpu/run.sh {name}")
    assert set(last_run.parts[name]) >= set(parts.PARTS[name].stages)


def test_readme_says_which_parts_are_current(last_run):
    text = record.README.read_text(encoding="utf-8")
    assert record.replaced(text, last_run) == text, "run: tests/gpu/record.py readme"


def test_the_recorded_lists_cover_what_the_build_reads(last_run, builds):
    current = {name for name in SELECTIVE if last_run.state(name) == "current"}
    if not current:
        pytest.skip("no part is current: run tests/gpu/run.sh")
    for path, reached in parts.scan(builds).items():
        missing = reached & current - last_run.reach.get(path, current)
        assert not missing, f"{path} reaches {missing}"


# The table of parts -------------------------------------------------------------------------------


def test_the_build_names_every_kernel_source_and_parts_are_told_apart(builds):
    reach = parts.scan(builds)
    kernels = {f.relative_to(ROOT).as_posix() for f in (ROOT / "cuda").rglob("*.cu*")}
    kernels = {path for path in kernels if not path.endswith((".cmake", ".in"))}
    assert kernels - {"cuda/instances.cmake"} <= set(reach)
    for name in SELECTIVE:
        assert any(name in found for found in parts.selective(reach).values()), name
    assert not reach["cuda/cache/write.cu"] & {"forward-sm90", "forward-portable", "paged"}
    assert reach["cuda/host/launch.h"] >= SELECTIVE


def test_every_python_test_belongs_to_one_part():
    of = {name: set(parts.python_tests(name)) for name in parts.PARTS}
    every = set().union(*of.values())
    tests = set((ROOT / "tests").rglob("test_*.py"))
    left = {file for file in tests - every if file.parent.name not in ("emulated", "house")}
    assert {file.name for file in left} == {"test_cpp.py"}
    kept = {file.name for file in every if file.parent.name in ("emulated", "house")}
    assert kept == {"test_docs.py"}  # of the pages, whose samples run on the GPU
    assert sum(map(len, of.values())) == len(every)
    assert all(of.values())


def test_python_sources_are_the_tests_and_what_they_import():
    names = {file.name for file in parts.with_imports(parts.python_tests("cache"))}
    assert {"test_cache_rows.py", "test_cache_cuda.py", "harness.py", "conftest.py"} <= names
    assert {"cases.py", "cache_cases.py"} <= names
    assert not {"test_paged.py", "paged_cases.py"} & names


def made(tmp_path, reach):
    """A small tree, and the sources of a stage in it by name."""
    for path in ("cuda/a.cuh", "cuda/b.cuh", "src/c.cpp", "cpu/d.cpp", "bindings/e.cpp"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    return lambda name, stage: {f.name for f in parts.sources(name, stage, reach, tmp_path)}


def test_a_file_counts_for_the_parts_it_reaches_and_else_for_all(tmp_path):
    reach = {"cuda/a.cuh": {"cache"}, "cuda/b.cuh": {"forward-sm90", "forward-portable"}}
    of = made(tmp_path, reach)
    assert of("cache", "memcheck") == {"a.cuh", "c.cpp", "d.cpp"}
    assert of("forward-sm90", "cpp") == {"b.cuh", "c.cpp", "d.cpp"}
    assert of("paged", "pytest") == {"c.cpp", "d.cpp", "e.cpp"}
    assert of("core", "memcheck") == {"a.cuh", "b.cuh", "c.cpp", "d.cpp"}


def test_hashes_are_of_contents_and_not_of_places(tmp_path):
    reach = {"cuda/a.cuh": {"cache"}}
    made(tmp_path, reach)
    before = {name: parts.hashes(name, reach, tmp_path) for name in parts.PARTS}
    (tmp_path / "cuda" / "cache").mkdir()
    (tmp_path / "cuda" / "a.cuh").rename(tmp_path / "cuda" / "cache" / "moved.cuh")
    moved = {"cuda/cache/moved.cuh": {"cache"}}
    assert {name: parts.hashes(name, moved, tmp_path) for name in parts.PARTS} == before
    (tmp_path / "cuda" / "cache" / "moved.cuh").write_text("changed")
    changed = {name for name in before if parts.hashes(name, moved, tmp_path) != before[name]}
    assert changed == {"cache", "over-pages", "core", "large"}


def test_fewer_cases_are_another_claim(tmp_path, monkeypatch):
    made(tmp_path, {})
    before = parts.hashes("cache", {}, tmp_path)
    monkeypatch.setattr(parts, "cases", lambda name: ("cuda_cache_f16", ""))
    after = parts.hashes("cache", {}, tmp_path)
    assert before["memcheck"] != after["memcheck"]
    assert before["pytest"] == after["pytest"]


NINJA_DEPS = """\
CMakeFiles/x.dir/instances/forward_sm90_f16.cu.o: #deps 3, deps mtime 1 (VALID)
    instances/forward_sm90_f16.cu
    /usr/include/math.h
    {root}/cuda/attention/sm90/forward.cuh
    {root}/cuda/host/launch.h

CMakeFiles/x.dir/cuda/cache/write.cu.o: #deps 2, deps mtime 1 (VALID)
    {root}/cuda/cache/write.cu
    {root}/build/site/cuattn/include/cuattn/params/attention.h
    {root}/cuda/host/launch.h

CMakeFiles/x.dir/src/new.cpp.o: #deps 1, deps mtime 1 (VALID)
    {root}/cuda/host/launch.h

CMakeFiles/x.dir/cuda/cache/gather.cu.o: #deps 1, deps mtime 1 (STALE)
    {root}/cuda/old.h

"""


def test_the_build_says_what_reaches_a_part(monkeypatch):
    def deps(command, **_):
        out = NINJA_DEPS.format(root=ROOT)
        return subprocess.CompletedProcess(command, 0, stdout=out)

    monkeypatch.setattr(subprocess, "run", deps)
    reach = parts.scan([ROOT / "build" / "none"])
    assert reach["cuda/attention/sm90/forward.cuh"] == {"forward-sm90", "over-pages"}
    assert reach["cuda/cache/write.cu"] == reach["include/cuattn/params/attention.h"] == {"cache"}
    assert reach["cuda/host/launch.h"] == set(parts.PARTS)  # src/new.cpp is of no known part
    assert len(reach) == 4
    assert "cuda/host/launch.h" not in parts.selective(reach)
    monkeypatch.setattr(subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 0, ""))
    with pytest.raises(RuntimeError, match="do not say"):
        parts.scan([ROOT])


# What holds ---------------------------------------------------------------------------------------


MACHINE = "NVIDIA H200, driver 580.1, CUDA 13.0"


@pytest.fixture
def current():
    """A record in which all is current."""
    made_up = record.Record({"parts": {}, "reach": {"cuda/cache/write.cu": "cache"}})
    for name, part in parts.PARTS.items():
        made_up.parts[name] = {
            stage: {"ok": True, "passed": 3, "seconds": 5, "machine": MACHINE, "tree": "0" * 40}
            | {"sources": made_up.hashes[name][stage]}
            for stage in part.stages
        }
    return made_up


def test_a_part_is_current_when_all_its_stages_passed_on_these_sources(current):
    assert {current.state(name) for name in parts.PARTS} == {"current"}
    assert not any(current.stale(name, "another") for name in parts.PARTS)
    entries = copy.deepcopy(current.parts["cache"])

    def state(stage, **changes):
        current.parts["cache"] = copy.deepcopy(entries)
        current.parts["cache"][stage].update(changes)
        return current.state("cache"), current.stale("cache", MACHINE)

    assert state("memcheck", ok=False) == ("failed: memcheck", ["memcheck"])
    assert state("pytest", sources="0" * 40) == ("sources changed since its pytest", ["pytest"])
    assert state("cpp", machine="another") == ("run on different machines", ["cpp"])
    del current.parts["cache"]["racecheck"]
    current.parts["cache"]["cpp"]["machine"] = MACHINE
    assert current.state("cache") == "not run yet: racecheck"
    assert current.stale("cache", MACHINE) == ["racecheck"]
    assert current.stale("cache", "another") == list(parts.PARTS["cache"].stages)
    del current.parts["cache"]
    assert current.state("cache") == "not run"


def test_readme_shows_a_part_that_is_not_current(current):
    assert "**" not in record.readme_section(current)
    current.parts["cache"]["cpp"]["sources"] = "0" * 40
    lines = [line for line in record.readme_section(current).splitlines() if "**" in line]
    assert len(lines) == 1
    assert lines[0].startswith("| cache |")
    assert lines[0].endswith("| **not current**: sources changed since its cpp | 18 |")


def test_readme_names_each_machine_once(current):
    last = record.readme_section(current).splitlines()[-1]
    assert last.startswith(f"{MACHINE}: ")
    assert last.count(" s") >= len(parts.PARTS)
    current.parts["cache"]["cpp"]["machine"] = "another"
    assert record.readme_section(current).splitlines()[-1].startswith("another: cache ")


def test_a_record_of_the_whole_suite_says_nothing_of_parts(tmp_path):
    old = tmp_path / "record.json"
    old.write_text(json.dumps({"sources": "a" * 40, "stages": {"pytest": {"ok": True}}}))
    assert record.Record(record.read(old)).state("cache") == "not run"


def test_records_of_several_runs_become_one(current, tmp_path):
    folders = [tmp_path / name for name in ("tree", "work", "out")]
    paths = [folder / "record.json" for folder in folders]
    for folder in folders:
        folder.mkdir()
    first, second = copy.deepcopy(current), copy.deepcopy(current)
    second.parts = {"cache": second.parts["cache"]}
    second.parts["cache"]["cpp"]["passed"] = 4  # the last word
    second.parts["cache"]["memcheck"]["sources"] = "0" * 40  # older than the other
    record.write(first, {folders[0]})
    record.write(second, {folders[1]})
    both = record.merged(paths)
    assert {both.state(name) for name in parts.PARTS} == {"current"}
    assert both.parts["cache"]["cpp"]["passed"] == 4
    assert both.parts["cache"]["memcheck"]["sources"] != "0" * 40


# What record.py reads -----------------------------------------------------------------------------


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


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "none" / "record.json")
    monkeypatch.setattr(record, "verified_hash", lambda: "a" * 40)
    monkeypatch.setattr(record, "machine", lambda: MACHINE)
    logs, out = tmp_path / "work" / "logs", tmp_path / "out"
    logs.mkdir(parents=True)
    out.mkdir()
    return logs, out


def test_the_build_is_recorded_with_what_reaches_which_part(folders, monkeypatch):
    logs, out = folders
    scanned = {"cuda/a.cu": {"cache"}, "cuda/host/launch.h": set(parts.PARTS)}
    monkeypatch.setattr(record, "scan", lambda builds: scanned)
    assert record.build(0, 9, "0,1", logs, out, [Path("b")])
    content = json.loads((out / "record.json").read_text())
    assert content["reach"] == {"cuda/a.cu": "cache"}
    assert content["build"]["ok"]
    assert not record.build(1, 9, "0,1", logs, out, [Path("b")])
    assert not json.loads((out / "record.json").read_text())["build"]["ok"]


@pytest.mark.parametrize(("part", "name"), [("cache", "pytest"), ("large", "limits")])
def test_a_stage_of_pytest_is_merged_with_the_others(part, name, folders):
    logs, out = folders
    (logs / "cache.cpp.log").write_text("3 passed, 0 failed, 1 skipped\n")
    assert record.stage("cache", "cpp", 0, 2, "0", logs, out)
    for broken, expected in (("", (2, 0, True)), ("<failure/>", (1, 1, False))):
        (logs / f"{part}.{name}.xml").write_text(JUNIT % broken)
        assert record.stage(part, name, 0, 3, "0,1", logs, out) == expected[2]
        content = json.loads((out / "record.json").read_text())["parts"]
        assert content["cache"]["cpp"]["passed"] == 3
        entry = content[part][name]
        assert (entry["passed"], entry["failed"], entry["ok"]) == expected
        assert (entry["skipped"], entry["gpus"], entry["machine"]) == (1, 2, MACHINE)
        assert entry.get("passed_on_cuda") == (1 if name == "pytest" else None)
        assert entry["sources"] == parts.hashes(part, {})[name]
        assert (out / f"{part}.{name}.xml").exists()


@pytest.mark.parametrize(
    ("status", "log"),
    [
        (1, "{begin}3 passed, 0 failed, 0 skipped\n{end}0 errors\n"),
        (124, ""),
        (0, "{begin}0 passed, 0 failed, 3 skipped\n{end}0 errors\n"),
        (0, "{begin}3 passed, 0 failed, 0 skipped\n{end}1 error\n"),
        (0, "{begin}3 passed, 0 failed, 0 skipped\n"),
    ],
)
def test_what_failed_is_never_recorded_as_passed(status, log, folders):
    logs, out = folders
    begin, end = "========= COMPUTE-SANITIZER\n", "========= ERROR SUMMARY: "
    (logs / "cache.memcheck.log").write_text(log.format(begin=begin, end=end))
    assert not record.stage("cache", "memcheck", status, 2, "0", logs, out)
    made_up = record.merged([out / "record.json"])
    assert not made_up.parts["cache"]["memcheck"]["ok"]
    assert made_up.state("cache") == "failed: memcheck"
