# SPDX-License-Identifier: Apache-2.0
"""``python -m cuattn demo``: attention on real sentences, then on a long input."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

import cuattn

from .._bench import devices, reference
from .._bench.report import bytes_text
from .._bench.workloads import Workload, dense
from . import minilm
from .place import Place, choose

SENTENCES = (
    "A man is playing a guitar on a small stage.",
    "Someone performs music on an acoustic guitar.",
    "The stock market fell sharply after the announcement.",
    "Share prices dropped when investors heard the news.",
    "Two dogs are running across a snowy field.",
    "A pair of puppies plays in the snow.",
    "The recipe needs two cups of flour and a pinch of salt.",
    "Mix the flour with salt before you add the water.",
    "Scientists discovered a planet that orbits a distant star.",
    "Astronomers found a new world far outside our solar system.",
    "The train to the airport leaves every fifteen minutes.",
    "Four times an hour a train departs for the airport.",
)
EMBEDDING_TOLERANCE = 1e-5


class CountedAttention:
    """cuattn.attention_varlen on a place, numpy arrays in and out; adds up the time it takes."""

    def __init__(self, place: Place):
        self.place, self.seconds = place, 0.0
        self.plan: cuattn.Plan | None = None

    def __call__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        cu_seqlens: np.ndarray,
        max_seqlen: int,
    ) -> np.ndarray:
        """Attention over packed sentences."""
        begin = time.perf_counter()
        *qkv, ends = (self.place.from_host(x) for x in (q, k, v, cu_seqlens))
        arguments: tuple[Any, ...] = (*qkv, ends, ends, max_seqlen, max_seqlen)
        out = self.place.to_host(cuattn.attention_varlen(*arguments))
        self.seconds += time.perf_counter() - begin
        if self.plan is None:
            self.plan = cuattn.explain("attention_varlen", *arguments)
        return out


def similar_pairs(embeddings: np.ndarray) -> tuple[int, list[tuple[float, int, int]]]:
    """Count the sentences whose partner (0-1, 2-3, ...) is nearest, and list pairs with cosines."""
    cosine = embeddings @ embeddings.T
    np.fill_diagonal(cosine, -1)
    nearest = cosine.argmax(axis=1)
    right = sum(int(nearest[i]) == i ^ 1 for i in range(len(nearest)))
    return right, [(float(cosine[i, i + 1]), i, i + 1) for i in range(0, len(nearest), 2)]


def sentences(place: Place) -> bool:
    """Encode SENTENCES with the library and with the plain formula, and compare."""
    print("\n1. Real input: sentence embeddings with all-MiniLM-L6-v2 (6 layers, 12 heads of 32)")
    folder, missing = minilm.model_folder(), minilm.missing()
    if folder is None or missing is not None:
        print(f"   not run, {missing} is missing. To get it:\n       {minilm.HOW_TO_GET}")
        print("   In its place: that model's attention layer on random numbers, 64 x 32 tokens.")
        return layer(place, dense("MiniLM-L6 layer", 64, 32, 12, 32, dtype="float32"))
    model = minilm.MiniLM(folder)
    token_ids = model.tokenize(SENTENCES)
    attention = CountedAttention(place)
    model.encode(token_ids, attention)  # first call: the device starts, threads are made
    attention.seconds = 0.0
    begin = time.perf_counter()
    embeddings = model.encode(token_ids, attention)
    seconds = time.perf_counter() - begin
    plain = model.encode(token_ids, minilm.plain_attention)
    error = float(np.abs(embeddings - plain).max())
    right, pairs = similar_pairs(embeddings)
    for cosine, a, b in pairs:
        print(f"   {cosine:.3f}  {SENTENCES[a]}\n          {SENTENCES[b]}")
    ok = error <= EMBEDDING_TOLERANCE and right == len(SENTENCES)
    if attention.plan is not None:
        print(f"   kernel             {attention.plan.kernel}: {attention.plan.reason}")
    print(
        f"   nearest neighbours {right} of {len(SENTENCES)} sentences find their paraphrase first"
    )
    print(
        f"   error              {error:.1e} from the plain formula's embeddings"
        f" (allowed {EMBEDDING_TOLERANCE:g})"
    )
    tokens = sum(map(len, token_ids))
    print(
        f"   time               {1e3 * seconds:.1f} ms for {len(SENTENCES)} sentences,"
        f" {tokens} tokens; {1e3 * attention.seconds:.1f} ms of it attention"
    )
    return ok


def layer(place: Place, w: Workload) -> bool:
    """Compare naive and flash on one layer: time, memory beyond the inputs, error."""
    host = devices.numpy_inputs(w)
    q, k, v = (place.from_host(x) for x in (host.q, host.k, host.v))
    ok = True
    times = {}
    for label, backend in (("naive", "naive"), ("flash", "auto")):
        options: dict[str, Any] = {"causal": w.causal, "backend": backend}
        plan = cuattn.explain("attention", q, k, v, **options)
        out = place.to_host(cuattn.attention(q, k, v, **options))
        error = reference.check(w, host, out)
        times[label] = place.time(
            functools.partial(cuattn.attention, q, k, v, **options), 1 if label == "naive" else 5
        )
        memory = bytes_text(out.nbytes + plan.workspace_bytes)
        figures = f"{1e3 * times[label]:9.2f} ms   {memory:>10s} beyond the inputs"
        errors = f"error {error.max_error:.1e} against float64 (allowed {error.allowed:.1e})"
        print(f"   {label}  [{plan.kernel:5s}]  {figures}   {errors}")
        ok &= error.ok
    print(f"   flash is {times['naive'] / times['flash']:.1f} times as fast as naive")
    return ok


def long_input(place: Place) -> bool:
    """Run a layer of a named model at a length where the score matrix hurts."""
    if place.is_cuda:
        w, about = (
            dense("", 1, 4096, 32, 128, dtype="float16", causal=True),
            "Llama-2-7B: 32 heads of 128, 4096 tokens",
        )
    else:
        w, about = (
            dense("", 1, 1024, 12, 64, dtype="float32", causal=True),
            "GPT-2: 12 heads of 64, 1024 tokens",
        )
    print(f"\n2. A long input: one attention layer of {about}, causal, {w.dtype}, random numbers")
    return layer(place, w)


def main() -> int:
    """Run the demo; 0 when every result was right."""
    place = choose()
    print(f"cuattn {cuattn.info()['version']}\nruns on   {place.device}, arrays of {place.library}")
    if place.note:
        print(f"          {place.note}")
    begin = time.perf_counter()
    ok = sentences(place)
    ok &= long_input(place)
    print(
        f"\n{'All results are right' if ok else 'WRONG RESULTS'};"
        f" {time.perf_counter() - begin:.1f} s in all."
    )
    return 0 if ok else 1
