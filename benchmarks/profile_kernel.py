# SPDX-License-Identifier: Apache-2.0
"""Run rows of the benchmark families a few times, for nsys or ncu to look at.

    nsys profile -c cudaProfilerApi python benchmarks/profile_kernel.py --workload "d64 s512 full"
    ncu --nvtx ... python benchmarks/profile_kernel.py --row "forward:d64 s512 full:auto" --row ...

Only the calls lie between cudaProfilerStart and cudaProfilerStop: neither the inputs nor the first
call, which loads the kernel. Each call is an NVTX range, named [who: row|FLOPs of a call], by which
ncu_table.py tells the rows of one run apart.
docs/profiling.md has whole commands.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from cuattn._bench import options
from cuattn._bench.families import FAMILIES
from cuattn._bench.peers import PEERS, Contestant, our_contestant
from cuattn._bench.workloads import AnyWorkload


def find_workload(family: str, name: str) -> AnyWorkload:
    """Return the row of that name; the way out of a wrong one is the list of right ones."""
    names = {w.name: w for w in FAMILIES[family].workloads}
    if name not in names:
        raise SystemExit(
            f"profile_kernel: family {family} has no workload {name!r}; it has: {', '.join(names)}"
        )
    return names[name]


def find_contestant(name: str) -> Contestant:
    """Return a backend of ours or a peer."""
    return PEERS[name] if name in PEERS else our_contestant(name)


def profile(torch: Any, workload: AnyWorkload, contestant: Contestant, calls: int) -> None:
    """Run a row within the profiler's range."""
    prepared = contestant.prepare(workload, workload.draw("cuda"))
    with prepared.context():
        prepared.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for _ in range(calls):
            name = f"[{contestant.name}: {workload.name}|{workload.flops:.4g}]"
            with torch.cuda.nvtx.range(name):
                prepared.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{contestant.name}: {workload.name}: {calls} calls, kernel {prepared.kernel}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="forward")
    parser.add_argument(
        "--row", action="append", default=[], help="family:workload:who, instead of these three"
    )
    parser.add_argument("--workload", help="name of a row, as bench.py --list says")
    parser.add_argument(
        "--who",
        choices=sorted({*options.BACKENDS, *options.PEERS}),
        default="auto",
        help="a backend of ours or a peer (default auto)",
    )
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no row after so many"
    )
    arguments = parser.parse_args()
    rows = [tuple(row.split(":", 2)) for row in arguments.row]
    if arguments.workload is not None:
        rows.append((arguments.family, arguments.workload, arguments.who))
    if not rows or any(len(row) != 3 for row in rows):
        parser.error("--workload NAME, or --row FAMILY:WORKLOAD:WHO as often as there are rows")
    found = [(find_workload(*row[:2]), find_contestant(row[2])) for row in rows]

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("profile_kernel: needs PyTorch with a CUDA device")
    with torch.no_grad():
        end = time.monotonic() + arguments.seconds
        for workload, contestant in found:
            if time.monotonic() > end:
                break
            profile(torch, workload, contestant, arguments.calls)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
