# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of cuattn.compat: append, rotate, attend, against the formula.

What the caches hold afterwards is compared bit by bit, what lies outside the tokens in use is NaN.
"""

from __future__ import annotations

import functools

import pytest

import flash_attn_cases as cases
import frameworks
import harness

torch = frameworks.require("torch")
from cuattn.compat.flash_attn import flash_attn_with_kvcache  # noqa: E402  after what it needs
from cuattn.compat.pages import Pages  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(harness.why_no_cuda() is not None, reason="no CUDA"),
        ],
    ),
]
PLACES = ("rows", "batch_idx", "leftpad", "batch_idx+leftpad", "pages", "large pages", "layers")
DIMS = (32, 59, 64, 80, 128, 256)
ROTARY = ((0.0, False), (0.5, True), (1.0, False), (1.0, True), (0.5, False))
LENGTHS = ((1, 300), (3, 300), (64, 512), (16, 1021), (1, 768), (70, 128), (5, 90))  # q, cache
BATCH = 3


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rotated(x, cos, sin, places, interleaved):
    """x [batch, n, heads, dim], token i at places[:, i], in float64 and rounded to x's dtype."""
    turning = 2 * cos.shape[1]
    cos, sin = (t.double()[places.long()][:, :, None] for t in (cos, sin))
    pairs = torch.arange(turning, device=x.device).view(-1, 2)
    pairs = pairs if interleaved else pairs.flatten().view(2, -1).T
    a, b = (x.double()[..., pairs[:, side]] for side in (0, 1))
    out = x.double().clone()
    out[..., pairs[:, 0]], out[..., pairs[:, 1]] = a * cos - b * sin, a * sin + b * cos
    return out.to(x.dtype)


class Call:
    """A call with random lengths, and the rows [batch, tokens] that it is to attend to."""

    def __init__(self, device, dtype, place, dim, heads, rotary, lengths, new, mode):
        self.device, self.dtype, self.heads, self.dim = device, dtype, heads, dim
        length, self.tokens = lengths
        self.q = torch.randn(BATCH, length, heads[0], dim, device=device).to(dtype)
        self.new = new
        most = self.tokens - max(new, length) + 1
        self.seqlens = torch.randint(0 if new else 1, most, (BATCH,), device=device).int()
        self.begin = torch.zeros(BATCH, dtype=torch.int32, device=device)
        if "leftpad" in place:
            self.begin = (torch.rand(BATCH, device=device) * self.seqlens).int()
        self.end = self.seqlens + new
        self.rows = [self.random_rows() for _ in "kv"]  # what the cache has, before the call
        self.arguments = {
            "cache_seqlens": self.seqlens,
            **cases.options_of(mode, BATCH, heads[0], device),
        }
        self.place(place)
        if new:
            shape = (BATCH, new, heads[1], dim)
            k, v = cases.tensors([shape, shape], dtype, device)
            self.arguments |= {"k": k, "v": v}
        self.rotate(*rotary)

    def random_rows(self):
        shape = (BATCH, self.tokens, self.heads[1], self.dim)
        places = torch.arange(self.tokens, device=self.device)[:, None, None]
        begin, end = (x[:, None, None, None] for x in (self.begin, self.seqlens))
        unused = (places < begin) | (places >= end)
        return torch.randn(shape, device=self.device).masked_fill(unused, torch.nan).to(self.dtype)

    def place(self, place):
        """Lay the rows out as caches, and say how they are read back: `self.read(cache)`."""
        if "leftpad" in place:
            self.arguments["cache_leftpad"] = self.begin
        if "pages" in place:
            self.in_pages(512 if "large" in place else 48)
        elif "batch_idx" in place:
            index = torch.randperm(2 * BATCH, device=self.device)[:BATCH]
            self.arguments["cache_batch_idx"] = index.int()
            shape = (2 * BATCH, *self.rows[0].shape[1:])
            self.caches = [self.empty(shape) for _ in "kv"]
            for cache, rows in zip(self.caches, self.rows, strict=True):
                cache[index] = rows
            self.read = lambda cache: cache[index]
        elif place == "layers":  # of one allocation, every layer's row behind the other's
            whole = self.empty((2, BATCH, 3, *self.rows[0].shape[1:]))
            self.caches = [whole[i, :, 1] for i in range(2)]
            for cache, rows in zip(self.caches, self.rows, strict=True):
                cache.copy_(rows)
            self.read = lambda cache: cache
        else:
            self.caches = [rows.clone() for rows in self.rows]
            self.read = lambda cache: cache

    def in_pages(self, page):
        each = -(-self.tokens // page)
        ids = torch.randperm(BATCH * each + 2, device=self.device)[: BATCH * each]
        self.arguments["block_table"] = ids.view(BATCH, each).int()
        self.caches = []
        for rows in self.rows:
            cache = self.empty((BATCH * each + 2, page, *rows.shape[2:]))
            more = self.empty((BATCH, each * page - self.tokens, *rows.shape[2:]))
            cache[ids] = torch.cat((rows, more), dim=1).view(-1, page, *rows.shape[2:])
            self.caches.append(cache)
        self.read = lambda cache: cache[ids].view(BATCH, -1, *cache.shape[2:])[:, : self.tokens]

    def empty(self, shape):
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def rotate(self, fraction, interleaved):
        self.turned_q, new = self.q, [self.arguments.get(name) for name in "kv"]
        dim = int(fraction * self.dim) // 16 * 16
        if self.new and dim:
            angle = torch.rand(2 * self.tokens + 512, dim // 2, device=self.device) * 6.28
            tables = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
            self.arguments |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
            self.arguments["rotary_interleaved"] = interleaved
            start = self.seqlens[:, None]
            places = start + torch.arange(self.new, device=self.device)
            new[0] = rotated(new[0], *tables, places, interleaved)
            options = self.arguments
            places = start + torch.arange(self.q.shape[1], device=self.device)
            if not options.get("causal") and options.get("window_size", (-1, -1)) == (-1, -1):
                places = start.expand_as(places)
            self.turned_q = rotated(self.q, *tables, places, interleaved)
        self.after = [rows.clone() for rows in self.rows]
        for b in range(BATCH if self.new else 0):
            for rows, x in zip(self.after, new, strict=True):
                rows[b, self.seqlens[b] : self.end[b]] = x[b]

    def check(self, return_lse=True):
        out = flash_attn_with_kvcache(
            self.q, *self.caches, **self.arguments, return_softmax_lse=return_lse
        )
        names = ("causal", "window_size", "softcap", "softmax_scale", "alibi_slopes")
        options = {n: self.arguments[n] for n in names if n in self.arguments}
        clean = [x.nan_to_num(0) for x in self.after]
        limits = {"begin": self.begin, "end": self.end, **options}
        exact, lse = cases.formula(self.turned_q, *clean, **limits)
        plain, _ = cases.formula(self.turned_q, *clean, self.dtype, **limits)
        if return_lse:
            out, found = out
            cases.assert_lse(found, lse)
        cases.assert_near(out, exact, plain, self.dtype)
        for i, cache in enumerate(self.caches):
            self.check_cache(self.read(cache), self.after[i], rotated=i == 0)
        return out

    def check_cache(self, found, wanted, rotated):
        assert torch.equal(found.isnan(), wanted.isnan())
        new = torch.arange(self.tokens, device=self.device)
        new = (new >= self.seqlens[:, None]) & (new < self.end[:, None])
        old = ~new & ~wanted.isnan().any(-1).any(-1)
        assert torch.equal(found[old], wanted[old])
        if not rotated or "rotary_cos" not in self.arguments:
            assert torch.equal(found[new], wanted[new])
            return
        near = 4 * torch.finfo(self.dtype).eps
        torch.testing.assert_close(found[new], wanted[new], atol=near, rtol=near)


GRID = [
    (place, dim, cases.HEADS[i % 3], ROTARY[i % 5], LENGTHS[i % 7], list(cases.MODES)[i % 11])
    for i, (dim, place) in enumerate((d, p) for d in DIMS for p in PLACES for _ in range(2))
]


@pytest.mark.parametrize(
    ("place", "dim", "heads", "rotary", "lengths", "mode"),
    [(p, d, h, r, n, m) for p, d, h, r, n, m in GRID],
)
def test_new_tokens_are_written_and_seen(device, place, dim, heads, rotary, lengths, mode):
    index = GRID.index((place, dim, heads, rotary, lengths, mode))
    dtype = cases.DTYPES[index % 3]
    new = (0, lengths[0], max(1, lengths[0] // 2), lengths[0] + 3)[index % 4]
    new = min(new, lengths[1] - lengths[0])
    Call(device, dtype, place, dim, heads, rotary, lengths, new, mode).check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("new", [0, 1])
def test_a_decode_step_of_each_cache(device, place, new):
    for dtype in cases.DTYPES:
        call = Call(device, dtype, place, 64, (8, 2), (1.0, False), (1, 512), new, "causal")
        call.check(return_lse=False)


@pytest.mark.parametrize("mode", ["plain", "causal", "left"])
@pytest.mark.parametrize(("length", "new"), [(3, 1), (1, 3), (3, 3), (5, 2)])
def test_queries_and_keys_are_rotated_at_their_own_places(device, mode, length, new):
    for dtype in (torch.float32, torch.bfloat16):
        for place in ("rows", "pages"):
            rotary, lengths = (1.0, True), (length, 96)
            Call(device, dtype, place, 40, (4, 2), rotary, lengths, new, mode).check()


def plain_call(length=1, tokens=64, dim=16, heads=2, batch=2):
    q = torch.randn(batch, length, heads, dim)
    k, v = torch.randn(2, batch, tokens, heads, dim)
    return q, k, v


def test_lengths_may_be_a_number_or_all(device):
    q, k, v = (x.to(device) for x in plain_call(3))
    for given, tokens in ((7, 7), (None, 64), (64, 64), (0, 0)):
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, return_softmax_lse=True)
        if tokens == 0:
            assert (out == 0).all()
            assert (lse == -torch.inf).all()
            continue
        want, want_lse = cases.formula(q, k[:, :tokens], v[:, :tokens])
        torch.testing.assert_close(out, want.float())
        cases.assert_lse(lse, want_lse)
    assert torch.equal(
        flash_attn_with_kvcache(q, k, v, cache_seqlens=7),
        flash_attn_with_kvcache(
            q, k, v, cache_seqlens=torch.full((2,), 7, dtype=torch.int32, device=device)
        ),
    )


def test_steps_of_one_token_are_a_prompt_at_once(device):
    q, k, v = torch.randn(3, 2, 9, 4, 40, device=device)
    caches = [torch.full((2, 32, 4, 40), torch.nan, device=device) for _ in "kv"]
    cos, sin = torch.randn(2, 32, 16, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    steps = []
    for i in range(9):
        one = [x[:, i : i + 1] for x in (k, v)]
        steps.append(
            flash_attn_with_kvcache(
                q[:, i : i + 1], *caches, *one, cos, sin, cache_seqlens=lengths, causal=True
            )
        )
        lengths += 1
    others = [torch.zeros(2, 32, 4, 40, device=device) for _ in "kv"]
    want = flash_attn_with_kvcache(q, *others, k, v, cos, sin, cache_seqlens=0, causal=True)
    torch.testing.assert_close(torch.cat(steps, dim=1), want)
    for cache, other in zip(caches, others, strict=True):
        assert torch.equal(cache[:, :9], other[:, :9])
        assert cache[:, 9:].isnan().all()


def test_caches_that_cannot_be_cut_are_read_where_they_lie(device):
    q, k, v = (x.to(device) for x in plain_call(2, tokens=300))
    want = flash_attn_with_kvcache(q, k, v, cache_seqlens=123, causal=True)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    apart = [torch.nn.functional.pad(x.flatten(1), (0, 24))[:, :-24].view_as(x) for x in (k, v)]
    expanded = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    for caches in (heads_first, apart):
        assert caches[0].stride() != k.stride()
        got = flash_attn_with_kvcache(q, *caches, cache_seqlens=123, causal=True)
        torch.testing.assert_close(got, want)
    got = flash_attn_with_kvcache(q, *expanded, cache_seqlens=123, causal=True)
    torch.testing.assert_close(got[0], want[0])
    index = torch.tensor([0, 0], dtype=torch.int32, device=device)
    # Two sequences split their keys otherwise than one does.
    torch.testing.assert_close(
        flash_attn_with_kvcache(q, k, v, cache_seqlens=123, cache_batch_idx=index)[0],
        flash_attn_with_kvcache(q[:1], k, v, cache_seqlens=123, cache_batch_idx=index[:1])[0],
    )


@pytest.mark.parametrize(("batch", "new"), [(0, 1), (2, 0), (0, 0)])
def test_no_sequence_and_no_token_are_taken(device, batch, new):
    q, k, v = (x.to(device) for x in plain_call(1, batch=batch))
    before, tables = k.clone(), torch.ones(2, 64, 4, device=device)
    added = torch.randn(2, batch, new, 2, 16, device=device)
    out = flash_attn_with_kvcache(q, k, v, *added, *tables, cache_seqlens=5, causal=True)
    assert out.shape == q.shape
    if new == 0:
        assert torch.equal(k, before)
        turned = rotated(q, *tables, torch.full((batch, 1), 5, device=device), True)
        want = cases.formula(turned, k, v, end=torch.full((batch,), 5, device=device))
        torch.testing.assert_close(out, want[0].float())


def test_num_splits_is_a_wish(device):
    q, k, v = (x.to(device) for x in plain_call(1, tokens=2048))
    want = flash_attn_with_kvcache(q, k, v)
    for num_splits in (-1, 0, 1, 3, 200):
        got = flash_attn_with_kvcache(q, k, v, num_splits=num_splits)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("page", [16, 512, 1024])
@pytest.mark.parametrize("entry", [-1, 4, 2**30, 2**30 + 1, -(2**30), -(2**31), 2**31 - 1])
def test_a_page_that_is_not_there_is_nobodys(page, entry, length):
    """Where pages are cut, its product with their number wraps to the page of another sequence."""
    q, new = torch.randn(2, length, 2, 16), torch.ones(2, 1, 2, 16)
    kv = [torch.zeros(4, page, 2, 16) for _ in range(2)]

    def call(lengths, table):
        lengths, table = (torch.tensor(x, dtype=torch.int32) for x in (lengths, table))
        flash_attn_with_kvcache(q, *kv, new, new, cache_seqlens=lengths, block_table=table)

    read, written = [[entry, 1], [2, 0]], [[3, entry], [2, 0]]
    for lengths, table in (([5, 3], read), ([page + 5, 3], read), ([page + 5, 3], written)):
        with pytest.raises(ValueError, match=r"block_table must be from 0 to 3, the pages of"):
            call(lengths, table)
        assert not any(x.any() for x in kv)
    call([5, 3], [[3, entry], [2, entry]])  # no token is there
    assert kv[0][..., 0, 0].nonzero().tolist() == [[2, 3], [3, 5]]


def test_an_id_that_is_no_page_becomes_none_that_a_device_reads_unchecked():
    kv = torch.zeros(4, 1024, 2, 16)
    table = torch.tensor([[-1, 4, 2**30, 2**30 + 1, -(2**30), -(2**31), 2**31 - 1]]).int()
    pages = Pages("test", kv, kv.clone(), table)
    assert pages.size < 1024  # cut
    names = pages.tables()
    assert ((names < 0) | (names >= len(pages.k))).all()


def test_entries_that_alternate_in_memory_are_written_up_to_256_tokens():
    new, lengths = torch.ones(2, 1, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
    call = functools.partial(flash_attn_with_kvcache, k=new, v=new, cache_seqlens=lengths)
    for leftpad in (None, torch.tensor([1, 2], dtype=torch.int32)):
        kv = torch.zeros(2, 2, 256, 2, 16).unbind(1)
        call(new, *kv, cache_leftpad=leftpad)
        assert kv[0][..., 0, 0].nonzero().tolist() == [[0, 3], [1, 5]]
    kv = torch.zeros(2, 2, 257, 2, 16).unbind(1)
    with pytest.raises(NotImplementedError, match=r"must not lie k, v, k, v in memory, got 257"):
        call(new, *kv)


def test_numbers_beyond_every_cache_are_taken():
    new, kv = torch.ones(2, 1, 2, 16), [torch.zeros(2, 64, 2, 16) for _ in range(2)]
    given = {"cache_seqlens": 5, "num_splits": 2**63, "window_size": (2**70, 2**63)}
    out = flash_attn_with_kvcache(new, *kv, new, new, **given)
    assert kv[0][..., 0, 0].nonzero().tolist() == [[0, 5], [1, 5]]
    assert torch.equal(out, flash_attn_with_kvcache(new, *kv, cache_seqlens=6))


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="no CUDA")
@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_captured_and_replayed_with_other_lengths(place):
    """So nothing waits for the device, and lengths are read there."""
    made = [
        Call("cuda", torch.float16, place, 64, (8, 2), (1.0, True), (1, 512), 1, "causal")
        for _ in range(2)
    ]
    first, second = made
    names = [n for n, x in first.arguments.items() if isinstance(x, torch.Tensor)]
    static = {n: first.arguments[n].clone() for n in names}
    q, caches = first.q.clone(), [torch.empty_like(x) for x in first.caches]
    arguments = {**first.arguments, **static}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attn_with_kvcache(q, *caches, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        out = flash_attn_with_kvcache(q, *caches, **arguments)
    for call in (second, first):
        q.copy_(call.q)
        for name in names:
            static[name].copy_(call.arguments[name])
        for cache, given in zip(caches, call.caches, strict=True):
            cache.copy_(given)
        graph.replay()
        assert torch.equal(out, call.check(return_lse=False))


Q, K, V = plain_call()
NEW = Q.clone()
TABLE = torch.zeros(2, 1, dtype=torch.int32)
COS = torch.zeros(64, 4)
INTS = torch.tensor([3, 4], dtype=torch.int32)
REFUSED = [
    ((Q[0], K, V), {}, ValueError, "q must have 4 axes"),
    ((Q, K, V[..., :8]), {}, ValueError, "k_cache and v_cache must have the same shape"),
    ((Q, K[:, :, :0], V[:, :, :0]), {}, ValueError, "multiple of the 0 heads of k_cache"),
    ((Q, K.half(), V), {}, ValueError, "k_cache must be torch.float32 on cpu like q"),
    ((Q, K[:1], V[:1]), {}, ValueError, "k_cache must have the 2 sequences of q, got 1"),
    ((Q, K.mT.contiguous().mT, V), {}, ValueError, "k_cache must be contiguous in its last axis"),
    ((Q, K, V, NEW), {"cache_seqlens": 1}, ValueError, "k and v must be given together"),
    ((Q, K, V, NEW, NEW), {}, ValueError, "cache_seqlens must be given with k and v"),
    (
        (Q, K, V, NEW[..., :8], NEW),
        {"cache_seqlens": 1},
        ValueError,
        r"k must be .*\[2, 1, 2, 16\]",
    ),
    ((Q, K, V, NEW, NEW), {"cache_seqlens": 64}, ValueError, "cache_seqlens must be from 0 to 63"),
    ((Q, K, V, NEW, NEW), {"cache_seqlens": 21 * INTS}, ValueError, r"cache_seqlens .*\[63, 84\]"),
    ((Q, K, V), {"cache_seqlens": -INTS}, ValueError, "cache_seqlens must be from 0 to 64"),
    ((Q, K, V), {"cache_seqlens": 1.5}, TypeError, "cache_seqlens must be an int or an int32"),
    ((Q, K, V), {"cache_seqlens": INTS.long()}, ValueError, r"pass cache_seqlens.int\(\)"),
    ((Q, K, V), {"cache_seqlens": INTS[:1]}, ValueError, r"cache_seqlens .*tensor \[2\], got sha"),
    ((Q, K, V), {"cache_batch_idx": INTS}, ValueError, "cache_batch_idx must be from 0 to 1"),
    ((Q, K, V), {"cache_leftpad": 30 * INTS}, ValueError, "cache_leftpad must be from 0 to cache"),
    (
        (Q, K, V),
        {"cache_leftpad": INTS, "block_table": TABLE},
        NotImplementedError,
        "cache_leftpad must be None with block_table",
    ),
    (
        (Q, K, V),
        {"cache_batch_idx": INTS, "block_table": TABLE},
        NotImplementedError,
        "cache_batch_idx must be None with block_table",
    ),
    ((Q, K, V), {"block_table": TABLE[:1]}, ValueError, r"block_table must be .*tensor \[2, n\]"),
    ((Q, K, V), {"rotary_cos": COS, "rotary_sin": COS}, ValueError, "together, and with k and v"),
    (
        (Q, K, V, NEW, NEW, COS),
        {"cache_seqlens": 1},
        ValueError,
        "rotary_cos and rotary_sin must be given together",
    ),
    (
        (Q, K, V, NEW, NEW, COS[:60], COS[:60]),
        {"cache_seqlens": 1},
        ValueError,
        "seqlen_ro at least the 64 tokens of the cache",
    ),
    (
        (Q, K, V, NEW, NEW, COS, COS[:, :2]),
        {"cache_seqlens": 1},
        ValueError,
        "rotary_sin must be a float tensor",
    ),
    (
        (Q, K.transpose(1, 2).contiguous().transpose(1, 2), V, NEW, NEW),
        {"cache_seqlens": 1},
        NotImplementedError,
        "k_cache is written, so the heads of a token must lie side by side",
    ),
    ((Q, K, V), {"window_size": (1, 2, 3)}, ValueError, "window_size must hold two integers"),
    ((Q, K, V), {"num_splits": "2"}, TypeError, "num_splits must be a whole number, got '2'"),
    *(  # what attention would refuse after the new tokens were written
        ((Q, K, V, NEW, NEW), {"cache_seqlens": 1, **wrong}, error, message)
        for wrong, error, message in (
            (
                {"alibi_slopes": COS[:3, 0]},
                ValueError,
                r"tensor \[2\] or \[2, 2\] on cpu.*got .*\[3\]",
            ),
            ({"alibi_slopes": COS[:2, 0].half()}, ValueError, "must be a float32 tensor.*float16"),
            ({"alibi_slopes": [1.0, 2.0]}, TypeError, "must be a float32 tensor.*got list"),
            ({"alibi_slopes": COS[:2, 0].clone().requires_grad_()}, NotImplementedError, "no_grad"),
            ({"softcap": 1e39}, ValueError, r"softcap must be finite in float32, got 1e\+39"),
        )
    ),
    ((Q.clone().requires_grad_(), K, V), {}, NotImplementedError, r"call it under torch.no_grad"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_flash_attns_names(arguments, options, error, message):
    before = [x.clone() for x in (K, V)]
    with pytest.raises(error, match=message) as refused:
        flash_attn_with_kvcache(*arguments, **options)
    assert str(refused.value).startswith("flash_attn_with_kvcache: ")
    assert "\n" not in str(refused.value)
    assert all(torch.equal(a, b) for a, b in zip(before, (K, V), strict=True))
