# SPDX-License-Identifier: Apache-2.0
"""Cache operations on a CUDA device: bytes per second beside a plain copy, and the time of a step.

    python benchmarks/cache.py [--filter TEXT] [-o [cache.json]]

8 heads of 128, blocks of 16. A row counts each byte that must be read or written once; the last
column is its share of what a device copy of 128 MiB reaches in the same process, or, for
swap_blocks, of a copy of 256 MiB between the device and pinned memory. Calls are captured in a CUDA
graph; their arrays take turns, so that no call finds its own in the L2 cache.

    prompts   sequences of 1024 tokens, block by block
    from 5    the same, the first token at place 5 of its block
    decode    one token for each sequence
    random    every token in any block and place
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import cuattn

HEADS, DIM, BLOCK = 8, 128, 16
RESULTS = Path(__file__).parent / "results" / "cache.json"
LAYOUTS = ("nhd", "hnd", "vllm")
Call = Callable[[int], object]  # of the turn


def seconds(call: Call, turns: int, rounds: int = 7) -> float:
    """Median time of one call, from replays of a graph of `turns` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            call(turn)
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / turns / 1e3)
    return statistics.median(times)


def stream_seconds(call: Call, rounds: int = 7) -> float:
    """The same outside a graph: copies between host and device."""
    call(0)
    times = []
    for turn in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(turn)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read and written per second by copies of 128 MiB, over 4 GiB in turn."""
    size = 128 << 20
    source, target = torch.zeros((2, 16, size), dtype=torch.uint8, device="cuda")
    return 2 * size / seconds(lambda turn: target[turn].copy_(source[(turn + 8) % 16]), 16)


def bus_rate(to_host: bool) -> float:
    host = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = host.cuda()
    target, source = (host, there) if to_host else (there, host)
    return host.numel() / stream_seconds(lambda _: target.copy_(source, non_blocking=True))


def cache_shape(layout: str, blocks: int, itemsize: int, is_k: bool) -> tuple[int, ...]:
    if layout == "nhd":
        return blocks, BLOCK, HEADS, DIM
    if layout == "hnd":
        return blocks, HEADS, BLOCK, DIM
    x = 16 // itemsize
    return (blocks, HEADS, DIM // x, BLOCK, x) if is_k else (blocks, HEADS, DIM, BLOCK)


def caches(layout: str, blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [cache_shape(layout, blocks, dtype.itemsize, is_k) for is_k in (True, False)]
    return [torch.zeros(shape, dtype=dtype, device="cuda") for shape in shapes]


def slots(order: str, tokens: int, blocks: int) -> torch.Tensor:
    if order == "random":
        return torch.randperm(blocks * BLOCK, device="cuda")[:tokens]
    perm = torch.randperm(blocks, device="cuda")
    if order == "decode":
        return perm[:tokens] * BLOCK + torch.randint(BLOCK, (tokens,), device="cuda")
    place = torch.arange(tokens, device="cuda") + (5 if order == "from 5" else 0)
    return perm[place // BLOCK] * BLOCK + place % BLOCK


def write_rows() -> Iterator[tuple[str, float, Call, int]]:
    """Name, bytes, call, and turns of each row of reshape_and_cache."""
    sizes = [("decode", 1), ("decode", 64), ("decode", 256)]
    sizes += [("prompts", 8192), ("prompts", 65536), ("prompts", 262144)]
    sizes += [("from 5", 65536), ("random", 65536)]
    e4m3 = torch.float8_e4m3fn
    for order, tokens in sizes:
        for dtype, stored in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, e4m3),
            (torch.float32, torch.float32),
        ):
            for layout in LAYOUTS:
                for rope in (False, True):
                    turns = 4 if tokens <= 65536 else 2
                    blocks = max(2 * tokens // BLOCK + 64, 4096)
                    cache = caches(layout, blocks, stored)
                    shape = (turns, tokens, HEADS, DIM)
                    k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in "kv")
                    where = [slots(order, tokens, blocks) for _ in range(turns)]
                    options = {"kv_layout": layout}
                    if rope:
                        angle = torch.rand(8192, DIM // 2, device="cuda")
                        options |= {"cos": angle.cos(), "sin": angle.sin()}
                        options["positions"] = torch.arange(tokens, device="cuda") % 8192
                    size = tokens * HEADS * DIM * 2 * (dtype.itemsize + stored.itemsize)
                    kinds = "e4m3" if stored == e4m3 else str(dtype)[6:]
                    name = f"write {order} {tokens} {kinds} {layout}{' rotated' if rope else ''}"

                    def call(turn, k=k, v=v, cache=cache, where=where, options=options):
                        turn %= len(where)
                        cuattn.reshape_and_cache(k[turn], v[turn], *cache, where[turn], **options)

                    yield name, size, call, 3 * turns


def gather_rows() -> Iterator[tuple[str, float, Call, int]]:
    for tokens in (8192, 65536, 262144):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for layout in LAYOUTS:
                count, turns, blocks = tokens // 1024, 2, 2 * tokens // BLOCK
                cache = caches(layout, blocks, dtype)
                order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
                tables = order.view(turns, count, 1024 // BLOCK)
                ends = torch.arange(count + 1, device="cuda", dtype=torch.int32) * 1023
                shape = (turns, tokens, HEADS, DIM)
                outs = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in "kv"]
                size = count * 1023 * HEADS * DIM * 2 * 2 * dtype.itemsize
                kinds = "e4m3" if dtype.itemsize == 1 else str(dtype)[6:]

                def call(turn, cache=cache, tables=tables, ends=ends, outs=outs, layout=layout):
                    turn %= len(tables)
                    cuattn.gather_cache(
                        *cache,
                        tables[turn],
                        ends,
                        kv_layout=layout,
                        k_out=outs[0][turn],
                        v_out=outs[1][turn],
                    )

                yield f"gather {tokens} {kinds} {layout}", size, call, 6 * turns


def copy_rows() -> Iterator[tuple[str, float, Call, int]]:
    layers, blocks = 32, 1024
    ks, vs = ([caches("nhd", blocks, torch.bfloat16)[0] for _ in range(layers)] for _ in range(2))
    for count in (1, 16, 64, 256):
        order = torch.randperm(blocks)
        for where in ("cpu", "cuda"):
            pairs = [
                order.roll(turn * 2 * count)[: 2 * count].view(-1, 2).contiguous().to(where)
                for turn in range(2)
            ]
            size = 2 * 2 * count * layers * ks[0][0].nbytes

            def call(turn, pairs=pairs):
                cuattn.copy_blocks(ks, vs, pairs[turn % 2])

            yield f"copy_blocks {count} pairs on {where}, {layers} layers", size, call, 6


def swap_rows() -> Iterator[tuple[str, bool, float, Call]]:
    count, blocks = 512, 1024
    device = caches("nhd", blocks, torch.bfloat16)
    shape = tuple(device[0].shape)
    host = [cuattn.pinned_empty(shape, np.uint16) for _ in "kv"]
    device = [cache.view(torch.uint16) for cache in device]
    rng = np.random.default_rng(0)
    for order in ("in a run", "scattered"):
        a, b = np.arange(count), np.arange(count) + 100
        if order == "scattered":
            a, b = rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]
        pairs = np.stack([a, b], axis=1)
        for to_host in (True, False):
            source, target = (device, host) if to_host else (host, device)

            def call(turn, source=source, target=target, pairs=pairs):
                cuattn.swap_blocks(source, target, pairs)

            size = 2 * count * device[0][0].nbytes
            yield f"swap {order} to {'host' if to_host else 'device'}", to_host, size, call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", default="", help="only rows whose name contains this")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        nargs="?",
        const=RESULTS,
        help="write the rows to this file, without a name to benchmarks/results/cache.json",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not cuattn.info()["cuda"]:
        sys.exit("cache.py: a CUDA device and cuattn built for it are needed")
    rates = {"copy": copy_rate(), "to_host": bus_rate(True), "to_device": bus_rate(False)}
    print(", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items()))
    rows = {}

    def add(name: str, size: float, time: float, rate: str) -> None:
        rows[name] = {"us": time * 1e6, "bytes": size, "of_copy": size / time / rates[rate]}
        print(
            f"{name:48s} {time * 1e6:10.2f} us {size / time / 1e9:7.0f} GB/s "
            f"{rows[name]['of_copy']:5.2f}",
            flush=True,
        )

    for family in (write_rows, gather_rows, copy_rows):
        for name, size, call, turns in family():
            if arguments.filter in name:
                add(name, size, seconds(call, turns), "copy")
    for name, to_host, size, call in swap_rows():
        if arguments.filter in name:
            add(name, size, stream_seconds(call), "to_host" if to_host else "to_device")
    if arguments.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name(),
            "cuattn": cuattn.info(),
            "bytes_per_second": rates,
            "rows": rows,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
