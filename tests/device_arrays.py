# SPDX-License-Identifier: Apache-2.0
"""Arrays of numpy on CUDA, by torch, or on the emulator; and back."""

from __future__ import annotations

import numpy as np

import harness


def to_device(device, x):
    if harness.is_emulated():
        import cupy

        return cupy.asarray(x)
    import torch

    return torch.from_numpy(x).to("cuda")


def to_host(x):
    return np.asarray(x.cpu().numpy() if hasattr(x, "cpu") else x.values, np.float64)
