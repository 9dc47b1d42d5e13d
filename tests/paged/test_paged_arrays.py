# SPDX-License-Identifier: Apache-2.0
"""Arrays of every library through the functions of the paged cache: the same bits, in place, with
nothing left behind. Views and read-only arrays: test_paged_views.py; JAX: test_jax.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import dlpack
import harness
import paged_cases
from cache_cases import LAYOUTS
from paged_calls import (
    CASE,
    I32,
    I64,
    LIBRARIES,
    ON_CUDA,
    OPERATIONS,
    Call,
    ForeignCuda,
    attend,
    attend_by_a_plan,
    every_operation,
    geometry,
    is_foreign,
    native,
    outcome,
    paged_arrays,
)


@pytest.fixture(params=[*LIBRARIES, *(pytest.param(x, marks=pytest.mark.gpu) for x in ON_CUDA)])
def library(request):
    return (LIBRARIES | ON_CUDA)[request.param]()


@every_operation
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_every_library_gives_the_same_bits(library, kv_layout, name, rng):
    operation, case = OPERATIONS[name]
    for dtype in ("float32", "float16", "bfloat16"):
        if cases.DTYPES[dtype] not in library.dtypes:
            continue
        problem = paged_cases.make(dataclasses.replace(case, kv_layout=kv_layout, dtype=dtype), rng)
        want, _ = outcome(native(library), operation, problem)
        got, arrays = outcome(library, operation, problem)
        assert len(got) == len(want) > 0
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        for array in arrays:  # every export was given back
            if isinstance(array, dlpack.Array):
                assert array.open_exports == 0
                assert array.requests, "an array was not looked at"


@every_operation
def test_an_array_of_bytes_holds_float8(library, name, rng):
    """Caches of e4m3 as uint8, for libraries without the dtype."""
    operation, case = OPERATIONS[name]
    if operation not in (attend, attend_by_a_plan):
        pytest.skip("without kv_dtype")
    problem = paged_cases.make(dataclasses.replace(case, fp8=True), rng)
    want, _ = outcome(native(library), operation, problem)
    got, _ = outcome(library, operation, problem)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_belong_to_the_library_that_asks(library, rng):
    if is_foreign(library):
        pytest.skip("it cannot allocate")
    call, problem = Call(library), paged_cases.make(CASE, rng)
    arrays = paged_arrays(call, problem)
    for result in cuattn.paged_attention(*arrays, return_lse=True):
        assert library.owns(result)
    plan = cuattn.paged_plan(*arrays[3:], **geometry(problem))
    assert library.owns(plan)
    assert library.owns(cuattn.paged_attention(*arrays, plan=plan))
    ends = call.put(np.array([0, *np.cumsum(CASE.lens)], I32))
    for result in cuattn.gather_cache(*arrays[1:4], ends):
        assert library.owns(result)


# Objects that know nothing but DLPack

ARRAYS = {  # a call of each function, by names; the outputs that may be missing come last
    "paged_attention": ("q", "out"),
    "paged_plan": ("context_lens", "out"),
    "paged_attention_v1": ("q", None),
    "paged_attention_v2": ("q", None),
    "reshape_and_cache": ("k", None),
    "gather_cache": ("k_cache", "k_out"),
    "copy_blocks": ("k_caches[0]", None),
    "swap_blocks": ("src[0]", None),
    "merge_states": ("out_a", "out"),
}


def bare_call(name, put, **options):
    """The function `name` on arrays of `put`, without outputs that it can allocate."""
    q, cache = put(np.ones((2, 4, 16), np.float32)), np.ones((5, 8, 2, 16), np.float32)
    tables, lens = put(np.zeros((2, 2), I32)), put(np.ones(2, I32))
    mapping = np.array([[0, 1]], I64)
    if name == "paged_attention":
        return cuattn.paged_attention(q, put(cache), put(cache), tables, lens, **options)
    if name == "paged_plan":
        sizes = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16, "block_size": 8}
        return cuattn.paged_plan(tables, lens, **sizes, **options)
    if name.startswith("paged_attention_v"):
        out = put(np.zeros((2, 4, 16), np.float32))
        caches = put(cache), put(cache)
        return getattr(cuattn, name)(
            out, q, *caches, tables, lens, 0.25, kv_layout="nhd", **options
        )
    if name == "reshape_and_cache":
        rows, slots = put(np.ones((2, 2, 16), np.float32)), put(np.zeros(2, I64))
        return cuattn.reshape_and_cache(rows, rows, put(cache), put(cache), slots, **options)
    if name == "gather_cache":
        ends = put(np.array([0, 1, 2], I32))
        return cuattn.gather_cache(put(cache), put(cache), tables, ends, **options)
    if name == "copy_blocks":
        return cuattn.copy_blocks(put(cache), None, mapping, **options)
    if name == "swap_blocks":
        return cuattn.swap_blocks(put(cache), np.ones_like(cache), mapping, **options)
    parts = [put(np.ones(shape, np.float32)) for shape in ((2, 4, 16), (2, 4)) * 2]
    return cuattn.merge_states(*parts, layout="nhd", **options)


def test_every_operation_has_a_bare_call():
    assert set(ARRAYS) == set(OPERATIONS)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_unknown_library_on_cuda_must_bring_its_stream(name):
    """No kernel sees these arrays, which lie on the host: the call is refused before."""
    made = []

    def put(values):
        made.append(dlpack.Array(values, device=(dlpack.CUDA, 0)))
        return made[-1]

    first, _ = ARRAYS[name]
    message = (
        f"{name}: stream must be given, because the current stream of Array ({first}) is not "
        "known; pass stream= and out="
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bare_call(name, put)
    assert not any(array.requests for array in made)


@pytest.mark.parametrize("name", [name for name, (_, out) in ARRAYS.items() if out])
@pytest.mark.parametrize(
    "make",
    [dlpack.Array, pytest.param(lambda x: ForeignCuda().put(x), marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
def test_an_unknown_library_must_bring_its_outputs(make, name):
    made = []

    def put(values):
        made.append(make(values))
        return made[-1]

    output, on_cuda = ARRAYS[name][1], make is not dlpack.Array
    message = (
        f"{name}: {output} must be given, because cuattn cannot allocate a Array; "
        f"pass {output}= with shape ("
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bare_call(name, put, **({"stream": 0} if on_cuda else {}))
    assert all(getattr(array, "open_exports", 0) == 0 for array in made)


@pytest.mark.gpu
def test_an_unknown_library_on_cuda_orders_itself_behind_the_given_stream(rng):
    library = ForeignCuda()
    torch = library.torch
    stream, call = torch.cuda.Stream(), Call(library)
    torch.cuda.synchronize()
    call.options = {"stream": stream}
    attend(call, paged_cases.make(CASE, rng))
    torch.cuda.synchronize()
    assert call.arrays
    assert all(x.requests[0]["stream"] == stream.cuda_stream for x in call.arrays)


def test_a_scale_of_one_element_is_that_of_every_head(device, rng):
    q = rng.standard_normal((2, 4, 16)).astype(np.float16)
    cache = rng.standard_normal((3, 8, 2, 16)).astype(ml_dtypes.float8_e4m3fn)
    tables, lens = np.array([[0, 1], [2, 0]], np.int32), np.array([11, 5], np.int32)
    call = functools.partial(harness.numpy_call, device, cuattn.paged_attention)
    arguments = q, cache, cache, tables, lens
    want = call(*arguments, k_scale=0.5, v_scale=2.0)
    one = {"k_scale": np.full(1, 0.5, np.float32), "v_scale": np.full(1, 2, np.float32)}
    assert np.array_equal(call(*arguments, **one), want)


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        (1e39, "must be finite in float32 and not negative, got 1e+39; value = stored * scale"),
        (-1.0, "must be finite in float32 and not negative, got -1; value = stored * scale"),
        ([1, 1, 1], "must have one element or shape (num_heads_kv,) = (2,) or (num_seqs, num_heads"
         "_kv) = (1, 2), got (3,); give one number per head"),
        ([1, -1], "must hold finite numbers that are not negative, got -1 for sequence 0 and head "
         "1; value = stored * scale"),
        ([np.nan], "must hold finite numbers that are not negative, got nan for sequence 0 and "
         "head 0; value = stored * scale"),
    ],
    ids=str,
)  # fmt: skip
def test_scales_that_no_cache_has_are_refused(scale, rule):
    codes = np.zeros((3, 8, 2, 16), ml_dtypes.float8_e4m3fn)
    scale = np.array(scale, np.float32) if isinstance(scale, list) else scale
    call = (
        np.zeros((1, 4, 16), np.float16),
        codes,
        codes,
        np.zeros((1, 2), np.int32),
        np.array([3], I32),
    )
    with pytest.raises(ValueError, match=f"^{re.escape(f'paged_attention: v_scale {rule}')}$"):
        cuattn.paged_attention(*call, v_scale=scale)
