# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of README.md: forward, decode and memory. Drawn by readme_figures.py."""

from __future__ import annotations

import pathlib

from cuattn._cli import plot

ALT = "Forward in TFLOP/s, decode in TB/s and memory in GiB, beside the fastest peers"
WIDTH, HEIGHT = 1000 * 0.75 / 72, 400 * 0.75 / 72  # inches; an SVG point is 3/4 of a pixel
SERIES = "bf16, 16 heads, d128, causal"
DECODE = (
    "32/8 1 x 8192",
    "32/8 16 x 1024",
    "64/8 16 x 8192",
    "32/32 16 x 1024",
    "32/32 64 x 2048",
)
MEMORY = {
    "cuattn:auto": "cuattn",
    "cuattn:naive": "cuattn naive, scores stored",
    "math": "torch SDPA math",
}
SMALL = 8


def forward_panel(axes, document: dict) -> None:
    """TFLOP/s over the sequence length, cuattn and its peers."""
    panel = plot.curves(document, "tflops")[SERIES]
    for name in plot.in_order(panel):
        lengths, values = zip(*panel[name], strict=True)
        axes.plot(
            lengths,
            values,
            label=plot.label(name),
            color=plot.colour(name),
            **plot.style_line(name),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(x) for x in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequence length")
    axes.set_title("Forward, TFLOP/s\n16 heads of 128, bfloat16, causal", fontsize=9)
    axes.legend(fontsize=SMALL, loc="lower right")


def decode_panel(axes, document: dict) -> None:
    """TB/s of some rows of decode, beside FlashInfer and the copy rate of the same run."""
    rows = {row["workload"]["name"]: row for row in document["rows"]}
    names = ("cuattn:auto", "flashinfer")
    height = 0.38
    for index, name in enumerate(names):
        values = []
        for row in DECODE:
            results = rows[f"{row}, block 16, bf16"]["results"]
            values.append(next(r["gbps"] / 1e3 for r in results if r["name"] == name))
        places = [place + (index - 0.5) * height for place in range(len(DECODE))]
        options = {"height": 0.92 * height, "color": plot.colour(name), "label": plot.label(name)}
        for place, bar in zip(places, axes.barh(places, values, **options), strict=True):
            end = {"ha": "right", "va": "center", "color": "white", "fontsize": SMALL}
            axes.text(bar.get_width() - 0.08, place, f"{bar.get_width():.2f}", **end)
    copy = document["ceilings"]["copy_gbps"] / 1e3
    axes.axvline(copy, color="#555555", linestyle=":", linewidth=1.2, label=f"a copy: {copy:.2f}")
    axes.set_yticks(range(len(DECODE)), DECODE)
    axes.set_xlim(0, 1.1 * copy)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title(
        "Decode over pages, TB/s of KV\nquery/key heads of 128, sequences x tokens", fontsize=9
    )
    axes.legend(fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)


def memory_panel(axes, document: dict) -> None:
    """GiB beyond the inputs over the sequence length, with and without the scores in memory."""
    series = next(iter(plot.curves(document, "tflops")))
    panel = plot.curves(document, "peak_bytes")[series]
    for name, words in MEMORY.items():
        lengths, values = zip(*panel[name], strict=True)
        values = [value / 2**30 for value in values]
        axes.plot(lengths, values, label=words, color=plot.colour(name), **plot.style_line(name))
        axes.annotate(
            f"{values[-1]:.3g}", (lengths[-1], values[-1]), (5, -3), textcoords="offset points",
            fontsize=SMALL - 1,
        )  # fmt: skip
    lengths = [length for length, _ in panel["cuattn:auto"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(x) for x in lengths])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_ylim(top=300)  # room for the legend
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("sequence length")
    axes.set_title("Memory beyond the inputs, GiB\nbatch 32, 32 heads of 128, float16", fontsize=9)
    axes.legend(fontsize=SMALL, loc="upper left")


def draw(documents: dict[str, dict], path: pathlib.Path) -> None:
    """Write the picture, 1000 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({**plot.STYLE, "font.size": 9}):
        figure, grid = plt.subplots(1, 3, figsize=(WIDTH, HEIGHT), layout="constrained")
        forward_panel(grid[0], documents["forward"])
        decode_panel(grid[1], documents["paged"])
        memory_panel(grid[2], documents["mission"])
        commits = (
            f"{name} {documents[name]['commit']}" for name in ("forward", "paged", "mission")
        )
        machine = documents["forward"]["machine"]
        caption = f"{machine['device']}, driver {machine['driver']}; commits: {', '.join(commits)}"
        figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96), wspace=0.04)
        figure.text(0.5, 0.015, caption, ha="center", fontsize=7, color="#666666")
        plot.save(figure, path)
        plt.close(figure)
