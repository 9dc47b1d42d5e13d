# SPDX-License-Identifier: Apache-2.0
"""What a Hopper's tensor cores make of float8 attention, in numpy: a model to hold bounds against.

They add 32 products and the sum so far at once, each cut to 13 bits below the largest of them, and
keep 13 bits of the result (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). P is e4m3, 16 times the
probability relative to the row's highest score. Scales, masks and sums of P are exact here, for
float32 is by far more than that. Next: tests/float8/test_float8_bounds.py.
"""

from __future__ import annotations

import numpy as np

import reference
from float8_cases import F8

BITS = 13


def cut(x, exponent, bits):
    """Leave off, towards zero, what is less than 2^-bits of 2^exponent."""
    unit = np.ldexp(1.0, exponent - bits)
    return np.trunc(x / unit) * unit


def exponent_of(x):
    return np.frexp(np.where(x == 0, 1.0, np.abs(x)))[1] - 1


def product(a, b, bits=BITS):
    """a [m, k] times b [n, k] transposed as tensor cores add it up."""
    total = np.zeros((len(a), len(b)))
    for step in range(0, a.shape[1], 32):
        terms = a[:, None, step : step + 32] * b[None, :, step : step + 32]
        terms = np.concatenate([terms, total[..., None]], axis=-1)
        largest = exponent_of(np.abs(terms).max(axis=-1))
        total = cut(terms, largest[..., None], bits).sum(axis=-1)
        total = cut(total, exponent_of(total), bits)
    return total


def attention(given, numbers, bits=BITS):
    """Out and lse of a problem of float8_cases.make() in dense layout, one tile of keys a row."""
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
        top = scores.max(axis=1, initial=-np.inf)
        top = np.where(np.isneginf(top), 0.0, top)
        probs = np.exp(scores - top[:, None])
        total = probs.sum(axis=1)
        with np.errstate(divide="ignore"):
            lse[b, h, :n] = np.logaddexp(np.log(total) + top, sinks[h])
        rounded = (16 * probs).astype(np.float32).astype(F8).astype(np.float64)
        summed = product(rounded, codes[2][b, of, keys].T, bits) / 16
        factor = np.where(total == 0, 0.0, np.exp(top - np.where(total == 0, 0.0, lse[b, h, :n])))
        out[b, h, :n] = summed * factor[:, None] * _ratio(v[b, of], codes[2][b, of], axis=0)
    return out.transpose(axes), lse


def _ratio(numbers, codes, axis=None):
    """The scale between them: of a head, or of each channel."""
    with np.errstate(invalid="ignore"):
        usable = np.where(np.nan_to_num(codes) == 0, np.nan, numbers / codes)
    found = np.nanmax(np.where(np.isnan(usable), 0.0, usable), axis=axis, initial=0.0)
    return np.where(found == 0, 1.0, found)
