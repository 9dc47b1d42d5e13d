# SPDX-License-Identifier: Apache-2.0
"""The tests of flex_attention's tests: planted mistakes, each of which a comparison must notice.

A mutant is the library with one function of its Python part changed, where a program, a list or a
derivative is made; unchanged it must pass.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import flex_cases
from cuattn.flex import backward, block_mask, derivative, expression, plan, program
from flex_cases import heads_first

Q_LEN, KV_LEN, HEADS = 170, 210, 4


def case(rng):
    """A mask of hidden, asked and seen blocks and a tail, whose array ends early; in two forms."""
    shapes = (Q_LEN, HEADS, 16), (KV_LEN, 2, 16), (KV_LEN, 2, 16), (Q_LEN, HEADS, 16)
    arrays = [rng.standard_normal((2, *shape)).astype(np.float32) for shape in shapes]
    limit = np.full(100, 200, np.int32)
    limit[99] = KV_LEN - 7
    table = rng.standard_normal((HEADS, 7)).astype(np.float32)

    def mask_of(limit):
        def mask(b, h, q, k):
            near = (k // 64 == q // 64) | (k < 9 + h) | ((q >= 64) & (q < 128) & (k >= 128))
            return near & ((k % 5 != 1) | (k >= 150)) & (k < limit[q])

        return mask

    def score(s, b, h, q, k):
        return np.tanh(s) * 2.0 + table[h, (q + 2 * k) % 7]

    whole = np.concatenate([limit, np.full(Q_LEN - 100, limit[99])])
    return arrays, mask_of(limit), mask_of(whole), score, table


def errors(rng):
    """The largest errors of out, dq and the table's gradient, beside the formula's differences."""
    (q, k, v, dout), short, mask, score, table = case(rng)
    call = {"mask_mod": short, "score_mod": score}
    out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **call)
    found = cuattn.flex_attention_backward(dout, q, k, v, out, lse, arrays=[table], **call)
    first = [heads_first(x).astype(np.float64) for x in (q, k, v)]
    weights = heads_first(dout).astype(np.float64)

    def loss(x=first[0]):
        return (flex_cases.attention(x, *first[1:], mask=mask, mod=score)[0] * weights).sum()

    want = flex_cases.attention(*first, mask=mask, mod=score)[0]
    worst = [float(np.abs(heads_first(out) - want).max())]
    way = rng.standard_normal(first[0].shape)
    slope = (loss(first[0] + 1e-6 * way) - loss(first[0] - 1e-6 * way)) / 2e-6
    worst.append(abs(float((heads_first(found.dq) * way).sum()) - slope))
    for at in ((0, 0), (2, 5), (3, 6)):
        kept, ends = table[at], []
        for step in (2.0**-10, -(2.0**-10)):
            table[at] = kept + step
            ends.append(loss())
        table[at] = kept
        slope = (ends[0] - ends[1]) / 2.0**-9
        worst.append(abs(float(found.darrays[0][at]) - slope))
    return worst


def is_right(rng):
    return max(errors(rng)) < 2e-3


def test_the_unchanged_library_is_right(rng):
    for _ in range(3):
        assert is_right(rng)


def never_asked(lists_of):
    def changed(states):
        lists = lists_of(states)
        return lists._replace(entries=lists.entries & ~1)

    return changed


def rising(lists_of):
    def changed(states):
        lists = lists_of(states)
        entries = lists.entries.copy()
        for row in range(states.shape[2]):
            part = slice(*lists.starts[0, 0, row : row + 2])
            entries[part] = entries[part][::-1]
        return lists._replace(entries=entries)

    return changed


def without_tail(ranges):
    def changed(length, block):
        first, last = ranges(length, block)
        last[-1] = first[-1]
        return first, last

    return changed


def swapped(one, other):
    """Write one operation for another."""

    def change(operation):
        def changed(node, scalars, first_slot):
            name, args, number = operation(node, scalars, first_slot)
            return {one: other, other: one}.get(name, name), args, number

        return changed

    return change


def unclamped(on_host):
    """Read what lies behind an array, where its last element is meant."""

    def changed(array):
        x = on_host(array)
        return np.concatenate([x, np.zeros_like(x)]) if x.ndim == 1 and x.dtype.kind == "i" else x

    return changed


def by_one(f):
    return lambda expr, by: f(expr, by) if by.op != "index" else expression.read(1.0)


def of_first_load(loads):
    return lambda expr: loads(expr)[:0]


def indices_mirrored(gradient_program):
    def changed(score, slots):
        code = gradient_program(score, slots)
        gives = (code[:, 0] == program.CODE["give"]) & (code[:, 5] >= 0)
        code[gives, 3:5] = code[gives, 4:2:-1]
        return code

    return changed


def tanh_as_its_slope(rule):
    def changed(node, d):
        return d[0] if node.op == "tanh" else rule(node, d)

    return changed


MUTANTS = {
    "partial flag dropped": (plan, "lists_of", never_asked),
    "list ascending": (plan, "lists_of", rising),
    "tail not partial": (block_mask, "ranges", without_tail),
    "q and h swapped": (program, "operation", swapped("q", "h")),
    "q and kv swapped": (program, "operation", swapped("q", "k")),
    "less for less or equal": (program, "operation", swapped("lt", "le")),
    "quotient for remainder": (program, "operation", swapped("floordiv", "mod")),
    "and for or": (program, "operation", swapped("and", "or")),
    "clamp removed": (plan, "on_host", unclamped),
    "score's derivative is 1": (program, "derivative", by_one),
    "tanh's derivative is 1": (derivative, "rule", tanh_as_its_slope),
    "captured array given nothing": (program, "loads", of_first_load),
    "indices of a gradient swapped": (backward, "gradient_program", indices_mirrored),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(rng, monkeypatch, name):
    module, function, change = MUTANTS[name]
    if function == "on_host":
        from cuattn.flex import evaluate

        module = evaluate
    monkeypatch.setattr(module, function, change(getattr(module, function)))
    try:
        noticed = not is_right(rng)
    except ValueError as error:  # the compiled module refuses it by name
        noticed = "block_entries must fall" in str(error)
    assert noticed, name
