# SPDX-License-Identifier: Apache-2.0
"""Masks and scores of a user in the kernel for Hoppers: many tiles, every option beside them."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

import cuattn
import flex_cases
import harness
from cuattn.flex import device as flex_device
from cuattn.flex.attention import find_for, problem_of
from cuattn.flex.form import capped
from cuattn.flex.trace import trace

TARGETS = harness.target_params(cpu=(), cuda=("sm90",))
DIMS = (
    *((64, 64), (128, 128), (40, 24), (96, 128)),
    *((192, 128), (256, 256), (192, 192), (136, 200)),
)
OPTIONS = ({}, {"causal": True}, {"window": (200, 150)}, {"num_splits": 3}, {"scale": 0.3})


def to_device(x):
    import torch

    return torch.from_numpy(x).to("cuda")


def on_device(options):
    return {n: to_device(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def on_device_int32(arrays):
    return [to_device(x.astype(np.int32)) for x in arrays]


def within(options, distance):
    """What causal and window leave, by how far a key stands before the query."""
    left, right = options.get("window", (-1, 0 if options.get("causal") else -1))
    return ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))


def hold(got, want, dtype, where):
    """Hold out and lse, heads first, to those of float64."""
    (out, lse), (want_out, want_lse) = got, want
    out = np.asarray(out.float().cpu(), np.float64).transpose(0, 2, 1, 3)
    lse = np.asarray(lse.cpu(), np.float64)
    most = {"float16": 6e-3, "bfloat16": 4e-2}[dtype]
    np.testing.assert_allclose(out, want_out, atol=most, rtol=most, err_msg=where)
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(want_lse), err_msg=where)
    some = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[some], want_lse[some], atol=2e-3, rtol=1e-5, err_msg=where)


def arrays_of(rng, dtype, *shapes):
    """Random arrays of a 16-bit dtype on the device, and the same as float64."""
    import torch

    made = [torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    made = [x.to(getattr(torch, dtype)) for x in made]
    return [x.to("cuda") for x in made], [x.double().numpy() for x in made]


@pytest.mark.parametrize("part", range(4))  # each function takes a second to compile
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_generated_functions_of_many_tiles(rng, device, backend, part):
    for case in range(part, 32, 4):
        dims, dtype = DIMS[case // 4], ("float16", "bfloat16")[case % 2]
        heads_kv, group = int(rng.integers(1, 3)), (1, 4, 2, 16)[case % 4]
        few = (case + case // 4) % 2 == 1  # queries, so that heads of a group share tiles
        q_len, kv_len = (int(rng.integers(1, n)) for n in (40 if few else 900, 900))
        heads = heads_kv * group
        make = flex_cases.Generator(rng, 2, heads, q_len, kv_len)
        mask = None if case % 5 == 4 else make.mask(1 + case % 3)
        mod = make.score() if case % 3 else None
        options = dict(OPTIONS[case // 3 % 5])
        if case % 7 == 1:
            options["sinks"] = rng.standard_normal(heads).astype(np.float32)
        shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
        arrays, wide = arrays_of(rng, dtype, *((2, *s) for s in shapes))

        def seen(b, h, i, j, o=options, m=mask, n=(q_len, kv_len)):
            given = {} if m is None else flex_cases.lengths_asked(m, *n)
            return within(o, i + n[1] - n[0] - j) & (True if m is None else m(b, h, i, j, **given))

        others = {n: x for n, x in options.items() if n in ("scale", "sinks")}
        want = flex_cases.attention(
            *map(flex_cases.heads_first, wide), mask=seen, mod=mod, **others
        )
        got = cuattn.flex_attention(
            *arrays,
            mask_mod=mask,
            score_mod=mod,
            backend=backend,
            return_lse=True,
            **on_device(options),
        )
        where = f"case {case}: {dims} {dtype}, {q_len} x {kv_len}, group {group}, {list(options)}"
        words = [cuattn.flex.trace(f, f is mod) for f in (mask, mod) if f is not None]
        hold(got, want, dtype, f"{where}: {words}")


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_rows_of_few_queries(rng, device, backend):
    """Row ranges of all heads, whose rows share tiles, and of each head."""
    for case in range(8):
        group, dim = (4, 16)[case % 2], (64, 128)[case // 2 % 2]
        q_len, kv_len = (int(rng.integers(1, n)) for n in (40, 900))
        low = rng.integers(0, kv_len, (2, 2 * group)).astype(np.int32)

        def mask(b, h, q, k, x=low, of_heads=case >= 4):
            return (k >= x[b, h if of_heads else 0] - q) & (k < x[b, 1] + 3 * q)

        shapes = ((2, q_len, 2 * group, dim), *[(2, kv_len, 2, dim)] * 2)
        arrays, wide = arrays_of(rng, "bfloat16", *shapes)
        want = flex_cases.attention(*map(flex_cases.heads_first, wide), mask=mask)
        got = cuattn.flex_attention(*arrays, mask_mod=mask, return_lse=True, backend=backend)
        hold(got, want, "bfloat16", f"case {case}: {q_len} x {kv_len}, group {group}, {dim}")
        plan = cuattn.explain("flex_attention", *arrays, mask_mod=mask)
        assert (plan.mask, plan.packed_heads) == ("rows", 1 if case >= 4 else group)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_lists_of_blocks_of_each_head(rng, device, backend):
    """Random blocks of several sizes, with whole rows and columns empty, in causal tiles too."""
    for case in range(12):
        size = (128, 256, 64)[case % 3]
        dim, dim_v = ((64, 64), (128, 128), (192, 128), (256, 256))[case % 4]
        q_len, kv_len = (int(n) for n in rng.integers(300, 1500, 2))
        counts = (-(-q_len // size), -(-kv_len // size))
        blocks = rng.random((2, 4, *counts)) < (0.1, 0.5, 0.9)[case // 2 % 3]
        blocks[:, :, rng.integers(counts[0])] = False
        blocks[:, :, :, rng.integers(counts[1])] = False
        options = {"causal": True} if case % 5 == 3 else {}
        mask = lambda b, h, q, k, x=blocks, n=size: x[b, h, q // n, k // n]  # noqa: E731
        shapes = ((2, q_len, 4, dim), (2, kv_len, 2, dim), (2, kv_len, 2, dim_v))
        arrays, wide = arrays_of(rng, "float16", *shapes)
        dense = flex_cases.dense_mask(mask, 2, 4, q_len, kv_len)
        far = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)
        bias = np.where(dense & within(options, far), 0.0, -np.inf)
        want = flex_cases.attention(*map(flex_cases.heads_first, wide), bias=bias)
        call = {"block_size": size, "return_lse": True, "backend": backend, **options}
        got = cuattn.sparse_attention(*arrays, to_device(blocks), **call)
        hold(got, want, "float16", f"case {case}: blocks of {size}, {q_len} x {kv_len}, {dim}")


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_scores_of_lengths_on_the_device(rng, device, backend):
    """Padded and packed batches; what lies behind the last key is not to be read."""
    table = rng.standard_normal((4, 1401)).astype(np.float32)
    mod = lambda s, b, h, q, k: s + table[h, q - k + 700] * (b + 1)  # noqa: E731
    for case in range(6):
        dim, causal = (64, 128, 256, 192)[case % 4], case % 3 == 0
        lengths = [rng.integers(1, 700, 3) for _ in "qk"]
        starts = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
        call = {"score_mod": mod, "causal": causal, "backend": backend, "return_lse": True}
        if case < 3:
            arrays, wide = arrays_of(rng, "float16", (3, 700, 4, dim), *[(3, 700, 2, dim)] * 2)
            for b, n in enumerate(lengths[1]):
                arrays[1][b, n:], arrays[2][b, n:] = float("nan"), float("nan")
            call["seqused_q"], call["seqused_k"] = on_device_int32(lengths)
            out, lse = cuattn.flex_attention(*arrays, **call)
            both = zip(*lengths, strict=True)
            parts = [(b, slice(0, n), slice(0, m)) for b, (n, m) in enumerate(both)]
        else:
            shapes = ((starts[0][-1], 4, dim), *[(starts[1][-1], 2, dim)] * 2)
            arrays, wide = arrays_of(rng, "float16", *shapes)
            call["cu_seqlens_q"], call["cu_seqlens_k"] = on_device_int32(starts)
            call["max_seqlen_q"], call["max_seqlen_k"] = (int(n.max()) for n in lengths)
            out, lse = cuattn.flex_attention(*arrays, **call)
            out, lse, wide = out[None], lse[None], [x[None] for x in wide]
            spans = [[slice(*x) for x in itertools.pairwise(n)] for n in starts]
            parts = [(0, *x) for x in zip(*spans, strict=True)]
        for b, (at, rows, keys) in enumerate(parts):
            q, k, v = wide[0][at : at + 1, rows], *(x[at : at + 1, keys] for x in wide[1:])
            far = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - np.arange(k.shape[1])
            want = flex_cases.attention(
                *map(flex_cases.heads_first, (q, k, v)),
                mod=lambda s, _, h, i, j, b=b: mod(s, b, h, i, j),
                bias=np.where(far >= 0, 0.0, -np.inf) if causal else None,
            )
            got = (out[at : at + 1, rows], lse[at : at + 1, :, rows])
            hold(got, want, "float16", f"case {case}, sequence {b}: {lengths}, {dim}")


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_a_call_takes_the_kernel_that_serves_it(rng, device, backend):
    import torch

    odd = lambda b, h, q, k: (q + k) % 3 != 1  # noqa: E731
    x = torch.randn(1, 300, 2, 128, device="cuda", dtype=torch.float16)
    out = cuattn.flex_attention(x, x, x, mask_mod=odd)
    named = cuattn.flex_attention(x, x, x, mask_mod=odd, backend="sm90")
    assert torch.equal(out, named)
    other = cuattn.flex_attention(x, x, x, mask_mod=odd, backend="sm80")
    assert float((other - out).abs().max()) < 4e-3
    assert cuattn.explain("flex_attention", x, x, x, mask_mod=odd).kernel == "sm90"
    slopes = torch.ones(2, device="cuda")
    plan = cuattn.explain("flex_attention", x, x, x, mask_mod=odd, alibi_slopes=slopes)
    assert plan.kernel == "sm80"
    call = {"mask_mod": odd, "alibi_slopes": slopes}
    sloped = cuattn.flex_attention(x, x, x, **call)
    assert torch.equal(sloped, cuattn.flex_attention(x, x, x, **call, backend="sm80"))
    with pytest.raises(NotImplementedError, match="beside functions of a user"):
        cuattn.flex_attention(x, x, x, **call, backend="sm90")
    graph = torch.cuda.CUDAGraph()
    with harness.capturing(graph):
        again = cuattn.flex_attention(x, x, x, mask_mod=odd)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, out)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("kind", ["rows", "lists", "options", "score"])
def test_a_softcap_joins_the_score(rng, device, backend, kind):
    """Beside a score function it comes first; beside row ranges and lists it is compiled alone."""
    q_len, kv_len, gain = 300, 420, rng.random(4).astype(np.float32)
    ids, marks = np.sort(rng.integers(0, 4, kv_len)), rng.integers(0, 3, kv_len)
    masks = {
        "rows": lambda b, h, i, j: ids[i] == ids[j],
        "lists": lambda b, h, i, j: marks[i] != marks[j],
    }
    mods = {
        "rows": None,
        "lists": lambda s, b, h, i, j: s * gain[h] - 0.01 * j,
        "options": lambda s, b, h, i, j: 0.7 * s,
        "score": lambda s, b, h, i, j: s - gain[h] * s * s,
    }
    mask, mod = masks.get(kind, masks["rows"]), mods[kind]
    shapes = (2, q_len, 4, 64), (2, kv_len, 2, 64), (2, kv_len, 2, 64)
    arrays, wide = arrays_of(rng, "float16", *shapes)
    for cap in (2.0, 0.5):  # another number is no other code
        want = flex_cases.attention(
            *map(flex_cases.heads_first, wide),
            mask=mask,
            mod=lambda s, *at, c=cap: (lambda x: mod(x, *at) if mod else x)(c * np.tanh(s / c)),
        )
        call = {"mask_mod": mask, "score_mod": mod, "softcap": cap, "return_lse": True}
        hold(cuattn.flex_attention(*arrays, backend=backend, **call), want, "float16", kind)
        if kind == "lists":  # of blocks that are joined to tiles of 128
            made = cuattn.create_block_mask(mask, None, None, q_len, kv_len, block_size=64)
            call |= {"mask_mod": None, "block_mask": made}
            hold(cuattn.flex_attention(*arrays, backend=backend, **call), want, "float16", kind)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_gradients_beside_a_softcap_that_joined_the_score(rng, device, backend):
    """The backward call has it as an option, and lse of the kernel that it was compiled into."""
    import torch

    n, cap, gain = 300, 2.0, to_device(rng.random(4).astype(np.float32))
    ids, marks = np.sort(rng.integers(0, 4, n)), rng.integers(0, 3, n)
    masks = lambda b, h, i, j: ids[i] == ids[j], lambda b, h, i, j: marks[i] != marks[j]
    mods = None, lambda s, b, h, i, j: s * gain[h] - 0.01 * j
    for mask, mod in itertools.product(masks, mods):
        arrays, wide = arrays_of(rng, "float16", (2, n, 4, 64), *[(2, n, 2, 64)] * 2)
        leaves = [x.requires_grad_() for x in arrays]
        dense = [to_device(x).requires_grad_() for x in wide]
        q, k, v = (x.transpose(1, 2) for x in dense)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        s = cap * torch.tanh(q @ k.transpose(2, 3) / 8 / cap)
        if mod is not None:
            s = s * gain[:, None, None] - 0.01 * torch.arange(n, device="cuda")
        seen = to_device(mask(0, 0, *np.ix_(np.arange(n), np.arange(n))))
        want = s.masked_fill(~seen, -torch.inf).softmax(3) @ v
        got = cuattn.flex_attention(*leaves, mask_mod=mask, score_mod=mod, softcap=cap)
        dout = to_device(rng.standard_normal(got.shape))
        got.backward(dout.half())
        want.transpose(1, 2).backward(dout)
        for name, a, b in zip("qkv", leaves, dense, strict=True):
            error = float((a.grad.double() - b.grad).norm() / b.grad.norm())
            assert error < 1e-2, (name, error, cuattn.flex.trace(mask))


def test_explain_names_sm90_for_what_it_runs():
    rows, odd = (1, 300, 2, 64), lambda b, h, q, k: (q + k) % 3 != 1
    softcap = cuattn.flex.scores.softcap(20.0)

    def explain(**given):
        given = {"device": "h100", "dtype": "bfloat16", "mask_mod": odd, **given}
        return cuattn.explain("flex_attention", rows, rows, rows, **given)

    assert explain(scale=np.float32(0.5), softcap=np.float32(0)).kernel == "sm90"
    for backend in ("auto", "sm90"):  # compiled with the mask, which sm90 has no option beside
        plan = explain(score_mod=softcap, backend=backend)
        assert (plan.kernel, "tanh" in plan.reason) == ("sm90", True)
    plan = explain(score_mod=softcap, backend="sm80")
    assert "options, as the scores are softcap" in plan.reason
    plan = explain(score_mod=softcap, device="a100")
    assert (plan.kernel, "options, as the scores are softcap" in plan.reason) == ("sm80", True)
    for given in ({}, {"score_mod": lambda s, b, h, q, k: s + 0.1}):  # the option joins the score
        plan = explain(softcap=2.0, **given)
        assert (plan.kernel, "tanh((score / " in plan.reason) == ("sm90", True)
        plan = explain(softcap=2.0, backend="sm80", **given)
        assert (plan.kernel, "tanh" in plan.reason) == ("sm80", False)
    slopes = ("float32", 2)
    assert explain(softcap=2.0, alibi_slopes=slopes).kernel == "sm80"
    with pytest.raises(NotImplementedError, match=r"backend 'sm90' .* it has no ALiBi, bias"):
        explain(alibi_slopes=slopes, backend="sm90")


def test_a_capped_score_is_the_softcap_of_the_formula(rng):
    """Both ways: a backward call has the option, whatever made out and lse."""
    x = rng.standard_normal((1, 70, 2, 32)).astype(np.float32)
    mask, gain = cuattn.flex.masks.causal(), rng.random(2).astype(np.float32)
    for mod in (None, lambda s, b, h, q, k: s * gain[h] + abs(s) * 0.3):
        call = {"mask_mod": mask, "score_mod": mod, "softcap": 0.7}
        want = cuattn.flex_attention(x, x, x, return_lse=True, **call)
        score = None if mod is None else trace(mod, is_score=True)
        joined = {"mask_mod": mask, "score_mod": capped(score, 0.7)}
        got = cuattn.flex_attention(x, x, x, return_lse=True, **joined)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
        grads = [cuattn.flex_attention_backward(x, x, x, x, *got, **g) for g in (call, joined)]
        for a, b in zip(*grads, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("can", [True, False])
def test_explain_compiles_a_score_beside_row_ranges(monkeypatch, can):
    """On a Hopper, whose kernel has no options beside them; without NVRTC they remain options."""
    monkeypatch.setattr("cuattn.flex.form.can_compile", lambda: can)
    rows, ids = (1, 300, 2, 64), np.arange(300) // 70
    mask, softcap = cuattn.flex.masks.document(ids), cuattn.flex.scores.softcap(20.0)

    def explain(**given):
        given = {"device": "h100", "dtype": "bfloat16", "mask_mod": mask, **given}
        plan = cuattn.explain("flex_attention", rows, rows, rows, **given)
        assert "row ranges" in plan.reason
        return plan.kernel, "tanh" in plan.reason

    assert explain(score_mod=softcap) == (("sm90", True) if can else ("sm80", False))
    assert explain(score_mod=softcap, device="a100") == ("sm80", False)
    assert explain(score_mod=lambda s, b, h, q, k: 0.5 * s) == ("sm90", False)
    assert explain(score_mod=softcap, softcap=5.0) == ("sm90", True)  # compiled in any case
    assert explain(softcap=5.0) == (("sm90", True) if can else ("sm80", False))


class Elsewhere:
    """An array on a GPU that is not there."""

    def __init__(self, *shape, dtype="float16"):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __dlpack_device__(self):
        return 2, 0

    def __array_namespace__(self):
        return np


@pytest.fixture
def on_hopper(monkeypatch):
    """Return a function that says what a call becomes there: arguments, arrays, new sources."""
    sources, explain = [], cuattn._explain.explain
    for name in ("kernel_for", "backward_kernel_for"):  # what they keep is of this machine
        made = getattr(flex_device, name).__wrapped__
        monkeypatch.setattr(flex_device, name, functools.lru_cache(made))
    monkeypatch.setattr(flex_device, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(flex_device, "functor", lambda *x: sources.append(x) or len(sources))
    monkeypatch.setattr("cuattn.flex.form.can_compile", lambda: True)
    h100 = lambda *x, **more: explain(*x, **{**more, "device": "h100"})  # noqa: E731
    monkeypatch.setattr("cuattn._explain.explain", h100)

    def find(score_mod=None, mask_mod=None, block_mask=None, gives=None, dtype="float16", **call):
        sources.clear()
        q = Elsewhere(1, 300, 2, 64, dtype=dtype)
        problem = problem_of(q, q, call)
        call |= {"q": q, "k": q, "v": q}
        found = find_for(call, problem, score_mod, mask_mod, block_mask, gives)
        return call, found, [source for source, *_ in sources]

    return find


ODD, IDS = lambda b, h, q, k: (q + k) % 3 != 1, np.arange(300) // 70


@pytest.mark.parametrize("size", [64, 128])
def test_a_softcap_leaves_blocks_in_tiles_of_sm90(on_hopper, size):
    """They are those of sm80 as long as the softcap is an option; it has tiles of 64 rows."""
    blocks = cuattn.create_block_mask(ODD, None, None, 300, 300, block_size=size)
    for cap in (None, 2.0):
        _, found, _ = on_hopper(block_mask=blocks, softcap=cap)
        assert (found["kernel"], found["query_block"], found["key_block"]) == ("sm90", 128, 128)
    _, found, _ = on_hopper(block_mask=blocks, softcap=2.0, backend="sm80")
    assert (found["query_block"], found["key_block"]) == (size, 128)
    assert "kernel" not in found


@pytest.mark.parametrize("kind", ["rows", "lists", "score"])
def test_softcaps_are_numbers_of_one_source(on_hopper, kind):
    """Of whatever class; each is found again, and the option is switched off."""
    mask = (lambda b, h, q, k: IDS[q] == IDS[k]) if kind == "rows" else ODD
    score = (lambda s, b, h, q, k: s - 0.1 * h) if kind == "score" else None
    given = (2.0, 5, True, np.float32(0.3), np.int64(2), 2.0)
    made = set()
    for cap in given:
        call, found, sources = on_hopper(score, mask, softcap=cap)
        made.update(sources)
        assert (call["softcap"], found["kernel"]) == (0.0, "sm90")
        assert np.float32(cap).view(np.int32) in found["numbers"]
    assert len(made) == 1
    call, found, _ = on_hopper(score, mask)
    assert ("softcap" in call, len(found.get("numbers", ()))) == (False, 0)
    for cap in (1e39, 1e-50, 1e30, -1.0, float("nan"), 10**400):  # the module says what is wrong
        call, found, _ = on_hopper(score, mask, softcap=cap)
        assert (call["softcap"] is cap, "kernel" in found) == (True, False)


def test_what_a_functor_cannot_hold_remains_an_option(on_hopper):
    """It takes 32 numbers, the softcap among them; sm80 runs the call as without it."""
    many = np.arange(1.0, 33.0).tolist()
    score = lambda s, b, h, q, k: sum(x * s for x in many)  # noqa: E731
    for mask in (ODD, lambda b, h, q, k: IDS[q] == IDS[k]):
        call, found, _ = on_hopper(score, mask, softcap=2.0)
        assert (call["softcap"], len(found["numbers"]), "kernel" in found) == (2.0, 32, False)
        assert on_hopper(score, mask)[1]["kernel"] == "sm90"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn"])
def test_a_softcap_of_other_dtypes_is_left_to_the_module(on_hopper, dtype):
    """It runs the call, or says what is wrong with it."""
    dtype, mask = getattr(ml_dtypes, dtype, dtype), lambda b, h, q, k: IDS[q] == IDS[k]
    call, _, sources = on_hopper(mask_mod=mask, softcap=2.0, dtype=dtype)
    assert (call["softcap"], sources) == (2.0, [])


def test_a_backward_call_has_a_softcap_as_an_option(on_hopper):
    gives = flex_device.Gives(frozenset(), has_dbias=False)
    blocks = cuattn.create_block_mask(ODD, None, None, 300, 300, block_size=64)
    for given in ({"mask_mod": ODD}, {"block_mask": blocks}):
        for _ in range(2):
            call, found, _ = on_hopper(softcap=2.0, **given)
            assert (call["softcap"], found["kernel"], len(found["numbers"])) == (0.0, "sm90", 1)
            call, found, _ = on_hopper(softcap=2.0, gives=gives, **given)
            assert (call["softcap"], "kernel" in found, len(found["numbers"])) == (2.0, False, 0)


def test_explain_of_blocks_and_pages_names_what_runs(on_hopper):
    """A softcap that is compiled is no option in its words; pages are gathered before sm90."""
    rows = (1, 512, 2, 64)
    blocks = cuattn.create_block_mask(ODD, None, None, 512, 512, block_size=64)
    given = {"device": "h100", "dtype": "float16", "softcap": 2.0}
    plan = cuattn.explain("flex_attention", rows, rows, rows, block_mask=blocks, **given)
    for words in ("number0 * tanh((score / number0))", "lists of 16 blocks"):
        assert words in plan.reason
    paged = {
        "block_tables": np.arange(4, dtype=np.int32).reshape(2, 2),
        "cu_seqlens_q": np.array([0, 40, 100], np.int32),
        "seqused_k": np.array([200, 512], np.int32),
        **{"max_seqlen_q": 60, "max_seqlen_k": 512, "kv_layout": "vllm", "mask_mod": ODD},
    }
    q, *cache = (100, 4, 64), (4, 2, 8, 256, 8), (4, 2, 64, 256)  # the last axis: keys of a block
    plan = cuattn.explain("flex_attention", q, *cache, **paged, **given)
    assert (plan.kernel, "tanh((score" in plan.reason) == ("sm90", True)


def test_explain_refuses_row_ranges_beside_options_in_sm90(on_hopper, monkeypatch):
    """As the call does, where nothing can be compiled."""
    monkeypatch.setattr("cuattn.flex.form.can_compile", lambda: False)
    rows, mask = (1, 300, 2, 64), lambda b, h, q, k: IDS[q] == IDS[k]
    given = {"device": "h100", "dtype": "float16", "backend": "sm90", "mask_mod": mask}
    assert cuattn.explain("flex_attention", rows, rows, rows, **given).kernel == "sm90"
    with pytest.raises(NotImplementedError, match="beside row ranges it has no softcap, ALiBi"):
        cuattn.explain("flex_attention", rows, rows, rows, softcap=2.0, **given)


def test_explain_takes_a_score_that_is_alibi():
    """Its slopes are made on the host, and the call copies them."""
    rows = (1, 300, 2, 64)
    call = {"score_mod": cuattn.flex.scores.alibi(2), "mask_mod": cuattn.flex.masks.causal()}
    where = {"device": "h100", "dtype": "bfloat16"}
    plan = cuattn.explain("flex_attention", rows, rows, rows, **call, **where)
    assert (plan.kernel, plan.score) == ("sm90", "scored")
    arrays = (rows, rows, rows, rows, rows, (1, 2, 300))
    plan = cuattn.explain("flex_attention_backward", *arrays, **call, **where)
    assert "options, as the scores are alibi_slopes" in plan.reason


def test_explain_counts_the_blocks_that_the_kernel_walks():
    """Blocks of 64 are joined into tiles of 128, which are asked where their parts differ."""
    rows, odd = (1, 512, 2, 64), lambda b, h, q, k: (q - k < 64) & ((q + k) % 3 != 1)
    mask = cuattn.create_block_mask(odd, None, None, 512, 512, block_size=64)
    given = {"block_mask": mask, "dtype": "float16"}
    plan = cuattn.explain("flex_attention", rows, rows, rows, device="h100", **given)
    assert "lists of 16 blocks" in plan.reason
    plan = cuattn.explain("flex_attention", rows, rows, rows, device="cpu", **given)
    assert "lists of 64 blocks" in plan.reason
