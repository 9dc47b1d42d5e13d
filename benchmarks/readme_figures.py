# SPDX-License-Identifier: Apache-2.0
"""Write the figures of README.md and docs/figures.md from benchmarks/results/*.json.

    python benchmarks/readme_figures.py            # rewrite the sections of both pages
    python benchmarks/readme_figures.py --draw     # the pictures too; needs matplotlib
    python benchmarks/readme_figures.py --check    # only say whether the pages are up to date

No figure is typed by hand. Run it after every new results file; tests/house/test_docs.py fails
until the sections are current.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import aims
import front_picture
import variants_page
from cuattn._bench import bars, report
from cuattn._cli import plot

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, FIGURES = ROOT / "README.md", ROOT / "docs" / "figures.md"
BACKWARD = ROOT / "docs" / "backward.md"
NONE_YET = (
    "No results are committed yet. To take them: `python benchmarks/bench.py --family "
    "mission,forward,ladder,cpu`, then `python benchmarks/readme_figures.py --draw`."
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
SPEED, MEMORY = ("speed",), ("speed", "memory")


class Shown(NamedTuple):
    """How a family is shown: what a cell says, which peer the last column compares with."""

    heading: str
    cell: Callable[[dict], str]
    peer: str | None = None
    pictures: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # of README; docs/figures.md has all


GRID_ROWS = ("d64 s16384 causal", "d128 s2048 full", "d128 s16384 causal", "d256 s16384 causal")
SHOWN = {
    "mission": Shown("Naive against flash: time and memory", time_and_memory, None, MEMORY),
    "forward": Shown("Forward, TFLOP/s", speed, BEST, MEMORY, GRID_ROWS),
    "backward": Shown(
        "Backward, TFLOP/s",
        speed,
        BEST,
        SPEED,
        GRID_ROWS,
    ),
    "fp16": Shown("Forward in float16, TFLOP/s", speed, BEST, SPEED),
    "gqa": Shown("Grouped heads, TFLOP/s", speed, BEST, MEMORY),
    "ragged": Shown("Sequences of many lengths, TFLOP/s", speed, BEST, SPEED),
    "models": Shown("Layers of models, TFLOP/s", speed, BEST),
    "masks": Shown(
        "Windows, documents and score options, TFLOP/s",
        speed,
        BEST,
        SPEED,
    ),
    "split": Shown("Few queries over many keys, TFLOP/s", speed, BEST),
    "invariant": Shown("Forward with batch_invariant=True, TFLOP/s", speed, "cuattn:invariant"),
    "ladder": Shown("Every rung of the ladder, TFLOP/s", speed, None, MEMORY),
    "paged": Shown(
        "Decode over pages, KV bytes / time in TB/s",
        bandwidth,
        BEST,
        SPEED,
        tuple(
            f"{name}, block 16, bf16"
            for name in (
                "32/8 1 x 8192",
                "32/8 16 x 1024",
                "32/8 64 x 8192",
                "32/32 16 x 1024",
            )
        ),
    ),
    "paged_ragged": Shown("Decode of unequal contexts, TB/s", bandwidth, BEST),
    "paged_vllm": Shown("PagedAttention V1 and V2 in vLLM's layout, TB/s", bandwidth),
    "paged_fp8": Shown("Decode over float8 caches, TB/s", bandwidth, "cuattn:wide"),
    "paged_blocks": Shown("Decode over blocks of 1 and 8 tokens, TB/s", bandwidth),
    "paged_invariant": Shown(
        "Decode with batch_invariant=True, TB/s", bandwidth, "cuattn:invariant"
    ),
    "cascade": Shown(
        "Decode behind a shared prefix, milliseconds", milliseconds, "flashinfer", SPEED
    ),
    "chunked": Shown("Prefill over pages, TFLOP/s", speed, "cuattn:dense"),
    "chunked_fp8": Shown("Prefill over float8 caches, TFLOP/s", speed, "cuattn:wide"),
    "parallel": Shown("Two GPUs beside one, milliseconds", milliseconds, "cuattn:one"),
    "cache": Shown("Cache operations, bytes / time in TB/s", bandwidth, "memcpy", SPEED),
    "flex": Shown("Masks and scores as functions, TFLOP/s", speed, "flex", SPEED),
    "fp8": Shown("Float8, TFLOP/s", speed, BEST, SPEED),
    "quantize": Shown("Quantisation, bytes / time in TB/s", bandwidth, "memcpy"),
    "variants": Shown("Variants of attention side by side", milliseconds, None, MEMORY),
    "mla": Shown("Latent attention, bytes of latents / time in TB/s", bandwidth, BEST, SPEED),
    "rope": Shown("Rotation, milliseconds", milliseconds, BEST),
    "fused": Shown("Norms, activations, sampling: bytes / time in TB/s", bandwidth, BEST, SPEED),
    "cpu": Shown("CPU backend, milliseconds", milliseconds, "torch", MEMORY),
    "cpu_ladder": Shown("CPU: naive against flash, milliseconds", milliseconds),
}
IN_README = ("forward", "backward", "paged")


def documents() -> dict[str, dict]:
    """Read the committed results of the families that are shown."""
    paths = {family: RESULTS / f"{family}.json" for family in SHOWN}
    return {family: plot.load(path) for family, path in paths.items() if path.exists()}


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


def table(document: dict, shown: Shown, rows: tuple[str, ...] = ()) -> str:
    """Format one row for each workload and one column for each library that was measured.

    `rows` are the names of those to show; all, where none is named.
    """
    cell, peer = shown.cell, shown.peer
    kept = [
        row
        for row in document["rows"]
        if row["status"] == "ok" and (not rows or row["workload"]["name"] in rows)
    ]
    names = plot.in_order(
        result["name"] for row in kept for result in row["results"] if "ms" in result
    )
    headings = ["workload", *map(plot.label, names)]
    if peer is not None:
        headings.append(f"cuattn x {'best peer' if peer == BEST else plot.label(peer)}")
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for row in kept:
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


class Ratios(NamedTuple):
    """Of one contestant of ours over the rows of a family: (ratio, row, peer), least first."""

    values: list[tuple[float, str, str]]

    @property
    def mean(self) -> float:
        return math.exp(statistics.fmean(math.log(value) for value, *_ in self.values))

    @property
    def behind(self) -> list[tuple[float, str, str]]:
        """Rows that a peer leads by more than the noise of the chip."""
        return [value for value in self.values if value[0] < bars.NOISE]


def ratios(document: dict, ours: str = "cuattn:auto", *, bound: str | None = None) -> Ratios:
    """Read the ratios of one of ours to the best peer of each row, `bound` left out."""
    found = []
    for row, result in report.our_results(document):
        peers = [r for r in row["results"] if not r["ours"] and "ms" in r and r["name"] != bound]
        if result["name"] == ours and "ms" in result and peers:
            best = min(peers, key=lambda r: r["ms"])
            found.append((report.ratio(result, best), row["workload"]["name"], best["name"]))
    return Ratios(sorted(found))


def memory_ratios(document: dict) -> dict[str, float]:
    """Of each row: how many times the memory of `auto` the rung that stores its scores takes."""
    found = {}
    for row in document["rows"]:
        peak = {r["name"]: r["peak_bytes"] for r in row["results"] if r.get("peak_bytes")}
        if {"cuattn:auto", "cuattn:naive"} <= peak.keys():
            found[row["workload"]["name"]] = peak["cuattn:naive"] / peak["cuattn:auto"]
    return found


def peers_text(values: Iterable[tuple[float, str, str]]) -> str:
    names = dict.fromkeys(
        plot.label(peer).replace("torch SDPA cuDNN", "cuDNN") for *_, peer in values
    )
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last


def device_of(document: dict) -> str:
    return document.get("machine", {}).get("device", "")


def losses(found: dict[str, dict]) -> list[str]:
    """Every family in which a peer leads some row by more than the noise, worst first.

    The GPU is named where it is not that of the forward table.
    """
    lines = []
    usual = device_of(found.get("forward", {}))
    for family, document in found.items():
        for ours, words in (("cuattn:auto", ""), ("cuattn:replan", ", the plan made in the call")):
            all_rows = ratios(document, ours, bound="memcpy")  # a copy is no library
            if not all_rows.behind:
                continue
            least, row, _ = all_rows.behind[0]
            heading = SHOWN[family].heading.split(",")[0].lower()
            gpu = device_of(document)
            is_other = usual and gpu != usual and document.get("device_kind") != "cpu"
            where = f" on {gpu}" if is_other else ""
            text = f"{heading}{words}{where}: {len(all_rows.behind)} of {len(all_rows.values)} rows"
            lines.append(
                (least, f"{text} to {peers_text(all_rows.behind)}, least {least:.3f} at {row}")
            )
    return [text for _, text in sorted(lines)]


def losses_text(found: dict[str, dict]) -> str:
    return "\n".join(f"- {line}" for line in losses(found) or ["no row of these tables"])


def front() -> str:
    """The picture of README, the three geometric means, and where it loses."""
    found = documents()
    if not {"forward", "paged", "mission"} <= found.keys():
        return NONE_YET
    forward, decode = ratios(found["forward"]), ratios(found["paged"])
    planned = ratios(found["paged"], "cuattn:replan")
    memory = memory_ratios(found["mission"])
    mean = math.exp(statistics.fmean(map(math.log, memory.values())))
    most = max(memory, key=memory.get)
    lines = [
        f"![{front_picture.ALT}](benchmarks/results/front.svg)",
        "",
        f"On one {device_of(found['forward'])}, geometric means over all rows of a table:",
        "",
        f"- **forward {forward.mean:.2f} x** the faster of {peers_text(forward.values)}: "
        f"{len(forward.values)} rows, least {forward.values[0][0]:.2f}",
        f"- **decode over pages {decode.mean:.2f} x** {peers_text(decode.values)}: "
        f"{len(decode.values)} rows, least {decode.values[0][0]:.2f}; where the plan is made in "
        f"the call {planned.mean:.2f}, least {planned.values[0][0]:.2f}",
        f"- **memory** beyond the inputs 1/{mean:.0f} of what storing the scores takes: "
        f"{len(memory)} lengths, 1/{memory[most]:.0f} at {most.removeprefix('s')} tokens",
        "",
        "Where a peer leads by more than 2 % (less is the noise of the chip):",
        "",
        losses_text(found),
        "",
        "[All figures](docs/figures.md), each with its commit, machine and command.",
    ]
    return "\n".join(lines)


def short() -> str:
    """The tables of README: four rows of each, and what all rows of the family say."""
    found = documents()
    parts = []
    for family in IN_README:
        if family not in found:
            continue
        document, shown = found[family], SHOWN[family]
        all_rows = ratios(document)
        least, row, _ = all_rows.values[0]
        parts += [
            f"**{shown.heading.split(', ')[-1]}.** {document['about']}",
            table(document, shown, shown.rows),
            f"All {len(all_rows.values)} rows: {all_rows.mean:.3f} x the best peer on the "
            f"geometric mean, least {least:.3f} at {row}. {document['machine']['device']}, "
            f"{report.commits(document)}, {document['time'][:10]}.",
        ]
    return "\n\n".join(parts) if parts else NONE_YET


def overview() -> str:
    """One line for each table: of which commit it is, and what it says beside the best peer."""
    lines = [
        "| table | machine | commit | day | rows | x best peer, geometric mean | least "
        "| bars that hold |"
    ]
    lines += ["| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for family, document in documents().items():
        heading = SHOWN[family].heading
        anchor = "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
        found, judged = ratios(document), []
        for row in document["rows"]:
            judged += [bar["holds"] for bar in row.get("bars", ()) if bar["holds"] is not None]
        cells = [
            f"[{heading}](#{anchor})",
            device_of(document),
            report.commits(document).split(" ", maxsplit=1)[1],
            document["time"][:10],
            str(sum(row["status"] == "ok" for row in document["rows"])),
            f"{found.mean:.3f}" if found.values else "",
            f"{found.values[0][0]:.3f}" if found.values else "",
            f"{sum(judged)} of {len(judged)}" if judged else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paragraph(family: str, document: dict) -> str:
    """One family: heading, what was measured, pictures, table, summary, machine and command."""
    shown = SHOWN[family]
    parts = [f"### {shown.heading}", document["about"]]
    if shown.pictures:
        pictures = (
            f"![{family}: {kind}](../benchmarks/results/{family}_{kind}.svg)"
            for kind in shown.pictures
        )
        parts.append("\n".join(pictures))
    is_variants = family == "variants"
    parts.append(variants_page.tables(document) if is_variants else table(document, shown))
    if summary := report.summary(document):
        parts.append("\n".join(f"- {line}" for line in summary.splitlines()))
    parts.append(f"{plot.caption(document)}  \n`{document['command']}`")
    return "\n\n".join(parts)


def section() -> str:
    """All tables, for docs/figures.md."""
    found = documents()
    parts = [paragraph(*item) for item in found.items()]
    host = RESULTS / "overhead.json"
    if host.exists():
        parts.append(host_time(json.loads(host.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) if parts else NONE_YET


def gradients() -> str:
    """The table of docs/backward.md, and what became of its bars."""
    document = documents().get("backward")
    if document is None:
        return (
            "No figures of a GPU are committed yet. To take them: `python benchmarks/bench.py "
            "--family backward`, then `python benchmarks/readme_figures.py --draw`."
        )
    parts = [document["about"], table(document, SHOWN["backward"])]
    if summary := report.summary(document):
        parts.append("\n".join(f"- {line}" for line in summary.splitlines()))
    if steps := host_times(document):
        parts.append(steps)
    return "\n\n".join([*parts, f"{plot.caption(document)}  \n`{document['command']}`"])


def host_times(document: dict) -> str:
    """Time on the host of the steps of training, where that was measured."""
    lines = []
    for row in document["rows"]:
        timed = [result for result in row["results"] if "host_us" in result]
        if timed:
            parts = (
                f"{plot.label(one['name'])} {one['host_us']:.0f} us ({milliseconds(one)} ms)"
                for one in timed
            )
            lines.append(f"- {row['workload']['name']}, host (device): {', '.join(parts)}")
    return "\n".join(lines)


def host_time(document: dict) -> str:
    """What a call costs on the host, in microseconds, for each library."""
    rows = document["rows"]
    places = ("numpy", "torch cpu", "torch cuda", "cupy")
    kinds = {
        "": "attention, result allocated",
        " out=": "attention, result given",
        " out=, empty batch": "attention of no rows, result given",
        " to the launch": "attention, up to the launch",
        " paged": "paged_attention, result allocated",
        " paged given": "paged_attention, result and workspace given",
        " its own SDPA": "torch's own scaled_dot_product_attention",
    }
    lines = [f"| microseconds | {' | '.join(places)} |", "| --- |" + " ---: |" * len(places)]
    for kind, words in kinds.items():
        found = (rows.get(place + kind) for place in places)
        cells = ("" if value is None else f"{value:.1f}" for value in found)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    others = ", ".join(f"{name} {rows[name]:.1f}" for name in rows if name.startswith("jax"))
    build = document["cuattn"]
    return "\n\n".join(
        [
            "### Time on the host, microseconds",
            f"Calls as small as they come, median of {document['calls']:,}.",
            "\n".join(lines),
            f"{others}. `import cuattn` beyond numpy's own: {rows['import'] / 1e3:.0f} ms.",
            f"{build['cuda']['devices'][0]['name']}  |  source hash {build['source_hash'][:12]}  \n"
            f"`{document['command']}`",
        ]
    )


SECTIONS: dict[pathlib.Path, dict[str, Callable[[], str]]] = {
    README: {"front": front, "figures": short},
    BACKWARD: {"gpu": gradients},
    FIGURES: {
        "overview": overview,
        "losses": lambda: losses_text(documents()),
        "figures": section,
        "aims": lambda: aims.table(RESULTS),
    },
}


def replaced(page: pathlib.Path, text: str) -> str:
    """Return the text of a page with its sections rewritten."""
    for name, write in SECTIONS[page].items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{write()}\n{end}{rest.split(end)[1]}"
    return text


def draw() -> int:
    """Draw the pictures that the pages show."""
    found = documents()
    front_picture.draw(found, RESULTS / "front.svg")
    # A process each: names within an SVG follow what its process has drawn before.
    for family in found:
        if SHOWN[family].pictures:
            command = [sys.executable, "-m", "cuattn", "plot", RESULTS / f"{family}.json"]
            subprocess.run([*command, "-o", RESULTS], check=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--draw", action="store_true", help="draw the pictures too")
    arguments = parser.parse_args()
    stale = False
    for page in SECTIONS:
        old = page.read_text(encoding="utf-8")
        new = replaced(page, old)
        stale = stale or new != old
        if not arguments.check:
            page.write_text(new, encoding="utf-8")
    if arguments.check:
        return int(stale)
    return draw() if arguments.draw else 0


if __name__ == "__main__":
    sys.exit(main())
