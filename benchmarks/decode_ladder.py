# SPDX-License-Identifier: Apache-2.0
"""One decode step, launched or replayed as a CUDA graph. Wall-clock time a step, on one GPU.

    python benchmarks/decode_ladder.py --output      # measure; results/decode_ladder.json
    python benchmarks/decode_ladder.py --draw        # the picture and the table in docs, from it

A step adds one token to every context and attends with one query a sequence: bfloat16, 32 query
heads and 8 kv heads of 128, blocks of 16 tokens in random order.

    launch       the addition, then cuattn.paged_attention: plan, attention, combine
    graph        the same kernels, captured once and replayed
    graph_auto   as graph with the kernel that "auto" picks; the others run the kernel `sm80`

The committed results have a fourth way, `persistent`: a step posted to a kernel that stays on the
device, an experiment that the library no longer holds. docs/notes/20261121-decode-ladder.md tells
what it was and where its sources are.

waited: the host waits for each step, as it does where it needs the token; the median. queued: all
steps are handed over, then one wait; the mean. Each is the median of the rounds, which take the
ways in a new random order. Every way's result is checked against `launch` before it is timed.
Caches below the size of the L2 stay in it from step to step, which those of a model's many layers
would not: there the table shows what a step costs beside its reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cuattn
from cuattn._bench import devices, runner
from cuattn._cli import plot

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decode_ladder.json"
NOTE = ROOT / "docs" / "notes" / "20261121-decode-ladder.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKEN_BYTES = 2 * NUM_HEADS_KV * HEAD_DIM * 2  # of K and V
WAYS = ("launch", "graph", "graph_auto")
LABELS = {
    "launch": ("launches", "#3d7ea6"),
    "graph": ("CUDA graph", "#e07a3f"),
    "persistent": ("persistent kernel", "#d1495b"),
    "graph_auto": ("CUDA graph, auto", "#9a8c98"),
}
MODES = ("waited", "queued")
WARM_STEPS, MOST_STEPS = 3, 64
ROUND_S = 8e-3  # about how long the steps of one round and mode take
ROOM = 16 * BLOCK_SIZE  # tokens that steps may add before the contexts are set back
assert ROOM > 2 * MOST_STEPS + WARM_STEPS

Step = Callable[[], None]


def cells(batches=BATCHES, contexts=CONTEXTS) -> Iterator[tuple[int, int]]:
    """(batch, context) of every row, the smallest reads first."""
    return iter(sorted(((b, c) for b in batches for c in contexts), key=lambda bc: bc[0] * bc[1]))


def steps_for(batch: int, context: int) -> int:
    """How many steps a round takes: about ROUND_S of them, from the bytes they read."""
    seconds = 10e-6 + batch * context * TOKEN_BYTES / 3e12
    return max(4, min(MOST_STEPS, int(ROUND_S / seconds)))


class Problem:
    """The arrays of one cell, out of one pool of blocks, and its ways to run a step."""

    def __init__(self, torch, pool, batch: int, context: int):
        self.torch, (self.k, self.v) = torch, pool
        width = (context + ROOM) // BLOCK_SIZE
        generator = torch.Generator("cuda").manual_seed(batch * context)
        order = torch.randperm(self.k.shape[0], generator=generator, device="cuda")
        self.tables = order[: batch * width].to(torch.int32).reshape(batch, width)
        self.lens = torch.empty(batch, dtype=torch.int32, device="cuda")
        self.context = context
        self.q = torch.randn(
            (batch, NUM_HEADS_Q, HEAD_DIM), dtype=torch.bfloat16, device="cuda", generator=generator
        )
        self.out = torch.empty_like(self.q)
        self.graphs: dict[str, Any] = {}

    def arrays(self) -> tuple:
        return self.q, self.k, self.v, self.tables, self.lens

    def reset(self) -> None:
        self.lens.fill_(self.context)
        self.torch.cuda.synchronize()

    def launch(self, backend: str = "sm80") -> None:
        self.lens.add_(1)
        cuattn.paged_attention(*self.arrays(), out=self.out, backend=backend)

    def graph(self, backend: str):
        if backend not in self.graphs:
            self.launch(backend)  # loads the kernels
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                self.launch(backend)
            self.graphs[backend] = graph
        return self.graphs[backend]

    def run(self, way: str, steps: int) -> dict[str, float]:
        """Seconds a step, by mode; WARM_STEPS go before."""
        backend = "auto" if way == "graph_auto" else "sm80"
        step = self.launch if way == "launch" else self.graph(backend).replay
        self.reset()
        return time_steps(step, self.torch.cuda.synchronize, steps)

    def check(self, ways: list[str]) -> None:
        """Compare the results of a few steps; raises AssertionError."""
        results = {}
        for way in dict.fromkeys(["launch", *ways]):
            self.out.fill_(float("nan"))
            self.run(way, 2)
            results[way] = self.out.clone()
            assert self.lens.tolist() == [self.context + WARM_STEPS + 4] * len(self.lens), way
        for way, result in results.items():
            self.torch.testing.assert_close(
                result, results["launch"], rtol=0.02, atol=2e-3, msg=lambda m, w=way: f"{w}: {m}"
            )


def time_steps(step: Step, wait: Step, steps: int) -> dict[str, float]:
    """Time `steps` steps with a wait after each, then as many with one wait; seconds a step."""
    clock = time.perf_counter
    for _ in range(WARM_STEPS):
        step()
        wait()
    waited = []
    for _ in range(steps):
        begin = clock()
        step()
        wait()
        waited.append(clock() - begin)
    begin = clock()
    for _ in range(steps):
        step()
    wait()
    return {"waited": statistics.median(waited), "queued": (clock() - begin) / steps}


def measure_cell(problem: Problem, ways: list[str], steps: int, rounds: int) -> dict[str, dict]:
    """Microseconds a step by way and mode: the median of the rounds."""
    problem.check(ways)
    found: dict[str, dict[str, list]] = {way: {mode: [] for mode in MODES} for way in ways}
    for number in range(rounds):
        for way in random.Random(number).sample(ways, len(ways)):
            for mode, seconds in problem.run(way, steps).items():
                found[way][mode].append(seconds * 1e6)
    return {
        way: {mode: round(statistics.median(times), 3) for mode, times in modes.items()}
        for way, modes in found.items()
    }


def measure(arguments: argparse.Namespace) -> dict:
    import torch

    if not torch.cuda.is_available() or not (cuattn.info()["cuda"] or {}).get("devices"):
        raise SystemExit("decode_ladder: needs a GPU, PyTorch with CUDA and cuattn with CUDA")
    rows = list(cells(arguments.batches, arguments.contexts))
    blocks = max(batch * (context + ROOM) for batch, context in rows) // BLOCK_SIZE
    shape = (blocks, BLOCK_SIZE, NUM_HEADS_KV, HEAD_DIM)
    pool = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    document = {
        "schema": "cuattn decode_ladder 1",
        "command": " ".join(["python benchmarks/decode_ladder.py", *sys.argv[1:]]),
        "commit": runner.commit(),
        "machine": devices.nvidia_smi("0", "name", "driver_version"),
        "cuattn": cuattn.info(),
        "torch": torch.__version__,
        "unit": "us a step, wall clock",
        "rounds": arguments.rounds,
        "rows": [],
    }
    gc.disable()
    with torch.no_grad():
        for batch, context in rows:
            problem = Problem(torch, pool, batch, context)
            steps = steps_for(batch, context)
            us = measure_cell(problem, arguments.ways, steps, arguments.rounds)
            row = {"batch": batch, "context": context, "steps": steps, "us": us}
            row["kv_bytes"] = batch * context * TOKEN_BYTES
            document["rows"].append(row)
            print(line(row), flush=True)
            del problem
            gc.collect()
    return document


def line(row: dict) -> str:
    times = "  ".join(
        f"{way} {us['waited']:8.1f} {us['queued']:8.1f}" for way, us in row["us"].items()
    )
    return f"batch {row['batch']:3d}  context {row['context']:6d}  {times}"


def number(us: float) -> str:
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def table(document: dict, mode: str) -> str:
    """Markdown: a row for each context, a column for each batch, the ways side by side."""
    ways = list(document["rows"][0]["us"])
    batches = sorted({row["batch"] for row in document["rows"]})
    contexts = sorted({row["context"] for row in document["rows"]})
    by_cell = {(row["batch"], row["context"]): row["us"] for row in document["rows"]}
    lines = [
        "| context | way | " + " | ".join(f"batch {b}" for b in batches) + " |",
        "| --- | --- |" + " --- |" * len(batches),
    ]
    for context in contexts:
        for way in ways:
            times = (by_cell.get((batch, context), {}).get(way) for batch in batches)
            numbers = " | ".join(number(us[mode]) if us else "" for us in times)
            lines.append(f"| {context if way == ways[0] else ''} | {LABELS[way][0]} | {numbers} |")
    return "\n".join(lines)


def figures(document: dict) -> str:
    """The part of the note that is written from the results."""
    machine = ", driver ".join(document["machine"].values())
    return "\n\n".join(
        [
            f"{machine}, commit {document['commit']}, `{document['command']}`; "
            f"median of {document['rounds']} rounds, microseconds a step.",
            "The host waits for each step:",
            table(document, "waited"),
            "All steps handed over at once:",
            table(document, "queued"),
            "![Time of a decode step](../../benchmarks/results/decode_ladder.svg)",
        ]
    )


def replaced(text: str, document: dict) -> str:
    """The note with its figures from the document."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{figures(document)}\n{END}{rest.split(END)[1]}"


def draw(document: dict, folder: pathlib.Path) -> pathlib.Path:
    """decode_ladder.svg: a panel for each of a few batches, time over the context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    batches = sorted({row["batch"] for row in document["rows"]})
    shown = [batch for batch in (1, 8, 64) if batch in batches] or batches[:3]
    with plt.rc_context(plot.STYLE):
        figure, panels = plt.subplots(
            1, len(shown), figsize=(4.8 * len(shown), 4), layout="constrained", squeeze=False
        )
        for axes, batch in zip(panels[0], shown, strict=True):
            rows = sorted(
                (row for row in document["rows"] if row["batch"] == batch),
                key=lambda row: row["context"],
            )
            for way in rows[0]["us"]:
                for mode, dashes in zip(MODES, ("-", ":"), strict=True):
                    axes.plot(
                        [row["context"] for row in rows],
                        [row["us"][way][mode] for row in rows],
                        dashes,
                        color=LABELS[way][1],
                        marker="o",
                        markersize=3,
                        label=f"{LABELS[way][0]}, {mode}",
                    )
            axes.set(title=f"batch {batch}", xlabel="context", xscale="log", yscale="log")
            axes.set_xticks([row["context"] for row in rows], [str(r["context"]) for r in rows])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        panels[0][0].set_ylabel("microseconds a step")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
        figure.suptitle("The time of a decode step, by the way it is started", fontweight="bold")
        written = plot.save(figure, folder / "decode_ladder.svg")
        plt.close(figure)
    return written


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=integers, default=BATCHES)
    parser.add_argument("--contexts", type=integers, default=CONTEXTS)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        nargs="?",
        const=RESULTS,
        help="write the results here, without a path to benchmarks/results/decode_ladder.json",
    )
    parser.add_argument("--draw", action="store_true", help="picture and table from that file")
    arguments = parser.parse_args()
    if arguments.draw:
        document = json.loads((arguments.output or RESULTS).read_text(encoding="utf-8"))
        NOTE.write_text(replaced(NOTE.read_text(encoding="utf-8"), document), encoding="utf-8")
        print(draw(document, RESULTS.parent), NOTE, sep="\n")
        return
    runner.writer(arguments.output)(measure(arguments))


if __name__ == "__main__":
    main()
