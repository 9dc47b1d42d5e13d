# SPDX-License-Identifier: Apache-2.0
"""A PagedKVCache as an engine uses it, beside a dict of what its sequences hold.

The contents are written by hand through the slots and read by hand through the tables, in the
arrays of every library, so that no kernel can hide a mistake.
"""

from __future__ import annotations

import os
import zlib
from unittest import mock

import numpy as np

import cuattn
from cuattn import _core
from frameworks import Cupy, Numpy, Torch

LIBRARIES = {"numpy": Numpy, "torch": Torch, "torch-cuda": lambda: Torch("cuda"), "cupy": Cupy}
F32 = np.float32


def place(cache, which, layout, slot, block_size):
    """The view of K or V of one slot, in an array of any library."""
    block, token = int(slot) // block_size, int(slot) % block_size
    if layout == "nhd":
        return cache[block, token]
    if layout == "hnd":
        return cache[block, :, token]
    return cache[block, :, :, token] if which == "v" else cache[block, :, :, token, :]


def content(salt, history, layer, which):
    """A number that stands for K or V of a token: salt and all tokens up to it decide about it."""
    key = repr(salt).encode() + bytes([layer, ord(which), *history])
    return zlib.crc32(key) % 4096 / 4096 + 1


class Faults:
    """While it is open, the call number `at` to what a cache works with raises instead.

    That is its arrays and memory, the files of its swap tier and the pool. `after`: it raises when
    it is done, as an interrupt does that came during the call.
    """

    def __init__(self, cache, at, error, *, after=False):
        self.at, self.error, self.after, self.calls = at, error, after, 0
        memory = [
            mock.patch.object(cache._memory, name, self.wrap(getattr(cache._memory, name)))
            for name in ("upload", "host_empty", "fetch", "download", "restore")
        ]
        files = [
            mock.patch.object(module, name, self.wrap(getattr(module, name)))
            for module, name in (
                (os, "pwrite"),
                (os, "preadv"),
                (_core, "UnlinkedFile"),
                (cuattn._kv_swap, "block_sums"),
            )
        ]
        own = [
            mock.patch.object(cache, "_blocks", FaultyPool(cache._blocks, self)),
            mock.patch.object(cache, "_grow", self.wrap(cache._grow)),
            mock.patch.object(cache, "_words", [FaultyArray(w, self) for w in cache._words]),
        ]
        self.patches = [*memory, *files, *own]

    def wrap(self, function):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls != self.at:
                return function(*arguments, **options)
            if self.after:
                function(*arguments, **options)
            raise self.error

        return call

    @property
    def fired(self):
        return self.calls >= self.at

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


class FaultyPool:
    """The core of a pool whose calls are counted by a Faults."""

    def __init__(self, core, faults):
        for name in ("hold", "hold_prefix", "commit"):
            setattr(self, name, faults.wrap(getattr(core, name)))


class FaultyArray:
    """An array whose reads and writes are counted by a Faults."""

    def __init__(self, array, faults):
        self.array, self.faults, self.shape = array, faults, array.shape
        self.read, self.write = faults.wrap(array.__getitem__), faults.wrap(array.__setitem__)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        if isinstance(index, int):  # a layer
            return FaultyArray(self.array[index], self.faults)
        return self.read(index)

    def __setitem__(self, index, values):
        self.write(index, values)


def what_counts(cache):
    """What no failed call may change; it may cost unused prefixes their blocks."""
    stats = cache.stats()
    names = ("free_blocks", "used_blocks", "shared_blocks", "sequences", "swapped_sequences")
    counts = [stats[name] for name in (*names, "tokens")]
    references = [cache.pool.ref_count(block) for block in range(stats["num_blocks"])]
    return counts, references, {seq: cache.context_len(seq) for seq in cache._sequences}


class Engine:
    """A PagedKVCache and beside it a dict of the tokens of every sequence."""

    def __init__(self, library, rng, folder, kv_layout="nhd", num_blocks=12, block_size=4):
        self.library, self.rng, self.folder = library, rng, folder
        self.layout, self.block_size = kv_layout, block_size
        self.cache = cuattn.PagedKVCache(
            *(2, num_blocks, block_size, 2, 8, "float32"),
            like=library.put(np.zeros(1, F32)),
            kv_layout=kv_layout,
            max_seqs=8,
            max_blocks_per_seq=20,
        )
        for layer in range(2):
            self.cache.k_cache(layer)[:] = float("nan")
            self.cache.v_cache(layer)[:] = float("nan")
        self.tokens = {}  # of each sequence, what its slots hold
        self.prompts = {}  # the ids that the cache was given
        self.salts = {}
        self.swapped = set()
        self.seen = set()  # what happened at least once

    def call(self, method, *arguments, **options):
        """A call of the cache. Now and then it fails on the way first, which changes nothing."""
        call = getattr(self.cache, method)
        if self.rng.random() < 0.2:
            before = what_counts(self.cache)
            error = [MemoryError("test"), KeyboardInterrupt(), OSError(5, "test")][
                int(self.rng.integers(3))
            ]
            with Faults(self.cache, int(self.rng.integers(1, 9)), error) as faults:
                try:
                    return call(*arguments, **options)
                except (MemoryError, KeyboardInterrupt, OSError):
                    if not faults.fired:
                        raise
            assert what_counts(self.cache) == before
            self.seen.add("failed")
        return call(*arguments, **options)

    def write(self, seq, slots):
        """K and V of the last tokens of a sequence."""
        tokens = self.tokens[seq]
        for i, slot in enumerate(slots, len(tokens) - len(slots)):
            for layer in range(2):
                for which in "kv":
                    cache = getattr(self.cache, f"{which}_cache")(layer)
                    value = content(self.salts[seq], tokens[: i + 1], layer, which)
                    place(cache, which, self.layout, slot, self.block_size)[:] = value

    def verify(self):
        """Every sequence in the cache, read through the arrays that kernels are given."""
        seqs = [seq for seq in self.tokens if seq not in self.swapped][-7:]
        if self.rng.random() < 0.2:  # else most rows hold what they held, and only grow
            self.rng.shuffle(seqs)
        rows = [*seqs[:2], None, *seqs[2:]]
        tables = self.library.get(self.cache.block_tables(rows))
        lengths = self.library.get(self.cache.context_lens(rows))
        assert lengths.dtype == tables.dtype == np.int32
        caches = {
            (which, layer): self.library.get(getattr(self.cache, f"{which}_cache")(layer))
            for which in "kv"
            for layer in range(2)
        }
        for row, seq in enumerate(rows):
            tokens = [] if seq is None else self.tokens[seq]
            assert lengths[row] == len(tokens)
            for i in range(len(tokens)):
                slot = tables[row, i // self.block_size] * self.block_size + i % self.block_size
                for (which, layer), cache in caches.items():
                    got = place(cache, which, self.layout, slot, self.block_size)
                    want = F32(content(self.salts[seq], tokens[: i + 1], layer, which))
                    assert (got == want).all(), (seq, i, which, layer)

    def pick(self, *, swapped=False):
        seqs = [seq for seq in self.tokens if (seq in self.swapped) == swapped]
        return seqs[int(self.rng.integers(len(seqs)))] if seqs else None

    def random_tokens(self, most):
        """Much of the same token, so that prefixes are found."""
        n = int(self.rng.integers(0, most))
        return [int(t) for t in np.where(self.rng.random(n) < 0.97, 0, 1)]

    def add(self):
        prompt = self.random_tokens(5 * self.block_size) if self.rng.random() < 0.8 else None
        salt = (None, "a")[int(self.rng.integers(2))]
        seq = self.call("add", prompt, salt=salt)
        self.salts[seq] = salt
        found = self.cache.context_len(seq)
        assert found % self.block_size == 0
        assert found < max(len(prompt or []), 1)
        self.tokens[seq], self.prompts[seq] = (prompt or [])[:found], prompt or []
        self.seen |= {"shared"} if found else set()

    def append(self, written=True):
        seq = self.pick()
        length, prompt = len(self.tokens[seq]), self.prompts[seq]
        options = {}
        if length < len(prompt):
            new = prompt[length : length + int(self.rng.integers(0, 3 * self.block_size))]
        else:
            new = self.random_tokens(2 * self.block_size)
            if length == len(prompt) and self.rng.random() < 0.8:
                options["tokens"] = new
        before = self.cache.stats()
        try:
            slots = self.call("append", seq, len(new), **options)
        except cuattn.OutOfBlocksError:
            after = self.cache.stats()
            assert all(after[key] == before[key] for key in ("free_blocks", "copies", "tokens"))
            self.seen.add("out of blocks")
            return
        assert slots.dtype == np.int64
        mapping = self.library.get(self.cache.slot_mapping([seq, None]))
        np.testing.assert_array_equal(mapping, [*slots, -1])
        self.seen |= {"copied"} if self.cache.stats()["copies"] > before["copies"] else set()
        self.tokens[seq] = self.tokens[seq] + new
        if "tokens" in options:
            self.prompts[seq] = self.prompts[seq] + new
        if written:
            self.write(seq, slots)
            if self.rng.random() < 0.9:
                self.call("commit", seq)
        elif self.rng.random() < 0.5:
            self.call("free", seq)
            del self.tokens[seq]
        else:
            self.truncate(seq, length)

    def fork(self):
        seq = self.pick()
        child = self.call("fork", seq)
        for kept in (self.tokens, self.prompts, self.salts):
            kept[child] = kept[seq]

    def commit(self):
        self.call("commit", self.pick())

    def free(self):
        seq = self.pick(swapped=bool(self.swapped) and self.rng.random() < 0.3)
        if seq is not None:
            self.call("free", seq)
            del self.tokens[seq]
            self.swapped.discard(seq)

    def truncate(self, seq=None, n=None):
        seq = self.pick() if seq is None else seq
        n = int(self.rng.integers(0, len(self.tokens[seq]) + 1)) if n is None else n
        self.call("truncate", seq, n)
        assert len(self.cache.slot_mapping([seq])) == 0
        if n < len(self.tokens[seq]):  # else the rest of the prompt is still to come
            self.prompts[seq] = self.prompts[seq][:n]
        self.tokens[seq] = self.tokens[seq][:n]

    def swap_out(self):
        seq = self.pick()
        self.call("swap_out", seq, "host" if self.rng.random() < 0.5 else self.folder / "kv")
        assert not list(self.folder.iterdir())
        self.swapped.add(seq)
        self.seen.add("swapped out")

    def swap_in(self):
        seq = self.pick(swapped=True)
        if seq is None:
            return
        before = self.cache.stats()
        try:
            self.call("swap_in", seq)
        except cuattn.OutOfBlocksError:
            after = self.cache.stats()
            assert all(after[key] == before[key] for key in ("free_blocks", "swapped_sequences"))
            return
        self.swapped.remove(seq)
        self.seen.add("swapped in")

    def step(self):
        choices = [self.add] if len(self.tokens) < 7 else [self.free]
        choices += [self.swap_in]
        if self.pick() is not None:
            choices += [self.append] * 5 + [self.fork, self.free, self.truncate, self.swap_out]
            choices += [self.commit]
            choices += [lambda: self.append(written=False)]
        choices[int(self.rng.integers(len(choices)))]()


def make(library=None, **options):
    library = library or Numpy()
    sizes = {"num_layers": 1, "num_blocks": 8, "block_size": 4, "num_heads_kv": 1, "head_dim": 8}
    like = library.put(np.zeros(1, F32))
    return cuattn.PagedKVCache(**{**sizes, "dtype": "float32", "like": like, **options})
