# SPDX-License-Identifier: Apache-2.0
"""Host time of one Python call of cuattn.attention and cuattn.paged_attention: median of many.

    python benchmarks/overhead.py [--calls 100000] [-o [overhead.json]]

A row is the time of the whole call. On the CPU that of q = k = v [1, 1, 1, 8], the kernel's few
hundred nanoseconds included; on CUDA the time from the call to its return, which is when the kernel
is in the stream's queue. The device is drained between batches of calls, outside the clock. Torch
runs under no_grad; in grad mode each tensor is also asked for requires_grad.

What the call spends before the kernel's launch is derived from three of the rows:

    launch         = out= row - out=, empty batch row
    to the launch  = whole call - launch

With a batch of 0 a call does all that it does otherwise (arguments, import, checks, choice of the
kernel, outputs) but for the launch itself, finding the compiled kernel and the few comparisons of
strides that an empty array is spared. `floor` rows are a call of the same framework that does next
to nothing. `paged` rows are paged_attention of one token a sequence, eight sequences on CUDA, one
on the CPU; `given` ones bring out=, plan= and workspace=, as a serving loop does.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuattn

SHAPE = (1, 1, 1, 8)  # CPU: nothing to compute
CUDA_SHAPE = (1, 128, 8, 64)
PAGED = {"num_seqs": 1, "num_heads_q": 1, "num_heads_kv": 1, "head_dim": 8, "dtype": "float32"}
CUDA_PAGED = {"num_seqs": 8, "num_heads_q": 32, "num_heads_kv": 8, "head_dim": 128}
CUDA_PAGED |= {"dtype": "float16"}
PAGED_BLOCK = 16  # tokens; each sequence has one block of them
RESULTS = Path(__file__).parent / "results" / "overhead.json"
BATCH = 64  # CUDA calls between two drains: far below the depth of a launch queue
# Aims in microseconds, by row: docs/design.md.
AIMS = {"numpy": 2.0, "torch cuda to the launch": 3.0, "cupy": 10.0, "import": 100e3}


def median_us(call: Callable[[], Any], calls: int, drain: Callable[[], Any] | None = None) -> float:
    """Median of single calls, each between two clock readings, less what a reading costs."""
    clock = time.perf_counter_ns
    for _ in range(200):
        call()
    samples, empty = [], []
    for start in range(0, calls, BATCH):
        if drain is not None:
            drain()
        for _ in range(min(BATCH, calls - start)):
            begin = clock()
            call()
            end = clock()
            samples.append(end - begin)
            empty.append(clock() - end)
    return (statistics.median(samples) - statistics.median(empty)) / 1e3


def our_rows(
    name: str, x: Any, empty_like: Callable, drain: Callable[[], Any] | None = None
) -> dict[str, tuple[Callable, Callable | None]]:
    """Rows of cuattn.attention(x, x, x): whole, with the output given, and without a launch."""
    out, none = empty_like(x), x[:0]
    none_out = empty_like(none)
    return {
        name: (lambda: cuattn.attention(x, x, x), drain),
        f"{name} out=": (lambda: cuattn.attention(x, x, x, out=out), drain),
        f"{name} out=, empty batch": (
            lambda: cuattn.attention(none, none, none, out=none_out),
            drain,
        ),
    }


def paged_rows(
    name: str, put: Callable, drain: Callable[[], Any] | None = None
) -> dict[str, tuple[Callable, Callable | None]]:
    """Rows of cuattn.paged_attention; `put` makes a numpy array one of the library."""
    shape = PAGED if drain is None else CUDA_PAGED
    seqs, heads, dim, dtype = (shape[x] for x in ("num_seqs", "num_heads_q", "head_dim", "dtype"))
    q = put(np.ones((seqs, heads, dim), dtype))
    cache = put(np.ones((seqs, PAGED_BLOCK, shape["num_heads_kv"], dim), dtype))
    tables = put(np.arange(seqs, dtype=np.int32)[:, None])
    lens = put(np.full(seqs, PAGED_BLOCK, np.int32))
    extents = {n: shape[n] for n in ("num_heads_q", "num_heads_kv", "head_dim", "dtype")}
    plan = cuattn.paged_plan(tables, lens, block_size=PAGED_BLOCK, **extents)
    arrays = (q, cache, cache, tables, lens)
    workspace_bytes = cuattn.explain("paged_attention", *arrays, plan=plan).workspace_bytes
    given = {
        "out": put(np.empty((seqs, heads, dim), dtype)),
        "plan": plan,
        "workspace": put(np.empty(max(workspace_bytes, 1), np.uint8)),
    }
    none, none_out = (q[:0], cache, cache, tables[:0], lens[:0]), given["out"][:0]
    return {
        f"{name} paged": (lambda: cuattn.paged_attention(*arrays), drain),
        f"{name} paged given": (lambda: cuattn.paged_attention(*arrays, **given), drain),
        f"{name} paged out=, empty batch": (
            lambda: cuattn.paged_attention(*none, out=none_out),
            drain,
        ),
    }


def derived_rows(rows: dict[str, float], name: str) -> dict[str, float]:
    """Split the whole call at the launch of the kernel (on the CPU: at the kernel)."""
    launch = rows[f"{name} out="] - rows[f"{name} out=, empty batch"]
    return {f"{name} to the launch": rows[name] - launch, f"{name} launch": launch}


def numpy_rows() -> dict[str, tuple[Callable, Callable | None]]:
    x = np.ones(SHAPE, np.float32)
    return {
        **our_rows("numpy", x, np.empty_like),
        **paged_rows("numpy", lambda array: array),
        "numpy floor (numpy.empty)": (lambda: np.empty(SHAPE, np.float32), None),
    }


def torch_rows(device: str) -> dict[str, tuple[Callable, Callable | None]]:
    try:
        import torch
    except ImportError:
        return {}
    if device == "cuda" and not (torch.cuda.is_available() and cuda_is_built()):
        return {}
    torch.set_grad_enabled(False)
    cuda = device == "cuda"
    x = torch.ones(CUDA_SHAPE if cuda else SHAPE, device=device)
    x = x.half() if cuda else x
    drain = torch.cuda.synchronize if cuda else None
    heads_first = x.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        **our_rows(f"torch {device}", x, torch.empty_like, drain),
        **paged_rows(f"torch {device}", lambda array: torch.from_numpy(array).to(device), drain),
        f"torch {device} floor (torch.empty_like)": (lambda: torch.empty_like(x), drain),
        f"torch {device} its own SDPA": (
            lambda: sdpa(heads_first, heads_first, heads_first),
            drain,
        ),
    }


def cupy_rows() -> dict[str, tuple[Callable, Callable | None]]:
    try:
        import cupy
    except ImportError:
        return {}
    if not cuda_is_built() or not cupy.cuda.is_available():
        return {}
    x = cupy.ones(CUDA_SHAPE, "float16")
    drain = cupy.cuda.get_current_stream().synchronize
    return {
        **our_rows("cupy", x, cupy.empty_like, drain),
        "cupy floor (cupy.empty)": (lambda: cupy.empty(CUDA_SHAPE, "float16"), drain),
    }


def jax_rows() -> dict[str, tuple[Callable, Callable | None]]:
    try:
        import jax
    except ImportError:
        return {}
    device = jax.devices("cpu")[0]
    x = jax.device_put(np.ones(SHAPE, np.float32), device)
    jitted = jax.jit(lambda q, k, v: cuattn.attention(q, k, v))
    add = jax.jit(lambda q: q + q)
    return {
        "jax eager": (lambda: cuattn.attention(x, x, x), None),
        "jax jit": (lambda: jitted(x, x, x), None),
        "jax floor (jit of an addition)": (lambda: add(x), None),
    }


def cuda_is_built() -> bool:
    return bool((cuattn.info()["cuda"] or {}).get("devices"))


def import_us(rounds: int = 9) -> float:
    """Median of what `import cuattn` takes beyond `import numpy`, each in a new process."""
    code = (
        "import time, numpy; begin = time.perf_counter(); import cuattn; "
        "print(time.perf_counter() - begin)"
    )
    run = [sys.executable, "-c", code]
    times = [float(subprocess.check_output(run, text=True)) for _ in range(rounds)]
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        nargs="?",
        const=RESULTS,
        help="write the rows to this file, without a name to benchmarks/results/overhead.json",
    )
    arguments = parser.parse_args()

    rows = {"import": import_us()}
    print(f"{'import':42s} {rows['import'] / 1e3:9.1f} ms   aim <= {AIMS['import'] / 1e3:.0f} ms")
    groups = {
        "numpy": numpy_rows,
        "torch cpu": lambda: torch_rows("cpu"),
        "torch cuda": lambda: torch_rows("cuda"),
        "cupy": cupy_rows,
        "jax": jax_rows,
    }
    for ours, group in groups.items():
        found = {
            name: median_us(call, arguments.calls, drain) for name, (call, drain) in group().items()
        }
        if f"{ours} out=" in found:
            found |= derived_rows(found, ours)
        for name, microseconds in found.items():
            aim = f"   aim <= {AIMS[name]:.0f} us" if name in AIMS else ""
            print(f"{name:42s} {microseconds:9.2f} us{aim}", flush=True)
        rows |= found
    if arguments.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "unit": "us",
            "calls": arguments.calls,
            "cpu_shape": SHAPE,
            "cuda_shape": CUDA_SHAPE,
            "paged": PAGED,
            "cuda_paged": CUDA_PAGED,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "cuattn": cuattn.info(),
            "rows": rows,
            "aims": AIMS,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
