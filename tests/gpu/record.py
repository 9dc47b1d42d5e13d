# SPDX-License-Identifier: Apache-2.0
"""Writes record.json: what passed on which GPU, on exactly which sources. Never edited by hand.

record.py hash    prints the hash of the committed sources, and fails while they are changed
record.py stage   merges one stage of run.sh into the record
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = Path(__file__).resolve().parent / "record.json"
SOURCES = ("include", "cuda", "src", "bindings", "cpu", "cmake", "CMakeLists.txt", "pyproject.toml")
STAGES = ("build", "pytest", "limits", "cpp", "memcheck", "racecheck", "initcheck", "synccheck")
STAGES += ("watchdog",)
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
LOG_TAIL = 5000  # lines kept of a stage's output


class SourcesChanged(RuntimeError):
    """The sources in the tree are not those of a commit."""


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree_hash(root: Path = ROOT) -> str:
    """What `git ls-files -s SOURCES | git hash-object --stdin` prints, from the files alone."""
    files = []
    for name in SOURCES:
        path = root / name
        found = [path] if path.is_file() else path.rglob("*")
        files += [f for f in found if f.is_file() and "__pycache__" not in f.parts]
    lines = []
    for file in sorted(files, key=lambda f: f.relative_to(root).as_posix().encode()):
        mode = "100755" if os.access(file, os.X_OK) else "100644"
        lines.append(
            f"{mode} {git_blob(file.read_bytes())} 0\t{file.relative_to(root).as_posix()}\n"
        )
    return git_blob("".join(lines).encode())


def git(*arguments: str, stdin: str | None = None) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


def committed_hash() -> str:
    """The hash of the sources, which must be those of HEAD."""
    changed = git("status", "--porcelain", "--", *SOURCES)
    if changed:
        raise SourcesChanged(f"commit the sources first; changed or untracked:\n{changed}")
    return git("hash-object", "--stdin", stdin=git("ls-files", "-s", *SOURCES)).strip()


def has_commits() -> bool:
    """Whether the tree is a checkout: a copy may lack .git, or hold one without a commit."""
    try:
        git("rev-parse", "--verify", "--quiet", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def verified_hash() -> str:
    """The hash of a commit that the files here are known to equal.

    A hash that was passed counts more than git: a copy of the tree may lie in another commit's.
    """
    expected, found = os.environ.get("CUATTN_SOURCE_HASH"), tree_hash()
    if expected is None and has_commits():
        return committed_hash()
    if expected != found:
        raise SourcesChanged(
            f"CUATTN_SOURCE_HASH is {expected}, but the sources here hash to {found}; "
            "pass what `record.py hash` prints where git is"
        )
    return found


def machine() -> dict[str, str]:
    def first_line(*command: str) -> str:
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return (result.stdout.strip().splitlines() or [""])[0]

    gpu = first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = gpu.partition(", ")
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", nvcc)
    return {"device": device, "driver": driver, "cuda": release.group(1) if release else ""}


def harness_counts(text: str) -> dict[str, int]:
    """The counts of cuattn_tests, added over its processes."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for match in re.finditer(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", text, re.MULTILINE):
        for key, value in zip(counts, match.groups(), strict=True):
            counts[key] += int(value)
    return counts


def pytest_counts(report: Path) -> dict[str, int]:
    counts = {"passed": 0, "failed": 0, "skipped": 0, "passed_on_cuda": 0}
    if not report.exists():
        return counts
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = (
            "failed"
            if tags & {"failure", "error"}
            else "skipped"
            if "skipped" in tags
            else "passed"
        )
        counts[outcome] += 1
        on_cuda = "cuda" in case.get("name", "") or "gpu" in case.get("classname", "")
        counts["passed_on_cuda"] += outcome == "passed" and on_cuda
    return counts


def sanitizer_errors(text: str) -> int | None:
    """The errors and hazards that the summaries name; None when some process printed no summary."""
    processes = len(re.findall(r"^========= COMPUTE-SANITIZER$", text, re.MULTILINE))
    errors = re.findall(r"^========= ERROR SUMMARY: (\d+) error", text, re.MULTILINE)
    hazards = re.findall(r"^========= RACECHECK SUMMARY: (\d+) hazard", text, re.MULTILINE)
    if processes == 0 or len(errors) + len(hazards) < processes:
        return None
    return sum(map(int, errors + hazards))


def read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def stage(name: str, status: int, seconds: int, gpus: str, logs: Path, out: Path) -> bool:
    log, report = logs / f"{name}.log", logs / f"{name}.xml"
    text = log.read_text(errors="replace") if log.exists() else ""
    if name == "build":
        entry = {"passed": int(status == 0), "failed": int(status != 0), "skipped": 0}
    elif name in ("pytest", "limits"):
        entry = pytest_counts(report)
        if name == "limits":  # all of it runs on CUDA
            del entry["passed_on_cuda"]
    else:
        entry = harness_counts(text)
    entry["seconds"] = seconds
    entry["gpus"] = len(gpus.split(","))
    good = status == 0 and entry["failed"] == 0 and entry["passed"] > 0
    if name in SANITIZERS:
        entry["sanitizer_errors"] = sanitizer_errors(text)
        good = good and entry["sanitizer_errors"] == 0
    entry["ok"] = good

    record = {"sources": verified_hash(), **machine(), "stages": {}}
    for earlier in map(read, (RECORD, logs.parent / "record.json", out / "record.json")):
        if all(earlier.get(key) == record[key] for key in ("sources", "device", "driver", "cuda")):
            record["stages"].update(earlier["stages"])
    record["stages"][name] = entry
    record["stages"] = {key: record["stages"][key] for key in STAGES if key in record["stages"]}
    for folder in {logs.parent, out}:
        (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    if out.resolve() != RECORD.parent:
        (out / f"{name}.log").write_text("\n".join(text.splitlines()[-LOG_TAIL:]) + "\n")
        if report.exists():
            shutil.copy(report, out)
    print(f"{name}: {'ok' if good else 'FAILED'} {json.dumps(entry)}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("hash")
    merge = commands.add_parser("stage")
    merge.add_argument("name", choices=STAGES)
    merge.add_argument("--status", type=int, required=True)
    merge.add_argument("--seconds", type=int, required=True)
    merge.add_argument("--gpus", required=True, help="those that the stage was spread over: 0,1")
    merge.add_argument("--logs", type=Path, required=True)
    merge.add_argument("--out", type=Path, required=True)
    arguments = vars(parser.parse_args())
    try:
        if arguments.pop("command") == "hash":
            print(verified_hash())
            return 0
        return 0 if stage(**arguments) else 1
    except SourcesChanged as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
