# SPDX-License-Identifier: Apache-2.0
"""Jobs of calls that are right but unusual, and of those that go wrong on one rank alone."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from jobs import draw, generator, judge, largest, rows
from shared_peers import reading

import cuattn
import cuattn.parallel as parallel
from cuattn.parallel import Layout

SCHEMES = ("gather", "heads", "ring")


def error_of(run):
    """The kind of an error and its message, or nothing."""
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# A call, and what one rank has otherwise.
BASE = {"causal": True}
DROPS = {"dropout_p": 0.25, "dropout_seed": 3}
ONE_OPTION = {
    "causal": (BASE, lambda: {"causal": False}),
    "window": (BASE, lambda: {"window": (5, 0)}),
    "scale": (BASE, lambda: {"scale": 0.3}),
    "softcap": (BASE, lambda: {"softcap": 3.0}),
    "batch_invariant": (BASE, lambda: {"batch_invariant": True}),
    "return_lse": (BASE, lambda: {"return_lse": True}),
    "deterministic": (BASE, lambda: {"deterministic": True}),
    "partial_dtype": (BASE, lambda: {"partial_dtype": "input"}),
    "seqused": (BASE, lambda: {"seqused": int32(9, 9)}),
    "alibi_slopes": (BASE, lambda: {"alibi_slopes": torch.ones(4)}),
    "bias": (BASE, lambda: {"bias": torch.ones(1, 1, 1, 1)}),
    "dropout_p": (DROPS, lambda: {"dropout_p": 0.5}),
    "dropout_seed": (DROPS, lambda: {"dropout_seed": 4}),
    "dropout_offset": (DROPS, lambda: {"dropout_offset": 1}),
}


def one_option_differs(ranks, name):
    """What the last rank has otherwise is said on all; the call after it runs."""
    base, other = ONE_OPTION[name]
    q, k, v = draw(1, 64, (4, 2))
    given = {"group": ranks.group, "check": True, **base}
    changed = given | other() if ranks.rank == ranks.size - 1 else given
    found = error_of(lambda: parallel.attention(q, k, v, **changed))
    parallel.attention(q, k, v, **given)
    return found


def learns_alone(ranks, name):
    """One rank alone wants the gradient of an array."""
    arrays = dict(zip("qkv", draw(1, 64, (4, 2)), strict=True))
    options = {"alibi_slopes": torch.ones(4), "sinks": torch.ones(4)}
    if name == "bias":
        options = {"bias": torch.zeros(1, 4, 1, 1)}
    (arrays | options)[name].requires_grad_(ranks.rank == 1)

    def run():
        named = {"group": ranks.group, "check": True}
        return parallel.attention(*arrays.values(), **options, causal=True, **named)

    found = error_of(run)
    with torch.no_grad():
        run()
    return found


def written_before_the_way_back(ranks, name, scheme):
    """What was given is written between a call and its way back: an error on all, then a call."""
    n = 64
    arrays = [x.requires_grad_() for x in draw(ranks.rank, n, (4, 2))]
    options = {
        "seqused": {"seqused": int32(n + 9, 70)},
        "dropout_state": {"dropout_p": 0.5, "dropout_state": torch.tensor([5, 1])},
        "alibi_slopes": {"alibi_slopes": torch.ones(4)},
        "bias": {"bias": torch.zeros(1, 4, 1, n * ranks.size)},
        "q": {},
    }[name]
    given = {"causal": True, "group": ranks.group, "scheme": scheme, **options}
    out = parallel.attention(*arrays, **given)
    with torch.no_grad():
        (arrays[0] if name == "q" else options[name]).sub_(1)
    found = error_of(lambda: out.sum().backward())
    parallel.attention(*arrays, **given).sum().backward()
    return found


def gradient_of_a_gradient(ranks, scheme):
    """What torch is told instead of a gradient that is none."""
    q, k, v = (x.requires_grad_() for x in draw(1, 64, (4, 2)))
    out = parallel.attention(q, k, v, causal=True, group=ranks.group, scheme=scheme)
    return error_of(lambda: torch.autograd.grad(out.sum(), q, create_graph=True))


def both_ways(ranks, layout, scheme, arrays, mine, **options):
    """A causal call and its gradients, from these leaves, against one process."""
    whole = [x.detach().clone().requires_grad_() for x in arrays]
    want = cuattn.attention(*whole, causal=True, return_lse=True)
    upstream = torch.randn(want[0].shape, generator=generator(3))
    want[0].backward(upstream)
    given = {"group": ranks.group, "layout": layout, "scheme": scheme, "return_lse": True}
    found = parallel.attention(*mine, causal=True, **given, **options)
    what = (scheme, layout)
    judge(found, rows(want, layout, ranks.rank), scheme, what, bits=False, bound=1e-5)
    found[0].backward(layout.shard(upstream, ranks.rank))
    for got, leaf in zip(mine, whole, strict=True):
        own = layout.shard(leaf.grad, ranks.rank)
        assert largest(got.grad, own) <= 2e-5 * (1 + float(leaf.grad.abs().sum())), what


def empty_shards(ranks, seed):
    """Ranks without tokens, and batches without sequences, take part on the way back, too."""
    for seqlen, batch in ((0, 2), (1, 2), (ranks.size - 1, 1), (129, 2), (300, 0)):
        arrays = draw(seed + seqlen, seqlen, (4, 4), batch=batch)
        for kind, scheme in itertools.product(("contiguous", "zigzag"), SCHEMES):
            layout = Layout(kind, seqlen, ranks.size)
            mine = [layout.shard(x, ranks.rank).requires_grad_() for x in arrays]
            both_ways(ranks, layout, scheme, arrays, mine)


class Strided(torch.autograd.Function):
    """Leaves as views with other strides, whose gradients come back to the leaves."""

    @staticmethod
    def forward(ctx, x):
        box = x.new_full((x.shape[0], x.shape[2] + 1, x.shape[1] + 3, 2 * x.shape[3]), torch.nan)
        view = box[:, 1:, 2:-1, : x.shape[3]].transpose(1, 2)  # heads in front, rows and dims apart
        view.copy_(x)
        return view

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def strided(ranks, seed):
    """Views of what is in another order, with other things between."""
    for seqlen in (256, 333):
        arrays = draw(seed, seqlen, (4, 2), (32, 24))
        for kind, scheme in itertools.product(("contiguous", "zigzag"), SCHEMES):
            layout = Layout(kind, seqlen, ranks.size)
            leaves = [layout.shard(x, ranks.rank).requires_grad_() for x in arrays]
            views = [Strided.apply(x) for x in leaves]
            assert not any(x.is_contiguous() for x in views if x.numel())
            for x in views:
                x.retain_grad()
            both_ways(ranks, layout, scheme, arrays, views)


def other_groups(ranks, seed):
    """Groups that are not the first ranks, one made in another order, and pairs with one rank."""
    mine = ranks.rank
    named = ((1, 3), (3, 2), (0,), (1,), (2,), (3,))
    odd, last, *alone = groups = [dist.new_group(x) for x in named]
    arrays = draw(seed, 300, (4, 2))
    for group, members in ((odd, (1, 3)), (last, (2, 3))):
        if mine in members:
            part = ranks._replace(group=group, rank=dist.get_rank(group), size=2)
            for scheme in SCHEMES:
                layout = Layout("zigzag", 300, 2)
                own = [layout.shard(x, part.rank).requires_grad_() for x in arrays]
                both_ways(part, layout, scheme, arrays, own)
    outsider = error_of(
        lambda: parallel.attention(*draw(1, 8, (4, 2)), group=odd) if mine in (0, 2) else None
    )
    for sizes, pair in (((1, 4), (alone[mine], None)), ((4, 1), (None, alone[mine]))):
        layout = Layout("zigzag", 300, sizes)
        part = ranks._replace(group=pair)
        own = [layout.shard(x, mine).requires_grad_() for x in arrays]
        both_ways(part, layout, "auto", arrays, own)
        out = parallel.attention(*own, causal=True, group=pair, layout=layout).detach()
        again = layout.unshard(out, pair)
        assert torch.equal(layout.shard(again, mine), out)
    for group, members in zip(groups, named, strict=True):
        if mine in members:
            dist.destroy_process_group(group)
    return outsider


def explained(ranks):
    """explain of every scheme, with every option that it takes, says what attention does."""
    q, k, v = draw(1, 64, (4, 2))
    n = 64 * ranks.size
    options = (
        {},
        {"causal": True, "alibi_slopes": torch.ones(4)},
        {"bias": torch.zeros(1, 1, 1, n), "window": (9, 9)},
        {"seqused": int32(n, 7)},
        {"dropout_p": 0.5, "causal": True},
        {"partial_dtype": "input", "memory_limit": 1 << 30, "layout": "zigzag"},
    )
    for scheme, given in itertools.product(("auto", *SCHEMES), options):
        choice = parallel.explain(q, k, v, group=ranks.group, scheme=scheme, **given)
        assert choice.scheme == scheme or scheme == "auto", (scheme, given, choice)
        assert set(choice.seconds) == set(SCHEMES) - set(choice.refused), choice
        more = {"dropout_seed": 1} if "dropout_p" in given else {}
        parallel.attention(q, k, v, group=ranks.group, scheme=scheme, **given, **more)


def decode_awkward(ranks):
    """Decode without sequences, with a gradient on one rank, and with options that differ."""
    caches = torch.randn(2, 6, 8, 2, 16).unbind()
    table, lens = torch.zeros(3, 2, dtype=torch.int32), int32(5, 9, 0)
    q = torch.randn(3, 4, 16, generator=generator(1))
    given = {"group": ranks.group, "check": True}

    def run(q=q, table=table, lens=lens, **more):
        return parallel.paged_attention(q, *caches, table, lens, **given, **more)

    for reduce in ("heads", "all"):
        assert run(q[:0], table[:0], lens[:0], reduce=reduce).shape[0] == 0
    is_last = ranks.rank == ranks.size - 1
    wants = q.clone().requires_grad_(is_last)
    found = [
        error_of(lambda: run(wants)),
        error_of(lambda: run(softcap=3.0 if is_last else 0.0)),
        error_of(lambda: run(lens=int32(5, 9, is_last))),
        error_of(lambda: run(interleave=16 if is_last else 8)),
        error_of(lambda: run(reduce="all" if is_last else "heads")),
    ]
    run()
    return found


def documents_of_none(ranks):
    """Packed documents of no token, alone and between others."""
    for begins in ([0], [0, 0, 0], [0, 0, 7, 7, 8]):
        ends = np.array(begins, np.int32)
        layout = Layout("contiguous", int(ends[-1]), ranks.size, chunk=max(1, -(-begins[-1] // 2)))
        arrays = draw(4, layout.seqlen, (4, 2), packed=True)
        for scheme in SCHEMES:
            mine = [layout.shard(x, ranks.rank, 0) for x in arrays]
            named = {"group": ranks.group, "layout": layout, "scheme": scheme}
            out = parallel.attention_varlen(*mine, ends, **named)
            where = torch.from_numpy(ends).to(out.device)
            want = cuattn.attention_varlen(*arrays, where, where, 8, 8)
            assert largest(out, layout.shard(want, ranks.rank, 0)) <= 1e-5, (begins, scheme)


def biases_of_few_rows(ranks, seed):
    """Of ranks with two rows, one and none: biases of rows and of keys, of 1 to 4 axes."""
    for seqlen in (2 * ranks.size - 1, 2 * ranks.size - 2):
        layout = Layout("contiguous", seqlen, ranks.size, chunk=2)
        g = generator(seed)
        shapes = (2, 4, seqlen, seqlen), (4, seqlen, 1), (seqlen, seqlen), (4, 1, seqlen), (seqlen,)
        for shape, scheme in itertools.product(shapes, ("auto", "gather", "ring")):
            whole = draw(seed, seqlen, (4, 2), (16, 16))
            bias = torch.randn(shape, generator=g)
            own, axis = bias, bias.ndim - 2
            if bias.ndim > 1 and bias.shape[axis] > 1:
                own = layout.shard(bias, ranks.rank, axis)
            leaves = [x.clone().requires_grad_() for x in (*whole, bias)]
            mine = [layout.shard(x, ranks.rank) for x in whole]
            mine = [x.clone().requires_grad_() for x in (*mine, own)]
            full = leaves[3].reshape((1,) * (4 - bias.ndim) + bias.shape)
            want = cuattn.attention(*leaves[:3], bias=full)
            found = parallel.attention(
                *mine[:3], bias=mine[3], group=ranks.group, layout=layout, scheme=scheme
            )
            upstream = torch.randn(want.shape, generator=g)
            torch.autograd.backward(want, upstream)
            torch.autograd.backward(found, layout.shard(upstream, ranks.rank))
            what = (seqlen, shape, scheme)
            assert largest(found, layout.shard(want, ranks.rank)) < 1e-5, what
            for got, leaf in zip(mine[:3], leaves, strict=False):
                assert largest(got.grad, layout.shard(leaf.grad, ranks.rank)) < 1e-4, what
            dbias = torch.zeros_like(own) if mine[3].grad is None else mine[3].grad
            if own is bias:
                dbias = dbias.clone()
                dist.all_reduce(dbias, group=ranks.group)
                assert largest(dbias, leaves[3].grad) < 1e-4, what
            else:
                assert largest(dbias, layout.shard(leaves[3].grad, ranks.rank, axis)) < 1e-4, what


def decode_that_fails(ranks, case):
    """Calls over caches of 1, 2, 3 and 4, of which rank 1 fails in the second; what each gives."""
    reduce = "all" if case == "packed" else "heads"
    tables, lens = torch.arange(8, dtype=torch.int32).view(2, 4), int32(30, 40)
    found = []
    with reading(ranks) as peers:
        for value in (1.0, 2.0, 3.0, 4.0):
            cache = torch.full((8, 8, 2, 32), value)
            fails = ranks.rank == 1 and value == 2.0
            how = {"side_effect": RuntimeError("out of memory")} if fails else {}
            how = how or {"wraps": cuattn.paged_attention}
            with mock.patch.object(cuattn, "paged_attention", **how):
                try:
                    out = parallel.paged_attention(
                        torch.ones(2, 4, 32), cache, cache, tables, lens,
                        group=ranks.group, reduce=reduce, check=False,
                    )  # fmt: skip
                except RuntimeError as error:
                    found.append(str(error))
                else:
                    mean = float(out.mean())
                    found.append("nan" if mean != mean else round(mean, 4))
        assert peers.meetings == 8
    return found
