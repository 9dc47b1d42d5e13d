# SPDX-License-Identifier: Apache-2.0
"""The blocks of a paged KV cache: who holds them, who shares them, which prefix is still there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from . import _core

INT64_MAX = 2**63 - 1


def token_array(op: str, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Make token ids a contiguous int64 array of one axis; refusals are in the name of `op`."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size > 0):
        raise TypeError(
            f"{op}: tokens must be integers on one axis, got {array.dtype} with shape "
            f"{array.shape}; pass a list of token ids"
        )
    if array.dtype == np.uint64 and array.size > 0 and array.max() > INT64_MAX:
        raise ValueError(
            f"{op}: tokens must be at most 2^63 - 1, got {array.max()}; hash ids to int64 yourself"
        )
    return np.ascontiguousarray(array, np.int64)


def salt_bytes(op: str, salt: bytes | str | int | None) -> bytes | None:
    """Encode a salt so that no two are the same bytes; refusals are in the name of `op`."""
    if salt is None:
        return None
    if isinstance(salt, bytes):
        return b"b" + salt
    if isinstance(salt, str):
        return b"s" + salt.encode("utf-8", "surrogatepass")
    if isinstance(salt, (int, np.integer)) and not isinstance(salt, bool):
        return b"i%d" % salt
    raise TypeError(
        f"{op}: salt must be bytes, str, int or None, got {salt!r}; pass the name or the digest of "
        "the adapter, the image or the tenant"
    )


class Uncopied:
    """Base of what has one owner: copy, deepcopy and pickle refuse."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name}: must not be copied or pickled, because a copy would hand out the same "
            f"blocks; share the object, or make a new {name}"
        )


class BlockPool(Uncopied):
    """Hands out the blocks of a paged KV cache, counts references and shares prefixes.

    A block is a number in [0, num_blocks), as `block_tables` hold it; the pool knows neither keys
    nor values. Every method is safe to call from several threads and takes O(1) time per block and
    per token given. One that raises has changed nothing.

    A committed block is found again by the tokens it holds and all tokens before it. Both are
    compared, so a collision of hashes cannot give one sequence the keys of another. Without a
    reference it stays findable until its memory is needed: the longest unused goes first, and of
    one sequence the end goes before the begin. What followed an evicted block is not found again.

    A salt keeps apart what tokens alone do not tell apart, as adapters, images behind the same
    placeholder tokens, or tenants: sequences share blocks only where their salts are equal. b"1",
    "1" and 1 are three salts, None is none.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, 1 to 2^31 - 1.
    block_size : int
        Tokens in a block.

    Raises
    ------
    ValueError
        Impossible sizes; in the methods an id out of range, or of a block that nobody holds.
    OutOfBlocksError
        Too few blocks are free; a MemoryError.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._pool = _core.BlockPool(num_blocks, block_size)
        self.num_blocks = int(num_blocks)
        self.block_size = int(block_size)

    def allocate(self, n: int) -> list[int]:
        """Take `n` free blocks, each with one reference: all, or none and an OutOfBlocksError."""
        return self._pool.allocate(n)

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference of each block; a shared one stays with its other holders.

        One that stands twice in `ids` loses two.
        """
        self._pool.free(ids)

    def fork(self, ids: Iterable[int]) -> None:
        """Add one reference to each block."""
        self._pool.fork(ids)

    def ref_count(self, id: int) -> int:
        """Count the references of a block; 0: it is free."""
        return self._pool.ref_count(id)

    def make_writable(self, id: int) -> tuple[int, int | None]:
        """Give the block to write to in place of `id`, and the one to copy from, or None.

        The caller's own block is returned as it is, and no longer matched. For a shared one a new
        block takes over the caller's reference: copy the content of the old one into it.
        """
        writable = self._pool.make_writable(id)
        return writable, None if writable == id else id

    def match_prefix(
        self, tokens: Sequence[int] | np.ndarray, *, salt: bytes | str | int | None = None
    ) -> tuple[list[int], int]:
        """Find the cached blocks that hold the first tokens, and how many tokens these are.

        Each block is given one more reference: `free` them like allocated ones. Only full blocks
        are matched, of sequences that were committed with the same salt.
        """
        op = "BlockPool.match_prefix"
        ids = self._pool.match_prefix(token_array(op, tokens), salt_bytes(op, salt))
        return ids, len(ids) * self.block_size

    def commit(
        self,
        ids: Iterable[int],
        tokens: Sequence[int] | np.ndarray,
        *,
        parent: int | None = None,
        salt: bytes | str | int | None = None,
    ) -> None:
        """Let the full blocks among `ids`, to which `tokens` have been written, be matched.

        Parameters
        ----------
        ids : iterable of int
            Blocks held by the caller, in order.
        tokens : sequence of int
            Their tokens. What lies beyond the last full block is ignored.
        parent : int, optional
            The committed block before the first; None: the sequence begins here.
        salt : bytes, str or int, optional
            That of the sequence. Where there is a parent it is known, and not to be given.

        Notes
        -----
        Where the same tokens are cached in another block already, that one stays the one found.
        """
        op = "BlockPool.commit"
        self._pool.commit(ids, token_array(op, tokens), parent, salt_bytes(op, salt))

    def stats(self) -> dict[str, int]:
        """Count what the pool holds, in blocks and tokens.

        num_blocks, block_size; free_blocks (what `allocate` can hand out, the evictable ones
        included), used_blocks (with a reference), shared_blocks (with two and more), cached_blocks
        (found by `match_prefix`), evictable_blocks (cached and without a reference); and since the
        beginning: evictions, copies (blocks replaced by `make_writable`), queried_tokens and
        matched_tokens (of `match_prefix`).
        """
        return self._pool.stats()

    def __repr__(self) -> str:
        stats: dict[str, Any] = self.stats()
        return (
            f"BlockPool(num_blocks={self.num_blocks}, block_size={self.block_size}): "
            f"{stats['free_blocks']} free, {stats['cached_blocks']} cached"
        )
