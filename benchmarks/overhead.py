# SPDX-License-Identifier: Apache-2.0
"""Host time of one Python call of cuattn.attention, the output allocated: median of many calls.

    python benchmarks/overhead.py [--calls 100000] [--json overhead.json]

On the CPU the whole call of q = k = v [1, 1, 1, 8] is timed, the kernel's few hundred nanoseconds
included. On CUDA the time is that from the call to its return, which is when the kernel is in the
stream's queue; the device is drained between batches of calls, outside the clock. `out=` rows show
what allocating the result costs, `floor` rows a call of the same framework that does next to
nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
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
BATCH = 64  # CUDA calls between two drains: far below the depth of a launch queue
# Aims in microseconds, by row: docs/design.md.
AIMS = {"numpy": 2.0, "torch cpu": 3.0, "torch cuda": 3.0, "cupy": 10.0, "import": 100e3}


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


def numpy_rows() -> dict[str, tuple[Callable, Callable | None]]:
    x = np.ones(SHAPE, np.float32)
    out = np.empty_like(x)
    return {
        "numpy": (lambda: cuattn.attention(x, x, x), None),
        "numpy out=": (lambda: cuattn.attention(x, x, x, out=out), None),
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
    out = torch.empty_like(x)
    drain = torch.cuda.synchronize if cuda else None
    heads_first = x.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        f"torch {device}": (lambda: cuattn.attention(x, x, x), drain),
        f"torch {device} out=": (lambda: cuattn.attention(x, x, x, out=out), drain),
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
    out = cupy.empty_like(x)
    drain = cupy.cuda.get_current_stream().synchronize
    return {
        "cupy": (lambda: cuattn.attention(x, x, x), drain),
        "cupy out=": (lambda: cuattn.attention(x, x, x, out=out), drain),
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
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()

    rows = {"import": import_us()}
    print(f"{'import':42s} {rows['import'] / 1e3:9.1f} ms   aim <= {AIMS['import'] / 1e3:.0f} ms")
    groups = (
        numpy_rows,
        lambda: torch_rows("cpu"),
        lambda: torch_rows("cuda"),
        cupy_rows,
        jax_rows,
    )
    for group in groups:
        for name, (call, drain) in group().items():
            rows[name] = median_us(call, arguments.calls, drain)
            aim = f"   aim <= {AIMS[name]:.0f} us" if name in AIMS else ""
            print(f"{name:42s} {rows[name]:9.2f} us{aim}", flush=True)
    if arguments.json is not None:
        record = {
            "unit": "us",
            "calls": arguments.calls,
            "cpu_shape": SHAPE,
            "cuda_shape": CUDA_SHAPE,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "cuattn": cuattn.info(),
            "rows": rows,
            "aims": AIMS,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
