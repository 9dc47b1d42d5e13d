# SPDX-License-Identifier: Apache-2.0
"""From measured rounds to JSON rows, table lines and a summary."""

from __future__ import annotations

import math
import pathlib
import re
import statistics
from collections.abc import Iterable
from typing import Any

from .workloads import AnyWorkload, as_json

COLUMNS = (
    "{name:34s} {who:16s} {ms:>10s} {tflops:>8s} {gbps:>8s} {roof:>6s} {memory:>10s} {ratio:>7s}"
    "  {note}"
)

AUTO, INVARIANT = "cuattn:auto", "cuattn:invariant"


def median_ms(rounds_ms: dict[int, float]) -> float:
    return statistics.median(rounds_ms.values())


def row_json(w: AnyWorkload, entries: Iterable[Any]) -> dict[str, Any]:
    """Make a row of the results file: the workload, everybody's figures, our ratio to the best."""
    results = []
    for entry in entries:
        prepared = entry.prepared
        result = {
            "name": entry.contestant.name,
            "ours": entry.contestant.is_ours,
            "status": entry.status,
            "kernel": prepared.kernel if prepared else None,
            "max_error": entry.max_error,
            "allowed_error": entry.allowed_error,
        }
        if entry.ok and entry.rounds_ms:
            ms = median_ms(entry.rounds_ms)
            result |= {
                "ms": ms,
                "tflops": w.flops / ms / 1e9,
                "gbps": (prepared.bytes or w.bytes) / ms / 1e6,
                "peak_bytes": entry.peak_bytes,
                "calls_per_round": max(1, entry.calls_per_round),
                "calls_at_once": entry.calls_at_once,
                **({} if entry.host_us is None else {"host_us": entry.host_us}),
                "rounds_ms": {
                    str(number): value for number, value in sorted(entry.rounds_ms.items())
                },
            }
        results.append(result)
    row = {"workload": as_json(w), "status": "ok", "results": results}
    best = min(
        (r for r in results if not r["ours"] and "ms" in r), key=lambda r: r["ms"], default=None
    )
    if best is not None:
        row["best_peer"] = best["name"]
        for result in results:
            if result["ours"] and "ms" in result:
                result["ratio_to_best_peer"] = ratio(result, best)
    timed = {result["name"]: result for result in results if "ms" in result}
    if {AUTO, INVARIANT} <= timed.keys():  # what the switch costs
        timed[INVARIANT]["ratio_to_auto"] = ratio(timed[INVARIANT], timed[AUTO])
    return row


def empty_row(w: AnyWorkload, status: str) -> dict[str, Any]:
    """Make a row on which nobody was measured."""
    return {"workload": as_json(w), "status": status, "results": []}


def ratio(ours: dict[str, Any], peer: dict[str, Any]) -> float:
    """Median of the ratios peer / ours over the rounds that both ran: above 1, ours is faster."""
    shared = ours["rounds_ms"].keys() & peer["rounds_ms"].keys()
    if not shared:
        return peer["ms"] / ours["ms"]
    return statistics.median(
        peer["rounds_ms"][number] / ours["rounds_ms"][number] for number in shared
    )


def header() -> str:
    names = {
        "name": "workload",
        "who": "who",
        "ms": "ms",
        "tflops": "TFLOP/s",
        "gbps": "GB/s",
        "roof": "% max",
    }
    return COLUMNS.format(**names, memory="memory", ratio="x peer", note="")


def row_lines(row: dict[str, Any], ceilings: dict[str, float]) -> str:
    """Format a row. % max is the larger of the shares of the measured matmul and copy rates."""
    name = row["workload"]["name"]
    if row["status"] != "ok":
        return f"{name:34s} {row['status']}"
    lines: list[str] = []
    for result in row["results"]:
        fields = dict.fromkeys(("ms", "tflops", "gbps", "roof", "memory", "ratio"), "")
        fields |= {
            "name": name if not lines else "",
            "who": result["name"],
            "note": result["status"],
        }
        if "ms" in result:
            best = " (best peer)" if result["name"] == row.get("best_peer") else ""
            kernel = f"[{result['kernel']}]" if result["kernel"] else ""
            if "ratio_to_auto" in result:
                kernel += f" {result['ratio_to_auto']:.3f} x auto"
            if "host_us" in result:
                kernel += f" host {result['host_us']:.1f} us"
            fields |= {
                "ms": f"{result['ms']:.4f}",
                "tflops": f"{result['tflops']:.4g}",
                "gbps": f"{result['gbps']:.0f}",
                "roof": f"{100 * roof(row['workload'], result, ceilings):.0f}",
                "memory": bytes_text(result["peak_bytes"]),
                "ratio": f"{result['ratio_to_best_peer']:.3f}"
                if "ratio_to_best_peer" in result
                else "",
                "note": (kernel + best).strip(),
            }
        elif result["status"].startswith("unsupported"):
            continue
        lines.append(COLUMNS.format(**fields).rstrip())
    lines += published_lines(row) + bar_lines(row)
    return "\n".join(lines) or f"{name:34s} nobody measured here serves it"


def published_lines(row: dict[str, Any]) -> list[str]:
    """Format a line for each scaled figure of a peer that was not measured, and our ratios."""
    lines = []
    for peer, bar in row.get("published", {}).items():
        ratios = (
            f"{result['name']} {result['ratio_to_published'][peer]:.3f}"
            for result in row["results"]
            if "ratio_to_published" in result
        )
        fields = dict.fromkeys(("name", "ms", "tflops", "gbps", "roof", "memory", "ratio"), "")
        note = f"its figure {bar['figure']} scaled by {bar['scaled_by']}: {', '.join(ratios)}"
        speeds = {unit: f"{bar[unit]:.4g}" for unit in ("tflops", "gbps") if unit in bar}
        fields |= {"who": f"({peer})", **speeds, "note": note}
        lines.append(COLUMNS.format(**fields).rstrip())
    return lines


def bar_lines(row: dict[str, Any]) -> list[str]:
    """Say of each bar of a row what was reached."""
    words = {True: "holds", False: "MISSED", None: "not measured"}
    return [
        f"{'':34s} {bar['ours']} against {bar['against']}: "
        + (f"{bar['value']:.3f}" if bar["value"] is not None else "-")
        + f" of {bar['least']:g}, {words[bar['holds']]}"
        for bar in row.get("bars", ())
    ]


def roof(workload: dict[str, Any], result: dict[str, Any], ceilings: dict[str, float]) -> float:
    """Share of the measured ceiling that binds: arithmetic or memory, whichever is nearer."""
    matmul = ceilings.get(f"matmul_{workload['dtype']}_tflops") or ceilings.get(
        "matmul_float32_tflops", math.inf
    )
    return max(result["tflops"] / matmul, result["gbps"] / ceilings["copy_gbps"])


def markdown(document: dict[str, Any]) -> str:
    """Format the results as a Markdown table: a row for each workload, a column for each name."""
    names = list(
        dict.fromkeys(
            result["name"]
            for row in document["rows"]
            for result in row["results"]
            if not result["status"].startswith("unsupported")
        )
    )
    lines = [f"| workload | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for row in document["rows"]:
        results = {result["name"]: result for result in row["results"]}
        quantity = document.get("quantity", "tflops")
        cells = [markdown_cell(results.get(name), quantity) for name in names]
        lines.append(f"| {row['workload']['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown_cell(result: dict[str, Any] | None, quantity: str = "tflops") -> str:
    if result is None or "ms" not in result:
        return "" if result is None else result["status"].split(":")[-1].strip()[:24]
    memory = f", {bytes_text(result['peak_bytes'])}" if result["peak_bytes"] else ""
    return f"{result['ms']:.4g} ms, {speed_text(result, quantity)}{memory}"


def speed_text(result: dict[str, Any], quantity: str) -> str:
    """TFLOP/s, or TB/s where memory is what counts."""
    if quantity == "gbps":
        return f"{result['gbps'] / 1e3:.3g} TB/s"
    return f"{result['tflops']:.3g} TFLOP/s"


def bytes_text(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def commits(document: dict[str, Any]) -> str:
    """Name the commit of the rows, or where a run went on with another, each and its rows."""
    whole = document["commit"] or "unknown"
    counts: dict[str, int] = {}
    for row in document["rows"]:
        if row.get("status", "ok") == "ok":
            commit = row.get("commit") or whole
            counts[commit] = counts.get(commit, 0) + 1
    if len(counts) <= 1:
        return f"commit {next(iter(counts), whole)}"
    return "commits " + ", ".join(f"{commit} ({n} rows)" for commit, n in counts.items())


def our_results(document: dict[str, Any]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    for row in document["rows"]:
        for result in row["results"]:
            if result["ours"]:
                yield row, result


def our_failures(document: dict[str, Any]) -> int:
    aborted = sum(row["status"].startswith(("aborted", "failed")) for row in document["rows"])
    return aborted + sum(
        result["status"].startswith("failed") for _, result in our_results(document)
    )


def summary(document: dict[str, Any]) -> str:
    """Geometric mean and worst row of the ratio to the best peer, per backend of ours."""
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row, result in our_results(document):
        found = {f"{peer}'s figures": r for peer, r in result.get("ratio_to_published", {}).items()}
        if "ratio_to_best_peer" in result:
            found = {"the best peer": result["ratio_to_best_peer"], **found}
        if "ratio_to_auto" in result:
            found["auto"] = result["ratio_to_auto"]
        for whom, value in found.items():
            ratios.setdefault((result["name"], whom), []).append((value, row["workload"]["name"]))
    lines = []
    backends = list(dict.fromkeys(name for name, _ in ratios))
    for (name, whom), values in sorted(ratios.items(), key=lambda item: backends.index(item[0][0])):
        mean = math.exp(statistics.fmean(math.log(value) for value, _ in values))
        worst, where = min(values)
        rows = f"{len(values)} row{'s' if len(values) > 1 else ''}"
        lines.append(
            f"{name}: {mean:.3f} x {whom} on the geometric mean of {rows}, "
            f"least {worst:.3f} at {where}"
        )
    lines += bar_summary(document)
    if not document["complete"]:
        lines.append("some rows were not run: raise --budget or choose rows with --workload")
    return "\n".join(lines)


def bar_summary(document: dict[str, Any]) -> list[str]:
    """How many bars hold, the mean of those that are alike, and which do not hold."""
    bars = [(bar, row) for row in document["rows"] for bar in row.get("bars", ())]
    if not bars:
        return []
    judged = [(bar, row) for bar, row in bars if bar["holds"] is not None]
    missed = [
        f"{row['workload']['name']}: {bar['ours']} {bar['value']:.3f} of {bar['least']:g} "
        f"({bar['against']})"
        for bar, row in judged
        if not bar["holds"]
    ]
    alike: dict[tuple[Any, ...], list[float]] = {}
    for bar, _ in judged:
        kind = (bar["ours"], bar["against"], bar["least"], bar.get("mean"))
        alike.setdefault(kind, []).append(bar["value"])
    means = [
        f"{ours} against {against}, where the bar is {least:g}: "
        f"{mean_text(values, wanted)} on the geometric mean of {len(values)} rows, least "
        f"{min(values):.3f}"
        for (ours, against, least, wanted), values in alike.items()
        if len(values) > 1
    ]
    count = f"bars: {len(judged) - len(missed)} of {len(judged)} hold"
    left = len(bars) - len(judged)
    return [count + (f", {left} not measured" if left else ""), *means, *missed]


def mean_text(values: list[float], wanted: float | None) -> str:
    """Format the geometric mean, and whether it is what was wanted of it."""
    mean = math.exp(statistics.fmean(map(math.log, values)))
    if wanted is None:
        return f"{mean:.3f}"
    return f"{mean:.3f} of {wanted:.3g} ({'holds' if mean >= wanted else 'MISSED'})"


def command(argv: list[str]) -> str:
    """Return the command line as a user types it, without the folder that the results go to."""
    script = pathlib.Path(argv[0]).name
    start = "python benchmarks/bench.py" if script == "bench.py" else "python -m cuattn"
    return re.sub(r" (-o|--output)[ =]\S+", "", " ".join([start, *argv[1:]]))
