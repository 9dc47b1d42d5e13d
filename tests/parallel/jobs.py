# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a pool are told to do: each compares its rows with those of one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pool import pairs_of
from shared_peers import SharedPeers, reading

import cuattn
import cuattn.parallel as parallel
from cuattn.parallel import Layout

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": (100, -1)},
    "window": {"window": (300, 50)},
    "causal dropout": {"causal": True, "dropout_p": 0.25, "dropout_seed": 7},
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass
class Whole:
    """A problem, whole on every rank: arrays and options, from a seed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    axis: int = 1  # of tokens
    solution: Any = None  # what `solved` has found

    def arrays(self):
        return self.q, self.k, self.v

    def one_process(self, **more):
        """(out, lse) of the whole."""
        if self.axis == 1:
            if more.get("batch_invariant"):
                more["num_splits"] = 1  # so few rows would be split on CUDA: docs/parallel.md
            return cuattn.attention(*self.arrays(), **self.options, **more)
        begins = self.options["cu_seqlens"]
        options = {n: x for n, x in self.options.items() if n != "cu_seqlens"}
        most = int(np.diff(begins).max(initial=0))
        where = torch.from_numpy(begins).to(self.q.device)
        return cuattn.attention_varlen(*self.arrays(), where, where, most, most, **options, **more)

    def solved(self, seed):
        """The same with leaves that one process has given gradients; with it dout and dlse."""
        if self.solution is None:
            learned = {n: x.clone() for n, x in self.options.items() if n in ("sinks", "bias")}
            leaves = [x.clone() for x in self.arrays()]
            for leaf in (*leaves, *learned.values()):
                leaf.requires_grad_()
            one = Whole(*leaves, self.options | learned, self.axis)
            g = generator(seed)
            found = one.one_process(return_lse=True, batch_invariant=True)
            upstream = [torch.randn(x.shape, generator=g).to(x.dtype) for x in found]
            torch.set_deterministic_debug_mode("warn")  # loads no compiler
            torch.autograd.backward(found, upstream)
            torch.set_deterministic_debug_mode("default")
            self.solution = one, upstream
        return self.solution

    def on_ranks(self, ranks, layout, scheme, arrays=None, **more):
        """(out, lse) of the rows of this rank."""
        options = dict(self.options)
        if "bias" in options and options["bias"].shape[2] > 1:
            options["bias"] = layout.shard(options["bias"], ranks.rank, 2)
        arrays = arrays or [layout.shard(x, ranks.rank, self.axis) for x in self.arrays()]
        run = parallel.attention if self.axis == 1 else parallel.attention_varlen
        named = {"group": ranks.group, "layout": layout, "scheme": scheme, "return_lse": True}
        return run(*arrays, **options, **{**named, **more})


def generator(seed):
    """Random numbers of the device that arrays are made on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def draw(seed, seqlen, heads=(4, 2), dims=(32, 32), dtype="float32", batch=2, packed=False):
    """Arrays of normals, [batch, seqlen, heads, dim] or packed."""
    g = generator(seed)
    lead = () if packed else (batch,)
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    return [torch.randn(*lead, seqlen, *x, generator=g).to(DTYPES[dtype]) for x in shapes]


def rows(whole, layout, rank):
    """The rows of a rank in what one process finds, (out, lse)."""
    out, lse = whole
    return layout.shard(out, rank, out.ndim - 3), layout.shard(lse, rank, lse.ndim - 1)


def largest(a, b):
    """The largest difference, NaN if any is; equal infinities do not differ."""
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


def judge(found, want, scheme, what, bits=True, bound=3e-6):
    """gather and heads: the bits of one process; ring: near them."""
    for got, mine, name in zip(found, want, ("out", "lse"), strict=True):
        assert got.shape == mine.shape, (what, name, got.shape, mine.shape)
        assert got.dtype == mine.dtype, (what, name, got.dtype)
        if bits and scheme != "ring":
            assert torch.equal(got, mine), (what, name, largest(got, mine))
        finite = mine[mine.isfinite()].abs()
        most = float(finite.max()) if finite.numel() else 0.0
        near = bound * (1 + most)
        if got.dtype in (torch.float16, torch.bfloat16):
            near = max(near, 2 * 2.0**-8 * most)
        assert largest(got, mine) <= near, (what, name, largest(got, mine), near)


def poisoned(job):
    """Run a job whose new memory torch fills with NaN."""

    @functools.wraps(job)
    def run(*arguments):
        torch.set_deterministic_debug_mode("warn")
        try:
            return job(*arguments)
        finally:
            torch.set_deterministic_debug_mode("default")

    return run


@poisoned
def masks_and_layouts(ranks, seed, dtype, heads, seqlen, batch):
    """Every mask by every layout and scheme; a ring repeats its bits."""
    for number, (mask, options) in enumerate(MASKS.items()):
        whole = Whole(*draw(seed + number, seqlen, heads, (32, 24), dtype, batch), options)
        want = whole.one_process(return_lse=True, batch_invariant=True)
        for kind, scheme in itertools.product(
            ("contiguous", "zigzag"), ("gather", "heads", "ring")
        ):
            layout = Layout(kind, seqlen, ranks.size)
            found = whole.on_ranks(ranks, layout, scheme, batch_invariant=True)
            what = (mask, kind, scheme)
            judge(found, rows(want, layout, ranks.rank), scheme, what)
            if scheme == "ring" and kind == "zigzag":
                again = whole.on_ranks(ranks, layout, scheme, batch_invariant=True)
                assert all(map(torch.equal, found, again)), what


def by_buffers(ranks, job, *arguments):
    """Run a job of this module whose keys move by buffers, where there are none by shared ones."""
    with reading(ranks) as peers:
        globals()[job](ranks, *arguments)
        assert peers is not None
        assert peers.messages > 0
        if isinstance(peers, SharedPeers):
            assert peers.meetings == 2 * peers.messages
            assert peers.copies == 0


def by_nccl(ranks, job, *arguments):
    """Run a job of this module without buffers."""
    with reading(ranks, False):
        globals()[job](ranks, *arguments)


def options_of(seed, heads, seqlen, names):
    """Options of the whole by name."""
    g = generator(seed)
    made = {
        "alibi": {"alibi_slopes": torch.rand(heads, generator=g), "causal": True},
        "alibi window": {"alibi_slopes": torch.rand(2, heads, generator=g), "window": (90, 0)},
        "sinks": {"sinks": torch.randn(heads, generator=g)},
        "bias": {"bias": torch.randn(1, heads, seqlen, seqlen, generator=g)},
        "bool bias": {"bias": torch.rand(2, 1, seqlen, seqlen, generator=g) > 0.3},
        "key bias": {"bias": torch.randn(2, heads, 1, seqlen, generator=g)},
        "softcap": {"softcap": 2.0, "scale": 0.4},
    }
    return {key: value for name in names for key, value in made[name].items()}


OPTIONS = (
    ("alibi", "sinks"),
    ("alibi window", "softcap"),
    ("bias", "sinks", "softcap"),
    ("bool bias",),
    ("key bias", "sinks"),
)


@poisoned
def every_option(ranks, seed):
    """Options together, by every scheme that has them; the others say what is missing."""
    for number, names in enumerate(OPTIONS):
        seqlen, heads = 600, 4
        options = {"window": (250, 60)} if names[0] == "key bias" else {}
        options |= options_of(seed + number, heads, seqlen, names)
        whole = Whole(*draw(seed + number, seqlen, (heads, 2)), options)
        want = whole.one_process(return_lse=True, batch_invariant=True)
        layout = Layout("zigzag", seqlen, ranks.size)
        for scheme in ("gather", "heads", "ring"):
            if scheme == "heads" and names[0] in ("bias", "bool bias"):
                continue  # refused by name: test_failures
            found = whole.on_ranks(ranks, layout, scheme, batch_invariant=True)
            judge(found, rows(want, layout, ranks.rank), scheme, (names, scheme), bound=1e-5)


@poisoned
def any_length(ranks, seed):
    """Fewer tokens than ranks, none, an odd number; ranks that have nothing take part."""
    for seqlen in (0, 1, ranks.size - 1, 129, 1000):
        whole = Whole(*draw(seed + seqlen, seqlen, (8, 1)), {"causal": True})
        want = whole.one_process(return_lse=True, batch_invariant=True)
        for kind, scheme in itertools.product(
            ("contiguous", "zigzag"), ("gather", "heads", "ring")
        ):
            layout = Layout(kind, seqlen, ranks.size)
            found = whole.on_ranks(ranks, layout, scheme, batch_invariant=True)
            bits = seqlen > 200  # a few rows are computed by other loops, whose share heads change
            judge(found, rows(want, layout, ranks.rank), scheme, (seqlen, kind, scheme), bits)
            again = layout.unshard(found[0], ranks.group)
            assert torch.equal(again[:, layout.positions(ranks.rank).tolist()], found[0])
    layout = Layout("zigzag", 512, ranks.size)
    for scheme in ("gather", "heads", "ring"):  # sequences, none of which is there
        q, k, v = (torch.zeros(0, layout.rows(ranks.rank), 8, 16).requires_grad_() for _ in "qkv")
        out = parallel.attention(
            q, k, v, layout=layout, scheme=scheme, group=ranks.group, causal=True
        )
        out.sum().backward()
        assert (out.shape, v.grad.shape) == (q.grad.shape, v.shape)


@poisoned
def documents(ranks, seed):
    """Documents that begin and end around the ends of chunks, many and one."""
    size, chunk = ranks.size, 128
    total = chunk * 2 * size
    around = [x + d for x in range(chunk, total, chunk) for d in (-1, 0, 1)]
    cuts = {
        "around": [0, *around, total, total],
        "one": [0, total - 3],
        "many": sorted([0, *np.random.default_rng(seed).integers(0, total, 200), total]),
    }
    for number, (name, begins) in enumerate(cuts.items()):
        begins = np.array(begins, np.int32)
        seqlen = int(begins[-1])
        masks = [MASKS["causal window"], {"causal": True}, {"window": (40, 20)}, {}]
        for options in masks[number:] if name != "many" else masks[1:2]:
            arrays = draw(seed + number, seqlen, (4, 2), packed=True)
            extra = {"sinks": torch.randn(4, generator=generator(seed))}
            if options.get("causal"):
                extra["alibi_slopes"] = torch.tensor([0.5, 0.1, 0.02, 0.0])
            whole = Whole(*arrays, options | extra | {"cu_seqlens": begins}, axis=0)
            want = whole.one_process(return_lse=True, batch_invariant=True)
            layouts = [Layout("zigzag", seqlen, size), Layout.balanced(begins, size, chunk=100)]
            for layout, scheme in itertools.product(layouts, ("gather", "heads", "ring")):
                found = whole.on_ranks(ranks, layout, scheme, batch_invariant=True)
                what = (name, options, layout.kind, scheme)
                is_tiled = layout.kind != "balanced" and name == "one"
                bits = scheme == "heads" or is_tiled
                judge(found, rows(want, layout, ranks.rank), scheme, what, bits, bound=1e-5)


def errors_of_a_ring(ranks, seed):
    """RMS errors against float64: a ring of float32 parts, of rounded ones, one process."""
    found = []
    seqlen = 1024
    q, k, v = draw(seed, seqlen, (4, 2), (64, 64), "bfloat16", batch=1)
    whole = Whole(q, k, v, {})
    wide = [x.double().movedim(2, 1).repeat_interleave(4 // x.shape[2], 1) for x in (q, k, v)]
    exact = torch.softmax(wide[0] @ wide[1].mT / 8, -1) @ wide[2]
    layout = Layout("zigzag", seqlen, ranks.size)
    exact = layout.shard(exact.movedim(1, 2), ranks.rank)
    one = layout.shard(whole.one_process(), ranks.rank)
    parts = [
        whole.on_ranks(ranks, layout, "ring", partial_dtype=x)[0] for x in ("float32", "input")
    ]
    for out in (*parts, one):
        found.append(float((out.double() - exact).pow(2).mean()))
    return found


def by_name(ranks, seed):
    """Layouts by name, scheme "auto", one rank, batch in the default group's order."""
    n = 96
    whole = Whole(*draw(seed, n * ranks.size, (4, 4)), {"causal": True})
    want = whole.one_process(return_lse=True)
    for kind in ("contiguous", "zigzag"):
        parts = n // 2 if kind == "zigzag" else n
        layout = Layout(kind, n * ranks.size, ranks.size, chunk=parts)
        arrays = [layout.shard(x, ranks.rank) for x in whole.arrays()]
        found = whole.on_ranks(ranks, kind, "auto", arrays)
        judge(found, rows(want, layout, ranks.rank), "ring", kind)
        choice = parallel.explain(*arrays, group=ranks.group, layout=kind, causal=True)
        assert choice.scheme in ("gather", "heads", "ring"), choice
        assert "by the model" in str(choice)
        tight = parallel.explain(*arrays, group=ranks.group, layout=kind, memory_limit=0)
        assert "memory_limit 0" in tight.refused["gather"], tight


def two_levels(ranks, seed, groups):
    """Heads over pairs of ranks, the sequence over two such pairs."""
    inner, outer = pairs_of(ranks, groups)
    for seqlen, heads, options in (
        (1024, (4, 2), {"causal": True, "sinks": torch.arange(4.0)}),
        (1000, (4, 1), {"window": (200, 30), "dropout_p": 0.25, "dropout_seed": seed}),
        (700, (4, 2), {"causal": True, **options_of(seed, 4, 700, ("key bias",))}),
        (3, (2, 2), {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1])}),
    ):
        whole = Whole(*draw(seed + seqlen, seqlen, heads), options)
        want = whole.one_process(return_lse=True, batch_invariant=True)
        for kind, scheme in itertools.product(("contiguous", "zigzag"), ("gather", "ring", "auto")):
            layout = Layout(kind, seqlen, (2, 2))
            mine = ranks._replace(group=(inner, outer))
            found = whole.on_ranks(mine, layout, scheme, batch_invariant=True)
            judge(found, rows(want, layout, ranks.rank), "ring", (seqlen, kind, scheme), bound=1e-5)
            whole_again = layout.unshard(found[0], (inner, outer))
            assert torch.equal(layout.shard(whole_again, ranks.rank), found[0])
            backward_of(mine, whole, layout, scheme, seed)


def backward_of(ranks, whole, layout, scheme, seed, bits=False):
    """The gradients of this rank are those of its rows in one process."""
    one, upstream = whole.solved(seed)
    names = [name for name in ("sinks", "bias") if name in whole.options]
    learned = {name: whole.options[name].clone().requires_grad_() for name in names}
    mine = [layout.shard(x, ranks.rank, whole.axis).requires_grad_() for x in whole.arrays()]
    part = dataclasses.replace(whole, options=whole.options | learned)
    found = part.on_ranks(ranks, layout, scheme, mine, deterministic=True, batch_invariant=True)
    torch.autograd.backward(found, list(rows(upstream, layout, ranks.rank)))
    for name, got, leaf in zip("qkv", mine, one.arrays(), strict=True):
        want = layout.shard(leaf.grad, ranks.rank, whole.axis)
        near = 2e-5 if want.dtype == torch.float32 else 3 * 2.0**-8
        near *= 1 + (float(leaf.grad.abs().max()) if leaf.numel() else 0)
        what = (name, scheme, layout, whole.options.keys(), largest(got.grad, want), near)
        assert got.grad.dtype == want.dtype
        assert largest(got.grad, want) <= near, what
        assert not bits or torch.equal(got.grad, want), what
    groups = ranks.group if isinstance(ranks.group, tuple) else (ranks.group,)
    for name, leaf in learned.items():
        want, got = one.options[name].grad, leaf.grad
        if name == "bias" and leaf.shape[2] > 1:  # of whose rows each rank has some
            want, got = (layout.shard(x, ranks.rank, 2) for x in (want, got))
        else:
            for group in groups:
                dist.all_reduce(got, group=group)
        bound = 1e-4 if name == "sinks" else 2e-5
        assert largest(got, want) <= bound * (1 + float(want.abs().max())), (name, scheme, layout)
    return [x.grad for x in mine]


def gradients(ranks, seed):
    """Every scheme, several masks and options; a second run has the same bits."""
    cases = (
        ("float32", (4, 2), {"causal": True, "sinks": torch.linspace(-2, 2, 4)}),
        ("float32", (4, 1), {"window": (200, 40), "softcap": 3.0}),
        ("bfloat16", (4, 4), {}),
        ("float32", (4, 4), {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0])}),
        ("float32", (4, 2), {"causal": True, "cu_seqlens": np.array([0, 5, 300, 301, 700, 999])}),
        ("float32", (4, 2), options_of(seed, 4, 600, ("bias",)) | {"causal": True}),
        ("float32", (4, 2), options_of(seed, 4, 600, ("key bias", "sinks"))),
    )
    for number, (dtype, heads, options) in enumerate(cases):
        packed = "cu_seqlens" in options
        if packed:
            options["cu_seqlens"] = options["cu_seqlens"].astype(np.int32)
        seqlen = 999 if packed else 600
        whole = Whole(
            *draw(seed + number, seqlen, heads, (32, 24), dtype, packed=packed),
            options, 0 if packed else 1,
        )  # fmt: skip
        kind = ("contiguous", "zigzag")[number % 2]
        layout = Layout(kind, seqlen, ranks.size)
        has_rows = "bias" in options and options["bias"].shape[2] > 1
        for scheme in ("gather", "ring") if has_rows else ("gather", "heads", "ring"):
            bits = scheme == "heads" and heads[1] % ranks.size == 0
            first = backward_of(ranks, whole, layout, scheme, seed, bits)
            if number == 0:
                again = backward_of(ranks, whole, layout, scheme, seed, bits)
                assert all(map(torch.equal, first, again)), scheme


def decode(ranks, seed):
    """Contexts dealt to ranks by blocks, written by local_slots, against one cache of all."""
    rng = np.random.default_rng(seed)
    g = generator(seed)
    size, block, heads, kv = ranks.size, 8, 4, 2
    lens = [0, 1, block, block * size + 3, 5 * block * size + block - 1, 61]
    columns = -(-max(lens) // block)
    for turn, dtype, reduce in (
        (None, "float32", "heads"),
        (16, "float32", "all"),
        (None, "bfloat16", "all"),
    ):
        q = torch.randn(len(lens), heads, 32, generator=g).to(DTYPES[dtype])
        shape = (len(lens), columns * block, kv, 32)
        k, v = (torch.randn(shape, generator=g).to(DTYPES[dtype]) for _ in range(2))
        sinks = torch.randn(heads, generator=g) if reduce == "all" else None
        tables = torch.arange(len(lens) * columns, dtype=torch.int32).view(len(lens), columns)
        context = torch.tensor(lens, dtype=torch.int32)
        caches = [x.reshape(-1, block, kv, 32) for x in (k, v)]
        options = {"sinks": sinks, "softcap": 5.0}
        want = cuattn.paged_attention(q, *caches, tables, context, **options)
        order = torch.from_numpy(rng.permutation(tables.numel()).astype(np.int32)).to(q.device)
        own_tables = order.view(tables.shape)
        own = [torch.full_like(x, torch.nan) for x in caches]
        for place in range(max(lens)):
            slots = parallel.local_slots(
                torch.full((len(lens),), place), own_tables,
                rank=ranks.rank, size=size, block_size=block, interleave=turn,
            )  # fmt: skip
            slots = torch.where(context > place, slots, -1)
            cuattn.reshape_and_cache(k[:, place], v[:, place], *own, slots)
        found = parallel.paged_attention(
            q,
            *own,
            own_tables,
            context,
            group=ranks.group,
            interleave=turn,
            reduce=reduce,
            **options,
        )
        if reduce == "heads":
            share = heads // size
            want = want[:, ranks.rank * share : (ranks.rank + 1) * share]
        assert found.shape == want.shape
        assert found.dtype == want.dtype
        near = 1e-5 if dtype == "float32" else 2.0**-6
        assert largest(found, want) <= near * (1 + float(want.abs().max())), (turn, dtype, reduce)
    return found.float().cpu().numpy().tobytes()


def graph(ranks, seed):
    """A captured call computes anew from what its arrays hold, many times the same bits."""
    layout = Layout("zigzag", 1024, ranks.size)
    draws = [Whole(*draw(seed + i, 1024, (4, 2), (64, 64), "bfloat16"), {}) for i in range(2)]
    mine = [[layout.shard(x, ranks.rank).contiguous() for x in w.arrays()] for w in draws]
    for scheme in ("gather", "heads", "ring"):
        call = functools.partial(
            draws[0].on_ranks, ranks, layout, scheme, mine[0], causal=True, return_lse=False
        )
        before = [x.clone() for x in mine[0]]
        torch.cuda.synchronize()
        first = call()  # connections are made outside of a capture
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = call()
        for x, y in zip(mine[0], mine[1], strict=True):
            x.copy_(y)
        want = call()
        for _ in range(50):
            found.fill_(torch.nan)
            captured.replay()
            assert torch.equal(found, want), scheme
        assert not torch.equal(first, want)
        for x, y in zip(mine[0], before, strict=True):
            x.copy_(y)


def calibration(ranks):
    """All ranks measure the same speeds, and count with them."""
    found = parallel.calibrate(ranks.group, num_heads=2, head_dim=32, seqlen=64, num_bytes=1 << 12)
    q, k, v = draw(1, 64, (4, 4))
    choice = parallel.explain(q, k, v, group=ranks.group)
    return found, choice.seconds, choice.scheme


def compiled(ranks, seed):
    """One op in a whole graph, with the bits and gradients of the eager call."""
    even = Layout("zigzag", 256, ranks.size)
    uneven = Layout.balanced([0, 90, 110, 230, 256], ranks.size, chunk=32)
    for layout, heads, scheme, options in (
        (even, (4, 2), "gather", {"causal": True}),
        (uneven, (4, 1), "heads", {"sinks": torch.linspace(-1, 1, 4)}),
        (uneven, (4, 2), "ring", {"causal": True, "sinks": torch.linspace(-1, 1, 4)}),
    ):
        whole = Whole(*draw(seed, 256, heads), options)

        def step(q, k, v, scheme=scheme, whole=whole, layout=layout):
            out, lse = whole.on_ranks(ranks, layout, scheme, [q * 2, k, v])
            return out * 3, lse

        found = []
        for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            mine = [layout.shard(x, ranks.rank).requires_grad_() for x in whole.arrays()]
            out, lse = run(*mine)
            (out.pow(2).sum() + lse.sum()).backward()
            found.append([out, lse, *(x.grad for x in mine)])
        for eager, graph in zip(*found, strict=True):
            assert torch.equal(eager, graph), (scheme, largest(eager, graph))
