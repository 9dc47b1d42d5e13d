# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a call, and what is kept for their group: a host group, a counter of calls.

Next: check.py (what all ranks must agree on), exchange.py (what moves between them).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from .board import Board, Silence, make_file, neighbour_digest, open_file
from .peers import make_peers

# torch 2.13 has given it another name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NoAnswer(RuntimeError):
    """What goes through the memory of hosts ended before all ranks had answered."""


class Team:
    """A group of ranks as the functions of this package see it."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)  # it would never end if what is kept for it held it
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.calls = 0  # of this package, on this group; the same number on every rank
        self.last_seconds = 0.0  # the modelled time that all ranks agreed on last
        self.speeds: Any = None  # measured by calibrate: cost.Speeds
        self.plans: dict[Any, Any] = {}  # of calls that were checked here: plan.py
        self.peers: Any = None  # the buffers of ranks that share a host: peers.Peers
        self.transport = ""  # how keys move, in words
        self._has_nccl: bool | None = None  # not asked yet
        self._host: Any = None
        self._board: Board | None = None
        self._has_looked_for_board = False
        self._free: dict[Team | None, int] = {}

    @property
    def group(self) -> Any:
        """The group, which the caller holds while a call runs."""
        return self._group()

    def has_nccl(self) -> bool:
        """Whether the group moves CUDA memory by NCCL; it may move the host's by gloo, too."""
        if self._has_nccl is None:
            self._has_nccl = False
            if torch.cuda.is_available():
                with contextlib.suppress(RuntimeError):  # of a group without a backend for CUDA
                    backend = self.group._get_backend(torch.device("cuda"))
                    self._has_nccl = bool(backend.name() == "nccl")
        return self._has_nccl

    def gather_on_host(self, mine: Tensor) -> Tensor:
        """Return what every rank gives, [size, ...] in host memory; all ranks call it together."""
        box = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self.host().allgather([box], [mine]).wait()
        except RuntimeError as error:
            raise NoAnswer(str(error)) from error
        return torch.stack(box)

    def gather_words(self, mine: bytes) -> list[bytes]:
        """Return 32 bytes that every rank gives; all ranks call it together."""
        if not self._has_looked_for_board:
            self._board = self.make_board()
            self._has_looked_for_board = True
        if self._board is None:
            found = self.gather_on_host(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            return [words.numpy().tobytes() for words in found]
        try:
            return self._board.gather(mine)
        except Silence as error:
            raise NoAnswer(str(error)) from error

    def make_board(self) -> Board | None:
        """Make what the ranks of one host share; None where they are of several, or cannot."""
        file = -1
        if self.rank == 0:
            with contextlib.suppress(OSError, AttributeError):
                file = make_file(self.size)
        board = None
        try:
            digest = neighbour_digest()
            mine = digest + os.getpid().to_bytes(8, "little") + (file + 1).to_bytes(8, "little")
            said = self.gather_on_host(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            found = [words.numpy().tobytes() for words in said]
            processes = [int.from_bytes(words[32:40], "little") for words in found]
            number = int.from_bytes(found[0][40:48], "little")
            if number > 0 and all(words.startswith(digest) for words in found):
                wait = timeout_of(self.group) or default_pg_timeout
                with contextlib.suppress(OSError, ValueError):
                    file = open_file(processes[0], number - 1) if self.rank else file
                    board = Board(file, self.rank, processes, wait)
        finally:
            if board is None and file >= 0:
                os.close(file)
        have = self.gather_on_host(torch.tensor([board is not None], device="cpu"))
        return board if bool(have.all()) else None

    def host(self) -> Any:
        """Return what moves host memory between the ranks of the group; they make it together.

        `new_group` would name it by how many groups a rank is in, and wait forever for one that is
        in another number of them. The name of the group is the same on all.
        """
        group = self.group
        if dist.get_backend(group) == "gloo":
            return group
        if self._host is None:
            name = f"cuattn.parallel/{group.group_name}/"
            store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
            wait = timeout_of(group)
            timeout = {} if wait is None else {"timeout": wait}
            self._host = dist.ProcessGroupGloo(store, self.rank, self.size, **timeout)
        return self._host

    def free_bytes(self, device: torch.device, inner: Team | None = None) -> int:
        """Return the least memory that is free on any rank, of both groups of two levels.

        Asked once; all ranks ask together, and make the connections of NCCL: a ring in which some
        have nothing to send could not.
        """
        if inner not in self._free:
            for team in (self, inner):  # whatever q is: a rank that refuses its own takes part
                if team is not None and team.has_nccl():
                    here = device if device.type == "cuda" else torch.device("cuda")
                    dist.all_reduce(token := torch.zeros(1, device=here), group=team.group)
                    team.look_for_peers(token.device)
            free = torch.tensor([free_memory(device)], dtype=torch.int64, device="cpu")
            for team in (self, inner):
                if team is not None:
                    free = team.gather_on_host(free).amin(0)
            self._free[inner] = int(free)
        return self._free[inner]

    def look_for_peers(self, device: torch.device) -> None:
        """Find out, with all ranks, whether they share a host and can read each other's memory."""
        if self.transport:
            return
        is_wanted = os.environ.get("CUATTN_PEER_COPIES", "") != "0"
        digest = neighbour_digest() if is_wanted else os.urandom(32)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        self.transport = "NCCL: the ranks share no host, or CUATTN_PEER_COPIES=0"
        if self.size == 1 or not bool((self.gather_on_host(mine) == mine).all()):
            return
        try:
            peers, why = make_peers(self.group, device, timeout_of(self.group)), ""
        except Exception as error:  # private functions of torch, which differ by version
            peers, why = None, str(error).partition("\n")[0]
        if bool(self.gather_on_host(torch.tensor([peers is not None], device="cpu")).all()):
            self.peers, self.transport = peers, "copy engines"
        else:
            self.transport = f"NCCL: ranks cannot read each other's memory here ({why})"

    def find_out_about_peers(self, q: Any) -> None:
        """Look for them once, where ranks have GPUs; all ranks together, and none in a graph.

        On the device of q, whatever a rank has in its place.
        """
        if self.transport or not self.has_nccl():
            return
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            is_there = isinstance(q, Tensor) and q.is_cuda
            current = torch.device("cuda", torch.cuda.current_device())
            self.look_for_peers(q.device if is_there else current)

    def reads_on(self, device: torch.device) -> bool:
        """Whether arrays on a device go by buffers that the other ranks read."""
        return self.peers is not None and bool(self.peers.device == device)

    def peers_with(self, num_bytes: int) -> Any:
        """Return buffers of so many bytes; None where a rank has no memory left for its own.

        All ranks ask alike. A graph that is captured takes them as they are.
        """
        if self.peers is None or num_bytes <= self.peers.bytes:
            return self.peers
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return None
        buffer, why = None, ""
        try:
            buffer = self.peers.allocate(num_bytes)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        if bool(self.gather_on_host(torch.tensor([buffer is not None], device="cpu")).all()):
            self.peers.share(buffer)
        else:
            self.peers = None
            self.transport = f"NCCL: a rank had no memory for a buffer of {num_bytes} bytes ({why})"
        return self.peers

    def peer(self, step: int) -> int:
        """Return the global rank that stands `step` places after this one in the ring."""
        return self.ranks[(self.rank + step) % self.size]


def timeout_of(group: Any) -> datetime.timedelta | None:
    """Return how long the ranks of a group wait for each other; None is torch's default."""
    for device in ("cuda", "cpu"):
        try:
            options = group._get_backend(torch.device(device)).options  # torch says it nowhere else
        except (RuntimeError, AttributeError):
            continue
        wait: datetime.timedelta = options._timeout
        return wait
    return None


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, or in the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_teams: weakref.WeakKeyDictionary[Any, Team] = weakref.WeakKeyDictionary()


def team_of(function: str, group: Any) -> Team:
    """Return what is kept for a group; None is the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{function}: group must be a group of torch.distributed, which is not initialised "
            "here; call torch.distributed.init_process_group first"
        )
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise ValueError(
            f"{function}: group must be a ProcessGroup that holds this rank, or (inner, outer), "
            f"got {type(given).__name__}; pass what new_group gave a member, or None for all ranks"
        )
    if given not in _teams:
        _teams[given] = Team(given)
    return _teams[given]


def teams_of(function: str, group: Any) -> tuple[Team | None, Team]:
    """Return the teams of a group, or of (inner, outer)."""
    if isinstance(group, (tuple, list)):
        if len(group) != 2:
            raise ValueError(
                f"{function}: group must be one group or (inner, outer), got {len(group)} groups"
            )
        inner, outer = (team_of(function, one) for one in group)
        return inner, outer
    return None, team_of(function, group)
