# SPDX-License-Identifier: Apache-2.0
"""The benchmark over ranks: every call measured in step by two processes, and its bars."""

from __future__ import annotations

import dataclasses

import pytest

import frameworks

torch = frameworks.require("torch")
from cuattn._bench import measure, parallel, peers, report  # noqa: E402
from cuattn._bench.devices import CpuDevice  # noqa: E402
from cuattn._bench.families import FAMILIES  # noqa: E402
from cuattn._bench.ranks import RanksRun  # noqa: E402

SMOKE = FAMILIES["parallel_smoke"]
SETTINGS = measure.Settings(rounds=3, calls=2, heat_s=0.0)


@pytest.fixture(scope="module")
def run():
    contestants = [peers.our_contestant(name) for name in SMOKE.backends]
    run = RanksRun(CpuDevice(), SETTINGS, [*contestants, peers.PEERS["yunchang"]])
    yield run
    run.close()


def test_every_call_of_ours_is_right_and_timed(run):
    for w in SMOKE.workloads:
        row = run.row(w, 2.0)
        assert row["status"] == "ok", row
        found = {result["name"]: result for result in row["results"]}
        names = {"cuattn:auto", "cuattn:one", "cuattn:unchecked"}
        names |= set() if w.kind == "decode" else {"cuattn:gather", "cuattn:heads", "cuattn:ring"}
        for name in names:
            assert found[name]["status"] == "ok", (w.name, found[name])
            assert len(found[name]["rounds_ms"]) == 3
            assert found[name]["max_error"] <= found[name]["allowed_error"]
        assert found["yunchang"]["status"].startswith("unsupported")
        if w.kind != "decode":
            assert found["cuattn:ring"]["kernel"] == "ring"
            chosen = found["cuattn:auto"]["kernel"]
            assert chosen is None if w.lengths else chosen in ("gather", "heads", "ring")
        assert report.row_lines(row, {"copy_gbps": 1.0}).startswith(w.name)


def test_a_wrong_result_is_not_timed(run):
    w = SMOKE.workloads[0]
    wrong = dataclasses.replace(w, softcap=1.0)  # which no call is told of
    row = run.row(wrong, 1.0)
    for result in row["results"]:
        assert "ms" not in result
        assert result["status"].startswith(("failed: wrong result", "unsupported"))


def test_rows_say_what_they_must_reach():
    rows = {w.name: w for w in FAMILIES["parallel"].workloads}
    for heads in ("16/16", "32/8"):
        least = {bar.against: bar.least for bar in rows[f"{heads} s131072 causal"].bars}
        assert least == {"cuattn:one": pytest.approx(1.9), "best peer": 1.10}
        assert rows[f"{heads} s8192 causal"].bars[0].least == 1.5
    assert rows["32/8 decode, 1 x 1048576"].bars[0].least == pytest.approx(1 / 0.55)
    training = rows["16/16 s131072 causal, training"]
    assert training.flops == pytest.approx(3.5 * rows["16/16 s131072 causal"].flops)


def test_documents_fill_the_sequence_the_same_way_each_time():
    lengths = parallel.document_lengths(131072, 64, 32768)
    assert sum(lengths) == 131072
    assert lengths == parallel.document_lengths(131072, 64, 32768)
    assert min(lengths[:-1]) >= 64
    assert max(lengths) <= 32768
    assert len(lengths) > 10
