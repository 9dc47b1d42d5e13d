# SPDX-License-Identifier: Apache-2.0
"""rope= of quantize and quantize_like: the codes and scales of rows that apply_rope has rotated
before, bit for bit, on the CPU and on a CUDA device, the emulator too.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
import harness
from cases import DTYPES
from cuattn import float8
from quantize_cases import MODES, VIEWS, drawn, placed, same, some

FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "lse_shift")
ROWS = (1, 5, 127, 129, 257)
TARGETS = harness.target_params(cpu=("",), cuda=("auto",))
on_devices = pytest.mark.parametrize(("device", "backend"), TARGETS)
TABLES = {dim: cuattn.rope_table(400, dim) for dim in range(2, 257, 2)}
BOTH = np.asarray(TABLES[256])


def rotated(x, rotary, places=None, interleaved=False):
    """By apply_rope on the CPU, of an array in bshd or packed."""
    cos, sin = TABLES[rotary]
    if places is not None:
        places = np.ascontiguousarray(np.broadcast_to(places, x.shape[:-2]), np.int64)
    return cuattn.apply_rope(np.ascontiguousarray(x), cos, sin, places, interleaved=interleaved)


def tables_on(device, rotary):
    return tuple(placed(device, table) for table in TABLES[rotary])


def compared(device, ours, theirs, note, fields=FIELDS):
    device.synchronize()
    for name in fields:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        if one is not None:
            same(device, one, np.asarray(device.numpy(other)), f"{name}: {note}")


def rotary_of(rng, dim):
    """All of it, pieces of 16 or any number of pairs."""
    kinds = dim, int(rng.choice(range(16, dim + 1, 16))), int(rng.choice(range(2, dim + 1, 2)))
    return kinds[rng.integers(3)]


@pytest.mark.parametrize("dim", [16, 48, 64, 96, 128, 192, 256])
@on_devices
def test_codes_and_scales_are_those_of_rotated_rows(device, backend, dim, rng):
    axes = MODES, (True, False), VIEWS, (True, False), DTYPES, (True, False), ("none", "given")
    for (mode, v_mode), hadamard, view, interleaved, dtype, has_places, mean in some(
        rng, *axes, most=14
    ):
        rows, keys = sorted(int(n) for n in rng.choice(ROWS, 2))
        rotary = rotary_of(rng, dim)
        q, k = (VIEWS[view](drawn(rng, n, dim, dtype), n, dim) for n in (rows, keys))
        given = {"mode": mode, "v_mode": v_mode, "hadamard": hadamard, "smooth_k": False}
        note = f"{given}, {view}, {interleaved}, {dtype}, {q.shape}, {k.shape}, {rotary}"
        of_q, of_k = (rng.integers(0, 400, (2, n)) for n in (rows, keys))
        means = rng.standard_normal((3, dim), np.float32) if mean == "given" else None
        turned = {"rope": tables_on(device, rotary), "rope_interleaved": interleaved}
        if has_places:
            turned["rope_positions"] = placed(device, of_q), placed(device, of_k)
        else:
            of_q, of_k = np.arange(rows) + keys - rows, np.arange(keys)
        rows_of_both = (rotated(x, rotary, p, interleaved) for x, p in ((q, of_q), (k, of_k)))
        theirs = cuattn.quantize(*rows_of_both, k, **given, key_mean=means)
        on_device = [placed(device, x) for x in (q, k, k)]
        key_mean = None if means is None else placed(device, means)
        ours = cuattn.quantize(*on_device, **given, **turned, key_mean=key_mean)
        compared(device, ours, theirs, note, FIELDS[:6])
        if means is not None:  # a sum of doubles in another order
            shifts = device.numpy(ours.lse_shift), theirs.lse_shift
            np.testing.assert_allclose(*shifts, rtol=1e-5, atol=1e-5, err_msg=note)
        for x, copy in zip((q, k), on_device, strict=False):  # the tile is rotated, not the array
            assert np.array_equal(harness.bits(device.numpy(copy)), harness.bits(x)), note


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@on_devices
def test_the_mean_is_that_of_rotated_keys(device, backend, dim, rng):
    """Of the rows that apply_rope gives on the same device, with the same order of sums."""
    for rows, dtype, layout, interleaved in some(
        rng, (3, 130, 700), DTYPES, ("bshd", "bhsd"), (True, False), most=6
    ):
        rotary = rotary_of(rng, dim)
        x = np.ascontiguousarray(drawn(rng, rows, dim, dtype)[:2, :rows, :3, :dim])
        x[0, rows // 2, 0, 3] = np.inf
        given = x if layout == "bshd" else x.swapaxes(1, 2)
        places = rng.integers(0, 400, (2, rows))
        turned = {"rope": tables_on(device, rotary), "rope_interleaved": interleaved,
                  "rope_positions": placed(device, places)}  # fmt: skip
        ours = cuattn.quantize(
            *[placed(device, given)] * 3, layout=layout, hadamard=False, **turned
        )
        y = rotated(x, rotary, places, interleaved)
        y = y if layout == "bshd" else y.swapaxes(1, 2)
        two = placed(device, y)
        theirs = cuattn.quantize(two, two, placed(device, given), layout=layout, hadamard=False)
        note = f"{rows}, {dtype}, {layout}, {interleaved}, {rotary}"
        fields = [name for name in FIELDS if name not in ("q", "k")]
        compared(device, ours, theirs, note, fields)
        for name in "qk":  # no NaN has bits that anybody promises
            got, want = (np.asarray(device.numpy(getattr(x, name))) for x in (ours, theirs))
            assert np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True)


@on_devices
def test_packed_rows(device, backend, rng):
    q, k = (rng.standard_normal((130, heads, 64), np.float32) for heads in (4, 2))
    places = np.concatenate([np.arange(40), np.arange(90)])
    for given in (None, places):
        turned = {} if given is None else {"rope_positions": placed(device, given)}
        theirs = cuattn.quantize(*(rotated(x, 64, given) for x in (q, k)), k, smooth_k=False)
        on_device = [placed(device, x) for x in (q, k, k)]
        ours = cuattn.quantize(*on_device, smooth_k=False, rope=tables_on(device, 64), **turned)
        compared(device, ours, theirs, given)


@on_devices
def test_known_scales(device, backend, rng):
    for dtype in DTYPES:
        x = rng.standard_normal((2, 150, 3, 64), np.float32).astype(DTYPES[dtype])
        scale = rng.uniform(0.005, 0.05, (2, 3)).astype(np.float32)
        places = rng.integers(0, 400, (2, 150))
        theirs = cuattn.quantize_like(rotated(x, 40, places, True), scale, hadamard=True)
        ours = cuattn.quantize_like(
            placed(device, x), placed(device, scale), hadamard=True, rope=tables_on(device, 40),
            rope_positions=placed(device, places), rope_interleaved=True,
        )  # fmt: skip
        same(device, ours, theirs, dtype)


@on_devices
def test_tables_of_any_stride_and_no_rows(device, backend, rng):
    """Tables that do not lie on 16 bytes; arrays of no rows, whose tables may end."""
    x = rng.standard_normal((1, 9, 2, 64), np.float32).astype(ml_dtypes.bfloat16)
    for rotary, first in ((32, 0), (64, 1), (16, 2)):
        tables = [t[:, first : first + rotary // 2] for t in BOTH]
        for interleaved in (True, False):
            words = {"rope_interleaved": interleaved, "smooth_k": False}
            y = cuattn.apply_rope(x, *tables, interleaved=interleaved)
            theirs = cuattn.quantize(y, y, x, smooth_k=False)
            rope = tuple(placed(device, t) for t in tables)
            ours = cuattn.quantize(*[placed(device, x)] * 3, rope=rope, **words)
            compared(device, ours, theirs, f"{rotary}, {first}, {interleaved}")
    short = tuple(placed(device, t) for t in BOTH[:, :1, :8])
    empty = placed(device, x[:, :0])
    found = cuattn.quantize(empty, empty, empty, rope=short)
    assert device.numpy(found.k_scale).tolist() == [[1.0, 1.0]]


def test_what_is_attended_to_is_near_attention_of_rotated_rows(rng):
    q, k, v = rng.standard_normal((3, 2, 150, 2, 64), np.float32)
    cos, sin = TABLES[64]
    exact, exact_lse = cuattn.rope_attention(q, k, v, cos, sin, causal=True, return_lse=True)
    found = cuattn.quantize(q, k, v, rope=(cos, sin))
    out, lse = found.attention(causal=True, return_lse=True)
    assert np.linalg.norm(out.astype(np.float32) - exact) < 0.2 * np.linalg.norm(exact)
    assert np.abs(lse - exact_lse).max() < 0.5


def test_torch_gives_the_same_bits(rng):
    torch = pytest.importorskip("torch")
    q, k, v = rng.standard_normal((3, 2, 40, 2, 64), np.float32)
    places = rng.integers(0, 400, (2, 40))
    ours = cuattn.quantize(q, k, v, rope=TABLES[48], rope_positions=places)
    tables = tuple(map(torch.from_numpy, TABLES[48]))
    arrays = map(torch.from_numpy, (q, k, v))
    theirs = cuattn.quantize(*arrays, rope=tables, rope_positions=torch.from_numpy(places))
    for name in FIELDS:
        got = getattr(theirs, name)
        got = got.contiguous().view(torch.uint8) if got.element_size() == 1 else got
        want = np.ascontiguousarray(getattr(ours, name))
        np.testing.assert_array_equal(got.numpy(), want.view(got.numpy().dtype))
    with pytest.raises(NotImplementedError, match="requires grad"):
        cuattn.quantize(*[torch.ones(1, 4, 1, 64, requires_grad=True)] * 3, rope=tables)


@pytest.mark.parametrize("interleaved", [True, False])
def test_jax_gives_nearly_the_same(interleaved, rng):
    jax = pytest.importorskip("jax")
    q, k, v = rng.standard_normal((3, 2, 40, 2, 64), np.float32).astype(ml_dtypes.bfloat16)
    words = {"rope_interleaved": interleaved}
    for places, rotary in ((None, 64), (rng.integers(0, 400, (2, 40)).astype(np.int32), 24)):
        wide = None if places is None else places.astype(np.int64)
        ours = cuattn.quantize(q, k, v, rope=TABLES[rotary], rope_positions=wide, **words)
        given = [jax.numpy.asarray(x) for x in (q, k, v, *TABLES[rotary])]

        def made(q, k, v, cos, sin, places=places):
            found = cuattn.quantize(q, k, v, rope=(cos, sin), rope_positions=places, **words)
            return [getattr(found, name) for name in FIELDS]

        for call in (made, jax.jit(made)):
            for name, got in zip(FIELDS, call(*given), strict=True):
                want = np.asarray(getattr(ours, name), np.float32)
                if name in ("q", "k", "v"):
                    assert (np.asarray(got, np.float32) == want).mean() > 0.98, name
                else:
                    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-3)
    packed = [jax.numpy.asarray(x[0]) for x in (q, k, v)]
    found = cuattn.quantize(*packed, rope=TABLES[64], **words)
    want = cuattn.quantize(q[0], k[0], v[0], rope=TABLES[64], **words)
    np.testing.assert_allclose(found.k_scale, want.k_scale, rtol=1e-2)


X = np.zeros((2, 20, 2, 32), np.float32)
COS, SIN = TABLES[16]
PLACES = np.zeros((2, 20), np.int64)
WRONG = {
    "rope_of_one": ({"rope": COS}, TypeError,
        "quantize: rope must be two arrays (cos, sin), got ndarray; pass a tuple"),
    "positions_alone": ({"rope_positions": PLACES}, ValueError,
        "quantize: rope_positions must be left out without rope, got <class 'numpy.ndarray'>; pass "
        "rope=(cos, sin)"),
    "interleaved_alone": ({"rope_interleaved": True}, ValueError,
        "quantize: rope_interleaved must be left out without rope, got <class 'bool'>; pass "
        "rope=(cos, sin)"),
    "interleaved_of_1": ({"rope": (COS, SIN), "rope_interleaved": 1}, TypeError,
        "quantize: rope_interleaved must be True or False, got 1; pass a bool"),
    "three_positions": ({"rope": (COS, SIN), "rope_positions": (PLACES,) * 3}, TypeError,
        "quantize: rope_positions must be an array or two, (of q, of k), got a tuple of 3; give "
        "each token its own in an int64 array"),
    "positions_of_fewer": ({"rope": (COS, SIN), "rope_positions": PLACES[:, :5]}, ValueError,
        "quantize: rope_positions must have shape (2, 20) like the tokens of x, got (2, 5); give "
        "each token its own"),
    "positions_too_far": ({"rope": (COS, SIN), "rope_positions": PLACES + 400}, ValueError,
        "quantize: rope_positions must lie within [0, 400), got 400 at token 0; cos and sin have "
        "that many rows"),
    "positions_float": ({"rope": (COS, SIN), "rope_positions": PLACES * 1.0}, ValueError,
        "quantize: rope_positions must be int64, got float64; cast it"),
    "short_tables": ({"rope": (COS[:19], SIN[:19])}, ValueError,
        "quantize: cos must have a row for each of the 20 tokens of a sequence, got 19; make it "
        "longer, or give positions"),
    "wide_tables": ({"rope": TABLES[34]}, ValueError,
        "quantize: cos must have rotary_dim / 2 from 1 to head_dim / 2 = 16, got 17; only "
        "rotary_dim elements of a row are turned"),
    "two_lengths": ({"rope": (COS, SIN[:30])}, ValueError,
        "quantize: sin must have max_position 400 like cos, got 30"),
    "tables_of_64_bits": ({"rope": (COS.astype(float), SIN)}, ValueError,
        "quantize: cos must be float32, got float64; cast it"),
    "tables_of_one_axis": ({"rope": (COS[0], SIN[0])}, ValueError,
        "quantize: cos must have 2 axes [max_position, rotary_dim / 2], got 1 with shape (8,); "
        "reshape it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    options, kind, message = WRONG[name]
    for call in (
        lambda **more: cuattn.quantize(X, X, X, **more),
        lambda **more: cuattn.quantize_like(X, 1.0, **more),
    ):
        with pytest.raises(kind) as caught:
            call(**options)
        found, wanted = (text.replace(" or two, (of q, of k)", "")
                         for text in (str(caught.value), message))  # fmt: skip
        assert found.startswith(wanted), found


@pytest.mark.parametrize("name", [n for n in WRONG if n not in ("positions_too_far",)])
def test_jax_arrays_are_refused_likewise(name):
    """But for positions that lie too far, which are clamped, as on CUDA."""
    jax = pytest.importorskip("jax")
    options, kind, message = WRONG[name]
    x = jax.numpy.asarray(X)
    with pytest.raises(kind) as caught:
        cuattn.quantize(x, x, x, **options)
    found = str(caught.value)
    assert found.split(", got")[0].startswith(message.split(" must")[0]), found


def test_one_array_alone_may_be_told_its_positions(rng):
    """A pair of positions whose first is None: q stands behind, k where it is told."""
    q, k = rng.standard_normal((1, 4, 2, 32), np.float32), rng.standard_normal((1, 9, 2, 32))
    k = k.astype(np.float32)
    places = rng.integers(0, 400, (1, 9))
    found = cuattn.quantize(q, k, k, rope=TABLES[32], rope_positions=(None, places))
    wanted = cuattn.quantize(rotated(q, 32, np.arange(4) + 5), rotated(k, 32, places), k)
    for name in FIELDS:
        assert np.array_equal(
            harness.bits(getattr(found, name)), harness.bits(getattr(wanted, name))
        )


def test_run_takes_one_array_with_all_that_it_may_ask_for(rng):
    """A mean that is made, a shift and scales of channels beside a rotation."""
    x = rng.standard_normal((2, 70, 3, 48), np.float32)
    mean = rng.standard_normal((2, 3, 48)).astype(np.float32)
    turn = float8.Turn(*TABLES[48], None, False)
    words = {"scale": (2, 3, 48), "channels": True, "mean": (2, 3, 48), "shift_mean": mean}
    ours = float8.run(x, "bshd", True, turn=turn, **words)
    theirs = float8.run(rotated(x, 48), "bshd", True, **words)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(harness.bits(one), harness.bits(other))
