# SPDX-License-Identifier: Apache-2.0
"""rope= of the attentions, and rope_attention: the bits of apply_rope and the plain call."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cases import DTYPES
from cuattn import _rope
from harness import bits, numpy_call

COS, SIN = cuattn.rope_table(100, 24)


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(bits(ours), bits(theirs))


def turning(device, function, *arrays, rope=(COS, SIN), **options):
    """A call with rope=, whose tables lie on the device."""

    def call(*arrays, cos, sin, **options):
        return function(*arrays, rope=(cos, sin), **options)

    return numpy_call(device, call, *arrays, cos=rope[0], sin=rope[1], **options)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(device, dtype, layout, rng):
    turn = (lambda x: x) if layout == "bshd" else (lambda x: np.ascontiguousarray(x.swapaxes(1, 2)))
    q = rng.standard_normal((2, 5, 4, 32)).astype(DTYPES[dtype])
    k, v = rng.standard_normal((2, 2, 9, 2, 32)).astype(DTYPES[dtype])
    used = np.array([7, 9], np.int32)
    for number, lengths in enumerate(({}, {"seqused_k": used}, {"seqused_q": used - 5})):
        interleaved = number == 1
        keys, queries = lengths.get("seqused_k", [9, 9]), lengths.get("seqused_q", [5, 5])
        places = np.arange(5) + (np.asarray(keys) - np.asarray(queries))[:, None]
        options = dict(causal=True, layout=layout, return_lse=True, **lengths)
        found = turning(
            device, cuattn.attention, *map(turn, (q, k, v)), rope_interleaved=interleaved, **options
        )
        rotated = numpy_call(
            device, cuattn.apply_rope, q, COS, SIN, places, interleaved=interleaved
        )
        same(found, numpy_call(device, cuattn.attention, *map(turn, (rotated, k, v)), **options))
        if number:
            continue
        given = rng.integers(0, 100, (2, 5))
        found = turning(
            device, cuattn.attention, *map(turn, (q, k, v)), rope_positions=given, layout=layout
        )
        rotated = numpy_call(device, cuattn.apply_rope, q, COS, SIN, given)
        same([found], [numpy_call(
            device, cuattn.attention, *map(turn, (rotated, k, v)), layout=layout)])  # fmt: skip
        both = numpy_call(
            device, cuattn.rope_attention, *map(turn, (q, k, v)), COS, SIN, causal=True,
            layout=layout,
        )  # fmt: skip
        rotated, keys = (numpy_call(device, cuattn.apply_rope, x, COS, SIN, p)
                         for x, p in ((q, places), (k, None)))  # fmt: skip
        same([both], [numpy_call(
            device, cuattn.attention, *map(turn, (rotated, keys, v)), causal=True,
            layout=layout)])  # fmt: skip


def test_tables_end_where_the_keys_in_use_do(device, rng):
    """Rows that no query in use has may stand anywhere; those of queries may not."""
    q, k = rng.standard_normal((2, 2, 10, 2, 24)).astype(np.float32)
    tables = COS[:10], SIN[:10]
    lengths = {"seqused_q": np.array([2, 10], np.int32), "seqused_k": np.array([10, 10], np.int32)}
    places = np.minimum(np.arange(10) + np.array([[8], [0]]), 9)
    rotated = numpy_call(device, cuattn.apply_rope, q, *tables, places)
    found = turning(device, cuattn.attention, q, k, k, rope=tables, causal=True, **lengths)
    same([found], [numpy_call(device, cuattn.attention, rotated, k, k, causal=True, **lengths)])
    rows, ends = q.reshape(20, 2, 24), np.array([0, 4, 10], np.int32)  # the last ten are nobody's
    keys, options = k[0], dict(max_seqlen_q=6, max_seqlen_k=6, causal=True)
    places = np.r_[0:4, 0:6, [0] * 10]
    tables = COS[:6], SIN[:6]
    rotated = numpy_call(device, cuattn.apply_rope, rows, *tables, places)
    found = turning(
        device, cuattn.attention_varlen, rows, keys, keys, ends, ends, rope=tables, **options
    )
    plain = numpy_call(device, cuattn.attention_varlen, rotated, keys, keys, ends, ends, **options)
    same([found[:10]], [plain[:10]])
    for call in (
        lambda: cuattn.attention(q, k, k, rope=(COS[:9], SIN[:9]), **lengths),
        lambda: cuattn.attention_varlen(
            rows, keys, keys, ends, ends, rope=(COS[:5], SIN[:5]), **options
        ),
    ):
        with pytest.raises(ValueError, match=r"cos must have a row for each place, got \d for pla"):
            call()


def test_attention_varlen(device, rng):
    q_ends, k_ends = np.array([0, 3, 3, 10], np.int32), np.array([0, 8, 9, 16], np.int32)
    q = rng.standard_normal((12, 4, 32)).astype(np.float32)  # two rows belong to nobody
    k, v = rng.standard_normal((2, 16, 2, 32)).astype(np.float32)
    used = np.array([6, 1, 7], np.int32)
    for lengths in ({}, {"seqused_k": used}):
        keys = used if lengths else np.diff(k_ends)
        places = np.concatenate([np.arange(n) + m - n for n, m in zip(
            np.diff(q_ends), keys, strict=True)] + [[0, 0]])  # fmt: skip
        options = dict(causal=True, **lengths)
        lens = (q_ends, k_ends, 7, 8)
        found = turning(device, cuattn.attention_varlen, q, k, v, *lens, **options)
        rotated = numpy_call(device, cuattn.apply_rope, q, COS, SIN, places)
        plain = numpy_call(device, cuattn.attention_varlen, rotated, k, v, *lens, **options)
        same([found[:10]], [plain[:10]])


@pytest.mark.parametrize("q_len", [None, 3])
def test_paged_attention(device, q_len, rng):
    lens = np.array([20, 3, 0, 32], np.int32)
    blocks = rng.permutation(10)[:8].reshape(4, 2).astype(np.int32)
    k, v = rng.standard_normal((2, 10, 16, 2, 32)).astype(np.float32)
    shape = (4, 4, 32) if q_len is None else (4, q_len, 4, 32)
    q, n = rng.standard_normal(shape).astype(np.float32), q_len or 1
    places = (np.arange(n) + lens[:, None] - n).clip(0).astype(np.int64)
    rows = numpy_call(
        device, cuattn.apply_rope, q.reshape(4 * n, 4, 32), COS, SIN, places.reshape(-1)
    )
    plain = numpy_call(device, cuattn.paged_attention, rows.reshape(shape), k, v, blocks, lens)
    same([turning(device, cuattn.paged_attention, q, k, v, blocks, lens)], [plain])
    given = turning(device, cuattn.paged_attention, q, k, v, blocks, lens,
                    rope_positions=places.reshape(-1) if q_len is None else places)  # fmt: skip
    same([given], [plain])


def test_explain_says_what_comes_before():
    shape = (1, 8, 2, 32)
    plain = cuattn.explain("attention", shape, shape, shape, device="h100")
    plan = cuattn.explain("attention", shape, shape, shape, device="h100", rope=(COS, SIN))
    assert plan.kernel == plain.kernel
    assert "apply_rope rotates q" in plan.reason
    assert "apply_rope rotates q" in str(plan)


X = np.zeros((1, 4, 2, 32), np.float32)
REFUSED = [
    (dict(rope=COS), TypeError, r"attention: rope must be two arrays \(cos, sin\), got ndarray"),
    (dict(rope=(COS,)), TypeError, r"\(cos, sin\), got a tuple of 1; pass what rope_table gives"),
    (dict(rope_interleaved=True), ValueError, "attention: rope_interleaved must be left out"),
    (dict(rope_positions=X), ValueError, "attention: rope_positions must be left out without rope"),
    (dict(rope=(COS[:3], SIN[:3])), ValueError, "cos must have a row for each of the 4 tokens"),
    (dict(rope=(COS, SIN), rope_positions=np.full((1, 4), 100)), ValueError, "positions must lie"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        cuattn.attention(X, X, X, **options)


@pytest.mark.parametrize(("options", "error", "message"), REFUSED[:4])
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_explain_refuses_what_is_no_rope(device, options, error, message):
    with pytest.raises(error, match=message):
        cuattn.explain("attention", X, X, X, device=device, **options)


@pytest.mark.parametrize("paged", [False, True])
def test_an_empty_batch_has_nothing_to_rotate(paged):
    q, ends, options = np.zeros((0, 2, 32), np.float32), np.zeros(1, np.int32), {"rope": (COS, SIN)}
    given = q, q, ends, ends, 0, 8
    if paged:
        pages, none = np.zeros((3, 16, 2, 32), np.float32), np.zeros((0, 2), np.int32)
        given = pages, pages, ends, None, 0, 8
        options |= {"block_tables": none, "seqused_k": none[:, 0]}
    assert cuattn.attention_varlen(q, *given, **options).shape == q.shape


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_positions": np.full((1, 4), 100)}, r"rope_positions must lie within \[0, 100\)"),
        ({"rope_positions": np.zeros((1, 4), np.int32)}, "rope_positions must be int64"),
        ({"rope_interleaved": 1}, "rope_interleaved must be True or False, got 1"),
        ({"rope": (COS.astype(np.float64), SIN)}, "cos must be float32, got float64"),
        ({"rope": (COS, SIN[:5])}, "sin must have"),
    ],
)
def test_refusals_name_what_was_given(given, words):
    with pytest.raises((ValueError, TypeError), match=f"^attention: {words}"):
        cuattn.attention(X, X, X, **{"rope": (COS, SIN), **given})
    with pytest.raises(ValueError, match="rope_attention: positions_k must lie"):
        cuattn.rope_attention(X, X, X, COS, SIN, positions_k=np.full((1, 4), -1))


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        (dict(rope=(COS, SIN)), "here the tables are called cos and sin"),
        (dict(rope_positions=np.zeros((1, 4), np.int64)), "here they are called positions_q and p"),
        (dict(rope_interleaved=True), "here it is called interleaved"),
    ],
)
def test_rope_attention_refuses_the_names_of_attention(options, way_out):
    (name,) = options
    with pytest.raises(TypeError, match=f"rope_attention: there is no argument {name}; {way_out}"):
        cuattn.rope_attention(X, X, X, COS, SIN, **options)


def test_what_others_say_is_kept_whole():
    assert _rope.in_words_of("attention", "q", "a producer failed") == "a producer failed"
    assert _rope.in_words_of("attention", "q", "driver: x is gone") == "driver: x is gone"
    assert _rope.in_words_of("attention", "q", "apply_rope: x is odd") == "attention: q is odd"


@pytest.mark.parametrize("name", ["rope", "rope_positions", "residual"])
def test_flex_attention_has_no_passes_beside_it(name):
    """What it does not do it must not take."""
    q = np.zeros((1, 4, 2, 32), np.float32)
    option = {name: q if name == "residual" else (COS, SIN)}
    with pytest.raises(TypeError, match=f"there is no argument {name}"):
        cuattn.flex_attention(q, q, q, **option)
    with pytest.raises(TypeError, match=f"there is no argument {name}"):
        cuattn.explain("flex_attention", q.shape, q.shape, q.shape, device="cpu", **option)
