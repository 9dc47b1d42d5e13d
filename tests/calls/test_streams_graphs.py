# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, streams and threads.

A call runs on the caller's stream, in order, and waits for nothing.
"""

from __future__ import annotations

import concurrent.futures
import gc
import math
import re
import time

import pytest

import cuattn
import harness
from cases import TENSOR_CORE_BACKENDS
from harness import free_bytes, has_hopper, why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]

CASES = {
    "sm80": dict(dtype="float16"),
    "sm80_scored": dict(dtype="bfloat16", backend="sm80", softcap=20.0),
    "simt": dict(dtype="float32"),
    "tiled": dict(dtype="float16"),
    "naive": dict(dtype="float32"),
    "cublas": dict(dtype="float16"),
}
if has_hopper():  # one kernel, four ways: tiles in a fixed order, scored, keys split, tiles drawn
    CASES |= {
        "sm90": dict(dtype="float16"),
        "sm90_scored": dict(dtype="bfloat16", backend="sm90", softcap=20.0),
        "sm90_split": dict(dtype="bfloat16", backend="sm90", num_splits=2),
        "sm90_drawn": dict(dtype="bfloat16", backend="sm90", batch=60),
    }
TENSOR_CORES = [name for name in TENSOR_CORE_BACKENDS if name in CASES]
every_case = pytest.mark.parametrize("name", CASES)
SLEEP = 200_000_000  # clock cycles, about 0.1 s


def make(torch, name, seed=0, seqlen=150):
    options = {"backend": name, "causal": True, **CASES[name]}
    dtype, batch = getattr(torch, options.pop("dtype")), options.pop("batch", 2)
    generator = torch.Generator("cuda").manual_seed(seed)
    arrays = [
        torch.randn((batch, seqlen, heads, 64), device="cuda", dtype=dtype, generator=generator)
        for heads in (4, 2, 2)
    ]
    return arrays, options


@every_case
def test_a_captured_call_replays_on_new_data(torch, name):
    arrays, options = make(torch, name)
    cuattn.attention(*arrays, **options)  # cublas makes its handle outside capture
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = cuattn.attention(*arrays, **options, return_lse=True)
    gc.collect()  # nothing that the graph needs may hang on a Python object
    before = None
    for seed in range(20):
        fresh, _ = make(torch, name, seed)
        for x, values in zip(arrays, fresh, strict=True):
            x.copy_(values)
        expected, expected_lse = cuattn.attention(*fresh, **options, return_lse=True)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        if seed == 5:
            before = free_bytes(torch)
    assert free_bytes(torch) >= before - (2 << 20)


@pytest.mark.parametrize("name", [*TENSOR_CORES, "simt", "tiled", "naive"])
def test_lengths_may_change_between_replays(torch, name):
    """cu_seqlens are read on the device: the same graph serves other lengths within its bounds."""
    (q, k, v), options = make(torch, name)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    ends = torch.tensor([0, 150, 300], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    cuattn.attention_varlen(q, k, v, ends, ends, 300, 300, **options)
    with harness.capturing(graph):
        out = cuattn.attention_varlen(q, k, v, ends, ends, 300, 300, **options)
    for lengths in (
        (0, 150, 300),
        (0, 0, 300),
        (0, 1, 300),
        (0, 299, 300),
        (0, 77, 200),
        (0, 0, 0),
    ):
        ends.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected = cuattn.attention_varlen(q, k, v, ends, ends, 300, 300, **options)
        rows = lengths[-1]
        assert torch.equal(out[:rows], expected[:rows])
        assert torch.isfinite(out[:rows]).all()
        assert torch.isnan(out[rows:]).all()  # rows of no sequence are not written


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_capture_needs_no_warm_up_but_for_cublas(torch, name):
    arrays, options = make(torch, name, seqlen=33)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out = cuattn.attention(*arrays, **options)
    graph.replay()
    assert torch.equal(out, cuattn.attention(*arrays, **options))


def test_merge_states_can_be_captured(torch):
    out, lse = torch.randn(2, 7, 3, 64, device="cuda"), torch.randn(2, 3, 7, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        merged, merged_lse = cuattn.merge_states(out, lse, out + 1, lse)
    graph.replay()
    torch.testing.assert_close(merged, out + 0.5)
    torch.testing.assert_close(merged_lse, lse + 0.6931472)


@every_case
def test_the_host_does_not_wait_and_the_stream_is_kept(torch, name):
    """On a side stream behind a sleep: the call returns at once and sees what comes before it."""
    arrays, options = make(torch, name)
    expected = cuattn.attention(*arrays, **options)
    stream = torch.cuda.Stream()
    elapsed = []
    for _ in range(3):  # one of three must not wait: other test processes may hold the host
        later = [torch.full_like(x, float("nan")) for x in arrays]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            for x, values in zip(later, arrays, strict=True):
                x.copy_(values, non_blocking=True)
            start = time.perf_counter()
            out = cuattn.attention(*later, **options)
            elapsed.append(time.perf_counter() - start)
            if stream.query():
                elapsed[-1] = math.inf
        stream.synchronize()
        assert torch.equal(out, expected)
    assert min(elapsed) < 0.05, f"the calls waited for the device: {elapsed} s"


@every_case
def test_an_explicit_stream_is_used(torch, name):
    arrays, options = make(torch, name)
    expected = cuattn.attention(*arrays, **options)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in (side, side.cuda_stream):
        out = torch.empty_like(arrays[0])
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP // 10)
            out.fill_(float("nan"))
        cuattn.attention(*arrays, **options, out=out, stream=stream)  # ordered behind the fill
        side.synchronize()
        assert torch.equal(out, expected)


@every_case
def test_two_streams_at_once(torch, name):
    (first, options), (second, _) = make(torch, name, 1), make(torch, name, 2)
    expected = [cuattn.attention(*x, **options) for x in (first, second)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for _ in range(24):
        for stream, arrays in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                results.append(cuattn.attention(*arrays, **options))
    torch.cuda.synchronize()
    for i, out in enumerate(results):
        assert torch.equal(out, expected[i % 2])


@every_case
def test_eight_threads(torch, name):
    problems = [make(torch, name, seed)[0] for seed in range(8)]
    options = make(torch, name)[1]
    expected = [cuattn.attention(*arrays, **options) for arrays in problems]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(60):
                out = cuattn.attention(*problems[index], **options)
                torch.cuda.current_stream().synchronize()
                assert torch.equal(out, expected[index])

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))  # raises what a thread raised


@pytest.mark.parametrize("name", [*TENSOR_CORES, "simt"])
def test_a_thread_whose_first_call_is_ours(torch, name):
    """Nothing has given the thread a CUDA context before."""
    arrays, options = make(torch, name)
    expected = cuattn.attention(*arrays, **options)
    out = torch.empty_like(expected)
    stream = torch.cuda.current_stream().cuda_stream
    torch.cuda.synchronize()

    def work():
        cuattn.attention(*arrays, **options, out=out, stream=stream)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@every_case
def test_a_thousand_calls_do_not_grow_device_memory(torch, name):
    arrays, options = make(torch, name)
    for _ in range(20):
        cuattn.attention(*arrays, **options)
    gc.collect()  # what earlier tests left in cycles is not freed between the two
    torch.cuda.synchronize()
    allocated, free = torch.cuda.memory_allocated(), free_bytes(torch)
    for _ in range(1000):
        cuattn.attention(*arrays, **options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert free_bytes(torch) >= free - (32 << 20)


@every_case
def test_busy_repeats_give_the_same_bits(torch, name):
    """100 repeats while another stream keeps the device busy."""
    arrays, options = make(torch, name, seqlen=257)
    expected = cuattn.attention(*arrays, **options)
    noise = torch.randn(2048, 2048, device="cuda")
    busy = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(busy):
            noise @ noise
        assert torch.equal(cuattn.attention(*arrays, **options), expected)


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_the_current_device_stays_current(torch, name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arrays, options = make(torch, name)
    expected = cuattn.attention(*arrays, **options)
    elsewhere = [x.to("cuda:1") for x in arrays]
    out = cuattn.attention(*elsewhere, **options)
    assert torch.cuda.current_device() == 0
    assert out.device.index == 1
    assert torch.equal(out.cpu(), expected.cpu())
    message = "attention: k must be on cuda:0 like q, got cuda:1; move it there"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cuattn.attention(arrays[0], elsewhere[1], arrays[2])


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_a_generous_bound_costs_no_wrong_rows(torch, name):
    """max_seqlen far above the lengths, as serving engines pass it."""
    arrays, options = make(torch, name)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays)
    ends = torch.tensor([0, 150, 300], dtype=torch.int32, device="cuda")
    tight = cuattn.attention_varlen(q, k, v, ends, ends, 150, 150, **options)
    loose = cuattn.attention_varlen(q, k, v, ends, ends, 2**31 - 1, 2**31 - 1, **options)
    assert torch.equal(tight, loose)
