# SPDX-License-Identifier: Apache-2.0
"""Training with torch: both ways to a gradient, eager and by the registered op, and what torch does
around them: hooks, transforms, dropout's generator, gradients of gradients.
"""

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

OPS = torch.ops.cuattn


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()


def compiled(step, *arguments):
    return torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)


def by_op(step, *arguments):
    """A dispatch mode looks on, so that the step goes by the registered ops."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return step(*arguments)


WAYS = {"eager": lambda step, *arguments: step(*arguments), "op": by_op, "compiled": compiled}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


SMALL = ("bias", "sinks", "alibi_slopes")
OPTIONS = {
    "plain": {},
    "every_array": {"small": SMALL, "seqused": True, "softcap": 3.0},
    "window": {"window": (5, 0), "scale": 0.3},
    "lse": {"return_lse": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5, "dropout_offset": 7},
    "dropout_state": {"dropout_p": 0.3, "dropout_state": torch.tensor([5, 7])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_op_and_the_eager_way_give_the_same_bits(name):
    options = dict(OPTIONS[name])
    leaves = arrays(options.pop("small", ()))
    if options.pop("seqused", False):
        options["seqused_q"] = torch.tensor([13, 9], dtype=torch.int32)
        options["seqused_k"] = torch.tensor([4, 21], dtype=torch.int32)

    def step():
        found = cuattn.torch.attention(**leaves, **options)
        found = found if isinstance(found, tuple) else (found,)
        loss = sum(x.nan_to_num(neginf=0.0).square().sum() for x in found)
        return (*found, *torch.autograd.grad(loss, tuple(leaves.values())))

    for a, b in zip(step(), by_op(step), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", *SMALL])
def test_whichever_array_alone_requires_grad_the_builtin_gives_its_gradient(name):
    given = {n: x.detach() for n, x in arrays(SMALL).items()}
    given[name].requires_grad_()
    rows = [given.pop(n) for n in "qkv"]
    out = [f(*rows, **given) for f in (cuattn.attention, cuattn.torch.attention)]
    leaf = next(x for x in (*rows, *given.values()) if x.requires_grad)
    (found,), (wanted,) = (torch.autograd.grad(x.square().sum(), leaf) for x in out)
    assert torch.equal(out[0], out[1])
    assert torch.equal(found, wanted)
    assert found.abs().sum() > 0


def test_ops_are_called_only_where_torch_looks_on():
    leaves = arrays()
    eager = cuattn.torch.attention(**leaves)
    looked_at = by_op(lambda: cuattn.torch.attention(**leaves))
    assert type(eager.grad_fn).__name__ == "CuattnAttentionBackward"
    assert "cuattn_attention" in type(looked_at.grad_fn).__name__
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        cuattn.torch.attention(**leaves).sum().backward()
    assert OPS.attention.default in seen
    assert OPS.attention_backward.default in seen
    seen.clear()
    with Mode():
        eager.sum().backward()  # its forward pass was not seen, its gradients are
    assert OPS.attention_backward.default in seen


def test_rows_past_those_in_use_are_never_read(way):
    """NaN there, in all that goes in, reaches no gradient; those of the rows themselves are 0."""
    leaves = arrays()
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([13, 6], [15, 21]))
    dout = torch.randn(2, 13, 4, 16)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        rows, keys = int(used_q[b]), int(used_k[b])
        cut = [leaves[n][b : b + 1, : rows if n == "q" else keys] for n in "qkv"]
        want, _ = formula(*cut, causal=True)
        total = total + (want[0] * dout[b, :rows]).sum()
    wanted = gradients_of(total, leaves)
    poisoned = {n: x.detach().clone() for n, x in leaves.items()}
    poisoned["q"][1, 6:] = torch.nan
    for n in "kv":
        poisoned[n][0, 15:] = torch.nan
    dout[1, 6:] = torch.nan
    poisoned = {n: x.requires_grad_() for n, x in poisoned.items()}

    def step(q, k, v):
        return cuattn.torch.attention(q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k)

    out = way(step, *poisoned.values())
    found = torch.autograd.grad(out, tuple(poisoned.values()), dout)
    assert_near(dict(zip("qkv", found, strict=True)), wanted)
    assert (found[0][1, 6:] == 0).all()
    for x in found[1:]:
        assert (x[0, 15:] == 0).all()


def test_ragged_dropout_has_the_gradients_of_the_formula(way):
    qkv, lengths = ragged()
    options = {"dropout_p": 0.25, "dropout_seed": 3, "dropout_offset": 5}
    kept = torch.from_numpy(np.asarray(reference.dropout(0.25, 3, 5, (3, 4), (7, 9)), np.float64))

    def step(*qkv):
        return cuattn.torch.attention_varlen(*qkv, *lengths, causal=True, **options)

    out = way(step, *qkv)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum(), qkv)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in lengths[:2])
        factor = kept[b : b + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        cut = (qkv[0][rows][None], qkv[1][keys][None], qkv[2][keys][None])
        want, _ = formula(*cut, causal=True, kept=factor)
        total = total + (want[0] * dout[rows]).sum()
    wanted = torch.autograd.grad(total, qkv)
    assert_near(dict(zip("qkv", found, strict=True)), dict(zip("qkv", wanted, strict=True)))


def test_compiled_dropout_repeats_with_its_seed():
    leaves = arrays(heads=(4, 4))

    def drawn(q, k, v):
        return cuattn.torch.attention(q, k, v, causal=True, dropout_p=0.25)

    def given(q, k, v):
        return cuattn.torch.attention(q, k, v, causal=True, dropout_p=0.25, dropout_seed=9)

    def run(function, seed):
        torch.manual_seed(seed)
        out = function(*leaves.values())
        return (out, *torch.autograd.grad(out.sum(), tuple(leaves.values())))

    function = torch.compile(drawn, fullgraph=True)
    first, again, other = (run(function, seed) for seed in (7, 7, 8))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    function = torch.compile(given, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(function, 1), run(given, 2), strict=True):
        assert torch.equal(a, b)


def all_tensors(dims, has_start=True):
    """Every optional tensor of an op, in the order of its schema, for 2 sequences or 3."""
    batch, heads, rows, keys = dims
    slopes, sinks = torch.rand(heads) / 4, torch.randn(heads)
    bias = torch.randn(heads, rows, keys)
    small = [x.requires_grad_() for x in (slopes, sinks, bias)]
    used = [torch.tensor([n] * (batch - 1) + [n - 2], dtype=torch.int32) for n in (rows, keys)]
    start = [torch.arange(batch, dtype=torch.int32)] if has_start else []  # of dense calls alone
    return (*small, *used, *start, torch.tensor([3, 5]))


def test_opcheck_with_every_optional_tensor():
    options = {"dropout_p": 0.25, "softcap": 3.0, "causal": True, "return_lse": True}
    qkv = tuple(arrays(rows=5, keys=7).values())
    tensors = all_tensors((2, 4, 5, 7))
    names = [x.name for x in OPS.attention.default._schema.arguments[3:10]]
    assert names[:5] == ["alibi_slopes", "sinks", "bias", "seqused_q", "seqused_k"]
    assert names[5:] == ["kv_start", "dropout_state"]
    torch.library.opcheck(OPS.attention.default, (*qkv, *tensors), options)
    packed, lengths = ragged(((7, 9), (7, 9), (7, 9)), others=0)
    arguments = (*packed, *lengths, *all_tensors((3, 4, 7, 9), has_start=False))
    torch.library.opcheck(OPS.attention_varlen.default, arguments, options)


def test_opcheck_of_the_backward_op_with_every_optional_tensor():
    options = {"dropout_p": 0.25, "softcap": 3.0, "causal": True}
    qkv = [x.detach() for x in arrays(rows=5, keys=7).values()]
    tensors = [x.detach() for x in all_tensors((2, 4, 5, 7))]
    out, lse = OPS.attention(*qkv, *tensors, return_lse=True, **options)
    dlse = torch.randn_like(lse)
    need = ["dq", "dk", "dv", "dbias", "dsinks", "dslopes"]
    for deterministic in (None, True):
        torch.library.opcheck(
            OPS.attention_backward.default,
            (torch.randn_like(out), *qkv, out, lse, *tensors, dlse),
            {**options, "need": need, "deterministic": deterministic},
        )


@pytest.mark.parametrize("use_deterministic", [False, True])
def test_deterministic_gradients_are_those_of_the_plain_call(use_deterministic):
    leaves = arrays(dtype=torch.bfloat16)
    out, lse = cuattn.torch.attention(**leaves, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    torch.use_deterministic_algorithms(use_deterministic)
    try:
        found = torch.autograd.grad(out, tuple(leaves.values()), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    plain = [x.detach() for x in (dout, *leaves.values(), out, lse)]
    for deterministic in (None, False, True):
        wanted = cuattn.attention_backward(*plain, causal=True, deterministic=deterministic)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def test_gradients_of_16_bits_can_be_added_up_in_float32():
    leaves = {n: x.detach() for n, x in arrays(dtype=torch.bfloat16).items()}
    out, lse = cuattn.attention(**leaves, return_lse=True)
    dout = torch.randn_like(out)
    given = {f"d{n}": torch.full(leaves[n].shape, torch.nan) for n in "kv"}
    wide = cuattn.attention_backward(dout, *leaves.values(), out, lse, **given)
    narrow = cuattn.attention_backward(dout, *leaves.values(), out, lse)
    assert wide.dk is given["dk"]
    assert wide.dv is given["dv"]
    assert torch.equal(wide.dq, narrow.dq)
    for n in "kv":
        assert torch.equal(given[f"d{n}"].bfloat16(), getattr(narrow, f"d{n}"))
        assert not torch.equal(given[f"d{n}"], getattr(narrow, f"d{n}").float())


def gradient_of_gradient(out, leaves):
    dq = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)[0]
    torch.autograd.grad(dq.square().sum(), leaves[1])


def test_no_gradient_of_a_gradient(way):
    qkv, lengths = ragged()
    for function, leaves, name in (
        (lambda *x: cuattn.torch.attention(*x), tuple(arrays().values()), "attention"),
        (lambda *x: cuattn.torch.attention_varlen(*x, *lengths), qkv, "attention_varlen"),
    ):
        out = way(function, *leaves)
        # torch.compile refuses in words of its own
        words = "does not currently support" if way is compiled else f"{name}_backward: a gradient"
        with pytest.raises((NotImplementedError, RuntimeError), match=words):
            gradient_of_gradient(out, leaves)


def test_two_backward_passes_and_no_third(way):
    leaves = arrays(("bias",))
    out = way(lambda *x: cuattn.torch.attention(*x[:3], bias=x[3]), *leaves.values())
    dout = torch.randn_like(out)
    out.backward(dout, retain_graph=True)
    once = {n: x.grad.clone() for n, x in leaves.items()}
    out.backward(dout)
    for n, x in leaves.items():
        assert torch.equal(x.grad, 2 * once[n])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(dout)


def test_what_backward_needs_may_not_change_under_it():
    for name in ("q", "out", "dropout_state"):
        leaves = arrays()
        state = torch.tensor([1, 2])
        product = leaves["q"] * 1
        out = cuattn.torch.attention(
            product, leaves["k"], leaves["v"], dropout_p=0.1, dropout_state=state
        )
        with torch.no_grad():
            {"q": product, "out": out, "dropout_state": state}[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_hooks_of_saved_tensors_see_what_is_kept():
    leaves = arrays(("sinks",))
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.detach().numpy().copy()

    wanted = gradients_of(cuattn.torch.attention(**leaves).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = cuattn.torch.attention(**leaves)
    assert sorted(packed) == sorted(
        [*(tuple(x.shape) for x in leaves.values()), (2, 13, 4, 16), (2, 4, 13)]
    )
    for n, x in gradients_of(out.sum(), leaves).items():
        assert torch.equal(x, wanted[n])


def test_a_batch_of_gradients_goes_by_the_op():
    leaves = arrays()
    out, lse = cuattn.torch.attention(**leaves, return_lse=True)
    dout, dlse = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    qkv = tuple(leaves.values())
    found = torch.autograd.grad(
        (out, lse), qkv, (dout, dlse), is_grads_batched=True, retain_graph=True
    )
    for i in range(3):
        one = torch.autograd.grad((out, lse), qkv, (dout[i], dlse[i]), retain_graph=True)
        for a, b in zip(found, one, strict=True):
            assert torch.equal(a[i], b)


def test_tensors_without_memory_have_gradients_of_their_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in arrays().values()]
        found = torch.autograd.grad(cuattn.torch.attention(*fake, causal=True).sum(), fake)
    assert [x.shape for x in found] == [x.shape for x in fake]


def test_selective_checkpointing_knows_the_op():
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    leaves = arrays()
    wanted = gradients_of(cuattn.torch.attention(**leaves).square().sum(), leaves)
    calls = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            "cuattn.torch.ops.run_attention",
            lambda *a, **options: calls.append(1) or cuattn.attention(*a, **options),
        )
        out = checkpoint(
            lambda *x: cuattn.torch.attention(*x).square(),
            *leaves.values(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts([OPS.attention.default]),
        )
        found = gradients_of(out.sum(), leaves)
    for n in leaves:
        assert torch.equal(found[n], wanted[n])
    assert len(calls) == 1, "its results were kept, so that the op ran once"
