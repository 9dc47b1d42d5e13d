# SPDX-License-Identifier: Apache-2.0
"""Writes record.json: what passed on which GPU, on exactly which sources. Never edited by hand.

record.py hash     prints the hash of the committed sources, and fails while they are changed
record.py list     prints the parts (parts.py), whether each is current, and how long it took
record.py readme   writes the same into README.md
record.py jobs, build, stage   for run.sh: what is stale, and what came of it
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from parts import (
    PARTS,
    PYTHON_STAGES,
    ROOT,
    SANITIZERS,
    STAGES,
    files,
    git_blob,
    hashes,
    scan,
    selective,
    stage_arguments,
)

RECORD = Path(__file__).resolve().parent / "record.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
SOURCES = ("include", "cuda", "src", "bindings", "cpu", "cmake", "CMakeLists.txt", "pyproject.toml")
LOG_TAIL = 5000  # lines kept of a stage's output


class SourcesChanged(RuntimeError):
    """The sources in the tree are not those of a commit."""


def tree_hash(root: Path = ROOT) -> str:
    """What `git ls-files -s SOURCES | git hash-object --stdin` prints, from the files alone."""
    lines = []
    for file in sorted(files(SOURCES, root), key=lambda f: f.relative_to(root).as_posix().encode()):
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


def machine() -> str:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ""

    gpu = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = (gpu.strip().splitlines() or [""])[0].partition(", ")
    release = re.search(r"release ([\d.]+)", output("nvcc", "--version"))
    return f"{device}, driver {driver}, CUDA {release[1] if release else ''}"


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
    """A record; one of the time before parts were kept says nothing of any part."""
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        record = {}
    return record if "parts" in record else {"parts": {}, "reach": {}}


class Record:
    """What ran, and what of it still holds for the sources that are here."""

    def __init__(self, content: dict):
        self.parts: dict[str, dict] = content["parts"]
        self.reach = {path: set(parts.split()) for path, parts in content["reach"].items()}
        self.build: dict = content.get("build", {})

    @functools.cached_property
    def hashes(self) -> dict[str, dict[str, str]]:
        return {name: hashes(name, self.reach) for name in PARTS}

    def holds(self, name: str, stage: str) -> bool:
        entry = self.parts.get(name, {}).get(stage, {})
        return entry.get("ok", False) and entry["sources"] == self.hashes[name][stage]

    def state(self, name: str) -> str:
        entries = {s: e for s, e in self.parts.get(name, {}).items() if s in PARTS[name].stages}
        missing = [stage for stage in PARTS[name].stages if stage not in entries]
        failed = [stage for stage, entry in entries.items() if not entry["ok"]]
        if not entries:
            return "not run"
        if failed:
            return f"failed: {', '.join(failed)}"
        stale = [stage for stage in entries if not self.holds(name, stage)]
        if stale:
            which = "" if len(stale) == len(entries) else f" its {', '.join(stale)}"
            return f"sources changed since{which}"
        if missing:
            return f"not run yet: {', '.join(missing)}"
        if len({entry["machine"] for entry in entries.values()}) > 1:
            return "run on different machines"
        return "current"

    def stale(self, name: str, here: str) -> list[str]:
        """The stages to run on this machine, so that the part becomes current."""
        if self.state(name) == "current":
            return []
        recorded = self.parts.get(name, {})
        return [
            stage
            for stage in PARTS[name].stages
            if not self.holds(name, stage) or recorded[stage]["machine"] != here
        ]

    def seconds(self, name: str) -> int:
        return sum(entry["seconds"] for entry in self.parts.get(name, {}).values())


def merged(paths: list[Path]) -> Record:
    """Of several records the last word on each stage, unless it is of other sources."""
    records = [Record(read(path)) for path in paths if path.exists()]
    if not records:
        return Record({"parts": {}, "reach": {}})
    last = records[-1]
    for record in reversed(records):
        for name, stages in record.parts.items():
            for stage, entry in stages.items():
                mine = last.parts.setdefault(name, {})
                of_here = name in PARTS and entry["sources"] == last.hashes[name].get(stage)
                if stage not in mine or (of_here and mine[stage]["sources"] != entry["sources"]):
                    mine[stage] = entry
    return last


def write(record: Record, folders: set[Path]) -> None:
    parts = {
        name: {stage: record.parts[name][stage] for stage in STAGES if stage in record.parts[name]}
        for name in PARTS
        if name in record.parts
    }
    reach = {path: " ".join(sorted(parts)) for path, parts in record.reach.items()}
    text = json.dumps({"build": record.build, "parts": parts, "reach": reach}, indent=2)
    for folder in folders:
        (folder / "record.json").write_text(text + "\n")
    if RECORD.parent in folders:
        write_readme(record)


def write_readme(record: Record) -> None:
    README.write_text(replaced(README.read_text(encoding="utf-8"), record), encoding="utf-8")


def records(logs: Path, out: Path) -> list[Path]:
    """Where a record may lie; run.sh writes the last two, the first is that of the checkout."""
    return [RECORD, logs.parent / "record.json", out / "record.json"]


def build(status: int, seconds: int, gpus: str, logs: Path, out: Path, deps: list[Path]) -> bool:
    """Records the build, and which files it says reach which parts."""
    record = merged(records(logs, out))
    if status == 0:
        record.reach = selective(scan(path.resolve() for path in deps))
    entry = {"ok": status == 0, "tree": verified_hash(), "machine": machine(), "seconds": seconds}
    record.build = {**entry, "gpus": len(gpus.split(","))}
    write(record, {logs.parent, out.resolve()})
    keep_log("build", logs, out)
    print(f"build: {'ok' if status == 0 else 'FAILED'}, {seconds} s")
    return status == 0


def keep_log(name: str, logs: Path, out: Path) -> str:
    log, report = logs / f"{name}.log", logs / f"{name}.xml"
    text = log.read_text(errors="replace") if log.exists() else ""
    if out.resolve() != RECORD.parent:
        (out / f"{name}.log").write_text("\n".join(text.splitlines()[-LOG_TAIL:]) + "\n")
        if report.exists():
            shutil.copy(report, out)
    return text


def stage(
    part: str, name: str, status: int, seconds: int, gpus: str, logs: Path, out: Path
) -> bool:
    """Merges what one stage of one part printed into the record."""
    text = keep_log(f"{part}.{name}", logs, out)
    if name in PYTHON_STAGES:
        entry = pytest_counts(logs / f"{part}.{name}.xml")
        if name == "limits":  # all of it runs on CUDA
            del entry["passed_on_cuda"]
    else:
        entry = harness_counts(text)
    good = status == 0 and entry["failed"] == 0 and entry["passed"] > 0
    if name in SANITIZERS:
        entry["sanitizer_errors"] = sanitizer_errors(text)
        good = good and entry["sanitizer_errors"] == 0
    record = merged(records(logs, out))
    entry |= {"ok": good, "seconds": seconds, "gpus": len(gpus.split(",")), "machine": machine()}
    entry |= {"sources": record.hashes[part][name], "tree": verified_hash()}
    record.parts.setdefault(part, {})[name] = entry
    write(record, {logs.parent, out.resolve()})
    print(f"{part} {name}: {'ok' if good else 'FAILED'} {json.dumps(entry)}")
    return good


def print_jobs(words: list[str], every: bool, longest_first: bool, logs: Path, out: Path) -> None:
    """Part, stage, the seconds it took last time, and what the stage is told."""
    record, here = merged(records(logs, out)), machine()
    parts = [word for word in words if word in PARTS] or list(PARTS)
    stages = [word for word in words if word in STAGES] or STAGES
    jobs = []
    for name in parts:
        for stage in PARTS[name].stages if every else record.stale(name, here):
            if stage in stages:
                last = record.parts.get(name, {}).get(stage, {}).get("seconds", 0)
                jobs.append((name, stage, last, *stage_arguments(name, stage)))
    if longest_first:
        first = (*PYTHON_STAGES, "watchdog")  # it builds
        jobs.sort(key=lambda job: (job[1] not in PYTHON_STAGES, job[1] not in first, -job[2]))
    for job in jobs:
        print(*job)


def print_list(logs: Path, out: Path) -> None:
    record = merged(records(logs, out))
    for name in PARTS:
        took = record.parts.get(name, {})
        times = ", ".join(f"{s} {took[s]['seconds']} s" for s in STAGES if s in took)
        print(f"{name:17} {record.state(name):32} {record.seconds(name):4} s  {times}")


def readme_section(record: Record) -> str:
    """A line for each part; the machines, which are mostly one, stand below."""
    lines = ["| part | what it holds | state | tests passed |", "| --- | --- | --- | ---: |"]
    machines: dict[str, list[str]] = {}
    for name, part in PARTS.items():
        stages, state = record.parts.get(name, {}), record.state(name)
        state = state if state == "current" else f"**not current**: {state}"
        passed = f"{sum(entry['passed'] for entry in stages.values()):,}" if stages else ""
        lines.append(f"| {name} | {part.about} | {state} | {passed} |")
        for where in dict.fromkeys(entry["machine"] for entry in stages.values()):
            machines.setdefault(where, []).append(f"{name} {record.seconds(name)} s")
    lines += [f"\n{where}: {', '.join(times)}." for where, times in machines.items()]
    return "\n".join(lines)


def replaced(text: str, record: Record) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{readme_section(record)}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("hash")
    commands.add_parser("readme")
    lists, jobs = commands.add_parser("list"), commands.add_parser("jobs")
    jobs.add_argument("words", nargs="*")
    jobs.add_argument("--every", action="store_true", help="also what is current")
    jobs.add_argument(
        "--longest-first", action="store_true", help="but Python stages before others"
    )
    built, ran = commands.add_parser("build"), commands.add_parser("stage")
    built.add_argument("--deps", type=Path, nargs="+", required=True, help="build folders")
    ran.add_argument("part", choices=PARTS)
    ran.add_argument("name", choices=STAGES)
    for command in built, ran:
        command.add_argument("--status", type=int, required=True)
        command.add_argument("--seconds", type=int, required=True)
        command.add_argument("--gpus", required=True, help="those it was spread over: 0,1")
    for command in lists, jobs, built, ran:
        command.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu" / "logs")
        command.add_argument("--out", type=Path, default=RECORD.parent)
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    for word in arguments.get("words", ()):
        if word not in PARTS and word not in STAGES:
            known = f"parts: {' '.join(PARTS)}; stages: {' '.join(STAGES)}"
            parser.error(f"unknown part or stage '{word}'; {known}")
    try:
        if command == "hash":
            print(verified_hash())
        elif command == "readme":
            write_readme(Record(read(RECORD)))
        elif command == "list":
            print_list(**arguments)
        elif command == "jobs":
            print_jobs(**arguments)
        else:
            return 0 if {"build": build, "stage": stage}[command](**arguments) else 1
    except SourcesChanged as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
