# SPDX-License-Identifier: Apache-2.0
"""What the library is held to, and what the committed results say of it: in docs/figures.md.

A row names its aim in words and reads what was reached from benchmarks/results; no figure of it is
typed by hand.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cuattn._bench.backward import PLAIN, PLAIN_OF_64
from cuattn._bench.bars import NOISE
from cuattn._bench.families import FAMILIES
from cuattn._bench.workloads import as_json


class Reached(NamedTuple):
    """What a results file says of an aim. `holds` is None where no committed result says it."""

    text: str
    holds: bool | None


class Aim(NamedTuple):
    what: str
    aim: str
    reached: Callable[[pathlib.Path], Reached]
    command: str


def read(results: pathlib.Path, name: str) -> dict | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


NOT_MEASURED = Reached("no committed result", None)


def mean_of(values: Iterable[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def host_us(row: str, most: float) -> Callable[[pathlib.Path], Reached]:
    """A row of overhead.json, in microseconds, must stay below `most`."""

    def reached(results: pathlib.Path) -> Reached:
        document = read(results, "overhead")
        if document is None:
            return NOT_MEASURED
        value = document["rows"][row]
        return Reached(f"{value / 1e3:.1f} ms" if most >= 1e4 else f"{value:.1f} us", value <= most)

    return reached


def cpu(name: str, mean: float, least: float = 0.0) -> Callable[[pathlib.Path], Reached]:
    """The float32 rows of benchmarks/cpu.py."""

    def reached(results: pathlib.Path) -> Reached:
        document = read(results, name)
        if document is None:
            return NOT_MEASURED
        found = [row["ratio"] for row in document["rows"] if row["dtype"] == "float32"]
        text = f"{mean_of(found):.2f} on the mean of {len(found)} rows, least {min(found):.2f}"
        return Reached(text, mean_of(found) >= mean and min(found) >= least)

    return reached


def rows_of(document: dict, ours: str) -> Iterable[tuple[float, dict]]:
    """The ratio to the best peer, and the workload."""
    for row in document["rows"]:
        for result in row["results"]:
            if result["name"] == ours and "ratio_to_best_peer" in result:
                yield result["ratio_to_best_peer"], row["workload"]


def best_peer(
    family: str,
    keep: Callable[[dict], bool],
    least: float,
    mean: float = 0.0,
    ours: str = "cuattn:auto",
) -> Callable[[pathlib.Path], Reached]:
    """Of the rows that `keep` names, each must reach `least` and all of them `mean`.

    Where the run had no time for some of them, nothing is said of the aim but a miss.
    """

    def reached(results: pathlib.Path) -> Reached:
        document = read(results, family)
        rows = [] if document is None else [r for r in rows_of(document, ours) if keep(r[1])]
        found = [ratio for ratio, _ in rows]
        if not found:
            return NOT_MEASURED
        wanted = (json.loads(json.dumps(as_json(w))) for w in FAMILIES[family].workloads)
        left = {w["name"] for w in wanted if keep(w)} - {w["name"] for _, w in rows}
        bar = least * (NOISE if least == 1.0 else 1.0)
        good = sum(ratio >= bar for ratio in found)
        text = f"{good} of {len(found)} rows, least {min(found):.3f}, mean {mean_of(found):.3f}"
        holds = good == len(found) and mean_of(found) >= mean
        if left and not document["complete"]:
            return Reached(f"{text}; {len(left)} not measured", None if holds else False)
        return Reached(text, holds)

    return reached


def bars_of(
    family: str,
    against: tuple[str, ...] = (),
    least: float | None = None,
    keep: Callable[[dict], bool] = lambda workload: True,
) -> Callable[[pathlib.Path], Reached]:
    """The bars that the rows of a family name: all, or those against some contestant.

    `keep` chooses rows by their workload.
    """

    def reached(results: pathlib.Path) -> Reached:
        document = read(results, family)
        rows = [] if document is None else [r for r in document["rows"] if keep(r["workload"])]
        found = [
            bar
            for row in rows
            for bar in row.get("bars", ())
            if bar["holds"] is not None
            and (not against or bar["against"] in against)
            and (least is None or bar["least"] == least)
        ]
        if not found:
            return NOT_MEASURED
        good = sum(bar["holds"] for bar in found)
        if found[0]["against"] == "microseconds":
            return Reached(f"{found[0]['value']:.1f} us", good == len(found))
        values = [bar["value"] for bar in found]
        text = f"{good} of {len(found)} rows, least {min(values):.3f}, mean {mean_of(values):.3f}"
        return Reached(text, good == len(found))

    return reached


def together(*parts: Callable[[pathlib.Path], Reached]) -> Callable[[pathlib.Path], Reached]:
    """Several results of one line."""

    def reached(results: pathlib.Path) -> Reached:
        found = [part(results) for part in parts]
        known = [part.holds for part in found if part.holds is not None]
        return Reached("; ".join(part.text for part in found), all(known) if known else None)

    return reached


def kv_megabytes(workload: dict) -> float:
    return workload["bytes"] / 1e6


def grouped(workload: dict) -> bool:
    return workload["num_heads_q"] != workload["num_heads_kv"]


def by_width(workload: dict) -> bool:
    """Whether a row of gradients is one of the table by head_dim and length."""
    return workload["name"].startswith("d") and not workload["step"]


PLAIN_ROWS = tuple(f"time of row {name}" for name in (PLAIN, PLAIN_OF_64))
BENCH = "benchmarks/bench.py --family"
AIMS = (
    Aim(
        "host time up to the launch, torch on CUDA, output allocated",
        "3 us",
        host_us("torch cuda to the launch", 3.0),
        "benchmarks/overhead.py",
    ),
    Aim("host time of a call, numpy, 8 elements", "2 us", host_us("numpy", 2.0), "the same"),
    Aim("the same, CuPy", "10 us", host_us("cupy", 10.0), "the same"),
    Aim("`import cuattn` beyond numpy's own", "100 ms", host_us("import", 1e5), "the same"),
    Aim(
        "CPU backend, float32, AVX-512, against torch",
        "1.5 on the geometric mean",
        cpu("cpu_avx512", 1.5),
        "benchmarks/cpu.py",
    ),
    Aim(
        "the same with AVX2, torch held to AVX2 too",
        "1.0 on the mean, no row below 0.9",
        cpu("cpu_avx2", 1.0, 0.9),
        "benchmarks/cpu.py --isa avx2",
    ),
    Aim(
        "`sm80` against FlashAttention-2, 2048 tokens and more; here head_dim 128, full",
        "1.0 in every row",
        best_peer("ladder", lambda w: w["seqlen_q"] >= 2048, 1.0, ours="cuattn:sm80"),
        f"{BENCH} ladder",
    ),
    Aim(
        "`sm90` against the best peer, 2048 tokens and more",
        "1.0 in every row, 1.03 on the mean",
        best_peer("forward", lambda w: w["seqlen_q"] >= 2048, 1.0, 1.03),
        f"{BENCH} forward",
    ),
    Aim(
        "the same, 512 tokens",
        "1.1",
        best_peer("forward", lambda w: w["seqlen_q"] == 512, 1.1),
        "the same",
    ),
    Aim(
        "backward against cuDNN and FlashAttention-2, by head_dim and length, 2048 tokens and more",
        "1.0 in every row, 1.1 on the mean",
        best_peer("backward", lambda w: by_width(w) and w["seqlen_q"] >= 2048, 1.0, 1.1),
        f"{BENCH} backward",
    ),
    Aim(
        "backward, 512 tokens",
        "1.1",
        best_peer("backward", lambda w: by_width(w) and w["seqlen_q"] == 512, 1.1),
        "the same",
    ),
    Aim(
        "backward, grouped heads, ragged, windows, against the best peer",
        "1.1",
        best_peer(
            "backward",
            lambda w: not w["step"] and (w["lengths"] or w["window"] != [-1, -1] or grouped(w)),
            1.1,
        ),
        "the same",
    ),
    Aim(
        "backward, 16384 tokens, head_dim 64 and 128, against FlashAttention-4's figures",
        "1.0",
        bars_of("backward", ("fa4",)),
        "the same",
    ),
    Aim(
        "backward, head_dim 256, 16384 tokens, deterministic, TFLOP/s",
        "530 full, 500 causal",
        bars_of("backward", ("TFLOP/s",)),
        "the same",
    ),
    Aim(
        "backward with `deterministic=True` against without",
        "0.9",
        bars_of("backward", ("cuattn:auto",)),
        "the same",
    ),
    Aim(
        "backward with softcap, ALiBi, sinks or dropout; with bias and dbias: of the plain speed",
        "0.8; 0.5",
        together(bars_of("backward", PLAIN_ROWS, 0.8), bars_of("backward", PLAIN_ROWS, 0.5)),
        "the same",
    ),
    Aim(
        "host time of a step through torch's autograd, 32 x 512 tokens, torch SDPA's beside it",
        "1.0",
        bars_of("backward", ("host time",)),
        "the same",
    ),
    Aim(
        "decode over pages against FlashInfer, 256 MB of KV and more",
        "1.0 in every row, 1.05 on the mean",
        best_peer("paged", lambda w: kv_megabytes(w) >= 256, 1.0, 1.05),
        f"{BENCH} paged",
    ),
    Aim(
        "the same, 16 to 64 MB; one sequence of 1024",
        "1.2; 8 us",
        together(bars_of("paged", ("best peer",), 1.2), bars_of("paged", ("microseconds",))),
        "the same",
    ),
    Aim(
        "blocks of 1 and 8 tokens, 512 MB and more",
        "0.8 of the copy rate",
        bars_of("paged_blocks"),
        f"{BENCH} paged_blocks",
    ),
    Aim(
        "float8 caches against bfloat16; under float8 queries against queries in bfloat16",
        "1.7; 0.9",
        together(
            bars_of("paged_fp8", ("cuattn:wide",), 1.7), bars_of("paged_fp8", ("cuattn:auto",), 0.9)
        ),
        f"{BENCH} paged_fp8",
    ),
    Aim(
        "float8 against FlashAttention-3's, head_dim 128, 8192 tokens and more: `fast`; exact",
        "1.1; 1.0",
        together(
            bars_of("fp8", ("best peer",), 1.1, lambda w: w["seqlen_q"] > 2048),
            bars_of("fp8", ("best peer",), 1.0),
        ),
        f"{BENCH} fp8",
    ),
    Aim(
        "`fast`: 2048 tokens; head_dim 64 and 256, 8192 tokens and more",
        "1.1; 1.05",
        together(
            bars_of("fp8", ("best peer",), 1.1, lambda w: w["seqlen_q"] == 2048),
            bars_of("fp8", ("best peer",), 1.05),
        ),
        "the same",
    ),
    Aim("float8, exact sums against `fast`", "0.9", bars_of("fp8", ("cuattn:fast",)), "the same"),
    Aim("v by rows against by columns", "0.96", bars_of("fp8", ("cuattn:auto",)), "the same"),
    Aim(
        "float8 against bfloat16: head_dim 256; with `quantize` in the call, 8192 tokens",
        "1.0; 1.12",
        together(
            bars_of("fp8", ("cuattn:bf16",), 1.0),
            bars_of("fp8", ("cuattn:bf16",), 1.12),
        ),
        "the same",
    ),
    Aim(
        "`quantize` of q, k and v against a copy of as many bytes",
        "0.85",
        bars_of("quantize"),
        f"{BENCH} quantize",
    ),
    Aim(
        "64 unequal sequences against equal ones",
        "0.9",
        bars_of("paged_ragged"),
        f"{BENCH} paged_ragged",
    ),
    Aim(
        "PagedAttention V1 and V2 against vLLM 0.6.6, MHA; GQA 4:1",
        "1.0; 2.0",
        together(
            bars_of("paged_vllm", ("vllm_v1", "vllm_v2"), 1.0),
            bars_of("paged_vllm", ("vllm_v1", "vllm_v2"), 2.0),
        ),
        f"{BENCH} paged_vllm",
    ),
    Aim(
        "V2 of one sequence of 8192 against `paged_attention`",
        "0.95",
        bars_of("paged_vllm", ("cuattn:auto",)),
        "the same",
    ),
    Aim("prefill over pages against packed keys", "0.9", bars_of("chunked"), f"{BENCH} chunked"),
    Aim(
        "prefill over float8 caches against bfloat16: float8 queries; bfloat16 ones",
        "1.0; 0.9",
        together(bars_of("chunked_fp8", least=1.0), bars_of("chunked_fp8", least=0.9)),
        f"{BENCH} chunked_fp8",
    ),
    Aim(
        "cache operations, large calls, against a copy of as many bytes",
        "0.9",
        bars_of("cache"),
        f"{BENCH} cache",
    ),
    Aim(
        "norms, activations and rotation against a copy of as many bytes",
        "0.95",
        together(bars_of("fused", ("memcpy",)), bars_of("rope", ("memcpy",))),
        f"{BENCH} fused,rope",
    ),
    Aim(
        "`attention(rope=)` of 2048 and 8192 tokens against rotated queries; of 512",
        "0.98; 0.95",
        together(
            bars_of("rope", ("cuattn:plain",), 0.98), bars_of("rope", ("cuattn:plain",), 0.95)
        ),
        f"{BENCH} rope",
    ),
    Aim(
        "latents: decode, prompts, projections against the best peer",
        "1.0 in every row",
        bars_of("mla", ("best peer",)),
        f"{BENCH} mla",
    ),
    Aim(
        "what is claimed of the variants, each against another",
        "the claim",
        bars_of("variants"),
        f"{BENCH} variants",
    ),
    Aim(
        "build, two cores; a wheel",
        "10 minutes; 60 MB at most",
        lambda _: Reached("in the log of each run", None),
        ".ci/run, .ci/wheel",
    ),
)


def table(results: pathlib.Path) -> str:
    """One line for each aim; what is missed stands out."""
    lines = ["| what | aim | reached | | measured by |", "| --- | --- | --- | --- | --- |"]
    words = {True: "holds", False: "**missed**", None: ""}
    for aim in AIMS:
        reached = aim.reached(results)
        command = aim.command if aim.command == "the same" else f"`{aim.command}`"
        cells = (aim.what, aim.aim, reached.text, words[reached.holds], command)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
