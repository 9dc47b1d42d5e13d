# SPDX-License-Identifier: Apache-2.0
"""mla_decode over lists of tokens (indices=) against float64: a list for each query, with entries
that are no token anywhere in it, tokens twice, NaN in every token that no list names.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

import cases
import cuattn
import harness
import mla_cases
import reference
from harness import bits, target_params

TARGETS = {"cpu": ("cpu",), "cuda": ("auto", "sm90", "sm80", "simt")}
NONE = (
    -1,
    -1,
    -1,
    -(2**31),
    2**31 - 1,
)  # entries that are no token; one more is the first past all


@dataclasses.dataclass(frozen=True)
class ListCase:
    """One call; the data comes from a seed."""

    dtype: str = "bfloat16"
    heads: int = 16
    q_len: int | None = None
    seqs: int = 3
    topk: int = 100
    block_size: int = 64
    num_blocks: int = 9
    latent: int = 512
    rope: int = 64
    holes: float = 0.3  # share of entries that are no token
    lens: bool = False  # topk_lens
    joined: bool = True
    packed: bool = False  # FlashMLA's bytes
    softcap: float = 0.0
    sinks: bool = False
    options: tuple = ()

    __str__ = mla_cases.MlaCase.__str__


def make(case, rng):
    """Random inputs by name; the first list is all holes, the last has none."""
    dtype, slots = cases.DTYPES[case.dtype], case.num_blocks * case.block_size
    axes = (case.seqs, *([] if case.q_len is None else [case.q_len]))
    lists = np.prod(axes, dtype=int)
    named = rng.permutation(slots)[: max(1, slots // 2)]
    indices = rng.choice(named, (lists, case.topk)).astype(np.int32)  # some of them twice
    shares = np.full(lists, case.holes)
    shares[:1] = 1.0
    shares[1:][-1:] = 0.0
    holes = rng.random(indices.shape) < shares[:, None]
    indices[holes] = rng.choice(np.array([*NONE, slots], np.int64), holes.sum()).astype(np.int32)
    columns = case.latent + case.rope
    cache = rng.standard_normal((slots, columns), np.float32)
    cache = cache.astype(dtype)
    if case.packed:
        cache = mla_cases.packed(cache[:, :512], np.ascontiguousarray(cache[:, 512:]))
    cache[np.setdiff1d(np.arange(slots), named)] = 0xFF if case.packed else np.nan
    q = rng.standard_normal((*axes, case.heads, columns), np.float32).astype(dtype)
    arrays = {"q": q, "cache": cache.reshape(case.num_blocks, case.block_size, -1)}
    if case.lens:
        lens = rng.integers(0, case.topk + 1, lists).astype(np.int32)
        lens[-1:] = case.topk
        for row, length in enumerate(lens):  # those behind would be seen
            indices[row, length:] = rng.integers(0, slots, case.topk - length)
        arrays["topk_lens"] = lens.reshape(axes)
    arrays["indices"] = indices.reshape(*axes, case.topk)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.heads).astype(np.float32)
    return arrays


def expected(case, arrays, rounded_to=None):
    """Each list as a sequence of one query over blocks of one token, without its holes."""
    q, cache = arrays["q"], arrays["cache"]
    cache = mla_cases.unpacked(cache) if case.packed else cache
    axes, slots = q.shape[:-2], cache.shape[0] * cache.shape[1]
    lists = arrays["indices"].reshape(np.prod(axes, dtype=int), case.topk)
    lens = arrays.get("topk_lens", np.full(len(lists), case.topk)).reshape(-1)
    found = [
        row[:n][(row[:n] >= 0) & (row[:n] < slots)] for row, n in zip(lists, lens, strict=True)
    ]
    tables = np.zeros((len(found), max(map(len, found), default=0) + 1), np.int32)
    for row, tokens in zip(tables, found, strict=True):
        row[: len(tokens)] = tokens
    keys = cache.reshape(slots, 1, 1, -1)
    out, lse = reference.paged_attention(
        q.reshape(-1, *q.shape[-2:]), keys, keys[..., : case.latent], tables,
        np.array([len(tokens) for tokens in found], np.int32), causal=True, window=(-1, -1),
        softcap=case.softcap, sinks=arrays.get("sinks"), scale=mla_cases.SCALE,
        rounded_to=rounded_to,
    )  # fmt: skip
    lse = lse.reshape(*axes, case.heads)
    return out.reshape(*axes, *out.shape[1:]), lse if case.q_len is None else lse.swapaxes(1, 2)


def call(device, backend, case, arrays, give_out=False):
    """Call mla_decode; out and lse as numpy arrays, every buffer checked."""
    arena, latent, placed = harness.Arena(device), case.latent, []
    for name in ("q", "cache"):
        whole = arrays[name]
        if case.packed and name == "cache":
            placed += [arena.put(whole, "padded", name), None]
        elif case.joined:
            view = arena.put(whole, name=name)
            placed += [view[..., :latent], view[..., latent:] if case.rope else None]
        else:
            placed += [arena.put(whole[..., :latent], "padded", name),
                       arena.put(whole[..., latent:], "padded", name + " rope")]  # fmt: skip
    options = {
        name: arena.put(arrays[name], name=name, align=4)
        for name in ("indices", "topk_lens", "sinks")
        if name in arrays
    }
    if give_out:
        shape = (*arrays["q"].shape[:-1], latent)
        lse_shape = (shape[0], shape[-2], *shape[1:-2])
        options["out"] = arena.output(shape, arrays["q"].dtype, "padded", "out")
        options["lse_out"] = arena.output(lse_shape, np.float32, "padded", "lse_out", align=4)
    out, lse = cuattn.mla_decode(
        *placed, None, None, scale=mla_cases.SCALE, softcap=case.softcap, return_lse=True,
        backend=backend, **options, **dict(case.options),
    )  # fmt: skip
    device.synchronize()
    assert not give_out or (out is options["out"] and lse is options["lse_out"])
    arena.verify()
    return device.numpy(out), device.numpy(lse)


CASES = [
    ListCase(),
    ListCase(dtype="float16", heads=7, topk=1, block_size=1, seqs=9),
    ListCase(dtype="float32", heads=5, q_len=3, topk=33, joined=False),
    ListCase(dtype="bfloat16", heads=3, q_len=1, seqs=4, topk=65, block_size=3, num_blocks=70),
    ListCase(dtype="float16", heads=33, q_len=2, topk=64, block_size=400, num_blocks=1),
    ListCase(heads=128, topk=129, seqs=2, lens=True),
    ListCase(dtype="float16", heads=64, q_len=4, topk=200, lens=True, sinks=True, joined=False),
    ListCase(heads=20, q_len=2, topk=90, softcap=5.0, holes=0.9),
    ListCase(heads=8, topk=700, seqs=2, options=(("num_splits", 5),), dtype="float16"),
    ListCase(heads=40, topk=2048, seqs=2, num_blocks=64, options=(("num_splits", 3),)),
    ListCase(heads=24, topk=1100, q_len=2, options=(("batch_invariant", True),), dtype="float16"),
    ListCase(heads=16, topk=600, seqs=40, lens=True, holes=0.02),
    ListCase(dtype="float32", heads=2, latent=80, rope=0, topk=31, seqs=5, lens=True),
    ListCase(dtype="float16", heads=9, latent=1024, rope=128, topk=20, q_len=2),
    ListCase(dtype="bfloat16", heads=70, topk=128, holes=0.0, seqs=2),
    ListCase(heads=4, topk=0, seqs=2, sinks=True),
    ListCase(packed=True, heads=40, q_len=2, topk=133, lens=True),
    ListCase(packed=True, heads=128, topk=1100, seqs=2, num_blocks=64,
             options=(("num_splits", 3),)),
    ListCase(packed=True, heads=20, q_len=3, topk=90, block_size=3, num_blocks=70, holes=0.9,
             softcap=5.0, sinks=True),
    ListCase(packed=True, heads=64, topk=600, seqs=40, lens=True, holes=0.02),
    ListCase(packed=True, heads=24, q_len=2, topk=1100, options=(("batch_invariant", True),)),
    ListCase(packed=True, heads=7, topk=1, block_size=1, seqs=9),
    ListCase(packed=True, heads=33, topk=9000, seqs=1, block_size=400, num_blocks=30),
    ListCase(packed=True, heads=18, topk=0, seqs=2, sinks=True),
]  # fmt: skip


def serves(backend, case):
    if backend == "sm90":
        return case.dtype != "float32" and (case.latent, case.rope) == (512, 64)
    return backend != "sm80" or (case.dtype != "float32" and case.latent <= 512 and case.rope <= 64)


def assert_case(device, backend, case, rng):
    """The library against the oracle for one case."""

    def attempt():
        arrays = make(case, rng)
        out, lse = call(device, backend, case, arrays, give_out=case.heads % 2 == 0)
        want, want_lse = expected(case, arrays)
        plain, plain_lse = expected(case, arrays, cases.DTYPES[case.dtype])
        cases.check_lse(lse, want_lse, plain_lse)
        cases.check(out, want, plain, case.dtype)

    harness.assert_by_draws(case.dtype, attempt, small=2)


@pytest.mark.parametrize(
    ("device", "backend", "case"), target_params(CASES, **TARGETS, ids=[str(c) for c in CASES])
)
def test_lists_against_float64(device, backend, case, rng):
    if serves(backend, case):
        return assert_case(device, backend, case, rng)
    with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot run this"):
        call(device, backend, case, make(case, rng))


def holes_as_slot(slot):
    """What is no token is read as one."""

    def change(case, arrays):
        lists, slots = arrays["indices"], arrays["cache"].shape[0] * arrays["cache"].shape[1]
        found = lists[(lists >= 0) & (lists < slots)].flat[slot]
        return {"indices": np.where((lists < 0) | (lists >= slots), found, lists)}

    return change


def once(case, arrays):
    """A token twice counts once."""
    lists = arrays["indices"].reshape(-1, case.topk).copy()
    for row in lists:
        _, first = np.unique(row, return_index=True)
        row[np.setdiff1d(np.arange(case.topk), first)] = -1
    return {"indices": lists.reshape(arrays["indices"].shape)}


MUTANTS = {
    "right": lambda case, arrays: {},
    "first_token_for_holes": holes_as_slot(0),
    "last_token_for_holes": holes_as_slot(-1),
    "tokens_counted_once": once,
    "list_of_the_first_query": lambda case, arrays: {
        "indices": np.repeat(arrays["indices"][:, :1], case.q_len, 1)
    },
    "lens_ignored": lambda case, arrays: {
        "topk_lens": np.full_like(arrays["topk_lens"], case.topk),
        "cache": np.nan_to_num(arrays["cache"].astype(np.float32)).astype(arrays["cache"].dtype),
    },
    "lens_of_the_sequence": lambda case, arrays: {
        "topk_lens": np.repeat(arrays["topk_lens"].min(1, keepdims=True), case.q_len, 1)
    },
    "last_entry_left_out": lambda case, arrays: {"topk_lens": np.fmax(arrays["topk_lens"] - 1, 0)},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices(name, rng):
    """The plain formula on lists that are read wrongly, in the library's place."""

    def mutant(device, backend, case, arrays, give_out):
        return expected(case, {**arrays, **MUTANTS[name](case, arrays)}, cases.DTYPES[case.dtype])

    case = ListCase(
        dtype="float16", heads=4, q_len=3, topk=24, block_size=16, num_blocks=3, lens=True
    )
    with mock.patch(f"{__name__}.call", mutant):
        if name == "right":
            return assert_case(None, "cpu", case, rng)
        with pytest.raises(AssertionError):
            assert_case(None, "cpu", case, rng)


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=("cpu",), cuda=("sm80", "simt")))
def test_blocks_of_one_token_are_the_same_bits(device, backend, rng):
    """A list without holes, as a block table."""
    case = ListCase(dtype="float16", heads=12, topk=300, holes=0.0, seqs=1)
    arrays = make(case, rng)
    arrays["indices"] = rng.integers(0, 9 * 64, (1, 300)).astype(np.int32)
    arrays["cache"] = rng.standard_normal(arrays["cache"].shape, np.float32).astype(np.float16)
    out, lse = call(device, backend, case, arrays)
    tables = {"q": arrays["q"], "cache": arrays["cache"].reshape(-1, 1, 576),
              "block_tables": arrays["indices"],
              "context_lens": np.array([300], np.int32)}  # fmt: skip
    same = mla_cases.MlaCase(dtype="float16", heads=12, block_size=1, lens=(300,))
    for mine, other in zip((out, lse), mla_cases.call(device, backend, same, tables), strict=True):
        assert (bits(mine) == bits(other)).all()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("device", "backend"), target_params(**{**TARGETS, "cuda": ("sm90", "sm80", "simt")})
)
def test_a_list_does_not_depend_on_its_batch(device, backend, packed, rng):
    case = ListCase(
        heads=8, topk=1200, q_len=2, packed=packed, options=(("batch_invariant", True),)
    )
    arrays = make(case, rng)
    whole = call(device, backend, case, arrays)
    few = {n: a if n == "cache" else a[[2, 1]] for n, a in arrays.items()}
    for all_of_them, part in zip(whole, call(device, backend, case, few), strict=True):
        assert (bits(all_of_them[[2, 1]]) == bits(part)).all()


def test_dsa_in_words():
    """Plain numpy, the way the docs say it."""
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((10, 64, 576), np.float32)
    q = rng.standard_normal((2, 16, 576), np.float32)
    indices = np.array([[5 * 64 + 3, -1, 17, 17], [-1, 9 * 64, 640, 3]], np.int32)
    y = cuattn.mla_decode(
        q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], None, None,
        scale=192**-0.5, indices=indices,
    )  # fmt: skip
    for b, tokens in enumerate(([(5, 3), (0, 17), (0, 17)], [(9, 0), (0, 3)])):
        keys = np.array([cache[t] for t in tokens], np.float64)
        weights = np.exp(192**-0.5 * q[b].astype(np.float64) @ keys.T)
        want = weights @ keys[:, :512] / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(y[b], want, rtol=0, atol=1e-5)


def bad_arrays():
    return {
        "q_nope": np.ones((2, 3, 4, 512), np.float32),
        "q_pe": np.ones((2, 3, 4, 64), np.float32),
        "ckv_cache": np.ones((3, 8, 512), np.float32),
        "kpe_cache": np.ones((3, 8, 64), np.float32),
        "block_tables": None,
        "context_lens": None,
    }


LISTS = np.zeros((2, 3, 5), np.int32)
REFUSED = [  # what is changed, and what the message says
    ({"block_tables": np.zeros((2, 1), np.int32), "context_lens": np.ones(2, np.int32)},
     "block_tables and context_lens must be None where indices are given, got both"),
    ({"context_lens": np.ones(2, np.int32)}, "must be None where indices are given"),
    ({"indices": LISTS.astype(np.int64)}, "indices must be int32, got int64"),
    ({"indices": LISTS[:, 0]}, r"indices must have 3 axes \[num_seqs, q_len, topk\], got"),
    ({"indices": LISTS[:1]}, "indices must have num_seqs 2 like q_nope, got 1"),
    ({"indices": LISTS[:, :2]}, "indices must have q_len 3 like q_nope, got 2"),
    ({"indices": np.zeros((2, 4, 5), np.int32)[:, :3]},
     r"indices must be contiguous over sequences and queries, got strides \(20, 5, 1\); make"),
    ({"indices": np.zeros((2, 3, 10), np.int32)[..., ::2]}, "indices must"),
    ({"topk_lens": np.zeros(2, np.int32)}, r"topk_lens must have 2 axes \[num_seqs, q_len\], got"),
    ({"topk_lens": np.zeros((2, 3), np.int64)}, "topk_lens must be int32, got int64"),
    ({"topk_lens": np.zeros((2, 2), np.int32)}, "topk_lens must have q_len 3 like q_nope, got 2"),
    ({"topk_lens": np.zeros((2, 6), np.int32)[:, ::2]},
     "topk_lens must be contiguous over sequences"),
    ({"topk_lens": np.array([[0, 5, 6], [0, 0, 0]], np.int32)},
     r"topk_lens must lie within \[0, 5\], got 6 at index 2"),
    ({"topk_lens": np.array([[0, 5, 5], [0, -1, 0]], np.int32)},
     r"topk_lens must lie within \[0, 5\], got -1 at index 4"),
    ({"window": (7, -1)}, r"window must be \(-1, -1\) where indices are given, got \(7, -1\)"),
    ({"out": np.zeros((6, 4, 512), np.float32)}, "out must have shape"),
    ({"ckv_cache": np.ones((0, 8, 512), np.float32), "kpe_cache": np.ones((0, 8, 64), np.float32)},
     r"ckv_cache must hold at least one token, got shape \(0, 8, 512\); allocate a block"),
    ({"kpe_cache": np.ones((3, 4, 64), np.float32)}, "kpe_cache must have block_size 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_lists_are_refused(change, message):
    arrays = bad_arrays()
    out = np.full((2, 3, 4, 512), 7, np.float32)
    options = {"scale": 0.1, "out": out, "indices": LISTS}
    for name, value in change.items():
        (arrays if name in arrays else options)[name] = value
    with pytest.raises(ValueError, match=message):
        cuattn.mla_decode(*arrays.values(), **options)
    assert (out == 7).all()


def test_lengths_and_memory_that_do_not_fit():
    arrays = bad_arrays()
    tables, lens = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match="topk_lens must be given with indices"):
        cuattn.mla_decode(*list(arrays.values())[:4], tables, lens, scale=1.0, topk_lens=lens)
    with pytest.raises(
        TypeError, match="block_tables must be an int32 array, got None; with indices"
    ):
        cuattn.mla_decode(*arrays.values(), scale=1.0)
    memory = np.zeros(2 * 3 * 4 * 512, np.float32)
    lists = memory.view(np.int32)[:30].reshape(2, 3, 5)
    with pytest.raises(ValueError, match="out must not share memory with indices"):
        cuattn.mla_decode(
            *arrays.values(), scale=1.0, indices=lists, out=memory.reshape(2, 3, 4, 512)
        )


@pytest.mark.parametrize(
    ("device", "heads", "kernel", "said"),
    [
        ("h100", 128, "sm90", "sm90: runs: wgmma"),
        ("h200", 16, "sm90", "sm80: can: tensor cores"),
        ("a100", 128, "sm80", "sm80: runs"),
    ],
)
def test_what_explain_says_of_lists(device, heads, kernel, said):
    plan = cuattn.explain(
        "mla_decode", (4, 2, heads, 512), (4, 2, heads, 64), (100, 64, 512), (100, 64, 64),
        None, None, scale=1.0, indices=(4, 2, 2048), topk_lens=(4, 2), device=device,
        dtype="bfloat16",
    )  # fmt: skip
    assert plan.kernel == kernel
    assert said in plan.ladder
