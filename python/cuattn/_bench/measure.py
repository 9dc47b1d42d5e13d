# SPDX-License-Identifier: Apache-2.0
"""Measures one workload: check everybody's result, then time them in rounds of shuffled order.

How a number is taken. Each contestant's result is checked first. Then, per workload, the chip is
heated and every contestant is timed in several rounds; each round runs them in a new random order
and keeps the median of its calls. A time is the median over the rounds; a ratio is the median of
the per-round ratios, so that a drift of the clocks within the run touches both sides alike.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from . import report
from .devices import Device
from .peers import Contestant
from .prepared import Prepared, Unsupported
from .workloads import AnyWorkload

PEER_SLACK = 4  # the check of another's sums only asks whether it computes the same function
BFLOAT16_SLACK = 8  # for who answers a float16 row in bfloat16: three bits less
SLOW_CALL_S = 1.0  # a call longer than this is timed twice, after the one that is checked
LARGE_BYTES = 4 << 30  # the allocator may have to make room for so much, which is not to be timed
MIN_SHARE_S = 0.1  # what a contestant gets on a row even when the budget is spent
MIN_GRAPH_SHARE_S = 0.03  # as much for graphs of calls
MAX_GRAPHS = 5  # in a round: each is many calls
JIT_NEEDS = 0.5  # of a row's fair share of the budget; with less left, nobody compiles any more


@dataclasses.dataclass
class Settings:
    """How thoroughly to measure."""

    rounds: int = 7
    calls: int = 40  # in a round, at most
    heat_s: float = 0.4
    budget_s: float = 150.0  # for one family; shared among its rows
    limit_s: float = 10.0  # a contestant expected to need longer for one call is skipped
    jit: str = "marked"  # peers that compile for each shape: on marked rows, on all, on none


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
    timed: Callable[[], object] | None = None  # calls_at_once calls; None: prepared.call
    calls_at_once: int = 1
    host_us: float | None = None  # until a call returns

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def warms_up(self) -> bool:
        """Whether each round begins with a call that is not timed."""
        return (self.peak_bytes or 0) > LARGE_BYTES


def say(*words: object) -> None:
    """Progress; stdout is for the table."""
    print(*words, file=sys.stderr, flush=True)


def explain_failure(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return "failed: out of memory"
    return f"failed: {type(error).__name__}: {text[:200]}"


def admit(entry: Entry, w: AnyWorkload, x: Any, sample: Any, device: Device) -> None:
    """Prepare, run once, check, and estimate the time of a call."""
    prepared = entry.prepared = entry.contestant.prepare(w, x)
    with prepared.context():
        out: list[Any] = []
        peaks: list[int | None] = []
        with device.peak_memory(peaks):
            out.append(prepared.call())
        error = sample.error(prepared.canonical(out.pop()))
        entry.max_error = error.max_error
        entry.allowed_error = error.allowed * (1 if entry.contestant.has_our_sums else PEER_SLACK)
        if entry.contestant.in_bfloat16 and w.dtype == "float16":
            entry.allowed_error *= BFLOAT16_SLACK
        if not error.max_error <= entry.allowed_error:  # NaN is wrong too
            allowed = f"allowed {entry.allowed_error:.3g}"
            entry.status = f"failed: wrong result, max error {error.max_error:.3g}, {allowed}"
            return
        peaks.clear()  # the first call may have loaded a library, or compiled and tuned
        with device.peak_memory(peaks):
            entry.estimate_s = device.time(prepared.call, 1)
        if entry.estimate_s >= SLOW_CALL_S:  # of two, for one may be a stall of the machine
            entry.estimate_s = min(entry.estimate_s, device.time(prepared.call, 1))
        if entry.estimate_s < SLOW_CALL_S:
            entry.estimate_s = device.time(prepared.call, 3 if entry.estimate_s < 0.1 else 1)
            if prepared.repeats:
                entry.calls_at_once = prepared.repeats
                entry.timed = device.capture(prepared.call, prepared.repeats)
                entry.estimate_s = device.time(entry.timed, 1) / prepared.repeats
            if prepared.has_host_time:
                entry.host_us = device.host_us(prepared.call)
        if entry.estimate_s >= SLOW_CALL_S:
            entry.rounds_ms[0] = entry.estimate_s * 1e3
        entry.peak_bytes = peaks[0] if peaks[0] is not None else prepared.memory_bytes


def plan_rounds(entries: list[Entry], settings: Settings, slice_s: float, flush_s: float) -> None:
    """Choose calls per round and rounds of each contestant, so that all fit into slice_s."""
    rounds = settings.rounds
    for entry in entries:
        if entry.rounds_ms:
            continue
        least_s = MIN_SHARE_S if entry.timed is None else MIN_GRAPH_SHARE_S
        share = max(least_s, slice_s / max(1, len(entries)))
        at_once_s = entry.estimate_s * entry.calls_at_once
        affordable = int(share / ((1 + entry.warms_up) * at_once_s + flush_s))
        entry.rounds = rounds if affordable >= rounds else max(3, affordable)
        most = settings.calls if entry.timed is None else min(settings.calls, MAX_GRAPHS)
        entry.calls_per_round = min(most, max(1, affordable // rounds))


def run_rounds(entries: list[Entry], device: Device, order: random.Random) -> None:
    """Time everybody once a round, in a new order each time."""
    for number in range(max((entry.rounds for entry in entries), default=0)):
        for entry in order.sample(entries, len(entries)):
            if number < entry.rounds and entry.ok:
                prepared = entry.prepared
                assert prepared is not None  # an entry that is ok has been admitted
                try:
                    with prepared.context():
                        if entry.warms_up:
                            prepared.call()
                        timed = entry.timed or prepared.call
                        seconds = device.time(timed, entry.calls_per_round)
                    entry.rounds_ms[number] = seconds / entry.calls_at_once * 1e3
                except Exception as error:
                    entry.status = explain_failure(error)
                    device.release()


class Run:
    """What the rows of one family share: the device, the contestants, and how fast they were."""

    def __init__(self, device: Device, settings: Settings, contestants: list[Contestant]):
        self.device, self.settings, self.contestants = device, settings, contestants
        self.order = random.Random(0)
        self.told: set[tuple[str, str]] = set()
        self.rate: dict[tuple[str, str], float] = {}  # (contestant, dtype) -> best FLOP/s seen

    def wanted(self, contestant: Contestant, w: AnyWorkload) -> bool:
        jit = self.settings.jit
        chosen = not contestant.is_jit or jit == "all" or (jit == "marked" and w.jit)
        backends = getattr(w, "backends", ())
        named = not backends or not contestant.is_ours or contestant.backend in backends
        return chosen and named and w.op in contestant.ops

    def reason_to_skip(
        self, contestant: Contestant, w: AnyWorkload, may_compile: bool
    ) -> str | None:
        if contestant.is_jit and not may_compile:
            return "skipped: no time left to compile"
        rate = self.rate.get((contestant.name, w.dtype))
        if rate and w.flops / rate > self.settings.limit_s:
            return f"skipped: one call would take about {w.flops / rate:.0f} s"
        return None

    def admit_all(self, w: AnyWorkload, x: Any, may_compile: bool) -> list[Entry]:
        entries = []
        sample = x.sample()
        for contestant in self.contestants:
            if not self.wanted(contestant, w):
                continue
            entry = Entry(contestant)
            entries.append(entry)
            reason = self.reason_to_skip(contestant, w, may_compile)
            if reason is not None:
                entry.status = reason
                continue
            try:
                admit(entry, w, x, sample, self.device)
            except Unsupported as reason:
                entry.status = f"unsupported: {reason}"
                if (contestant.name, str(reason)) not in self.told:
                    self.told.add((contestant.name, str(reason)))
                    say(f"    without {contestant.name}: {reason}")
            except Exception as error:
                entry.status = explain_failure(error)
                self.device.release()
        return entries

    def row(self, w: AnyWorkload, slice_s: float, fair_s: float = 0.0) -> dict[str, Any]:
        """Measure one workload within about slice_s seconds; fair_s is what it should have had."""
        begin = time.perf_counter()
        try:
            x = self.device.inputs(w)
        except Exception as error:
            self.device.release()
            return report.empty_row(w, explain_failure(error))
        entries = self.admit_all(w, x, may_compile=slice_s >= JIT_NEEDS * fair_s)
        running = [entry for entry in entries if entry.ok]
        self.device.heat(self.settings.heat_s)
        left_s = slice_s - (time.perf_counter() - begin)
        plan_rounds(running, self.settings, left_s, self.device.flush_seconds)
        run_rounds(running, self.device, self.order)
        for entry in running:
            if entry.ok:
                key = (entry.contestant.name, w.dtype)
                rate = w.flops / (report.median_ms(entry.rounds_ms) / 1e3)
                self.rate[key] = max(rate, self.rate.get(key, 0.0))
        return report.row_json(w, entries)
