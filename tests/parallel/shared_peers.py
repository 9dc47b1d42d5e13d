# SPDX-License-Identifier: Apache-2.0
"""Buffers that processes of this host share: what cuattn.parallel.peers has on GPUs, on the CPU.

What a device would do beside the attention is done when it is waited for: a result that nobody
waited for is never there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist

from cuattn.parallel.team import team_of


class SharedPeers:
    """Like peers.Peers, of files that all ranks map."""

    def __init__(self, ranks):
        self.rank, self.size, self.group = ranks
        self.device = torch.device("cpu")
        self.bytes = self.meetings = self.grown = 0
        names = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(names, dist.get_global_rank(self.group, 0), self.group)
        self.folder = names[0]
        self.maps, self.copies = [], 0  # which nobody has waited for

    def allocate(self, num_bytes):
        return num_bytes

    def share(self, num_bytes):
        self.grown += 1
        files = [os.path.join(self.folder, f"{self.grown}.{r}") for r in range(self.size)]
        with open(files[self.rank], "wb") as file:
            file.write(b"\xff" * num_bytes)  # NaN
        dist.barrier(self.group)
        options = {"shared": True, "size": num_bytes, "dtype": torch.uint8}
        self.maps = [torch.from_file(name, **options) for name in files]
        dist.barrier(self.group)
        os.unlink(files[self.rank])
        self.bytes = num_bytes

    def view(self, rank, first, shape, dtype):
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.maps[rank][first : first + count].view(dtype).view(shape)

    def enter(self):
        pass

    def leave(self):
        self.meet()

    def meet(self):
        self.meetings += 1
        dist.barrier(self.group)

    def now(self):
        return []

    def copy(self, moves, after):
        assert after == []
        self.copies += len(moves)
        return list(moves)

    def wait(self, mark):
        for into, source in mark:
            into.copy_(source)
            self.copies -= 1


@contextlib.contextmanager
def reading(ranks, reads=True):
    """Have keys move by buffers, on the CPU by shared ones; or by none, on GPUs by NCCL alone."""
    team = team_of("reading", ranks.group)
    team.find_out_about_peers(torch.empty(0))  # else a first call would
    own = team.peers
    if not reads:
        team.peers = None
    elif own is None and torch.get_default_device().type == "cpu":
        team.peers = SharedPeers(ranks)
    used = team.peers
    if used is not None:
        count_messages(used)
    try:
        yield used
    finally:
        team.peers = own
        if used is not None:
            del used.enter
        if isinstance(used, SharedPeers) and ranks.rank == 0:
            os.rmdir(used.folder)


def count_messages(used):
    """Count the messages that begin, as `used.messages`."""
    enter, used.messages = used.enter, 0

    def counted():
        used.messages += 1
        enter()

    used.enter = counted
