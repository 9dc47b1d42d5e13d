# SPDX-License-Identifier: Apache-2.0
"""What attention refuses of float8 arrays and their scales, and what quantisation refuses."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import float8
from float8_cases import F8


def codes(*shape):
    return np.zeros(shape, F8)


def ones(*shape):
    return np.ones(shape, np.float32)


Q, K = codes(2, 5, 4, 32), codes(2, 150, 2, 32)
BF16 = np.zeros(Q.shape, ml_dtypes.bfloat16)
ATTENTION = {
    "q_of_16_bits": ((BF16, K, K), {}, ValueError,
        "q, k and v must all be float8_e4m3fn or none of them, got bfloat16, float8_e4m3fn and "
        "float8_e4m3fn; make all three with cuattn.quantize, or take paged_attention, which has "
        "16-bit q over float8 caches"),
    "k_scale_of_3_heads": ((Q, K, K), {"k_scale": ones(3)}, ValueError,
        "k_scale must be a number or have shape (1,), (num_heads_kv,) = (2,), (batch, "
        "num_heads_kv) = (2, 2) or (batch, num_heads_kv, ceil(seqlen_kv / 128)) = (2, 2, 2), got "
        "(3,); make such a scale with cuattn.quantize"),
    "q_scale_of_key_heads": ((Q, K, K), {"q_scale": ones(2, 2, 1)}, ValueError,
        "q_scale must be a number or have shape (1,), (num_heads_kv,) = (2,), (batch, "
        "num_heads_kv) = (2, 2) or (batch, num_heads_q, ceil(seqlen_q / 128)) = (2, 4, 1), got "
        "(2, 2, 1); make such a scale with cuattn.quantize"),
    "v_scale_of_blocks": ((Q, K, K), {"v_scale": ones(2, 2, 2)}, ValueError,
        "v_scale must be a number or have shape (1,), (num_heads_kv,) = (2,), (batch, "
        "num_heads_kv) = (2, 2) or (batch, num_heads_kv, head_dim_v) = (2, 2, 32), got (2, 2, 2); "
        "make such a scale with cuattn.quantize"),
    "k_scale_float64": ((Q, K, K), {"k_scale": np.ones(2)}, ValueError,
        "k_scale must be float32, got float64; cast it"),
    "k_scale_negative": ((Q, K, K), {"k_scale": -1.0}, ValueError,
        "k_scale must be finite in float32 and not negative, got -1; value = stored * scale"),
    "v_scale_nan": ((Q, K, K), {"v_scale": float("nan")}, ValueError,
        "v_scale must be finite in float32 and not negative, got nan; value = stored * scale"),
    "k_scale_that_holds_nan": ((Q, K, K), {"k_scale": np.float32([1, np.nan])}, ValueError,
        "k_scale must hold finite numbers that are not negative, got nan at (0, 1, 0), axes that "
        "it lacks counted as 0; value = stored * scale"),
    "q_scale_that_holds_less_than_0": ((Q, K, K), {"q_scale": np.float32([[1, 1], [-2, 1]])},
        ValueError,
        "q_scale must hold finite numbers that are not negative, got -2 at (1, 0, 0), axes that "
        "it lacks counted as 0; value = stored * scale"),
    "scale_of_bfloat16": ((BF16, BF16, BF16), {"k_scale": 2.0}, ValueError,
        "k_scale belongs to float8_e4m3fn arrays, these are bfloat16; leave it out, or make float8 "
        "arrays with cuattn.quantize"),
    "int8_q_alone": ((Q.view(np.int8), K, K), {}, ValueError,
        "int8 q and k must come together, with v of float8_e4m3fn, got int8, float8_e4m3fn and "
        "float8_e4m3fn; make all three with cuattn.quantize(mode='int8')"),
    "int8_k_alone": ((BF16, K.view(np.int8), K), {}, ValueError,
        "int8 q and k must come together, with v of float8_e4m3fn, got bfloat16, int8 and "
        "float8_e4m3fn; make all three with cuattn.quantize(mode='int8')"),
    "int8_v": ((Q.view(np.int8), K.view(np.int8), K.view(np.int8)), {}, ValueError,
        "int8 q and k must come together, with v of float8_e4m3fn, got int8, int8 and int8; make "
        "all three with cuattn.quantize(mode='int8')"),
    "int8_of_head_dim_24": ((np.zeros((1, 2, 1, 24), np.int8),) * 2 + (codes(1, 2, 1, 16),), {},
        ValueError,
        "q must have head_dim a multiple of 16 up to 256 for int8, got 24; pad it with zeros and "
        "pass scale= of the true head_dim"),
    "bias_of_16_bits_of_int8": ((Q.view(np.int8), K.view(np.int8), K),
        {"bias": np.zeros((5, 150), np.float16)}, ValueError,
        "bias must be float32 or bool for int8 q, got float16; cast it"),
    "out_of_int8": ((Q.view(np.int8), K.view(np.int8), K), {"out": Q.view(np.int8).copy()},
        ValueError,
        "out must be bfloat16, float16 or float32 for int8 q, got int8; allocate it so, or leave "
        "it out"),
    "head_dim_24": ((codes(1, 2, 1, 24),) * 3, {}, ValueError,
        "q must have head_dim a multiple of 16 up to 256 for float8, got 24; pad it with zeros and "
        "pass scale= of the true head_dim"),
    "v_neither_rows_nor_columns": ((Q, K, codes(2, 150, 2, 64)[..., ::2]), {}, ValueError,
        "v must be contiguous in its last axis or in its sequence axis, got strides (19200, 128, "
        "64, 2) in elements; make a contiguous copy"),
    "columns_not_padded": ((Q, K, codes(2, 2, 32, 150).transpose(0, 3, 1, 2)), {}, ValueError,
        "v must have channels that start on 16 bytes, got strides (9600, 1, 4800, 150) in elements "
        "of 1 bytes; make a contiguous copy"),
    "bias_of_float8": ((Q, K, K), {"bias": codes(5, 150)}, ValueError,
        "bias must be float32 or bool for float8_e4m3fn q, got float8_e4m3fn; cast it"),
    "out_of_float8": ((Q, K, K), {"out": codes(*Q.shape)}, ValueError,
        "out must be bfloat16, float16 or float32 for float8_e4m3fn q, got float8_e4m3fn; allocate "
        "it so, or leave it out"),
    "dtype_of_floats": ((BF16, BF16, BF16), {"dtype": "float8_e4m3fn"}, ValueError,
        "dtype float8_e4m3fn asks for arrays of that dtype or of uint8, got q of bfloat16; leave "
        "it out"),
    "fast_sums_of_16_bits": ((BF16, BF16, BF16), {"accumulate": "fast"}, ValueError,
        "accumulate must be 'exact' for bfloat16 q, got 'fast'; leave it out, or quantise q, k and "
        "v with cuattn.quantize"),
    "sums_unknown": ((Q, K, K), {"accumulate": "fastest"}, ValueError,
        "accumulate must be 'exact' or 'fast', got 'fastest'; choose one of these"),
    "dtype_unknown": ((Q, K, K), {"dtype": "float8_e5m2"}, ValueError,
        "dtype must be None or 'float8_e4m3fn', got 'float8_e5m2'; it says what uint8 arrays hold, "
        "other arrays say so themselves"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_says_what_is_wrong(name):
    arrays, options, error, message = ATTENTION[name]
    with pytest.raises(error) as refused:
        cuattn.attention(*arrays, **options)
    assert str(refused.value) == f"attention: {message}"


X, CODES = ones(1, 20, 2, 32), codes(1, 20, 2, 32)
QUANTIZE = {
    "mode": (lambda: cuattn.quantize(X, X, X, mode="token"), ValueError,
        "quantize: mode must be one of 'tensor', 'head', 'block', 'int8', got 'token'; choose one "
        "of these"),
    "axes": (lambda: cuattn.quantize(X[0, 0], X, X), ValueError,
        "quantize: q must have 3 or 4 axes, got shape (2, 32); pass [total, heads, dim] or the "
        "axes of layout"),
    "dtype": (lambda: cuattn.quantize_like(X.astype(np.float64), 1.0), ValueError,
        "quantize_like: x must be float32, float16 or bfloat16, got float64; cast it"),
    "dim": (lambda: cuattn.quantize_like(X[..., :24], 1.0), ValueError,
        "quantize_like: x must have dim a multiple of 16 up to 256, got 24; pad it with zeros"),
    "scale_of_0": (lambda: cuattn.quantize_like(X, 0.0), ValueError,
        "quantize_like: scale must hold finite numbers above 0, got 0; value = stored * scale"),
    "scale_shape": (lambda: cuattn.quantize_like(X, ones(3)), ValueError,
        "quantize_like: scale must have shape (1,), (heads,), (batch, heads), each with 2 heads or "
        "a divisor of it, or (batch, heads, ceil(rows / 128)) = (1, 2, 1), got (3,); allocate it "
        "so"),
    "back_from_floats": (lambda: cuattn.dequantize(X, 1.0), ValueError,
        "dequantize: x must be float8_e4m3fn, got float32; cast it"),
    "back_to_itself": (lambda: cuattn.dequantize(K, 1.0, out=K), ValueError,
        "dequantize: out must be float32, float16 or bfloat16, got float8_e4m3fn; cast it"),
    "scale_of_a_tuple": (lambda: cuattn.quantize_like(X, (1, 2)), TypeError,
        "quantize_like: scale must be a number or a float32 array, got (1, 2); make an array of "
        "it, in the library of x"),
    "scale_of_none": (lambda: cuattn.quantize_like(X, None), TypeError,
        "quantize_like: scale must be a number, got None; pass a float"),
    "x_of_none": (lambda: cuattn.quantize_like(None, 1.0), TypeError,
        "quantize_like: x must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__),"
        " got NoneType; convert it first"),
    "layout_of_none": (lambda: cuattn.quantize(X, X, X, layout=None), TypeError,
        "quantize: layout must be a string, got None; pass a str"),
    "hadamard_of_none": (lambda: cuattn.quantize_like(X, 1.0, hadamard=None), TypeError,
        "quantize_like: hadamard must be True or False, got None; pass a bool"),
    "smooth_k_of_1": (lambda: cuattn.quantize(X, X, X, smooth_k=1), TypeError,
        "quantize: smooth_k must be True or False, got 1; pass a bool"),
    "key_mean_of_a_list": (lambda: cuattn.quantize(X, X, X, key_mean=[1.0]), TypeError,
        "quantize: key_mean must be a float32 array [num_heads_kv, head_dim], got list; make an "
        "array of it, in the library of k"),
    "key_mean_of_one_axis": (lambda: cuattn.quantize(X, X, X, key_mean=ones(32)), ValueError,
        "quantize: key_mean must have shape (num_heads_kv, head_dim), got (32,); reshape it"),
    "scale_of_text": (lambda: cuattn.quantize(X, X, X, scale="x"), TypeError,
        "quantize: scale must be a number, got 'x'; pass that of attention"),
    "scale_of_nan": (lambda: cuattn.quantize(X, X, X, scale=float("nan")), ValueError,
        "quantize: scale must be finite, got nan; pass that of attention"),
    "keys_of_another_dim": (lambda: cuattn.quantize(X, X[..., :16], X), ValueError,
        "quantize: k must have head_dim 32 like q, got 16; pass arrays of one call of attention"),
    "keys_of_more_heads": (lambda: cuattn.quantize(X[:, :, :1], X, X), ValueError,
        "quantize: q must have a multiple of the heads of k, got 1 for 2; pass keys whose heads "
        "divide those of q"),
    "values_of_fewer_rows": (lambda: cuattn.quantize(X, X, X[:, :5]), ValueError,
        "quantize: v must have seqlen 20 like k, got 5; pass arrays of one call of attention"),
    "back_to_none": (lambda: cuattn.dequantize(K, 1.0, dtype=None), TypeError,
        "dequantize: dtype must be a string, got None; pass a str"),
    "back_to_float64": (lambda: cuattn.dequantize(K, 1.0, dtype="float64"), ValueError,
        "dequantize: dtype must be float32, float16 or bfloat16, got 'float64'; choose one of "
        "these"),
    "list": (lambda: cuattn.quantize_like([1.0], 1.0), TypeError,
        "quantize_like: x must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__),"
        " got list; convert it first"),
    "mode_of_none": (lambda: cuattn.quantize(X, X, X, mode=None), ValueError,
        "quantize: mode must be one of 'tensor', 'head', 'block', 'int8', got None; choose one of "
        "these"),
    "q_of_float64": (lambda: cuattn.quantize(X.astype(np.float64), X, X), ValueError,
        "quantize: q must be float32, float16 or bfloat16, got float64; cast it"),
    "k_of_float64": (lambda: cuattn.quantize(X, X.astype(np.float64), X), ValueError,
        "quantize: k must be float32, float16 or bfloat16, got float64; cast it"),
    "v_of_24": (lambda: cuattn.quantize(X, X, X[..., :24]), ValueError,
        "quantize: v must have dim a multiple of 16 up to 256, got 24; pad it with zeros"),
    "key_mean_of_3_heads": (lambda: cuattn.quantize(X, X, X, key_mean=ones(3, 32)), ValueError,
        "quantize: key_mean must have shape (num_heads_kv, head_dim) = (2, 32), got (3, 32); pass "
        "the mean of these keys"),
    "key_mean_of_float64": (lambda: cuattn.quantize(X, X, X, key_mean=np.ones((2, 32))),
        ValueError, "quantize: key_mean must be float32, got float64; cast it"),
    "layout_beside_a_mean": (
        lambda: cuattn.quantize(X, X, X, key_mean=ones(2, 32), layout="nhd"), ValueError,
        "quantize: layout must be 'bshd' or 'bhsd', got 'nhd'; choose one of these"),
    "channels_unsaid": (lambda: cuattn.dequantize(CODES, ones(1, 2, 32)), ValueError,
        "dequantize: scale must have shape (1,), (heads,), (batch, heads), each with 2 heads or a "
        "divisor of it, or (batch, heads, ceil(rows / 128)) = (1, 2, 1), got (1, 2, 32); pass "
        "channels=True for scales of channels, (batch, heads, dim)"),
    "packed": (lambda: cuattn.quantize(X[0], X[0], X[0]).attention(), ValueError,
        "QuantizedQKV.attention: q must have 4 axes, got packed arrays of shape (20, 2, 32); call "
        "attention_varlen(*qkv.arrays, ..., scale=qkv.scale, **qkv.scales), and add lse_shift to "
        "its lse"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZE)
def test_quantisation_says_what_is_wrong(name):
    call, error, message = QUANTIZE[name]
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value) == message


ALIKE = {
    "layout": lambda put: cuattn.quantize_like(put(X), 1.0, layout="nhd"),
    "axes": lambda put: cuattn.quantize_like(put(X[0, 0]), 1.0),
    "dim": lambda put: cuattn.quantize_like(put(X[..., :24]), 1.0),
    "numbers": lambda put: cuattn.quantize_like(put(X.astype(np.int32)), 1.0),
    "hadamard": lambda put: cuattn.quantize_like(put(X), 1.0, hadamard=1),
    "scale_of_0": lambda put: cuattn.quantize_like(put(X), 0.0),
    "scale_less_than_0": lambda put: cuattn.quantize_like(put(X), put(-ones(2))),
    "scale_of_3_heads": lambda put: cuattn.quantize_like(put(X), put(ones(3))),
    "scale_of_blocks": lambda put: cuattn.quantize_like(put(X), put(ones(1, 2, 3))),
    "scale_of_16_bits": lambda put: cuattn.quantize_like(put(X), put(ones(2).astype(np.float16))),
    "mean_of_1_head": lambda put: cuattn.quantize(*[put(X)] * 3, key_mean=put(ones(1, 32))),
    "mean_of_16_bits": lambda put: cuattn.quantize(
        *[put(X)] * 3, key_mean=put(ones(2, 32).astype(np.float16))
    ),
    "codes_of_floats": lambda put: cuattn.dequantize(put(X), 1.0),
    "codes_by_a_scale_of_channels": lambda put: cuattn.dequantize(put(CODES), put(ones(1, 2, 32))),
    "channels": lambda put: cuattn.dequantize(put(CODES), 1.0, channels=1),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_jax_arrays_are_refused_as_those_of_numpy(name):
    jax = pytest.importorskip("jax")
    put = jax.numpy.asarray
    if name == "scale_less_than_0":  # a value, which is read on the CPU alone
        put = functools.partial(jax.device_put, device=jax.devices("cpu")[0])
    with pytest.raises((TypeError, ValueError)) as expected:
        ALIKE[name](np.asarray)
    with pytest.raises(expected.type) as refused:
        ALIKE[name](put)
    assert str(refused.value) == str(expected.value)


def test_jax_arrays_come_without_out_and_stream():
    jnp = pytest.importorskip("jax.numpy")
    out = jnp.zeros(CODES.shape, jnp.float32)
    for call in (
        lambda: cuattn.dequantize(jnp.asarray(CODES), 1.0, dtype="float32", out=out),
        lambda: cuattn.dequantize(jnp.asarray(CODES), 1.0, stream=1),
        lambda: cuattn.quantize_like(jnp.asarray(X), 1.0, stream=1),
    ):
        with pytest.raises(NotImplementedError, match=r"must be None for JAX arrays"):
            call()
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16, got 'int8'"):
        cuattn.dequantize(jnp.asarray(CODES), 1.0, dtype="int8")


def by_jax(x, scale):
    """Codes of quantize_like, by XLA on the CPU: on a GPU its quotients are not rounded right."""
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.numpy.asarray(array) for array in (x, scale)]
        return np.asarray(cuattn.quantize_like(*arrays)).view(np.uint8)


def test_jax_takes_scales_of_some_heads(rng):
    x = rng.standard_normal((2, 140, 4, 32), np.float32)
    scale = rng.uniform(0.01, 0.02, (2, 2, 2)).astype(np.float32)
    expected = cuattn.quantize_like(x, scale).view(np.uint8)
    assert (by_jax(x, scale) == expected).all()


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 4), (2, 4, 2)])
def test_jax_divides_by_scales(shape, rng):
    """Half of the values lie between two codes but for the rounding of a quotient."""
    scale = rng.uniform(0.01, 0.02, shape).astype(np.float32)
    ties = (17 + 2 * rng.integers(0, 8, (2, 256, 4, 32))) / np.float32(16)
    rows = {3: lambda: scale.repeat(128, 2).swapaxes(1, 2)}.get(
        len(shape), lambda: scale[..., None, :]
    )
    x = (ties * rows()[..., None]).astype(np.float32)
    expected = cuattn.quantize_like(x, scale).view(np.uint8)
    assert (by_jax(x, scale) == expected).all()


def test_packed_arrays_go_where_the_message_says(rng):
    x, ends = rng.standard_normal((20, 2, 32), np.float32), np.array([0, 20], np.int32)
    qkv = cuattn.quantize(x, x, x)
    out, lse = cuattn.attention_varlen(
        *qkv.arrays, ends, ends, 20, 20, scale=qkv.scale, **qkv.scales, return_lse=True
    )
    one = cuattn.quantize(x[None], x[None], x[None])
    want, want_lse = one.attention(return_lse=True)
    assert np.array_equal(out.view(np.uint16), want[0].view(np.uint16))
    assert np.allclose(lse + qkv.lse_shift, want_lse[0], atol=1e-5)


@pytest.mark.parametrize("message", ["a producer failed", "driver: x is gone", "quantize"])
def test_what_others_say_is_kept_whole(message):
    assert float8.in_words_of("quantize", "k", message) == message


def test_the_device_that_is_wanted_is_that_of_the_named_array():
    message = "quantize: mean must be on cpu like x, got cuda:0; move it there"
    want = "quantize: key_mean must be on cpu like k, got cuda:0; move it there"
    assert float8.in_words_of("quantize", "k", message) == want


def test_what_smoothing_does_not_go_with():
    found = cuattn.quantize(X, X, X)
    for name, value in (("softcap", 30.0), ("sinks", ones(2)), ("scale", 1.0), ("layout", "bhsd")):
        with pytest.raises(ValueError, match=rf"QuantizedQKV.attention: {name} "):
            found.attention(**{name: value})
    plain = cuattn.quantize(X, X, X, smooth_k=False)
    assert plain.lse_shift is None
    assert plain.attention(softcap=30.0, sinks=ones(2)).shape == X.shape


def test_no_gradient_goes_back_through_float8():
    out = np.zeros(Q.shape, ml_dtypes.bfloat16)
    lse = np.zeros((2, 4, 5), np.float32)
    with pytest.raises(NotImplementedError, match=r"q is float8_e4m3fn.*cast to bfloat16"):
        cuattn.attention_backward(out, Q, K, K, out, lse)


def test_other_functions_still_refuse_float8_by_name():
    with pytest.raises(NotImplementedError, match="q is float8_e4m3fn"):
        cuattn.flex_attention(Q, K, K)
    for arrays, word in (((Q, K, K), "q is float8_e4m3fn"), ((Q.view(np.int8),) * 3, "q is int8")):
        with pytest.raises(NotImplementedError, match=word):
            cuattn.explain("flex_attention", *arrays)
    cache, ends = codes(1, 16, 2, 32), np.array([0, 5, 10], np.int32)
    pages = {"block_tables": np.zeros((2, 1), np.int32), "seqused_k": np.array([5, 5], np.int32)}
    pages |= {"cu_seqlens_q": ends, "max_seqlen_q": 5, "max_seqlen_k": 16}
    wide = "k is float8_e4m3fn, over which masks and scores"
    for q, message in (
        (codes(10, 4, 32), "q is float8_e4m3fn"),
        (BF16[0].repeat(2, 0), wide),
    ):
        with pytest.raises(NotImplementedError, match=message):
            cuattn.flex_attention(q, cache, cache, **pages)
        with pytest.raises(NotImplementedError, match=message):
            cuattn.explain("flex_attention", q, cache, cache, **pages)


@pytest.mark.parametrize("name", ["scale", "layout", "q_scale", "k_scale", "v_scale"])
def test_what_quantize_settled_may_be_none_and_nothing_else(name):
    x = np.random.default_rng(0).standard_normal((1, 16, 2, 16), np.float32)
    qkv = cuattn.quantize(x, x, x)
    found = qkv.attention(**{name: None})
    assert np.array_equal(found.view(np.uint16), qkv.attention().view(np.uint16))
    with pytest.raises(
        ValueError, match=f"QuantizedQKV.attention: {name} was settled by quantize, got 2.0; pass"
    ):
        qkv.attention(**{name: 2.0})
