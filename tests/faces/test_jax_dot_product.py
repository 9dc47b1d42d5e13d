# SPDX-License-Identifier: Apache-2.0
"""cuattn.jax.dot_product_attention against jax.nn's own, forward and gradients."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import frameworks

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402

ours = cuattn.jax.dot_product_attention
theirs = jax.nn.dot_product_attention
if "return_residual" not in inspect.signature(theirs).parameters:
    pytest.skip("an older JAX, without what is compared", allow_module_level=True)

BATCH, DIM = 2, 16


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        yield


def test_signature_is_that_of_jax_nn():
    mine, want = (inspect.signature(f).parameters for f in (ours, theirs))
    assert [(n, p.kind, p.default) for n, p in mine.items()] == [
        (n, p.kind, p.default) for n, p in want.items()
    ]


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def qkv(rng, rows, keys, heads=(4, 2), dim=DIM):
    return [
        draw(rng, BATCH, rows, heads[0], dim),
        draw(rng, BATCH, keys, heads[1], dim),
        draw(rng, BATCH, keys, heads[1], dim),
    ]


LENGTHS = ((9, 9), (5, 12), (12, 5))
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "one": {"local_window_size": 1},
    "wide": {"local_window_size": (30, 0)},
    "causal_window": {"is_causal": True, "local_window_size": (2, 5)},
    "behind": {"local_window_size": (-1, 4)},
}
ARRAYS = {
    "none": (),
    "bias": ("bias",),
    "mask": ("mask",),
    "both": ("bias", "mask"),
    "keys": ("key_value_seq_lengths",),
    "rows": ("query_seq_lengths",),
    "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
    "every": ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"),
}


def arrays_of(rng, names, rows, keys):
    mask = rng.random((BATCH, 1, rows, keys)) > 0.3
    made = {
        "bias": draw(rng, 1, 4, rows, keys),
        "mask": jnp.asarray(mask),
        "query_seq_lengths": jnp.asarray([rows, 3], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([4, keys + 7], jnp.int32),
    }
    return {n: made[n] for n in names}


def visible(rows, keys, given):
    """Which rows see a key: elsewhere jax.nn averages what nobody sees, and cuattn gives 0."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    seen = np.ones((BATCH, 1, rows, keys), bool)
    if given.get("is_causal"):
        seen &= j <= i
    if (sizes := given.get("local_window_size")) is not None:
        left, right = (sizes, sizes) if isinstance(sizes, int) else sizes
        seen &= (j >= i - left) & (j <= i + right)
    if "mask" in given:
        seen &= np.asarray(given["mask"])
    if "key_value_seq_lengths" in given:
        seen &= j < np.asarray(given["key_value_seq_lengths"])[:, None, None, None]
    if "query_seq_lengths" in given:
        seen &= i < np.asarray(given["query_seq_lengths"])[:, None, None, None]
    return seen.any(-1).transpose(0, 2, 1)[..., None]  # [batch, rows, 1 head, 1]


def assert_near(found, wanted, tolerance=2e-5):
    a, b = (np.asarray(x, np.float64) for x in (found, wanted))
    assert found.dtype == wanted.dtype
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max(initial=0) <= tolerance * max(1, np.abs(b).max(initial=0))


def compare(arguments, given, seen, weights, transform=jax.jit):
    """Forward, residual and the gradients of q, k, v and bias, where a row sees a key."""
    traced = {n: x for n, x in given.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in given.items() if n not in traced}

    def loss(function, **rest):
        def run(arguments, traced):
            out, residual = function(*arguments, **traced, **static, **rest, return_residual=True)
            out = jnp.where(seen, out, 0)
            return (out * weights).sum() + residual.sum() * 0, (out, residual)

        return run

    def of_each(arguments, traced):
        bias = {n: x for n, x in traced.items() if n == "bias"}
        rest = {n: x for n, x in traced.items() if n != "bias"}
        results = []
        for function, options in ((ours, {}), (theirs, {"implementation": "xla"})):
            run = loss(function, **options)
            both = lambda a, b, run=run: run(a, {**b, **rest})  # noqa: E731
            (_, found), gradients = jax.value_and_grad(both, (0, 1), has_aux=True)(arguments, bias)
            results.append((found, gradients))
        return results

    mine, other = transform(of_each)(arguments, traced)
    ((out, residual), found), ((want, want_residual), wanted) = mine, other
    assert_near(out, want)
    rows = np.broadcast_to(seen[..., 0], residual.shape)
    assert_near(np.asarray(residual)[rows], np.asarray(want_residual)[rows])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_near(a, b)
    return out


PAIRS = [  # every two of lengths, masks and arrays meet
    (mask, arrays, LENGTHS[(i + j) % 3])
    for i, mask in enumerate(MASKS)
    for j, arrays in enumerate(ARRAYS)
]


@pytest.mark.parametrize(("mask", "arrays", "lengths"), PAIRS, ids=str)
def test_the_values_and_gradients_of_jax_nn(mask, arrays, lengths, rng):
    given = {**MASKS[mask], **arrays_of(rng, ARRAYS[arrays], *lengths)}
    seen = visible(*lengths, given)
    arguments = qkv(rng, *lengths)
    weights = draw(rng, *arguments[0].shape)
    out = compare(arguments, given, seen, weights)
    full, residual = ours(*arguments, **given, return_residual=True)
    np.testing.assert_array_equal(np.where(seen, full, 0), np.asarray(full))  # 0 elsewhere
    assert (np.asarray(residual)[~np.broadcast_to(seen[..., 0], residual.shape)] == -np.inf).all()
    np.testing.assert_array_equal(np.asarray(full), np.asarray(out))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("dim", [16, 20, 3])
def test_heads_and_head_sizes(heads, dim, rng):
    arguments = qkv(rng, 7, 9, heads, dim)
    weights = draw(rng, *arguments[0].shape)
    given = {"scale": 0.3} if dim == 16 else {}
    compare(arguments, {"is_causal": True, **given}, np.ones((BATCH, 7, 1, 1), bool), weights)


@pytest.mark.parametrize("shape", [(9, 12), (1, 12), (4, 1, 1), (1, 1, 9, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_biases_of_other_shapes_and_dtypes(shape, dtype, rng):
    bias = (3 * draw(rng, *shape)).astype(dtype)
    arguments = qkv(rng, 9, 12)
    found = ours(*arguments, bias)
    assert_near(found, theirs(*arguments, bias, implementation="xla"))


@pytest.mark.parametrize("shape", [(2, 1, 9, 12), (1, 12), (4, 9, 1)], ids=str)
def test_gradients_of_biases_that_are_broadcast(shape, rng):
    arguments = qkv(rng, 9, 12)
    given = {"bias": draw(rng, *shape), "local_window_size": (20, 3)}
    weights = draw(rng, *arguments[0].shape)
    compare(arguments, given, np.ones((BATCH, 9, 1, 1), bool), weights)


def test_three_axes(rng):
    q, k, v = (x[0] for x in qkv(rng, 9, 9))
    lengths = jnp.asarray([5], jnp.int32)
    options = {"is_causal": True, "key_value_seq_lengths": lengths, "return_residual": True}
    found, wanted = ours(q, k, v, **options), theirs(q, k, v, **options, implementation="xla")
    for a, b in zip(found, wanted, strict=True):
        assert_near(a, b)
    mask = jnp.asarray(rng.random((4, 9, 9)) > 0.2).at[..., 0].set(True)
    assert_near(ours(q, k, v, mask=mask), theirs(q, k, v, mask=mask, implementation="xla"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype, rng):
    arguments = [x.astype(dtype) for x in qkv(rng, 9, 9)]
    found = ours(*arguments, is_causal=True, return_residual=True)
    exact = [x.astype(jnp.float32) for x in arguments]
    wanted = theirs(*exact, is_causal=True, return_residual=True)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        assert_near(a.astype(jnp.float32), b, 2e-2)


@pytest.mark.parametrize("arrays", ARRAYS)
def test_vmap_of_gradients(arrays, rng):
    names = ARRAYS[arrays]
    made = [
        (qkv(rng, 7, 9), arrays_of(rng, names, 7, 9), draw(rng, BATCH, 7, 4, DIM)) for _ in range(2)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)

    def gradient(arguments, given, weights):
        rest = {n: x for n, x in given.items() if n != "bias"}
        bias = given.get("bias", jnp.zeros((1, 1, 1, 1)))
        loss = lambda a, b: (ours(*a, b, **rest, is_causal=True) * weights).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(arguments, bias)

    for run in (jax.vmap(gradient), jax.jit(jax.vmap(gradient))):
        many = run(*stacked)
        for i, one in enumerate(made):
            for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(gradient(*one)), strict=True):
                assert_near(a[i], b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"implementation": "xla"}, NotImplementedError, "implementation must be None, which is"),
        ({"implementation": "cudnn"}, NotImplementedError, "implementation must be None"),
        ({"query": lambda q: q[0, 0]}, ValueError, "query must have 3 or 4 axes"),
        ({"key": lambda k: k[..., :8]}, ValueError, "value must have the shape of key"),
        ({"query": lambda q: q[..., :8]}, ValueError, "query must have batch 2 and head size 16"),
        ({"query": lambda q: q[:, :, :3]}, ValueError, "query must have a multiple of key's 2"),
        ({"query": lambda q: q.astype("float16")}, ValueError, "query must be float32 like key"),
        ({"mask": jnp.ones((9, 9))}, ValueError, "mask must be bool, got float32; pass an add"),
        ({"mask": jnp.ones((9, 8), bool)}, ValueError, "mask must broadcast to batch, heads"),
        ({"bias": jnp.ones((3, 9, 9))}, ValueError, "bias must broadcast to batch, heads"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        (
            {"query_seq_lengths": jnp.ones(3, jnp.int32)},
            ValueError,
            r"query_seq_lengths must be int32 of shape \(2,\)",
        ),
        (
            {"key_value_seq_lengths": jnp.ones(2)},
            ValueError,
            "key_value_seq_lengths must be int32",
        ),
        ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size must be an int or a"),
        ({"local_window_size": (1, 2.0)}, ValueError, "local_window_size must be an int or a"),
    ],
)
def test_refusals_name_the_argument_of_jax(change, error, message, rng):
    given = dict(zip(("query", "key", "value"), qkv(rng, 9, 9), strict=True))
    given |= {n: x(given[n]) if callable(x) else x for n, x in change.items()}
    with pytest.raises(error, match=message):
        ours(**given)


@pytest.mark.parametrize("head_size", [264, 501, 512])
def test_wide_heads_have_a_result_and_no_gradient(head_size, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 2, head_size), np.float32)) for _ in "qkv")
    given = {"is_causal": True}
    assert_near(ours(q, k, v, **given), jax.nn.dot_product_attention(q, k, v, **given))
    with pytest.raises(NotImplementedError, match="wider heads have no backward pass"):
        jax.grad(lambda q: ours(q, k, v).sum())(q)


def test_large_heads_float64_and_traced_scales_are_refused(rng):
    big = jnp.zeros((1, 2, 1, 520))
    with pytest.raises(NotImplementedError, match="query must have a head size of at most 512"):
        ours(big, big, big)
    q, k, v = (x.astype(jnp.int32) for x in qkv(rng, 3, 3))
    with pytest.raises(TypeError, match="query, key and value must be float32, float16 or bfl"):
        ours(q, k, v)
    q, k, v = qkv(rng, 3, 3)
    with pytest.raises(TypeError, match=r"scale must be a Python number.*multiply query"):
        jax.jit(lambda s: ours(q, k, v, scale=s))(0.5)
    assert_near(ours(q, k, v, scale=jnp.float32(0.5)), ours(q, k, v, scale=0.5))
