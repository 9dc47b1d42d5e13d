# SPDX-License-Identifier: Apache-2.0
"""``python -m cuattn plot``: pictures of benchmark results, SVG or PNG.

Rows that differ only in the sequence length become curves: <family>_speed and <family>_memory. A
family of unlike workloads becomes bars: <family>_speed alone.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from .._bench import report
from .._bench.runner import SCHEMA

# One colour for each contestant, in every picture; ours are the strong ones.
OUR_COLOURS = {
    "cuattn:auto": "#d1495b",
    "cuattn:invariant": "#e8889a",
    "cuattn:replan": "#e8889a",
    "cuattn:deterministic": "#e8889a",
    "cuattn:v2": "#e07a3f",
    "cuattn:v1": "#edae49",
    "cuattn:wide": "#8f6593",
    "cuattn:cascade": "#edae49",
    "cuattn:fast": "#e8889a",
    "cuattn:quantised": "#edae49",
    "cuattn:bf16": "#8f6593",
    "cuattn:sm90": "#d1495b",
    "cuattn:sm80": "#e07a3f",
    "cuattn:cpu": "#d1495b",
    "cuattn:simt": "#edae49",
    "cuattn:tiled": "#8f6593",
    "cuattn:cublas": "#00798c",
    "cuattn:naive": "#30638e",
}
PEER_COLOURS = {
    "cudnn": "#5b8c5a",
    "flash": "#3d7ea6",
    "fa3": "#22223b",
    "fa3_bf16": "#22223b",
    "fa3_columns": "#4a4e69",
    "fa4": "#7f7caf",
    "efficient": "#9a8c98",
    "math": "#b5a397",
    "flex": "#c98b5f",
    "flashinfer": "#4f8fba",
    "torch": "#4a4e69",
    "eager": "#4a4e69",
    "compiled": "#c98b5f",
    "memcpy": "#b5a397",
    "numpy": "#9a8c98",
}
PEER_MARKERS = {
    "cudnn": "^",
    "fa3": "D",
    "fa3_bf16": "D",
    "fa3_columns": "d",
    "fa4": "v",
    "efficient": "P",
    "math": "X",
    "flex": "<",
    "flashinfer": ">",
}
LABELS = {
    "flash": "torch SDPA flash (FA2)",
    "cudnn": "torch SDPA cuDNN",
    "efficient": "torch SDPA efficient",
    "math": "torch SDPA math",
    "torch": "torch SDPA",
    "varlen": "torch varlen (FA2)",
    "flex": "FlexAttention",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa3_bf16": "FlashAttention-3, bf16",
    "fa3_columns": "FlashAttention-3, v by columns",
    "fa4": "FlashAttention-4",
    "flashinfer": "FlashInfer",
    "cuattn:replan": "cuattn, plan in the call",
    "cuattn:deterministic": "cuattn, deterministic",
    "cuattn:v1": "cuattn, V1",
    "cuattn:v2": "cuattn, V2",
    "cuattn:wide": "cuattn, 16-bit cache",
    "cuattn:fast": "cuattn, one level of sums",
    "cuattn:rows": "cuattn, v by rows",
    "cuattn:quantised": "cuattn, quantised in the call",
    "cuattn:bf16": "cuattn, bf16",
    "cuattn:cascade": "cuattn, cascade",
    "cuattn:one": "cuattn, one GPU",
    "cuattn:unchecked": "cuattn, calls not compared",
    "cuattn:gather": "gather",
    "cuattn:heads": "heads",
    "cuattn:ring": "ring",
    "context_parallel": "torch context_parallel, flash",
    "context_cudnn": "torch context_parallel, cuDNN",
    "context_ring": "torch context_parallel, ring",
    "cuattn:unfused": "cuattn, separate calls",
    "cuattn:plain": "cuattn, rotated beforehand",
    "eager": "torch, eager",
    "compiled": "torch.compile",
    "memcpy": "a plain copy",
    "numpy": "numpy, plain formula",
}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "svg.hashsalt": "cuattn",
}
# What a family's speed is: field of a result, its unit, the axis label.
SPEED = {"tflops": ("tflops", 1.0, "TFLOP/s"), "gbps": ("gbps", 1e3, "TB/s")}
PANEL_WIDTH, PANEL_HEIGHT, ONE_PANEL_WIDTH = 4.8, 3.3, 7.0  # inches


# What is read of a results file: the types of its parts, and of each result that has a time.
NONE, NUMBER = type(None), (int, float)
PARTS = {
    "family": str,
    "time": str,
    "commit": (str, NONE),
    "machine": {"device": str},
    "versions": {},
    "cuattn": (dict, NONE),
    "rows": [{"workload": {"name": str, "series": str}, "results": [{"name": str}]}],
}
TIMED = {"ms": NUMBER, "tflops": NUMBER, "gbps": NUMBER, "peak_bytes": (*NUMBER, NONE)}


def load(path: pathlib.Path) -> dict[str, Any]:
    """Read a results file; raises ValueError where it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"plot: cannot read {path}: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"plot: {path} is no results file of this version (schema {SCHEMA})")
    wrong = misfit(document, PARTS)
    if document.get("quantity", "tflops") not in SPEED:
        wrong = wrong or ".quantity"
    for workload, result in () if wrong else measured(document):
        wrong = wrong or misfit(result, TIMED, ".rows.results")
        if not workload.get("lengths", True):
            wrong = wrong or misfit(workload, {"seqlen_q": NUMBER}, ".rows.workload")
    if wrong:
        raise ValueError(f"plot: {path} is no results file of bench: see {wrong[1:]}")
    if not re.fullmatch(r"\w[\w.-]*", document["family"]):
        raise ValueError(
            f"plot: {path} must name its family in letters, digits, '_', '.' and '-', for the "
            f"pictures are called so; got {document['family']!r}"
        )
    return document


def misfit(value: Any, parts: Any, path: str = "") -> str:
    """Name the first part of a JSON value that is missing or not of its type; "" where all fit."""
    if isinstance(parts, dict):
        if not isinstance(value, dict):
            return path
        pairs = [(value.get(name), part, f"{path}.{name}") for name, part in parts.items()]
    elif isinstance(parts, list):
        if not isinstance(value, list):
            return path
        pairs = [(item, parts[0], f"{path}[{i}]") for i, item in enumerate(value)]
    else:
        return "" if isinstance(value, parts) else path
    return next(filter(None, (misfit(*pair) for pair in pairs)), "")


def measured(document: dict[str, Any]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """(workload, result) of everything that was timed."""
    for row in document["rows"]:
        for result in row["results"]:
            if "ms" in result:
                yield row["workload"], result


def curves(
    document: dict[str, Any], quantity: str
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Group (sequence length, quantity) points: series -> contestant -> points in order."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for workload, result in measured(document):
        if workload.get("lengths", True) or result.get(quantity) is None:
            continue  # ragged, or no dense attention
        panel = found.setdefault(workload["series"], {})
        panel.setdefault(result["name"], []).append((workload["seqlen_q"], result[quantity]))
    for panel in found.values():
        for points in panel.values():
            points.sort()
    return {series: panel for series, panel in found.items() if max(map(len, panel.values())) > 1}


def colour(name: str) -> str:
    """Return the contestant's colour in every picture."""
    return OUR_COLOURS.get(name) or PEER_COLOURS.get(name, "#777777")


def label(name: str) -> str:
    """Return the contestant's name for people."""
    return LABELS.get(name, name.replace("cuattn:auto", "cuattn").replace(":", " "))


def caption(document: dict[str, Any]) -> str:
    """Where, when and with what the figures were taken."""
    machine = document["machine"]
    parts = [machine["device"]]
    if machine.get("driver"):
        parts.append(f"driver {machine['driver']}")
    names = ("torch", "nvidia-cudnn-cu13", "fa3-fwd", "flash-attn-4", "flashinfer-python")
    parts += [
        f"{name} {document['versions'][name]}" for name in names if name in document["versions"]
    ]
    version = (document["cuattn"] or {}).get("version")
    parts.append(f"cuattn {version}, {report.commits(document)}, {document['time'][:10]}")
    return "  |  ".join(parts)


def style_line(name: str) -> dict[str, Any]:
    """Ours are thick and on top, peers thin and dashed."""
    if name.startswith("cuattn:"):
        return {"linewidth": 2.4, "marker": "o", "markersize": 5, "zorder": 3}
    marker = PEER_MARKERS.get(name, "s")
    return {"linewidth": 1.4, "marker": marker, "markersize": 4.5, "linestyle": "--", "zorder": 2}


def in_order(names: Iterable[str]) -> list[str]:
    """Ours first, the fastest rung before the others, then peers by name."""
    ours = list(OUR_COLOURS)
    return sorted(
        set(names), key=lambda name: (ours.index(name) if name in ours else len(ours), name)
    )


def draw_curves(
    plt: Any, document: dict[str, Any], quantity: str, axis_label: str, title: str, log_y: bool
) -> Any:
    """One panel for each series, or None where nothing varies with the length."""
    panels = curves(document, quantity)
    if not panels:
        return None
    names = in_order(name for panel in panels.values() for name in panel)
    texts = (
        merged_labels(panels, names)
        if quantity == "peak_mib"
        else {name: label(name) for name in names}
    )
    columns = min(len(panels), 3 if len(panels) % 3 == 0 and len(panels) % 2 else 2)
    rows = math.ceil(len(panels) / columns)
    width = ONE_PANEL_WIDTH if columns == 1 else PANEL_WIDTH * columns
    size = (width, PANEL_HEIGHT * rows + 1.3)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (series, panel) in zip(grid.flat, panels.items(), strict=False):
        for name in in_order(panel):
            if name not in texts:
                continue
            places, values = zip(*panel[name], strict=True)
            axes.plot(places, values, label=texts[name], color=colour(name), **style_line(name))
        axes.set_xscale("log", base=2)
        lengths = sorted({x for points in panel.values() for x, _ in points})
        axes.set_xticks(lengths, [str(x) for x in lengths], rotation=0 if len(lengths) < 6 else 45)
        axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(series, fontsize=10)
        axes.set_xlabel("sequence length")
        axes.set_ylabel(axis_label)
    finish(figure, document, title, list(texts.values()))
    return figure


def merged_labels(
    panels: dict[str, dict[str, list[tuple[float, float]]]], names: list[str]
) -> dict[str, str]:
    """Legend text of every contestant to draw; those whose curves coincide share one line."""
    texts: dict[str, str] = {}
    for name in names:
        twin = next((leader for leader in texts if coincide(panels, leader, name)), None)
        if twin is None:
            texts[name] = label(name)
        else:
            texts[twin] += f", {label(name).removeprefix('cuattn ')}"
    return texts


def coincide(
    panels: dict[str, dict[str, list[tuple[float, float]]]], leader: str, name: str
) -> bool:
    """Whether every point of `name` lies within 5 % of one of `leader`."""
    for panel in panels.values():
        known = dict(panel.get(leader, ()))
        for length, value in panel.get(name, ()):
            if length not in known or abs(known[length] - value) > 0.05 * value:
                return False
    return True


def bar_panels(document: dict[str, Any]) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Group what was measured by series where most series have several rows; else all in one."""
    panels: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for workload, result in measured(document):
        panels.setdefault(workload["series"], []).append((workload, result))
    rows = {workload["name"] for workload, _ in measured(document)}
    if document.get("quantity") == "gbps" and 2 * len(panels) < len(rows):
        return panels
    return {"": [pair for panel in panels.values() for pair in panel]} if panels else {}


def draw_bars(plt: Any, document: dict[str, Any], title: str) -> Any:
    """Speed of unlike workloads, one group of bars for each."""
    panels = bar_panels(document)
    if not panels:
        return None
    quantity, unit, text = SPEED[document.get("quantity", "tflops")]
    names = in_order(result["name"] for _, result in measured(document))
    height = 0.8 / len(names)
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    longest = max(len({workload["name"] for workload, _ in panel}) for panel in panels.values())
    panel_height = 0.28 * longest * max(2, len(names)) / columns**0.5 + 0.6
    size = (PANEL_WIDTH * max(2, 1.3 * columns), panel_height * rows + 1.2)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (series, panel) in zip(grid.flat, panels.items(), strict=False):
        workloads = list(dict.fromkeys(workload["name"] for workload, _ in panel))
        for index, name in enumerate(names):
            found = [(workload["name"], r[quantity]) for workload, r in panel if r["name"] == name]
            shift = (index - (len(names) - 1) / 2) * height
            places = [workloads.index(workload) + shift for workload, _ in found]
            values = [value / unit for _, value in found]
            options = {"height": 0.92 * height, "color": colour(name), "label": label(name)}
            bars = axes.barh(places, values, **options)
            axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
        axes.set_yticks(range(len(workloads)), workloads)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_title(series, fontsize=10)
        axes.set_xlabel(text)
    finish(figure, document, title, [label(name) for name in names])
    return figure


def finish(figure: Any, document: dict[str, Any], title: str, texts: list[str]) -> None:
    """Title, one legend below the panels, and the caption."""
    handles: dict[str, object] = {}
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    width, height = figure.get_size_inches()
    columns = min(len(texts), max(1, int(width / (0.7 + 0.085 * max(map(len, texts))))))
    lines = textwrap.wrap(caption(document), int(width * 17))
    caption_strip = (0.12 + 0.14 * len(lines)) / height
    strip = caption_strip + 0.24 * math.ceil(len(texts) / columns) / height  # kept free of panels
    figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
    figure.text(0.5, 0.08 / height, "\n".join(lines), ha="center", fontsize=7, color="#666666")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.legend(
        [handles[text] for text in texts],
        texts,
        loc="lower center",
        bbox_to_anchor=(0.5, caption_strip),
        borderaxespad=0,
        ncols=columns,
    )


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a picture in the format of its name, the same bytes each time; returns the path."""
    options = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 150}
    figure.savefig(path, **options)
    return path


def draw(document: dict[str, Any], folder: pathlib.Path, suffix: str = "svg") -> list[pathlib.Path]:
    """Write the pictures of one results file; returns their paths."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plot: needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    family = document["family"]
    written = []
    with plt.rc_context(STYLE):
        speed = draw_curves(
            plt, document, "tflops", "TFLOP/s", f"{family}: speed", log_y=spans(document, "tflops")
        )
        if speed is None:
            speed = draw_bars(plt, document, f"{family}: speed")
        memory = draw_curves(
            plt, document, "peak_mib", "MiB beyond the inputs", f"{family}: peak memory", log_y=True
        )
        for name, figure in (("speed", speed), ("memory", memory)):
            if figure is None:
                continue
            written.append(save(figure, folder / f"{family}_{name}.{suffix}"))
            plt.close(figure)
    return written


def spans(document: dict[str, Any], quantity: str) -> bool:
    """Whether the values spread so far that only a logarithmic axis shows them."""
    values = [result[quantity] for _, result in measured(document) if result[quantity] > 0]
    return bool(values) and max(values) / min(values) > 50


def main(paths: list[pathlib.Path], folder: pathlib.Path, suffix: str = "svg") -> int:
    """Draw every results file into the folder; 1 where one could not be read, or none written."""
    try:
        documents = {path: load(path) for path in paths}
        folder.mkdir(parents=True, exist_ok=True)
        for path, document in documents.items():
            for _, result in measured(document):
                result["peak_mib"] = result["peak_bytes"] / 2**20 if result["peak_bytes"] else None
            written = draw(document, folder, suffix)
            print("\n".join(map(str, written)) or f"plot: nothing was measured in {path}")
    except OSError as error:
        print(f"plot: -o must be a folder to write to, got {folder}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
