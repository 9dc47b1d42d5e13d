# SPDX-License-Identifier: Apache-2.0
"""The device that a call is explained for: here, or made up."""

from __future__ import annotations

import numbers
import sys
from typing import Any, TypeGuard

from .._arrays import is_jax
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

KINDS = "None, 'cpu', a CUDA device number, a GPU's name or a dict"
NUMBERS = ("major", "minor", "num_sms", "smem_per_block_optin")  # that a dict must have
MOST_NUMBER = 2**31 - 1  # of a CUDA device
CUDA_DEVICE_TYPES = (2, 13)  # of DLPack: kDLCUDA, kDLCUDAManaged


def describe_device(device: str | dict[str, Any]) -> dict[str, Any]:
    """Fields of the C struct cuattn_device for a GPU named in DEVICES, or completed from a dict."""
    if isinstance(device, dict):
        known = {"is_cuda": True, "native": 1, "has_cublas": True, "name": "made up"}
        missing, unknown = set(NUMBERS) - set(device), set(device) - {*NUMBERS, *known}
        if missing or unknown:
            raise ValueError(
                "explain: device must have major, minor, num_sms and smem_per_block_optin, "
                f"missing {sorted(missing)}, unknown {sorted(unknown, key=repr)}; complete the dict"
            )
        found = {**known, **device}
        for name in (*NUMBERS, "native"):
            if not is_integer(found[name]):
                raise TypeError(
                    f"explain: device must have an integer as {name}, got {found[name]!r}; pass "
                    "an int"
                )
        if not isinstance(found["name"], str):
            raise TypeError(
                f"explain: device must have a string as name, got {found['name']!r}; pass a str"
            )
        return found
    word = device.lower().replace(" ", "")
    if word not in DEVICES:
        raise ValueError(
            f"explain: device must be {KINDS}, got {device!r}; known names are {', '.join(DEVICES)}"
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


def is_integer(value: Any) -> TypeGuard[int]:
    """Tell an integer, numpy's too, from what only passes for one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def without_memory(array: Any) -> Any:
    """Reduce a JAX array, whose memory is XLA's, to dtype and shape; keep anything else."""
    return (str(array.dtype), *array.shape) if is_jax(array) else array


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
    if isinstance(device, str) and device == "cpu":
        return -1, CPU
    if is_integer(device):
        number = int(device)
        if not 0 <= number <= MOST_NUMBER:
            raise ValueError(
                f"explain: device must be {KINDS}, got {number}; count GPUs from 0, and pass 'cpu' "
                "for the CPU"
            )
        if not isinstance(q, tuple):
            raise ValueError(
                "explain: device must be None, 'cpu', a GPU's name or a dict where q is an array, "
                f"got {number}; pass shapes to ask about another device of this machine"
            )
        return number, None
    if not isinstance(device, (str, dict)):
        raise TypeError(
            f"explain: device must be {KINDS}, got {device!r}; known names are {', '.join(DEVICES)}"
        )
    return 0, describe_device(device)
