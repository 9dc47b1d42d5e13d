# SPDX-License-Identifier: Apache-2.0
"""How rotations and draws are judged. Next: fused/test_rope.py, fused/test_sampling.py,
mla/test_mutants_mla.py.
"""

from __future__ import annotations

import math

import numpy as np

import cuattn
from cases import DTYPES
from harness import Arena, bits, numpy_call

# Half a unit in the last place, and three roundings of float32.
ROUNDING = {"float32": 4 * 2.0**-24, "float16": 2.0**-11 + 2.0**-22, "bfloat16": 2.0**-8 + 2.0**-22}
SHAPES = [  # head_dim, rotary_dim, offset
    (64, 64, 0),
    (128, 64, 64),
    (72, 32, 8),
    (40, 24, 16),  # half of rotary_dim is no piece of 16 bytes
    (24, 10, 3),
    (8, 2, 0),
]


def turned(x, cos, sin, offset, interleaved, inverse=False):
    """The rotation in float64, and the size of what was summed; cos and sin of each token."""
    x, half = x.astype(np.float64), cos.shape[-1]
    cos, sin = (t.astype(np.float64)[..., None, :] for t in (cos, -sin if inverse else sin))
    i = np.arange(half)
    first = offset + (2 * i if interleaved else i)
    second = first + (1 if interleaved else half)
    y, size = x.copy(), np.abs(x)
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    size[..., first] = size[..., second] = np.abs(a) + np.abs(b)
    return y, size


def assert_turned(device, dtype, interleaved, rng):
    """apply_rope against float64 for heads of every kind, and the bits of what is not turned."""
    storages = ("contiguous", "transposed", "padded", "in place")
    for number, (head_dim, rotary_dim, offset) in enumerate(SHAPES):
        heads, batch, seqlen = (1, 5, 4)[number % 3], (2, 3, 1)[number % 3], (7, 1, 300)[number % 3]
        inverse, storage = number % 2 == 1, storages[number % 4]
        shape = (batch, seqlen, heads, head_dim)
        x = rng.standard_normal(shape).astype(DTYPES[dtype])
        cos, sin = rng.uniform(-1, 1, (2, 500, rotary_dim // 2)).astype(np.float32)
        positions = None if number == 2 else rng.integers(0, 500, (batch, seqlen))
        arena = Arena(device)
        if storage == "in place":
            out = arena.output(shape, x.dtype)
            device.write(out, x)
            given = out
        else:
            given = arena.put(x, storage)
            out = arena.output(shape, x.dtype, storage) if number % 2 else None
        tables = [arena.put(t, "padded", align=4 * (1 + 3 * (number % 2))) for t in (cos, sin)]
        places = None if positions is None else arena.put(positions, "reversed", align=8)
        options = dict(interleaved=interleaved, inverse=inverse, offset=offset)
        found = cuattn.apply_rope(given, *tables, places, out=out, **options)
        device.synchronize()
        arena.verify()
        assert out is None or found is out
        found = device.numpy(found)
        rows = np.broadcast_to(np.arange(seqlen), (batch, seqlen))
        rows = rows if positions is None else positions
        expected, size = turned(x, cos[rows], sin[rows], offset, interleaved, inverse)
        error = np.abs(found.astype(np.float64) - expected)
        assert (error <= ROUNDING[dtype] * size + 2.0**-25).all(), (head_dim, rotary_dim, storage)
        rest = np.r_[0:offset, offset + rotary_dim : head_dim]
        assert np.array_equal(bits(found[..., rest]), bits(x[..., rest]))


def assert_likely(counts, probabilities):
    """The chi-square test, 4 standard deviations by Wilson and Hilferty."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    k = len(counts) - 1
    if k == 0:
        return
    statistic = ((counts - expected) ** 2 / expected).sum()
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    assert z < 4, (statistic, k)


def filtered(p, top_k=0, top_p=1.0, min_p=0.0, joint=False):
    """The float64 set, renormalised."""
    kept = np.ones(len(p), bool)
    if top_k:
        kept &= p >= np.sort(p)[-top_k]
    if top_p < 1:
        q = p if joint else np.where(kept, p, 0) / p[kept].sum()
        order = np.argsort(-q)
        last = order[np.argmax(np.cumsum(q[order]) >= top_p)]
        kept &= p >= p[last]
    kept &= p >= min_p * p.max()
    return np.where(kept, p, 0)


def assert_distribution(device, options):
    """Hold 200,000 draws of fixed seeds and logits against the float64 distribution."""
    draws, vocabulary = 100_000, 40
    logits = np.random.default_rng(20).standard_normal(vocabulary).astype(np.float32) * 1.5
    given = dict(options)
    given["order"] = "joint" if given.pop("joint", False) else "top_k_first"
    rows = np.repeat(logits[None], draws, 0)
    by_seed = numpy_call(device, cuattn.sample, rows, seed=np.arange(draws), **given)
    by_offset = numpy_call(device, cuattn.sample, rows, seed=9, offset=np.arange(draws), **given)
    p = np.exp(logits.astype(np.float64) / options.get("temperature", 1.0))
    rules = {name: value for name, value in options.items() if name != "temperature"}
    for found in (by_seed, by_offset):
        assert_likely(np.bincount(found, minlength=vocabulary), filtered(p / p.sum(), **rules))
