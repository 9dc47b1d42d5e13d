# SPDX-License-Identifier: Apache-2.0
"""Measures workloads over ranks: processes that time everybody in step, the slowest rank counts.

As measure.py: every result is checked, everybody is timed in rounds of shuffled order, each call
finds a cold L2. Before a call all ranks wait for each other on the host.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from typing import Any, NamedTuple

from . import report
from .devices import Device, open_device
from .measure import PEER_SLACK, Entry, Settings, explain_failure
from .peers import PEERS, Contestant, our_contestant
from .prepared import Prepared, Unsupported
from .workloads import AnyWorkload

SIZE = 2
GRACE_S = 120.0  # beyond its share of time, after which a row counts as hanging


class RanksRun:
    """As measure.Run, over two processes of its own."""

    def __init__(self, device: Device, settings: Settings, contestants: list[Contestant]):
        self.device, self.settings, self.contestants = device, settings, contestants
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            here, there = context.Pipe()
            where = device.kind, f"file://{self.folder.name}/store"
            process = context.Process(target=serve, args=(rank, *where, settings, there))
            process.daemon = True
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def row(self, w: AnyWorkload, slice_s: float, fair_s: float = 0.0) -> dict[str, Any]:
        """Measure one workload within about slice_s seconds."""
        del fair_s
        names = [c.name for c in self.contestants if w.op in c.ops]
        found: list[Any] = []
        for pipe in self.pipes:
            pipe.send((w, names, slice_s))
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(slice_s + GRACE_S):
                raise RuntimeError(f"rank {rank} hangs")
            found.append(pipe.recv())
        failed = [x for x in found if isinstance(x, str)]
        if failed:
            return report.empty_row(w, failed[0])
        entries = [entry_of(c, x) for c, x in zip(self.contestants, found[0], strict=False)]
        return report.row_json(w, entries)

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()


def entry_of(contestant: Contestant, fields: dict[str, Any]) -> Entry:
    """Make of what a rank says an entry of the report."""
    fields = dict(fields)
    prepared = Prepared(lambda: None, kernel=fields.pop("kernel"))
    return Entry(contestant, prepared=prepared, **fields)


class Ranks(NamedTuple):
    """What a process knows of the others."""

    rank: int
    host: Any  # a group that moves host memory
    device: Device
    settings: Settings
    order: random.Random

    def worst(self, values: list[float]) -> list[float]:
        """Return the largest of each over the ranks."""
        import torch
        import torch.distributed as dist

        box = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.host)
        return [float(x) for x in box]

    def seconds(self, call: Any, times: int) -> float:
        """Time a call of all ranks so many times: the median of the slowest."""
        import torch.distributed as dist

        found = []
        for _ in range(times):
            dist.barrier(group=self.host)
            found.append(self.device.time(call, 1))
        return statistics.median(self.worst(found))


def serve(rank: int, kind: str, store: str, settings: Settings, pipe: Any) -> None:
    """Join the group and measure what comes until there is no more."""
    import torch
    import torch.distributed as dist

    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUATTN_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=GRACE_S)
    backend = "nccl" if kind == "cuda" else "gloo"
    where: dict[str, Any] = {"device_id": torch.device("cuda", rank)} if kind == "cuda" else {}
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=SIZE, timeout=wait, **where
    )
    host = dist.new_group(range(SIZE), backend="gloo", timeout=wait)
    ranks = Ranks(rank, host, open_device(kind), settings, random.Random(0))
    while (task := pipe.recv()) is not None:
        try:
            with torch.no_grad():
                pipe.send(measure(ranks, *task))
        except Exception as error:
            pipe.send(explain_failure(error))
        ranks.device.release()
    dist.destroy_process_group()


def contestant_of(name: str) -> Contestant:
    backend = name.removeprefix("cuattn:")
    return our_contestant(backend) if backend != name else PEERS[name]


def measure(ranks: Ranks, w: AnyWorkload, names: list[str], slice_s: float) -> list[dict[str, Any]]:
    """Check and time everybody on one workload; the same on every rank."""
    end = time.perf_counter() + slice_s
    inputs = ranks.device.inputs(w)
    sample = inputs.sample()
    admitted = {name: admit(ranks, w, contestant_of(name), inputs, sample) for name in names}
    ready = {name: x for name, x in admitted.items() if x[0]["status"] == "ok"}
    ranks.device.heat(ranks.settings.heat_s)
    left = -ranks.worst([time.perf_counter() - end])[0]
    share = max(left, 0.1) / max(len(ready), 1) / ranks.settings.rounds
    for fields, _, estimate in ready.values():
        affordable = int(share / (estimate + ranks.device.flush_seconds + 1e-3))
        fields["calls_per_round"] = max(1, min(ranks.settings.calls, affordable))
    for number in range(ranks.settings.rounds if left > 0 else 3):
        for name in ranks.order.sample(list(ready), len(ready)):
            fields, prepared, _ = ready[name]
            with prepared.context():
                seconds = ranks.seconds(prepared.call, fields["calls_per_round"])
            fields["rounds_ms"][number] = seconds * 1e3
    return [fields for fields, _, _ in admitted.values()]


def admit(
    ranks: Ranks, w: AnyWorkload, contestant: Contestant, inputs: Any, sample: Any
) -> tuple[dict[str, Any], Any, float]:
    """Prepare a call, run and check it on all ranks: its fields, itself, seconds of a call."""
    fields: dict[str, Any] = {"status": "ok", "kernel": None, "rounds_ms": {}}
    prepared, estimate = None, 0.0
    try:
        prepared = contestant.prepare(w, inputs)
        fields["kernel"] = prepared.kernel
        with prepared.context():
            peaks: list[int | None] = []
            error = sample.error(prepared.canonical(prepared.call()))
            with ranks.device.peak_memory(peaks):
                estimate = ranks.seconds(prepared.call, 1)
        fields |= {"peak_bytes": peaks[0], "max_error": error.max_error}
        fields["allowed_error"] = error.allowed * (1 if contestant.has_our_sums else PEER_SLACK)
        if not error.max_error <= fields["allowed_error"]:
            fields["status"] = f"failed: wrong result, max error {error.max_error:.3g}"
    except Unsupported as reason:
        fields["status"] = f"unsupported: {reason}"
    except Exception as error:
        fields["status"] = explain_failure(error)
        ranks.device.release()
    bad = ranks.worst([float(fields["status"] != "ok")])[0]
    if bad and fields["status"] == "ok":
        fields["status"] = "failed: on another rank"
    return fields, prepared, estimate
