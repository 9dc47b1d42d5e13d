# SPDX-License-Identifier: Apache-2.0
"""The two tables of the family `variants`: each kind of attention, and each claim made of one.

A line of the first is a contestant of ours on a row: memory, time, speed-up and use. Rungs of the
ladder are compared with `naive`, V2 with V1, what reads fewer keys with MHA. Claims are those of
papers and of who asked for this library; what stands beside them is read from the results.
"""

from __future__ import annotations

from typing import NamedTuple

from cuattn._bench import report

NAMES = {
    "auto": "flash (auto)",
    "v1": "paged, V1",
    "v2": "paged, V2",
    "unfused": "two calls",
}


class Claim(NamedTuple):
    """`ours` of `row` beside `base` of `base_row`; `quantity` is ms, or bytes of the workload."""

    text: str
    said: str
    row: str
    ours: str
    base_row: str
    base: str
    quantity: str = "ms"


MHA, LONG = "decode MHA 32 x 4096", "MHA causal s8192"
CLAIMS = (
    *(
        Claim(f"flash beside naive, {n} tokens", "more with the length", f"full s{n}", "auto",
              f"full s{n}", "naive")
        for n in (512, 2048, 8192)
    ),
    *(
        Claim(f"V2 beside V1, {shape}", "1.5 to 2", f"pages {shape}", "v2", f"pages {shape}", "v1")
        for shape in ("1 x 8192", "8 x 2048", "32 x 2048")
    ),
    Claim("window of 1024 beside full causal, 8192 tokens", "N / W: up to 4", "window 1024 s8192",
          "auto", LONG, "auto"),
    Claim("window, 8192 of 32768 tokens beside 8192 of 8192: time a token", "1: O(N W)",
          "window 1024 s32768", "auto", "window 1024 s8192", "auto"),
    Claim("GQA 32/8 beside MHA, bytes of the cache", "4", "decode GQA 32/8 32 x 4096", "auto", MHA,
          "auto", "bytes"),
    Claim("GQA 32/8 beside MHA, a decode step", "up to 4", "decode GQA 32/8 32 x 4096", "auto",
          MHA, "auto"),
    Claim("MQA beside MHA, a decode step", "up to 32", "decode MQA 32/1 32 x 4096", "auto", MHA,
          "auto"),
    Claim("MLA beside MHA, bytes of the cache", "8", "decode MLA 32 heads 32 x 4096", "auto", MHA,
          "auto", "bytes"),
    Claim("MLA beside MHA, a decode step", "up to 8", "decode MLA 32 heads 32 x 4096", "auto", MHA,
          "auto"),
    Claim("residual and norm in one pass beside torch's two", "1.5 to 3", "residual + rms_norm",
          "auto", "residual + rms_norm", "eager"),
)  # fmt: skip


def results_of(document: dict) -> dict[tuple[str, str], tuple[dict, dict]]:
    """(row, contestant without cuattn:) -> (workload, result) of what was timed."""
    return {
        (row["workload"]["name"], result["name"].removeprefix("cuattn:")): (row["workload"], result)
        for row in document["rows"]
        for result in row["results"]
        if "ms" in result
    }


def tokens_of(workload: dict) -> int:
    """Tokens whose time is compared: rows of the window differ in how many they have."""
    return workload["batch"] * workload["seqlen_q"] if "seqlen_q" in workload else 1


def reached(claim: Claim, found: dict) -> str:
    """Say how many times as fast, or as small, `ours` is; nothing where one was not measured."""
    ours = found.get((claim.row, claim.ours))
    base = found.get((claim.base_row, claim.base))
    if ours is None or base is None:
        return "not measured"
    if claim.quantity == "bytes":
        return f"{base[0]['bytes'] / ours[0]['bytes']:.1f}"
    share = tokens_of(ours[0]) / tokens_of(base[0])
    if claim.row == claim.base_row:
        return f"{report.ratio(ours[1], base[1]):.2f}"
    return f"{base[1]['ms'] * share / ours[1]['ms']:.2f}"


def baseline(workload: dict, who: str, found: dict) -> tuple[str, dict] | None:
    """What a line is compared with, by its words and result."""
    name = workload["name"]
    places = {
        "naive": (name, "naive"),
        "V1": (name, "v1"),
        "MHA": (MHA if name.startswith("decode") else LONG, "auto"),
        "two calls": (name, "unfused"),
    }
    for words, place in places.items():
        compared = words != "MHA" or name.startswith(("decode", "GQA", "MQA", "window 1024 s8192"))
        if compared and place in found and place != (name, who):
            return words, found[place][1]
    return None


def line(workload: dict, result: dict, found: dict) -> str:
    """One line of the table of variants."""
    who = result["name"].removeprefix("cuattn:")
    base = baseline(workload, who, found)
    speed_up = f"{base[1]['ms'] / result['ms']:.2f} x {base[0]}" if base else ""
    cache = workload["bytes"] if "context_lens" in workload else None
    memory = report.bytes_text(result["peak_bytes"])
    cells = (
        workload["name"],
        f"{NAMES.get(who, who)}{' [' + result['kernel'] + ']' if result['kernel'] else ''}",
        memory,
        report.bytes_text(cache),
        f"{result['ms']:.3g}",
        speed_up,
    )
    return " | ".join(cells)


def tables(document: dict) -> str:
    """Format both tables, what each kind is for, and the peers of a row beside ours."""
    found = results_of(document)
    lines = ["| row | who | memory beside the inputs | KV bytes | ms | speed-up |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    uses: dict[str, list[str]] = {}
    for row in document["rows"]:
        workload = row["workload"]
        uses.setdefault(workload.get("use", ""), []).append(workload["name"])
        for result in row["results"]:
            if "ms" in result:
                lines.append(f"| {line(workload, result, found)} |")
            elif result["status"].startswith("failed"):
                lines.append(
                    f"| {workload['name']} | {result['name']} | {result['status'][:60]} ||||"
                )
    claims = ["| claim | said | here |", "| --- | ---: | ---: |"]
    claims += [f"| {c.text} | {c.said} | {reached(c, found)} |" for c in CLAIMS]
    words = [f"- {', '.join(names)}: {use}" for use, names in uses.items() if use]
    return "\n\n".join(["\n".join(part) for part in (lines, words, claims)])
