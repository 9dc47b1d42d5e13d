# SPDX-License-Identifier: Apache-2.0
"""cuattn.attention, or its gradients, on the CPU beside torch's scaled_dot_product_attention.

    python benchmarks/cpu.py [--backward] [--isa avx2] [--dtype float32,bfloat16] [--json cpu.json]

Both run with as many threads, on the same arrays, into outputs that they allocate. A round times
one after the other, the order changing from round to round; a row gives the median of each and the
median of the per-round ratios, above 1 where cuattn is faster. With --isa torch is held to the same
instruction set. Float32 has aims (docs/design.md); the other dtypes are reported. With --backward
both get the gradients of q, k and v from what their forward pass kept, which is not timed. On a
machine with other work, --threads 1 --cpu-time counts the seconds that the process had.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# batch, num_heads, seqlen, head_dim; each also causal
SHAPES = [
    (1, 8, 2048, 64),
    (1, 8, 2048, 128),
    (1, 8, 512, 64),
    (4, 8, 128, 64),
    (1, 16, 1000, 80),
]
ROUND_SECONDS = 0.05  # calls of a round are repeated for this long
# What float32 is held to, by instruction set: (geometric mean, least row) of the ratio to torch.
AIMS = {
    "forward": {"avx512": (1.5, None), "avx2": (1.0, 0.9)},
    "backward": {"avx512": (1.3, None), "avx2": (1.0, None)},
}
# How torch and its BLAS are held to an instruction set.
TORCH_ISA = {
    "avx512": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


Clock = Callable[[], float]


def seconds_per_call(call: Callable[[], Any], calls: int, clock: Clock) -> float:
    begin = clock()
    for _ in range(calls):
        call()
    return (clock() - begin) / calls


def calls_of(direction: str, qkv: list[Any], causal: bool) -> dict[str, Callable[[], Any]]:
    """What is timed; each call gives a tuple of tensors."""
    import torch

    import cuattn

    sdpa = torch.nn.functional.scaled_dot_product_attention
    if direction == "forward":
        return {
            "cuattn": lambda: (cuattn.attention(*qkv, layout="bhsd", causal=causal),),
            "torch": lambda: (sdpa(*qkv, is_causal=causal),),
        }
    out, lse = cuattn.attention(*qkv, layout="bhsd", causal=causal, return_lse=True)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    leaves = [x.clone().requires_grad_() for x in qkv]
    with torch.enable_grad():
        torch_out = sdpa(*leaves, is_causal=causal)
    return {
        "cuattn": lambda: cuattn.attention_backward(
            dout, *qkv, out, lse, layout="bhsd", causal=causal
        ),
        "torch": lambda: torch.autograd.grad(torch_out, leaves, dout, retain_graph=True),
    }


def measure(
    direction: str, shape: tuple[int, ...], causal: bool, dtype: str, rounds: int, clock: Clock
) -> dict[str, Any]:
    """One row: medians over `rounds` of both, after checking that they agree."""
    import torch

    batch, heads, seqlen, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(3)]
    calls = calls_of(direction, qkv, causal)
    pairs = list(zip(calls["cuattn"](), calls["torch"](), strict=True))
    difference = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    limit = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    limit *= max(1.0, *(b.float().abs().max().item() for _, b in pairs))
    if not difference <= limit:
        raise RuntimeError(f"{dtype} {shape} causal={causal}: results differ by {difference}")

    repeats = {
        name: max(1, round(ROUND_SECONDS / seconds_per_call(call, 2, clock)))
        for name, call in calls.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in sorted(calls, reverse=i % 2 == 1):
            times[name].append(seconds_per_call(calls[name], repeats[name], clock))
    flops = (
        {"forward": 4, "backward": 10}[direction]
        * batch
        * heads
        * seqlen
        * seqlen
        * head_dim
        * (0.5 if causal else 1.0)
    )
    ratios = [b / a for a, b in zip(times["cuattn"], times["torch"], strict=True)]
    row = {
        "dtype": dtype,
        "shape": list(shape),
        "causal": causal,
        "ratio": statistics.median(ratios),
        "max_difference": difference,
        "rounds_us": {name: [t * 1e6 for t in values] for name, values in times.items()},
    }
    for name, values in times.items():
        row[f"{name}_us"] = statistics.median(values) * 1e6
        row[f"{name}_gflops"] = flops / statistics.median(values) / 1e9
    return row


def commit() -> str:
    """The commit of this tree, with a mark when files differ from it; empty outside git."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=sorted(TORCH_ISA), help="default: the machine's best")
    parser.add_argument("--dtype", default="float32,float16,bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backward", action="store_true", help="time the gradients")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own seconds")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    direction = "backward" if arguments.backward else "forward"
    clock = time.process_time if arguments.cpu_time else time.perf_counter

    # Both libraries read these when they are loaded, so nothing of them is imported above.
    os.environ["CUATTN_NUM_THREADS"] = str(arguments.threads)
    if arguments.isa is not None:
        os.environ.update(CUATTN_CPU_ISA=arguments.isa, **TORCH_ISA[arguments.isa])
    import torch

    import cuattn
    from cuattn._bench.devices import cpu_machine

    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    isa = cuattn.info()["cpu"]["isa"]
    print(f"{cpu_machine()['cpu']}, {isa}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{'dtype':9s} {'batch, heads, seqlen, dim':26s} {'':7s}torch  cuattn GFLOP/s  ratio")
    rows, means, held = [], {}, True
    for dtype in arguments.dtype.split(","):
        ratios = []
        for shape in SHAPES:
            for causal in (False, True):
                row = measure(direction, shape, causal, dtype, arguments.rounds, clock)
                rows.append(row)
                ratios.append(row["ratio"])
                name = (
                    f"{dtype:9s} {', '.join(map(str, shape)):26s} {'causal' if causal else '':6s}"
                )
                speeds = f"{row['torch_gflops']:6.0f}  {row['cuattn_gflops']:6.0f}"
                print(f"{name} {speeds} {row['ratio']:14.2f}", flush=True)
        means[dtype] = math.exp(statistics.fmean(map(math.log, ratios)))
        text = f"{dtype:9s} geometric mean {means[dtype]:.2f}, least {min(ratios):.2f}"
        if dtype == "float32" and isa in AIMS[direction]:
            mean, least = AIMS[direction][isa]
            held = means[dtype] >= mean and (least is None or min(ratios) >= least)
            text += f"; aim: mean >= {mean}" + ("" if least is None else f", least >= {least}")
            text += ", held" if held else ", MISSED"
        print(text)

    if arguments.json is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "machine": cpu_machine(),
            "direction": direction,
            "isa": isa,
            "threads": arguments.threads,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuattn": cuattn.info(),
            },
            "geometric_means": means,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
