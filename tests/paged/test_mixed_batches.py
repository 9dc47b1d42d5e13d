# SPDX-License-Identifier: Apache-2.0
"""attention_varlen over pages where some sequences have one query and others many: when the single
queries go by a kernel of their own, and that they are right. batch_invariant=True, which always has
it so on CUDA, is in test_paged_prefill.py.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re

import numpy as np
import pytest

import cases
import cuattn
import harness
import made_up_gpus
from paged_cases import PagedCase
from paged_prefill_cases import assert_case, make, oracle

APART = "; single queries go by a kernel of paged_attention"
SOONER = (
    r"\* (\w+) of paged_attention: runs: single queries, about (\d+) us sooner with (\d+) of them"
)


def explain_mixed(
    device, decodes=16, context=8192, chunk=512, heads=(32, 8), block_size=16, **options
):
    """The plan of a chunk beside single queries."""
    blocks, batch = (99, block_size, heads[1], 128), decodes + 1
    given = {
        "dtype": "bfloat16",
        "block_tables": (batch, -(-context // block_size)),
        "causal": True,
    }
    shapes = ((chunk + decodes, heads[0], 128), blocks, blocks, (batch + 1,), None)
    given |= {"seqused_k": (batch,), **options}
    return cuattn.explain("attention_varlen", *shapes, chunk, context, device=device, **given)


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_single_queries_go_apart_where_that_pays(gpu):
    def explained(**options):
        return explain_mixed(made_up_gpus.GPUS[gpu], **options)

    def saved_us(**options):
        plan = explained(**options)
        if APART not in plan.reason:
            assert "single queries" not in plan.ladder
            return 0
        assert plan.reason.endswith(APART)
        kernel, us, count = re.fullmatch(SOONER, plan.ladder.splitlines()[-1]).groups()
        assert kernel == plan.kernel == {"H100": "sm90", "A100": "sm80"}[gpu]
        assert int(count) == options.get("decodes", 16)
        return int(us)

    assert saved_us() > 100
    assert saved_us(decodes=32) > 1.8 * saved_us()
    assert saved_us(context=32768) > 3 * saved_us()
    assert saved_us(context=32768, window=(1023, 0)) < saved_us() / 4
    assert saved_us(softcap=30.0, sinks=(32,), alibi_slopes=(32,)) > 0
    # The other kernel has nothing to lose by short contexts, and none is a single query here.
    assert saved_us(context=64) == 0
    assert saved_us(decodes=0) == 0
    shapes = ((17 * 512, 32, 128), (99, 16, 8, 128), (99, 16, 8, 128), (18,), None, 512, 8192)
    options = {"block_tables": (17, 512), "seqused_k": (17,), "causal": True, "dtype": "bfloat16"}
    device = made_up_gpus.GPUS[gpu]
    prompts = cuattn.explain("attention_varlen", *shapes, device=device, **options)
    assert "single queries" not in prompts.reason
    # The two kernels share the workspace.
    whole, apart = explained(num_splits=1), explained()
    assert "single queries" not in whole.reason
    assert apart.workspace_bytes > whole.workspace_bytes
    # What the kernels of paged_attention do not serve stays with the other.
    for refused in ({"bias": (1, 8192)}, {"seqused_q": (17,)}, {"cu_seqlens_k": (18,)}):
        assert "single queries" not in explained(**refused).reason
    assert "single queries" not in explained(backend="naive").reason
    assert explain_mixed("cpu").reason.count("single queries") == 0


def test_heads_that_share_a_tile_leave_nothing_to_gain():
    """Of Hopper's kernel over pages with a head for each key head, where memory is the bound."""
    gpu = made_up_gpus.GPUS["H100"]
    assert "single queries" not in explain_mixed(gpu, heads=(8, 8)).reason
    assert "single queries" in explain_mixed(gpu, heads=(64, 8)).reason
    assert "single queries" in explain_mixed(gpu, heads=(8, 8), block_size=24).reason  # gathers


MIXED_OPTIONS = [
    {},
    {"window": (5000, 0), "sinks": True},
    {"softcap": 5.0, "alibi": "batch", "sinks": True},
    {"causal": False, "block_size": 8, "kv_layout": "hnd"},
    {"kv_layout": "vllm"},
]


@pytest.mark.parametrize("option", MIXED_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_single_queries_beside_others(device, backend, dtype, option, rng):
    """As many as pay, sequences with more queries and with none among them."""
    queries = (1, 70, 2, 0, 1, 1, 5, 1, 1, 0, 1, 1)
    lens = (6000, 100, 2200, 9, 1, 700, 0, 1025, 0, 3, 4095, 64)
    heads = {"num_heads_q": 40, "num_heads_kv": 8, "head_dim": 64}  # groups that fill no tile
    case = PagedCase(dtype=dtype, lens=lens, **heads, **option)
    problem = make(case, queries, rng)
    assert APART in explain_problem(device, problem).reason
    assert_case(device, backend, case, queries, rng)


def explain_problem(device, problem):
    case, arrays = problem.case, problem.arrays
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q")
    options = {k: v for k, v in problem.options.items() if k in ("causal", "window", "softcap")}
    options |= {k: arrays[k].shape for k in ("alibi_slopes", "sinks") if k in arrays}
    return cuattn.explain(
        "attention_varlen",
        *(arrays[name].shape for name in names),
        None,
        int(np.diff(arrays["cu_seqlens_q"]).max()),
        max(case.lens),
        block_tables=arrays["block_tables"].shape,
        seqused_k=(len(case.lens),),
        kv_layout=case.kv_layout,
        dtype=case.dtype,
        device="cpu" if device.name == "cpu" else 0,
        **options,
    )


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_captured_call_parts_other_batches(rng):
    """A graph reads on the device who has one query: a replay may part the batch otherwise. Eight
    threads that make the same calls get the same bits."""
    import torch

    device = harness.Cuda()
    lens = (4000, 300, 2500, 3900, 1300, 64, 77, 900)
    heads = {"num_heads_q": 40, "num_heads_kv": 8, "head_dim": 128}
    case = PagedCase(lens=lens, dtype="bfloat16", **heads)
    problem = make(case, (40, 1, 1, 1, 1, 1, 1, 1), rng)
    assert APART in explain_problem(device, problem).reason
    arena = harness.Arena(device)
    names = ("q", "k_cache", "v_cache", "block_tables")
    q, k, v, table = (arena.put(problem.arrays[name], name=name) for name in names)
    used = arena.put(np.array(lens, np.int32), name="seqused_k")
    ends = torch.tensor(problem.arrays["cu_seqlens_q"]).cuda()

    def call(ends):
        return cuattn.attention_varlen(
            q, k, v, ends, None, 40, 4000, block_tables=table, seqused_k=used, causal=True,
            return_lse=True,
        )  # fmt: skip

    call(ends)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = call(ends)
    for queries in (
        (1, 1, 38, 0, 1, 5, 1, 0),
        (1,) * 8,
        (6,) * 7 + (5,),
        (1, 40, 1, 1, 1, 1, 1, 1),
    ):
        ends.copy_(torch.tensor(np.cumsum((0, *queries)).astype(np.int32)))
        rows = sum(queries)
        arrays = {**problem.arrays, "cu_seqlens_q": np.cumsum((0, *queries)).astype(np.int32)}
        arrays["q"] = problem.arrays["q"][:rows]
        part = dataclasses.replace(problem, arrays=arrays)
        expected, plain = (oracle(part, x)[0] for x in (None, cases.DTYPES["bfloat16"]))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        cases.check(device.numpy(out)[:rows], expected, plain, "bfloat16")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for again, again_lse in pool.map(call, [ends] * 16):
                torch.cuda.synchronize()
                assert torch.equal(again[:rows], out[:rows])
                assert torch.equal(again_lse[:, :rows], lse[:, :rows])
