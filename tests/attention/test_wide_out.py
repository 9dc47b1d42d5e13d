# SPDX-License-Identifier: Apache-2.0
"""`out` of float32 for 16-bit inputs: the result before it is rounded, on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LENGTHS = np.array([0, 3, 20, 21], np.int32)  # an odd start, a long and a short sequence


def draw(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


def poisoned(*shape):
    """A strided view: every other head of an array of NaN."""
    whole = np.full((*shape[:-2], 2 * shape[-2], shape[-1]), np.nan, np.float32)
    return whole[..., ::2, :]


def dense(rng, dtype, backend):
    q, k, v = (draw(rng, dtype, 2, 19, heads, 40) for heads in (4, 2, 2))
    sinks = draw(rng, np.float32, 4)
    return poisoned(2, 19, 4, 40), lambda **x: cuattn.attention(
        q, k, v, causal=True, sinks=sinks, backend=backend, **x
    )


def no_keys(rng, dtype, backend):
    q = draw(rng, dtype, 1, 5, 2, 16)
    k = v = draw(rng, dtype, 1, 3, 1, 16)  # the first two rows see none
    return poisoned(1, 5, 2, 16), lambda **x: cuattn.attention(
        q, k, v, causal=True, backend=backend, **x
    )


def varlen(rng, dtype, backend):
    q, k, v = (draw(rng, dtype, 21, heads, 24) for heads in (4, 1, 1))
    return poisoned(21, 4, 24), lambda **x: cuattn.attention_varlen(
        q, k, v, LENGTHS, LENGTHS, 17, 17, window=(5, 2), backend=backend, **x
    )


def caches(rng, dtype):
    tables = rng.permutation(12).astype(np.int32).reshape(3, 4)
    return *(draw(rng, dtype, 12, 4, 2, 16) for _ in range(2)), tables


def varlen_over_pages(rng, dtype, backend):
    k, v, tables = caches(rng, dtype)
    q, used = draw(rng, dtype, 21, 4, 16), np.array([7, 16, 3], np.int32)
    return poisoned(21, 4, 16), lambda **x: cuattn.attention_varlen(
        q, k, v, LENGTHS, None, 17, 16, block_tables=tables, seqused_k=used, backend=backend, **x
    )


def paged(rng, dtype, backend):
    k, v, tables = caches(rng, dtype)
    q, sinks = draw(rng, dtype, 3, 2, 4, 16), draw(rng, np.float32, 4)
    lens = np.array([1, 16, 0], np.int32)
    return poisoned(3, 2, 4, 16), lambda **x: cuattn.paged_attention(
        q, k, v, tables, lens, sinks=sinks, **x
    )


CALLS = {x.__name__: x for x in (dense, no_keys, varlen, varlen_over_pages, paged)}


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_a_float32_out_rounds_to_the_bits_of_a_16_bit_one(name, dtype, backend, rng):
    wide, call = CALLS[name](rng, DTYPES[dtype], backend)
    narrow, lse = call(return_lse=True)
    assert np.array_equal(lse, call(out=wide, return_lse=True)[1])
    assert np.array_equal(wide.astype(DTYPES[dtype]), narrow)
    assert name == "no_keys" or np.abs(wide - narrow.astype(np.float32)).max() > 0  # not rounded


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
    wide, call = CALLS[name](rng, np.float16, "cpu")
    with pytest.raises(ValueError, match=r"out must be float16 like q, or float32, got float64"):
        call(out=wide.astype(np.float64))


def test_versions_1_and_2_take_the_dtype_of_q_alone(rng):
    k, v, tables = caches(rng, np.float16)
    out, lens = np.empty((3, 4, 16), np.float32), np.array([1, 16, 0], np.int32)
    q = draw(rng, np.float16, 3, 4, 16)
    for op in (cuattn.paged_attention_v1, cuattn.paged_attention_v2):
        with pytest.raises(ValueError, match="out must be float16, got float32"):
            op(out, q, k, v, tables, lens, 0.25, kv_layout="nhd")
