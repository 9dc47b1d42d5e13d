# SPDX-License-Identifier: Apache-2.0
"""cuattn's ops under torch.func (vmap, grad, their combinations) and under torch's FLOP counter."""

from __future__ import annotations

import re
import warnings

import pytest

import cuattn
import frameworks

torch = frameworks.require("torch")
from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

import cuattn.torch  # noqa: E402
from cuattn.torch import sdpa_arguments  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
our_sdpa = cuattn.torch.scaled_dot_product_attention
attention = cuattn.torch.attention


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def each(function, in_dims, *arrays, **options):
    """What vmap means, as a loop."""
    size = next(x.shape[d] for x, d in zip(arrays, in_dims, strict=True) if d is not None)
    parts = [
        function(
            *(x if d is None else x.select(d, i) for x, d in zip(arrays, in_dims, strict=True)),
            **options,
        )
        for i in range(size)
    ]
    return torch.stack(parts)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 1, 0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_of_attention_is_a_loop(in_dims, batch):
    shapes = [(batch, n, 4, 16) for n in (9, 7, 7)]
    arrays = [
        torch.randn(s if d is None else (*s[:d], 3, *s[d:]))
        for s, d in zip(shapes, in_dims, strict=True)
    ]
    for options in ({}, {"causal": True, "layout": "bshd", "window": (3, 0)}):
        got = torch.func.vmap(lambda *a, o=options: attention(*a, **o), in_dims)(*arrays)
        assert torch.equal(got, each(attention, in_dims, *arrays, **options))


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("bias", (3, 9, 7), 0),
        ("bias", (2, 4, 9, 3, 7), 3),
        ("bias", (3, 1, 4, 1, 7), 0),
        ("bias", (2, 1, 9, 7), None),
        ("bias", (1, 4, 9, 7), None),
        ("alibi_slopes", (4, 3), 1),
        ("alibi_slopes", (3, 2, 4), 0),
        ("alibi_slopes", (2, 4), None),
        ("alibi_slopes", (4,), None),
        ("sinks", (3, 4), 0),
        ("sinks", (4,), None),
        ("seqused_k", (3, 2), 0),
        ("seqused_k", (2,), None),
    ],
)
def test_vmap_of_each_optional_tensor(name, shape, dim):
    q, k, v = (torch.randn(3, 2, n, 4, 16) for n in (9, 7, 7))
    x = torch.rand(shape) if name != "seqused_k" else torch.randint(1, 8, shape).int()
    call = lambda q, k, v, x: attention(q, k, v, **{name: x})  # noqa: E731
    got = torch.func.vmap(call, (0, 0, 0, dim))(q, k, v, x)
    assert torch.allclose(got, each(call, (0, 0, 0, dim), q, k, v, x), atol=1e-6)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "kv_start"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_vmap_of_lengths_of_a_batch_of_one(name, dim):
    """An expanded or selected axis of 1 folds into a view with a stride, which no call takes."""
    q, lengths = torch.randn(3, 1, 7, 4, 16), torch.arange(1, 7, dtype=torch.int32)[::2]
    lengths = lengths[:1] if dim is None else lengths.unsqueeze(1 - dim)
    call = lambda q, n: attention(q, q, q, **{name: n})  # noqa: E731
    got = torch.func.vmap(call, (0, dim))(q, lengths)
    each_length = lengths.flatten().expand(3).split(1)
    assert torch.equal(got, torch.stack([call(*x) for x in zip(q, each_length, strict=True)]))


def test_vmap_over_the_last_axis_of_offsets_and_states():
    q, states = torch.randn(3, 5, 4, 16), torch.arange(6).reshape(2, 3)
    ends = torch.tensor([[0, 0, 0], [2, 0, 3], [5, 5, 5]], dtype=torch.int32)
    packed = lambda q, n: cuattn.torch.attention_varlen(q, q, q, n, n, 5, 5)  # noqa: E731
    want = torch.stack([packed(q[i], ends[:, i].contiguous()) for i in range(3)])
    assert torch.equal(torch.func.vmap(packed, (0, 1))(q, ends), want)
    dropped = lambda q, s: attention(q, q, q, dropout_p=0.5, dropout_state=s)  # noqa: E731
    q = q[:, None]
    want = torch.stack([dropped(q[i], states[:, i].contiguous()) for i in range(3)])
    assert torch.equal(torch.func.vmap(dropped, (0, 1))(q, states), want)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "dropout_seed": 1}])
def test_vmap_over_the_last_axis_of_queries(batch, options):
    """Folded into a batch of 1, or selected, they are rows with gaps, which no kernel reads."""
    q, sinks = torch.randn(batch, 5, 4, 16, 3), torch.zeros(4)
    loss = lambda q, s: attention(q, q, q, sinks=s, **options).square().sum()  # noqa: E731
    found = torch.func.vmap(torch.func.grad(loss, (0, 1)), (4, None))(q, sinks)
    for i in range(3):
        want = torch.func.grad(loss, (0, 1))(q[..., i].contiguous(), sinks)
        for x, y in zip(found, want, strict=True):
            assert torch.allclose(x[i], y, atol=1e-5)


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 3, 16)])
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_vmap_of_scales_of_codes(name, shape, dim, layout):
    """There are as many examples as heads: one number of each is no scale of a head."""
    if len(shape) == 3 and name != "v_scale":
        shape = (2, 6 if name == "q_scale" else 3, 1)
    arrays = [torch.randn(3, 2, 16, h, 16).to(torch.float8_e4m3fn) for h in (6, 3, 3)]
    if layout == "bhsd":
        arrays = [x.transpose(2, 3) for x in arrays]
    scale = torch.rand(shape if dim is None else (*shape, 3)) + 0.5
    scale = scale.movedim(-1, 0) if dim == 0 else scale
    call = lambda q, k, v, x: attention(q, k, v, layout=layout, **{name: x.contiguous()})  # noqa: E731
    dims = (0, 0, 0, dim)
    assert torch.equal(
        torch.func.vmap(call, dims)(*arrays, scale), each(call, dims, *arrays, scale)
    )


def test_vmap_of_slopes_of_a_batch_of_one():
    q, slopes = torch.randn(3, 1, 9, 4, 16), torch.rand(1, 4)
    call = lambda q: attention(q, q, q, alibi_slopes=slopes)  # noqa: E731
    assert torch.equal(torch.func.vmap(call)(q), each(call, (0,), q))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0)])
def test_vmap_goes_through_what_needs_no_torch(in_dims):
    """cuattn.attention and attention_varlen hand the call to the ops, which have rules."""
    arrays = [torch.randn(3, 3, 7, 4, 16) if d is not None else torch.randn(3, 7, 4, 16)
              for d in in_dims]  # fmt: skip
    bias = torch.randn(3, 4, 7, 7)
    for options in ({}, {"causal": True, "return_lse": True, "bias": bias}):
        call = lambda *a, f=cuattn.attention, o=options: f(*a, **o)  # noqa: E731
        got = torch.func.vmap(call, in_dims)(*arrays)
        want = torch.func.vmap(lambda *a, o=options: attention(*a, **o), in_dims)(*arrays)
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    q, cu = torch.randn(3, 7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = lambda q: cuattn.attention_varlen(q, q, q, cu, cu, 4, 4, causal=True)  # noqa: E731
    assert torch.equal(torch.func.vmap(packed)(q), torch.stack([packed(x) for x in q]))


@pytest.mark.parametrize("call", [cuattn.attention, attention, our_sdpa])
@pytest.mark.filterwarnings("error")
def test_vmap_of_what_has_no_way_back_runs_where_none_is_wanted(call, monkeypatch):
    """SDPA of wide heads went to torch's own function, cuattn.attention refused a gradient."""
    monkeypatch.setattr(sdpa_arguments, "warned", set())
    q = torch.randn(3, 1, 4, 5, 320)
    want = torch.stack([call(x, x, x) for x in q])
    with torch.no_grad():
        beneath = torch.func.vmap(lambda x: call(x, x, x))(q.clone().requires_grad_())
    assert torch.equal(torch.func.vmap(lambda x: call(x, x, x))(q), want)
    assert torch.equal(beneath, want)
    with_grad = {
        "vmap": lambda: torch.func.vmap(lambda x: call(x, x, x))(q.clone().requires_grad_()),
        "grad": lambda: torch.func.grad(lambda x: call(x, x, x).sum())(q[0]),
        "grad of vmap": lambda: torch.func.grad(
            lambda q: torch.func.vmap(lambda x: call(x, x, x))(q).sum()
        )(q),
    }
    for wanted in with_grad.values():
        if call is our_sdpa:
            sdpa_arguments.warned.clear()
            with warnings.catch_warnings(record=True) as seen:  # torch warns of its own loop, too
                warnings.simplefilter("always")
                wanted()
            assert any("outside 1 to 256 with a gradient" in str(w.message) for w in seen)
        else:
            with pytest.raises(NotImplementedError, match="no gradient goes through heads of more"):
                wanted()
    if call is not our_sdpa:
        codes = torch.randn(3, 1, 16, 2, 16).to(torch.float8_e4m3fn)
        got = torch.func.vmap(lambda x: call(x, x, x))(codes)
        assert torch.equal(got, torch.stack([call(x, x, x) for x in codes]))


def test_vmap_without_a_rule_is_refused_with_the_way_out():
    q = torch.randn(3, 2, 7, 4, 16)
    weight = torch.ones(16)
    for op, call in {
        "rms_norm": lambda q: cuattn.rms_norm(q, weight),
        "apply_rope": lambda q: cuattn.apply_rope(q, *cuattn.rope_table(8, 16)),
        "flex_attention": lambda q: cuattn.flex_attention(q, q, q),
        "attention(residual=)": lambda q: cuattn.attention(q, q, q, residual=q),
    }.items():
        message = rf"^{re.escape(op)}: \w+ is batched by torch.func.vmap, .* in a loop$"
        with pytest.raises(NotImplementedError, match=message):
            torch.func.vmap(call)(q)
    sparse = torch.zeros(2, 7, 4, 16).to_sparse()  # the other refusals of torch stay as they are
    with pytest.raises(ValueError, match="must be a dense array in memory"):
        cuattn.attention(sparse, sparse, sparse)


def test_vmap_with_lse_and_nested_vmaps():
    q = torch.randn(3, 5, 2, 9, 4, 16)
    out, lse = torch.func.vmap(torch.func.vmap(lambda q: attention(q, q, q, return_lse=True)))(q)
    want, want_lse = attention(*[q.reshape(30, 9, 4, 16)] * 3, return_lse=True)
    assert torch.equal(out.reshape(want.shape), want)
    assert torch.equal(lse.reshape(want_lse.shape), want_lse)


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_under_vmap_is_that_of_torch(masked):
    q, k = torch.randn(3, 2, 4, 9, 20), torch.randn(2, 3, 4, 7, 20)
    mask = torch.randn(9, 7, 3) if masked else None
    dims = (0, 1, 1, 2 if masked else None)
    got = torch.func.vmap(our_sdpa, dims)(q, k, k, mask)
    want = torch.func.vmap(sdpa, dims)(q, k, k, mask)
    assert torch.allclose(got, want, atol=1e-5)
    two_axes = torch.func.vmap(lambda q: our_sdpa(q, q, q, is_causal=True))(q[:, 0, 0])
    want = sdpa(q[:, 0, 0], q[:, 0, 0], q[:, 0, 0], is_causal=True)
    assert torch.allclose(two_axes, want, atol=1e-5)


def test_functional_gradients_are_those_of_torch():
    arrays = [torch.randn(3, 2, 4, n, 20) for n in (9, 7, 7)]
    mask = torch.randn(3, 1, 9, 7)

    def loss(function):
        return lambda *a: function(*a[:3], attn_mask=a[3]).sin().sum()

    want = torch.func.vmap(torch.func.grad(loss(sdpa), (0, 1, 2, 3)))(*arrays, mask)
    got = torch.func.vmap(torch.func.grad(loss(our_sdpa), (0, 1, 2, 3)))(*arrays, mask)
    one = torch.func.grad(loss(our_sdpa), (0, 1, 2, 3))(*(x[0] for x in arrays), mask[0])
    for a, b, c in zip(got, want, one, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
        assert torch.allclose(c, b[0], atol=2e-5)
    outer = torch.func.grad(lambda *a: torch.func.vmap(loss(our_sdpa))(*a).sum(), (0, 1, 2, 3))
    for a, b in zip(outer(*arrays, mask), want, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_gradients_of_what_all_examples_share():
    q, k = torch.randn(3, 2, 4, 9, 16), torch.randn(2, 4, 7, 16)
    mask, sinks = torch.randn(1, 4, 9, 7), torch.rand(4)

    def loss(q, k, mask, sinks):
        out = attention(q, k, k, layout="bhsd", bias=mask, sinks=sinks)
        return out.sin().sum()

    grad = torch.func.grad(loss, (0, 1, 2, 3))
    got = torch.func.vmap(grad, (0, None, None, None))(q, k, mask, sinks)
    for i in range(3):
        for a, b in zip(got, grad(q[i], k, mask, sinks), strict=True):
            assert torch.allclose(a[i], b, atol=2e-5)


def test_a_jacobian_is_there_and_no_second_derivative():
    q = torch.randn(1, 2, 5, 16)
    loss = lambda q: our_sdpa(q, q, q).sum()  # noqa: E731
    want = torch.func.jacrev(lambda q: sdpa(q, q, q).sum(-1))(q)
    got = torch.func.jacrev(lambda q: our_sdpa(q, q, q).sum(-1))(q)
    assert torch.allclose(got, want, atol=2e-5)
    with pytest.raises(NotImplementedError, match="attention_backward: a gradient of a gradient"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)


def test_forward_mode_is_refused_by_the_name_of_the_array():
    """A tangent was lost without a word."""
    forward = torch.autograd.forward_ad
    q, other = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    calls = {
        "attention: q": lambda x: cuattn.attention(x, other, other),
        "attention: k": lambda x: attention(other, x, other),
        "attention: v": lambda x: our_sdpa(*(y.transpose(1, 2) for y in (other, other, x))),
        "attention: bias": lambda x: attention(
            other, other, other, bias=x[0, :, :, :9].movedim(1, 0)
        ),
        "flex_attention: k": lambda x: cuattn.flex_attention(other, x, other),
        "rms_norm: x": lambda x: cuattn.rms_norm(x, torch.ones(16)),
        "attention_varlen: v": lambda x: cuattn.attention_varlen(
            other[0], other[0], x[0], cu, cu, 9, 9
        ),
    }
    for start, call in calls.items():
        refused = pytest.raises(NotImplementedError, match=f"^{start} has a tan")
        with_grad = () if start.startswith("rms_norm") else (q.clone().requires_grad_(),)
        for array in (q, *with_grad):
            with forward.dual_level(), refused:
                call(forward.make_dual(array, torch.ones_like(q)))
            with refused:
                torch.func.jvp(call, (array,), (q,))
    want = cuattn.attention(other, other, other)
    compiled = torch.compile(lambda x: cuattn.attention(x, x, x), backend="aot_eager")
    with forward.dual_level():  # of another tensor than those of the call
        dual = forward.make_dual(torch.randn(9), torch.ones(9))
        assert torch.equal(attention(other, other, other), want)
        assert torch.equal(compiled(other), want)
        mapped = torch.func.vmap(lambda x: cuattn.attention(x, x, x))(other[None])
        assert torch.equal(mapped[0], want)
        with FlopCounterMode(display=False):
            assert torch.equal(attention(other, other, other), want)
        with pytest.raises(NotImplementedError, match=r"^flex_attention: a captured array has"):
            cuattn.flex_attention(other, other, other, score_mod=lambda s, b, h, i, j: s * dual[j])


def test_vmap_of_no_examples():
    q = torch.randn(0, 2, 9, 4, 16)
    assert torch.func.vmap(lambda q: attention(q, q, q))(q).shape == q.shape


def test_tensors_that_a_transform_made_and_does_not_differentiate():
    q, weight = torch.randn(1, 9, 2, 16), torch.ones(16)
    got = torch.func.grad(lambda x: (cuattn.attention(q * 1, q, q) * x).sum())(q)
    assert torch.equal(got, attention(q, q, q))
    with pytest.raises(NotImplementedError, match=r"^rms_norm: x is of torch\.func\.grad"):
        torch.func.grad(lambda x: (cuattn.rms_norm(q * 1, weight) * x).sum())(q)


def test_vmap_draws_dropout_as_it_is_told():
    q = torch.randn(1, 9, 2, 16).expand(3, 1, 9, 2, 16)
    call = lambda q: attention(q, q, q, dropout_p=0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(q)
    same = torch.func.vmap(call, randomness="same")(q)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], attention(q[0], q[0], q[0]))
    different = torch.func.vmap(call, randomness="different")(q)
    assert not torch.equal(different[0], different[1])


def test_vmap_of_a_ragged_call():
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    q, k = torch.randn(3, 11, 4, 16), torch.randn(11, 2, 3, 16)
    call = lambda q, k: cuattn.torch.attention_varlen(q, k, k, cu, cu, 7, 7)  # noqa: E731
    got = torch.func.vmap(call, (0, 2))(q, k)
    for i in range(3):
        assert torch.equal(got[i], call(q[i], k[:, :, i].contiguous()))


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim_v", [64, 32])
def test_flops_of_sdpa_are_those_of_torch(grad, causal, dim_v):
    arrays = [torch.randn(2, 4, n, d) for n, d in ((96, 64), (80, 64), (80, dim_v))]
    arrays = [x.requires_grad_(grad) for x in arrays]
    if grad:
        want = 2 * 2 * 4 * 96 * 80 * (4 * 64 + 3 * dim_v)
    else:
        want = 2 * 2 * 4 * 96 * 80 * (64 + dim_v)

    def step(function):
        out = function(*arrays, is_causal=causal)
        if grad:
            out.sum().backward()

    assert flops_of(lambda: step(our_sdpa)) == want  # no key lies behind the last query here
    counted = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    if dim_v == 64 and counted:  # else torch's formula runs, without the recomputed scores
        assert flops_of(lambda: step(sdpa)) == want


def test_flops_of_grouped_heads_and_of_both_layouts():
    q, k = torch.randn(2, 96, 8, 64), torch.randn(2, 80, 2, 64)
    want = 4 * 2 * 8 * 96 * 80 * 64
    assert flops_of(lambda: attention(q, k, k)) == want
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert flops_of(lambda: attention(q, k, k, layout="bhsd")) == want
    assert flops_of(lambda: our_sdpa(q, k, k, enable_gqa=True)) == want


@pytest.mark.parametrize("grad", [False, True])
def test_flops_of_a_ragged_batch(grad):
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    q, k = torch.randn(11, 4, 16, requires_grad=grad), torch.randn(11, 2, 16, requires_grad=grad)

    def step():
        out = cuattn.torch.attention_varlen(q, k, k, cu, cu, 7, 7)
        if grad:
            out.sum().backward()

    assert flops_of(step) == 2 * 4 * (4 * 4 + 7 * 7) * 16 * (7 if grad else 2)


def test_flops_of_tensors_without_memory():
    q = torch.empty(2, 96, 8, 64, device="meta")
    assert flops_of(lambda: attention(q, q, q)) == 4 * 2 * 8 * 96 * 96 * 64
    x = torch.empty(11, 4, 16, device="meta")
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    ragged = lambda: cuattn.torch.attention_varlen(x, x, x, cu, cu, 7, 7)  # noqa: E731
    assert flops_of(ragged) == 4 * 4 * 3 * 7 * 7 * 16
