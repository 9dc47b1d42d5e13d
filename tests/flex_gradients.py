# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention through functions in float64: the chain rule over dense scores, where a
function's derivatives are central differences of the function itself. It shares nothing with the
tracer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import flex_cases
from flex_cases import heads_first

STEP = 1e-6


class Dense(NamedTuple):
    """Gradients in float64, heads first, and the sums of the sizes that their errors grow with."""

    values: tuple  # dq, dk, dv
    sizes: tuple
    ds: np.ndarray  # of the scores after the score function
    ds_sizes: np.ndarray
    capped: np.ndarray  # the scores before it


def close(got, want, size, what, tolerance=1e-6):
    """Compare: an error is a share of the sizes of all that was added up."""
    got = np.asarray(got, np.float64)
    assert np.all(np.isfinite(got)), what
    most = tolerance * float(np.max(size, initial=1.0))
    np.testing.assert_allclose(got, want, atol=most, rtol=0, err_msg=what)


def check(got, want, what, tolerance=1e-6):
    for name, x, y, size in zip(("dq", "dk", "dv"), got, want.values, want.sizes, strict=False):
        close(heads_first(x), y, size, f"{name}, {what}", tolerance)


def dense_gradients(q, k, v, dout, *, mask=None, mod=None, dlse=None, softcap=0.0, bias=None):
    """The chain rule; a score has the error of its own size and of the row's lse."""
    q, k, v, dout = (heads_first(x).astype(np.float64) for x in (q, k, v, dout))
    heads_kv = k.shape[1]
    group = q.shape[1] // heads_kv
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = 1 / np.sqrt(q.shape[3])
    x = q @ k.swapaxes(2, 3) * scale
    capped = softcap * np.tanh(x / softcap) if softcap else x
    s = capped if mod is None else flex_cases.dense_scores(mod, capped)
    s = s if bias is None else s + bias
    s = s if mask is None else np.where(flex_cases.dense_mask(mask, *s.shape), s, -np.inf)
    top = s.max(axis=3, keepdims=True, initial=-1e30)
    p = np.exp(s - top)
    p = p / np.maximum(p.sum(axis=3, keepdims=True), 1e-300)
    delta = (dout * (p @ v)).sum(axis=3, keepdims=True)
    delta = delta if dlse is None else delta - dlse[..., None]
    ds = p * (dout @ v.swapaxes(2, 3) - delta)
    slope = 1.0
    if mod is not None:
        ends = [flex_cases.dense_scores(mod, capped + h) for h in (STEP, -STEP)]
        with np.errstate(invalid="ignore"):
            slope = np.where(p > 0, (ends[0] - ends[1]) / (2 * STEP), 0.0)
    inner = slope * (1 - (capped / softcap) ** 2 if softcap else 1.0) * scale
    dx = ds * inner
    reach = 8 + np.where(p > 0, np.abs(s), 0.0)
    reach = reach + reach.max(axis=3, keepdims=True, initial=0.0)
    p_size = p * reach
    ds_size = p_size * (np.abs(dout) @ np.abs(v).swapaxes(2, 3) + np.abs(delta))
    dx_size = ds_size * (np.abs(inner) + scale)

    def sums(dx, p, q, k, dout):
        of_keys = [dx.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout]
        shape = (len(q), heads_kv, group)
        return dx @ k, *(y.reshape(*shape, *y.shape[2:]).sum(axis=2) for y in of_keys)

    sizes = sums(dx_size, p_size, np.abs(q), np.abs(k), np.abs(dout))
    return Dense(sums(dx, p, q, k, dout), sizes, ds, ds_size, capped)


def dense_array_gradient(mod, array, want):
    """The gradient of an array of float64 that `mod` reads, an element at a time; and its size."""
    out, size = np.zeros(array.shape), np.zeros(array.shape)
    for at in np.ndindex(array.shape):
        kept, ends = array[at], []
        for h in (STEP, -STEP):
            array[at] = kept + h
            ends.append(flex_cases.dense_scores(mod, want.capped))
        array[at] = kept
        with np.errstate(invalid="ignore"):
            slope = np.where(want.ds != 0, (ends[0] - ends[1]) / (2 * STEP), 0.0)
        out[at], size[at] = (want.ds * slope).sum(), (want.ds_sizes * np.abs(slope)).sum()
    return out, size
