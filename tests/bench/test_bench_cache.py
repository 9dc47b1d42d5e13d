# SPDX-License-Identifier: Apache-2.0
"""The benchmark of cache operations: bytes counted, what was moved checked."""

import dataclasses

import pytest

import frameworks
from cuattn._bench import devices, measure, peers
from cuattn._bench.families import FAMILIES

torch = frameworks.require("torch")

SMOKE = FAMILIES["cache_smoke"].workloads


def ids(w):
    return w.name


@pytest.mark.parametrize("workload", SMOKE, ids=ids)
def test_every_operation_leaves_what_it_must(workload):
    contestants = [peers.our_contestant("auto"), peers.our_contestant("v1"), peers.PEERS["memcpy"]]
    settings = measure.Settings(rounds=3, heat_s=0.0)
    row = measure.Run(devices.CpuDevice(), settings, contestants).row(workload, 0.1)
    ours, other, copy = (result["status"] for result in row["results"])
    assert (ours, copy) == ("ok", "ok")
    assert other.startswith("unsupported")
    assert row["best_peer"] == "memcpy"
    assert row["results"][0]["ratio_to_best_peer"] > 0


@pytest.mark.parametrize("workload", SMOKE, ids=ids)
def test_the_check_sees_one_wrong_element(workload):
    x = workload.draw("cpu")
    prepared = peers.our_contestant("auto").prepare(workload, x)
    pairs = prepared.canonical(prepared.call())
    sample = x.sample()
    assert sample.error(pairs).ok
    for got, expected in pairs:
        assert got.numel() > 0
        assert got.shape == expected.shape
        wrong = got.clone().flatten()
        wrong[-1] = 77 if workload.op == "swap_blocks" else 7.0
        pair = (wrong.view(got.shape), expected)
        assert not sample.error([pair]).ok
    if pairs[0][0].is_floating_point() and pairs[0][0].dtype != torch.float8_e4m3fn:
        missing = torch.full_like(pairs[0][0], torch.nan)
        assert not sample.error([(missing, pairs[0][1])]).ok


@pytest.mark.parametrize("workload", SMOKE, ids=ids)
def test_nothing_is_right_before_the_call(workload):
    """So the check looks at what the call does, and not at the arrays as they were drawn."""
    x = workload.draw("cpu")
    prepared = peers.our_contestant("auto").prepare(workload, x)
    if workload.op in ("copy_blocks", "swap_blocks"):
        assert not x.sample().error(prepared.canonical(None)).ok
        return
    outs = prepared.call()
    for out in outs:
        out.copy_(torch.zeros_like(out))
    assert not x.sample().error(prepared.canonical(outs)).ok


@pytest.mark.parametrize("layout", ["nhd", "vllm"])
def test_a_rotated_float8_is_rounded_once(layout):
    """Through bfloat16, one element in 32 would fall on the other side."""
    whole = next(
        w for w in FAMILIES["cache"].workloads if w.name == f"write {layout}, RoPE, bf16 to e4m3"
    )
    workload = dataclasses.replace(whole, tokens=512)
    x = workload.draw("cpu")
    prepared = peers.our_contestant("auto").prepare(workload, x)
    for got, expected in prepared.canonical(prepared.call()):
        assert torch.equal(got.float(), expected.float())


def test_bytes_count_both_sides():
    write = next(w for w in FAMILIES["cache"].workloads if w.name == "write nhd, bf16 to e4m3")
    assert write.bytes == 65536 * 8 * 128 * 2 * (2 + 1)
    gather = next(w for w in FAMILIES["cache"].workloads if w.name == "gather nhd")
    assert gather.bytes == 65536 * 8 * 128 * 2 * (2 + 2)
    copy = next(w for w in FAMILIES["cache"].workloads if w.op == "copy_blocks")
    assert copy.bytes == 32 * 256 * 16 * 8 * 128 * 2 * (2 + 2)
    swap = next(w for w in FAMILIES["cache"].workloads if w.op == "swap_blocks")
    assert swap.bytes == 1024 * 16 * 8 * 128 * 2
    wide = dataclasses.replace(write, cache_dtype="float32", dtype="float32")
    assert wide.bytes == 65536 * 8 * 128 * 2 * 8


def test_layouts_dtypes_and_operations_of_the_family():
    rows = FAMILIES["cache"].workloads
    for op in ("reshape_and_cache", "gather_cache"):
        assert {w.kv_layout for w in rows if w.op == op} == {"nhd", "hnd", "vllm"}
    assert {w.op for w in rows} == {
        "reshape_and_cache",
        "gather_cache",
        "copy_blocks",
        "swap_blocks",
    }
    assert {w.to_host for w in rows if w.op == "swap_blocks"} == {True, False}
