# SPDX-License-Identifier: Apache-2.0
"""The benchmark of gradients: work counted, wrong gradients seen, bars of the rows judged."""

import dataclasses
import importlib
import json
import types
from pathlib import Path

import pytest

import cuattn
import frameworks
import reference as oracle
from cuattn._bench import bars, devices, measure, ops, peers, published
from cuattn._bench.backward import OURS, PLAIN
from cuattn._bench.families import FAMILIES
from cuattn._bench.workloads import as_json

torch = frameworks.require("torch")
backward_reference = pytest.importorskip("cuattn._bench.backward_reference")
backward_inputs = pytest.importorskip("cuattn._bench.backward_inputs")

ROOT = Path(__file__).resolve().parents[2]
SMOKE = FAMILIES["backward_smoke"].workloads
ROWS = {w.name: w for w in FAMILIES["backward"].workloads}


def ids(w):
    return w.name


@pytest.mark.parametrize("w", SMOKE, ids=ids)
def test_every_row_is_measured_and_says_what_it_is(w):
    names = ("torch", "flash", "cudnn", "varlen")
    contestants = [peers.our_contestant("auto"), peers.our_contestant("deterministic")]
    contestants += [peers.PEERS[name] for name in names]
    run = measure.Run(devices.CpuDevice(), measure.Settings(rounds=3, heat_s=0.0), contestants)
    row = run.row(w, 0.1)
    results = {result["name"]: result for result in row["results"]}
    assert results[OURS]["status"] == "ok"
    assert all(r["status"].startswith(("ok", "unsupported")) for r in results.values())
    assert results["cudnn"]["status"] == (
        "unsupported: needs CUDA tensors"
        if not (w.softcap or w.alibi or w.sinks or w.bias or w.dropout_p or w.lengths)
        else results["flash"]["status"]
    )
    assert ("host_us" in results[OURS]) == w.step
    if w.name in ("full", "causal", "step", "16 bits"):
        assert results["flash"]["status"] == "ok"
        assert row["best_peer"] in names
    bars.judge(w.bars, row, [row], {})
    json.dumps(row)


@pytest.mark.parametrize("w", SMOKE, ids=ids)
def test_the_check_sees_one_wrong_number_of_each_gradient(w):
    x = w.draw("cpu")
    prepared = peers.our_contestant("auto").prepare(w, x)
    with torch.no_grad():
        got, sample = prepared.canonical(prepared.call()), x.sample()
    assert set(got) == set(w.need)
    assert sample.error(got).ok
    for name in w.need:
        for value in (7.0, torch.nan):
            wrong = got[name].clone()
            wrong.view(-1)[-1] += value
            assert not sample.error({**got, name: wrong}).ok, name


@pytest.mark.parametrize("w", SMOKE, ids=ids)
def test_the_check_stays_on_its_device(w):
    """The meta device refuses to meet another."""
    x = w.draw("cpu")
    for name in ("q", "k", "v", "dout", "slopes", "bias", "sinks"):
        array = getattr(x, name)
        setattr(x, name, None if array is None else array.to("meta"))
    head = backward_reference.KeyHead(w, x, 7, 1, w.num_heads_kv - 1)
    for dtypes in ((torch.float64, None), (torch.float32, torch.bfloat16)):
        assert {a.device.type for a in head.gradients(*dtypes).values()} == {"meta"}


def test_rows_longer_than_a_chunk_are_checked_whole(monkeypatch):
    whole = {}
    for chunk in (2048, 40):
        monkeypatch.setattr(backward_reference, "CHUNK", chunk)
        for w in SMOKE:
            head = backward_reference.KeyHead(w, w.draw("cpu"), 7, 1, w.num_heads_kv - 1)
            for name, a in head.gradients(torch.float64).items():
                expected = whole.setdefault((w.name, name), a)
                torch.testing.assert_close(a, expected, rtol=1e-12, atol=1e-12)


def test_the_bits_of_dropout_are_those_of_the_oracle():
    factor = oracle.dropout(0.1, 2**40 + 5, 0, (2, 3), (5, 37))
    heads = torch.arange(3, 6)
    got = backward_reference.kept(0.1, 2**40 + 5, heads, torch.arange(5), 37)
    assert (got.numpy() == factor[1]).all()
    assert 0 < (factor == 0).mean() < 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_two_and_a_half_times_the_forward_s(causal):
    word = "causal" if causal else "full"
    forward = next(w for w in FAMILIES["forward"].workloads if w.name == f"d128 s2048 {word}")
    gradients = ROWS[f"d128 s2048 {word}"]
    assert gradients.flops == 2.5 * forward.flops
    assert dataclasses.replace(gradients, step=True).flops == 3.5 * forward.flops
    narrow = ROWS[f"d192/128 s2048 {word}"]
    pairs = narrow.batch * narrow.num_heads_q * 2048**2 / (2 if causal else 1)
    assert narrow.flops == pairs * 2 * (3 * 192 + 2 * 128)


def test_the_table_has_its_rows_and_the_risky_ones_are_last():
    for width in ("64", "96", "128", "192", "256", "192/128"):
        for seqlen in (512, 2048, 8192, 16384):
            for word in ("full", "causal"):
                w = ROWS[f"d{width} s{seqlen} {word}"]
                assert w.batch * seqlen == 16384
                assert w.num_heads_q * w.head_dim <= 2048
                assert w.bars[0].least == (1.1 if seqlen == 512 else 1.0)
    assert [w.name for w in ROWS.values()][-8:] == [name for name in ROWS if "192/128" in name]
    assert {w.dtype for w in ROWS.values()} == {"bfloat16", "float16"}
    assert {w.op for w in ROWS.values()} == set(ops.BACKWARD)
    assert list(ROWS).index(PLAIN) < list(ROWS).index("causal softcap 30")


def plan_of(w, device):
    """What `explain` says of a row, which then needs no arrays."""
    lead = (sum(w.lengths),) if w.lengths else (w.batch, w.seqlen_q)
    q = (w.dtype, *lead, w.num_heads_q, w.head_dim)
    k = (w.dtype, *lead, w.num_heads_kv, w.head_dim)
    v, out = (*k[:-1], w.width_v), (*q[:-1], w.width_v)
    lse = (w.num_heads_q, *lead) if w.lengths else (lead[0], w.num_heads_q, lead[1])
    sizes = ()
    if w.lengths:
        ends = ("int32", len(w.lengths) + 1)
        sizes = (ends, ends, w.seqlen_q, w.seqlen_q)
    options = {"causal": w.causal, "window": w.window}
    arguments = (out, q, k, v, out, ("float32", *lse), *sizes)
    return cuattn.explain(w.op, *arguments, **options, device=device)


PLAIN_ROWS = [
    w
    for w in ROWS.values()
    if not (w.step or w.softcap or w.alibi or w.sinks or w.bias or w.dropout_p)
]


@pytest.mark.parametrize("w", PLAIN_ROWS, ids=ids)
def test_rows_without_score_options_run_tensor_cores(w):
    assert plan_of(w, "h100").kernel == "sm90"
    assert plan_of(w, "a100").kernel == "sm80"


CALLS = {
    "cudnn": ("CUDNN_ATTENTION", "full"),
    "flash": ("FLASH_ATTENTION", "full"),
    "flash, grouped": ("FLASH_ATTENTION", "grouped"),
    "flash, window": ("FLASH_ATTENTION", "window"),
}


@pytest.mark.parametrize("case", CALLS)
def test_torch_takes_the_calls_of_cuda_peers(case):
    """On the meta device, which has the ops' signatures and shapes and no numbers."""
    backend, name = CALLS[case]
    w = next(w for w in SMOKE if w.name == name)
    x = w.draw("cpu")
    names = ("q", "k", "v", "dout")
    meta = {n: getattr(x, n).bfloat16().to("meta") for n in names}
    fake = types.SimpleNamespace(**meta, cu_seqlens=None)
    function = backward_inputs.cudnn if backend == "CUDNN_ATTENTION" else backward_inputs.flash
    if w.window != (-1, -1):
        function = backward_inputs.flash_rows
    prepared = function(w, fake)
    got = prepared.canonical(prepared.call())
    assert {n: a.shape for n, a in got.items()} == {
        "dq": x.q.shape,
        "dk": x.k.shape,
        "dv": x.v.shape,
    }


def test_a_failure_of_a_peer_is_its_own(monkeypatch):
    def broken(w, x):
        raise RuntimeError("cuDNN Frontend error: no plan")

    broken_peer = peers.Contestant("flash", broken, ops=peers.DIFFERENTIATED)
    contestants = [peers.our_contestant("auto"), broken_peer]
    run = measure.Run(devices.CpuDevice(), measure.Settings(rounds=3, heat_s=0.0), contestants)
    ours, theirs = run.row(SMOKE[0], 0.1)["results"]
    assert ours["status"] == "ok"
    assert theirs["status"] == "failed: RuntimeError: cuDNN Frontend error: no plan"


def measured(name, ms, **more):
    found = {"name": name, "ours": name.startswith("cuattn"), "ms": ms, "tflops": 1.0 / ms}
    return {**found, "rounds_ms": {"0": ms}, **more}


def test_bars_of_gradients_are_judged():
    plain = {"workload": {"name": PLAIN}, "results": [measured(OURS, 1.0)]}
    row = {"workload": {"name": "x"}}
    row["results"] = [measured(OURS, 1.25, host_us=40.0), measured("flash", 2.0, host_us=50.0)]
    judged = (
        (f"time of row {PLAIN}", 0.8, 0.8, True),
        (f"time of row {PLAIN}", 0.9, 0.8, False),
        ("time of row none", 0.8, None, None),
        ("host time", 1.0, 1.25, True),
        ("TFLOP/s", 530.0, 0.8, False),
    )
    bars.judge(tuple(bars.Bar(OURS, a, least) for a, least, *_ in judged), row, [plain], {})
    assert [(bar["value"], bar["holds"]) for bar in row["bars"]] == [j[2:] for j in judged]


def test_figures_of_flash_attention_4_follow_cudnn():
    w = ROWS["d128 s16384 full"]
    results = [measured("cudnn", 1.0, tflops=269.8), measured(OURS, 1.0, tflops=400.0)]
    row = {"workload": as_json(w), "results": results}
    published.add_bars("backward", row, {"matmul_bfloat16_tflops": 700.0}, "NVIDIA H200")
    assert row["published"].keys() == {"fa4"}
    assert row["published"]["fa4"]["tflops"] == pytest.approx(619.7 / 2)
    assert row["published"]["fa4"]["scaled_by"] == "cudnn of this row"
    assert results[1]["ratio_to_published"]["fa4"] == pytest.approx(400 * 2 / 619.7)


def test_rows_measured_apart_are_joined_and_judged_together(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    join = importlib.import_module("join")
    workloads = FAMILIES["backward_smoke"].workloads
    head = {"schema": 1, "family": "backward_smoke", "machine": {"device": "one"}, "versions": {}}
    head |= {"settings": {"rounds": 3}, "ceilings": {"copy_gbps": 1.0}, "complete": True}
    paths = [tmp_path / name for name in ("second.json", "first.json")]
    for path, part in zip(paths, (workloads[5:], workloads[:5]), strict=True):
        rows = []
        for w in part:
            ours = {"name": OURS, "ours": True, "status": "ok", "ms": 2.0, "tflops": 1.0}
            row = {"workload": as_json(w), "status": "ok", "results": [{**ours, "gbps": 1.0}]}
            bars.judge(w.bars, row, rows, head["ceilings"])
            rows.append(row)
        path.write_text(json.dumps({**head, "commit": path.stem, "rows": rows}))
    whole = join.joined(paths)
    assert [row["workload"]["name"] for row in whole["rows"]] == [w.name for w in workloads]
    assert [row["commit"] for row in whole["rows"]] == ["first"] * 5 + ["second"] * 9
    against = f"time of row {PLAIN}"
    judged = [
        bar["value"] for row in whole["rows"] for bar in row["bars"] if bar["against"] == against
    ]
    assert judged == [1.0] * 6  # the plain row is of the other file
    assert whole["complete"]
    other = json.loads(paths[1].read_text()) | {"machine": {"device": "two"}}
    paths[1].write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="must find the same machine"):
        join.joined(paths)
