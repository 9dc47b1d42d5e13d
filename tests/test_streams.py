# SPDX-License-Identifier: Apache-2.0
"""On CUDA: work goes to the caller's stream, the host is not held up, and calls can be captured."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import cuattn
import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}"),
]

SHAPE = (2, 256, 4, 64)  # [batch, seqlen, num_heads, head_dim]
SLEEP_CYCLES = 400_000_000  # a fifth of a second or more on any GPU
BACKENDS = ["auto", "naive", "cublas"]  # the last two take a workspace


@pytest.fixture
def qkv(torch):
    generator = torch.Generator("cuda").manual_seed(1)

    def make():
        return torch.randn(SHAPE, generator=generator, device="cuda", dtype=torch.float16)

    return [make() for _ in range(3)]


def available(backend, qkv):
    try:
        cuattn.attention(*qkv, backend=backend)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_call_runs_on_the_current_stream_and_the_host_goes_on(torch, qkv, backend):
    available(backend, qkv)
    want = cuattn.attention(*qkv, backend=backend)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(qkv[0])
    torch.cuda.synchronize()
    seconds = []
    for _ in range(3):  # the best of three: other test processes may hold the host
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(qkv[0])  # only work behind this on the same stream sees q
            begin = time.perf_counter()
            got = cuattn.attention(late, *qkv[1:], backend=backend)
            seconds.append(time.perf_counter() - begin)
            assert not stream.query()  # the call is back, the stream still asleep
        stream.synchronize()
        assert torch.equal(got, want)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["object", "pointer"])
def test_a_given_stream_is_used_and_its_results_belong_to_it(torch, qkv, backend, form):
    available(backend, qkv)
    want = cuattn.attention(*qkv, backend=backend)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(qkv[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(qkv[0])
    given = stream if form == "object" else stream.cuda_stream
    got = cuattn.attention(late, *qkv[1:], backend=backend, stream=given)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, want)


def test_dlpack_arrays_run_on_the_given_stream(torch, qkv):
    class OnlyDlpack:
        def __init__(self, tensor):
            self.tensor = tensor
            self.requests = []

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, **request):
            self.requests.append(request)
            return self.tensor.__dlpack__(**request)

    want = cuattn.attention(*qkv)
    stream = torch.cuda.Stream()
    out = torch.zeros_like(want)
    torch.cuda.synchronize()
    arrays = [OnlyDlpack(x) for x in qkv]
    assert cuattn.attention(*arrays, out=out, stream=stream) is out
    stream.synchronize()
    assert torch.equal(out, want)
    assert [a.requests[0]["stream"] for a in arrays] == [stream.cuda_stream] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_call_replays_on_new_values_without_growth(torch, qkv, backend):
    available(backend, qkv)
    q, k, v = qkv
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            cuattn.attention(q, k, v, causal=True, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuattn.attention(q, k, v, causal=True, backend=backend)
    gc.collect()
    for step in range(3):
        q.normal_(generator=torch.Generator("cuda").manual_seed(step))
        graph.replay()
        torch.cuda.synchronize()
        want = cuattn.attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(out, want)
        del want
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved


def test_varlen_and_merge_are_captured_too(torch, qkv):
    q, k, v = (x.reshape(-1, 4, 64) for x in qkv)
    cu_seqlens = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")
    arguments = (q, k, v, cu_seqlens, cu_seqlens, 412, 412)

    def work():
        out, lse = cuattn.attention_varlen(*arguments, return_lse=True)
        return cuattn.merge_states(out, lse, out, lse, layout="thd")

    want = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_two_streams_interleave_without_mixing(torch, qkv):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    jobs = [qkv, [x + 1 for x in qkv]]
    wants = [cuattn.attention(*job, backend="naive") for job in jobs]
    torch.cuda.synchronize()
    for _ in range(24):
        results = []
        for stream, job in zip(streams, jobs, strict=True):
            with torch.cuda.stream(stream):
                results.append(cuattn.attention(*job, backend="naive"))
        torch.cuda.synchronize()
        for got, want in zip(results, wants, strict=True):
            assert torch.equal(got, want)


def test_the_current_device_stays_and_the_tensors_device_computes(torch, qkv):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    want = cuattn.attention(*qkv)
    moved = [x.to("cuda:1") for x in qkv]
    for current in (0, 1):
        with torch.cuda.device(current):
            got = cuattn.attention(*moved)
            assert got.device == moved[0].device
            assert torch.cuda.current_device() == current
            assert torch.equal(got.to("cuda:0"), want)
    with pytest.raises(ValueError, match="attention: k must be on cuda:0 like q, got cuda:1"):
        cuattn.attention(qkv[0], moved[1], qkv[2])


def test_host_and_device_do_not_mix(torch, qkv):
    with pytest.raises(ValueError, match="attention: k must be on cuda:0 like q, got cpu"):
        cuattn.attention(qkv[0], qkv[1].cpu(), qkv[2])
    with pytest.raises(ValueError, match="attention: k must be on cuda:0 like q, got cpu"):
        cuattn.attention(qkv[0], np.zeros(SHAPE, np.float16), qkv[2])
    with pytest.raises(ValueError, match="attention: out must be on cuda:0 like q, got cpu"):
        cuattn.attention(*qkv, out=qkv[0].cpu())
    with pytest.raises(ValueError, match="attention: workspace must be on the device of q"):
        cuattn.attention(*qkv, backend="naive", workspace=np.zeros(1 << 25, np.uint8))


def test_cupy_shares_the_stream_of_its_user(torch, qkv):
    cupy = pytest.importorskip("cupy")
    want = cuattn.attention(*qkv)
    arrays = [cupy.from_dlpack(x) for x in qkv]
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        out = cuattn.attention(*arrays)
    stream.synchronize()
    assert type(out) is cupy.ndarray
    assert torch.equal(torch.from_dlpack(out), want)
    mixed = cuattn.attention(qkv[0], arrays[1], arrays[2])
    assert torch.equal(mixed, want)


def test_cupy_calls_are_captured(torch, qkv):
    cupy = pytest.importorskip("cupy")
    arrays = [cupy.from_dlpack(x) for x in qkv]
    want = cuattn.attention(*qkv)
    out = cupy.zeros(SHAPE, "float16")
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        cuattn.attention(*arrays, out=out)
        out[...] = 0
        stream.begin_capture()
        cuattn.attention(*arrays, out=out)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(out), want)


def test_jax_on_cuda_gives_the_same_bits(torch, qkv):
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("jax sees no GPU")
    arrays = [jax.device_put(x.cpu().numpy()) for x in qkv]
    want = cuattn.attention(*qkv, causal=True).cpu().numpy()

    def function(q, k, v):
        return cuattn.attention(q, k, v, causal=True)

    for call in (function, jax.jit(function)):
        np.testing.assert_array_equal(np.asarray(call(*arrays)), want)
    naive = cuattn.attention(*arrays, backend="naive", return_lse=True)
    torch_naive = cuattn.attention(*qkv, backend="naive", return_lse=True)
    for a, b in zip(naive, torch_naive, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b.cpu().numpy())
