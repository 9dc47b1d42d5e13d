# SPDX-License-Identifier: Apache-2.0
"""The tables of variants: every row is compared with what it says, every claim with two rows."""

import importlib
from pathlib import Path

import pytest

from cuattn._bench.families import FAMILIES
from cuattn._bench.workloads import as_json

ROWS = {w.name: w for w in FAMILIES["variants"].workloads}


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    return importlib.import_module("variants_page")


def document(times):
    """Rows of the family with made-up times, {(row, who): ms}."""
    rows = []
    for name, w in ROWS.items():
        results = [
            {"name": f"cuattn:{who}", "status": "ok", "ms": ms, "kernel": None, "peak_bytes": 1024,
             "rounds_ms": {"0": ms}}
            for (row, who), ms in times.items() if row == name
        ]  # fmt: skip
        rows.append({"workload": as_json(w), "results": results})
    return {"rows": rows}


def test_claims_name_rows_and_contestants_of_the_family(page):
    for claim in page.CLAIMS:
        for row, who in ((claim.row, claim.ours), (claim.base_row, claim.base)):
            assert who in (*ROWS[row].backends, "eager"), claim


def test_claims_are_ratios_of_what_was_measured(page):
    times = {("full s512", "naive"): 8.0, ("full s512", "auto"): 2.0,
             ("window 1024 s8192", "auto"): 1.0, ("window 1024 s32768", "auto"): 5.0,
             (page.MHA, "auto"): 6.0, ("decode GQA 32/8 32 x 4096", "auto"): 2.0,
             ("decode MLA 32 heads 32 x 4096", "auto"): 1.0}  # fmt: skip
    text = page.tables(document(times))
    assert "| flash beside naive, 512 tokens | more with the length | 4.00 |" in text
    assert "| flash beside naive, 2048 tokens | more with the length | not measured |" in text
    assert "time a token | 1: O(N W) | 0.80 |" in text  # 4 times the tokens in 5 times the time
    assert "| GQA 32/8 beside MHA, bytes of the cache | 4 | 4.0 |" in text
    assert "| GQA 32/8 beside MHA, a decode step | up to 4 | 3.00 |" in text
    assert "| MLA beside MHA, bytes of the cache | 8 | 14.2 |" in text
    assert "| full s512 | flash (auto) | 1.0 KiB |  | 2 | 4.00 x naive |" in text
    assert f"| {page.MHA} | flash (auto) | 1.0 KiB | 2.0 GiB | 6 |  |" in text


def test_every_row_says_what_it_is_for(page):
    text = page.tables(document({}))
    assert all(w.use in text for w in ROWS.values())
