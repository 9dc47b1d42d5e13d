# SPDX-License-Identifier: Apache-2.0
"""The benchmark of latents, rotation, fused operations and variants: results and counts."""

import pytest

import frameworks
from cuattn._bench import bars, devices, measure, peers
from cuattn._bench.families import FAMILIES
from cuattn._bench.mla import MlaWorkload

torch = frameworks.require("torch")

FORMS = ("explicit", "absorbed")
SMOKE = [w for name in ("mla_smoke", "fused_smoke") for w in FAMILIES[name].workloads]
VARIANTS = FAMILIES["variants_smoke"].workloads


def row_of(w, backends, others=()) -> dict:
    contestants = [peers.our_contestant(name) for name in backends]
    contestants += [peers.PEERS[name] for name in others]
    settings = measure.Settings(rounds=3, heat_s=0.0)
    return measure.Run(devices.CpuDevice(), settings, contestants).row(w, 0.1)


def served_by(w) -> set[str]:
    """Who has to be measured on a row, beside `auto`."""
    if w.op == "mla_attention":
        return {"cuattn:explicit", "cuattn:absorbed", "eager"}
    if w.op == "mla_decode":
        return {"cuattn:invariant"} | ({"eager"} if w.name == "decode, equal" else set())
    if w.op == "attention_rope":
        return {"cuattn:unfused", "cuattn:plain"}
    if w.op == "append_attention":
        return {"cuattn:unfused"}
    apart = {"cuattn:unfused"} if getattr(w, "residual", False) else set()
    copied = set() if w.op in ("sample", "mla_project") else {"memcpy"}
    return {"eager"} | apart | copied


@pytest.mark.parametrize("workload", SMOKE, ids=lambda w: w.name)
def test_everybody_who_serves_a_row_gets_it_right(workload):
    row = row_of(workload, ("auto", "invariant", "unfused", "plain", *FORMS), ("eager", "memcpy"))
    right = {result["name"] for result in row["results"] if result["status"] == "ok"}
    assert right == {"cuattn:auto"} | served_by(workload)
    rest = [r["status"] for r in row["results"] if r["name"] not in right]
    assert all(status.startswith("unsupported") for status in rest)


def spoilt(result):
    """The same result with one wrong element."""
    if isinstance(result, (list, tuple)):
        return [spoilt(result[0]), *result[1:]]
    wrong = result.clone().flatten()
    wrong[0] = -1 if wrong.dtype == torch.int32 else wrong[0] + 0.5
    return wrong.view(result.shape)


@pytest.mark.parametrize("workload", SMOKE, ids=lambda w: w.name)
def test_the_check_sees_one_wrong_element(workload):
    x = workload.draw("cpu")
    sample = x.sample()
    prepared = peers.our_contestant("auto").prepare(workload, x)
    result = prepared.call()
    assert sample.error(prepared.canonical(result)).ok
    assert not sample.error(prepared.canonical(spoilt(result))).ok


def test_an_append_that_writes_nothing_is_wrong():
    w = next(w for w in SMOKE if w.op == "append_attention")
    x = w.draw("cpu")
    sample = x.sample()
    call = peers.our_contestant("unfused").prepare(w, x).call
    x.write = lambda *caches: None
    assert not sample.error(call()).ok


def test_a_token_that_the_filter_takes_away_is_wrong():
    w = next(w for w in SMOKE if w.name == "sample top_k")
    x = w.draw("cpu")
    (logits,) = x.sets[0]
    fourth = logits.topk(w.top_k + 1).indices
    assert x.sample().error(fourth[:, -2]).ok
    assert not x.sample().error(fourth[:, -1]).ok


@pytest.mark.parametrize("workload", VARIANTS, ids=lambda w: w.name)
def test_variants_are_measured_by_those_they_name(workload):
    row = row_of(workload, ("auto", "v1", "v2", "naive", "unfused"), ("eager",))
    names = {r["name"].removeprefix("cuattn:") for r in row["results"] if r["status"] == "ok"}
    assert names - {"eager"} == set(workload.backends) - {"cublas", "tiled", "simt", "sm80"}
    assert workload.use


def test_bars_of_the_families_name_rows_and_contestants():
    """A bar against a row that is not there would never be judged."""
    for name in ("mla", "rope", "fused", "variants"):
        family, before = FAMILIES[name], []
        known = {f"cuattn:{b}" for b in family.backends} | {*family.peers}
        for w in family.workloads:
            for bar in w.bars:
                against = bar.against.removeprefix("time of ").removeprefix("row ")
                is_row = against != bar.against
                words = {"best peer", "copy", "TFLOP/s", "microseconds", *known}
                assert (against in before) if is_row else (against in words), (w.name, bar)
                assert bar.ours in known
            before.append(w.name)
    assert bars.NOISE < 1


def test_work_of_latents_is_counted():
    decode = MlaWorkload("", (4096,) * 128, 128)
    assert decode.bytes == 128 * 4096 * 576 * 2
    assert decode.flops == 2 * 128 * 128 * 4096 * (576 + 512)
    prompt = MlaWorkload("", (4,), 2, q_len=4, op="mla_attention")
    assert prompt.flops == 4 * 4 * 2 * 512 * 128 + 2 * 2 * 10 * (192 + 128)
    project = MlaWorkload("", (1,), 3, q_len=5, op="mla_project")
    assert project.flops == 2 * 3 * 5 * 512 * 128
    norm = next(w for w in FAMILIES["fused"].workloads if w.name == "rms_norm 4096, residual")
    assert norm.bytes == 4 * 16384 * 4096 * 2
    act = next(w for w in FAMILIES["fused"].workloads if w.op == "act_mul")
    assert act.bytes == 3 * 8192 * 14336 * 2
