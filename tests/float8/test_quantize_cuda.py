# SPDX-License-Identifier: Apache-2.0
"""quantize, quantize_like and dequantize on CUDA: the codes and scales of the CPU, bit for bit."""

from __future__ import annotations

import pytest

import cuattn
import harness
from harness import why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]

MODES = [
    ("tensor", None),
    ("head", None),
    ("block", None),
    ("head", "channel"),
    ("int8", None),
]
FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


def drawn(rng, shape, dtype, device):
    import torch

    x = torch.from_numpy(rng.standard_normal(shape, "float32") * 3 + rng.standard_normal())
    return x.to(getattr(torch, dtype)).to(device)


def same_bits(ours, theirs):
    import torch

    assert ours.dtype == theirs.dtype
    assert ours.stride() == theirs.stride()
    ours = ours.cpu()
    word = torch.uint8 if ours.element_size() == 1 else torch.int32
    assert torch.equal(ours.view(word), theirs.view(word))


@pytest.mark.parametrize(("mode", "v_mode"), MODES)
def test_codes_and_scales_are_those_of_the_cpu(mode, v_mode, rng):
    """Without a mean, whose sum a GPU takes in another order."""
    for dtype, dim, rotates in (("float32", 48, 1), ("float16", 128, 1), ("bfloat16", 256, 0)):
        rows, keys = (int(n) for n in rng.integers(1, 400, 2))
        shapes = (2, rows, 4, dim), (2, keys, 2, dim), (2, keys, 2, 80)
        on_cpu = [drawn(rng, shape, dtype, "cpu") for shape in shapes]
        options = {"mode": mode, "v_mode": v_mode, "hadamard": bool(rotates), "smooth_k": False}
        theirs = cuattn.quantize(*on_cpu, **options)
        ours = cuattn.quantize(*[x.cuda() for x in on_cpu], **options)
        for name in FIELDS:
            same_bits(getattr(ours, name), getattr(theirs, name))
        channels = v_mode == "channel"
        for name, by_channel in (("k", False), ("v", channels)):
            codes, scale = getattr(ours, name), getattr(ours, f"{name}_scale")
            again = cuattn.dequantize(codes, scale, dtype=dtype, channels=by_channel)
            want = cuattn.dequantize(codes.cpu(), scale.cpu(), dtype=dtype, channels=by_channel)
            assert (again.cpu() == want).all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_take_several_parts_give_the_codes_of_the_cpu(dtype, dim, rng):
    """Arrays of 20 MB and more: tiles come while others are worked on, in kernels that overlap."""
    import torch

    from harness import is_emulated

    if is_emulated():
        pytest.skip("the emulator would take minutes")
    heads = 3072 // dim
    shapes = (2, 1900, heads, dim), (2, 2100, heads // 2, dim), (2, 2100, heads // 2, dim)
    on_cpu = [drawn(rng, shape, dtype, "cpu") for shape in shapes]
    on_gpu = [x.cuda() for x in on_cpu]
    mean = torch.from_numpy(rng.standard_normal((heads // 2, dim), "float32"))
    for mode in ("tensor", "head", "block", "int8"):
        for given in (None, mean):
            options = {"mode": mode, "smooth_k": False, "hadamard": bool(rng.integers(2))}
            theirs = cuattn.quantize(*on_cpu, **options, key_mean=given)
            on_device = None if given is None else given.cuda()
            for _ in range(3):
                ours = cuattn.quantize(*on_gpu, **options, key_mean=on_device)
            for name in FIELDS:
                same_bits(getattr(ours, name), getattr(theirs, name))
            if given is not None:
                shifts = ours.lse_shift.cpu(), theirs.lse_shift
                torch.testing.assert_close(*shifts, rtol=1e-5, atol=1e-5)


def test_scales_of_unusual_sizes_divide_as_the_cpu_does(rng):
    """Beyond 2^60 either way quotients take another path; zeros keep their signs."""
    import torch

    x = drawn(rng, (1, 131, 2, 64), "float32", "cpu")
    x[0, :, 0, :8] = -0.0
    for size in (1e-38, 1e-20, 1e-3, 1.0, 1e19, 1e30):
        big = (x * size).contiguous()
        for scale in (size, size / 7, float(torch.tensor(size * 3.1))):
            if scale < 1.2e-38:
                continue
            theirs = cuattn.quantize_like(big, scale)
            same_bits(cuattn.quantize_like(big.cuda(), scale), theirs)


def test_the_mean_of_the_keys_and_the_shift_of_lse(rng):
    import torch

    q, k, v = (drawn(rng, (2, 333, heads, 64), "bfloat16", "cpu") for heads in (4, 2, 2))
    theirs = cuattn.quantize(q, k, v)
    ours = cuattn.quantize(q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(ours.lse_shift.cpu(), theirs.lse_shift, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.k_scale.cpu(), theirs.k_scale, rtol=1e-5, atol=0)
    near = (ours.k.cpu().float() - theirs.k.float()).abs() <= 0.126 * theirs.k.float().abs() + 0.01
    assert near.all()
    out, lse = ours.attention(causal=True, return_lse=True, backend="naive")
    want, want_lse = theirs.attention(causal=True, return_lse=True)
    torch.testing.assert_close(out.cpu().float(), want.float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-3, atol=1e-2)


def test_views_padding_and_special_numbers(rng):
    import torch

    wide = drawn(rng, (2, 61, 3, 128), "float32", "cpu")
    wide[0, 3, 1, :4] = torch.tensor([float("inf"), float("nan"), -float("inf"), 0.0])
    wide[:, :, 2] = 0.0
    for cut in (
        lambda x: x[:, ::2, :, ::2],
        lambda x: x.transpose(1, 2)[:, :, 1:].transpose(1, 2)[..., :64],
        lambda x: x[..., 1:65],
        lambda x: x[:, :0],
    ):
        # With a rotation a NaN spreads over its row, whose bits nobody promises.
        options = {"smooth_k": False, "hadamard": False}
        theirs = cuattn.quantize(*[cut(wide)] * 3, **options)
        on_gpu = wide.cuda()
        ours = cuattn.quantize(*[cut(on_gpu)] * 3, **options)
        for name in ("q", "v"):
            scale = getattr(theirs, f"{name}_scale")
            assert torch.equal(getattr(ours, f"{name}_scale").cpu(), scale)
            a, b = getattr(ours, name).cpu().float(), getattr(theirs, name).float()
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        like = cuattn.quantize_like(cut(on_gpu), ours.q_scale)
        a, b = like.cpu().float(), cuattn.quantize_like(cut(wide), theirs.q_scale).float()
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_all_is_done_on_the_stream_that_is_given(rng):
    """The factor of lse_shift, too: the stream is still busy when the current one is not."""
    import torch

    from harness import is_emulated

    if is_emulated():
        pytest.skip("the emulator has no streams")
    q, k, v = (drawn(rng, (1, 200, 2, 64), "bfloat16", "cuda") for _ in range(3))
    want = cuattn.quantize(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    found = cuattn.quantize(q, k, v, stream=stream)
    torch.cuda.synchronize()
    assert torch.equal(found.lse_shift, want.lse_shift)


def test_a_captured_graph_quantises_again(rng):
    import torch

    from harness import is_emulated

    if is_emulated():
        pytest.skip("the emulator has no graphs")
    x = drawn(rng, (1, 200, 2, 64), "bfloat16", "cuda")
    q = x.clone()
    cuattn.quantize(q, q, q)  # the first call is not captured
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        found = cuattn.quantize(q, q, q)
    q.copy_(x * 2)
    graph.replay()
    torch.cuda.synchronize()
    want = cuattn.quantize(q, q, q)
    for name in ("q_scale", "k_scale", "v_scale"):
        assert torch.equal(getattr(found, name), getattr(want, name))
    assert torch.equal(found.v.view(torch.uint8), want.v.view(torch.uint8))
