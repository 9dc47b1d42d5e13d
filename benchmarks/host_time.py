# SPDX-License-Identifier: Apache-2.0
"""Host time of the torch calls, with and without gradients, torch's own SDPA in the same process.

    python benchmarks/host_time.py [--rounds 20] [--calls 2000] [-o host_time.json]

All on the CPU and one thread: one query, one key, one head of 64 elements, so that the kernel takes
about a tenth of a microsecond and what is left is what a call costs before its kernel: arguments,
import of the arrays, checks, choice of the kernel, allocation of the results, autograd. A round
times every row, in a new order; a row of a round is the median of its calls, each between two clock
readings, less what a reading costs. Shown are the medians over the rounds, and that of the ratios
to torch's row of the same kind in the same round: other programs slow a round as a whole.

`step` rows are forward and backward, by torch.autograd.grad.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUATTN_NUM_THREADS", "1")

import numpy as np
import torch

import cuattn
import cuattn.torch

HEAD_DIM = 64
BLOCK = 16  # tokens of a block of the cache
Rows = dict[str, tuple[Callable[[], Any], str | None]]  # the call, and the row it is held to
SDPA, SDPA_GRAD, SDPA_STEP = "torch SDPA", "torch SDPA, grad", "torch SDPA step"


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Median of single calls, less what reading the clock costs."""
    clock = time.perf_counter_ns
    for _ in range(20):
        call()
    samples, empty = [], []
    for _ in range(calls):
        begin = clock()
        call()
        end = clock()
        samples.append(end - begin)
        empty.append(clock() - end)
    return (statistics.median(samples) - statistics.median(empty)) / 1e3


def step(forward: Callable[[], Any], inputs: tuple[Any, ...], dout: Any) -> Callable[[], Any]:
    """Make a call of forward and backward."""
    grad = torch.autograd.grad
    return lambda: grad(forward(), inputs, dout)


def dense_rows() -> Rows:
    """Rows of attention and its twins, without and with gradients."""
    own = torch.nn.functional.scaled_dot_product_attention
    ours = cuattn.torch.scaled_dot_product_attention
    q, k, v = torch.randn(3, 1, 1, 1, HEAD_DIM)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    dout, out = torch.randn_like(q), torch.empty_like(q)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    flat = [x[0] for x in (q, k, v)]
    flat_leaves = tuple(x.clone().requires_grad_() for x in flat)
    ragged = (offsets, offsets, 1, 1)
    rows: Rows = {
        SDPA: (lambda: own(q, k, v), None),
        SDPA_GRAD: (lambda: own(*leaves), None),
        SDPA_STEP: (step(lambda: own(*leaves), leaves, dout), None),
        "floor: torch.empty_like": (lambda: torch.empty_like(q), SDPA),
        "attention": (lambda: cuattn.attention(q, k, v), SDPA),
        "attention, causal": (lambda: cuattn.attention(q, k, v, causal=True), SDPA),
        "attention, out=": (lambda: cuattn.attention(q, k, v, out=out), SDPA),
        "attention, return_lse": (lambda: cuattn.attention(q, k, v, return_lse=True), SDPA),
        "torch.attention": (lambda: cuattn.torch.attention(q, k, v), SDPA),
        "torch.attention, causal": (lambda: cuattn.torch.attention(q, k, v, causal=True), SDPA),
        "torch SDPA's twin": (lambda: ours(q, k, v), SDPA),
        "torch SDPA's twin, causal": (lambda: ours(q, k, v, is_causal=True), SDPA),
        "attention_varlen": (lambda: cuattn.attention_varlen(*flat, *ragged), SDPA),
        "torch.attention_varlen": (lambda: cuattn.torch.attention_varlen(*flat, *ragged), SDPA),
    }
    for name, function in {
        "attention": cuattn.attention,
        "torch.attention": cuattn.torch.attention,
        "torch SDPA's twin": ours,
    }.items():
        rows[f"{name}, grad"] = (lambda f=function: f(*leaves), SDPA_GRAD)
        rows[f"{name} step"] = (step(lambda f=function: f(*leaves), leaves, dout), SDPA_STEP)
    for name, function in {
        "attention_varlen": cuattn.attention_varlen,
        "torch.attention_varlen": cuattn.torch.attention_varlen,
    }.items():
        forward = lambda f=function: f(*flat_leaves, *ragged)  # noqa: E731
        rows[f"{name}, grad"] = (forward, SDPA_GRAD)
        rows[f"{name} step"] = (step(forward, flat_leaves, dout[0]), SDPA_STEP)
    return rows


def paged_rows() -> Rows:
    """Rows of one token over one block of a cache."""
    q = torch.randn(1, 1, HEAD_DIM)
    k_cache, v_cache = torch.randn(2, 1, BLOCK, 1, HEAD_DIM)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    cache = (k_cache, v_cache, tables, lens)
    slots = torch.zeros(1, dtype=torch.int64)
    angles = torch.randn(BLOCK, HEAD_DIM // 2)
    rope = (angles.cos(), angles.sin())
    extents = {"num_heads_q": 1, "num_heads_kv": 1, "head_dim": HEAD_DIM, "block_size": BLOCK}
    plan = cuattn.paged_plan(tables, lens, dtype="float32", **extents)
    workspace_bytes = cuattn.explain("paged_attention", q, *cache, plan=plan).workspace_bytes
    given = {
        "out": torch.empty_like(q),
        "plan": plan,
        "workspace": torch.empty(max(workspace_bytes, 1), dtype=torch.uint8),
    }
    append = cuattn.append_attention
    return {
        "paged_attention": (lambda: cuattn.paged_attention(q, *cache), SDPA),
        "paged_attention, all given": (lambda: cuattn.paged_attention(q, *cache, **given), SDPA),
        "reshape_and_cache": (
            lambda: cuattn.reshape_and_cache(q, q, k_cache, v_cache, slots),
            SDPA,
        ),
        "append_attention": (lambda: append(q, q, q, *cache), SDPA),
        "append_attention, rope": (lambda: append(q, q, q, *cache, rope=rope), SDPA),
    }


def measure(rows: Rows, rounds: int, calls: int, seed: int) -> dict[str, dict[str, float]]:
    """Time every row in every round, in an order of its own."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    order = list(rows)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(median_us(rows[name][0], calls))
    found = {}
    for name, (_, peer) in rows.items():
        found[name] = {"us": statistics.median(times[name])}
        if peer is not None:
            ratios = [a / b for a, b in zip(times[name], times[peer], strict=True)]
            found[name]["of_torch"] = statistics.median(ratios)
    return found


def main() -> None:
    """Measure, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rows = dense_rows() | paged_rows()
    peers = (SDPA, SDPA_GRAD, SDPA_STEP)
    rows = {n: row for n, row in rows.items() if n in peers or arguments.rows in n}
    found = measure(rows, arguments.rounds, arguments.calls, arguments.seed)
    for name, row in found.items():
        ratio = f"{row['of_torch']:8.2f} of torch" if "of_torch" in row else ""
        print(f"{name:34s}{row['us']:9.2f} us{ratio}")
    if arguments.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "unit": "us",
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuattn": cuattn.info(),
            "rows": found,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
