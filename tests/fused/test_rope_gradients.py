# SPDX-License-Identifier: Apache-2.0
"""Gradients of torch and JAX through rotation, and rope= of JAX arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuattn
import frameworks
from harness import numpy_call

COS, SIN = (1.3 * table for table in cuattn.rope_table(64, 12))  # no rotation: a stretched one


@pytest.fixture
def jax(device):
    """JAX, on the device of the test."""
    module = frameworks.require("jax")
    import jax_cases

    with module.default_device(jax_cases.device_of(device)):
        yield module


def rotated(x, places, interleaved):
    """The pairs of the first 12 elements, in float64 of torch."""
    torch = frameworks.require("torch")
    cos, sin = (torch.from_numpy(t)[places].double()[..., None, :] for t in (COS, SIN))
    pairs = x[..., :12].unflatten(-1, (6, 2) if interleaved else (2, 6))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2), x[..., 12:]), -1)


def attended(q, k, v, causal=True):
    """Attention of [batch, rows, heads, columns] in float64 of torch."""
    torch = frameworks.require("torch")
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    rows, keys = scores.shape[-2:]
    seen = torch.ones(rows, keys, dtype=bool).tril(keys - rows)
    scores = scores.masked_fill(~seen, -math.inf) if causal else scores
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def drawn(rng):
    q = rng.standard_normal((2, 5, 4, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 9, 2, 16)).astype(np.float32)
    return q, k, v, rng.standard_normal((2, 5, 4, 16)).astype(np.float32)


def wanted(q, k, v, weight, places, interleaved):
    torch = frameworks.require("torch")
    arrays = [torch.from_numpy(x).double().requires_grad_() for x in (q, k, v)]
    turned = rotated(arrays[0], torch.as_tensor(places), interleaved)
    (attended(turned, *arrays[1:]) * torch.from_numpy(weight)).sum().backward()
    return [x.grad.numpy() for x in arrays]


CASES = {
    "at the end of the keys": (False, None, "bshd"),
    "neighbours": (True, None, "bhsd"),
    "positions": (False, [[3, 1, 60, 0, 2], [9, 9, 9, 9, 1]], "bhsd"),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_torch(device, case, rng):
    torch = frameworks.require("torch")
    interleaved, given, layout = CASES[case]
    q, k, v, weight = drawn(rng)
    places = np.array(np.arange(5) + 4 if given is None else given)
    want = wanted(q, k, v, weight, places, interleaved)
    where = str(device)
    turn = (lambda x: x) if layout == "bshd" else (lambda x: x.transpose(1, 2).contiguous())
    to = [turn(torch.from_numpy(x)).to(where) for x in (q, k, v, weight)]
    rope = tuple(torch.from_numpy(t).to(where) for t in (COS, SIN))
    positions = None if given is None else torch.from_numpy(places).to(where)
    for k_too in (True, False):
        arrays = [x.clone().requires_grad_(k_too or i == 0) for i, x in enumerate(to[:3])]
        out = cuattn.attention(
            *arrays, causal=True, rope=rope, rope_positions=positions,
            rope_interleaved=interleaved, layout=layout,
        )  # fmt: skip
        (out * to[3]).sum().backward()
        for x, expected in zip(arrays, want, strict=True):
            if x.requires_grad:
                np.testing.assert_allclose(turn(x.grad).cpu(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("inverse", [False, True])
def test_apply_rope_is_linear(device, inverse, rng):
    """Its gradient, of an expanded one too, is its transpose; one of a gradient is there."""
    torch = frameworks.require("torch")
    where = str(device)
    x, dy = (torch.randn(2, 7, 3, 16, device=where) for _ in range(2))
    rope = tuple(torch.from_numpy(t).to(where) for t in (COS, SIN))
    x.requires_grad_()
    y = cuattn.apply_rope(x, *rope, inverse=inverse, offset=2)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(dx, cuattn.apply_rope(dy, *rope, inverse=not inverse, offset=2))
    one = torch.ones((), device=where, requires_grad=True)
    (dx,) = torch.autograd.grad((y * one).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.sum(), one)
    torch.testing.assert_close(found, dx.sum().detach())
    through = torch.func.grad(
        lambda a: cuattn.apply_rope(a, *rope, inverse=inverse, offset=2).sum()
    )
    assert torch.equal(through(x.detach()), dx.detach())
    rope[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_face_of_torch_rotates_too(rng):
    """With its own options, in autocast's regions, and where torch.compile breaks the graph."""
    torch = frameworks.require("torch")
    from cuattn.torch import attention

    arrays = drawn(rng)
    places = np.arange(5) + 4
    gradient = wanted(*arrays, places, False)[0]
    q, k, v, weight = map(torch.from_numpy, arrays)
    rope = torch.from_numpy(COS), torch.from_numpy(SIN)
    turned = cuattn.apply_rope(q, *rope, torch.from_numpy(places).repeat(2, 1))
    want = cuattn.attention(turned, k, v, causal=True)
    q.requires_grad_()
    for options in ({}, {"deterministic": True}, {"return_lse": True}):
        out = attention(q, k, v, causal=True, rope=rope, **options)
        out = out[0] if "return_lse" in options else out
        torch.testing.assert_close(out.detach(), want, rtol=1e-4, atol=1e-5)
        (dq,) = torch.autograd.grad((out * weight).sum(), q)
        np.testing.assert_allclose(dq, gradient, rtol=2e-4, atol=2e-5)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, causal=True, rope=rope)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)
    with torch.no_grad():
        compiled = torch.compile(
            lambda q: attention(q, k, v, causal=True, rope=rope) * 2, backend="eager"
        )
        torch.testing.assert_close(compiled(q), 2 * want, rtol=1e-4, atol=1e-5)


def test_what_torch_is_refused():
    torch = frameworks.require("torch")
    x = torch.zeros(1, 4, 2, 16, requires_grad=True)
    cos, sin = torch.from_numpy(COS), torch.from_numpy(SIN)
    for call, message in (
        (lambda: cuattn.apply_rope(x, cos, sin, out=torch.empty(1, 4, 2, 16)),
         "apply_rope: out must be None while torch differentiates x"),
        (lambda: cuattn.apply_rope(x, cos.clone().requires_grad_(), sin),
         r"apply_rope: cos requires grad, .* pass cos.detach\(\)"),
        (lambda: cuattn.attention(*[x.detach()] * 3, rope=(cos.clone().requires_grad_(), sin)),
         r"attention: cos requires grad, .* pass cos.detach\(\)"),
        (lambda: cuattn.attention(x, x, x, rope=(cos, sin.clone().requires_grad_())),
         "attention: sin requires grad"),
        (lambda: torch.func.vmap(torch.func.grad(
            lambda a: cuattn.apply_rope(a[None], cos, sin).sum()))(x.detach()),
         "apply_rope: x is batched by torch.func.vmap, .* in a loop"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=message):
            call()
    with torch.no_grad():
        assert cuattn.attention(x, x, x, rope=(cos, sin)).shape == x.shape


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_jax(jax, case, rng):
    interleaved, given, layout = CASES[case]
    q, k, v, weight = drawn(rng)
    places = np.array(np.arange(5) + 4 if given is None else given)
    want = wanted(q, k, v, weight, places, interleaved)
    turn = (lambda x: x) if layout == "bshd" else (lambda x: x.swapaxes(1, 2))
    options = {} if given is None else {"rope_positions": places.astype(np.int32)}

    def loss(q, k, v):
        out = cuattn.attention(
            turn(q), turn(k), turn(v), causal=True, rope=(COS, SIN), layout=layout,
            rope_interleaved=interleaved, **options,
        )  # fmt: skip
        return (turn(out) * weight).sum()

    for find in (jax.grad(loss, (0, 1, 2)), jax.jit(jax.grad(loss, (0, 1, 2)))):
        for found, expected in zip(find(q, k, v), want, strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    if given is None:
        alone = jax.grad(lambda q: loss(q[None], k[:1], v[:1]))
        each = np.stack([alone(x) for x in q])
        np.testing.assert_allclose(jax.vmap(alone)(q), each, rtol=2e-4, atol=2e-5)


def jax_and_numpy(jax, device, function, arrays, **options):
    """The results of the same call of JAX, under jit, and of the device."""
    want = numpy_call(device, function, **arrays, **options)
    given = {name: jax.numpy.asarray(a) for name, a in arrays.items()}
    return np.asarray(jax.jit(lambda a: function(**a, **options))(given)), want


def turning(function):
    """`function` with the tables as arguments."""

    def call(cos, sin, **arrays):
        return function(rope=(cos, sin), **arrays)

    return call


LENGTHS = {
    "all": {},
    "keys in use": {"seqused_k": np.array([7, 9], np.int32)},
    "queries in use": {"seqused_q": np.array([3, 5], np.int32)},
    "padding on the left": {"kv_start": np.array([2, 0], np.int32)},
    "fewer keys than queries": {"seqused_k": np.array([2, 0], np.int32)},
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_jax_has_the_bits_of_other_arrays(jax, device, lengths, rng):
    q, k, v, _ = drawn(rng)
    arrays = {"q": q, "k": k, "v": v, "cos": COS, "sin": SIN, **LENGTHS[lengths]}
    found, want = jax_and_numpy(jax, device, turning(cuattn.attention), arrays, causal=True)
    assert np.array_equal(found, want, equal_nan=True)


@pytest.mark.parametrize("used", [None, [6, 1, 7]])
def test_jax_ragged(jax, device, used, rng):
    q = rng.standard_normal((12, 4, 16)).astype(np.float32)  # two rows are nobody's
    k, v = rng.standard_normal((2, 16, 2, 16)).astype(np.float32)
    arrays = {"q": q, "k": k, "v": v, "cos": COS, "sin": SIN,
              "cu_seqlens_q": np.array([0, 3, 3, 10], np.int32),
              "cu_seqlens_k": np.array([0, 8, 9, 16], np.int32)}  # fmt: skip
    if used is not None:
        arrays["seqused_k"] = np.array(used, np.int32)
    found, want = jax_and_numpy(jax, device, turning(cuattn.attention_varlen), arrays, causal=True,
                                max_seqlen_q=7, max_seqlen_k=8)  # fmt: skip
    assert np.array_equal(found[:10], want[:10])


@pytest.mark.parametrize("q_len", [None, 3])
@pytest.mark.parametrize("given", [False, True])
def test_jax_paged(jax, device, q_len, given, rng):
    k, v = rng.standard_normal((2, 10, 16, 2, 16)).astype(np.float32)
    shape = (4, 4, 16) if q_len is None else (4, q_len, 4, 16)
    arrays = {"q": rng.standard_normal(shape).astype(np.float32), "k_cache": k, "v_cache": v,
              "block_tables": rng.permutation(10)[:8].reshape(4, 2).astype(np.int32),
              "context_lens": np.array([20, 3, 0, 32], np.int32),
              "cos": COS, "sin": SIN}  # fmt: skip
    if given:
        arrays["rope_positions"] = rng.integers(0, 64, shape[:-2])
    found, want = jax_and_numpy(jax, device, turning(cuattn.paged_attention), arrays)
    assert np.array_equal(found, want)


def test_jax_rotates_keys_too(jax, device, rng):
    q, k, v, _ = drawn(rng)
    arrays = {"q": q, "k": k, "v": v, "cos": COS, "sin": SIN}
    found, want = jax_and_numpy(jax, device, cuattn.rope_attention, arrays, causal=True)
    assert np.array_equal(found, want)
