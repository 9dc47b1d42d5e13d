# SPDX-License-Identifier: Apache-2.0
"""Masks and scores as functions, made at random, and what they mean: dense float64, by running the
same function on grids of numpy's indices. Shares nothing with the tracer or the library.
"""

from __future__ import annotations

import inspect

import numpy as np


def lengths_asked(function, q_len, kv_len):
    names = inspect.signature(function).parameters
    return {n: x for n, x in (("q_len", q_len), ("kv_len", kv_len)) if n in names}


def dense_mask(mask, batch, heads, q_len, kv_len):
    """The mask as bool [batch, heads, q_len, kv_len]."""
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    given = lengths_asked(mask, q_len, kv_len)
    out = np.empty((batch, heads, q_len, kv_len), bool)
    for b in range(batch):
        for h in range(heads):
            out[b, h] = mask(b, h, q, k, **given)
    return out


def dense_scores(mod, scores):
    """Scores after a score function, of any [batch, heads, q_len, kv_len]."""
    q_len, kv_len = scores.shape[2:]
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    given = lengths_asked(mod, q_len, kv_len)
    out = np.empty_like(scores)
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            out[b, h] = mod(scores[b, h], b, h, q, k, **given)
    return out


def heads_first(x):
    return np.asarray(x).transpose(0, 2, 1, 3)


def attention(q, k, v, *, mask=None, mod=None, scale=None, softcap=0.0, bias=None, sinks=None):
    """The formula in float64, heads first: out [batch, heads, q_len, head_dim_v] and lse."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * (1 / np.sqrt(q.shape[3]) if scale is None else scale)
    s = softcap * np.tanh(s / softcap) if softcap else s
    s = s if mod is None else dense_scores(mod, s)
    s = s if bias is None else s + bias
    s = s if mask is None else np.where(dense_mask(mask, *s.shape), s, -np.inf)
    sink = np.full((1, q.shape[1], 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(s - top)
    total = weights.sum(axis=3, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, weights @ np.where(np.isfinite(v), v, 0.0) / total, 0.0)
        return out, (top + np.log(total))[..., 0]


class Generator:
    """Random masks and score functions, for numpy's indices and symbols alike."""

    def __init__(self, rng, batch, heads, q_len, kv_len):
        self.rng, self.n = rng, max(q_len, kv_len, 1)
        kinds = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16)
        self.ids = [
            rng.integers(0, 6, self.n).astype(rng.choice(kinds)),
            np.sort(rng.integers(0, 6, self.n)).astype(rng.choice(kinds)),
        ]
        self.per_batch = rng.integers(0, self.n + 1, batch)
        self.per_head = rng.integers(0, self.n + 1, (2, heads))[1]  # a view
        self.flags = rng.integers(0, 2, (batch, self.n)).astype(bool)
        self.slopes = rng.random(heads).astype(rng.choice((np.float16, np.float32, np.float64)))
        self.table = rng.standard_normal((2 * heads, 2 * self.n + 1)).astype(np.float32)[::2]
        self.one = np.float32(rng.random())

    def number(self, low, high):
        return int(self.rng.integers(low, max(high, low + 1)))

    def leaf(self):
        n, ids = self.n, self.ids[self.number(0, 2)]
        w, c, m = self.number(-2, n), self.number(1, n), self.number(1, 9)
        per_batch, per_head, flags = self.per_batch, self.per_head, self.flags
        return [
            lambda b, h, q, k: k <= q + w,
            lambda b, h, q, k: q >= k,
            lambda b, h, q, k: abs(q - k) <= w,
            lambda b, h, q, k: (q - k) % m == 0,
            lambda b, h, q, k: q // c == k // c,
            lambda b, h, q, k: k // c <= q // m,
            lambda b, h, q, k: ids[q] == ids[k],
            lambda b, h, q, k: k < per_batch[b],
            lambda b, h, q, k: k >= per_head[h],
            lambda b, h, q, k: flags[b, k],
            lambda b, h, q, k: 2 * k - q > w,
            lambda b, h, q, k: (q + h) % (m + 1) != 0,
            lambda b, h, q, k, q_len, kv_len: k <= q + kv_len - q_len,
        ][self.number(0, 13)]

    def mask(self, depth):
        if depth == 0 or self.rng.random() < 0.25:
            return self.leaf()
        x, y = self.mask(depth - 1), self.mask(depth - 1)

        def ask(f, b, h, q, k, q_len, kv_len):
            return f(b, h, q, k, **lengths_asked_by(f, q_len, kv_len))

        join = self.number(0, 4)
        if join == 0:
            return lambda b, h, q, k, q_len, kv_len: ~ask(x, b, h, q, k, q_len, kv_len)
        if join == 1:
            return lambda b, h, q, k, q_len, kv_len: (
                ask(x, b, h, q, k, q_len, kv_len) | ask(y, b, h, q, k, q_len, kv_len)
            )
        return lambda b, h, q, k, q_len, kv_len: (
            ask(x, b, h, q, k, q_len, kv_len) & ask(y, b, h, q, k, q_len, kv_len)
        )

    def score(self):
        slopes, table, one, n = self.slopes, self.table, self.one, self.n
        cap, w = float(self.rng.uniform(2, 30)), self.number(0, n)
        low, high = np.minimum, np.maximum
        return [
            lambda s, b, h, q, k: s - slopes[h] * abs(q - k),
            lambda s, b, h, q, k: cap * np.tanh(s / cap),
            lambda s, b, h, q, k: s + table[h, q - k + n],
            lambda s, b, h, q, k: s + table[h][low(high(q - k, -w), w) + n],
            lambda s, b, h, q, k: np.where(q - k > w, s * 0.5, s),
            lambda s, b, h, q, k: np.where((q + k) % 3 == 0, -np.inf, s),
            lambda s, b, h, q, k: s * np.exp(-abs(q - k) / cap) + one,
            lambda s, b, h, q, k: s * np.log(2.0 + q / 8.0) / np.sqrt(1.0 + h),
            lambda s, b, h, q, k, q_len, kv_len: s + (k - q) / (q_len + kv_len),
            lambda s, b, h, q, k: high(low(s, 2.0), -one),
        ][self.number(0, 10)]


def lengths_asked_by(f, q_len, kv_len):
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    return {n: x for n, x in (("q_len", q_len), ("kv_len", kv_len)) if n in names}
