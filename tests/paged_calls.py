# SPDX-License-Identifier: Apache-2.0
"""A call of each function of the paged cache with arrays of any library; every output is given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cuattn
import dlpack
import frameworks
import harness
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
