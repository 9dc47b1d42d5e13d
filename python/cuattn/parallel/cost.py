# SPDX-License-Identifier: Apache-2.0
"""What each scheme would take, and which one is chosen: formulas in docs/parallel.md.

Speeds are those of two H100s and their NVLink, and of the copy engines of two H200s, until
`calibrate` has measured them; what the host takes and copies was measured there, too (docs/notes).
Next: attention.py.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np
import torch

import cuattn

from .layout import Layout
from .peers import Message
from .team import gather_into, team_of

TILE_ROWS = 128  # of a tile of queries
MERGE_BYTES = 4e12  # each second
COPY_BYTES = 2.5e12  # read and written each second
CALL_SECONDS = 150e-6  # of the host before the first kernel
POST_SECONDS = 130e-6  # of the host for each exchange after the first
PIECE_SECONDS = 150e-6  # of a call of few rows, which does not fill a device
PACKED_BY_GROUPS = 4  # the time of packing some heads after the others, as that of all at once
IN_PARTS = 1.05  # the time of gradients in parts, as those of one call
IN_GROUPS = 1.09  # the time of attention by two groups of heads, as that of all at once
BACKWARD = 2.8  # the time of gradients, as that of the way forth
MOST_GROUPS = 8  # of heads, of gather
SUMS_BYTES = 64 << 20  # of the float32 sums of a group: fewer groups are fewer calls
SCHEMES = ("local", "gather", "heads", "ring", "two levels")


class Speeds(NamedTuple):
    """What the model counts with."""

    flops: float = 730e12  # of a kernel, each second
    bytes: float = 229e9  # that a rank sends and receives, each second
    latency: float = 18e-6  # of the smallest exchange
    tiles: int = 132  # that a device works on at a time
    parts: float = 1.05  # the time of a ring's attention beside what moves, as that of one call
    reads: float = 0.0  # bytes that come by copy engines, each second; 0: NCCL brings them

    @property
    def comes(self) -> float:
        """The bytes of keys that come to a rank of gather or ring, each second."""
        return self.reads or self.bytes


ENGINES = Speeds(parts=1.0, reads=360e9)  # two H200s, by the copy engines of peers.py


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the model sees of a call."""

    batch: int
    heads_q: int
    heads_kv: int
    dims: int  # head_dim + head_dim_v
    itemsize: int
    causal: bool
    in_order: bool = False  # ranks hold the sequence one behind the other
    pairs: float = 0.0  # that see each other, of packed documents; 0: of the whole sequence
    pieces: tuple[float, float] = (0.0, 0.0)  # calls beyond one a step, of gather and of a ring
    trains: bool = False  # gradients are wanted
    beside: float = 0.0  # pairs of documents that lie whole on a rank, which wait for no keys

    def key_bytes(self, rows: float) -> float:
        """Return the bytes of the keys and values of so many tokens."""
        return rows * self.batch * self.heads_kv * self.dims * self.itemsize


@dataclasses.dataclass(frozen=True)
class Choice:
    """The scheme of a call and why.

    Attributes
    ----------
    scheme : str
        "local", "gather", "heads", "ring" or "two levels"; of the last `outer` is that of the outer
        group.
    seconds : dict of str to float
        The modelled time of each scheme that is possible.
    refused : dict of str to str
        Why the others are not.
    reason : str
        Why this one.
    buffer_bytes : int
        Memory that gather needs for keys and values on their way.
    groups : tuple of int
        The key heads that gather brings at a time.
    alone : float
        The modelled time of one rank that held the whole sequence.
    transport : str
        What moves the keys of gather and ring: "copy engines" of one host, which leave the
        multiprocessors to attention, or "NCCL" and why not the others; "" without a GPU.
    """

    scheme: str
    seconds: dict[str, float]
    refused: dict[str, str]
    reason: str
    buffer_bytes: int
    outer: str = ""
    groups: tuple[int, ...] = ()
    alone: float = 0.0
    transport: str = ""

    def __str__(self) -> str:
        lines = [f"{self.scheme}: {self.reason}"]
        lines += [f"  one rank that held all: {self.alone * 1e3:.3f} ms"] if self.alone else []
        lines += [f"  {name}: {t * 1e3:.3f} ms by the model" for name, t in self.seconds.items()]
        lines += [f"  {name}: no, {why}" for name, why in self.refused.items()]
        if self.scheme != "local":
            lines.append(f"  gather's buffers: {self.buffer_bytes} bytes")
            lines += [f"  keys move by {self.transport}"] if self.transport else []
        return "\n".join(lines)


def groups_of_sums(heads: int, head_bytes: float) -> int:
    """Return into how many groups gather cuts key heads whose gradients it adds up in float32."""
    return max(1, min(MOST_GROUPS, heads, round(heads * head_bytes / SUMS_BYTES)))


def pairs_of_documents(shape: Shape, lengths: np.ndarray) -> float:
    """Count the pairs of documents."""
    return float((lengths.astype(np.float64) ** 2).sum()) * (0.5 if shape.causal else 1.0)


def shape_of_documents(
    shape: Shape, begins: np.ndarray, layout: Layout, whole: np.ndarray | None = None
) -> Shape:
    """Return a shape with the pairs of packed documents, and the calls into which runs cut them.

    A document that lies in c runs of all ranks is c / R of a rank, each against all in the ring;
    gather takes all of a rank at once but for documents that end within a chunk. `whole`: lengths
    of documents beside these.
    """
    lengths = np.diff(begins).astype(np.float64)
    lengths = lengths[lengths > 0]
    pairs = pairs_of_documents(shape, lengths)
    beside = 0.0 if whole is None else pairs_of_documents(shape, whole)
    runs = sum(len(layout.spans(rank)) for rank in range(layout.size))
    cut = np.maximum(lengths * runs / max(layout.seqlen, 1), 1.0)
    of_ring = float((cut * cut).sum()) / layout.size * (0.5 if shape.causal else 1.0)
    of_gather = min(len(lengths), runs) / layout.size
    pieces = (of_gather, of_ring)
    return dataclasses.replace(shape, pairs=max(pairs, 1.0), pieces=pieces, beside=beside)


def gather_groups(
    shape: Shape, seqlen: int, size: int, memory: int, speeds: Speeds
) -> tuple[tuple[int, ...], int]:
    """Cut the key heads into groups that gather brings at a time; with them its buffers' bytes.

    What is shown is the first exchange, and each group costs a collective and fills the device
    worse: one group where the sequence is short, else a small one and the rest, which comes beside
    its attention. Where memory does not allow that, eight equal ones.
    """
    heads = shape.heads_kv
    head_bytes = seqlen * shape.batch * shape.dims * shape.itemsize
    found = []
    for share in (1, 2, 4, MOST_GROUPS):
        first = -(-heads // share)
        rest = heads - first
        needed = (heads + max(rest, first)) * head_bytes  # the larger one in order of tokens, too
        groups = tuple(x for x in (first, rest) if x > 0)
        if needed <= memory:
            found.append((gather_seconds(shape, seqlen, size, speeds, groups), groups, needed))
    if found:
        return min(found)[1:]
    step = -(-heads // MOST_GROUPS)
    return tuple(min(step, heads - h) for h in range(0, heads, step)), 4 * step * head_bytes


def work_of(shape: Shape, seqlen: int, size: int, speeds: Speeds) -> float:
    """Return the seconds of a rank's attention on a device that it fills."""
    pairs = shape.pairs or seqlen * seqlen * (0.5 if shape.causal else 1.0)
    return 2 * shape.batch * shape.heads_q * shape.dims * pairs / size / speeds.flops


def beside_of(shape: Shape, size: int, speeds: Speeds) -> float:
    """Return the seconds of a rank's attention that waits for no keys."""
    return work_of(dataclasses.replace(shape, pairs=shape.beside), 0, size, speeds)


def gather_seconds(
    shape: Shape, seqlen: int, size: int, speeds: Speeds, groups: tuple[int, ...]
) -> float:
    """Return when the last group is done: each is brought while those before it are used.

    Keys are packed, moved and put in order. However few its heads are, a group takes as long as a
    tile of rows against all keys.
    """
    work = work_of(shape, seqlen, size, speeds) * (IN_GROUPS if len(groups) > 1 else 1.0)
    own = shape.key_bytes(seqlen / size)
    packed = 2 * own / COPY_BYTES * (1 if len(groups) == 1 else PACKED_BY_GROUPS)
    brought = packed + (size - 1) * own / speeds.comes
    ordered = 0.0 if shape.in_order else 2 * size * own / COPY_BYTES
    least = 2 * TILE_ROWS * shape.dims * seqlen / (speeds.flops / speeds.tiles)
    here = CALL_SECONDS + POST_SECONDS * (len(groups) - 1)
    done = here + beside_of(shape, size, speeds)
    for group in groups:
        share = group / sum(groups)
        here += brought * share + speeds.latency
        done = max(done, here) + ordered * share + max(work * share, least)
        done += shape.pieces[0] * PIECE_SECONDS
    return done


def heads_seconds(shape: Shape, seqlen: int, size: int, speeds: Speeds) -> float:
    """Return the time of four exchanges, of q, k, v and out, and of the attention between them.

    Rows are packed, joined and put in order, each a copy.
    """
    heads = shape.heads_q + max(shape.heads_kv, size)
    held = seqlen / size * shape.batch * heads * shape.dims * shape.itemsize
    moved = held * (size - 1) / size / speeds.bytes + 4 * speeds.latency
    copied = 6 * held / COPY_BYTES
    work = work_of(shape, seqlen, size, speeds)
    return CALL_SECONDS + 3 * POST_SECONDS + moved + copied + work


def ring_seconds(shape: Shape, seqlen: int, size: int, speeds: Speeds) -> float:
    """Return the time of all steps: each attends beside the next exchange, and merges."""
    rows = seqlen / size
    step = speeds.parts * work_of(shape, seqlen, size, speeds) / size
    hop = shape.key_bytes(rows) / speeds.comes + speeds.latency
    results = rows * shape.batch * shape.heads_q * shape.dims / 2
    merge = 0.75 * results * 12 / MERGE_BYTES
    rounded = results * (4 + shape.itemsize) / COPY_BYTES if shape.itemsize < 4 else 0.0
    packed = 2 * shape.key_bytes(rows) / COPY_BYTES
    host = CALL_SECONDS + POST_SECONDS * (size - 1) + shape.pieces[1] * PIECE_SECONDS
    first = max(step + beside_of(shape, size, speeds), hop)  # what is done beside the first hop
    steps = first + (size - 2) * max(step, hop) + step if size > 1 else first
    return host + packed + steps + (size - 1) * merge + rounded


def model(
    shape: Shape, seqlen: int, size: int, speeds: Speeds, groups: tuple[int, ...]
) -> dict[str, float]:
    """Return the seconds of each scheme, by counting FLOPs, bytes, copies and what the host does.

    The host's share counts in full, as in a call alone; of calls in a row most of it is hidden.
    """
    forth = {
        "gather": gather_seconds(shape, seqlen, size, speeds, groups),
        "heads": heads_seconds(shape, seqlen, size, speeds),
        "ring": ring_seconds(shape, seqlen, size, speeds),
    }
    if not shape.trains:
        return forth
    # Of steps in a row the host does not show.
    posts = {"gather": len(groups) - 1, "heads": 3, "ring": size - 1}
    host = {scheme: CALL_SECONDS + POST_SECONDS * count for scheme, count in posts.items()}
    back = backward_seconds(shape, seqlen, size, speeds)
    return {scheme: t - host[scheme] + back[scheme] for scheme, t in forth.items()}


def backward_seconds(shape: Shape, seqlen: int, size: int, speeds: Speeds) -> dict[str, float]:
    """Return the time of the gradients by each scheme.

    Those of the keys are float32 sums, made, added up and sent: in a ring of the keys of a rank, by
    gather of all. heads exchanges what it did on the way forth.
    """
    work = BACKWARD * work_of(shape, seqlen, size, speeds)
    keys = shape.key_bytes(seqlen / size)
    sums = keys / shape.itemsize * 4
    again = (size - 1) * keys / speeds.comes
    host = CALL_SECONDS + 3 * POST_SECONDS
    exchanges = heads_seconds(shape, seqlen, size, speeds) - work_of(shape, seqlen, size, speeds)
    sent = (size - 1) * sums / speeds.bytes
    in_gather, in_ring = (PIECE_SECONDS * count for count in shape.pieces)
    whole = size * sums
    in_gather *= groups_of_sums(shape.heads_kv, whole / shape.heads_kv)
    beside = BACKWARD * beside_of(shape, size, speeds)
    in_gather, in_ring = in_gather + beside, in_ring + beside
    return {
        "gather": IN_PARTS * work + again + sent + 16 * whole / COPY_BYTES + in_gather,
        "heads": work + exchanges - host,
        "ring": IN_PARTS * work
        + max(again - work, 0.0)
        + sent
        + 14 * (size - 1) * sums / COPY_BYTES
        + in_ring,
    }


def heads_refusal(shape: Shape, size: int) -> str | None:
    """Say why heads cannot be dealt to ranks."""
    if shape.heads_q % size != 0:
        return f"num_heads_q {shape.heads_q} is no multiple of {size} ranks"
    if shape.heads_kv % size != 0 and size % shape.heads_kv != 0:
        return f"num_heads_kv {shape.heads_kv} and {size} ranks do not divide one another"
    return None


def choose(
    function: str,
    wanted: str,
    shape: Shape,
    seqlen: int,
    size: int,
    limits: tuple[dict[str, str], int, Speeds | None],
    cut: tuple[Shape, int] | None = None,
) -> Choice:
    """Choose a scheme; limits: what cannot be by name, bytes of memory, speeds.

    `cut`: the documents that gather and ring bring keys of, and their tokens, where not of all.
    """
    refused, memory, speeds = limits
    refused = dict(refused)
    usual = "two H200s and their copy engines" if speeds is ENGINES else "two H100s"
    where = f" of {usual} (parallel.calibrate measures this group)"
    where = where if speeds in (None, ENGINES) else ""
    speeds = speeds or Speeds()
    part, tokens = (shape, seqlen) if cut is None else cut
    groups, needed = gather_groups(part, tokens, size, memory, speeds)
    seconds = model(part, tokens, size, speeds, groups)
    if cut is not None:
        seconds["heads"] = model(shape, seqlen, size, speeds, groups)["heads"]
    alone = work_of(shape, seqlen, 1, speeds) * (1 + BACKWARD if shape.trains else 1)
    why = heads_refusal(shape, size)
    if why is not None:
        refused.setdefault("heads", why)
    if needed > memory:
        refused.setdefault("gather", f"its buffers of {needed} bytes exceed memory_limit {memory}")
    if size == 1:
        return Choice("local", {}, {}, "the group has one rank", needed)
    possible = {name: t for name, t in seconds.items() if name not in refused}
    if wanted != "auto":
        if wanted in refused:
            raise (ValueError if "memory_limit" in refused[wanted] else NotImplementedError)(
                f"{function}: scheme must not be {wanted!r} here: {refused[wanted]}; "
                + (f"take one of {sorted(possible)}" if possible else "change that")
            )
        return Choice(wanted, possible, refused, "it was asked for", needed, "", groups, alone)
    if not possible:
        words = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise NotImplementedError(f"{function}: no scheme can run this call: {words}")
    best = min(possible, key=lambda name: (possible[name], name))
    reason = "the least time by the model" + where
    return Choice(best, possible, refused, reason, needed, "", groups, alone)


def calibrate(
    group: Any = None,
    *,
    num_heads: int = 8,
    head_dim: int = 128,
    seqlen: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    num_bytes: int | None = None,
) -> dict[str, float]:
    """Measure what scheme="auto" counts with: the speed of attention and of the group.

    All ranks call it; the slowest counts. The result is kept for the group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        None is the default group.
    num_heads, head_dim : int
        The attention that is timed: one sequence, causal.
    seqlen : int, optional
        Its tokens; None is 16384 on CUDA, which fill a device, else 1024.
    dtype : torch.dtype
        Of it.
    device : torch.device, optional
        None: the current CUDA device where the group moves CUDA memory, else the CPU.
    num_bytes : int, optional
        What each rank sends to the next; None is 64 MiB on CUDA, else 4 MiB.

    Returns
    -------
    dict
        "flops", "bytes" and "reads" (of keys, by copy engines where there are), each a second;
        "latency", seconds of a small exchange among others behind it; "tiles", the multiprocessors
        of a device, 1 on the CPU; "parts", not measured: how many times as long the attention of a
        ring takes beside what moves.
    """
    team = team_of("parallel.calibrate", group)
    is_cuda = team.has_nccl()
    where = torch.device(device or (torch.cuda.current_device() if is_cuda else "cpu"))
    seqlen = seqlen or (16384 if where.type == "cuda" else 1024)
    num_bytes = num_bytes or (1 << 26 if where.type == "cuda" else 1 << 22)
    x = torch.randn(1, seqlen, num_heads, head_dim, device=where).to(dtype)
    work = seconds_of(where, lambda: cuattn.attention(x, x, x, causal=True))
    num_bytes = -(-num_bytes // 128) * 128
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=where)
    box = message.new_empty(team.size * num_bytes)
    team.free_bytes(where)  # which finds out how keys move
    reads = team.reads_on(where)

    def move() -> None:
        gather_into(box, message, team.group)

    moved = seconds_of(where, move)
    read = seconds_of(where, lambda: read_rows(team, message)) if reads else moved
    message, box = message[:128], box[: team.size * 128]
    latency = seconds_of(where, move)
    own = torch.tensor([work, moved, read, latency], dtype=torch.float64, device="cpu")
    work, moved, read, latency = team.gather_on_host(own).amax(0).tolist()
    flops = 2 * num_heads * 2 * head_dim * seqlen * seqlen / 2 / work
    sent = max(team.size - 1, 1) * num_bytes
    rates = [sent / max(t - latency, t / 2) for t in (moved, read)]
    tiles = 1
    if where.type == "cuda":
        tiles = torch.cuda.get_device_properties(where).multi_processor_count
    parts = (ENGINES if reads else Speeds()).parts
    team.speeds = Speeds(flops, rates[0], latency, tiles, parts, rates[1])
    return team.speeds._asdict()


def read_rows(team: Any, message: torch.Tensor) -> None:
    """Read what all other ranks have, of as many bytes, by copy engines."""
    keys, values = message.view(-1, 1, 128).chunk(2, -1)
    peers = team.peers_with(message.numel())
    if peers is None:
        return
    sent = Message(peers, team.rank, [(keys, values)], len(keys))
    try:
        for rank in range(team.size):
            if rank != team.rank:
                into = sent.empty(0, len(keys))
                peers.wait(sent.fetch([(into, rank, 0, (0, len(keys)))]))
    finally:
        sent.close()


def seconds_of(device: torch.device, run: Any) -> float:
    """Return the median of five times after one that warms up: of eight runs in a row on CUDA."""
    times = []
    runs = 8 if device.type == "cuda" else 1
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(runs):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / runs)
    return sorted(times[1:])[2]


def layout_of(function: str, layout: Any, rows: int, sizes: tuple[int, int]) -> Layout:
    """Return the layout of a call; a word is for ranks of equal length."""
    inner, outer = sizes
    if isinstance(layout, Layout):
        if (layout.inner, layout.outer) != sizes:
            raise ValueError(
                f"{function}: layout must be of the group's ranks "
                f"{outer if inner == 1 else sizes}, got {layout}; make it for this group"
            )
        return layout
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(
            f"{function}: layout must be 'contiguous', 'zigzag' or a Layout, got {layout!r}"
        )
    parts = 2 if layout == "zigzag" else 1
    if rows * inner % parts != 0:
        raise ValueError(
            f"{function}: layout 'zigzag' by name needs an even number of tokens on each rank, got "
            f"{rows}; pass Layout('zigzag', seqlen, size), which takes any"
        )
    size = outer if inner == 1 else sizes
    return Layout(layout, rows * inner * outer, size, chunk=rows * inner // parts)
