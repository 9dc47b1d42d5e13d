# SPDX-License-Identifier: Apache-2.0
"""torch's flash backend on CUDA with cuattn active: SDPA, varlen_attn, dropout, torch.compile."""

from __future__ import annotations

import inspect
import warnings

import pytest

import frameworks
import harness

torch = frameworks.require("torch")
from cuattn.integrations import torch as door  # noqa: E402
from cuattn.integrations import torch_kernels  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention

try:
    door.check_version()
except ImportError as too_old:
    pytest.skip(str(too_old), allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(harness.why_no_cuda() is not None, reason="no CUDA"),
]


@pytest.fixture
def calls(monkeypatch):
    """Active cuattn, and the calls that reach its functions."""
    torch.manual_seed(0)
    torch.compiler.reset()
    seen = []
    for name in ("attention", "attention_varlen", "attention_backward"):
        run = getattr(torch_kernels, name)
        counted = lambda *a, name=name, run=run, **o: seen.append(name) or run(*a, **o)  # noqa: E731
        monkeypatch.setattr(torch_kernels, name, counted)
    monkeypatch.setattr(door, "told", set())
    door.register()
    torch.nn.attention.activate_flash_attention_impl("cuattn")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        yield seen
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()


def qkv(heads=(8, 8), rows=300, dim=64):
    shapes = [(2, rows, n, dim) for n in (heads[0], heads[1], heads[1])]
    made = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    return [x.requires_grad_() for x in made]


def judge(arrays, out, want, tolerance=0.03):
    dout = torch.randn_like(want)
    found = torch.autograd.grad((out.double() * dout).sum(), arrays)
    wanted = torch.autograd.grad((want * dout).sum(), arrays)
    for a, b in zip((out, *found), (want, *wanted), strict=True):
        assert (a.double() - b.double()).abs().max() < tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim"), [((8, 8), 64), ((8, 2), 128), ((4, 4), 72), ((4, 4), 20)]
)
def test_sdpa_runs_by_cuattn(calls, causal, heads, dim):
    arrays = qkv(heads, dim=dim)
    heads_first = [x.transpose(1, 2) for x in arrays]
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    out = sdpa(*heads_first, **options)
    assert calls == ["attention"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = sdpa(*(x.double() for x in heads_first), **options)
    judge(arrays, out, want)
    assert calls == ["attention", "attention_backward"]


def test_a_compiled_step(calls):
    arrays = qkv()
    step = lambda q, k, v: sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)  # noqa: E731
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = step(*(x.double() for x in arrays))
    judge(arrays, torch.compile(step, fullgraph=True)(*arrays), want)
    assert calls == ["attention", "attention_backward"]


def test_varlen_attn(calls):
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("this torch's varlen_attn takes no window_size")
    arrays = [torch.randn(500, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    arrays = [x.requires_grad_() for x in arrays]
    ends = torch.tensor([0, 130, 130, 500], dtype=torch.int32, device="cuda")
    out = varlen_attn(*arrays, ends, ends, 370, 370, window_size=(-1, 0))
    assert calls == ["attention_varlen"]
    parts = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for rows in (slice(0, 130), slice(130, 500)):
            one = [x[rows].double().transpose(0, 1)[None] for x in arrays]
            parts.append(sdpa(*one, is_causal=True)[0].transpose(0, 1))
    judge(arrays, out, torch.cat(parts))


def test_dropout_runs_by_torchs_own_kernel_both_ways(calls):
    arrays = qkv()
    heads_first = [x.transpose(1, 2) for x in arrays]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = sdpa(*heads_first, dropout_p=0.5)
        out.sum().backward()
    assert ["dropout_p must be 0" in str(w.message) for w in seen] == [True]
    assert calls == []
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in arrays)


def test_restoring_gives_the_ops_back(calls):
    torch.nn.attention.restore_flash_attention_impl()
    q = qkv()[0].detach().transpose(1, 2)
    sdpa(q, q, q)
    assert calls == []


def test_a_cuda_graph_captures_the_call(calls):
    q = qkv()[0].detach().transpose(1, 2)
    want = sdpa(q, q, q)
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out = sdpa(q, q, q)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
