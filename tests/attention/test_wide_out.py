# SPDX-License-Identifier: Apache-2.0
"""`out` of float32 for 16-bit inputs: the result before it is rounded."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import cuattn
import harness

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LENGTHS = np.array([0, 3, 20, 21], np.int32)  # an odd start, a long and a short sequence


def draw(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


def poisoned(*shape):
    """A strided view: every other head of an array of NaN."""
    whole = np.full((*shape[:-2], 2 * shape[-2], shape[-1]), np.nan, np.float32)
    return whole[..., ::2, :]


def dense(rng, dtype):
    q, k, v = (draw(rng, dtype, 2, 19, heads, 40) for heads in (4, 2, 2))
    options = {"causal": True, "sinks": draw(rng, np.float32, 4)}
    return poisoned(2, 19, 4, 40), cuattn.attention, (q, k, v), options


def whole_tiles(rng, dtype):
    q, k, v = (draw(rng, dtype, 1, 300, heads, 128) for heads in (4, 2, 2))
    return poisoned(1, 300, 4, 128), cuattn.attention, (q, k, v), {"window": (200, 30)}


def wide_heads(rng, dtype):  # two warps share the columns of a row in sm80
    q, k, v = (draw(rng, dtype, 1, 40, 2, dim) for dim in (504, 504, 320))
    return poisoned(1, 40, 2, 320), cuattn.attention, (q, k, v), {"causal": True}


def split_keys(rng, dtype):
    q, k, v = (draw(rng, dtype, 1, n, 2, 64) for n in (3, 900, 900))
    return poisoned(1, 3, 2, 64), cuattn.attention, (q, k, v), {}


def no_keys(rng, dtype):
    q = draw(rng, dtype, 1, 5, 2, 16)
    k = v = draw(rng, dtype, 1, 3, 1, 16)  # the first two rows see none
    return poisoned(1, 5, 2, 16), cuattn.attention, (q, k, v), {"causal": True}


def varlen(rng, dtype):
    q, k, v = (draw(rng, dtype, 21, heads, 24) for heads in (4, 1, 1))
    arrays = q, k, v, LENGTHS, LENGTHS, 17, 17
    return poisoned(21, 4, 24), cuattn.attention_varlen, arrays, {"window": (5, 2)}


def caches(rng, dtype, head_dim=16):
    tables = rng.permutation(12).astype(np.int32).reshape(3, 4)
    return *(draw(rng, dtype, 12, 8, 2, head_dim) for _ in range(2)), tables


def varlen_over_pages(rng, dtype):
    k, v, tables = caches(rng, dtype)
    q, used = draw(rng, dtype, 21, 4, 16), np.array([7, 16, 3], np.int32)
    arrays = q, k, v, LENGTHS, None, 17, 16
    options = {"block_tables": tables, "seqused_k": used}
    return poisoned(21, 4, 16), cuattn.attention_varlen, arrays, options


def paged(rng, dtype, head_dim=64):  # the least that sm90 takes
    k, v, tables = caches(rng, dtype, head_dim)
    q, sinks = draw(rng, dtype, 3, 2, 4, head_dim), draw(rng, np.float32, 4)
    lens = np.array([1, 16, 0], np.int32)
    arrays = q, k, v, tables, lens
    return poisoned(*q.shape), cuattn.paged_attention, arrays, {"sinks": sinks}


def paged_in_small_heads(rng, dtype):
    return paged(rng, dtype, head_dim=16)


def paged_in_parts(rng, dtype):
    k, v = (draw(rng, dtype, 256, 16, 2, 128) for _ in range(2))
    tables, lens = np.arange(256, dtype=np.int32).reshape(2, 128), np.array([2048, 1000], np.int32)
    return poisoned(2, 8, 128), cuattn.paged_attention, (
        draw(rng, dtype, 2, 8, 128), k, v, tables, lens,
    ), {}  # fmt: skip


BUILDERS = (
    dense, whole_tiles, wide_heads, split_keys, no_keys, varlen, varlen_over_pages, paged,
    paged_in_small_heads, paged_in_parts,
)  # fmt: skip
CALLS = {x.__name__: x for x in BUILDERS}
TARGETS = harness.target_params(cuda=("sm80", "sm90"))


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_a_float32_out_rounds_to_the_bits_of_a_16_bit_one(name, dtype, device, backend, rng):
    if name in ("paged_in_small_heads", "wide_heads") and backend == "sm90":
        pytest.skip("sm90 reads pages of head_dim 64 and more, and heads up to 256")
    wide, function, arrays, options = CALLS[name](rng, DTYPES[dtype])
    if function is not cuattn.paged_attention or backend != "naive":
        options["backend"] = backend
    call = functools.partial(
        harness.numpy_call, device, function, *arrays, **options, return_lse=True
    )
    narrow, lse = call()
    wide, wide_lse = call(out=wide)
    assert wide.dtype == np.float32
    assert np.array_equal(lse, wide_lse)
    assert np.array_equal(wide.astype(DTYPES[dtype]), narrow)
    assert name == "no_keys" or np.abs(wide - narrow.astype(np.float32)).max() > 0  # not rounded


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("naive", "cublas", "tiled"))
)
def test_kernels_that_write_the_dtype_of_q_alone_say_so(device, backend, rng):
    wide, function, arrays, _ = whole_tiles(rng, np.float16)
    with pytest.raises(NotImplementedError, match=f"float32, which backend '{backend}' does not"):
        harness.numpy_call(device, function, *arrays, backend=backend, out=wide)


def test_the_wide_result_is_nearer_to_float64(rng):
    q, k, v = (draw(rng, ml_dtypes.bfloat16, 1, 64, 2, 64) for _ in range(3))
    scores = np.einsum("bihd,bjhd->bhij", *(x.astype(np.float64) for x in (q, k))) / 8
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhij,bjhd->bihd", weights, v.astype(np.float64))
    wide = cuattn.attention(q, k, v, out=np.empty(q.shape, np.float32))
    assert np.abs(wide - want).max() < 2e-5


@pytest.mark.parametrize("name", ["dense", "varlen", "paged"])
def test_another_dtype_is_refused_with_both_that_are_taken(name, rng):
    wide, function, arrays, options = CALLS[name](rng, np.float16)
    with pytest.raises(ValueError, match=r"out must be float16 like q, or float32, got float64"):
        function(*arrays, **options, out=wide.astype(np.float64))


def test_versions_1_and_2_take_the_dtype_of_q_alone(rng):
    k, v, tables = caches(rng, np.float16)
    out, lens = np.empty((3, 4, 16), np.float32), np.array([1, 16, 0], np.int32)
    q = draw(rng, np.float16, 3, 4, 16)
    for op in (cuattn.paged_attention_v1, cuattn.paged_attention_v2):
        with pytest.raises(ValueError, match="out must be float16, got float32"):
            op(out, q, k, v, tables, lens, 0.25, kv_layout="nhd")
