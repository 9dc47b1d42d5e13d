# SPDX-License-Identifier: Apache-2.0
"""Arrays of norms, activations, sampling and rotation, the calls, and their check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import cuattn

from .cache_inputs import PIECE_BYTES
from .fused import FusedWorkload
from .paged_inputs import calls_in_graph, in_turn, num_sets
from .prepared import Prepared, require
from .reference import EPS, Error

MOST_SETS = 512  # of small arrays, which the L2 holds then
ROWS = 64  # of a result that are compared
SEED = 20261125
SUMS = 4 * EPS["float32"]  # beside one rounding: sums and divisions in float32
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # nothing, or torch.compile


class FusedInputs:
    """Sets of x (and residual) that the calls take in turn; weight and bias are shared."""

    def __init__(self, w: FusedWorkload, device: str):
        self.workload, self.device = w, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.is_cuda = device != "cpu"
        self.dtype = getattr(torch, w.dtype)
        count = min(num_sets(w.bytes, self.is_cuda), MOST_SETS)
        self.repeats = calls_in_graph(w.bytes, count) if self.is_cuda else 0
        width = w.columns * (2 if w.op == "act_mul" else 1)
        shape: tuple[int, ...] = (w.rows, width)
        if w.op == "apply_rope":
            shape = (1, w.rows, w.columns // w.head_dim, w.head_dim)
            table = cuattn.rope_table(w.rows, w.head_dim)
            self.cos, self.sin = (torch.from_numpy(part).to(device) for part in table)
        self.sets = [tuple(self.draw(shape) for _ in range(1 + w.residual)) for _ in range(count)]
        self.weight, self.bias = (self.draw((width,)) for _ in range(2))

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)

    def outs(self) -> list[torch.Tensor]:
        """Arrays for the results, the same for every call: allocation is not measured."""
        w, x = self.workload, self.sets[0][0]
        if w.op == "act_mul":
            return [torch.empty((w.rows, w.columns), dtype=x.dtype, device=x.device)]
        return [torch.empty_like(x) for _ in range(1 + w.residual)]

    def sample(self) -> Any:
        w = self.workload
        if w.op == "sample":
            return Tokens(w, self.sets[0][0])
        rows = torch.linspace(0, w.rows - 1, min(ROWS, w.rows)).long().to(self.device)
        axis = 1 if w.op == "apply_rope" else 0
        arrays = [x.index_select(axis, rows).double() for x in self.sets[0]]
        tables = [t[rows].double() for t in (self.cos, self.sin)] if axis else []
        weights = (self.weight.double(), self.bias.double())
        if w.residual:  # the sum is rounded before it is normed
            arrays[1] = (arrays[0] + arrays[1]).to(self.dtype).double() - arrays[0]
        expected = formula(w)(*arrays, *weights, *tables)
        return Rows(rows, axis, expected, EPS[w.dtype])


class Rows:
    """Some rows of each result in float64."""

    def __init__(self, rows: Any, axis: int, expected: tuple[torch.Tensor, ...], eps: float):
        self.rows, self.axis, self.expected, self.eps = rows, axis, expected, eps

    def error(self, outs: Any) -> Error:
        largest, allowed = 0.0, 0.0
        for got, expected in zip(outs, self.expected, strict=True):
            part = got.index_select(self.axis, self.rows).double()
            difference = (part - expected).abs().max().item()
            largest = max(largest, difference) if difference == difference else difference
            allowed = max(allowed, (self.eps + SUMS) * expected.abs().max().item())
        return Error(largest, allowed)


class Tokens:
    """The tokens that the filters leave to each row, in float64; what is equal counts as left."""

    def __init__(self, w: FusedWorkload, logits: torch.Tensor):
        logits = logits.double()
        if w.temperature == 0:
            self.left = logits == logits.max(-1, keepdim=True).values
            return
        p = torch.softmax(logits / w.temperature, -1)
        ordered = p.sort(-1, descending=True).values
        least = torch.zeros_like(p[:, :1])
        if w.top_k is not None:
            least = ordered[:, w.top_k - 1 : w.top_k]
        if w.top_p is not None:
            before = ordered.cumsum(-1) - ordered
            wanted = before <= w.top_p + 1e-6  # float32 sums of a peer are as far off
            least = ordered.masked_fill(~wanted, 2.0).min(-1, keepdim=True).values
        self.left = p >= least

    def error(self, tokens: Any) -> Error:
        tokens = tokens.long().reshape(-1, 1)
        known = (tokens >= 0) & (tokens < self.left.shape[1])
        right = known & self.left.gather(1, tokens.clamp(0, self.left.shape[1] - 1))
        missing = len(self.left) - int(right.sum().item())
        return Error(float(missing), 0.0)


# ---- the formulas, of float64 for the check and of the dtype for torch ----


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "silu":
        return functional.silu
    return lambda a: functional.gelu(a, approximate="tanh" if name == "gelu_tanh" else "none")


def rotate(w: FusedWorkload) -> Callable[..., torch.Tensor]:
    """RoPE in the words of torch; cos and sin [tokens, dim / 2]."""

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        if w.interleaved:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return turn


def formula(w: FusedWorkload) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Of x (and residual), weight, bias (and tables): every result."""

    def normed(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if w.op == "rms_norm":
            return functional.rms_norm(h, (w.columns,), weight, 1e-6)
        return functional.layer_norm(h, (w.columns,), weight, bias, 1e-5)

    if w.op in ("rms_norm", "layer_norm"):
        if not w.residual:
            return lambda x, weight, bias: (normed(x, weight, bias),)

        def with_residual(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
            h = x + residual
            return normed(h, weight, bias), h

        return with_residual
    act = activation(w.act)
    if w.op == "act_mul":
        return lambda x, *_: (act(x[..., : w.columns]) * x[..., w.columns :],)
    if w.op == "bias_act":
        return lambda x, _, bias: (act(x + bias),)
    turn = rotate(w)
    return lambda x, _weight, _bias, cos, sin: (turn(x, cos, sin),)


def drawn_by_torch(w: FusedWorkload) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sample in torch's operations; an exponential race draws, for multinomial waits."""

    def draw(logits: torch.Tensor) -> torch.Tensor:
        if w.temperature == 0:
            return logits.argmax(-1)
        logits = logits / w.temperature
        if w.top_k is not None:
            least = torch.topk(logits, w.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if w.top_p is not None:
            ordered, index = logits.sort(-1)
            below = ordered.softmax(-1).cumsum(-1) <= 1 - w.top_p
            below[:, -1] = False
            logits = logits.masked_fill(below.scatter(1, index, below), -torch.inf)
        p = logits.softmax(-1)
        return (p / torch.empty_like(p).exponential_(1)).argmax(-1)

    return draw


def torch_calls(w: FusedWorkload, x: FusedInputs, wrap: Wrap) -> Prepared:
    """Torch's operations, as they are or compiled."""
    if w.op == "sample":
        return Prepared(in_turn(x.sets, wrap(drawn_by_torch(w))), repeats=x.repeats)
    function = wrap(formula(w))
    more = [x.weight, x.bias]
    if w.op == "apply_rope":
        more += [x.cos, x.sin]
    return Prepared(in_turn(x.sets, lambda *a: function(*a, *more)), repeats=x.repeats)


# ---- ours ----


def our_call(w: FusedWorkload, x: FusedInputs, outs: Any, unfused: bool) -> Callable[..., Any]:
    """Return the call on one set of arrays; its result is a list of arrays, or the tokens."""
    if w.op == "sample":
        options: dict[str, Any] = {"temperature": w.temperature, "seed": SEED}
        return lambda logits: cuattn.sample(logits, top_k=w.top_k, top_p=w.top_p, **options)
    out = outs[0]
    if w.op == "apply_rope":
        words = {"interleaved": w.interleaved, "out": out}
        return lambda a: [cuattn.apply_rope(a, x.cos, x.sin, **words)]
    if w.op == "act_mul":
        return lambda a: [cuattn.act_mul(a, act=w.act, out=out)]
    if w.op == "bias_act":
        return lambda a: [cuattn.bias_act(a, x.bias, act=w.act, out=out)]
    function = getattr(cuattn, w.op)
    weights = (x.weight,) if w.op == "rms_norm" else (x.weight, x.bias)
    if not w.residual:
        return lambda a: [function(a, *weights, out=out)]

    def apart(a: torch.Tensor, residual: torch.Tensor) -> Any:
        h = torch.add(a, residual, out=outs[1])
        return [function(h, *weights, out=out), h]

    def together(a: torch.Tensor, residual: torch.Tensor) -> Any:
        return function(a, *weights, residual=residual, out=out, residual_out=outs[1])

    return apart if unfused else together


def ours(backend: str) -> Callable[[FusedWorkload, FusedInputs], Prepared]:
    """Prepare "auto", or "unfused": the residual added by a call before the norm."""

    def prepare(w: FusedWorkload, x: FusedInputs) -> Prepared:
        require(backend == "auto" or (backend == "unfused" and w.residual), "one kernel each")
        outs = x.outs()
        call = our_call(w, x, outs, backend == "unfused")
        return Prepared(in_turn(x.sets, call), repeats=x.repeats)

    return prepare


def memcpy(w: FusedWorkload, x: FusedInputs) -> Prepared:
    """Copy as many bytes as the call reads and writes."""
    require(w.op != "sample", "its results are few bytes")
    count = w.bytes // 2
    pairs = [
        tuple(torch.ones(count, dtype=torch.int8, device=x.device) for _ in range(2))
        for _ in x.sets
    ]

    def copy(source: torch.Tensor, target: torch.Tensor) -> Any:
        for piece, to in zip(source.split(PIECE_BYTES), target.split(PIECE_BYTES), strict=True):
            to.copy_(piece)
        return source, target

    sample = x.sample()
    right = sample.expected

    def as_expected(arrays: Any) -> Any:
        """Give the formula's rows where the copy is whole, else NaN."""
        is_whole = torch.equal(*arrays)
        found = []
        for part in right:
            shape = list(part.shape)
            shape[sample.axis] = w.rows
            whole = torch.full(shape, torch.nan, dtype=part.dtype, device=part.device)
            if is_whole:
                whole.index_copy_(sample.axis, sample.rows, part)
            found.append(whole)
        return found

    return Prepared(in_turn(pairs, copy), canonical=as_expected, repeats=x.repeats)
