# SPDX-License-Identifier: Apache-2.0
"""sample and speculative_verify: every token by integer arithmetic, and their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuattn
import fused_cases
from cases import DTYPES
from fused_cases import assert_likely
from harness import is_emulated, numpy_call

MASK = 0xFFFFFFFF


def philox(counter, key):
    c, k = list(counter), [key & MASK, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & MASK, a >> 32 ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def random_words(seed, offset, index, purpose):
    return philox((index, purpose, offset & MASK, offset >> 32), seed)


def weights_of(x):
    """2^x in units of 2^-40, with the roundings of the library; Python integers."""
    whole = np.rint(np.where(x > -41, x, 0)).astype(np.float32)
    f = (np.where(x > -41, x, 0).astype(np.float32) - whole).astype(np.float32)
    p = np.full(f.shape, 1.5345812e-4, np.float32)
    for c in (1.3399931e-3, 9.6184891e-3, 5.5503286e-2, 2.4022646e-1, 6.9314718e-1, 1.0):
        p = p * f + np.float32(c)
    found = [int(m * 2**24) * 2 ** (16 + int(w)) if w >= -16 else int(m * 2**24) >> -16 - int(w)
             for m, w in zip(p.astype(np.float64), whole, strict=True)]  # fmt: skip
    return [w if y > -41 else 0 for w, y in zip(found, x, strict=True)]


def draw(weights, words):
    total = sum(weights)
    if total == 0:
        return -1
    wanted = (words[0] | words[1] << 32) * total >> 64
    sums = np.cumsum(np.array(weights, object))
    return int(np.argmax(sums > wanted))


def plain_sample(logits, seed, offset, temperature, top_k, top_p, min_p, joint):
    """One row, by sorting and by sums of Python integers."""
    x = logits.astype(np.float32)
    if np.isnan(x).any() or not np.isfinite(x.max()):
        return -1
    if temperature <= 0:
        return int(np.argmax(x))
    scale = np.float32(1.44269504) / np.float32(temperature)
    with np.errstate(over="ignore"):
        weights = weights_of((x - x.max()) * min(scale, np.float32(3.4028235e38)))
    order, n = np.argsort(-x, kind="stable"), len(x)
    least = -math.inf
    if 1 <= top_k < n:
        least = x[order[top_k - 1]]
    if top_p < 1:
        pool = [i for i in order if joint or x[i] >= least]
        total = sum(weights[i] for i in pool)
        target = max(1, min(math.ceil(float(total) * float(np.float32(top_p))), total))
        mass = 0
        for i in pool:
            mass += weights[i]
            if mass >= target:
                least = max(least, x[i])
                break
    fewest = int(float(np.float32(min_p)) * 2**40)
    kept = [w if x[i] >= least and w >= fewest else 0 for i, w in enumerate(weights)]
    return draw(kept, random_words(seed, offset, 0, 0))


@pytest.mark.parametrize("joint", [False, True], ids=["top_k_first", "joint"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_is_the_one_of_the_definition(device, dtype, joint, rng):
    for vocabulary in (1, 5, 5001) if is_emulated() else (1, 5, 1000, 5001):
        rows = 6 if vocabulary < 5001 else 4
        logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(DTYPES[dtype])
        logits[1] = np.round(logits[1])  # ties
        logits[2, rng.integers(vocabulary)] = -np.inf
        arrays = {
            "seed": rng.integers(0, 2**62, rows),
            "offset": rng.integers(0, 2**40, rows),
            "temperature": rng.choice([0.0, 0.3, 1.0, 2.0], rows).astype(np.float32),
            "top_k": rng.choice([0, 1, 3, 50], rows).astype(np.int32),
            "top_p": rng.choice([0.1, 0.9, 0.99, 1.0], rows).astype(np.float32),
            "min_p": rng.choice([0.0, 0.1, 1.0], rows).astype(np.float32),
        }
        order = "joint" if joint else "top_k_first"
        found = numpy_call(device, cuattn.sample, logits, order=order, **arrays)
        for row in range(rows):
            options = {name: values[row].item() for name, values in arrays.items()}
            assert found[row] == plain_sample(logits[row], joint=joint, **options), options
        alone = numpy_call(device, cuattn.sample, logits[3:4], order=order, **{
            name: values[3].item() for name, values in arrays.items()})  # fmt: skip
        assert alone[0] == found[3]  # numbers for arrays, another batch


def test_rows_that_cannot_be_drawn_from_give_minus_one(device):
    logits = np.zeros((5, 40), np.float32)
    logits[0], logits[1, 3], logits[2, 39] = -np.inf, np.nan, np.inf
    logits[3, :] = -np.inf
    logits[3, 7] = -3e38
    for temperature in (0.0, 1.0, 1e-30):
        found = numpy_call(device, cuattn.sample, logits, seed=3, temperature=temperature)
        assert list(found[:4]) == [-1, -1, -1, 7]
        assert 0 <= found[4] < 40
    assert numpy_call(device, cuattn.sample, logits[:0], seed=3).shape == (0,)


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.7, "joint": True},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.skipif(is_emulated(), reason="a block for each draw")
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_distribution(device, options):
    """Seeds and logits are fixed: this passes always or never."""
    fused_cases.assert_distribution(device, options)


def plain_verify(draft, target, tokens, seed, offset):
    n = len(tokens)
    for i, token in enumerate(tokens):
        u = np.float32((random_words(seed, offset, i, 1)[0] >> 8) * 2.0**-24)
        if not u * draft[i, token] < target[i, token]:
            weights = [max(0, int(float(t) * 2**40) - int(float(d) * 2**40))
                       for t, d in zip(target[i], draft[i], strict=True)]  # fmt: skip
            return [*tokens[:i], draw(weights, random_words(seed, offset, i, 2))], i
    weights = [int(float(t) * 2**40) for t in target[n]]
    return [*tokens, draw(weights, random_words(seed, offset, n, 0))], n


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def test_chains_are_verified_as_defined(device, rng):
    for rows, n, vocabulary in ((4, 3, 50), (2, 1, 5000), (3, 0, 7), (6, 5, 4)):
        draft = softmax(rng.standard_normal((rows, n, vocabulary)))
        target = softmax(rng.standard_normal((rows, n + 1, vocabulary)))
        if n > 2:
            target[0, :n] = draft[0]  # accepted whole
        tokens = rng.integers(0, vocabulary, (rows, n)).astype(np.int32)
        seeds = rng.integers(0, 2**62, rows)
        found, accepted = numpy_call(
            device, cuattn.speculative_verify, draft, target, tokens, seed=seeds, offset=11
        )
        for row in range(rows):
            chain, count = plain_verify(
                draft[row], target[row], tokens[row].tolist(), int(seeds[row]), 11
            )
            assert accepted[row] == count
            assert list(found[row]) == chain + [-1] * (n - count)
        if n > 2:
            assert accepted[0] == n


@pytest.mark.skipif(is_emulated(), reason="a block for each draw")
def test_verified_tokens_have_the_distribution_of_the_target(device):
    """Seeds and probabilities are fixed: this passes always or never."""
    rows, vocabulary, rng = 100_000, 12, np.random.default_rng(4)
    draft, target = softmax(rng.standard_normal((2, 2, vocabulary)))
    steps = np.broadcast_to(np.log(draft[:1]), (rows, vocabulary))
    first = cuattn.sample(np.ascontiguousarray(steps), seed=np.arange(rows) + 10**6)
    found, accepted = numpy_call(
        device, cuattn.speculative_verify, np.broadcast_to(draft[:1], (rows, 1, vocabulary)).copy(),
        np.broadcast_to(target, (rows, 2, vocabulary)).copy(), first[:, None], seed=np.arange(rows),
    )  # fmt: skip
    assert_likely(np.bincount(found[:, 0], minlength=vocabulary), target[0].astype(np.float64))
    more = found[accepted == 1, 1]
    assert_likely(np.bincount(more, minlength=vocabulary), target[1].astype(np.float64))


def test_probabilities_that_are_none(device):
    """NaN and negative ones are 0; a row without any gives -1; a draft of 0 is always accepted."""
    target, draft = np.zeros((5, 2, 6), np.float32), np.zeros((5, 1, 6), np.float32)
    tokens = np.full((5, 1), 3, np.int32)
    target[0] = draft[0] = np.nan
    target[1, 0, 3] = 0.5  # draft is 0 there
    target[2, 0] = draft[2] = [0, 0.5, 0, 0, 0.5, 0]  # equal: drawn from the target
    target[3, 0], draft[3] = [np.nan, -1, 0, 0, 0.25, -np.inf], np.nan
    target[4], draft[4, 0, 3] = 0.0, 1.0
    for seed in range(20):
        found, accepted = numpy_call(
            device, cuattn.speculative_verify, draft, target, tokens, seed=seed
        )
        assert list(accepted) == [0, 1, 0, 0, 0]
        assert found[[0, 4]].tolist() == [[-1, -1]] * 2
        assert found[1].tolist() == [3, -1]
        assert found[2, 0] in (1, 4)
        assert found[3].tolist() == [4, -1]


def test_ends_of_the_filters(device):
    """What arrays of options may hold: nothing in them is judged."""
    logits = np.tile(np.float32([1, 3, 0, 3, 2]), (8, 1))  # tokens 1 and 3 are equal
    likeliest, every = {1, 3}, set(range(5))
    top_p = np.float32([-1, 0, 1e-30, np.nan, 2, 1, 1, 1])
    top_k = np.int32([0, 0, 0, 0, 0, 1, 5, -7])
    temperature = np.float32([1, 1, 1, 50, 50, 50, 50, np.inf])
    allowed = [likeliest] * 3 + [every] * 2 + [likeliest] + [every] * 2
    seen = [set() for _ in allowed]
    for step in range(60 if is_emulated() else 300):
        found = numpy_call(
            device, cuattn.sample, logits, seed=np.arange(8) + 77, offset=step, top_p=top_p,
            top_k=top_k, temperature=temperature,
        )  # fmt: skip
        for tokens, token in zip(seen, found.tolist(), strict=True):
            tokens.add(token)
    assert seen == allowed
    greedy = np.float32([np.nan, -1, 0, -0.0, -np.inf, 0, 0, 0])
    assert set(numpy_call(device, cuattn.sample, logits, seed=1, temperature=greedy)) == {1}
    for options in ({"top_k": 1}, {"top_k": 2}, {"top_p": 1e-9}, {"min_p": 1.0}):
        found = numpy_call(device, cuattn.sample, logits, seed=np.arange(8), **options)
        assert set(found) <= likeliest


L, P = np.zeros((2, 8), np.float32), np.full((2, 3, 8), 0.125, np.float32)
T = np.zeros((2, 2), np.int32)
REFUSED = [
    (lambda: cuattn.sample(L, seed=None), "sample: seed must be given, an integer from 0 on"),
    (lambda: cuattn.sample(L, seed=-1), "sample: seed must be given"),
    (lambda: cuattn.sample(L, seed=np.arange(3)), r"sample: seed must have shape \(2,\)"),
    (lambda: cuattn.sample(L, seed=np.zeros(2, np.int32)), "sample: seed must be int64"),
    (lambda: cuattn.sample(L, seed=1, offset=-1), "sample: offset must be an integer from 0"),
    (lambda: cuattn.sample(L, seed=1, temperature=-1.0), "sample: temperature must be finite and"),
    (lambda: cuattn.sample(L, seed=1, temperature=math.inf), "sample: temperature must be finite"),
    (lambda: cuattn.sample(L, seed=1, top_p=0.0), "sample: top_p must be above 0 and at most 1"),
    (lambda: cuattn.sample(L, seed=1, top_p=1.5), "sample: top_p must be above 0 and at most 1"),
    (lambda: cuattn.sample(L, seed=1, top_k=-2), "sample: top_k must be from 1 to"),
    (lambda: cuattn.sample(L, seed=1, top_k=2**31), "top_k must be from 1 to 2147483647, or 0"),
    (lambda: cuattn.sample(L, seed=1, top_p=math.nan), "sample: top_p must be above 0"),
    (lambda: cuattn.sample(L, seed=1, min_p=math.nan), "sample: min_p must be from 0 to 1"),
    (lambda: cuattn.sample(L, seed=1, min_p=1.1), "sample: min_p must be from 0 to 1"),
    (lambda: cuattn.sample(L, seed=1, order="both"), "sample: order must be 'top_k_first' or"),
    (lambda: cuattn.sample(L[:, :0], seed=1), "sample: logits must have a vocabulary of 1 to"),
    (lambda: cuattn.sample(L[0], seed=1), "sample: logits must have 2 axes"),
    (lambda: cuattn.sample(L, seed=1, out=np.zeros(3, np.int32)), "sample: out must have shape"),
    (
        lambda: cuattn.speculative_verify(P, P, T, seed=1),
        "speculative_verify: target_probs must have one token more than draft_probs, 4, got 3",
    ),
    (
        lambda: cuattn.speculative_verify(P[:, :2], P, T + 8, seed=1),
        r"speculative_verify: draft_tokens must lie within \[0, 8\), got 8",
    ),
    (
        lambda: cuattn.speculative_verify(P[:, :2].astype(np.float16), P, T, seed=1),
        "speculative_verify: draft_probs must be float32",
    ),
    (lambda: cuattn.speculative_verify(P[:, :2], P, T[:, :1], seed=1), "draft_tokens must have"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuattn.sample(L, seed=1, temperature=None), "temperature must be a number, got N"),
        (lambda: cuattn.sample(L, seed=1, offset=None), "sample: offset must be an integer, got N"),
        (lambda: cuattn.sample(None, seed=1), "sample: logits must be an array"),
        (lambda: cuattn.act_mul(L, act=None), "act_mul: act must be a string, got None"),
        (lambda: cuattn.rms_norm(L, None), "rms_norm: weight must be an array"),
        (lambda: cuattn.rms_norm(L, L[0], eps=None), "rms_norm: eps must be a number, got None"),
        (lambda: cuattn.apply_rope(P, P[0], None), "apply_rope: sin must be an array"),
        (lambda: cuattn.apply_rope(P, L, L, offset=None), "offset must be an integer, got None"),
        (lambda: cuattn.speculative_verify(P, P, None, seed=1), "draft_tokens must be an array"),
    ],
)
def test_none_is_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()
