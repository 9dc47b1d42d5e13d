# SPDX-License-Identifier: Apache-2.0
"""Arrays of every library through the functions of the paged cache: the same bits, in place, with
nothing left behind. JAX: test_jax.py.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import cases
import cuattn
import dlpack
import frameworks
import harness
import paged_cases
from cache_cases import LAYOUTS
from paged_cases import PagedCase

I32, I64 = np.int32, np.int64
CASE = PagedCase(lens=(40, 1, 0, 33), q_len=2)
DECODE = dataclasses.replace(CASE, q_len=None)
BLOCK_MAPPING = np.array([[0, 3], [2, 1]], I64)
LIBRARIES = {name: make for name, make in frameworks.CPU.items() if name != "jax"}


class ForeignCuda(frameworks.Torch):
    """torch's memory behind `__dlpack__` alone."""

    dtypes = (np.float32, np.float16)

    def __init__(self):
        super().__init__("cuda")

    class Array(frameworks.OnlyDlpack):
        pass

    def put(self, values):
        return self.Array(super().put(values))

    def get(self, array):
        return super().get(array.tensor)


ON_CUDA = {**frameworks.CUDA, "dlpack-cuda": ForeignCuda}


@pytest.fixture(params=[*LIBRARIES, *(pytest.param(x, marks=pytest.mark.gpu) for x in ON_CUDA)])
def library(request):
    return (LIBRARIES | ON_CUDA)[request.param]()


def is_cuda(library):
    return isinstance(library, frameworks.Cupy) or getattr(library, "device", "cpu") == "cuda"


def is_foreign(library):
    return isinstance(library, (frameworks.Foreign, ForeignCuda))


def native(library):
    """The library whose results count: numpy, and torch on CUDA."""
    return frameworks.Torch("cuda") if is_cuda(library) else frameworks.Numpy()


def stream_of(library):
    """What objects that know nothing but DLPack must be given on CUDA."""
    return {"stream": 0} if isinstance(library, ForeignCuda) else {}


class Call:
    """One call with arrays of one library; every output is given, and begins as 0xFF bytes."""

    def __init__(self, library):
        self.library, self.arrays = library, []
        self.options = stream_of(library)

    def put(self, values):
        self.arrays.append(self.library.put(np.asarray(values)))
        return self.arrays[-1]

    def output(self, shape, dtype):
        return self.put(
            np.full(np.prod([*shape, np.dtype(dtype).itemsize]), 0xFF, np.uint8)
            .view(dtype)
            .reshape(shape)
        )

    def held(self, array):
        """What an array holds, as numpy."""
        if is_cuda(self.library):
            frameworks.require("torch").cuda.synchronize()
        return array.values if isinstance(array, dlpack.Array) else self.library.get(array)


def paged_arrays(call, problem):
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    return [call.put(problem.arrays[name]) for name in names]


def workspace_of(call, problem, options):
    """What objects that know nothing but DLPack must be given."""
    if not is_foreign(call.library):
        return {}
    like = Call(native(call.library))
    plan = {"plan": like.put(call.held(options["plan"]))} if options else {}
    size = cuattn.explain(
        "paged_attention", *paged_arrays(like, problem), **problem.options, **plan
    ).workspace_bytes
    return {"workspace": call.output((size,), np.uint8)}


def attend(call, problem, **options):
    q = problem.arrays["q"]
    lse_shape = (q.shape[0], q.shape[-2], *q.shape[1:-2])
    out, lse = call.output(q.shape, q.dtype), call.output(lse_shape, np.float32)
    got = cuattn.paged_attention(
        *paged_arrays(call, problem),
        **problem.options,
        **options,
        **workspace_of(call, problem, options),
        **call.options,
        out=out,
        lse_out=lse,
    )
    assert got[0] is out
    assert got[1] is lse
    return out, lse


def geometry(problem):
    case = problem.case
    return {
        "num_heads_q": case.num_heads_q,
        "num_heads_kv": case.num_heads_kv,
        "head_dim": case.head_dim,
        "block_size": case.block_size,
        "q_len": case.q_len or 1,
        "dtype": case.dtype,
        "kv_layout": case.kv_layout,
        "kv_dtype": problem.options.get("kv_dtype"),
    }


def attend_by_a_plan(call, problem):
    lens = [problem.arrays[name] for name in ("block_tables", "context_lens")]
    like = native(call.library)
    size = cuattn.paged_plan(*map(like.put, lens), **geometry(problem)).shape
    plan = call.output(size, I32)
    got = cuattn.paged_plan(*map(call.put, lens), **geometry(problem), **call.options, out=plan)
    assert got is plan
    return plan, *attend(call, problem, plan=plan)


def attend_as_v1(call, problem):
    out = call.output(problem.arrays["q"].shape, problem.arrays["q"].dtype)
    layout = problem.case.kv_layout
    got = cuattn.paged_attention_v1(
        out, *paged_arrays(call, problem), 0.125, kv_layout=layout, **call.options
    )
    assert got is out
    return (out,)


def attend_as_v2(call, problem):
    q, layout = problem.arrays["q"], problem.case.kv_layout
    capacity = problem.arrays["block_tables"].shape[1] * problem.case.block_size
    shape = (*q.shape[:2], -(-capacity // 256))
    out = call.output(q.shape, q.dtype)
    buffers = {
        "exp_sums": call.output(shape, np.float32),
        "max_logits": call.output(shape, np.float32),
        "tmp_out": call.output((*shape, q.shape[2]), q.dtype),
    }
    got = cuattn.paged_attention_v2(
        out,
        *paged_arrays(call, problem),
        0.125,
        partition_size=256,
        kv_layout=layout,
        **buffers,
        **call.options,
    )
    assert got is out
    return out, *buffers.values()


def write_rows(call, problem):
    """One row a sequence that has a context, to where its newest token lies."""
    case, arrays = problem.case, problem.arrays
    k, v = (arrays["q"][..., i : i + case.num_heads_kv, :] for i in (0, 2))
    slots = np.array([
        -1 if n == 0 else int(row[(n - 1) // case.block_size]) * case.block_size
        + (n - 1) % case.block_size
        for row, n in zip(arrays["block_tables"], case.lens, strict=True)
    ], I64)  # fmt: skip
    caches = [call.put(arrays[name]) for name in ("k_cache", "v_cache")]
    got = cuattn.reshape_and_cache(
        *(call.put(np.ascontiguousarray(x)) for x in (k, v)),
        *caches,
        call.put(slots),
        kv_layout=case.kv_layout,
        **call.options,
    )
    assert got[0] is caches[0]
    assert got[1] is caches[1]
    return caches


def gather(call, problem):
    case, arrays = problem.case, problem.arrays
    ends = np.concatenate([[0], np.cumsum(case.lens)]).astype(I32)
    shape = (ends[-1], case.num_heads_kv, case.head_dim)
    outs = [call.output(shape, arrays["k_cache"].dtype) for _ in "kv"]
    caches = [call.put(arrays[name]) for name in ("k_cache", "v_cache")]
    got = cuattn.gather_cache(
        *caches,
        call.put(arrays["block_tables"]),
        call.put(ends),
        kv_layout=case.kv_layout,
        k_out=outs[0],
        v_out=outs[1],
        **call.options,
    )
    assert got[0] is outs[0]
    assert got[1] is outs[1]
    return outs


def copy(call, problem):
    caches = [call.put(problem.arrays[name]) for name in ("k_cache", "v_cache")]
    cuattn.copy_blocks(*caches, BLOCK_MAPPING, **call.options)
    cuattn.copy_blocks(caches[:1], caches[1:], call.put(np.array([[4, 0]], I64)), **call.options)
    return caches


def swap(call, problem):
    """Out to an array of the host and back to other blocks."""
    cache = call.put(problem.arrays["k_cache"])
    host = np.zeros_like(problem.arrays["k_cache"][:2])
    cuattn.swap_blocks(cache, host, np.array([[3, 0], [1, 1]], I64), **call.options)
    call.held(cache)  # waits: the host array is read next
    assert host.view(np.uint8).any()
    cuattn.swap_blocks([host], [cache], np.array([[0, 2], [1, 4]], I64), **call.options)
    call.held(cache)  # the host array lives as long
    return (cache,)


def merge(call, problem):
    outs = problem.arrays["q"]
    lses = np.arange(outs[..., 0].size, dtype=np.float32).reshape(outs.shape[:-1]) % 7
    out, lse = call.output(outs.shape, outs.dtype), call.output(lses.shape, np.float32)
    parts = [call.put(x) for x in (outs, lses, outs[::-1].copy(), lses[::-1].copy())]
    got = cuattn.merge_states(*parts, layout="nhd", out=out, lse_out=lse, **call.options)
    assert got[0] is out
    assert got[1] is lse
    return out, lse


OPERATIONS = {
    "paged_attention": (attend, CASE),
    "paged_plan": (attend_by_a_plan, CASE),
    "paged_attention_v1": (attend_as_v1, DECODE),
    "paged_attention_v2": (attend_as_v2, DECODE),
    "reshape_and_cache": (write_rows, DECODE),
    "gather_cache": (gather, DECODE),
    "copy_blocks": (copy, DECODE),
    "swap_blocks": (swap, DECODE),
    "merge_states": (merge, DECODE),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def outcome(library, operation, problem):
    """The bytes of all outputs, and the arrays that were handed over."""
    call = Call(library)
    results = [np.array(call.held(x)) for x in operation(call, problem)]
    return [harness.bits(x) for x in results], call.arrays


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


# Views and read-only arrays


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_caches_may_be_halves_of_one_tensor(device, kv_layout, rng):
    """[num_blocks, 2, ...]: what is written to one half leaves the other as it was."""
    case = dataclasses.replace(DECODE, kv_layout=kv_layout)
    problem = paged_cases.make(case, rng)
    arrays, arena = problem.arrays, harness.Arena(device)
    k_cache, v_cache = arrays["k_cache"], arrays["v_cache"]
    both = arena.output((len(v_cache), 2, *v_cache.shape[1:]), v_cache.dtype)
    k_half, v_half = both[:, 0].reshape(k_cache.shape), both[:, 1]
    device.write(k_half, k_cache)
    device.write(v_half, v_cache)
    # That k_half is a view, in the layout where it has another shape than v_half, too:
    assert np.array_equal(
        harness.bits(device.numpy(both[:, 0])), harness.bits(k_cache.reshape(v_cache.shape))
    )
    rest = {n: arena.put(arrays[n], name=n, align=4) for n in ("block_tables", "context_lens")}
    q = arena.put(arrays["q"], name="q")

    out, lse = cuattn.paged_attention(
        q, k_half, v_half, *rest.values(), kv_layout=kv_layout, return_lse=True
    )
    want, want_lse = paged_cases.run(device, "auto", problem)
    assert np.array_equal(harness.bits(device.numpy(out)), harness.bits(want))
    assert np.array_equal(harness.bits(device.numpy(lse)), harness.bits(want_lse))
    for version in (cuattn.paged_attention_v1, cuattn.paged_attention_v2):
        out = arena.output(arrays["q"].shape, arrays["q"].dtype)
        version(out, q, k_half, v_half, *rest.values(), 0.125, kv_layout=kv_layout)
        number = int(version.__name__[-1])
        want = paged_cases.run_version(number, device, problem)
        assert np.array_equal(harness.bits(device.numpy(out)), harness.bits(want))

    ends = np.array([0, *np.cumsum(case.lens)], I32)
    gathered = cuattn.gather_cache(
        k_half, v_half, rest["block_tables"], arena.put(ends, align=4), kv_layout=kv_layout
    )
    like = frameworks.Torch("cuda") if device.name == "cuda" else frameworks.Numpy()
    expected = Call(like)
    for got, part in zip(gathered, gather(expected, problem), strict=True):
        assert np.array_equal(harness.bits(device.numpy(got)), harness.bits(expected.held(part)))

    cuattn.copy_blocks(k_half, None, BLOCK_MAPPING)
    k = k_cache.copy()
    k[BLOCK_MAPPING[:, 1]] = k_cache[BLOCK_MAPPING[:, 0]]
    device.synchronize()
    assert np.array_equal(harness.bits(device.numpy(k_half)), harness.bits(k))
    assert np.array_equal(harness.bits(device.numpy(v_half)), harness.bits(v_cache))
    host = np.ascontiguousarray(k_cache[::-1])
    cuattn.swap_blocks(host, k_half, np.array([[0, 2]], I64))
    k[2] = host[0]
    problem.arrays["k_cache"] = k
    expected = Call(like)
    write_to = [np.array(expected.held(x)) for x in write_rows(expected, problem)]
    rows, slots = expected.arrays[2:4], expected.arrays[4]
    cuattn.reshape_and_cache(
        *(arena.put(expected.held(x)) for x in rows),
        k_half,
        v_half,
        arena.put(expected.held(slots), align=8),
        kv_layout=kv_layout,
    )
    device.synchronize()
    for got, want in zip((k_half, v_half), write_to, strict=True):
        assert np.array_equal(harness.bits(device.numpy(got)), harness.bits(want))
    arena.verify()


def frozen(values):
    values = np.array(values)
    values.flags.writeable = False
    return values


class Frozen(frameworks.Numpy):
    """Inputs that cannot be written; outputs are made by Call.output."""

    def put(self, values):
        return frozen(values)


class FrozenCall(Call):
    def output(self, shape, dtype):
        return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("reshape_and_cache", "copy_blocks")]
)
def test_inputs_may_be_read_only(name, rng):
    operation, case = OPERATIONS[name]
    problem = paged_cases.make(case, rng)
    if name == "swap_blocks":  # its destination is written
        cache, host = frozen(problem.arrays["k_cache"]), np.zeros_like(problem.arrays["k_cache"])
        cuattn.swap_blocks(cache, host, frozen(BLOCK_MAPPING))
        got, want = host[BLOCK_MAPPING[:, 1]], cache[BLOCK_MAPPING[:, 0]]
        np.testing.assert_array_equal(harness.bits(got), harness.bits(want))
        return
    want, got = (
        [*operation(call, problem)]
        for call in (FrozenCall(frameworks.Numpy()), FrozenCall(Frozen()))
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(harness.bits(a), harness.bits(b))


READ_ONLY = {
    "numpy": frozen,
    "dlpack": lambda x: dlpack.Array(np.array(x), flags=dlpack.READ_ONLY),
}


def writing_calls(problem):
    """The arguments of each function, and those that it writes."""
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    q, k_cache, v_cache, tables, lens = arrays = [problem.arrays[name] for name in names]
    rows, ends = np.zeros((4, 2, 64), q.dtype), np.array([0, *np.cumsum(DECODE.lens)], I32)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    like_q, lse = np.zeros_like(q), np.zeros((4, 8), np.float32)
    version = dict(zip(("q", "key_cache", "value_cache", *names[3:]), arrays, strict=True))
    version |= {"out": like_q, "scale": 0.125, "kv_layout": "nhd"}
    buffers = {"exp_sums": lse[..., None], "max_logits": lse[..., None] + 1}
    buffers["tmp_out"] = like_q[:, :, None] + 1
    packed = np.zeros((2, ends[-1], 2, 64), q.dtype)
    lists = {"k_caches": [k_cache], "v_caches": [v_cache], "block_mapping": BLOCK_MAPPING}
    plan = cuattn.paged_plan(tables, lens, **geometry(problem))
    parts = {"out_a": q, "lse_a": lse, "out_b": q, "lse_b": lse, "out": like_q, "lse_out": lse + 1}
    return {
        "reshape_and_cache": ({"k": rows, "v": rows, **caches, "slot_mapping": np.arange(4)},
            ("k_cache", "v_cache")),
        "gather_cache": ({**caches, "block_tables": tables, "cu_seqlens": ends,
            "k_out": packed[0], "v_out": packed[1]}, ("k_out", "v_out")),
        "copy_blocks": (lists, ("k_caches", "v_caches")),
        "swap_blocks": ({"src": [v_cache], "dst": [k_cache], "block_mapping": BLOCK_MAPPING},
            ("dst",)),
        "paged_attention": ({**dict(zip(names, arrays, strict=True)), "out": like_q,
            "lse_out": lse}, ("out", "lse_out")),
        "paged_plan": ({"block_tables": tables, "context_lens": lens, **geometry(problem),
            "out": plan}, ("out",)),
        "paged_attention_v1": (version, ("out",)),
        "paged_attention_v2": ({**version, **buffers}, ("out", *buffers)),
        "merge_states": (parts, ("out", "lse_out")),
    }  # fmt: skip


@pytest.mark.parametrize("make", READ_ONLY.values(), ids=READ_ONLY)
@every_operation
def test_what_is_written_must_be_writable(name, make, rng):
    """Caches, buffers, plans and outputs; and a refused call changes none of the others."""
    given, written = writing_calls(paged_cases.make(DECODE, rng))[name]
    for output in written:
        arrays = {
            n: [np.array(x) for x in value] if isinstance(value, list) else np.array(value)
            if isinstance(value, np.ndarray) else value
            for n, value in given.items()
        }  # fmt: skip
        in_list = isinstance(given[output], list)
        refused = [make(given[output][0])] if in_list else make(given[output])
        message = f"{name}: {output}{'[0]' * in_list} is read-only; pass a writable array"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            getattr(cuattn, name)(**{**arrays, output: refused})
        for other, value in given.items():
            pairs = zip(value, arrays[other], strict=True) if isinstance(value, list) else []
            if isinstance(value, np.ndarray):
                pairs = [(value, arrays[other])]
            for before, after in pairs:
                assert np.array_equal(harness.bits(before), harness.bits(after)), other
        getattr(cuattn, name)(**arrays)  # which is no mistake of the call itself
