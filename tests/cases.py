# SPDX-License-Identifier: Apache-2.0
"""What is tested and when it passes: the cases, their inputs, and the tolerance rule. Shared with
the benchmarks.

A result passes when its error against float64 is at most twice that of the plain low-precision
formula plus one rounding, by the maximum and by the Frobenius norm, and its infinities and NaN are
exactly where they belong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import ml_dtypes
import numpy as np

import reference

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
EPS = {
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}  # distance from 1 to the next number

CPU_BACKENDS = ("cpu", "naive")
CUDA_BACKENDS = ("naive", "cublas", "tiled", "simt", "sm80", "sm90", "auto")
TENSOR_CORE_BACKENDS = ("sm80", "sm90")  # float16 and bfloat16 alone

# (seqlen_q, seqlen_kv): tile edges and their neighbours, q longer than k, single rows, nothing at
# all.
LENGTHS = {
    "one": (1, 1),
    "decode": (1, 239),
    "column": (239, 1),
    "small": (3, 17),
    "tall": (31, 3),
    "edge_31_33": (31, 33),
    "edge_63_65": (63, 65),
    "edge_64_64": (64, 64),
    "edge_65_63": (65, 63),
    "edge_97_127": (97, 127),
    "edge_127_129": (127, 129),
    "edge_128_128": (128, 128),
    "edge_129_128": (129, 128),
    "odd_147_191": (147, 191),
    "odd_193_113": (193, 113),
    "odd_113_203": (113, 203),
    "wide_16_300": (16, 300),
    "tall_300_16": (300, 16),
    "long_255_257": (255, 257),
    "no_keys": (17, 0),
    "no_queries": (0, 17),
}
HEAD_DIMS = tuple(range(8, 257, 8))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Sizes, options and how the arrays lie in memory; the data comes from a seed."""

    dtype: str = "float32"
    batch: int = 2
    num_heads_q: int = 4
    num_heads_kv: int = 2
    seqlen_q: int = 33
    seqlen_kv: int = 65
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    layout: str = (
        "bshd"  # or "bhsd", or "ragged" (attention_varlen; seqlen_* are then the longest lengths)
    )
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = "none"  # "head", "batch"
    sinks: bool = False
    bias: str = "none"  # a name of BIASES
    seqused: str = "none"  # "q", "k", "both"
    kv_start: bool = False  # padding on the left; not of ragged
    storage: str = "contiguous"  # a name of strides.STORAGES, for each of q, k, v and out
    give_out: bool = True  # out= and lse_out= are ours and poisoned, else the library allocates
    magnitude: float = 1.0  # of q and k

    def __str__(self):
        parts = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "dtype"
        ]
        return "-".join(parts).replace(" ", "")

    @property
    def dim_v(self):
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scored(self):
        return bool(self.softcap) or self.alibi != "none" or self.bias != "none"


# Shape (axes that are 1 or absent are broadcast) and dtype of each bias; None: the dtype of q.
BIASES = {
    "full": ("bhij", None),
    "float32": ("bhij", "float32"),
    "bool": ("bhij", "bool"),
    "rows": ("11ij", None),
    "keys": ("b11j", "float32"),
    "bool_keys": ("b11j", "bool"),
    "heads": ("1hi1", None),
    "matrix": ("ij", "float32"),
    "transposed": (
        "bhij",
        None,
    ),  # keys vary slowest in memory: any non-negative strides are allowed
}


@dataclasses.dataclass
class Problem:
    """Inputs of a case as numpy arrays, ready for the reference and for the library."""

    case: Case
    # Q, k, v (and cu_seqlens_q, cu_seqlens_k), alibi_slopes, sinks, bias, seqused_q, seqused_k,
    # kv_start.
    arrays: dict
    options: dict  # keyword arguments that are not arrays
    lengths: tuple = ()  # ragged: max_seqlen_q, max_seqlen_k

    def reference(self, rounded_to=None):
        """Out and lse of the oracle, or with rounded_to of the plain formula in that dtype."""
        arrays = dict(self.arrays)
        qkv = [arrays.pop(name) for name in "qkv"]
        if self.case.layout == "ragged":
            cu_seqlens = [arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k")]
            return reference.attention_varlen(
                *qkv, *cu_seqlens, *self.lengths, **arrays, **self.options, rounded_to=rounded_to
            )
        return reference.attention(*qkv, **arrays, **self.options, rounded_to=rounded_to)


def dropout_places(rng, num_heads):
    """Where a call with dropout begins as a part of a greater one: nowhere, or anywhere."""
    if rng.integers(3) == 0:
        return {}
    row, seq = (int(x) for x in rng.integers(0, 2**16, 2))
    key = 16 * int(rng.integers(0, 2**20))  # CUDA takes no other
    others = int(rng.integers(5))
    heads = num_heads + others
    head = seq * heads + int(rng.integers(others + 1))  # the part is of one sequence's heads
    places = {"dropout_row": row, "dropout_key": key, "dropout_head": head}
    return places | {"dropout_heads": heads if others or rng.integers(2) else 0}


def normals(rng, shape):
    """Normal numbers in float32: many are drawn from a table, in a quarter of the time."""
    if np.prod(shape, dtype=np.int64) < 65536:
        return rng.standard_normal(shape, np.float32)
    return rng.standard_normal(65536, np.float32)[rng.integers(65536, size=shape, dtype=np.uint16)]


def make_problem(case, rng):
    """Random inputs of `case`. Rows that take no part (beyond seqused, before kv_start, behind the
    last sequence) hold NaN.
    """
    dtype = DTYPES[case.dtype]
    arrays, lengths = {}, ()
    if case.layout == "ragged":
        longest_q, longest_k = (
            _ragged_lengths(n, case.batch, rng) for n in (case.seqlen_q, case.seqlen_kv)
        )
        spare = int(
            rng.integers(0, 3)
        )  # rows behind the last sequence; max_seqlen above the longest one
        lengths = (case.seqlen_q + spare, case.seqlen_kv + spare)
        rows_q, rows_k = (int(n.sum()) + spare for n in (longest_q, longest_k))
        shapes = [
            (rows_q, case.num_heads_q),
            (rows_k, case.num_heads_kv),
            (rows_k, case.num_heads_kv),
        ]
        for name, n in (("cu_seqlens_q", longest_q), ("cu_seqlens_k", longest_k)):
            arrays[name] = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
    else:
        shapes = [
            (case.batch, s, h) if case.layout == "bshd" else (case.batch, h, s)
            for s, h in (
                (case.seqlen_q, case.num_heads_q),
                (case.seqlen_kv, case.num_heads_kv),
                (case.seqlen_kv, case.num_heads_kv),
            )
        ]
    dims = case.head_dim, case.head_dim, case.dim_v
    for name, shape, dim in zip("qkv", shapes, dims, strict=True):
        values = normals(rng, (*shape, dim)) * (case.magnitude if name in "qk" else 1.0)
        if case.storage == "expanded" and name in "kv":  # one head, seen by all with stride 0
            values[:] = values.take([0], axis=1 if case.layout == "bhsd" else len(shape) - 1)
        arrays[name] = values.astype(dtype)

    max_q, max_k = lengths or (case.seqlen_q, case.seqlen_kv)
    for name, rows in (("q", max_q), ("k", max_k)):
        if case.seqused in (name, "both"):
            stored = np.full(case.batch, rows)
            if case.layout == "ragged":
                stored = np.diff(arrays[f"cu_seqlens_{name}"])
            arrays[f"seqused_{name}"] = rng.integers(0, stored + 1).astype(np.int32)
    if case.kv_start:
        arrays["kv_start"] = rng.integers(0, max_k + 1, case.batch).astype(np.int32)
    if case.alibi != "none":
        shape = (case.num_heads_q,) if case.alibi == "head" else (case.batch, case.num_heads_q)
        arrays["alibi_slopes"] = rng.uniform(0.0, 0.5, size=shape).astype(np.float32)
    if case.sinks:
        arrays["sinks"] = rng.normal(scale=2, size=case.num_heads_q).astype(np.float32)
    if case.bias != "none":
        axes, bias_dtype = BIASES[case.bias]
        extents = {"b": case.batch, "h": case.num_heads_q, "i": max_q, "j": max_k, "1": 1}
        values = rng.standard_normal([extents[a] for a in axes], np.float32)
        arrays["bias"] = (
            values > -0.5
            if bias_dtype == "bool"
            else values.astype(DTYPES[bias_dtype or case.dtype])
        )
    _poison_unused_rows(case, arrays, max_q, max_k)

    options = {
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
        "softcap": case.softcap,
    }
    if case.layout != "ragged":
        options["layout"] = case.layout
    return Problem(case, arrays, options, lengths)


def lowest(array):
    """The most negative finite number of an array's dtype."""
    return float(ml_dtypes.finfo(array.dtype).min)


def _ragged_lengths(longest, batch, rng):
    """Lengths of `batch` sequences: one the longest, about one in four empty."""
    lengths = rng.integers(0, longest + 1, size=batch) * (rng.random(batch) < 0.75)
    if batch:
        lengths[rng.integers(batch)] = longest
    return lengths


def _poison_unused_rows(case, arrays, max_q, max_k):
    for name, cu_name, limit in (("q", "q", max_q), ("k", "k", max_k), ("v", "k", max_k)):
        used = arrays.get(f"seqused_{cu_name}")
        if case.layout == "ragged":
            starts = arrays[f"cu_seqlens_{cu_name}"]
            arrays[name][starts[-1] :] = np.nan
            for b in range(case.batch if used is not None else 0):
                arrays[name][starts[b] + used[b] : starts[b + 1]] = np.nan
        elif used is not None:
            rows = arrays[name] if case.layout == "bshd" else arrays[name].swapaxes(1, 2)
            for b in range(case.batch):
                if case.storage != "expanded" or name == "q":
                    rows[b, used[b] : limit] = np.nan
        if case.kv_start and name != "q" and case.storage != "expanded":
            rows = arrays[name] if case.layout == "bshd" else arrays[name].swapaxes(1, 2)
            for b in range(case.batch):
                rows[b, : arrays["kv_start"][b]] = np.nan


# The tolerance rule.


class ToleranceExceeded(AssertionError):
    """An error larger than the rule allows, by the factor `excess`."""

    def __init__(self, message, excess):
        super().__init__(message)
        self.excess = float(excess)


# An excess of less than so many times the limit may be chance: in float32 the plain formula errs as
# little as ours, and one draw in a hundred lies beyond twice its error.
CHANCE = {"float32": 2.0, "float16": 0.0, "bfloat16": 0.0}
_redrawn = False  # inside drawn_again()


@contextlib.contextmanager
def drawn_again():
    """Within it each excess counts: who checks here draws anew, and tells chance from a fault."""
    global _redrawn
    before, _redrawn = _redrawn, True
    try:
        yield
    finally:
        _redrawn = before


def check(out, expected, plain, dtype, floor=0.0):
    """Raise AssertionError unless `out` is as near to `expected` as the rule asks.

    An error below `floor` passes in any case; one that chance explains, where nobody draws again.
    """
    out, expected, plain = (np.asarray(x, np.float64) for x in (out, expected, plain))
    _check_special_values(out, expected, "out")
    finite = np.isfinite(expected)
    if not finite.any():
        return
    error, size = np.abs(out[finite] - expected[finite]), np.abs(expected[finite])
    plain_error = np.abs(plain[finite] - expected[finite])
    # The plain formula may overflow where ours must not.
    plain_error = plain_error[np.isfinite(plain_error)]
    worst_plain = plain_error.max(initial=0.0)
    limit = max(2 * worst_plain + EPS[dtype] * size.max(), floor)
    norm_limit = 2 * np.linalg.norm(plain_error) + EPS[dtype] * np.linalg.norm(size)
    norm_limit = max(norm_limit, floor * np.sqrt(error.size))
    if not error.max() <= limit:
        where = tuple(int(i) for i in np.argwhere(finite)[error.argmax()])
        _judge_excess(
            f"out: max error {error.max():.3e} exceeds {limit:.3e} (plain {worst_plain:.3e}) "
            f"at {where}: got {out[where]!r}, expected {expected[where]!r}",
            error.max() / max(limit, np.finfo(np.float64).tiny),
            dtype,
        )
    norm = np.linalg.norm(error)
    if not norm <= norm_limit:
        message = f"out: Frobenius error {norm:.3e} exceeds {norm_limit:.3e}"
        _judge_excess(message, norm / max(norm_limit, np.finfo(np.float64).tiny), dtype)


def _judge_excess(message, excess, dtype):
    if _redrawn or not excess <= CHANCE[dtype]:
        raise ToleranceExceeded(message, excess)


def check_lse(lse, expected, plain):
    """The rule for lse: 2 max|plain error| + 1e-5 max(1, |lse|)."""
    lse, expected, plain = (np.asarray(x, np.float64) for x in (lse, expected, plain))
    _check_special_values(lse, expected, "lse")
    finite = np.isfinite(expected)
    usable = finite & np.isfinite(plain)
    plain_error = np.abs(plain[usable] - expected[usable])
    limit = 2 * plain_error.max(initial=0.0) + 1e-5 * np.maximum(1, np.abs(expected[finite]))
    error = np.abs(lse[finite] - expected[finite])
    if not (error <= limit).all():
        worst = int((error / limit).argmax())
        where = tuple(int(i) for i in np.argwhere(finite)[worst])
        raise ToleranceExceeded(
            f"lse: error {error[worst]:.3e} exceeds {limit[worst]:.3e} at {where}: "
            f"got {lse[where]!r}, expected {expected[where]!r}",
            error[worst] / limit[worst],
        )


def _check_special_values(out, expected, what):
    if out.shape != expected.shape:
        raise AssertionError(f"{what}: shape {out.shape}, expected {expected.shape}")
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        got, wanted = test(out), test(expected)
        if not np.array_equal(got, wanted):
            where = tuple(int(i) for i in np.argwhere(got != wanted)[0])
            raise AssertionError(
                f"{what}: {name} in {int(got.sum())} places, expected in {int(wanted.sum())}; "
                f"first at {where}: got {out[where]!r}, expected {expected[where]!r}"
            )


# Choosing cases.


def pairwise(factors, seed=0):
    """A short list of dicts in which every two values of every two factors meet.

    Greedy, and the same for the same seed.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    order = sorted(open_pairs)
    rng.shuffle(order)
    rows = []
    for first in order:
        if tuple(first) not in open_pairs:
            continue
        chosen = {int(first[0]): int(first[1]), int(first[2]): int(first[3])}
        for a in rng.permutation(len(names)):
            a = int(a)
            if a in chosen:
                continue
            gains = {  # of each value: the open pairs that it would close
                int(x): sum(_pair(a, int(x), b, y) in open_pairs for b, y in chosen.items())
                for x in rng.permutation(len(factors[names[a]]))
            }
            chosen[a] = max(gains, key=gains.get)
        for a, b in itertools.combinations(sorted(chosen), 2):
            open_pairs.discard((a, chosen[a], b, chosen[b]))
        rows.append({name: factors[name][chosen[i]] for i, name in enumerate(names)})
    return rows


def _pair(a, x, b, y):
    return (a, x, b, y) if a < b else (b, y, a, x)


FACTORS = {
    "dtype": tuple(DTYPES),
    "batch": (1, 2, 3),
    "heads": ((1, 1), (4, 4), (4, 2), (6, 1), (7, 7), (8, 2)),
    "lengths": tuple(LENGTHS.values()),
    "dims": (
        (8, 8),
        (32, 32),
        (40, 40),
        (64, 64),
        (64, 32),
        (80, 80),
        (96, 96),
        (128, 128),
        (120, 128),
        (192, 128),
        (192, 192),
        (256, 256),
    ),
    "layout": ("bshd", "bhsd", "ragged"),
    "mask": (
        (False, (-1, -1)),
        (True, (-1, -1)),
        (True, (20, -1)),
        (False, (9, 5)),
        (False, (0, 0)),
        (False, (-1, 3)),
        (False, (40, 0)),
        (True, (0, 30)),
    ),
    "scale": (None, 0.3),
    "softcap": (0.0, 1.5, 30.0),
    "alibi": ("none", "head", "batch"),
    "sinks": (False, True),
    "bias": ("none", *BIASES),
    "seqused": ("none", "q", "k", "both"),
    "kv_start": (False, True),
    "storage": ("contiguous", "transposed", "padded", "packed", "expanded", "odd"),
    "give_out": (True, False),
}


def case_of(factors):
    """The Case of one row of pairwise(FACTORS)."""
    values = dict(factors)
    values["kv_start"] &= values["layout"] != "ragged"
    heads, lengths, dims, mask = (values.pop(name) for name in ("heads", "lengths", "dims", "mask"))
    return Case(
        **values,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        head_dim=dims[0],
        head_dim_v=None if dims[0] == dims[1] else dims[1],
        causal=mask[0],
        window=mask[1],
    )


def random_case(rng):
    """A configuration drawn from everything the contract allows at a small size."""

    def pick(values):
        return values[int(rng.integers(len(values)))]

    values = {name: pick(options) for name, options in FACTORS.items()}
    for name, off in (
        ("softcap", 0.0),
        ("alibi", "none"),
        ("bias", "none"),
        ("seqused", "none"),
        ("kv_start", False),
        ("sinks", False),
    ):
        if rng.random() < 0.5:  # most calls use few options
            values[name] = off
    if rng.random() < 0.7:
        values["lengths"] = tuple(int(n) for n in rng.integers(0, 200, size=2))
    if rng.random() < 0.5:
        values["dims"] = (int(rng.integers(1, 33)) * 8, int(rng.integers(1, 33)) * 8)
    if rng.random() < 0.4:
        values["mask"] = (
            bool(rng.random() < 0.5),
            tuple(int(n) for n in rng.integers(-1, 220, size=2)),
        )
    return case_of(values)
