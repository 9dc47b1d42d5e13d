# SPDX-License-Identifier: Apache-2.0
"""attention(residual=): the float32 result and what is added to it, rounded once."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import cases
import cuattn
import harness
import reference
from harness import bits, target_params

AUTO = {"cpu": ("cpu", "naive"), "cuda": ("auto", "simt", "sm80")}
# heads, key heads, head_dim, head_dim_v, storage of residual and out; 24 columns are whole pieces
SHAPES = [(4, 2, 32, 24, "contiguous"), (3, 3, 64, 64, "padded"), (2, 1, 24, 40, "contiguous")]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "softcap": 3.0},
    "lengths": {"causal": True, "seqused_q": np.array([5, 0], np.int32),
                "seqused_k": np.array([9, 4], np.int32)},
}  # fmt: skip


def draw(rng, dtype, heads, heads_kv, dim, dim_v):
    shapes = (2, 7, heads, dim), (2, 13, heads_kv, dim), (2, 13, heads_kv, dim_v)
    residual = rng.standard_normal((2, 7, heads, dim_v)) * 3
    return [x.astype(cases.DTYPES[dtype]) for x in (*map(rng.standard_normal, shapes), residual)]


def turned(layout, x):
    return x if layout == "bshd" else np.ascontiguousarray(x.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "layout"),
    target_params([(d, x) for d in cases.DTYPES for x in ("bshd", "bhsd")], **AUTO),
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_rounding(device, backend, dtype, layout, options, shape, rng):
    if (backend, dtype) in (("simt", "float16"), ("simt", "bfloat16"), ("sm80", "float32")):
        return
    *sizes, storage = shape
    q, k, v, residual = (turned(layout, x) for x in draw(rng, dtype, *sizes))
    arena = harness.Arena(device)
    placed = [arena.put(x, name=n) for n, x in zip("qkv", (q, k, v), strict=True)]
    added = arena.put(residual, storage, "residual")
    words = {"layout": layout, "backend": backend, "return_lse": True}
    words |= {
        name: arena.put(x, name=name, align=4) if isinstance(x, np.ndarray) else x
        for name, x in OPTIONS[options].items()
    }
    wide = arena.output(residual.shape, np.float32, name="wide")
    out = arena.output(residual.shape, residual.dtype, storage)
    _, plain_lse = cuattn.attention(*placed, out=wide, **words)
    found, lse = cuattn.attention(*placed, residual=added, out=out, **words)
    made, _ = cuattn.attention(*placed, residual=added, **words)
    device.synchronize()
    arena.verify()
    assert found is out
    assert device.is_array(made)
    exact = device.numpy(wide) + residual.astype(np.float32)
    want = exact.astype(residual.dtype)
    for got in (found, made):
        assert (bits(device.numpy(got)) == bits(want)).all()
    assert (bits(device.numpy(lse)) == bits(device.numpy(plain_lse))).all()
    if dtype != "float32":  # or else two roundings would pass
        twice = device.numpy(wide).astype(residual.dtype).astype(np.float32)
        twice = (twice + residual.astype(np.float32)).astype(residual.dtype)
        assert (bits(twice) != bits(want)).any()
    words = {"layout": layout, **OPTIONS[options]}
    expected = reference.attention(q, k, v, **words)[0] + residual.astype(np.float64)
    plain = reference.attention(q, k, v, rounded_to=residual.dtype, **words)[0]
    cases.check(want, expected, plain + residual.astype(np.float64), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_in_place(device, dtype, rng):
    """The usual call of a layer: the hidden state takes the result up."""
    q, k, v, residual = draw(rng, dtype, 2, 2, 32, 32)
    placed = harness.on(device, q, k, v)
    hidden = harness.Arena(device).output(residual.shape, residual.dtype)
    device.write(hidden, residual)
    want = cuattn.attention(*placed, residual=harness.on(device, residual)[0])
    assert cuattn.attention(*placed, residual=hidden, out=hidden) is hidden
    device.synchronize()
    assert (bits(device.numpy(hidden)) == bits(device.numpy(want))).all()
    assert (bits(device.numpy(hidden)) != bits(residual)).any()


def test_no_queries_and_no_keys(device, rng):
    q, k, v, residual = draw(rng, "float16", 2, 2, 32, 32)
    found = harness.numpy_call(device, cuattn.attention, q, k[:, :0], v[:, :0], residual=residual)
    assert (bits(found) == bits(residual)).all()
    found = harness.numpy_call(device, cuattn.attention, q[:, :0], k, v, residual=residual[:, :0])
    assert found.shape == (2, 0, 2, 32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float8_queries_take_the_dtype_of_residual(device, dtype, rng):
    *arrays, residual = draw(rng, dtype, 2, 2, 32, 32)
    codes = [x.astype(ml_dtypes.float8_e4m3fn) for x in arrays]
    nothing = np.zeros(residual.shape, np.float32)
    wide = harness.numpy_call(device, cuattn.attention, *codes, residual=nothing)
    plain = harness.numpy_call(device, cuattn.attention, *codes)  # rounded to bfloat16
    off = np.abs(plain.astype(np.float32) - wide)
    assert (off <= 2.0**-8 * np.abs(wide) + 1e-6).all()
    found = harness.numpy_call(device, cuattn.attention, *codes, residual=residual)
    want = (wide + residual.astype(np.float32)).astype(residual.dtype)
    assert (bits(found) == bits(want)).all()


def test_rope_comes_with_it(rng):
    q, k, v, residual = draw(rng, "float32", 2, 2, 32, 32)
    rope = cuattn.rope_table(20, 32)
    found = cuattn.attention(q, k, v, rope=rope, residual=residual)
    assert (bits(found) == bits(cuattn.attention(q, k, v, rope=rope) + residual)).all()


BAD = [
    ({"residual": np.zeros((2, 7, 4, 32), np.float16)}, ValueError, "residual must have shape"),
    ({"residual": np.zeros((2, 7, 4, 24), np.float32)}, ValueError,
     "residual must be float16 like out, got float32"),
    ({"q": np.zeros((1, 2, 7, 4, 32), np.float16)}, ValueError, "q must have 4 axes"),
    ({"v": np.zeros((), np.float16)}, ValueError, "v must have"),
    ({"residual": np.zeros((2, 7, 4, 48), np.float16)[..., ::2]}, ValueError, "residual must"),
    ({"residual": [1.0]}, TypeError, "residual must be an array"),
    ({"k": np.zeros((2, 13, 2, 40), np.float16)}, ValueError, "head_dim"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_writes_nothing(change, error, message, rng):
    q, k, v, residual = draw(rng, "float16", 4, 2, 32, 24)
    out, lse = np.full(residual.shape, 7, np.float16), np.full((2, 4, 7), 7, np.float32)
    words = {"q": q, "k": k, "v": v, "residual": residual, "out": out, "lse_out": lse} | change
    with pytest.raises(error, match=message) as refusal:
        cuattn.attention(**words)
    assert str(refusal.value).startswith("attention")  # the function that was called
    assert (out == 7).all()
    assert (lse == 7).all()


def test_memory_that_overlaps_otherwise(rng):
    q, k, v, residual = draw(rng, "float16", 4, 2, 32, 24)
    memory = np.zeros(residual.size + 24, np.float16)
    shifted = memory[24:].reshape(residual.shape), memory[:-24].reshape(residual.shape)
    with pytest.raises(ValueError, match="out must not share memory with residual"):
        cuattn.attention(q, k, v, residual=shifted[0], out=shifted[1])


OVERLAPS = {  # the array that attention writes before the sum, and what lies in it
    "residual in lse_out": ("lse_out", "residual"),
    "out in lse_out": ("lse_out", "out"),
    "residual in workspace": ("workspace", "residual"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_is_written_before_the_sum_lies_apart(name, rng):
    written, other = OVERLAPS[name]
    q, k, v, residual = draw(rng, "float16", 4, 2, 32, 24)
    memory = np.zeros(1 << 20, np.uint8)
    lse = memory[: 2 * 4 * 7 * 4].view(np.float32).reshape(2, 4, 7)
    within = memory[: residual.nbytes].view(np.float16).reshape(residual.shape)
    within[:] = residual
    words = {"residual": residual, "return_lse": True, "backend": "naive"}
    words |= {written: lse if written == "lse_out" else memory, other: within}
    with pytest.raises(ValueError, match=f"{written} must not share memory with {other}"):
        cuattn.attention(q, k, v, **words)
    assert (bits(within) == bits(residual)).all()


def test_what_lies_between_is_apart(rng):
    """Rows of one packed array: no byte in common, though one begins before the other ends."""
    q, k, v, residual = draw(rng, "float32", 4, 2, 32, 24)
    packed = np.zeros((2, 4, 7, 32), np.float32)
    lse, between = packed[..., 31], packed[..., :24].swapaxes(1, 2)
    between[:] = residual
    found, _ = cuattn.attention(q, k, v, residual=between, out=between, lse_out=lse)
    want, want_lse = cuattn.attention(q, k, v, residual=residual, return_lse=True)
    assert (bits(found) == bits(want)).all()
    assert (bits(lse) == bits(want_lse)).all()


def test_what_touches_lies_apart(rng):
    q, k, v, residual = draw(rng, "float16", 4, 2, 32, 24)
    memory = np.zeros(residual.nbytes + 2 * 4 * 7 * 4, np.uint8)
    within = memory[: residual.nbytes].view(np.float16).reshape(residual.shape)
    within[:] = residual
    lse = memory[residual.nbytes :].view(np.float32).reshape(2, 4, 7)
    found, _ = cuattn.attention(q, k, v, residual=within, out=within, lse_out=lse)
    assert (bits(found) == bits(cuattn.attention(q, k, v, residual=residual))).all()


def test_what_owns_gradients_refuses():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 2, 32, requires_grad=True)
    k, learned = torch.zeros(1, 4, 2, 32), torch.zeros(4, requires_grad=True)
    for name in ("q", "k", "v", "residual", "bias"):
        given = {
            **dict.fromkeys(("q", "k", "v", "residual"), k),
            name: q if name != "bias" else learned,
        }
        with pytest.raises(
            NotImplementedError, match=rf"{name} requires grad, .*write attention\(\.\.\.\) \+"
        ):
            cuattn.attention(**given)
    from cuattn import torch as face

    traced = torch.compile(face.attention, backend="eager")
    with pytest.raises(NotImplementedError, match=r"write attention\(\.\.\.\) \+ residual"):
        traced(q, k, k, residual=k)
    with torch.no_grad():
        assert torch.equal(cuattn.attention(q, k, k, residual=k + 1), k + 1)


def test_jax_adds_itself():
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.zeros((1, 4, 2, 32))
    with pytest.raises(NotImplementedError, match=r"write attention\(\.\.\.\) \+ residual"):
        cuattn.attention(q, q, q, residual=q)


def test_explain_says_what_comes_after():
    shape = (1, 8, 2, 32)
    plain = cuattn.explain("attention", shape, shape, shape, device="h100")
    plan = cuattn.explain("attention", shape, shape, shape, device="h100", residual=shape)
    assert plan.kernel == plain.kernel
    assert "residual is added to its result in float32" in plan.reason
    assert "residual: is added to a float32 result" in str(plan)
    none = np.zeros((0, 8, 2, 32), np.float32)
    plan = cuattn.explain("attention", none, none, none, residual=none)
    assert "residual is added" in plan.reason
    with pytest.raises(NotImplementedError, match="backend 'tiled' does not write from 16-bit"):
        cuattn.explain(
            "attention", shape, shape, shape, device="h100", residual=shape, backend="tiled"
        )
    assert cuattn.explain(
        "attention", shape, shape, shape, device="cpu", residual=shape, backend="naive"
    ).kernel == "naive"  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_explain_refuses_what_the_call_refuses(device, change, error, message, rng):
    q, k, v, residual = draw(rng, "float16", 4, 2, 32, 24)
    given = {"q": q, "k": k, "v": v, "residual": residual} | change
    with pytest.raises(error, match=message):
        cuattn.explain("attention", *map(given.pop, "qkv"), device=device, **given)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ((2, 7, 4, 32), r"residual must have shape \(2, 7, 4, 24\), got \(2, 7, 4, 32\)"),
        (("float32", 2, 7, 4, 24), "residual must be float16 like out, got float32"),
    ],
)
def test_explain_holds_shapes_against_each_other(residual, message):
    q, k, v = (2, 7, 4, 32), (2, 13, 2, 32), (2, 13, 2, 24)
    for device in ("cpu", "h100"):
        with pytest.raises(ValueError, match=re.escape("attention(residual=): ") + message):
            cuattn.explain("attention", q, k, v, device=device, residual=residual)


def test_explain_refuses_jax_arrays_beside_residual():
    q = pytest.importorskip("jax.numpy").zeros((1, 4, 2, 32))
    with pytest.raises(NotImplementedError, match=r"write attention\(\.\.\.\) \+ residual"):
        cuattn.explain("attention", q, q, q, residual=q)


@pytest.mark.parametrize("codes", ["float8_e4m3fn", "int8"])
def test_explain_knows_what_becomes_of_codes(codes):
    q, v = (codes, 1, 8, 2, 32), ("float8_e4m3fn", 1, 8, 2, 32)
    plan = cuattn.explain("attention", q, q, v, device="a100", residual=q[1:])
    assert plan.kernel == "sm80"
    assert "codes become numbers of 16 bits first; after it residual is added" in plan.reason
