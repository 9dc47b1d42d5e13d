# SPDX-License-Identifier: Apache-2.0
"""paged_attention of float8_e4m3fn queries over float8 caches: by every scale and option against
float64 of what codes and scales mean; unused slots hold NaN. Refusals:
test_float8_queries_errors.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import paged_prefill_cases
from float8_cases import F8
from paged_cases import PagedCase

NUMBERS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "bfloat16"}  # by out's dtype
SCALES = ("none", "float", "one", "head", "batch")
LAYOUT_SIZES = [("nhd", 16), ("nhd", 7), ("hnd", 8), ("hnd", 33), ("vllm", 8), ("vllm", 32)]
OPTIONS = [
    {},
    {"window": (20, -1)},
    {"softcap": 5.0, "sinks": True},
    {"alibi": "head", "causal": False},
    {"alibi": "batch", "window": (63, 0)},
    {"causal": False, "window": (9, 2), "options": (("scale", 0.3),)},
]
FACTORS = {
    "layout": LAYOUT_SIZES,
    "head_dim": [16, 48, 64, 128, 256],
    "heads": [(8, 2), (4, 4), (8, 1), (6, 2)],
    "lens": [(37, 1, 0, 130), (1,), (513, 64, 65), (0, 0), ()],
    "q_len": [None, 1, 2, 5],
    "option": OPTIONS,
    "queries": SCALES,
    "caches": ["none", "float", "head", "batch"],
    "split": [(), (("num_splits", 3),), (("batch_invariant", True),)],
    "out": [None, *NUMBERS],
    "storage": ["contiguous", "packed", "padded"],
}
TARGETS = harness.target_params(cpu=("auto", "cpu"), cuda=("auto", "sm80", "sm90"))
PLAIN = harness.target_params(cpu=("auto",), cuda=("auto",))


def listed():
    """Every option with every other, as a case, the scales of q, and how q and out are given."""
    for row in cases.pairwise(FACTORS):
        option = dict(row["option"])
        option["options"] = option.get("options", ()) + row["split"]
        layout, size = row["layout"]
        heads, heads_kv = row["heads"]
        option |= {"num_heads_q": heads, "num_heads_kv": heads_kv, "scales": row["caches"]}
        option |= {name: row[name] for name in ("head_dim", "q_len", "lens")}
        case = PagedCase(dtype="bfloat16", fp8=True, kv_layout=layout, block_size=size, **option)
        yield case, row["queries"], row["out"], row["storage"]


ROWS = list(listed())


@dataclasses.dataclass
class Queries:
    """A call over codes, the scale of each head and row, and what they mean in float64."""

    given: paged_cases.PagedProblem
    factor: np.ndarray
    numbers: np.ndarray

    def in_numbers(self, dtype=None):
        """The problem of 16-bit queries, as the kernel sees it, or of what codes mean."""
        arrays = {name: x for name, x in self.given.arrays.items() if name != "q_scale"}
        options = {name: x for name, x in self.given.options.items() if name != "q_scale"}
        q = self.numbers if dtype is None else self.numbers.astype(cases.DTYPES[dtype])
        case = dataclasses.replace(self.given.case, dtype=dtype or self.given.case.dtype)
        return paged_cases.PagedProblem(case, {**arrays, "q": q}, options)

    def judge(self, out, lse, dtype="bfloat16"):
        """The rule, by the rounded numbers that kernels read; and out by what codes mean."""
        numbers = NUMBERS[dtype]
        rounded = self.in_numbers(numbers)
        expected, plain = rounded.reference(), rounded.reference(cases.DTYPES[numbers])
        cases.check_lse(lse, expected[1], plain[1])
        cases.check(out, expected[0], plain[0], numbers)
        cases.check(out, self.in_numbers().reference()[0], plain[0], numbers)


def make(case, kind, rng):
    """Draw a call; of its scales one is of another size for each head and sequence."""
    problem = paged_cases.make(case, rng)
    codes = np.asarray(problem.arrays["q"], np.float32).astype(F8)
    shapes = {
        "one": (1,),
        "head": (case.num_heads_kv,),
        "batch": (len(case.lens), case.num_heads_kv),
    }
    arrays, options = {**problem.arrays, "q": codes.view(np.uint8)}, dict(problem.options)
    factor = np.ones(1, np.float32)
    if kind == "float":
        options["q_scale"] = float(np.float32(rng.uniform(0.5, 2)))
        factor = np.array([options["q_scale"]], np.float32)
    elif kind != "none":
        factor = arrays["q_scale"] = rng.uniform(0.5, 2, shapes[kind]).astype(np.float32)
    group = case.num_heads_q // case.num_heads_kv
    if kind in ("head", "batch"):
        factor = np.repeat(factor, group, axis=-1)
    if kind == "batch" and case.q_len is not None:
        factor = factor[:, None]
    problem = paged_cases.PagedProblem(case, arrays, options)
    return Queries(problem, factor[..., None], codes.astype(np.float64) * factor[..., None])


def run(device, backend, queries, out=None, storage="contiguous", **more):
    """Call paged_attention on bytes; every buffer is checked, and a given out is poisoned."""
    problem, arena = queries.given, harness.Arena(device)
    placed = paged_cases.place(arena, problem, {"q": storage})
    q = problem.arrays["q"]
    keywords = {**problem.options, **more, "backend": backend, "return_lse": True}
    if out is not None:
        keywords["out"] = arena.output(q.shape, cases.DTYPES[out], name="out")
        lse_shape = (q.shape[0], q.shape[-2], *q.shape[1:-2])
        keywords["lse_out"] = arena.output(lse_shape, np.float32, name="lse_out", align=4)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    positional = [placed.pop(name) for name in names]
    if backend == "sm90":
        with pytest.raises(NotImplementedError, match="cannot run this call: it "):
            cuattn.paged_attention(*positional, **placed, **keywords)
        pytest.skip("refused, as it must be")
    result, lse = cuattn.paged_attention(*positional, **placed, **keywords)
    device.synchronize()
    if out is not None:
        assert result is keywords["out"]
        assert lse is keywords["lse_out"]
    arena.verify()
    result = device.numpy(result)
    assert result.dtype == cases.DTYPES[out or "bfloat16"]
    return result, device.numpy(lse)


@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_every_option_with_every_other(device, backend, row, rng):
    case, kind, out, storage = ROWS[row]

    def attempt():
        queries = make(case, kind, rng)
        queries.judge(*run(device, backend, queries, out, storage), out or "bfloat16")

    harness.assert_by_draws(NUMBERS[out or "bfloat16"], attempt)


@pytest.mark.parametrize("out", [None, "float16", "float32"])
@pytest.mark.parametrize("q_len", [None, 3])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_the_bits_of_numbers_that_dequantize_makes(device, backend, kind, q_len, out, rng):
    """stored * scale, rounded once, for every code but NaN."""
    case = PagedCase(dtype=NUMBERS[out or "bfloat16"], fp8=True, q_len=q_len, scales="batch",
                     lens=(60, 3, 0, 90))  # fmt: skip
    queries = make(case, kind, rng)
    codes = np.arange(queries.given.arrays["q"].size).astype(np.uint8) * np.uint8(37)
    codes = np.where(codes & 127 == 127, 0, codes).reshape(queries.given.arrays["q"].shape)
    queries.given.arrays["q"] = codes
    queries.numbers = codes.view(F8).astype(np.float32) * queries.factor
    got = run(device, backend, queries, out)
    dtype = None if out is None else cases.DTYPES[out]
    wide = queries.in_numbers(case.dtype)
    arena = harness.Arena(device)
    more = {} if dtype is None else {"out": arena.output(codes.shape, dtype)}
    want = paged_cases.run(device, backend, wide, **more)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(harness.bits(a), harness.bits(b))


@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_codes_that_nobody_sees_may_be_nan(device, backend, rng):
    """Queries before the first token of a short context, and those of an empty one."""
    case = PagedCase(dtype="bfloat16", fp8=True, q_len=5, lens=(40, 2, 0, 5))
    queries = make(case, "batch", rng)
    for b, length in enumerate(case.lens):
        unseen = slice(0, max(case.q_len - length, 0))
        queries.given.arrays["q"][b, unseen] = 0x7F
        queries.numbers[b, unseen] = 0.0
    out, lse = run(device, backend, queries, "bfloat16")
    assert not np.asarray(out, np.float32)[2].any()
    assert np.isneginf(lse[1, :, :3]).all()
    queries.judge(out, lse)


@pytest.mark.parametrize("q_len", [None, 4])
@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_with_a_plan(device, backend, q_len, rng):
    """One of float8 queries is that of 16-bit queries over float8 caches."""
    case = PagedCase(dtype="bfloat16", fp8=True, q_len=q_len, lens=(513, 1, 0, 90))
    queries = make(case, "head", rng)
    plans = [
        paged_cases.plan_of(device, backend, dataclasses.replace(
            queries.given, case=dataclasses.replace(case, dtype=dtype)))
        for dtype in ("float8_e4m3fn", "bfloat16")
    ]  # fmt: skip
    want, got = map(device.numpy, plans)
    assert np.array_equal(want, got)
    queries.judge(*run(device, backend, queries, plan=plans[0]))


@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_bits_do_not_depend_on_the_batch(device, backend, rng):
    case = PagedCase(dtype="bfloat16", fp8=True, lens=(700, 33, 5),
                     options=(("batch_invariant", True),))  # fmt: skip
    queries = make(case, "batch", rng)
    out, lse = run(device, backend, queries)
    for b, length in enumerate(case.lens):
        alone = {
            name: x[b : b + 1] if name in ("q", "q_scale", "block_tables", "context_lens") else x
            for name, x in queries.given.arrays.items()
        }
        one = dataclasses.replace(queries.given, arrays=alone,
                                  case=dataclasses.replace(case, lens=(length,)))  # fmt: skip
        got = run(device, backend, dataclasses.replace(queries, given=one))
        for a, b_ in zip(got, (out[b : b + 1], lse[b : b + 1]), strict=True):
            assert np.array_equal(harness.bits(a), harness.bits(b_))


def on_256_bytes(memory):
    """What is left of memory behind the first byte that a workspace may start on."""
    if hasattr(memory, "data_ptr"):  # of torch, whose arrays have a method named values
        at = memory.data_ptr()
    else:
        held = getattr(memory, "values", memory)
        where = getattr(held, "__cuda_array_interface__", None) or held.__array_interface__
        at = where["data"][0]
    return memory[-at % 256 :]


@pytest.mark.parametrize("lens", [(90, 0), (0, 0)])
@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_the_workspace_that_explain_names(device, backend, lens, rng):
    queries = make(PagedCase(dtype="bfloat16", fp8=True, q_len=3, lens=lens), "head", rng)
    arena = harness.Arena(device)
    placed = paged_cases.place(arena, queries.given)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    positional = [placed.pop(name) for name in names]
    plan = cuattn.explain("paged_attention", *positional, **placed, **queries.given.options)
    assert plan.workspace_bytes >= queries.given.arrays["q"].size * 2
    memory = arena.output((plan.workspace_bytes + 256,), np.uint8, name="workspace", align=256)
    memory = on_256_bytes(memory)[: plan.workspace_bytes]
    queries.judge(*run(device, backend, queries, workspace=memory))
    with pytest.raises(MemoryError, match=f"workspace must hold {plan.workspace_bytes} bytes"):
        run(device, backend, queries, workspace=memory[:-1])
    arena.verify()


@pytest.mark.parametrize("out", [None, "float16", "float32"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("batch", ["few", "mixed", "chunks", "decode"])
@pytest.mark.parametrize("kind", ["none", "float", "head"])
@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_ragged_queries_become_numbers(device, backend, kind, batch, invariant, out, rng):
    """attention_varlen over pages has the bits of queries that dequantize made, however it goes."""
    lens, lengths = paged_prefill_cases.BATCHES[batch]
    numbers = NUMBERS[out or "bfloat16"]
    case = PagedCase(dtype=numbers, fp8=True, lens=lens, scales="batch", block_size=8)
    problem = paged_prefill_cases.make(case, lengths, rng)
    codes = np.asarray(problem.arrays["q"], np.float32).astype(F8)
    drawn = rng.uniform(0.5, 2, case.num_heads_kv).astype(np.float32)
    factor = {"none": 1, "float": drawn[0], "head": np.repeat(drawn, 4)[:, None]}[kind]
    wide = (codes.astype(np.float32) * factor).astype(cases.DTYPES[numbers])
    scales = {} if kind == "none" else {"q_scale": float(drawn[0]) if kind == "float" else drawn}
    results = []
    for q, given in ((codes.view(np.uint8), scales), (wide, {})):
        arena = harness.Arena(device)
        names = ("k_cache", "v_cache", "cu_seqlens_q")
        arrays = [arena.put(x) for x in (q, *map(problem.arrays.get, names))]
        names = ("block_tables", "k_scale", "v_scale")
        options = {name: arena.put(problem.arrays[name]) for name in names}
        options |= {n: arena.put(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        options["seqused_k"] = arena.put(np.array(lens, np.int32))
        options |= {"causal": True, "window": (100, 0), "softcap": 3.0, "return_lse": True}
        if out is not None:
            options["out"] = arena.output(codes.shape, cases.DTYPES[out])
        options |= {"dtype": "float8_e4m3fn", "batch_invariant": invariant}
        result = cuattn.attention_varlen(*arrays, None, max(lengths), max(lens), **options)
        device.synchronize()
        arena.verify()
        results.append([device.numpy(x) for x in result])
    assert results[0][0].dtype == cases.DTYPES[out or "bfloat16"]
    for a, b in zip(*results, strict=True):
        assert np.array_equal(harness.bits(a), harness.bits(b))


# The mutants: the oracle reads scales wrongly; the rule must notice each.

MUTANTS = {
    "of the next head": lambda x: np.roll(x, 1, -1),
    "of the next sequence": lambda x: np.roll(x, 1, 0),
    "none": np.ones_like,
    "twice": np.square,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_scales_show(name, rng):
    case = PagedCase(dtype="bfloat16", fp8=True, lens=(130, 90, 200), num_heads_q=4)
    queries = make(case, "batch", rng)
    scale = np.array([[0.5, 2.0], [1.5, 0.8], [1.1, 0.6]], np.float32)
    codes = queries.given.arrays["q"].view(F8).astype(np.float64)
    queries.given.arrays["q_scale"] = scale
    queries.numbers = codes * np.repeat(scale, 2, 1)[..., None]
    out, lse = run(harness.Cpu(), "cpu", queries)
    queries.judge(out, lse)
    queries.numbers = codes * np.repeat(MUTANTS[name](scale), 2, 1)[..., None]
    with pytest.raises(AssertionError):
        queries.judge(out, lse)


def pages(device, q="float8_e4m3fn", heads=(8, 64), **options):
    caches = ("float8_e4m3fn", 9, 16, 2, 64)
    shapes = ((q, 4, *heads), caches, caches, (4, 8), (4,))
    return cuattn.explain("paged_attention", *shapes, device=device, **options)


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "cpu"), ("a100", "sm80"), ("h200", "sm80")])
def test_what_explain_says(device, kernel):
    plan, plain = pages(device, q_scale=("float32", 4, 2)), pages(device, "bfloat16")
    assert (plan.kernel, plan.num_splits) == (plain.kernel, plain.num_splits)
    assert plan.kernel == kernel
    assert plan.reason == f"{plain.reason}; q's codes become numbers"
    line = "* dequantize: runs: codes of q become numbers of 16 bits first"
    assert plan.ladder == f"{plain.ladder}{line}\n"
    assert plan.workspace_bytes == plain.workspace_bytes + 4 * 8 * 64 * 2
    if device == "h200":
        assert "sm90: cannot: it takes caches of 16 bits" in plan.ladder
    by_dtype = cuattn.explain("paged_attention", (4, 8, 64), *[(9, 16, 2, 64)] * 2, (4, 8), (4,),
                              device=device, dtype="float8_e4m3fn")  # fmt: skip
    assert by_dtype.reason == plan.reason


def test_the_log_names_codes(monkeypatch):
    code = (
        "import numpy as np, ml_dtypes, cuattn\n"
        "f8 = ml_dtypes.float8_e4m3fn\n"
        "q, cache = np.ones((1, 2, 16), f8), np.ones((2, 8, 2, 16), f8)\n"
        "tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)\n"
        "cuattn.paged_attention(q, cache, cache, tables, lens)\n"
    )
    monkeypatch.setenv("CUATTN_LOG", "1")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "paged_attention float8_e4m3fn over float8_e4m3fn on cpu" in said.stderr
    assert "; q's codes become numbers" in said.stderr


def tensor(torch, x):
    kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
    if str(x.dtype) not in kinds:
        return torch.from_numpy(x)
    raw = torch.from_numpy(np.ascontiguousarray(x).view(f"u{x.itemsize}"))
    return raw.view(kinds[str(x.dtype)])


@pytest.mark.parametrize("scale", ["head", "float"])
@pytest.mark.parametrize("q_len", [None, 3])
def test_torch_and_jax_give_the_same_bits(q_len, scale, rng):
    case = PagedCase(dtype="bfloat16", fp8=True, lens=(90, 7), q_len=q_len, scales="batch")
    problem = make(case, scale, rng).given
    names = ("block_tables", "context_lens")
    arrays = [problem.arrays["q"].view(F8), *problem.caches(), *map(problem.arrays.get, names)]
    scales = {n: x for n, x in (problem.arrays | problem.options).items() if n.endswith("_scale")}
    want = cuattn.paged_attention(*arrays, **scales).view(np.int16)

    torch = pytest.importorskip("torch")
    given = {n: x if isinstance(x, float) else tensor(torch, x) for n, x in scales.items()}
    out = cuattn.paged_attention(*(tensor(torch, x) for x in arrays), **given)
    assert out.dtype == torch.bfloat16
    assert np.array_equal(out.view(torch.int16).numpy(), want)

    jax = pytest.importorskip("jax")
    face = importlib.import_module("cuattn.jax")
    numbers = {n: x for n, x in scales.items() if isinstance(x, float)}
    call = jax.jit(lambda arrays, scales: face.paged_attention(*arrays, **scales, **numbers))
    place = functools.partial(jax.device_put, device=jax.devices("cpu")[0])
    out = call([*map(place, arrays)], {n: place(x) for n, x in scales.items() if n not in numbers})
    assert np.array_equal(np.asarray(out).view(np.int16), want)
    lowered = cuattn.paged_attention(*map(place, arrays), **scales)  # eagerly
    assert np.array_equal(np.asarray(lowered).view(np.int16), want)


@pytest.mark.parametrize("q_len", [None, 2])
def test_tokens_are_appended_under_codes(q_len, rng):
    """New keys of 16 bits are quantised by the scales of the caches, q has its own."""
    case = PagedCase(dtype="bfloat16", fp8=True, lens=(40, 1, 17), q_len=q_len, scales="head")
    queries = make(case, "batch", rng)
    problem = queries.given
    shape = (*problem.arrays["q"].shape[:-2], case.num_heads_kv, case.head_dim)
    k, v = rng.standard_normal((2, *shape), np.float32).astype(ml_dtypes.bfloat16)
    options = {**problem.options, "return_lse": True}
    scales = {n: x for n, x in problem.arrays.items() if n.endswith("_scale")}
    of_caches = {name: scales[name] for name in ("k_scale", "v_scale")}
    results = []
    for dtype in ("codes", "bfloat16"):
        is_codes = dtype == "codes"
        q = problem.arrays["q"] if is_codes else queries.in_numbers(dtype).arrays["q"]
        caches = [problem.arrays[name].copy() for name in ("k_cache", "v_cache")]
        tables = [problem.arrays[name] for name in ("block_tables", "context_lens")]
        given = scales if is_codes else of_caches
        result = cuattn.append_attention(q, k, v, *caches, *tables, **given, **options)
        results.append((*result, *caches))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(harness.bits(a), harness.bits(b))
    written = [problem.arrays["k_cache"], results[0][2]]
    assert not np.array_equal(*written)


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a GPU")
def test_a_graph_reads_new_scales_and_codes(rng):
    import torch

    case = PagedCase(dtype="bfloat16", fp8=True, lens=(90, 700, 3), scales="head")
    queries = make(case, "batch", rng)
    placed = {n: torch.from_numpy(x.copy()).cuda() for n, x in queries.given.arrays.items()}
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    positional, arrays = [placed[name] for name in names], dict(placed)
    for name in names:
        arrays.pop(name)
    given = {**arrays, **queries.given.options, "return_lse": True}
    cuattn.paged_attention(*positional, **given)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out, lse = cuattn.paged_attention(*positional, **given)
    for _ in range(3):
        drawn = make(case, "batch", rng)
        for name in ("q", "q_scale"):
            placed[name].copy_(torch.from_numpy(drawn.given.arrays[name]))
        caches = {n: x for n, x in queries.given.arrays.items() if n not in ("q", "q_scale")}
        drawn.given.arrays.update(caches)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        drawn.judge(out.float().cpu().numpy(), lse.cpu().numpy())
