# SPDX-License-Identifier: Apache-2.0
"""What flash-attn's functions should give: the formula in torch, and flash-attn's rule of tests.

The formula is evaluated in float64, and once more in the dtype of the call: a result may be twice
as wrong as that, and a rounding more.
"""

from __future__ import annotations

import frameworks

torch = frameworks.require("torch")

HEAD_DIMS = (32, 40, 59, 64, 111, 128, 160, 256)
LENGTHS = ((1, 3), (1, 37), (33, 65), (97, 97), (113, 71), (64, 129))
HEADS = ((4, 4), (4, 2), (6, 1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"window_size": (11, 5)},
    "left": {"window_size": (9, -1)},
    "right": {"window_size": (-1, 3)},
    "causal-local": {"causal": True, "window_size": (17, 4)},
    "softcap": {"softcap": 3.0},
    "scale": {"softmax_scale": 0.31, "causal": True},
    "alibi": {"alibi_slopes": 1},
    "alibi-causal": {"alibi_slopes": 2, "causal": True},
    "all": {"alibi_slopes": 2, "window_size": (30, 2), "softcap": 5.0, "softmax_scale": 0.2},
}


def numbered(*lists):
    """Combinations of the first list with the second, the others dealt out in turn."""
    pairs = [(a, b) for a in lists[0] for b in lists[1]]
    rest = [[values[(5 * i + i // 7) % len(values)] for values in lists[2:]] for i in range(999)]
    return [(*pair, *more) for pair, more in zip(pairs, rest, strict=False)]


def options_of(mode, batch, heads, device):
    """The options of a mode; where it has alibi_slopes, random ones of so many axes."""
    options = dict(MODES[mode])
    axes = options.pop("alibi_slopes", 0)
    if axes:
        shape = (heads,) if axes == 1 else (batch, heads)
        options["alibi_slopes"] = torch.rand(shape, device=device) * 0.3
    return options


def formula(
    q,
    k,
    v,
    dtype=torch.float64,
    *,
    begin=None,
    end=None,
    rows=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    softmax_scale=None,
    alibi_slopes=None,
    kept=None,
    dropout_p=0.0,
):
    """out and lse of [batch, seqlen, heads, head_dim], every step in `dtype`.

    Sequence b has keys begin[b] to end[b] and the first rows[b] queries; the others give 0.
    """
    batch, length, heads, head_dim = q.shape
    keys = k.shape[1]
    whole = torch.tensor([0, keys, length], device=q.device).expand(batch, 3)
    begin = whole[:, 0] if begin is None else begin
    end = whole[:, 1] if end is None else end
    rows = whole[:, 2] if rows is None else rows
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = q @ (k * scale).transpose(-1, -2)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(length, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)
    begin, end, rows = (x[:, None, None].long() for x in (begin, end, rows))
    behind = i + (end - begin - rows) - (j - begin)  # how far key j lies behind query i
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype).reshape(-1, heads)[..., None, None]
        scores = scores - slopes * behind[:, None].abs()
    hidden = (j < begin) | (j >= end) | (i >= rows)
    left, right = window_size
    right = 0 if causal else right
    hidden |= (behind > left) if left >= 0 else torch.zeros_like(hidden)
    hidden |= (behind < -right) if right >= 0 else torch.zeros_like(hidden)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = torch.logsumexp(scores.double(), dim=-1)
    empty = hidden.all(-1)[:, None, :, None]
    weights = torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0).to(dtype)
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    return (weights @ v).transpose(1, 2), lse


def roundings_of(q, k, softmax_scale=None, **_):
    """By how many roundings float32 results may differ: a score's are those of its products.

    backward takes a weight again, exp(score - lse), so that the error of a score, which is a sum of
    head_dim products, is the weight's; softmax, which `plain` differentiates, divides it away. Of
    4,000 inputs with head_dim 256 and scale 0.31 one needs more: 3.4 instead of 3, for dk.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    longest = [x.detach().float().norm(dim=-1).max().item() for x in (q, k)]
    return max(8.0, 3 * longest[0] * longest[1] * scale)


def moved_by_rounded_out(out, exact, lse, leaves, dout):
    """By what the exact gradients of q, k and v move where backward reads the rounded `out`.

    Backward takes the sum of dout times out for that of the weights times their gradients, as
    flash-attn's does, and lse's gradient is the weights. `plain` never rounds that sum, and its own
    error may be small where there are few rows: of 4,800 inputs of head_dim 256 one was 2.7 of the
    bound away from the gradients of the exact out, all but a rounding of it by this.
    """
    sums = ((exact - out.detach()) * dout).sum(-1).transpose(-1, -2)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    moved = torch.autograd.grad(lse, leaves[:2], sums, retain_graph=True)
    return [*moved, torch.zeros_like(leaves[2])]


def assert_near(found, exact, plain, dtype, name="out", roundings=32.0):
    """flash-attn's rule: twice the error of the same formula in the same dtype, and a rounding.

    In float32, sums of another order have other errors, about as large, of which what cancels
    remains: there it is `roundings`.
    """
    assert found.shape == exact.shape, name
    exact = exact.double()
    error = (found.double() - exact).abs().max().item() if found.numel() else 0.0
    allowed = (plain.double() - exact).abs().max().item() if found.numel() else 0.0
    most = exact.abs().max().item() if found.numel() else 0.0
    roundings, least = (roundings, 1) if dtype == torch.float32 else (2, 1e-2)
    bound = 2 * allowed + roundings * torch.finfo(dtype).eps * max(most, least)
    assert error <= bound, f"{name}: {error} > {bound}"


def assert_lse(found, exact):
    """lse is float32, and -inf where a row is empty."""
    assert found.dtype == torch.float32
    assert torch.equal(torch.isinf(found), torch.isinf(exact))
    seen = torch.isfinite(exact)
    error = (found[seen].double() - exact[seen]).abs()
    assert (error <= 2e-3 * exact[seen].abs().clamp(min=1)).all()


def tensors(shapes, dtype, device, grad=False):
    """Random tensors of a dtype, leaves of autograd where `grad`."""
    made = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]
