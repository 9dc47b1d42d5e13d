# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie: what a call of several steps writes shares no memory with what it reads.

The compiled module compares the arrays of one step; these calls read arrays that their last step
does not see. Only addresses are compared, nothing is read.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._tracing import keep_out_of_graphs

MOST_WORK: Any = 100_000  # candidates of an exact comparison; what needs more counts as shared


class Place:
    """The addresses of an array, wherever it lies, as one of numpy that nobody reads."""

    def __init__(self, pointer: int, shape: Any, strides: Any, itemsize: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (pointer, True),
            "shape": tuple(shape),
            "strides": None if strides is None else tuple(strides),
            "typestr": f"|V{itemsize}",
        }


def place_of(array: Any) -> np.ndarray | None:
    """Find where an array of numpy, torch or CuPy lies; None: nowhere, or nobody tells."""
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(array, tensor):
        size = array.element_size()
        strides = [stride * size for stride in array.stride()]
        found = Place(array.data_ptr(), array.shape, strides, size)
    else:
        told = getattr(array, "__cuda_array_interface__", None)
        told = told or getattr(array, "__array_interface__", None)
        if told is None:
            return None
        size = array.dtype.itemsize
        found = Place(told["data"][0], told["shape"], told.get("strides"), size)
    return np.asarray(found) if 0 not in found.__array_interface__["shape"] else None


def share_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether two places have a byte in common; arrays between each other's rows have none."""
    try:
        return bool(np.shares_memory(a, b, max_work=MOST_WORK))
    except np.exceptions.TooHardError:
        return True


def refuse_shared(op: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise where a call would write over what it reads, or twice to one place."""
    if any(array is not None for array in written.values()):
        compare(op, written, read)


def compare(op: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Compare the places of what is written with all others; runs as it stands in graphs."""
    before = [(name, place_of(array)) for name, array in read.items()]
    for name, array in written.items():
        place = place_of(array)
        for other, there in before:
            if place is not None and there is not None and share_memory(place, there):
                raise ValueError(
                    f"{op}: {name} must not share memory with {other}, got overlapping arrays; "
                    "give it memory of its own"
                )
        before.append((name, place))


keep_out_of_graphs(globals(), "compare")
