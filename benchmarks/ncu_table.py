# SPDX-License-Identifier: Apache-2.0
"""Turn what `ncu --csv --page raw --print-units base` wrote into the table of docs/profiling.md.

    ncu --metrics "$(python benchmarks/ncu_table.py --metrics)" ... --log-file d128.csv python ...
    python benchmarks/ncu_table.py d64.csv d128.csv

A column is a file, named after it, or where ncu ran with --nvtx a row of profile_kernel.py; of its
kernels the one that took the most time, the median over its launches.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable

# Label, metric, and how its value in base units is printed.
ROWS: list[tuple[str, str, Callable[[float], str]]] = [
    ("time, ms", "gpu__time_duration.sum", lambda x: f"{x / 1e6:.3f}"),
    ("SM clock, GHz", "sm__cycles_elapsed.avg.per_second", lambda x: f"{x / 1e9:.2f}"),
    (
        "tensor pipe active, %",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    (
        "exp2 pipe (XU), %",
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    (
        "FMA pipe, %",
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    (
        "ALU pipe, %",
        "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    (
        "issue slots used, %",
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    (
        "compute, % of its roof",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        lambda x: f"{x:.1f}",
    ),
    (
        "memory, % of its roof",
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        lambda x: f"{x:.1f}",
    ),
    ("L1 hit rate, %", "l1tex__t_sector_hit_rate.pct", lambda x: f"{x:.1f}"),
    ("DRAM read, MB", "dram__bytes_read.sum", lambda x: f"{x / 1e6:.0f}"),
    ("DRAM written, MB", "dram__bytes_write.sum", lambda x: f"{x / 1e6:.0f}"),
    ("DRAM, % of peak", "dram__throughput.avg.pct_of_peak_sustained_elapsed", lambda x: f"{x:.1f}"),
    ("L2 hit rate, %", "lts__t_sector_hit_rate.pct", lambda x: f"{x:.1f}"),
    (
        "warps active, % of 64",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        lambda x: f"{x:.1f}",
    ),
    ("registers a thread at entry", "launch__registers_per_thread", lambda x: f"{x:.0f}"),
    (
        "shared memory a block, KB",
        "launch__shared_mem_per_block_dynamic",
        lambda x: f"{x / 1024:.0f}",
    ),
]
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
LEAST_STALL = 0.05  # a reason below this in every column is left out, unless told otherwise


def metrics() -> list[str]:
    """Every metric that the table may show, for ncu's --metrics."""
    return [metric for _, metric, _ in ROWS] + [STALL.format(reason) for reason in STALLS]


def number(text: str) -> float | None:
    """Read a value as ncu prints it (1,234.5), None where it has none."""
    text = text.replace(",", "")
    return float(text) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) else None


RANGE = re.compile(r"\[([^]|]*)\|([^]]*)\]")  # of profile_kernel.py: who and row, FLOPs
FLOPS = "flops"  # of a call, beside the metrics


def read(lines: Iterable[str], stem: str) -> dict[str, dict[str, float]]:
    """Read the columns of a file: one for each range that its launches lie in, else `stem`."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        raise ValueError("no kernel in it: was something profiled, with --csv --page raw?")
    heading, _units, *launches = rows
    at = {name: place for place, name in enumerate(heading)}
    for needed in ("Kernel Name", ROWS[0][1]):
        if needed not in at:
            raise ValueError(f"it has no column {needed!r}; take the metrics of --metrics")
    columns: dict[str, list[list[str]]] = {}
    flops: dict[str, float] = {}
    for launch in launches:
        within = next(filter(None, map(RANGE.search, launch)), None)
        name = within[1].removeprefix("cuattn:") if within else stem
        columns.setdefault(name, []).append(launch)
        if within:
            flops[name] = float(within[2])
    found = {name: longest(at, chosen) for name, chosen in columns.items()}
    for name, value in flops.items():
        found[name][FLOPS] = value
    return found


def longest(at: dict[str, int], launches: list[list[str]]) -> dict[str, float]:
    """Medians of the metrics over the launches of the kernel that took the most time."""
    seconds: dict[str, float] = {}
    for launch in launches:
        name = launch[at["Kernel Name"]]
        seconds[name] = seconds.get(name, 0.0) + (number(launch[at[ROWS[0][1]]]) or 0.0)
    chosen_name = max(seconds, key=lambda name: seconds[name])
    chosen = [launch for launch in launches if launch[at["Kernel Name"]] == chosen_name]
    found = {}
    for metric in metrics():
        values = [number(launch[at[metric]]) for launch in chosen] if metric in at else []
        if values and None not in values:
            found[metric] = statistics.median(values)
    return found


def intensity(found: dict[str, float]) -> float | None:
    """FLOPs of the call for each byte that its longest kernel moves from and to DRAM."""
    moved = found.get("dram__bytes_read.sum", 0.0) + found.get("dram__bytes_write.sum", 0.0)
    return found[FLOPS] / moved if found.get(FLOPS) and moved else None


def table(columns: dict[str, dict[str, float]], least_stall: float = LEAST_STALL) -> str:
    """Format a Markdown table: a row for each metric, a column for each file."""
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]

    def add(label: str, metric: str, text: Callable[[float], str]) -> None:
        cells = (text(found[metric]) if metric in found else "" for found in columns.values())
        lines.append(f"| {label} | {' | '.join(cells)} |")

    for label, metric, text in ROWS:
        if any(metric in found for found in columns.values()):
            add(label, metric, text)
    ratios = [intensity(found) for found in columns.values()]
    if any(ratios):
        cells = ("" if ratio is None else f"{ratio:.0f}" for ratio in ratios)
        lines.append(f"| FLOPs a byte of DRAM | {' | '.join(cells)} |")
    stalls = {
        reason: max(found.get(STALL.format(reason), 0.0) for found in columns.values())
        for reason in STALLS
    }
    for reason in sorted(STALLS, key=lambda reason: -stalls[reason]):
        if stalls[reason] >= least_stall:
            label = f"warps a scheduler in {reason.replace('_', ' ')}, per issue"
            add(label, STALL.format(reason), lambda x: f"{x:.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--least-stall", type=float, default=LEAST_STALL, metavar="WARPS")
    parser.add_argument("--metrics", action="store_true", help="print the list for ncu and stop")
    arguments = parser.parse_args()
    if arguments.metrics:
        print(",".join(metrics()))
        return 0
    columns = {}
    for path in arguments.files:
        try:
            columns |= read(path.read_text(encoding="utf-8").splitlines(), path.stem)
        except (OSError, ValueError) as error:
            print(f"ncu_table: {path}: {error}", file=sys.stderr)
            return 1
    print(table(columns, arguments.least_stall))
    return 0


if __name__ == "__main__":
    sys.exit(main())
