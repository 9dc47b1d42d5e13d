# SPDX-License-Identifier: Apache-2.0
"""Training with torch on CUDA: graphs of whole steps, streams, autocast, both gradients' ways."""

from __future__ import annotations

import contextlib

import pytest

import cuattn
import frameworks
import harness
from harness import why_no_cuda

torch = frameworks.require("torch")
import cuattn.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLEEP = 20_000_000  # clock cycles, about 10 ms


@pytest.fixture(autouse=True)
def quiet_device():
    torch.manual_seed(0)
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@contextlib.contextmanager
def deterministic():
    """Bits that can be compared: of kernels that add up in a fixed order, from poisoned memory."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def leaves(dtype=torch.bfloat16, seqlen=130, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(2, seqlen, heads, 64) for heads in (4, 2, 2)]
    made = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    dout = torch.randn(shapes[0], device="cuda", generator=generator).to(dtype)
    return [x.requires_grad_() for x in made], dout


def step(qkv, dout, **options):
    out = cuattn.torch.attention(*qkv, causal=True, **options)
    return (out.detach(), *torch.autograd.grad(out, qkv, dout))


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert not b.isnan().any()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.25, "dropout_seed": 3}])
def test_the_op_and_the_eager_way_give_the_same_bits(dtype, options):
    from torch.utils.flop_counter import FlopCounterMode

    qkv, dout = leaves(dtype)
    with deterministic():
        wanted = step(qkv, dout, **options)
        with FlopCounterMode(display=False):
            found = step(qkv, dout, **options)
    assert_same(found, wanted)
    plain = [x.detach() for x in qkv]
    out, lse = cuattn.attention(*plain, causal=True, return_lse=True, **options)
    gradients = cuattn.attention_backward(
        dout, *plain, out, lse, causal=True, deterministic=True, **options
    )
    assert_same(wanted, (out, *gradients))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_step_draws_another_dropout_each_time(dtype):
    """Forward, backward and the count of calls in one graph: the state lies on the device."""
    qkv, dout = leaves(dtype)
    state = torch.tensor([3, 0], device="cuda")

    def counted():
        found = step(qkv, dout, dropout_p=0.25, dropout_state=state)
        state[1].add_(1)
        return found

    with deterministic():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            counted()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with harness.capturing(graph):
            found = counted()
        state.copy_(torch.tensor([3, 0]))
        outs = []
        for i in range(4):
            fresh, other = leaves(dtype, seed=i)
            with torch.no_grad():
                for x, values in zip((*qkv, dout), (*fresh, other), strict=True):
                    x.copy_(values)
            for x in found:
                x.fill_(torch.nan)
            graph.replay()
            wanted = step(fresh, other, dropout_p=0.25, dropout_seed=3, dropout_offset=i)
            assert_same(found, wanted)
            outs.append(wanted[0])
        assert state.tolist() == [3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_step_replays_on_new_data(dtype):
    qkv, dout = leaves(dtype)
    with deterministic():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(qkv, dout)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with harness.capturing(graph):
            found = step(qkv, dout)
        for seed in range(1, 5):
            fresh, other = leaves(dtype, seed=seed)
            with torch.no_grad():
                for x, values in zip((*qkv, dout), (*fresh, other), strict=True):
                    x.copy_(values)
            for x in found:
                x.fill_(torch.nan)
            graph.replay()
            assert_same(found, step(fresh, other))


def test_steps_in_two_streams_at_once():
    """The way back runs in the stream of the way there, which another keeps busy."""
    with deterministic():
        sets = [leaves(seed=seed) for seed in (1, 2)]
        wanted = [step(*one) for one in sets]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found = []
        for _ in range(12):
            for stream, (qkv, dout) in zip(streams, sets, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP // 100)
                    out = cuattn.torch.attention(*qkv, causal=True)
                    late = torch.full_like(dout, torch.nan)
                    torch.cuda._sleep(SLEEP // 100)
                    late.copy_(dout)  # ordered in this stream alone
                    found.append((out.detach(), *torch.autograd.grad(out, qkv, late)))
        torch.cuda.synchronize()
    for i, one in enumerate(found):
        assert_same(one, wanted[i % 2])


def test_a_step_does_not_wait_for_the_device():
    qkv, dout = leaves()
    step(qkv, dout)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(10 * SLEEP)
    found = step(qkv, dout)
    done.record()
    assert not done.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_converts_and_gives_gradients_of_the_leaves(dtype):
    qkv, dout = leaves(torch.float32)
    with deterministic():
        with torch.autocast("cuda", dtype=dtype):
            out = cuattn.torch.attention(*qkv, causal=True)
            function = torch.compile(cuattn.torch.attention, fullgraph=True, backend="aot_eager")
            compiled = function(*qkv, causal=True)
        assert out.dtype == compiled.dtype == dtype
        half = [x.detach().to(dtype).requires_grad_() for x in qkv]
        wanted = step(half, dout.to(dtype))
        for result in (out, compiled):
            found = torch.autograd.grad(result, qkv, dout.to(dtype))
            assert all(x.dtype == torch.float32 for x in found)
            assert_same((result, *found), (wanted[0], *(x.float() for x in wanted[1:])))


def test_gradients_of_16_bits_can_be_added_up_in_float32():
    qkv, dout = leaves()
    plain = [x.detach() for x in qkv]
    out, lse = cuattn.attention(*plain, return_lse=True)
    dk, dv = (torch.full(x.shape, torch.nan, device="cuda") for x in plain[1:])
    wide = cuattn.attention_backward(dout, *plain, out, lse, dk=dk, dv=dv, deterministic=True)
    narrow = cuattn.attention_backward(dout, *plain, out, lse, deterministic=True)
    assert wide.dk is dk
    assert wide.dv is dv
    assert_same((wide.dq, dk.bfloat16(), dv.bfloat16()), narrow)


def test_arrays_of_two_devices_are_refused():
    qkv, dout = leaves(torch.float32)
    q, k, v = (x.detach() for x in qkv)
    with pytest.raises(ValueError, match=r"attention: k must be on .* like q, got .*; move it"):
        cuattn.torch.attention(q.requires_grad_(), k.cpu(), v)
    q = q.detach()
    out, lse = cuattn.attention(q, k, v, return_lse=True)
    for name, given in (
        ("dout", (dout.cpu(), q, k, v, out, lse)),
        ("out", (dout, q, k, v, out.cpu(), lse)),
        ("lse", (dout, q, k, v, out, lse.cpu())),
    ):
        with pytest.raises(ValueError, match=rf"attention_backward: {name} must be on .* like q"):
            cuattn.attention_backward(*given)
