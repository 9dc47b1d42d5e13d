# SPDX-License-Identifier: Apache-2.0
"""A cache of any shape as pages that cuattn's kernels read, without a copy.

An entry of a cache is a page of flash-attn, or the whole row of a sequence in a contiguous cache.
Where it has more tokens than a block of cuattn may have, it is cut into several.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

LARGEST = 256  # tokens of a block


@functools.cache
def page_size(tokens: int) -> int:
    """Choose the divisor of a number of tokens that kernels like best."""
    divisors = (d for d in range(1, LARGEST + 1) if tokens % d == 0)
    return max(divisors, key=lambda d: (d % 16 == 0, d % 8 == 0, d), default=1)


def tokens_apart(cache: Tensor) -> int:
    """Count the tokens from an entry to the next, as they lie in memory; 0 where they do not."""
    entries, tokens = cache.shape[:2]
    if entries < 2:
        return tokens
    step, row = cache.stride()[:2]
    return step // row if row and step % row == 0 else 0


def can_be_cut(k: Tensor, v: Tensor) -> bool:
    """Whether both caches lie entry behind entry, and alike."""
    apart = tokens_apart(k)
    return k.shape[1] <= LARGEST or (k.shape[1] <= apart == tokens_apart(v))


class Pages:
    """The caches as pages, and the pages of each sequence.

    `table` int32 [batch, n] names the entries of each sequence. `token_by_token` makes pages of
    one token, so that a sequence may begin anywhere.
    """

    def __init__(self, op: str, k: Tensor, v: Tensor, table: Tensor, token_by_token: bool = False):
        self.table = table
        self.entries = k.shape[0]
        self.names: Tensor | None = None  # of tables(), once asked
        self.tokens = tokens = k.shape[1]  # of an entry
        self.capacity = table.shape[1] * tokens  # tokens that a sequence may have
        if tokens <= LARGEST and not token_by_token:
            self.k, self.v, self.size, self.apart = k, v, tokens, tokens
            return
        self.apart = tokens_apart(k)
        if not tokens <= self.apart == tokens_apart(v):
            raise ValueError(
                f"{op}: k_cache and v_cache must lie in memory alike, entry behind entry, got "
                f"strides {k.stride()} and {v.stride()}; pass contiguous caches"
            )
        self.size = 1 if token_by_token else page_size(math.gcd(tokens, self.apart))
        self.k, self.v = self.cut(k), self.cut(v)

    def cut(self, cache: Tensor) -> Tensor:
        """View a cache as pages; between those of two entries may lie some that are not its own."""
        entries, tokens, heads, dim = cache.shape
        pages = ((entries - 1) * self.apart + tokens) // self.size if entries else 0
        _, row, head, _ = cache.stride()
        return cache.as_strided((pages, self.size, heads, dim), (self.size * row, row, head, 1))

    def tables(self, leftpad: Tensor | None = None) -> Tensor:
        """Name the pages of each sequence, int32 [batch, pages]; from token `leftpad` on."""
        if leftpad is None and self.size == self.tokens == self.apart:
            return self.table
        if leftpad is None and self.names is not None:
            return self.names
        pages = torch.arange(self.tokens // self.size, dtype=torch.int32, device=self.table.device)
        # What is no entry stays none: its product could wrap to the page of another sequence.
        table = self.table.clamp(-1, self.entries)
        if leftpad is not None:
            return table * self.apart + leftpad[:, None] + pages
        self.names = (table[:, :, None] * (self.apart // self.size) + pages).flatten(1)
        return self.names

    def alternate(self) -> bool:
        """Whether pages of v lie between those of k, so that either view has pages of the other."""
        if self.apart == self.tokens:
            return False
        extent = max(x.stride(0) for x in (self.k, self.v)) * len(self.k) * self.k.element_size()
        return abs(self.k.data_ptr() - self.v.data_ptr()) < extent
