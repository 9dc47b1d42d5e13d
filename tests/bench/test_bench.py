# SPDX-License-Identifier: Apache-2.0
"""The benchmark counts work rightly, refuses wrong results, and survives a peer that fails."""

import dataclasses
import random
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import cuattn
import frameworks
from cuattn._bench import devices, measure, options, peers, published, reference, report
from cuattn._bench import prepared as prepared_calls
from cuattn._bench.families import FAMILIES
from cuattn._bench.workloads import Workload, dense, visible_pairs

ROOT = Path(__file__).resolve().parents[2]
ALL = [(name, w) for name, family in FAMILIES.items() for w in family.workloads]
SMALL = dense("small", 1, 64, 2, 32, dtype="float32", causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 2), (0, 0), (5, -1)])
@pytest.mark.parametrize("seqlens", [(9, 9), (4, 11), (11, 4), (5, 0)])
def test_visible_pairs_counts_the_mask(seqlens, causal, window):
    w = Workload("", 1, *seqlens, 1, 1, 8, causal=causal, window=window)
    scores = np.zeros(seqlens)
    rows = np.arange(seqlens[0])
    mask = np.isfinite(reference.score_rows(w, scores, rows, seqlens, 0.0, None))
    assert visible_pairs(*seqlens, causal, window) == mask.sum()


def test_flops_follow_the_published_convention():
    full, causal = (dense("", 2, 1024, 16, 128, causal=causal) for causal in (False, True))
    assert full.flops == 4 * 2 * 16 * 1024**2 * 128
    assert causal.flops == full.flops / 2


def test_the_mission_s_table_is_there():
    rows = {w.seqlen_q: w for w in FAMILIES["mission"].workloads}
    assert sorted(rows) == [128, 512, 2048, 4096]
    for w in rows.values():
        shape = (w.batch, w.num_heads_q, w.num_heads_kv, w.head_dim, w.dtype)
        assert shape == (32, 32, 32, 128, "float16")
    assert {"naive", "auto"} <= set(FAMILIES["mission"].backends)


def test_split_has_few_queries_over_many_keys():
    rows = FAMILIES["split"].workloads
    shapes = {(w.seqlen_q, w.seqlen_kv, w.causal) for w in rows}
    assert shapes == {(q, k, c) for q in (64, 128) for k in (32768, 131072) for c in (False, True)}
    for w in rows:
        assert (w.batch, w.num_heads_q, w.num_heads_kv, w.head_dim) == (1, 8, 1, 128)
        shape = (1, w.seqlen_q, 8, 128), *[(1, w.seqlen_kv, 1, 128)] * 2
        options = {"causal": w.causal, "dtype": w.dtype, "device": "h200"}
        assert cuattn.explain("attention", *shape, **options).num_splits > 1
        invariant = cuattn.explain("attention", *shape, **options, batch_invariant=True)
        assert invariant.num_splits == 128 // (w.seqlen_q // 16)  # a part for a multiprocessor
    assert "fa3" in FAMILIES["split"].peers


@pytest.mark.parametrize("seqlen_q", [16, 96])
def test_fa3_may_split_the_keys_where_queries_are_fewer(monkeypatch, seqlen_q):
    seen = []

    def flash_attn_func(q, k, v, causal=False, softcap=0.0, num_splits=1):
        seen.append(num_splits)

    library = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(peers, "module", lambda *names: library)
    w = dataclasses.replace(dense("", 1, 96, 4, 64), seqlen_q=seqlen_q)
    q = types.SimpleNamespace(is_cuda=True)
    peers.fa3(w, devices.Inputs(w, q=q, k=None, v=None)).call()
    assert seen == [0 if seqlen_q < 96 else 1]


def test_names_are_unique_within_a_family_and_peers_are_known():
    assert len({(family, w.name) for family, w in ALL}) == len(ALL)
    for family in FAMILIES.values():
        assert set(family.peers) <= peers.PEERS.keys()
        assert set(family.backends) <= set(options.BACKENDS)


def plan_of(w, backend, device):
    """What `explain` says of our call of a row, which then needs no arrays."""
    tokens_q, tokens_kv = ((w.batch, w.seqlen_q), (w.batch, w.seqlen_kv))
    if w.lengths:
        tokens_q = tokens_kv = (sum(w.lengths),)
    x = types.SimpleNamespace(
        q=(w.dtype, *tokens_q, w.num_heads_q, w.head_dim),
        k=(w.dtype, *tokens_kv, w.num_heads_kv, w.head_dim),
        v=(w.dtype, *tokens_kv, w.num_heads_kv, w.head_dim),
        cu_seqlens=("int32", len(w.lengths) + 1),
    )
    arguments, keywords = peers.our_call(w, x, backend)
    return cuattn.explain(w.op, *arguments, **keywords, device=device)


HALF_ROWS = [(name, w) for name, w in ALL if name in ("forward", "gqa", "fp16", "ragged")]


@pytest.mark.parametrize(("family", "w"), HALF_ROWS, ids=[f"{f}: {w.name}" for f, w in HALF_ROWS])
def test_rows_in_half_precision_run_the_kernel_that_their_backend_names(family, w):
    hopper = {backend: plan_of(w, backend, "h100") for backend in ("auto", "invariant", "sm80")}
    assert {backend: plan.kernel for backend, plan in hopper.items()} == {
        "auto": "sm90",
        "invariant": "sm90",
        "sm80": "sm80",
    }
    assert {plan_of(w, backend, "a100").kernel for backend in hopper} == {"sm80"}
    assert plan_of(w, "auto", "cpu").kernel == "cpu"
    for plan in hopper.values():
        assert plan.mask == ("causal" if w.causal else "none")
        assert plan.score == "identity"
        assert (plan.head_dim, plan.head_dim_v) == (w.head_dim, w.head_dim)  # nothing is padded
        assert (plan.num_splits, plan.packed_heads) == (1, 1)
        assert plan.workspace_bytes <= 256  # a counter at most: no keys in parts, none gathered
    # The tiles of `invariant` are those of any other batch.
    other = dataclasses.replace(w, batch=2 * w.batch, lengths=2 * w.lengths)
    if not w.lengths:
        other = dataclasses.replace(other, seqlen_q=w.seqlen_q // 2)
    again, plan = plan_of(other, "invariant", "h100"), hopper["invariant"]
    assert (again.tile_m, again.tile_n) == (plan.tile_m, plan.tile_n)


def test_bfloat16_rounding_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(reference.round_to(x, "bfloat16"), expected)


@pytest.mark.parametrize("workload", FAMILIES["smoke"].workloads, ids=lambda w: w.name)
def test_the_check_accepts_the_formula_and_sees_one_wrong_row(workload):
    inputs = devices.numpy_inputs(workload)
    out = peers.plain_numpy(workload, inputs).call()
    assert reference.check(workload, inputs, out).ok
    flat = out.reshape(-1, *out.shape[-2:])
    for value in (flat[-1, -1, 0] + 1e-3, np.nan):
        flat[-1, -1, 0] = value  # the last row of the last sequence and head is always looked at
        assert not reference.check(workload, inputs, out).ok


FLEX = [
    dense("causal", 2, 96, (4, 2), 32, dtype="float32", causal=True),
    dense("window", 1, 160, 2, 32, dtype="float32", window=(20, 5)),
    dense("softcap, alibi", 1, 70, 2, 32, dtype="float32", softcap=3.0, alibi=True, bias=True),
    Workload("documents", 3, 90, 90, 2, 2, 32, dtype="float32", lengths=(90, 1, 33)),
    Workload("causal", 3, 90, 90, 2, 2, 32, dtype="float32", causal=True, lengths=(7, 90, 64)),
]


@pytest.mark.parametrize("workload", FLEX, ids=lambda w: f"{w.op}-{w.mask}")
def test_flex_attention_is_asked_for_the_same_function(workload):
    frameworks.require("torch")
    from torch.nn.attention.flex_attention import flex_attention

    inputs = devices.torch_inputs(workload, "cpu")
    arrays, options = peers.flex_arguments(workload, inputs)
    out = peers.from_flex(workload, flex_attention(*arrays, **options))
    assert out.shape == inputs.q.shape
    assert reference.check(workload, inputs, out).ok


@pytest.mark.parametrize("backend", ["auto", "invariant", "naive"])
def test_our_backends_by_name(backend):
    workload = FAMILIES["smoke"].workloads[1]
    inputs = devices.numpy_inputs(workload)
    prepared = peers.our_contestant(backend).prepare(workload, inputs)
    assert reference.check(workload, inputs, prepared.call()).ok
    _, chosen = peers.our_call(workload, inputs, backend)
    assert chosen.get("batch_invariant", False) == (backend == "invariant")
    assert backend in options.BACKENDS


def row_with(**tflops) -> dict:
    results = [
        {"name": name.replace("_", ":"), "ours": name.startswith("cuattn"), "ms": 1.0, "tflops": t}
        for name, t in tflops.items()
    ]
    return {"workload": {"name": "d128 s2048 full"}, "results": results}


def test_a_published_figure_is_scaled_by_fa3_of_its_row_or_else_by_the_matmul_rate():
    ceilings = {"matmul_bfloat16_tflops": 347.0}
    row = row_with(cuattn_sm90=600.0, fa3=622.5 / 2)
    published.add_bars("forward", row, ceilings, "NVIDIA H200")
    assert row["published"]["fa4"]["tflops"] == pytest.approx(628.4 / 2)
    assert row["results"][0]["ratio_to_published"]["fa4"] == pytest.approx(1200 / 628.4)
    row = row_with(cuattn_sm90=600.0)
    published.add_bars("forward", row, ceilings, "NVIDIA H200")
    assert row["published"]["fa4"]["tflops"] == pytest.approx(628.4 * 347.0 / 694.0)
    assert "600" not in report.published_lines(row)[0]
    assert "(fa4)" in report.published_lines(row)[0]


def test_a_published_figure_yields_to_a_measured_peer_and_to_other_devices():
    measured_here = row_with(cuattn_sm90=600.0, fa3=622.5, fa4=600.0)
    elsewhere = row_with(cuattn_sm90=600.0, fa3=622.5)
    ceilings = {"matmul_bfloat16_tflops": 694.0}
    published.add_bars("forward", measured_here, ceilings, "NVIDIA H200")
    published.add_bars("forward", elsewhere, ceilings, "NVIDIA L4")
    assert "published" not in measured_here
    assert "published" not in elsewhere


def test_published_figures_name_rows_that_exist():
    names = {(family, w.name) for family, w in ALL}
    assert published.FIGURES.keys() <= names
    assert published.DECODE_FIGURES.keys() <= names


def contestants(*calls) -> list[peers.Contestant]:
    return [peers.Contestant(call.__name__, call) for call in calls]


def right(w, x):
    return peers.plain_numpy(w, x)


def wrong(w, x):
    return prepared_calls.Prepared(lambda: np.zeros_like(np.asarray(x.q)))


def broken(w, x):
    raise RuntimeError("no such kernel")


def too_large(w, x):
    raise MemoryError


def not_for_this(w, x):
    raise prepared_calls.Unsupported("other shapes only")


def slow_at_first(w, x):
    plain, calls = peers.plain_numpy(w, x), []

    def call():
        calls.append(None)
        if len(calls) == 1:
            time.sleep(0.3)
        return plain.call()

    return prepared_calls.Prepared(call)


def fails_later(w, x):
    plain, calls = peers.plain_numpy(w, x), []

    def call():
        calls.append(None)
        if len(calls) > 6:
            raise RuntimeError("device lost")
        return plain.call()

    return prepared_calls.Prepared(call)


def measured(*calls, **settings) -> dict:
    settings = measure.Settings(**{"rounds": 3, "heat_s": 0.0, **settings})
    run = measure.Run(devices.CpuDevice(), settings, contestants(*calls))
    return run.row(SMALL, 0.2)


def test_a_peer_that_fails_is_a_row_and_not_the_end():
    row = measured(broken, too_large, wrong, not_for_this, fails_later, right)
    status = {result["name"]: result["status"] for result in row["results"]}
    assert status["broken"] == "failed: RuntimeError: no such kernel"
    assert status["too_large"] == "failed: out of memory"
    assert status["wrong"].startswith("failed: wrong result")
    assert status["not_for_this"] == "unsupported: other shapes only"
    assert status["fails_later"] == "failed: RuntimeError: device lost"
    assert status["right"] == "ok"
    assert row["best_peer"] == "right"
    text = report.row_lines(row, {"copy_gbps": 1.0, "matmul_float32_tflops": 1.0})
    assert "not_for_this" not in text
    assert "failed: out of memory" in text


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_first_call_that_loads_a_library_is_not_what_is_timed(monkeypatch, is_ours):
    monkeypatch.setattr(measure, "SLOW_CALL_S", 0.2)
    contestant = peers.Contestant("slow_at_first", slow_at_first, is_ours=is_ours)
    settings = measure.Settings(rounds=3, heat_s=0.0)
    result = measure.Run(devices.CpuDevice(), settings, [contestant]).row(SMALL, 0.2)["results"][0]
    assert len(result["rounds_ms"]) == 3
    assert result["ms"] < 200


def test_a_slow_call_is_timed_once(monkeypatch):
    monkeypatch.setattr(measure, "SLOW_CALL_S", 0.0)
    assert list(measured(right)["results"][0]["rounds_ms"]) == ["0"]


def test_fa3_says_itself_what_it_was_built_without(monkeypatch):
    module = types.ModuleType("fa3_fwd_config")
    flags = {"FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_SPLIT": False}
    module.CONFIG = {"build_flags": flags}
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", module)
    assert peers.fa3_built_without() == {"FP16"}
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", None)  # not installed
    assert peers.fa3_built_without() == set()


def test_a_dense_batch_packs_into_equal_sequences():
    w = Workload("", 3, 5, 8, 1, 1, 8)
    assert [ends.tolist() for ends in peers.packed_ends(w)] == [[0, 5, 10, 15], [0, 8, 16, 24]]


def test_a_call_expected_to_take_too_long_is_skipped():
    settings = measure.Settings(rounds=3, heat_s=0.0, limit_s=1.0)
    run = measure.Run(devices.CpuDevice(), settings, contestants(right))
    run.rate["right", "float32"] = SMALL.flops / 100
    assert run.row(SMALL, 0.1)["results"][0]["status"].startswith("skipped: one call would take")


def test_peers_that_compile_run_on_marked_rows_only():
    contestant = dataclasses.replace(contestants(right)[0], is_jit=True)
    for jit, marked, expected in [("marked", True, 1), ("marked", False, 0), ("all", False, 1)]:
        settings = measure.Settings(rounds=3, heat_s=0.0, jit=jit)
        run = measure.Run(devices.CpuDevice(), settings, [contestant])
        row = run.row(dataclasses.replace(SMALL, jit=marked), 0.1)
        assert len(row["results"]) == expected


def test_the_ratio_is_the_median_of_the_rounds_both_ran():
    ours = {"ms": 1.0, "rounds_ms": {"0": 1.0, "1": 2.0, "2": 4.0}}
    peer = {"ms": 2.0, "rounds_ms": {"0": 2.0, "1": 2.0, "2": 2.0, "3": 9.0}}
    assert report.ratio(ours, peer) == 1.0
    assert report.ratio({"ms": 1.0, "rounds_ms": {"9": 1.0}}, peer) == 2.0


def test_the_batch_invariant_backend_is_compared_with_auto():
    entries = [measure.Entry(peers.our_contestant(name)) for name in ("auto", "invariant")]
    for entry, ms in zip(entries, (1.0, 1.25), strict=True):
        entry.prepared, entry.rounds_ms = (
            prepared_calls.Prepared(lambda: None, kernel="cpu"),
            {0: ms},
        )
    row = report.row_json(SMALL, entries)
    assert row["results"][1]["ratio_to_auto"] == 0.8
    assert "ratio_to_auto" not in row["results"][0]
    assert "0.800 x auto" in report.row_lines(row, {"copy_gbps": 1.0})
    text = report.summary({"rows": [row], "complete": True})
    assert text.startswith("cuattn:invariant: 0.800 x auto on the geometric mean of 1 row")


def test_rounds_shrink_for_slow_calls_and_fill_the_time_of_fast_ones():
    entries = [measure.Entry(c) for c in contestants(right, wrong)]
    entries[0].estimate_s, entries[1].estimate_s = 1e-5, 0.5
    measure.plan_rounds(entries, measure.Settings(rounds=7, calls=40), slice_s=4.0, flush_s=0.0)
    assert (entries[0].rounds, entries[0].calls_per_round) == (7, 40)
    assert (entries[1].rounds, entries[1].calls_per_round) == (4, 1)


def test_every_contestant_runs_once_a_round_in_changing_order():
    seen: list[str] = []

    class Device(devices.CpuDevice):
        def time(self, call, iterations, *, flush=True):
            seen.append(call.__name__)
            return 1.0

    def prepared(name):
        def call():
            return None

        call.__name__ = name
        entry = measure.Entry(contestants(right)[0], prepared=prepared_calls.Prepared(call))
        entry.rounds, entry.calls_per_round = 5, 1
        return entry

    measure.run_rounds([prepared(name) for name in "abc"], Device(), random.Random(0))
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 15, 3)]
    assert all(sorted(order) == list("abc") for order in rounds)
    assert len(set(rounds)) > 1


NCU = """\
==PROF== Connected to process 4711
"ID","Kernel Name","Block Size","gpu__time_duration.sum","lts__t_sector_hit_rate.pct",\
"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio","dram__bytes_read.sum"
"","","","ns","%","inst","byte"
"0","prepare(int)","(32, 1, 1)","2,000","99.0","0.5","1"
"1","prefill<128, 2>(P)","(384, 1, 1)","1,500,000","90.5","1.25","100,000,000"
"2","prefill<128, 2>(P)","(384, 1, 1)","1,300,000","91.5","1.75","102,000,000"
"""


def ncu_table() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "ncu_table.py"))


def test_ncu_table_takes_the_median_of_the_kernel_that_took_the_most_time():
    module = ncu_table()
    found = module["read"](NCU.splitlines(), "d128")
    assert found["d128"]["gpu__time_duration.sum"] == 1.4e6
    text = module["table"](found | {"d64": {}})
    assert "| time, ms | 1.400 |  |" in text
    assert "| L2 hit rate, % | 91.0 |  |" in text
    assert "| DRAM read, MB | 101 |  |" in text
    assert "| warps a scheduler in gmma, per issue | 1.50 |  |" in text
    assert "barrier" not in text  # not measured
    assert "tensor" not in text


def test_ncu_table_has_a_column_for_each_row_that_was_profiled():
    """And FLOPs a byte, of the FLOPs that the range's name says."""
    module, lines = ncu_table(), NCU.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"'))
    named = ["auto: s512|1.01e9", "auto: s512|1.01e9", "v1: 1 x 8|0"]
    lines[first] += ',"thread Domain:Push/Pop_Range"'
    lines[first + 1] += ',""'
    launches = [f'{line},"<default domain>:[cuattn:{name}]:none"'
                for line, name in zip(lines[first + 2 :], named, strict=False)]  # fmt: skip
    found = module["read"]([*lines[: first + 2], *launches], "file")
    assert list(found) == ["auto: s512", "v1: 1 x 8"]
    text = module["table"](found)
    assert text.startswith("| | auto: s512 | v1: 1 x 8 |")
    moved = found["auto: s512"]["dram__bytes_read.sum"]
    assert f"| FLOPs a byte of DRAM | {1.01e9 / moved:.0f} |  |" in text


@pytest.mark.parametrize("text", ["", "==ERROR== no permission\n", NCU.replace("Kernel Name", "K")])
def test_ncu_table_names_the_file_that_holds_no_kernel(tmp_path, text):
    path = tmp_path / "d128.csv"
    path.write_text(text)
    command = [sys.executable, str(ROOT / "benchmarks" / "ncu_table.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "d128.csv" in done.stderr
    assert done.stdout == ""


def test_profile_kernel_lists_the_rows_when_the_name_is_wrong():
    command = [sys.executable, str(ROOT / "benchmarks" / "profile_kernel.py"), "--workload", "d99"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no workload 'd99'" in done.stderr
    assert "d128 s8192 causal" in done.stderr


def test_the_recorded_command_names_no_folder_of_the_machine():
    script = ["/somewhere/benchmarks/bench.py", "--family", "gqa"]
    for output in (["-o", "/a/b"], ["--output", "/a/b"], ["--output=/a/b"]):
        recorded = report.command([*script, *output, "--budget", "8"])
        assert recorded == "python benchmarks/bench.py --family gqa --budget 8"
