# SPDX-License-Identifier: Apache-2.0
"""Arrays that are quantised on a device and on the CPU: views of every kind, how bits are compared.

Next: tests/float8/test_quantize_shapes.py, test_quantize_rope.py.
"""

from __future__ import annotations

import itertools

import numpy as np

import harness
from cases import DTYPES

DIMS = range(16, 257, 16)
ROWS = (1, 15, 127, 129, 143, 257)
MODES = [
    ("tensor", None),
    ("head", None),
    ("block", None),
    ("head", "channel"),
    ("block", "tensor"),
    ("int8", None),
    ("int8", "channel"),
]

VIEWS = {  # of memory of [3, 2 rows, 6, 2 dim] elements: [2, rows, 3, dim]
    "contiguous": lambda x, rows, dim: np.ascontiguousarray(x[:2, :rows, :3, :dim]),
    "every other row and head": lambda x, rows, dim: x[1:, : 2 * rows : 2, ::2, :dim],
    "every other channel": lambda x, rows, dim: x[:2, :rows, 3:, : 2 * dim : 2],
    "off 16 bytes": lambda x, rows, dim: x[:2, :rows, :3, 1 : dim + 1],
    "on 4 channels": lambda x, rows, dim: x[:2, :rows, 2:5, 4 : dim + 4],
    "one batch": lambda x, rows, dim: np.broadcast_to(
        x[:1, :rows, :3, :dim], (2, rows, 3, dim)
    ),
    "columns": lambda x, rows, dim: np.ascontiguousarray(
        x[:2, :rows, :3, :dim].transpose(0, 2, 3, 1)
    ).transpose(0, 3, 1, 2),
}  # fmt: skip


def drawn(rng, rows, dim, dtype):
    """Memory for views: biased, with zeros in a head and numbers that are not finite."""
    x = rng.standard_normal((3, 2 * rows, 6, 2 * dim), np.float32) * 3 + rng.standard_normal()
    x[:, :, 2] = 0
    return x.astype(DTYPES[dtype])


def placed(device, view):
    """The same memory, strides and all, on the device."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    shifts = [n // view.itemsize for n in view.strides]
    begin, start = (x.__array_interface__["data"][0] for x in (base, view))
    flat = np.lib.stride_tricks.as_strided(base, (base.size,), (base.itemsize,))
    buffer = device.buffer(flat.nbytes + 64)
    whole = device.view(buffer, flat.dtype, 0, flat.shape, (1,))
    device.write(whole, flat)
    return device.view(buffer, view.dtype, start - begin, view.shape, shifts)


def same(device, ours, theirs, name):
    """Bits and strides; a NaN has the bits of a NaN."""
    got = np.asarray(device.numpy(ours))
    word = np.uint8 if theirs.itemsize == 1 else np.uint32
    bits = [np.ascontiguousarray(x).view(word) for x in (got, theirs)]
    assert got.shape == theirs.shape, name
    different = np.argwhere(bits[0] != bits[1])
    assert len(different) == 0, f"{name}: {len(different)} differ, first at {different[0]}"


def some(rng, *axes, most=None):
    """All combinations, or as many as `most`, at random; of them a third on the emulator."""
    every = list(itertools.product(*axes))
    count = min(len(every), most or len(every))
    if harness.is_emulated():  # its threads take turns on one core
        count = -(-count // 3)
    return [every[i] for i in rng.permutation(len(every))[:count]]
