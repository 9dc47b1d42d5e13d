# SPDX-License-Identifier: Apache-2.0
"""Cases of paged attention: what varies, random inputs with poison in all that must not matter, and
how a call is run and judged. Next: test_paged.py.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import harness
import reference

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CUDA_BACKENDS = ("auto", "sm90", "sm80", "simt")
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
HEADS = [(8, 2), (4, 4), (8, 1), (6, 2), (32, 8)]
HALF = ("float16", "bfloat16")
# What a table holds past the context: ids that exist, that do not, and the largest there are.
JUNK = (0, -1, 2147480000, 2**31 - 1, -(2**31), -123456)


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """One call; the data comes from a seed."""

    dtype: str = "float16"
    fp8: bool = False  # caches of float8_e4m3fn
    kv_layout: str = "nhd"
    block_size: int = 16
    head_dim: int = 64
    num_heads_q: int = 8
    num_heads_kv: int = 2
    q_len: int | None = None  # None: decode, q has no axis of queries
    lens: tuple = (37, 1, 0, 130)
    causal: bool = True
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: str = "none"  # or "head", "batch"
    sinks: bool = False
    scales: str = "none"  # or "float", "head", "batch"
    options: tuple = ()  # more keywords, as pairs

    def __str__(self):
        changed = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return ",".join(changed) or "default"


@dataclasses.dataclass
class PagedProblem:
    """Inputs as numpy arrays; caches of bytes for float8."""

    case: PagedCase
    arrays: dict
    options: dict

    def caches(self):
        """The caches with their dtype."""
        k, v = self.arrays["k_cache"], self.arrays["v_cache"]
        return (k.view(E4M3), v.view(E4M3)) if self.case.fp8 else (k, v)

    def reference(self, rounded_to=None):
        """Out and lse of the oracle, or of the plain formula in a dtype."""
        arrays = {k: v for k, v in self.arrays.items() if k not in ("k_cache", "v_cache")}
        positional = (arrays.pop("q"), *self.caches(), arrays.pop("block_tables"))
        options = {
            k: v
            for k, v in self.options.items()
            if k not in ("kv_dtype", "num_splits", "batch_invariant")
        }
        return reference.paged_attention(
            *positional, arrays.pop("context_lens"), **arrays, **options, rounded_to=rounded_to
        )


def make(case, rng):
    """Random inputs of `case`, with NaN in every slot that no sequence owns."""
    dtype = E4M3 if case.fp8 else cases.DTYPES[case.dtype]
    size, heads, dim = case.block_size, case.num_heads_kv, case.head_dim
    blocks_of = [-(-n // size) for n in case.lens]
    width = max(blocks_of, default=0) + 2
    num_blocks = sum(blocks_of) + 3
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = rng.choice(np.array(JUNK, np.int64), (len(case.lens), width)).astype(np.int32)
    used = np.zeros((num_blocks, size), bool)
    for b, (count, length) in enumerate(zip(blocks_of, case.lens, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[b, :count] = mine
        for i, block in enumerate(mine):
            used[block, : min(size, length - i * size)] = True
    caches = cases.normals(rng, (2, num_blocks, size, heads, dim))
    caches = np.where(used[:, :, None, None], caches, np.nan).astype(dtype)
    q_shape = (len(case.lens), *([] if case.q_len is None else [case.q_len]))
    q = rng.standard_normal((*q_shape, case.num_heads_q, dim), np.float32)
    arrays = {
        "q": q.astype(cases.DTYPES[case.dtype]),
        "k_cache": paged(caches[0], case.kv_layout, True),
        "v_cache": paged(caches[1], case.kv_layout, False),
        "block_tables": tables,
        "context_lens": np.array(case.lens, np.int32),
    }
    options = {
        "kv_layout": case.kv_layout,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        **dict(case.options),
    }
    if case.fp8:
        arrays["k_cache"], arrays["v_cache"] = (
            arrays[name].view(np.uint8) for name in ("k_cache", "v_cache")
        )
        options["kv_dtype"] = "float8_e4m3fn"
    if case.alibi != "none":
        shape = (len(case.lens),) if case.alibi == "batch" else ()
        arrays["alibi_slopes"] = rng.uniform(0, 0.3, (*shape, case.num_heads_q)).astype(np.float32)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.num_heads_q).astype(np.float32)
    for name in ("k_scale", "v_scale"):
        if case.scales == "float":
            options[name] = float(rng.uniform(0.5, 2))
        elif case.scales != "none":
            shape = (len(case.lens),) if case.scales == "batch" else ()
            arrays[name] = rng.uniform(0.5, 2, (*shape, heads)).astype(np.float32)
    return PagedProblem(case, arrays, options)


def paged(nhd, kv_layout, is_k):
    """[num_blocks, block_size, num_heads_kv, head_dim] in another layout."""
    if kv_layout == "nhd":
        return np.ascontiguousarray(nhd)
    if kv_layout == "hnd":
        return np.ascontiguousarray(nhd.transpose(0, 2, 1, 3))
    hds = nhd.transpose(0, 2, 3, 1)  # [num_blocks, heads, head_dim, block_size]
    if not is_k:
        return np.ascontiguousarray(hds)
    x = 16 // nhd.dtype.itemsize
    blocks, heads, dim, size = hds.shape
    return np.ascontiguousarray(
        hds.reshape(blocks, heads, dim // x, x, size).transpose(0, 1, 2, 4, 3)
    )


def place(arena, problem, storage=None, given=None):
    """The arrays of a problem on the arena's device, by name; `given` are there already."""
    storage = storage or {}
    align = {"q": 16, "k_cache": 16, "v_cache": 16}
    placed = {
        name: arena.put(values, storage.get(name, "contiguous"), name, align.get(name, 4))
        for name, values in problem.arrays.items()
        if name not in (given or {})
    }
    return {**placed, **(given or {})}


def serves(backend, case):
    """Whether a rung takes a case; "auto" and "cpu" take all, the others must refuse the rest."""
    if backend == "sm90":
        fits = case.block_size % 8 == 0 and case.head_dim >= 64 and case.kv_layout != "vllm"
        return case.dtype != "float32" and not case.fp8 and fits
    if backend == "simt":
        return case.dtype == "float32"
    return backend != "sm80" or case.dtype != "float32"


def run(device, backend, problem, give_out=False, storage=None, given=None, **more):
    """Call paged_attention; out and lse as numpy arrays, every buffer checked. Skips the test where
    the rung refuses the case, as it must.
    """
    case, arena = problem.case, harness.Arena(device)
    placed = place(arena, problem, storage, given)
    q = problem.arrays["q"]
    keywords = {**problem.options, **more, "backend": backend, "return_lse": True}
    if give_out:
        keywords["out"] = arena.output(q.shape, q.dtype, name="out")
        lse_shape = (q.shape[0], q.shape[-2], *q.shape[1:-2])
        keywords["lse_out"] = arena.output(lse_shape, np.float32, name="lse_out", align=4)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    positional = [placed.pop(name) for name in names]
    if not serves(backend, case):
        refusal = f"paged_attention: backend '{backend}' cannot run this call"
        with pytest.raises(NotImplementedError, match=f"^{refusal}"):
            cuattn.paged_attention(*positional, **placed, **keywords)
        pytest.skip(f"refused: {refusal}")
    out, lse = cuattn.paged_attention(*positional, **placed, **keywords)
    device.synchronize()
    if give_out:
        assert out is keywords["out"]
        assert lse is keywords["lse_out"]
    assert device.is_array(out)
    assert device.is_array(lse)
    arena.verify()
    return device.numpy(out), device.numpy(lse)


def plan_of(device, backend, problem, out=None):
    """The plan of a problem, on its device."""
    case, arena = problem.case, harness.Arena(device)
    placed = [arena.put(problem.arrays[n], name=n) for n in ("block_tables", "context_lens")]
    return cuattn.paged_plan(
        *placed,
        num_heads_q=case.num_heads_q,
        num_heads_kv=case.num_heads_kv,
        head_dim=case.head_dim,
        block_size=case.block_size,
        q_len=case.q_len or 1,
        dtype=case.dtype,
        kv_layout=case.kv_layout,
        kv_dtype="float8_e4m3fn" if case.fp8 else None,
        causal=case.causal,
        window=case.window,
        backend=backend,
        out=out,
    )


def run_version(version, device, problem, scale=0.125, given=None, **more):
    """Call V1 or V2 into a poisoned out; out as a numpy array."""
    arena = harness.Arena(device)
    placed = place(arena, problem, given=given)
    out = arena.output(problem.arrays["q"].shape, problem.arrays["q"].dtype, name="out")
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    function = cuattn.paged_attention_v1 if version == 1 else cuattn.paged_attention_v2
    options = {k: problem.options[k] for k in ("k_scale", "v_scale") if k in problem.options}
    positional = [placed.pop(name) for name in names]
    if problem.case.fp8:  # the caches say so themselves
        positional[1:3] = (as_float8(device, x) for x in positional[1:3])
    returned = function(
        out, *positional, scale, kv_layout=problem.case.kv_layout, **placed, **options, **more
    )
    device.synchronize()
    assert returned is out
    arena.verify()
    return device.numpy(out)


def as_float8(device, array):
    is_torch = hasattr(device, "torch_dtype")
    return array.view(device.torch_dtype(E4M3) if is_torch else E4M3)


def judge(problem, out, lse):
    """The tolerance rule."""
    expected, expected_lse = problem.reference()
    plain, plain_lse = problem.reference(cases.DTYPES[problem.case.dtype])
    cases.check_lse(lse, expected_lse, plain_lse)
    cases.check(out, expected, plain, problem.case.dtype)


def assert_case(device, backend, case, rng, small=None, **more):
    """The library against the reference for one case; `small` is that of assert_by_draws()."""

    def attempt():
        problem = make(case, rng)
        judge(problem, *run(device, backend, problem, **more))

    harness.assert_by_draws(case.dtype, attempt, small)
