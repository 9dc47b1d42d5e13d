# SPDX-License-Identifier: Apache-2.0
"""cuattn.torch: registered ops, torch.compile without graph breaks, the SDPA-shaped call."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import frameworks
import harness

torch = frameworks.require("torch")
import cuattn.torch  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
our_sdpa = cuattn.torch.scaled_dot_product_attention

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(harness.why_no_cuda() is not None, reason="no CUDA"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()


def qkv(device="cpu", shape=(2, 9, 4, 32)):
    return [torch.randn(shape, device=device) for _ in range(3)]


def ragged(device="cpu"):
    cu_seqlens = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)
    return (*qkv(device, (11, 2, 16)), cu_seqlens, cu_seqlens, 7, 7)


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "lse": {"return_lse": True},
    "bhsd": {"layout": "bhsd", "return_lse": True},
    "numbers": {"scale": 0.3, "softcap": 5.0, "backend": "naive"},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_gives_the_same_bits_without_a_graph_break(device, name):
    arrays = qkv(device)
    options = CALLS[name]
    compiled = torch.compile(
        lambda q, k, v: cuattn.torch.attention(q, k, v, **options), fullgraph=True
    )
    want = cuattn.attention(*arrays, **options)
    got = compiled(*arrays)
    for a, b in zip(as_tuple(want), as_tuple(got), strict=True):
        assert torch.equal(a, b)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def test_a_compiled_call_takes_every_optional_tensor(device):
    arrays = qkv(device)
    tensors = {
        "alibi_slopes": torch.rand(4, device=device),
        "sinks": torch.rand(4, device=device),
        "bias": torch.rand(9, 9, device=device),
        "seqused_q": torch.tensor([9, 3], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([5, 9], dtype=torch.int32, device=device),
    }
    compiled = torch.compile(
        lambda arrays, tensors: cuattn.torch.attention(*arrays, **tensors), fullgraph=True
    )
    assert torch.equal(compiled(arrays, tensors), cuattn.attention(*arrays, **tensors))


def test_a_compiled_ragged_call_gives_the_same_bits(device):
    arguments = ragged(device)
    compiled = torch.compile(
        lambda *a: cuattn.torch.attention_varlen(*a, causal=True, return_lse=True), fullgraph=True
    )
    want = cuattn.attention_varlen(*arguments, causal=True, return_lse=True)
    for a, b in zip(want, compiled(*arguments), strict=True):
        assert torch.equal(a, b)


def test_eager_calls_go_straight_to_the_library(device):
    arrays = qkv(device)
    out = torch.empty_like(arrays[0])
    assert cuattn.torch.attention(*arrays, out=out) is out
    assert torch.equal(out, cuattn.attention(*arrays))
    arguments = ragged(device)
    assert torch.equal(
        cuattn.torch.attention_varlen(*arguments), cuattn.attention_varlen(*arguments)
    )


@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"return_lse": True, "window": [2, 0]}]
)
def test_the_ops_pass_opcheck(device, options):
    torch.library.opcheck(torch.ops.cuattn.attention.default, tuple(qkv(device)), options)
    heads_first = {**options, "layout": "bhsd"}
    torch.library.opcheck(torch.ops.cuattn.attention.default, tuple(qkv(device)), heads_first)
    torch.library.opcheck(torch.ops.cuattn.attention_varlen.default, ragged(device), options)


def test_fake_tensors_have_the_shapes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv()
    want = cuattn.attention(q, k, v[..., :16], return_lse=True)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        got = cuattn.torch.attention(*fake[:2], fake[2][..., :16], return_lse=True)
        with pytest.raises(TypeError, match="q must be a plain torch tensor, got a FakeTensor"):
            cuattn.attention(*fake)
    for a, b in zip(want, got, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_without_grad_mode_a_tensor_that_requires_grad_is_an_array(device):
    arrays = qkv(device)
    want = cuattn.attention(*arrays)
    arrays[1].requires_grad_()
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert torch.equal(cuattn.attention(*arrays), want)
    with torch.no_grad():
        out = torch.compile(cuattn.torch.attention, fullgraph=True)(*arrays)
    assert torch.equal(out, want)
    assert not out.requires_grad


def test_a_parameter_is_an_array():
    arrays = [torch.nn.Parameter(x) for x in qkv()]
    with torch.no_grad():
        out = cuattn.attention(*arrays)
    assert type(out) is torch.Tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.to_sparse(), "k must be a dense array in memory"),
        (lambda x: x.to("meta"), "k must be a dense array in memory"),
        (lambda x: x.to(torch.complex64), "k must be float32 like q, got complex64"),
        (lambda x: x.double(), "k must be float32 like q, got float64"),
        (lambda x: x.half(), "k must be float32 like q, got float16"),
        (lambda x: x.transpose(1, 3), "k must have head_dim 32 like q, got 9"),
        (lambda x: x.expand(2, 9, 4, 32)[..., ::2], "k must have head_dim 32 like q, got 16"),
    ],
)
def test_tensors_that_no_kernel_reads(make, message):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=f"attention: {message}") as error:
        cuattn.attention(q, make(k), v)
    assert "\n" not in str(error.value)


def test_negated_views_are_refused():
    """`x.conj().imag` is a view of x whose memory has the other sign."""
    q, k, v = qkv()
    bias = torch.randn(9, 9, dtype=torch.complex64).conj().imag
    thin = torch.randn(2, 4, 9, 1, dtype=torch.complex64).conj().imag
    for x in (bias, thin):
        assert x.is_neg()
        with pytest.raises(ValueError, match=r"bias is a negated view.*pass bias.resolve_neg\(\)"):
            cuattn.attention(q, k, v, bias=x)
        got = cuattn.attention(q, k, v, bias=x.resolve_neg())
        assert torch.equal(got, cuattn.attention(q, k, v, bias=x.clone().contiguous()))
    with pytest.raises(ValueError, match="q is a negated view"):
        cuattn.attention(torch.randn(2, 9, 4, 32, dtype=torch.complex64).conj().imag, k, v)


NEGATED = """
import torch, cuattn
x = torch.ones(1, 4, 2, 16)
for arrays in ((torch._neg_view(x), x, x), (x, x, torch._neg_view(x).transpose(0, 1))):
    try:
        cuattn.attention(*arrays)
    except ValueError as error:
        print(error)
print(bool((cuattn.attention(x, x, torch._neg_view(x).resolve_neg()) == -1).all()))
"""


def test_negated_views_with_dense_rows_are_refused_under_check():
    """Only `torch._neg_view` makes these; to ask each tensor would cost a tenth of a short call."""
    command, environment = [sys.executable, "-c", NEGATED], {**os.environ, "CUATTN_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rule = "is a negated view, whose memory holds the values with the other sign"
    assert done.stdout.splitlines() == [
        f"attention: q {rule}; pass q.resolve_neg()",
        f"attention: v {rule}; pass v.resolve_neg()",
        "True",
    ]


def test_arrays_of_numpy_and_unknown_names_are_refused_by_name():
    x = torch.randn(1, 4, 2, 16)
    options = {"dropout_p": 0.5}, {"deterministic": True}, {"causal": True}
    for place, name in enumerate("qkv"):
        for given in ({}, *options):
            arrays = [x, x, x]
            arrays[place] = x.numpy()
            arrays[place - 1] = x.clone().requires_grad_()
            message = f"^attention: {name} must be a torch tensor, got ndarray; pass"
            with pytest.raises(TypeError, match=message):
                cuattn.torch.attention(*arrays, **given)
    compiled = torch.compile(lambda x: cuattn.torch.attention(x, x, x, colour=1), backend="eager")
    with pytest.raises(TypeError, match=r"^attention: there is no argument colour"):
        compiled(x)


@pytest.mark.parametrize("name", ["out", "lse_out", "workspace", "stream"])
def test_ops_refuse_what_they_do_not_own(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        arrays = qkv()
        with pytest.raises(NotImplementedError, match=f"attention: {name} must be None while torc"):
            cuattn.torch.attention(*arrays, **{name: 1})


MASKS = {
    "none": lambda length, keys: {},
    "causal": lambda length, keys: {"is_causal": True},
    "bool": lambda length, keys: {"attn_mask": torch.rand(length, keys) > 0.3},
    "float": lambda length, keys: {"attn_mask": torch.randn(2, 1, length, keys)},
    "scale": lambda length, keys: {"scale": 0.25},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("length", "keys"), [(16, 16), (16, 24), (24, 16), (1, 7), (7, 1)])
def test_sdpa_means_what_torch_means(device, mask, length, keys):
    q = torch.randn(2, 4, length, 32)
    k, v = torch.randn(2, 4, keys, 32), torch.randn(2, 4, keys, 16)
    options = MASKS[mask](length, keys)
    want = sdpa(q.double(), k.double(), v.double(), **as_double(options)).float()
    on_device = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    got = our_sdpa(q.to(device), k.to(device), v.to(device), **on_device).cpu()
    seen = torch.isfinite(want)  # older torch gives NaN where no key is seen
    assert torch.allclose(got[seen], want[seen], atol=1e-5, rtol=1e-5)
    assert (got[~seen] == 0).all()


def as_double(options):
    mask = options.get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        return options
    return {"attn_mask": mask.double()}


def test_sdpa_takes_any_leading_axes_and_grouped_heads():
    q, k = torch.randn(3, 2, 4, 8, 32), torch.randn(3, 2, 2, 8, 32)
    mask = torch.rand(3, 1, 1, 8, 8) > 0.2
    got = our_sdpa(q, k, k, attn_mask=mask, enable_gqa=True)
    want = sdpa(q, k, k, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(
        our_sdpa(q[0, 0], q[1, 0], q[2, 0]), sdpa(q[0, 0], q[1, 0], q[2, 0]), atol=1e-5
    )


def permuted(shape, order):
    """Random values whose axes lie in memory in the given order, the last without gaps."""
    x = torch.randn([shape[axis] for axis in order])
    return x.permute([order.index(axis) for axis in range(len(order))])


def order_of(x):
    """The axes of extent > 1 by their strides, and whether they are dense in that order."""
    order = sorted((a for a in range(x.dim()) if x.shape[a] > 1), key=x.stride, reverse=True)
    return order, x.permute(
        [*(a for a in range(x.dim()) if a not in order), *order]
    ).is_contiguous()


ORDERS = [(*order, 3) for order in itertools.permutations(range(3))]


@pytest.mark.parametrize("shape", [(2, 4, 9, 16), (1, 4, 9, 16), (2, 1, 9, 16), (2, 4, 1, 16)])
@pytest.mark.parametrize("order", ORDERS)
def test_sdpa_returns_the_memory_layout_of_the_query(device, order, shape):
    q = permuted(shape, order).to(device)
    k, v = (torch.randn(*shape[:2], 7, 16, device=device) for _ in range(2))
    want = sdpa(q, k, v)
    compiled = torch.compile(our_sdpa, fullgraph=True)
    for function in (our_sdpa, compiled):
        out = function(q, k, v)
        assert torch.allclose(out, want, atol=1e-5)
        assert order_of(out) == order_of(q)
        assert order_of(out)[1]
        if device == "cpu":  # on CUDA it depends on the kernel
            assert order_of(out) == order_of(want)


@pytest.mark.parametrize("order", ORDERS)
def test_sdpa_with_another_head_dim_of_value_has_the_layout_of_the_query(device, order):
    q = permuted((2, 4, 9, 32), order).to(device)
    k, v = torch.randn(2, 2, 9, 32, device=device), torch.randn(2, 2, 9, 16, device=device)
    options = {"is_causal": True, "enable_gqa": True}
    want = our_sdpa(q.contiguous(), k, v, **options)
    for function in (our_sdpa, torch.compile(our_sdpa, fullgraph=True)):
        out = function(q, k, v, **options)
        assert torch.equal(out, want)
        assert order_of(out) == (list(order), True)


def test_a_query_with_gaps_gives_a_dense_result_in_its_order():
    wide = torch.randn(2, 9, 3, 4, 16)
    q, k, v = (wide[:, :, i].transpose(1, 2) for i in range(3))  # packed [b, s, 3, h, d]
    out = our_sdpa(q, k, v)
    assert order_of(out) == ([0, 2, 1, 3], True) == order_of(sdpa(q, k, v))
    assert torch.equal(out, our_sdpa(*(x.contiguous() for x in (q, k, v))))


def test_a_query_whose_last_axis_is_not_the_innermost_is_copied():
    q = permuted((2, 4, 9, 16), (0, 1, 3, 2))
    k = q.contiguous()
    assert torch.equal(our_sdpa(q, k, k), our_sdpa(k, k, k))


def test_sdpa_of_other_than_4_axes_is_contiguous():
    """As torch's is before 2.15, which keeps the order of 3 axes."""
    for axes, swap in ((3, (0, 1)), (5, (2, 3))):
        q = torch.randn((2, 3, 4, 9, 16)[5 - axes :]).transpose(*swap)
        k = q.contiguous()
        assert our_sdpa(q, k, k).is_contiguous()


def test_the_op_passes_opcheck_with_a_memory_layout(device):
    q = permuted((2, 4, 9, 32), (2, 0, 1, 3)).to(device)
    options = {"layout": "bhsd", "physical_layout": [2, 0, 1, 3]}
    torch.library.opcheck(torch.ops.cuattn.attention.default, (q, q, q), options)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3)])
def test_sdpa_keeps_the_layout_with_dynamic_shapes(order):
    compiled = torch.compile(our_sdpa, fullgraph=True, dynamic=True)
    for length in (8, 9, 17):
        q = permuted((2, 4, length, 16), order)
        out = compiled(q, q, q)
        assert torch.equal(out, our_sdpa(q, q, q))
        assert order_of(out) == (list(order), True)


def test_sdpa_is_compiled_with_dynamic_shapes():
    compiled = torch.compile(
        lambda q, k: our_sdpa(q, k, k, is_causal=True), fullgraph=True, dynamic=True
    )
    for length in (8, 9, 17):
        q, k = torch.randn(1, 2, length, 16), torch.randn(1, 2, 9, 16)
        assert torch.equal(compiled(q, k), our_sdpa(q, k, k, is_causal=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"is_causal": True, "attn_mask": torch.zeros(8, 8)},
            ValueError,
            "attn_mask must be None with is_causal=True",
        ),
        (
            {"key": torch.zeros(1, 2, 8, 16)},
            ValueError,
            "key must have the 4 heads of query, or 1, got 2",
        ),
        ({"key": torch.zeros(16)}, ValueError, "key must have at least 2 axes, got 1"),
    ],
)
def test_sdpa_refuses_clearly(options, error, message):
    arrays = dict(zip(("query", "key", "value"), [torch.zeros(1, 4, 8, 16)] * 3, strict=True))
    with pytest.raises(error, match=f"scaled_dot_product_attention: .*{message}"):
        our_sdpa(**{**arrays, **options})


def test_older_torch_without_the_exchange_api_gives_the_same_bits():
    code = """
import torch
if "__dlpack_c_exchange_api__" in vars(torch.Tensor):
    del torch.Tensor.__dlpack_c_exchange_api__
import cuattn
torch.manual_seed(1)
q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
want = cuattn.attention(q.numpy(), k.numpy(), v.numpy())
out, lse = cuattn.attention(q, k, v, return_lse=True)
assert type(out) is torch.Tensor and type(lse) is torch.Tensor
assert torch.equal(out, torch.from_numpy(want))
q.requires_grad_()
with torch.no_grad():
    assert torch.equal(cuattn.attention(q, k, v), out)
cuattn.attention(q, k, v).sum().backward()
assert q.grad.abs().sum() > 0
half = cuattn.attention(q.detach().bfloat16(), k.bfloat16(), v.bfloat16())
assert half.dtype == torch.bfloat16
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_bfloat16_tensors_give_the_bits_of_numpy():
    tensors = [x.bfloat16() for x in qkv()]
    out = cuattn.attention(*tensors)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = [x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in tensors]
    want = cuattn.attention(*arrays)
    np.testing.assert_array_equal(out.view(torch.int16).numpy(), want.view(np.int16))
