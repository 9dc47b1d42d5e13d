# SPDX-License-Identifier: Apache-2.0
"""The functions of the paged cache on CUDA streams: in order, without waiting for the device, in
graphs and from several threads, always with the bits of the plain call.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import math
import time

import numpy as np
import pytest

import cuattn
import harness
from harness import free_bytes, has_hopper, why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]

SLEEP = 200_000_000  # clock cycles, about 0.1 s
HEADS_Q, HEADS_KV, DIM, BLOCK, BLOCKS = 8, 2, 64, 16, 120
LENS = (300, 17, 130, 0)
WIDTH = 32  # blocks that a table can name: 512 tokens
PREFIX = 70
SHAPE = {"num_heads_q": HEADS_Q, "num_heads_kv": HEADS_KV, "head_dim": DIM, "block_size": BLOCK}


class Inputs(dict):
    """The tensors of a call by name, outputs and caches that it writes among them."""

    def like(self, change):
        """The same kinds of tensors: `change(x)` of each, what is pinned stays so."""
        return Inputs(
            {n: change(x).pin_memory() if x.is_pinned() else change(x) for n, x in self.items()}
        )

    def copy_from(self, others):
        for name, x in others.items():
            self[name].copy_(x, non_blocking=True)

    def clone(self):
        return self.like(lambda x: x.clone())


def inputs(torch, names, *, dtype="float16", q_len=None, seed=0, lens=LENS, device="cuda"):
    """Random tensors for `names`: floats NaN where they are written alone."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, dtype)
    numbers = np.random.default_rng(seed)
    blocks = numbers.permutation(BLOCKS)
    rows = (len(lens), *([] if q_len is None else [q_len]))

    def random(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def written(*shape, dtype=dtype):
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    def int32(values):
        return torch.tensor(np.array(values), dtype=torch.int32, device=device)

    cache = (BLOCKS, BLOCK, HEADS_KV, DIM)
    x = 16 // torch.empty(0, dtype=dtype).element_size()
    parts = (len(lens), HEADS_Q, WIDTH * BLOCK // 256)
    total = sum(lens)
    tables = np.resize(blocks, (len(lens), WIDTH))
    slots = numbers.permutation(BLOCKS * BLOCK)[:total]
    slots[numbers.random(total) < 0.1] = -1
    made = {
        "q": lambda: random(*rows, HEADS_Q, DIM),
        "k_cache": lambda: random(*cache),
        "v_cache": lambda: random(*cache),
        "key_cache": lambda: random(BLOCKS, HEADS_KV, DIM // x, BLOCK, x),
        "value_cache": lambda: random(BLOCKS, HEADS_KV, DIM, BLOCK),
        "block_tables": lambda: int32(tables),
        "context_lens": lambda: int32(lens),
        "shared_k": lambda: random(PREFIX, HEADS_KV, DIM),
        "shared_v": lambda: random(PREFIX, HEADS_KV, DIM),
        "out": lambda: written(*rows, HEADS_Q, DIM),
        "exp_sums": lambda: written(*parts, dtype=torch.float32),
        "max_logits": lambda: written(*parts, dtype=torch.float32),
        "tmp_out": lambda: written(*parts, DIM),
        "k": lambda: random(total, HEADS_KV, DIM),
        "v": lambda: random(total, HEADS_KV, DIM),
        "slot_mapping": lambda: torch.tensor(slots, device=device),
        "cu_seqlens": lambda: int32([0, *np.cumsum(lens)]),
        "k_out": lambda: written(total, HEADS_KV, DIM),
        "v_out": lambda: written(total, HEADS_KV, DIM),
        "block_mapping": lambda: torch.tensor(blocks[:20].reshape(10, 2), device=device),
        "host": lambda: torch.zeros(cache, dtype=dtype, pin_memory=device == "cuda"),
        "lse_a": lambda: random(len(lens), HEADS_Q, dtype=torch.float32),
        "lse_b": lambda: random(len(lens), HEADS_Q, dtype=torch.float32),
        "out_a": lambda: random(len(lens), HEADS_Q, DIM),
        "out_b": lambda: random(len(lens), HEADS_Q, DIM),
    }
    return Inputs({name: made[name]() for name in names})


PAGED = ("q", "k_cache", "v_cache", "block_tables", "context_lens")


def attend(x, *, plan=None, backend="auto", **stream):
    arrays = [x[name] for name in PAGED]
    return cuattn.paged_attention(*arrays, return_lse=True, plan=plan, backend=backend, **stream)


def attend_by_a_plan(x, *, backend="auto", **stream):
    q = x["q"]
    plan = cuattn.paged_plan(
        x["block_tables"],
        x["context_lens"],
        **SHAPE,
        q_len=q.shape[1] if q.dim() == 4 else 1,
        dtype=str(q.dtype).removeprefix("torch."),
        backend=backend,
        **stream,
    )
    return plan, *attend(x, plan=plan, backend=backend, **stream)


def attend_as_v1(x, **stream):
    return (cuattn.paged_attention_v1(**x, scale=0.125, **stream),)


def attend_as_v2(x, **stream):
    cuattn.paged_attention_v2(**x, scale=0.125, partition_size=256, **stream)
    return x["out"], x["exp_sums"], x["max_logits"], x["tmp_out"]


def write(x, **stream):
    return cuattn.reshape_and_cache(**x, **stream)


def gather(x, **stream):
    return cuattn.gather_cache(**x, **stream)


def copy(x, **stream):
    """By pairs on the device, then by some on the host, which the launch takes along."""
    caches = [x["k_cache"]], [x["v_cache"]]
    cuattn.copy_blocks(*caches, x["block_mapping"], **stream)
    cuattn.copy_blocks(*caches, np.array([[0, 1], [5, 3]]), **stream)
    return x["k_cache"], x["v_cache"]


def swap(x, pairs, **stream):
    """Out to pinned memory, back to another cache, and from there to a third."""
    pairs = np.array(pairs)
    cuattn.swap_blocks(x["k_cache"], x["host"], pairs, **stream)
    cuattn.swap_blocks(x["host"], x["v_cache"], pairs[:, ::-1].copy(), **stream)
    return x["host"], x["v_cache"]


def merge(x, **stream):
    return cuattn.merge_states(**x, layout="nhd", **stream)


def cascade(x, **stream):
    names = ("q", "shared_k", "shared_v", *PAGED[1:])
    return cuattn.cascade_attention(*(x[name] for name in names), return_lse=True, **stream)


VERSION = ("out", "q", "key_cache", "value_cache", "block_tables", "context_lens")
NEIGHBOURS = [[i, i] for i in range(20)]
SCATTERED = [[7 * i % BLOCKS, 11 * i % BLOCKS] for i in range(20)]
# What is called, the names of its tensors, and how they are made.
JOBS = {
    "decode": (attend, PAGED, {}),
    "decode_q4": (attend, PAGED, {"q_len": 4}),
    "decode_sm80": (functools.partial(attend, backend="sm80"), PAGED, {"dtype": "bfloat16"}),
    "decode_simt": (attend, PAGED, {"dtype": "float32"}),
    "plan": (attend_by_a_plan, PAGED, {}),
    "plan_q4": (attend_by_a_plan, PAGED, {"q_len": 4}),
    "plan_sm80": (functools.partial(attend_by_a_plan, backend="sm80"), PAGED, {}),
    "plan_simt": (attend_by_a_plan, PAGED, {"dtype": "float32"}),
    "v1": (attend_as_v1, VERSION, {}),
    "v2": (attend_as_v2, (*VERSION, "exp_sums", "max_logits", "tmp_out"), {}),
    "reshape_and_cache": (write, ("k", "v", "k_cache", "v_cache", "slot_mapping"), {}),
    "gather_cache": (
        gather,
        ("k_cache", "v_cache", "block_tables", "cu_seqlens", "k_out", "v_out"),
        {},
    ),
    "copy_blocks": (copy, ("k_cache", "v_cache", "block_mapping"), {}),
    "swap_neighbours": (
        functools.partial(swap, pairs=NEIGHBOURS),
        ("k_cache", "v_cache", "host"),
        {},
    ),
    "swap_scattered": (
        functools.partial(swap, pairs=SCATTERED),
        ("k_cache", "v_cache", "host"),
        {},
    ),
    "merge_states": (merge, ("out_a", "lse_a", "out_b", "lse_b"), {}),
    "cascade": (cascade, (*PAGED, "shared_k", "shared_v"), {}),
    "cascade_q4": (cascade, (*PAGED, "shared_k", "shared_v"), {"q_len": 4}),
}
if has_hopper():
    JOBS |= {
        "decode_sm90": (functools.partial(attend, backend="sm90"), PAGED, {"dtype": "bfloat16"}),
        "plan_sm90": (functools.partial(attend_by_a_plan, backend="sm90"), PAGED, {"q_len": 3}),
    }
every_job = pytest.mark.parametrize("name", JOBS)


def make(torch, name, **options):
    """The function of a job and its inputs."""
    function, names, own = JOBS[name]
    return function, inputs(torch, names, **{**own, **options})


def expected(torch, function, x):
    """What the plain call gives, apart from what it writes; everything is done when it returns."""
    torch.cuda.synchronize()
    results = function(x.clone())
    torch.cuda.synchronize()
    return results


def assert_same(torch, results, wanted):
    assert len(results) == len(wanted) > 0
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        # Bytes: what was not written is NaN, and equal.
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@every_job
@pytest.mark.parametrize("form", ["current", "object", "pointer"])
def test_a_call_follows_its_stream_and_does_not_wait(torch, name, form):
    """All inputs come late, behind a sleep: only work after them on the same stream sees them."""
    function, x = make(torch, name)
    want = expected(torch, function, x)
    early = x.like(torch.zeros_like)
    wrong = expected(torch, function, early)
    assert any(not torch.equal(a, b) for a, b in zip(want, wrong, strict=True))
    stream = torch.cuda.Stream()
    given = {"object": stream, "pointer": stream.cuda_stream}
    seconds = []
    for _ in range(3):  # one of three must not wait: other test processes may hold the host
        late = early.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            late.copy_from(x)
        options = {} if form == "current" else {"stream": given[form]}
        with torch.cuda.stream(stream if form == "current" else torch.cuda.current_stream()):
            begin = time.perf_counter()
            results = function(late, **options)
            seconds.append(time.perf_counter() - begin)
        if stream.query():
            seconds[-1] = math.inf
        stream.synchronize()
        assert_same(torch, results, want)
    assert min(seconds) < 0.05, f"the calls waited for the device: {seconds} s"


@every_job
def test_a_graph_replays_on_longer_contexts_and_other_tables(torch, name):
    """A plan is made anew inside of the graph."""
    function, x = make(torch, name)
    function(x.clone())  # loads the kernels
    static = x.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        results = function(static)
    gc.collect()  # nothing that the graph needs may hang on a Python object
    # Rows of k, v and the gathered ones are as many as at the capture.
    growing = "slot_mapping" not in x and "cu_seqlens" not in x
    for step in range(1, 7):
        lens = (
            tuple(n + 30 * step + (n == 0) for n in LENS)
            if growing
            else LENS[step % 4 :] + LENS[: step % 4]
        )
        _, fresh = make(torch, name, seed=step, lens=lens)
        want = expected(torch, function, fresh)
        static.copy_from(fresh)
        for result in results:
            if all(result is not kept for kept in static.values()):
                result.fill_(float("nan") if result.is_floating_point() else -1)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(torch, results, want)
    free = free_bytes(torch)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert free_bytes(torch) >= free - (2 << 20)


@every_job
def test_threads_on_their_own_streams(torch, name):
    count = 6
    function, _ = make(torch, name)
    problems = [make(torch, name, seed=seed)[1] for seed in range(count)]
    wanted = [expected(torch, function, x) for x in problems]

    def work(index):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mine = problems[index].clone()
            for _ in range(25):
                mine.copy_from(problems[index])
                results = function(mine)
                stream.synchronize()
                assert_same(torch, results, wanted[index])

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))  # raises what a thread raised


@every_job
def test_streams_interleave_without_mixing(torch, name):
    """One thread, many calls on their way on two streams at once."""
    function, _ = make(torch, name)
    problems = [make(torch, name, seed=seed)[1] for seed in range(2)]
    wanted = [expected(torch, function, x) for x in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    rounds = [[x.clone() for x in problems] for _ in range(12)]
    torch.cuda.synchronize()
    results = []
    for given in rounds:
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                results.append(function(x))
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        assert_same(torch, got, wanted[i % 2])


@every_job
def test_memory_is_the_callers(torch, name):
    """Hundreds of calls neither keep memory nor take any beside the allocator of torch."""
    function, x = make(torch, name)
    for _ in range(20):
        function(x)
    torch.cuda.synchronize()
    gc.collect()  # what other tests left
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free = free_bytes(torch)
    for _ in range(300):
        function(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    assert free_bytes(torch) >= free - (2 << 20)


def test_one_plan_serves_the_layers_of_a_captured_step(torch):
    """Rows are written, the plan is made once into the same memory, two layers attend by it."""
    names = ("k", "v", "slot_mapping", *PAGED)
    lens = (200, 40, 77)

    def step(x, plan, layers):
        tables, context = x["block_tables"], x["context_lens"]
        cuattn.paged_plan(tables, context, **SHAPE, dtype="float16", out=plan)
        results = []
        for k_cache, v_cache in layers:
            cuattn.reshape_and_cache(x["k"], x["v"], k_cache, v_cache, x["slot_mapping"])
            arrays = x["q"], k_cache, v_cache, tables, context
            results += cuattn.paged_attention(*arrays, plan=plan, return_lse=True)
        return results

    def newest(x, lens):
        """One row a sequence, for the place behind its last token."""
        x["k"], x["v"] = x["k"][: len(lens)].clone(), x["v"][: len(lens)].clone()
        at = torch.tensor(lens, device="cuda") - 1
        blocks = x["block_tables"].gather(1, (at // BLOCK)[:, None])[:, 0].long()
        x["slot_mapping"] = blocks * BLOCK + at % BLOCK
        return x

    def layers_of(x):
        return [(x["k_cache"], x["v_cache"]), (x["v_cache"].clone(), x["k_cache"].clone())]

    x = newest(inputs(torch, names, lens=lens), lens)
    layers = layers_of(x)
    plan = cuattn.paged_plan(x["block_tables"], x["context_lens"], **SHAPE, dtype="float16")
    step(x, plan, layers)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        results = step(x, plan, layers)
    plans = []
    for seed in range(4):
        grown = tuple(n + 60 * seed for n in lens)
        fresh = newest(inputs(torch, names, lens=grown, seed=seed), grown)
        x.copy_from(fresh)
        for kept, values in zip(layers, layers_of(fresh), strict=True):
            for cache, new in zip(kept, values, strict=True):
                cache.copy_(new)
        plan.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        plans.append(plan.clone())
        want = step(fresh, torch.empty_like(plan), layers_of(fresh))
        assert_same(torch, results, want)
    assert not torch.equal(plans[0], plans[3])
