# SPDX-License-Identifier: Apache-2.0
"""Gradients through torch's autograd, against autograd through the formula in float64."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cuattn
import frameworks
import reference

torch = frameworks.require("torch")
import cuattn.torch  # noqa: E402
from torch_steps import arrays, assert_near, formula, gradients_of, ragged  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
our_sdpa = cuattn.torch.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": ()},
    "sinks": {"sinks": ()},
    "alibi": {"alibi_slopes": ()},
    "all": {"causal": True, "softcap": 3.0, "bias": (), "sinks": (), "alibi_slopes": ()},
}


def call_and_formula(function, name, with_lse=True, **made):
    options = {n: x for n, x in OPTIONS[name].items() if x != ()}
    leaves = arrays(OPTIONS[name], **made)
    tensors = {n: x for n, x in leaves.items() if n not in "qkv"}
    qkv = [leaves[n] for n in "qkv"]
    out, lse = function(*qkv, **tensors, **options, return_lse=True)
    want_out, want_lse = formula(*qkv, **tensors, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * with_lse
    loss = (out * dout).sum() + (lse * dlse).sum()
    want = (want_out * dout).sum() + (want_lse * dlse).sum()
    return loss, want, leaves


@pytest.mark.parametrize("function", [cuattn.attention, cuattn.torch.attention])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_formula(function, name):
    loss, want, leaves = call_and_formula(function, name)
    assert_near(gradients_of(loss, leaves), gradients_of(want, leaves))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_step_gives_what_an_eager_one_does(name):
    def step(leaves, options):
        out, lse = cuattn.torch.attention(**leaves, **options, return_lse=True)
        return (out.sin() + lse.transpose(1, 2)[..., None]).sum()

    options = {n: x for n, x in OPTIONS[name].items() if x != ()}
    leaves = arrays(OPTIONS[name])
    eager = gradients_of(step(leaves, options), leaves)
    # Our kernel is opaque to the code generator, which takes seconds: one case runs it.
    backend = "inductor" if name == "all" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    got = gradients_of(compiled(leaves, options), leaves)
    for n, x in eager.items():
        assert torch.allclose(got[n], x, atol=1e-5, rtol=1e-5), n  # sin and sum are torch's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    leaves = arrays(dtype=dtype, heads=(2, 2))
    out = cuattn.torch.attention(*leaves.values(), causal=True)
    want, _ = formula(*leaves.values(), causal=True)
    dout = torch.randn_like(out)
    found = gradients_of((out * dout).sum(), leaves)
    assert_near(found, gradients_of((want * dout).sum(), leaves), 0.03)


def test_heads_first_transposed_and_expanded_gradients():
    leaves = arrays()
    heads_first = [x.transpose(1, 2) for x in leaves.values()]
    out = cuattn.torch.attention(*heads_first, layout="bhsd")
    want, _ = formula(*leaves.values())
    for reduce in (torch.sum, lambda x: x[..., 3].sum(), lambda x: x[:, :, 1:4].mean()):
        found = torch.autograd.grad(reduce(out), tuple(leaves.values()), retain_graph=True)
        wanted = torch.autograd.grad(
            reduce(want.transpose(1, 2)), tuple(leaves.values()), retain_graph=True
        )
        assert_near(dict(zip("qkv", found, strict=True)), dict(zip("qkv", wanted, strict=True)))


def test_only_what_is_asked_for_gets_a_gradient():
    leaves = arrays(("bias", "sinks"))
    for wanted in leaves:
        asked = {n: x.detach().requires_grad_(n == wanted) for n, x in leaves.items()}
        out = cuattn.torch.attention(**asked)
        out.sum().backward()
        assert [n for n, x in asked.items() if x.grad is not None] == [wanted]
        assert asked[wanted].grad.abs().sum() > 0


def test_a_gradient_through_lse_alone_and_through_out_alone():
    leaves = arrays()
    out, lse = cuattn.torch.attention(**leaves, return_lse=True)
    want_out, want_lse = formula(**leaves)
    inputs = (leaves["q"], leaves["k"])
    for got, want in ((lse, want_lse), (out, want_out)):
        found = torch.autograd.grad(got.sum(), inputs, retain_graph=True)
        wanted = torch.autograd.grad(want.sum(), inputs, retain_graph=True)
        assert_near(dict(zip("qk", found, strict=True)), dict(zip("qk", wanted, strict=True)))


@pytest.mark.parametrize("function", [cuattn.attention_varlen, cuattn.torch.attention_varlen])
def test_ragged_gradients(function):
    qkv, lengths = ragged()
    out = function(*qkv, *lengths, causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum(), qkv)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in lengths[:2])
        want, _ = formula(qkv[0][rows][None], qkv[1][keys][None], qkv[2][keys][None], causal=True)
        total = total + (want[0] * dout[rows]).sum()
    wanted = torch.autograd.grad(total, qkv)
    assert_near(dict(zip("qkv", found, strict=True)), dict(zip("qkv", wanted, strict=True)))
    assert (found[0][-2:] == 0).all()


def test_a_compiled_ragged_step():
    qkv, lengths = ragged()

    def step(*qkv):
        return cuattn.torch.attention_varlen(*qkv, *lengths, causal=True).square().sum()

    eager = torch.autograd.grad(step(*qkv), qkv)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled = torch.autograd.grad(compiled(*qkv), qkv)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "broadcast"])
def test_sdpa_has_the_gradients_of_torch(mask):
    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(9, 9) > 0.2},
        "float": {"attn_mask": torch.randn(2, 3, 9, 9, requires_grad=True)},
        "broadcast": {"attn_mask": torch.randn(1, 1, 1, 9, requires_grad=True)},
    }[mask]
    wanted = [q, k, v, *(x for x in options.values() if torch.is_tensor(x) and x.requires_grad)]
    double = {n: x.double() if x in wanted[3:] else x for n, x in options.items()}
    out, want = our_sdpa(q, k, v, **options), sdpa(q.double(), k.double(), v.double(), **double)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum(), wanted)
    expected = torch.autograd.grad((want * dout).sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_dropout_is_drawn_from_the_generator_and_differentiated():
    leaves = arrays(heads=(4, 4))
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        out = cuattn.torch.attention(**leaves, dropout_p=0.25)
        runs.append((out, gradients_of(out.square().sum(), leaves)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[2][0])
    for name in leaves:
        assert torch.equal(runs[0][1][name], runs[1][1][name])
    kept = reference.dropout(0.25, 3, 5, (2, 4), (13, 21))
    state = torch.tensor([3, 5])
    want, _ = formula(**leaves, kept=torch.from_numpy(np.asarray(kept, np.float64)))
    wanted = gradients_of(want.sum(), leaves)
    for given in ({"dropout_state": state}, {"dropout_seed": 3, "dropout_offset": 5}):
        out = cuattn.attention(*leaves.values(), dropout_p=0.25, **given)
        assert torch.allclose(out.double(), want, atol=1e-5)
        assert_near(gradients_of(out.sum(), leaves), wanted)


def test_sdpa_drops_too():
    q = torch.randn(2, 3, 9, 16, requires_grad=True)
    torch.manual_seed(1)
    first = our_sdpa(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    with torch.no_grad():
        again = our_sdpa(q, q, q, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, our_sdpa(q, q, q))
    with pytest.raises(ValueError, match="dropout_p must lie in"):
        our_sdpa(q, q, q, dropout_p=1.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    leaves = arrays()

    def block(q, k, v):
        return cuattn.torch.attention(q, k, v, causal=True, dropout_p=0.2).square()

    torch.manual_seed(3)
    plain = gradients_of(block(**leaves).sum(), leaves)
    torch.manual_seed(3)
    out = checkpoint(block, *leaves.values(), use_reentrant=use_reentrant)
    out.sum().backward()
    for name, x in leaves.items():
        assert torch.equal(x.grad, plain[name])


def test_two_backward_passes_and_none_of_a_gradient():
    leaves = arrays()
    out = cuattn.torch.attention(**leaves)
    first = torch.autograd.grad(out.sum(), leaves["q"], retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    assert torch.equal(first[0], second[0])
    with pytest.raises(NotImplementedError, match="attention_backward: a gradient of a gradient"):
        torch.autograd.grad(second[0].sum(), leaves["k"])


def test_autocast_converts_as_torch_does():
    leaves = arrays()
    heads_first = [x.transpose(1, 2) for x in arrays(heads=(4, 4), keys=13).values()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cuattn.torch.attention(**leaves)
        assert out.dtype == torch.bfloat16
        assert our_sdpa(*heads_first).dtype == sdpa(*heads_first).dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves.values())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = cuattn.attention(*(x.bfloat16() for x in leaves.values()))
        assert torch.equal(cuattn.torch.attention(**leaves), want)


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("how", ["called", "compiled"])
def test_autocast_leaves_the_builtins_alone(how, wants_gradient):
    """They gave autocast's dtype where a gradient was wanted, and in graphs."""
    q, k, v = (x.detach() for x in arrays().values())
    rows = [x[0].detach().requires_grad_(wants_gradient) for x in (q, k, v)]
    ends = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in rows[:2]]
    packed = (*rows, *ends, *(x.shape[0] for x in rows[:2]))
    q.requires_grad_(wants_gradient)
    steps = {
        "attention": lambda: cuattn.attention(q, k, v, causal=True),
        "attention_varlen": lambda: cuattn.attention_varlen(*packed),
        "dropout": lambda: cuattn.attention(q, k, v, dropout_p=0.5),
    }
    for name, step in steps.items():
        torch.manual_seed(1)
        want = step()
        if how == "compiled":
            torch.compiler.reset()
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = step()
        assert out.dtype == torch.float32, name
        assert torch.equal(out, want), name
        assert out.requires_grad == wants_gradient


def test_autocast_leaves_codes_and_float64_alone():
    q = torch.randn(1, 9, 2, 16)
    codes, double = q.to(torch.float8_e4m3fn), q.double()
    want = cuattn.torch.attention(codes, codes, codes, k_scale=2.0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(cuattn.torch.attention(codes, codes, codes, k_scale=2.0), want)
        with pytest.raises(ValueError, match="float64"):
            cuattn.torch.attention(double, double, double)


def test_explain_takes_arrays_that_require_grad():
    leaves = arrays()
    assert all(x.requires_grad for x in leaves.values())
    plain = {name: x.detach() for name, x in leaves.items()}
    want = cuattn.explain("attention", *plain.values())
    assert str(cuattn.explain("attention", *leaves.values())) == str(want)
    q, k = plain["q"], plain["k"]  # shapes beside an array are like it
    shapes = {"bias": (1, 1, q.shape[1], k.shape[1])}
    assert "cpu" in str(cuattn.explain("attention", q, tuple(k.shape), tuple(k.shape), **shapes))


@pytest.fixture(params=["eager", "op"])
def watched(request):
    """Both ways to a gradient: ops are seen by a dispatch mode, the eager way is not."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False) if request.param == "op" else contextlib.nullcontext()


def test_deterministic_algorithms_are_asked_for(monkeypatch, watched):
    from cuattn import _core

    asked = []
    run = _core.attention_backward
    monkeypatch.setattr(
        _core,
        "attention_backward",
        lambda arguments: asked.append(arguments.get("deterministic")) or run(arguments),
    )
    leaves = arrays()
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            with watched:
                cuattn.torch.attention(**leaves).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [None, True]


@pytest.mark.parametrize("options", [{}, {"window": [2, 0]}, {"layout": "bhsd", "causal": True}])
def test_the_ops_pass_opcheck_with_gradients(options):
    leaves = tuple(arrays(rows=5, keys=5, heads=(5, 5)).values())
    options = {**options, "return_lse": True}
    torch.library.opcheck(torch.ops.cuattn.attention.default, leaves, options)
    qkv, lengths = ragged(others=0)
    options.pop("layout", None)
    torch.library.opcheck(torch.ops.cuattn.attention_varlen.default, (*qkv, *lengths), options)


def test_a_small_step_reaches_the_same_loss_as_torch():
    """Ten steps of a head of attention between two linear layers, from the same seed."""
    losses = []
    for function in (sdpa, our_sdpa):
        torch.manual_seed(5)
        layers = torch.nn.ModuleList([torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)])
        x, y = torch.randn(4, 12, 32), torch.randn(4, 12, 32)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
        for _ in range(10):
            q, k, v = layers[0](x).view(4, 12, 3, 2, 16).permute(2, 0, 3, 1, 4)
            out = layers[1](function(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 12, 32))
            loss = (out - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_has_no_gradient_is_refused_by_name():
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    out = torch.empty_like(q)
    with pytest.raises(NotImplementedError, match="attention: out must be None while torch traces"):
        cuattn.attention(q, q, q, out=out)
    lse = torch.zeros(1, 2, 5)
    with pytest.raises(NotImplementedError, match="no gradient goes through merge_states"):
        cuattn.merge_states(q, lse, q, lse)
    rows, cache = torch.randn(3, 2, 16, requires_grad=True), torch.randn(4, 8, 2, 16)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    paged = {
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "seqused_k": torch.tensor([9], dtype=torch.int32),
    }
    with pytest.raises(
        NotImplementedError, match=r"block_tables must .*gather_cache first, or call"
    ):
        cuattn.attention_varlen(rows, cache, cache, cu, None, 3, 16, **paged)
    with pytest.raises(NotImplementedError, match="return_lse must be True for a gradient"):
        torch.ops.cuattn.attention(q, q, q)[0].sum().backward()


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range_is_refused(p):
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match="dropout_p must lie in"):
        cuattn.torch.attention(q, q, q, dropout_p=p)
