# SPDX-License-Identifier: Apache-2.0
"""The benchmark of float8: codes that everybody gets, the bounds of the check, who runs a row."""

import dataclasses
import types

import numpy as np
import pytest

import cuattn
import float8_model
import frameworks
from cuattn._bench import bars, devices, measure, peers
from cuattn._bench.families import FAMILIES
from cuattn._bench.float8 import BEST, BF16, FAST, OURS, QUANTISED, Float8Workload
from cuattn._bench.float8 import ROWS as BY_ROWS

torch = frameworks.require("torch")
inputs = pytest.importorskip("cuattn._bench.float8_inputs")

SMOKE = FAMILIES["fp8_smoke"].workloads
ATTENDING = [w for w in SMOKE if w.op == "float8_attention"]
QUANTISING = [w for w in SMOKE if w.op == "quantize"]
ROWS = {w.name: w for w in FAMILIES["fp8"].workloads}
FA3 = ("fa3", "fa3_columns")


def ids(w):
    return w.name


def statuses(workload, ours, others):
    contestants = [peers.our_contestant(name) for name in ours]
    contestants += [peers.PEERS[name] for name in others]
    settings = measure.Settings(rounds=3, calls=1, heat_s=0.0)
    row = measure.Run(devices.CpuDevice(), settings, contestants).row(workload, 0.02)
    return {result["name"]: result["status"] for result in row["results"]}


@pytest.mark.parametrize("workload", ATTENDING, ids=ids)
def test_everybody_who_serves_a_row_gets_it_right(workload):
    ours = ("auto", "rows", "naive", "bf16", "quantised", "fast")
    found = statuses(workload, ours, (*FA3, "memcpy"))
    for name in (OURS, BY_ROWS, "cuattn:naive", BF16, QUANTISED, FAST):
        assert found[name] == "ok"
    assert all(found[name] == "unsupported: needs CUDA tensors" for name in FA3)
    assert "memcpy" not in found


@pytest.mark.parametrize("workload", QUANTISING, ids=ids)
def test_codes_are_right_and_a_copy_stands_beside_them(workload):
    found = statuses(workload, ("auto", "bf16"), ("fa3", "memcpy"))
    assert found.pop(BF16).startswith("unsupported")
    assert found == {OURS: "ok", "memcpy": "ok"}


@pytest.mark.parametrize("backend", ["auto", "bf16", "quantised"])
@pytest.mark.parametrize("name", ["d64 s2048 full", "d128 s8192 causal", "32/8 heads s8192 causal"])
def test_the_check_sees_one_wrong_row(name, backend):
    w = next(w for w in SMOKE if w.name == name)
    x = w.draw("cpu")
    sample = x.sample()
    prepared = peers.our_contestant(backend).prepare(w, x)
    out = prepared.call()
    assert sample.error(prepared.canonical(out)).ok
    for value in (0.0, out[0, 0, 0], np.nan):  # of the last row, whose results are small
        wrong = out.clone()
        wrong[-1, -1, -1] = value
        error = sample.error(prepared.canonical(wrong))
        slack = 1 if backend == "quantised" else measure.PEER_SLACK
        assert not error.max_error <= slack * error.allowed
    other = cuattn.attention(*x.codes.arrays, **x.codes.scales, causal=not w.causal)
    assert not sample.error(prepared.canonical(other)).ok


def test_codes_that_mean_other_numbers_are_seen():
    w = ATTENDING[2]
    x = w.draw("cpu")
    sample = x.sample()
    for name in ("q_scale", "k_scale", "v_scale"):
        scales = {**x.codes.scales, name: x.codes.scales[name] * 1.5}
        assert not sample.error((inputs.CODES, cuattn.attention(*x.codes.arrays, **scales))).ok
    right = cuattn.attention(x.q, x.k, x.v)
    assert sample.error((inputs.NUMBERS, right)).ok
    assert not sample.error((inputs.NUMBERS, x.codes.attention())).ok  # 16 bits may not err so much


def by_tensor_cores(w, x, sample, tile):
    """Make the rows of a sample as a Hopper's products of float8 do, sums of `tile` keys each."""
    out = torch.zeros(w.batch, w.seqlen_q, w.num_heads_q, w.head_dim)
    for (b, h), rows in sample.rows.items():
        codes = [code[b, :, h].float().numpy().astype(np.float64) for code in x.codes.arrays]
        q, k, v = codes[0][rows], *codes[1:]
        scales = [scale[b, h].item() for scale in x.codes.scales.values()]
        s = float8_model.product(q, k) * (w.head_dim**-0.5 * scales[0] * scales[1])
        if w.causal:
            s = np.where(np.arange(w.seqlen_kv) <= rows[:, None], s, -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        codes_p = inputs.to_e4m3(16 * p).astype(np.float64) / 16
        tiles = [slice(begin, begin + tile) for begin in range(0, w.seqlen_kv, tile)]
        sums = sum(float8_model.product(codes_p[:, at], v[at].T) for at in tiles)
        sums *= scales[2] / p.sum(axis=1, keepdims=True)
        out[b, rows, h] = torch.from_numpy(sums).float()
    return out.bfloat16()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [128, 1024], ids=["exact", "fast"])
def test_what_tensor_cores_make_of_it_is_within_the_bounds(tile, causal):
    w = Float8Workload("", 1, 1024, 1024, 2, 2, 64, causal=causal)
    x = w.draw("cpu")
    sample = x.sample()
    assert sample.error((inputs.CODES, by_tensor_cores(w, x, sample, tile))).ok


def test_sums_of_one_level_are_checked_as_those_of_a_peer():
    assert peers.our_contestant("auto").has_our_sums
    assert not peers.our_contestant("fast").has_our_sums


@pytest.mark.parametrize("name", FA3)
@pytest.mark.parametrize("workload", [ATTENDING[3], ATTENDING[-1]], ids=ids)
def test_fa3_gets_the_same_codes_and_scales_in_its_shapes(monkeypatch, workload, name):
    x, seen = workload.draw("cpu"), []

    def flash_attn_func(q, k, v, causal=False, q_descale=None, k_descale=None, v_descale=None):
        scales = (q_descale, k_descale, v_descale)
        assert {s.shape for s in scales} == {(workload.batch, workload.num_heads_kv)}
        assert {s.dtype for s in scales} == {torch.float32}
        assert {a.dtype for a in (q, k, v)} == {torch.float8_e4m3fn}
        seen.append((v.stride(1), v.stride(3)))
        words = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        return cuattn.attention(q, k, v, causal=causal, **words), None

    library = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(inputs, "module", lambda *names: library)
    on_cuda = types.SimpleNamespace(q=types.SimpleNamespace(is_cuda=True), codes=x.codes)
    prepared = peers.PEERS[name].prepare(workload, on_cuda)
    assert x.sample().error(prepared.canonical(prepared.call())).ok
    row, dim = seen[0]
    assert (row == 1, dim == 1) == ((True, False) if name == "fa3_columns" else (False, True))
    library.flash_attn_func = lambda q, k, v, causal=False: None
    with pytest.raises(inputs.Unsupported, match="no descales"):
        peers.PEERS[name].prepare(workload, on_cuda)


def test_a_build_of_fa3_without_float8_is_told(monkeypatch):
    monkeypatch.setattr(peers, "fa3_built_without", lambda: {"FP8"})
    on_cuda = types.SimpleNamespace(q=types.SimpleNamespace(is_cuda=True))
    with pytest.raises(inputs.Unsupported, match="no float8"):
        peers.PEERS["fa3"].prepare(ATTENDING[0], on_cuda)


def test_fast_asks_for_sums_of_one_level(monkeypatch):
    w, seen, attend = ATTENDING[0], [], cuattn.attention

    def attention(q, k, v, *, accumulate="exact", **options):
        seen.append(accumulate)
        return attend(q, k, v, **options)

    def explain(op, *arrays, accumulate="exact", **options):
        seen.append(accumulate)
        return types.SimpleNamespace(kernel="sm90", workspace_bytes=0)

    monkeypatch.setattr(cuattn, "attention", attention)
    monkeypatch.setattr(cuattn, "explain", explain)
    x = w.draw("cpu")
    for backend in ("fast", "auto"):
        prepared = peers.our_contestant(backend).prepare(w, x)
        assert x.sample().error(prepared.canonical(prepared.call())).ok
    assert seen == ["fast", "fast", "exact", "exact"]


def test_quantised_makes_its_codes_in_every_call(monkeypatch):
    w = ATTENDING[1]
    x, calls, quantize = w.draw("cpu"), [], cuattn.quantize
    monkeypatch.setattr(cuattn, "quantize", lambda *qkv, mode: calls.append(qkv) or quantize(*qkv))
    prepared = peers.our_contestant("quantised").prepare(w, x)
    assert not calls
    for _ in range(2):
        out = prepared.call()
    assert len(calls) == 2
    assert all(a is b for a, b in zip(calls[0], (x.q, x.k, x.v), strict=True))
    assert torch.equal(out, x.codes.attention(causal=w.causal))
    assert prepared.bytes > w.bytes  # it reads 16 bits


@pytest.mark.parametrize("workload", QUANTISING, ids=ids)
def test_the_check_sees_what_is_wrong_with_codes(workload):
    x = workload.draw("cpu")
    prepared = peers.our_contestant("auto").prepare(workload, x)
    qkv, made = prepared.call()
    sample = x.sample()
    assert sample.error(prepared.canonical((qkv, made))).ok
    options = {"mode": workload.mode, "smooth_k": workload.smooth_k}
    other = cuattn.quantize(*qkv, hadamard=not workload.hadamard, **options)
    kept = cuattn.quantize(*qkv, mode=workload.mode, smooth_k=not workload.smooth_k)
    wrong = [
        dataclasses.replace(made, q=other.q, q_scale=other.q_scale),  # not rotated as k is
        dataclasses.replace(made, k=made.k.roll(1, 1)),
        dataclasses.replace(made, v_scale=made.v_scale * 1.2),
        dataclasses.replace(made, v=made.v.roll(1, 1)),
        dataclasses.replace(made, v_scale=made.v_scale * torch.nan),
    ]
    if workload.smooth_k:
        wrong.append(dataclasses.replace(made, lse_shift=2 * made.lse_shift))
        wrong.append(dataclasses.replace(made, k=kept.k, k_scale=kept.k_scale))
    for each in wrong:
        error = sample.error(prepared.canonical((qkv, each)))
        assert not error.max_error <= error.allowed


def test_a_copy_is_of_as_many_bytes_as_quantising_touches():
    w = FAMILIES["quantize"].workloads[0]
    assert w.bytes == 3 * 2 * 8192 * 16 * 128 * (2 + 1)
    small = QUANTISING[0]
    source, target = peers.memcpy(small, small.draw("cpu")).call()
    assert source.numel() + target.numel() == small.bytes


def test_rows_of_the_family():
    forward = {w.name: w for w in FAMILIES["forward"].workloads if w.seqlen_q > 512}
    assert ROWS.keys() == forward.keys() | {"32/8 heads s8192 causal"}
    assert all(w.batch * w.seqlen_q == 16384 for w in ROWS.values())
    assert all(ROWS[name].flops == w.flops for name, w in forward.items())
    w = ROWS["d128 s8192 full"]
    assert w.bytes == 2 * 8192 * 16 * 128 * (3 + 2)
    assert ROWS["32/8 heads s8192 causal"].bytes == 2 * 8192 * 128 * (32 + 2 * 8 + 2 * 32)
    assert w.series == "e4m3, 16 heads, d128, full"


@pytest.mark.parametrize("w", ROWS.values(), ids=ids)
def test_a_row_runs_the_same_function_on_a_hopper(w):
    """No row measures another kernel than that for float8."""
    rows = ("float8_e4m3fn", w.batch, w.seqlen_q)
    arrays = [(*rows, heads, w.head_dim) for heads in (w.num_heads_q, *(w.num_heads_kv,) * 2)]
    scale = ("float32", w.batch, w.num_heads_kv)
    scales = {f"{name}_scale": scale for name in "qkv"}
    plan = cuattn.explain("attention", *arrays, causal=w.causal, **scales, device="h100")
    assert (plan.kernel, "codes become" in plan.ladder) == ("sm90", False)


def wanted(name):
    return {(bar.ours, bar.against): bar.least for bar in ROWS[name].bars}


def test_bars_of_the_rows():
    always = {(OURS, FAST): 0.9, (BY_ROWS, OURS): 0.96}
    for name in ("d128 s16384 full", "d128 s16384 causal"):
        assert wanted(name) == {(FAST, BEST): 1.1, (OURS, BEST): 1.0, **always}
    for name in ("d128 s8192 full", "32/8 heads s8192 causal"):
        least = {(FAST, BEST): 1.1, (OURS, BEST): 1.0, (QUANTISED, BF16): 1.12}
        assert wanted(name) == {**least, **always}
    assert wanted("d64 s2048 full") == {(FAST, BEST): 1.1, **always}
    assert wanted("d64 s16384 full") == {(FAST, BEST): 1.05, **always}
    assert wanted("d256 s16384 causal") == {(FAST, BEST): 1.05, (OURS, BF16): 1.0, **always}
    assert {bar.least for w in FAMILIES["quantize"].workloads for bar in w.bars} == {0.85}


def test_bars_are_judged_by_names_that_are_measured():
    family = FAMILIES["fp8"]
    ours = {peers.our_contestant(backend).name for backend in family.backends}
    for w in family.workloads:
        for bar in w.bars:
            assert bar.ours in ours
            assert bar.against in {BEST, *ours}
    w = ROWS["d128 s16384 full"]
    timed = [(OURS, 1.0, 1.05), (FAST, 0.95, 1.05 / 0.95), ("fa3", 1.05, None)]
    results = [
        {"name": name, "ours": name != "fa3", "ms": ms, "rounds_ms": {"0": ms}}
        | ({} if ratio is None else {"ratio_to_best_peer": ratio})
        for name, ms, ratio in timed
    ]
    row = {"results": results}
    bars.judge(w.bars, row, [], {})
    assert [(bar["least"], bar["holds"]) for bar in row["bars"]] == [
        (1.1, True),
        (0.9, True),
        (0.96, None),  # nobody has measured it
        (1.0, True),
    ]
