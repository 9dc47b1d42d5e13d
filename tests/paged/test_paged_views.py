# SPDX-License-Identifier: Apache-2.0
"""Views and read-only arrays through the functions of the paged cache."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import cuattn
import dlpack
import frameworks
import harness
import paged_cases
from cache_cases import LAYOUTS
from paged_calls import (
    BLOCK_MAPPING,
    DECODE,
    I32,
    I64,
    OPERATIONS,
    Call,
    every_operation,
    gather,
    geometry,
    write_rows,
)


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
