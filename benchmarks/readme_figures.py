# SPDX-License-Identifier: Apache-2.0
"""Write the figures of README.md from benchmarks/results/*.json; none of them is typed by hand.

    python benchmarks/readme_figures.py            # draw the pictures, rewrite the section
    python benchmarks/readme_figures.py --check    # only say whether README.md is up to date

Run it after every new results file; tests/house/test_docs.py fails until the section is current.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from cuattn._bench import report
from cuattn._cli import plot

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
NONE_YET = (
    "No results are committed yet. To take them: `python benchmarks/bench.py --family "
    "mission,forward,ladder,cpu`, then `python benchmarks/readme_figures.py`."
)


def time_and_memory(result: dict) -> str:
    memory = f", {report.bytes_text(result['peak_bytes'])}" if result["peak_bytes"] else ""
    return f"{milliseconds(result)} ms{memory}"


def speed(result: dict) -> str:
    return f"{result['tflops']:.0f}"


def milliseconds(result: dict) -> str:
    return f"{result['ms']:.3g}" if result["ms"] < 1000 else f"{result['ms']:.0f}"


def bandwidth(result: dict) -> str:
    return f"{result['gbps'] / 1e3:.2f}"


BEST = "best"  # the fastest peer of each row


class Shown(NamedTuple):
    """How README shows a family: what a cell says, which peer the last column compares with."""

    heading: str
    cell: Callable[[dict], str]
    peer: str | None = None
    rows: str = ""  # only those whose names contain this


SHOWN = {
    "mission": Shown("Naive against flash: time and memory beyond the inputs", time_and_memory),
    "forward": Shown("Forward in TFLOP/s", speed, BEST),
    "fp16": Shown("The same in float16", speed, BEST),
    "gqa": Shown("Grouped heads, TFLOP/s", speed, BEST),
    "ragged": Shown("Sequences of many lengths, TFLOP/s", speed, BEST),
    "masks": Shown("Windows, documents and score options, TFLOP/s", speed, BEST),
    "ladder": Shown("Every rung of the ladder, TFLOP/s", speed),
    "paged": Shown("Decode over pages, KV bytes / time in TB/s", bandwidth, BEST, "16, bf16"),
    "cascade": Shown("Decode of 64/8 heads behind a shared prefix, milliseconds", milliseconds),
    "cache": Shown("Cache operations, bytes / time in TB/s", bandwidth, "memcpy"),
    "cpu": Shown("CPU backend, milliseconds", milliseconds, "torch"),
}


def ratio(row: dict, results: dict[str, dict], peer: str) -> str:
    """How many times as fast as the peer cuattn is: the median of the per-round ratios."""
    ours = results.get("cuattn:auto")
    theirs = results.get(row.get("best_peer", "") if peer == BEST else peer)
    if ours is None or theirs is None or "ms" not in ours or "ms" not in theirs:
        return ""
    return f"{report.ratio(ours, theirs):.2f}"


def why_not(result: dict | None) -> str:
    """Why a cell has no figure; nothing where the contestant does not serve the row."""
    if result is None or result["status"].startswith("unsupported"):
        return ""
    return report.markdown_cell(result)


def table(document: dict, shown: Shown) -> str:
    """Format one row for each workload and one column for each library that was measured."""
    cell, peer = shown.cell, shown.peer
    names = plot.in_order(result["name"] for _, result in plot.measured(document))
    headings = ["workload", *map(plot.label, names)]
    if peer is not None:
        headings.append(f"cuattn x {'best peer' if peer == BEST else plot.label(peer)}")
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for row in document["rows"]:
        if row["status"] != "ok" or shown.rows not in row["workload"]["name"]:
            continue
        results = {result["name"]: result for result in row["results"]}
        cells = [row["workload"]["name"]]
        for name in names:
            result = results.get(name)
            measured = result is not None and "ms" in result
            cells.append(cell(result) if measured else why_not(result))
        if peer is not None:
            cells.append(ratio(row, results, peer))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paragraph(family: str, document: dict) -> str:
    """One family: heading, what was measured, picture, table, summary, machine and command."""
    shown = SHOWN[family]
    parts = [f"### {shown.heading}", document["about"]]
    if shown.rows:
        rows = f"The rows of {shown.rows!r}; all are in "
        parts[-1] += f" {rows}[{family}.json](benchmarks/results/{family}.json)."
    if (RESULTS / f"{family}_speed.svg").exists():
        pictures = [f"![{family}: speed](benchmarks/results/{family}_speed.svg)"]
        if (RESULTS / f"{family}_memory.svg").exists():
            pictures.append(f"![{family}: memory](benchmarks/results/{family}_memory.svg)")
        parts.append("\n".join(pictures))
    parts.append(table(document, shown))
    if summary := report.summary(document):
        parts.append("\n".join(f"- {line}" for line in summary.splitlines()))
    parts.append(f"{plot.caption(document)}  \n`{document['command']}`")
    return "\n\n".join(parts)


def documents() -> dict[str, dict]:
    """Read the committed results of the families that README shows."""
    paths = {family: RESULTS / f"{family}.json" for family in SHOWN}
    return {family: plot.load(path) for family, path in paths.items() if path.exists()}


def section() -> str:
    """Return what belongs between the markers."""
    found = documents()
    return "\n\n".join(paragraph(*item) for item in found.items()) if found else NONE_YET


def replaced(text: str) -> str:
    """README with the section rewritten."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    if not arguments.check and documents():
        failed = plot.main([RESULTS / f"{family}.json" for family in documents()], RESULTS)
        if failed:
            return failed
    old = readme.read_text(encoding="utf-8")
    new = replaced(old)
    if arguments.check:
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
