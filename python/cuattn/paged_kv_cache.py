# SPDX-License-Identifier: Apache-2.0
"""The keys and values of many sequences in blocks, and the arrays with which kernels find them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core import HeldBlocks, OutOfBlocksError
from ._kv_shapes import cache_shapes, check_blocks, check_positive, dtype_name, whole
from ._kv_state import NO_SLOTS, State, check_sequence, check_tier, list_of, new_tokens
from ._kv_swap import FileBlocks, HostBlocks
from ._memory import WORD, memory_of
from .block_pool import BlockPool, Uncopied, salt_bytes, token_array

if TYPE_CHECKING:
    from ._types import KvLayout


class PagedKVCache(Uncopied):
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
        cache.commit(seq)                         # for each sequence: its slots are written

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

    Sharing: `add(tokens)` finds full blocks that hold the same begin, once `commit` has said that
    their keys and values are written. Nothing else makes a block findable: when a step fails,
    `free` its sequences, or `truncate` them to where they were. A block held by several sequences
    is copied before one of them writes to it.

    A method that raises has changed nothing, whatever it raises and wherever; an interrupt comes
    before or after a change, not within. Only blocks that were about to be evicted or overwritten
    may not be found again.

    Raises
    ------
    OutOfBlocksError
        `append` and `swap_in` need more blocks than are free.
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
        kv_layout: KvLayout = "nhd",
        max_seqs: int = 256,
        max_blocks_per_seq: int | None = None,
    ):
        op = "PagedKVCache"
        max_blocks_per_seq = num_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        sizes |= {"num_layers": num_layers, "num_heads_kv": num_heads_kv, "head_dim": head_dim}
        sizes |= {"max_seqs": max_seqs, "max_blocks_per_seq": max_blocks_per_seq}
        check_positive(op, sizes)
        dtype = dtype_name(op, dtype)
        check_blocks(op, block_size, head_dim, dtype, kv_layout)
        self.pool = BlockPool(num_blocks, block_size)
        self._blocks = self.pool._pool
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
        self._sequences: dict[int, HeldBlocks] = {}
        self._next_sequence = 0
        self._lock = threading.RLock()

    # ---- Sequences
    #
    # How a change comes true: blocks are taken as HeldBlocks, which give them back when they go,
    # and written. Then `HeldBlocks.replace` lets the sequence have them and its next state. Before
    # that nothing of the sequence has changed, so there is nothing to undo. It is one call into C,
    # so an interrupt comes before or after it; and it is the last step that can fail.

    def add(
        self,
        tokens: Sequence[int] | np.ndarray | None = None,
        *,
        salt: bytes | str | int | None = None,
    ) -> int:
        """Begin a sequence, with what is cached of its begin if its token ids are given.

        `context_len` tells how many tokens were found: they need no `append`. At least the last
        one is left to the caller, whose query yields the next token.

        Parameters
        ----------
        tokens : sequence of int, optional
        salt : bytes, str or int, optional
            What keys depend on beside the tokens: an adapter, the images behind placeholder
            tokens, a tenant. Only sequences with equal salts share blocks, as in `BlockPool`.
        """
        op = "PagedKVCache.add"
        encoded = salt_bytes(op, salt)
        ids = token_array(op, [] if tokens is None else tokens)
        known = ids.tolist()
        end = max(min(len(ids) - 1, self.max_blocks_per_seq * self.block_size), 0)
        with self._lock:
            held = self._blocks.hold_prefix(ids[:end], encoded)
            found = len(held)
            held.state = State(known, len(known), encoded, found * self.block_size, found)
            return self._register(held)

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
            Where K and V of these tokens go: block * block_size + place in the block. Once they
            are written, say so with `commit`.
        """
        op = "append"
        n = whole(f"PagedKVCache.{op}", "n", n)
        with self._lock:
            held = self._resident(op, seq)
            state, size = held.state, self.block_size
            new = [] if tokens is None else new_tokens(state, n, tokens)
            begin, end = state.length, state.length + n
            needed = max(-(-end // size) - len(held), 0)
            if n < 0 or len(held) + needed > self.max_blocks_per_seq:
                raise ValueError(
                    f"PagedKVCache.{op}: n must lie within [0, "
                    f"{self.max_blocks_per_seq * size - begin}] for sequence {seq} of {begin} "
                    f"tokens, got {n}; make the cache with a larger max_blocks_per_seq"
                )
            writes_last = n > 0 and begin % size != 0
            with self._grow(op, seq, held, needed, writes_last) as fresh:
                keep = len(held) + needed - len(fresh)
                if keep < len(held):  # the last block is shared, and the first fresh one its copy
                    source, target = held.ids(keep)[0], fresh.ids()[0]
                    for words in self._words:
                        words[:, target] = words[:, source]
                    self._rewrite_rows(seq, keep)
                first = begin // size
                blocks = np.array([*held.ids(first)[: keep - first], *fresh.ids()], np.int64)
                places = np.arange(begin - first * size, end - first * size)
                slots = blocks[places // size] * size + places % size
                if new:
                    del state.tokens[state.known :]
                    state.tokens.extend(new)
                known = state.known + len(new)
                after = State(state.tokens, known, state.salt, end, state.committed, slots)
                held.replace(keep, fresh, after)
            return slots.copy()

    def commit(self, seq: int) -> None:
        """Say that K and V are written in the slots of all appends to a sequence so far.

        Only then are its full blocks found by `add` and `swap_in`. On a GPU it is enough that the
        kernels that write are queued, on the stream of those that will read.
        """
        with self._lock:
            held = self._resident("commit", seq)
            state = held.state
            full = min(state.known, state.length) // self.block_size
            if full > state.committed:
                self._publish(held.ids(), state, state.committed, full)
                held.state = state._replace(committed=full)

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of a sequence, as when guessed tokens were rejected."""
        n = whole("PagedKVCache.truncate", "n", n)
        with self._lock:
            held = self._resident("truncate", seq)
            state = held.state
            if not 0 <= n <= state.length:
                raise ValueError(
                    f"PagedKVCache.truncate: n must lie within [0, {state.length}], the tokens "
                    f"of sequence {seq}, got {n}; append makes it longer"
                )
            keep = -(-n // self.block_size)
            # The rest of a prompt still follows where nothing was removed.
            known = state.known if n == state.length else min(state.known, n)
            committed = min(state.committed, n // self.block_size)
            after = State(state.tokens, known, state.salt, n, committed)
            if keep < len(held):
                self._rewrite_rows(seq, keep)
            held.replace(keep, self._blocks.hold(0), after)

    def fork(self, seq: int) -> int:
        """Begin a sequence with all that `seq` has; nothing is copied before one of them writes."""
        with self._lock:
            parent = self._resident("fork", seq)
            state = parent.state
            tokens = state.tokens[: state.known]
            child = parent.fork()
            child.state = state._replace(tokens=tokens, slots=NO_SLOTS)
            return self._register(child)

    def free(self, seq: int) -> None:
        """End a sequence. What others hold stays; what is committed can be found for a while."""
        with self._lock:
            self._sequence("free", seq)
            held = self._sequences.pop(seq)
            # At once, whoever still has the objects: an exception that is kept holds its frames.
            held.clear()
            if held.state.swapped is not None:
                held.state.swapped.close()

    def context_len(self, seq: int) -> int:
        """Count the tokens of a sequence that have a slot."""
        return self._sequence("context_len", seq).state.length

    # ---- Swapping

    def swap_out(self, seq: int, tier: str | os.PathLike[str] = "host") -> None:
        """Move a sequence out of the cache, and its blocks to whoever needs them.

        What its last `append` made room for must have been written, or is lost.

        Parameters
        ----------
        seq : int
        tier : "host" or path
            Host memory, pinned for a GPU; or the path of a file to make, on the disk that is to be
            used. No file may be there. It loses its name as soon as it is made: nobody sees it, and
            its room is free again after `swap_in`, `free`, or the end of the process.

        Raises
        ------
        OSError
            The file cannot be made, or the disk is full.
        """
        check_tier(tier)
        with self._lock:
            held, none = self._resident("swap_out", seq), self._blocks.hold(0)
            swapped: HostBlocks | FileBlocks
            if isinstance(tier, str) and tier == "host":
                swapped = HostBlocks(self._memory, self._words, held.ids())
            else:
                swapped = FileBlocks(self._memory, self._words, held.ids(), tier)
            after = held.state._replace(slots=NO_SLOTS, swapped=swapped)
            self._rewrite_rows(seq, 0)
            held.replace(0, none, after)

    def swap_in(self, seq: int) -> None:
        """Move a sequence back; blocks that others have committed since are shared with them.

        Raises
        ------
        OSError
            The file cannot be read, or not as it was written. `free` the sequence then, and compute
            its tokens anew.
        """
        op, size = "swap_in", self.block_size
        with self._lock:
            held = self._sequence(op, seq)
            state = held.state
            if state.swapped is None:
                raise ValueError(
                    f"PagedKVCache.{op}: sequence {seq} must be swapped out, but it is in the "
                    "cache; leave it there"
                )
            tokens = np.array(state.tokens[: min(state.known, state.length)], np.int64)
            with self._blocks.hold_prefix(tokens, state.salt) as blocks:
                first = len(blocks)
                with self._grow(op, seq, blocks, -(-state.length // size) - first) as more:
                    try:
                        state.swapped.restore(self._words, more.ids(), first)
                    except OSError as error:
                        raise OSError(
                            error.errno,
                            f"PagedKVCache.{op}: the file of sequence {seq} must be read as it was "
                            f"written, got: {error.strerror}; free the sequence, and compute its "
                            "tokens anew",
                        ) from error
                    blocks.replace(first, more, None)
                committed = max(first, state.committed)
                self._publish(blocks.ids(), state, first, committed)
                held.replace(0, blocks, state._replace(committed=committed, swapped=None))
            state.swapped.close()

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
            held = [None if s is None else self._resident("block_tables", s) for s in seqs]
            index: list[int] = []
            values: list[int] = []
            before: list[tuple[int | None, int]] = []
            rows: list[tuple[int | None, int]] = []
            for row, (seq, blocks) in enumerate(zip(seqs, held, strict=True)):
                holder, present = self._rows[row]
                present = present if holder == seq else 0
                count = 0 if blocks is None else len(blocks)
                if blocks is not None and count > present:
                    first = row * self.max_blocks_per_seq
                    index += range(first + present, first + count)
                    values += blocks.ids(present)
                before.append((seq, present))
                rows.append((seq, count))
            self._rows[: len(rows)] = before  # true whatever the writing comes to
            if index:
                where = self._memory.upload(np.array(index, np.int64))
                what = self._memory.upload(np.array(values, np.int32))
                self._tables.reshape(-1)[where] = what
            self._rows[: len(rows)] = rows
            return self._tables[: len(seqs)]

    def context_lens(self, seqs: Iterable[int | None]) -> Any:
        """Count the tokens of sequences, the last `append` included: int32 [len(seqs)].

        None counts 0.
        """
        with self._lock:
            seqs = self._batch("context_lens", seqs)
            lengths = [
                0 if s is None else self._resident("context_lens", s).state.length for s in seqs
            ]
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
            parts = [
                none if s is None else self._resident("slot_mapping", s).state.slots for s in seqs
            ]
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
            states = [held.state for held in self._sequences.values()]
            resident = [state for state in states if state.swapped is None]
            words = sum(int(np.prod(words.shape)) for words in self._words)
            return {
                **self.pool.stats(),
                "sequences": len(self._sequences),
                "swapped_sequences": len(self._sequences) - len(resident),
                "tokens": sum(state.length for state in resident),
                "cache_bytes": words * WORD.itemsize,
            }

    # ---- Within

    def _register(self, held: HeldBlocks) -> int:
        seq = self._next_sequence
        self._next_sequence += 1
        self._sequences[seq] = held
        return seq

    def _sequence(self, op: str, seq: int) -> HeldBlocks:
        check_sequence(op, seq)
        if seq not in self._sequences:
            raise ValueError(
                f"PagedKVCache.{op}: seq must be a sequence of this cache, got {seq!r}, which was "
                "freed or never added; pass what add or fork gave"
            )
        return self._sequences[seq]

    def _resident(self, op: str, seq: int) -> HeldBlocks:
        held = self._sequence(op, seq)
        if held.state.swapped is not None:
            raise ValueError(
                f"PagedKVCache.{op}: sequence {seq} must be in the cache, but it is swapped out; "
                "call swap_in first"
            )
        return held

    def _batch(self, op: str, seqs: Iterable[int | None]) -> list[int | None]:
        batch = list_of(op, seqs)
        if len(batch) > self.max_seqs:
            raise ValueError(
                f"PagedKVCache.{op}: seqs must be at most max_seqs = {self.max_seqs}, got "
                f"{len(batch)}; make the cache with a larger max_seqs"
            )
        return batch

    def _layer(self, op: str, layer: int) -> int:
        layer = whole(f"PagedKVCache.{op}", "layer", layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(
                f"PagedKVCache.{op}: layer must lie within [0, {self.num_layers}), got {layer}; "
                "layers count from 0"
            )
        return layer

    def _grow(
        self, op: str, seq: int, held: HeldBlocks, needed: int, writes_last: bool = False
    ) -> HeldBlocks:
        """Take `needed` blocks, and one more first if the last of `held` has to be copied."""
        try:
            return held.grow(needed, writes_last)
        except OutOfBlocksError:
            shared = writes_last and self.pool.ref_count(held.ids(len(held) - 1)[0]) > 1
            stats = self.pool.stats()
            raise OutOfBlocksError(
                f"PagedKVCache.{op}: sequence {seq} needs {needed + shared} more blocks, got "
                f"{stats['free_blocks']} free of {stats['num_blocks']}; free or swap out a "
                "sequence, or make a larger cache"
            ) from None

    def _publish(self, ids: list[int], state: State, first: int, end: int) -> None:
        """Let others find the blocks [first, end) of a sequence; once more is no mistake."""
        tokens = state.tokens[first * self.block_size : end * self.block_size]
        parent, salt = (ids[first - 1], None) if first > 0 else (None, state.salt)
        self._blocks.commit(ids[first:end], np.array(tokens, np.int64), parent, salt)

    def _rewrite_rows(self, seq: int, first: int) -> None:
        """Of the rows that hold `seq`, write the entries from `first` on again."""
        for row, (holder, present) in enumerate(self._rows):
            if holder == seq and present > first:
                self._rows[row] = (holder, first)
