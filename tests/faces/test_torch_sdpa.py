# SPDX-License-Identifier: Apache-2.0
"""cuattn.torch.scaled_dot_product_attention against torch's own, forward and gradients.

Random float32 arrays against torch's function in float64, every gradient included. It runs the
formula ("math"), as its CPU kernel gives NaN for a head_dim of 1 with a scale that is not positive.
"""

from __future__ import annotations

import warnings

import pytest

import cuattn
import frameworks
import harness

torch = frameworks.require("torch")
import cuattn.torch  # noqa: E402
from cuattn.torch import eager, sdpa_arguments  # noqa: E402

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
def same_numbers():
    torch.manual_seed(0)
    torch.compiler.reset()


def leaf(shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def judge(arrays, function=our_sdpa, view=lambda x: x, tolerance=2e-5, **options):
    """Compare a call and its gradients with torch's in float64; `view` is laid over the leaves."""
    leaves = [x for x in (*arrays, *options.values()) if torch.is_tensor(x) and x.requires_grad]
    mask = options.get("attn_mask")
    as_double = options if mask is None else {**options, "attn_mask": wide(mask)}
    out = function(*map(view, arrays), **options)
    with formula():
        want = sdpa(*(wide(view(x)) for x in arrays), **as_double)
    assert out.shape == want.shape
    dout = torch.randn_like(want)
    found = torch.autograd.grad((out.double() * dout).sum(), leaves)
    wanted = torch.autograd.grad((want * dout).sum(), leaves)
    for name, a, b in zip(
        ("out", "dq", "dk", "dv", "dmask"), (out, *found), (want, *wanted), strict=False
    ):
        size = b.abs().max().clamp(min=1) if b.numel() else 1
        assert a.shape == b.shape, name
        assert torch.allclose(a.double() / size, b.double() / size, atol=tolerance, rtol=0), name
    return out


def formula():
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def wide(x):
    return x if x.dtype == torch.bool else x.double()


def qkv(leading=(2, 4), rows=9, keys=7, dim=16, dim_v=16, device="cpu", of_keys=None):
    of_keys = leading if of_keys is None else of_keys
    shapes = (*leading, rows, dim), (*of_keys, keys, dim), (*of_keys, keys, dim_v)
    return [leaf(shape, device) for shape in shapes]


LEADING = {
    "two axes": ((), ()),
    "three axes": ((4,), (4,)),
    "five axes": ((3, 2, 4), (3, 2, 4)),
    "six axes": ((2, 1, 3, 4), (2, 1, 3, 4)),
    "fewer of keys": ((2, 4), (4,)),
    "two of keys": ((2, 4), ()),
    "fewer of queries": ((4,), (2, 4)),
    "two of queries": ((), (2, 4)),
    "batch of one query": ((1, 4), (2, 4)),
    "batch of one key": ((2, 4), (1, 4)),
    "one head of keys": ((2, 4), (2, 1)),
    "one head of queries": ((2, 1), (2, 4)),
    "across": ((3, 1, 4), (2, 4)),
    "nothing in common": ((3, 1, 1), (1, 2, 4)),
    "no batch": ((0, 4), (0, 4)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LEADING)
def test_leading_axes(device, name, causal):
    leading, of_keys = LEADING[name]
    judge(qkv(leading, of_keys=of_keys, device=device), is_causal=causal)


def test_value_broadcasts_on_its_own(device):
    q, k = leaf((1, 4, 9, 16), device), leaf((2, 1, 7, 16), device)
    judge([q, k, leaf((1, 4, 7, 8), device)])
    judge([q, leaf((2, 4, 7, 16), device), leaf((7, 8), device)])


@pytest.mark.parametrize("of_keys", [(2, 2), (2, 1), (1, 2), (2,)])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(device, of_keys, causal):
    judge(qkv((2, 4), of_keys=of_keys, device=device), is_causal=causal, enable_gqa=True)


def test_grouped_heads_of_key_and_value_that_differ(device):
    q, k, v = leaf((2, 4, 9, 16), device), leaf((2, 2, 7, 16), device), leaf((2, 1, 7, 16), device)
    judge([q, k, v], enable_gqa=True)


MASKS = [(9, 7), (1, 7), (9, 1), (1, 1), (4, 9, 7), (4, 1, 7), (1, 9, 7)]
MASKS += [(2, 4, 9, 7), (2, 1, 9, 7), (1, 4, 1, 7), (2, 1, 1, 7), (1, 1, 9, 1)]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_of_every_broadcast(device, shape, kind):
    if kind == "bool":
        mask = torch.rand(shape, device=device) > 0.3
        mask[..., 0] = True
    else:
        mask = leaf(shape, device)
    judge(qkv(device=device), attn_mask=mask)
    judge(qkv(of_keys=(2, 2), device=device), attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("leading", "shape"),
    [
        ((3, 2, 4), (9, 7)),
        ((3, 2, 4), (4, 1, 7)),
        ((3, 2, 4), (2, 1, 9, 7)),
        ((3, 2, 4), (3, 1, 1, 9, 7)),
        ((3, 2, 4), (3, 2, 4, 9, 7)),
        ((4,), (4, 9, 7)),
        ((), (9, 7)),
        ((), (1, 7)),
    ],
)
def test_masks_of_other_leading_axes(device, leading, shape):
    judge(qkv(leading, device=device), attn_mask=leaf(shape, device))


def test_a_mask_of_more_axes_than_the_query():
    """Not held to torch's formula, which refuses it in 2.13."""
    q, k, v = qkv((4,))
    mask = leaf((1, 4, 9, 7))
    out = our_sdpa(q, k, v, attn_mask=mask)
    with formula():
        want = sdpa(*(wide(x) for x in (q, k, v)), attn_mask=wide(mask[0]))
    assert torch.allclose(out.double().reshape(want.shape), want, atol=2e-5, rtol=0)


def test_a_mask_of_no_queries_is_folded():
    q, k, v = torch.ones(2, 1, 1, 0, 8), torch.ones(2, 1, 1, 40, 8), torch.ones(2, 3, 1, 40, 24)
    out = our_sdpa(q, k, v, attn_mask=torch.ones(3, 1, 0, 40))
    assert out.shape == (2, 3, 1, 0, 24)


def test_a_mask_that_hides_a_row_gives_zero():
    q, k, v = (x.detach() for x in qkv())
    mask = torch.ones(9, 7, dtype=torch.bool)
    mask[3] = False
    assert (our_sdpa(q, k, v, attn_mask=mask)[:, :, 3] == 0).all()


@pytest.mark.parametrize("scale", [None, 0.5, -0.25, 0.0])
@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (3, 5), (20, 12), (63, 64), (64, 33), (250, 4)])
def test_head_dims_that_are_no_multiple_of_8(device, dim, dim_v, scale):
    judge(qkv(dim=dim, dim_v=dim_v, device=device), is_causal=True, scale=scale)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_a_padded_result_is_dense_in_the_order_of_the_query(order):
    back = [order.index(axis) for axis in range(4)]
    q = torch.randn([(2, 4, 9, 20)[axis] for axis in order]).permute(back)
    # The code generator orders memory by its own rules, but takes seconds: one case runs it.
    backend = "inductor" if order == (2, 0, 1, 3) else "aot_eager"
    for function in (our_sdpa, torch.compile(our_sdpa, fullgraph=True, backend=backend)):
        out = function(q, q, q[..., :12])
        assert out.permute(order).is_contiguous()
        assert torch.allclose(out, sdpa(q, q, q[..., :12]), atol=1e-5)


VIEWS = {
    "every second column": lambda x: x[..., ::2],
    "columns outermost": lambda x: x.transpose(-1, -3),
    "columns second": lambda x: x.transpose(-1, -2),
    "an odd offset": lambda x: x[..., 1:],
    "reversed rows": lambda x: x.flip(-2)[..., :8],
    "one column of many": lambda x: x[..., 3:4],
    "the same for all": lambda x: x[..., :1, :].expand(*x.shape[:-2], 5, x.shape[-1]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_that_no_kernel_reads(device, name):
    view = VIEWS[name]
    judge([leaf((2, 4, 16, 16), device) for _ in range(3)], view=view)
    backend = "inductor" if name == "columns outermost" else "aot_eager"
    compiled = torch.compile(our_sdpa, fullgraph=True, backend=backend)
    judge([leaf((2, 4, 16, 16), device) for _ in range(3)], compiled, view=view)


def test_a_compiled_call_takes_memory_of_any_offset_later(device):
    """No guard of torch.compile asks where memory begins."""
    compiled = torch.compile(our_sdpa, fullgraph=True)
    for begin in (0, 1, 6):
        view = lambda x, begin=begin: x[begin : begin + 1152].view(2, 4, 9, 16)  # noqa: E731
        judge([leaf(1160, device) for _ in range(3)], compiled, view=view)


class SaidToBeOnCuda(torch.Tensor):
    is_cuda = True

    def storage_offset(self):
        assert not torch.compiler.is_compiling(), "dynamo does not trace it before 2.13"
        return super().storage_offset()


def test_rows_off_16_bytes_are_copied_on_cuda_alone(monkeypatch):
    """On tensors that only say where they are, so that it is known on a machine without a GPU."""
    for kind, copied in ((SaidToBeOnCuda, True), (torch.Tensor, False)):
        x = torch.empty(2, 4, 9, 20, dtype=torch.float16).as_subclass(kind)
        off = (x[..., :16], x.flatten()[4:1028].view(2, 4, 8, 16))
        assert [y.is_cuda for y in off] == [copied, copied]
        assert [sdpa_arguments.readable(y) is not y for y in off] == [copied, copied]
        packed = x[..., :16].clone().transpose(1, 2)
        assert sdpa_arguments.readable(packed) is packed
        assert [eager.on_16_bytes(y) is not y for y in off] == [False, copied]
        assert eager.on_16_bytes(off[1]).data_ptr() % 16 == (0 if copied else 8)
        with monkeypatch.context() as patched:  # the op copies
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            assert sdpa_arguments.readable(off[1]) is off[1]


def test_negated_views_have_their_values(device):
    made = [torch.randn(2, 4, 9, 16, dtype=torch.complex64, device=device) for _ in range(3)]
    parts = [x.conj().imag for x in made]
    assert all(x.is_neg() for x in parts)
    plain = [-x.imag for x in made]
    mask = torch.randn(9, 9, dtype=torch.complex64, device=device)
    assert torch.equal(our_sdpa(*parts), our_sdpa(*plain))
    got = our_sdpa(*parts, attn_mask=mask.conj().imag)
    assert torch.equal(got, our_sdpa(*plain, attn_mask=-mask.imag))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_converts_all_that_torch_converts(device, dtype):
    arrays = [x.detach() for x in qkv(dim=64, dim_v=64, device=device)]
    mask = torch.randn(9, 7, device=device)
    with torch.autocast(device, dtype=dtype):
        out = our_sdpa(*arrays, attn_mask=mask)
        want = sdpa(*arrays, attn_mask=mask)
        assert out.dtype == want.dtype == dtype
        mixed = our_sdpa(arrays[0].to(dtype), *(x.to(dtype) for x in arrays[1:]), attn_mask=mask)
    cast = our_sdpa(*(x.to(dtype) for x in arrays), attn_mask=mask.to(dtype))
    assert torch.equal(out, cast)
    assert torch.equal(out, mixed)


def test_autocast_leaves_float64_alone(device, quiet):
    arrays = [x.detach().double() for x in qkv(device=device)]
    with torch.autocast(device, dtype=torch.bfloat16):
        assert our_sdpa(*arrays).dtype == sdpa(*arrays).dtype == torch.float64


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


FALLBACKS = {
    "float64": lambda: [x.detach().double().requires_grad_() for x in qkv()],
    "a head_dim outside 1 to 256 with a gradient": lambda: qkv(dim=264, dim_v=264),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_torch_runs_what_cuattn_does_not_and_says_so_once(reason, monkeypatch):
    monkeypatch.setattr(sdpa_arguments, "warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            judge(FALLBACKS[reason](), is_causal=True, scale=0.3)
        judge(FALLBACKS[reason](), attn_mask=torch.randn(9, 7).to(FALLBACKS[reason]()[0].dtype))
    (warning,) = seen
    assert f"{reason}; torch's own function runs" in str(warning.message)
    assert warning.filename == __file__


def test_a_compiled_fallback_has_no_break(quiet):
    arrays = [x.double().detach() for x in qkv()]
    got = torch.compile(our_sdpa, fullgraph=True)(*arrays)
    assert torch.allclose(got, sdpa(*arrays))


def test_a_wide_value_alone_falls_back(quiet):
    judge(qkv(dim=64, dim_v=300))


def test_wide_heads_without_a_gradient_do_not_fall_back():
    for dim, dim_v in ((300, 64), (64, 508), (512, 512)):
        arrays = [x.detach() for x in qkv(dim=dim, dim_v=dim_v)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = our_sdpa(*arrays)
        assert torch.allclose(out, sdpa(*arrays), atol=2e-5)
    with pytest.warns(UserWarning, match="a head_dim outside 1 to 512;"):
        our_sdpa(*(x.detach() for x in qkv(dim=520, dim_v=8)))


@pytest.mark.parametrize("function", [our_sdpa, cuattn.torch.attention])
def test_meta_tensors_have_the_shapes_of_real_ones(function):
    q = torch.empty(2, 4, 9, 16, device="meta")
    k = torch.empty(2, 4, 7, 16, device="meta")
    if function is our_sdpa:
        out = function(q, k, k[..., :12], is_causal=True)
        assert (out.device.type, out.shape) == ("meta", (2, 4, 9, 12))
        assert function(q.half(), k.half(), k.half()).dtype == torch.float16
    else:
        out = function(q, q, q)
        assert (out.device.type, out.shape) == ("meta", q.shape)


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = torch.randn(2, 9, 4, 20).transpose(1, 2)
    want = our_sdpa(q, q, q)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        got = our_sdpa(fake, fake, fake)
    assert (got.shape, got.stride()) == (want.shape, want.stride())


def refusals():
    from torch.nn.attention.bias import causal_upper_left

    x = torch.zeros(2, 4, 8, 16)
    ragged = [torch.zeros(4, 3, 16), torch.zeros(4, 5, 16)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor(ragged)
        csr = torch.eye(8).to_sparse_csr()
    jagged = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    upper_left = causal_upper_left(8, 8)
    return {
        "nested": (NotImplementedError, {"query": nested}, "query must be a dense .* a nested"),
        "jagged": (NotImplementedError, {"value": jagged}, "value must be a dense .* a nested"),
        "sparse": (NotImplementedError, {"key": x.to_sparse()}, "key must be .*torch.sparse_coo"),
        "csr": (
            NotImplementedError,
            {"attn_mask": csr},
            "attn_mask must be .*torch.sparse_csr",
        ),
        "one axis": (ValueError, {"key": x[0, 0, 0]}, "key must have at least 2 axes, got 1"),
        "dtype": (ValueError, {"value": x.half()}, "value must be torch.float32 like query, got"),
        "head_dim": (ValueError, {"key": x[..., :8]}, "key must have head_dim 16 like query"),
        "rows": (ValueError, {"value": x[:, :, :5]}, "value must have the 8 rows of key, got 5"),
        "causal rows": (
            ValueError,
            {"query": x[:, :, :4], "value": x[:, :, :5], "is_causal": True},
            "value must have the 8 rows of key, got 5",
        ),
        "sparse query": (NotImplementedError, {"query": x.to_sparse()}, "query must be a dense"),
        "batch": (ValueError, {"key": x.repeat(2, 1, 1, 1)}, "leading axes .* must broadcast"),
        "heads": (
            ValueError,
            {"key": x[:, :2]},
            "4 heads of query, .*enable_gqa=True",
        ),
        "groups": (
            ValueError,
            {"key": x[:, :3], "enable_gqa": True},
            "the 4 heads of query must be a multiple of those of key, got 3",
        ),
        "mask": (ValueError, {"attn_mask": torch.zeros(7, 8)}, r"broadcast to \[2, 4, 8, 8\], got"),
        "mask axes": (ValueError, {"attn_mask": torch.zeros(3, 2, 4, 8, 8)}, "must broadcast to"),
        "mask dtype": (ValueError, {"attn_mask": torch.zeros(8, 8).half()}, "attn_mask must be bo"),
        "bias": (NotImplementedError, {"attn_mask": upper_left}, "pass is_causal=True"),
        "both": (
            ValueError,
            {"is_causal": True, "attn_mask": torch.zeros(8, 8)},
            "attn_mask must be None with is_causal=True",
        ),
        "dropout": (ValueError, {"dropout_p": 1.5}, "dropout_p must lie in"),
        "numpy": (TypeError, {"query": x.numpy()}, "query must be a torch tensor, got ndarray"),
        "numpy key": (TypeError, {"key": x.numpy()}, "key must be a torch tensor, got ndarray"),
        "numpy mask": (TypeError, {"attn_mask": x.numpy()}, "attn_mask must be a torch tensor"),
    }


@pytest.mark.parametrize("name", refusals())
def test_refusals_name_the_argument(name):
    error, given, message = refusals()[name]
    arrays = {n: torch.zeros(2, 4, 8, 16) for n in ("query", "key", "value")}
    with pytest.raises(error, match=message) as raised:
        our_sdpa(**{**arrays, **given})
    assert "\n" not in str(raised.value)


def test_what_is_refused_here_torch_refuses_too():
    """By its formula: its CPU kernel reads past a value that has fewer rows than the key."""
    for name in ("one axis", "dtype", "head_dim", "rows", "batch", "heads", "groups", "mask"):
        arrays = {n: torch.zeros(2, 4, 8, 16) for n in ("query", "key", "value")}
        with formula(), pytest.raises((RuntimeError, ValueError, IndexError)):
            sdpa(**{**arrays, **refusals()[name][1]})


def test_dropout_keeps_the_mean_and_repeats_with_the_seed():
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 64, 16)
    v = torch.ones(1, 2, 64, 12)
    torch.manual_seed(3)
    first = our_sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, our_sdpa(q, k, v, dropout_p=0.5))
    mean = torch.stack([our_sdpa(q, k, v, dropout_p=0.5) for _ in range(200)]).mean()
    assert abs(mean.item() - 1) < 0.02
    assert not torch.allclose(first, torch.ones_like(first), atol=0.05)


def test_a_causal_value_of_two_axes_is_broadcast():
    q = torch.randn(2, 3, 7, 16)
    value = torch.randn(7, 16)
    found = cuattn.torch.scaled_dot_product_attention(q, q, value, is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, value, is_causal=True)
    torch.testing.assert_close(found, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_torchs_jit_holds_the_call():
    q, other = torch.randn(2, 1, 8, 2, 16)
    traced = torch.jit.trace(lambda x: cuattn.torch.attention(x, x, x), q, check_trace=False)
    torch.testing.assert_close(traced(other), cuattn.attention(other, other, other))
    with pytest.raises(NotImplementedError, match=r"flex_attention: torch\.jit\.trace cannot"):
        torch.jit.trace(lambda x: cuattn.flex_attention(x, x, x), q, check_trace=False)
