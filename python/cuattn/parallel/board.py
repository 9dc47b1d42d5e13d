# SPDX-License-Identifier: Apache-2.0
"""A few bytes from every rank of a host to all, by memory that they share.

Microseconds, where sockets take hundreds, which a call alone would show. Rank 0 makes a page that
has no name; the others open it by its process. Each rank has two places in it:

    rank 0  | message 1, 3, 5, ... | message 2, 4, 6, ... |    a place: the number, the bytes, a
    rank 1  | message 1, 3, 5, ... | message 2, 4, 6, ... |    digest of both, to read it whole

Nobody writes message n + 2 before all have read n: a rank gives n + 2 when it has read n + 1 of
all, and they gave n + 1 when they had read n. A lock on a byte of the page tells that a rank lives.
Next: check.py.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

NUMBER, WORDS, DIGEST = 8, 32, 16  # bytes
PLACE = 64
EAGER = 1e-3  # seconds that a rank asks again and again
PAUSE = 2e-4  # between two questions after that
ROUNDS = 500  # of such, until it looks whether the other lives


class Silence(RuntimeError):
    """A rank has ended, or has not written in time."""


class Board:
    """A page that the ranks of a host map."""

    def __init__(
        self, file: int, rank: int, processes: Sequence[int], timeout: datetime.timedelta
    ) -> None:
        """Map the page of a file, which the board keeps and closes; with the ranks' processes."""
        self.rank, self.processes = rank, processes
        self.seconds = timeout.total_seconds()
        self.messages = 0
        self.is_broken = False  # a rank gave up: numbers of messages are no longer the same
        self.page = mmap.mmap(file, len(processes) * 2 * PLACE)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)  # until the process ends
        self.file = file

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def place(self, rank: int) -> int:
        """Return where a rank writes this message."""
        return (2 * rank + self.messages % 2) * PLACE

    def gather(self, words: bytes) -> list[bytes]:
        """Give 32 bytes, and return those of every rank; all ranks call it together."""
        if self.is_broken:
            raise Silence("an earlier call had no answer")
        self.messages += 1
        whole = sealed(self.messages, words)
        begin = self.place(self.rank)
        self.page[begin : begin + len(whole)] = whole
        ranks = range(len(self.processes))
        try:
            return [words if rank == self.rank else self.wait_for(rank) for rank in ranks]
        except BaseException:
            self.is_broken = True
            raise

    def wait_for(self, rank: int) -> bytes:
        """Return what a rank gives, when it has."""
        started = time.monotonic()
        rounds = 0
        is_last = False  # it has ended, and what it wrote before is looked at once more
        while True:
            words = self.read(rank)
            if words is not None:
                return words
            if is_last:
                raise Silence(f"rank {rank} has ended")
            passed = time.monotonic() - started
            if passed < EAGER:
                os.sched_yield()
                continue
            if passed > self.seconds:
                raise Silence(f"rank {rank} did not come within {self.seconds:g} s")
            rounds += 1
            if rounds % ROUNDS == 0:
                is_last = not self.lives(rank)
            time.sleep(PAUSE)

    def read(self, rank: int) -> bytes | None:
        """Return what a rank has given; None where it has not, or not yet all of it."""
        begin = self.place(rank)
        found = self.page[begin : begin + NUMBER + WORDS + DIGEST]
        words = found[NUMBER : NUMBER + WORDS]
        return words if found == sealed(self.messages, words) else None

    def lives(self, rank: int) -> bool:
        """Whether a rank holds its lock; one that lost it, by closing a copy of the file, runs."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        try:
            state = Path(f"/proc/{self.processes[rank]}/stat").read_text().rpartition(")")[2]
        except OSError:
            return False
        return state.split()[0] not in "ZX"  # ended, and not yet taken note of


def sealed(number: int, words: bytes) -> bytes:
    """Return a message as it is written."""
    whole = number.to_bytes(NUMBER, "little") + words
    return whole + hashlib.blake2b(whole, digest_size=DIGEST).digest()


def neighbour_digest() -> bytes:
    """Return what ranks of one host and container have alike; where unknown, what nobody has."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt", "net")]
    except OSError:
        return os.urandom(32)
    return hashlib.sha256(repr((boot, spaces)).encode()).digest()


def make_file(size: int) -> int:
    """Make a page for so many ranks; raises OSError where the system has none."""
    file = os.memfd_create("cuattn.parallel", os.MFD_CLOEXEC)
    os.ftruncate(file, size * 2 * PLACE)
    return file


def open_file(process: int, file: int) -> int:
    """Open the page that another process made; raises OSError where it may not."""
    return os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
