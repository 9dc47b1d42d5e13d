# SPDX-License-Identifier: Apache-2.0
"""Sizes beyond 65,535 on every axis and beyond 2^31 elements in every array, on a GPU.

No reference could run at these sizes, so the inputs are made such that the right answer is known:
the few rows that matter are compared with a small call of the same library, which test_prefill.py
holds against the reference.
"""

from __future__ import annotations

import pytest

import cuattn
from cases import TENSOR_CORE_BACKENDS
from harness import has_hopper, need_memory, why_no_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}"),
]

BACKENDS = {
    "sm80": "float16",
    "simt": "float32",
    "tiled": "float16",
    "naive": "float16",
    "cublas": "float16",
}
if has_hopper():
    BACKENDS["sm90"] = "bfloat16"
TENSOR_CORES = [name for name in TENSOR_CORE_BACKENDS if name in BACKENDS]
FLASH = [name for name in BACKENDS if name not in ("naive", "cublas")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def random(torch, backend, *shape):
    dtype = getattr(torch, BACKENDS[backend])
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator(torch))


def generator(torch):
    return torch.Generator("cuda").manual_seed(11)


def same(torch, a, b, backend):
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[BACKENDS[backend]]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_backend
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"),
    [(70_000, 1, 1), (1, 70_000, 70_000), (1, 70_000, 1), (300, 300, 1)],
)
def test_batch_and_heads_beyond_65535(torch, backend, batch, heads, kv_heads):
    q = random(torch, backend, batch, 3, heads, 16)
    k, v = (random(torch, backend, batch, 5, kv_heads, 16) for _ in range(2))
    out = cuattn.attention(q, k, v, causal=True, backend=backend)
    tail = cuattn.attention(
        q[-1:, :, -1:], k[-1:, :, -1:], v[-1:, :, -1:], causal=True, backend=backend
    )
    same(torch, out[-1:, :, -1:], tail, backend)
    head = cuattn.attention(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], causal=True, backend=backend)
    same(torch, out[:1, :, :1], head, backend)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("backend", [*FLASH, "naive"])
def test_more_than_65535_ragged_sequences(torch, backend):
    count = 80_000
    q = random(torch, backend, 2 * count, 2, 16)
    ends = torch.arange(0, 2 * count + 1, 2, device="cuda", dtype=torch.int32)
    out = cuattn.attention_varlen(q, q, q, ends, ends, 2, 2, causal=True, backend=backend)
    dense = q.view(count, 2, 2, 16)
    expected = cuattn.attention(dense[-7:], dense[-7:], dense[-7:], causal=True, backend=backend)
    same(torch, out.view(count, 2, 2, 16)[-7:], expected, backend)
    same(torch, out.view(count, 2, 2, 16)[:, 0], dense[:, 0], backend)  # the first row sees itself


@pytest.mark.parametrize("backend", FLASH)
def test_long_sequences(torch, backend):
    """70,000 queries against 70,000 keys, causal: the first and the last rows."""
    q, k, v = (random(torch, backend, 1, 70_000, 1, 64) for _ in range(3))
    out = cuattn.attention(q, k, v, causal=True, backend=backend)
    same(
        torch, out[:, :40], cuattn.attention(*(x[:, :40] for x in (q, k, v)), causal=True), backend
    )
    last = cuattn.attention(q[:, -40:], k, v, causal=True, backend=backend)
    same(torch, out[:, -40:], last, backend)


@pytest.mark.parametrize("backend", FLASH)
def test_a_million_keys(torch, backend):
    """1.1 million keys, one of which dominates: its value comes back."""
    keys = 1_100_000
    q = torch.ones(1, 1, 1, 64, device="cuda", dtype=getattr(torch, BACKENDS[backend]))
    k, v = (random(torch, backend, 1, keys, 1, 64) for _ in range(2))
    k[0, -3] = 8
    out, lse = cuattn.attention(q, k, v, backend=backend, return_lse=True)
    same(torch, out[0, 0, 0], v[0, -3, 0], backend)
    assert lse.item() == pytest.approx(64, abs=1e-2)


@pytest.mark.parametrize("backend", FLASH)
def test_a_million_tokens(torch, backend):
    """One sequence of a million queries and keys in a window: rows of the beginning, the middle
    and the end.
    """
    rows, left, take = 2**20 + 3, 300, 40
    q, k, v = (random(torch, backend, 1, rows, 2, 64) for _ in range(3))
    out = cuattn.attention(q, k, v, causal=True, window=(left, -1), backend=backend)
    for end in (take, rows // 2, rows):
        begin = max(0, end - take - left)
        part = [x[:, begin:end] for x in (q, k, v)]
        near = cuattn.attention(*part, causal=True, window=(left, -1), backend=backend)
        same(torch, out[:, end - take : end], near[:, -take:], backend)


@pytest.mark.parametrize("backend", [*FLASH, "naive"])
def test_more_than_two_to_the_31_elements(torch, backend):
    """q, k, v and out of 2.2e9 elements each."""
    wide = BACKENDS[backend] == "float32"
    need_memory(45 if wide else 23)
    rows, heads = (1 << 24) + 5, 2
    q = torch.empty(rows, 1, heads, 64, device="cuda", dtype=getattr(torch, BACKENDS[backend]))
    q.uniform_(-1, 1, generator=generator(torch))
    out = torch.full_like(q, float("nan"))
    cuattn.attention(q, q, q, out=out, backend=backend)
    # One key: its own value, but for the rounding of exp2(s - max) / sum in float32.
    slack = 2 * torch.finfo(torch.float32).eps if wide else 0.0
    for part in (slice(None, 3), slice(-3, None), slice(rows // 2, rows // 2 + 3)):
        torch.testing.assert_close(out[part], q[part], rtol=slack, atol=0)
    for got, want in zip(out.split(1 << 22), q.split(1 << 22), strict=True):
        assert ((got - want).abs() <= slack * want.abs()).all()


@pytest.mark.parametrize("backend", [*FLASH, "naive"])
def test_strides_beyond_two_to_the_31_elements(torch, backend):
    """Two sequences 2^31 elements apart inside one buffer, for each of q, k, v and out."""
    wide = BACKENDS[backend] == "float32"
    need_memory(12 if wide else 6)
    gap = 2**31 + 64
    dtype = getattr(torch, BACKENDS[backend])
    memory = torch.empty(gap + 4 * 4096, device="cuda", dtype=dtype)
    views = [memory.as_strided((2, 30, 2, 64), (gap, 128, 64, 1), 4096 * i) for i in range(4)]
    small = [random(torch, backend, 2, 30, 2, 64) for _ in range(3)]
    for view, values in zip(views, small, strict=False):
        view.copy_(values)
    cuattn.attention(*views[:3], causal=True, out=views[3], backend=backend)
    expected = cuattn.attention(*small, causal=True, backend=backend)
    assert torch.equal(views[3], expected)


@pytest.mark.parametrize("backend", TENSOR_CORES)
def test_scores_beyond_two_to_the_31_elements(torch, backend):
    """naive keeps 2.3e9 scores in its workspace; a flash kernel keeps none and must agree."""
    need_memory(14)
    q, k, v = (random(torch, backend, 1, 24_000, 4, 32) for _ in range(3))
    plain = cuattn.attention(q, k, v, causal=True, backend="naive")
    same(torch, plain, cuattn.attention(q, k, v, causal=True, backend=backend), backend)


@pytest.mark.parametrize("backend", TENSOR_CORES)
def test_bias_beyond_two_to_the_31_elements(torch, backend):
    need_memory(12)
    q = random(torch, backend, 1, 47_000, 1, 32)
    bias = torch.zeros(1, 1, 47_000, 47_000, device="cuda", dtype=q.dtype)
    bias[0, 0, -1, :-1] = float("-inf")
    out = cuattn.attention(q, q, q, bias=bias, backend=backend)
    assert torch.equal(out[0, -1], q[0, -1])  # the last row sees its own key only
    near = cuattn.attention(q[:, :100], q, q, backend=backend)
    same(torch, out[:, :100], near, backend)


# The longest axes there are, but for a little that lies below every tile's multiple.
LONGEST = 2**31 - 2048 - 5


@pytest.mark.parametrize("backend", [*FLASH, "naive"])
@pytest.mark.parametrize("causal", [False, True])
def test_as_many_queries_as_32_bits_count(torch, backend, causal):
    """One query seen 2^31 times; its answers are memory of their own."""
    need_memory({"simt": 72, "naive": 68}.get(backend, 40))
    q, k, v = (random(torch, backend, 1, n, 1, 8) for n in (1, 3, 3))
    expected = cuattn.attention(q, k, v, backend=backend)
    q = q.expand(1, LONGEST, 1, 8)
    out = torch.full(q.shape, float("nan"), device="cuda", dtype=q.dtype)
    cuattn.attention(q, k, v, causal=causal, out=out, backend=backend)
    # Causal: the last three rows stand at the keys, and those before them see none.
    want = torch.zeros_like(expected) if causal else expected
    for part in out[:, : LONGEST - 3].split(1 << 26, dim=1):
        same(torch, part, want.expand(part.shape), backend)
    last = cuattn.attention(q[:, -3:], k, v, causal=causal, backend=backend)
    same(torch, out[:, LONGEST - 3 :], last, backend)


@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.parametrize("window", [(300, -1), (299, 7)])
def test_as_many_keys_as_32_bits_count(torch, backend, window):
    """The last 300 keys of 2^31, in a window; values in memory, keys the same everywhere."""
    need_memory(68 if BACKENDS[backend] == "float32" else 36)
    q, k = (random(torch, backend, 1, n, 1, 8) for n in (5, 1))
    v = torch.zeros(1, LONGEST, 1, 8, device="cuda", dtype=q.dtype)
    v[:, -400:] = random(torch, backend, 1, 400, 1, 8)
    k = k.expand(v.shape)
    options = dict(causal=window[1] < 0, window=window, backend=backend, return_lse=True)
    out, lse = cuattn.attention(q, k, v, **options)
    near, near_lse = cuattn.attention(q, k[:, -400:], v[:, -400:], **options)
    same(torch, out, near, backend)
    torch.testing.assert_close(lse, near_lse, rtol=1e-5, atol=1e-5)


def test_merging_beyond_two_to_the_31_elements(torch):
    need_memory(20)
    rows = (1 << 25) + 3
    out = torch.ones(rows, 1, 64, device="cuda", dtype=torch.float16)
    lse = torch.zeros(rows, 1, device="cuda")
    merged, merged_lse = cuattn.merge_states(out, lse, out, lse)
    assert bool((merged == 1).all())
    assert merged_lse[-1].item() == pytest.approx(0.6931472, abs=1e-6)
