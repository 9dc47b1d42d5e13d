# SPDX-License-Identifier: Apache-2.0
"""Cases of the backward pass: their inputs, the call, and the judgement of its results. What a row
without a part holds is NaN everywhere: in q, k, v, dout, out, lse and dlse.
"""

from __future__ import annotations

import dataclasses

import numpy as np

import cases
import cuattn
import harness
import reference_backward
from cases import Case

NEED = ("dq", "dk", "dv")
SOURCES = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dbias": "bias",
    "dsinks": "sinks",
    "dslopes": "alibi_slopes",
}


@dataclasses.dataclass(frozen=True)
class BackwardCase(Case):
    """A forward case, and what only its backward pass has."""

    dlse: bool = False
    dropout: float = 0.0
    own_forward: bool = False  # out and lse are the library's, else float64's, rounded

    __str__ = Case.__str__

    def __post_init__(self):
        # The pairs that make no call.
        if self.storage == "expanded":
            object.__setattr__(self, "storage", "contiguous")


@dataclasses.dataclass
class BackwardProblem:
    """A forward problem, and dout, out, lse (and dlse) as numpy arrays."""

    case: BackwardCase
    forward: cases.Problem
    arrays: dict
    expected: dict  # gradients in float64
    plain: dict  # of the plain formula in the case's dtype
    sizes: dict = dataclasses.field(default_factory=dict)  # sums of absolute values

    @property
    def need(self):
        return tuple(self.expected)


def gradients(forward, given, rounded_to=None, **options):
    """The gradients of the reference for a forward problem and `given` dout, out, lse (, dlse)."""
    arrays = dict(forward.arrays)
    positional = [given["dout"], *(arrays.pop(name) for name in "qkv"), given["out"], given["lse"]]
    options |= {**forward.options, "dlse": given.get("dlse"), "rounded_to": rounded_to}
    if forward.case.layout != "ragged":
        return reference_backward.attention_backward(*positional, **arrays, **options)
    cu_seqlens = [arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k")]
    return reference_backward.attention_varlen_backward(
        *positional, *cu_seqlens, *forward.lengths, **arrays, **options
    )


def make_problem(case, rng):
    """Random inputs of `case`, and what is expected."""
    forward = cases.make_problem(case, rng)
    if case.dropout:
        forward.options |= {
            "dropout_p": case.dropout,
            "dropout_seed": int(rng.integers(2**62)),
            "dropout_offset": int(rng.integers(2**31)),
            **cases.dropout_places(rng, case.num_heads_q),
        }
    dtype = cases.DTYPES[case.dtype]
    exact_out, exact_lse = forward.reference()
    exact = {"out": exact_out, "lse": exact_lse}
    exact["dout"] = rng.standard_normal(exact_out.shape, np.float32).astype(dtype)
    if case.dlse:
        exact["dlse"] = rng.standard_normal(exact_lse.shape, np.float32)
    arrays = {
        name: x.astype(dtype if name in ("out", "dout") else np.float32)
        for name, x in exact.items()
    }
    if case.own_forward:
        arrays["out"], arrays["lse"] = run_forward(forward)
    poison(forward, arrays)
    # Both of out and lse as they are given: what their rounding costs, neither can mend.
    sizes = {}
    expected = gradients(forward, arrays, sizes=sizes)
    return BackwardProblem(
        case, forward, arrays, expected, gradients(forward, arrays, dtype), sizes
    )


def run_forward(forward):
    """What the library gives for a forward problem."""
    arrays = dict(forward.arrays)
    qkv = [arrays.pop(name) for name in "qkv"]
    if forward.case.layout != "ragged":
        return cuattn.attention(*qkv, **arrays, **forward.options, return_lse=True)
    cu_seqlens = [arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k")]
    out, lse = cuattn.attention_varlen(
        *qkv, *cu_seqlens, *forward.lengths, **arrays, **forward.options, return_lse=True
    )
    return out, lse


def poison(forward, arrays):
    """NaN in all rows that take no part."""
    case, used = forward.case, forward.arrays.get("seqused_q")
    by_rows = {}  # views with the rows, of a sequence or of all, first
    for name, x in arrays.items():
        axis = x.ndim - 1 if name in ("lse", "dlse") else x.ndim - 3
        if name not in ("lse", "dlse") and case.layout == "bhsd":
            axis += 1
        by_rows[name] = np.moveaxis(x, axis, 0)
    for x in by_rows.values():
        if case.layout == "ragged":
            starts = forward.arrays["cu_seqlens_q"]
            x[starts[-1] :] = np.nan
            for b in range(case.batch if used is not None else 0):
                x[starts[b] + used[b] : starts[b + 1]] = np.nan
        elif used is not None:
            for b in range(case.batch):
                x[used[b] :, b] = np.nan


def run(device, backend, problem, need=None, dkv_dtype=None, **options):
    """Call the library; the gradients as a dict of numpy arrays, every buffer checked."""
    case, arena = problem.case, harness.Arena(device)
    need = problem.need if need is None else need
    places = harness.storages(case)
    places |= dict.fromkeys(("dout", "dq", "dk", "dv"), case.storage)
    placed = {
        name: arena.put(x, places.get(name, "contiguous"), name, align=4 if x.ndim < 3 else 16)
        for name, x in (problem.forward.arrays | problem.arrays).items()
    }
    positional = [placed.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")]
    function = cuattn.attention_backward
    if case.layout == "ragged":
        function = cuattn.attention_varlen_backward
        positional += [placed.pop("cu_seqlens_q"), placed.pop("cu_seqlens_k")]
        positional += problem.forward.lengths
    keywords = {**placed, **problem.forward.options, "backend": backend, "need": need, **options}
    if case.give_out:
        for name in need:
            like = problem.forward.arrays[SOURCES[name]]
            dtype = like.dtype if name == "dq" or name not in NEED else dkv_dtype or like.dtype
            place = places.get(name, places.get(SOURCES[name], "contiguous"))
            keywords[name] = arena.output(like.shape, dtype, place, name)
    found = function(*positional, **keywords)
    device.synchronize()
    assert found._fields == tuple(need)
    arena.verify()
    results = {}
    for name, x in found._asdict().items():
        assert device.is_array(x), f"{name} is a {type(x)}"
        assert not case.give_out or x is keywords[name]
        results[name] = device.numpy(x)
    return results


def judge(problem, found, *others):
    """The tolerance rule for each gradient, over this draw and `others`: (problem, found) pairs of
    the same case. Rows that take no part, which make_problem fills with NaN, have exactly 0.
    """
    for of, got in ((problem, found), *others):
        marks = {
            "dq": of.arrays["dout"],
            "dk": of.forward.arrays["k"],
            "dv": of.forward.arrays["v"],
        }
        for name, mark in marks.items():
            unused = np.isnan(mark.astype(np.float32)).all(axis=-1)
            assert name not in got or not np.any(got[name][unused]), f"{name} of an unused row"
    for name in found:
        dtype = problem.case.dtype
        if name in ("dsinks", "dslopes"):
            dtype = "float32"
        elif name == "dbias":
            dtype = str(problem.forward.arrays["bias"].dtype)
        triples = [
            (got[name], of.expected[name], of.plain[name])
            for of, got in ((problem, found), *others)
        ]
        if len(triples) == 1:
            got, expected, plain = triples[0]
        else:
            got, expected, plain = (
                np.concatenate([np.asarray(one, np.float64).reshape(-1) for one in part])
                for part in zip(*triples, strict=True)
            )
        # Terms of both signs: what float32 leaves of their sum is a part of their sizes. A term
        # errs as its weight does, whose exponent is rounded at the size of its score.
        sizes = [np.max(of.sizes.get(name, 0), initial=0) for of, _ in ((problem, found), *others)]
        floor = 4 * np.finfo(np.float32).eps * max(sizes)
        try:
            cases.check(got, expected, plain, dtype, floor)
        except AssertionError as error:
            error.args = (f"{name} of {problem.case}: {error}",)
            raise


ENOUGH, DRAWS = 8, 16  # errors of the plain formula, of which the largest is a measure


def assert_case(device, backend, case, rng, need=None, without=(), **options):
    """The library against the reference for one case: the gradients `need`, or all that the case
    has but those in `without`. Gradients of few elements, as dsinks of one head, and of few rows
    are judged over several draws together: the plain formula's one error may be small by chance.
    """
    last = []

    def attempt():
        last.clear()
        counts = {}  # elements that err by themselves
        while not last or (len(last) < DRAWS and min(counts.values()) < ENOUGH):
            problem = make_problem(case, rng)
            asked = need or tuple(name for name in problem.need if name not in without)
            last.append((problem, run(device, backend, problem, asked, **options)))
            # Where a row sees one key, all elements of its gradients err alike.
            rows = np.isfinite(problem.arrays["lse"]).sum()
            for name, x in problem.expected.items():
                counts[name] = counts.get(name, 0) + (min(rows, x.size) if np.any(x) else ENOUGH)
        judge(*last[0], *last[1:])

    harness.assert_by_draws(case.dtype, attempt)
    return last[0][0]


FACTORS = {
    **cases.FACTORS,
    "batch": (1, 2, 3),
    "lengths": (
        *((1, 1), (1, 200), (200, 1), (17, 0), (0, 17), (63, 65), (64, 64), (65, 63), (127, 129)),
        *((129, 127), (200, 64), (33, 200), (40, 147)),
    ),
    "scale": (None, 0.3, -0.2, 0.0),
    "storage": ("contiguous", "transposed", "padded", "packed", "odd"),
    "dlse": (False, True),
    "dropout": (0.0, 0.25),
}


def case_of(factors):
    """The BackwardCase of one row of pairwise(FACTORS)."""
    values = dict(factors)
    own = {name: values.pop(name) for name in ("dlse", "dropout")}
    base = cases.case_of(values)
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return BackwardCase(**fields, **own)
