# SPDX-License-Identifier: Apache-2.0
"""cascade_attention against float64 attention over prefix and pages together."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import dlpack
import frameworks
import harness
import paged_cases
import reference
from cuattn import _arrays
from paged_cases import PagedCase

CASES = [
    PagedCase(),
    PagedCase(dtype="float32", lens=(5, 100, 33)),
    PagedCase(dtype="bfloat16", q_len=3, lens=(40, 3, 9)),
    PagedCase(kv_layout="vllm", sinks=True, head_dim=128, lens=(70, 1)),
    PagedCase(q_len=2, sinks=True, softcap=4.0, lens=(16, 17, 200), num_heads_q=2),
    PagedCase(q_len=4, causal=False, kv_layout="hnd", lens=(16, 4)),
    PagedCase(fp8=True, scales="head", lens=(16, 1, 0, 65)),
    PagedCase(q_len=3, lens=(0, 1, 2, 3, 40)),  # fewer own tokens than queries
    PagedCase(options=(("scale", 0.3), ("num_splits", 2), ("batch_invariant", False))),
    PagedCase(options=(("batch_invariant", True),), lens=(300, 2)),
    PagedCase(window=(60, -1)),
    PagedCase(window=(0, 0), lens=(5, 0, 1)),
    PagedCase(window=(2**40, -1), lens=(3, 20)),
    PagedCase(dtype="float32", q_len=3, window=(25, 0), lens=(0, 1, 2, 9, 20, 40)),
    PagedCase(q_len=4, causal=False, window=(90, 2), lens=(16, 4, 60)),
    PagedCase(dtype="bfloat16", window=(131, -1), kv_layout="vllm", num_heads_q=6, sinks=True),
    PagedCase(alibi="head"),
    PagedCase(alibi="batch", dtype="float32", num_heads_q=6),
    PagedCase(alibi="head", q_len=3, dtype="float32", lens=(0, 1, 2, 9, 40), softcap=3.0),
    PagedCase(alibi="batch", q_len=2, lens=(70,), num_heads_kv=8, kv_layout="hnd"),
    PagedCase(alibi="head", q_len=3, causal=False, lens=(3, 50)),
    PagedCase(alibi="head", window=(50, -1), dtype="float32", sinks=True, lens=(3, 0, 60, 49)),
    PagedCase(alibi="batch", window=(50, 0), q_len=2, lens=(3, 20, 60), scales="head", fp8=True),
    PagedCase(alibi="batch", window=(20, -1), lens=()),
]
CAPTURED = PagedCase(q_len=2, window=(60, -1), alibi="head", lens=(3, 20, 60, 90))
PAGED = ("q", "k_cache", "v_cache", "block_tables", "context_lens")


def whole(problem, shared_k, shared_v, rounded_to=None):
    """The oracle over the keys of the prefix and behind it, in one dense batch.

    Under causal every query is a sequence of its own that ends at it: the end of the prefix, or a
    token behind it.
    """
    case, arrays = problem.case, problem.arrays
    lens, tables = arrays["context_lens"], arrays["block_tables"]
    q = arrays["q"] if case.q_len is not None else arrays["q"][:, None]
    num_seqs, q_len, heads, head_dim = q.shape
    ends = lens
    if case.causal:
        ends = np.maximum(lens[:, None] - q_len + 1 + np.arange(q_len), 0).ravel()
        q = q.reshape(num_seqs * q_len, 1, heads, head_dim)
    repeat = q_len if case.causal else 1
    keys = []
    for cache, is_k, name, shared in zip(
        problem.caches(), (True, False), ("k_scale", "v_scale"), (shared_k, shared_v), strict=True
    ):
        scale = arrays.get(name, problem.options.get(name))
        own = reference._gather(reference.unpaged(cache, case.kv_layout, is_k), tables, lens, scale)
        shared = np.broadcast_to(shared.astype(np.float32), (len(lens), *shared.shape))
        keys.append(np.concatenate([shared, own], axis=1).repeat(repeat, axis=0))
    slopes = arrays.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes.repeat(repeat, axis=0)
    out, lse = reference.attention(
        q,
        *keys,
        causal=case.causal,
        window=case.window,
        scale=problem.options.get("scale"),
        softcap=case.softcap,
        alibi_slopes=slopes,
        sinks=arrays.get("sinks"),
        seqused_k=ends + len(shared_k),
        rounded_to=rounded_to,
    )
    out = out.reshape(arrays["q"].shape)
    if case.causal:
        lse = lse.reshape(num_seqs, q_len, heads).swapaxes(1, 2)
    return (out, lse) if case.q_len is not None else (out, lse[:, :, 0])


def draw(case, shared_len, rng):
    """A problem, and K and V of a prefix."""
    shape = (shared_len, case.num_heads_kv, case.head_dim)
    dtype = cases.DTYPES[case.dtype]
    shared = [rng.standard_normal(shape, np.float32).astype(dtype) for _ in "kv"]
    return paged_cases.make(case, rng), shared


def judge(problem, shared, out, lse):
    expected, expected_lse = whole(problem, *shared)
    plain, plain_lse = whole(problem, *shared, rounded_to=cases.DTYPES[problem.case.dtype])
    cases.check_lse(lse, expected_lse, plain_lse)
    cases.check(out, expected, plain, problem.case.dtype)


@pytest.mark.parametrize("shared_len", [0, 1, 130])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cascade(device, case, shared_len, rng):
    def attempt():
        problem, shared = draw(case, shared_len, rng)
        arena = harness.Arena(device)
        placed = paged_cases.place(arena, problem)
        q, *paged = [placed.pop(name) for name in PAGED]
        prefix = [arena.put(x, name=f"shared_{i}") for i, x in zip("kv", shared, strict=True)]
        out, lse = cuattn.cascade_attention(
            q, *prefix, *paged, **placed, **problem.options, return_lse=True
        )
        device.synchronize()
        assert device.is_array(out)
        arena.verify()
        judge(problem, shared, device.numpy(out), device.numpy(lse))

    harness.assert_by_draws(case.dtype, attempt)


LIBRARIES = {name: frameworks.CPU[name] for name in ("numpy", "torch")}
PLACES = [*LIBRARIES, *(pytest.param(name, marks=pytest.mark.gpu) for name in frameworks.CUDA)]


@pytest.mark.parametrize("place", PLACES)
def test_arrays_of_every_library(place, rng):
    library = {**LIBRARIES, **frameworks.CUDA}[place]()
    case = PagedCase(dtype="float32", alibi="batch", window=(60, 0), q_len=2, lens=(3, 20, 60))
    problem, shared = draw(case, 70, rng)
    arrays = {name: library.put(values) for name, values in problem.arrays.items()}
    q, *paged = [arrays.pop(name) for name in PAGED]
    prefix = [library.put(values) for values in shared]
    out, lse = cuattn.cascade_attention(
        q, *prefix, *paged, **arrays, **problem.options, return_lse=True
    )
    assert library.owns(out)
    assert library.owns(lse)
    judge(problem, shared, library.get(out), library.get(lse))


def test_lengths_and_slopes_of_another_library(rng):
    torch = frameworks.require("torch")
    problem, shared = draw(dataclasses.replace(CAPTURED, dtype="float32"), 70, rng)
    arrays = {name: torch.from_numpy(values) for name, values in problem.arrays.items()}
    arrays |= {name: problem.arrays[name] for name in ("context_lens", "alibi_slopes")}
    q, *paged = [arrays.pop(name) for name in PAGED]
    prefix = [torch.from_numpy(values) for values in shared]
    out, lse = cuattn.cascade_attention(
        q, *prefix, *paged, **arrays, **problem.options, return_lse=True
    )
    judge(problem, shared, out.numpy(), lse.numpy())


def test_keys_before_the_window_are_not_read(device, rng):
    """And so may be anything: only the last left + 1 tokens of the prefix count."""
    case = PagedCase(q_len=2, window=(20, -1), lens=(2, 30), alibi="head")
    problem, shared = draw(case, 90, rng)
    poisoned = [x.copy() for x in shared]
    for x in poisoned:
        x[: 90 - 21] = np.nan
    results = []
    for prefix in (shared, poisoned):
        arena = harness.Arena(device)
        placed = paged_cases.place(arena, problem)
        q, *paged = [placed.pop(name) for name in PAGED]
        prefix = [arena.put(x) for x in prefix]
        out = cuattn.cascade_attention(q, *prefix, *paged, **placed, **problem.options)
        results.append(device.numpy(out).copy())
    assert np.isfinite(results[0].astype(np.float32)).all()
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(lens=(300, 7)),
        PagedCase(window=(60, -1), alibi="head", lens=(30, 7), options=(("num_splits", 3),)),
    ],
    ids=str,
)
def test_lent_workspace_of_the_size_that_explain_says(device, case, rng):
    problem, shared = draw(case, 500, rng)
    arena = harness.Arena(device)
    placed = paged_cases.place(arena, problem)
    q, *paged = [placed.pop(name) for name in PAGED]
    arrays = [q, *[arena.put(x) for x in shared], *paged]
    plan = cuattn.explain("cascade_attention", *arrays, **placed, **problem.options)
    workspace = arena.output((plan.workspace_bytes,), np.uint8, name="workspace", align=256)
    call = functools.partial(cuattn.cascade_attention, *arrays, **placed, **problem.options)
    out, lse = call(workspace=workspace, return_lse=True)
    device.synchronize()
    arena.verify()
    judge(problem, shared, device.numpy(out), device.numpy(lse))
    if plan.workspace_bytes:
        with pytest.raises(MemoryError, match="workspace must hold"):
            call(workspace=workspace[:-1])


def explain(*, q=(4, 32, 128), shared=(8192, 8, 128), **options):
    caches = [(100, 16, *shared[1:])] * 2
    arrays = (q, shared, shared, *caches, (q[0], 32), (q[0],))
    options = {"device": "h100", "dtype": "bfloat16", **options}
    return cuattn.explain("cascade_attention", *arrays, **options)


def test_explain_says_both_parts():
    plan = explain()
    heads = (1, 4, 32, 128), (1, 8192, 8, 128), (1, 8192, 8, 128)
    where = {"device": "h100", "dtype": "bfloat16"}
    prefix = cuattn.explain("attention", *heads, **where)
    pages = cuattn.explain(
        "paged_attention", (4, 32, 128), *[(100, 16, 8, 128)] * 2, (4, 32), (4,), **where
    )
    assert plan.kernel == f"{prefix.kernel} + {pages.kernel}"
    assert plan.workspace_bytes == max(prefix.workspace_bytes, pages.workspace_bytes) > 0
    assert (plan.tile_m, plan.num_splits) == (pages.tile_m, pages.num_splits)
    for part in (prefix, pages):
        assert part.ladder in str(plan)
        assert part.reason in plan.reason
    assert explain(q=(4, 1, 32, 128)).workspace_bytes == plan.workspace_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "prefix, 8192 keys"),
        ({"window": (99, -1)}, "prefix, 100 keys"),
        ({"window": (99, -1)}, "bool bias [1, 1, 4, 100]"),
        ({"window": (10**6, -1)}, "bool bias [1, 1, 4, 8192]"),
        ({"alibi_slopes": (32,)}, "float32 bias [1, 32, 1, 8192]"),
        ({"alibi_slopes": (4, 32)}, "float32 bias [1, 32, 4, 8192]"),
        ({"alibi_slopes": (32,), "window": (99, 0)}, "float32 bias [1, 32, 4, 100]"),
    ],
    ids=str,
)
def test_explain_says_how_window_and_alibi_reach_the_prefix(options, words):
    reason = explain(**options).reason
    assert words in reason
    assert ("bias [" in reason) == bool(options)


def test_explain_of_arrays_and_what_it_refuses():
    arrays = list(given_arrays().values())
    assert cuattn.explain("cascade_attention", *arrays, window=(3, -1)).kernel == "cpu + cpu"
    with pytest.raises(TypeError, match="cascade_attention takes q, shared_k, shared_v, k_cache"):
        cuattn.explain("cascade_attention", *arrays[:-1])
    with pytest.raises(TypeError, match="cascade_attention has no option partition_size"):
        cuattn.explain("cascade_attention", *arrays, partition_size=512)
    with pytest.raises(TypeError, match="no option colour"):
        cuattn.explain("cascade_attention", *arrays, colour=1)
    with pytest.raises(ValueError, match="explain: shared_k must have 3 axes"):
        cuattn.explain("cascade_attention", arrays[0], (1, 9, 2, 64), *arrays[2:])


def on_torch(case, shared_len, rng, torch):
    """q, prefix and pages as CUDA tensors, and the optional arrays with the options."""
    problem, shared = draw(case, shared_len, rng)
    arrays = {name: torch.from_numpy(x).cuda() for name, x in problem.arrays.items()}
    q, *paged = [arrays.pop(name) for name in PAGED]
    prefix = [torch.from_numpy(x).cuda() for x in shared]
    return problem, shared, (q, *prefix, *paged), {**arrays, **problem.options}


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a GPU")
def test_a_graph_serves_other_lengths(rng):
    """context_lens are read on the device: by the kernels, the window and ALiBi alike."""
    import torch

    problem, shared, arrays, options = on_torch(CAPTURED, 70, rng, torch)
    cuattn.cascade_attention(*arrays, **options)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = cuattn.cascade_attention(*arrays, **options, return_lse=True)
    for lens in ((3, 20, 60, 90), (90, 2, 5, 33), (2, 2, 2, 2)):
        kept = np.minimum(lens, CAPTURED.lens).astype(np.int32)  # blocks that the tables have
        arrays[-1].copy_(torch.from_numpy(kept))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        problem.arrays["context_lens"] = kept
        judge(problem, shared, out.cpu().numpy(), lse.cpu().numpy())


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a GPU")
def test_an_explicit_stream_is_used_for_the_bias_too(rng):
    """The lengths arrive on that stream, behind a sleep; the current stream knows nothing."""
    import torch

    problem, shared, arrays, options = on_torch(CAPTURED, 70, rng, torch)
    lens, arrays = arrays[-1].clone(), (*arrays[:-1], torch.zeros_like(arrays[-1]))
    out, side = torch.empty_like(arrays[0]), torch.cuda.Stream()
    lse = torch.empty(4, 8, 2, device="cuda")
    cuattn.cascade_attention(*arrays, **options)
    torch.cuda.synchronize()
    default = torch.cuda.default_stream()
    given = [(side, side), (side, side.cuda_stream), (default, default), (default, 0)]
    for there, stream in given:
        arrays[-1].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(there):
            torch.cuda._sleep(50_000_000)
            arrays[-1].copy_(lens)
        with torch.cuda.stream(torch.cuda.Stream()):
            cuattn.cascade_attention(*arrays, **options, out=out, lse_out=lse, stream=stream)
        there.synchronize()
        judge(problem, shared, out.cpu().numpy(), lse.cpu().numpy())


def test_into_given_outputs(device, rng):
    case = PagedCase(q_len=2, lens=(30, 7))
    problem = paged_cases.make(case, rng)
    arena = harness.Arena(device)
    placed = paged_cases.place(arena, problem)
    q, *paged = [placed[name] for name in PAGED]
    shared = [arena.put(rng.standard_normal((9, 2, 64)).astype(np.float16)) for _ in "kv"]
    out = arena.output(problem.arrays["q"].shape, np.float16)
    lse_out = arena.output((2, 8, 2), np.float32, align=4)
    result = cuattn.cascade_attention(q, *shared, *paged, out=out, lse_out=lse_out)
    assert result[0] is out
    assert result[1] is lse_out
    expected = cuattn.cascade_attention(q, *shared, *paged, return_lse=True)
    device.synchronize()
    arena.verify()
    for got, want in zip(result, expected, strict=True):
        assert np.array_equal(harness.bits(device.numpy(got)), harness.bits(device.numpy(want)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wide_out_takes_parts_that_are_not_rounded(device, dtype, rng):
    """It is the merge of float32 parts, and rounded it is out but for the parts' rounding."""
    case = PagedCase(q_len=2, lens=(30, 7), dtype=dtype)
    problem, shared = draw(case, 9, rng)
    arrays = [problem.arrays[name] for name in PAGED]
    out = np.zeros(arrays[0].shape, np.float32)
    found, lse = harness.numpy_call(
        device, cuattn.cascade_attention, arrays[0], *shared, *arrays[1:], out=out, return_lse=True
    )
    assert found.dtype == np.float32
    want, want_lse = whole(problem, *shared)
    # Tensor cores round probabilities to the dtype, an out of that dtype the sums of them.
    step = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    most = 1e-5 if device.name == "cpu" else 2 * step * np.abs(want).max()
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=most)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4)
    torch = frameworks.require("torch")
    if device.name == "cpu" and dtype == "float16":
        given = [torch.from_numpy(x) for x in (arrays[0], *shared, *arrays[1:])]
        wide = torch.empty(out.shape)
        assert cuattn.cascade_attention(*given, out=wide) is wide
        assert np.array_equal(wide.numpy(), found)


def test_outputs_over_what_is_read_are_refused():
    """As paged_attention does, before anything is written."""
    given = given_arrays()
    lse = np.zeros((2, 8), np.float32)
    for name in ("q", "shared_k", "shared_v", "k_cache", "v_cache"):
        out = given[name].reshape(-1)[:1024].reshape(2, 8, 64)
        with pytest.raises(
            ValueError, match=f"cascade_attention: out must not share memory with {name}, got"
        ):
            cuattn.cascade_attention(**given, out=out, lse_out=lse)
        assert (given[name] == 1).all()
        assert (lse == 0).all()
    sinks = np.ones(16, np.float32)
    with pytest.raises(ValueError, match="lse_out must not share memory with sinks"):
        cuattn.cascade_attention(**given, sinks=sinks[:8], lse_out=sinks.reshape(2, 8))
    memory = np.zeros((2, 8, 64), np.float16)
    over = memory.reshape(-1).view(np.float32)[:16].reshape(2, 8)
    with pytest.raises(ValueError, match="out must not share memory with lse_out"):
        cuattn.cascade_attention(**given, out=memory, lse_out=over)


def given_arrays():
    return {
        "q": np.ones((2, 8, 64), np.float16),
        "shared_k": np.ones((9, 2, 64), np.float16),
        "shared_v": np.ones((9, 2, 64), np.float16),
        "k_cache": np.ones((3, 16, 2, 64), np.float16),
        "v_cache": np.ones((3, 16, 2, 64), np.float16),
        "block_tables": np.zeros((2, 2), np.int32),
        "context_lens": np.ones(2, np.int32),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_k": np.ones((1, 9, 2, 64), np.float16)}, "shared_k must have 3 axes"),
        (
            {"shared_v": np.ones((10, 2, 64), np.float16), "window": (3, -1)},
            "shared_k and shared_v must have equally many tokens, got 9 and 10; slice",
        ),
        ({"q": np.ones((2, 64), np.float16)}, "q must have axes"),
        (
            {"shared_v": np.ones((9, 2, 32), np.float16)},
            r"shared_v must have shape \(9, 2, 64\) like shared_k, got \(9, 2, 32\)",
        ),
    ],
)
def test_refusals(changes, message):
    cuattn.cascade_attention(**given_arrays())
    with pytest.raises(ValueError, match="cascade_attention: " + message):
        cuattn.cascade_attention(**{**given_arrays(), **changes})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 5}, TypeError, "window must be a pair"),
        ({"window": (-2, 0)}, ValueError, "window"),
        ({"alibi_slopes": np.ones(5, np.float32)}, ValueError, "alibi_slopes must"),
        ({"alibi_slopes": [1.0] * 8}, TypeError, "alibi_slopes must be an array"),
        ({"workspace": 3}, TypeError, "workspace must be an array"),
    ],
    ids=str,
)
def test_options_are_refused_as_paged_attention_does(options, error, message):
    with pytest.raises(error, match=f"paged_attention: {message}"):
        cuattn.cascade_attention(**given_arrays(), **options)


def test_what_is_no_array_of_a_library_is_refused():
    given = given_arrays()
    with pytest.raises(TypeError, match=r"cascade_attention: shared_v must be an array .*float"):
        cuattn.cascade_attention(**{**given, "shared_v": 3.0})
    for name, options in (("q", {}), ("block_tables", {"window": (3, -1)})):
        bare = {**given, name: dlpack.Array(given[name])}
        with pytest.raises(NotImplementedError, match=f"{name} must .* paged_attention"):
            cuattn.cascade_attention(**bare, **options)


def test_a_library_without_known_arithmetic_is_told_the_way_out():
    array = dlpack.Array(np.ones(3, np.float32))
    with (
        pytest.raises(
            NotImplementedError, match=r"window and alibi_slopes need .* paged_attention"
        ),
        _arrays.operations("cascade_attention", array, None),
    ):
        pass


def test_bfloat16_of_ml_dtypes():
    given = [np.ones((2, 8, 64)), np.ones((9, 2, 64)), np.ones((9, 2, 64))]
    given += [np.ones((3, 16, 2, 64))] * 2
    given = [x.astype(ml_dtypes.bfloat16) for x in given]
    out = cuattn.cascade_attention(*given, np.zeros((2, 2), np.int32), np.ones(2, np.int32))
    assert out.dtype == ml_dtypes.bfloat16
    assert (out.astype(np.float32) == 1).all()
