# SPDX-License-Identifier: Apache-2.0
"""benchmarks/decode_ladder.py without a GPU: its rows, its clock, its table and its picture."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

import frameworks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ladder():
    path = ROOT / "benchmarks" / "decode_ladder.py"
    spec = importlib.util.spec_from_file_location("decode_ladder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(ladder, batches=(1, 8), contexts=(512, 1024)):
    rows = []
    for batch, context in ladder.cells(batches, contexts):
        us = {
            way: {"waited": batch * context / 100 + i, "queued": batch * context / 200 + i}
            for i, way in enumerate(ladder.LABELS)
        }
        rows.append({"batch": batch, "context": context, "us": us})
    machine = {"name": "a GPU", "driver_version": "1.2"}
    return {"rows": rows, "machine": machine, "commit": "abc", "command": "it", "rounds": 5}


def test_rows_are_all_batches_and_contexts_with_the_smallest_reads_first(ladder):
    rows = list(ladder.cells())
    assert len(rows) == len(set(rows)) == 49
    assert rows[0] == (1, 512)
    assert rows[-1] == (64, 32768)
    assert [b * c for b, c in rows] == sorted(b * c for b, c in rows)


def test_steps_fit_into_the_room_of_the_tables(ladder):
    counts = [ladder.steps_for(batch, context) for batch, context in ladder.cells()]
    assert counts[0] == ladder.MOST_STEPS
    assert counts[-1] >= 4
    assert all(ladder.WARM_STEPS + 2 * count <= ladder.ROOM for count in counts)


def test_the_clock_counts_waits_in_one_mode_and_hands_over_at_once_in_the_other(ladder):
    log = []

    def wait():
        log.append("wait")
        time.sleep(0.01)

    times = ladder.time_steps(lambda: log.append("step"), wait, 5)
    warm = ["step", "wait"] * ladder.WARM_STEPS
    assert log == [*warm, *["step", "wait"] * 5, *["step"] * 5, "wait"]
    assert times["waited"] >= 0.01
    assert 0.002 <= times["queued"] < times["waited"]


def test_table_has_each_way_under_each_context(ladder):
    lines = ladder.table(document(ladder), "waited").splitlines()
    assert lines[0] == "| context | way | batch 1 | batch 8 |"
    assert lines[2] == "| 512 | launches | 5.1 | 41.0 |"
    assert lines[8] == "|  | persistent kernel | 12.2 | 83.9 |"
    assert len(lines) == 2 + 2 * len(ladder.LABELS)
    assert ladder.table(document(ladder), "queued").splitlines()[2] == (
        "| 512 | launches | 2.6 | 20.5 |"
    )


def test_note_keeps_its_text_around_new_figures(ladder):
    note = ladder.NOTE.read_text(encoding="utf-8")
    once = ladder.replaced(note, document(ladder))
    assert "a GPU, driver 1.2, commit abc" in once
    assert once.split(ladder.BEGIN)[0] == note.split(ladder.BEGIN)[0]
    assert ladder.replaced(once, document(ladder)) == once


def test_note_has_the_figures_of_the_results(ladder):
    if not ladder.RESULTS.exists():
        pytest.skip("no results of the decode ladder are committed")
    note = ladder.NOTE.read_text(encoding="utf-8")
    results = json.loads(ladder.RESULTS.read_text(encoding="utf-8"))
    assert ladder.replaced(note, results) == note, "run: python benchmarks/decode_ladder.py --draw"


def test_picture_is_drawn(ladder, tmp_path):
    frameworks.require("matplotlib")
    written = ladder.draw(document(ladder, (1, 2, 4, 8, 64)), tmp_path)
    assert written.name == "decode_ladder.svg"
    assert written.stat().st_size > 5000
