# SPDX-License-Identifier: Apache-2.0
"""Paged attention and the cache operations over caches of more than 2^32 elements.

The blocks of a small problem (paged_cases.py) are moved to both ends of huge caches, to where 31
and 32 bits overflow, and to random places between, so that the oracle stays small. What lies around
them is NaN on a GPU; on the CPU it is zeros that nobody touches, which take no memory.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import paged_prefill_cases
from cache_cases import LAYOUTS, cache_shape, to_nhd
from paged_cases import PagedCase
from strides import element_strides

CASE = PagedCase(head_dim=128, lens=(700, 33, 0, 1, 1100))
PER_BLOCK = CASE.block_size * CASE.num_heads_kv * CASE.head_dim  # elements
NUM_BLOCKS = 2**32 // PER_BLOCK + 3
# Blocks that a wrong offset confuses with others: the ends, and around 2^31 and 2^32 elements.
EDGES = [2**31 // PER_BLOCK + i for i in (-1, 0)] + [2**32 // PER_BLOCK + i for i in (-1, 0)]
EDGES = np.array([0, NUM_BLOCKS - 1, *EDGES])

ON_CUDA = [pytest.mark.gpu, pytest.mark.slow]


def kernels(dtype, fp8, kv_layout):
    """(device, backend) of all that take such caches."""
    if dtype != "float32":  # 34 GB, though nobody touches them
        yield harness.Cpu(), "cpu"
    if harness.why_no_cuda() is None:
        yield harness.Cuda(), "simt" if dtype == "float32" else "sm80"
    if dtype != "float32" and not fp8 and kv_layout != "vllm" and harness.has_hopper():
        yield harness.Cuda(), "sm90"


def targets(*kinds):
    """Parameters (device, backend, dtype, fp8, kv_layout) for kinds of (dtype, fp8)."""
    params = [] if harness.why_no_cuda() is None else [harness.skipped_cuda(*[None] * 5)]
    for (dtype, fp8), layout in itertools.product(kinds, LAYOUTS):
        for device, backend in kernels(dtype, fp8, layout):
            name = f"{device}-{backend}-{dtype}{'-fp8' * fp8}-{layout}"
            marks = ON_CUDA if device.name == "cuda" else []
            params.append(pytest.param(device, backend, dtype, fp8, layout, id=name, marks=marks))
    return pytest.mark.parametrize(("device", "backend", "dtype", "fp8", "kv_layout"), params)


def huge(device, shape, dtype):
    """An array of `shape`: NaN on a GPU, zeros on the CPU."""
    if device.name == "cpu":
        return np.zeros(shape, dtype)
    strides, size = element_strides(shape, "contiguous", 1)
    num_bytes = size * np.dtype(dtype).itemsize
    harness.need_memory(num_bytes / 2**30 + 1)
    return device.view(device.buffer(num_bytes), dtype, 0, shape, strides)


def spread(device, problem, rng):
    """The problem with its block ids moved, and the caches they name."""
    count = problem.arrays["k_cache"].shape[0]
    others = np.setdiff1d(rng.choice(NUM_BLOCKS, count, replace=False), EDGES)
    ids = rng.permutation(np.concatenate([EDGES, others])[:count]).astype(np.int32)
    caches = {}
    for name in ("k_cache", "v_cache"):
        small = problem.arrays[name]
        shape = (NUM_BLOCKS, *small.shape[1:])
        caches[name] = huge(device, shape, small.dtype)
        for block, values in zip(ids, small, strict=True):
            device.write(caches[name][int(block)], values)
    tables = problem.arrays["block_tables"].copy()
    for row, length in zip(tables, problem.case.lens, strict=True):
        used = -(-length // problem.case.block_size)
        row[:used] = ids[row[:used]]
    moved = dataclasses.replace(problem, arrays={**problem.arrays, "block_tables": tables})
    return moved, caches


@targets(("float32", False), ("bfloat16", False), ("bfloat16", True))
def test_paged_attention(device, backend, dtype, fp8, kv_layout, rng):
    """Keys cut as the library likes, as asked, and by a plan; decode and a few queries."""
    case = dataclasses.replace(CASE, dtype=dtype, fp8=fp8, kv_layout=kv_layout)

    def attempt():
        problem = paged_cases.make(case, rng)
        moved, caches = spread(device, problem, rng)
        for q_len in (None, 3):
            drawn = paged_cases.make(dataclasses.replace(case, q_len=q_len), rng)
            for p in (problem, moved):
                p.case, p.arrays["q"] = drawn.case, drawn.arrays["q"]
            plan = paged_cases.plan_of(device, backend, moved)
            for options in ({}, {"num_splits": 3}, {"plan": plan}):
                result = paged_cases.run(device, backend, moved, given=caches, **options)
                paged_cases.judge(problem, *result)

    harness.assert_by_draws(dtype, attempt)


@targets(("float32", False), ("bfloat16", False), ("bfloat16", True))
def test_paged_attention_v1_and_v2(device, backend, dtype, fp8, kv_layout, rng):
    options = (("scale", 0.125),)
    case = dataclasses.replace(CASE, dtype=dtype, fp8=fp8, kv_layout=kv_layout, options=options)

    def attempt():
        problem = paged_cases.make(case, rng)
        moved, caches = spread(device, problem, rng)
        for version in (1, 2):
            out = paged_cases.run_version(version, device, moved, given=caches)
            paged_cases.judge(problem, out, problem.reference()[1])

    harness.assert_by_draws(dtype, attempt)


@targets(("float32", False), ("bfloat16", False))
def test_chunked_prefill(device, backend, dtype, fp8, kv_layout, rng):
    case = dataclasses.replace(CASE, dtype=dtype, kv_layout=kv_layout)

    def attempt():
        problem = paged_prefill_cases.make(case, (100, 33, 0, 1, 300), rng)
        moved, caches = spread(device, problem, rng)
        out, lse = paged_prefill_cases.run(device, backend, moved, "seqused_k", given=caches)
        expected, expected_lse = paged_prefill_cases.oracle(problem)
        plain, plain_lse = paged_prefill_cases.oracle(problem, cases.DTYPES[dtype])
        cases.check_lse(lse, expected_lse, plain_lse)
        cases.check(out, expected, plain, dtype)

    harness.assert_by_draws(dtype, attempt)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize(
    "device",
    [harness.Cpu(), harness.skipped_cuda()]
    if harness.why_no_cuda()
    else [harness.Cpu(), pytest.param(harness.Cuda(), marks=ON_CUDA)],
    ids=str,
)
def test_cache_operations(device, kv_layout, rng):
    """Rows reach their slots in the first, the last and the critical blocks, and come back."""
    heads, dim, size = CASE.num_heads_kv, CASE.head_dim, CASE.block_size
    caches = [
        huge(device, cache_shape(kv_layout, NUM_BLOCKS, size, heads, dim, np.float16, is_k), "f2")
        for is_k in (True, False)
    ]

    def held(cache, block):
        block = device.numpy(cache[int(block)])[None]
        return to_nhd(block, kv_layout, cache is caches[0])[0]

    arena, blocks = harness.Arena(device), rng.permutation(EDGES)
    token = np.arange(len(blocks) * size)
    rows = rng.standard_normal((2, len(token), heads, dim)).astype(np.float16)
    k, v = (arena.put(x) for x in rows)
    slots = arena.put(blocks[token // size] * size + token % size, align=8)
    cuattn.reshape_and_cache(k, v, *caches, slots, kv_layout=kv_layout)
    for cache, values in zip(caches, rows, strict=True):
        for block, expected in zip(blocks, values.reshape(-1, size, heads, dim), strict=True):
            assert np.array_equal(held(cache, block), expected)

    table = arena.put(blocks[None].astype(np.int32), align=4)
    ends = arena.put(np.array([0, len(token)], np.int32), align=4)
    gathered = cuattn.gather_cache(*caches, table, ends, kv_layout=kv_layout)
    for got, expected in zip(gathered, rows, strict=True):
        assert np.array_equal(device.numpy(got), expected)

    last, middle = NUM_BLOCKS - 1, 2**31 // PER_BLOCK
    pairs = np.array([[last, 1], [0, last - 1], [middle, middle + 1]])
    cuattn.copy_blocks(*caches, pairs)
    for cache in caches:
        for source, copy in pairs:
            assert np.array_equal(held(cache, copy), held(cache, source))

    host = cuattn.pinned_empty((1, *caches[0].shape[1:]), "f2")
    cuattn.swap_blocks(caches[0], host, np.array([[last, 0]]))
    cuattn.swap_blocks(host, caches[0], np.array([[0, middle]]))
    device.synchronize()
    assert np.array_equal(held(caches[0], middle), held(caches[0], last))
    arena.verify()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}")
@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"window": (300, -1)}], ids=str)
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("backend", ["sm90", "sm80", "simt"])
def test_contexts_as_long_as_32_bits_count(torch, backend, kv_layout, options):
    """2^31 - 2048 tokens in a handful of blocks: one key of the last block outweighs all others."""
    if backend == "sm90" and not harness.has_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    size, dim, dtype = 256, 64, torch.float32 if backend == "simt" else torch.bfloat16
    blocks = (2**31 - 2048) // size
    axes = (3, size, 2, dim) if kv_layout == "nhd" else (3, 2, size, dim)
    k, v = (torch.zeros(axes, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.ones(1, 2, dim, device="cuda", dtype=dtype)
    place = (1, -2) if kv_layout == "nhd" else (1, slice(None), -2)
    k[place] = 8.0
    v[place] = torch.randn(2, dim, device="cuda", dtype=dtype)
    table = torch.zeros(1, blocks, device="cuda", dtype=torch.int32)
    table[0, -1] = 1
    lens = torch.tensor([blocks * size], device="cuda", dtype=torch.int32)
    out, lse = cuattn.paged_attention(
        q, k, v, table, lens, kv_layout=kv_layout, backend=backend, return_lse=True, **options
    )
    torch.testing.assert_close(out[0], v[place], rtol=1e-2, atol=1e-2)
    assert lse.cpu().numpy() == pytest.approx(64.0, abs=1e-3)  # 2^31 keys of score 0 add 4e-19
