# SPDX-License-Identifier: Apache-2.0
"""Mistakes that ranks are told to make, each of which the comparison of jobs.py has to see."""

from __future__ import annotations

import torch
from jobs import Whole, draw, judge, poisoned, rows
from shared_peers import reading

import cuattn
from cuattn.parallel import Layout

MERGE = cuattn.merge_states


def mutants():
    """(module or class, name, what replaces it) of each mistake."""
    from cuattn.parallel import attend as pieces_as_calls
    from cuattn.parallel import exchange, peers, ring, schemes

    def in_order(layout, box, begins):
        del begins
        return box[: layout.seqlen]

    def swap(a, a_lse, b, b_lse, layout, out, lse_out):
        found = MERGE(a.clone(), b_lse, b, a_lse.clone(), layout=layout)
        out.copy_(found[0])
        lse_out.copy_(found[1])

    calls, pieces, last, attend = (
        schemes.Scheme.calls, schemes.find_pieces, ring.last_step, ring.attend
    )  # fmt: skip

    def every_sink(self, *arguments):
        return ((call, rows, keys, True) for call, rows, keys, _ in calls(self, *arguments))

    def one_off(*arguments):
        found = pieces(*arguments)
        sides = [tuple(s if s < 0 else s + 1 for s in piece.window) for piece in found]
        return [piece._replace(window=w) for piece, w in zip(found, sides, strict=True)]

    def base_2(call, sinks, out, lse):
        attend(call, sinks, out, lse)
        lse *= 1.4426950408889634

    fold = schemes.fold_of

    def one_key_less(*arguments):
        found = fold(*arguments)
        return None if found is None else tuple(n - 1 for n in found)

    dropout = pieces_as_calls.dropout_of

    def forget(name):
        return lambda *arguments: dropout(*arguments) | {name: 0}

    def of_place_0(name):
        return pieces_as_calls, "dropout_of", forget(name)

    of = peers.Message.of

    def first_rows(self, rank, index, place):
        return of(self, rank, index, (0, place[1]))

    def own_rows(self, rank, *arguments):
        return of(self, self.rank, *arguments)

    short = lambda *arguments: max(last(*arguments) - 1, 0)  # noqa: E731
    return {
        "order of zigzag": (exchange, "in_order", in_order),
        "weights of the merge": (cuattn, "merge_states", swap),
        "sink twice": (schemes.Scheme, "calls", every_sink),
        "shift by one": (schemes, "find_pieces", one_off),
        "a run one key short": (schemes, "fold_of", one_key_less),
        "ring one step short": (ring, "last_step", short),
        "lse in base 2": (ring, "attend", base_2),
        "rows that were rounded": (ring, "rest_of", lambda *_: []),
        "read the first rows": (peers.Message, "of", first_rows),
        "read own rows": (peers.Message, "of", own_rows),
        "dropout of the first rows": of_place_0("dropout_row"),
        "dropout of the first keys": of_place_0("dropout_key"),
        "dropout of the first heads": of_place_0("dropout_head"),
        "dropout of so many heads": of_place_0("dropout_heads"),
    }


@poisoned
def mutant(ranks, name, seed):
    """Whether a mistake is seen on this rank, by the scheme that makes it."""
    from cuattn.parallel import schemes

    where, attribute, wrong = mutants()[name]
    right = getattr(where, attribute)
    of_gather = ("order of zigzag", "read the first rows", "read own rows")
    of_heads = ("first heads", "so many heads")
    scheme = "gather" if name in of_gather else "heads" if name.endswith(of_heads) else "ring"
    options = {"causal": True, "sinks": torch.linspace(-1, 1, 4)}
    if name.startswith("dropout"):
        options |= {"dropout_p": 0.25, "dropout_seed": seed}
    batch = 1 if name == "a run one key short" else 2  # one sequence alone is folded
    dtype = "bfloat16" if name == "rows that were rounded" else "float32"
    whole = Whole(*draw(seed, 512, (4, 2), dtype=dtype, batch=batch), options)
    want = whole.one_process(return_lse=True)
    layout = Layout("zigzag", 512, ranks.size)
    seen = []
    for attributes in (right, wrong):
        schemes.pairs_of.cache_clear()
        setattr(where, attribute, attributes)
        try:
            with reading(ranks, name.startswith("read")):
                found = whole.on_ranks(ranks, layout, scheme)
        finally:
            setattr(where, attribute, right)
            schemes.pairs_of.cache_clear()
        try:
            judge(found, rows(want, layout, ranks.rank), scheme, name, bits=False)
            seen.append(False)
        except AssertionError:
            seen.append(True)
    return seen
