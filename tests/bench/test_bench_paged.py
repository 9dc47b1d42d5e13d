# SPDX-License-Identifier: Apache-2.0
"""The benchmark over paged caches: work counted, results checked, bars judged."""

import dataclasses
import json

import numpy as np
import pytest

import frameworks
from cuattn._bench import bars, devices, measure, peers, published, report
from cuattn._bench.bars import Bar
from cuattn._bench.families import FAMILIES
from cuattn._bench.paged import PagedWorkload, ragged_lengths
from cuattn._bench.workloads import as_json

torch = frameworks.require("torch")
from cuattn._bench import paged_inputs  # noqa: E402 it needs torch

*SMOKE, SHARED = [w for w in FAMILIES["paged_smoke"].workloads if w.op == "paged_attention"]
CHUNKS = next(w for w in FAMILIES["paged_smoke"].workloads if w.op == "paged_prefill")
DECODE = [
    *SMOKE,
    dataclasses.replace(SMOKE[0], name="bf16", dtype="bfloat16"),
    dataclasses.replace(SMOKE[0], name="e4m3", dtype="bfloat16", e4m3=True),
    dataclasses.replace(SMOKE[2], name="e4m3 vllm", dtype="float16", e4m3=True),
    SHARED,
    dataclasses.replace(SHARED, name="shared vllm", dtype="bfloat16", kv_layout="vllm"),
]
CEILINGS = {"copy_gbps": 2140.0, "matmul_bfloat16_tflops": 347.0}


def row_of(w, backends, device=None) -> dict:
    contestants = [peers.our_contestant(name) for name in backends]
    settings = measure.Settings(rounds=3, heat_s=0.0)
    run = measure.Run(device or devices.CpuDevice(), settings, contestants)
    return run.row(w, 0.1)


def statuses(row: dict) -> dict[str, str]:
    return {result["name"].removeprefix("cuattn:"): result["status"] for result in row["results"]}


@pytest.mark.parametrize("workload", DECODE, ids=lambda w: w.name)
def test_every_kind_of_call_gives_the_right_result(workload):
    words = (
        *("auto", "invariant", "v1", "v2", "wide", "codes", "replan", "dense", "sm80", "naive"),
        "cascade",
    )
    row = row_of(workload, words)
    status = statuses(row)
    assert [status[name] for name in ("auto", "invariant", "v1", "v2")] == ["ok"] * 4
    assert (status["wide"] == "ok") == (status["codes"] == "ok") == workload.e4m3
    of_cascade = "ok" if workload.shared_len else "unsupported: for a shared prefix only"
    assert status["cascade"] == of_cascade
    assert status["replan"].startswith("unsupported")  # the CPU needs no plan
    assert status["dense"] == "unsupported: for prefill only"
    assert status["sm80"].startswith("unsupported")
    assert status["naive"].startswith("failed: ValueError: paged_attention: backend must be")


def test_a_shared_prefix_is_the_same_blocks_of_every_table():
    x = SHARED.draw("cpu")
    blocks = SHARED.shared_len // SHARED.block_size
    assert (x.block_tables[:, :blocks] == x.block_tables[:1, :blocks]).all()
    needed = -(-np.asarray(SHARED.context_lens) // SHARED.block_size)
    pairs = zip(x.block_tables.numpy(), needed, strict=True)
    own = np.concatenate([row[blocks:count] for row, count in pairs])
    used = np.concatenate([x.block_tables[0, :blocks].numpy(), own])
    assert sorted(used) == list(range(len(used)))  # each block once, and none is left over
    assert len(x.caches[0][0]) == len(used)
    tokens = SHARED.shared_len + sum(n - SHARED.shared_len for n in SHARED.context_lens)
    assert SHARED.bytes == 2 * tokens * SHARED.num_heads_kv * SHARED.head_dim * 4
    with pytest.raises(ValueError, match="shared prefix of 33 tokens ends in a block"):
        dataclasses.replace(SHARED, shared_len=33).draw("cpu")


def test_cascade_reads_the_prefix_that_the_tables_name():
    """The prefix is taken out of the cache; with other blocks there, its result is another."""
    x = SHARED.draw("cpu")
    prepared = peers.our_contestant("cascade").prepare(SHARED, x)
    assert x.sample().error(prepared.call()).ok
    x.block_tables[:, 0] = x.block_tables[0, 1]
    assert not x.sample().error(prepared.call()).ok


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_prefill_over_pages_and_over_packed_keys_gives_the_right_result(layout):
    row = row_of(dataclasses.replace(CHUNKS, kv_layout=layout), ("auto", "dense", "v1"))
    status = statuses(row)
    assert (status["auto"], status["dense"]) == ("ok", "ok")
    assert status["v1"] == "unsupported: for decode only"
    assert CHUNKS.flops == 4 * 4 * 64 * (20 * 50 + 20 * 21 // 2 + 33 * 34 // 2 + 5)


def test_chunks_over_float8_caches():
    """Codes are judged by what rounding P to float8 errs, all else by the dtype."""
    w = dataclasses.replace(CHUNKS, dtype="bfloat16", e4m3=True)
    row = row_of(w, ("auto", "wide", "codes", "dense"))
    refused = "unsupported: for 16-bit caches only"
    assert statuses(row) == {"auto": "ok", "wide": "ok", "codes": "ok", "dense": refused}
    sample = w.draw("cpu").sample()
    zeros = torch.zeros(54, 4, 64)
    assert sample.error(zeros).allowed < sample.error(paged_inputs.Products((zeros,))).allowed
    assert not sample.error(paged_inputs.Products((zeros,))).ok


@pytest.mark.parametrize("workload", [*DECODE, CHUNKS], ids=lambda w: w.name)
def test_the_check_sees_one_wrong_row(workload):
    x = workload.draw("cpu")
    out = peers.our_contestant("auto").prepare(workload, x).call()
    sample = x.sample()
    assert sample.error(out).ok
    for value in (float(out[-1, -1, 0]) + 0.1, np.nan):
        out[-1, -1, 0] = value
        assert not sample.error(out).ok


def test_the_check_reads_the_tokens_that_the_tables_name():
    """Against the same sequences out of gather_cache."""
    import cuattn

    for w in DECODE[:3]:
        x = w.draw("cpu")
        ends = np.concatenate([[0], np.cumsum(w.context_lens)])
        cu_seqlens = torch.from_numpy(ends.astype(np.int32))
        tables, layout = x.block_tables, w.kv_layout
        k, v = cuattn.gather_cache(*x.caches[0], tables, cu_seqlens, kv_layout=layout)
        for b, h in ((0, 0), (len(w.context_lens) - 1, w.num_heads_q - 1)):
            _, k_head, v_head, _, _ = x.head(b, h, np.arange(1))
            group = h // (w.num_heads_q // w.num_heads_kv)
            at = slice(ends[b], ends[b + 1])
            np.testing.assert_array_equal(k_head, k[at, group].numpy())
            np.testing.assert_array_equal(v_head, v[at, group].numpy())


def test_sets_of_caches_are_taken_in_turn_beginning_with_the_checked_one():
    seen = []
    call = paged_inputs.in_turn([(0, 0), (1, 1)], lambda k, v: seen.append(k))
    for _ in range(3):
        call()
    assert seen == [0, 1, 0]


def test_calls_of_a_graph_fill_a_millisecond_and_use_every_set_alike():
    assert paged_inputs.calls_in_graph(4 << 20, 64) % 64 == 0
    assert paged_inputs.calls_in_graph(4 << 20, 64) >= 128
    assert paged_inputs.calls_in_graph(2 << 30, 2) == 2
    assert paged_inputs.calls_in_graph(512 << 20, 2) == 8


def test_a_call_in_a_graph_is_timed_as_its_share():
    """And a graph is what the rounds run."""
    real = peers.ours("auto")

    def prepare(w, x):
        return dataclasses.replace(real(w, x), repeats=5)

    class Device(devices.CpuDevice):
        captured = 0

        def capture(self, call, repeats):
            self.captured += 1
            return lambda: repeats

        def time(self, call, iterations, *, flush=True):
            return 1.0 if isinstance(call(), int) else 1e-6

    device = Device()
    contestant = dataclasses.replace(peers.our_contestant("auto"), prepare=prepare)
    run = measure.Run(device, measure.Settings(rounds=3, heat_s=0.0), [contestant])
    result = run.row(SMOKE[0], 100.0)["results"][0]
    assert result["status"] == "ok"
    assert device.captured == 1
    assert result["ms"] == pytest.approx(200.0)  # five calls a second
    assert result["calls_at_once"] == 5


def test_a_graph_needs_little_time_when_the_budget_is_spent():
    entries = [measure.Entry(peers.our_contestant("auto")) for _ in range(2)]
    for entry in entries:
        entry.estimate_s = 1e-4
    entries[0].timed, entries[0].calls_at_once = lambda: None, 10
    measure.plan_rounds(entries, measure.Settings(rounds=7, calls=40), 0.0, flush_s=4e-4)
    assert (entries[0].rounds, entries[0].calls_per_round) == (7, 3)  # 30 ms
    assert (entries[1].rounds, entries[1].calls_per_round) == (7, 28)  # 100 ms
    measure.plan_rounds(entries, measure.Settings(rounds=7, calls=40), 100.0, flush_s=4e-4)
    assert entries[0].calls_per_round == 5


def test_bytes_are_those_of_the_keys_and_values_read():
    w = PagedWorkload("", (100, 28), 32, 8)
    assert w.bytes == 2 * 128 * 8 * 128 * 2
    assert dataclasses.replace(w, e4m3=True).bytes == w.bytes // 2
    assert w.flops == 4 * 32 * 128 * 128
    narrow = next(w for w in DECODE if w.name == "e4m3")
    results = row_of(narrow, ("auto", "wide"))["results"]
    auto, wide = (result["gbps"] * result["ms"] for result in results)
    assert wide == pytest.approx(2 * auto)


def test_the_family_has_the_sizes_of_its_table():
    rows = FAMILIES["paged"].workloads
    assert min(w.bytes for w in rows) == 4 << 20
    assert max(w.bytes for w in rows) == 2 << 30
    assert {(w.num_heads_q, w.num_heads_kv) for w in rows} == {(32, 8), (64, 8), (32, 32)}
    assert {w.block_size for w in rows} == {16, 64}
    assert {w.dtype for w in rows} == {"bfloat16", "float16"}
    lengths = ragged_lengths()
    assert len(lengths) == 64
    assert 128 <= min(lengths) < 256
    assert 16384 < max(lengths) <= 32768


def test_the_families_of_cascade_and_of_batch_invariance_have_the_rows_they_say():
    rows = FAMILIES["cascade"].workloads
    sizes = [(len(w.context_lens), w.shared_len, w.context_lens[0] - w.shared_len) for w in rows]
    assert sizes == [(64, 8192, 512), (16, 32768, 512), (64, 2048, 512)]
    assert {(w.num_heads_q, w.num_heads_kv, w.dtype, w.block_size) for w in rows} == {
        (64, 8, "bfloat16", 16)
    }
    assert FAMILIES["cascade"].backends == ("auto", "cascade")
    rows = FAMILIES["paged_invariant"].workloads
    assert {w.num_heads_q // w.num_heads_kv for w in rows} == {4, 8}
    assert {len(w.context_lens) for w in rows} == {1, 4, 16, 64}
    assert {w.context_lens[0] for w in rows} == {1024, 4096, 8192, 32768}
    assert FAMILIES["paged_invariant"].backends == ("auto", "invariant")
    for w in rows:  # at most 25 % slower on a row, 10 % on the geometric mean
        (bar,) = w.bars
        assert (bar.ours, bar.against) == ("cuattn:invariant", "cuattn:auto")
        assert (1 / bar.least, 1 / bar.mean) == pytest.approx((1.25, 1.1))


def test_what_batch_invariance_costs_is_said_of_row_and_family():
    w = dataclasses.replace(SMOKE[0], bars=FAMILIES["paged_invariant"].workloads[0].bars)
    row = row_of(w, ("auto", "invariant"))
    invariant = next(r for r in row["results"] if r["name"] == "cuattn:invariant")
    bars.judge(w.bars, row, [], CEILINGS)
    assert row["bars"][0]["value"] == pytest.approx(invariant["ratio_to_auto"])


def measured_row(name="w", **ms) -> dict:
    results = [
        {
            "name": who.replace("cuattn_", "cuattn:"),
            "ours": who.startswith("cuattn"),
            "status": "ok",
            "ms": value,
            "gbps": 1000.0 / value,
            "tflops": 1.0 / value,
            "rounds_ms": {"0": value},
        }
        for who, value in ms.items()
    ]
    return {"workload": {"name": name, "series": name}, "status": "ok", "results": results}


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [
        (Bar("cuattn:auto", "microseconds", 600.0), 500.0, True),
        (Bar("cuattn:auto", "microseconds", 400.0), 500.0, False),
        (Bar("cuattn:auto", "best peer", 1.2), 1.25, True),
        (Bar("cuattn:auto", "best peer", 1.26), 1.25, False),
        (Bar("cuattn:auto", "copy", 0.9), 2000 / 2140, True),
        (Bar("cuattn:auto", "cuattn:wide", 1.9), 2.0, True),
        (Bar("cuattn:wide", "cuattn:auto", 0.6), 0.5, False),
        (Bar("cuattn:auto", "row before", 1.6), 2.0, True),
        (Bar("cuattn:auto", "row absent", 1.0), None, None),
        (Bar("cuattn:v9", "copy", 1.0), None, None),
        (Bar("cuattn:auto", "vllm_v1", 1.0), 0.985, True),  # within the noise of a bar of 1
        (Bar("cuattn:auto", "vllm_v2", 1.0), 0.97, False),
    ],
    ids=lambda x: f"{x.against} {x.least}" if isinstance(x, Bar) else None,
)
def test_a_bar_is_judged_by_what_it_names(bar, value, holds):
    before = measured_row("before", cuattn_auto=1.0)
    row = measured_row(cuattn_auto=0.5, cuattn_wide=1.0, flashinfer=0.625)
    row["results"][0] |= {
        "ratio_to_best_peer": 1.25,
        "ratio_to_published": {"vllm_v1": 0.985, "vllm_v2": 0.97},
    }
    bars.judge((bar,), row, [before], CEILINGS)
    judged = row["bars"][0]
    assert judged["value"] == (None if value is None else pytest.approx(value))
    assert judged["holds"] is holds
    text = "\n".join(report.bar_lines(row))
    assert {True: "holds", False: "MISSED", None: "not measured"}[holds] in text
    summary = report.bar_summary({"rows": [before, row]})
    assert (
        summary[0]
        == {
            True: "bars: 1 of 1 hold",
            False: "bars: 0 of 1 hold",
            None: "bars: 0 of 0 hold, 1 not measured",
        }[holds]
    )
    assert len(summary) == (2 if holds is False else 1)


def test_bars_that_are_alike_have_a_mean():
    rows = []
    for ratio in (1.0, 1.21):
        row = measured_row(cuattn_auto=1.0)
        row["results"][0]["ratio_to_best_peer"] = ratio
        bars.judge((Bar("cuattn:auto", "best peer", 1.0),), row, [], CEILINGS)
        rows.append(row)
    text = report.bar_summary({"rows": rows})[1]
    assert "best peer, where the bar is 1: 1.100 on the geometric mean of 2 rows" in text
    assert text.endswith("least 1.000")


@pytest.mark.parametrize(("second", "word"), [(0.9, "holds"), (0.85, "MISSED")])
def test_a_bar_may_ask_something_of_the_mean(second, word):
    rows = []
    for speed in (0.96, second):
        row = measured_row(cuattn_auto=speed, cuattn_invariant=1.0)
        bars.judge((Bar("cuattn:invariant", "cuattn:auto", 0.8, mean=0.92),), row, [], CEILINGS)
        rows.append(row)
    count, mean = report.bar_summary({"rows": rows})
    assert count == "bars: 2 of 2 hold"
    assert f"{(0.96 * second) ** 0.5:.3f} of 0.92 ({word}) on the geometric mean of 2" in mean
    for row in rows:  # a file written before bars had means
        del row["bars"][0]["mean"]
    assert "of 0.92" not in report.bar_summary({"rows": rows})[1]


def test_figures_of_decode_are_scaled_by_the_copy_rate():
    row = measured_row("fp16 32/8 1 x 8192", cuattn_v1=1.0, cuattn_v2=0.5)
    published.add_bars("paged_vllm", row, CEILINGS, "NVIDIA H200")
    assert row["published"]["vllm_v2"]["gbps"] == pytest.approx(917.0 / 2)
    assert row["results"][1]["ratio_to_published"]["vllm_v2"] == pytest.approx(2000 / (917 / 2))
    assert "the copy rate" in report.published_lines(row)[0]
    elsewhere = measured_row("fp16 32/8 1 x 8192", cuattn_v1=1.0)
    published.add_bars("paged_vllm", elsewhere, CEILINGS, "NVIDIA L4")
    assert "published" not in elsewhere


def test_every_row_of_vllm_s_table_has_both_figures():
    names = {w.name for w in FAMILIES["paged_vllm"].workloads}
    assert {name for _, name in published.DECODE_FIGURES} == names


def test_tables_say_bytes_where_memory_is_what_counts():
    document = {"quantity": "gbps", "rows": [measured_row(cuattn_auto=0.5)]}
    document["rows"][0]["results"][0]["peak_bytes"] = None
    assert "0.5 ms, 2 TB/s" in report.markdown(document)


def test_pictures_of_a_decode_family_show_tb_per_second(tmp_path):
    frameworks.require("matplotlib")
    from cuattn._cli import plot

    row = measured_row(cuattn_auto=0.5, cuattn_v1=1.0)
    for result in row["results"]:
        result["peak_bytes"] = None
    head = {"schema": 1, "family": "paged_vllm", "quantity": "gbps", "versions": {}, "cuattn": {}}
    head |= {"machine": {"device": "H200"}, "commit": None, "time": "2026-01-01T00:00:00Z"}
    path = tmp_path / "paged_vllm.json"
    path.write_text(json.dumps({**head, "rows": [row]}), encoding="utf-8")
    assert plot.main([path], tmp_path) == 0
    picture = (tmp_path / "paged_vllm_speed.svg").read_text(encoding="utf-8")
    assert "<!-- TB/s -->" in picture
    assert "<!-- cuattn, V1 -->" in picture
    assert not (tmp_path / "paged_vllm_memory.svg").exists()


def test_pictures_have_a_panel_for_each_series_of_several_rows():
    from cuattn._cli import plot

    for family, panels in (("paged", 9), ("paged_vllm", 4), ("cache", 12)):
        rows = [measured_row(cuattn_auto=1.0) for _ in FAMILIES[family].workloads]
        for row, w in zip(rows, FAMILIES[family].workloads, strict=True):
            row["workload"] = as_json(w)
        found = plot.bar_panels({"quantity": "gbps", "rows": rows})
        assert len(found) == panels
        assert sum(map(len, found.values())) == len(rows)
