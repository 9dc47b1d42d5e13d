# SPDX-License-Identifier: Apache-2.0
"""Processes that stand for ranks: started once, joined by gloo or NCCL, given job after job.

A job is a function of a module that the processes can import, run on every rank of a group with
(team, *arguments); `Pool.run` returns what each rank returned, or raises what any raised.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import socket
import sys
import traceback
from typing import Any, NamedTuple

import pytest

import harness

HERE = pathlib.Path(__file__).parent
SECONDS = 180  # after which a rank counts as hanging


class Ranks(NamedTuple):
    """What a job is told of its group."""

    rank: int
    size: int
    group: Any


def why_no_nccl() -> str | None:
    """Say why no ranks over NCCL can be had; None where they can."""
    if os.environ.get("CUATTN_TEST_NCCL") != "1":
        return "NCCL: the cases have not passed yet; CUATTN_TEST_NCCL=1 runs them"
    gpus = count_gpus()
    return None if gpus > 1 else f"NCCL takes 2 GPUs, {gpus} here"


def count_gpus() -> int:
    """Count the GPUs that ranks may have."""
    if harness.why_no_cuda() is not None or harness.is_emulated():
        return 0
    import torch

    return torch.cuda.device_count()


class Pool:
    """`size` processes; jobs run on the first n of them. Over NCCL each has a GPU, its default."""

    def __init__(self, size: int, timeout: float = SECONDS, backend: str = "gloo") -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
        context.set_forkserver_preload(["warm"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, size, port, timeout, backend, there), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for rank in range(size):
            self.receive(rank)

    def receive(self, rank: int) -> Any:
        """Return what a rank answers within the time."""
        assert self.pipes[rank].poll(SECONDS), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def send(self, size: int, job: Any, *arguments: Any, each: Any = ()) -> None:
        """Start a job on the first `size` ranks; each: more arguments, by rank."""
        if size > self.size:
            pytest.skip(f"{size} ranks, {self.size} here")
        for rank in range(size):
            own = each[rank] if each else ()
            self.pipes[rank].send((size, job.__module__, job.__name__, (*arguments, *own)))

    def outcomes(self, size: int, job: Any, *arguments: Any, each: Any = ()) -> list[Any]:
        """Run a job; (kind of error or "", result or message) of each rank."""
        self.send(size, job, *arguments, each=each)
        return [self.receive(rank) for rank in range(size)]

    def run(self, size: int, job: Any, *arguments: Any) -> list[Any]:
        """Run a job that no rank fails."""
        self.send(size, job, *arguments)
        ranks = {self.pipes[rank]: rank for rank in range(size)}
        results = [None] * size
        while ranks:  # the first that answers: a rank that failed leaves the others waiting
            ready = multiprocessing.connection.wait(list(ranks), SECONDS)
            assert ready, f"ranks {sorted(ranks.values())} hang"
            for pipe in ready:
                error, results[ranks[pipe]] = pipe.recv()
                assert not error, f"rank {ranks[pipe]}: {error}: {results[ranks[pipe]]}"
                del ranks[pipe]
        return results

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()


def serve(rank: int, size: int, port: int, timeout: float, backend: str, pipe: Any) -> None:
    """Join the group and run jobs until there are no more."""
    os.environ["CUATTN_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=timeout)
    where = f"tcp://127.0.0.1:{port}"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=wait)
    groups = {n: dist.new_group(range(n), timeout=wait) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    pipe.send("ready")
    while True:
        task = pipe.recv()
        if task is None:
            break
        count, module, name, arguments = task
        try:
            job = getattr(importlib.import_module(module), name)
            pipe.send(("", job(Ranks(rank, count, groups[count]), *arguments)))
        except Exception as error:
            text = f"{error}\n{traceback.format_exc()}" if type(error) is AssertionError else error
            pipe.send((type(error).__name__, str(text)))
    dist.destroy_process_group()
