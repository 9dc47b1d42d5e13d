# SPDX-License-Identifier: Apache-2.0
"""The backward pass beyond 65,535 sequences and heads and 2^31 elements, on a GPU: the last rows
and heads against a small call of the kernel, which test_backward.py holds against the reference.
"""

from __future__ import annotations

import pytest

import cuattn
from harness import need_memory, why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]


def gradients(torch, q, k, v, dout):
    out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True, backend="naive")
    return cuattn.attention_backward(dout, q, k, v, out, lse, causal=True, backend="naive")


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
def test_batch_and_heads_beyond_65535(torch, batch, heads):
    generator = torch.Generator("cuda").manual_seed(11)
    q, k, v, dout = (
        torch.randn((batch, n, heads, 16), device="cuda", generator=generator) for n in (3, 5, 5, 3)
    )
    whole = gradients(torch, q, k, v, dout)
    for at in (0, -1):
        last = [x[at:, :, at:] if at else x[:1, :, :1] for x in (q, k, v, dout)]
        for big, small in zip(whole, gradients(torch, *last), strict=True):
            assert torch.isfinite(big).all()
            assert torch.equal(big[at:, :, at:] if at else big[:1, :, :1], small)


def test_rows_and_planes_beyond_2_to_31_elements(torch):
    """dout and q are slices of a tensor whose rows lie 2^16 elements apart, and the planes hold
    more than 2^31 pairs.
    """
    need_memory(60)
    rows, keys = 40_000, 60_000
    wide = torch.zeros((1, rows, 1, 1 << 16), device="cuda", dtype=torch.float16)
    q, dout = wide[..., :8], wide[..., 8:16]
    q.normal_()
    dout.normal_()
    k, v = (torch.randn((1, keys, 1, 8), device="cuda", dtype=torch.float16) for _ in range(2))
    whole = gradients(torch, q, k, v, dout)
    packed = gradients(torch, q.contiguous(), k, v, dout.contiguous())
    for a, b in zip(whole, packed, strict=True):
        assert torch.equal(a, b)
    # The last rows see the keys as they do in a call of their own: causal is bottom-right aligned.
    tail = gradients(torch, q[:, -5:], k, v, dout[:, -5:])
    assert torch.equal(whole.dq[:, -5:], tail.dq)
