# SPDX-License-Identifier: Apache-2.0
"""Rotation, norms, activations and sampling on JAX arrays: the bits of the call on numpy arrays or,
on a GPU, on torch tensors; eagerly, under jax.jit and jax.vmap.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks
from cases import DTYPES
from harness import bits, numpy_call

jax = frameworks.require("jax")
jnp = jax.numpy

import jax_cases  # noqa: E402

COS, SIN = cuattn.rope_table(40, 16)


@pytest.fixture(autouse=True)
def on_the_device(device):
    with jax.default_device(jax_cases.device_of(device)):
        yield


def drawn(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def calls(rng, dtype):
    """Function, arrays by name and options, of every function and its optional arrays."""
    x, rows = drawn(rng, 2, 5, 3, 24, dtype=dtype), drawn(rng, 2, 3, 32, dtype=dtype)
    weight, bias = drawn(rng, 2, 32)
    probs = np.exp(drawn(rng, 4, 3, 9))
    probs = (probs / probs.sum(-1, keepdims=True)).astype(np.float32)
    tokens = rng.integers(0, 9, (4, 2)).astype(np.int32)
    logits, seeds = drawn(rng, 4, 50, dtype=dtype), np.array([3, 2**31 - 1, 7, 0])
    filters = {"temperature": np.float32([0, 0.5, 1, 2]), "top_k": np.int32([3, 0, 9, 1]),
               "top_p": np.float32([0.5, 0.9, 1, 1]),
               "min_p": np.float32([0, 0.1, 0, 0])}  # fmt: skip
    turn = {"cos": COS, "sin": SIN}
    return [
        (cuattn.apply_rope, {"x": x, **turn}, {}),
        (cuattn.apply_rope, {"x": x, **turn, "positions": rng.integers(0, 40, (2, 5))},
         {"interleaved": True, "inverse": True, "offset": 8}),
        (cuattn.apply_rope, {"x": x[0], **turn, "positions": np.arange(5)}, {}),
        (cuattn.rms_norm, {"x": rows, "weight": weight}, {"eps": 1e-3, "weight_offset": 1.0}),
        (cuattn.layer_norm, {"x": rows, "weight": weight, "bias": bias,
                             "residual": rows[::-1].copy()}, {}),
        (cuattn.act_mul, {"x": rows, "bias": rows[0, 0].copy()}, {"act": "gelu"}),
        (cuattn.bias_act, {"x": rows}, {"act": "silu"}),
        (cuattn.sample, {"logits": logits}, {"seed": 5, "offset": 3, "temperature": 0.7,
                                             "top_k": 9, "top_p": 0.8}),
        (cuattn.sample, {"logits": logits, "seed": seeds, "offset": seeds[::-1].copy(), **filters},
         {"order": "joint"}),
        (cuattn.speculative_verify, {"draft_probs": probs[:, :2], "target_probs": probs,
                                     "draft_tokens": tokens, "seed": seeds}, {"offset": 9}),
    ]  # fmt: skip


def leaves(found):
    return [bits(np.asarray(x)) for x in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_other_arrays(device, dtype, rng):
    for function, arrays, options in calls(rng, dtype):
        want = leaves(numpy_call(device, function, **arrays, **options))
        ours = {name: jnp.asarray(a) for name, a in arrays.items()}
        kept = {name: np.asarray(a) for name, a in ours.items()}
        eager = function(**ours, **options)
        for x in jax.tree.leaves(eager):
            assert x.devices() == {jax_cases.device_of(device)}
        traced = jax.jit(lambda a, f=function, o=options: f(**a, **o))(ours)
        for found in (eager, traced):
            for mine, theirs in zip(leaves(found), want, strict=True):
                assert np.array_equal(mine, theirs), function.__name__
        for name, array in ours.items():  # nothing given was written
            assert np.array_equal(np.asarray(array), kept[name], equal_nan=True)


def test_vmap_runs_one_entry_after_the_other(device, rng):
    x, residual = drawn(rng, 2, 4, 3, 32)
    weight = jnp.ones(32)
    found = jax.vmap(lambda a, r: cuattn.rms_norm(a, weight, residual=r))(x, residual)
    ones = np.ones(32, np.float32)
    want = numpy_call(device, cuattn.rms_norm, x, ones, residual=residual)
    assert all((a == b).all() for a, b in zip(leaves(found), leaves(want), strict=True))
    logits = drawn(rng, 3, 5, 20)
    found = jax.vmap(lambda a: cuattn.sample(a, seed=4, top_k=3))(jnp.asarray(logits))
    want = [numpy_call(device, cuattn.sample, a, seed=4, top_k=3).tolist() for a in logits]
    assert found.tolist() == want


X, W = (1, 4, 2, 16), (16,)
REFUSED = [
    (lambda x, w: cuattn.rms_norm(x, w, out=x), NotImplementedError, "rms_norm: out must be None"),
    (lambda x, w: cuattn.rms_norm(x, w[:3]), ValueError, "rms_norm: weight must have shape"),
    (lambda x, w: cuattn.layer_norm(x, w, w[:3]), ValueError, "layer_norm: bias must have shape"),
    (lambda x, w: cuattn.rms_norm(x, w, residual=x[:, :2]), ValueError, "residual must have shape"),
    (lambda x, w: cuattn.rms_norm(x, w, eps="a"), TypeError, "rms_norm: eps must be a number"),
    (lambda x, w: cuattn.act_mul(x, act="tanh"), ValueError, "act_mul: act must be 'silu'"),
    (lambda x, w: cuattn.act_mul(x[..., :3]), ValueError, "must have an even number of columns"),
    (lambda x, w: cuattn.apply_rope(x, COS[:3], SIN[:3]), ValueError, "a row for each of the 4"),
    (lambda x, w: cuattn.apply_rope(x, COS, SIN[:9]), ValueError, "sin must have max_position 40"),
    (lambda x, w: cuattn.apply_rope(x, COS, SIN, w), ValueError, "positions must have shape"),
    (lambda x, w: cuattn.apply_rope(x, COS, SIN, inverse=1), TypeError, "inverse must be True or"),
    (lambda x, w: cuattn.apply_rope(w, COS, SIN), ValueError, "apply_rope: x must have axes"),
    (lambda x, w: cuattn.sample(x[0, 0], seed=None), ValueError, "sample: seed must be given"),
    (lambda x, w: cuattn.sample(x[0, 0], seed=1, top_p=1.5), ValueError, "top_p must be above 0"),
    (lambda x, w: cuattn.sample(x[0], seed=1), ValueError, "sample: logits must have 2 axes"),
    (lambda x, w: cuattn.sample(x[0, 0], seed=w.astype(int)), ValueError, "seed must have shape"),
    (lambda x, w: jax.grad(lambda a: cuattn.rms_norm(a, w).sum())(x), NotImplementedError,
     "rms_norm: no gradient goes through"),
    (lambda x, w: cuattn.attention(x, x, x, rope=(COS[:3], SIN[:3])), ValueError,
     "attention: cos must have a row for each of the 4 tokens"),
    (lambda x, w: cuattn.attention(x, x, x, rope=(COS, SIN), rope_positions=w), ValueError,
     "attention: rope_positions must have shape"),
    (lambda x, w: cuattn.rope_attention(x, x, x, COS, SIN, positions_k=w), ValueError,
     "rope_attention: positions_k must have shape"),
    (lambda x, w: cuattn.attention(x, x, x, rope=(COS, SIN), seqused_k=w.astype(int)), ValueError,
     r"attention: seqused_k must have shape \(1,\)"),
    (lambda x, w: jax.grad(lambda c: cuattn.apply_rope(x, c, SIN).sum())(jnp.asarray(COS)),
     NotImplementedError, "apply_rope: no gradient goes through cos"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises((error, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(call(jnp.ones(X), jnp.ones(W)))  # on a GPU it is said no sooner
