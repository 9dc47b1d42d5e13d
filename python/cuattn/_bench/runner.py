# SPDX-License-Identifier: Apache-2.0
"""The benchmark command: families of workloads in, a table on stdout and JSON files out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cuattn

from . import bars, published, report
from .devices import Device, open_device
from .families import FAMILIES, Family
from .measure import Run, Settings, say
from .options import BACKENDS
from .peers import PEERS, Contestant, our_contestant, versions
from .ranks import RanksRun
from .workloads import AnyWorkload

SCHEMA = 1
Save = Callable[[dict[str, Any]], None]
RECORDED_ENVIRONMENT = (
    "CUATTN_NUM_THREADS",
    "CUATTN_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


class Clock:
    """Splits what is left of a family's time budget evenly among its remaining rows."""

    def __init__(self, budget_s: float, rows: int):
        self.end = time.perf_counter() + budget_s
        self.rows_left = rows
        self.fair_s = budget_s / max(1, rows)

    def slice_s(self) -> float:
        share = (self.end - time.perf_counter()) / max(1, self.rows_left)
        self.rows_left -= 1
        return share


def run_family(
    name: str, family: Family, run: Run | RanksRun, document: dict[str, Any], save: Save
) -> None:
    """Measure the rows that document lacks, and save it after each: a run cut short keeps them."""
    measured = {row["workload"]["name"] for row in document["rows"]}
    workloads = [w for w in family.workloads if w.name not in measured]
    clock = Clock(run.settings.budget_s, len(workloads))
    complete = True
    for index, w in enumerate(workloads, 1):
        slice_s = clock.slice_s()
        if slice_s <= 0:
            complete = False
            document["rows"].append(report.empty_row(w, "not run: out of time budget"))
            continue
        say(f"[{name} {index}/{len(workloads)}] {w.name}")
        try:
            row = run.row(w, slice_s, clock.fair_s)
        except Exception as error:  # the device context is lost; what was measured stays
            row = report.empty_row(w, f"aborted: {error}")
        published.add_bars(name, row, document["ceilings"], run.device.name)
        bars.judge(getattr(w, "bars", ()), row, document["rows"], document["ceilings"])
        document["rows"].append(row | {"commit": document["commit"]})
        print(report.row_lines(row, document["ceilings"]), flush=True)
        save(document)
        if row["status"].startswith("aborted"):
            complete = False
            break
    document["complete"] = complete
    order = {w.name: place for place, w in enumerate(FAMILIES[name].workloads)}
    document["rows"].sort(key=lambda row: order.get(row["workload"]["name"], -1))
    document["state_after"] = run.device.state()
    save(document)


def kept_rows(path: pathlib.Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that an earlier run left in path, each with its commit; [] without a file.

    Raises SystemExit where that run was of another machine, other libraries or other settings.
    """
    if not path.exists():
        return []
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for key in ("schema", "family", "machine", "versions", "settings"):
            one, other = (dict_without_budget(d[key]) for d in (earlier, document))
            if one != other:
                raise SystemExit(
                    f"bench: --resume must find the same {key} in {path}; it has {one}, and this "
                    f"run {other}: choose another folder, or measure all rows anew"
                )
        rows = [row for row in earlier["rows"] if row["status"] == "ok"]
        return [{"commit": earlier["commit"], **row} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"bench: --resume cannot read {path}: {error!r}") from None


def dict_without_budget(part: Any) -> Any:
    """Return a part of a document without what may differ between runs that are joined."""
    free = ("budget_s", "cores", "system")
    return {k: v for k, v in part.items() if k not in free} if isinstance(part, dict) else part


def describe(device: Device, contestants: list[Contestant], settings: Settings) -> dict[str, Any]:
    """Say where, with what and how: the head of a results file."""
    information = cuattn.info()
    ours = ("version", "source_hash", "cuda_archs", "cpu")
    return {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": report.command(sys.argv),
        "commit": commit(),
        "cuattn": {key: information[key] for key in ours if key in information},
        "machine": device.machine(),
        "device_kind": device.kind,
        "python": sys.version.split()[0],
        "versions": versions(contestants),
        "environment": {key: os.environ[key] for key in RECORDED_ENVIRONMENT if key in os.environ},
        "settings": dataclasses.asdict(settings),
        "state_before": device.state(),
    }


def commit() -> str | None:
    """Return the commit of the current tree, with + for uncommitted changes; None outside one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return None


def writer(path: pathlib.Path | None) -> Save:
    """Return a function that writes the document to path in one step, or does nothing."""

    def save(document: dict[str, Any]) -> None:
        if path is None:
            return
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


def check_output(folder: pathlib.Path | None) -> None:
    """Make the folder, and a file there: what cannot be written is not measured."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SystemExit(f"bench: -o must be a folder to write to, got {folder}: {error}") from None


def list_families() -> None:
    for name, family in FAMILIES.items():
        print(f"{name}: {family.about}")
        for w in family.workloads:
            print(f"    {w.name:34s} {w.series}, {w.extent}")


class Bench:
    """The devices of one command, opened and measured when first needed."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings):
        self.arguments, self.settings = arguments, settings
        self.opened: dict[str, tuple[Device, dict[str, float]]] = {}

    def device(self, kind: str) -> tuple[Device, dict[str, float]]:
        if kind not in self.opened:
            device = open_device(kind)
            gc.collect()
            gc.freeze()  # torch collects garbage before each capture of a graph
            say(f"device: {device.name}; measuring its ceilings")
            ceilings = device.ceilings()
            say("ceilings:", ", ".join(f"{key} {value:.4g}" for key, value in ceilings.items()))
            self.opened[kind] = device, ceilings
        return self.opened[kind]

    def contestants(self, name: str) -> list[Contestant]:
        """Return whom the command line, or else the family, asks for."""
        arguments, family = self.arguments, FAMILIES[name]
        backends = choose(arguments.backend, family.backends, BACKENDS, "backend")
        peers = choose(arguments.peer, family.peers, tuple(PEERS), "peer")
        if not backends and not peers:
            raise SystemExit(f"bench: {name} has nobody to measure; name a --backend or a --peer")
        return [our_contestant(backend) for backend in backends] + [PEERS[peer] for peer in peers]

    def workloads(self, name: str) -> tuple[AnyWorkload, ...]:
        """Return the family's workloads that the command line asks for."""
        return tuple(w for w in FAMILIES[name].workloads if self.arguments.workload in w.name)

    def families(self) -> list[str]:
        """Check the command line; returns the families of which there is something to measure."""
        check_output(self.arguments.output)
        names = choose(self.arguments.family, ("smoke",), tuple(FAMILIES), "family")
        chosen = [name for name in names if self.workloads(name) and self.contestants(name)]
        if not chosen:
            raise SystemExit(
                f"bench: no workload of {', '.join(names) or 'no family'} has "
                f"{self.arguments.workload!r} in its name; --list shows all"
            )
        return chosen

    def family(self, name: str) -> int:
        """Measure one family; returns how many results of ours failed."""
        arguments, family = self.arguments, FAMILIES[name]
        contestants = self.contestants(name)
        device, ceilings = self.device("cpu" if family.device == "cpu" else arguments.device)
        document = describe(device, contestants, self.settings)
        document |= {"family": name, "about": family.about, "ceilings": ceilings}
        document |= {"quantity": family.quantity, "complete": False, "rows": []}
        document["commit"] = arguments.commit or document["commit"]
        path = arguments.output / f"{name}.json" if arguments.output else None
        print(f"\n{name}: {family.about}\n{report.header()}")
        heat_s = min(self.settings.heat_s, family.heat_s)
        budget_s = arguments.budget or min(self.settings.budget_s, family.budget_s)
        settings = dataclasses.replace(self.settings, heat_s=heat_s, budget_s=budget_s)
        document["settings"] = dataclasses.asdict(settings)
        if arguments.resume and path:
            document["rows"] = kept_rows(path, document)
        family = dataclasses.replace(family, workloads=self.workloads(name))
        if family.over_ranks:
            run: Run | RanksRun = RanksRun(device, settings, contestants)
        else:
            run = Run(device, settings, contestants)
        device.heat(self.settings.heat_s)
        with no_grad():
            run_family(name, family, run, document, writer(path))
        if isinstance(run, RanksRun):
            run.close()
        print(report.summary(document))
        if path:
            say(f"wrote {path}")
        return report.our_failures(document)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where a result of ours failed."""
    if arguments.list:
        list_families()
        return 0
    if arguments.resume and not arguments.output:
        raise SystemExit("bench: --resume must be told by -o which folder holds the earlier run")
    settings = Settings(rounds=arguments.rounds, limit_s=arguments.limit, jit=arguments.jit)
    if arguments.quick:
        settings = dataclasses.replace(settings, rounds=3, calls=5, budget_s=20.0, heat_s=0.1)
    if arguments.budget is not None:
        settings = dataclasses.replace(settings, budget_s=arguments.budget)
    bench = Bench(arguments, settings)
    return 1 if sum([bench.family(name) for name in bench.families()]) else 0


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """torch.no_grad() where torch is loaded."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch else contextlib.nullcontext()
