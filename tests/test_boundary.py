# SPDX-License-Identifier: Apache-2.0
"""Whatever Python hands over, the answer is a result or one of five exceptions, never a crash."""

from __future__ import annotations

import gc
import inspect
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuattn
import dlpack

REFUSALS = (ValueError, TypeError, NotImplementedError, MemoryError, RuntimeError)
GOOD = [np.arange(64, dtype=np.float32).reshape(1, 4, 2, 8) for _ in range(3)]
WANT = cuattn.attention(*GOOD)

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int64, np.uint8]
DTYPES += [np.bool_, np.complex64, ml_dtypes.float8_e4m3fn, "V2", "S3", "M8[s]", ">f4", object]

extents = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 264])


@st.composite
def arrays(draw):
    """numpy arrays of any dtype and up to seven axes, with any strides that stay in memory."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(extents, max_size=7)))
    size = int(np.prod(shape, dtype=np.int64))
    if size > 1 << 16:
        shape = shape[:2]
    array = np.zeros(shape, dtype)
    form = draw(st.sampled_from(["plain", "reversed", "stepped", "expanded", "frozen", "swapped"]))
    if form == "reversed":
        array = array[tuple(slice(None, None, -1) for _ in shape)]
    elif form == "stepped":
        array = array[tuple(slice(None, None, 2) for _ in shape)]
    elif form == "expanded" and shape:
        array = np.broadcast_to(array[:1], (3, *shape[1:])) if shape[0] else array
    elif form == "frozen":
        array.flags.writeable = False
    elif form == "swapped":
        array = array.T
    return array


good_arrays = st.sampled_from([(1, 4, 2, 8), (1, 3, 2, 8), (2, 4, 1, 16), (4, 2, 8)]).map(
    lambda shape: np.ones(shape, np.float32)
)
foreign = st.builds(
    lambda shape, kind, index, flags, major: dlpack.zeros(
        shape, device=(kind, index), flags=flags, version=(major, 0)
    ),
    st.sampled_from([(1, 4, 2, 8), (4,), ()]),
    st.sampled_from([1, 3, 10, 16]),
    st.sampled_from([0, 5]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([0, 1, 2]),
)
wide_integers = st.integers(-(2**70), 2**70)
anything = st.one_of(
    st.none(),
    st.booleans(),
    wide_integers,
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=3),
    st.tuples(wide_integers, wide_integers),
    st.sampled_from([np.float32(1), np.int8(3), np.bool_(True), object(), int, 1j, {}]),
    good_arrays,
    arrays(),
    foreign,
)
OPTIONS = {
    "layout": st.sampled_from(["bshd", "bhsd", "nhd", "thd", "", "\0", "é"]),
    "causal": st.booleans(),
    "window": st.tuples(st.integers(-3, 9), wide_integers),
    "scale": st.floats(),
    "softcap": st.floats(),
    "alibi_slopes": arrays(),
    "sinks": arrays(),
    "bias": arrays(),
    "seqused_q": arrays(),
    "seqused_k": arrays(),
    "num_splits": wide_integers,
    "batch_invariant": st.booleans(),
    "return_lse": st.booleans(),
    "out": arrays(),
    "lse_out": arrays(),
    "workspace": arrays(),
    "backend": st.sampled_from(["auto", "cpu", "naive", "sm80", "nope", "a" * 5000]),
    "stream": st.one_of(wide_integers, st.just("x")),
}
odd_options = st.fixed_dictionaries(
    {}, optional={name: st.one_of(usual, anything) for name, usual in OPTIONS.items()}
)
anything_array = st.one_of(good_arrays, arrays(), foreign, anything)
thorough = settings(max_examples=400, suppress_health_check=list(HealthCheck))


def answer(function, *arguments, **options):
    """The call's outcome: a result or a refusal with a message; then a good call still is right."""
    message = "a result"
    try:
        function(*arguments, **options)
    except REFUSALS as refusal:
        message = str(refusal)
    assert message
    assert "internal error" not in message
    np.testing.assert_array_equal(cuattn.attention(*GOOD), WANT)


@thorough
@given(anything_array, anything_array, anything_array, odd_options)
def test_attention_answers_anything(q, k, v, options):
    answer(cuattn.attention, q, k, v, **options)


@thorough
@given(odd_options)
def test_attention_of_good_arrays_answers_any_options(options):
    answer(cuattn.attention, *GOOD, **options)


@thorough
@given(
    anything_array,
    anything_array,
    st.one_of(st.just(np.array([0, 2, 4], np.int32)), anything),
    st.one_of(st.integers(-2, 9), anything),
    odd_options,
)
def test_attention_varlen_answers_anything(q, k, cu_seqlens, longest, options):
    options.pop("layout", None)
    answer(cuattn.attention_varlen, q, k, k, cu_seqlens, cu_seqlens, longest, longest, **options)


@thorough
@given(anything_array, anything_array, anything_array, anything_array, odd_options)
def test_merge_states_answers_anything(out_a, lse_a, out_b, lse_b, options):
    kept = {n: x for n, x in options.items() if n in ("layout", "out", "lse_out", "stream")}
    answer(cuattn.merge_states, out_a, lse_a, out_b, lse_b, **kept)
    answer(cuattn.merge_states, out_a, lse_a, **kept)


@thorough
@given(anything_array, anything_array, odd_options)
def test_explain_answers_anything(q, k, options):
    answer(cuattn.explain, "attention", q, k, k, **options)


def test_refusals_keep_no_reference():
    arrays = [np.zeros((1, 4, 2, 8), np.float32) for _ in range(6)]
    lengths = np.zeros(2, np.int64)
    counts = [sys.getrefcount(x) for x in (*arrays, lengths)]
    for options in (
        {"seqused_q": lengths},
        {"bias": arrays[3], "sinks": arrays[4], "out": arrays[5]},
        {"out": arrays[3], "lse_out": arrays[4]},
        {"workspace": arrays[3], "stream": 5},
    ):
        with pytest.raises(REFUSALS):
            cuattn.attention(*arrays[:3], **options)
    del options
    gc.collect()
    assert [sys.getrefcount(x) for x in (*arrays, lengths)] == counts


def builtin_arrays(function):
    def array(*shape):
        return np.linspace(-2, 3, np.prod(shape), dtype=np.float32).reshape(shape)

    if function == "attention":
        return GOOD
    if function == "attention_varlen":
        lengths = np.array([0, 1, 3], np.int32)
        return [array(3, 2, 8), array(3, 1, 8), array(3, 1, 8), lengths, lengths, 2, 2]
    tables, lens = np.array([[1, 0]], np.int32), np.array([6], np.int32)
    return [array(1, 2, 8), array(2, 4, 1, 8), array(2, 4, 1, 8), tables, lens]


@pytest.mark.parametrize("function", ["attention", "attention_varlen", "paged_attention"])
def test_a_builtin_takes_its_arguments_as_the_python_function_would(function):
    call, good = getattr(cuattn, function), builtin_arrays(function)
    parameters = inspect.signature(call).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(named) == len(good)
    assert len(defaults) >= 19
    expected = call(*good)
    variants = [call(*good, **{name: value}) for name, value in defaults.items()]
    variants += [call(*good, **defaults), call(**dict(zip(named, good, strict=True)))]
    variants += [call(*good[:1], **dict(zip(named[1:], good[1:], strict=True)))]
    for out in variants:
        np.testing.assert_array_equal(out, expected)
    unknown = [name for name in ("layout", "kv_layout", "plan", "scales") if name not in defaults]
    wrong = [(good[:2], {}), (good, {"q": good[0]}), *((good, {name: 1}) for name in unknown)]
    if function == "attention_varlen":
        wrong += [([*good[:3], None, *good[4:]], {}), ([*good[:5], None, 2], {})]
        with pytest.raises(ValueError, match="kv_layout belongs to paged caches"):
            call(*good, kv_layout="hnd")
    for values, options in wrong:
        with pytest.raises(TypeError, match=function):
            call(*values, **options)
    assert call.__doc__.startswith("Attend w")
