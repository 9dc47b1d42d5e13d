# SPDX-License-Identifier: Apache-2.0
"""Where the demo's arrays live: a GPU through PyTorch or CuPy, else numpy on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cuattn


@dataclasses.dataclass(frozen=True)
class Place:
    """A device and the array library that reaches it."""

    is_cuda: bool
    device: str  # for people
    library: str
    note: str  # why here and not elsewhere
    from_host: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    synchronize: Callable[[], None]

    def time(self, call: Callable[[], Any], repeats: int) -> float:
        """Take the best seconds of one call, the device's work included, after a first call."""
        call()
        best = float("inf")
        for _ in range(repeats):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            best = min(best, time.perf_counter() - begin)
        return best


def usable_gpus() -> list[dict[str, Any]]:
    """GPUs that this build has code for."""
    cuda = cuattn.info().get("cuda") or {}
    return [gpu for gpu in cuda.get("devices", []) if gpu["code"] != "unsupported"]


def host(note: str) -> Place:
    """Reach the CPU backend, on numpy arrays."""
    cpu = cuattn.info()["cpu"]
    device = f"CPU ({cpu['isa']}, {cpu['threads']} threads)"
    return Place(
        False, device, f"numpy {np.__version__}", note, np.asarray, np.asarray, lambda: None
    )


def through_torch(gpu: dict[str, Any]) -> Place | None:
    """Reach the GPU through PyTorch, where it is installed with CUDA."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    device = f"cuda:{gpu['id']}"
    return Place(
        True,
        f"GPU {gpu['id']}: {gpu['name']} (compute capability {gpu['compute_capability']})",
        f"PyTorch {torch.__version__}",
        "",
        lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device),
        lambda x: x.cpu().numpy(),
        lambda: torch.cuda.synchronize(device),
    )


def through_cupy(gpu: dict[str, Any]) -> Place | None:
    """Reach the GPU through CuPy, where it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    device = cupy.cuda.Device(gpu["id"])
    device.use()
    return Place(
        True,
        f"GPU {gpu['id']}: {gpu['name']} (compute capability {gpu['compute_capability']})",
        f"CuPy {cupy.__version__}",
        "",
        cupy.asarray,
        cupy.asnumpy,
        device.synchronize,
    )


def choose() -> Place:
    """Choose the best place on this machine, with a note where a GPU cannot be used."""
    if cuattn.info().get("cuda") is None:
        return host("this build has no CUDA")
    gpus = usable_gpus()
    if not gpus:
        return host("no GPU that this build has code for (python -m cuattn info tells more)")
    for reach in (through_torch, through_cupy):
        place = reach(gpus[0])
        if place is not None:
            return place
    return host(
        f"{gpus[0]['name']} is here, but numpy arrays run on the CPU: install torch or cupy"
    )
