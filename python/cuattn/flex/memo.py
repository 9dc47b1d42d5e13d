# SPDX-License-Identifier: Apache-2.0
"""What a call finds out of its functions, kept for the next call that is the same.

Rows, lists and programs hang on the functions, the shapes, and what captured arrays hold. `trace`
says whether a function is as it was; here stands the rest. What is kept lives as long as the traced
function. Next: attention.py, which asks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .block_mask import BlockMask
from .evaluate import as_numpy
from .plan import Problem
from .trace import Traced
from .tracers import is_jax_tracer

MOST = 32  # entries with a function, two for a call on CUDA; the oldest goes first
MOST_BYTES = 32 << 20  # of captured arrays that are compared
T = TypeVar("T")
_lock = threading.Lock()
_converted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # masks of torch
TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Kept(NamedTuple):
    """What one call found out."""

    others: list[weakref.ref[Any]]  # whose identity is in its key; a function may hang on them
    marks: list[Any]  # of the captured arrays
    found: Any


def shapes_of(problem: Problem) -> tuple[Any, ...]:
    """Return a problem as a key."""
    starts = None if problem.starts_q is None else problem.starts_q.tobytes()
    return (*problem[:4], starts, tuple(problem.lengths), problem.total_q)


def version_of(x: Any) -> Any:
    """Return what tells whether a tensor of torch on a GPU was written; None for all else."""
    if not getattr(x, "is_cuda", False) or not hasattr(x, "_version"):
        return None
    try:
        return x._version, x.data_ptr(), x.stride()
    except RuntimeError:  # inference tensors have no versions
        return None


def never_changes(x: Any) -> bool:
    """Whether it is an array of JAX."""
    return is_jax_tracer(x) or type(x).__module__.startswith("jax")


def is_compared(x: Any) -> bool:
    """Whether its numbers are compared, as nothing else tells that they are others."""
    return not never_changes(x) and version_of(x) is None


def mark_of(x: Any) -> Any:
    """Return what tells whether an array still holds the same numbers."""
    if never_changes(x):
        return None
    version = version_of(x)
    if version is not None:
        return version
    return as_numpy(x).tobytes()


def remember(
    traced: list[Traced], others: tuple[Any, ...], key: tuple[Any, ...], make: Callable[[], T]
) -> T:
    """Return what `make` returns, or returned in an earlier call of the same.

    Parameters
    ----------
    traced : list of Traced
        The functions, of which the first keeps it, or the first that captures what JAX traces: the
        others may outlive the trace.
    others : tuple
        Objects that must be the same ones.
    key : tuple
        What must be equal.
    make : function
        Is called where nothing is kept, or what is kept is of other numbers.
    """
    arrays = [x for f in traced for x in f.arrays]
    if sum(getattr(x, "nbytes", 0) for x in arrays if is_compared(x)) > MOST_BYTES:
        return make()
    keeper = next((f for f in traced if any(map(is_jax_tracer, f.arrays))), traced[0])
    others = tuple(x for x in (*traced, *others) if x is not None and x is not keeper)
    key = (*key, *map(id, others))
    marks = [mark_of(x) for x in arrays]
    kept = keeper.kept.get(key)
    if kept is not None and kept.marks == marks and all(map(is_of, kept.others, others)):
        return kept.found
    found = make()
    with _lock:
        everything = keeper.kept
        everything.pop(key, None)
        everything[key] = Kept([weakref.ref(x) for x in others], marks, found)
        if len(everything) > MOST:
            everything.pop(next(iter(everything)))
    return found


def is_of(reference: weakref.ref[Any], x: Any) -> bool:
    """Whether a reference is of an object."""
    return reference() is x


def of_torch(block_mask: Any) -> BlockMask:
    """Return a BlockMask of torch as ours, the same one each time."""
    tensors = [getattr(block_mask, name) for name in TENSORS]
    marks = [None if x is None else mark_of(x) for x in tensors]
    marks += [block_mask.mask_mod, tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)]
    known = _converted.get(block_mask)
    if known is None or known[0] != marks:
        known = _converted[block_mask] = (marks, BlockMask.from_torch(block_mask))
    return known[1]
