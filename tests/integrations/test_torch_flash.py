# SPDX-License-Identifier: Apache-2.0
"""cuattn under torch's flash ops: on the CPU, for which torch has none, and on CUDA where it is.

The kernels are put under the CPU's dispatch key, so that torch's own callers (the aten ops with
their autograd formulas, `varlen_attn`, FakeTensors) reach them as they do on CUDA.
"""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
import warnings

import pytest

import cuattn
import frameworks

torch = frameworks.require("torch")
from cuattn.integrations import torch as door  # noqa: E402
from cuattn.integrations import torch_kernels  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten

try:
    door.check_version()
except ImportError as too_old:
    pytest.skip(str(too_old), allow_module_level=True)


@pytest.fixture
def on_cpu():
    torch.manual_seed(0)
    handle = door.activate("CPU")
    yield
    handle.remove()


def near(a, b, tolerance=2e-5):
    assert a.shape == b.shape
    assert torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def rows(heads_first):
    return heads_first.transpose(1, 2)


def bottom_right(rows, keys, left=-1, right=-1):
    """True where a query sees a key, counted from the last of both."""
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"window_size_left": 3, "window_size_right": 1},
    "left window": {"window_size_left": 2, "window_size_right": -1},
    "causal window": {"is_causal": True, "window_size_left": 4, "window_size_right": 0},
}


def mask_of(options, rows, keys):
    right = 0 if options.get("is_causal") else options.get("window_size_right", -1)
    return bottom_right(rows, keys, options.get("window_size_left", -1), right)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [4, 2])
def test_the_dense_flash_op_and_its_gradient(on_cpu, name, heads):
    options = dict(CASES[name])
    q, k, v = (
        torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((9, 4), (11, heads), (11, heads))
    )
    causal = options.pop("is_causal", False)
    out, lse, seed, offset, debug = aten._flash_attention_forward(
        q, k, v, None, None, 9, 11, 0.0, causal, False, **options
    )
    double = [rows(x).double() for x in (q, k, v)]
    mask = mask_of(CASES[name], 9, 11)
    want = rows(sdpa(*double, attn_mask=mask, scale=options.get("scale"), enable_gqa=True))
    near(out, want)
    scale = options.get("scale", 0.25)
    scores = double[0] @ double[1].repeat_interleave(4 // heads, 1).transpose(-1, -2) * scale
    near(lse, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))
    assert (seed.shape, seed.dtype, offset.shape, debug.numel()) == ((2,), torch.uint64, (), 0)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum(), (q, k, v))
    wanted = torch.autograd.grad((want * dout).sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        near(a, b)


PLACED = {  # in memory, of [batch, seqlen, heads, head_dim]
    "as it is": lambda b, s, h, d: torch.randn(b, s, h, d),
    "heads first": lambda b, s, h, d: torch.randn(b, h, s, d).transpose(1, 2),
    "one head": lambda b, s, h, d: torch.randn(b, s, 1, d).expand(b, s, h, d),
    "one sequence": lambda b, s, h, d: torch.randn(1, s, h, d).expand(b, s, h, d),
    "columns apart": lambda b, s, h, d: torch.randn(b, s, d, h).transpose(2, 3),
    "odd offset": lambda b, s, h, d: torch.randn(b, s, h, d + 3)[..., 3:],
    "backwards": lambda b, s, h, d: torch.randn(h, d, s, b).permute(3, 2, 0, 1),
}


def test_arrays_in_whatever_memory_and_without_rows_or_keys(on_cpu, rng):
    draw = random.Random(seed := int(rng.integers(2**31)))
    torch.manual_seed(seed)
    for _ in range(40):
        batch, rows_, keys = (draw.choice(of) for of in ((0, 1, 3), (0, 1, 7, 40), (0, 1, 9, 70)))
        (heads, heads_kv), dim = draw.choice([(4, 4), (4, 2), (4, 1), (1, 1)]), draw.choice([8, 64])
        names = [draw.choice(list(PLACED)) for _ in "qkv"]
        extents = ((rows_, heads), (keys, heads_kv), (keys, heads_kv))
        q, k, v = (
            PLACED[name](batch, *extent, dim).requires_grad_()
            for name, extent in zip(names, extents, strict=True)
        )
        left, right, causal = draw.choice([-1, 0, 3]), draw.choice([-1, 0, 2]), draw.random() < 0.4
        window = {"window_size_left": left, "window_size_right": right}
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, rows_, keys, 0.0, causal, False, **window
        )
        mask = mask_of({"is_causal": causal, **window}, rows_, keys)
        double = [x.detach().double().requires_grad_() for x in (q, k, v)]
        many = [x.repeat_interleave(heads // heads_kv, 2) for x in double[1:]]
        scores = torch.einsum("bqhd,bkhd->bhqk", double[0], many[0]) * dim**-0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        seeing = mask.any(-1)[:, None]
        weights = torch.where(seeing, scores.masked_fill(~seeing, 0).softmax(-1), 0.0)
        want = torch.einsum("bhqk,bkhd->bqhd", weights, many[1])
        about = (
            f"seed {seed}: {names}, {batch, rows_, keys, heads, heads_kv, dim}, {window}, {causal}"
        )
        dout = torch.randn_like(out)
        found = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
        wanted = (want, scores.logsumexp(-1), *torch.autograd.grad(want, double, dout.double()))
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape, about
            assert torch.allclose(a.double(), b.double(), atol=1e-4, rtol=1e-4), about


def packed(lengths, heads, dim=16):
    """Rows of sequences end to end, and where they end."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.randn(int(ends[-1]), heads, dim, requires_grad=True), ends


def each_sequence(q, k, v, ends_q, ends_k, **options):
    parts = []
    for i in range(len(ends_q) - 1):
        a, b = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        one = [x.double().transpose(0, 1)[None] for x in (q[a], k[b], v[b])]
        mask = mask_of(options, one[0].shape[2], one[1].shape[2])
        if one[0].shape[2]:
            parts.append(sdpa(*one, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_varlen_attn_of_torch_and_its_gradient(on_cpu, window):
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("this torch's varlen_attn takes no window_size")
    q, ends_q = packed((4, 0, 7), 4)
    k, ends_k = packed((6, 3, 9), 4)
    v = torch.randn(18, 4, 16, requires_grad=True)
    out = varlen_attn(q, k, v, ends_q, ends_k, 7, 9, window_size=window)
    options = {"window_size_left": window[0], "window_size_right": window[1]}
    want = each_sequence(q, k, v, ends_q, ends_k, **options)
    near(out, want)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum(), (q, k, v))
    wanted = torch.autograd.grad((want * dout).sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        near(a, b)


def has(name):
    """Whether this torch's op takes an argument."""
    return any(x.name == name for x in aten._flash_attention_forward.default._schema.arguments)


@pytest.mark.skipif(
    not has("block_table") or not has("num_splits"),
    reason="this torch's flash op takes no block table or no number of splits",
)
@pytest.mark.parametrize("window", [(-1, 0), (5, 0)])
def test_a_paged_cache_through_block_tables(on_cpu, window):
    cache_k, cache_v = torch.randn(2, 8, 4, 2, 16)  # 8 pages of 4 tokens
    table = torch.tensor([[5, 2, 7], [1, 6, 99]], dtype=torch.int32)  # 99 is past the second
    used = torch.tensor([11, 6], dtype=torch.int32)
    q, ends_q = packed((3, 2), 4)
    left, right = window
    arguments = (ends_q, None, 3, 12, 0.0, window == (-1, 0), False)
    options = {"window_size_left": left, "window_size_right": right}
    options |= {"seqused_k": used, "block_table": table, "num_splits": 1}
    out, lse, *_ = aten._flash_attention_forward(
        q.detach(), cache_k, cache_v, *arguments, **options
    )
    k, v = (
        torch.cat([x[[5, 2, 7]].flatten(0, 1)[:11], x[[1, 6]].flatten(0, 1)[:6]])
        for x in (cache_k, cache_v)
    )
    ends_k = torch.tensor([0, 11, 17])
    near(out, each_sequence(q, k, v, ends_q, ends_k, **options))
    assert lse.shape == (4, 5)


def test_lengths_in_use_and_slopes(on_cpu):
    q, k, v = (torch.randn(2, n, 4, 16) for n in (5, 9, 9))
    used, slopes = torch.tensor([7, 9], dtype=torch.int32), torch.rand(4)
    out = aten._flash_attention_forward(
        q, k, v, None, None, 5, 9, 0.0, True, False, seqused_k=used, alibi_slopes=slopes
    )[0]
    want = cuattn.attention(q, k, v, causal=True, seqused_k=used, alibi_slopes=slopes)
    assert torch.equal(out, want)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("dim_v", [16, 8])
def test_the_sdpa_op_keeps_the_layout_that_torch_promises(on_cpu, order, dim_v):
    from torch._subclasses.fake_tensor import FakeTensorMode

    back = [order.index(axis) for axis in range(4)]
    q = torch.randn([(2, 4, 9, 16)[a] for a in order]).permute(back).requires_grad_()
    k, v = (
        torch.randn(2, 4, 9, 16, requires_grad=True),
        torch.randn(2, 4, 9, dim_v, requires_grad=True),
    )
    result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.2)
    double = [x.double() for x in (q, k, v)]
    want = sdpa(*double, is_causal=True, scale=0.2)
    near(result[0], want)
    assert result[2:4] == (None, None)
    assert result[4:6] == (9, 9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x.detach()) for x in (q, k, v)]
        shapes = aten._scaled_dot_product_flash_attention(*fake, 0.0, True, scale=0.2)
    if shapes[0].shape != result[0].shape:  # an older torch takes value's head_dim to be query's
        assert dim_v != 16
        shapes = result
    for a, b in zip(result[:2], shapes[:2], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    dout = torch.randn_like(want)
    found = torch.autograd.grad((result[0] * dout).sum(), (q, k, v))
    wanted = torch.autograd.grad((want * dout).sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        near(a, b)
    raw = aten._scaled_dot_product_flash_attention_backward(
        dout.float(),
        q,
        k,
        v,
        result[0].detach(),
        result[1],
        None,
        None,
        9,
        9,
        0.0,
        True,
        result[6],
        result[7],
        scale=0.2,
    )
    for x, of in zip(raw, (q, k, v), strict=True):
        assert x.stride() == torch.empty_like(of).stride()


def test_the_op_that_writes_in_place(on_cpu):
    if not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip("this torch has no such op")
    q, ends = packed((4, 7), 2)
    q, out = q.detach(), torch.full((11, 2, 16), torch.nan)
    lse = aten._flash_attention_forward_no_dropout_inplace(
        out, q, q, q, ends, ends, 7, 7, 0.0, False, False
    )
    want, want_lse = cuattn.attention_varlen(q, q, q, ends, ends, 7, 7, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    wide = torch.full((11, 2, 32), torch.nan)[..., ::2]
    aten._flash_attention_forward_no_dropout_inplace(
        wide, q, q, q, ends, ends, 7, 7, 0.0, False, False
    )
    assert torch.equal(wide, want)


def test_deterministic_algorithms_reach_the_backward_pass(monkeypatch):
    asked = []
    run = torch_kernels.attention_backward
    monkeypatch.setattr(
        torch_kernels,
        "attention_backward",
        lambda *a, **o: asked.append(o.get("deterministic")) or run(*a, **o),
    )
    q = torch.randn(1, 5, 2, 16)
    out, lse = cuattn.attention(q, q, q, return_lse=True)
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            torch_kernels.flash_backward(
                out, q, q, q, out, lse, None, None, 5, 5, 0.0, False, None, None
            )
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [None, True]


class Own:
    """Stands for torch's kernel of an op."""

    def __init__(self):
        self.calls = []

    def call_boxed(self, keyset, *arguments, **options):
        self.calls.append((arguments, options))
        return "torch's"


REFUSALS = {
    "dropout": ((0.5, False, False), {}, "dropout_p must be 0"),
    "debug mask": ((0.0, False, True), {}, "return_debug_mask must be False"),
    "unknown": ((0.0, False, False), {"new_argument": 1}, "new_argument must be None"),
    "dense pages": (
        (0.0, False, False),
        {"block_table": torch.zeros(1, 1, dtype=torch.int32)},
        "block_table must be None without cum_seq_q",
    ),
    "lengths": (
        (0.0, False, False),
        {"seqused_k": torch.zeros(1, dtype=torch.int64)},
        "seqused_k must be int32",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_torchs_kernel_runs_what_cuattn_refuses_and_it_is_said_once(name, monkeypatch):
    numbers, options, message = REFUSALS[name]
    monkeypatch.setattr(door, "told", set())
    own, q = Own(), torch.randn(1, 5, 2, 16)
    kernel = door.make_kernel("_flash_attention_forward", torch_kernels.flash_forward, own)
    arguments = (q, q, q, None, None, 5, 5, *numbers)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert kernel(None, *arguments, **options) == "torch's"
    (warning,) = seen
    assert message in str(warning.message)
    assert "torch's own kernel runs it (said once)" in str(warning.message)
    assert len(own.calls) == 3
    assert own.calls[0][1] == options
    alone = door.make_kernel("_flash_attention_forward", torch_kernels.flash_forward, None)
    with pytest.raises((torch_kernels.Refused, NotImplementedError, ValueError), match=message):
        alone(None, *arguments, **options)


def test_the_backward_pass_of_a_dropout_is_torchs(monkeypatch):
    monkeypatch.setattr(door, "told", set())
    own, q = Own(), torch.randn(1, 5, 2, 16)
    kernel = door.make_kernel("_flash_attention_backward", torch_kernels.flash_backward, own)
    with pytest.warns(UserWarning, match="_flash_attention_backward.*dropout_p must be 0"):
        kernel(None, q, q, q, q, q, q[..., 0, 0], None, None, 5, 5, 0.5, False, None, None)
    assert len(own.calls) == 1


def test_slopes_with_gradients_are_torchs_affair():
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    with pytest.raises(torch_kernels.Refused, match="alibi_slopes must be None with gradients"):
        torch_kernels.flash_forward(
            q, q, q, None, None, 5, 5, 0.0, False, False, alibi_slopes=torch.rand(2)
        )


def test_other_errors_are_not_swallowed():
    own, q = Own(), torch.randn(1, 5, 2, 16)

    def fails(*arguments, **options):
        raise cuattn.CudaError("launch failed")

    with pytest.raises(cuattn.CudaError):
        door.make_kernel("_flash_attention_forward", fails, own)(None, q)
    assert not own.calls


def test_torchs_table_activates_and_restores(monkeypatch):
    names = torch.nn.attention.list_flash_attention_impls()
    door.register()
    door.register()
    assert torch.nn.attention.list_flash_attention_impls() == sorted({*names, "cuattn"})
    assert torch.nn.attention.current_flash_attention_impl() is None
    q = torch.randn(1, 5, 2, 16)
    call = lambda: aten._flash_attention_forward(q, q, q, None, None, 5, 5, 0.0, False, False)  # noqa: E731
    with pytest.raises(NotImplementedError):
        call()
    torch.nn.attention.register_flash_attention_impl(
        "cuattn", register_fn=lambda: door.activate("CPU")
    )
    torch.nn.attention.activate_flash_attention_impl("cuattn")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "cuattn"
        assert torch.equal(call()[0], cuattn.attention(q, q, q))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        door.register()
    with pytest.raises(NotImplementedError):
        call()


@pytest.mark.skipif(bool(cuattn.info()["cuda_archs"]), reason="this build has CUDA")
def test_a_build_without_cuda_is_not_activated():
    door.register()
    with pytest.raises(RuntimeError, match="cuattn was built without CUDA"):
        torch.nn.attention.activate_flash_attention_impl("cuattn")


def test_an_older_torch_is_told_what_is_wanted(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(ImportError) as error:
        door.register()
    message = str(error.value)
    assert f"torch must be >=2.11, got {torch.__version__}, which lacks" in message
    assert "torch.nn.attention.restore_flash_attention_impl" in message


def test_importing_changes_nothing():
    code = """
import torch
before = torch._C._dispatch_dump("aten::_flash_attention_forward")
names = torch.nn.attention.list_flash_attention_impls()
import cuattn.integrations.torch
assert torch._C._dispatch_dump("aten::_flash_attention_forward") == before
assert torch.nn.attention.list_flash_attention_impls() == names
cuattn.integrations.torch.register()
assert torch._C._dispatch_dump("aten::_flash_attention_forward") == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
