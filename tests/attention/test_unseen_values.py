# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in values that a row does not see, on every CUDA rung: docs/numerics.md, "NaN
and infinity", says where they must have no influence and where a NaN may come back. The CPU, where
they have none, is in test_numerics_edges.py.

A tile of P V multiplies them by zero, so a NaN may appear in the column of such a value, in rows
whose query tile visits the tile of its key. Every other element is right, and so is every lse.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cases
import cuattn
import harness
import paged_cases
import paged_prefill_cases
from cases import Case
from paged_cases import E4M3, PagedCase

JUNK = (np.nan, np.inf, -np.inf)
APART = ("cpu", "naive")  # rungs that look at no value that a row does not see
MASKS = {
    "causal": {"causal": True},
    "window": {"window": (60, 20)},
    "bias": {"bias": "bool"},
    "scored": {"causal": True, "softcap": 8.0, "alibi": "head"},
}
DIMS = [(64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a rung cuts rows and keys; m 0: no tiles."""

    kernel: str
    m: int
    n: int
    packed: int = 1


def tiles_of(device, backend, case, problem):
    """What explain() says of a call."""

    def place(array):
        return (str(array.dtype), *array.shape)

    arrays = {name: place(x) for name, x in problem.arrays.items()}
    names = ["q", "k", "v"]
    op = "attention"
    if case.layout == "ragged":
        op, names = "attention_varlen", [*names, "cu_seqlens_q", "cu_seqlens_k"]
    positional = [arrays.pop(name) for name in names] + list(problem.lengths)
    where = "cpu" if device.name == "cpu" else 0
    options = {**problem.options, **arrays, "backend": backend}
    plan = cuattn.explain(op, *positional, device=where, dtype=case.dtype, **options)
    return Tiles(plan.kernel, plan.tile_m, plan.tile_n, plan.packed_heads)


def visiting(tiles, case, queries, keys, key):
    """For each of a sequence's queries whether its tile visits the tile of `key`."""
    if tiles.kernel in APART or queries == 0:
        return np.zeros(queries, bool)
    if tiles.kernel == "cublas":
        return np.ones(queries, bool)
    left, right = case.window
    if case.causal:
        right = 0 if right < 0 else min(right, 0)
    tile = np.arange(queries) * tiles.packed // tiles.m
    first = tile * tiles.m // tiles.packed
    last = np.minimum((tile * tiles.m + tiles.m - 1) // tiles.packed, queries - 1)
    begin = np.zeros(queries, int) if left < 0 else first + keys - queries - left
    end = np.full(queries, keys) if right < 0 else last + keys - queries + right + 1
    begin, end = np.clip(begin, 0, keys), np.clip(end, 0, keys)
    at = key // tiles.n
    return (begin < end) & (begin // tiles.n <= at) & (at <= (end - 1) // tiles.n)


def spoil(problem, tiles, rng):
    """Junk in values of a few keys, each in a column of its own; where NaN may come back in out."""
    case, arrays = problem.case, problem.arrays
    v, ragged = arrays["v"], case.layout == "ragged"
    group = case.num_heads_q // case.num_heads_kv
    shape = harness.output_shapes(problem)[0]
    allowed = np.zeros(shape, bool)
    columns = rng.permutation(case.dim_v)[:12]
    for i, column in enumerate(columns):
        b, head = int(rng.integers(case.batch)), int(rng.integers(case.num_heads_kv))
        starts = [arrays.get(f"cu_seqlens_{x}") for x in "qk"]
        stored = [
            int(s[b + 1] - s[b]) if ragged else n
            for s, n in zip(starts, (case.seqlen_q, case.seqlen_kv), strict=True)
        ]
        used = [
            min(n, int(arrays[f"seqused_{x}"][b])) if f"seqused_{x}" in arrays else n
            for x, n in zip("qk", stored, strict=True)
        ]
        if used[1] == 0:
            continue
        key = int(rng.integers(used[1]))
        heads = slice(head * group, (head + 1) * group)
        rows = visiting(tiles, case, *used, key)
        if ragged:
            v[starts[1][b] + key, head, column] = JUNK[i % 3]
            allowed[starts[0][b] : starts[0][b] + used[0], heads, column] |= rows[:, None]
        elif case.layout == "bshd":
            v[b, key, head, column] = JUNK[i % 3]
            allowed[b, : used[0], heads, column] |= rows[:, None]
        else:
            v[b, head, key, column] = JUNK[i % 3]
            allowed[b, heads, : used[0], column] |= rows
    return allowed


def forgive(out, expected, allowed):
    """`out` with what is allowed to be no number put right."""
    return np.where(allowed & ~np.isfinite(out.astype(np.float64)), expected, out)


def assert_values_apart(device, backend, case, rng):
    """The tolerance rule but for the elements that may be NaN."""

    def attempt():
        problem = cases.make_problem(case, rng)
        if case.alibi != "none":  # weights that underflow to 0 would hide values that are seen
            problem.arrays["alibi_slopes"] *= np.float32(0.02)
        tiles = tiles_of(device, backend, case, problem)
        allowed = spoil(problem, tiles, rng)
        out, lse = harness.run(device, backend, problem)
        expected = problem.reference()[0]
        harness.judge(problem, forgive(out, expected, allowed), lse)

    harness.assert_by_draws(case.dtype, attempt)


def targets(cpu=()):
    """Parameters (device, backend, dtype)."""
    params = [] if harness.why_no_cuda() is None else [harness.skipped_cuda(None, None, None)]
    for device, backend in harness.targets(cpu=cpu):
        for dtype in cases.DTYPES:
            if not harness.serves(backend, device, Case(dtype)):
                continue
            marks = [pytest.mark.gpu] if device.name == "cuda" else []
            name = f"{device}-{backend}-{dtype}"
            params.append(pytest.param(device, backend, dtype, id=name, marks=marks))
    return pytest.mark.parametrize(("device", "backend", "dtype"), params)


def skip_refused(device, backend, case):
    if not harness.serves(backend, device, case):
        pytest.skip(f"backend '{backend}' refuses this call: test_prefill.py")


@targets()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_attention(device, backend, dtype, dims, mask, rng):
    """Several tiles of rows and keys, so that some rows must stay apart on every rung."""
    case = Case(dtype, 1, 4, 2, 420, 500, *dims, **MASKS[mask])
    skip_refused(device, backend, case)
    assert_values_apart(device, backend, case, rng)


@targets()
@pytest.mark.parametrize("layout", ["ragged", "bhsd"])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_layouts_and_lengths(device, backend, dtype, head_dim, mask, layout, rng):
    case = Case(dtype, 3, 4, 2, 300, 400, head_dim, layout=layout, **MASKS[mask])
    skip_refused(device, backend, case)
    assert_values_apart(device, backend, case, rng)
    if backend != "cublas":
        used = dataclasses.replace(case, seqused="both")
        assert_values_apart(device, backend, used, rng)


@targets()
@pytest.mark.parametrize("group", [1, 4])
def test_short_queries(device, backend, dtype, group, rng):
    """Packed heads, and split keys where a rung splits."""
    case = Case(dtype, 1, 2 * group, 2, 9, 1500, 128, causal=True, window=(700, -1))
    skip_refused(device, backend, case)
    assert_values_apart(device, backend, case, rng)


@targets(cpu=cases.CPU_BACKENDS)
@pytest.mark.parametrize("junk", [np.inf, -np.inf])  # NaN is in every test
@pytest.mark.parametrize("layout", ["bshd", "ragged"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_rows_not_in_use_have_no_influence(device, backend, dtype, dims, layout, junk, rng):
    """Behind seqused and behind the last sequence, in q, k and v alike."""
    case = Case(dtype, 2, 2, 1, 70, 190, *dims, layout=layout, seqused="both", causal=True)
    skip_refused(device, backend, case)

    def change(problem):
        for name in "qkv":
            array = problem.arrays[name]
            array[np.isnan(array)] = junk

    harness.assert_case(device, backend, case, rng, change)


@targets()
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_key_that_a_row_does_not_see_changes_nothing(device, backend, dtype, head_dim, rng):
    """NaN in keys of the second half of a causal square: rows of the first half do not see them."""
    case = Case(dtype, 1, 4, 2, 300, 300, head_dim, causal=True)
    skip_refused(device, backend, case)

    def change(problem):
        problem.arrays["k"][:, rng.integers(150, 300, 4), 1, rng.integers(head_dim)] = np.nan

    harness.assert_case(device, backend, case, rng, change)


def test_what_is_forgiven_is_little(rng):
    """A NaN one element beside, or in a tile that is not visited, is noticed."""
    case = Case("float16", 1, 2, 1, 256, 256, 64, causal=True)
    problem = cases.make_problem(case, rng)
    tiles = Tiles("sm80", 64, 64)
    assert visiting(tiles, case, 256, 256, 130).tolist() == [row >= 128 for row in range(256)]
    packed = dataclasses.replace(tiles, packed=2)
    assert visiting(packed, case, 256, 256, 130).tolist() == [row >= 128 for row in range(256)]
    assert not visiting(Tiles("naive", 0, 0), case, 256, 256, 130).any()
    assert visiting(Tiles("cublas", 0, 0), case, 256, 256, 130).all()
    banded = dataclasses.replace(case, causal=False, window=(10, 10))
    seen = visiting(tiles, banded, 256, 256, 130)
    assert seen.tolist() == [row >= 64 for row in range(256)]
    allowed = spoil(problem, tiles, rng)
    (out, lse), dtype = problem.reference(), cases.DTYPES["float16"]
    spoiled = np.where(allowed & np.isfinite(out), np.nan, out).astype(dtype)
    harness.judge(problem, forgive(spoiled, out, allowed), lse)
    elsewhere = np.argwhere(~allowed & np.isfinite(out))
    spoiled[tuple(elsewhere[rng.integers(len(elsewhere))])] = np.nan
    with pytest.raises(AssertionError, match="out: NaN in"):
        harness.judge(problem, forgive(spoiled, out, allowed), lse)


# Over pages.

PAGED_DIMS = (64, 72, 128, 192, 256)
LENS = (37, 5, 700, 1100)
CUTS = {"default": (), "split": (("num_splits", 3),), "invariant": (("batch_invariant", True),)}


def paged_targets(cpu=()):
    """Parameters (device, backend, dtype, fp8, kv_layout)."""
    params = [] if harness.why_no_cuda() is None else [harness.skipped_cuda(*[None] * 5)]
    for device, backend in harness.targets(cpu=cpu, cuda=paged_cases.CUDA_BACKENDS):
        for dtype, fp8, layout in (
            ("float32", False, "nhd"),
            ("float32", False, "vllm"),
            ("float16", False, "nhd"),
            ("bfloat16", False, "hnd"),
            ("bfloat16", False, "vllm"),
            ("float16", True, "hnd"),
            ("bfloat16", True, "vllm"),
        ):
            case = PagedCase(dtype=dtype, fp8=fp8, kv_layout=layout)
            if device.name == "cuda" and not paged_cases.serves(backend, case):
                continue
            marks = [pytest.mark.gpu] if device.name == "cuda" else []
            name = f"{device}-{backend}-{dtype}{'-fp8' * fp8}-{layout}"
            params.append(pytest.param(device, backend, dtype, fp8, layout, id=name, marks=marks))
    return pytest.mark.parametrize(("device", "backend", "dtype", "fp8", "kv_layout"), params)


def slots_first(problem, name):
    """A view of a cache as [num_blocks, block_size, num_heads_kv, head_dim]; V of any layout."""
    case, cache = problem.case, problem.arrays[name]
    cache = cache.view(E4M3) if case.fp8 else cache
    return cache.transpose(
        {"nhd": (0, 1, 2, 3), "hnd": (0, 2, 1, 3)}.get(case.kv_layout, (0, 3, 1, 2))
    )


def spoil_pages(problem, rng, last):
    """Junk in values among the `last` keys of each sequence, each in a column of its own; for each
    the sequence, the kv head and the column.
    """
    case, values = problem.case, slots_first(problem, "v_cache")
    columns, marks = list(rng.permutation(case.head_dim)), []
    for b, length in enumerate(case.lens):
        for _ in range(3 if length else 0):
            key = int(rng.integers(max(length - last, 0), length))
            block = problem.arrays["block_tables"][b, key // case.block_size]
            head, column = int(rng.integers(case.num_heads_kv)), columns.pop()
            junk = np.nan if case.fp8 else JUNK[len(marks) % 3]
            values[block, key % case.block_size, head, column] = junk
            marks.append((b, head, column))
    return marks


@paged_targets()
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("head_dim", PAGED_DIMS)
@pytest.mark.parametrize(("q_len", "group"), [(3, 2), (5, 8), (2, 1)])
def test_decode_of_several_queries(
    device, backend, dtype, fp8, kv_layout, head_dim, q_len, group, cut, rng
):
    """A value that another query sees: NaN in its column, in queries that share its kv head."""
    if fp8 and head_dim % 16 != 0:
        pytest.skip("float8 caches take multiples of 16")
    case = PagedCase(
        dtype,
        fp8,
        kv_layout,
        head_dim=head_dim,
        num_heads_q=2 * group,
        q_len=q_len,
        lens=LENS,
        window=(200, -1),
        options=CUTS[cut],
    )

    def attempt():
        problem = paged_cases.make(case, rng)
        marks = spoil_pages(problem, rng, last=q_len)
        out, lse = paged_cases.run(device, backend, problem)
        expected = problem.reference()[0]
        allowed = np.zeros(out.shape, bool)
        for b, head, column in marks if backend not in ("cpu", "simt") else ():
            allowed[b, :, head * group : (head + 1) * group, column] = dtype != "float32"
        paged_cases.judge(problem, forgive(out, expected, allowed), lse)

    harness.assert_by_draws(dtype, attempt)


@paged_targets(cpu=("cpu",))
@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("junk", [np.inf, -np.inf])
@pytest.mark.parametrize("head_dim", PAGED_DIMS)
def test_slots_that_nobody_owns(
    device, backend, dtype, fp8, kv_layout, head_dim, junk, version, rng
):
    """Behind the contexts and in blocks without an owner, in K and V; V1 and V2 too."""
    if fp8:
        pytest.skip("float8_e4m3fn has no infinity")
    if version != 0 and backend != ("cpu" if device.name == "cpu" else "auto"):
        pytest.skip("V1 and V2 choose for themselves")
    case = PagedCase(dtype, fp8, kv_layout, head_dim=head_dim, lens=LENS)
    case = dataclasses.replace(case, options=(("scale", 0.125),))

    def attempt():
        problem = paged_cases.make(case, rng)
        for name in ("k_cache", "v_cache"):
            cache = problem.arrays[name]
            if not fp8:
                cache[np.isnan(cache)] = junk
        if version == 0:
            out, lse = paged_cases.run(device, backend, problem)
        else:
            out, lse = paged_cases.run_version(version, device, problem), problem.reference()[1]
        paged_cases.judge(problem, out, lse)

    harness.assert_by_draws(dtype, attempt)


@targets()
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunked_prefill(device, backend, dtype, head_dim, kv_layout, rng):
    """Chunks of 200 queries at the end of 700 keys: junk in keys that the first of them do not see
    reaches rows of tiles that visit them, and no row of another sequence or kv head.
    """
    if backend in ("cublas", "tiled") and (backend == "cublas" or head_dim > 128):
        pytest.skip("refused: test_paged_prefill.py")
    if device.name == "cuda" and backend == "simt" and dtype != "float32":
        pytest.skip("refused: test_paged_prefill.py")
    case = PagedCase(dtype, False, kv_layout, head_dim=head_dim, lens=(700, 333, 64, 0))
    queries = (200, 333, 1, 0)

    def attempt():
        problem = paged_prefill_cases.make(case, queries, rng)
        marks = spoil_pages(problem, rng, last=150)
        out, lse = paged_prefill_cases.run(device, backend, problem, "seqused_k")
        (expected, expected_lse) = paged_prefill_cases.oracle(problem)
        plain, plain_lse = paged_prefill_cases.oracle(problem, cases.DTYPES[dtype])
        allowed = np.zeros(out.shape, bool)
        starts, group = problem.arrays["cu_seqlens_q"], case.num_heads_q // case.num_heads_kv
        for b, head, column in marks if backend not in APART else ():
            rows = slice(starts[b], starts[b + 1])
            allowed[rows, head * group : (head + 1) * group, column] = True
        cases.check_lse(lse, expected_lse, plain_lse)
        cases.check(forgive(out, expected, allowed), expected, plain, dtype)

    harness.assert_by_draws(dtype, attempt)
