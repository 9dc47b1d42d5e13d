# SPDX-License-Identifier: Apache-2.0
"""Gradients through jax.grad, against JAX's own through the formula; dropout on JAX arrays."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402

NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks", "dslopes")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def formula(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, **given):
    """out and lse of bshd arrays in steps that JAX differentiates."""
    q, k, v = (x.swapaxes(1, 2).astype(jnp.float32) for x in (q, k, v))
    group, (rows, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("bhid,bhjd->bhij", q, k, precision="highest")
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(rows)[:, None] + keys - rows - jnp.arange(keys)
    if "alibi_slopes" in given:
        scores = scores - given["alibi_slopes"][..., None, None] * abs(distance)
    if "bias" in given:
        scores = scores + given["bias"]
    seen = jnp.ones((rows, keys), bool)
    if causal:
        seen &= distance >= 0
    if window[0] >= 0:
        seen &= (distance <= window[0]) & (distance >= -window[1])
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.scipy.special.logsumexp(scores, axis=-1)
    if "sinks" in given:
        lse = jnp.logaddexp(lse, given["sinks"][None, :, None])
    out = jnp.einsum("bhij,bhjd->bhid", jnp.exp(scores - lse[..., None]), v, precision="highest")
    return out.swapaxes(1, 2), lse


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": ()},
    "sinks": {"sinks": ()},
    "alibi": {"alibi_slopes": ()},
    "all": {"causal": True, "softcap": 3.0, "bias": (), "sinks": (), "alibi_slopes": ()},
}


def arrays(rng, options=(), heads=(4, 2), rows=13, keys=21):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    made = {
        "q": normal(2, rows, heads[0], 16),
        "k": normal(2, keys, heads[1], 16),
        "v": normal(2, keys, heads[1], 16),
        "bias": normal(2, 1, rows, keys),
        "sinks": normal(heads[0]),
        "alibi_slopes": abs(normal(heads[0])) / 4,
    }
    return {n: x for n, x in made.items() if n in "qkv" or n in options}


def loss_of(function, numbers, weights):
    def loss(given):
        qkv = [given[n] for n in "qkv"]
        rest = {n: x for n, x in given.items() if n not in "qkv"}
        out, lse = function(*qkv, **rest, **numbers)
        return (out * weights[0]).sum() + (lse * weights[1]).sum()

    return loss


def ours(*args, **options):
    return cuattn.attention(*args, **options, return_lse=True)


def problem(rng, name):
    given = arrays(rng, OPTIONS[name])
    numbers = {n: x for n, x in OPTIONS[name].items() if x != ()}
    weights = [
        jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((2, 13, 4, 16), (2, 4, 13))
    ]
    return given, numbers, weights


def assert_near(found, wanted, tolerance=5e-5):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        a, b = (np.asarray(x[name], np.float64) for x in (found, wanted))
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max()), name


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_formula(name, rng):
    given, numbers, weights = problem(rng, name)
    found = jax.grad(loss_of(ours, numbers, weights))(given)
    assert_near(found, jax.grad(loss_of(formula, numbers, weights))(given))
    compiled = jax.jit(jax.value_and_grad(loss_of(ours, numbers, weights)))(given)[1]
    for n, x in found.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(compiled[n]))


@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient_alone_is_that_of_all(wanted, rng):
    """In turn over the same compiled call: what one wants must not reach the next."""
    given, numbers, weights = problem(rng, "all")
    loss = jax.jit(loss_of(ours, numbers, weights))
    alone = jax.jit(jax.grad(lambda x: loss({**given, wanted: x})))
    want = jax.grad(loss)(given)
    np.testing.assert_array_equal(np.asarray(alone(given[wanted])), np.asarray(want[wanted]))
    text = alone.lower(given[wanted]).compile().as_text()
    assert text.count("cuattn_attention_backward") == 1  # dbias, or all others


def test_vmap_and_checkpoint(rng):
    given, numbers, weights = problem(rng, "all")
    loss = loss_of(ours, numbers, weights)
    want = jax.grad(loss)(given)
    again = jax.grad(jax.checkpoint(loss))(given)
    for n, x in want.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(again[n]))
    stacked = {n: jnp.stack([x, 2 * x]) if n in "qkv" else x for n, x in given.items()}
    axes = {n: 0 if n in "qkv" else None for n in given}
    many = jax.vmap(jax.grad(loss), in_axes=(axes,))(stacked)
    second = jax.grad(loss)({n: 2 * x if n in "qkv" else x for n, x in given.items()})
    for n, x in want.items():
        np.testing.assert_array_equal(np.asarray(many[n][0]), np.asarray(x))
        np.testing.assert_array_equal(np.asarray(many[n][1]), np.asarray(second[n]))


def test_sixteen_bits(rng):
    given = {n: x.astype(jnp.bfloat16) for n, x in arrays(rng).items()}
    weights = [jnp.ones((2, 13, 4, 16)), jnp.zeros((2, 4, 13))]
    found = jax.grad(loss_of(ours, {"causal": True}, weights))(given)
    assert_near(found, jax.grad(loss_of(formula, {"causal": True}, weights))(given), 0.03)


def ragged(rng):
    q = jnp.asarray(rng.standard_normal((11, 4, 16), np.float32))
    k, v = jnp.asarray(rng.standard_normal((2, 20, 2, 16), np.float32))
    cu_q, cu_k = (jnp.asarray(x, jnp.int32) for x in ([0, 4, 4, 11], [0, 6, 11, 20]))
    return (q, k, v), (cu_q, cu_k, 7, 9)


def test_ragged_gradients(rng):
    qkv, lengths = ragged(rng)
    weights = jnp.asarray(rng.standard_normal((11, 4, 16), np.float32))

    def loss(qkv):
        return (cuattn.attention_varlen(*qkv, *lengths, causal=True) * weights).sum()

    def by_sequence(qkv):
        total = 0.0
        for b in range(3):
            rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in lengths[:2])
            if rows.stop > rows.start:
                one = qkv[0][rows][None], qkv[1][keys][None], qkv[2][keys][None]
                total += (formula(*one, causal=True)[0][0] * weights[rows]).sum()
        return total

    for function in (jax.grad(loss), jax.jit(jax.grad(loss))):
        found, want = function(qkv), jax.grad(by_sequence)(qkv)
        assert_near(dict(zip("qkv", found, strict=True)), dict(zip("qkv", want, strict=True)))
    many = jax.vmap(jax.grad(loss))(tuple(jnp.stack([x, x]) for x in qkv))
    np.testing.assert_array_equal(np.asarray(many[0][1]), np.asarray(jax.grad(loss)(qkv)[0]))


def test_integers_have_no_gradient(rng):
    given = arrays(rng)
    used = jnp.asarray([9, 13], jnp.int32)
    loss = lambda q, used: cuattn.attention(q, given["k"], given["v"], seqused_q=used).sum()  # noqa: E731
    dq, dused = jax.grad(loss, argnums=(0, 1), allow_int=True)(given["q"], used)
    assert (np.asarray(dq)[0, 9:] == 0).all()
    assert dused.dtype == jax.dtypes.float0


@pytest.mark.parametrize("name", OPTIONS)
def test_the_plain_function_gives_the_bits_of_numpy(name, rng):
    given, numbers, weights = problem(rng, name)
    numpy = {n: np.asarray(x) for n, x in given.items()}
    need = tuple(g for g, n in zip(GRADIENTS, NAMES, strict=True) if n in given)[::-1]

    def call(dout, dlse, **given):
        qkv = [given.pop(n) for n in "qkv"]
        out, lse = cuattn.attention(*qkv, **given, **numbers, return_lse=True)
        return cuattn.attention_backward(
            dout, *qkv, out, lse, dlse=dlse, need=need, **given, **numbers
        )

    want = call(*(np.asarray(x) for x in weights), **numpy)
    for function in (call, jax.jit(call)):
        for a, b in zip(want, function(*weights, **given), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


def test_the_plain_ragged_function_gives_the_bits_of_numpy(rng):
    qkv, lengths = ragged(rng)
    out, lse = cuattn.attention_varlen(*qkv, *lengths, return_lse=True)
    found = cuattn.attention_varlen_backward(out, *qkv, out, lse, *lengths, deterministic=True)
    numpy = [np.asarray(x) for x in (out, *qkv, out, lse, *lengths[:2])]
    want = cuattn.attention_varlen_backward(*numpy, *lengths[2:])
    for a, b in zip(want, found, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def test_dropout_has_the_bits_of_numpy_in_both_directions(rng):
    given = arrays(rng, heads=(2, 2))
    numpy = [np.asarray(x) for x in given.values()]
    want = cuattn.attention(*numpy, dropout_p=0.3, dropout_seed=5, dropout_offset=7)
    states = [jnp.asarray([5, 7], dtype) for dtype in (jnp.int32, jnp.uint32)]
    calls = [{"dropout_seed": 5, "dropout_offset": 7}, *({"dropout_state": s} for s in states)]
    for seed in calls:
        call = lambda qkv, seed=seed: cuattn.attention(*qkv, dropout_p=0.3, **seed)  # noqa: E731
        qkv = tuple(given.values())
        for function in (call, jax.jit(call)):
            np.testing.assert_array_equal(want, np.asarray(function(qkv)))
        weights = jnp.asarray(rng.standard_normal(want.shape, np.float32))
        found = jax.grad(lambda qkv: (call(qkv) * weights).sum())(qkv)  # noqa: B023
        out, lse = cuattn.attention(
            *numpy, dropout_p=0.3, dropout_seed=5, dropout_offset=7, return_lse=True
        )
        expected = cuattn.attention_backward(
            np.asarray(weights), *numpy, out, lse, dropout_p=0.3, dropout_seed=5, dropout_offset=7
        )
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
    key = jax.random.key_data(jax.random.key(3))
    assert cuattn.attention(*given.values(), dropout_p=0.3, dropout_state=key).shape == want.shape


def test_what_has_no_gradient_is_refused_by_name(rng):
    given = arrays(rng)
    loss = lambda q: cuattn.attention(q, given["k"], given["v"]).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="attention: no gradient of a gradient goes thr"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(given["q"])
    (q, _, _), (cu_q, _, rows, _) = ragged(rng)
    cache = jnp.zeros((4, 8, 2, 16))
    paged = {
        "block_tables": jnp.zeros((3, 2), jnp.int32),
        "seqused_k": jnp.asarray([9, 3, 9], jnp.int32),
    }
    with pytest.raises(NotImplementedError, match=r"block_tables must be None .*gather_cache"):
        jax.grad(
            lambda q: cuattn.attention_varlen(q, cache, cache, cu_q, None, rows, 16, **paged).sum()
        )(q)
    out, lse = cuattn.attention(*given.values(), return_lse=True)
    backward = (out, *given.values(), out, lse)
    with pytest.raises(NotImplementedError, match="attention_backward: dq must be None for JAX"):
        cuattn.attention_backward(*backward, dq=out)
    with pytest.raises(ValueError, match="need must name gradients of what is given, got 'dbias'"):
        cuattn.attention_backward(*backward, need=("dbias",))
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        cuattn.jax.attention_backward(*backward, biass=None)
    with pytest.raises(ValueError, match="lse must have the shape of the forward"):
        cuattn.attention_backward(*backward[:-1], lse[:1])


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range_is_refused(p, rng):
    with pytest.raises(ValueError, match="dropout_p must lie in"):
        cuattn.attention(*arrays(rng).values(), dropout_p=p, dropout_seed=1)


def test_a_few_steps_of_training_follow_those_of_the_formula(rng):
    x = jnp.asarray(rng.standard_normal((2, 12, 32), np.float32))
    start = {
        "in": jnp.asarray(rng.standard_normal((32, 96), np.float32)) / 6,
        "out": jnp.asarray(rng.standard_normal((32, 32), np.float32)) / 6,
    }

    def losses(function):
        def loss(weights):
            q, k, v = jnp.moveaxis((x @ weights["in"]).reshape(2, 12, 3, 2, 16), 2, 0)
            out = function(q, k, v, causal=True)[0].reshape(2, 12, 32) @ weights["out"]
            return ((out - jnp.roll(x, 1, axis=1)) ** 2).mean()

        step, weights, found = jax.jit(jax.value_and_grad(loss)), start, []
        for _ in range(8):
            value, gradient = step(weights)
            weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient)
            found.append(float(value))
        return found

    got, want = losses(ours), losses(formula)
    assert got == pytest.approx(want, rel=1e-4)
    assert got[-1] < got[0]
