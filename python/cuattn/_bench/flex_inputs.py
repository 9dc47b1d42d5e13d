# SPDX-License-Identifier: Apache-2.0
"""Arrays of flex_attention, the calls of those who are measured on it, and the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cuattn

from . import reference
from .devices import to_host
from .flex import PLAIN, FlexWorkload, functions
from .prepared import Prepared, Unsupported, require
from .reference import EPS, Error

RUNGS = ("auto", "cpu", "naive", "simt", "sm80", "sm90")


class FlexInputs:
    """q, k and v [batch, seqlen, heads, dim], and what the functions capture, on the device."""

    def __init__(self, w: FlexWorkload, device: str):
        self.workload, self.device = w, device
        generator = torch.Generator(device).manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn((w.batch, n, heads, w.head_dim), generator=generator, device=device)
            .to(getattr(torch, w.dtype))
            for n, heads in (
                (w.queries, w.num_heads_q), (w.seqlen, w.num_heads_kv), (w.seqlen, w.num_heads_kv)
            )
        )  # fmt: skip
        captured = {n: torch.from_numpy(x).to(device) for n, x in w.captured().items()}
        self.score, self.mask = functions(w, captured)

    def sample(self) -> Sample:
        return Sample(self)


class Sample:
    """Some rows of some heads in float64, and what the plain formula errs on them."""

    def __init__(self, x: FlexInputs):
        w = x.workload
        rng = np.random.default_rng(1)
        score, mask = functions(w, w.captured())
        group, plain_error, most = w.num_heads_q // w.num_heads_kv, 0.0, 0.0
        self.expected: dict[tuple[int, int], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        for b, h in ((0, 0), (w.batch - 1, w.num_heads_q - 1)):
            rows = reference.sample_rows(w.queries, rng)
            q, k, v = (
                to_host(a[b, :, n]) for a, n in ((x.q, h), (x.k, h // group), (x.v, h // group))
            )
            places = (b, h, rows[:, None], np.arange(w.seqlen)[None, :])

            def weights(
                scores: np.ndarray[Any, Any], at: tuple[Any, ...] = places
            ) -> np.ndarray[Any, Any]:
                scores = scores if score is None else score(scores, *at)
                scores = scores if mask is None else np.where(mask(*at), scores, -np.inf)
                return reference.softmax(scores)

            scale = w.head_dim**-0.5
            wide = weights(scale * (q[rows].astype(np.float64) @ k.T.astype(np.float64)))
            expected = wide @ v.astype(np.float64)
            rounded = weights(reference.round_to(np.float32(scale) * (q[rows] @ k.T), w.dtype))
            plain = reference.round_to(rounded.astype(np.float32), w.dtype) @ v
            plain_error = max(
                plain_error, float(np.abs(reference.round_to(plain, w.dtype) - expected).max())
            )
            most = max(most, float(np.abs(expected).max()))
            self.expected[b, h] = rows, expected
        self.allowed = 2 * plain_error + EPS[w.dtype] * most

    def error(self, out: Any) -> Error:
        """Compare a result in q's layout."""
        worst = 0.0
        for (b, h), (rows, expected) in self.expected.items():
            worst = float(np.maximum(worst, np.abs(to_host(out[b, :, h])[rows] - expected).max()))
        return Error(worst, self.allowed)


# Masks of which bounds say nothing: both sides get lists of blocks, found pair by pair outside.
IN_LISTS = ("unsorted documents", "blocks 50 %", "blocks 10 %")


def ours(backend: str) -> Callable[[FlexWorkload, FlexInputs], Prepared]:
    """Prepare "auto", a rung, or "plain": attention without functions, where it is the same."""

    def prepare(w: FlexWorkload, x: FlexInputs) -> Prepared:
        if backend == "plain":
            require(w.kind in PLAIN, "functions")
            options = PLAIN[w.kind](w)
            return Prepared(lambda: cuattn.attention(x.q, x.k, x.v, **options))
        require(backend in RUNGS, "a rung or auto")
        call: dict[str, Any] = {"score_mod": x.score, "mask_mod": x.mask, "backend": backend}
        if x.mask is not None and w.kind in IN_LISTS:
            n = w.seqlen
            call["block_mask"] = cuattn.create_block_mask(x.mask, None, None, n, n, exact=True)
        try:
            plan = cuattn.explain("flex_attention", x.q, x.k, x.v, **call)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        return Prepared(
            lambda: cuattn.flex_attention(x.q, x.k, x.v, **call),
            kernel=plan.kernel,
            has_host_time=x.device != "cpu",
        )

    return prepare


def flex(w: FlexWorkload, x: FlexInputs) -> Prepared:
    """FlexAttention of torch, compiled for the shape; its block mask outside."""
    require(x.q.is_cuda, "needs CUDA tensors")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each shape is compiled anew; the recompile limit would end the run
    arrays = tuple(a.transpose(1, 2) for a in (x.q, x.k, x.v))
    block_mask = None
    if x.mask is not None:
        block_mask = create_block_mask(x.mask, None, None, w.queries, w.seqlen, device=x.q.device)
    options = {"score_mod": x.score, "block_mask": block_mask}
    options["enable_gqa"] = w.num_heads_q != w.num_heads_kv
    compiled = torch.compile(flex_attention, dynamic=False)
    return Prepared(lambda: compiled(*arrays, **options), canonical=lambda out: out.transpose(1, 2))
