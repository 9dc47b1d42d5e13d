# SPDX-License-Identifier: Apache-2.0
"""The oracle itself, held against scalar loops written apart from it and against values known on
paper.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import reference


def scalar_row(q, keys, values, logits_extra, sink):
    """One query row: softmax over (score, value) pairs in plain floats. logits_extra maps a score
    to the final one.
    """
    scores = []
    for j, key in enumerate(keys):
        final = logits_extra(sum(float(a) * float(b) for a, b in zip(q, key, strict=True)), j)
        if final is not None:
            scores.append((final, values[j]))
    logits = [s for s, _ in scores] + ([] if sink is None else [sink])
    if not logits:
        return [0.0] * len(values[0] if len(values) else []), -math.inf
    top = max(logits)
    total = sum(math.exp(s - top) for s in logits)
    width = len(values[0]) if len(values) else 0
    out = [sum(math.exp(s - top) / total * float(x[c]) for s, x in scores) for c in range(width)]
    return out, top + math.log(total)


def scalar_attention(
    q, k, v, *, causal, window, scale, softcap, slopes, sinks, bias, used_q, used_k
):
    """bshd in nested loops. slopes [batch][head], bias [batch][head][i][j] as float or bool, used
    per batch.
    """
    batch, sq, heads, dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros((batch, sq, heads, v.shape[3]))
    lse = np.full((batch, heads, sq), -math.inf)
    for b in range(batch):
        nq, nk = used_q[b], used_k[b]
        for h in range(heads):
            for i in range(nq):
                at = i + nk - nq

                def final(dot, j, b=b, h=h, i=i, at=at):
                    if causal and j > at:
                        return None
                    if window[0] >= 0 and j < at - window[0]:
                        return None
                    if window[1] >= 0 and j > at + window[1]:
                        return None
                    s = dot * (dim**-0.5 if scale is None else scale)
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if slopes is not None:
                        s -= slopes[b][h] * abs(at - j)
                    if bias is not None and bias.dtype == bool:
                        return s if bias[b, h, i, j] else None
                    return s if bias is None else s + bias[b, h, i, j]

                row, row_lse = scalar_row(
                    q[b, i, h],
                    k[b, :nk, h // group],
                    v[b, :nk, h // group],
                    final,
                    None if sinks is None else sinks[h],
                )
                out[b, i, h, : len(row)] = row
                lse[b, h, i] = row_lse
    return out, lse


@pytest.mark.parametrize("case", range(60))
def test_reference_equals_scalar_loops(case, rng):
    batch, sq, sk, dim, dim_v = (
        int(rng.integers(low, high)) for low, high in ((1, 3), (1, 7), (0, 9), (1, 6), (1, 6))
    )
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    heads = kv_heads * group
    q = rng.normal(size=(batch, sq, heads, dim)) * 2
    k = rng.normal(size=(batch, sk, kv_heads, dim)) * 2
    v = rng.normal(size=(batch, sk, kv_heads, dim_v))

    def maybe(make):
        return make() if rng.random() < 0.5 else None

    causal = bool(rng.random() < 0.4)
    window = (int(rng.integers(-1, 4)), int(rng.integers(-1, 4)))
    scale, softcap = (
        maybe(lambda: float(rng.uniform(0.1, 2))),
        maybe(lambda: float(rng.uniform(0.5, 4))) or 0.0,
    )
    slopes = maybe(lambda: rng.uniform(0, 1, size=(batch, heads)))
    sinks = maybe(lambda: rng.normal(size=heads))
    bias = maybe(lambda: rng.normal(size=(batch, heads, sq, sk)))
    if bias is not None and rng.random() < 0.5:
        bias = bias > 0
    used_q = maybe(lambda: rng.integers(0, sq + 1, size=batch).astype(np.int32))
    used_k = maybe(lambda: rng.integers(0, sk + 1, size=batch).astype(np.int32))

    expected, expected_lse = scalar_attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        slopes=slopes,
        sinks=sinks,
        bias=bias,
        used_q=[sq] * batch if used_q is None else used_q,
        used_k=[sk] * batch if used_k is None else used_k,
    )
    options = dict(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=slopes,
        sinks=sinks,
        bias=bias,
        seqused_q=used_q,
        seqused_k=used_k,
    )
    out, lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)

    out, lse = reference.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd", **options)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)

    lengths = (
        np.full(batch, n) if used is None else used for n, used in ((sq, used_q), (sk, used_k))
    )
    check_packed((q, k, v), lengths, options, expected, expected_lse)


def check_packed(arrays, lengths, options, expected, expected_lse):
    """The same as packed sequences of the lengths in use: every option but seqused, which is then
    the length itself.
    """
    (q, k, v), (lengths_q, lengths_k) = arrays, lengths
    sq, sk = q.shape[1], k.shape[1]
    cu_q, cu_k = (
        np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k)
    )
    packed_q = np.concatenate([q[b, :n] for b, n in enumerate(lengths_q)])
    packed_k, packed_v = (
        np.concatenate([x[b, :n] for b, n in enumerate(lengths_k)]) for x in (k, v)
    )
    options = {**options, "seqused_q": None, "seqused_k": None}
    out, lse = reference.attention_varlen(
        packed_q, packed_k, packed_v, cu_q, cu_k, sq, sk, **options
    )
    for b, n in enumerate(lengths_q):
        np.testing.assert_allclose(
            out[cu_q[b] : cu_q[b + 1]], expected[b, :n], rtol=1e-12, atol=1e-12
        )
        np.testing.assert_allclose(
            lse[:, cu_q[b] : cu_q[b + 1]], expected_lse[b, :, :n], rtol=1e-12, atol=1e-12
        )


def test_equal_keys_give_the_mean_and_log_n():
    q, k = np.ones((1, 1, 1, 4)), np.zeros((1, 5, 1, 4))
    v = np.arange(5.0).reshape(1, 5, 1, 1)
    out, lse = reference.attention(q, k, v)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(math.log(5))
    _, lse = reference.attention(q, k, v, sinks=np.zeros(1))
    assert lse.item() == pytest.approx(math.log(6))


def test_row_without_keys_is_zero_and_minus_infinity_and_a_sink_alone_is_the_lse():
    q, k, v = np.ones((1, 3, 2, 4)), np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4))
    out, lse = reference.attention(q, k, v, causal=True)
    assert not out[0, :2].any()
    assert (lse[0, :, :2] == -np.inf).all()
    assert (out[0, 2] == 1).all()
    out, lse = reference.attention(q, k, v, causal=True, sinks=np.array([0.5, -2.0]))
    assert not out[0, :2].any()
    assert (lse[0, :, :2] == [[0.5] * 2, [-2.0] * 2]).all()


def test_nan_in_a_visible_value_stays_in_the_rows_that_see_it():
    q, k, v = np.ones((1, 3, 1, 4)), np.ones((1, 3, 1, 4)), np.ones((1, 3, 1, 4))
    v[0, 2] = np.nan
    out, lse = reference.attention(q, k, v, causal=True)
    assert np.isfinite(out[0, :2]).all()
    assert np.isnan(out[0, 2]).all()
    assert np.isfinite(lse).all()
    k[0, 1] = np.nan
    out, lse = reference.attention(q, k, v, causal=True)
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1:]).all()
    assert np.isnan(lse[0, 0, 1:]).all()


def test_plain_formula_rounds_scores_probabilities_and_output():
    q, k = (
        np.full((1, 1, 1, 1), 1 + 2**-10, np.float16),
        np.full((1, 2, 1, 1), 1 + 2**-10, np.float16),
    )
    k[0, 1] = 0
    v = np.array([1, 0], np.float16).reshape(1, 2, 1, 1)
    out, lse = reference.attention(q, k, v, scale=1.0, rounded_to=np.float16)
    score = float(np.float16((1 + 2**-10) ** 2))
    assert lse.item() == pytest.approx(math.log(math.exp(score) + 1), rel=1e-6)
    assert out.item() == float(np.float16(1 / (1 + math.exp(-score))))
    assert out.dtype == np.float32


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "nhd", "thd"])
def test_merge_reference_equals_scalar_formula(layout, rng):
    parts, extents = 3, (2, 5, 3) if layout in ("bshd", "bhsd") else (5, 3)
    outs = rng.normal(size=(parts, *extents, 4))
    lses = rng.normal(size=(parts, *extents)) * 3
    lses[0].flat[0] = -np.inf
    lses[:, ..., -1] = -np.inf
    swap = layout in ("bshd", "thd")
    out, lse = reference.merge_states(outs, lses.swapaxes(-1, -2) if swap else lses, layout=layout)
    lse = lse.swapaxes(-1, -2) if swap else lse
    for index in np.ndindex(*extents):
        total = sum(math.exp(x) for x in lses[(slice(None), *index)])
        if total == 0:
            assert lse[index] == -np.inf
            assert not out[index].any()
            continue
        expected = (
            sum(outs[(p, *index)] * math.exp(lses[(p, *index)]) for p in range(parts)) / total
        )
        np.testing.assert_allclose(out[index], expected, rtol=1e-12, atol=1e-14)
        assert lse[index] == pytest.approx(math.log(total), rel=1e-12)
