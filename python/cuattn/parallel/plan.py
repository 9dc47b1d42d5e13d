# SPDX-License-Identifier: Apache-2.0
"""A call as a rank sees it: read, checked, its scheme chosen, and what the others must say alike.

Next: check.py, cost.py.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cuattn

from .attend import Dropout, Problem
from .check import Said, no_answer
from .cost import ENGINES, Choice, Shape, choose, heads_refusal, layout_of, shape_of_documents
from .deal import places_of
from .documents import Split, split_of
from .layout import Layout, check_offsets
from .pairs import Window, window_of
from .team import NoAnswer, Team

NARROW = ("naive", "cublas", "tiled")  # kernels whose results are of q's dtype alone
WANTED = ("auto", "gather", "heads", "ring")
TAKEN = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Plan:
    """A checked call: who takes part and how."""

    inner: Team | None  # the ranks that heads are dealt to
    outer: Team | None  # the ranks that the sequence is cut over, as the scheme sees it
    layout: Layout  # of the outer team; of the inner where there is no outer
    inner_layout: Layout | None
    problem: Problem
    choice: Choice
    scheme: str
    said: Said | None  # what every rank must say alike
    split: Split | None = None  # of packed documents, where some lie whole on a rank


def limit_memory(function: str, given: dict[str, Any], inner: Team | None, outer: Team) -> None:
    """Fill in the memory limit, which all ranks of a team find together at its first call."""
    q = given["q"]
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    try:
        free = outer.free_bytes(device, inner)
    except NoAnswer as error:
        raise no_answer(function, "all told their free memory", error) from error
    if given["memory_limit"] is None:
        given["memory_limit"] = free // 4


KEPT = 128  # plans of a team
ARRAYS = ("alibi_slopes", "sinks", "bias", "seqused", "dropout_state")
DROPOUT = ("dropout_p", "dropout_seed", "dropout_offset", "dropout_state")


def key_of(function: str, given: dict[str, Any], cu_seqlens: Any) -> Any:
    """Say what a plan depends on; None where it is not kept: arrays may hold other values."""
    arrays = [given[name] for name in ("q", "k", "v")]
    if any(given[name] is not None for name in ARRAYS) or not all(
        isinstance(x, Tensor) for x in arrays
    ):
        return None
    apart = ("q", "k", "v", "group", "check", "cu_seqlens")
    words = tuple(x for name, x in given.items() if name not in apart)
    ends: Any = None if cu_seqlens is None else np.asarray(cu_seqlens)
    ends = None if ends is None else (ends.dtype.str, ends.tobytes())
    seen = tuple(
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_cuda and x.data_ptr() % 16)
        for x in arrays
    )
    current = torch.cuda.current_device() if arrays[0].is_cuda else None
    key = (function, words, ends, seen, current, torch.is_grad_enabled())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def kept_plan(
    function: str, given: dict[str, Any], cu_seqlens: Any, inner: Team | None, outer: Team
) -> Plan:
    """Return the plan of a call, that of an earlier one alike where there was one."""
    key = key_of(function, given, cu_seqlens)
    if key is None:
        return plan_of(function, given, cu_seqlens, inner, outer)
    key = (key, inner, outer.speeds)
    if key not in outer.plans:
        if len(outer.plans) >= KEPT:
            outer.plans.clear()
        outer.plans[key] = plan_of(function, given, cu_seqlens, inner, outer)
    plan: Plan = outer.plans[key]
    return plan


def plan_of(
    function: str, given: dict[str, Any], cu_seqlens: Any, inner: Team | None, outer: Team
) -> Plan:
    """Check a call as this rank sees it."""
    axis = 1 if cu_seqlens is None else 0
    q, k, v, kernel = read_arrays(function, given, axis)
    sizes = (1 if inner is None else inner.size, outer.size)
    layout = layout_of(function, given["layout"], q.shape[axis], sizes)
    rank = outer.rank * sizes[0] + (0 if inner is None else inner.rank)
    if layout.rows(rank) != q.shape[axis]:
        raise ValueError(
            f"{function}: q must hold the {layout.rows(rank)} tokens that rank {rank} has in "
            f"{layout}, got {q.shape[axis]}; take them with layout.shard"
        )
    begins = None if cu_seqlens is None else check_offsets(function, cu_seqlens, layout.seqlen)
    window = window_of(given["causal"], given["window"])
    bias = read_bias(function, given["bias"], q, layout)
    shape = Shape(
        1 if axis == 0 else q.shape[0],
        *(q.shape[-2], k.shape[-2], q.shape[-1] + v.shape[-1], q.element_size()),
        window[1] == 0,
        layout.inner == 1 and layout.kind == "contiguous",
        trains=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    )
    runs, ends, split, cut = layout.outer_layout(), begins, None, None
    if begins is not None:
        shape = shape_of_documents(shape, begins, runs)
        split = split_of(runs, begins.tobytes(), outer.rank)
    if split is not None:
        runs, ends = split.layout, split.cut_begins
        cut = shape_of_documents(shape, ends, runs, split.whole_lengths), runs.seqlen
    refused = refusals(given, kernel, q, window, bias)
    ambiguous = bias is not None and any(layout.rows(rank) == 1 for rank in range(layout.size))
    if ambiguous and inner is None and given["scheme"] == "auto":  # all ranks choose alike
        refused.setdefault("heads", "a rank with one row cannot tell whether a bias is of rows")
    if given["dropout_p"] and q.is_cuda and not begins_at_16(runs, ends):
        refused.setdefault(
            "ring",
            "dropout on CUDA draws for 16 keys at a time, and the keys of a rank begin elsewhere "
            "in their sequence or document",
        )
    usual = ENGINES if outer.reads_on(q.device) else None
    limits = refused, given["memory_limit"], outer.speeds or usual
    if inner is None:
        choice = choose(function, given["scheme"], shape, layout.seqlen, outer.size, limits, cut)
    else:
        choice = choose_two_levels(function, given["scheme"], shape, layout, limits, cut)
    if q.is_cuda:
        choice = dataclasses.replace(choice, transport=outer.transport)
    by_heads = inner is not None or choice.scheme == "heads"
    if by_heads and "heads" in refused:
        raise NotImplementedError(
            f"{function}: group must be one group here: {refused['heads']}; pass it with scheme="
            "'gather' or 'ring'"
        )
    problem = Problem(
        window, begins, given["scale"], given["softcap"], given["alibi_slopes"], bias,
        given["batch_invariant"], given["deterministic"], given["partial_dtype"] == "float32",
        choice.groups, used=read_used(function, given["seqused"], q, layout.seqlen),
        dropout=dropout_of(given, q.shape[-2]),
    )  # fmt: skip
    scheme = choice.outer or choice.scheme
    plan = Plan(inner, outer, layout, None, problem, choice, scheme, None, split)
    if choice.scheme == "heads":
        whole = Layout("contiguous", layout.seqlen, 1)
        plan = dataclasses.replace(
            plan, inner=outer, outer=None, layout=whole, inner_layout=layout, scheme="local",
            split=None,
        )  # fmt: skip
    elif inner is not None:
        plan.layout = layout.outer_layout()
        rows = plan.layout.rows(outer.rank)
        part = -(-rows // inner.size)
        plan.inner_layout = Layout("contiguous", rows, inner.size, chunk=part)
    plan.said = said_of(function, given, plan, layout, shape, begins)
    return plan


def said_of(
    function: str,
    given: dict[str, Any],
    plan: Plan,
    layout: Layout,
    shape: Shape,
    begins: Any,
) -> Said:
    """List what every rank must say alike."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    team = plan.outer or plan.inner
    assert team is not None
    words = (
        "causal", "window", "scale", "softcap", "batch_invariant", "return_lse",
        "deterministic", "partial_dtype", "memory_limit", *DROPOUT[:3],
    )  # fmt: skip
    values = {
        "batch": shape.batch,
        "num_heads_q": q.shape[-2],
        "num_heads_kv": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "dtype": q.dtype,
        "device": q.device.type,
        "memory of others": team.reads_on(q.device),
        "layout": (layout, hash(layout)),
        "scheme": (given["scheme"], plan.choice.scheme, plan.choice.outer),
        **{name: given[name] for name in words},
        **{name: shape_words(given[name]) for name in ARRAYS if name != "bias"},
        "bias": shape_of_bias(plan.problem.bias),
        "requires_grad": [
            x is not None and x.requires_grad and torch.is_grad_enabled()
            for x in (q, k, v, *(given[name] for name in ("sinks", "bias", "alibi_slopes")))
        ],
        "cu_seqlens": None if begins is None else begins.tolist(),
        "cuattn": cuattn.__version__,
    }
    return Said(function, values, plan.choice.seconds.get(plan.choice.scheme, 0.0))


def shape_words(x: Tensor | None) -> str:
    """Say what of a small array is the same on all ranks."""
    if x is None:
        return "none"
    words = f"{x.dtype} {list(x.shape)}"
    if not x.is_cuda:  # where values are read without a wait
        words += f" {x.detach().tolist()}"
    return words


def shape_of_bias(x: Tensor | None) -> str:
    """Say what of a bias is the same on all ranks: its rows are 1 or those of each."""
    return "none" if x is None else f"{x.dtype} {[*x.shape[:2], -1, x.shape[3]]}"


def choose_two_levels(
    function: str, wanted: str, shape: Shape, layout: Layout, limits: Any, cut: Any
) -> Choice:
    """Choose the scheme of the outer group; heads are dealt to the inner one."""
    size = layout.inner
    why = heads_refusal(shape, size)
    if why is not None:
        raise NotImplementedError(
            f"{function}: group must be one group here: {why} of the inner one; pass the ranks as "
            "one group"
        )
    heads = shape.heads_q // size, max(shape.heads_kv // size, 1)
    part = dataclasses.replace(shape, heads_q=heads[0], heads_kv=heads[1])
    if cut is not None:
        cut = dataclasses.replace(cut[0], heads_q=heads[0], heads_kv=heads[1]), cut[1]
    refused = {name: why for name, why in limits[0].items() if name != "heads"}
    refused["heads"] = "the inner group has the heads"
    limits = (refused, *limits[1:])
    outer = choose(function, wanted, part, layout.seqlen, layout.outer, limits, cut)
    seconds = {"two levels": outer.seconds.get(outer.scheme, 0.0)}
    reason = f"two groups were given; {outer.scheme} over the outer one: {outer.reason}"
    return dataclasses.replace(
        outer, scheme="two levels", seconds=seconds, reason=reason, outer=outer.scheme
    )


def refusals(
    given: dict[str, Any], kernel: str, q: Tensor, window: Window, bias: Tensor | None
) -> dict[str, str]:
    """List the schemes that cannot run a call, and why."""
    found = {}
    slopes = given["alibi_slopes"]
    if slopes is not None and window[1] != 0:
        found["gather"] = found["ring"] = "alibi_slopes without a causal mask go by heads alone"
    elif slopes is not None and bias is not None:
        found["ring"] = "it has alibi_slopes or bias, not both"
    if bias is not None and bias.shape[2] != 1:  # 0: of a rank without rows
        found["heads"] = "a bias of rows is not exchanged"
    if given["seqused"] is not None and window not in ((-1, -1), (-1, 0)):
        found.setdefault("ring", "seqused and a window go by gather and heads")
        if window[1] != 0:
            found["gather"] = "seqused and a window that looks right go by heads alone"
    is_narrow = q.is_cuda and q.dtype != torch.float32
    if is_narrow and given["partial_dtype"] == "float32" and kernel in NARROW:
        found.setdefault(
            "ring",
            f"kernel {kernel!r}, which it takes, gives no float32 parts of 16-bit inputs; "
            "partial_dtype='input' merges rounded ones",
        )
    return found


def read_arrays(
    function: str, given: dict[str, Any], axis: int
) -> tuple[Tensor, Tensor, Tensor, str]:
    """Check q, k, v and the options that one process checks, too; with them the kernel."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{function}: {name} must be a torch tensor, got {type(x).__name__}; "
                "cuattn.parallel moves tensors by torch.distributed"
            )
    if q.dtype not in TAKEN:
        raise ValueError(
            f"{function}: q must be float32, float16 or bfloat16, got {q.dtype}; cast it"
        )
    for name in ARRAYS:
        x = given[name]
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(
                f"{function}: {name} must be a torch tensor, got {type(x).__name__}; pass one on "
                f"{q.device}"
            )
        if x is not None and x.device != q.device:
            raise ValueError(
                f"{function}: {name} must lie on the device of q, {q.device}, got {x.device}; "
                "move it there"
            )
    if given["scheme"] not in WANTED:
        raise ValueError(
            f"{function}: scheme must be one of {', '.join(map(repr, WANTED))}, got "
            f"{given['scheme']!r}"
        )
    if given["partial_dtype"] not in ("float32", "input"):
        raise ValueError(
            f"{function}: partial_dtype must be 'float32' or 'input', got "
            f"{given['partial_dtype']!r}"
        )
    limit = given["memory_limit"]
    if not isinstance(limit, numbers.Integral) or limit < 0:
        raise ValueError(
            f"{function}: memory_limit must be None or a number of bytes >= 0, got {limit!r}; "
            "leave it out for a quarter of what is free"
        )
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{function}: q must lie on the current device, cuda:{torch.cuda.current_device()}, "
            f"got {q.device}; call torch.cuda.set_device first, or its exchanges wait forever"
        )
    return q, k, v, check_one(function, given, q, k, v, axis)


def check_one(
    function: str, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, axis: int
) -> str:
    """Let the library check these rows as a call of their own, and say which kernel it takes."""
    if axis == 0:
        if any(x.ndim != 3 for x in (q, k, v)):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(
                f"{function}: q, k and v must have axes [tokens, heads, dim], got {shapes}"
            )
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    words = ("causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "batch_invariant")
    names = (*words, *DROPOUT)
    options = {n: x.detach() if isinstance(x := given[n], Tensor) else x for n in names}
    if axis == 1 or options["alibi_slopes"] is None or options["alibi_slopes"].ndim == 1:
        plan = cuattn.explain("attention", *(x.detach() for x in (q, k, v)), **options)
    else:
        raise ValueError(
            f"{function}: alibi_slopes must have shape (num_heads_q,), got "
            f"{tuple(options['alibi_slopes'].shape)}; documents share them"
        )
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"{function}: k must hold the tokens of q, {q.shape[1]}, got {k.shape[1]}; each rank "
            "has queries, keys and values of the same tokens"
        )
    if q.shape[2] == 0 or k.shape[2] == 0:
        raise ValueError(
            f"{function}: q and k must have a head, got {q.shape[2]} and {k.shape[2]}; a rank of "
            "none leaves the call out on all"
        )
    return plan.kernel


def dropout_of(given: dict[str, Any], heads: int) -> Dropout | None:
    """Return what is dropped."""
    if not given["dropout_p"]:
        return None
    return Dropout({name: given[name] for name in DROPOUT if given[name] is not None}, heads)


def begins_at_16(layout: Layout, begins: np.ndarray | None) -> bool:
    """Whether all runs of keys begin at multiples of 16 of their sequence or document."""
    spans = (span for rank in range(layout.size) for span in layout.spans(rank))
    firsts = np.array([first for first, _ in spans], np.int64)
    places = firsts if begins is None else places_of(begins)[firsts]
    return not (places % 16).any()


def read_used(function: str, used: Tensor | None, q: Tensor, seqlen: int) -> Tensor | None:
    """Check the lengths in use of a padded batch; their values where that needs no wait."""
    if used is None:
        return None
    if used.dtype != torch.int32 or used.shape != q.shape[:1] or used.device != q.device:
        raise ValueError(
            f"{function}: seqused must be int32 ({q.shape[0]},) on {q.device}, the tokens of each "
            f"sequence in use, got {used.dtype} {tuple(used.shape)} on {used.device}"
        )
    if not used.is_cuda and not bool(((used >= 0) & (used <= seqlen)).all()):
        raise ValueError(
            f"{function}: seqused must lie within [0, {seqlen}], the whole sequence, got "
            f"{used.tolist()}; it counts the tokens of each sequence in use"
        )
    return used


def read_bias(function: str, bias: Tensor | None, q: Tensor, layout: Layout) -> Tensor | None:
    """Check a bias: the rows of this rank, all keys."""
    if bias is None:
        return None
    full = (q.shape[0], q.shape[2], q.shape[1], layout.seqlen)
    view = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim < 4 else bias
    fits = view.ndim == 4 and all(n in (1, m) for n, m in zip(view.shape, full, strict=True))
    if not fits or view.dtype not in (torch.float32, torch.bool, q.dtype):
        raise ValueError(
            f"{function}: bias must be float32, bool or of q's dtype and broadcast to [batch, "
            f"num_heads_q, tokens of this rank, tokens of the sequence] = {full}, got {bias.dtype} "
            f"{tuple(bias.shape)}; give the rows of this rank"
        )
    return view
