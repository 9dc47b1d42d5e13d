# SPDX-License-Identifier: Apache-2.0
"""Times of `cuattn.quantize` of q, k and v on CUDA, and what two builds make of the same numbers.

    python benchmarks/quantize_time.py [--save FILE.pt] [--compare FILE.pt]

q, k and v are [2, 8192, 2048 / head_dim, head_dim] in bfloat16. A CUDA graph holds twenty calls and
is replayed nine times; the median is told, in microseconds a call. --save keeps codes and scales;
--compare tells which part of the codes differs from a file that another build has saved, and how
far scales are off. For two builds: run it with PYTHONPATH at each, or with cuattn/lib/libcuattn.so
of a copied installation replaced, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

import cuattn

DIMS, MODES, CALLS, REPLAYS = (128, 64, 256, 96), ("block", "head"), 20, 9


def arrays(dim: int) -> list[torch.Tensor]:
    torch.manual_seed(dim)
    shape = (2, 8192, 2048 // dim, dim)
    return [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]


def time_us(qkv: list[torch.Tensor], mode: str) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            cuattn.quantize(*qkv, mode=mode)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1000)
    return round(statistics.median(times), 1)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype == torch.float8_e4m3fn:
        a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
        return (a != b).double().mean().item()
    return (a - b).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="FILE.pt")
    parser.add_argument("--compare", metavar="FILE.pt")
    told = parser.parse_args()
    before = torch.load(told.compare) if told.compare else {}
    found = {}
    print(torch.cuda.get_device_name(), cuattn.__file__)
    for dim in DIMS:
        qkv = arrays(dim)
        for mode in MODES:
            for _ in range(3):
                made = cuattn.quantize(*qkv, mode=mode)
            parts = (made.q, made.k, made.v, made.q_scale, made.k_scale, made.v_scale)
            found[dim, mode] = [x.cpu() for x in parts]
            row = {"head_dim": dim, "mode": mode, "us": time_us(qkv, mode)}
            if (dim, mode) in before:
                pairs = zip(found[dim, mode], before[dim, mode], strict=True)
                row["differs"] = [difference(*pair) for pair in pairs]
            print(json.dumps(row))
    if told.save:
        torch.save(found, told.save)


if __name__ == "__main__":
    main()
