# SPDX-License-Identifier: Apache-2.0
"""Gradients through jax.grad against float64, eagerly, under jit, vmap and jax.checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks
import reference
import reference_backward

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402

BATCH, ROWS, KEYS, DIM = 2, 11, 17, 16
NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
GRADIENTS = dict(zip(NAMES, reference_backward.NAMES, strict=True))
ORDERS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}
CASES = {  # heads, then options; a shape stands for an array of it
    "gqa": ((6, 2), {}),
    "mqa": ((4, 1), {"causal": True}),
    "bhsd": ((4, 2), {"layout": "bhsd", "causal": True}),
    "window": ((4, 2), {"window": (3, 4)}),
    "left": ((4, 2), {"window": (2, 0), "causal": True}),
    "softcap": ((4, 2), {"softcap": 1.5, "scale": 0.7}),
    "used": ((4, 2), {"seqused_q": (11, 5), "seqused_k": (6, 13), "causal": True}),
    "used_gqa": ((6, 2), {"seqused_k": (17, 1), "window": (4, 2), "softcap": 2.0}),
    "none_used": ((2, 2), {"seqused_k": (0, 17)}),
    "bias": ((4, 2), {"bias": (BATCH, 4, ROWS, KEYS)}),
    "bias_of_rows": ((4, 2), {"bias": (4, ROWS, 1)}),
    "bias_of_keys": ((4, 2), {"bias": (BATCH, 1, 1, KEYS)}),
    "bias_of_all": ((4, 2), {"bias": (ROWS, KEYS), "causal": True}),
    "sinks": ((4, 2), {"sinks": (4,), "window": (2, 1)}),
    "slopes": ((4, 2), {"alibi_slopes": (4,), "causal": True}),
    "slopes_of_batch": ((4, 2), {"alibi_slopes": (BATCH, 4)}),
    "all": (
        (4, 2),
        {
            "causal": True,
            "softcap": 3.0,
            "bias": (BATCH, 4, 1, KEYS),
            "sinks": (4,),
            "alibi_slopes": (4,),
            "seqused_k": (12, 17),
        },
    ),
}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class Problem:
    """Inputs of a case; what no row in use sees is NaN."""

    def __init__(self, name, rng):
        heads, options = CASES[name]
        order = ORDERS[options.get("layout", "bshd")]
        lengths = {"q": (ROWS, heads[0]), "k": (KEYS, heads[1]), "v": (KEYS, heads[1])}
        shapes = {n: (BATCH, length, h, DIM) for n, (length, h) in lengths.items()}
        shapes |= {n: options[n] for n in NAMES[3:] if n in options}
        draw = lambda shape: rng.standard_normal(shape, np.float32)  # noqa: E731
        self.arrays = {n: draw(shape) for n, shape in shapes.items()}
        if "alibi_slopes" in self.arrays:
            self.arrays["alibi_slopes"] = np.abs(self.arrays["alibi_slopes"]) / 4
        self.options = {n: x for n, x in options.items() if n not in NAMES}
        for used, names in (("seqused_q", "q"), ("seqused_k", "kv")):
            if used in options:
                self.options[used] = np.array(options[used], np.int32)
                for n in names:
                    for b, length in enumerate(options[used]):
                        self.arrays[n][b, length:] = np.nan
        for n in "qkv":
            self.arrays[n] = self.arrays[n].transpose(order).copy()
        self.weights = [
            draw((BATCH, ROWS, heads[0], DIM)).transpose(order).copy(),
            draw((BATCH, heads[0], ROWS)),
        ]

    def loss(self, arrays, weights):
        """A sum over out and lse; lse of rows without a key is -inf and takes no part."""
        given = {n: x for n, x in arrays.items() if n not in "qkv"}
        options = {n: jnp.asarray(x) if n[:3] == "seq" else x for n, x in self.options.items()}
        out, lse = cuattn.attention(
            *(arrays[n] for n in "qkv"), **given, **options, return_lse=True
        )
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        return (out * weights[0]).sum() + (lse * weights[1]).sum()

    def expected(self):
        arrays = {n: x.astype(np.float64) for n, x in self.arrays.items()}
        qkv = [arrays.pop(n) for n in "qkv"]
        out, lse = reference.attention(*qkv, **arrays, **self.options)
        seen = lse > -np.inf
        dlse = np.where(seen, self.weights[1], 0)
        found = reference_backward.attention_backward(
            self.weights[0], *qkv, out, lse, dlse=dlse, **arrays, **self.options
        )
        value = (out * self.weights[0]).sum() + (lse[seen] * dlse[seen]).sum()
        return value, {n: found[GRADIENTS[n]] for n in self.arrays}

    def device(self):
        return {n: jnp.asarray(x) for n, x in self.arrays.items()}, [
            jnp.asarray(w) for w in self.weights
        ]


def assert_near(found, wanted, name):
    found = np.asarray(found, np.float64)
    assert found.shape == wanted.shape, name
    assert np.isfinite(found).all(), name
    assert np.abs(found - wanted).max() <= 2e-5 * max(1, np.abs(wanted).max()), name


@pytest.mark.parametrize("transform", ["eager", "jit", "checkpoint", "jit of checkpoint"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name, transform, rng):
    problem = Problem(name, rng)
    loss = jax.checkpoint(problem.loss) if "checkpoint" in transform else problem.loss
    function = jax.value_and_grad(loss)
    function = jax.jit(function) if "jit" in transform else function
    value, found = function(*problem.device())
    wanted_value, wanted = problem.expected()
    assert abs(float(value) - wanted_value) <= 2e-5 * max(1, abs(wanted_value)) * 10
    assert found.keys() == wanted.keys()
    for n, x in wanted.items():
        assert_near(found[n], x, n)


@pytest.mark.parametrize("name", CASES)
def test_vmap_of_gradients_is_that_of_float64(name, rng):
    """All arrays mapped, and q, k, v alone: what is shared still gets a gradient of each entry."""
    problems = [Problem(name, rng) for _ in range(3)]
    function = jax.vmap(jax.value_and_grad(problems[0].loss))
    given = [p.device() for p in problems]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
    for run in (function, jax.jit(function)):
        values, found = run(*stacked)
        for i, problem in enumerate(problems):
            value, wanted = problem.expected()
            assert abs(float(values[i]) - value) <= 2e-4 * max(1, abs(value))
            for n, x in wanted.items():
                assert_near(found[n][i], x, n)

    for p in problems[1:]:
        p.arrays |= {n: x for n, x in problems[0].arrays.items() if n not in "qkv"}
    axes = {n: 0 if n in "qkv" else None for n in given[0][0]}
    shared = {n: x if n in "qkv" else x[0] for n, x in stacked[0].items()}
    _, found = jax.vmap(jax.value_and_grad(problems[0].loss), (axes, 0))(shared, stacked[1])
    for i, problem in enumerate(problems):
        for n, x in problem.expected()[1].items():
            assert_near(found[n][i], x, n)


@pytest.mark.parametrize("jit", [False, True])
def test_vmap_with_a_seed_drops_the_same_both_ways(jit, rng):
    """Entry by entry: what is folded into one batch counts its sequences on."""
    q, k, v, w = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((3, 2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (2, 5, 4, 8))
    )

    def loss(q):
        return (cuattn.attention(q, k, v, dropout_p=0.5, dropout_seed=3) * w).sum()

    function = jax.vmap(jax.value_and_grad(loss))
    values, found = (jax.jit(function) if jit else function)(q)
    forward = jax.vmap(loss)(q)
    of_the_sum = jax.grad(lambda q: jax.vmap(loss)(q).sum())(q)
    for i, x in enumerate(q):
        value, wanted = jax.value_and_grad(loss)(x)
        for got in (values[i], forward[i]):
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
        for got in (found[i], of_the_sum[i]):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_vmap_of_the_sum_adds_up_what_is_shared(rng):
    """jax.grad of a sum over vmap: cotangents of arrays that all entries share are summed."""
    problems = [Problem("all", rng) for _ in range(2)]
    for n in NAMES[3:]:
        problems[1].arrays[n] = problems[0].arrays[n]
    given = [p.device() for p in problems]
    stacked, weights = jax.tree.map(lambda *x: jnp.stack(x), *given)
    shared = {n: x if n in "qkv" else x[0] for n, x in stacked.items()}
    axes = {n: 0 if n in "qkv" else None for n in shared}
    total = lambda arrays: jax.vmap(problems[0].loss, (axes, 0))(arrays, weights).sum()  # noqa: E731
    found = jax.jit(jax.grad(total))(shared)
    wanted = [p.expected()[1] for p in problems]
    for n in NAMES:
        parts = [w[n] for w in wanted]
        assert_near(found[n], np.stack(parts) if n in "qkv" else sum(parts), n)


RAGGED = ([0, 4, 4, 9], [0, 6, 11, 14], 5, 6)


def ragged(rng):
    draw = lambda rows, heads: rng.standard_normal((rows, heads, DIM), np.float32)  # noqa: E731
    q, k, v, dout = draw(11, 4), draw(16, 2), draw(16, 2), draw(11, 4)
    cu_q, cu_k = (np.array(x, np.int32) for x in RAGGED[:2])
    q[9:], k[14:], v[14:] = np.nan, np.nan, np.nan  # belong to no sequence
    return [q, k, v], [cu_q, cu_k], dout


RAGGED_CASES = {
    "plain": {},
    "window": {"window": (2, 1), "softcap": 2.0},
    "used": {"seqused_k": (3, 5, 1), "causal": True},
}


def ragged_expected(qkv, ends, dout, options):
    qkv = [x.astype(np.float64) for x in qkv]
    out, lse = reference.attention_varlen(*qkv, *ends, *RAGGED[2:], **options)
    found = reference_backward.attention_varlen_backward(
        dout, *qkv, out, lse, *ends, *RAGGED[2:], **options
    )
    return [found[n] for n in ("dq", "dk", "dv")]


@pytest.mark.parametrize("name", RAGGED_CASES)
def test_ragged_gradients_alone_and_with_shared_ends(name, rng):
    options = dict(RAGGED_CASES[name])
    if "seqused_k" in options:
        options["seqused_k"] = np.array(options["seqused_k"], np.int32)
    problems = [ragged(rng) for _ in range(2)]
    ends = [jnp.asarray(x) for x in problems[0][1]]

    def loss(qkv, dout):
        given = {n: jnp.asarray(x) if n[:3] == "seq" else x for n, x in options.items()}
        out = cuattn.attention_varlen(*qkv, *ends, *RAGGED[2:], **given)
        return (out[:9] * dout[:9]).sum()

    given = [([jnp.asarray(x) for x in p[0]], jnp.asarray(p[2])) for p in problems]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(jax.checkpoint(loss)))):
        one, many = gradient(*given[0]), jax.vmap(gradient)(*stacked)
        for i, (qkv, cu, dout) in enumerate(problems):
            for n, wanted, a in zip(
                "qkv", ragged_expected(qkv, cu, dout, options), many, strict=True
            ):
                assert_near(a[i], wanted, n)
        for a, b in zip(one, many, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b[0]))


def test_vmap_of_ragged_calls_with_ends_of_their_own(rng):
    """Mapped cu_seqlens run one entry after the other: no refusal is needed."""
    qkv, (cu_q, cu_k), dout = ragged(rng)
    ends = [np.stack([cu_q, [0, 1, 5, 9]]), np.stack([cu_k, [0, 2, 8, 14]])]
    ends = [x.astype(np.int32) for x in ends]

    def loss(qkv, cu_q, cu_k):
        out = cuattn.attention_varlen(*qkv, cu_q, cu_k, *RAGGED[2:], causal=True)
        return (out[:9] * dout[:9]).sum()

    given = [jnp.asarray(x) for x in qkv]
    for run in (
        jax.vmap(jax.grad(loss), (None, 0, 0)),
        jax.vmap(jax.jit(jax.grad(loss)), (None, 0, 0)),
    ):
        found = run(given, *(jnp.asarray(x) for x in ends))
        for i in range(2):
            cu = [x[i] for x in ends]
            for n, wanted, a in zip(
                "qkv", ragged_expected(qkv, cu, dout, {"causal": True}), found, strict=True
            ):
                assert_near(a[i], wanted, n)
