# SPDX-License-Identifier: Apache-2.0
"""The persistent decode kernel: its steps, its ends, and what it refuses.

While it runs, nothing here launches another kernel: inputs and results move by copies alone.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import cuattn
from cuattn._persistent import PersistentDecode
from harness import why_no_cuda

cuda = pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}")
LENS = (37, 1, 0, 130, 255, 64)
WIDTH = 18  # blocks of a table: 288 tokens


def make(
    torch, rng, dtype="float16", kv_layout="nhd", lens=LENS, heads=(8, 2), head_dim=128, q_len=1
):
    """Positional arguments of a call; blocks of 16 in random order, every slot filled."""
    num_heads_q, num_heads_kv = heads
    shape = {"nhd": (16, num_heads_kv), "hnd": (num_heads_kv, 16)}[kv_layout]
    blocks = len(lens) * WIDTH

    def random(*shape):
        values = torch.from_numpy(rng.standard_normal(shape, np.float32))
        return values.to("cuda", getattr(torch, dtype))

    tables = rng.permutation(blocks).astype(np.int32).reshape(len(lens), WIDTH)
    queries = (len(lens), num_heads_q) if q_len == 1 else (len(lens), q_len, num_heads_q)
    return [
        random(*queries, head_dim),
        random(blocks, *shape, head_dim),
        random(blocks, *shape, head_dim),
        torch.from_numpy(tables).cuda(),
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
    ]


def expect(torch, arrays, steps, grow, **options):
    """Results of paged_attention after each step, on the host."""
    q, k, v, tables, lens = arrays
    results = []
    for step in range(1, steps + 1):
        grown = (lens + grow * step).clamp(max=WIDTH * 16)
        results.append(cuattn.paged_attention(q, k, v, tables, grown, backend="sm80", **options))
    return [result.cpu() for result in results]


def start(torch, arrays, **options):
    """A decode whose output holds no result yet, on a stream of its own."""
    out = torch.full_like(arrays[0], float("nan"))
    torch.cuda.synchronize()
    return PersistentDecode(*arrays, out=out, stream=torch.cuda.Stream(), **options)


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_with_growing_lengths_have_the_bits_of_paged_attention(
    torch, rng, dtype, kv_layout, num_splits
):
    arrays = make(torch, rng, dtype, kv_layout)
    options = {"kv_layout": kv_layout, "num_splits": num_splits}
    expected = expect(torch, arrays, 40, 1, **options)
    with start(torch, arrays, grow=1, **options) as decode:
        for step, result in enumerate(expected, 1):
            assert decode.post() == step
            decode.wait(step)
            assert torch.equal(decode.out.cpu(), result), step
        assert arrays[4].tolist() == [min(n + 40, WIDTH * 16) for n in LENS]


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("head_dim", [72, 96, 128])
def test_groups_and_head_dims_have_the_bits_of_paged_attention(torch, rng, heads, head_dim):
    arrays = make(torch, rng, heads=heads, head_dim=head_dim)
    (expected,) = expect(torch, arrays, 1, 0, num_splits=3)
    with start(torch, arrays, num_splits=3) as decode:
        decode.wait(decode.post())
        assert torch.equal(decode.out.cpu(), expected)


@cuda
@pytest.mark.gpu
def test_a_few_queries_a_sequence_have_the_bits_of_paged_attention(torch, rng):
    arrays = make(torch, rng, heads=(4, 2), q_len=4)
    (expected,) = expect(torch, arrays, 1, 0, num_splits=3)
    with start(torch, arrays, num_splits=3) as decode:
        decode.wait(decode.post())
        assert torch.equal(decode.out.cpu(), expected)


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize("grow", [0, 3])
def test_steps_posted_ahead_run_one_after_another(torch, rng, grow):
    arrays = make(torch, rng)
    expected = expect(torch, arrays, 60, grow, num_splits=4)
    with start(torch, arrays, grow=grow, num_splits=4) as decode:
        for ahead in (1, 29, 0, 30):
            posted = decode.post(ahead)
        assert posted == 60
        decode.wait(60)
        assert torch.equal(decode.out.cpu(), expected[-1])
        assert arrays[4].tolist() == [min(n + 60 * grow, WIDTH * 16) for n in LENS]


@cuda
@pytest.mark.gpu
def test_a_step_sees_what_was_copied_before_it_was_posted(torch, rng):
    arrays = make(torch, rng)
    queries = [torch.randn(arrays[0].shape).half().pin_memory() for _ in range(30)]
    expected = []
    for q in queries:
        expected += expect(torch, [q.cuda(), *arrays[1:]], 1, 0, num_splits=3)
    with start(torch, arrays, num_splits=3) as decode:
        for q, result in zip(queries, expected, strict=True):
            arrays[0].copy_(q)
            torch.cuda.current_stream().synchronize()
            decode.wait(decode.post())
            assert torch.equal(decode.out.cpu(), result)


@cuda
@pytest.mark.gpu
def test_more_items_than_resident_blocks_are_all_done(torch, rng):
    lens = tuple(int(n) for n in rng.integers(0, 280, 128))
    arrays = make(torch, rng, lens=lens, heads=(32, 8))
    expected = expect(torch, arrays, 5, 1, num_splits=3)  # 128 * 8 * 3 items
    with start(torch, arrays, grow=1, num_splits=3) as decode:
        for step, result in enumerate(expected, 1):
            decode.wait(decode.post())
            assert torch.equal(decode.out.cpu(), result), step


@cuda
@pytest.mark.gpu
def test_the_default_splits_are_right_too(torch, rng):
    arrays = make(torch, rng, "bfloat16", lens=(288,))
    expected = expect(torch, arrays, 3, 1)
    with start(torch, arrays, grow=1) as decode:
        for result in expected:
            decode.wait(decode.post())
            # A rounding of bfloat16; one key of 288 less is ten times as much.
            torch.testing.assert_close(decode.out.cpu(), result, rtol=2**-7, atol=1e-3)


@cuda
@pytest.mark.gpu
def test_stop_ends_the_kernel_between_steps(torch, rng):
    arrays = make(torch, rng)
    stream = torch.cuda.Stream()
    decode = PersistentDecode(*arrays, grow=0, idle_seconds=30, stream=stream)
    last = decode.post(10_000_000)  # a minute of steps
    begin = time.monotonic()
    decode.stop()
    stream.synchronize()
    assert time.monotonic() - begin < 5
    with pytest.raises(RuntimeError, match=r"was stopped before step 10000000; start another"):
        decode.wait(last)
    with pytest.raises(ValueError, match=r"PersistentDecode: the kernel was stopped and takes no"):
        decode.post()
    decode.close()


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 3])
def test_without_a_step_the_kernel_ends_by_itself(torch, rng, steps):
    arrays = make(torch, rng)
    stream = torch.cuda.Stream()
    decode = PersistentDecode(*arrays, idle_seconds=0.2, stream=stream)
    decode.wait(decode.post(steps))
    begin = time.monotonic()
    stream.synchronize()
    assert 0.1 < time.monotonic() - begin < 5
    with pytest.raises(ValueError, match=r"ended without a step for idle_seconds and takes no"):
        decode.post()
    decode.wait(steps)  # those done stay done
    decode.close()


@cuda
@pytest.mark.gpu
def test_an_unused_decode_leaves_the_device_when_it_is_dropped(torch, rng):
    arrays = make(torch, rng)
    decode = PersistentDecode(*arrays, idle_seconds=30, stream=torch.cuda.Stream())
    begin = time.monotonic()
    del decode
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 5


@cuda
@pytest.mark.gpu
def test_waiting_ends_when_its_time_is_over_and_for_steps_never_posted(torch, rng):
    arrays = make(torch, rng)
    with start(torch, arrays) as decode:
        last = decode.post(1_000_000)
        with pytest.raises(TimeoutError, match=r"step 1000000 is not done within 0\.05 s"):
            decode.wait(last, 0.05)
        with pytest.raises(ValueError, match=r"step must be within the 1000000 that were posted"):
            decode.wait(last + 1)
        with pytest.raises(ValueError, match=r"steps must be >= 0, got -1"):
            decode.post(-1)
    decode.close()
    with pytest.raises(ValueError, match=r"PersistentDecode: it is closed"):
        decode.post()


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grow": -1}, r"grow must be >= 0, got -1"),
        ({"idle_seconds": 0.0}, r"idle_seconds must be above 0 and at most 60, got 0"),
        ({"idle_seconds": 61.0}, r"idle_seconds must be above 0 and at most 60, got 61"),
        ({"idle_seconds": float("nan")}, r"idle_seconds must be above 0 and at most 60"),
        ({"stream": None}, r"stream must be a stream of its own, got None"),
    ],
)
def test_options_out_of_range_are_refused(torch, rng, options, message):
    arrays = make(torch, rng)
    with pytest.raises(ValueError, match=r"PersistentDecode: " + message):
        PersistentDecode(*arrays, **{"stream": torch.cuda.Stream(), **options})


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "float16 and bfloat16"),
        ({"head_dim": 64}, "head_dim 72 to 128"),
        ({"heads": (18, 2)}, "8 queries times heads"),
    ],
)
def test_calls_without_a_kernel_are_refused(torch, rng, changes, why):
    arrays = make(torch, rng, **changes)
    with pytest.raises(NotImplementedError, match=rf"{why}.*; use paged_attention"):
        PersistentDecode(*arrays, stream=torch.cuda.Stream())


def test_cpu_arrays_are_refused():
    q = np.zeros((1, 2, 128), np.float16)
    cache = np.zeros((1, 16, 2, 128), np.float16)
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(NotImplementedError, match=r"it runs on CUDA arrays; use paged_attention"):
        PersistentDecode(q, cache, cache, tables, lens, stream=None)
