# SPDX-License-Identifier: Apache-2.0
"""A few bytes from every rank of a host to all, by memory that they share.

Microseconds, where sockets take a third of a millisecond, which a call alone would show. Rank 0
makes a page that has no name; the others open it by its process. Each rank has two places in it:

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

    def __init__(self, file: int, rank: int, size: int, timeout: datetime.timedelta) -> None:
        """Map the page of a file, which the board keeps, and closes."""
        self.file, self.rank, self.size = file, rank, size
        self.seconds = timeout.total_seconds()
        self.messages = 0
        self.page = mmap.mmap(file, size * 2 * PLACE)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)  # until the process ends

    def __del__(self) -> None:
        os.close(self.file)

    def place(self, rank: int) -> int:
        """Return where a rank writes this message."""
        return (2 * rank + self.messages % 2) * PLACE

    def gather(self, words: bytes) -> list[bytes]:
        """Give 32 bytes, and return those of every rank; all ranks call it together."""
        self.messages += 1
        whole = sealed(self.messages, words)
        begin = self.place(self.rank)
        self.page[begin : begin + len(whole)] = whole
        return [words if r == self.rank else self.wait_for(r) for r in range(self.size)]

    def wait_for(self, rank: int) -> bytes:
        """Return what a rank gives, when it has."""
        begin = self.place(rank)
        number = self.messages.to_bytes(NUMBER, "little")
        started = time.monotonic()
        rounds = 0
        while True:
            found = self.page[begin : begin + NUMBER + WORDS + DIGEST]
            words = found[NUMBER : NUMBER + WORDS]
            if found.startswith(number) and found == sealed(self.messages, words):
                return words
            passed = time.monotonic() - started
            if passed < EAGER:
                os.sched_yield()
                continue
            if passed > self.seconds:
                raise Silence(f"rank {rank} did not come within {self.seconds:g} s")
            rounds += 1
            if rounds % ROUNDS == 0 and not self.lives(rank):
                raise Silence(f"rank {rank} has ended")
            time.sleep(PAUSE)

    def lives(self, rank: int) -> bool:
        """Whether a rank still holds its lock."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return False


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
