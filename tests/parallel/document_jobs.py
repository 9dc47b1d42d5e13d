# SPDX-License-Identifier: Apache-2.0
"""Packed documents of which some lie whole on a rank: what the ranks of a pool are told to do."""

from __future__ import annotations

import itertools

import jobs
import numpy as np
import torch
from jobs import draw, generator, judge, poisoned, rows
from option_jobs import both_ways, solve
from pool import pairs_of

import cuattn.parallel as parallel
from cuattn.parallel import Layout, autograd, exchange, gather, ring
from cuattn.parallel.documents import split_of


def begins_of(lengths):
    """Where documents of these lengths begin."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def layouts_of(begins, size):
    """Layouts that cut few documents, or all but the short ones; one deals chunks by turns."""
    seqlen = int(begins[-1])
    ends = [min(end, seqlen) for end in range(128, seqlen + 128, 128)]
    return (
        Layout.balanced(begins, size, chunk=128),
        Layout("contiguous", seqlen, size),
        Layout("zigzag", seqlen, size),
        Layout._of("by turns", size, [i % size for i in range(len(ends))], ends),
    )


def options_of(seed, heads=4):
    """Options whose terms count documents and places within them, or rows."""
    g = generator(seed)
    return (
        {"causal": True, "sinks": 3 + torch.randn(heads, generator=g)},
        {"causal": True, "alibi_slopes": torch.rand(heads, generator=g) / 8, "softcap": 3.0},
        {"causal": True, "window": (60, -1), "sinks": 3 + torch.randn(heads, generator=g)},
        {"window": (40, 20)},
        {},
    )


LENGTHS = {
    "mixed": [300, 0, 5, 517, 1, 0, 130, 64, 40, 0],
    "short": [7] * 150,
    "whole": [256, 256, 256, 256],  # a layout of two or four ranks cuts none
    "one": [700],
}


@poisoned
def both_ways_by_every_layout(ranks, seed):
    """Out, lse and all gradients are those of one process, whatever of the documents is cut."""
    seen = set()
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        begins = begins_of(lengths)
        arrays = draw(seed + number, int(begins[-1]), (4, 2), (32, 24), packed=True)
        for turn, options in enumerate(
            options_of(seed)[number:] if name != "mixed" else options_of(seed)
        ):
            whole = solve(seed, arrays, options | {"cu_seqlens": begins})
            layouts = layouts_of(begins, ranks.size)
            for layout in layouts if name == "mixed" else [layouts[turn % 4]]:
                split = split_of(layout, begins.astype(np.int64).tobytes(), ranks.rank)
                if split is not None:
                    seen.add("some cut" if split.layout.seqlen else "none cut")
                for scheme in ("gather", "ring"):
                    both_ways(ranks, whole, layout, scheme)
    assert seen == {"some cut", "none cut"}


@poisoned
def dropped_by_document(ranks, seed):
    """What is dropped is counted by the documents of the whole, those left out too."""
    lengths = [128, 256, 0, 384, 128, 16, 112]
    begins = begins_of(lengths)
    arrays = draw(seed, int(begins[-1]), (4, 2), (32, 24), packed=True)
    options = {"causal": True, "dropout_p": 0.25, "dropout_seed": seed, "cu_seqlens": begins}
    whole = solve(seed, arrays, options)
    for layout, scheme in itertools.product(layouts_of(begins, ranks.size), ("gather", "ring")):
        both_ways(ranks, whole, layout, scheme)


def whole_documents_alone(ranks, seed):
    """Nothing moves where no document is cut; with batch_invariant the bits of one process."""
    begins = begins_of([256, 128, 128, 512, 0] * ranks.size)
    options = {"causal": True, "cu_seqlens": begins}
    arrays = draw(seed, int(begins[-1]), (4, 2), (32, 24), packed=True)
    problem = jobs.Whole(*arrays, options, axis=0)
    want = problem.one_process(return_lse=True, batch_invariant=True)
    layout = Layout.balanced(begins, ranks.size)

    def moved(*_):
        raise AssertionError("keys were moved")

    kept = {
        (m, n): getattr(m, n)
        for m, n in (
            (gather, "Gathered"),
            (gather, "Message"),
            (gather, "exchange"),
            (ring, "Shift"),
            (ring, "Message"),
            (exchange, "gather_into"),
            (autograd, "exchange"),
        )
    }
    try:
        for module, name in kept:
            setattr(module, name, moved)
        for scheme in ("auto", "gather", "ring"):
            more = {"batch_invariant": True, "memory_limit": 0}  # nor is memory for keys taken
            found = problem.on_ranks(ranks, layout, scheme, **more)
            judge(found, rows(want, layout, ranks.rank), "gather", scheme)
            shards = [layout.shard(x, ranks.rank, 0).requires_grad_() for x in arrays]
            out = parallel.attention_varlen(
                *shards, begins, causal=True, group=ranks.group, layout=layout, scheme=scheme
            )
            out.sum().backward()
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


@poisoned
def two_levels(ranks, seed, groups):
    """Heads over pairs of ranks, the sequence over two such pairs, some documents whole on one."""
    mine = ranks._replace(group=pairs_of(ranks, groups))
    for number, lengths in enumerate(([300, 0, 5, 517, 1, 130, 64], [512, 512], [7] * 90)):
        begins = begins_of(lengths)
        arrays = draw(seed + number, int(begins[-1]), (8, 4), (32, 24), packed=True)
        options = options_of(seed, 8)[0] | {"cu_seqlens": begins}
        del options["sinks"]  # whose gradient is that of the heads of a rank
        whole = solve(seed, arrays, options)
        for kind, scheme in itertools.product(("contiguous", "zigzag"), ("gather", "ring")):
            both_ways(mine, whole, Layout(kind, int(begins[-1]), (2, 2)), scheme)


def by_buffers(ranks, seed):
    """The same where ranks read the memory of others."""
    with jobs.reading(ranks) as peers:
        both_ways_by_every_layout(ranks, seed)
        dropped_by_document(ranks, seed)
        assert peers.messages > 0
