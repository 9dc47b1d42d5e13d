# SPDX-License-Identifier: Apache-2.0
"""The cache operations on CUDA: what only the device sees, streams, graphs, and large caches."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import harness
from cache_cases import LAYOUTS, Write, cache_shape, copied, tables, write
from harness import Arena, Cuda, why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]

SLEEP_CYCLES = 400_000_000  # a fifth of a second or more on any GPU
I64 = np.int64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_out_of_range_is_not_written(layout, rng):
    """Far outside, just outside, and near 2^63: nothing but the good rows changes."""
    slots = rng.permutation(7 * 16)[:37].astype(I64)
    bad = [112, 113, -2, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1, 10**12]
    slots[rng.permutation(37)[: len(bad)]] = bad
    for pair in (("float16", "float16"), ("bfloat16", "float8_e4m3fn")):
        write(Cuda(), rng, Write(layout, *pair, slots=slots))


def test_positions_out_of_range_are_clamped(rng):
    case = Write("nhd", "float32")
    rope = {**tables(rng, 32), "interleaved": False}
    positions = rng.integers(0, 50, 37)
    positions[[3, 9]] = 0, 49
    slots = case.draw_slots(rng)
    k, v = (rng.standard_normal((37, 3, 64)).astype(np.float32) for _ in range(2))
    held = []
    for given in (
        positions,
        np.where(np.arange(37) == 3, -7, positions + 10**9 * (positions == 49)),
    ):
        arena = Arena(Cuda())
        caches = [arena.output((7, 16, 3, 64), np.float32) for _ in range(2)]
        arrays = [arena.put(x, align=8) for x in (k, v, slots, given)]
        placed = {name: arena.put(rope[name]) for name in ("cos", "sin")}
        cuattn.reshape_and_cache(*arrays[:2], *caches, arrays[2], **placed, positions=arrays[3])
        arena.device.synchronize()
        arena.verify()
        held.append(arena.device.numpy(caches[0]).view(np.uint32))
    assert np.array_equal(*held)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathering_by_junk_stays_inside(layout, rng):
    """Wild block ids and lengths: some rows come out, nothing else is touched."""
    device = Cuda()
    for ends in ([0, 5, 900, 20], [-7, -3, 2, 2**31 - 1], [0, 0, 0, 60], [50, 3, 2, 1]):
        arena = Arena(device)
        caches = [
            arena.put(np.ones(cache_shape(layout, 5, 16, 2, 32, np.float16, is_k), np.float16))
            for is_k in (True, False)
        ]
        table = rng.integers(-(2**31), 2**31, (3, 2)).astype(np.int32)
        outs = [arena.output((60, 2, 32), np.float16) for _ in range(2)]
        cuattn.gather_cache(
            *caches,
            arena.put(table, align=4),
            arena.put(np.array(ends, np.int32), align=4),
            kv_layout=layout,
            k_out=outs[0],
            v_out=outs[1],
        )
        device.synchronize()
        arena.verify()
        for out in outs:  # a row was copied from a block, or was left alone
            rows = device.numpy(out)
            assert ((rows == 1) | np.isnan(rows)).all()


def test_pairs_that_name_no_block_are_skipped(rng):
    cache = rng.standard_normal((9, 4, 2, 16)).astype(np.float32)
    mapping = np.array([[0, 3], [-1, 4], [1, 9], [9, 5], [2, -1], [2**40, 6], [8, 7]], I64)
    arena = Arena(Cuda())
    place = arena.output(cache.shape, cache.dtype)
    arena.device.write(place, cache)
    cuattn.copy_blocks([place], [], arena.put(mapping, align=8))
    arena.device.synchronize()
    assert np.array_equal(arena.device.numpy(place), copied(cache, mapping[[0, 6]]))
    arena.verify()


CHECKED = """
import torch, cuattn
long = lambda *values: torch.tensor(values, device="cuda")
rows = torch.ones(3, 2, 16, device="cuda")
cache, spare = torch.zeros(2, 2, 4, 2, 16, device="cuda")
table = torch.ones(3, 8, device="cuda")
def slots(*values, **rope):
    cuattn.reshape_and_cache(rows, rows, cache, spare, long(*values), **rope)
def gather(ends, blocks):
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
    blocks = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    cuattn.gather_cache(cache, cache, blocks, ends, k_out=rows.clone(), v_out=rows.clone())
def copy(*pairs): cuattn.copy_blocks([cache], [cache], torch.tensor(pairs, device="cuda"))
pair = torch.tensor([[0, 1]], device="cuda")
codes = torch.zeros(2, 2, 4, 2, 16, device="cuda").to(torch.float8_e4m3fn)
def scaled(*scales):
    scales = torch.tensor(scales, device="cuda")
    cuattn.reshape_and_cache(rows, rows, *codes, long(0, 1, 2), k_scale=scales, v_scale=scales)
calls = [
    lambda: slots(0, 8, 1),
    lambda: slots(0, -1, 1, cos=table, sin=table, positions=long(0, 9, 3)),
    lambda: gather([0, 3], [[2]]),
    lambda: gather([0, 5], [[1]]),
    lambda: copy([0, 2]),
    lambda: copy([0, 1], [0, 1]),
    lambda: scaled(2.0, 0.0),
    lambda: scaled(float("nan")),
]
for call in calls:
    try:
        call()
    except ValueError as error:
        print(error)
slots(0, -1, 7, cos=table, sin=table, positions=long(0, 9, 2))
gather([0, 3], [[1]])
copy([0, 1])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    cuattn.copy_blocks([cache], [cache], pair)
graph.replay()
torch.cuda.synchronize()
print("done")
"""

CHECKED_MESSAGES = [
    "reshape_and_cache: slot_mapping must lie within [-1, 8), got 8 at index 1; "
    "a slot is block * block_size + token, -1 skips",
    "reshape_and_cache: positions must lie within [0, 3), got 3 at index 2; "
    "cos and sin have that many rows",
    "gather_cache: block_tables must name blocks in [0, 2), got 2 at (0, 0); "
    "entries past the sequence may hold anything",
    "gather_cache: block_tables must have room for every sequence, got a length of 5 for sequence "
    "0 with 1 blocks of 4; widen the table",
    "copy_blocks: block_mapping must name destination blocks in [0, 2), got 2 in pair 0; "
    "a row is (source, destination)",
    "copy_blocks: block_mapping must name each destination once, got 1 in pairs 0 and 1; "
    "all pairs are copied at once",
    "reshape_and_cache: k_scale must be positive and finite in float32, as 1 / k_scale, got 0; "
    "value = stored * scale",
    "reshape_and_cache: k_scale must be positive and finite in float32, as 1 / k_scale, got nan; "
    "value = stored * scale",
]


def test_values_on_the_device_are_checked_on_request():
    """CUATTN_CHECK=1 reads slots, positions, tables and mappings back; else nothing breaks."""
    for checked, messages in (("1", CHECKED_MESSAGES), ("0", [])):
        environment = {**os.environ, "CUATTN_CHECK": checked}
        command = [sys.executable, "-c", CHECKED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [*messages, "done"]


def sample(torch, layout="nhd", dtype="float16"):
    """k, v, caches, slots, and a table that finds the rows again."""
    dtype = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    k, v = torch.randn(2, 40, 2, 64, device="cuda", generator=generator).to(dtype)
    caches = [
        torch.zeros(cache_shape(layout, 6, 16, 2, 64, np.float16, is_k), device="cuda", dtype=dtype)
        for is_k in (True, False)
    ]
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32, device="cuda")
    token = torch.arange(40, device="cuda")
    slots = table[0, token // 16].long() * 16 + token % 16
    return k, v, caches, slots, table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_run_behind_the_work_of_their_stream_and_do_not_wait(torch, layout):
    k, v, caches, slots, table = sample(torch, layout)
    ends = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    late = torch.zeros_like(k)
    outs = [torch.zeros_like(k) for _ in range(2)]
    mapping = torch.tensor([[4, 0]], device="cuda")
    host = cuattn.pinned_empty(caches[0].shape, np.float16)
    stream = torch.cuda.Stream()

    def are_done_before_the_device(cycles):
        host[...] = 0
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            late.copy_(k)
            cuattn.reshape_and_cache(late, v, *caches, slots, kv_layout=layout)
            cuattn.gather_cache(
                *caches, table, ends, kv_layout=layout, k_out=outs[0], v_out=outs[1]
            )
            cuattn.copy_blocks(caches[:1], caches[1:], mapping)
            cuattn.copy_blocks(caches[:1], caches[1:], np.array([[1, 5]], I64))
            cuattn.swap_blocks(caches[0], host, np.array([[0, 2], [5, 3]], I64))
            has_come = host.any()  # before the stream is asked, which may end in between
            is_busy = not stream.query()
            assert not is_busy or not has_come
        stream.synchronize()
        return is_busy

    # A busy host may be slower than the first sleep; a call that waits is slower than any.
    longer = (SLEEP_CYCLES, 10 * SLEEP_CYCLES, 50 * SLEEP_CYCLES)
    assert any(map(are_done_before_the_device, longer)), "a call waited for the device"
    assert torch.equal(outs[0], k)
    assert torch.equal(outs[1], v)
    for cache in caches:
        assert torch.equal(cache[0], cache[4])
        assert torch.equal(cache[5], cache[1])
    assert np.array_equal(host[2], caches[0][4].cpu().numpy())
    assert np.array_equal(host[3], caches[0][1].cpu().numpy())


def test_a_given_stream_is_used(torch):
    k, v, caches, slots, _ = sample(torch)
    late = torch.zeros_like(k)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        late.copy_(k)
    cuattn.reshape_and_cache(late, v, *caches, slots, stream=stream)
    cuattn.copy_blocks(caches, None, np.array([[4, 0]], I64), stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(caches[0].view(-1, 2, 64)[slots], k)
    assert torch.equal(caches[0][0], caches[0][4])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_captured_and_replayed_with_new_slots(torch, layout):
    k, v, caches, slots, table = sample(torch, layout)
    ends = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    outs = [torch.zeros_like(k) for _ in range(2)]
    mapping = torch.tensor([[4, 0], [-1, -1]], device="cuda")
    host_mapping = np.array([[0, 5]], I64)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        cuattn.reshape_and_cache(k, v, *caches, slots, kv_layout=layout)
        cuattn.copy_blocks(caches[:1], caches[1:], mapping)
        cuattn.copy_blocks(caches[:1], caches[1:], host_mapping)
        cuattn.gather_cache(*caches, table, ends, kv_layout=layout, k_out=outs[0], v_out=outs[1])
    host_mapping[:] = -1  # the graph holds its own
    for step, blocks in enumerate(([4, 1, 3], [2, 3, 1], [1, 2, 4])):
        k.normal_()
        table.copy_(torch.tensor([blocks], dtype=torch.int32))
        token = torch.arange(40, device="cuda")
        slots.copy_(table[0, token // 16].long() * 16 + token % 16)
        ends.copy_(torch.tensor([0, 40 - step], dtype=torch.int32))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for out, rows in zip(outs, (k, v), strict=True):
            assert torch.equal(out[: 40 - step], rows[: 40 - step])
            assert torch.isnan(out[40 - step :]).all()
        for cache in caches:
            assert torch.equal(cache[0], cache[4])
            assert torch.equal(cache[5], cache[0])
        for cache in caches:
            cache.zero_()


def test_under_capture_the_total_must_be_known(torch):
    _, _, caches, _, table = sample(torch)
    ends = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        harness.capturing(graph),
        pytest.raises(ValueError, match=r"^gather_cache: k_out and v_out must be given under"),
    ):
        cuattn.gather_cache(*caches, table, ends)


@pytest.mark.parametrize("order", ["neighbours", "scattered"])
def test_swapping_overlaps_with_other_streams(torch, order):
    """A copy to pinned memory is done while a kernel of another stream still sleeps."""
    cache = torch.randn(64, 16, 2, 64, device="cuda")
    host = cuattn.pinned_empty((64, 16, 2, 64), np.float32)
    blocks = np.random.default_rng(0).permutation(64) if order == "scattered" else np.arange(64)
    pairs = np.stack([blocks, blocks], axis=1)
    busy, copies = torch.cuda.Stream(), torch.cuda.Stream()
    cuattn.swap_blocks(cache, host, pairs)  # kernels are loaded on first use, which may wait
    torch.cuda.synchronize()
    host[...] = 0
    with torch.cuda.stream(busy):
        torch.cuda._sleep(SLEEP_CYCLES)
    with torch.cuda.stream(copies):
        cuattn.swap_blocks(cache, host, pairs)
    copies.synchronize()
    assert not busy.query()
    assert np.array_equal(host, cache.cpu().numpy())


def test_cupy_arrays(torch):
    cupy = pytest.importorskip("cupy")
    k, v, caches, slots, table = sample(torch)
    want = [x.clone() for x in caches]
    cuattn.reshape_and_cache(k, v, *want, slots)
    torch.cuda.synchronize()
    theirs = [cupy.from_dlpack(x) for x in (k, v, *caches, slots, table)]
    result = cuattn.reshape_and_cache(*theirs[:5])
    assert result[0] is theirs[2]
    out = cuattn.gather_cache(*theirs[2:4], theirs[5], cupy.array([0, 40], "int32"))
    cupy.cuda.get_current_stream().synchronize()
    assert type(out[0]) is cupy.ndarray
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache, expected)
    assert torch.equal(torch.from_dlpack(out[0]), k)


def test_the_host_does_not_stand_in_for_the_device(torch):
    k, v, caches, slots, table = sample(torch)
    with pytest.raises(
        ValueError, match=r"^reshape_and_cache: slot_mapping must be on cuda:0 like"
    ):
        cuattn.reshape_and_cache(k, v, *caches, slots.cpu())
    with pytest.raises(ValueError, match=r"^reshape_and_cache: v_cache must be on cuda:0 like k"):
        cuattn.reshape_and_cache(k, v, caches[0], caches[1].cpu(), slots)
    with pytest.raises(ValueError, match=r"^swap_blocks: block_mapping must be on the host"):
        cuattn.swap_blocks(caches[0], caches[1], torch.tensor([[0, 1]], device="cuda"))
    with pytest.raises(ValueError, match=r"^gather_cache: block_tables must be on cuda:0"):
        cuattn.gather_cache(*caches, table.cpu(), table[0, :2].contiguous())


def test_blocks_that_are_written_by_rows_start_on_16_bytes(torch):
    memory = torch.zeros(4 * 4 * 2 * 16 + 8, device="cuda", dtype=torch.float16)
    off = memory[4:-4].view(4, 4, 2, 16)
    k = torch.zeros(1, 2, 16, device="cuda", dtype=torch.float16)
    slot = torch.zeros(1, device="cuda", dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^reshape_and_cache: k_cache must start on 16 bytes"):
        cuattn.reshape_and_cache(k, k, off, torch.zeros_like(off), slot)
