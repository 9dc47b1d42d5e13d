# SPDX-License-Identifier: Apache-2.0
"""Packed attention_varlen with few queries a sequence over many keys, which goes by a kernel of
paged_attention on CUDA: packed rows are blocks that overlap. Sequences begin anywhere in k and v,
and no row of a neighbour, nor one behind the last, may count.
"""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

import cases
import cuattn
import harness
import made_up_gpus
import reference

STEP = "; few queries over many keys: a kernel of paged_attention"
HEADS = (8, 1, 128)  # query heads, key heads, head_dim
SHORT = (16,) * 152  # beside them the kernels of attention cut the keys of a long one less
LENS = (5000, 1, 0, 77, 1097, 64, 2191, *SHORT)


def explain(device, queries=1, keys=8192, batch=16, heads=HEADS, total=None, **options):
    hq, hkv, dim = heads
    total = batch * keys if total is None else total
    kv, ends = (total, hkv, dim), (batch + 1,)
    given = {"causal": True, "dtype": "bfloat16", **options}
    return cuattn.explain(
        "attention_varlen", (batch * queries, hq, dim), kv, kv, ends, ends, queries, keys,
        device=device, **given,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_where_it_pays(gpu):
    def is_step(**options):
        plan = explain(made_up_gpus.GPUS[gpu], **options)
        assert (STEP in plan.reason) == ("us sooner than a kernel of attention" in plan.ladder)
        return STEP in plan.reason

    # One long sequence among short ones has few multiprocessors elsewhere, split or not.
    among = dict(batch=64, total=8192 + 63 * 16)
    assert is_step(**among)
    assert is_step(**among, queries=8)  # 64 rows of a group
    assert is_step(
        **among, softcap=30.0, sinks=(8,), alibi_slopes=(8,), window=(8000, 0), seqused_k=(64,)
    )
    # Parts of all sequences fill a Hopper by themselves.
    assert is_step() == (gpu == "A100")
    # Short contexts, short windows, as many keys as queries: nothing to gain.
    assert not is_step(keys=256)
    assert not is_step(**among, window=(127, 0))
    assert not is_step(**among, queries=9)
    # Bits that do not depend on the batch, parts by number, what the step does not serve.
    assert not is_step(**among, batch_invariant=True)
    assert not is_step(**among, num_splits=1)
    assert not is_step(**among, bias=(1, 8192))
    assert not is_step(**among, seqused_q=(64,))
    assert not is_step(**among, dropout_p=0.5, dropout_seed=1)
    assert not is_step(**among, heads=(8, 1, 512))
    assert not is_step(**among, backend={"H100": "sm90", "A100": "sm80"}[gpu])


def test_enough_heads_leave_nothing_to_gain_on_hopper():
    gpu = made_up_gpus.GPUS["H100"]
    assert STEP not in explain(gpu, batch=132, heads=(8, 8, 128)).reason
    assert STEP in explain(gpu, batch=16, heads=(8, 8, 128), total=16 * 8192 // 8).reason


def test_more_tiles_than_a_step_counts_leave_the_call_to_the_ladder():
    """max_seqlen_k is a bound, however generous: 2^31 tiles of 64 keys are none of the user's."""
    gpu = made_up_gpus.GPUS["H100"]
    total, batch = 16384 * 514, 16384
    plan = explain(gpu, keys=1 << 23, batch=batch, heads=(32, 8, 128), total=total)
    assert STEP not in plan.reason


def test_not_on_the_cpu():
    assert STEP not in explain("cpu").reason


def test_workspace_holds_lengths_and_parts():
    gpu = made_up_gpus.GPUS["A100"]
    assert explain(gpu).workspace_bytes > 16 * 4
    assert explain(gpu, num_splits=1).workspace_bytes == 0


def make(queries, lens, heads, dtype, rng, spare=5):
    """q, k, v, cu_seqlens_q, cu_seqlens_k; rows that belong to nobody hold NaN."""
    hq, hkv, dim = heads
    shapes = (sum(queries), hq, dim), (sum(lens) + spare, hkv, dim), (sum(lens) + spare, hkv, dim)
    arrays = [
        rng.standard_normal(shape, np.float32).astype(cases.DTYPES[dtype]) for shape in shapes
    ]
    for x in arrays[1:]:
        x[sum(lens) :] = np.nan
    return [*arrays, *(np.cumsum((0, *n)).astype(np.int32) for n in (queries, lens))]


def oracle(arrays, longest, rounded_to=None, **options):
    return reference.attention_varlen(*arrays, *longest, **options, rounded_to=rounded_to)


OPTIONS = [
    {"causal": True},
    {},
    {"causal": True, "window": (3000, 0)},
    {"causal": True, "softcap": 5.0, "alibi_slopes": "heads", "sinks": "heads"},
    {"causal": True, "seqused_k": "used"},
]
TARGETS = harness.target_params(cpu=("auto",), cuda=("auto",))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [HEADS, (4, 2, 64), (10, 2, 48), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_right(device, backend, dtype, heads, options, rng):
    queries = 3 if "window" in options or not options else 1
    counts = [queries, 1, queries, 0, queries, min(queries, 2), queries, *(1 for _ in SHORT)]
    longest = (queries, max(LENS))
    options = dict(options)
    if device.name == "cuda":
        plan = explain(0, queries, max(LENS), len(LENS), heads, sum(LENS) + 5, dtype=dtype)
        pays = (dtype, heads, queries) != ("float32", HEADS, 3)  # simt reads them for 4 rows
        assert (STEP in plan.reason) == pays

    def attempt():
        arrays = make(counts, LENS, heads, dtype, rng)
        given = dict(options)
        for name in ("alibi_slopes", "sinks"):
            if name in given:
                given[name] = rng.uniform(0, 0.3, heads[0]).astype(np.float32)
        if "seqused_k" in given:
            given["seqused_k"] = (np.array(LENS, np.int32) * 2 + 2) // 3
        arena = harness.Arena(device)
        placed = [arena.put(x, name=n) for n, x in zip("qkvab", arrays, strict=True)]
        lent = {
            k: arena.put(x, name=k) if isinstance(x, np.ndarray) else x for k, x in given.items()
        }
        out, lse = cuattn.attention_varlen(
            *placed, *longest, **lent, backend=backend, return_lse=True
        )
        device.synchronize()
        arena.verify()
        exact, plain = (oracle(arrays, longest, x, **given) for x in (None, cases.DTYPES[dtype]))
        cases.check_lse(device.numpy(lse), exact[1], plain[1])
        cases.check(device.numpy(out), exact[0], plain[0], dtype)

    harness.assert_by_draws(dtype, attempt)


@pytest.mark.parametrize("storage", ["packed", "padded", "expanded"])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_storages(device, backend, storage, rng):
    """k and v as columns of one array, with gaps, and one head for all."""
    heads = (8, 2, 64)
    arrays = make((1,) * len(LENS), LENS, heads, "bfloat16", rng, spare=0)
    if storage == "expanded":
        for x in arrays[1:3]:
            x[:, 1] = x[:, 0]
    arena = harness.Arena(device)
    places = ["contiguous", storage, storage, "contiguous", "contiguous"]
    placed = [
        arena.put(x, place, name) for x, place, name in zip(arrays, places, "qkvab", strict=True)
    ]
    out = cuattn.attention_varlen(*placed, 1, max(LENS), causal=True, backend=backend)
    device.synchronize()
    arena.verify()
    longest = (1, max(LENS))
    exact, plain = (
        oracle(arrays, longest, x, causal=True)[0] for x in (None, cases.DTYPES["bfloat16"])
    )
    cases.check(device.numpy(out), exact, plain, "bfloat16")


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[0, 2**31 - 1], [-5, 9000], [20000, 3], [8999, 9100]], ids=str)
def test_wrong_lengths_on_the_device_are_clamped(ends, rng):
    """No access leaves the arrays; the sequence whose lengths are right stays right."""
    device = harness.Cuda()
    arrays = make(
        (1,) * (3 + len(SHORT)), (9000, 8000, 9000, *SHORT), HEADS, "float16", rng, spare=0
    )
    arena = harness.Arena(device)
    q, k, v, begins = (arena.put(x, name=n) for n, x in zip("qkva", arrays[:4], strict=True))

    def call(ends_k):
        placed = harness.Arena(device).put(np.array(ends_k, np.int32))
        return device.numpy(cuattn.attention_varlen(q, k, v, begins, placed, 1, 9000))

    out = call([0, 9000, *ends, *(ends[1] for _ in SHORT)])
    device.synchronize()
    arena.verify()
    first = [arrays[0][:1], *(x[:9000] for x in arrays[1:3]), *np.int32([[0, 1], [0, 9000]])]
    exact, plain = (oracle(first, (1, 9000), x)[0] for x in (None, cases.DTYPES["float16"]))
    cases.check(out[:1], exact, plain, "float16")  # the parts of its keys hang on all lengths


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_captured_call_follows_lengths(rng):
    """A replay reads cu_seqlens on the device. Eight threads get the same bits."""
    import torch

    device = harness.Cuda()
    lens = (9000, 3000, 5000, 1000, *SHORT)
    arrays = make((1,) * len(lens), lens, (8, 2, 128), "bfloat16", rng, spare=0)
    arena = harness.Arena(device)
    q, k, v, begins, ends = (arena.put(x, name=n) for n, x in zip("qkvab", arrays, strict=True))

    def call(_=None):
        return cuattn.attention_varlen(q, k, v, begins, ends, 1, 9000, causal=True, return_lse=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = call()
    for four in (lens[:4], (1, 9000, 8999, 0), (4500, 4500, 4500, 4500)):
        now = np.cumsum((0, *four, *SHORT)).astype(np.int32)
        ends.copy_(torch.tensor(now))
        exact, plain = (
            oracle([*arrays[:4], now], (1, 9000), x, causal=True)
            for x in (None, cases.DTYPES["bfloat16"])
        )
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        cases.check(device.numpy(out), exact[0], plain[0], "bfloat16")
        cases.check_lse(device.numpy(lse), exact[1], plain[1])
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for again, again_lse in pool.map(call, range(16)):
                torch.cuda.synchronize()
                assert torch.equal(again, out)
                assert torch.equal(again_lse, lse)
