# SPDX-License-Identifier: Apache-2.0
"""What flex_attention costs beside its forward kernel: compilers, block masks, gradients.

    python benchmarks/flex_costs.py compile      # NVRTC alone: needs no GPU
    python benchmarks/flex_costs.py masks        # create_block_mask, on the host
    python benchmarks/flex_costs.py backward     # beside torch's FlexAttention, on a GPU

`compile` says how long NVRTC takes for a function's source, and how long reading its machine code
from the disk does. `backward` times dq, dk and dv of one layer by CUDA events, both in turns. Each
prints a table, and with -o FOLDER writes it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time

import numpy as np

import cuattn
from cuattn import flex
from cuattn._bench.flex import FlexWorkload, functions
from cuattn.flex import functors, nvrtc
from cuattn.flex.emit import Function, Kernel, source
from cuattn.flex.trace import trace

KERNELS = {
    "sm90": ("sm_90a", Kernel("sm90", "bfloat16", 128, 128)),
    "sm80": ("sm_90", Kernel("sm80", "bfloat16", 128, 128)),
}
KINDS = ("unsorted documents", "streaming", "softcap", "alibi", "relative bias")
LENGTHS = (8192, 32768, 131072)
ROUNDS, CALLS = 5, 6


def of_kind(kind: str) -> dict[str, Function]:
    """Return the functions of a kind as a source takes them; causal is an option of the kernel."""
    w = FlexWorkload(kind, kind, seqlen=1024)
    score, mask = functions(w, w.captured())
    found, first = {}, 0
    for name, function in (("score", score), ("mask", None if score else mask)):
        if function is not None:
            traced = trace(function, is_score=name == "score")
            found[name] = Function(traced.expr, traced.scalars, first, traced.arrays)
            first += len(traced.arrays)
    return found


def compile_times() -> list[dict]:
    """Compile a function of each kind for each kernel."""
    begin = time.perf_counter()
    nvrtc.nvrtc()
    print(f"opening NVRTC {nvrtc.nvrtc().version}: {time.perf_counter() - begin:.2f} s")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUATTN_CACHE_DIR"] = folder
        functors.headers_key()
        for kernel, (arch, of) in KERNELS.items():
            for kind in KINDS:
                text = source(of, of_kind(kind), False, "score" not in of_kind(kind), True)
                times = []
                for _ in range(2):  # NVRTC, then the disk
                    begin = time.perf_counter()
                    functors.machine_code(text, arch)
                    times.append(time.perf_counter() - begin)
                rows.append(
                    {"kernel": kernel, "kind": kind, "s": times[0], "disk_ms": times[1] * 1e3}
                )
                print(
                    f"{kernel:5s} {kind:20s} {times[0]:6.2f} s, disk {times[1] * 1e3:6.2f} ms",
                    flush=True,
                )
    return rows


def mask_times() -> list[dict]:
    """Make block masks of long sequences; the best of three."""
    rows = []
    for n in LENGTHS:
        ids = np.random.default_rng(0).integers(0, 8, n // 64).repeat(64).astype(np.int32)
        for name, mask in (
            ("streaming", flex.masks.streaming(1024)),
            ("unsorted documents", lambda b, h, q, k, ids=ids: ids[q] == ids[k]),
        ):
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                cuattn.create_block_mask(mask, None, None, n, n)
                times.append(time.perf_counter() - begin)
            rows.append({"seqlen": n, "mask": name, "ms": min(times) * 1e3})
            print(f"{n:7d} {name:20s} {min(times) * 1e3:8.2f} ms", flush=True)
    return rows


def torch_gradients(x, w):
    """Return a call of FlexAttention's backward alone, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    arrays = [a.transpose(1, 2).detach().requires_grad_() for a in (x.q, x.k, x.v)]
    options = {"score_mod": x.score}
    if x.mask is not None:
        options["block_mask"] = create_block_mask(
            x.mask, None, None, w.seqlen, w.seqlen, device="cuda"
        )
    out = torch.compile(flex_attention, dynamic=False)(*arrays, **options)
    dout = torch.randn_like(out)
    return dout.transpose(1, 2).contiguous(), lambda: torch.autograd.grad(
        out, arrays, dout, retain_graph=True
    )


def our_gradients(x, dout):
    """Return a call of our backward, of what our forward call gave."""
    call = {"score_mod": x.score, "mask_mod": x.mask}
    out, lse = cuattn.flex_attention(x.q, x.k, x.v, return_lse=True, **call)
    return lambda: cuattn.flex_attention_backward(dout, x.q, x.k, x.v, out, lse, **call)


def milliseconds(call) -> float:
    """Median time of a call."""
    import torch

    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in events]))


def backward_times() -> list[dict]:
    """Time gradients of both, in turns, after their results are held to each other."""
    rows = []
    for kind in ("documents", "causal", "unsorted documents", "alibi, a function"):
        w = FlexWorkload(kind, kind)
        x = w.draw("cuda")
        dout, theirs = torch_gradients(x, w)
        ours = our_gradients(x, dout)
        errors = [
            float((a.float() - b.transpose(1, 2).float()).abs().max() / b.float().abs().max())
            for a, b in zip(ours(), theirs(), strict=True)
        ]
        times = [(milliseconds(ours), milliseconds(theirs)) for _ in range(ROUNDS)]
        ratio = float(np.median([b / a for a, b in times]))
        ms = [float(np.median(t)) for t in zip(*times, strict=True)]
        tflops = 2.5 * w.flops / ms[0] / 1e9
        row = {"kind": kind, "ms": ms[0], "torch_ms": ms[1], "ratio": ratio, "tflops": tflops}
        rows.append(row | {"errors": errors})
        print(
            f"{kind:20s} {ms[0]:7.3f} ms ({tflops:.0f} TFLOP/s), torch {ms[1]:7.3f} ms, "
            f"ratio {ratio:.2f}, differ by {max(errors):.1e} of the greatest",
            flush=True,
        )
    return rows


PARTS = {"compile": compile_times, "masks": mask_times, "backward": backward_times}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("-o", "--output", type=pathlib.Path, help="folder for flex_costs_PART.json")
    given = parser.parse_args()
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
    for part in given.parts:
        rows = PARTS[part]()
        if given.output:
            path = given.output / f"flex_costs_{part}.json"
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
