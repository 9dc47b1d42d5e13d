# SPDX-License-Identifier: Apache-2.0
"""On CUDA: work goes to the caller's stream, the host is not held up, and calls can be captured."""

from __future__ import annotations

import gc
import math
import time

import numpy as np
import pytest

import cuattn
import frameworks
import harness
import paged_cases
import paged_prefill_cases
from paged_cases import PagedCase

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
    for _ in range(3):  # one of three must not wait: other test processes may hold the host
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(qkv[0])  # only work behind this on the same stream sees q
            begin = time.perf_counter()
            got = cuattn.attention(late, *qkv[1:], backend=backend)
            seconds.append(time.perf_counter() - begin)
            if stream.query():  # no longer asleep
                seconds[-1] = math.inf
        stream.synchronize()
        assert torch.equal(got, want)
    assert min(seconds) < 0.05, f"the calls waited for the device: {seconds} s"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["object", "pointer"])
def test_a_given_stream_is_used_and_its_results_belong_to_it(torch, qkv, backend, form):
    available(backend, qkv)
    want = cuattn.attention(*qkv, backend=backend)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(qkv[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5 * SLEEP_CYCLES)
        late.copy_(qkv[0])
    given = stream if form == "object" else stream.cuda_stream
    got = cuattn.attention(late, *qkv[1:], backend=backend, stream=given)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, want)


def test_dlpack_arrays_run_on_the_given_stream(torch, qkv):
    want = cuattn.attention(*qkv)
    stream = torch.cuda.Stream()
    out = torch.zeros_like(want)
    torch.cuda.synchronize()
    arrays = [frameworks.OnlyDlpack(x) for x in qkv]
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
    with harness.capturing(graph):
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
    with harness.capturing(graph):
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


@pytest.fixture
def jax():
    frameworks.require_gpu_of_jax()
    return frameworks.require("jax")


def test_jax_on_cuda_gives_the_same_bits(torch, jax, qkv):
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


PAGED = [
    PagedCase(kv_layout="nhd", lens=(300, 1, 0, 2000)),
    PagedCase(kv_layout="hnd", q_len=3, sinks=True, lens=(300, 3, 2000)),
    PagedCase(kv_layout="vllm", fp8=True, scales="head", lens=(300, 1, 2000)),
    PagedCase(dtype="float32", lens=(3000,)),
]


def same_bits(got, want):
    """JAX arrays on CUDA against torch tensors."""
    for a, b in zip(got, want, strict=True):
        assert next(iter(a.devices())).platform != "cpu"
        np.testing.assert_array_equal(
            harness.bits(np.asarray(a)), harness.bits(b.cpu().contiguous().numpy())
        )


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_jax_on_cuda_over_pages_gives_the_same_bits(torch, jax, case, rng):
    problem = paged_cases.make(case, rng)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    theirs = {name: torch.from_numpy(x).cuda() for name, x in problem.arrays.items()}
    ours = {name: jax.device_put(x) for name, x in problem.arrays.items()}

    def attend(arrays):
        rest = {name: x for name, x in arrays.items() if name not in names}
        positional = [arrays[name] for name in names]
        return cuattn.paged_attention(*positional, **rest, **problem.options, return_lse=True)

    want = attend(theirs)
    for call in (attend, jax.jit(attend)):
        same_bits(call(ours), want)


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
def test_jax_on_cuda_writes_and_reads_pages(torch, jax, kv_layout, rng):
    case = PagedCase(kv_layout=kv_layout, lens=(70, 0, 33))
    problem = paged_cases.make(case, rng)
    pages = [problem.arrays[name] for name in ("k_cache", "v_cache", "block_tables")]
    rows = rng.standard_normal((2, 20, case.num_heads_kv, case.head_dim), np.float32)
    rows = rows.astype(np.float16)
    num_blocks = pages[0].shape[0]
    slots = rng.permutation(num_blocks * case.block_size)[:20]
    slots[3] = -1
    cu_seqlens = np.array([0, 70, 70, 103], np.int32)
    written = [torch.from_numpy(x).cuda() for x in (*rows, *pages[:2], slots)]
    cuattn.reshape_and_cache(*written, kv_layout=kv_layout)
    tables, ends = (torch.from_numpy(x).cuda() for x in (pages[2], cu_seqlens))
    read = cuattn.gather_cache(*written[2:4], tables, ends, kv_layout=kv_layout)

    def write(k, v, k_cache, v_cache, slots):
        return cuattn.reshape_and_cache(k, v, k_cache, v_cache, slots, kv_layout=kv_layout)

    def gather(*arrays):
        return cuattn.jax.gather_cache(*arrays, kv_layout=kv_layout, total=103)

    given = [jax.device_put(x) for x in (*rows, *pages[:2], slots.astype(np.int32))]
    same_bits(write(*given), written[2:4])
    same_bits(given[2:4], [torch.from_numpy(x) for x in pages[:2]])  # as they were
    places = [x.unsafe_buffer_pointer() for x in given[2:4]]
    caches = jax.jit(write, donate_argnums=(2, 3))(*given)
    assert [x.unsafe_buffer_pointer() for x in caches] == places
    same_bits(caches, written[2:4])
    arrays = [*caches, *(jax.device_put(x) for x in (pages[2], cu_seqlens))]
    for call in (gather, jax.jit(gather)):
        same_bits(call(*arrays), read)


def test_jax_on_cuda_prefills_over_pages(torch, jax, rng):
    case = PagedCase(lens=(300, 64, 0, 517), head_dim=128)
    problem = paged_prefill_cases.make(case, (300, 1, 0, 200), rng)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "block_tables", "context_lens")
    arrays = [problem.arrays[name] for name in names]

    def prefill(q, k, v, cu_seqlens_q, block_tables, seqused_k):
        return cuattn.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            None,
            300,
            517,
            block_tables=block_tables,
            seqused_k=seqused_k,
            causal=True,
            return_lse=True,
        )

    want = prefill(*(torch.from_numpy(x).cuda() for x in arrays))
    for call in (prefill, jax.jit(prefill)):
        same_bits(call(*(jax.device_put(x) for x in arrays)), want)
