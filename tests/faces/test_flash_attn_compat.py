# SPDX-License-Identifier: Apache-2.0
"""cuattn.compat.flash_attn without a cache: flash-attn's signatures, numbers and gradients.

The published tests of flash-attn in spirit: odd lengths, head sizes that are no multiple of 8,
grouped heads, windows, ALiBi and softcap, forward and backward, against the formula.
"""

from __future__ import annotations

import inspect

import pytest

import flash_attn_cases as cases
import frameworks
import harness

torch = frameworks.require("torch")
from cuattn.compat import flash_attn  # noqa: E402  after what it needs

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
MASK = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"
END = f"{MASK}, alibi_slopes=None, deterministic=False, return_attn_probs=False"
RAGGED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0"
SIGNATURES = {  # of flash-attn 2.8.4, flash_attn/flash_attn_interface.py
    "flash_attn_func": f"q, k, v, dropout_p=0.0, {END}",
    "flash_attn_kvpacked_func": f"q, kv, dropout_p=0.0, {END}",
    "flash_attn_qkvpacked_func": f"qkv, dropout_p=0.0, {END}",
    "flash_attn_varlen_func": f"q, k, v, {RAGGED}, {END}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {RAGGED}, {END}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, dropout_p=0.0, {END}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        f"{MASK}, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_signatures_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    words = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert ", ".join(words) == SIGNATURES[name]


def test_every_function_of_flash_attn_is_here():
    assert set(flash_attn.__all__) == set(SIGNATURES)


def gradients(out, leaves, dout):
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def judge(found, leaves, dout, dtype, options):
    """out, lse and the gradients of leaves, against the formula and its evaluation in the dtype."""
    (out, lse), exact, plain = (
        found,
        cases.formula(*leaves, **options),
        cases.formula(*leaves, dtype, **options),
    )
    roundings = cases.roundings_of(*leaves[:2], **options)
    cases.assert_near(out, exact[0], plain[0], dtype, roundings=roundings)
    cases.assert_lse(lse, exact[1])
    moved = cases.moved_by_rounded_out(out, *exact, leaves, dout)
    wanted = (gradients(x[0], leaves, dout) for x in (exact, plain))
    rows = zip("qkv", gradients(out, leaves, dout), moved, *wanted, strict=True)
    for name, gradient, more, *two in rows:
        cases.assert_near(gradient.double() - more, *two, dtype, f"d{name}", roundings)


GRID = cases.numbered(cases.HEAD_DIMS, cases.MODES, cases.LENGTHS, cases.HEADS)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "mode", "lengths", "heads"), GRID)
def test_a_batch_is_the_formula(device, dtype, dim, mode, lengths, heads):
    shapes = [(2, n, h, dim) for n, h in zip((*lengths, lengths[1]), (*heads, heads[1]), strict=1)]
    q, k, v = cases.tensors(shapes, dtype, device, grad=True)
    options = cases.options_of(mode, 2, heads[0], device)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert out.dtype == dtype
    assert probabilities.shape == (0,)
    judge((out, lse), (q, k, v), torch.randn_like(out), dtype, options)
    with torch.no_grad():
        same = flash_attn.flash_attn_func(q, k, v, **options)
    assert torch.equal(same, out)


def ragged(lengths, device):
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return ends, max(lengths)


def padded(x, lengths):
    """[total, ...] as [batch, longest, ...], zeros behind a sequence."""
    return torch.nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True)


def unpadded(x, lengths):
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


RAGGED_GRID = cases.numbered(cases.HEAD_DIMS, cases.MODES, cases.HEADS, cases.DTYPES)


@pytest.mark.parametrize(("dim", "mode", "heads", "dtype"), RAGGED_GRID)
def test_ragged_sequences_are_the_formula(device, dtype, dim, mode, heads):
    rows, keys = [5, 0, 33, 1], [9, 7, 20, 31]
    shapes = [(sum(rows), heads[0], dim), *[(sum(keys), heads[1], dim)] * 2]
    leaves = cases.tensors(shapes, dtype, device, grad=True)
    options = cases.options_of(mode, 4, heads[0], device)
    (ends_q, longest_q), (ends_k, longest_k) = ragged(rows, device), ragged(keys, device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *leaves, ends_q, ends_k, longest_q, longest_k, return_attn_probs=True, **options
    )
    limits = {
        "rows": torch.tensor(rows, device=device),
        "end": torch.tensor(keys, device=device),
        **options,
    }
    dout, results = torch.randn_like(out), []
    for kind in (torch.float64, dtype):
        batch = [padded(x, n) for x, n in zip(leaves, (rows, keys, keys), strict=True)]
        want, want_lse = cases.formula(*batch, kind, **limits)
        want = unpadded(want, rows)
        if kind == torch.float64:
            want_lse = unpadded(want_lse.transpose(1, 2), rows).T
            cases.assert_lse(lse, want_lse)
            moved = cases.moved_by_rounded_out(out, want, want_lse, leaves, dout)
        results.append((want, *gradients(want, leaves, dout)))
    pairs = zip(gradients(out, leaves, dout), moved, strict=True)
    found = (out, *(gradient.double() - more for gradient, more in pairs))
    roundings = cases.roundings_of(*leaves[:2], **options)
    for name, *three in zip(("out", "dq", "dk", "dv"), found, *results, strict=True):
        cases.assert_near(*three, dtype, name, roundings)


@pytest.mark.parametrize("page", [16, 48, 256, 512, 257])
@pytest.mark.parametrize(("dim", "rows"), [(64, [5, 1, 17]), (59, [1, 1, 1]), (128, [70, 3, 40])])
def test_ragged_queries_over_pages_are_those_over_rows(device, page, dim, rows):
    keys = [90, 1, 600]
    q, k, v = cases.tensors(
        [(sum(rows), 4, dim), (3, 1024, 2, dim), (3, 1024, 2, dim)], torch.float32, device
    )
    caches, table = in_pages((k, v), page, device)
    packed = [unpadded(x, keys) for x in (k, v)]
    (ends_q, longest_q), (ends_k, longest_k) = ragged(rows, device), ragged(keys, device)
    numbers = (ends_q, ends_k, longest_q, longest_k)
    options = {"causal": True, "window_size": (200, -1), "softcap": 9.0}
    want = flash_attn.flash_attn_varlen_func(q, *packed, *numbers, **options)
    got = flash_attn.flash_attn_varlen_func(q, *caches, *numbers, **options, block_table=table)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def in_pages(caches, page, device):
    """Shuffled pages that hold [batch, tokens, ...], NaN where nothing is, and their table."""
    batch, tokens = caches[0].shape[:2]
    each = -(-tokens // page)
    table = torch.randperm(batch * each + 3, device=device)[: batch * each].view(batch, each)
    made = []
    for cache in caches:
        pages = torch.full((batch * each + 3, page, *cache.shape[2:]), torch.nan, device=device)
        whole = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, each * page - tokens))
        pages[table.flatten()] = whole.reshape(-1, page, *cache.shape[2:])
        made.append(pages)
    return made, table.int()


@pytest.mark.parametrize("dim", [32, 59])
def test_packed_tensors_give_the_bits_and_gradients_of_three(device, dim):
    qkv = torch.randn(2, 13, 3, 4, dim, device=device, requires_grad=True)
    ends = torch.tensor([0, 13, 26], dtype=torch.int32, device=device)
    flat = qkv.flatten(0, 1)
    calls = {
        "flash_attn_func": qkv.unbind(2),
        "flash_attn_kvpacked_func": (qkv[:, :, 0], qkv[:, :, 1:]),
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_varlen_func": (*flat.unbind(1), ends, ends, 13, 13),
        "flash_attn_varlen_kvpacked_func": (flat[:, 0], flat[:, 1:], ends, ends, 13, 13),
        "flash_attn_varlen_qkvpacked_func": (flat, ends, 13),
    }
    results = {}
    for name, arguments in calls.items():
        out, lse, _ = getattr(flash_attn, name)(
            *arguments, causal=True, softcap=7.0, deterministic=True, return_attn_probs=True
        )
        (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
        results[name] = (out.reshape(2, 13, 4, dim), gradient, lse.flatten().sort().values)
    first = results.pop("flash_attn_func")
    for found in results.values():
        for a, b in zip(found, first, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("ragged_call", [False, True])
def test_dropout_is_drawn_from_torchs_generator_and_has_its_gradient(ragged_call):
    leaves = cases.tensors([(1, 24, 2, 32)] * 3, torch.float32, "cpu", grad=True)
    ends = torch.tensor([0, 24], dtype=torch.int32)

    def call(q, k, v):
        torch.manual_seed(5)
        if not ragged_call:
            return flash_attn.flash_attn_func(q, k, v, dropout_p=0.25, causal=True)
        rows = (x.squeeze(0) for x in (q, k, v))
        numbers = (ends, ends, 24, 24)
        return flash_attn.flash_attn_varlen_func(*rows, *numbers, 0.25, causal=True)[None]

    unit = torch.eye(24, 32)[None, :, None].expand(1, 24, 2, 32)
    weights = call(*leaves[:2], unit).detach().transpose(1, 2)[..., :24]
    kept = weights != 0
    share = kept.sum() / torch.ones(24, 24).tril().sum() / 2
    assert 0.65 < share < 0.85
    out, dout = call(*leaves), torch.randn(1, 24, 2, 32)
    want, _ = cases.formula(*leaves, causal=True, kept=kept, dropout_p=0.25)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    pairs = zip(gradients(out, leaves, dout), gradients(want, leaves, dout), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    torch.manual_seed(6)
    assert not torch.equal(flash_attn.flash_attn_func(*leaves, 0.25, causal=True), out)


def test_gradients_reach_the_slopes_and_start_from_lse(device):
    leaves = cases.tensors([(2, 9, 4, 40)] * 3, torch.float32, device, grad=True)
    slopes = torch.rand(4, device=device, requires_grad=True)
    found, wanted = [], []
    for results, function in ((found, flash_attn.flash_attn_func), (wanted, cases.formula)):
        options = {} if function is cases.formula else {"return_attn_probs": True}
        out, lse = function(*leaves, alibi_slopes=slopes, **options)[:2]
        loss = out.sum() + lse.square().sum()
        results.extend(torch.autograd.grad(loss, (*leaves, slopes)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-4, rtol=1e-4)


def test_deterministic_reaches_the_way_back(monkeypatch):
    from cuattn import _core

    seen = []
    run = _core.attention_backward
    monkeypatch.setattr(
        _core,
        "attention_backward",
        lambda arguments: seen.append(arguments.get("deterministic")) or run(arguments),
    )
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    for wanted in (False, True):
        flash_attn.flash_attn_func(x, x, x, deterministic=wanted).sum().backward()
        rows = [x[0]] * 3
        out = flash_attn.flash_attn_varlen_func(*rows, ends, ends, 5, 5, deterministic=wanted)
        out.sum().backward()
    assert seen == [None, None, True, True]


def test_rows_that_kernels_do_not_read_are_copied(device):
    wide = torch.randn(2, 4, 24, 9, device=device)
    q = wide.transpose(1, 3)[..., :4]  # the last axis is not the innermost
    k = torch.randn(2, 9, 24, 12, device=device)[..., 3:7].expand(2, 9, 24, 4)
    options = {"causal": True}
    got = flash_attn.flash_attn_func(q, k, k, **options)
    torch.testing.assert_close(got, cases.formula(q, k, k, **options)[0].float())
    q8 = torch.randn(2, 8, 4, 9, device=device).permute(0, 3, 2, 1)
    got = flash_attn.flash_attn_func(q8, q8, q8)
    torch.testing.assert_close(got, cases.formula(q8, q8, q8)[0].float())


def test_a_compiled_step_has_no_graph_break(device):
    torch.compiler.reset()

    def step(q, k, v, ends):
        out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 0))
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return out.sum() + flash_attn.flash_attn_varlen_func(*rows, ends, ends, 7, 7).sum()

    leaves = cases.tensors([(2, 7, 2, 20)] * 3, torch.float32, device, grad=True)
    ends = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves, ends), leaves)
    for a, b in zip(found, torch.autograd.grad(step(*leaves, ends), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_step_over_pages_is_the_eager_one(device):
    torch.compiler.reset()
    q, k, v = cases.tensors([(5, 2, 32), *[(4, 16, 2, 32)] * 2], torch.float32, device)
    ints = {"dtype": torch.int32, "device": device}
    ends_q, ends_k = torch.tensor([0, 2, 5], **ints), torch.tensor([0, 10, 30], **ints)
    table = torch.tensor([[3, 0], [2, 1]], **ints)

    def step(q):
        given = q * 2, k, v, ends_q, ends_k, 3, 20
        return flash_attn.flash_attn_varlen_func(*given, causal=True, block_table=table) + 1

    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(q), step(q))


X = torch.zeros(2, 5, 4, 16)
ROWS, ENDS = X.flatten(0, 1), torch.tensor([0, 5, 10], dtype=torch.int32)
REFUSED = [
    ("flash_attn_func", (X.numpy(), X, X), {}, TypeError, "q must be a torch tensor"),
    ("flash_attn_func", (X, X[0], X), {}, ValueError, "k must have 4 axes"),
    ("flash_attn_func", [torch.zeros(1, 2, 2, 257)] * 3, {}, ValueError, "head_dim at most 256"),
    ("flash_attn_func", (X, X, X), {"window_size": 3}, ValueError, "window_size must hold two"),
    ("flash_attn_func", (X, X, X), {"softmax_scale": "a"}, TypeError, "softmax_scale must be a n"),
    (
        "flash_attn_func",
        (X, X, X),
        {"softmax_scale": float("nan")},
        ValueError,
        "softmax_scale must be finite",
    ),
    ("flash_attn_func", (X, X, X), {"softcap": float("inf")}, ValueError, "softcap must be fin"),
    ("flash_attn_func", (X, X, X), {"alibi_slopes": X[0, 0, :3, 0]}, ValueError, "alibi_slopes"),
    (
        "flash_attn_func",
        (X, X, X),
        {"dropout_p": 0.1, "return_attn_probs": True},
        NotImplementedError,
        "return_attn_probs must be False with dropout_p=0.1",
    ),
    ("flash_attn_func", (X, X, X), {"dropout_p": 1.5}, ValueError, "dropout_p"),
    ("flash_attn_kvpacked_func", (X, X), {}, ValueError, "kv must have 5 axes"),
    ("flash_attn_qkvpacked_func", (X[:, None],), {}, ValueError, "qkv must hold 3 tensors"),
    (
        "flash_attn_varlen_func",
        (ROWS, ROWS, ROWS, ENDS.long(), ENDS, 5, 5),
        {},
        ValueError,
        "cu_seqlens_q must be an int32 tensor",
    ),
    (
        "flash_attn_varlen_func",
        (ROWS, ROWS, ROWS, ENDS, None, 5, 5),
        {},
        TypeError,
        "cu_seqlens_k must be an int32 tensor",
    ),
    (
        "flash_attn_varlen_func",
        (ROWS, X, X, ENDS, ENDS, 5, 5),
        {"block_table": ENDS},
        ValueError,
        "block_table must be an int32 tensor",
    ),
    ("flash_attn_varlen_qkvpacked_func", (ROWS, ENDS, 5), {}, ValueError, "qkv must have 4|hold 3"),
    *[
        (
            "flash_attn_varlen_func",
            (ROWS, ROWS, ROWS, ENDS, ENDS, 5, 5),
            {name: None},
            TypeError,
            name,
        )
        for name in ("seqused_k", "leftpad_k", "zero_tensors")  # of its private functions alone
    ],
]


@pytest.mark.parametrize(("name", "arguments", "options", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_flash_attns_names(name, arguments, options, error, message):
    with pytest.raises(error, match=message) as refused:
        getattr(flash_attn, name)(*arguments, **options)
    assert "\n" not in str(refused.value)


def test_no_gradient_goes_through_pages():
    pages = torch.zeros(3, 256, 4, 16, requires_grad=True)
    table = torch.zeros(2, 1, dtype=torch.int32)
    arguments = (ROWS, pages, pages, ENDS, ENDS, 5, 5)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: block_table: no grad"):
        flash_attn.flash_attn_varlen_func(*arguments, block_table=table)
    with torch.no_grad():
        flash_attn.flash_attn_varlen_func(*arguments, block_table=table)
