# SPDX-License-Identifier: Apache-2.0
"""Processes that stand for ranks: started once, joined by gloo or NCCL, given job after job.

A job is a function of a module that the processes can import, run on every rank of a group with
(team, *arguments); `Pool.run` returns what each rank returned, or raises what any raised.
Ranks that do not answer in time say where they stand, are killed, and are started anew for the
next job.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, NamedTuple

import pytest

import harness

HERE = pathlib.Path(__file__).parent
SECONDS = {"gloo": 180, "nccl": 60}  # after which a rank counts as hanging
STARTS = 180  # seconds that ranks may take to start: each over NCCL imports torch
OFFLINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # all ranks are on this host


class Ranks(NamedTuple):
    """What a job is told of its group."""

    rank: int
    size: int
    group: Any


def pairs_of(ranks, groups):
    """The inner and the outer group of this rank, of four, made at the first call."""
    import torch.distributed as dist

    if not groups:
        for pair in ((0, 1), (2, 3), (0, 2), (1, 3)):
            group = dist.new_group(pair)
            if ranks.rank in pair:
                groups.append(group)
    return tuple(groups)


def why_no_nccl() -> str | None:
    """Say why no ranks over NCCL can be had; None where they can."""
    gpus = count_gpus()
    return None if gpus > 1 else f"NCCL takes 2 GPUs, {gpus} here"


def count_gpus() -> int:
    """Count the GPUs that ranks may have."""
    if harness.why_no_cuda() is not None or harness.is_emulated():
        return 0
    import torch

    return torch.cuda.device_count()


class Pool:
    """`size` processes; jobs run on the first n of them. Over NCCL each has a GPU, its default.

    Over gloo they are forked from a process that has imported torch. Over NCCL each is a new one:
    CUDA takes no fork of a process that has used it.
    """

    def __init__(self, size: int, timeout: float | None = None, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.seconds = SECONDS[backend]
        self.timeout = timeout or self.seconds
        self.logs = tempfile.TemporaryDirectory()
        self.starts = 0
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start the ranks, and wait until their group is made."""
        context = multiprocessing.get_context("spawn" if self.backend == "nccl" else "forkserver")
        sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
        if self.backend == "gloo":
            context.set_forkserver_preload(["cuattn.parallel", "pytest"])  # not of sys.path here
        self.starts += 1
        store = f"{self.logs.name}/store{self.starts}"
        for rank in range(self.size):
            here, there = context.Pipe()
            how = (self.size, store, self.timeout, self.backend)
            process = context.Process(
                target=serve, args=(rank, *how, self.log(rank), there), daemon=True
            )
            process.start()
            there.close()  # else a rank that dies would not end the pipe
            self.pipes.append(here)
            self.processes.append(process)
        self.answers(self.size, STARTS)

    def log(self, rank: int) -> str:
        """Return the file in which a rank says where it stands."""
        return f"{self.logs.name}/{rank}"

    def receive(self, rank: int) -> Any:
        """Return what a rank answers within the time."""
        if not self.pipes[rank].poll(self.seconds):
            pytest.fail(self.give_up(f"rank {rank} hangs"))
        return self.pipes[rank].recv()

    def send(self, size: int, job: Any, *arguments: Any, each: Any = ()) -> None:
        """Start a job on the first `size` ranks; each: more arguments, by rank."""
        if size > self.size:
            pytest.skip(f"{size} ranks, {self.size} here")
        if not self.processes:
            self.start()
        for rank in range(size):
            own = each[rank] if each else ()
            self.pipes[rank].send((size, job.__module__, job.__name__, (*arguments, *own)))

    def run(self, size: int, job: Any, *arguments: Any) -> list[Any]:
        """Run a job that no rank fails."""
        self.send(size, job, *arguments)
        return self.answers(size)

    def answers(self, size: int, seconds: float | None = None) -> list[Any]:
        """Return what the first ranks answer; where one fails or hangs, end all of them."""
        ranks = {self.pipes[rank]: rank for rank in range(size)}
        results = [None] * size
        while ranks:  # the first that answers: a rank that failed leaves the others waiting
            ready = multiprocessing.connection.wait(list(ranks), seconds or self.seconds)
            if not ready:
                pytest.fail(self.give_up(f"ranks {sorted(ranks.values())} hang"))
            for pipe in ready:
                rank = ranks.pop(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    pytest.fail(self.give_up(f"rank {rank} has died"))
                if error:
                    words = f"rank {rank}: {error}: {results[rank]}"
                    pytest.fail(self.give_up(words) if ranks else words)
        return results

    def give_up(self, words: str) -> str:
        """End all ranks, and add to the words where each stood."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()
        said = (pathlib.Path(self.log(rank)).read_text() for rank in range(self.size))
        return "\n".join([words, *(f"-- rank {rank}\n{text}" for rank, text in enumerate(said))])

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)  # one that a driver holds does not hold the tests
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + 5
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        self.kill()
        self.logs.cleanup()


def serve(
    rank: int, size: int, store: str, timeout: float, backend: str, log: str, pipe: Any
) -> None:
    """Join the group and run jobs until there are no more."""
    with open(log, "w", buffering=1) as said:
        faulthandler.enable(said)
        faulthandler.register(signal.SIGUSR1, said)
        begin = time.monotonic()

        def note(words: str) -> None:
            print(f"{time.monotonic() - begin:.1f} s: {words}", file=said)

        os.environ["CUATTN_NUM_THREADS"] = "1"
        for name, value in OFFLINE.items():
            os.environ.setdefault(name, value)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        note("torch is here")
        wait = datetime.timedelta(seconds=timeout)
        if backend == "nccl":
            torch.cuda.set_device(rank)
            torch.set_default_device(f"cuda:{rank}")
            torch.cuda.synchronize()
            note("the device is here")
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait
        )
        groups = {n: dist.new_group(range(n), timeout=wait) for n in range(1, size)}
        groups[size] = dist.group.WORLD
        if backend == "nccl":
            note("the groups are named")
            dist.all_reduce(torch.ones(1))
            torch.cuda.synchronize()
        note("the group is here")
        pipe.send(("", None))
        while (task := pipe.recv()) is not None:
            count, module, name, arguments = task
            note(f"{module}.{name} {arguments}")
            pipe.send(outcome(module, name, Ranks(rank, count, groups[count]), arguments))
            note("answered")
        dist.destroy_process_group()


def outcome(module: str, name: str, ranks: Ranks, arguments: Any) -> tuple[str, Any]:
    """Run a job: ("", what it returns), or the kind of its error and its message."""
    try:
        job = getattr(importlib.import_module(module), name)
        return "", job(ranks, *arguments)
    except Exception as error:
        text = f"{error}\n{traceback.format_exc()}" if type(error) is AssertionError else error
        return type(error).__name__, str(text)
