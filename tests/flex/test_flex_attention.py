# SPDX-License-Identifier: Apache-2.0
"""flex_attention on the CPU against dense float64 of the same Python functions."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cuattn
import flex_cases
from cuattn import flex
from cuattn.flex import attention as calls
from cuattn.flex.device import free_options
from cuattn.flex.options import join_options

# Scores are a few units large: float32 leaves 1e-6 of them, a wrong key shows as 0.1.
TOLERANCE = {"float32": 5e-5, "float16": 6e-3, "bfloat16": 5e-2}
HEAD_DIMS = ((16, 16), (64, 64), (40, 24), (128, 128), (192, 128))


def heads_first(x):
    return x.transpose(0, 2, 1, 3)


def arrays(rng, batch, heads, heads_kv, q_len, kv_len, dims, dtype=np.float32):
    shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def check(got, want, dtype="float32", what=""):
    """Compare out and lse; infinities and zeros of empty rows exactly."""
    out, lse = (np.asarray(x, np.float64) for x in got)
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(want[1]), err_msg=what)
    empty = np.isneginf(want[1])
    assert np.all(heads_first(out)[empty] == 0), what
    some = ~empty
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(
        heads_first(out), want[0], atol=tolerance, rtol=tolerance, err_msg=what
    )
    np.testing.assert_allclose(lse[some], want[1][some], atol=1e-4, rtol=1e-5, err_msg=what)


def poisoned(q, v):
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    return {
        "out": out,
        "lse_out": np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32),
    }


@pytest.mark.parametrize("part", range(4))
def test_random_functions_equal_the_dense_formula(rng, part):
    for case in range(40):
        batch, group = int(rng.integers(1, 3)), int(rng.choice((1, 2, 4)))
        heads_kv = int(rng.integers(1, 3))
        heads = heads_kv * group
        q_len, kv_len = (int(n) for n in rng.integers(1, 300, 2))
        if case % 4 == 0:
            kv_len = q_len
        make = flex_cases.Generator(rng, batch, heads, q_len, kv_len)
        mask = None if case % 5 == 4 else make.mask(case % 4)
        mod = make.score() if case % 3 else None
        q, k, v = arrays(rng, batch, heads, heads_kv, q_len, kv_len, HEAD_DIMS[case % 5])
        options = {}
        if case % 7 == 1:
            options["sinks"] = rng.standard_normal(heads).astype(np.float32)
        if case % 7 == 2:
            options["bias"] = rng.standard_normal((heads, 1, kv_len)).astype(np.float32)
        if case % 7 == 3:
            options["softcap"] = 3.0
        backend = "naive" if case % 10 == 9 else "auto"
        got = cuattn.flex_attention(
            q, k, v, mask_mod=mask, score_mod=mod, backend=backend, **poisoned(q, v), **options
        )
        want = flex_cases.attention(*map(heads_first, (q, k, v)), mask=mask, mod=mod, **options)
        text = (
            f"case {case}: mask {mask and flex.trace(mask)}, score {mod and flex.trace(mod, True)}"
        )
        check(got, want, what=text)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_types(rng, dtype):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    q, k, v = arrays(rng, 2, 4, 2, 147, 191, (64, 64), kind)
    mod = flex.scores.softcap(20.0)
    mask = flex.masks.streaming(40)
    got = cuattn.flex_attention(q, k, v, mask_mod=mask, score_mod=mod, return_lse=True)
    want = flex_cases.attention(
        *map(heads_first, (q, k, v)),
        mask=mask,
        mod=lambda s, b, h, i, j: 20.0 * np.tanh(s / 20.0),
    )
    assert got[0].dtype == kind
    check(got, want, dtype)


READY = {
    "causal": flex.masks.causal(),
    "sliding_window": flex.masks.sliding_window(30, 4),
    "document": flex.masks.document(np.repeat(np.arange(4), (50, 1, 49, 100))),
    "document by lengths": flex.masks.document(cu_seqlens=[0, 50, 50, 120, 200]),
    "document not sorted": flex.masks.document(np.arange(200) % 3),
    "prefix_lm": flex.masks.prefix_lm(np.array([7, 90])),
    "chunked": flex.masks.chunked(33),
    "block_diagonal": flex.masks.block_diagonal(48),
    "dilated": flex.masks.dilated(3, 60),
    "streaming": flex.masks.streaming(20, 3),
}
SERVED_BY = {
    **{"causal": "options", "sliding_window": "options", "document": "row ranges"},
    **{"document by lengths": "row ranges", "prefix_lm": "row ranges", "chunked": "row ranges"},
    **{
        "block_diagonal": "row ranges",
        "dilated": "options, as the mask lies in the window (60, 0)",
    },
    "streaming": "options, as the mask lies in the window (-1, 0)",
}


@pytest.mark.parametrize("name", READY)
def test_ready_masks(rng, name):
    mask = READY[name]
    q, k, v = arrays(rng, 2, 2, 1, 200, 200, (32, 32))
    want = flex_cases.attention(*map(heads_first, (q, k, v)), mask=mask)
    check(cuattn.flex_attention(q, k, v, mask_mod=mask, return_lse=True), want)
    made = cuattn.create_block_mask(mask, 2, None, 200, 200, block_size=64)
    check(cuattn.flex_attention(q, k, v, block_mask=made, return_lse=True), want)
    words = cuattn.explain("flex_attention", q, k, v, mask_mod=mask).ladder.split("functions: ")[1]
    assert words.startswith(SERVED_BY.get(name, "row ranges" if "row" in words else "a program"))


def test_tree_sees_the_context_and_its_ancestors(rng):
    mask = flex.masks.tree([-1, 0, 0, 1, 2])
    q, k, v = arrays(rng, 1, 2, 1, 5, 45, (32, 32))
    node, key = np.arange(5)[:, None], np.arange(45)[None, :] - 40
    ancestors = np.eye(5, dtype=bool)
    for child, parents in enumerate(([], [0], [0], [0, 1], [0, 2])):
        ancestors[child, parents] = True
    seen = (key < 0) | ancestors[node, np.maximum(key, 0)]
    bias = np.where(seen, 0.0, -np.inf)
    want = flex_cases.attention(*map(heads_first, (q, k, v)), bias=bias)
    check(cuattn.flex_attention(q, k, v, mask_mod=mask, return_lse=True), want)


def test_ready_scores(rng):
    q, k, v = arrays(rng, 2, 4, 2, 70, 90, (32, 32))
    slopes = rng.random(4).astype(np.float32)
    table = rng.standard_normal((4, 2 * 25 + 1)).astype(np.float32)
    buckets = rng.standard_normal((32, 4)).astype(np.float32)
    row, key = np.arange(70)[:, None] + 20, np.arange(90)[None, :]
    near = np.clip(row - key, -25, 25) + 25
    bucket = np.vectorize(lambda d: flex.scores.t5_bucket(int(d), 32, True, 128))(key - row)
    cases = {
        "alibi": (flex.scores.alibi(slopes), -slopes[:, None, None] * abs(row - key)),
        "relative_bias": (flex.scores.relative_bias(table), table[:, near]),
        "t5_buckets": (flex.scores.t5_buckets(buckets), buckets[bucket].transpose(2, 0, 1)),
    }
    for name, (mod, bias) in cases.items():
        want = flex_cases.attention(*map(heads_first, (q, k, v)), bias=bias)
        got = cuattn.flex_attention(q, k, v, score_mod=mod, return_lse=True)
        check(got, want, what=name)
    capped = cuattn.flex_attention(q, k, v, score_mod=flex.scores.softcap(2.0), return_lse=True)
    check(capped, flex_cases.attention(*map(heads_first, (q, k, v)), softcap=2.0))


def test_padded_and_ragged_batches_count_from_the_start_of_each_sequence(rng):
    lengths_q, lengths_k = np.array([33, 0, 70, 5]), np.array([50, 9, 70, 0])
    q, k, v = arrays(rng, 4, 4, 2, 80, 75, (32, 24))
    ids = np.sort(rng.integers(0, 4, 80))
    masks = {
        "rows": lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
        "bottom right": flex.masks.causal(),
        "both": lambda b, h, i, j, q_len, kv_len: (j % 3 != h) & (j <= i + kv_len - q_len),
    }
    used = {"seqused_q": lengths_q.astype(np.int32), "seqused_k": lengths_k.astype(np.int32)}
    begins = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in used.values()]
    packed = [
        np.concatenate([x[b, :n] for b, n in enumerate(lengths)])
        for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))
    ]
    ragged = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), begins, strict=True))
    for name, mask in masks.items():
        mod = lambda s, b, h, i, j: s - 0.1 * (b + 1) * abs(i - j)  # noqa: E731
        padded = cuattn.flex_attention(
            q, k, v, mask_mod=mask, score_mod=mod, **used, **poisoned(q, v)
        )
        out, lse = cuattn.flex_attention(
            *packed,
            mask_mod=mask,
            score_mod=mod,
            max_seqlen_q=70,
            max_seqlen_k=70,
            return_lse=True,
            **ragged,
        )
        for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            one = [heads_first(x[b : b + 1, :c]) for x, c in ((q, m), (k, n), (v, n))]
            want = flex_cases.attention(
                *one,
                mask=lambda _, h, i, j, q_len, kv_len, b=b, f=mask: f(
                    b, h, i, j, **flex_cases.lengths_asked(f, q_len, kv_len)
                ),
                mod=lambda s, _, h, i, j, b=b, f=mod: f(s, b, h, i, j),
            )
            check((padded[0][b : b + 1, :m], padded[1][b : b + 1, :, :m]), want, what=name)
            assert np.all(padded[0][b, m:] == 0)
            assert np.all(np.isneginf(padded[1][b, :, m:]))
            rows = slice(begins[0][b], begins[0][b] + m)
            check((out[None, rows], lse[None, :, rows]), want, what=f"{name}, ragged")


def test_documents_count_from_the_bottom_right(rng):
    """Queries are the last tokens of the keys, as those of a cache."""
    ids = np.stack([np.sort(rng.integers(0, 4, 90)), rng.integers(0, 4, 90)])
    q, k, v = arrays(rng, 2, 2, 1, 20, 90, (16, 16))
    for every in (ids, ids[0], ids[1]):
        dense = (every[..., 70:, None] == every[..., None, :]).reshape(-1, 1, 20, 90)
        bias = np.where(dense, 0.0, -np.inf)
        want = flex_cases.attention(*map(heads_first, (q, k, v)), bias=bias)
        mask = flex.masks.document(every)
        check(cuattn.flex_attention(q, k, v, mask_mod=mask, return_lse=True), want)


def test_runs_of_a_row_that_lengths_choose(rng):
    """Of two sequences of as many keys and other queries, each has its own documents."""
    table = np.sort(rng.integers(0, 4, (40, 50)), axis=1)
    mask = lambda b, h, i, j, q_len, kv_len: table[q_len, i] == table[q_len, j]  # noqa: E731
    q, k, v = arrays(rng, 2, 2, 1, 39, 50, (16, 16))
    used = np.array([39, 25], np.int32)
    got = cuattn.flex_attention(q, k, v, mask_mod=mask, seqused_q=used, return_lse=True)
    for b, n in enumerate(used):
        one = [heads_first(x[b : b + 1]) for x in (q[:, :n], k, v)]
        check(
            (got[0][b : b + 1, :n], got[1][b : b + 1, :, :n]), flex_cases.attention(*one, mask=mask)
        )


def test_masks_add_up_with_those_of_options(rng):
    q, k, v = arrays(rng, 1, 2, 2, 130, 140, (32, 32))
    for name, mask in {
        "option": lambda b, h, i, j: j >= i - 40,
        "rows": lambda b, h, i, j: i // 50 == j // 50,
        "program": lambda b, h, i, j: (i + j) % 2 == 0,
    }.items():
        got = cuattn.flex_attention(
            q, k, v, mask_mod=mask, causal=True, window=(60, 3), return_lse=True
        )
        both = lambda b, h, i, j: mask(b, h, i, j) & (j <= i + 10) & (j >= i - 50)  # noqa: E731, B023
        check(got, flex_cases.attention(*map(heads_first, (q, k, v)), mask=both), what=name)


def test_a_block_mask_goes_with_a_mask_function_and_with_lengths_in_use(rng):
    q, k, v = arrays(rng, 2, 2, 1, 700, 900, (16, 16))
    blocks = lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0  # noqa: E731
    thirds = lambda b, h, i, j: j % 3 == 0  # noqa: E731
    made = cuattn.create_block_mask(blocks, None, None, 700, 900)
    got = cuattn.flex_attention(q, k, v, block_mask=made, mask_mod=thirds, return_lse=True)
    both = flex.masks.and_masks(blocks, thirds)
    check(got, flex_cases.attention(*map(heads_first, (q, k, v)), mask=both))
    used = np.array([430, 77], np.int32)  # blocks that count from the last key were made for 900
    for mask in (flex.masks.streaming(20), blocks):
        made = cuattn.create_block_mask(mask, None, None, 700, 900, block_size=64)
        got = cuattn.flex_attention(q, k, v, block_mask=made, seqused_k=used)
        want = cuattn.flex_attention(q, k, v, mask_mod=mask, seqused_k=used)
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_values_that_are_not_seen_are_not_read(rng):
    q, k, v = arrays(rng, 1, 1, 1, 40, 300, (16, 16))
    v[:, 1::2] = np.inf
    mask = lambda b, h, i, j: (j % 2 == 0) & (i > 2)  # noqa: E731
    got = cuattn.flex_attention(q, k, v, mask_mod=mask, return_lse=True)
    check(got, flex_cases.attention(*map(heads_first, (q, k, v)), mask=mask))


def test_a_captured_array_is_read_at_each_call_and_beyond_its_end_at_its_last_element(rng):
    q, k, v = arrays(rng, 1, 1, 1, 20, 50, (16, 16))
    limit = np.array([5], np.int64)
    mask = lambda b, h, i, j: j < limit[b + 7]  # noqa: E731
    for n in (5, 40):
        limit[0] = n
        got = cuattn.flex_attention(q, k, v, mask_mod=mask, return_lse=True)
        want = flex_cases.attention(
            *map(heads_first, (q, k, v)), mask=lambda b, h, i, j, n=n: j + 0 * i < n
        )
        check(got, want)


def test_layouts_strides_and_views(rng):
    q, k, v = arrays(rng, 2, 4, 4, 60, 60, (32, 32))
    mask = flex.masks.chunked(16)
    want = cuattn.flex_attention(q, k, v, mask_mod=mask)
    first = [np.ascontiguousarray(heads_first(x)) for x in (q, k, v)]
    got = cuattn.flex_attention(*first, mask_mod=mask, layout="bhsd")
    np.testing.assert_array_equal(heads_first(got), want)
    wide = np.zeros((2, 60, 4, 96), np.float32)
    wide[..., 32:64] = k
    np.testing.assert_array_equal(
        cuattn.flex_attention(q, wide[..., 32:64], v, mask_mod=mask), want
    )


def test_nothing_to_compute(rng):
    mask = flex.masks.streaming(3)
    for batch, q_len, kv_len in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = arrays(rng, batch, 2, 1, q_len, kv_len, (16, 16))
        out, lse = cuattn.flex_attention(q, k, v, mask_mod=mask, **poisoned(q, v))
        assert out.shape == q.shape
        assert np.all(out == 0)
        assert np.all(np.isneginf(lse))


def test_torch_and_jax_arrays_of_the_cpu(rng):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, k, v = arrays(rng, 1, 2, 1, 30, 30, (16, 16))
    ids = rng.integers(0, 3, 30)
    on_cpu = functools.partial(jax.device_put, device=jax.devices("cpu")[0])
    for convert in (torch.from_numpy, on_cpu):
        mine = convert(ids)
        mask = lambda b, h, i, j: mine[i] == mine[j]  # noqa: E731, B023
        got = cuattn.flex_attention(*map(convert, (q, k, v)), mask_mod=mask)
        assert type(got) is type(convert(q))
        want = cuattn.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: ids[i] == ids[j])
        np.testing.assert_array_equal(np.asarray(got), want)
    mod = lambda s, b, h, i, j: torch.where(i > j, torch.tanh(s), s - 1.0)  # noqa: E731
    want = flex_cases.attention(
        *map(heads_first, (q, k, v)), mod=lambda s, b, h, i, j: np.where(i > j, np.tanh(s), s - 1)
    )
    check(cuattn.flex_attention(q, k, v, score_mod=mod, return_lse=True), want)


def test_a_block_mask_of_torch(rng):
    flex_torch = pytest.importorskip("torch.nn.attention.flex_attention")
    import torch

    ids = torch.tensor([0] * 70 + [1] * 130)

    def document(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    made = flex_torch.create_block_mask(document, None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
    q, k, v = (torch.from_numpy(x) for x in arrays(rng, 1, 2, 2, 200, 200, (16, 16)))
    want = cuattn.flex_attention(q, k, v, mask_mod=document)
    got = cuattn.flex_attention(q, k, v, block_mask=made)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    joined = flex_torch.and_masks(document, flex_torch.or_masks(document, flex_torch.noop_mask))
    got = cuattn.flex_attention(q, k, v, mask_mod=joined)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)

    def lists(count, *columns):
        counts = torch.tensor([[[count, 2]]], dtype=torch.int32)
        ids = torch.tensor([[[columns, (1, 0)]]], dtype=torch.int32)
        made = flex_torch.BlockMask.from_kv_blocks(counts, ids, seq_lengths=(200, 200))
        return flex.BlockMask.from_torch(made)

    assert lists(1, 1, 0).states.tolist() == [[[[0, 2], [2, 2]]]]
    with pytest.raises(ValueError, match=r"_torch: kv_indices must lie within \[0, 2\), got -1"):
        lists(1, -1, 0)
    with pytest.raises(ValueError, match=r"_torch: kv_num_blocks must lie within \[0, 3\), got 7"):
        lists(7, 1, 0)


SCORE_OPTIONS = frozenset(("scale", "softcap", "alibi_slopes"))


def score_forms(slopes, cap, n):
    """Score functions that are options of CUDA where n is no number of keys beyond the queries."""
    by_batch = np.stack([slopes, 2 * slopes])
    return (
        flex.scores.softcap(cap),
        flex.scores.alibi(slopes),
        lambda s, b, h, i, j: np.tanh(s * (1 / cap)) * cap,
        lambda s, b, h, i, j: s - 0.25 * abs(j - i - n),
        lambda s, b, h, i, j: slopes[h] * -abs(i - j + n) + s,
        lambda s, b, h, i, j: cap * np.tanh(s / cap) - by_batch[b, h] * abs(i + n - j),
        lambda s, b, h, i, j: s * 1.5,
        lambda s, b, h, i, j: s / cap,
        lambda s, b, h, i, j: cap * np.tanh(s / 4.0),
        lambda s, b, h, i, j: 2.0 * s - 0.25 * abs(j - i - n),
        lambda s, b, h, i, j: cap * np.tanh(0.5 * s) - by_batch[b, h] * abs(i + n - j),
        lambda s, b, h, i, j: s + (j - i - n) * np.exp(-0.5 * (h + 1.0)),
        lambda s, b, h, i, j: s - slopes[h] * (i + n - j),
    )


def test_scores_that_are_options_are_the_same_as_options(rng):
    slopes = rng.random(4).astype(np.float32)
    cap = float(rng.uniform(1, 9))
    for q_len, kv_len in ((40, 40), (30, 47)):
        q, k, v = arrays(rng, 2, 4, 2, q_len, kv_len, (16, 16))
        problem = calls.problem_of(q, k, {})
        for causal in (True, False):
            mask = flex.masks.causal() if causal else None
            for i, score in enumerate(score_forms(slopes, cap, kv_len - q_len)):
                found = calls.find(problem, score, mask, None, SCORE_OPTIONS)
                if i >= 11 and not causal:  # a key behind the query gets a bonus
                    assert "score" in found.functions
                    continue
                assert not found.functions
                options = {"q": q, "scale": 0.3}
                join_options(options, found.options)
                got = cuattn.attention(k=k, v=v, causal=causal, **options)
                want = cuattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask, scale=0.3)
                np.testing.assert_allclose(got, want, atol=2e-5)
                found = calls.find(problem, score, mask, None, frozenset(("bias",)))
                assert "score" in found.functions


def test_a_factor_is_no_scale_where_a_softcap_lies_between():
    assert free_options({}) == SCORE_OPTIONS
    assert free_options({"softcap": 2.0}) == {"alibi_slopes"}
    assert free_options({"softcap": 0.0, "alibi_slopes": np.ones(4)}) == {"scale", "softcap"}
    joined = (np.float32(0.5), -1, np.array(0.5), "a word", np.nan, 1e30)
    assert ["scale" in free_options({"scale": x}) for x in joined] == [True] * 2 + [False] * 4


def test_scores_that_are_nearly_options_stay_functions(rng):
    slopes = rng.random(4).astype(np.float32)
    q, k, _ = arrays(rng, 2, 4, 2, 30, 47, (16, 16))
    problem = calls.problem_of(q, k, {})
    for score in (
        lambda s, b, h, i, j: s * -2.0,
        lambda s, b, h, i, j: s * 0.0,
        lambda s, b, h, i, j: s * 1e39,
        lambda s, b, h, i, j: 1e15 * np.tanh(s * 1e15),
        lambda s, b, h, i, j: s * s,
        lambda s, b, h, i, j: s * slopes[h],
        lambda s, b, h, i, j: 2.0 / s,
        lambda s, b, h, i, j: s * 2.0 + 1.0,
        lambda s, b, h, i, j: -3.0 * np.tanh(s / -3.0),
        lambda s, b, h, i, j: 3.0 * np.tanh((s + 1.0) / 3.0),
        lambda s, b, h, i, j: s - slopes[h] * abs(i - j),  # from the top left
        lambda s, b, h, i, j: s + slopes[h] * (i + 17 - j),
        lambda s, b, h, i, j: s - slopes[h] * abs(2 * i + 17 - j),
        lambda s, b, h, i, j: s - slopes[i % 4] * abs(i + 17 - j),
        lambda s, b, h, i, j: s - s * abs(i + 17 - j),
        lambda s, b, h, i, j: slopes[h] * abs(i + 17 - j) - s,
    ):
        found = calls.find(problem, score, flex.masks.causal(), None, SCORE_OPTIONS)
        assert "score" in found.functions or set(found.options) == {"alibi_slopes"}
        if found.options:
            want = cuattn.flex_attention(q, k, k, score_mod=score, mask_mod=flex.masks.causal())
            got = cuattn.attention(q, k, k, causal=True, **found.options)
            np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("has_nvrtc", [False, True])
def test_explain_says_what_functions_become(has_nvrtc, monkeypatch):
    monkeypatch.setattr("cuattn.flex.device.can_compile", lambda: has_nvrtc)
    shapes = ((2, 300, 4, 64),) * 3

    def explain(**call):
        plan = cuattn.explain("flex_attention", *shapes, device="cpu", **call)
        assert plan.kernel == "cpu"
        return plan.reason

    assert "nothing beside attention" in explain()
    assert "options, as the mask is the window (-1, 0)" in explain(mask_mod=flex.masks.causal())
    assert "row ranges, as each row's keys" in explain(mask_mod=flex.masks.chunked(50))
    listed = explain(mask_mod=flex.masks.streaming(10), score_mod=flex.scores.softcap(5.0))
    assert "a program for each score" in listed
    assert "lists of 9 blocks: 3 are skipped, in" in listed
    streaming, chunked = flex.masks.streaming(10), flex.masks.chunked(50)
    for mask, d, words, kernel in (
        (streaming, 64, "by NVRTC", "sm90"),
        (streaming, 256, "by NVRTC", "sm90"),
        (streaming, 320, "not in sm90, which takes them up to head_dim 256", "sm80"),
        (chunked, 64, "row r", "sm90"),
        (chunked, 96, "row r", "sm90"),
        (chunked, 192, "row r", "sm90" if has_nvrtc else "sm80"),
        (chunked, 320, "row r", "naive"),
    ):
        wide = ((2, 300, 4, d),) * 3
        plan = cuattn.explain("flex_attention", *wide, device="h100", mask_mod=mask)
        assert plan.kernel == kernel
        assert words in plan.reason
    for keys, splits in ((640, 5), (2048, 16)):  # of tiles of 64 keys, which the functor has
        wide = ((1, 128, 4, 256), *((1, keys, 4, 256),) * 2)
        plan = cuattn.explain("flex_attention", *wide, device="h100", mask_mod=streaming)
        assert (plan.tile_n, plan.num_splits, plan.warps) == (64, splits, 12)
        assert plan.workspace_bytes == splits * 128 * 4 * (256 + 1) * 4
    alibi = {"device": "h100", "mask_mod": chunked, "alibi_slopes": ("float32", 4)}
    assert cuattn.explain("flex_attention", *shapes, **alibi).kernel == "sm80"
    with pytest.raises(TypeError, match="there is no argument mod"):
        explain(mod=1)
