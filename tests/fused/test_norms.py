# SPDX-License-Identifier: Apache-2.0
"""rms_norm, layer_norm, act_mul and bias_act against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuattn
from cases import DTYPES
from harness import Arena, is_emulated

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half of the last place
COLUMNS = [1, 8, 100, 1024, 1032, 4097, 8192, 16384, 40000]


def put(arena, rng, shape, dtype, storage="contiguous", scale=1.0):
    values = (rng.standard_normal(shape) * scale).astype(DTYPES[dtype])
    return arena.put(values, storage, align=16 if storage == "padded" else 4), values


@pytest.mark.parametrize("centred", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(device, dtype, centred, rng):
    function = cuattn.layer_norm if centred else cuattn.rms_norm
    for number, columns in enumerate(COLUMNS):
        rows = (1, 5, 3)[number % 3]
        if is_emulated() and columns > 8192 and (dtype == "float16" or centred):
            continue  # seconds each
        arena = Arena(device)
        scale = (1.0, 1e4 if dtype != "float16" else 30.0, 1e-4)[number % 3]
        x, values = put(arena, rng, (rows, 2, columns), dtype, ("padded", "contiguous")[number % 2],
                        scale)  # fmt: skip
        weight_dtype = dtype if number % 2 else "float32"
        weight, w = put(arena, rng, (columns,), weight_dtype)
        options, offset, bias = {}, float(number % 2), 0.0
        if centred:
            options["bias"], bias = put(arena, rng, (columns,), weight_dtype)
        h = values.astype(np.float64)
        if number % 3 != 1:
            added = (rng.standard_normal(values.shape) * scale).astype(values.dtype)
            kept = options["residual"] = arena.output(values.shape, values.dtype)
            device.write(kept, added)
            if number % 2:
                options["residual"] = arena.put(added, align=4)
                options["residual_out"] = kept
            h = (values.astype(np.float32) + added.astype(np.float32)).astype(values.dtype)
        if number % 4 == 3:
            options["out"] = arena.output(values.shape, values.dtype, "padded")
        found = function(x, weight, eps=1e-6, weight_offset=offset, **options)
        device.synchronize()
        arena.verify()
        if "residual" in options:
            found, again = found
            assert again is kept
            assert np.array_equal(device.numpy(kept), h)
        assert "out" not in options or found is options["out"]
        h = h.astype(np.float64)
        mean = h.mean(-1, keepdims=True) if centred else 0.0
        inverse = 1 / np.sqrt(((h - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
        # Of layer_norm: where the variance is nothing, what the mean lacks is all there is.
        noise = 2.0**-20 * (np.abs(h) + np.abs(mean)) * inverse
        factor = w.astype(np.float64) + offset
        y = (h - mean) * inverse * factor
        expected = y + np.asarray(bias, np.float64)
        limit = UNIT[dtype] * np.abs(expected) + np.abs(factor) * noise + 1e-6 * np.abs(y) + 1e-7
        error = np.abs(device.numpy(found).astype(np.float64) - expected)
        assert (error <= limit).all(), (columns, (error / limit).max())


def logistic(x):
    return 0.5 * (1 + np.tanh(x / 2))


def normal(x):
    return np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(x)


ACTIVATIONS = {
    "silu": lambda x: x * logistic(x),
    "gelu": lambda x: x * normal(x),
    "gelu_tanh": lambda x: x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(device, dtype, act, rng):
    exact = ACTIVATIONS[act]
    for number, columns in enumerate((1, 8, 24, 1000, 1023)):
        arena = Arena(device)
        storage = ("contiguous", "padded")[number % 2]
        x, values = put(arena, rng, (3, 2, 2 * columns), dtype, storage, 3.0)
        bias, b = (None, np.zeros(2 * columns)) if number % 2 else put(
            arena, rng, (2 * columns,), dtype)  # fmt: skip
        whole = values.astype(np.float64) + b.astype(np.float64)
        left, right = whole[..., :columns], whole[..., columns:]
        out = arena.output(left.shape, values.dtype, storage) if number % 2 else None
        gated = cuattn.act_mul(x, act=act, bias=bias, out=out)
        alone = cuattn.bias_act(x, bias, act=act)
        device.synchronize()
        arena.verify()
        for found, y, size in ((gated, exact(left) * right, np.abs(left * right)),
                               (alone, exact(whole), np.abs(whole))):  # fmt: skip
            error = np.abs(device.numpy(found).astype(np.float64) - y)
            limit = UNIT[dtype] * np.abs(y) + 1e-6 * size + 2e-7
            assert (error <= limit).all(), (columns, (error / limit).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_a_bias_begins(device, dtype, rng):
    """At 16 bytes or not, the bits are the same."""
    values, b = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((3, 64), (64,)))
    for act in ACTIVATIONS:
        for function in (cuattn.act_mul, cuattn.bias_act):
            x, found = Arena(device).put(values), []
            for offset in (0, b.itemsize):
                buffer = device.buffer(b.nbytes + 16)
                bias = device.view(buffer, b.dtype, offset, b.shape, (1,))
                device.write(bias, b)
                found.append(device.numpy(function(x, bias=bias, act=act)))
            assert np.array_equal(found[0], found[1]), (act, function)


def test_activations_at_the_ends(device):
    x = np.float32([[-1e30, -200.0, -88.0, -0.0, 0.0, 200.0, 1e30, np.nan]])
    for act in ACTIVATIONS:
        arena = Arena(device)
        found = device.numpy(cuattn.bias_act(arena.put(x), act=act))[0]
        assert np.array_equal(found[3:7], x[0, 3:7]), act
        assert np.isnan(found[7])
        assert (np.abs(found[:3]) < 1e-30).all(), act


def test_in_place(device, rng):
    values = rng.standard_normal((4, 64)).astype(np.float32)
    weight = np.ones(64, np.float32)
    for function in (
        lambda x, out: cuattn.rms_norm(x, Arena(device).put(weight), out=out),
        lambda x, out: cuattn.bias_act(x, act="silu", out=out),
    ):
        arena = Arena(device)
        apart = device.numpy(function(arena.put(values), None))
        x = arena.output(values.shape, np.float32)
        device.write(x, values)
        assert function(x, x) is x
        device.synchronize()
        assert np.array_equal(device.numpy(x), apart)


X, W = np.zeros((4, 8), np.float32), np.zeros(8, np.float32)
REFUSED = [
    (lambda: cuattn.rms_norm(X, W[:7]), r"rms_norm: weight must have shape \(columns,\) = \(8,\)"),
    (lambda: cuattn.rms_norm(X, W.astype(np.float64)), "rms_norm: weight must be float32"),
    (lambda: cuattn.rms_norm(X, W, eps=-1.0), "rms_norm: eps must be finite and not negative"),
    (lambda: cuattn.rms_norm(X, W, eps=math.nan), "rms_norm: eps must be finite"),
    (lambda: cuattn.rms_norm(X[:, :0], W[:0]), "rms_norm: x must have from 1 to"),
    (lambda: cuattn.rms_norm(X[:, ::2], W[:4]), "rms_norm: x must be contiguous in its last axis"),
    (
        lambda: cuattn.rms_norm(np.zeros((4, 6, 8), np.float32)[::2, :5], W),
        "rms_norm: x must have rows that begin at even steps",
    ),
    (lambda: cuattn.rms_norm(X, W, residual_out=X.copy()), "residual_out must be NULL without"),
    (
        lambda: cuattn.rms_norm(X, W, residual=X),
        "rms_norm: residual must not share memory with x",
    ),
    (lambda: cuattn.rms_norm(X, W, residual=X[:2].copy()), "rms_norm: residual must have shape"),
    (
        lambda: cuattn.rms_norm(X, W, residual=np.lib.stride_tricks.as_strided(W, (4, 8), (0, 4))),
        "rms_norm: residual is written, so no stride may be zero",
    ),
    (lambda: cuattn.rms_norm(X, W, out=X[0]), "rms_norm: out must have shape"),
    (lambda: cuattn.layer_norm(X, W, W[:3]), "layer_norm: bias must have shape"),
    (lambda: cuattn.act_mul(X, act="tanh"), "act_mul: act must be 'silu', 'gelu' or 'gelu_tanh'"),
    (lambda: cuattn.act_mul(X[:, :7]), "act_mul: x must have an even number of columns"),
    (lambda: cuattn.act_mul(X, out=X[:, :4]), "act_mul: out must not share memory with x"),
    (lambda: cuattn.act_mul(X, bias=W[:4]), "act_mul: bias must have shape"),
    (lambda: cuattn.bias_act(X.astype(np.int32)), "bias_act: x must be float32, float16 or"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
