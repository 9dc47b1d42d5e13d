# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of one sequence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._kv_swap import FileBlocks, HostBlocks
from .block_pool import token_array

NO_SLOTS = np.empty(0, np.int64)


class State(NamedTuple):
    """What the cache knows of a sequence beside its blocks; replaced as a whole, never changed."""

    tokens: list[int]  # the first `known` are those of the sequence; what follows is left over
    known: int = 0
    salt: bytes | None = None
    length: int = 0  # tokens with a slot
    committed: int = 0  # blocks that others may find
    slots: np.ndarray = NO_SLOTS  # of the last append
    swapped: HostBlocks | FileBlocks | None = None


def check_sequence(op: str, seq: Any) -> None:
    """Refuse what cannot be the number of a sequence."""
    if not isinstance(seq, (int, np.integer)) or isinstance(seq, bool):
        raise TypeError(
            f"PagedKVCache.{op}: seq must be an integer, got {seq!r}; pass what add or fork gave"
        )


def list_of(op: str, seqs: Any) -> list[int | None]:
    """List the sequences of a batch."""
    try:
        return list(seqs)
    except TypeError:
        raise TypeError(
            f"PagedKVCache.{op}: seqs must be a list of sequences, got {seqs!r}; pass [{seqs!r}] "
            "for one"
        ) from None


def check_tier(tier: Any) -> None:
    """Refuse what names no place for the blocks of a sequence."""
    if not isinstance(tier, (str, bytes, os.PathLike)):
        raise TypeError(
            f"PagedKVCache.swap_out: tier must be 'host' or a path, got {tier!r}; leave it out for "
            "host memory"
        )


def new_tokens(state: State, n: int, tokens: Sequence[int] | np.ndarray) -> list[int]:
    """Check the ids of tokens that `append` is given for a sequence, and list them."""
    ids = token_array("PagedKVCache.append", tokens).tolist()
    if len(ids) != n:
        raise ValueError(
            f"PagedKVCache.append: tokens must be n = {n} ids, got {len(ids)}; give each new "
            "token its id"
        )
    if state.known != state.length:
        raise ValueError(
            f"PagedKVCache.append: tokens must follow known ones, got {state.length} tokens "
            f"in the cache and {state.known} ids; give all ids by add or append, or "
            "leave tokens out"
        )
    return ids
