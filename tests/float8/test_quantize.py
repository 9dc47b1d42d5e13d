# SPDX-License-Identifier: Apache-2.0
"""quantize, quantize_like, dequantize against their formulas in float64, by numpy, torch, JAX."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle

import numpy as np
import pytest

import cuattn
import reference
from cases import DTYPES
from float8_cases import BLOCK, F8

LARGEST = 448.0


def encoded(x):
    """The nearest code to each float64, to even, saturating; by search among all codes."""
    codes = np.arange(127, dtype=np.uint8)  # of the sizes, in order
    sizes = codes.view(F8).astype(np.float64)
    size = np.minimum(np.abs(x), LARGEST)
    high = np.clip(np.searchsorted(sizes, size), 1, 126)
    low = high - 1
    below, above = size - sizes[low], sizes[high] - size
    nearest = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    found = np.where(np.signbit(x), nearest | 0x80, nearest).astype(np.uint8)
    return np.where(np.isnan(x), 0x7F, found).astype(np.uint8)


def decoded(codes, scale):
    return codes.astype(np.float64) * np.asarray(scale, np.float64)


def rotation(dim):
    """R in float64: signs, then Hadamard matrices along the diagonal, by Kronecker products."""
    mask, flips = 0xFFFFFFFF, []
    for i in range(dim):
        x = (i + 1) * 0x9E3779B1 & mask
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        flips.append(-1.0 if (x ^ x >> 16) & 1 else 1.0)
    size, matrix = dim & -dim, np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return np.diag(flips) @ np.kron(np.eye(dim // size), matrix) / np.sqrt(size)


def spread(scale, x, part=None):
    """A scale against x in bshd."""
    heads = x.shape[2]
    if scale.size == 1:
        return scale.reshape(1, 1, 1, 1)
    scale = np.repeat(scale, heads // scale.shape[1], axis=1)
    if scale.ndim == 2:
        return scale[:, None, :, None]
    if part == "channel":
        return scale[:, None]
    return np.repeat(scale, BLOCK, axis=2)[:, :, : x.shape[1]].transpose(0, 2, 1)[..., None]


def expected_scale(x, shape, part=None):
    """The largest size of each part / 448, of x in bshd."""
    sizes = np.abs(x.astype(np.float64))
    batch, rows, heads, dim = sizes.shape
    if shape == (1,):
        return sizes.max(keepdims=True).reshape(1) / LARGEST
    if part == "channel":
        return sizes.max(axis=1) / LARGEST
    if len(shape) == 3:
        padded = np.pad(sizes, ((0, 0), (0, -rows % BLOCK), (0, 0), (0, 0)))
        return padded.reshape(batch, -1, BLOCK, heads, dim).max((2, 4)).swapaxes(1, 2) / LARGEST
    return sizes.max((1, 3)).reshape(batch, shape[1], -1).max(2) / LARGEST


def same_codes(codes, value, slack=0.0):
    """Codes are those of `value`, or of one that differs from it by no more than `slack`."""
    got = np.asarray(codes).view(np.uint8)
    if slack == 0.0:
        np.testing.assert_array_equal(got, encoded(value))
        return
    apart = slack * (1 + np.abs(value))
    low, high = encoded(value - apart), encoded(value + apart)
    assert ((got == low) | (got == high) | (got == encoded(value))).all()


def test_every_number_is_rounded_to_the_nearest_code_and_ties_to_even(rng):
    sizes = np.arange(127, dtype=np.uint8).view(F8).astype(np.float64)
    middles = (sizes[1:] + sizes[:-1]) / 2
    near = [np.nextafter(middles.astype(np.float32), end) for end in (0, 1e9)]
    drawn = rng.standard_normal(400) * 2.0 ** rng.integers(-14, 12, 400)
    edges = np.concatenate([sizes, middles, *near, [449, 465, 1e30, np.inf], drawn])
    values = np.concatenate([edges, -edges, [np.nan]]).astype(np.float32)
    values = np.resize(values, (1, -(-len(values) // 16), 1, 16))
    for dtype in DTYPES.values():
        with np.errstate(over="ignore"):
            x = values.astype(dtype)
        same_codes(cuattn.quantize_like(x, 1.0), x.astype(np.float64))
        for scale in (0.25, 3.0):  # float32 divides
            quotient = x.astype(np.float32) / np.float32(scale)
            same_codes(cuattn.quantize_like(x, scale), quotient.astype(np.float64))
    finite = values[np.isfinite(values) & (np.abs(values) <= LARGEST)]
    codes = cuattn.quantize_like(np.resize(finite, (1, len(finite) // 16, 1, 16)), 1.0)
    back = cuattn.dequantize(codes, 1.0, dtype="float32")
    np.testing.assert_array_equal(back, codes.astype(np.float32))
    assert np.array_equal(cuattn.quantize_like(back, 1.0).view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize(
    ("mode", "v_mode"), [("tensor", None), ("head", None), ("block", None), ("head", "channel")]
)
def test_scales_and_codes_are_those_of_the_formula(mode, v_mode, rng):
    for dtype, layout in itertools.product(("float32", "bfloat16"), ("bshd", "bhsd")):
        rows, keys = (int(n) for n in rng.integers(2, 300, 2))  # one key less its mean is 0
        q = (rng.standard_normal((2, rows, 4, 48)) * 3).astype(DTYPES[dtype])
        k = (rng.standard_normal((2, keys, 2, 48)) + 2).astype(DTYPES[dtype])
        v = rng.standard_normal((2, keys, 2, 80)).astype(DTYPES[dtype])
        given = [x if layout == "bshd" else x.swapaxes(1, 2) for x in (q, k, v)]
        found = cuattn.quantize(*given, layout=layout, mode=mode, v_mode=v_mode)
        mean = k.astype(np.float64).mean(axis=1, keepdims=True)
        wide = {
            "q": q.astype(np.float64) @ rotation(48),
            "k": (k.astype(np.float64) - mean) @ rotation(48),
            "v": v.astype(np.float64),
        }
        for name, x in wide.items():
            codes, scale = getattr(found, name), getattr(found, f"{name}_scale")
            codes = codes if layout == "bshd" else codes.swapaxes(1, 2)
            part = v_mode if name == "v" else None
            assert codes.dtype == F8
            assert codes.shape == x.shape
            np.testing.assert_allclose(scale, expected_scale(x, scale.shape, part), rtol=2e-5)
            value = x / spread(scale.astype(np.float64), x, part)
            same_codes(codes, value, 1e-4)
            assert np.abs(codes.astype(np.float32)).max() == LARGEST
        stored = found.v if layout == "bshd" else found.v.swapaxes(1, 2)
        assert stored.shape[1] == 1 or stored.strides[1] == 1  # the sequence is contiguous
        assert stored.strides[3] % 16 == 0
        shift = np.einsum("bshd,bthd->bhs", q.astype(np.float64), np.repeat(mean, 2, axis=2))
        np.testing.assert_allclose(found.lse_shift, shift / np.sqrt(48), rtol=1e-4, atol=1e-4)


def test_rotation_is_orthogonal_and_leaves_scores(rng):
    for dim in (16, 48, 64, 80, 96, 128, 192, 256):
        matrix = rotation(dim)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
        x = rng.standard_normal((1, 5, 2, dim)).astype(np.float32)
        codes = cuattn.quantize_like(x, 2.0**-4, hadamard=True)
        same_codes(codes, np.clip(x.astype(np.float64) @ matrix / 2.0**-4, -1e9, 1e9), 1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"hadamard": False}, {"smooth_k": False}, {"mode": "block"}, {"mode": "int8"}]
)
def test_attention_of_what_quantize_gives_is_near_attention(options, rng):
    q, k = rng.standard_normal((2, 2, 150, 4, 64), np.float32)
    k = k[:, :, :2] + 3 * rng.standard_normal((1, 1, 2, 64)).astype(np.float32)
    v = rng.standard_normal((2, 150, 2, 64), np.float32)
    exact, exact_lse = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    found = cuattn.quantize(q, k, v, **options)
    out, lse = found.attention(causal=True, return_lse=True)
    error = np.linalg.norm(out.astype(np.float64) - exact) / np.linalg.norm(exact)
    assert error < 0.2
    assert np.abs(lse - exact_lse).max() < 0.5 + 0.02 * np.abs(exact_lse).max()
    room = np.full(lse.shape, np.nan, np.float32)
    _, given = found.attention(causal=True, lse_out=room)
    assert given is room
    np.testing.assert_array_equal(room, lse)


def test_packed_arrays_and_attention_varlen(rng):
    ends = np.array([0, 40, 40, 130], np.int32)
    q, k, v = (rng.standard_normal((130, heads, 64), np.float32) for heads in (4, 2, 2))
    found = cuattn.quantize(q, k, v)
    assert found.k_scale.shape == (2,)
    assert found.lse_shift.shape == (4, 130)
    out, lse = cuattn.attention_varlen(
        *found.arrays, ends, ends, 90, 90, **found.scales, return_lse=True
    )
    exact, exact_lse = reference.attention_varlen(
        *(x.astype(np.float64) for x in (q, k, v)), ends, ends, 90, 90
    )
    error = np.linalg.norm(out.astype(np.float64) - exact) / np.linalg.norm(exact)
    assert error < 0.1
    assert np.abs(lse + found.lse_shift - exact_lse).max() < 0.1
    for mode in ("block", "int8"):
        with pytest.raises(NotImplementedError, match="mode must be 'head' or 'tensor' for packed"):
            cuattn.quantize(q, k, v, mode=mode)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_int8_codes_are_those_of_the_formula(dtype, rng):
    """round(x / scale) to even, the largest size of 128 rows / 127; NaN 0, infinities 127."""
    q, k = (rng.standard_normal((2, rows, 2, 48)) * 3 for rows in (130, 257))
    q, k = q.astype(DTYPES[dtype]), k.astype(DTYPES[dtype])
    plain = {"mode": "int8", "hadamard": False, "smooth_k": False}
    found = cuattn.quantize(q, k, k, **plain)
    assert found.v.dtype == F8
    for x, codes, scale in ((q, found.q, found.q_scale), (k, found.k, found.k_scale)):
        wanted = expected_scale(x, scale.shape) * LARGEST / 127
        np.testing.assert_allclose(scale, wanted, rtol=1e-6)
        quotient = x.astype(np.float32) / spread(scale, x)  # float32 divides
        np.testing.assert_array_equal(codes, np.rint(quotient).astype(np.int8))
        assert codes.dtype == np.int8
        assert np.abs(codes.astype(int)).max() == 127
        back = cuattn.dequantize(codes, scale, dtype="float32")
        np.testing.assert_array_equal(back, codes.astype(np.float32) * spread(scale, x))
        again = cuattn.dequantize(codes, scale, dtype="bfloat16")
        np.testing.assert_array_equal(again, back.astype(again.dtype))
    turned = cuattn.quantize(q, k, k, mode="int8")
    mean = k.astype(np.float64).mean(axis=1, keepdims=True)
    for x, codes, scale in (
        (q.astype(np.float64), turned.q, turned.q_scale),
        (k.astype(np.float64) - mean, turned.k, turned.k_scale),
    ):
        off = np.abs(codes - x @ rotation(48) / spread(scale.astype(np.float64), x))
        assert off.max() < 0.51
    ties = np.float32([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 127, np.nan, np.inf, -np.inf, *[0] * 6]])
    codes = cuattn.quantize(*[ties[None, :, None]] * 3, **plain).k
    assert codes[0, 0, 0, :10].tolist() == [-2, -2, 0, 0, 2, 2, 127, 0, 127, -127]


def test_int8_has_a_fraction_of_the_error_of_float8(rng):
    q, k, v = rng.standard_normal((3, 1, 512, 2, 64), np.float32)
    v[...] = cuattn.dequantize(cuattn.quantize_like(v, 0.02), 0.02, dtype="float32")
    exact, _ = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    errors = {}
    for mode in ("block", "int8"):
        found = cuattn.quantize(q, k, v, mode=mode)
        out = np.empty(q.shape, np.float32)
        given = {**found.scales, "v_scale": 0.02}
        codes = cuattn.quantize_like(v, 0.02)
        cuattn.attention(found.q, found.k, codes, **given, out=out)
        errors[mode] = np.linalg.norm(out - exact)
    assert errors["int8"] < errors["block"] / 2.5, errors


def test_int8_of_torch_has_the_same_bits(rng):
    torch = pytest.importorskip("torch")
    q, k, v = rng.standard_normal((3, 2, 140, 2, 64), np.float32)
    ours = cuattn.quantize(q, k, v, mode="int8")
    theirs = cuattn.quantize(*map(torch.from_numpy, (q, k, v)), mode="int8")
    for name in "qk":
        assert getattr(theirs, name).dtype == torch.int8
        np.testing.assert_array_equal(getattr(theirs, name).numpy(), getattr(ours, name))
    out = theirs.attention(causal=True)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(
        out.float().numpy(), ours.attention(causal=True).astype(np.float32)
    )
    step = torch.compile(
        lambda a, b, c, s: cuattn.torch.attention(a, b, c, k_scale=s, q_scale=0.5),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    codes = [theirs.q, theirs.k, theirs.v.contiguous()]
    direct = cuattn.attention(*codes, k_scale=theirs.k_scale, q_scale=0.5)
    assert torch.equal(step(*codes, theirs.k_scale), direct)
    codes[2].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient goes through float8_e4m3fn"):
        cuattn.attention(*codes)


def test_a_mean_that_is_given_is_taken(rng):
    q, k, v = rng.standard_normal((3, 2, 20, 2, 32), np.float32)
    mean = rng.standard_normal((2, 32)).astype(np.float32)
    found = cuattn.quantize(q, k, v, key_mean=mean, hadamard=False, mode="tensor")
    value = (k - mean).astype(np.float64) / float(found.k_scale[0])
    same_codes(found.k, value, 1e-5)
    shift = np.einsum("bshd,hd->bhs", q.astype(np.float64), mean) / np.sqrt(32)
    np.testing.assert_allclose(found.lse_shift, shift, rtol=1e-4, atol=1e-5)


def test_zeros_infinities_and_nan(rng):
    x = np.zeros((1, 20, 2, 16), np.float32)
    x[0, 3, 1] = np.inf
    x[0, 4, 1, :2] = np.nan, -np.inf
    x[0, 5, 1, 0] = 2.0
    found = cuattn.quantize(x, x, x, hadamard=False, smooth_k=False)
    np.testing.assert_array_equal(found.v_scale, np.float32([[1.0, 2.0 / LARGEST]]))
    values = np.asarray(found.v).astype(np.float32)
    assert not values[:, :, 0].any()
    assert (values[0, 3, 1] == LARGEST).all()
    assert np.isnan(values[0, 4, 1, 0])
    assert values[0, 4, 1, 1] == -LARGEST
    tiny = np.full((1, 2, 1, 16), 1e-42, np.float32)
    assert cuattn.quantize(tiny, tiny, tiny).v_scale[0, 0] > 0
    empty = np.zeros((1, 0, 2, 16), np.float32)
    assert cuattn.quantize(x, empty, empty).attention().shape == x.shape


def test_views_and_one_pass_for_known_scales(rng):
    wide = rng.standard_normal((2, 30, 2, 64), np.float32)
    views = wide[:, ::2, :, ::2], wide.transpose(0, 1, 3, 2)[:, :, :32].transpose(0, 1, 3, 2)
    for x in views:
        whole = cuattn.quantize(*[np.ascontiguousarray(x)] * 3, hadamard=False, smooth_k=False)
        found = cuattn.quantize(x, x, x, hadamard=False, smooth_k=False)
        np.testing.assert_array_equal(found.k.view(np.uint8), whole.k.view(np.uint8))
        again = cuattn.quantize_like(x, found.k_scale)
        np.testing.assert_array_equal(again.view(np.uint8), found.k.view(np.uint8))
        back = cuattn.dequantize(found.k, found.k_scale, dtype="float32")
        np.testing.assert_array_equal(
            back, found.k.astype(np.float32) * found.k_scale[:, None, :, None]
        )
        by_bytes = cuattn.dequantize(found.k.view(np.uint8), found.k_scale, dtype="float32")
        np.testing.assert_array_equal(by_bytes, back)


def test_torch_is_asked_for_nothing_but_the_results():
    """Three codes, three scales, a mean and a shift, which is multiplied in place."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    asked = collections.Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked[str(function)] += 1
            return function(*args, **(kwargs or {}))

    x = torch.ones(1, 32, 2, 64, dtype=torch.bfloat16)
    with Counting():
        cuattn.quantize(x, x, x)
    # The permute lays out v, whose sequences are not padded here.
    want = {"aten.empty.memory_format": 8, "aten.mul_.Tensor": 1, "aten.permute.default": 1}
    assert asked == want


def test_the_shift_is_float32_whatever_the_factor_is(rng):
    x = rng.standard_normal((1, 32, 2, 64), np.float32)
    assert cuattn.quantize(x, x, x, scale=np.float64(0.5)).lse_shift.dtype == np.float32


def test_torch_gives_the_same_bits(rng):
    torch = pytest.importorskip("torch")
    q, k, v = rng.standard_normal((3, 2, 40, 2, 64), np.float32)
    ours, theirs = cuattn.quantize(q, k, v), cuattn.quantize(*map(torch.from_numpy, (q, k, v)))
    for name in ("q", "k", "v"):
        codes = getattr(theirs, name)
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.stride() == tuple(getattr(ours, name).strides)
        got = codes.contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(got, np.ascontiguousarray(getattr(ours, name)).view(np.uint8))
    out, lse = theirs.attention(causal=True, return_lse=True)
    expected, expected_lse = ours.attention(causal=True, return_lse=True)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), expected_lse)
    step = torch.compile(
        lambda a, b, c, s: cuattn.torch.attention(a, b, c, k_scale=s, q_scale=0.5),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    codes = [x.contiguous() for x in theirs.arrays]
    direct = cuattn.attention(*codes, k_scale=theirs.k_scale, q_scale=0.5)
    assert torch.equal(step(*codes, theirs.k_scale), direct)
    wanted = codes[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient goes through float8_e4m3fn"):
        cuattn.attention(wanted, *codes[1:])


def test_jax_gives_nearly_the_same(rng):
    jax = pytest.importorskip("jax")
    q, k, v = rng.standard_normal((3, 2, 140, 2, 64), np.float32)
    for mode, v_mode in (("head", "tensor"), ("block", "channel"), ("int8", "channel")):
        options = {"mode": mode, "v_mode": v_mode}
        ours = cuattn.quantize(q, k, v, **options)
        fields = [field.name for field in dataclasses.fields(ours)][:7]
        made = jax.jit(
            lambda *x, options=options, fields=fields: [
                getattr(cuattn.quantize(*x, **options), name) for name in fields
            ]
        )(*map(jax.numpy.asarray, (q, k, v)))
        theirs = dataclasses.replace(ours, **dict(zip(fields, made, strict=True)))
        for name in ("q_scale", "k_scale", "v_scale", "lse_shift"):
            got, expected = getattr(theirs, name), getattr(ours, name)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        for name in ("q", "k", "v"):
            got = np.asarray(getattr(theirs, name)).view(np.uint8)
            same = got == np.ascontiguousarray(getattr(ours, name)).view(np.uint8)
            assert same.mean() > 0.99
        out, lse = theirs.attention(causal=True, return_lse=True)
        assert out.dtype == jax.numpy.bfloat16
        expected, expected_lse = ours.attention(causal=True, return_lse=True)
        assert np.abs(np.asarray(out, np.float32) - expected.astype(np.float32)).max() < 0.1
        np.testing.assert_allclose(lse, expected_lse, atol=0.05)
    codes, scale = theirs.k, theirs.k_scale
    back = cuattn.dequantize(codes, scale, dtype="float32")
    np.testing.assert_allclose(
        back, cuattn.dequantize(np.asarray(codes), np.asarray(scale), dtype="float32"), rtol=1e-6
    )


def test_jax_refuses_gradients_but_of_what_is_stopped():
    jax = pytest.importorskip("jax")
    x, scale, mean = jax.numpy.ones((1, 20, 2, 16)), jax.numpy.ones(1), jax.numpy.ones((2, 16))
    codes = cuattn.quantize_like(x, 0.5)

    def numbers(codes, scale):
        return cuattn.dequantize(codes, scale, dtype="float32")

    for name, function, array in (
        ("quantize", lambda y: cuattn.quantize(y, x, x).q_scale, x),
        ("quantize", lambda y: cuattn.quantize(x, x, y).v_scale, x),
        ("quantize", lambda y: cuattn.quantize(x, x, x, key_mean=y).lse_shift, mean),
        ("quantize", lambda y: numbers(cuattn.quantize_like(y, 0.5), 0.5), x),
        ("quantize", jax.jit(lambda y: numbers(cuattn.quantize_like(x, y), 0.5)), scale),
        ("dequantize", lambda y: numbers(codes, y), scale),
        ("dequantize", lambda y: numbers(y.astype(codes.dtype), 0.5), x),
    ):
        message = f"{name}: no gradient goes through {name}; pass jax.lax.stop_gradient"
        message = message.replace("quantize:", "quantize(_like)?:")
        with pytest.raises(NotImplementedError, match=message):
            jax.grad(lambda y, function=function: function(y).sum())(array)
        with pytest.raises(NotImplementedError, match=message):
            jax.jvp(function, (array,), (array,))
    stopped = lambda y: numbers(cuattn.quantize_like(jax.lax.stop_gradient(y), 0.5), 0.5)  # noqa: E731
    for function in (stopped, jax.jit(stopped)):
        np.testing.assert_array_equal(jax.grad(lambda y, f=function: (y * f(y)).sum())(x), x)
    np.testing.assert_array_equal(jax.vmap(stopped)(x[None])[0], x)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_copies_keep_the_padding_of_columns(copied, layout, rng):
    for shape in ((2, 20, 3, 32), (2, 16, 3, 32), (20, 2, 32)):
        x = rng.standard_normal(shape, np.float32)
        qkv = cuattn.quantize(x, x, x, layout=layout, mode="int8" if len(shape) == 4 else "head")
        found = copied(copied(qkv))
        assert found.v.strides == qkv.v.strides
        assert found.scale is None
        assert found.v.tobytes() == qkv.v.tobytes()
        if len(shape) == 4:
            got, want = (each.attention(out=np.empty_like(x)) for each in (found, qkv))
            assert np.array_equal(got, want)


def test_a_copy_of_other_values_than_those_of_quantize_keeps_them(rng):
    x = rng.standard_normal((2, 20, 3, 32), np.float32)
    qkv = cuattn.quantize(x, x, x)
    for v in (qkv.v[:, 2:], qkv.v[:1], np.ascontiguousarray(qkv.v)):
        other = dataclasses.replace(qkv, v=v)
        assert copy.deepcopy(other).v.tobytes() == v.tobytes()
