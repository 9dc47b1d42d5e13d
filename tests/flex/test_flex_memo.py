# SPDX-License-Identifier: Apache-2.0
"""What is kept between calls: found again if all is the same, and never if something changed."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import cuattn
import flex_cases
import harness
from cuattn import flex
from cuattn.flex import attention as calls


def heads_first(x):
    return x.transpose(0, 2, 1, 3)


@pytest.fixture
def planned(monkeypatch):
    """Count the calls that are planned anew."""
    made, plan = [], calls.plan
    monkeypatch.setattr(calls, "plan", lambda *given: made.append(given) or plan(*given))
    return made


def check(q, k, mask, score=None, **given):
    out = cuattn.flex_attention(q, k, k, mask_mod=mask, score_mod=score, **given)
    want, _ = flex_cases.attention(*map(heads_first, (q, k, k)), mask=mask, mod=score)
    np.testing.assert_allclose(heads_first(np.asarray(out)), want, atol=5e-5, rtol=5e-5)


def test_the_same_call_is_planned_once(rng, planned):
    q, k = (rng.standard_normal((2, n, 4, 16)).astype(np.float32) for n in (60, 90))
    ids = np.sort(rng.integers(0, 4, 90))
    for mask in (
        lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
        flex.masks.streaming(7),
        flex.masks.causal(),
    ):
        planned.clear()
        for _ in range(3):
            check(q, k, mask)
            check(q.copy(), k, mask)
        assert len(planned) == 1
        check(q[:, :40], k, mask)
        check(q[:1], k[:1], mask)
        check(q, k[:, :61], mask)
        check(q, k, mask)
        assert len(planned) == 4
    both = {"mask_mod": mask, "score_mod": flex.scores.softcap(3.0)}
    first = cuattn.flex_attention(q, k, k, **both)
    assert len(planned) == 5
    np.testing.assert_array_equal(cuattn.flex_attention(q, k, k, **both), first)
    assert len(planned) == 5
    for n in range(1, 30):  # the oldest go
        cuattn.flex_attention(q[:, :n], k, k, **both)
    assert len(flex.trace(mask).kept) <= 16


def test_what_changes_is_seen(rng, planned):
    """Numbers, elements and functions that a mask or a score reaches, one after the other."""
    q, k = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (70, 50))
    torch = pytest.importorskip("torch")
    wide = rng.integers(0, 3, (2, 140))
    ids, tensor, table = wide[:, ::2], torch.from_numpy(wide[0].copy()), np.zeros(9, np.float32)
    width, inner = 5, flex.masks.sliding_window(9)

    def mask(b, h, i, j):
        return inner(b, h, i, j, q_len=70, kv_len=50) | (ids[b, j] == tensor[i]) & (i - j < width)

    def score(s, b, h, i, j):
        return s + table[(i + j) % 9]

    def again(count):
        planned.clear()
        check(q, k, read, score)
        check(q, k, read, score)
        assert len(planned) == count

    # numpy's indices take numpy's arrays
    def read(b, h, i, j):
        return mask(b, h, i, j)

    tensor = tensor.numpy()  # shares its memory with a tensor
    again(1)
    again(0)
    wide[1, 14] += 1  # behind a strided view
    again(1)
    tensor[3] += 1
    again(1)
    table[4] = 0.5
    again(1)
    table[4] = -0.0
    again(1)
    width = 11
    again(1)
    inner = flex.masks.sliding_window(3, 2)
    again(1)
    ids = np.ascontiguousarray(ids)
    again(1)
    again(0)


def test_a_written_tensor_is_seen(rng, planned):
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(rng.standard_normal((1, 40, 2, 16)).astype(np.float32))
    for kind in (torch.int32, torch.int64, torch.uint8):
        ids = torch.from_numpy(np.sort(rng.integers(0, 3, 40))).to(kind)
        mask = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731, B023
        planned.clear()
        for write in (lambda: None, lambda: ids.numpy().fill(0), lambda: ids[20:].add_(1)):  # noqa: B023
            write()
            for _ in range(2):
                out = cuattn.flex_attention(q, q, q, mask_mod=mask)
            host = ids.numpy()
            want = cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: host[i] == host[j])  # noqa: B023
            assert torch.equal(out, want)
        assert len(planned) == 6  # three of them of the other function


def test_block_masks_are_told_apart_and_die(rng, planned):
    q = rng.standard_normal((1, 200, 2, 16)).astype(np.float32)
    dense = rng.random((4, 4)) < 0.6
    dense[2, 2] = False  # or the streams, which see it, may miss none
    mod = flex.masks.streaming(30)
    made = [
        cuattn.create_block_mask(mod, None, None, 200, 200, block_size=64),
        flex.BlockMask.from_dense(dense, 200, 200, block_size=64, mask_mod=mod),
    ]
    outs = [[cuattn.flex_attention(q, q, q, block_mask=m) for m in made] for _ in range(2)]
    assert len(planned) == 2
    assert not np.array_equal(*outs[0])
    np.testing.assert_array_equal(outs[0], outs[1])
    dead = [weakref.ref(m) for m in made]
    del made
    planned.clear()
    gc.collect()
    assert [x() for x in dead] == [None, None]


def test_a_block_mask_with_a_mask_is_planned_once(rng, planned):
    q = rng.standard_normal((1, 200, 2, 16)).astype(np.float32)
    dense, step = rng.random((4, 4)) < 0.6, 3
    made = flex.BlockMask.from_dense(dense, 200, 200, block_size=64)
    mask = lambda b, h, i, j: (i + j) % step != 0  # noqa: E731
    call = {"block_mask": made, "mask_mod": mask}
    outs = [cuattn.flex_attention(q, q, q, **call) for _ in range(3)]
    assert len(planned) == 1
    np.testing.assert_array_equal(outs[0], outs[2])
    step = 2
    hidden = np.where(dense.repeat(64, axis=0).repeat(64, axis=1)[:200, :200], 0.0, -np.inf)
    want, _ = flex_cases.attention(*[heads_first(q)] * 3, mask=mask, bias=hidden)
    out = cuattn.flex_attention(q, q, q, **call)
    np.testing.assert_allclose(heads_first(out), want, atol=5e-5, rtol=5e-5)


def test_a_zero_that_changes_its_sign_is_seen():
    zero = 0.0
    score = lambda s, b, h, i, j: s + 1.0 / zero  # noqa: E731
    first = flex.trace(score, is_score=True)
    assert flex.trace(score, is_score=True) is first
    zero = -0.0
    assert flex.trace(score, is_score=True) is not first


def test_threads_that_make_the_first_calls_get_the_same(rng):
    q = rng.standard_normal((1, 150, 2, 16)).astype(np.float32)
    for _ in range(5):
        ids = np.sort(rng.integers(0, 3, 150))
        mask = lambda b, h, i, j: (ids[i] == ids[j]) & ((i * j) % 5 != 1)  # noqa: B023, E731
        at_once = threading.Barrier(8)

        def call(mask=mask, at_once=at_once):
            at_once.wait(10)
            return cuattn.flex_attention(q, q, q, mask_mod=mask)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outs = [x.result() for x in [pool.submit(call) for _ in range(8)]]
        want, _ = flex_cases.attention(*[heads_first(q)] * 3, mask=mask)
        for out in outs:
            np.testing.assert_allclose(heads_first(out), want, atol=5e-5, rtol=5e-5)


def test_a_block_mask_of_torch_is_taken_once(rng, planned):
    flex_torch = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = lambda b, h, i, j: (i - j) % 3 != 0  # noqa: E731
    made = flex_torch.create_block_mask(mask, None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
    q = rng.standard_normal((1, 200, 2, 16)).astype(np.float32)
    outs = [cuattn.flex_attention(q, q, q, block_mask=made) for _ in range(3)]
    assert len(planned) == 1
    np.testing.assert_array_equal(outs[0], outs[2])
    made.kv_num_blocks[..., 1] -= 1  # the last of the second row of blocks is hidden
    out = cuattn.flex_attention(q, q, q, block_mask=made)
    changed = np.flatnonzero(np.any(out != outs[0], axis=(0, 2, 3)))
    assert set(changed // 64) == {1}
    made.mask_mod = lambda b, h, i, j: (i - j) % 3 == 0
    assert not np.array_equal(cuattn.flex_attention(q, q, q, block_mask=made), out)


# On a GPU


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    if harness.is_emulated() or harness.why_no_cuda() is not None:
        pytest.skip("needs a GPU")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    return torch


def cuda_masks(ids, table):
    return (
        (lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i), None),
        (lambda b, h, i, j: (ids[i] != ids[j] + 1) & (j <= i), None),
        (flex.masks.streaming(40), lambda s, b, h, i, j: s + table[h, (i - j) % 20]),
    )


def dense_out(torch, q, mask, score):
    x = heads_first(q.double().cpu().numpy())
    want, _ = flex_cases.attention(x, x, x, mask=mask, mod=score)
    return torch.from_numpy(want).transpose(1, 2)


@pytest.mark.gpu
def test_a_tensor_of_the_device_that_torch_writes_is_seen(rng, cuda, planned):
    torch = cuda
    for kind in (torch.int32, torch.int64):
        for sorts in (True, False):
            x = rng.integers(0, 4, 300)
            ids = torch.from_numpy(np.sort(x) if sorts else x).to("cuda", kind)
            table = torch.from_numpy(rng.standard_normal((2, 20)).astype(np.float32)).cuda()
            q = torch.from_numpy(rng.standard_normal((1, 300, 2, 64))).to("cuda", torch.float16)
            for mask, score in cuda_masks(ids, table):
                planned.clear()
                for step in range(4):
                    if step == 2:
                        ids[100:] += 1
                        table.mul_(2.0)
                    out = cuattn.flex_attention(q, q, q, mask_mod=mask, score_mod=score)
                    host, t = ids.cpu().numpy(), table.cpu().numpy()
                    want = dense_out(torch, q, *next(
                        f for f, g in zip(cuda_masks(host, t), cuda_masks(ids, table), strict=True)
                        if flex.trace(g[0]).key() == flex.trace(mask).key()
                    ))  # fmt: skip
                    assert float((out.double().cpu() - want).abs().max()) < 6e-3
                assert len(planned) == 2


@pytest.mark.gpu
def test_rows_lists_and_captured_arrays_go_into_a_graph(rng, cuda):
    torch = cuda
    ids, table = np.sort(rng.integers(0, 4, 300)), rng.standard_normal((2, 20)).astype(np.float32)
    for mask, score in cuda_masks(ids, table):
        q = torch.from_numpy(rng.standard_normal((1, 300, 2, 64))).to("cuda", torch.float16)
        out, call = torch.empty_like(q), {"mask_mod": mask, "score_mod": score}
        refused = pytest.raises(RuntimeError, match="call it once before")
        with refused, harness.capturing(torch.cuda.CUDAGraph()):
            cuattn.flex_attention(q, q, q, out=out, **call)
        cuattn.flex_attention(q, q, q, **call)
        graph = torch.cuda.CUDAGraph()
        with harness.capturing(graph):
            cuattn.flex_attention(q, q, q, out=out, **call)
        flex.trace(mask).kept.clear()  # what the graph reads lives on
        noise = [torch.full((1 << 16,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
        for _ in range(2):
            q.copy_(torch.randn_like(q))
            graph.replay()
            want = dense_out(torch, q, mask, score)
            assert float((out.double().cpu() - want).abs().max()) < 6e-3
        del noise


@pytest.mark.gpu
def test_what_is_kept_serves_other_streams(rng, cuda):
    torch = cuda
    ids = np.sort(rng.integers(0, 4, 2000))
    q = torch.from_numpy(rng.standard_normal((1, 2000, 2, 64))).to("cuda", torch.float16)
    other = torch.cuda.Stream()
    for _ in range(20):
        mask = lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)  # noqa: E731
        want = cuattn.flex_attention(q, q, q, mask_mod=mask)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000)
            out = cuattn.flex_attention(q, q, q, mask_mod=mask)
        del mask  # its rows may be given to others, once the other stream has read them
        junk = [torch.full((2000,), 2000, device="cuda", dtype=torch.int32) for _ in range(8)]
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        del junk


@pytest.mark.gpu
def test_a_block_mask_of_torch_on_the_device(rng, cuda, planned):
    flex_torch = pytest.importorskip("torch.nn.attention.flex_attention")
    torch = cuda
    ids = torch.from_numpy(rng.integers(0, 3, 300)).cuda()
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)  # noqa: E731
    made = flex_torch.create_block_mask(mask, None, None, 300, 300, device="cuda")
    q = torch.from_numpy(rng.standard_normal((1, 300, 2, 64))).to("cuda", torch.float16)
    host = ids.cpu().numpy()
    want = dense_out(torch, q, lambda b, h, i, j: (host[i] == host[j]) & (j <= i), None)
    for _ in range(2):
        out = cuattn.flex_attention(q, q, q, block_mask=made)
        assert float((out.double().cpu() - want).abs().max()) < 6e-3
    assert len(planned) == 1


def test_a_condition_that_is_used_over_and_over_is_planned_at_once(rng):
    """As a tree it has a million million nodes."""

    def mask(b, h, q, k):
        seen = k <= q
        for t in range(40):
            seen = (seen & ((q + t) % 3 != 0)) | (seen & ((k + t) % 5 != 0))
        return seen

    x = rng.standard_normal((1, 20, 1, 16)).astype(np.float32)
    begin = time.perf_counter()
    out = cuattn.flex_attention(x, x, x, mask_mod=mask)
    assert time.perf_counter() - begin < 5
    places = np.arange(20)
    bias = mask(0, 0, places[:, None], places)[None, None]
    np.testing.assert_allclose(out, cuattn.attention(x, x, x, bias=bias), atol=1e-6)
