# SPDX-License-Identifier: Apache-2.0
"""attention_varlen over caches of float8_e4m3fn in blocks: queries of 16 bits, for which codes
become numbers as they are gathered, and float8 queries, by every scale; unused slots hold NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import float8_cases
import harness
import paged_cases
import reference
from float8_cases import F8
from paged_cases import PagedCase
from paged_prefill_cases import BATCHES, assert_case, make, oracle, run, tokens_of

TARGETS = harness.target_params(
    cpu=("auto", *cases.CPU_BACKENDS), cuda=("auto", "naive", "sm80", "sm90")
)
PLAIN = harness.target_params(cpu=cases.CPU_BACKENDS, cuda=("auto", "naive"))
OPTIONS = [
    {"scales": "head"},
    {"scales": "batch", "causal": False, "kv_layout": "hnd", "block_size": 8},
    {"scales": "float", "window": (20, -1), "kv_layout": "vllm", "head_dim": 80},
    {"softcap": 5.0, "alibi": "head", "block_size": 33, "num_heads_kv": 1},
    {"sinks": True, "window": (63, 0), "scales": "batch", "kv_layout": "vllm", "block_size": 8},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_queries_of_16_bits(device, backend, dtype, batch, option, rng):
    lens, queries = BATCHES[batch]
    case = PagedCase(dtype=dtype, fp8=True, lens=lens, **option)
    assert_case(device, backend, case, queries, rng)


@pytest.mark.parametrize("lengths", ["cu_seqlens_k", "seqused_k", "both"])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("head_dim", [16, 48, 128, 256])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_layouts_lengths_and_head_dims(device, backend, head_dim, kv_layout, lengths, rng):
    lens, queries = BATCHES["mixed"]
    case = PagedCase(dtype="bfloat16", fp8=True, lens=lens, kv_layout=kv_layout, scales="batch",
                     head_dim=head_dim, num_heads_q=4)  # fmt: skip
    assert_case(device, backend, case, queries, rng, lengths, spare=3)


@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=("auto",), cuda=("auto",))
)
def test_single_queries_go_apart(device, backend, kv_layout, rng):
    """batch_invariant: on CUDA by a kernel of paged_attention, the others by one of prefill."""
    lens, queries = BATCHES["mixed"]
    case = PagedCase(fp8=True, lens=lens, kv_layout=kv_layout, scales="batch", block_size=8,
                     options=(("batch_invariant", True),))  # fmt: skip
    assert_case(device, backend, case, queries, rng)


@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_values_of_another_head_dim(device, backend, kv_layout, rng):
    lens, queries = BATCHES["mixed"]
    case = PagedCase(head_dim=192, fp8=True, lens=lens, kv_layout=kv_layout, scales="head")

    def narrow(problem):
        v = problem.arrays["v_cache"]
        problem.arrays["v_cache"] = v[:, :, :48] if kv_layout == "vllm" else v[..., :48]

    assert_case(device, backend, case, queries, rng, change=narrow)


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("scales", ["none", "float", "head", "batch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_the_same_bits_as_a_cache_of_the_numbers(device, backend, dtype, scales, kv_layout, rng):
    """stored * scale, rounded once to q's dtype, for every code but NaN."""
    lens, queries = (130, 1, 0, 70), (60, 0, 2, 70)
    case = PagedCase(dtype=dtype, fp8=True, lens=lens, kv_layout=kv_layout, scales=scales)
    problem = make(case, queries, rng)
    for name in ("k_cache", "v_cache"):  # all codes but NaN
        codes = np.arange(problem.arrays[name].size).astype(np.uint8) * np.uint8(37)
        codes = np.where(codes & 127 == 127, 0, codes).reshape(problem.arrays[name].shape)
        problem.arrays[name] = codes.astype(np.uint8)
    problem.arrays["q"] = (problem.arrays["q"] * np.float32(0.01)).astype(cases.DTYPES[dtype])
    lengths = "cu_seqlens_k"  # no kernel of paged_attention
    out, lse = run(device, backend, problem, lengths)
    wide = dataclasses.replace(problem, case=dataclasses.replace(case, fp8=False))
    wide.options = {n: x for n, x in problem.options.items() if not n.endswith("_scale")}
    wide.arrays = {n: x for n, x in problem.arrays.items() if not n.endswith("_scale")}
    wide.case = dataclasses.replace(wide.case, kv_layout="nhd", block_size=lens[0])
    for name in "kv":  # a block for each sequence
        cache = np.zeros((len(lens), lens[0], 2, 64), cases.DTYPES[dtype])
        ends = np.cumsum((0, *lens))
        tokens = tokens_of(problem, name, cases.DTYPES[dtype])
        for b, n in enumerate(lens):
            cache[b, :n] = tokens[ends[b] : ends[b] + n]
        wide.arrays[f"{name}_cache"] = cache
    wide.arrays["block_tables"] = np.arange(len(lens), dtype=np.int32)[:, None]
    wide.options["kv_layout"] = "nhd"
    want, want_lse = run(device, backend, wide, lengths)
    assert np.array_equal(harness.bits(out), harness.bits(want))
    assert np.array_equal(harness.bits(lse), harness.bits(want_lse))


def float8_queries(problem, kind, rng):
    """Make q codes and draw scales of a kind; the numbers that they mean, by name."""
    case, arrays, lens = problem.case, problem.arrays, problem.case.lens
    queries = np.diff(arrays["cu_seqlens_q"])
    batch, heads = len(lens), case.num_heads_kv
    blocks = [-(-int(max(n, default=0)) // float8_cases.BLOCK) for n in (queries, lens)]
    shapes = {"head": (heads,), "batch": (batch, heads)}
    parts = {"q": (batch, case.num_heads_q, blocks[0]), "k": (batch, heads, blocks[1]),
             "v": (batch, heads, case.head_dim)}  # fmt: skip
    arrays["q"] = np.asarray(arrays["q"], np.float32).astype(F8).view(np.uint8)
    numbers = {"q": arrays["q"].view(F8).astype(np.float32)}
    numbers |= {name: tokens_of(problem, name, None) for name in "kv"}
    if kind == "none":
        return numbers
    for name, count in (("q", queries), ("k", lens), ("v", lens)):
        by_sequence = kind == "channels" and name != "v"
        shape = shapes["batch"] if by_sequence else shapes.get(kind, parts[name])
        scale = rng.uniform(0.5, 2, shape).astype(np.float32)
        arrays[f"{name}_scale"] = scale
        owner = np.repeat(np.arange(batch), count)
        place = np.concatenate([np.arange(n) for n in count])
        full = np.broadcast_to(scale, (batch, *scale.shape[-1:])) if scale.ndim == 1 else scale
        full = np.repeat(full, numbers[name].shape[1] // full.shape[1], axis=1)
        if full.ndim == 2:
            factor = full[owner][..., None]
        elif name == "v":
            factor = full[owner]
        else:
            factor = full[owner, :, place // float8_cases.BLOCK][..., None]
        numbers[name] = numbers[name] * factor
    return numbers


SM90 = harness.target_params(cpu=(), cuda=("sm90",))
PRODUCTS = [
    *(o for o in OPTIONS if "softcap" not in o),
    {"scales": "head", "head_dim": 128, "accumulate": "fast"},
    {"scales": "head", "head_dim": 256, "window": (63, 0), "kv_layout": "vllm"},
]
# Most rows that keys could be gathered into are unused: more than the gather's blocks take at once.
LONG = ((4100, 5, 0, 70, 4099, 1, 33, 64, 8) * 8, (3, 2, 0, 5, 1, 1, 2, 1, 2) * 8)


@pytest.mark.parametrize("kv_layout", ["nhd", "vllm"])
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_long_sequences_beside_short_ones(device, backend, kv_layout, rng):
    case = PagedCase(dtype="bfloat16", fp8=True, lens=LONG[0], kv_layout=kv_layout, scales="batch",
                     num_heads_q=2, num_heads_kv=1, head_dim=64)  # fmt: skip
    assert_case(device, backend, case, LONG[1], rng, "seqused_k")


@pytest.mark.parametrize("kind", ["none", "head", "batch", "channels"])
@pytest.mark.parametrize("lengths", ["seqused_k", "both"])
@pytest.mark.parametrize("option", PRODUCTS, ids=str)
@pytest.mark.parametrize("batch", ["chunks", "mixed", "few", "long"])
@pytest.mark.parametrize(("device", "backend"), SM90)
def test_products_of_codes_have_the_bits_of_rows(
    device, backend, batch, option, lengths, kind, rng
):
    """Float8 queries by sm90 over pages, which are gathered as codes, and over packed codes."""
    lens, queries = LONG if batch == "long" else BATCHES[batch]
    option, sums = dict(option), option.get("accumulate", "exact")
    option.pop("accumulate", None)
    case = PagedCase(**{**option, "scales": "none"}, dtype="bfloat16", fp8=True, lens=lens)
    problem = make(case, queries, rng)
    rows = [tokens_of(problem, name, None).astype(F8).view(np.uint8) for name in "kv"]
    float8_queries(problem, kind, rng)
    problem.options |= {"num_splits": 1, "accumulate": sums}
    results = [run(device, backend, problem, lengths, spare=2)]
    arena, arrays = harness.Arena(device), problem.arrays
    starts = [arrays["cu_seqlens_q"], np.cumsum((0, *lens)).astype(np.int32)]
    options = {n: problem.options[n] for n in ("causal", "window") if n in problem.options}
    options |= {
        n: arena.put(arrays[n]) for n in ("sinks", "q_scale", "k_scale", "v_scale") if n in arrays
    }
    result = cuattn.attention_varlen(
        *(arena.put(x) for x in (arrays["q"], *rows, *starts)), max(queries) + 2, max(lens) + 2,
        dtype="float8_e4m3fn", num_splits=1, accumulate=sums, backend=backend, return_lse=True,
        **options,
    )  # fmt: skip
    device.synchronize()
    results.append([device.numpy(x) for x in result])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(harness.bits(a), harness.bits(b))


def multiplies_codes(device, backend, problem):
    """Whether products of float8 run: on Hopper, of many queries without score options."""
    if device.name == "cpu" or backend != "auto":
        return False
    arrays = problem.arrays
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q")
    shapes = [("uint8", *arrays[n].shape) if n != names[3] else arrays[n].shape for n in names]
    more = ("block_tables", "alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale")
    options = {n: (str(arrays[n].dtype), *arrays[n].shape) for n in more if n in arrays}
    options |= {n: problem.options[n] for n in ("causal", "window", "softcap")}
    lens, longest = problem.case.lens, int(np.diff(arrays["cu_seqlens_q"]).max())
    plan = cuattn.explain(
        "attention_varlen", *shapes, None, longest, max(lens), kv_layout=problem.case.kv_layout,
        seqused_k=(len(lens),), dtype="float8_e4m3fn", device=0, **options,
    )  # fmt: skip
    return plan.kernel == "sm90" and "numbers" not in plan.reason


@pytest.mark.parametrize("kind", ["none", "head", "batch", "channels", "parts"])
@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", ["chunks", "mixed", "few"])
@pytest.mark.parametrize(("device", "backend"), PLAIN)
def test_float8_queries(device, backend, batch, option, kind, rng):
    lens, queries = BATCHES[batch]
    case = PagedCase(**{**option, "scales": "none"}, dtype="bfloat16", fp8=True, lens=lens)

    def attempt():
        problem = make(case, queries, rng)
        numbers = float8_queries(problem, kind, rng)
        out, lse = run(device, backend, problem, "seqused_k", spare=2 if kind != "parts" else 0)
        assert out.dtype == ml_dtypes.bfloat16
        arrays, options = problem.arrays, problem.options
        options = {n: options[n] for n in ("causal", "window", "softcap")}
        options |= {n: arrays[n] for n in ("alibi_slopes", "sinks") if n in arrays}
        ends = [arrays["cu_seqlens_q"], np.cumsum((0, *lens))]
        # The codes as they are, or q, or all three rounded once: what a row was computed from is
        # what its lse is nearest to. Rounded numbers are exact in the plain formula, too.
        reads_codes = device.name == "cpu" or backend == "naive"
        if multiplies_codes(device, backend, problem):  # P has 3 bits: the test above has its bits
            want, want_lse = reference.attention_varlen(
                *numbers.values(), *ends, max(queries), max(lens), **options
            )
            off, size = (
                np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (out - want, want)
            )
            assert np.linalg.norm(off) < 0.06 * np.linalg.norm(size)
            assert (off <= 0.3 * size + 0.05 * size.mean()).all()  # each row, too
            assert np.allclose(lse, want_lse, atol=0.02)
            return
        rounded = {n: x.astype(ml_dtypes.bfloat16).astype(np.float32) for n, x in numbers.items()}
        computed = [
            [reference.attention_varlen(*of.values(), *ends, max(queries), max(lens), **options,
                                        rounded_to=x) for x in (None, ml_dtypes.bfloat16)]
            for of in (numbers, {**numbers, "q": rounded["q"]}, rounded)[: 1 if reads_codes else 3]
        ]  # fmt: skip
        with np.errstate(invalid="ignore"):  # rows that see nothing have an lse of -inf
            far = np.abs([lse - want[1] for want, _ in computed])
        nearest = np.where(np.isnan(far), np.inf, far).argmin(axis=0)
        (want, want_lse), (plain, plain_lse) = (
            (np.choose(nearest.T[..., None], [x[i][0].astype(np.float64) for x in computed]),
             np.choose(nearest, [x[i][1] for x in computed])) for i in (0, 1)
        )  # fmt: skip
        cases.check(out, want, plain, "bfloat16")
        cases.check_lse(lse, want_lse, want_lse if reads_codes else plain_lse)

    harness.assert_by_draws("bfloat16", attempt)


def test_prompts_in_chunks_through_a_quantised_cache(device, rng):
    """Chunks that reshape_and_cache quantises by scales of heads, then tokens one by one."""
    scale = np.array([0.02, 0.013], np.float32)
    q, k, v = (
        rng.standard_normal((150, heads, 64), np.float32).astype(ml_dtypes.bfloat16)
        for heads in (8, 2, 2)
    )
    arena = harness.Arena(device)
    blocks = [arena.put(np.full((12, 16, 2, 64), 0x7F, np.uint8)) for _ in "kv"]
    table = arena.put(np.arange(11, -1, -1, dtype=np.int32)[None])
    scales = {f"{name}_scale": arena.put(scale) for name in "kv"}
    outs, at = [], 0
    for n in (64, 37, 1, 47, 1):
        slots = np.arange(at, at + n)
        slots = ((11 - slots // 16) * 16 + slots % 16).astype(np.int64)
        rows = [arena.put(x[at : at + n]) for x in (q, k, v)]
        cuattn.reshape_and_cache(*rows[1:], *blocks, arena.put(slots), **scales)
        at += n
        out = cuattn.attention_varlen(
            rows[0], *blocks, arena.put(np.array([0, n], np.int32)), None, n, 192,
            block_tables=table, seqused_k=arena.put(np.array([at], np.int32)), causal=True,
            dtype="float8_e4m3fn", **scales,
        )  # fmt: skip
        device.synchronize()
        outs.append(device.numpy(out))
    scaled = scale[:, None]
    stored = [np.asarray(x, np.float32) * (1 / scaled) for x in (k, v)]
    codes = [np.clip(x, -448, 448).astype(F8) for x in stored]  # beyond 464 NumPy makes NaN of it
    meant = [x.astype(np.float32) * scaled for x in codes]
    want = reference.attention(q[None], *(x[None] for x in meant), causal=True)[0][0]
    rounded = [x.astype(ml_dtypes.bfloat16) for x in meant]
    plain = reference.attention(
        q[None], *(x[None] for x in rounded), causal=True, rounded_to=ml_dtypes.bfloat16
    )[0][0]
    cases.check(np.concatenate(outs), want, plain, "bfloat16")


# Mutants: the oracle reads scales wrongly; the rule must notice each.
MUTANTS = {
    "k_scale of the next head": ("k_scale", lambda x: np.roll(x, 1, 1)),
    "v_scale of the next head": ("v_scale", lambda x: np.roll(x, 1, 1)),
    "k_scale of the next sequence": ("k_scale", lambda x: np.roll(x, 1, 0)),
    "v_scale of the next sequence": ("v_scale", lambda x: np.roll(x, 1, 0)),
    "no v_scale": ("v_scale", np.ones_like),
    "k_scale twice": ("k_scale", np.square),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_scales_show(name, rng):
    lens, queries = BATCHES["chunks"]
    case = PagedCase(dtype="bfloat16", fp8=True, lens=lens, scales="batch")
    problem = make(case, queries, rng)
    for scale in ("k_scale", "v_scale"):
        problem.arrays[scale] = np.array([[0.5, 2.0], [1.5, 0.8], [1.1, 0.6]], np.float32)
    out, _ = run(harness.Cpu(), "cpu", problem, "seqused_k")
    argument, change = MUTANTS[name]
    wrong = dataclasses.replace(problem, arrays=dict(problem.arrays))
    wrong.arrays[argument] = change(problem.arrays[argument])
    right, mutant = (
        [oracle(x, rounded)[0] for rounded in (None, cases.DTYPES["bfloat16"])]
        for x in (problem, wrong)
    )
    cases.check(out, *right, "bfloat16")
    with pytest.raises(AssertionError):
        cases.check(out, *mutant, "bfloat16")


def test_no_key_and_no_query(device, rng):
    for lens, queries in (((0, 0), (3, 40)), ((), ()), ((40, 40), (0, 0))):
        problem = make(PagedCase(fp8=True, lens=lens, scales="head"), queries, rng)
        out, lse = run(device, "auto", problem, "seqused_k", spare=1)
        assert not np.asarray(out, np.float32).any()
        assert np.isneginf(lse).all()


def test_caches_of_the_type_say_so_themselves(rng):
    """dtype= is for bytes alone."""
    problem = make(PagedCase(fp8=True, lens=(90,)), (70,), rng)
    arrays = problem.arrays
    given = {"block_tables": arrays["block_tables"], "seqused_k": np.array([90], np.int32)}
    outs = []
    for view, dtype in ((np.uint8, "float8_e4m3fn"), (paged_cases.E4M3, None)):
        caches = [arrays[n].view(view) for n in ("k_cache", "v_cache")]
        outs.append(cuattn.attention_varlen(arrays["q"], *caches, arrays["cu_seqlens_q"], None, 70,
                                            90, dtype=dtype, **given))  # fmt: skip
    assert np.array_equal(harness.bits(outs[0]), harness.bits(outs[1]))


@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize("queries", ["bfloat16", "float8_e4m3fn"])
def test_torch_and_jax_give_the_same_bits(queries, q_len, rng):
    problem = make(PagedCase(fp8=True, lens=(90,), dtype="bfloat16", scales="head"), (q_len,), rng)
    arrays = problem.arrays
    names = ("k_scale", "v_scale", "block_tables")
    given = {name: arrays[name] for name in names} | {"seqused_k": np.array([90], np.int32)}
    q = arrays["q"].astype(F8) if queries == "float8_e4m3fn" else arrays["q"]
    qkv = [q, *problem.caches()]
    ends = arrays["cu_seqlens_q"]
    want = cuattn.attention_varlen(*qkv, ends, None, q_len, 90, **given).view(np.int16)

    torch = pytest.importorskip("torch")

    def tensor(x):
        kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
        if str(x.dtype) not in kinds:
            return torch.from_numpy(x)
        raw = torch.from_numpy(np.ascontiguousarray(x).view(f"u{x.itemsize}"))
        return raw.view(kinds[str(x.dtype)])

    options = {name: tensor(x) for name, x in given.items()}
    out = cuattn.attention_varlen(*map(tensor, [*qkv, ends]), None, q_len, 90, **options)
    assert out.dtype == torch.bfloat16
    assert np.array_equal(out.view(torch.int16).numpy(), want)

    jax = pytest.importorskip("jax")
    face = importlib.import_module("cuattn.jax")

    @jax.jit
    def call(q, k, v, ends, options):
        return face.attention_varlen(q, k, v, ends, None, q_len, 90, **options)

    place = functools.partial(jax.device_put, device=jax.devices("cpu")[0])
    options = {name: place(x) for name, x in given.items()}
    out = call(*map(place, [*qkv, ends]), options)
    assert np.array_equal(np.asarray(out).view(np.int16), want)


def test_queries_are_rotated_first(rng):
    problem = make(PagedCase(fp8=True, lens=(90,), dtype="float16"), (70,), rng)
    arrays = problem.arrays
    given = {"block_tables": arrays["block_tables"], "seqused_k": np.array([90], np.int32)}
    given |= {"causal": True, "dtype": "float8_e4m3fn"}
    table = cuattn.rope_table(100, 64)
    positions = np.arange(20, 90)
    turned = cuattn.apply_rope(arrays["q"], *table, positions)
    rest = (arrays["k_cache"], arrays["v_cache"], arrays["cu_seqlens_q"], None, 70, 90)
    want = cuattn.attention_varlen(turned, *rest, **given)
    out = cuattn.attention_varlen(arrays["q"], *rest, **given, rope=table, rope_positions=positions)
    assert np.array_equal(harness.bits(out), harness.bits(want))
