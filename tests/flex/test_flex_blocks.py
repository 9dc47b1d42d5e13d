# SPDX-License-Identifier: Apache-2.0
"""Block masks and the recogniser: sound, exact where promised, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import flex_cases
from cuattn import flex
from cuattn.flex import attention as calls
from cuattn.flex.block_mask import ASKED, HIDDEN, SEEN, lists_of
from cuattn.flex.evaluate import Host, evaluate
from cuattn.flex.plan import Problem, plan
from cuattn.flex.rows import limits, split


def true_states(dense, block):
    rows, columns = (-(-n // block) for n in dense.shape[2:])
    out = np.empty((*dense.shape[:2], rows, columns), np.uint8)
    for i in range(rows):
        for j in range(columns):
            part = dense[..., i * block : (i + 1) * block, j * block : (j + 1) * block]
            seen = np.where(part.all(axis=(2, 3)), SEEN, ASKED)
            out[..., i, j] = np.where(part.any(axis=(2, 3)), seen, HIDDEN)
    return out


def test_random_masks_are_classified_soundly_and_split_exactly(rng):
    for case in range(1000):
        q_len, kv_len = (int(n) for n in rng.integers(1, 200, 2))
        make = flex_cases.Generator(rng, 2, 2, q_len, kv_len)
        mask = make.mask(case % 4)
        dense = flex_cases.dense_mask(mask, 2, 2, q_len, kv_len)
        want = true_states(dense, 64)
        made = cuattn.create_block_mask(mask, 2, 2, q_len, kv_len, block_size=64)
        wrong = (made.states != want) & (made.states != ASKED)
        assert not wrong.any(), flex.trace(mask)
        if case % 8 == 0:
            exact = cuattn.create_block_mask(mask, 2, 2, q_len, kv_len, block_size=64, exact=True)
            assert np.array_equal(np.broadcast_to(exact.states, want.shape), want)
        host, keys = Host(flex.trace(mask)), split(flex.trace(mask).expr)
        q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
        values = {"b": 1, "h": 1, "q": q, "k": k, "q_len": q_len, "kv_len": kv_len}
        again = np.ones((q_len, kv_len), bool)
        if keys.begin is not None:
            again &= k >= evaluate(host, keys.begin, values)
        if keys.end is not None:
            again &= k < evaluate(host, keys.end, values)
        if keys.rest is not None:
            again &= evaluate(host, keys.rest, values)
        assert np.array_equal(again, dense[1, 1]), flex.trace(mask)


@pytest.mark.parametrize(
    ("mask", "lengths", "want"),
    [
        (lambda b, h, q, k: k <= q, (70, 70), (-1, 0)),
        (lambda b, h, q, k: ~(k > q), (70, 70), (-1, 0)),
        (lambda b, h, q, k: k <= q, (70, 90), None),  # top left: not the option, from bottom right
        (lambda b, h, q, k: k <= q + 20, (70, 90), (-1, 0)),
        (flex.masks.causal(), (70, 90), (-1, 0)),
        (flex.masks.causal(), None, (-1, 0)),
        (lambda b, h, q, k: k <= q, None, None),
        (lambda b, h, q, k: abs(q - k) <= 9, (70, 70), (9, 9)),
        (lambda b, h, q, k: (q - k < 5) & (k - q < 5), (70, 70), (4, 4)),
        (flex.masks.sliding_window(30, 2), (70, 90), (30, 2)),
        (lambda b, h, q, k: k < q, (70, 70), None),  # never at the diagonal
        (lambda b, h, q, k: (k <= q) | (q < 0), (70, 70), None),
    ],
)
def test_causal_masks_and_windows_are_options_where_they_count_alike(mask, lengths, want):
    traced = flex.trace(mask)
    assert limits(Host(traced), split(traced.expr), lengths) == want


def words_of(mask, n=300, batch=2):
    problem = Problem(batch, 4, n, n, None, [(n, n)] * batch, batch * n)
    return plan(problem, None, flex.trace(mask), None)


def test_intervals_of_rows_need_no_program():
    ids = np.repeat(np.arange(3), 100)
    per_batch = np.stack([ids, np.arange(300) // 7])
    for mask in (
        lambda b, h, q, k: q // 30 == k // 30,
        lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        lambda b, h, q, k: per_batch[b, k] == per_batch[b, q],
        lambda b, h, q, k: (k <= q) | (k < 5 * (h + 1)),
        lambda b, h, q, k: (q % 7 != 0) & (k <= q),
    ):
        found = words_of(mask)
        assert found.window is None, found.words
        assert "mask_program" not in found.arrays, found.words
        assert found.arrays["row_begin"].dtype == np.int32
    shuffled = np.arange(300) % 2
    found = words_of(lambda b, h, q, k: (shuffled[q] == shuffled[k]) & (k <= 3 * q))
    assert "mask_program" in found.arrays
    assert "row_end" in found.arrays


def test_limits_that_are_a_window_need_no_rows():
    """Beside what a program asks; also where the host does not know the lengths."""
    shuffled = np.arange(300) % 2
    known = Problem(2, 4, 300, 300, None, [(300, 300)] * 2, 600)
    ragged = known._replace(lengths=[(20, 70), (9, 0)], starts_q=np.array([0, 20, 29]), total_q=29)
    unknown = known._replace(lengths=[], total_q=0)
    scattered = lambda b, h, q, k: shuffled[q] == shuffled[k]  # noqa: E731
    for limit, window, is_counted_from_the_end in (
        (flex.masks.causal(), (-1, 0), True),
        (flex.masks.sliding_window(9, 2), (9, 2), True),
        (lambda b, h, q, k: (k <= q) & (q - k < 8), (7, 0), False),
    ):
        mask = flex.trace(flex.masks.and_masks(scattered, limit))
        for problem in (known, ragged, unknown) if is_counted_from_the_end else (known,):
            found = plan(problem, None, mask, None)
            assert found.window == window
            assert "row_begin" not in found.arrays
            assert str(found.functions["mask"].expr) == "(array0[q_idx] == array0[kv_idx])"
    found = plan(unknown, None, mask, None)  # from the top left: of any lengths no window
    assert "<= q_idx" in str(found.functions["mask"].expr)
    odd = flex.masks.and_masks(scattered, flex.masks.causal(), lambda b, h, q, k: k < 2 * q)
    assert plan(known, None, flex.trace(odd), None).window is None
    found = plan(unknown, None, flex.trace(odd), None)
    assert found.window == (-1, 0)
    assert "(kv_idx < (2 * q_idx))" in str(found.functions["mask"].expr)


def test_the_usual_masks_leave_no_block_needlessly_asked():
    n, ids = 700, np.sort(np.random.default_rng(1).integers(0, 6, 700))
    for mask in (
        lambda b, h, q, k: k <= q,
        lambda b, h, q, k: abs(q - k) <= 50,
        lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        lambda b, h, q, k: q // 128 == k // 128,
        flex.masks.streaming(256),
        lambda b, h, q, k: (q // 64 + k // 64) % 2 == 0,
    ):
        made = cuattn.create_block_mask(mask, None, None, n, n)
        assert np.array_equal(
            made.states, true_states(flex_cases.dense_mask(mask, 1, 1, n, n), 128)
        )


def test_bounds_are_sound_in_float32_too(rng):
    third = float(np.float32(1 / 3))
    mask = lambda b, h, q, k: (q * third + k * third) * 3.0 <= 100.0  # noqa: E731
    made = cuattn.create_block_mask(mask, None, None, 130, 130, block_size=64)
    q, k = np.arange(130)[:, None], np.arange(130)[None, :]
    traced = flex.trace(mask)
    dense = evaluate(Host(traced), traced.expr, {"q": q, "k": k, "b": 0, "h": 0}, np.float32)
    want = true_states(dense[None, None], 64)
    assert not ((made.states != want) & (made.states != ASKED)).any()


def test_bounds_are_sound_where_a_float_is_nan(rng):
    table = rng.random(260).astype(np.float32)
    table[[70, 200]] = np.nan, np.inf
    high = 20.0
    for mask in (
        lambda b, h, q, k: table[k] > 0.5,
        lambda b, h, q, k: ~(table[k] <= 2.0),
        lambda b, h, q, k: table[k] != 0.25,
        lambda b, h, q, k: flex.sqrt(1.0 * (q - k)) <= high,
        lambda b, h, q, k: ~(flex.log(1.0 * (q - k)) <= high),
        lambda b, h, q, k: flex.abs(table[k] - table[q]) >= 0.0,
        lambda b, h, q, k: flex.tanh(table[k] * (q - k)) <= 1.0,
        lambda b, h, q, k: flex.minimum(table[k] / (q - k), 3.0) <= 4.0,
    ):
        made = cuattn.create_block_mask(mask, None, None, 200, 260, block_size=64)
        traced = flex.trace(mask)
        values = {"b": 0, "h": 0, "q": np.arange(200)[:, None], "k": np.arange(260)[None]}
        dense = np.broadcast_to(evaluate(Host(traced), traced.expr, values), (200, 260))
        wrong = (made.states != true_states(dense[None, None], 64)) & (made.states != ASKED)
        assert not wrong.any(), traced
    root = cuattn.create_block_mask(
        lambda b, h, q, k: flex.sqrt(1.0 * q) <= 7.9, None, None, 256, 64, block_size=64
    )
    assert root.states.ravel().tolist() == [ASKED, HIDDEN, HIDDEN, HIDDEN]  # never NaN


def test_a_limit_at_the_end_of_int32_is_a_program():
    keys = split(flex.trace(lambda b, h, q, k: (k <= 2**31 - 1) & (k <= q)).expr)
    assert keys.begin is None
    assert keys.end is None
    assert str(keys.rest) == "((kv_idx <= 2147483647) & (kv_idx <= q_idx))"


def test_lists_hold_the_blocks_of_both_directions(rng):
    states = rng.integers(0, 3, (2, 3, 5, 7)).astype(np.uint8)
    mask = flex.BlockMask(flex.masks.causal(), (2, 3, 640, 896), (128, 128), states)
    for lists, want in ((mask.by_query, states), (mask.by_key, states.swapaxes(2, 3))):
        again = np.zeros(want.shape, np.uint8)
        for b, h, row in np.ndindex(want.shape[:3]):
            part = lists.entries[lists.starts[b, h, row] : lists.starts[b, h, row + 1]]
            assert np.all(np.diff(part // 2) < 0)
            again[b, h, row, part // 2] = np.where(part % 2, ASKED, SEEN)
        assert np.array_equal(again, want)
    assert lists_of(np.zeros((1, 1, 0, 4), np.uint8)).starts.shape == (1, 1, 1)


def test_masks_join_and_print():
    causal = cuattn.create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256)
    even = cuattn.create_block_mask(lambda b, h, q, k: k % 2 == 0, None, None, 256, 256)
    for made, want in (
        (causal & even, lambda b, h, q, k: (k <= q) & (k % 2 == 0)),
        (causal | even, lambda b, h, q, k: (k <= q) | (k % 2 == 0)),
        (~causal, lambda b, h, q, k: k > q),
    ):
        dense = flex_cases.dense_mask(want, 1, 1, 256, 256)
        assert np.array_equal(flex_cases.dense_mask(made.mask_mod, 1, 1, 256, 256), dense)
        wrong = (made.states != true_states(dense, 128)) & (made.states != ASKED)
        assert not wrong.any()
    assert causal.sparsity() == 0.25
    assert str(causal).splitlines() == [
        "BlockMask of (1, 1, 256, 256) (batch, num_heads, seqlen_q, seqlen_kv), blocks of (128, "
        "128), 25.0 % skipped",
        "+.",
        "#+",
    ]


@pytest.mark.parametrize("extents", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_block_sparse_attention_equals_its_dense_form(rng, extents):
    blocks = rng.random((*extents, 4, 5)) < 0.4
    blocks[..., 0, :] = False  # rows that see nothing
    q, k, v = (
        rng.standard_normal((2, n, m, 32)).astype(np.float32)
        for n, m in ((250, 4), (310, 2), (310, 2))
    )
    dense = blocks.repeat(64, axis=2).repeat(64, axis=3)[:, :, :250, :310]
    hidden = np.where(dense, 0.0, -np.inf)
    want, lse = flex_cases.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), bias=hidden)
    made = flex.BlockMask.from_dense(blocks, 250, 310, block_size=64, batch=2, num_heads=4)
    for backend in ("auto", "naive"):
        out, got = cuattn.flex_attention(q, k, v, block_mask=made, return_lse=True, backend=backend)
        np.testing.assert_allclose(out.transpose(0, 2, 1, 3), want, atol=5e-5)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(lse))
    if extents == (1, 1):
        starts = np.concatenate([[0], np.cumsum(blocks[0, 0].sum(axis=1))])
        lists = flex.BlockMask.from_csr(
            starts, np.nonzero(blocks[0, 0])[1], 250, 310, block_size=64
        )
        assert np.array_equal(lists.states, made.states)
        pair = starts, np.nonzero(blocks[0, 0])[1]
        assert np.array_equal(sparse_attention(q, k, v, pair), out)
        assert np.array_equal(sparse_attention(q, k, v, blocks[0, 0]), out)
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    again = sparse_attention(*heads_first, blocks, layout="bhsd", backend="naive")
    assert np.array_equal(again.transpose(0, 2, 1, 3), out)
    causal = sparse_attention(q, k, v, made, mask_mod=flex.masks.causal())
    hidden = np.where(np.tri(250, 310, 60, bool), hidden, -np.inf)
    want, _ = flex_cases.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), bias=hidden)
    np.testing.assert_allclose(causal.transpose(0, 2, 1, 3), want, atol=5e-5)


def sparse_attention(q, k, v, blocks, **options):
    options = {"backend": "naive", **options} if "mask_mod" not in options else options
    return cuattn.sparse_attention(q, k, v, blocks, block_size=64, **options)


def arrays(rng, q_len, kv_len):
    return [rng.standard_normal((1, n, 2, 16)).astype(np.float32) for n in (q_len, kv_len, kv_len)]


def test_tiles_of_lists_and_rows_are_drawn_on_hoppers():
    """They differ in weight: each CTA of the persistent kernel takes the next one by a counter."""
    ids = np.arange(8192) * 7 % 13
    mixed, chunked = (lambda b, h, q, k: ids[q] == ids[k]), flex.masks.chunked(50)

    def schedule(n, **functions):
        shapes = ((2, n, 16, 128),) * 3
        plan = cuattn.explain(
            "flex_attention", *shapes, device="h100", dtype="float16", **functions
        )
        assert plan.kernel == "sm90"
        assert plan.workspace_bytes == 256 * ("drawn" in plan.schedule)  # the counter
        return plan.schedule

    for mask in (mixed, chunked):
        assert schedule(8192, mask_mod=mask) == "persistent CTAs, tiles drawn"
        assert schedule(300, mask_mod=mask) == "persistent CTAs, fixed order"  # one for each CTA
    made = cuattn.create_block_mask(mixed, None, None, 8192, 8192)
    assert schedule(8192, block_mask=made) == "persistent CTAs, tiles drawn"


def test_a_block_mask_beside_its_own_function_keeps_what_is_seen(rng):
    drawn = rng.random((4, 4)) < 0.5

    def in_blocks(b, h, i, j):
        return drawn[i // 64, j // 64]

    mask = cuattn.create_block_mask(in_blocks, None, None, 256, 250, block_size=64, exact=True)
    assert set(np.unique(mask.states)) <= {0, 2}
    assert mask.within(in_blocks) is mask
    assert set(np.unique(mask.within(lambda b, h, i, j: j % 2 == 0).states)) <= {0, 1}
    q, k, v = arrays(rng, 256, 250)
    got = cuattn.flex_attention(q, k, v, mask_mod=in_blocks, block_mask=mask)
    np.testing.assert_array_equal(got, cuattn.flex_attention(q, k, v, block_mask=mask))
    plan = cuattn.explain("flex_attention", q, k, v, mask_mod=in_blocks, block_mask=mask)
    assert "in 0 the program is run" in plan.reason


def test_a_block_mask_of_torch_beside_its_own_function_keeps_what_is_full(rng):
    flex_torch = pytest.importorskip("torch.nn.attention.flex_attention")
    import torch

    drawn, ids = torch.from_numpy(rng.random((4, 4)) < 0.5), torch.arange(256) // 100
    drawn[0, 0] = drawn[1, 2] = True  # full; where documents meet: partial

    def in_blocks(b, h, i, j):
        return drawn[i // 64, j // 64] & ((ids[i] == ids[j]) | (j < 128))

    made = flex_torch.create_block_mask(in_blocks, None, None, 256, 256, "cpu", BLOCK_SIZE=64)
    full = torch.zeros(4, 4, dtype=torch.bool)
    for row, count in enumerate(made.full_kv_num_blocks[0, 0]):
        full[row, made.full_kv_indices[0, 0, row, :count].long()] = True
    assert 0 < full.sum() < drawn.sum()
    q, k, v = (torch.from_numpy(x) for x in arrays(rng, 256, 256))
    problem = calls.problem_of(q, k, {})
    beside = calls.traced(problem, None, in_blocks, made)
    assert beside.block_mask is calls.traced(problem, None, None, made).block_mask
    assert torch.equal(torch.from_numpy(beside.block_mask.states[0, 0] == 2), full)
    others = calls.traced(problem, None, lambda b, h, i, j: j != 7, made).block_mask
    assert set(np.unique(others.states)) <= {0, 1}
    want = cuattn.flex_attention(q, k, v, mask_mod=in_blocks)
    got = cuattn.flex_attention(q, k, v, mask_mod=in_blocks, block_mask=made)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_blocks_that_a_function_hides_more_of_keep_what_it_sees(rng):
    """The function again, beside a block mask that it is a part of, hides nothing more."""
    dense, causal = rng.random((4, 4)) < 0.7, flex.masks.causal()
    mask = flex.BlockMask.from_dense(dense, 256, 256, block_size=64, mask_mod=causal)
    assert mask.within(causal) is mask
    assert (~mask).within(causal) is not mask
    q, k, v = arrays(rng, 256, 256)
    got = cuattn.flex_attention(q, k, v, mask_mod=causal, block_mask=mask)
    np.testing.assert_array_equal(got, cuattn.flex_attention(q, k, v, block_mask=mask))
    again = mask.within(flex.masks.causal())  # the same by other words: asked
    got = cuattn.flex_attention(q, k, v, block_mask=again)
    np.testing.assert_allclose(got, cuattn.flex_attention(q, k, v, block_mask=mask), atol=2e-6)


ROWS = np.zeros((1, 100, 2, 8), np.float32)
BLOCKS = np.ones((2, 2), bool)
PACKED = {"cu_seqlens_q": np.array([0, 100], np.int32)}


@pytest.mark.parametrize(
    ("arrays", "blocks", "options", "error", "words"),
    [
        ([ROWS] * 3, np.ones((1, 2), bool), {}, ValueError, r"bool of shape .*, 2, 2\)"),
        ([ROWS] * 3, np.ones((3, 2, 2), bool), {}, ValueError, r"got bool of shape \(3, 2, 2\)"),
        ([ROWS] * 3, np.ones((3, 1, 2, 2), bool), {}, ValueError, "batch must be 3"),
        ([ROWS] * 3, ([0, 1, 2], [0, 2]), {}, ValueError, r"columns must lie within \[0, 2\)"),
        ([ROWS] * 3, (np.arange(3), np.ones(2)), {}, ValueError, "columns must be whole numbers"),
        ([ROWS] * 3, "blocks", {}, TypeError, "blocks must be a bool array, .* got str"),
        ([ROWS] * 3, BLOCKS, {"sink": 1}, TypeError, "no argument sink"),
        ([ROWS[0]] * 3, BLOCKS, PACKED, ValueError, "cu_seqlens_q must not be given"),
        ([ROWS[0]] * 3, BLOCKS, {}, ValueError, "q and k must have 4 axes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(arrays, blocks, options, error, words):
    with pytest.raises(error, match=words):
        cuattn.sparse_attention(*arrays, blocks, block_size=64, **options)


def test_coarser_blocks_are_the_same_mask(rng):
    blocks = rng.random((2, 1, 9, 11)) < 0.6
    made = flex.BlockMask.from_dense(blocks, 9 * 64 - 3, 11 * 64 - 5, block_size=64)
    dense = flex_cases.dense_mask(made.mask_mod, 2, 1, *made.shape[2:])
    for tile in ((64, 64), (128, 128), (64, 128), (192, 64)):
        got = made.of_tiles(tile)
        assert got.block_size == tile
        again = flex.create_block_mask(
            made.mask_mod, *made.shape, block_size=got.block_size, exact=True
        )
        assert np.array_equal(got.states, np.broadcast_to(again.states, got.states.shape))
    assert np.array_equal(flex_cases.dense_mask(got.mask_mod, 2, 1, *made.shape[2:]), dense)


def test_a_long_document_mask_takes_memory_by_the_block():
    ids = np.sort(np.random.default_rng(0).integers(0, 40, 131072))
    made = cuattn.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], 1, 1, 131072, 131072)
    assert made.by_query.entries.nbytes < 200_000
    assert made.sparsity() > 0.95


REFUSED = {
    "size": (lambda: make(block_size=100), r"block_size must be a multiple of 64.*got 100"),
    "batch": (lambda: cuattn.create_block_mask(flex.masks.causal(), -1, 1, 8, 8), "batch must be"),
    "length": (
        lambda: cuattn.create_block_mask(flex.masks.causal(), 1, 1, 8, 2.5),
        "seqlen_kv must",
    ),
    "overflow": (
        lambda: cuattn.create_block_mask(lambda b, h, q, k: q * q > k, 1, 1, 70000, 8),
        r"`\(q_idx \* q_idx\)` may reach .* beyond int32",
    ),
    "dense": (
        lambda: flex.BlockMask.from_dense(np.ones((2, 2), bool), 300, 200),
        r"must be bool of shape \(batch or 1, num_heads or 1, 3, 2\)",
    ),
    "dtype": (lambda: flex.BlockMask.from_dense(np.ones((2, 2)), 200, 200), "must be bool"),
    "heads": (
        lambda: flex.BlockMask.from_dense(np.ones((1, 3, 1, 1), bool), 8, 8, num_heads=4),
        "num_heads must be 3",
    ),
    "range": (lambda: csr([0, 1, 2], [0, 2]), r"columns must lie within \[0, 2\), got 2"),
    "order": (lambda: csr([0, 2, 2], [1, 0]), "must rise within a query block"),
    "twice": (lambda: csr([0, 2, 2], [1, 1]), "each once, got 1 and then 1 in block 0"),
    "count": (lambda: csr([0, 1, 3], [0, 1]), "starts must rise from 0 to the 2 columns"),
    "rows": (lambda: csr([0, 1], [0]), r"shape \(3,\)"),
    "other": (lambda: make() & make(block_size=64), "of the same .* and block_size"),
}


def make(**options):
    return cuattn.create_block_mask(flex.masks.causal(), 1, 1, 256, 256, **options)


def csr(starts, columns):
    return flex.BlockMask.from_csr(starts, columns, 256, 256)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_block_masks_are_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
