# SPDX-License-Identifier: Apache-2.0
"""What a Hopper's tensor cores make of float8 attention, in numpy: a model to hold bounds against.

They add 32 products and the sum so far at once, each cut to 13 bits below the largest of them, and
keep 13 bits of the result (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). P is e4m3, 16 times the
probability relative to a reference: the highest score of the row in the first tile of keys, the
last of the row; a score beyond 16 times that is the next one. Scales, masks and what is summed in
float32 are exact here, for that is by far more than 13 bits. Next:
tests/float8/test_float8_bounds.py.
"""

from __future__ import annotations

import numpy as np

import reference
from float8_cases import F8

BITS = 13
TILE = 128  # keys


def cut(x, exponent, bits):
    """Leave off, towards zero, what is less than 2^-bits of 2^exponent."""
    unit = np.ldexp(1.0, exponent - bits)
    return np.trunc(x / unit) * unit


def exponent_of(x):
    return np.frexp(np.where(x == 0, 1.0, np.abs(x)))[1] - 1


def product(a, b, bits=BITS, begin=0.0):
    """a [m, k] times b [n, k] transposed, added to begin [m, n] as tensor cores add it up."""
    total = np.zeros((len(a), len(b))) + begin
    for step in range(0, a.shape[1], 32):
        terms = a[:, None, step : step + 32] * b[None, :, step : step + 32]
        terms = np.concatenate([terms, total[..., None]], axis=-1)
        largest = exponent_of(np.abs(terms).max(axis=-1))
        total = cut(terms, largest[..., None], bits).sum(axis=-1)
        total = cut(total, exponent_of(total), bits)
    return total


def weigh(scores, v, is_fast, bits):
    """Weighted sums [m, n] and the sum of P [m] of scores [m, keys] and values [keys, n], relative
    to a reference [m], the third result.
    """
    rows = len(scores)
    summed, total, reference = np.zeros((rows, v.shape[1])), np.zeros(rows), np.full(rows, -np.inf)
    for end in range(scores.shape[1], 0, -TILE):
        tile = slice(max(0, end - TILE), end)
        top = scores[:, tile].max(axis=1)
        moves = top > reference + np.log(16)
        new = np.where(moves, top, reference)
        base = np.where(np.isneginf(new), 0.0, new)
        rescale = np.exp(np.where(moves, reference - base, 0.0))
        reference = new
        probs = np.exp(scores[:, tile] - base[:, None])
        rounded = (16 * probs).astype(np.float32).astype(F8).astype(np.float64)
        summed, total = summed * rescale[:, None], total * rescale
        if is_fast:
            summed = product(rounded, v[tile].T, bits, begin=summed)
            total += product(rounded, np.ones((1, len(v[tile]))), bits)[:, 0] / 16
        else:
            summed += product(rounded, v[tile].T, bits)
            total += probs.sum(axis=1)
    return summed / 16, total, np.where(np.isneginf(reference), 0.0, reference)


def attention(given, numbers, bits=BITS):
    """Out and lse of a problem of float8_cases.make() in dense layout."""
    case, arrays = given.case, numbers.arrays
    axes = reference.LAYOUTS[case.layout]
    codes = [np.asarray(given.arrays[x]).astype(np.float64).transpose(axes) for x in "qkv"]
    q, k, v = (arrays[x].astype(np.float64).transpose(axes) for x in "qkv")
    batch, heads, rows = q.shape[:3]
    group = heads // k.shape[1]
    used_q = reference._used(arrays.get("seqused_q"), rows, batch)
    used_k = reference._used(arrays.get("seqused_k"), k.shape[2], batch)
    first = reference.first_keys(arrays.get("kv_start"), k.shape[2], batch)
    options = [numbers.options[x] for x in ("causal", "window", "scale")]
    exact = reference.score(q, k, used_q, used_k, first, *options, 0.0, None, None, None)
    out, lse = np.zeros((batch, heads, rows, v.shape[3])), np.full((batch, heads, rows), -np.inf)
    sinks = arrays.get("sinks", np.full(heads, -np.inf)).astype(np.float64)
    scale = case.scale or case.head_dim**-0.5
    for b, h in np.ndindex(batch, heads):
        n, keys, of = used_q[b], slice(first[b], max(first[b], used_k[b])), h // group
        ratio = [_ratio(x[b, i], y[b, i]) for x, y, i in ((q, codes[0], h), (k, codes[1], of))]
        scores = product(codes[0][b, h, :n], codes[1][b, of, keys], bits)
        scores = scores * (scale * ratio[0] * ratio[1])
        scores = np.where(exact.visible[b, h, :n, keys], scores, -np.inf)
        is_fast = given.options["accumulate"] == "fast"
        summed, total, top = weigh(scores, codes[2][b, of, keys], is_fast, bits)
        with np.errstate(divide="ignore"):
            lse[b, h, :n] = np.logaddexp(np.log(total) + top, sinks[h])
        factor = np.where(total == 0, 0.0, np.exp(top - np.where(total == 0, 0.0, lse[b, h, :n])))
        out[b, h, :n] = summed * factor[:, None] * _ratio(v[b, of], codes[2][b, of], axis=0)
    return out.transpose(axes), lse


def _ratio(numbers, codes, axis=None):
    """The scale between them: of a head, or of each channel."""
    with np.errstate(invalid="ignore"):
        usable = np.where(np.nan_to_num(codes) == 0, np.nan, numbers / codes)
    found = np.nanmax(np.where(np.isnan(usable), 0.0, usable), axis=axis, initial=0.0)
    return np.where(found == 0, 1.0, found)
