# SPDX-License-Identifier: Apache-2.0
"""Where PagedKVCache keeps the blocks of a sequence that is swapped out: host memory, or a file.

Each is filled when it is made, from K and V of all layers as WORDs, [num_layers, num_blocks, ...],
gives back its blocks from `first` on as often as it is asked, and holds its memory until `close`.
"""

from __future__ import annotations

import errno
import functools
import math
import os
from typing import Any

import numpy as np

from . import _core
from ._memory import WORD, NumpyMemory


class HostBlocks:
    """Blocks in host memory."""

    def __init__(self, memory: NumpyMemory, caches: list[Any], blocks: list[int]):
        index = memory.upload(np.array(blocks, np.int64))
        self._memory = memory
        self._arrays = [
            memory.host_empty((len(cache), len(blocks), *cache.shape[2:])) for cache in caches
        ]
        for array, cache in zip(self._arrays, caches, strict=True):
            for layer in range(len(cache)):
                memory.download(array[layer], cache[layer][index])

    def restore(self, caches: list[Any], blocks: list[int], first: int) -> None:
        """Write the blocks from `first` on to `blocks` of the caches."""
        index = self._memory.upload(np.array(blocks, np.int64))
        for array, cache in zip(self._arrays, caches, strict=True):
            for layer in range(len(cache)):
                cache[layer][index] = self._memory.restore(array[layer][first:])

    def close(self) -> None:
        """Let go of the memory."""
        self._arrays = []


class FileBlocks:
    """Blocks in a file that has no name, so that nobody can remove, replace or truncate it by one.

    It is read, not mapped: what a disk lost is an OSError, where a mapping would end the process.
    And each block is held against the sum that was taken of it, because a disk may also give back
    something else than it was given.
    """

    def __init__(self, memory: NumpyMemory, caches: list[Any], blocks: list[int], path: Any):
        self._memory = memory
        self._file = _core.UnlinkedFile(os.fspath(path))
        self._pieces: list[tuple[int, np.ndarray]] = []  # of each layer: offset, sum of each block
        end = 0
        try:
            index = memory.upload(np.array(blocks, np.int64))
            for cache in caches:
                for layer in range(len(cache)):
                    words = memory.fetch(cache[layer][index])
                    self._pieces.append((end, block_sums(words)))
                    end = write_all(self._file.fileno(), words, end)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                error.filename = path
            raise

    def restore(self, caches: list[Any], blocks: list[int], first: int) -> None:
        """Write the blocks from `first` on to `blocks` of the caches, once they are checked."""
        pieces = iter(self._pieces)
        index = self._memory.upload(np.array(blocks, np.int64))
        for cache in caches:
            words = np.empty((len(blocks), *cache.shape[2:]), WORD)
            skipped = first * math.prod(words.shape[1:]) * WORD.itemsize
            for layer in range(len(cache)):
                offset, sums = next(pieces)
                read_all(self._file.fileno(), words, offset + skipped)
                if not np.array_equal(block_sums(words), sums[first:]):
                    raise OSError(errno.EIO, "holds other bytes than were written")
                cache[layer][index] = self._memory.upload(words)

    def close(self) -> None:
        """Give the disk its room back."""
        self._file.close()


def write_all(descriptor: int, words: np.ndarray, offset: int) -> int:
    """Write all words at an offset, and return where they end."""
    data = words.reshape(-1).view(np.uint8).data
    while len(data) > 0:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    return offset


def read_all(descriptor: int, words: np.ndarray, offset: int) -> None:
    """Fill all words from an offset."""
    data = words.reshape(-1).view(np.uint8).data
    while len(data) > 0:
        count = os.preadv(descriptor, [data], offset)
        if count == 0:
            raise OSError(errno.EIO, f"ends {len(data)} bytes early")
        data, offset = data[count:], offset + count


@functools.lru_cache(maxsize=8)
def sum_weights(count: int) -> np.ndarray:
    """Odd, so that each change of one number changes the sum; random, so that several do."""
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64) | np.uint64(1)


def block_sums(words: np.ndarray) -> np.ndarray:
    """Sum up each block: its numbers of 32 bits times a weight for each place, modulo 2^64.

    The multilinear hash of arXiv:1202.4961, at twice the speed of the copies beside it, where
    zlib.crc32 has half of it.
    """
    numbers = words.reshape(len(words), math.prod(words.shape[1:])).view(np.uint32)
    return np.einsum("bi,i->b", numbers, sum_weights(numbers.shape[1]))
