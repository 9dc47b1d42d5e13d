# SPDX-License-Identifier: Apache-2.0
"""Two builds of the library in one process: what a change of a kernel costs.

    python benchmarks/two_builds.py BEFORE/libcuattn.so AFTER/libcuattn.so [--rows forward]
        [--name TEXT] [--seconds 18] [-o FILE]

Rows are decode over pages; the forward pass: plain, scores, of which `before` may have kernels that
`after` serves by others, causal masks by sm80, and few queries over many keys; or the backward pass
by sm80.

Both are loaded side by side and called through the C ABI, whose structs must be the same in both;
cuattn itself need not be installed. On a machine without a GPU the calls run on the CPU.
Each row captures the same calls of each build in a CUDA graph, over as many caches in turn as an L2
does not hold, or one forward call over and over; rounds time both in a random order. The ratio is
before / after, the median of the rounds: above 1, the second build is faster. `bits` says whether
the results are the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

HEAD_DIM, ROUNDS, MOST_SETS = 128, 9, 24
COLD_BYTES = 256 << 20  # of caches in turn: none finds its own in the L2
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
SIZE, DOUBLE = ctypes.c_size_t, ctypes.c_double


class Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


BFLOAT16 = Dtype(4, 16, 1)


class Options(ctypes.Structure):
    """cuattn_paged_options of c_api.h, to `backend`."""

    _fields_ = (
        *(("struct_size", SIZE), ("version", INT), ("kv_layout", INT), ("kv_dtype", INT)),
        *(("causal", INT), ("window_left", LONG), ("window_right", LONG), ("has_scale", INT)),
        *(("num_splits", INT), ("scale", DOUBLE), ("softcap", DOUBLE), ("batch_invariant", INT)),
        *(("alibi_slopes", POINTER), ("sinks", POINTER), ("k_scale", DOUBLE), ("v_scale", DOUBLE)),
        *(("k_scales", POINTER), ("v_scales", POINTER), ("plan", POINTER)),
        *(("partition_size", LONG), ("max_context_len", LONG), ("exp_sums", POINTER)),
        *(("max_logits", POINTER), ("tmp_out", POINTER), ("backend", ctypes.c_char_p)),
    )


class AttentionOptions(ctypes.Structure):
    """cuattn_attention_options of c_api.h, to `backend`."""

    _fields_ = (
        *(("struct_size", SIZE), ("layout", INT), ("causal", INT), ("window_left", LONG)),
        *(("window_right", LONG), ("has_scale", INT), ("num_splits", INT), ("scale", DOUBLE)),
        *(("softcap", DOUBLE), ("batch_invariant", INT), ("return_lse", INT)),
        *(("alibi_slopes", POINTER), ("sinks", POINTER), ("bias", POINTER)),
        *(("seqused_q", POINTER), ("seqused_k", POINTER), ("cu_seqlens_q", POINTER)),
        *(("cu_seqlens_k", POINTER), ("max_seqlen_q", LONG), ("max_seqlen_k", LONG)),
        *(("block_tables", POINTER), ("kv_layout", INT), ("backend", ctypes.c_char_p)),
    )


class BackwardOptions(ctypes.Structure):
    """cuattn_backward_options of c_api.h."""

    _fields_ = (("struct_size", SIZE), ("need", INT), ("deterministic", INT), ("dlse", POINTER))


class BackwardCall(ctypes.Structure):
    """cuattn_backward_call of c_api.h."""

    _fields_ = (("device", INT * 2), ("workspace_bytes", SIZE), ("state", ctypes.c_uint64 * 512))


class Call(ctypes.Structure):
    """cuattn_attention_call of c_api.h."""

    _fields_ = (
        *(("device", INT * 2), ("out_dtype", Dtype), ("ndims", INT * 2), ("out_shape", LONG * 4)),
        *(("lse_shape", LONG * 3), ("workspace_bytes", SIZE), ("nothing_to_do", INT)),
        ("state", ctypes.c_uint64 * 512),
    )


class Shape(ctypes.Structure):
    """cuattn_paged_shape of c_api.h."""

    _fields_ = (
        *(("q_len", LONG), ("num_heads_q", LONG), ("num_heads_kv", LONG), ("head_dim", LONG)),
        *(("block_size", LONG), ("dtype", Dtype)),
    )


class Row(NamedTuple):
    heads_q: int
    heads_kv: int
    batch: int
    context: int
    block: int
    planned: bool = True
    softcap: float = 0.0
    backend: str = "auto"

    @property
    def name(self) -> str:
        words = f"{self.heads_q}/{self.heads_kv} {self.batch} x {self.context}, block {self.block}"
        words += ", plan in the call" * (not self.planned and self.backend == "auto")
        words += f", softcap {self.softcap:g}" * bool(self.softcap)
        return words + f", {self.backend}" * (self.backend != "auto")

    @property
    def kind(self) -> str:
        kind = "softcap" if self.softcap else self.backend
        return ("planned" if self.planned else "plan in the call") if kind == "auto" else kind

    @property
    def bytes(self) -> int:
        return 4 * self.batch * self.context * self.heads_kv * HEAD_DIM


class ForwardRow(NamedTuple):
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 16
    heads_kv: int = 16
    causal: bool = False
    score: str = "none"  # softcap, bias
    backend: str = "auto"

    @property
    def name(self) -> str:
        words = f"{self.heads_q}/{self.heads_kv} {self.seqlen_q} of {self.seqlen_k}"
        words += f", {self.head_dim}, {'causal' if self.causal else 'full'}"
        return words + f", {self.kind}"

    @property
    def kind(self) -> str:
        if self.score == "none":
            plain = "few queries" if self.seqlen_q < self.seqlen_k else "plain"
            return plain + f" by {self.backend}" * (self.backend != "auto")
        return f"{self.score}{' by ' * (self.backend != 'auto')}" + self.backend.removeprefix(
            "auto"
        )


class BackwardRow(NamedTuple):
    head_dim: int
    seqlen: int
    causal: bool
    backend: str
    heads: int = 16

    @property
    def name(self) -> str:
        words = f"{self.heads} heads, {self.seqlen}, {self.head_dim}"
        return words + f", {'causal' if self.causal else 'full'}, backward by {self.backend}"

    @property
    def kind(self) -> str:
        return f"backward, {'causal' if self.causal else 'full'}"


def backward_rows() -> Iterable[BackwardRow]:
    for head_dim in (32, 64, 96, 128, 192, 256):
        for seqlen in (512, 4096) if IS_CUDA else (24,):
            for causal in (False, True):
                yield BackwardRow(head_dim, seqlen, causal, "sm80" if IS_CUDA else "cpu")


def forward_rows() -> Iterable[ForwardRow]:
    length = 4096 if IS_CUDA else 48
    for head_dim in (64, 96, 128, 192, 256):
        for score in ("softcap", "bias"):
            yield ForwardRow(head_dim, length, length, score=score)
        yield ForwardRow(head_dim, length, length, causal=True, score="softcap")
    for head_dim in (64, 128, 256) if IS_CUDA else ():
        for causal in (False, True):
            sm80 = {"score": "softcap", "backend": "sm80"}
            yield ForwardRow(head_dim, length, length, causal=causal, **sm80)
    for head_dim in (32, 64, 96, 128, 192, 256) if IS_CUDA else ():
        for seqlen in (512, 4096):
            yield ForwardRow(head_dim, seqlen, seqlen, causal=True, backend="sm80")
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            yield ForwardRow(head_dim, length, length, causal=causal)
    for few, many in ((64, 32768), (128, 32768), (64, 131072)) if IS_CUDA else ((8, 64),):
        for causal in (False, True):
            yield ForwardRow(128, few, many, heads_q=8, heads_kv=1, causal=causal)
    few, many = (512, 32768) if IS_CUDA else (8, 64)
    yield ForwardRow(128, few, many, heads_q=32, heads_kv=8, causal=True)


def paged_rows() -> Iterable[Row]:
    """Take KV of 4 MB to 2 GB; what is not the planned call of `auto`, on blocks of 16 alone."""
    sizes = ((1, 8192), (16, 1024), (64, 1024), (16, 8192), (64, 8192))
    if not IS_CUDA:
        sizes = ((1, 512), (3, 64))
    for heads in ((32, 8), (64, 8), (32, 32)):
        for extents in sizes:
            yield Row(*heads, *extents, 16)
            yield Row(*heads, *extents, 64)
            yield Row(*heads, *extents, 16, planned=False)
            yield Row(*heads, *extents, 16, softcap=30.0)
            if IS_CUDA:
                yield Row(*heads, *extents, 16, planned=False, backend="sm80")


AnyRow = Row | ForwardRow | BackwardRow


def draw(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()


class Arrays:
    """Sets of q, k and v, what they share, and views of all for C."""

    def __init__(self, row: AnyRow):
        self.views: list[Any] = []
        self.sets: list[tuple[torch.Tensor, ...]]
        if isinstance(row, Row):
            return self.draw_paged(row)
        if isinstance(row, BackwardRow):
            shape = (1, row.seqlen, row.heads, row.head_dim)
            lse = torch.full((1, row.heads, row.seqlen), 8.0, device=DEVICE)
            self.sets = [(*(draw(*shape) for _ in range(5)), lse)] * (4 if row.seqlen > 512 else 20)
            return None
        q = draw(1, row.seqlen_q, row.heads_q, row.head_dim)
        kv = (draw(1, row.seqlen_k, row.heads_kv, row.head_dim) for _ in range(2))
        # A graph of one short call would measure its own launch.
        self.sets = [(q, *kv)] * (20 if row.seqlen_q < row.seqlen_k else 4)
        if row.score == "bias":
            self.bias = self.view(draw(1, row.heads_q, row.seqlen_q, row.seqlen_k))
        return None

    def draw_paged(self, row: Row) -> None:
        """Draw caches, their tables and lengths."""
        blocks = row.batch * row.context // row.block
        count = min(max(2, -(-COLD_BYTES // row.bytes)), MOST_SETS) if IS_CUDA else 2
        order = torch.randperm(blocks, device=DEVICE).to(torch.int32)
        tables = order.view(row.batch, -1)
        lens = torch.full((row.batch,), row.context, device=DEVICE, dtype=torch.int32)
        self.tables, self.lens = self.view(tables), self.view(lens)
        cache = (blocks, row.block, row.heads_kv, HEAD_DIM)
        self.sets = [(draw(row.batch, row.heads_q, HEAD_DIM), *(draw(*cache) for _ in range(2)))
                     for _ in range(count)]  # fmt: skip

    def view(self, x: torch.Tensor) -> Any:
        """Return the address of x as a DLTensor; it lives as long as this."""
        capsule = x.__dlpack__()
        self.views.append((x, capsule))
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
        return POINTER(get(capsule, b"dltensor"))


class Build:
    """One libcuattn.so."""

    def __init__(self, path: pathlib.Path):
        self.c = ctypes.CDLL(str(path.resolve()), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self.c.cuattn_last_error.restype = ctypes.c_char_p

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.c.cuattn_last_error().decode())

    def prepare(self, row: AnyRow, x: Arrays) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Return a function that runs the call on every set, and the results it writes."""
        if isinstance(row, Row):
            return self.prepare_paged(row, x)
        if isinstance(row, BackwardRow):
            return self.prepare_backward(row, x)
        options = AttentionOptions()
        self.c.cuattn_attention_options_init(ctypes.byref(options), SIZE(ctypes.sizeof(options)))
        options.backend, options.causal = row.backend.encode(), row.causal
        options.softcap = 30.0 if row.score == "softcap" else 0.0
        options.bias = x.bias if row.score == "bias" else None
        return self.runs(x, self.c.cuattn_attention_prepare, self.c.cuattn_attention_run, options)

    def prepare_paged(self, row: Row, x: Arrays) -> tuple[Callable[[], None], list[torch.Tensor]]:
        options = Options()
        self.c.cuattn_paged_options_init(ctypes.byref(options), SIZE(ctypes.sizeof(options)))
        options.backend, options.softcap = row.backend.encode(), row.softcap
        if row.planned:
            options.plan = self.plan(row, x, options)
        shared = x.tables, x.lens
        prepare, run = self.c.cuattn_paged_prepare, self.c.cuattn_paged_run
        return self.runs(x, prepare, run, options, *shared)

    def prepare_backward(
        self, row: BackwardRow, x: Arrays
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        options, more, call = AttentionOptions(), BackwardOptions(), BackwardCall()
        self.c.cuattn_attention_options_init(ctypes.byref(options), SIZE(ctypes.sizeof(options)))
        self.c.cuattn_backward_options_init(ctypes.byref(more), SIZE(ctypes.sizeof(more)))
        options.backend, options.causal = row.backend.encode(), row.causal
        arrays = (POINTER * 6)(*(x.view(a).value for a in x.sets[0]))
        given = [ctypes.byref(a) for a in (options, more, call)]
        self.check(self.c.cuattn_attention_backward_prepare(arrays, *given))
        outs = [torch.full_like(x.sets[0][0], torch.nan) for _ in range(3)]
        gradients = (POINTER * 6)(*(x.view(a).value for a in outs))
        space = torch.zeros(max(1, call.workspace_bytes), dtype=torch.uint8, device=DEVICE)
        memory = POINTER(space.data_ptr()), SIZE(space.numel())

        def run() -> None:
            for _ in x.sets:
                launch = self.c.cuattn_attention_backward_run
                self.check(launch(ctypes.byref(call), gradients, *memory, stream()))

        x.views += [options, more, arrays, space]
        return run, outs

    def runs(
        self, x: Arrays, prepare: Any, launch: Any, options: ctypes.Structure, *shared: Any
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        runs = []
        for arrays in x.sets:
            call, views = Call(), [x.view(a) for a in arrays]
            to = ctypes.byref(options), ctypes.byref(call)
            self.check(prepare(*views, *shared, *to))
            out = torch.full_like(arrays[0], torch.nan)
            space = torch.zeros(max(1, call.workspace_bytes), dtype=torch.uint8, device=DEVICE)
            runs.append((call, out, x.view(out), space))

        def run() -> None:
            for call, _, view, space in runs:
                memory = POINTER(space.data_ptr()), SIZE(space.numel())
                self.check(launch(ctypes.byref(call), view, None, *memory, stream()))

        x.views += [options, runs]  # a graph replays with the workspace of `run`
        return run, [out for _, out, _, _ in runs]

    def plan(self, row: Row, x: Arrays, options: Options) -> Any:
        call = Call()
        shape = Shape(1, row.heads_q, row.heads_kv, HEAD_DIM, row.block, BFLOAT16)
        arguments = [ctypes.byref(a) for a in (shape, options, call)]
        self.check(self.c.cuattn_paged_plan_prepare(x.tables, x.lens, *arguments))
        plan = torch.zeros(call.out_shape[0], dtype=torch.int32, device=DEVICE)
        view = x.view(plan)
        self.check(self.c.cuattn_paged_plan_run(ctypes.byref(call), view, stream()))
        return view


def stream() -> Any:
    return POINTER(torch.cuda.current_stream().cuda_stream if IS_CUDA else 0)


def captured(run: Callable[[], None]) -> Callable[[], object]:
    """Make a CUDA graph of what `run` launches, which has run before."""
    if not IS_CUDA:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(call: Callable[[], object]) -> float:
    if not IS_CUDA:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def heat() -> None:
    """Large products until the clocks are where sustained work puts them."""
    if IS_CUDA:
        a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(300):
            torch.mm(a, a)
        torch.cuda.synchronize()


def measure(row: AnyRow, builds: list[Build]) -> dict[str, Any]:
    """Time both builds on one row."""
    x = Arrays(row)
    calls, outs = [], []
    for build in builds:
        run, out = build.prepare(row, x)
        run()
        outs.append(out)
        calls.append(captured(run))
    times: list[list[float]] = [[] for _ in builds]
    for _ in range(ROUNDS):
        for i in random.sample(range(len(builds)), len(builds)):
            times[i].append(milliseconds(calls[i]) / len(x.sets))
    alike = all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    names = {"name": row.name, "kind": row.kind}
    return {**row._asdict(), **names, "ms": times, "ratio": ratio, "same_bits": alike}


def summary(found: list[dict[str, Any]]) -> Iterable[str]:
    """Say what became of each kind of call, and of all."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        kinds.setdefault("all rows", []).append(row)
        kinds.setdefault(row["kind"], []).append(row)
    for kind, part in kinds.items():
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in part))
        least = min(part, key=lambda row: row["ratio"])
        bits = sum(row["same_bits"] for row in part)
        yield (
            f"{kind}: before / after {mean:.3f} on the geometric mean of {len(part)} rows, least "
            f"{least['ratio']:.3f} at {least['name']}; the same bits in {bits}"
        )


ROWS: dict[str, Callable[[], Iterable[AnyRow]]] = {
    "paged": paged_rows,
    "forward": forward_rows,
    "backward": backward_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--rows", choices=ROWS, default="paged")
    parser.add_argument("--name", default="", help="only rows whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to stop (default 60)")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="a JSON file for all rounds")
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    builds = [Build(arguments.before), Build(arguments.after)]
    heat()
    found = []
    chosen = [row for row in ROWS[arguments.rows]() if arguments.name in row.name]
    random.shuffle(chosen)
    for row in chosen:
        if time.perf_counter() > end:
            print(f"{len(found)} of {len(chosen)} rows: out of time")
            break
        one = measure(row, builds)
        found.append(one)
        before, after = (statistics.median(times) * 1e3 for times in one["ms"])
        bits = "" if one["same_bits"] else "  other bits"
        print(f"{row.name:44s} {before:9.2f} {after:9.2f} us  {one['ratio']:.3f}{bits}", flush=True)
    print("\n".join(summary(found)))
    if arguments.output:
        head = {"device": torch.cuda.get_device_name() if IS_CUDA else "cpu", "rounds": ROUNDS}
        head |= {"torch": torch.__version__, "command": " ".join(sys.argv)}
        arguments.output.write_text(json.dumps({**head, "rows": found}) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
