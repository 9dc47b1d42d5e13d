# SPDX-License-Identifier: Apache-2.0
"""What a mask and a score function become for one call: options, row ranges, programs, lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .block_mask import BlockMask, Shape, classify, lists_of
from .emit import Function
from .evaluate import Host, bounds, evaluate
from .expression import Expr, read
from .options import score_options
from .program import program
from .rows import Split, conjuncts, document_parts, limits, runs, split, window_within
from .trace import Traced

BLOCK = (128, 128)


class Problem(NamedTuple):
    """The shapes of a call."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_kv: int
    starts_q: np.ndarray[Any, Any] | None  # of a ragged call: where each sequence's rows begin
    lengths: list[tuple[int, int]]  # queries and keys in use of each sequence
    total_q: int

    @property
    def common(self) -> tuple[int, int] | None:
        """Return the lengths where all sequences have the same, else None."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @property
    def shape(self) -> Shape:
        """Return what block masks are made for."""
        return Shape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv)


class Found(NamedTuple):
    """A mask and score function, as the compiled module takes them, and in words."""

    window: tuple[int, int] | None  # an option: kernels that know nothing of flex serve it
    arrays: dict[str, Any]
    words: str
    functions: dict[str, Function]  # what the programs among the arrays were written of
    options: dict[str, Any]  # that stand for a score function


class Rows:
    """Begin and end of each row's keys, for as many sequences and heads as they differ."""

    def __init__(self, problem: Problem, free: frozenset[str]):
        self.problem = problem
        is_same = problem.common is not None and problem.starts_q is None
        self.batch = 1 if is_same and "b" not in free else problem.batch
        self.heads = problem.num_heads if "h" in free else 1
        ragged = problem.starts_q is not None
        rows = problem.total_q if ragged else problem.seqlen_q
        shape = (self.heads, rows) if ragged else (self.batch, self.heads, rows)
        self.begin, self.end = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def fill(self, keys_of: Callable[[dict[str, Any]], Any]) -> bool:
        """Ask `keys_of(indices)` for each sequence and head; False as soon as it has no answer."""
        for b in range(self.batch):
            q_len, kv_len = self.problem.lengths[b] if self.problem.lengths else (0, 0)
            for h in range(self.heads):
                q = np.arange(q_len)
                values = {"q": q, "b": b, "h": h, "q_len": q_len, "kv_len": kv_len}
                keys = keys_of(values)
                if keys is None:
                    return False
                for side, x in zip((self.begin, self.end), keys, strict=True):
                    self.place(side, b, h, q_len)[...] = np.clip(x, 0, kv_len)
        return True

    def place(self, side: Any, b: int, h: int, q_len: int) -> Any:
        """Return the rows in use of a sequence and head."""
        if self.problem.starts_q is None:
            return side[b, h, :q_len]
        first = self.problem.starts_q[b]
        return side[h, first : first + q_len]


def keys_function(host: Host, keys: Split, documents: list[tuple[Expr, Expr]]) -> Any:
    """Return what gives the (begin, end) of rows; None where an array is not sorted into runs."""
    known: dict[Any, Any] = {}  # the runs of an array, for the indices that they depend on

    def runs_of(load: Expr, values: dict[str, Any]) -> Any:
        kv_len = values["kv_len"]
        asked = ("b", "h", "q_len")
        key = (id(load), kv_len, *(values[name] for name in asked if name in load.free))
        if key not in known:
            k = np.arange(kv_len)
            found = evaluate(host, load, {**values, "k": k})
            known[key] = runs(np.broadcast_to(found, k.shape))
        return known[key]

    def keys_of(values: dict[str, Any]) -> Any:
        begin = 0 if keys.begin is None else evaluate(host, keys.begin, values)
        end = values["kv_len"] if keys.end is None else evaluate(host, keys.end, values)
        for x, load in documents:
            found = runs_of(load, values)
            if found is None:
                return None
            ids, first, last = found
            wanted = np.broadcast_to(evaluate(host, x, values), values["q"].shape)
            at = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
            is_there = ids[at] == wanted if len(ids) else np.zeros(wanted.shape, bool)
            begin = np.maximum(begin, np.where(is_there, first[at] if len(ids) else 0, 0))
            end = np.minimum(end, np.where(is_there, last[at] if len(ids) else 0, 0))
        return begin, end

    return keys_of


def find_rows(host: Host, problem: Problem, keys: Split) -> tuple[Rows | None, Expr | None]:
    """Return the row ranges of a mask, if it has any, and what they leave to be asked."""
    documents, left = document_parts(keys.rest)
    for parts, rest in ((documents, left), ([], keys.rest)) if documents else (([], keys.rest),):
        sides = [
            *(e for e in (keys.begin, keys.end) if e is not None),
            *(e for p in parts for e in p),
        ]
        if not sides:
            continue
        rows = Rows(problem, frozenset().union(*(e.free for e in sides)))
        if rows.fill(keys_function(host, keys, parts)):
            return rows, rest
    return None, keys.rest


def find_limits(
    host: Host, problem: Problem, e: Expr, keys: Split, is_known: bool
) -> tuple[tuple[int, int] | None, Rows | None, Expr | None]:
    """Return the window and the row ranges that a mask lies in, and what they leave to be asked.

    One of them: ranges are made where a window does not hold all limits, and the host knows the
    lengths.
    """
    window, rest = window_within(host, e, problem.common)
    if not is_known:
        return window, None, rest
    if window is not None and rest is not None:
        rows, left = find_rows(host, problem, split(rest))
        if rows is None:
            return window, None, left
    return None, *find_rows(host, problem, keys)


def parted(host: Host, e: Expr) -> tuple[Expr, Expr | None]:
    """Return the part of a mask that the host knows, and what reads arrays that it does not."""
    parts: dict[bool, Expr] = {}
    for part in conjuncts(e):
        is_unknown = host.reads_unknown(part)
        parts[is_unknown] = parts[is_unknown] & part if is_unknown in parts else part
    return (e, None) if True not in parts else (parts.get(False, read(True)), parts[True])


def plan(
    problem: Problem,
    score: Traced | None,
    mask: Traced | None,
    block_mask: BlockMask | None,
    takes: frozenset[str] = frozenset(),
) -> Found:
    """Return what one call hands to the compiled module.

    A score function may become the options that `takes` names.
    """
    found: dict[str, Any] = {}
    window, words = None, []
    captured: list[Any] = []
    functions: dict[str, Function] = {}
    if mask is not None:
        of_mask = Host(mask)
        known, unknown = parted(of_mask, mask.expr)
        keys = split(known)
        window = limits(of_mask, keys, problem.common)
        is_window = window is not None and unknown is None
    options = options_for(score, problem, window is not None and window[1] == 0, takes)
    if options:
        words.append(f"options, as the scores are {' and '.join(options)}")
    elif score is not None and score.expr.op != "index":
        host = Host(score)
        require_int32(host, score.expr, problem)
        found["score_program"] = program(score.expr, score.scalars)
        functions["score"] = Function(score.expr, score.scalars, 0, score.arrays)
        captured += host.arrays
        words.append(f"a program for each score, {score}")
    if mask is not None and not is_window:
        host = of_mask
        is_known = bool(problem.lengths) or not problem.batch
        if not is_known and block_mask is not None:
            raise NotImplementedError(
                "flex_attention: block_mask must not be given beside lengths on the device, with "
                f"which its blocks cannot be compared, got one of {mask}; pass mask_mod"
            )
        rows, rest = None, None
        if window is None:
            window, rows, rest = find_limits(host, problem, known, keys, is_known)
        rest = unknown if rest is None else rest if unknown is None else rest & unknown
        is_limited = window not in (None, (-1, -1))
        words += [f"options, as the mask lies in the window {window}"] if is_limited else []
        if rows is not None:
            found["row_begin"], found["row_end"] = rows.begin, rows.end
            words.append("row ranges, as each row's keys are an interval")
        if rest is not None:
            require_int32(host, rest, problem)
            found["mask_program"] = program(rest, mask.scalars, len(captured))
            functions["mask"] = Function(rest, mask.scalars, len(captured), mask.arrays)
            captured += host.arrays
            words.append(f"a program for what is neither window nor interval of keys, {rest}")
            words += [] if unknown is None else ["which reads arrays that JAX traces"]
            words.append(add_lists(found, problem, mask, block_mask))
    elif window is not None and window != (-1, -1):
        words.append(f"options, as the mask is the window {window}")
    if captured:
        found["arrays"] = captured
    text = "; ".join(words) or "nothing beside attention"
    return Found(window, found, text, functions, options)


def options_for(
    score: Traced | None, problem: Problem, causal: bool, takes: frozenset[str]
) -> dict[str, Any]:
    """Return the options that stand for a score function, if all of them may be taken."""
    if score is None or problem.common is None or not takes:
        return {}
    host, shape = Host(score), (problem.batch, problem.num_heads)
    if host.reads_unknown(score.expr):
        return {}
    found = score_options(host, score.expr, problem.common, causal, shape)
    return found if found and takes.issuperset(found) else {}


def require_int32(host: Host, expr: Expr, problem: Problem) -> None:
    """Refuse whole numbers that leave int32, which kernels compute them in."""
    most = {"b": problem.batch, "h": problem.num_heads}
    most |= {"q": problem.seqlen_q, "k": problem.seqlen_kv}
    boxes: dict[str, Any] = {
        name: (np.int64(0), np.int64(max(n - 1, 0))) for name, n in most.items()
    }
    for name, n in (("q_len", problem.seqlen_q), ("kv_len", problem.seqlen_kv)):
        boxes[name] = np.int64(0 if problem.common is None else n), np.int64(n)
    boxes["score"] = -np.inf, np.inf
    bounds(host, expr, boxes, reads_floats=False)


def add_lists(
    found: dict[str, Any], problem: Problem, mask: Traced, block_mask: BlockMask | None
) -> str:
    """Add which blocks are to be computed, and in which the mask is to be asked."""
    is_dense = problem.starts_q is None and problem.common == problem.shape[2:]
    counts_lengths = not mask.expr.free.isdisjoint(("q_len", "kv_len"))
    if block_mask is not None and (is_dense or not counts_lengths):
        states, block = block_mask.states, block_mask.block_size
        lists = block_mask.by_query
    elif is_dense and problem.seqlen_q and problem.seqlen_kv:
        states, block = classify(mask, problem.shape, BLOCK), BLOCK
        lists = lists_of(states)
    elif not problem.lengths:
        return "neither row ranges nor lists of blocks, as lengths lie on the device"
    else:
        return "no lists of blocks, as sequences have lengths of their own"
    found["block_starts"], found["block_entries"] = lists
    found["query_block"], found["key_block"] = block
    hidden, asked = (int(np.count_nonzero(states == s)) for s in (0, 1))
    return f"lists of {states.size} blocks: {hidden} are skipped, in {asked} the program is run"
