# SPDX-License-Identifier: Apache-2.0
"""The device that a call is explained for: here, or made up."""

from __future__ import annotations

import sys
from typing import Any

from .build import info

# Real GPUs that explain() may ask about by name:
# compute capability, multiprocessors, bytes of shared memory that a block can opt in to.
DEVICES: dict[str, tuple[int, int, int, int]] = {
    "a100": (8, 0, 108, 166912),
    "a10": (8, 6, 72, 101376),
    "rtx3090": (8, 6, 82, 101376),
    "l4": (8, 9, 58, 101376),
    "l40s": (8, 9, 142, 101376),
    "rtx4090": (8, 9, 128, 101376),
    "h100": (9, 0, 132, 232448),
    "h200": (9, 0, 132, 232448),
    "b200": (10, 0, 148, 232448),
    "rtx5090": (12, 0, 170, 101376),
}

CPU: dict[str, Any] = {
    "is_cuda": False,
    "major": 0,
    "minor": 0,
    "num_sms": 0,
    "smem_per_block_optin": 0,
    "native": 1,
    "has_cublas": False,
    "name": "cpu",
}

CUDA_DEVICE_TYPES = (2, 13)  # of DLPack: kDLCUDA, kDLCUDAManaged


def describe_device(device: str | dict[str, Any]) -> dict[str, Any]:
    """Fields of the C struct cuattn_device for a GPU named in DEVICES, or completed from a dict."""
    if isinstance(device, dict):
        known = {"is_cuda": True, "native": 1, "has_cublas": True, "name": "made up"}
        missing = {"major", "minor", "num_sms", "smem_per_block_optin"} - set(device)
        unknown = set(device) - {"major", "minor", "num_sms", "smem_per_block_optin", *known}
        if missing or unknown:
            raise ValueError(
                "explain: device must have major, minor, num_sms and smem_per_block_optin, "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}; complete the dict"
            )
        return {**known, **device}
    word = device.lower().replace(" ", "")
    if word not in DEVICES:
        raise ValueError(
            f"explain: device must be None, 'cpu', a CUDA device number, a GPU's name or a dict, "
            f"got {device!r}; known names are {', '.join(DEVICES)}"
        )
    major, minor, num_sms, smem = DEVICES[word]
    return {
        "is_cuda": True,
        "major": major,
        "minor": minor,
        "num_sms": num_sms,
        "smem_per_block_optin": smem,
        "native": 1,
        "has_cublas": True,
        "name": word.upper(),
    }


def without_memory(array: Any) -> Any:
    """Reduce a JAX array, whose memory is XLA's, to dtype and shape; keep anything else."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return array
    return (str(array.dtype), *array.shape)


def device_of_jax(q: Any) -> Any:
    """Return a device of an array of JAX; of one that is traced the default one."""
    if isinstance(q, sys.modules["jax"].core.Tracer):
        from ..jax.call import default_device

        return default_device()
    return next(iter(q.devices()))


def place(device: int | str | dict[str, Any] | None, q: Any) -> tuple[int, dict[str, Any] | None]:
    """Where shapes lie (a CUDA device number, or -1 for the CPU), and the device to ask about."""
    if device is None:
        if "jax" in sys.modules and without_memory(q) is not q:
            return (-1 if device_of_jax(q).platform == "cpu" else 0), None
        if hasattr(q, "__dlpack_device__"):
            kind, number = q.__dlpack_device__()
            return (number if kind in CUDA_DEVICE_TYPES else -1), None
        return (0 if (info()["cuda"] or {}).get("devices") else -1), None
    if device == "cpu":
        return -1, CPU
    if isinstance(device, int):
        if not isinstance(q, tuple):
            raise ValueError(
                "explain: device must be None, 'cpu', a GPU's name or a dict where q is an array, "
                f"got {device}; pass shapes to ask about another device of this machine"
            )
        return device, None
    return 0, describe_device(device)
