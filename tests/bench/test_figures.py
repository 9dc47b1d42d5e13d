# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md and docs/figures.md: what a sentence says is what the rows say."""

import importlib
import json
import math
import re
from pathlib import Path

import pytest

import frameworks
from cuattn._bench.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("readme_figures")


def result(name, ms, peer_ms=None, **more):
    """What a results file has of a contestant; the ratio is that to a peer of `peer_ms`."""
    found = {"name": name, "ours": name.startswith("cuattn"), "status": "ok", "ms": ms}
    found |= {"tflops": 1.0 / ms, "gbps": 1000.0 / ms, "peak_bytes": None}
    found["rounds_ms"] = {"0": ms}
    if peer_ms is not None:
        found["ratio_to_best_peer"] = peer_ms / ms
    return found | more


def row(name, *results, **workload):
    found = {"workload": {"name": name, "series": "s", **workload}, "status": "ok"}
    found["results"] = list(results)
    peers = [r for r in results if not r["ours"]]
    if peers:
        found["best_peer"] = min(peers, key=lambda r: r["ms"])["name"]
    return found


def document(*rows, **more):
    found = {"schema": 1, "commit": "abc", "time": "2026-11-23", "rows": list(rows)}
    return found | {"complete": True, "about": "About.", "command": "bench"} | more


def two(name, ratio, ours="cuattn:auto", peer="fa3", **workload):
    return row(name, result(ours, 1.0, ratio), result(peer, ratio), **workload)


def test_the_tables_of_the_readme_show_rows_that_are_measured(figures):
    for family in figures.IN_README:
        names = [w.name for w in FAMILIES[family].workloads]
        shown = figures.SHOWN[family].rows
        assert len(shown) == 4
        assert set(shown) <= set(names)


def test_a_table_shows_the_rows_it_is_asked_for(figures):
    rows = document(two("a", 2.0), two("b", 0.5))
    shown = figures.SHOWN["paged"]
    assert "| a | 1.00 | 0.50 | 2.00 |" in figures.table(rows, shown, ("a",))
    assert "| b |" not in figures.table(rows, shown, ("a",))
    assert "| b | 1.00 | 2.00 | 0.50 |" in figures.table(rows, shown)


def test_a_loss_beyond_the_noise_is_named_worst_first(figures):
    found = {
        "forward": document(two("a", 1.2), two("b", 0.985)),
        "masks": document(two("a", 0.9), two("b", 0.97, peer="cudnn"), two("c", 1.5)),
        "paged": document(two("a", 1.1), two("b", 0.8, "cuattn:replan", "flashinfer")),
        "cache": document(two("a", 0.1, peer="memcpy")),
    }
    planned, masks = figures.losses(found)
    assert planned == (
        "decode over pages, the plan made in the call: 1 of 1 rows to FlashInfer, least 0.800 at b"
    )
    assert masks == "windows: 2 of 3 rows to FlashAttention-3 and cuDNN, least 0.900 at a"
    assert figures.losses_text({"forward": found["forward"]}) == "- no row of these tables"


def test_the_front_says_what_its_three_tables_say(figures, monkeypatch):
    peaks = [result("cuattn:auto", 1.0, peak_bytes=2), result("cuattn:naive", 1.0, peak_bytes=8)]
    found = {
        "forward": document(two("a", 1.21), two("b", 1.0, peer="cudnn")),
        "paged": document(
            two("a", 1.5, peer="flashinfer"), two("b", 0.9, "cuattn:replan", "flashinfer")
        ),
        "mission": document(row("s128", *peaks)),
    }
    monkeypatch.setattr(figures, "documents", lambda: found)
    text = figures.front()
    assert "**forward 1.10 x** the faster of cuDNN and FlashAttention-3: 2 rows, least 1.00" in text
    assert "**decode over pages 1.50 x** FlashInfer: 1 rows, least 1.50; where the plan" in text
    assert "in the call 0.90, least 0.90" in text
    assert "1/4 of what storing the scores takes: 1 lengths, 1/4 at 128 tokens" in text
    assert "1 of 1 rows to FlashInfer" in text  # and where it loses


def test_aims_read_what_was_reached(figures, tmp_path):
    aims = figures.aims

    def lines():
        table = aims.table(tmp_path).splitlines()[2:]
        return {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:4] for line in table}

    assert len(lines()) == len(aims.AIMS)
    assert all(words == "" for _, words in lines().values())  # nothing is known of anything
    forward = document(
        two("a", 1.1, seqlen_q=2048), two("b", 0.985, seqlen_q=4096), two("c", 1.05, seqlen_q=512)
    )
    (tmp_path / "forward.json").write_text(json.dumps(forward))
    name = next(aim.what for aim in aims.AIMS if aim.what.startswith("`sm90` against"))
    mean = math.sqrt(1.1 * 0.985)
    assert lines()[name] == [f"2 of 2 rows, least 0.985, mean {mean:.3f}", "holds"]  # noise: 2 %
    assert lines()["the same, 512 tokens"] == ["0 of 1 rows, least 1.050, mean 1.050", "**missed**"]
    forward["rows"].append(two("d", 0.9, seqlen_q=2048))
    (tmp_path / "forward.json").write_text(json.dumps(forward))
    assert lines()[name][1] == "**missed**"
    bar = {"against": "memcpy", "least": 0.9, "value": 0.8, "holds": False}
    cache = document({**two("a", 0.8), "bars": [bar]})
    (tmp_path / "cache.json").write_text(json.dumps(cache))
    name = next(aim.what for aim in aims.AIMS if aim.what.startswith("cache operations"))
    assert lines()[name] == ["0 of 1 rows, least 0.800, mean 0.800", "**missed**"]


def test_the_front_picture_is_1000_pixels_wide(figures, tmp_path):
    frameworks.require("matplotlib")
    figures.front_picture.draw(figures.documents(), tmp_path / "front.svg")
    text = (tmp_path / "front.svg").read_text(encoding="utf-8")
    points = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', text)[1])
    assert points / 0.75 == pytest.approx(1000)
    for words in ("Forward, TFLOP/s", "Decode over pages", "Memory beyond the inputs"):
        assert words in text  # matplotlib names each text in a comment
