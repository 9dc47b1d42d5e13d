# SPDX-License-Identifier: Apache-2.0
"""The border: every array library gives the same bits, nothing is copied, kept or left behind."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import cuattn
import dlpack
import frameworks

SHAPE = (2, 9, 4, 32)  # [batch, seqlen, num_heads, head_dim]


def inputs(rng, dtype=np.float32, shape=SHAPE):
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def outputs(arrays):
    """What a library that cannot allocate must be given: numpy arrays."""
    batch, seqlen, heads, _ = SHAPE
    lse = np.empty((batch, heads, seqlen), np.float32)
    return {"out": np.empty(SHAPE, arrays[0].values.dtype), "lse_out": lse}


def attend(library, arrays, **options):
    if isinstance(library, frameworks.Foreign):
        options |= outputs(arrays)
    return cuattn.attention(*arrays, return_lse=True, **options)


@pytest.fixture(params=[*frameworks.CPU, *frameworks.CUDA])
def library(request):
    table = frameworks.CPU | frameworks.CUDA
    return table[request.param]()


@pytest.fixture(params=frameworks.CPU)
def cpu_library(request):
    return frameworks.CPU[request.param]()


def test_every_library_gives_the_same_bits(library, rng):
    for dtype in library.dtypes:
        values = inputs(rng, dtype)
        bias = rng.standard_normal((1, 4, 9, 9), np.float32)
        if library.__class__ in (frameworks.Torch, frameworks.Cupy) and is_cuda(library):
            reference = frameworks.Torch("cuda")
        else:
            reference = frameworks.Numpy()
        want = attend(
            reference, [reference.put(x) for x in values], causal=True, bias=reference.put(bias)
        )
        got = attend(library, [library.put(x) for x in values], causal=True, bias=library.put(bias))
        for a, b in zip(want, got, strict=True):
            a, b = reference.get(a), library.get(b)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(frameworks.bits_of(a), frameworks.bits_of(b))


def is_cuda(library):
    return isinstance(library, frameworks.Cupy) or getattr(library, "device", "cpu") == "cuda"


def test_results_belong_to_the_library_of_q(library, rng):
    out, lse = attend(library, [library.put(x) for x in inputs(rng)])
    assert library.owns(out)
    assert library.owns(lse)


def test_out_is_written_in_place_and_returned(library, rng):
    if isinstance(library, frameworks.Jax):
        pytest.skip("XLA owns the results")
    values = inputs(rng)
    arrays = [library.put(x) for x in values]
    out, lse = (
        library.put(np.zeros(SHAPE, np.float32)),
        library.put(np.zeros((2, 4, 9), np.float32)),
    )
    got = cuattn.attention(*arrays, out=out, lse_out=lse)
    assert got[0] is out
    assert got[1] is lse
    if not isinstance(library, frameworks.Foreign):
        want = attend(library, arrays)
        np.testing.assert_array_equal(library.get(out), library.get(want[0]))
        np.testing.assert_array_equal(library.get(lse), library.get(want[1]))
    else:
        np.testing.assert_array_equal(out.values, cuattn.attention(*values))


def test_varlen_and_merge_give_the_same_bits(cpu_library, rng):
    if isinstance(cpu_library, frameworks.Foreign):
        pytest.skip("covered by attention")
    q, k, v = inputs(rng, shape=(11, 2, 16))
    cu_seqlens = np.array([0, 4, 4, 11], np.int32)
    arguments = [q, k, v, cu_seqlens, cu_seqlens]
    want = cuattn.attention_varlen(*arguments, 7, 7, return_lse=True)
    got = cuattn.attention_varlen(*map(cpu_library.put, arguments), 7, 7, return_lse=True)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, cpu_library.get(b))
    parts = [want[0], want[1], want[0][::-1].copy(), want[1][:, ::-1].copy()]
    merged = cuattn.merge_states(*parts, layout="thd")
    other = cuattn.merge_states(*map(cpu_library.put, parts), layout="thd")
    stacked = cuattn.merge_states(
        cpu_library.put(np.stack(parts[::2])), cpu_library.put(np.stack(parts[1::2])), layout="thd"
    )
    for a, b, c in zip(merged, other, stacked, strict=True):
        assert cpu_library.owns(b)
        np.testing.assert_array_equal(a, cpu_library.get(b))
        np.testing.assert_array_equal(a, cpu_library.get(c))


def test_libraries_may_be_mixed_on_one_device(rng):
    torch = frameworks.require("torch")
    q, k, v = inputs(rng)
    out = cuattn.attention(torch.from_numpy(q), k, dlpack.Array(v))
    assert type(out) is torch.Tensor
    np.testing.assert_array_equal(out.numpy(), cuattn.attention(q, k, v))


def test_numpy_arrays_are_read_where_they_are():
    q = np.ones((1, 2, 1, 8), np.float32)
    k = np.ones((1, 1 << 20, 1, 8), np.float32)  # 32 MiB
    cuattn.attention(q, k, k)
    tracemalloc.start()
    try:
        cuattn.attention(q, k, k)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_read_only_and_strided_inputs_are_taken(rng):
    q, k, v = inputs(rng)
    want = cuattn.attention(q, k, v)
    for array in (q, k, v):
        array.flags.writeable = False
    np.testing.assert_array_equal(cuattn.attention(q, k, v), want)
    q = np.ascontiguousarray(q.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cuattn.attention(q, k, v), want)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    got = cuattn.attention(*heads_first, layout="bhsd")
    np.testing.assert_array_equal(got.transpose(0, 2, 1, 3), want)


def test_a_subclass_of_ndarray_is_an_array(tmp_path, rng):
    q, k, v = inputs(rng)
    mapped = np.memmap(tmp_path / "k", np.float32, "w+", shape=k.shape)
    mapped[...] = k
    np.testing.assert_array_equal(cuattn.attention(q, mapped, v), cuattn.attention(q, k, v))


def test_dlpack_is_asked_with_the_version_and_no_stream_on_the_cpu(rng):
    arrays = [dlpack.Array(x) for x in inputs(rng)]
    cuattn.attention(*arrays, out=np.empty(SHAPE, np.float32))
    for array in arrays:
        assert array.requests == [{"max_version": (1, 1)}]
        assert array.open_exports == 0


def test_an_older_producer_is_asked_again_without_the_version(rng):
    arrays = [dlpack.Array(x, version=(0, 8)) for x in inputs(rng)]
    cuattn.attention(*arrays, out=np.empty(SHAPE, np.float32))
    assert [array.requests for array in arrays] == [[{"max_version": (1, 1)}, {}]] * 3
    gc.collect()
    assert [array.open_exports for array in arrays] == [0] * 3  # each deleter has run once


def test_byte_offset_is_honoured(rng):
    q, k, v = inputs(rng)
    shifted = dlpack.Array(k, byte_offset=64)
    np.testing.assert_array_equal(cuattn.attention(q, shifted, v), cuattn.attention(q, k, v))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (dlpack.zeros(SHAPE, flags=dlpack.IS_COPIED), "k is exported as a copy"),
        (dlpack.zeros(SHAPE, version=(2, 0)), "k is exported as DLPack 2.x"),
        (dlpack.zeros(SHAPE, device=(10, 0)), "k must be on the CPU or a CUDA device"),
        (dlpack.zeros((1,) * 7), "k must have at most 6 axes, got 7; reshape it"),
    ],
)
def test_refused_exports_are_given_back(array, message, rng):
    q, _, v = inputs(rng)
    with pytest.raises(ValueError, match=f"attention: {message}"):
        cuattn.attention(q, array, v)
    gc.collect()
    assert len(array.requests) == 1
    assert array.open_exports == 0


def test_an_error_of_the_producer_names_the_argument(rng):
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("no memory here")

    q, _, v = inputs(rng)
    with pytest.raises(
        ValueError, match=r"attention: k must be a dense array.*no memory here"
    ) as e:
        cuattn.attention(q, Broken(), v)
    assert isinstance(e.value.__cause__, BufferError)


NOT_ARRAYS = [None, 3, 2.5, "q", [1.0], (1.0,), {}, np.float32(1), memoryview(b"12345678")]


@pytest.mark.parametrize("value", NOT_ARRAYS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_no_array_is_a_type_error(value, position, rng):
    arrays = inputs(rng)
    arrays[position] = value
    name = f"attention: {'qkv'[position]} must be an array .*, got {type(value).__name__}"
    with pytest.raises(TypeError, match=name):
        cuattn.attention(*arrays)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: np.ma.array(x), TypeError, "k must be a plain array, got a numpy MaskedArray"),
        (lambda x: x.astype(object), ValueError, "k must hold numbers, got dtype object; cast it"),
        (lambda x: x.astype(">f4"), ValueError, "k must be in native byte order"),
        (lambda x: x.astype(np.float64), ValueError, "k must be float32 like q, got float64"),
        (lambda x: x.astype(ml_dtypes.float8_e5m2), ValueError, "k must be float32 like q, got f"),
        (lambda x: x.astype(ml_dtypes.int4), ValueError, "k must be float32, float16 or bfloat16"),
        (
            lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 4, 32), (4, 6, 4, 4)),
            ValueError,
            "k must have strides that are multiples of its item size 4, got 6 bytes on axis 1",
        ),
    ],
)
def test_numpy_arrays_that_no_kernel_reads(make, error, message, rng):
    q, k, v = inputs(rng)
    with pytest.raises(error, match=f"attention: {message}"):
        cuattn.attention(q, make(k), v)


def test_outputs_must_be_writable(rng):
    arrays = inputs(rng)
    out = np.zeros(SHAPE, np.float32)
    out.flags.writeable = False
    for read_only in (out, dlpack.zeros(SHAPE, flags=dlpack.READ_ONLY)):
        with pytest.raises(ValueError, match="attention: out is read-only"):
            cuattn.attention(*arrays, out=read_only)
    zero_stride = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), SHAPE, (0, 0, 0, 4))
    with pytest.raises(ValueError, match="attention: out is written, so no stride may be zero"):
        cuattn.attention(*arrays, out=zero_stride)


def test_a_library_that_cannot_allocate_needs_out(rng):
    arrays = [dlpack.Array(x) for x in inputs(rng)]
    with pytest.raises(ValueError, match=r"attention: out must be given.*shape \(2, 9, 4, 32\)"):
        cuattn.attention(*arrays)
    assert [array.open_exports for array in arrays] == [0] * 3


def test_the_array_api_allocates_for_libraries_without_a_rule_of_their_own(rng):
    class WithNamespace(dlpack.Array):
        device = "cpu"

        def __array_namespace__(self):
            return np

    arrays = inputs(rng)
    out = cuattn.attention(WithNamespace(arrays[0]), *arrays[1:])
    np.testing.assert_array_equal(out, cuattn.attention(*arrays))


def test_streams_are_refused_on_the_cpu(rng):
    arrays = inputs(rng)
    with pytest.raises(ValueError, match="attention: stream must be None for arrays on the CPU"):
        cuattn.attention(*arrays, stream=0)
    for stream in ("0", 1.5, True, object()):
        with pytest.raises(TypeError, match="attention: stream must be None, an integer or an obj"):
            cuattn.attention(*arrays, stream=stream)
    with pytest.raises(ValueError, match="attention: stream must be a stream handle"):
        cuattn.attention(*arrays, stream=-1)


def test_workspace_is_lent_or_refused(rng):
    arrays = inputs(rng)
    plan = cuattn.explain("attention", *arrays, backend="naive")
    assert plan.workspace_bytes > 0
    lent = np.empty(plan.workspace_bytes, np.uint8)
    want = cuattn.attention(*arrays, backend="naive")
    got = cuattn.attention(*arrays, backend="naive", workspace=lent)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(MemoryError, match=f"workspace must hold {plan.workspace_bytes} bytes"):
        cuattn.attention(*arrays, backend="naive", workspace=lent[:-64])
    memory = np.empty(1 << 16, np.uint8)
    overlapping = np.lib.stride_tricks.as_strided(memory, (256, 256), (1, 1))
    shared = np.lib.stride_tricks.as_strided(memory, (256, 256), (0, 1))
    for gaps in (memory.reshape(256, 256)[:, ::2], memory[::-1], overlapping, shared):
        with pytest.raises(ValueError, match="attention: workspace must be contiguous"):
            cuattn.attention(*arrays, backend="naive", workspace=gaps)
    elsewhere = dlpack.zeros((1 << 16,), np.uint8, device=(dlpack.CUDA, 0))
    with pytest.raises(ValueError, match="attention: workspace must be on the device of q"):
        cuattn.attention(*arrays, backend="naive", workspace=elsewhere)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 2)])
@pytest.mark.parametrize("place", ["numpy", "torch"])
def test_a_workspace_of_no_bytes_is_one(place, shape, rng):
    """As explain sizes it for a kernel that needs none; numpy gives such arrays strides of 0."""
    library = frameworks.CPU[place]()
    arrays = [library.put(x) for x in inputs(rng)]
    lent = library.put(np.empty(shape, np.float32))
    assert cuattn.explain("attention", *arrays).workspace_bytes == 0
    got = cuattn.attention(*arrays, workspace=lent)
    np.testing.assert_array_equal(library.get(got), library.get(cuattn.attention(*arrays)))
    with pytest.raises(MemoryError, match="workspace must hold"):
        cuattn.attention(*arrays, backend="naive", workspace=lent)


@pytest.mark.parametrize("backend", ["auto", "naive"])
def test_a_thousand_calls_keep_nothing(cpu_library, backend, rng):
    arrays = [cpu_library.put(x) for x in inputs(rng)]

    def refused():
        for wrong in ({"scale": float("nan")}, {"layout": "x"}, {"bias": 3}, {"window": 1}):
            with pytest.raises((ValueError, TypeError)):
                cuattn.attention(*arrays, **wrong)

    def calls(count):
        for i in range(count):
            attend(cpu_library, arrays, backend=backend)
            if i % 20 == 0:
                refused()
        for array in arrays:
            if isinstance(array, dlpack.Array):
                array.requests.clear()
        gc.collect()

    calls(50)
    counts = [sys.getrefcount(x) for x in arrays]
    before = resident_bytes()
    calls(1000)
    assert [sys.getrefcount(x) for x in arrays] == counts
    assert resident_bytes() - before < 64 << 20


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_threads_do_not_disturb_each_other(cpu_library, rng):
    jobs = [[cpu_library.put(x) for x in inputs(rng)] for _ in range(8)]
    wants = [cpu_library.get(attend(cpu_library, job)[0]) for job in jobs]
    wrong = []

    def work(job, want):
        for _ in range(60):
            if not np.array_equal(cpu_library.get(attend(cpu_library, job)[0]), want):
                wrong.append(want)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_result_outlives_its_inputs(cpu_library, rng):
    values = inputs(rng)
    out, lse = attend(cpu_library, [cpu_library.put(x) for x in values])
    gc.collect()
    want = cuattn.attention(*values, return_lse=True)
    np.testing.assert_array_equal(cpu_library.get(out), want[0])
    np.testing.assert_array_equal(cpu_library.get(lse), want[1])
