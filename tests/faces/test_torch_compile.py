# SPDX-License-Identifier: Apache-2.0
"""Graphs of plain cuattn.attention and attention_varlen, which are builtins: by torch.compile,
torch.jit.trace and make_fx.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import cuattn
import frameworks

torch = frameworks.require("torch")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()


def qkv(shape=(2, 9, 4, 32)):
    return [torch.randn(shape) for _ in range(3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "return_lse": True},
        {"layout": "bhsd", "window": (3, 1), "out": None},
        {"dropout_p": 0.5, "dropout_seed": 3},
    ],
)
def test_a_plain_call_is_traced_to_the_same_bits(options):
    arrays = qkv()
    compiled = torch.compile(lambda q, k, v: cuattn.attention(q, k, v, **options), fullgraph=True)
    for a, b in zip(compiled(*arrays), cuattn.attention(*arrays, **options), strict=True):
        assert torch.equal(a, b)


def test_a_plain_step_with_gradients_is_traced():
    arrays = [x.requires_grad_() for x in qkv()]

    def step(q, k, v):
        return cuattn.attention(q=q, k=k, v=v, causal=True).sin().sum()

    want = torch.autograd.grad(step(*arrays), arrays)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*arrays), arrays)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_plain_ragged_call_is_traced():
    q, k, v = qkv((11, 2, 16))
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    step = lambda q: cuattn.attention_varlen(q, k, v, cu, cu, 7, 7, causal=True) + 1  # noqa: E731
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q), step(q))


def test_a_call_that_no_op_holds_runs_as_it_stands():
    arrays, out = qkv(), torch.empty(2, 9, 4, 32)
    step = lambda q, k, v, out: cuattn.attention(q, k, v, out=out)  # noqa: E731
    assert torch.compile(step)(*arrays, out) is out
    assert torch.equal(out, cuattn.attention(*arrays))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, fullgraph=True)(*arrays, out)


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_without_a_seed_draws_from_torchs_generator(op, grad):
    """In eager code as in graphs, whether or not a gradient is recorded."""
    arrays = qkv() if op == "attention" else [x[0] for x in qkv()]
    arrays = [x.requires_grad_(grad) for x in arrays]
    cu = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in arrays[:2]]
    sizes = () if op == "attention" else (*cu, 16, 16)

    def call(*arrays, face=cuattn):
        return getattr(face, op)(*arrays, *sizes, dropout_p=0.5)

    found = []
    for function in (call, lambda *x: call(*x, face=cuattn.torch), torch.compile(call)):
        torch.manual_seed(5)
        found += [function(*arrays), function(*arrays)]
    assert all(torch.equal(x, found[i % 2]) for i, x in enumerate(found[:4]))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[4], found[5])  # a graph draws by torch's own compiled generator
    assert not torch.equal(found[4], getattr(cuattn, op)(*arrays, *sizes))
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(call, *arrays, use_reentrant=True)
    assert torch.equal(out, found[0])  # which runs it without a gradient first
    with pytest.raises(ValueError, match="dropout_seed or dropout_state must be given"):
        getattr(cuattn, op)(*arrays, *sizes, dropout_p=0.5, dropout_offset=1)  # of which seed?
    assert cuattn.explain(op, *arrays, *sizes, dropout_p=0.5).kernel == "cpu"
    with pytest.raises(ValueError, match="dropout_seed or dropout_state must be given"):
        getattr(cuattn, op)(*(x.detach().numpy() for x in arrays), *sizes, dropout_p=0.5)


def test_numpy_arrays_in_a_compiled_function():
    q, k, v = (x.numpy() for x in qkv())
    want = cuattn.attention(q, k, v)
    got = torch.compile(lambda q, k, v: cuattn.attention(q, k, v))(q, k, v)
    np.testing.assert_array_equal(got, want)


ORDERS = {
    "cuattn first": "import cuattn, torch",
    "torch first": "import torch, cuattn",
    "compiler first": "import torch, torch._dynamo, cuattn",
    "with cuattn.torch": "import cuattn.torch, torch",
    "what graphs call": "import cuattn.torch.flex_ops, torch",
    "a part of the compiler": "import cuattn, torch, torch._dynamo.config",
}


@pytest.mark.parametrize("name", ORDERS)
def test_in_whatever_order_the_libraries_are_imported(name):
    code = f"""
import sys
{ORDERS[name]}
finders = list(sys.meta_path)
walk = iter(sys.meta_path)  # as another thread that imports
next(walk)
if "compiler" not in "{name}":
    assert "torch._dynamo" not in sys.modules
q = torch.randn(1, 5, 2, 16)
step = torch.compile(lambda q: cuattn.attention(q, q, q).sin(), backend="eager", fullgraph=True)
assert torch.equal(step(q), cuattn.attention(q, q, q).sin())
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("cuattn")]
assert all(finder.has_found for finder in ours)
assert {{*map(id, finders[1:])}} <= {{*map(id, walk)}}, "a finder was missed"
"""
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=120
    )


def test_a_torch_that_cannot_be_told_compiles_with_a_warning():
    code = """
import cuattn, torch, warnings
from cuattn import _tracing
del torch.compiler.substitute_in_graph
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import torch._dynamo
assert any("call cuattn.torch.attention in compiled code" in str(w.message) for w in seen)
q = torch.randn(1, 5, 2, 16)
torch.compile(lambda q: cuattn.attention(q, q, q), backend="eager")(q)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def recorded(how, function, *arrays):
    if how == "jit":
        return torch.jit.trace(function, arrays, check_trace=False)
    early = how == "make_fx before dispatch"
    return torch.fx.experimental.proxy_tensor.make_fx(function, pre_dispatch=early)(*arrays)


@pytest.mark.parametrize("how", ["jit", "make_fx", "make_fx before dispatch"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestRecordings:
    """They held the memory of a result, and no call."""

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize(
        "options", [{}, {"causal": True, "return_lse": True}, {"q_scale": None}]
    )
    def test_a_plain_call_is_recorded(self, how, grad, options):
        def step(q, k, v):
            out = cuattn.attention(q, k, v, **options)
            return out[0] + out[1].sum() if isinstance(out, tuple) else out + 1

        arrays, others = ([x.requires_grad_(grad) for x in qkv()] for _ in range(2))
        assert torch.equal(recorded(how, step, *arrays)(*others), step(*others))

    def test_a_call_of_the_op_is_recorded(self, how):
        q, other = torch.randn(2, 1, 5, 2, 16)
        step = lambda q: cuattn.torch.attention(q, q, q)  # noqa: E731
        assert torch.equal(recorded(how, step, q)(other), step(other))

    def test_wide_heads_and_codes_are_recorded(self, how):
        call = lambda q: cuattn.attention(q, q, q)  # noqa: E731
        for shape, dtype in (((1, 5, 2, 320), None), ((1, 16, 2, 16), torch.float8_e4m3fn)):
            q, other = (torch.randn(shape).to(dtype or torch.float32) for _ in range(2))
            assert torch.equal(recorded(how, call, q)(other), call(other))

    def test_a_ragged_call_is_recorded(self, how):
        cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        step = lambda q: cuattn.attention_varlen(q, q, q, cu, cu, 5, 5, causal=True)  # noqa: E731
        q, other = torch.randn(2, 9, 2, 16)
        assert torch.equal(recorded(how, step, q)(other), step(other))

    @pytest.mark.parametrize(
        ("message", "call"),
        {
            "attention: out must be None while": lambda x: cuattn.attention(x, x, x, out=x.clone()),
            "rms_norm: x is of torch.jit": lambda x: cuattn.rms_norm(x, torch.ones(16)),
            "flex_attention: ": lambda x: cuattn.flex_attention(x, x, x),
            "attention_backward: q is": lambda x: cuattn.attention_backward(
                x, x, x, x, x, x[..., 0]
            ),
            "reshape_and_cache: k is": lambda x: cuattn.reshape_and_cache(
                x[0], x[0], torch.zeros(1, 16, 2, 16), torch.zeros(1, 16, 2, 16), torch.arange(9)
            ),
        }.items(),
    )
    def test_what_no_op_holds_is_refused(self, how, message, call):
        x = torch.randn(1, 9, 2, 16)
        with pytest.raises(NotImplementedError, match=f"^{message}.*"):
            recorded(how, call, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("face", [cuattn.attention, cuattn.torch.scaled_dot_product_attention])
def test_a_trace_of_a_module_with_parameters_passes_torchs_check(face, causal):
    """The check traces again without grad mode, where no lse was made and no size asked for."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x):
            heads = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
            if face is cuattn.attention:
                return face(*heads, causal=causal)
            return face(*(h.transpose(1, 2) for h in heads), is_causal=causal)

    layer, x, other = Layer(), torch.randn(2, 9, 16), torch.randn(3, 5, 16)
    traced = torch.jit.trace(layer, x)
    with torch.no_grad():
        served = torch.jit.trace(layer, x)  # is trained all the same
    want = layer(other)
    (expected,) = torch.autograd.grad(want.square().sum(), layer.qkv.weight)
    for module in (traced, served):
        found = module(other)
        assert torch.equal(found, want)
        (gradient,) = torch.autograd.grad(found.square().sum(), layer.qkv.weight)
        assert torch.equal(gradient, expected)


def test_a_dispatch_mode_that_records_nothing_changes_nothing():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            return function(*arguments, **(options or {}))

    arrays, out = qkv(), torch.empty(2, 9, 4, 32)
    with Watch():
        assert cuattn.attention(*arrays, out=out) is out
    assert torch.equal(out, cuattn.attention(*arrays))
