# SPDX-License-Identifier: Apache-2.0
"""Cases of attention over float8 arrays: codes and scales for the library, numbers for the oracle.

The oracle is float64 of what codes and scales mean, the rule that of cases.py. Next: tests/float8/.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

import cases
import harness
from cases import Case, Problem, make_problem

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 128
SCALES = ("none", "one", "head", "batch", "parts")
FACTORS = {
    **cases.FACTORS,
    "dtype": ("float32",),  # of out, which float8 queries may have
    "dims": tuple(d for d in cases.FACTORS["dims"] if d[0] % 16 == 0 and d[1] % 16 == 0),
    "bias": tuple(name for name in cases.FACTORS["bias"]),
    "scales": SCALES,
}

SM90_FACTORS = {  # what sm90 takes
    **FACTORS,
    "accumulate": ("exact", "fast"),
    "softcap": (0.0,),
    "alibi": ("none",),
    "bias": ("none",),
    "scales": ("none", "one", "head", "batch", "channel"),
    "magnitude": (0.0, 1.0, 4.0),
}


def sm90_rows() -> list[dict]:
    """What pairwise() makes of SM90_FACTORS."""
    return cases.pairwise(SM90_FACTORS)


def draw_scales(case: Case, problem: Problem, kind: str, rng) -> dict:
    """q_scale, k_scale and v_scale of a kind; "parts": blocks of rows, and "channel", of v."""
    if kind == "none":
        return {}
    heads, batch = case.num_heads_kv, case.batch
    longest = problem.lengths or (case.seqlen_q, case.seqlen_kv)
    blocks = [-(-n // BLOCK) for n in longest]
    parts = {
        "q_scale": (batch, case.num_heads_q, blocks[0]),
        "k_scale": (batch, heads, blocks[1]),
        "v_scale": (batch, heads, case.dim_v),
    }
    shapes = {"one": (1,), "head": (heads,), "batch": (batch, heads)}
    if kind == "channel":  # of v alone
        parts.update(q_scale=(batch, heads), k_scale=(heads,))
    drawn = {
        name: rng.uniform(0.5, 1.5, shapes.get(kind, parts[name])).astype(np.float32)
        for name in parts
    }
    if kind == "one" and rng.random() < 0.5:
        return {name: float(scale[0]) for name, scale in drawn.items()}
    return drawn


def places(case: Case, problem: Problem, name: str):
    """Sequence and place in it of each stored row of q, k or v, -1 where there is none."""
    side = "q" if name == "q" else "k"
    if case.layout != "ragged":
        rows = case.seqlen_q if name == "q" else case.seqlen_kv
        return np.arange(case.batch)[:, None], np.arange(rows)[None]
    starts = problem.arrays[f"cu_seqlens_{side}"]
    rows = np.arange(len(problem.arrays[name]))
    owner = np.clip(np.searchsorted(starts, rows, "right") - 1, 0, case.batch - 1)
    return owner, rows - starts[owner]


def meant(case: Case, problem: Problem, name: str, codes, scale):
    """The numbers that codes and a scale mean, in float32."""
    values = codes.astype(np.float32)
    if scale is None:
        return values
    scale = np.asarray(scale, np.float32)
    if scale.size == 1:
        return values * scale.reshape(())
    owner, place = places(case, problem, name)
    heads = values.shape[1 if case.layout in ("ragged", "bhsd") else 2]
    full = np.broadcast_to(scale, (case.batch, *scale.shape[-1:])) if scale.ndim == 1 else scale
    full = np.repeat(full, heads // full.shape[1], axis=1)  # heads of q that read a key head
    if full.ndim == 2:
        factors = full[owner][..., None] + np.zeros((*place.shape, 1, 1), np.float32)
    elif name == "v":
        factors = full[owner] + np.zeros((*place.shape, 1, 1), np.float32)
    else:
        part = np.clip(place // BLOCK, 0, full.shape[2] - 1)
        factors = full[owner, :, part][..., None]
    return values * (factors.swapaxes(1, 2) if case.layout == "bhsd" else factors)


def make(
    case: Case, kind: str, rng, int8: bool = False, accumulate: str = "exact"
) -> tuple[Problem, Problem]:
    """Draw a case: the problem of the library, and the same in numbers. int8: q and k are that."""
    problem = make_problem(case, rng)
    codes = {name: problem.arrays[name].astype(F8) for name in "qkv"}
    scales = draw_scales(case, problem, kind, rng)
    if int8:  # codes of q and k are multiples of 1 / 32
        for name in "qk":
            wide = np.nan_to_num(np.asarray(problem.arrays[name], np.float32) * 32)
            codes[name] = np.clip(np.rint(wide), -127, 127).astype(np.int8)
            scales[f"{name}_scale"] = scales.get(f"{name}_scale", 1.0) * (1 / 32)
    numbers = {
        name: meant(case, problem, name, codes[name], scales.get(f"{name}_scale")) for name in "qkv"
    }
    arrays = {name: x for name, x in scales.items() if isinstance(x, np.ndarray)}
    options = {name: x for name, x in scales.items() if name not in arrays}
    given = Problem(
        case,
        {**problem.arrays, **codes, **arrays},
        {**problem.options, **options, "accumulate": accumulate},
        problem.lengths,
    )
    return given, dataclasses.replace(problem, arrays={**problem.arrays, **numbers})


def assert_case(device, backend, case: Case, kind: str, rng, int8: bool = False) -> None:
    """The library against the oracle; without an out of ours the result is bfloat16."""
    case = dataclasses.replace(case, dtype="float32" if case.give_out else "bfloat16")

    def attempt():
        given, numbers = make(dataclasses.replace(case, dtype="float32"), kind, rng, int8)
        if not harness.serves(backend, device, case):
            return
        out, lse = harness.run(device, backend, given)
        assert out.dtype == cases.DTYPES[case.dtype]
        harness.judge(dataclasses.replace(numbers, case=case), out, lse)

    harness.assert_by_draws(case.dtype, attempt)


def peak(numbers):
    """No less than the largest probability of each row, sinks apart, laid out as lse: the root of
    the sum of all squared.
    """
    arrays = {name: x for name, x in numbers.arrays.items() if name != "sinks"}
    _, lse = dataclasses.replace(numbers, arrays=arrays).reference()
    arrays["q"] = 2 * arrays["q"]
    _, of_squares = dataclasses.replace(numbers, arrays=arrays).reference()
    dead = np.isneginf(lse)
    return np.exp(np.where(dead, 0, of_squares) / 2 - np.where(dead, 0, lse))


def judge_products(case, numbers, out, lse, accumulate="exact", unit=0.0):
    """The rule for products in float8. `numbers`: the problem in what codes and scales mean.

    Rows of no sequence do not count.

    By what the arithmetic keeps (test_float8_bounds.py holds it against a model of that):
    - Tensor cores cut 32 products and the sum so far to 13 bits below the largest of them, which
      is |q||k| at most. Cuts of both signs nearly cancel: a score and lse are off by 2^-12 |q||k|,
      a probability by twice that part of itself.
    - Products of int8 are exact, and a score is off by a `unit` of them at most.
    - P is e4m3, off by 2^-4 of itself at most; one below 2^-13 of the row's largest by 2^-14 of
      that. With equal scores it is exact. So out is off by these parts of what |v| would give.
    - Its sums keep 13 bits, too: 2^-10 of that.
    - Fast sums are cut for every 32 keys, where that is more: by 2^-13 of |P||v| each, if values
      have no mean. They are divided by the sum of the rounded P, which is off as its terms are, and
      which lse is of.
    """
    is_fast = accumulate == "fast"
    expected, expected_lse = numbers.reference()
    sizes = {**numbers.arrays, "v": np.abs(numbers.arrays["v"])}
    size, _ = dataclasses.replace(numbers, arrays=sizes).reference()
    flat = {**sizes, "q": np.zeros_like(sizes["q"])}
    flat.pop("sinks", None)
    mean, log_count = dataclasses.replace(numbers, arrays=flat).reference()  # of |v|, keys seen
    by_rows = log_count if case.layout == "bhsd" else np.moveaxis(log_count, -2, -1)
    count = np.exp(by_rows)[..., None]
    small = 2.0**-14 * count * (mean + is_fast * np.abs(expected))
    of_sum = np.zeros_like(lse)  # what rounding does to the sum of P
    if is_fast and case.magnitude > 0:
        of_sum = 2.0**-4 + 2.0**-10 + 2.0**-14 * np.exp(log_count) * peak(numbers)
    rows = len(out)
    if case.layout == "ragged":
        rows = int(numbers.arrays["cu_seqlens_q"][-1])
        lse, expected_lse, of_sum = (x[:, :rows] for x in (lse, expected_lse, of_sum))
    out, expected, size, small, count = (
        np.asarray(x[:rows], np.float64) for x in (out, expected, size, small, count)
    )
    largest = [np.nanmax(np.linalg.norm(numbers.arrays[x], axis=-1), initial=0) for x in "qk"]
    of_score = 2.0**-12 * largest[0] * largest[1] * (case.scale or case.head_dim**-0.5) + unit
    dead = np.isneginf(expected_lse)
    assert (np.isneginf(lse) == dead).all(), f"{case}: lse -inf in other rows"
    off = np.abs(np.where(dead, 0, lse) - np.where(dead, 0, expected_lse))
    allowed = of_score + of_sum + 1e-5 * (1 + np.abs(np.where(dead, 0, expected_lse)))
    assert (off <= allowed).all(), f"{case}: lse off by {off.max()}, {allowed.max()} are due"
    of_cuts = np.maximum(2.0**-10, 2.0**-13 * count / 32) if is_fast else 2.0**-10
    eps = cases.EPS[case.dtype] + of_cuts  # of out, and of the sums
    of_p = 0.0 if case.magnitude == 0 else 2.0**-4 + 2 * of_score
    error = np.abs(out - expected)
    rounded = size + (is_fast and of_p > 0) * np.abs(expected)  # off by as much as P is
    within = error <= eps * size + of_p * rounded + small * (of_p > 0) + 1e-6
    assert within.all(), f"{case}: out off by {error[~within]} at {np.argwhere(~within)[:9]}"
    norms = [np.linalg.norm(x) for x in (error, expected, eps * size)]
    assert norms[0] <= 2 * of_p * norms[1] + 2 * norms[2] + 1e-6, f"{case}: norms {norms}"
