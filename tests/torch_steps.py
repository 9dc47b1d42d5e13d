# SPDX-License-Identifier: Apache-2.0
"""What the tests of torch's autograd share: the formula in float64, leaves, gradients by name."""

from __future__ import annotations

import numpy as np

import frameworks

torch = frameworks.require("torch")


def formula(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, kept=None, **given):
    """out and lse of bshd arrays in float64, every step one that autograd knows."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group, (rows, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if given.get("alibi_slopes") is not None:
        scores = scores - given["alibi_slopes"].double()[..., None, None] * distance.abs()
    if given.get("bias") is not None:
        scores = scores + given["bias"].double()
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    left, right = window[0], min(0, window[1]) if causal and window[1] >= 0 else window[1]
    right = 0 if causal else right
    hidden |= (distance > left) if left >= 0 else hidden
    hidden |= (distance < -right) if right >= 0 else hidden
    scores = scores.masked_fill(hidden, -torch.inf)
    if given.get("sinks") is not None:
        sink = given["sinks"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.logsumexp(torch.cat((scores, sink), dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    if kept is not None:
        weights = weights * kept
    return (weights @ v).transpose(1, 2), lse


def arrays(options=(), dtype=torch.float32, heads=(4, 2), rows=13, keys=21, dim=16):
    """Leaves that want gradients: q, k, v, and those of the others that `options` names."""
    made = {
        "q": torch.randn(2, rows, heads[0], dim),
        "k": torch.randn(2, keys, heads[1], dim),
        "v": torch.randn(2, keys, heads[1], dim),
        "bias": torch.randn(2, 1, rows, keys),
        "sinks": torch.randn(heads[0]),
        "alibi_slopes": torch.rand(heads[0]) / 4,
    }
    chosen = {n: x for n, x in made.items() if n in "qkv" or n in options}
    return {n: (x.to(dtype) if n in "qkv" else x).requires_grad_() for n, x in chosen.items()}


def gradients_of(loss, leaves):
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))


def assert_near(found, wanted, tolerance=2e-5):
    assert found.keys() == wanted.keys()
    for name in wanted:
        scale = wanted[name].abs().max().clamp(min=1)
        assert found[name].dtype == wanted[name].dtype
        error = (found[name].double() - wanted[name].double()).abs().max() / scale
        assert error < tolerance, f"d{name}: {error}"


def ragged(lengths=((4, 6), (0, 5), (7, 9)), others=2):
    starts = np.concatenate([[[0, 0]], np.cumsum(lengths, axis=0)])
    cu_q, cu_k = (torch.tensor(starts[:, i], dtype=torch.int32) for i in range(2))
    q = torch.randn(int(cu_q[-1]) + others, 4, 16, requires_grad=True)  # others: of no sequence
    k, v = (torch.randn(int(cu_k[-1]), 2, 16, requires_grad=True) for _ in range(2))
    return (q, k, v), (cu_q, cu_k, 7, 9)
