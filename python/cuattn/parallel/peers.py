# SPDX-License-Identifier: Apache-2.0
"""Arrays of a rank in memory that the other ranks of its host read by their copy engines.

NCCL moves by kernels, which take multiprocessors from the attention beside them, and a kernel that
keeps all of them until it is done waits for what they took. Copy engines take none. A rank packs
what the others need into its buffer, meets them on the device, and they read it when they want:

    stream      pack | meet | attend to own keys | attend to theirs | meet: all have read
    the other               | read theirs        |

The buffers are torch's symmetric memory, kept for the group and as large as its largest message.
Next: schemes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Span

ALIGN = 256  # bytes; where an array of a message begins
FOREVER = 0  # milliseconds: no limit
KEPT = 1024  # views of buffers


class Peers:
    """The buffers of all ranks of a group, and the stream on which this rank reads them."""

    def __init__(self, group: Any, device: torch.device, milliseconds: int) -> None:
        self.group_name, self.device, self.milliseconds = group.group_name, device, milliseconds
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.bytes = 0
        self._buffer: Any = None
        self._memory: Any = None
        self._views: dict[Any, Tensor] = {}
        self._has_copied = False  # since the message began
        self._is_captured = False  # a graph holds the addresses of these buffers
        self._kept: list[Any] = []  # buffers of which graphs do
        self._current: Any = None  # the stream of the message that is being made
        self._last: Any = None  # the stream of the last message, and when it was done

    def allocate(self, num_bytes: int) -> Any:
        """Make a buffer of so many bytes, and some more, for `share`."""
        import torch.distributed._symmetric_memory as symmetric

        step = max(1 << 21, 1 << max(num_bytes.bit_length() - 4, 0))
        rounded = -(-num_bytes // step) * step
        with torch.inference_mode(False):
            try:
                return symmetric.empty(rounded, dtype=torch.uint8, device=self.device)
            except RuntimeError:  # what torch keeps for itself may be in the way
                torch.cuda.empty_cache()
                return symmetric.empty(rounded, dtype=torch.uint8, device=self.device)

    def share(self, buffer: Any) -> None:
        """Take such a buffer; all ranks call it together."""
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.rendezvous(buffer, self.group_name)
        torch.cuda.synchronize(self.device)  # all have read the old one when the streams are done
        if self._is_captured:
            self._kept.append((self._buffer, self._memory))
        self._views.clear()
        self._buffer, self._memory, self.bytes = buffer, memory, buffer.numel()
        self._is_captured = False

    def view(self, rank: int, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an array in the buffer of a rank, from a byte on."""
        key = rank, first, tuple(shape), dtype
        if key not in self._views:
            if len(self._views) >= KEPT:
                self._views.clear()
            place = first // dtype.itemsize
            with torch.inference_mode(False):  # it is written in other modes, too
                self._views[key] = self._memory.get_buffer(rank, key[2], dtype, place)
        return self._views[key]

    def enter(self) -> None:
        """Begin a message on the current stream: behind the one before, whatever its stream."""
        self._current = stream = torch.cuda.current_stream(self.device.index)
        if torch.cuda.is_current_stream_capturing():
            self._is_captured = True
        elif self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])

    def leave(self) -> None:
        """End a message: its stream waits for all copies, also where a call failed."""
        stream = self._current
        if self._has_copied:
            stream.wait_stream(self.stream)
            self._has_copied = False
        self.meet()
        if not torch.cuda.is_current_stream_capturing():
            self._last = stream, stream.record_event()

    def meet(self) -> None:
        """Have the stream of the message wait until those of all ranks are here."""
        self._memory.barrier(0, self.milliseconds)

    def now(self) -> Any:
        """Return a mark: all that the stream of the message was given so far is done."""
        return self._current.record_event()

    def copy(self, moves: Sequence[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Copy (into, source) on the other stream, after a mark; return one of their end."""
        self.stream.wait_event(after)
        self._has_copied = True
        torch.cuda.set_stream(self.stream)  # torch.cuda.stream asks much more of the host
        try:
            for into, source in moves:
                into.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(self._current)
        return self.stream.record_event()

    def wait(self, mark: Any) -> None:
        """Have the stream of the message wait for a mark."""
        self._current.wait_event(mark)


class Message:
    """What every rank of a call puts into its buffer: keys beside values, [rows, ..., dim]."""

    def __init__(
        self, peers: Peers, rank: int, pairs: Sequence[tuple[Tensor, Tensor]], most: int
    ) -> None:
        """Pack pairs of keys and values, and meet the others; `most`: rows of the longest rank."""
        self.peers, self.rank, self.dtype = peers, rank, pairs[0][0].dtype
        self.shapes = [shape_of(*pair) for pair in pairs]
        self.firsts, _ = places_of(self.shapes, most, self.dtype)
        peers.enter()
        try:
            for index, pair in enumerate(pairs):
                torch.cat(pair, -1, out=self.of(rank, index, (0, len(pair[0]))))
        except BaseException:  # the others meet twice
            peers.meet()
            peers.leave()
            raise
        peers.meet()  # here: beside attention that keeps all multiprocessors it would wait for it

    def of(self, rank: int, index: int, rows: Span) -> Tensor:
        """Return rows of a pair of a rank, from one on and so many, where they lie."""
        shape = self.shapes[index]
        first = self.firsts[index] + rows[0] * shape.numel() * self.dtype.itemsize
        return self.peers.view(rank, first, (rows[1], *shape), self.dtype)

    def empty(self, index: int, rows: int) -> Tensor:
        """Make an array for so many rows of a pair."""
        shape = (rows, *self.shapes[index])
        return torch.empty(shape, dtype=self.dtype, device=self.peers.device)

    def fetch(self, moves: Sequence[tuple[Tensor, int, int, Span]], after: Any = None) -> Any:
        """Read rows into arrays, each (into, rank, index, rows); returns a mark to wait for.

        `after` is a mark of when the memory of the arrays was free; None: now.
        """
        pairs = [(into, self.of(rank, index, rows)) for into, rank, index, rows in moves]
        return self.peers.copy(pairs, self.peers.now() if after is None else after)

    def close(self) -> None:
        """Keep the buffer until all ranks have read it."""
        self.peers.leave()


def shape_of(keys: Tensor, values: Tensor) -> torch.Size:
    """Return the shape of a row of keys beside values."""
    return torch.Size((*keys.shape[1:-1], keys.shape[-1] + values.shape[-1]))


def places_of(shapes: Sequence[torch.Size], most: int, dtype: torch.dtype) -> tuple[list[int], int]:
    """Return where arrays of as many as `most` rows begin in a buffer, and its bytes."""
    firsts, end = [], 0
    for shape in shapes:
        firsts.append(end)
        end += -(-most * shape.numel() * dtype.itemsize // ALIGN) * ALIGN
    return firsts, end


def make_peers(group: Any, device: torch.device, timeout: Any) -> Peers:
    """Let the ranks of a group on one host share memory; raises where torch cannot.

    All ranks call it together.
    """
    milliseconds = FOREVER if timeout is None else int(timeout.total_seconds() * 1000)
    peers = Peers(group, device, milliseconds)
    peers.share(peers.allocate(ALIGN))
    return peers
