# SPDX-License-Identifier: Apache-2.0
"""PagedAttention V1 and V2, and the buffers of V2, against float64."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import harness
import paged_cases
import reference
from paged_cases import HALF, HEAD_DIMS, HEADS, PagedCase


def version_params():
    factors = {
        "dtype": ["float32", "float16", "bfloat16", "float16-fp8"],
        "head_dim": HEAD_DIMS,
        "layout": [("vllm", 8), ("vllm", 16), ("vllm", 32), ("nhd", 16), ("hnd", 64)],
        "heads": HEADS,
        "alibi": ["none", "head"],
        "lens": [(37, 1, 0, 130), (1100, 512, 513, 1), (2050,)],
        "scales": ["none", "float", "head"],
    }
    for row in cases.pairwise(factors):
        dtype, _, fp8 = row["dtype"].partition("-")
        yield PagedCase(
            dtype=dtype,
            fp8=bool(fp8),
            head_dim=row["head_dim"] // 16 * 16 if fp8 else row["head_dim"],
            kv_layout=row["layout"][0],
            block_size=row["layout"][1],
            num_heads_q=row["heads"][0],
            num_heads_kv=row["heads"][1],
            alibi=row["alibi"],
            lens=row["lens"],
            scales=row["scales"] if fp8 else "none",
            options=(("scale", 0.125),),
        )


@pytest.mark.parametrize("case", list(version_params()), ids=str)
def test_v1_and_v2(device, case, rng):
    def attempt():
        problem = paged_cases.make(case, rng)
        _, lse = problem.reference()
        for version in (1, 2):
            out = paged_cases.run_version(version, device, problem)
            paged_cases.judge(problem, out, lse)

    harness.assert_by_draws(case.dtype, attempt)


@pytest.mark.parametrize("context", [500, 1250, 2500, 3500])
def test_v2_of_one_sequence(device, context, rng):
    """64 to 448 partitions: twice the warps, a block each, a stage less, two in turn on an H200."""
    case = PagedCase(
        kv_layout="vllm",
        dtype="float16",
        num_heads_q=32,
        num_heads_kv=32,
        head_dim=128,
        lens=(context,),
        options=(("scale", 0.125),),
    )
    problem = paged_cases.make(case, rng)
    out = paged_cases.run_version(2, device, problem, partition_size=256)
    paged_cases.judge(problem, out, problem.reference()[1])


@pytest.mark.parametrize("partition_size", [256, 512, 1024])
@pytest.mark.parametrize(
    ("dtype", "fp8"), [*((name, False) for name in cases.DTYPES), *((name, True) for name in HALF)]
)
@pytest.mark.parametrize(("kv_layout", "block_size"), [("vllm", 16), ("nhd", 1), ("hnd", 48)])
@pytest.mark.parametrize("lens", [(1100, 256, 1, 0, 2048), (256, 0, 37)], ids=["long", "short"])
def test_v2_buffers(device, lens, kv_layout, block_size, dtype, fp8, partition_size, rng):
    """Each partition holds its maximum, its sum and its output; the others keep what they held."""
    case = PagedCase(
        kv_layout=kv_layout,
        block_size=block_size,
        dtype=dtype,
        fp8=fp8,
        lens=lens,
        alibi="batch",
        scales="head" if fp8 else "none",
        options=(("scale", 0.25),),
    )
    check_v2_buffers(device, paged_cases.make(case, rng), partition_size)


@pytest.mark.parametrize("partition_size", [256, 512, 1024])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("top", [0, 511, 512, 1023, 1024, 1500])
def test_v2_buffers_hold_the_maximum_wherever_it_lies(device, top, dtype, partition_size, rng):
    """One key outweighs all others: in the first, the last or a middle chunk of its partition."""
    case = PagedCase(dtype=dtype, lens=(2048, 1100), options=(("scale", 0.25),))
    problem = paged_cases.make(case, rng)
    arrays = problem.arrays
    for b, length in enumerate(case.lens):
        if top < length:
            block, token = arrays["block_tables"][b, top // 16], top % 16
            for h in range(case.num_heads_kv):
                q = arrays["q"][b, h * 4].astype(np.float32)
                arrays["k_cache"][block, token, h] = 2 * q
    check_v2_buffers(device, problem, partition_size)


def check_v2_buffers(device, problem, partition_size):
    """Run V2 into buffers of ours and hold each partition against float64."""
    case = problem.case
    dtype, lens, kv_layout = case.dtype, case.lens, case.kv_layout
    capacity = problem.arrays["block_tables"].shape[1] * case.block_size
    shape = (len(lens), case.num_heads_q, -(-capacity // partition_size))
    arena = harness.Arena(device)
    buffers = {
        "exp_sums": arena.output(shape, np.float32),
        "max_logits": arena.output(shape, np.float32),
        "tmp_out": arena.output((*shape, case.head_dim), cases.DTYPES[dtype]),
    }
    out = paged_cases.run_version(
        2, device, problem, scale=0.25, partition_size=partition_size, **buffers
    )
    _, lse = problem.reference()
    paged_cases.judge(problem, out, lse)
    arrays = problem.arrays
    max_logits, exp_sums, tmp_out = reference.paged_partitions(
        arrays["q"],
        *problem.caches(),
        arrays["block_tables"],
        arrays["context_lens"],
        scale=0.25,
        partition_size=partition_size,
        kv_layout=kv_layout,
        **{name: arrays[name] for name in ("alibi_slopes", "k_scale", "v_scale") if name in arrays},
    )
    got = {name: device.numpy(array).astype(np.float64) for name, array in buffers.items()}
    used = ~np.isnan(max_logits)
    assert used.sum() < used.size
    # Scores of 600 and more, in float32; else probabilities and outputs are rounded to the dtype.
    eps = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(got["max_logits"][used], max_logits[used], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["exp_sums"][used], exp_sums[used], rtol=3e-4)
    np.testing.assert_allclose(got["tmp_out"][used], tmp_out[used], atol=eps, rtol=eps)
    for name in got:
        assert np.isnan(got[name][~used]).all(), f"{name}: a partition past the context was written"
    arena.verify()


def test_max_context_len_bounds_the_partitions(device, rng):
    case = PagedCase(kv_layout="vllm", lens=(600, 30), options=(("scale", 0.125),))
    problem = paged_cases.make(case, rng)
    arena = harness.Arena(device)
    buffers = {name: arena.output((2, 8, 2), np.float32) for name in ("exp_sums", "max_logits")}
    out = paged_cases.run_version(2, device, problem, max_context_len=600, **buffers)
    paged_cases.judge(problem, out, problem.reference()[1])
