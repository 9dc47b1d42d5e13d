# SPDX-License-Identifier: Apache-2.0
"""The tests of the tests of latent attention, rotation and sampling: planted mistakes, each of
which the comparison must notice. A mutant is the plain formula with one thing wrong, in the
library's place.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

import cases
import fused_cases
import mla_cases
import reference
from mla_cases import MlaCase

BASE = MlaCase(lens=(45, 20), heads=5)
# Each tile of keys raises the maxima: what follows them wrongly shows in every row.
LONG = MlaCase(lens=(96,), heads=4, block_size=32, scale=1.0, spread=0.3)
TILE, HALF = 32, 256  # keys of a step; columns of one warpgroup


def plain(case, arrays):
    return mla_cases.expected(case, arrays, cases.DTYPES[case.dtype])


def of_case(**changes):
    """A mutant that computes another call."""
    return lambda case, arrays: plain(dataclasses.replace(case, **changes), arrays)


def of_arrays(change):
    """A mutant that reads its arrays wrongly."""
    return lambda case, arrays: plain(case, {**arrays, **change(case, arrays)})


def without_rope(case, arrays):
    q = arrays["q"].copy()
    q[..., case.latent :] = 0
    return {"q": q}


def one_key_more(case, arrays):
    cache = arrays["cache"].copy()
    cache[np.isnan(cache.astype(np.float32))] = 1
    return {"cache": cache, "context_lens": arrays["context_lens"] + np.int32(1)}


def turned_again(case, arrays):
    """The rope columns of q by one more position."""
    half = case.rope // 2
    angles = 10000.0 ** (-np.arange(half) / half)
    q = arrays["q"].copy()
    part = q[..., case.latent :].astype(np.float64)
    cos, sin = (np.broadcast_to(f(angles), (*part.shape[:-2], half)) for f in (np.cos, np.sin))
    q[..., case.latent :], _ = fused_cases.turned(part, cos, sin, 0, True)
    return {"q": q}


def values_from_64(case, arrays):
    cache = arrays["cache"][:, :, None]
    return reference.paged_attention(
        arrays["q"], cache, cache[..., 64:576], arrays["block_tables"], arrays["context_lens"],
        scale=case.scale, rounded_to=cases.DTYPES[case.dtype],
    )  # fmt: skip


def stepwise(factor_of=lambda factor, step: factor, weights_of=lambda now, before: now):
    """One sequence, tile by tile; the upper half of the columns takes what the functions say."""

    def mutant(case, arrays):
        dtype, lens = cases.DTYPES[case.dtype], arrays["context_lens"]
        blocks = arrays["block_tables"][0, : -(-lens[0] // case.block_size)]
        keys = arrays["cache"][blocks].reshape(-1, case.latent + case.rope)[: lens[0]]
        keys, q = keys.astype(np.float32), arrays["q"][0].astype(np.float32)
        out = np.zeros((case.heads, case.latent), np.float32)
        maximum, total, before = np.full((case.heads, 1), -np.inf, np.float32), 0.0, None
        for step, first in enumerate(range(0, len(keys), TILE)):
            tile = keys[first : first + TILE]
            scores = np.float32(case.scale) * (q @ tile.T)
            largest = np.maximum(maximum, scores.max(-1, keepdims=True))
            factor, weights = np.exp(maximum - largest), np.exp(scores - largest)
            total, maximum = total * factor + weights.sum(-1, keepdims=True), largest
            weights = weights.astype(dtype).astype(np.float32)
            out[:, :HALF] = out[:, :HALF] * factor + weights @ tile[:, :HALF]
            other = weights if before is None else weights_of(weights, before)
            values = tile[:, HALF : case.latent]
            out[:, HALF:] = out[:, HALF:] * factor_of(factor, step) + other @ values
            before = weights
        lse = (maximum + np.log(total))[None, :, 0]
        return (out / total).astype(dtype)[None], lse

    return mutant


HONEST = {"formula": (BASE, plain), "steps": (LONG, stepwise())}
MUTANTS = {
    "rope_panel_left_out": (BASE, of_arrays(without_rope)),
    "values_from_column_64": (BASE, values_from_64),
    "scale_of_576_columns": (BASE, of_case(scale=576**-0.5)),
    "first_factor_ignored_by_the_other_half": (
        LONG, stepwise(lambda factor, step: np.ones_like(factor) if step == 1 else factor)),
    "second_factor_ignored_by_the_other_half": (
        LONG, stepwise(lambda factor, step: np.ones_like(factor) if step == 2 else factor)),
    "weights_read_before_they_are_written": (LONG, stepwise(weights_of=lambda now, before: before)),
    "last_half_block_not_masked": (BASE, of_arrays(one_key_more)),
    "q_turned_twice": (BASE, of_arrays(turned_again)),
    "lse_in_base_2": (BASE, lambda c, a: (plain(c, a)[0], plain(c, a)[1] / np.float32(np.log(2)))),
}  # fmt: skip


def climbing(case, arrays):
    """Keys that grow with their place, for q of one sign."""
    arrays["q"][...] = np.abs(arrays["q"])
    for i, block in enumerate(arrays["block_tables"][0, : -(-case.lens[0] // case.block_size)]):
        size = np.float32(0.01 * (i + 1))
        arrays["cache"][block] = np.abs(arrays["cache"][block]) * size.astype(arrays["q"].dtype)


def judged(name, table, dtype, rng):
    case, mutant = table[name]
    case = dataclasses.replace(case, dtype=dtype)
    call = lambda device, backend, case, arrays, give_out: mutant(case, arrays)  # noqa: E731
    reorder = (lambda arrays: climbing(case, arrays)) if case.block_size == TILE else None
    with mock.patch.object(mla_cases, "call", call):
        mla_cases.assert_case(None, "cpu", case, rng, reorder=reorder)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices(name, dtype, rng):
    with pytest.raises(AssertionError):
        judged(name, MUTANTS, dtype, rng)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", HONEST)
def test_what_is_right_passes(name, dtype, rng):
    judged(name, HONEST, dtype, rng)


def turned_wrongly(name):
    """apply_rope with one thing wrong, for test_rope."""

    def apply_rope(x, cos, sin, positions=None, *, out=None, **options):
        inverse, offset = options.get("inverse", False), options.get("offset", 0)
        rows = (
            np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]) if positions is None else positions
        )
        angles = cos[rows], sin[rows]
        interleaved = options["interleaved"] != (name == "pairs")
        y, _ = fused_cases.turned(x, *angles, offset, interleaved, inverse != (name == "sin sign"))
        if name == "twice":
            y, _ = fused_cases.turned(y, *angles, offset, interleaved, inverse)
        y = y.astype(x.dtype)
        if name == "rest not copied":
            y[..., :offset] = 0
        if out is None:
            return y
        out[...] = y
        return out

    return apply_rope


@pytest.mark.parametrize("name", ["right", "sin sign", "twice", "pairs", "rest not copied"])
def test_a_wrong_rotation_is_noticed(name, rng):
    def test():
        with mock.patch.object(fused_cases.cuattn, "apply_rope", turned_wrongly(name)):
            fused_cases.assert_turned(mla_cases.harness.Cpu(), "float32", False, rng)

    if name == "right":
        return test()
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize(
    "options", [{"offset": 0}, {"seed": 9}, {"temperature": 1.2}, {"top_k": 6}]
)
def test_wrong_draws_are_noticed(options):
    """An offset that does not advance, one seed for all, another temperature, a token less."""
    sample = fused_cases.cuattn.sample
    wrong = lambda *arrays, **given: sample(*arrays, **{**given, **options})  # noqa: E731
    case = {"top_k": 7} if "top_k" in options else {}
    with (
        mock.patch.object(fused_cases.cuattn, "sample", wrong),
        pytest.raises(AssertionError),
    ):
        fused_cases.assert_distribution(mla_cases.harness.Cpu(), case)
