# SPDX-License-Identifier: Apache-2.0
"""What ranks compute of options that count places, without transport: on one device, any."""

from __future__ import annotations

import itertools
import types

import pytest

import frameworks

torch = frameworks.require("torch")
from jobs import draw, generator, largest  # noqa: E402

import cuattn  # noqa: E402
import harness  # noqa: E402
from cuattn.parallel import Layout  # noqa: E402
from cuattn.parallel.attend import Dropout, Problem, attend  # noqa: E402
from cuattn.parallel.decode import MOST_PLACES, list_places, local_lens  # noqa: E402
from cuattn.parallel.schemes import Scheme  # noqa: E402

SEQLEN, HEADS, DIMS = 600, (4, 2), (64, 64)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and (harness.why_no_cuda() or harness.is_emulated()):
        pytest.skip(harness.why_no_cuda() or "torch sees no emulated device")
    with torch.device(request.param):
        yield request.param


def near(got, want, dtype, what):
    bound = (2e-5 if dtype == "float32" else 4 * 2.0**-8) * (1 + float(want.abs().max()))
    assert largest(got, want) <= bound, (what, largest(got, want), bound)


def whole_of(seed, dtype, options):
    """Arrays, the result of one call, what comes back, and the gradients that one call gives."""
    arrays = draw(seed, SEQLEN, HEADS, DIMS, dtype)
    out, lse = cuattn.attention(*arrays, **options, return_lse=True)
    g = generator(seed)
    dout = torch.randn(out.shape, generator=g).to(out.dtype)
    dlse = torch.where(lse.isfinite(), torch.randn(lse.shape, generator=g), 0.0)
    need = ("dq", "dk", "dv", *(("dslopes",) if "alibi_slopes" in options else ()))
    found = cuattn.attention_backward(
        dout, *arrays, out, lse, **options, dlse=dlse, need=need, deterministic=True
    )
    return arrays, (dout, out, lse, dlse), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["slopes", "slopes of sequences", "used", "dropout"])
def test_gradients_of_all_pairs_of_ranks_are_those_of_the_whole(name, dtype, device, seed):
    g = generator(seed)
    used = slopes = dropout = None
    if name == "dropout":
        drops = {"dropout_p": 0.25, "dropout_seed": seed, "dropout_offset": 7}
        options, dropout = {"causal": True, **drops}, Dropout(drops, HEADS[0])
    elif name == "used":
        used = torch.tensor([SEQLEN, 257], dtype=torch.int32)
        options = {"causal": True, "seqused_q": used, "seqused_k": used}
    else:
        shape = (HEADS[0],) if name == "slopes" else (2, HEADS[0])
        slopes = torch.rand(shape, generator=g) / 8
        options = {"causal": True, "alibi_slopes": slopes}
    arrays, result, want = whole_of(seed, dtype, options)
    dslopes = None if slopes is None else torch.zeros_like(slopes)
    problem = Problem(
        (-1, 0), slopes=slopes, dslopes=dslopes, used=used, dropout=dropout, deterministic=True
    )
    layout, size = Layout("zigzag", SEQLEN, 3), 3
    shards = [[layout.shard(x, rank) for x in arrays] for rank in range(size)]
    sums = [[torch.zeros(x.shape) for x in own] for own in shards]
    for rank in range(size):
        scheme = Scheme(types.SimpleNamespace(rank=rank, size=size), layout, problem)
        mine = [layout.shard(x, rank, 1 if x.ndim == 4 else 2).contiguous() for x in result]
        for owner in range(size):
            _, k, v = shards[owner]
            into = (sums[rank][0], *sums[owner][1:], None)
            scheme.differentiate(problem, shards[rank][0], k, v, None, mine, owner, into)
    for rank in range(size):
        for array, got, whole in zip("qkv", sums[rank], want, strict=False):
            near(got, layout.shard(whole, rank).float(), dtype, array)
    if dslopes is not None:
        assert float(want[3].abs().max()) > 1.0
        near(dslopes, want[3], dtype, "slopes")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "used"])
def test_rows_and_heads_of_a_rank_drop_what_the_whole_drops(name, dtype, device, seed):
    drops = {"dropout_p": 0.25, "dropout_seed": seed, "dropout_offset": 7}
    used = torch.tensor([257, SEQLEN], dtype=torch.int32) if name == "used" else None
    lengths = {} if used is None else {"seqused_q": used, "seqused_k": used}
    arrays, result, _ = whole_of(seed, dtype, {"causal": True, **drops, **lengths})
    size, layout = 2, Layout("zigzag", SEQLEN, 2)
    for rank, share in itertools.product(range(size), range(size)):
        heads, kv = (slice(share * n // size, (share + 1) * n // size) for n in HEADS)
        problem = Problem((-1, 0), used=used, dropout=Dropout(drops, HEADS[0])).of_heads(heads)
        scheme = Scheme(types.SimpleNamespace(rank=rank, size=size), layout, problem)
        q, k, v = (x[:, :, h] for x, h in zip(arrays, (heads, kv, kv), strict=True))
        q = layout.shard(q, rank)
        want = (
            layout.shard(result[1][:, :, heads], rank),
            layout.shard(result[2][:, heads], rank, 2),
        )
        out, lse = (torch.full_like(x, torch.nan) for x in want)
        for call, rows, _, _ in scheme.forward_calls(q, k, v, None):
            attend(call, None, out[:, rows], lse[..., rows])
        near(out, want[0], dtype, ("out", rank, share))
        assert largest(lse, want[1]) <= 1e-4


def test_one_kernel_counts_the_local_lengths(device, seed):
    """How many places in the list of a rank lie before the end; lengths beyond it end with it."""
    g = generator(seed)
    for size, turn in itertools.product((1, 2, 3, 8), (1, 16, 48)):
        lens = torch.randint(0, 1024 * size, (9,), generator=g).to(torch.int32)
        lens[:3] = torch.tensor([0, 1, 1024 * size], dtype=torch.int32)
        found = []
        for rank in range(size):
            places = list_places(1000, (rank, size, turn), lens.device)
            found.append(torch.bucketize(lens, places, out_int32=True))
            assert len(places) == 1024
            last = torch.tensor([2**31 - 1], dtype=torch.int32)
            assert torch.bucketize(last, places, out_int32=True).tolist() == [1024]
            by_formula = local_lens(lens, rank=rank, size=size, interleave=turn)
            assert torch.equal(found[-1], by_formula.clamp(max=1024))
        if turn == 16:
            assert torch.equal(sum(found), lens)
    assert list_places(MOST_PLACES + 1, (0, 2, 16), lens.device) is None
    assert list_places(1000, (0, 2, 16), lens.device) is list_places(1024, (0, 2, 16), lens.device)
