# SPDX-License-Identifier: Apache-2.0
"""What a row must reach, said beside the workload and judged when the row is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import report

NOISE = 0.98  # a bar of 1.00 holds from here on: the chip is limited by power


@dataclasses.dataclass(frozen=True)
class Bar:
    """A result of ours must be `least` times as fast as `against`.

    `against` is another contestant of the row, "best peer", "copy" (the copy rate of the run), a
    figure of published.py, "row <name>" (the same contestant on an earlier row, in GB/s), "time of
    row <name>" (the same by time), "host time" (that of the best peer), "TFLOP/s", or
    "microseconds", of which there may be `least` at most. `mean` is what the geometric mean over
    all rows with this bar must reach.
    """

    ours: str
    against: str
    least: float
    mean: float | None = None


def value(
    bar: Bar, row: dict[str, Any], rows: list[dict[str, Any]], ceilings: dict[str, float]
) -> float | None:
    """How far `ours` came; None where it or `against` was not measured."""
    timed = {result["name"]: result for result in row["results"] if "ms" in result}
    ours = timed.get(bar.ours)
    if ours is None:
        return None
    if bar.against == "microseconds":
        return ours["ms"] * 1e3
    if bar.against == "best peer":
        return ours.get("ratio_to_best_peer")
    if bar.against == "copy":
        return ours["gbps"] / ceilings["copy_gbps"]
    if bar.against == "TFLOP/s":
        return float(ours["tflops"])
    if bar.against == "host time":
        peers = [r["host_us"] for r in timed.values() if not r["ours"] and "host_us" in r]
        return min(peers) / ours["host_us"] if peers and "host_us" in ours else None
    if bar.against.startswith("time of row "):
        name = bar.against.removeprefix("time of row ")
        found = (r for r in rows if r["workload"]["name"] == name)
        results = (result for r in found for result in r["results"] if result["name"] == bar.ours)
        return next((r["ms"] / ours["ms"] for r in results if "ms" in r), None)
    if bar.against.startswith("row "):
        found = (r for r in rows if r["workload"]["name"] == bar.against.removeprefix("row "))
        results = (result for r in found for result in r["results"] if result["name"] == bar.ours)
        return next((ours["gbps"] / r["gbps"] for r in results if "gbps" in r), None)
    if bar.against in timed:
        return report.ratio(ours, timed[bar.against])
    return ours.get("ratio_to_published", {}).get(bar.against)


def judge(
    bars: tuple[Bar, ...],
    row: dict[str, Any],
    rows: list[dict[str, Any]],
    ceilings: dict[str, float],
) -> None:
    """Add to a measured row what became of its bars; `rows` are those before it."""
    row["bars"] = []
    for bar in bars:
        reached = value(bar, row, rows, ceilings)
        if reached is None:
            holds = None
        elif bar.against == "microseconds":
            holds = reached <= bar.least
        else:
            holds = reached >= bar.least * (NOISE if bar.least == 1.0 else 1.0)
        row["bars"].append({**dataclasses.asdict(bar), "value": reached, "holds": holds})
