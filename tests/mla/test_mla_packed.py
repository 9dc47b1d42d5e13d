# SPDX-License-Identifier: Apache-2.0
"""Packed latents, FlashMLA's cache of 656 bytes a token: mla_write quantises into it, mla_decode
reads it with the bits of a bfloat16 cache that holds what it says.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
import harness
import mla_cases
from harness import bits, target_params
from mla_cases import packed, unpacked

BF16 = ml_dtypes.bfloat16
SLOTS = np.array([17, -1, 3, 40, 0, 31])


def draw(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(BF16)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_infinity_costs_its_part_and_a_nan_itself(bad, rng):
    ckv, kpe = draw(rng, 1, 512), draw(rng, 1, 64)
    ckv[0, 200] = bad
    cache = np.zeros((1, 1, 656), np.uint8)
    cuattn.mla_write(ckv, kpe, cache, None, np.zeros(1, np.int64))
    with np.errstate(invalid="ignore"):  # 0 times infinity
        lost = np.isnan(unpacked(cache)[0, 0, :512].astype(np.float32))
    expected = np.arange(512) // 128 == 1 if np.isinf(bad) else np.arange(512) == 200
    assert np.array_equal(lost, expected)


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=("cpu",), cuda=("auto",)))
def test_rows_are_quantised_as_flashmla_does(device, backend, rng):
    ckv, kpe = draw(rng, len(SLOTS), 512), draw(rng, len(SLOTS), 64)
    ckv *= np.float32(10.0) ** rng.integers(-6, 6, (len(SLOTS), 1))
    ckv = ckv.astype(BF16)
    ckv[2, 128:256] = 0  # a part without a scale
    ckv[3, 5], ckv[3, 300] = 3e38, -1e-38
    arena = harness.Arena(device)
    rows = [arena.put(ckv, "padded", "ckv"), arena.put(kpe, "padded", "kpe")]
    cache = arena.output((3, 16, 656), np.uint8, "contiguous", "cache")
    before = device.numpy(cache).copy()
    slots = arena.put(SLOTS, name="slots", align=8)
    written = cuattn.mla_write(*rows, cache, None, slots)
    device.synchronize()
    assert written == (cache, None)
    got = device.numpy(cache).reshape(48, 656)
    want = before.reshape(48, 656).copy()
    there = SLOTS >= 0
    want[SLOTS[there]] = packed(ckv, kpe)[there]
    np.testing.assert_array_equal(got, want)


def test_the_error_is_that_of_e4m3(rng):
    """A sixteenth of a number at most, or a part in 2^9 of the largest of its 128 times 1 / 448."""
    ckv, kpe = draw(rng, 40, 512), draw(rng, 40, 64)
    cache = np.zeros((5, 8, 656), np.uint8)
    cuattn.mla_write(ckv, kpe, cache, None, np.arange(40))
    got, want = unpacked(cache).reshape(40, 576).astype(np.float64), ckv.astype(np.float64)
    largest = np.repeat(abs(want.reshape(40, 4, 128)).max(-1), 128, -1)
    limit = np.fmax(abs(want) / 16, largest / 448 * 2.0**-10) + 2.0**-8 * abs(want)
    assert (abs(got[:, :512] - want) <= limit).all()
    assert (abs(got[:, :512] - want).max(-1) > 0).all()
    assert (bits(unpacked(cache).reshape(40, 576)[:, 512:]) == bits(kpe)).all()


LISTS = {"tables": False, "lists": True}


def drawn_cache(rng, blocks, size):
    cache = rng.integers(0, 127, (blocks, size, 656)).astype(np.uint8)  # no NaN among the codes
    cache[..., :512] |= rng.integers(0, 2, (blocks, size, 512)).astype(np.uint8) << 7
    scales = rng.uniform(1e-4, 4e-3, (blocks, size, 4)).astype(np.float32)
    cache[..., 512:528] = scales.view(np.uint8).reshape(blocks, size, 16)
    cache[..., 528:] = draw(rng, blocks, size, 64).view(np.uint8)
    return cache


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [9, 40])
@pytest.mark.parametrize(
    ("device", "backend", "lists"),
    target_params(
        list(LISTS.values()), cpu=("cpu",), cuda=("auto", "sm90", "sm80", "simt"), ids=list(LISTS)
    ),
)
def test_decode_has_the_bits_of_the_cache_it_stands_for(device, backend, lists, heads, splits, rng):
    """By the kernel that reads both: each tile of sm80, sm90; queries without a key."""
    seqs, blocks, size = 3, 7, 16
    cache = drawn_cache(rng, blocks, size)
    q = draw(rng, seqs, heads, 576)
    arena = harness.Arena(device)
    q, whole = arena.put(q, name="q"), arena.put(unpacked(cache), name="whole")
    codes = arena.put(cache, "padded", "codes")
    put = lambda x, name: arena.put(x.astype(np.int32), name=name, align=4)  # noqa: E731
    options = {"scale": mla_cases.SCALE, "return_lse": True, "num_splits": splits}
    entries, counts = rng.integers(-20, blocks * size, (seqs, 200)), np.array([200, 0, 77])
    if lists:
        tables, lens = None, None
        named = {"indices": put(entries, "indices"), "topk_lens": put(counts, "topk_lens")}
    else:
        named, tables = {}, put(rng.permutation(blocks)[: 2 * seqs].reshape(seqs, 2), "tables")
        lens = put(np.array([32, 0, 19]), "lens")
    parts = q[..., :512], q[..., 512:]
    call = (*parts, codes, None, tables, lens)
    plan = cuattn.explain("mla_decode", *call, backend=backend, **options, **named)
    out, lse = cuattn.mla_decode(*call, backend=backend, **options, **named)
    want, want_lse = cuattn.mla_decode(
        *parts, whole[..., :512], whole[..., 512:], tables, lens, backend=plan.kernel,
        **options, **named,
    )  # fmt: skip
    device.synchronize()
    arena.verify()
    assert abs(device.numpy(want).astype(np.float32)).max() > 0.01
    for got, expected in ((out, want), (lse, want_lse)):
        assert (bits(device.numpy(got)) == bits(device.numpy(expected))).all()


@pytest.mark.parametrize("heads", [16, 128])
def test_packed_rows_go_by_sm80(heads):
    shapes = (4, heads, 512), (4, heads, 64), ("uint8", 4, 300, 656), None, None, None
    plan = cuattn.explain("mla_decode", *shapes, scale=1.0, device="h100", dtype="bfloat16")
    assert plan.kernel == "sm80"
    assert "sm90: cannot: it takes packed latents in pages" in plan.ladder


def decode_arrays():
    return {
        "q_nope": np.ones((2, 4, 512), BF16),
        "q_pe": np.ones((2, 4, 64), BF16),
        "ckv_cache": np.zeros((3, 8, 656), np.uint8),
        "kpe_cache": None,
        "block_tables": np.zeros((2, 2), np.int32),
        "context_lens": np.array([5, 16], np.int32),
    }


F16 = np.float16
DECODE = [
    ({"kpe_cache": np.zeros((3, 8, 64), BF16)}, "kpe_cache must be None and q_pe an array where"),
    ({"q_pe": None}, "kpe_cache must be None and q_pe an array where ckv_cache is uint8"),
    ({"q_nope": np.ones((2, 4, 512), F16), "q_pe": np.ones((2, 4, 64), F16)},
     "q_nope must be bfloat16 over packed latents"),
    ({"ckv_cache": np.zeros((3, 8, 640), np.uint8)}, "ckv_cache must have bytes of a packed"),
    ({"ckv_cache": np.zeros((3, 8, 1, 656), np.uint8)}, "ckv_cache must have 3 axes"),
    ({"ckv_cache": np.zeros((3, 8, 660), np.uint8)[..., :656]}, "must have a packed latent"),
    ({"q_nope": np.ones((2, 4, 256), BF16)}, "q_nope must have columns 512 like packed latents"),
    ({"q_pe": np.ones((2, 4, 32), BF16)}, "q_pe must have columns 64 like packed latents"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DECODE, ids=range(len(DECODE)))
def test_decode_refuses(change, message):
    out = np.full((2, 4, 512), 7, BF16)
    with pytest.raises(ValueError, match=message):
        cuattn.mla_decode(*(decode_arrays() | change).values(), scale=0.1, out=out)
    assert (out == 7).all()


ROPE = {"cos": np.ones((9, 8), np.float32), "sin": np.ones((9, 8), np.float32),
        "positions": np.zeros(2, np.int64)}  # fmt: skip
WRITE = [
    ({"kpe": None}, "kpe_cache must be None and kpe an array where ckv_cache is uint8"),
    ({"ckv": np.ones((2, 512), F16), "kpe": np.ones((2, 64), F16)}, "ckv must be bfloat16 for"),
    ({"ckv": np.ones((2, 256), BF16)}, "ckv must have columns 512 like packed latents"),
    ({"kpe": np.ones((2, 128), BF16)}, "kpe must have columns 64 like packed latents"),
    ({"kpe": np.ones((3, 64), BF16)}, "kpe must have num_tokens 2 like ckv"),
    ({"ckv_cache": np.full((3, 8, 576), 7, np.uint8)}, "must have bytes of a packed latent"),
    (ROPE, "cos, sin and positions must be None where ckv_cache is uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRITE, ids=range(len(WRITE)))
def test_write_refuses(change, message):
    arrays = {"ckv": np.ones((2, 512), BF16), "kpe": np.ones((2, 64), BF16),
              "ckv_cache": np.full((3, 8, 656), 7, np.uint8), "kpe_cache": None,
              "slot_mapping": np.array([0, 9])} | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cuattn.mla_write(**arrays)
    assert (arrays["ckv_cache"] == 7).all()


def plan_of(heads=128, seqs=4, topk=2048, device="h100", cache=("uint8", 100, 64, 656), **more):
    return cuattn.explain(
        "mla_decode", (seqs, heads, 512), (seqs, heads, 64), cache,
        None if cache[0] == "uint8" else (*cache[:2], 64), None, None, scale=1.0,
        indices=(seqs, topk), device=device, dtype="bfloat16", **more,
    )  # fmt: skip


@pytest.mark.parametrize(("device", "kernel"), [("h100", "sm90"), ("a100", "sm80")])
def test_what_explain_says_of_packed_latents(device, kernel):
    plan = cuattn.explain(
        "mla_decode", (4, 128, 512), (4, 128, 64), ("uint8", 100, 64, 656), None, (4, 9), (4,),
        scale=1.0, device=device, dtype="bfloat16",
    )  # fmt: skip
    assert plan.kernel == kernel


@pytest.mark.parametrize("heads", [17, 128])
@pytest.mark.parametrize(("seqs", "topk"), [(4, 2048), (3, 5), (1, 0), (910, 2048)])
def test_packed_lists_take_the_plan_of_a_bfloat16_cache(seqs, topk, heads):
    """And nothing more of the workspace; of 16 heads sm80 is faster."""
    plain = plan_of(heads, seqs, topk, cache=(100, 64, 512))
    assert plain.kernel == "sm90"
    assert plan_of(heads, seqs, topk) == plain
    assert plan_of(16, seqs, topk).kernel == "sm80"
    assert plan_of(16, seqs, topk, backend="sm90").kernel == "sm90"


def test_explain_takes_the_plain_shape_of_packed_latents():
    """Without kpe_cache it can be no other."""
    shapes = (4, 128, 512), (4, 128, 64), (100, 64, 656), None, None, None
    words = {"scale": 1.0, "indices": (4, 2048), "device": "a100"}
    plan = cuattn.explain("mla_decode", *shapes, dtype="bfloat16", **words)
    assert (plan.kernel, plan.tile_m, plan.tile_n) == ("sm80", 32, 16)
    named = [*shapes[:2], ("uint8", *shapes[2]), *shapes[3:]]
    assert plan == cuattn.explain("mla_decode", *named, dtype="bfloat16", **words)
    with pytest.raises(ValueError, match="q_nope must be bfloat16 over packed latents"):
        cuattn.explain("mla_decode", *shapes, dtype="float16", **words)
    with pytest.raises(ValueError, match="q_pe and kpe_cache must be given together"):
        cuattn.explain("mla_decode", *shapes[:2], (100, 64, 512), None, None, None, **words)
