# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel where it differs from the others: heads of a group in one tile, tiles drawn by
persistent CTAs, arrays seen through the TMA. Split keys are in test_splits_sm90.py.

What every backend owes is in test_prefill.py, test_prefill_values.py, test_properties.py,
test_streams_graphs.py and test_limits.py, which run on sm90 too; what its plans look like is in
test_plan_sm90.py.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

import cuattn
from cases import EPS, Case, lowest, make_problem, random_case
from harness import Cuda, assert_by_draws, assert_case, bits, has_hopper, judge, run
from split_cases import plan_of, same_bits, with_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not has_hopper(), reason="needs a GPU of compute capability 9.0"),
]
CUDA = Cuda()
HALF = ("float16", "bfloat16")


@pytest.mark.parametrize("number", range(160))
def test_odd_lengths_with_any_options(number, rng):
    seqlen_q, seqlen_kv = (2 * int(n) + 1 for n in rng.integers(0, 150, size=2))
    case = dataclasses.replace(
        random_case(rng), dtype=HALF[number % 2], seqlen_q=seqlen_q, seqlen_kv=seqlen_kv
    )
    print(case)  # shown when the test fails
    if number % 3 == 0:
        assert_in_large_tiles(case, rng)
    else:
        assert_case(CUDA, "sm90", case, rng)


def assert_in_large_tiles(case, rng):
    """Short rows in the tiles of long ones, as in a batch invariant call."""

    def attempt():
        problem = make_problem(case, rng)
        judge(problem, *run(CUDA, "sm90", with_options(problem, batch_invariant=True)))

    assert_by_draws(case.dtype, attempt)


TILES = {
    "bias": dict(batch=5, seqlen_q=64, seqlen_kv=64, bias="full", num_heads_kv=4),
    "odd_bias": dict(batch=7, seqlen_q=49, seqlen_kv=49, bias="heads", head_dim=32),
    "softcap": dict(batch=3, seqlen_q=60, seqlen_kv=60, softcap=5.0, sinks=True),
    "alibi": dict(batch=3, seqlen_q=64, seqlen_kv=64, alibi="batch", causal=True),
    "scored_ragged": dict(
        **dict(batch=30, seqlen_q=70, seqlen_kv=70, layout="ragged"),
        **dict(softcap=5.0, alibi="head", window=(40, 0), num_heads_q=6, num_heads_kv=6),
    ),
    "one": dict(seqlen_q=64, seqlen_kv=64),
    "odd": dict(batch=5, seqlen_q=197, seqlen_kv=197, num_heads_q=6),
    "causal": dict(batch=3, seqlen_q=333, seqlen_kv=400, causal=True),
    "window": dict(seqlen_q=700, seqlen_kv=700, window=(64, 64)),
    "sinks": dict(seqlen_q=500, seqlen_kv=500, window=(127, 0), sinks=True, num_heads_kv=1),
    "few_keys": dict(seqlen_q=1000, seqlen_kv=77),
    "few_queries": dict(seqlen_q=7, seqlen_kv=3000),
    "empty_rows": dict(seqlen_q=300, seqlen_kv=90, causal=True),
    "lengths": dict(batch=4, seqlen_q=200, seqlen_kv=150, seqused="both"),
    "ragged": dict(
        batch=40, num_heads_q=6, num_heads_kv=6, seqlen_q=256, seqlen_kv=256, layout="ragged"
    ),
    "heads_first": dict(seqlen_q=130, seqlen_kv=190, layout="bhsd", head_dim=40, head_dim_v=56),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", HALF)
def test_small_tiles_and_large_ones_are_right(dtype, name, rng):
    case = Case(dtype, **TILES[name])
    assert plan_of(case, backend="sm90").tile_m == 64 < plan_of(case, batch_invariant=True).tile_m
    assert_case(CUDA, "sm90", case, rng)
    assert_in_large_tiles(case, rng)


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 40)}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (192, 128), (256, 256)])
def test_more_tiles_than_ctas_in_a_ragged_batch(dims, mask, rng):
    """Sequences from 0 to 300 keys: every CTA draws several tiles, some of them empty."""
    case = Case("bfloat16", 36, 6, 2, 300, 300, *dims, layout="ragged", **MASKS[mask])
    assert_case(CUDA, "sm90", case, rng)


# Batch, lengths, heads, head dims, options: K and V of all heads exceed what shares L2.
LARGE = {
    "causal": ((2, 4096, 4096, 16, 16, 128, 128), {"causal": True}),
    "grouped": ((2, 4096, 4096, 32, 8, 128, 128), {"causal": True}),
    "narrow": ((1, 8192, 8192, 40, 40, 64, 64), {}),
    "wide-window": ((2, 3001, 3001, 20, 20, 256, 256), {"window": (500, 100)}),
    "latent": ((3, 2999, 3100, 16, 16, 192, 128), {"causal": True}),
    "softcap": ((1, 5003, 5003, 24, 6, 96, 96), {"causal": True, "softcap": 20.0}),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_problems_agree_with_float32(torch, name):
    (batch, seqlen_q, seqlen_kv, heads_q, heads_kv, dim, dim_v), options = LARGE[name]
    generator = torch.Generator("cuda").manual_seed(5)
    qkv = [
        torch.randn(batch, n, h, d, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n, h, d in (
            (seqlen_q, heads_q, dim),
            (seqlen_kv, heads_kv, dim),
            (seqlen_kv, heads_kv, dim_v),
        )
    ]
    out, lse = cuattn.attention(*qkv, **options, backend="sm90", return_lse=True)
    plain = cuattn.attention(*qkv, **options, backend="sm80")
    wide = [x.float() for x in qkv]
    exact, exact_lse = cuattn.attention(*wide, **options, backend="simt", return_lse=True)
    error, plain_error = out.float() - exact, plain.float() - exact
    eps = EPS["bfloat16"]
    assert error.abs().max() <= 2 * plain_error.abs().max() + eps * exact.abs().max()
    assert error.norm() <= 2 * plain_error.norm() + eps * exact.norm()
    torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=1e-4)


PACKED = {
    "decode": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=1, seqlen_kv=333),
    "one_group": dict(num_heads_q=64, num_heads_kv=1, seqlen_q=3, seqlen_kv=150, head_dim=128),
    "three": dict(num_heads_q=6, num_heads_kv=2, seqlen_q=50, seqlen_kv=170),
    "causal": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=37, seqlen_kv=190, causal=True),
    "window": dict(num_heads_q=16, num_heads_kv=2, seqlen_q=29, seqlen_kv=300, window=(140, 9)),
    "empty_rows": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=60, seqlen_kv=20, causal=True),
    "sinks": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=11, seqlen_kv=100, sinks=True),
    "lengths": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=30, seqlen_kv=300, seqused="both"),
    "wide": dict(num_heads_q=8, num_heads_kv=1, seqlen_q=5, seqlen_kv=301, head_dim=256),
    "strided": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=9, seqlen_kv=99, storage="packed"),
    "heads_first": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=9, seqlen_kv=99, layout="bhsd"),
    "capped": dict(num_heads_q=8, num_heads_kv=2, seqlen_q=7, seqlen_kv=300, softcap=9.0),
    "capped_causal": dict(
        **dict(num_heads_q=16, num_heads_kv=1, seqlen_q=33, seqlen_kv=400, causal=True),
        **dict(softcap=3.0, sinks=True, head_dim=256),
    ),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", HALF)
def test_heads_of_a_group_in_one_tile(dtype, name, rng):
    case = Case(dtype, **PACKED[name])
    large = name in ("three", "empty_rows")  # small tiles are no multiple of them, or full
    plan = plan_of(case, batch_invariant=large, backend="sm90")
    assert plan.packed_heads == case.num_heads_q // case.num_heads_kv
    (assert_in_large_tiles if large else partial(assert_case, CUDA, "sm90"))(case, rng)
    if case.layout == "bshd":
        assert_case(CUDA, "sm90", dataclasses.replace(case, layout="ragged"), rng)


@pytest.mark.parametrize("scored", [dict(alibi="head"), dict(bias="full"), dict(softcap=9.0)])
def test_scores_of_each_head_in_a_group_of_short_queries(scored, rng):
    assert_case(CUDA, "sm90", Case("float16", 2, 8, 2, 5, 300, 64, **scored), rng)


LOWEST_SCORE = np.float32(np.finfo(np.float32).min * np.log(2))
# Rows of a multiple of 8 elements: the TMA can bring them.
BIASED = {
    "full": dict(),
    "one_key_tile": dict(seqlen_kv=8),
    "rows": dict(bias="rows", batch=3),
    "causal": dict(causal=True, seqlen_q=400, head_dim=64),
    "window": dict(window=(70, 30), seqlen_q=300, head_dim=96),
    "window_128": dict(window=(150, 0), seqlen_q=500),
    "ragged": dict(layout="ragged", batch=5, causal=True),
    "heads_first": dict(layout="bhsd", head_dim=80),
    "lengths": dict(seqused="both", batch=4),
    "empty_rows": dict(causal=True, seqlen_q=300, seqlen_kv=40),
    "after_softcap": dict(softcap=9.0),
    "after_alibi": dict(alibi="batch", causal=True),
    "wide": dict(head_dim=256),  # read from where it lies
    "float32": dict(bias="float32"),  # likewise
    "many_items": dict(batch=9, num_heads_q=16, num_heads_kv=2, seqlen_q=200, seqlen_kv=264),
}


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("dtype", HALF)
def test_bias_in_boxes(dtype, name, rng):
    shape = dict(batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=150, seqlen_kv=520, head_dim=128)
    case = Case(dtype, **{"bias": "full", **shape, **BIASED[name]})
    assert_case(CUDA, "sm90", case, rng)

    def hide(problem):
        bias = problem.arrays["bias"]
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        bias[..., 3, :] = -np.inf

    assert_case(CUDA, "sm90", case, rng, hide)

    def attempt():
        problem = make_problem(case, rng)
        bias = problem.arrays["bias"]
        bias[..., ::3, -200:] = lowest(bias)
        bias[rng.random(bias.shape) < 0.2] = lowest(bias)
        # One part: beside such scores lse has no room for the number of keys, which weighs parts.
        out, lse = run(CUDA, "sm90", with_options(problem, num_splits=1))
        # Kernels take a score that is no float in base 2 for the lowest that is.
        problem.arrays["bias"] = np.maximum(bias, LOWEST_SCORE, dtype=np.float32)
        judge(problem, out, lse)

    assert_by_draws(dtype, attempt)


REPEATED = {
    "drawn": dict(batch=20, causal=True),
    "wide": dict(batch=10, head_dim=256, causal=True),
    "fixed": dict(batch=10, head_dim=128),
    "window": dict(batch=10, head_dim=128, window=(90, 20)),
    "scored": dict(batch=20, head_dim=96, causal=True, softcap=20.0),
    "bias": dict(batch=20, head_dim=128, seqlen_kv=336, bias="full"),
    "ragged": dict(batch=50, layout="ragged", head_dim=128, causal=True),
    "ragged_split": dict(batch=3, layout="ragged", seqlen_kv=2000, head_dim=128, causal=True),
    "packed": dict(batch=60, seqlen_q=9, head_dim=128),
}


@pytest.mark.parametrize("name", [*REPEATED, "split"])
def test_a_thousand_launches_give_the_same_bits(torch, name, rng):
    shape = dict(dtype="bfloat16", num_heads_q=8, num_heads_kv=2, seqlen_q=290, seqlen_kv=333)
    options = {"num_splits": 3} if name == "split" else {}
    case = Case(**{**shape, **REPEATED.get(name, {})})
    problem = make_problem(case, rng)
    arrays = {n: torch_copy(x) for n, x in problem.arrays.items()}
    positional = [arrays.pop(n) for n in "qkv"]
    function = cuattn.attention
    if case.layout == "ragged":
        function = cuattn.attention_varlen
        positional += [arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k"), *problem.lengths]
    out = torch.zeros((*positional[0].shape[:-1], case.dim_v), dtype=torch.bfloat16, device="cuda")
    lse_shape = (out.shape[0], out.shape[2], out.shape[1])
    lse = torch.zeros(lse_shape if out.ndim == 4 else out.shape[1::-1], device="cuda")
    options |= dict(problem.options, backend="sm90", out=out, lse_out=lse)
    function(*positional, **arrays, **options)
    first, first_lse = out.clone(), lse.clone()
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        function(*positional, **arrays, **options)
        changed += (out.view(torch.int16) != first.view(torch.int16)).sum()
        changed += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert changed.item() == 0


def torch_copy(values):
    view = CUDA.view(CUDA.buffer(values.nbytes), values.dtype, 0, values.shape, strides_of(values))
    CUDA.write(view, values)
    return view


def strides_of(values):
    return [n // values.itemsize for n in values.strides]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_batch_invariant_rows_are_the_same_alone_in_a_batch_and_packed_or_not(head_dim, mask, rng):
    rows, keys, heads, heads_kv = 20, 700, 8, 2
    mates = (1, 3, 130)  # around as many sequences as the GPU has multiprocessors
    case = Case("bfloat16", mates[-1], heads, heads_kv, rows, keys, head_dim, **MASKS[mask])
    problem = with_options(make_problem(case, rng), batch_invariant=True)
    arrays, results = problem.arrays, []
    for batch in mates:
        part = {name: x[:batch] for name, x in arrays.items()}
        smaller = dataclasses.replace(case, batch=batch)
        out, lse = run(CUDA, "sm90", dataclasses.replace(problem, case=smaller, arrays=part))
        results.append((out[0], lse[0]))
    # Beside a sequence whose queries fill tiles by themselves, heads do not share one.
    long = 512
    assert plan_of(case, backend="sm90").packed_heads == heads // heads_kv
    assert plan_of(dataclasses.replace(case, seqlen_q=long)).packed_heads == 1
    mate = make_problem(dataclasses.replace(case, batch=1, seqlen_q=long, seqlen_kv=90), rng)
    joined = {n: np.concatenate([mate.arrays[n][0], arrays[n][0]]) for n in "qkv"}
    for name, n, more in (("cu_seqlens_q", long, rows), ("cu_seqlens_k", 90, keys)):
        joined[name] = np.array([0, n, n + more], np.int32)
    options = {n: x for n, x in problem.options.items() if n != "layout"}
    ragged = dataclasses.replace(
        problem,
        case=dataclasses.replace(case, batch=2, layout="ragged", seqlen_q=long),
        arrays=joined,
        options=options,
        lengths=(long, keys),
    )
    out, lse = run(CUDA, "sm90", ragged)
    results.append((out[long:], lse[:, long:]))
    for other in results[1:]:
        assert same_bits(results[0], other)


@pytest.mark.parametrize("scores", [{}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [20, 400])
def test_batch_invariant_cuts_keys_at_the_same_places_whoever_is_longer(
    torch, rows, head_dim, mask, scores, rng
):
    """2500 keys are three parts or more: alone, in a batch, as the shorter of a padded batch.

    With 400 rows the longer ones have longer parts.
    """
    keys, longest = 2500, 12000
    case = Case("bfloat16", 7, 8, 2, rows, keys, head_dim, **MASKS[mask], **scores)
    assert plan_of(case, batch_invariant=True).num_splits >= 3
    problem = make_problem(case, rng)
    judge(problem, *run(CUDA, "sm90", with_options(problem, batch_invariant=True)))
    q, k, v = (
        torch.randn(7, n, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for n, heads in ((rows, 8), (keys, 2), (keys, 2))
    )
    options = dict(**MASKS[mask], **scores, batch_invariant=True, return_lse=True, backend="sm90")

    def first(q, k, v, **more):
        return [x[0] for x in cuattn.attention(q, k, v, **options, **more)]

    def same(a, b):
        return all(
            torch.equal(*(t.contiguous().view(torch.uint8) for t in pair))
            for pair in zip(a, b, strict=True)
        )

    longer_k, longer_v = (x.new_full((3, longest, 2, head_dim), torch.nan) for x in (k, v))
    for to, x in ((longer_k, k), (longer_v, v)):
        to[0, :keys] = x[0]
        to[1:] = 0.5
    used = torch.tensor([keys, longest, 1], dtype=torch.int32, device="cuda")
    alone = first(q[:1], k[:1], v[:1])
    assert same(alone, first(q, k, v))
    assert same(alone, first(q[:3], longer_k, longer_v, seqused_k=used))
    behind_k, behind_v = (torch.cat([x[:, keys:], x[:, :keys]], 1) for x in (longer_k, longer_v))
    start = torch.tensor([longest - keys, 0, longest - 1], dtype=torch.int32, device="cuda")
    assert same(alone, first(q[:3], behind_k, behind_v, kv_start=start))
    # attention_varlen cuts nothing: the same bits where attention is told to cut nothing either.
    bounds = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (rows, keys)]
    packed = cuattn.attention_varlen(q[0], k[0], v[0], *bounds, rows, keys, **options)
    assert same(first(q[:1], k[:1], v[:1], num_splits=1), packed)
    mates = [torch.cat([x[1][:n], x[0]]) for x, n in ((q, 3), (k, 37), (v, 37))]
    bounds = [
        torch.tensor([0, a, a + b], dtype=torch.int32, device="cuda")
        for a, b in ((3, rows), (37, keys))
    ]
    out, lse = cuattn.attention_varlen(*mates, *bounds, rows, keys, **options)
    assert same((out[3:], lse[:, 3:]), packed)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", "qkv")
def test_an_axis_of_stride_zero(torch, name, axis, layout):
    """One slice seen under every index of an axis, as torch's expand makes it."""
    shape = (3, 70, 4, 64) if layout == "bshd" else (3, 4, 70, 64)
    arrays = {n: torch.randn(shape, device="cuda", dtype=torch.float16) for n in "qkv"}
    arrays[name] = arrays[name].narrow(axis, 0, 1).expand(shape)
    options = dict(layout=layout, causal=True, backend="sm90", return_lse=True)
    out, lse = cuattn.attention(*arrays.values(), **options)
    copies = [x.contiguous() for x in arrays.values()]
    expected, expected_lse = cuattn.attention(*copies, **options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_one_buffer_in_many_shapes(torch):
    """Maps of arrays are kept: another shape, stride or dtype at the same address is another."""
    memory = torch.randn(3 * 200 * 4 * 72, device="cuda", dtype=torch.float16)
    for rows in range(1, 200):
        heads, dim = (1, 2, 4)[rows % 3], (64, 72)[rows % 2]
        size = rows * heads * dim
        dtype = torch.bfloat16 if rows % 5 == 0 else torch.float16
        q, k, v = (memory[i * size : (i + 1) * size].view(dtype) for i in range(3))
        q, k, v = (x.view(1, rows, heads, dim) for x in (q, k, v))
        out = cuattn.attention(q, k, v, causal=True, backend="sm90")
        elsewhere = [x.clone() for x in (q, k, v)]
        assert torch.equal(out, cuattn.attention(*elsewhere, causal=True, backend="sm90")), rows


@pytest.mark.parametrize("name", ["drawn", "split"])
def test_the_workspace_may_hold_anything_and_is_not_overrun(torch, name):
    q = torch.randn(30, 300, 8, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(30, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    options = dict(causal=True, num_splits=2 if name == "split" else 0, backend="sm90")
    plan = cuattn.explain("attention", q, k, k, **options)
    assert (plan.num_splits > 1) == (name == "split")
    assert plan.workspace_bytes > 0
    expected = cuattn.attention(q, k, k, **options)
    memory = torch.full((plan.workspace_bytes + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        workspace = memory[: plan.workspace_bytes]
        out = cuattn.attention(q, k, k, **options, workspace=workspace)
        assert torch.equal(out, expected)
    assert bool((memory[plan.workspace_bytes :] == 0xFF).all())


@pytest.mark.parametrize("dtype", HALF)
def test_scores_beyond_the_range_of_float16(dtype, rng):
    case = Case(dtype, 2, 4, 4, 130, 257, 64, magnitude=100.0)
    assert_case(CUDA, "sm90", case, rng)
    assert_case(CUDA, "sm90", dataclasses.replace(case, causal=True, head_dim=128), rng)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("dtype", HALF)
def test_an_infinite_value_reaches_every_row(dtype, value, rng):
    def spoil(problem):
        problem.arrays["v"][1, 37, 1, 5] = value

    assert_case(CUDA, "sm90", Case(dtype, 2, 4, 2, 70, 170, 64), rng, spoil)


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
SCORED = {"full": {}, "causal": {"causal": True}, "alibi": {"alibi": "head"}}


def moving(step, offset):
    """Scores that rise by about `step`, in base 2, with each 128 keys to the left in some rows,
    fall in others and stay in a third kind: a warp has them all. `offset` is added to each.
    """

    def change(problem):
        q, k = problem.arrays["q"], problem.arrays["k"]
        rows, keys, unit = np.arange(q.shape[1]), np.arange(k.shape[1]), q.shape[-1] ** 0.5
        tile = (k.shape[1] - 1 - keys) // 128
        q[..., 0] = np.array([1.0, -1.0, 0.5, 0.0, 1.0])[rows % 5, None]
        k[..., 0] = (tile * step * np.log(2) * unit)[:, None]
        q[..., 1], k[..., 1] = 1.0, offset * unit

    return change


@pytest.mark.parametrize("offset", [0.0, -200.0])
@pytest.mark.parametrize("step", [3.0, 7.9, 8.1, 40.0])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("score", SCORED)
@pytest.mark.parametrize("dims", DIMS)
def test_rows_that_outgrow_their_reference(dims, score, dtype, step, offset, rng):
    case = Case(dtype, 1, 4, 2, 300, 900, *dims, **SCORED[score])
    assert_case(CUDA, "sm90", case, rng, moving(step, offset))


@pytest.mark.parametrize("offset", [0.0, -200.0])
@pytest.mark.parametrize("score", SCORED)
@pytest.mark.parametrize("dims", DIMS)
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(dims, score, offset, rng):
    """A warp looks again when one of its rows may have outgrown its reference."""
    problem = make_problem(Case("bfloat16", 1, 4, 2, 300, 900, *dims, **SCORED[score]), rng)
    moving(5.0, offset)(problem)
    out, lse = run(CUDA, "sm90", problem)
    problem.arrays["q"][:, ::2] *= -30
    other, other_lse = run(CUDA, "sm90", problem)
    assert same_bits((out[:, 1::2], lse[:, :, 1::2]), (other[:, 1::2], other_lse[:, :, 1::2]))
    assert not np.array_equal(bits(out), bits(other))


@pytest.mark.parametrize("value", ["lowest", -1e9, 1e9])
@pytest.mark.parametrize("bias", ["float32", "full"])
@pytest.mark.parametrize("dims", DIMS)
def test_the_bits_of_a_row_do_not_depend_on_large_neighbours(dims, bias, value, rng):
    """Scores of a row whose reference is large are centered in a branch of its warp."""
    case = Case("bfloat16", 1, 4, 2, 300, 904, *dims, bias=bias)
    problem = with_options(make_problem(case, rng), num_splits=1)
    array = problem.arrays["bias"]
    out, lse = run(CUDA, "sm90", problem)
    array[..., ::2, :] = lowest(array) if value == "lowest" else value
    other, other_lse = run(CUDA, "sm90", problem)
    assert same_bits((out[:, 1::2], lse[:, :, 1::2]), (other[:, 1::2], other_lse[:, :, 1::2]))
    mean = problem.arrays["v"].astype(np.float64).mean(1).repeat(2, axis=1)
    for row in range(0, 300, 2):
        np.testing.assert_allclose(
            np.asarray(other[:, row], np.float64), mean, atol=2 * EPS["bfloat16"]
        )
