# SPDX-License-Identifier: Apache-2.0
"""Whatever Python hands over, the answer is a result or one of five exceptions, never a crash."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
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


def axes(*values):
    return (ctypes.c_int64 * len(values))(*values)


# What a producer writes into its Tensor, and what is said of it.
LIES = {
    "no_axes_at_all": ({"ndim": -(2**31)}, "must have a shape, got -2147483648 axes"),
    "a_negative_axis": ({"ndim": -1}, "must have a shape, got -1 axes"),
    "too_many_axes": ({"ndim": 2**31 - 1}, "must have at most 6 axes, got 2147483647"),
    "no_shape": ({"shape": None}, "must have a shape, got NULL for 4 axes"),
    "a_negative_extent": ({"shape": axes(1, -4, 2, 8)}, "must have extents >= 0, got -4 on axis 1"),
    "the_lowest_extent": (
        {"shape": axes(1, 4, 2, -(2**63))},
        "must have extents >= 0, got -9223372036854775808 on axis 3",
    ),
    "extents_beyond_64_bits": (
        {"shape": axes(2**32, 2**32, 2, 8), "strides": axes(0, 0, 0, 1)},
        "must have bytes that 64 bits can count, got extent 4294967296 and stride 0 on axis 0",
    ),
    "extents_beyond_64_bits_without_strides": (
        {"shape": axes(2**32, 2**32, 2, 8), "strides": None},
        "must have bytes that 64 bits can count, got extent 4294967296 and stride NULL on axis 0",
    ),
    "a_stride_that_wraps": (
        {"strides": axes(64, 2**62, 8, 1)},
        "must have bytes that 64 bits can count, got extent 4 and stride 4611686018427387904 on "
        "axis 1",
    ),
    "the_lowest_stride": (
        {"strides": axes(64, -(2**63), 8, 1)},
        "must have bytes that 64 bits can count, got extent 4 and stride -9223372036854775808",
    ),
    "strides_that_sum_up_beyond_64_bits": (
        {"shape": axes(2, 2, 2, 8), "strides": axes(2**60, 2**60, 8, 1)},
        "must have bytes that 64 bits can count, got extent 2 and stride 1152921504606846976 on "
        "axis 0",
    ),
    "an_offset_that_wraps": ({"byte_offset": 2**64 - 4096}, "must lie in memory"),
    "an_end_beyond_memory": (
        {"data": 2**64 - 256, "byte_offset": 0},
        "must lie in memory, got byte_offset 0 and elements from 0 to 252 bytes",
    ),
    "a_begin_below_memory": (
        {"data": 64, "byte_offset": 0, "strides": axes(64, -16, 8, 1)},
        "must lie in memory, got byte_offset 0 and elements from -192 to 60 bytes",
    ),
}


@pytest.mark.parametrize("version", [(1, 1), (0, 8)])
@pytest.mark.parametrize("name", LIES)
def test_what_a_producer_lies_about_is_refused(name, version):
    fields, message = LIES[name]

    def lie(tensor):
        for field, value in fields.items():
            setattr(tensor, field, value)

    def lying():
        return dlpack.Array(np.zeros((1, 4, 2, 8), np.float32), version=version, change=lie)

    lse = np.zeros((1, 2, 4), np.float32)
    calls = {
        "q": lambda x: cuattn.attention(x, *GOOD[1:]),
        "k": lambda x: cuattn.attention(GOOD[0], x, GOOD[2]),
        "bias": lambda x: cuattn.attention(*GOOD, bias=x),
        "out": lambda x: cuattn.attention(*GOOD, out=x),
        "lse_out": lambda x: cuattn.attention(*GOOD, lse_out=x),
        "workspace": lambda x: cuattn.attention(*GOOD, workspace=x),
        "out_b": lambda x: cuattn.merge_states(GOOD[0], lse, x, lse),
        "k_caches[0]": lambda x: cuattn.copy_blocks([x], None, np.zeros((0, 2), np.int64)),
    }
    for argument, call in calls.items():
        array = lying()
        with pytest.raises(ValueError, match=re.escape(f": {argument} {message}")):
            call(array)
        if array.open_exports:
            gc.collect()  # half a second where torch and JAX have been at work
        assert array.open_exports == 0
    np.testing.assert_array_equal(cuattn.attention(*GOOD), WANT)


@pytest.mark.parametrize("name", [name for name in LIES if "extents_beyond" in name])
def test_a_shape_that_no_memory_holds_is_refused_by_explain(name):
    shape = tuple(LIES[name][0]["shape"])
    with pytest.raises(ValueError, match="attention: q must have bytes that 64 bits can count"):
        cuattn.explain("attention", shape, GOOD[1].shape, GOOD[2].shape)


def test_strides_of_numpy_that_overflow_are_refused():
    wide = np.lib.stride_tricks.as_strided(GOOD[1], strides=(128, 2**62, 32, 4))
    with pytest.raises(ValueError, match="attention: k must have bytes that 64 bits can count"):
        cuattn.attention(GOOD[0], wide, GOOD[2])


@pytest.mark.parametrize(
    "device",
    [None, 1, "cpu", (), (1,), (1, 0, 0), ("1", "0"), (1.0, 0), (None, 0), (1, None), {}, object()],
)
def test_a_device_that_is_no_pair_of_integers_is_refused(device):
    array = dlpack.zeros((1, 4, 2, 8))
    array.dl_device = device
    with pytest.raises(TypeError) as refusal:
        cuattn.attention(GOOD[0], array, GOOD[2])
    assert (
        "attention: k must give a pair of integers by __dlpack_device__, got "
        f"{device!r}; pass what its library makes"
    ) == str(refusal.value)


@pytest.mark.parametrize("kind", [0, 3, 16, 999, 2**31 - 1, -1, -(2**31)])
def test_devices_that_cuattn_does_not_know_are_refused_or_are_host_memory(kind):
    def lie(tensor):
        tensor.device.type = kind

    array = dlpack.Array(GOOD[1], device=(1, 0), change=lie)
    if kind == 3:  # pinned host memory
        np.testing.assert_array_equal(cuattn.attention(GOOD[0], array, GOOD[2]), WANT)
        return
    with pytest.raises(ValueError, match=f"k must be on .* got DLPack device type {kind};"):
        cuattn.attention(GOOD[0], array, GOOD[2])


@pytest.mark.parametrize("kind", [2, 13])
@pytest.mark.parametrize("place", [0, 1])
def test_memory_of_cuda_that_was_not_announced_is_refused(place, kind):
    """Its producer was told no stream. As the first argument it was taken for one of torch."""
    arrays, name = list(GOOD), "qk"[place]
    change = lambda tensor: setattr(tensor.device, "type", kind)  # noqa: E731
    arrays[place] = dlpack.Array(arrays[place], device=(1, 0), change=change)
    with pytest.raises(ValueError, match=f"attention: {name} must say by __dlpack_device__ that"):
        cuattn.attention(*arrays)
    gc.collect()
    assert arrays[place].open_exports == 0


@pytest.mark.parametrize("number", [2**31, 2**70, -(2**70)])
def test_a_device_beyond_32_bits_is_no_device_of_cuda(number):
    array = dlpack.zeros((1, 4, 2, 8))
    array.dl_device = (number, number)
    array.change = lambda tensor: setattr(tensor.device, "type", 1)
    assert cuattn.attention(GOOD[0], array, GOOD[2]).shape == WANT.shape
    assert array.requests == [{"max_version": (1, 1)}]  # and is asked for no stream


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
