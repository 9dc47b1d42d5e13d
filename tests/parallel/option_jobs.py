# SPDX-License-Identifier: Apache-2.0
"""Jobs of options that count places of the sequence: each against one process, both ways."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jobs
import numpy as np
import torch
import torch.distributed as dist
from jobs import draw, generator, judge, largest, poisoned, rows

import cuattn
import cuattn.parallel as parallel
from cuattn.parallel import Layout
from cuattn.parallel.schemes import fold_of_documents

LEARNED = ("alibi_slopes", "sinks")  # whose gradient on a rank is its share


def one_process(arrays, options):
    """(out, lse) of the whole, with the gradient."""
    options = dict(options)
    begins, used = options.pop("cu_seqlens", None), options.pop("seqused", None)
    if used is not None:
        options |= {"seqused_q": used, "seqused_k": used}
    run = cuattn.attention
    if begins is not None:
        where = torch.from_numpy(begins).to(arrays[0].device)
        most = int(np.diff(begins).max(initial=0))
        arrays = (*arrays, where, where, most, most)
        run = cuattn.attention_varlen
    return run(*arrays, **options, return_lse=True)


def leaves_of(arrays, options):
    """Copies that collect gradients: the arrays, and the options with what is learned."""
    options = dict(options)
    learned = [name for name in LEARNED if name in options]
    for name in learned:
        options[name] = options[name].clone().requires_grad_()
    return [x.clone().requires_grad_() for x in arrays], options, [options[n] for n in learned]


class Whole(NamedTuple):
    """A problem that one process has solved, both ways: its leaves have their gradients."""

    arrays: list
    options: dict
    want: tuple
    upstream: list
    leaves: list
    learned: list


def solve(seed, arrays, options):
    """Solve a problem by one process."""
    leaves, own, learned = leaves_of(arrays, options)
    want = one_process(leaves, own)
    g = generator(seed)
    upstream = [torch.randn(x.shape, generator=g).to(x.dtype) for x in want]
    upstream[1] = torch.where(want[1].isfinite(), upstream[1], 0.0)
    torch.autograd.backward(want, upstream)
    return Whole(arrays, options, want, upstream, leaves, learned)


def both_ways(ranks, whole, layout, scheme, bound=2e-5):
    """Forward and backward over ranks are those of one process, of learned options, too."""
    axis = whole.arrays[0].ndim - 3
    shards = [layout.shard(x, ranks.rank, axis) for x in whole.arrays]
    mine, own_options, learned = leaves_of(shards, whole.options)
    run = parallel.attention if axis == 1 else parallel.attention_varlen
    found = run(
        *mine, **own_options,
        group=ranks.group, layout=layout, scheme=scheme, return_lse=True, deterministic=True,
    )  # fmt: skip
    what = (scheme, layout.kind, sorted(whole.options))
    judge(found, rows(whole.want, layout, ranks.rank), scheme, what, bits=False, bound=bound)
    torch.autograd.backward(found, list(rows(whole.upstream, layout, ranks.rank)))
    for name, got, leaf in zip("qkv", mine, whole.leaves, strict=True):
        near = bound if leaf.dtype == torch.float32 else 3 * 2.0**-8
        near *= 1 + (float(leaf.grad.abs().max()) if leaf.numel() else 0)
        own = layout.shard(leaf.grad, ranks.rank, axis)
        assert largest(got.grad, own) <= near, (what, name, largest(got.grad, own), near)
    for got, leaf in zip(learned, whole.learned, strict=True):
        total = got.grad.clone()
        dist.all_reduce(total, group=ranks.group)
        near = 10 * bound * (1 + float(leaf.grad.abs().max()))
        assert float(leaf.grad.abs().max()) > 0.05, what  # there is something to compare
        assert largest(total, leaf.grad) <= near, (what, total, leaf.grad)
    return [*found, *(x.grad for x in (*mine, *learned))]


def compare(ranks, seed, cases, seqlen=600, heads=(4, 2), packed=False):
    """Each case by its schemes, in both layouts by turns; a second run has the same bits."""
    for number, (options, schemes) in enumerate(cases):
        whole = solve(seed, draw(seed + number, seqlen, heads, (32, 24), packed=packed), options)
        for turn, scheme in enumerate(schemes):
            kind = ("zigzag", "contiguous")[(number + turn) % 2]
            layout = Layout(kind, seqlen, ranks.size)
            first, again = (both_ways(ranks, whole, layout, scheme) for _ in range(2))
            assert all(map(torch.equal, first, again)), (scheme, sorted(options))


ALL = ("gather", "heads", "ring")


@poisoned
def documents_in_one_call(ranks, seed):
    """Gather pairs all runs of a rank with all keys at once, each from its last document on."""
    rng = np.random.default_rng(seed)
    total = 128 * 6 * ranks.size
    cuts = {
        "few": sorted({0, *rng.integers(1, total, 3).tolist(), total}),
        "many": sorted([0, *rng.integers(0, total, 150).tolist(), total, total]),
        "at the ends of chunks": [0, 128, 256, 640, total - 128, total],
        "one": [0, total],
    }
    for number, (name, begins) in enumerate(cuts.items()):
        begins = np.array(begins, np.int32)
        sinks = torch.randn(4, generator=generator(seed))
        masks = {"causal": True, "softcap": 3.0}, {"causal": True, "window": (150, -1)}
        for options in masks:
            given = options | {"cu_seqlens": begins, "sinks": sinks}
            arrays = draw(seed + number, total, (4, 2), (32, 24), packed=True)
            want = jobs.Whole(*arrays, given, axis=0).one_process(return_lse=True)
            ends = range(128, total + 1, 128)
            owners = [i % ranks.size for i in range(len(ends))]
            for layout in (
                Layout.balanced(begins, ranks.size, chunk=128),
                Layout._of("by turns", ranks.size, owners, ends),
                Layout("zigzag", total, ranks.size),
            ):
                problem = jobs.Whole(*arrays, given, axis=0)
                if layout.kind == "by turns" and name == "one":
                    ends_of_all = begins.astype(np.int64).tobytes()
                    assert fold_of_documents(layout, ranks.rank, ends_of_all) is not None
                found = problem.on_ranks(ranks, layout, "gather")
                what = (name, sorted(options), layout.kind)
                judge(found, rows(want, layout, ranks.rank), "gather", what, False, 1e-5)


def dropout(ranks, seed):
    """Ranks drop what one process drops, of sequences, padded ones and documents, both ways."""
    g = generator(seed)
    one, each = torch.rand(4, generator=g) / 8, torch.rand(2, 4, generator=g) / 8
    sinks, bias = 3 + torch.randn(4, generator=g), torch.randn(2, 4, 1, 600, generator=g)
    drops = {"dropout_p": 0.25, "dropout_seed": seed, "dropout_offset": 3}
    state = torch.tensor([seed, 5])
    cases = (
        ({"causal": True, **drops}, (*ALL, "gather", "ring")),
        ({"dropout_p": 0.5, "dropout_state": state, "sinks": sinks}, ALL),
        ({"causal": True, "alibi_slopes": each, **drops}, ALL),
        ({"window": (90, 40), "softcap": 2.0, "bias": bias, **drops}, ALL),
        ({"window": (90, 40), "alibi_slopes": one, **drops}, ("heads",)),
        ({"causal": True, "seqused": torch.tensor([257, 600], dtype=torch.int32), **drops}, ALL),
    )
    compare(ranks, seed, cases)
    compare(ranks, seed, [(cases[0][0], (*ALL, "auto"))], heads=(8, 1))  # keys go to several ranks
    begins = np.array([0, 0, 5, 300, 300, 301, 599, 600], np.int32)
    documents = drops | {"causal": True, "alibi_slopes": one, "cu_seqlens": begins}
    on_cuda = one.is_cuda  # where a ring would draw for parts of 16 keys
    compare(ranks, seed, [(documents, ALL[: 2 if on_cuda else 3])], packed=True)


def slopes(ranks, seed):
    """Learned slopes, of heads and of sequences, with sinks, of documents."""
    g = generator(seed)
    one, each = torch.rand(4, generator=g) / 8, torch.rand(2, 4, generator=g) / 8
    sinks = 3 + torch.randn(4, generator=g)
    causal = {"causal": True}
    cases = (
        (causal | {"alibi_slopes": one}, ALL * 2),
        (causal | {"alibi_slopes": each, "sinks": sinks}, ALL),
        (causal | {"alibi_slopes": one, "window": (150, -1), "softcap": 3.0}, ALL),
        ({"alibi_slopes": each, "window": (40, 70)}, ("heads",)),
    )
    compare(ranks, seed, cases)
    begins = np.array([0, 5, 300, 301, 599, 600], np.int32)
    packed = causal | {"alibi_slopes": one, "cu_seqlens": begins}
    compare(ranks, seed, ((packed, ALL),), packed=True)


def lengths_in_use(ranks, seed):
    """Padded batches, whose padding is NaN: no row of it is read."""
    g = generator(seed)
    seqlen = 600
    cases = (
        ({"causal": True}, ALL * 2),
        ({}, ALL * 2),
        ({"causal": True, "sinks": 3 + torch.randn(4, generator=g)}, ALL),
        ({"window": (90, 0), "softcap": 2.0}, ("gather", "heads")),
        ({"window": (90, 40)}, ("heads",)),
        ({"causal": True, "alibi_slopes": torch.rand(4, generator=g) / 8}, ALL),
    )
    for lengths in ((600, 257), (128, 0)):
        used = torch.tensor(lengths, dtype=torch.int32)
        padded = [(options | {"seqused": used}, schemes) for options, schemes in cases]
        compare(ranks, seed, padded, seqlen)
    layout = Layout("zigzag", seqlen, ranks.size)
    arrays = draw(seed, seqlen, (4, 2), (32, 24))
    for scheme, causal in itertools.product(ALL, (True, False)):
        options = {"causal": causal, "seqused": torch.tensor([130, 400], dtype=torch.int32)}
        named = {"group": ranks.group, "layout": layout, "scheme": scheme}
        found = []
        for fill in (0.0, torch.nan):
            padded = [x.clone() for x in arrays]
            for x in padded:
                x[0, 130:] = x[1, 400:] = fill
            mine = [layout.shard(x, ranks.rank) for x in padded]
            found.append(parallel.attention(*mine, **options, **named))
        assert torch.equal(*found), (scheme, causal)
