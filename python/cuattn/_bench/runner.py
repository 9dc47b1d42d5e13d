# SPDX-License-Identifier: Apache-2.0
"""Runs families of workloads: check, then rounds of shuffled order, then a table and a JSON file.

How a number is taken. Each contestant's result is checked first. Then, per workload, the chip is
heated and every contestant is timed in several rounds; each round runs them in a new random order
and keeps the median of its calls. A time is the median over the rounds; a ratio is the median of
the per-round ratios, so that a drift of the clocks within the run touches both sides alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import cuattn

from . import report
from .devices import CpuDevice, CudaDevice, Inputs, open_device
from .options import BACKENDS
from .peers import PEERS, Contestant, Prepared, Unsupported, our_contestant, versions
from .reference import check
from .workloads import FAMILIES, Family, Workload

SCHEMA = 1
PEER_SLACK = 4  # the check of a peer only asks whether it computes the same function
SLOW_CALL_S = 1.0  # a call longer than this is timed once, by its check
MAX_CALLS_PER_ROUND = 40
RECORDED_ENVIRONMENT = (
    "CUATTN_NUM_THREADS",
    "CUATTN_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


@dataclasses.dataclass
class Entry:
    """A contestant on one workload: ready to be timed, or a reason why not."""

    contestant: Contestant
    status: str = "ok"
    prepared: Prepared | None = None
    estimate_s: float = 0.0
    peak_bytes: int | None = None
    max_error: float | None = None
    allowed_error: float | None = None
    calls_per_round: int = 0
    rounds: int = 0
    rounds_ms: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclasses.dataclass
class Settings:
    rounds: int = 7
    heat_s: float = 0.4
    budget_s: float = 150.0  # for one family; shared among its rows
    limit_s: float = 10.0  # a contestant expected to need longer for one call is skipped
    jit: str = "marked"  # peers that compile for each shape: on marked rows, on all, on none


class Clock:
    """Splits what is left of a family's time budget evenly among its remaining rows."""

    def __init__(self, budget_s: float, rows: int):
        self.end = time.perf_counter() + budget_s
        self.rows_left = rows

    def slice_s(self) -> float:
        share = (self.end - time.perf_counter()) / max(1, self.rows_left)
        self.rows_left -= 1
        return share


def say(*words: object) -> None:
    """Progress; stdout is for the table."""
    print(*words, file=sys.stderr, flush=True)


def explain_failure(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return "failed: out of memory"
    return f"failed: {type(error).__name__}: {text[:200]}"


def admit(entry: Entry, w: Workload, x: Inputs, device: CudaDevice | CpuDevice) -> None:
    """Prepare, run once, check, and estimate the time of a call."""
    prepared = entry.prepared = entry.contestant.prepare(w, x)
    with prepared.context():
        out, peaks = [], []
        with device.peak_memory(peaks):
            first_s = device.time(lambda: out.append(prepared.call()), 1)
        error = check(w, x, prepared.canonical(out.pop()))
        entry.max_error, entry.allowed_error = error.max_error, error.allowed
        allowed = error.allowed * (1 if entry.contestant.is_ours else PEER_SLACK)
        if not error.max_error <= allowed:
            entry.status = (
                f"failed: wrong result, max error {error.max_error:.3g}, allowed {allowed:.3g}"
            )
            return
        if first_s < SLOW_CALL_S or entry.contestant.is_jit:
            peaks.clear()  # the first call may have compiled and tuned
            with device.peak_memory(peaks):
                device.time(prepared.call, 1)
            entry.estimate_s = device.time(prepared.call, 3 if first_s < 0.1 else 1)
        else:
            entry.estimate_s = first_s
            entry.rounds_ms[0] = first_s * 1e3
        entry.peak_bytes = peaks[0] if peaks[0] is not None else prepared.memory_bytes


def plan_rounds(entries: list[Entry], rounds: int, slice_s: float, flush_s: float) -> None:
    """Choose calls per round and rounds of each contestant, so that all fit into slice_s."""
    share = max(0.02, slice_s) / max(1, len(entries))
    for entry in entries:
        if entry.rounds_ms:
            continue
        call_s = entry.estimate_s + flush_s
        affordable = int(share / call_s)
        entry.rounds = rounds if affordable >= rounds else max(3, affordable)
        entry.calls_per_round = min(MAX_CALLS_PER_ROUND, max(1, affordable // rounds))


def run_rounds(entries: list[Entry], device: CudaDevice | CpuDevice, order: random.Random) -> None:
    for number in range(max((entry.rounds for entry in entries), default=0)):
        for entry in order.sample(entries, len(entries)):
            if number < entry.rounds and entry.ok:
                try:
                    with entry.prepared.context():
                        seconds = device.time(entry.prepared.call, entry.calls_per_round)
                    entry.rounds_ms[number] = seconds * 1e3
                except Exception as error:
                    entry.status = explain_failure(error)
                    device.release()


class Run:
    """State shared by the rows of one family."""

    def __init__(self, device, settings: Settings, contestants: list[Contestant]):
        self.device, self.settings, self.contestants = device, settings, contestants
        self.order = random.Random(0)
        self.rate: dict[tuple[str, str], float] = {}  # (contestant, dtype) -> best FLOP/s seen

    def expected_s(self, contestant: Contestant, w: Workload) -> float:
        rate = self.rate.get((contestant.name, w.dtype))
        return w.flops / rate if rate else 0.0

    def wanted(self, contestant: Contestant, w: Workload) -> bool:
        return (
            not contestant.is_jit
            or self.settings.jit == "all"
            or (self.settings.jit == "marked" and w.jit)
        )

    def admit_all(self, w: Workload, x: Inputs) -> list[Entry]:
        entries = []
        for contestant in self.contestants:
            if not self.wanted(contestant, w):
                continue
            entry = Entry(contestant)
            entries.append(entry)
            expected_s = self.expected_s(contestant, w)
            if expected_s > self.settings.limit_s:
                entry.status = f"skipped: one call would take about {expected_s:.0f} s"
                continue
            try:
                admit(entry, w, x, self.device)
            except Unsupported as reason:
                entry.status = f"unsupported: {reason}"
            except Exception as error:
                entry.status = explain_failure(error)
                self.device.release()
        return entries

    def row(self, w: Workload, slice_s: float) -> dict:
        begin = time.perf_counter()
        try:
            x = self.device.inputs(w)
        except Exception as error:
            self.device.release()
            return {"workload": w.as_json(), "results": [], "status": explain_failure(error)}
        entries = self.admit_all(w, x)
        running = [entry for entry in entries if entry.ok]
        self.device.heat(self.settings.heat_s)
        left_s = slice_s - (time.perf_counter() - begin)
        plan_rounds(running, self.settings.rounds, left_s, self.device.flush_seconds)
        run_rounds(running, self.device, self.order)
        for entry in running:
            if entry.ok:
                key = (entry.contestant.name, w.dtype)
                rate = w.flops / (report.median_ms(entry.rounds_ms) / 1e3)
                self.rate[key] = max(rate, self.rate.get(key, 0.0))
        return report.row_json(w, entries)


def run_family(name: str, family: Family, run: Run, document: dict, save) -> None:
    """Measure every row; document is saved after each, so that a run cut short keeps its rows."""
    clock = Clock(run.settings.budget_s, len(family.workloads))
    for index, w in enumerate(family.workloads, 1):
        slice_s = clock.slice_s()
        if slice_s <= 0:
            document["complete"] = False
            document["rows"].append(
                {"workload": w.as_json(), "results": [], "status": "not run: out of time budget"}
            )
            continue
        say(f"[{name} {index}/{len(family.workloads)}] {w.name}")
        row = run.row(w, slice_s)
        document["rows"].append(row)
        print(report.row_lines(row, document["ceilings"]), flush=True)
        save(document)
    save(document)


def describe(device, contestants: list[Contestant], settings: Settings) -> dict:
    """Where, with what and how: the head of a results file."""
    information = cuattn.info()
    return {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": report.command(sys.argv),
        "commit": commit(),
        "cuattn": {
            key: information.get(key)
            for key in ("version", "source_hash", "archs", "cpu")
            if key in information
        },
        "machine": device.machine(),
        "device_kind": device.kind,
        "python": sys.version.split()[0],
        "versions": versions(contestants),
        "environment": {key: os.environ[key] for key in RECORDED_ENVIRONMENT if key in os.environ},
        "settings": dataclasses.asdict(settings),
    }


def commit() -> str | None:
    """Return the commit of the current tree, with + for uncommitted changes; None outside one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return None


def writer(path: pathlib.Path | None):
    """Return a function that writes the document to path in one step, or does nothing."""

    def save(document: dict) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    return save


def choose(
    names: str | None, defaults: tuple[str, ...], known: tuple[str, ...], what: str
) -> list[str]:
    chosen = [name for name in names.split(",") if name] if names is not None else list(defaults)
    if chosen == ["none"]:
        return []
    if chosen == ["all"]:
        return list(known)
    for name in chosen:
        if name not in known:
            raise SystemExit(f"bench: no {what} is called {name!r}; known: {', '.join(known)}")
    return chosen


def list_families() -> None:
    for name, family in FAMILIES.items():
        print(f"{name}: {family.about}")
        for w in family.workloads:
            print(
                f"    {w.name:34s} {w.series}, batch {len(w.sequences)}, "
                f"seqlen {w.seqlen_q} x {w.seqlen_kv}"
            )


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        list_families()
        return 0
    settings = Settings(
        rounds=arguments.rounds,
        budget_s=arguments.budget,
        limit_s=arguments.limit,
        jit=arguments.jit,
    )
    if arguments.quick:
        settings = dataclasses.replace(settings, rounds=3, budget_s=20.0, heat_s=0.1)
    families = choose(arguments.family, ("smoke",), tuple(FAMILIES), "family")
    device = open_device(arguments.device)
    say(f"device: {device.name}; measuring its ceilings")
    device.heat(settings.heat_s)
    ceilings = device.ceilings()
    say("ceilings:", ", ".join(f"{key} {value:.4g}" for key, value in ceilings.items()))
    failures = 0
    for name in families:
        family = FAMILIES[name]
        wanted = tuple(w for w in family.workloads if arguments.workload in w.name)
        backends = choose(arguments.backend, family.backends, BACKENDS, "backend")
        peers = choose(arguments.peer, family.peers, tuple(PEERS), "peer")
        contestants = [our_contestant(backend) for backend in backends] + [
            PEERS[peer] for peer in peers
        ]
        document = {
            **describe(device, contestants, settings),
            "family": name,
            "about": family.about,
        }
        document["commit"] = arguments.commit or document["commit"]
        document |= {"ceilings": ceilings, "complete": True, "rows": []}
        save = writer(arguments.output / f"{name}.json" if arguments.output else None)
        print(f"\n{name}: {family.about}\n{report.header()}")
        run = Run(device, settings, contestants)
        with no_grad():
            run_family(name, dataclasses.replace(family, workloads=wanted), run, document, save)
        print(report.summary(document))
        failures += report.our_failures(document)
        if arguments.output:
            say(f"wrote {arguments.output / name}.json")
    return 1 if failures else 0


def no_grad():
    """torch.no_grad() where torch is loaded."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch else contextlib.nullcontext()
