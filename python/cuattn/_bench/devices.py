# SPDX-License-Identifier: Apache-2.0
"""Where a workload runs and how it is timed: CUDA events on a GPU, perf_counter on the CPU.

CUDA: every timed call finds a cold L2 (a buffer of at least four times its size is overwritten
first, which also gives the host time to enqueue the call), and the chip is heated before each
workload, because a power-limited GPU favours whoever runs first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cuattn

from . import reference
from .workloads import AnyWorkload, Workload

HOST_CALLS = 50  # of which the host's time is the median


class Inputs:
    """Arrays of one workload: q, k, v in bshd (ragged: packed), and the options that are arrays."""

    def __init__(
        self,
        w: Workload,
        *,
        q: Any,
        k: Any,
        v: Any,
        slopes: Any = None,
        bias: Any = None,
        cu_seqlens: Any = None,
    ):
        self.workload = w
        self.q, self.k, self.v, self.slopes, self.bias, self.cu_seqlens = (
            q,
            k,
            v,
            slopes,
            bias,
            cu_seqlens,
        )

    def head(self, b: int, h: int, rows: np.ndarray) -> reference.Head:
        """Copy one sequence and query head to the host: q rows, k, v, ALiBi slope, bias rows."""
        w = self.workload
        group = h // (w.num_heads_q // w.num_heads_kv)
        q = self._sequence(self.q, b)[:, h]
        k, v = (self._sequence(x, b)[:, group] for x in (self.k, self.v))
        slope = float(self.slopes[h]) if self.slopes is not None else 0.0
        bias = to_host(self.bias[0, h][rows]) if self.bias is not None else None
        return to_host(q)[rows], to_host(k), to_host(v), slope, bias

    def out_head(self, out: Any, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        return to_host(self._sequence(out, b)[:, h])[rows]

    def sample(self) -> reference.Sample:
        """Make what results of this workload are checked with."""
        return reference.Sample(self.workload, self)

    def _sequence(self, x: Any, b: int) -> Any:
        if not self.workload.lengths:
            return x[b]
        begin = sum(self.workload.lengths[:b])
        return x[begin : begin + self.workload.lengths[b]]


def to_host(x: Any) -> np.ndarray:
    """Copy a torch tensor or numpy array to float32 numpy."""
    if hasattr(x, "detach"):
        return x.detach().float().cpu().numpy()
    return np.asarray(x).astype(np.float32)


def alibi_slopes(num_heads: int) -> np.ndarray:
    return np.exp2(-8.0 * np.arange(1, num_heads + 1) / num_heads).astype(np.float32)


def shapes(w: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v: bshd, or packed for a ragged workload."""
    lead_q = (sum(w.lengths),) if w.lengths else (w.batch, w.seqlen_q)
    lead_kv = (sum(w.lengths),) if w.lengths else (w.batch, w.seqlen_kv)
    kv = (*lead_kv, w.num_heads_kv, w.head_dim)
    return {"q": (*lead_q, w.num_heads_q, w.head_dim), "k": kv, "v": kv}


def cu_seqlens(w: Workload) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(w.lengths)]).astype(np.int32)


def torch_inputs(w: Workload, device: str) -> Inputs:
    import torch

    dtype = getattr(torch, w.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    arrays: dict[str, Any] = {name: draw(shape) for name, shape in shapes(w).items()}
    if w.alibi:
        arrays["slopes"] = torch.from_numpy(alibi_slopes(w.num_heads_q)).to(device)
    if w.bias:
        arrays["bias"] = draw((1, w.num_heads_q, w.seqlen_q, w.seqlen_kv))
    if w.lengths:
        arrays["cu_seqlens"] = torch.from_numpy(cu_seqlens(w)).to(device)
    return Inputs(w, **arrays)


def numpy_inputs(w: Workload) -> Inputs:
    rng = np.random.default_rng(0)
    if w.dtype == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(w.dtype)
    arrays: dict[str, Any] = {
        name: rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes(w).items()
    }
    if w.alibi:
        arrays["slopes"] = alibi_slopes(w.num_heads_q)
    if w.bias:
        arrays["bias"] = rng.standard_normal(
            (1, w.num_heads_q, w.seqlen_q, w.seqlen_kv), np.float32
        ).astype(dtype)
    if w.lengths:
        arrays["cu_seqlens"] = cu_seqlens(w)
    return Inputs(w, **arrays)


class CudaDevice:
    """The current CUDA device, driven through torch."""

    kind = "cuda"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.name = properties.name
        self.gpu = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "0"
        l2_bytes = getattr(properties, "L2_cache_size", 0) or 64 << 20
        self.flush_buffer = torch.empty(max(4 * l2_bytes, 1 << 30), dtype=torch.int8, device="cuda")
        self.flush_seconds = 0.0
        generator = torch.Generator("cuda").manual_seed(1)
        self.heater = torch.randn(8192, 8192, generator=generator, device="cuda").bfloat16()
        self.heated = torch.empty_like(self.heater)
        self.flush_seconds = self.time(self.flush_buffer.zero_, 5, flush=False)

    def inputs(self, w: AnyWorkload) -> Any:
        return w.draw("cuda")

    def heat(self, seconds: float) -> None:
        """Large matrix products until the clocks are where sustained work puts them."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(8):
                self.torch.mm(self.heater, self.heater, out=self.heated)
            self.torch.cuda.synchronize()

    def time(self, call: Callable[[], object], iterations: int, *, flush: bool = True) -> float:
        """Median seconds of one call."""
        cuda = self.torch.cuda
        events = [
            (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            for _ in range(iterations)
        ]
        for begin, end in events:
            if flush:
                self.flush_buffer.zero_()
            begin.record()
            call()
            end.record()
        cuda.synchronize()
        return float(np.median([begin.elapsed_time(end) for begin, end in events])) / 1e3

    def host_us(self, call: Callable[[], object]) -> float:
        """Median microseconds until a call returns, its work in a stream that is never full."""
        seconds = []
        for _ in range(HOST_CALLS):
            self.torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds)) * 1e6

    def capture(self, call: Callable[[], object], repeats: int) -> Callable[[], object]:
        """Make a CUDA graph of several calls, which have run before; returns its replay."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        return graph.replay

    @contextlib.contextmanager
    def peak_memory(self, result: list[int | None]) -> Iterator[None]:
        """Append the bytes that the calls inside held at most beyond what was held before."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        yield
        cuda.synchronize()
        result.append(cuda.max_memory_allocated() - before)

    def release(self) -> None:
        """Give cached memory back after a failure. Raises if it broke the device context."""
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def ceilings(self) -> dict[str, float]:
        """Measure this device when hot: copies in GB/s, 8192^3 products in TFLOP/s."""
        torch = self.torch
        self.heat(0.4)
        result = {"copy_gbps": self.copy_gbps(2 << 30)}
        for dtype in ("bfloat16", "float16", "float32"):
            a = self.heater.to(getattr(torch, dtype))
            out = torch.empty_like(a)
            self.heat(0.2)
            seconds = self.time(functools.partial(torch.mm, a, a, out=out), 8, flush=False)
            result[f"matmul_{dtype}_tflops"] = 2 * 8192**3 / seconds / 1e12
        self.release()
        return result

    def copy_gbps(self, size: int) -> float:
        """Copy size bytes within device memory; bytes read and written count."""
        source = self.torch.empty(size, dtype=self.torch.int8, device="cuda").random_()
        target = self.torch.empty_like(source)
        seconds = self.time(lambda: target.copy_(source), 20, flush=False)
        return 2 * size / seconds / 1e9

    def state(self) -> dict[str, str]:
        """Clock, power and temperature of the chip at work."""
        self.heat(0.2)
        for _ in range(400):  # half a second, enough for nvidia-smi to look while they run
            self.torch.mm(self.heater, self.heater, out=self.heated)
        found = nvidia_smi(self.gpu, "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        self.torch.cuda.synchronize()
        return found

    def machine(self) -> dict[str, Any]:
        torch = self.torch
        major, minor = torch.cuda.get_device_capability()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "device": self.name,
            "compute_capability": f"{major}.{minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": nvidia_smi("0", "driver_version").get("driver_version"),
            **cpu_machine(),
        }


class CpuDevice:
    """The host; torch CPU tensors where torch is installed, else numpy arrays."""

    kind = "cpu"
    flush_seconds = 0.0

    def __init__(self) -> None:
        self.name = cpu_name()
        self.has_torch = importlib.util.find_spec("torch") is not None

    def inputs(self, w: AnyWorkload) -> Any:
        if self.has_torch or type(w) is not Workload:
            return w.draw("cpu")
        return numpy_inputs(w)

    def heat(self, seconds: float) -> None:
        end = time.perf_counter() + min(seconds, 0.1)
        a = np.ones((256, 256), np.float32)
        while time.perf_counter() < end:
            a @ a  # wakes the cores

    def time(self, call: Callable[[], object], iterations: int, *, flush: bool = True) -> float:
        del (
            flush
        )  # the sizes measured here do not fit a core's cache, and hosts have no fixed size of it
        seconds = []
        for _ in range(iterations):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds))

    def host_us(self, call: Callable[[], object]) -> float:
        """Microseconds of a call, which is the host's work as a whole."""
        return self.time(call, 3) * 1e6

    def capture(self, call: Callable[[], object], repeats: int) -> Callable[[], object]:
        """Return several calls as one."""

        def calls() -> None:
            for _ in range(repeats):
                call()

        return calls

    @contextlib.contextmanager
    def peak_memory(self, result: list[int | None]) -> Iterator[None]:
        """Append None: the host's allocators tell nothing exact, the plan's figures are used."""
        result.append(None)
        yield

    def release(self) -> None:
        pass

    def ceilings(self) -> dict[str, float]:
        source = np.random.default_rng(0).standard_normal(32 << 20, np.float32)
        target = np.empty_like(source)
        copy = self.time(lambda: np.copyto(target, source), 5)
        a = source[: 2048 * 2048].reshape(2048, 2048)
        out = np.empty_like(a)
        product = self.time(lambda: np.matmul(a, a, out=out), 5)
        tflops = 2 * 2048**3 / product / 1e12
        return {"copy_gbps": 2 * source.nbytes / copy / 1e9, "matmul_float32_tflops": tflops}

    def state(self) -> dict[str, str]:
        """Nothing that hosts tell alike."""
        return {}

    def machine(self) -> dict[str, Any]:
        return {"device": self.name, **cpu_machine()}


Device = CudaDevice | CpuDevice


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as text:
        for line in text:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def nvidia_smi(gpu: str, *fields: str) -> dict[str, str]:
    """Ask nvidia-smi for fields of a GPU, named by its id; empty where it is not there."""
    words = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={gpu}"]
    command = ["nvidia-smi", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in done.stdout.split(",")), strict=False))


def open_device(kind: str) -> Device:
    """Open auto, cuda or cpu; auto takes a GPU where torch sees one and this build has CUDA."""
    with_cuda = cuattn.info().get("cuda") is not None
    if kind == "cuda" and not with_cuda:
        raise SystemExit("bench: --device cuda needs a build with CUDA (CUATTN_CUDA=ON)")
    if kind != "cpu" and with_cuda and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return CudaDevice()
    if kind == "cuda":
        raise SystemExit("bench: --device cuda needs PyTorch with a CUDA device (try --device cpu)")
    return CpuDevice()
