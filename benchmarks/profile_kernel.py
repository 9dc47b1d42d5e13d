# SPDX-License-Identifier: Apache-2.0
"""Run one row of a benchmark family a few times, for nsys or ncu to look at.

    nsys profile -c cudaProfilerApi python benchmarks/profile_kernel.py --workload "d64 s512 full"

Only the calls lie between cudaProfilerStart and cudaProfilerStop: neither the inputs nor the first
call, which loads the kernel. Each call is an NVTX range with the name of who runs.
docs/profiling.md has whole commands.
"""

from __future__ import annotations

import argparse
import sys

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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="forward")
    parser.add_argument("--workload", required=True, help="name of a row, as bench.py --list says")
    parser.add_argument(
        "--who",
        choices=sorted({*options.BACKENDS, *options.PEERS}),
        default="auto",
        help="a backend of ours or a peer (default auto)",
    )
    parser.add_argument("--calls", type=int, default=3)
    arguments = parser.parse_args()
    workload = find_workload(arguments.family, arguments.workload)
    contestant = find_contestant(arguments.who)

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("profile_kernel: needs PyTorch with a CUDA device")
    with torch.no_grad():
        prepared = contestant.prepare(workload, workload.draw("cuda"))
        with prepared.context():
            prepared.call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            for _ in range(arguments.calls):
                with torch.cuda.nvtx.range(f"{contestant.name}: {workload.name}"):
                    prepared.call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    print(f"{contestant.name}: {workload.name}: {arguments.calls} calls, kernel {prepared.kernel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
