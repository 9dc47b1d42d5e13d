# SPDX-License-Identifier: Apache-2.0
"""Arrays of float8 attention and of `quantize`, the calls that are timed, and their checks.

Errors are relative to the size of a row (its root mean square), so that rows of many keys, whose
results are small, are looked at as closely as the first ones.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cuattn

from . import cache_inputs, reference
from .devices import to_host
from .float8 import Float8Workload, QuantizeWorkload
from .paged_inputs import calls_in_graph, in_turn, num_sets, to_e4m3
from .prepared import Prepared, Unsupported, first, module, require
from .reference import EPS, LEAST_TOP, Error

RUNGS = ("auto", "cpu", "naive", "sm90")
OUT = "bfloat16"  # of results over float8
BLOCK = 128  # rows that share a scale in mode "block"
MODES = {"blocks": "block", "int8": "int8"}  # of `quantize`
CODES, NUMBERS, THROUGH = "codes", "numbers", "through codes"  # what a result is judged by
Places = list[tuple[int, int]]


def drawn(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    random = torch.randn(shape, generator=generator, device=generator.device)
    return random.to(getattr(torch, dtype))


def corners(batch: int, heads: int) -> Places:
    """Return the first and the last sequence and head."""
    return sorted({(0, 0), (batch - 1, heads - 1)})


def meant(codes: torch.Tensor, scale: torch.Tensor, b: int, h: int, group: int) -> np.ndarray:
    """Return what codes [batch, rows, heads, dim] of one head mean, float32 [rows, dim].

    `scale` is of blocks of rows of each head, or of key heads; `group` heads share one of these.
    """
    stored = to_host(codes[b, :, h])
    if scale.ndim == 3:
        return stored * np.repeat(to_host(scale[b, h]), BLOCK)[: len(stored), None]
    return stored * np.float32(scale[b, h // group].item())


class Float8Inputs:
    """q, k and v in 16 bits, and their codes and scales by head as `quantize` makes them."""

    def __init__(self, w: Float8Workload, device: str):
        self.workload = w
        generator = torch.Generator(device).manual_seed(0)
        lead_q, lead_kv = (w.batch, w.seqlen_q), (w.batch, w.seqlen_kv)
        self.q = drawn((*lead_q, w.num_heads_q, w.head_dim), w.dtype, generator)
        self.k, self.v = (
            drawn((*lead_kv, w.num_heads_kv, w.head_dim), w.dtype, generator) for _ in range(2)
        )
        self.codes = cuattn.quantize(self.q, self.k, self.v)

    def head(self, b: int, h: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Numbers of q, k and v of a query head, and what their codes mean."""
        w, given = self.workload, self.codes
        group = w.num_heads_q // w.num_heads_kv
        heads = (h, h // group, h // group)
        numbers = [
            to_host(x[b, :, n]) for x, n in zip((self.q, self.k, self.v), heads, strict=True)
        ]
        scales = (given.q_scale, given.k_scale, given.v_scale)
        groups = (group, 1, 1)
        each = zip(given.arrays, scales, heads, groups, strict=True)
        return numbers, [meant(x, scale, b, n, size) for x, scale, n, size in each]

    def sample(self) -> Sample:
        return Sample(self)


class Sample:
    """Some rows in float64, of the numbers and of what codes mean, and what plain formulas err.

    A result over codes is judged by codes, one over 16-bit numbers by numbers, and one that
    quantises in the call by numbers too, with the error that codes have. The rule is that of
    reference.py: twice the error of the plain formula, which for codes rounds P to float8, plus one
    rounding of out.
    """

    def __init__(self, x: Float8Inputs):
        w = x.workload
        rng = np.random.default_rng(1)
        self.rows: dict[tuple[int, int], np.ndarray] = {}
        self.expected: dict[tuple[str, int, int], np.ndarray] = {}
        errs = dict.fromkeys((CODES, NUMBERS, THROUGH), 0.0)
        peak = 0.0
        for b, h in corners(w.batch, w.num_heads_q):
            rows = self.rows[b, h] = reference.sample_rows(w.seqlen_q, rng)
            numbers, codes = x.head(b, h)
            right, of_codes = (exact(w, rows, *arrays) for arrays in (numbers, codes))
            plain = plain_float8(w, rows, *codes)
            errs[CODES] = max(errs[CODES], off(plain, of_codes))
            errs[THROUGH] = max(errs[THROUGH], off(plain, right))
            errs[NUMBERS] = max(errs[NUMBERS], off(plain_16(w, rows, *numbers), right))
            self.expected[CODES, b, h] = of_codes
            self.expected[NUMBERS, b, h] = self.expected[THROUGH, b, h] = right
            peak = max(peak, *(off(0, expected) for expected in (right, of_codes)))
        self.allowed = {by: 2 * err + EPS[OUT] * peak for by, err in errs.items()}

    def error(self, judged: tuple[str, torch.Tensor]) -> Error:
        """Compare a result in q's layout with what it is judged by."""
        by, out = judged
        worst = 0.0
        for (b, h), rows in self.rows.items():
            got = to_host(out[b, :, h])[rows]
            worst = float(np.maximum(worst, off(got, self.expected[by, b, h])))  # keeps NaN
        return Error(worst, self.allowed[by])


def off(got: Any, expected: np.ndarray) -> float:
    """Return the largest error of a row, relative to the root mean square of what is expected."""
    size = np.sqrt(np.mean(np.square(expected), axis=1, keepdims=True))
    return float((np.abs(got - expected) / size).max())


def scores(w: Float8Workload, rows: np.ndarray, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return masked scores of some rows in the dtype of q."""
    s = q.dtype.type(w.head_dim**-0.5) * (q[rows] @ k.T)
    return reference.score_rows(w, s, rows, (w.seqlen_q, w.seqlen_kv), 0.0, None)


def exact(w: Float8Workload, rows: np.ndarray, *qkv: np.ndarray) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in qkv)
    return reference.softmax(scores(w, rows, q, k)) @ v


def plain_16(
    w: Float8Workload, rows: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """Return the formula with scores, P and out rounded to the 16-bit dtype."""
    p = reference.softmax(reference.round_to(scores(w, rows, q, k), w.dtype))
    return reference.round_to(reference.round_to(p, w.dtype) @ v, w.dtype)


def plain_float8(
    w: Float8Workload, rows: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """Return the formula with P rounded to float8, at the least size that docs/fp8.md gives it."""
    s = scores(w, rows, q, k)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    out = to_e4m3(LEAST_TOP * p) @ v / (LEAST_TOP * p.sum(axis=1, keepdims=True))
    return reference.round_to(out, OUT)


def ours(backend: str) -> Callable[[Any, Any], Prepared]:
    """Prepare a call of ours by its word.

    "auto" or a rung: attention on codes, v by columns. "rows": v by rows. "fast": with
    accumulate="fast". "blocks", "int8": on codes of that mode of `quantize`. "bf16": on the numbers
    before they were quantised. "quantised", "quantised_blocks": those, quantised in the call.
    """

    def prepare(w: Any, x: Any) -> Prepared:
        if w.op == "quantize":
            require(backend == "auto", "quantize takes no backend")
            return quantising(w, x)
        options: dict[str, Any] = {"causal": w.causal}
        if backend == "bf16":
            return attending(w, (x.q, x.k, x.v), options, NUMBERS)
        if backend in MODES:
            made = cuattn.quantize(x.q, x.k, x.v, mode=MODES[backend])
            return attending(w, made.arrays, {**options, **made.scales}, THROUGH)
        if backend in ("quantised", "quantised_blocks"):
            q, k, v = x.q, x.k, x.v
            mode = "head" if backend == "quantised" else "block"
            made = x.codes if mode == "head" else cuattn.quantize(q, k, v, mode=mode)
            prepared = attending(w, made.arrays, {**options, **made.scales}, THROUGH)
            prepared.call = lambda: cuattn.quantize(q, k, v, mode=mode).attention(**options)
            prepared.memory_bytes = None
            prepared.bytes = super(Float8Workload, w).bytes
            return prepared
        q, k, v = x.codes.arrays
        if backend == "fast":
            options["accumulate"] = "fast"
        elif backend == "rows":
            v = v.contiguous()
        else:
            require(backend in RUNGS, "a rung, auto or another backend of fp8")
            options["backend"] = backend
        return attending(w, (q, k, v), {**options, **x.codes.scales}, CODES)

    return prepare


def attending(
    w: Float8Workload, qkv: tuple[Any, ...], options: dict[str, Any], by: str
) -> Prepared:
    """Prepare cuattn.attention of these arrays, to be judged by `by`."""
    try:
        plan = cuattn.explain("attention", *qkv, **options)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from error
    out_bytes = w.batch * w.seqlen_q * w.num_heads_q * w.head_dim * 2
    attend: Any = cuattn.attention
    return Prepared(
        lambda: attend(*qkv, **options),
        canonical=lambda out: (by, out),
        kernel=plan.kernel,
        memory_bytes=out_bytes + plan.workspace_bytes,
        bytes=super(Float8Workload, w).bytes if by == NUMBERS else None,
    )


def fa3(w: Float8Workload, x: Float8Inputs, columns: bool = False) -> Prepared:
    """FlashAttention-3 on the same codes and scales; its v by rows, or by columns as ours."""
    require(x.q.is_cuda, "needs CUDA tensors")
    library = module(
        "fa3_fwd_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface"
    )
    function, given = library.flash_attn_func, x.codes
    require("v_descale" in inspect.signature(function).parameters, "this build has no descales")
    q, k, v = given.arrays
    v = v if columns else v.contiguous()
    options = {"causal": w.causal, "q_descale": given.q_scale}
    options |= {"k_descale": given.k_scale, "v_descale": given.v_scale}
    return Prepared(lambda: function(q, k, v, **options), canonical=lambda out: (CODES, first(out)))


# ---- quantize alone ----


class QuantizeInputs:
    """What the sets of arrays of a call are drawn from: several, so that none lies in the L2."""

    def __init__(self, w: QuantizeWorkload, device: str):
        self.workload, self.device = w, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.is_cuda = device != "cpu"
        self.sets = num_sets(w.bytes, self.is_cuda)
        self.repeats = calls_in_graph(w.bytes, self.sets) if self.is_cuda else 0

    def drawn(self) -> tuple[torch.Tensor, ...]:
        w = self.workload
        shape = (w.batch, w.seqlen, w.num_heads, w.head_dim)
        q, k, v = (drawn(shape, w.dtype, self.generator) for _ in range(3))
        return q, k + 2.0, v  # keys with a mean, which smoothing takes away

    def sample(self) -> WorstOf:
        return WorstOf()


class WorstOf:
    """Takes the first of several errors that is not allowed, or else the largest."""

    def error(self, found: list[tuple[float, float]]) -> Error:
        errors = [Error(*pair) for pair in found]
        wrong = (error for error in errors if not error.ok)
        return next(wrong, max(errors, key=lambda error: error.max_error))


def quantising(w: QuantizeWorkload, x: QuantizeInputs) -> Prepared:
    """Prepare cuattn.quantize of sets of arrays in turn."""
    options: dict[str, Any] = {"mode": w.mode, "hadamard": w.hadamard, "smooth_k": w.smooth_k}

    def call(*qkv: torch.Tensor) -> Any:
        return qkv, cuattn.quantize(*qkv, **options)

    def errors(found: Any) -> list[tuple[float, float]]:
        rng = np.random.default_rng(1)
        qkv, made = found
        places = corners(w.batch, w.num_heads)
        return [pair for b, h in places for pair in errors_of_head(w, qkv, made, b, h, rng)]

    sets = [x.drawn() for _ in range(x.sets)]
    return Prepared(in_turn(sets, call), canonical=errors, repeats=x.repeats)


def errors_of_head(
    w: QuantizeWorkload, qkv: Any, made: Any, b: int, h: int, rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Return the errors of scores, values and lse_shift of a head, each with what is allowed.

    Scores tell whether q and k were rotated alike and k was centred: they may be off by twice what
    rounding the numbers as they are does. A value is off by half a step.
    """
    rows = reference.sample_rows(w.seqlen, rng)
    q, k, v = (to_host(x[b, :, h]).astype(np.float64) for x in qkv)
    q = q[rows]
    mean = k.mean(axis=0) if w.smooth_k else np.zeros(w.head_dim)
    right = q @ (k - mean).T
    plain = rounded(q) @ rounded(k - mean).T
    got_q = meant(made.q, made.q_scale, b, h, 1)[rows]
    got = got_q.astype(np.float64) @ meant(made.k, made.k_scale, b, h, 1).T
    found = [(float(np.abs(got - right).max()), 2 * float(np.abs(plain - right).max()))]
    step = np.abs(v) * 2.0**-4 + made.v_scale[b, h].item() * 2.0**-10
    off_steps = np.abs(meant(made.v, made.v_scale, b, h, 1) - v) / step
    found.append((float(off_steps.max()), 1.0 + 1e-4))
    if w.smooth_k:
        shift = to_host(made.lse_shift[b, h])[rows]
        expected = w.head_dim**-0.5 * (q @ mean)
        size = w.head_dim**-0.5 * (np.abs(q) @ np.abs(mean))
        found.append((float((np.abs(shift - expected) / size).max()), 1e-4))
    return found


def rounded(x: np.ndarray) -> np.ndarray:
    """Return x through float8_e4m3fn, by one scale."""
    scale = np.abs(x).max() / 448
    return scale * to_e4m3(x / scale).astype(np.float64)


def memcpy(w: QuantizeWorkload, x: QuantizeInputs) -> Prepared:
    """Copy as many bytes from one contiguous array to another."""
    copy: Any = cache_inputs.memcpy
    prepared: Prepared = copy(w, x)
    pairs = prepared.canonical

    def errors(arrays: Any) -> list[tuple[float, float]]:
        return [(float((got - right).abs().max()), 0.0) for got, right in pairs(arrays)]

    return dataclasses.replace(prepared, canonical=errors)
