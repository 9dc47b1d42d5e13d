# SPDX-License-Identifier: Apache-2.0
"""The keys and values of many sequences in blocks, and the arrays with which kernels find them."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ._core import OutOfBlocksError
from ._memory import WORD, memory_of
from .block_pool import BlockPool, token_array

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
KV_LAYOUTS = ("nhd", "hnd", "vllm")


def whole(op: str, name: str, value: Any) -> int:
    """Read an argument that must be an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}; pass an int") from None


def dtype_name(op: str, dtype: Any) -> str:
    """Name a dtype given as a word or as the object of numpy, torch or CuPy."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = name or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(
            f"{op}: dtype must be one of {', '.join(ITEM_BYTES)}, got {name}; choose one of these"
        )
    return name


def cache_shapes(
    num_blocks: int, block_size: int, num_heads_kv: int, head_dim: int, dtype: str, kv_layout: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer."""
    if kv_layout == "nhd":
        shape: tuple[int, ...] = (num_blocks, block_size, num_heads_kv, head_dim)
        return shape, shape
    if kv_layout == "hnd":
        shape = (num_blocks, num_heads_kv, block_size, head_dim)
        return shape, shape
    x = 16 // ITEM_BYTES[dtype]
    return (
        (num_blocks, num_heads_kv, head_dim // x, block_size, x),
        (num_blocks, num_heads_kv, head_dim, block_size),
    )


class _Sequence:
    """What the cache knows of one sequence."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0  # tokens with a slot
        self.tokens: list[int] = []  # ids of the first ones, as far as they are known
        self.committed = 0  # blocks that others can find
        self.slots = np.empty(0, np.int64)  # of the last append
        self.swapped: _Swapped | None = None


class _Swapped:
    """The blocks of a sequence outside the cache: K and V, [num_layers, blocks, words]."""

    def __init__(self, arrays: list[Any], path: str | None):
        self.arrays, self.path = arrays, path

    def discard(self) -> None:
        self.arrays = []
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):  # the map kept the content
                os.unlink(self.path)


class PagedKVCache:
    """Keeps the keys and values of many sequences, in blocks of one preallocated cache.

    Sequences join, grow, fork, leave and share what they have in common; what belongs to a sequence
    is in `block_tables` and `context_lens`, which live on the device and are updated there. An
    engine makes these calls for each step, with K and V of `n` new tokens in every sequence::

        cache.append(seq, n)                      # for each sequence
        tables = cache.block_tables(seqs)         # once for all layers
        lengths = cache.context_lens(seqs)
        slots = cache.slot_mapping(seqs)
        for layer in ...:                         # write, then attend
            cuattn.reshape_and_cache(k, v, cache.k_cache(layer), cache.v_cache(layer), slots)
            cuattn.paged_attention(q, cache.k_cache(layer), cache.v_cache(layer), tables, lengths)

    A sequence is a number that is never used again. Methods may be called from several threads.

    Parameters
    ----------
    num_layers, num_blocks, block_size, num_heads_kv, head_dim : int
        Sizes; block_size in tokens, 1 to 256. head_dim is a multiple of 8 (float8_e4m3fn: of 16).
    dtype : str or dtype
        float32, float16, bfloat16 or float8_e4m3fn.
    like : array
        An array of numpy, torch or CuPy: the library and the device of the cache.
    kv_layout : {"nhd", "hnd", "vllm"}
        As of `paged_attention`; "vllm" takes block sizes of 8, 16 and 32.
    max_seqs : int
        Rows of the tables: sequences in one step.
    max_blocks_per_seq : int, optional
        Columns of the tables; default: all blocks. A table as narrow as the longest sequence needs
        lets kernels plan better.

    Notes
    -----
    The returned tables, lengths and slots are views of buffers that stay where they are, so a
    captured CUDA graph sees what later calls put there. They hold until the next call of the same
    method. On a GPU everything runs on the current stream of the library.

    Sharing: `add(tokens)` finds blocks that hold the same begin. Blocks become findable once they
    are full and their sequence is appended to again, forked, swapped or freed, because their keys
    and values have been written by then. A block held by several sequences is copied before one of
    them writes to it.

    Raises
    ------
    OutOfBlocksError
        `append` and `swap_in` need more blocks than are free; nothing has changed then.
    ValueError
        Impossible sizes, an unknown or freed sequence, a table that is too small.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads_kv: int,
        head_dim: int,
        dtype: Any,
        *,
        like: Any,
        kv_layout: str = "nhd",
        max_seqs: int = 256,
        max_blocks_per_seq: int | None = None,
    ):
        op = "PagedKVCache"
        self.pool = BlockPool(num_blocks, block_size)
        max_blocks_per_seq = num_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        sizes = {"num_layers": num_layers, "num_heads_kv": num_heads_kv, "head_dim": head_dim}
        sizes |= {"max_seqs": max_seqs, "max_blocks_per_seq": max_blocks_per_seq}
        for name, size in sizes.items():
            if whole(op, name, size) < 1:
                raise ValueError(f"{op}: {name} must be >= 1, got {size}; give the real number")
        dtype = dtype_name(op, dtype)
        if kv_layout not in KV_LAYOUTS:
            raise ValueError(
                f"{op}: kv_layout must be 'nhd', 'hnd' or 'vllm', got {kv_layout!r}; choose one "
                "of these"
            )
        multiple = 16 if dtype == "float8_e4m3fn" else 8
        if head_dim % multiple != 0:
            raise ValueError(
                f"{op}: head_dim must be a multiple of {multiple} for {dtype}, got {head_dim}; "
                "pad the heads with zeros"
            )
        if block_size > 256:
            raise ValueError(
                f"{op}: block_size must be at most 256, got {block_size}; that is what the kernels "
                "take"
            )
        if kv_layout == "vllm" and block_size not in (8, 16, 32):
            raise ValueError(
                f"{op}: block_size must be 8, 16 or 32 for kv_layout 'vllm', got {block_size}; "
                "or use 'nhd'"
            )
        self.num_layers, self.block_size, self.kv_layout = num_layers, block_size, kv_layout
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self._memory = memory_of(op, like)
        shapes = cache_shapes(num_blocks, block_size, num_heads_kv, head_dim, dtype, kv_layout)
        caches = [self._memory.empty((num_layers, *shape), dtype) for shape in shapes]
        self._k, self._v = ([cache[i] for i in range(num_layers)] for cache in caches)
        self._words = [self._memory.words(cache) for cache in caches]
        self._tables = self._memory.empty((max_seqs, self.max_blocks_per_seq), "int32")
        self._lengths = self._memory.empty((max_seqs,), "int32")
        self._slots = self._memory.empty((max_seqs,), "int64")
        # Of each row of the tables: the sequence that stands there, and how many of its blocks.
        self._rows: list[tuple[int | None, int]] = [(None, 0)] * max_seqs
        self._sequences: dict[int, _Sequence] = {}
        self._next_sequence = 0
        self._lock = threading.RLock()

    # ---- Sequences

    def add(self, tokens: Sequence[int] | np.ndarray | None = None) -> int:
        """Begin a sequence, with what is cached of its begin if its token ids are given.

        `context_len` tells how many tokens were found: they need no `append`. At least the last
        one is left to the caller, whose query yields the next token.
        """
        sequence = _Sequence()
        if tokens is not None:
            ids = token_array("PagedKVCache.add", tokens)
            sequence.tokens = ids.tolist()
            sequence.blocks, sequence.length = self.pool.match_prefix(ids[:-1])
            sequence.committed = len(sequence.blocks)
        return self._register(sequence)

    def append(
        self, seq: int, n: int, *, tokens: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Make room for the next `n` tokens of a sequence.

        Parameters
        ----------
        seq : int
        n : int
        tokens : sequence of int, optional
            Their token ids, if `add` was not given them: later sequences can then share them.

        Returns
        -------
        slots : numpy int64 [n]
            Where K and V of these tokens go: block * block_size + place in the block. Write them
            before the next call for this sequence.
        """
        op = "append"
        n = whole(f"PagedKVCache.{op}", "n", n)
        with self._lock:
            sequence = self._resident(op, seq)
            known = [] if tokens is None else self._new_tokens(sequence, n, tokens)
            end = sequence.length + n
            needed = -(-end // self.block_size) - len(sequence.blocks)
            if n < 0 or len(sequence.blocks) + needed > self.max_blocks_per_seq:
                raise ValueError(
                    f"PagedKVCache.{op}: n must lie within [0, "
                    f"{self.max_blocks_per_seq * self.block_size - sequence.length}] for sequence "
                    f"{seq} of {sequence.length} tokens, got {n}; make the cache with a larger "
                    "max_blocks_per_seq"
                )
            self._commit(sequence)
            self._grow(op, seq, sequence, needed, writes=n > 0)
            size, first = self.block_size, sequence.length // self.block_size
            places = np.arange(sequence.length - first * size, end - first * size)
            blocks = np.array(sequence.blocks[first:], np.int64)
            sequence.slots = blocks[places // size] * size + places % size
            sequence.length = end
            sequence.tokens += known
            return sequence.slots.copy()

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of a sequence, as when guessed tokens were rejected."""
        n = whole("PagedKVCache.truncate", "n", n)
        with self._lock:
            sequence = self._resident("truncate", seq)
            if not 0 <= n <= sequence.length:
                raise ValueError(
                    f"PagedKVCache.truncate: n must lie within [0, {sequence.length}], the tokens "
                    f"of sequence {seq}, got {n}; append makes it longer"
                )
            kept = -(-n // self.block_size)
            if kept < len(sequence.blocks):
                self.pool.free(sequence.blocks[kept:])
                del sequence.blocks[kept:]
                self._rewrite_rows(seq, kept)
            del sequence.tokens[n:]
            sequence.length = n
            sequence.committed = min(sequence.committed, n // self.block_size)
            sequence.slots = sequence.slots[:0]

    def fork(self, seq: int) -> int:
        """Begin a sequence with all that `seq` has; nothing is copied before one of them writes."""
        with self._lock:
            parent = self._resident("fork", seq)
            self._commit(parent)
            self.pool.fork(parent.blocks)
            child = _Sequence()
            child.blocks, child.length = list(parent.blocks), parent.length
            child.tokens, child.committed = list(parent.tokens), parent.committed
            return self._register(child)

    def free(self, seq: int, *, written: bool = True) -> None:
        """End a sequence. What others hold stays, and what is committed can be found for a while.

        written=False: the slots of the last `append` were not written, so do not offer them.
        """
        with self._lock:
            sequence = self._sequence("free", seq)
            if sequence.swapped is not None:
                sequence.swapped.discard()
            elif written:
                self._commit(sequence)
            self.pool.free(sequence.blocks)
            del self._sequences[seq]

    def context_len(self, seq: int) -> int:
        """Count the tokens of a sequence that have a slot."""
        return self._sequence("context_len", seq).length

    # ---- Swapping

    def swap_out(self, seq: int, tier: str | os.PathLike[str] = "host") -> None:
        """Move a sequence out of the cache, and its blocks to whoever needs them.

        Parameters
        ----------
        seq : int
        tier : "host" or path
            Host memory, pinned for a GPU; or a file to make, which is mapped into memory. It must
            not exist; `swap_in` and `free` remove it.

        Raises
        ------
        OSError
            The file cannot be made, or the disk is full. The sequence is as before.
        """
        with self._lock:
            sequence = self._resident("swap_out", seq)
            self._commit(sequence)
            index = self._memory.upload(np.array(sequence.blocks, np.int64))
            shapes = [(self.num_layers, len(sequence.blocks), *w.shape[2:]) for w in self._words]
            path = None if tier == "host" else os.fspath(tier)
            if path is None:
                arrays = [self._memory.host_empty(shape) for shape in shapes]
            else:
                arrays = [self._memory.host_array(array) for array in _map_file(path, shapes)]
            for host, words in zip(arrays, self._words, strict=True):
                for layer in range(self.num_layers):
                    self._memory.download(host[layer], words[layer][index])
            sequence.swapped = _Swapped(arrays, path)
            self.pool.free(sequence.blocks)
            sequence.blocks, sequence.committed = [], 0
            self._rewrite_rows(seq, 0)

    def swap_in(self, seq: int) -> None:
        """Move a sequence back; blocks that others have computed since are shared with them."""
        with self._lock:
            sequence = self._sequence("swap_in", seq)
            if sequence.swapped is None:
                raise ValueError(
                    f"PagedKVCache.swap_in: sequence {seq} must be swapped out, but it is in the "
                    "cache; leave it there"
                )
            shared, _ = self.pool.match_prefix(sequence.tokens[: sequence.length])
            first = len(shared)
            sequence.blocks = shared
            try:
                needed = -(-sequence.length // self.block_size) - first
                self._grow("swap_in", seq, sequence, needed, writes=False)
            except OutOfBlocksError:
                sequence.blocks = []
                self.pool.free(shared)
                raise
            index = self._memory.upload(np.array(sequence.blocks[first:], np.int64))
            for host, words in zip(sequence.swapped.arrays, self._words, strict=True):
                for layer in range(self.num_layers):
                    words[layer][index] = self._memory.restore(host[layer][first:])
            sequence.committed = first
            sequence.swapped.discard()
            sequence.swapped = None

    # ---- Arrays

    def k_cache(self, layer: int) -> Any:
        """Return the K cache of a layer; its shape is that of `kv_layout`."""
        return self._k[self._layer("k_cache", layer)]

    def v_cache(self, layer: int) -> Any:
        """Return the V cache of a layer; its shape is that of `kv_layout`."""
        return self._v[self._layer("v_cache", layer)]

    def block_tables(self, seqs: Iterable[int | None]) -> Any:
        """Tell where the blocks of sequences lie: int32 [len(seqs), max_blocks_per_seq].

        None stands for an empty row. Only entries that are new to a row are written; those beyond
        the blocks of a sequence mean nothing.
        """
        with self._lock:
            seqs = self._batch("block_tables", seqs)
            held = [[] if s is None else self._resident("block_tables", s).blocks for s in seqs]
            index: list[int] = []
            values: list[int] = []
            rows: list[tuple[int | None, int]] = []
            for row, (seq, blocks) in enumerate(zip(seqs, held, strict=True)):
                holder, present = self._rows[row]
                if holder != seq:
                    present = 0
                first = row * self.max_blocks_per_seq
                index += range(first + present, first + len(blocks))
                values += blocks[present:]
                rows.append((seq, len(blocks)))
            if index:
                where = self._memory.upload(np.array(index, np.int64))
                what = self._memory.upload(np.array(values, np.int32))
                self._tables.reshape(-1)[where] = what
            self._rows[: len(rows)] = rows  # once they are written
            return self._tables[: len(seqs)]

    def context_lens(self, seqs: Iterable[int | None]) -> Any:
        """Count the tokens of sequences, the last `append` included: int32 [len(seqs)].

        None counts 0.
        """
        with self._lock:
            seqs = self._batch("context_lens", seqs)
            lengths = [0 if s is None else self._resident("context_lens", s).length for s in seqs]
            view = self._lengths[: len(seqs)]
            view[:] = self._memory.upload(np.array(lengths, np.int32))
            return view

    def slot_mapping(self, seqs: Iterable[int | None]) -> Any:
        """Return the slots of the last `append` of each sequence, end to end: int64 [tokens].

        None gives one slot of -1, which is skipped. More than max_seqs slots are a new array.
        """
        with self._lock:
            seqs = self._batch("slot_mapping", seqs)
            none = np.array([-1], np.int64)
            parts = [none if s is None else self._resident("slot_mapping", s).slots for s in seqs]
            slots = self._memory.upload(np.concatenate([none[:0], *parts]))
            if len(slots) > self.max_seqs:
                return slots
            view = self._slots[: len(slots)]
            view[:] = slots
            return view

    def stats(self) -> dict[str, int]:
        """Count what the cache holds: that of `BlockPool.stats`, and more.

        sequences, swapped_sequences; tokens (of the sequences in the cache, each with all it
        shares); cache_bytes (K and V of all layers).
        """
        with self._lock:
            resident = [s for s in self._sequences.values() if s.swapped is None]
            words = sum(int(np.prod(words.shape)) for words in self._words)
            return {
                **self.pool.stats(),
                "sequences": len(self._sequences),
                "swapped_sequences": len(self._sequences) - len(resident),
                "tokens": sum(sequence.length for sequence in resident),
                "cache_bytes": words * WORD.itemsize,
            }

    # ---- Within

    def _register(self, sequence: _Sequence) -> int:
        with self._lock:
            seq = self._next_sequence
            self._next_sequence += 1
            self._sequences[seq] = sequence
            return seq

    def _sequence(self, op: str, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise ValueError(
                f"PagedKVCache.{op}: seq must be a sequence of this cache, got {seq!r}, which was "
                "freed or never added; pass what add or fork gave"
            )
        return self._sequences[seq]

    def _resident(self, op: str, seq: int) -> _Sequence:
        sequence = self._sequence(op, seq)
        if sequence.swapped is not None:
            raise ValueError(
                f"PagedKVCache.{op}: sequence {seq} must be in the cache, but it is swapped out; "
                "call swap_in first"
            )
        return sequence

    def _batch(self, op: str, seqs: Iterable[int | None]) -> list[int | None]:
        batch = list(seqs)
        if len(batch) > self.max_seqs:
            raise ValueError(
                f"PagedKVCache.{op}: seqs must be at most max_seqs = {self.max_seqs}, got "
                f"{len(batch)}; make the cache with a larger max_seqs"
            )
        return batch

    def _layer(self, op: str, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(
                f"PagedKVCache.{op}: layer must lie within [0, {self.num_layers}), got {layer}; "
                "layers count from 0"
            )
        return layer

    def _new_tokens(
        self, sequence: _Sequence, n: int, tokens: Sequence[int] | np.ndarray
    ) -> list[int]:
        ids = token_array("PagedKVCache.append", tokens).tolist()
        if len(ids) != n:
            raise ValueError(
                f"PagedKVCache.append: tokens must be n = {n} ids, got {len(ids)}; give each new "
                "token its id"
            )
        if len(sequence.tokens) != sequence.length:
            raise ValueError(
                f"PagedKVCache.append: tokens must follow known ones, got {sequence.length} tokens "
                f"in the cache and {len(sequence.tokens)} ids; give all ids by add or append, or "
                "leave tokens out"
            )
        return ids

    def _commit(self, sequence: _Sequence) -> None:
        """Let others find the full blocks whose tokens are known."""
        size, first = self.block_size, sequence.committed
        full = min(len(sequence.tokens), sequence.length) // size
        if full > first:
            self.pool.commit(
                sequence.blocks[first:full],
                sequence.tokens[first * size : full * size],
                parent=sequence.blocks[first - 1] if first > 0 else None,
            )
            sequence.committed = full

    def _grow(self, op: str, seq: int, sequence: _Sequence, needed: int, *, writes: bool) -> None:
        """Add blocks, and make the last one the sequence's own if it will be written."""
        last = len(sequence.blocks) - 1
        partial = writes and sequence.length % self.block_size != 0
        fresh: list[int] = []
        try:
            fresh = self.pool.allocate(needed)
            source = None
            if partial:
                writable, source = self.pool.make_writable(sequence.blocks[last])
        except OutOfBlocksError:
            self.pool.free(fresh)
            wanted = needed + (partial and self.pool.ref_count(sequence.blocks[last]) > 1)
            stats = self.pool.stats()
            raise OutOfBlocksError(
                f"PagedKVCache.{op}: sequence {seq} needs {wanted} more blocks, got "
                f"{stats['free_blocks']} free of {stats['num_blocks']}; free or swap out a "
                "sequence, or make a larger cache"
            ) from None
        if source is not None:
            for words in self._words:
                words[:, writable] = words[:, source]
            sequence.blocks[last] = writable
            self._rewrite_rows(seq, last)
        sequence.blocks += fresh

    def _rewrite_rows(self, seq: int, first: int) -> None:
        """Of the rows that hold `seq`, the entries from `first` on are no longer right."""
        for row, (holder, present) in enumerate(self._rows):
            if holder == seq:
                self._rows[row] = (holder, min(present, first))


def _map_file(path: str, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Make a file that holds arrays of WORDs and map it; nothing is left of it after an error."""
    counts = [int(np.prod(shape)) for shape in shapes]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A page of a mapped file for which the disk has no room would kill the process.
        os.posix_fallocate(descriptor, 0, max(sum(counts), 1) * WORD.itemsize)
        with os.fdopen(descriptor, "r+b", closefd=False) as file:
            words = np.memmap(file, WORD, "r+")
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    ends = np.cumsum(counts)
    return [
        np.asarray(words[end - count : end]).reshape(shape)
        for end, count, shape in zip(ends, counts, shapes, strict=True)
    ]
