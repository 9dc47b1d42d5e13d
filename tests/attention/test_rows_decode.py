# SPDX-License-Identifier: Apache-2.0
"""Dense attention of few queries over many keys, which goes by a kernel of paged_attention on CUDA:
the rows of a sequence are one block of a cache without a table.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import harness
import made_up_gpus
from cases import Case

STEP = "; few queries over many keys: a kernel of paged_attention"


def is_step(gpu, queries=1, keys=8192, batch=4, heads=(32, 8), dim=128, **options):
    shape, kv = (batch, queries, heads[0], dim), (batch, keys, heads[1], dim)
    return STEP in made_up_gpus.explain(gpu, shape=shape, kv=kv, **options).reason


def test_where_it_pays_on_hopper():
    assert is_step("H100")
    assert is_step("H100", queries=4, causal=True)  # 16 rows of a group
    assert is_step("H100", heads=(32, 32), queries=16)
    assert is_step("H100", heads=(12, 12), dim=64, batch=44)
    assert not is_step("H100", heads=(12, 12), dim=64, batch=45)  # rounds of blocks
    assert is_step("H100", keys=256, batch=300, dim=256, dtype="bfloat16")
    scores = dict(softcap=30.0, alibi_slopes=(32,), sinks=(32,), window=(5000, 0))
    assert is_step("H100", **scores)
    assert is_step("H100", **scores, seqused_k=(4,))
    assert not is_step("H100", queries=5)
    assert not is_step("H100", keys=255)
    assert not is_step("H100", window=(200, 0))
    for option in (
        dict(bias=(1, 8192)),
        dict(dropout_p=0.5, dropout_seed=1),
        dict(seqused_q=(4,)),
        dict(kv_start=(4,)),
        dict(batch_invariant=True),
        dict(num_splits=2),
        dict(backend="sm90"),
        dict(dim=512),
        dict(v=(4, 8192, 8, 64)),
    ):
        assert not is_step("H100", **option), option


def test_where_it_pays_elsewhere():
    """The kernels of attention give each head a tile there; heads without a group lose little."""
    assert is_step("A100", batch=16)
    assert not is_step("A100", batch=2, keys=256)
    assert not is_step("A100", heads=(8, 8))
    assert is_step("A100", batch=16, dtype="float32") == is_step("L4", batch=16, dtype="float32")


def test_alike_splits_need_no_deal():
    def plan(batch, keys, heads=(32, 8), dim=128, **options):
        shape, kv = (batch, 1, heads[0], dim), (batch, keys, heads[1], dim)
        return made_up_gpus.explain("H200", shape=shape, kv=kv, **options)

    assert plan(16, 8192).num_splits == 1  # 128 blocks of 132
    assert plan(16, 8192).workspace_bytes == 0
    assert plan(8, 8192).num_splits == 1  # 64 blocks take all that memory gives
    assert plan(4, 8192).num_splits == 2  # 32 do not
    assert plan(4, 8192).workspace_bytes == 4 * 2 * 4 * 32 * (128 + 1)
    assert plan(20, 8192).num_splits == 4  # 160 blocks: the last 28 would be alone, of 640 few are
    assert plan(6, 1024, (16, 8), 256).num_splits == 1
    assert plan(1, 1024, (32, 32)).cluster == 4
    shape, kv = (8, 1, 32, 128), (8, 8192, 8, 128)
    # One of eight may have most of the keys.
    assert made_up_gpus.explain("H200", shape=shape, kv=kv, seqused_k=(8,)).num_splits == 2


DENSE = {
    "decode": dict(seqlen_q=1, seqlen_kv=1111),
    "causal": dict(seqlen_q=4, seqlen_kv=700, causal=True),
    "window": dict(seqlen_q=3, seqlen_kv=900, window=(600, 0)),
    "two_sided": dict(seqlen_q=4, seqlen_kv=900, window=(600, 2)),
    "softcap": dict(seqlen_q=2, seqlen_kv=400, softcap=5.0, sinks=True),
    "alibi": dict(seqlen_q=4, seqlen_kv=430, alibi="batch", causal=True),
    "lengths": dict(batch=5, seqlen_q=2, seqlen_kv=600, seqused="k", causal=True),
    "long": dict(batch=1, seqlen_q=1, seqlen_kv=9000),
    "splits": dict(batch=5, seqlen_q=3, seqlen_kv=5000, causal=True),
    "many_lengths": dict(batch=16, num_heads_kv=8, seqlen_q=1, seqlen_kv=4000, seqused="k"),
    "long_lengths": dict(batch=3, seqlen_q=1, seqlen_kv=9000, seqused="k"),
    "many": dict(batch=40, seqlen_q=1, seqlen_kv=300),
    "rounds": dict(batch=67, num_heads_kv=4, seqlen_q=1, seqlen_kv=300),
    "one_head": dict(num_heads_q=1, num_heads_kv=1, seqlen_q=16, seqlen_kv=513),
    "mqa": dict(num_heads_q=5, num_heads_kv=1, seqlen_q=3, seqlen_kv=513, causal=True),
    "heads_first": dict(seqlen_q=3, seqlen_kv=333, layout="bhsd", causal=True),
    "strided": dict(seqlen_q=3, seqlen_kv=333, storage="packed"),
    "scale": dict(seqlen_q=3, seqlen_kv=333, scale=0.3, give_out=False),
}


@pytest.mark.parametrize("name", DENSE)
def test_the_cases_go_by_the_step(name):
    case = Case(**{"num_heads_q": 8, "head_dim": 128, **DENSE[name]})
    options = {"seqused_k": (case.batch,)} if case.seqused == "k" else {}
    heads = case.num_heads_q, case.num_heads_kv
    shape = case.seqlen_q, case.seqlen_kv, case.batch, heads, case.head_dim
    assert is_step("H200", *shape, **options)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_rows_equal_the_formula(device, backend, head_dim, dtype, name, rng):
    case = Case(**{"num_heads_q": 8, "dtype": dtype, "head_dim": head_dim, **DENSE[name]})
    harness.assert_case(device, backend, case, rng)


@pytest.mark.parametrize("name", ["decode", "causal", "lengths", "heads_first"])
@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_rows_of_float32_equal_the_formula(device, backend, name, rng):
    case = Case(**{"num_heads_q": 16, "batch": 16, **DENSE[name]})
    harness.assert_case(device, backend, dataclasses.replace(case, seqlen_kv=2000), rng)


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_captured_call_over_a_growing_cache(rng):
    """Views of a cache, which has room for more tokens; a replay follows seqused_k."""
    import torch

    import cuattn

    torch.manual_seed(int(rng.integers(2**31)))
    cache = torch.randn(2, 3, 4096, 4, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(3, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
    for length in (300, 4095):
        k, v = cache[0, :, :length], cache[1, :, :length]
        assert STEP in cuattn.explain("attention", q, k, v).reason
        got = cuattn.attention(q, k, v)
        want = cuattn.attention(q.float(), k.float(), v.float(), backend="simt")
        torch.testing.assert_close(got.float(), want, atol=1e-2, rtol=1e-2)
    used = torch.tensor([5, 0, 4096], device="cuda", dtype=torch.int32)
    call = {"seqused_k": used, "causal": True, "return_lse": True}
    cuattn.attention(q, *cache, **call)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = cuattn.attention(q, *cache, **call)
    for lengths in ((5, 0, 4096), (4096, 77, 1)):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        for b, n in enumerate(lengths):
            if n == 0:
                assert not out[b].any()
                assert torch.isneginf(lse[b]).all()
                continue
            alone = (x[b : b + 1].float() for x in (q, cache[0, :, :n], cache[1, :, :n]))
            want, want_lse = cuattn.attention(*alone, backend="simt", return_lse=True)
            torch.testing.assert_close(out[b : b + 1].float(), want, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(lse[b : b + 1], want_lse, atol=2e-3, rtol=1e-4)
    assert np.isfinite(out.float().cpu().numpy()).all()
