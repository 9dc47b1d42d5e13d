# SPDX-License-Identifier: Apache-2.0
"""mla_attention in both forms, mla_project and mla_write against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import cuattn
import harness
import reference
from cases import DTYPES
from harness import Arena, bits
from mla_cases import CUDA_BACKENDS

FORMS = ("explicit", "absorbed")
# batch, heads, seqlen_q, seqlen_kv, latent, head_dim, head_dim_v, rope_dim
SHAPES = [
    (2, 3, 7, 50, 48, 24, 16, 0),
    (1, 4, 65, 65, 64, 32, 32, 16),
    (2, 2, 1, 200, 512, 128, 128, 64),
    (1, 2, 9, 4, 32, 16, 24, 8),
    (1, 5, 70, 130, 1024, 64, 64, 0),
]


def draw(rng, shape, dtype, size=1.0):
    return (rng.standard_normal(shape, np.float32) * size).astype(DTYPES[dtype])


def make(rng, shape, dtype, same):
    batch, heads, rows, keys, latent, dim, dim_v, rope = shape
    arrays = {
        "q": draw(rng, (batch, heads, rows, dim), dtype),
        "k_latent": draw(rng, (batch, keys, latent), dtype),
        "v_latent": None if same else draw(rng, (batch, keys, latent), dtype),
        "k_proj": draw(rng, (heads, latent, dim), dtype, latent**-0.5),
        "v_proj": draw(rng, (heads, latent, dim_v), dtype, latent**-0.5),
    }
    if rope:
        arrays["q_rope"] = draw(rng, (batch, heads, rows, rope), dtype)
        arrays["k_rope"] = draw(rng, (batch, keys, rope), dtype)
    return arrays


def formula(arrays, form, causal, rounded_to=None):
    """The formula of a form; with `rounded_to` what lies between its steps is rounded."""
    compute = np.float64 if rounded_to is None else np.float32
    a = {n: x.astype(compute) for n, x in arrays.items() if x is not None}
    rounded = lambda x: x if rounded_to is None else x.astype(rounded_to).astype(compute)  # noqa: E731
    k_latent, v_latent = a["k_latent"], a.get("v_latent", a["k_latent"])
    scale = (arrays["q"].shape[-1] + (a["q_rope"].shape[-1] if "q_rope" in a else 0)) ** -0.5
    if form == "explicit":
        q = a["q"]
        k = rounded(np.einsum("btl,hld->bhtd", k_latent, a["k_proj"]))
        v = rounded(np.einsum("btl,hld->bhtd", v_latent, a["v_proj"]))
    else:
        q = rounded(np.einsum("bhsd,hld->bhsl", a["q"], a["k_proj"]))
        k, v = k_latent[:, None], v_latent[:, None]
    if "q_rope" in a:
        q = np.concatenate([q, a["q_rope"]], -1)
        e = np.broadcast_to(a["k_rope"][:, None], (*k.shape[:3], a["k_rope"].shape[-1]))
        k = np.concatenate([k, e], -1)
    out, lse = reference.attention(
        q, k, v, layout="bhsd", causal=causal, scale=scale, rounded_to=rounded_to
    )
    if form == "absorbed":
        out = np.einsum("bhsl,hld->bhsd", rounded(out.astype(compute)), a["v_proj"])
    return out, lse


def assert_form(device, rng, shape, dtype, form, causal, same=True, joined=False, backend="auto"):
    """One call against float64; `joined`: the rope columns lie beside the latents."""

    def attempt():
        arrays = make(rng, shape, dtype, same)
        arena = Arena(device)
        apart = {n: x for n, x in arrays.items() if x is not None}
        if joined:
            whole = np.concatenate([apart.pop("k_latent"), apart.pop("k_rope")], -1)
            whole = arena.put(whole, name="k_latent")
        placed = {n: arena.put(x, name=n) for n, x in apart.items()}
        if joined:
            placed["k_latent"], placed["k_rope"] = whole[..., : shape[4]], whole[..., shape[4] :]
        if same:
            placed["v_latent"] = placed["k_latent"]
        positional = [placed.pop(n) for n in tuple(arrays)[:5]]
        out = arena.output((*shape[:3], shape[6]), DTYPES[dtype], "transposed", "out")
        result, lse = cuattn.mla_attention(
            *positional, **placed, causal=causal, form=form, return_lse=True, out=out,
            backend=backend,
        )  # fmt: skip
        device.synchronize()
        assert result is out
        arena.verify()
        want, want_lse = formula(arrays, form, causal)
        other, other_lse = formula(arrays, FORMS[form == "explicit"], causal)
        np.testing.assert_allclose(want, other, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(want_lse, other_lse, rtol=1e-9, atol=1e-9)
        plain, plain_lse = formula(arrays, form, causal, DTYPES[dtype])
        cases.check_lse(device.numpy(lse), want_lse, plain_lse)
        cases.check(device.numpy(result), want, plain, dtype)

    # Few rows: of 16 bits too, chance alone puts a draw a little beyond twice the plain error.
    harness.assert_by_draws(dtype, attempt, small=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forms_against_float64(device, shape, form, rng):
    dtypes = itertools.cycle(DTYPES)
    for same, causal in itertools.product((True, False), repeat=2):
        assert_form(device, rng, shape, next(dtypes), form, causal, same)


# batch, heads, seqlen_q, seqlen_kv: tiles of 32 keys and 64 rows that are full, end early, or see
# nothing; several row groups; one long sequence, in parts.
ROWS = [
    (3, 5, 7, 77), (2, 16, 5, 130), (1, 17, 1, 900), (2, 3, 40, 33), (3, 33, 1, 32), (1, 9, 2, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "shape"),
    harness.target_params([(s,) for s in ROWS], cpu=("cpu",), cuda=CUDA_BACKENDS),
)
def test_latents_in_rows_on_each_kernel(device, backend, shape, rng):
    for dtype, causal, joined in (("bfloat16", True, True), ("float16", False, False)):
        widths = (512, 16, 8, 64)
        assert_form(
            device, rng, shape + widths, dtype, "absorbed", causal, joined=joined, backend=backend
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_project_against_float64(device, dtype, rng):
    for lead, heads, latent, dim, transpose in [
        ((), 3, 16, 8, False), ((5,), 2, 512, 128, True), ((5,), 2, 512, 128, False),
        ((3, 37), 2, 48, 72, True), ((2, 1), 4, 200, 24, False), ((70,), 1, 1024, 8, False),
        ((0,), 2, 16, 8, True),
        # Enough tiles for the SMs of an H200: those of 64 rows, then those of 128.
        ((37,), 66, 136, 72, False), ((37,), 66, 72, 136, True), ((130,), 66, 200, 136, False),
        ((130,), 66, 136, 200, True),
    ]:  # fmt: skip
        x = draw(rng, (*lead, heads, dim if transpose else latent), dtype)
        proj = draw(rng, (heads, latent, dim), dtype)
        arena = Arena(device)
        placed = arena.put(x, "padded", "x"), arena.put(proj, "padded", "proj")
        out = arena.output((*lead, heads, latent if transpose else dim), DTYPES[dtype], "padded")
        assert cuattn.mla_project(*placed, transpose=transpose, out=out) is out
        device.synchronize()
        arena.verify()
        spec = "...hd,hld->...hl" if transpose else "...hl,hld->...hd"
        want = np.einsum(spec, x.astype(np.float64), proj.astype(np.float64))
        error = abs(device.numpy(out).astype(np.float64) - want)
        # Sums of up to 1024 products in float32, then one rounding.
        size = np.einsum(spec, abs(x.astype(np.float64)), abs(proj.astype(np.float64)))
        eps = cases.EPS[dtype] if dtype != "float32" else 0.0
        assert (error <= eps * abs(want) + 2e-5 * size + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_alone_are_written(device, dtype, rng):
    slots = np.array([5, 31, -1, 0, 17], np.int64)
    for latent, joined in itertools.product((8, 24, 512), (True, False)):
        arena = Arena(device)
        ckv = draw(rng, (5, latent), dtype)
        cache = arena.output((4, 8, latent + 16 * joined), DTYPES[dtype])[..., :latent]
        placed, places = arena.put(ckv, align=16), arena.put(slots, align=8)
        written, none = cuattn.mla_write(placed, None, cache, None, places)
        device.synchronize()
        arena.verify()
        assert written is cache
        assert none is None
        got = device.numpy(cache).reshape(32, latent)
        assert (bits(got[slots[slots >= 0]]) == bits(ckv[slots >= 0])).all()
        rest = np.delete(got, slots[slots >= 0], axis=0)
        assert np.isnan(rest.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_is_that_of_reshape_and_cache(device, dtype, rng):
    slots = np.array([5, 31, -1, 0, 17], np.int64)
    ckv, kpe = draw(rng, (5, 48), dtype), draw(rng, (5, 16), dtype)
    angles = rng.uniform(0, 6, (9, 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([8, 0, 3, 1, 4], np.int64)
    for joined, interleaved in itertools.product((True, False), repeat=2):
        arena = Arena(device)
        put = lambda x, align=16: arena.put(x, align=align)  # noqa: B023, E731
        placed = [put(x) for x in (ckv, kpe)]
        if joined:
            cache = arena.output((4, 8, 64), DTYPES[dtype])
            mine = cache[..., :48], cache[..., 48:]
        else:
            mine = arena.output((4, 8, 48), DTYPES[dtype]), arena.output((4, 8, 16), DTYPES[dtype])
        turn = {"cos": put(cos), "sin": put(sin), "positions": put(positions, 8),
                "rope_interleaved": interleaved}  # fmt: skip
        cuattn.mla_write(*placed, *mine, put(slots, 8), **turn)
        want_k = arena.output((4, 8, 1, 16), DTYPES[dtype])
        want_v = arena.output((4, 8, 1, 48), DTYPES[dtype])
        cuattn.reshape_and_cache(
            placed[1].reshape(5, 1, 16), placed[0].reshape(5, 1, 48), want_k, want_v,
            put(slots, 8), **turn,
        )  # fmt: skip
        device.synchronize()
        arena.verify()
        for got, want in zip(mine, (want_v, want_k), strict=True):
            got, want = device.numpy(got), device.numpy(want)[:, :, 0]
            assert (bits(got) == bits(want)).all()


def test_explain_counts_both_forms():
    """The crossover of 512 latent and 128 head columns lies at 170.7 queries, whatever the keys."""

    def plan(queries, **options):
        latent = ("bfloat16", 1, 8192, 512)  # one object: it is key and value
        rope = {"q_rope": (1, 128, queries, 64), "k_rope": (1, 8192, 64)}
        arrays = (1, 128, queries, 128), latent, latent, *[(128, 512, 128)] * 2
        return cuattn.explain(
            "mla_attention", *arrays, dtype="bfloat16", device="h100", **rope, **options
        )

    few, many = plan(64), plan(2048)
    assert few.reason.startswith("absorbed: the smaller estimate")
    assert many.reason.startswith("explicit: the smaller estimate")
    assert plan(64, form="explicit").reason.startswith("explicit: asked for")
    assert few.kernel == "project + sm90"
    assert "from 170.7 queries on" in few.ladder
    rows, pairs = 8192 * 128 * 512 * 256, 64 * 8192 - 63 * 32
    explicit, absorbed = (
        float(few.ladder.split(form)[1].split()[0]) * 1e9 for form in ("explicit", "absorbed")
    )
    assert abs(explicit / (2 * rows + 2 * pairs * 128 * 320) - 1) < 1e-4
    assert abs(absorbed / (2 * 64 * 128 * 512 * 256 + 2 * pairs * 128 * 1088) - 1) < 1e-4
