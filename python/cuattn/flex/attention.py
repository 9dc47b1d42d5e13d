# SPDX-License-Identifier: Apache-2.0
"""flex_attention: attention with masks and scores that are written as Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .. import _core
from .._arrays import Array, ArrayT
from .._call import is_torch, torch_face
from .._kv_shapes import BLOCK_SIZE_AXIS
from .._options import DENSE, PASSES, options_of
from .._other_names import way_out
from .._tracing import refuse_captured_tangents, refuse_jit_trace
from .block_mask import BlockMask, Shape
from .device import Gives, Placed, free_options, is_cuda, of_tiles, place_of, runs_in_sm90
from .evaluate import on_host
from .form import Form, best_form
from .memo import of_torch, remember, shapes_of
from .options import join_options
from .plan import Found, Problem, plan
from .rows import narrowed
from .trace import Traced, trace
from .tracers import is_jax_tracer, runs_in_xla

T = TypeVar("T")
NAME = "flex_attention"
RAGGED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
PAGED: tuple[str, ...] = ("block_tables", "kv_layout")
OPTIONS: frozenset[str]
OPTIONS = frozenset(o.name for o in options_of(*DENSE) if o.kind not in PASSES) | {*RAGGED, *PAGED}


def flex_attention(
    q: ArrayT,
    k: Array,
    v: Array,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | Any = None,
    **options: Any,
) -> Any:
    """Attend with a mask and a score that are written as Python functions.

    ``out = softmax(mask(bias + alibi + score_mod(softcap(scale * q @ k.T)))) @ v``. The functions
    run once, on symbols: what they compute becomes an expression, and no array of seqlen_q x
    seqlen_kv is made. A mask that is causal or a window runs by these options; one that leaves each
    row one interval of keys by row ranges; the others by a program and lists of blocks.

    Parameters
    ----------
    q, k, v : array
        As `attention` takes them: [batch, seqlen, heads, dim], or packed [total, heads,
        dim] with cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k among the options; with
        block_tables too, and seqused_k, k and v are caches in blocks, as `attention_varlen` takes
        them: decoding and appending, whose keys are gathered into rows first.
    score_mod : function, optional
        ``score_mod(score, b, h, q_idx, kv_idx)`` returns the score in natural units: operators,
        `cuattn.flex` functions (where, minimum, maximum, abs, exp, log, tanh, sqrt), numpy's and
        torch's of the same names, and arrays of 0 to 2 axes indexed by these. -inf hides a key.
    mask_mod : function, optional
        ``mask_mod(b, h, q_idx, kv_idx)`` returns whether query q_idx of sequence b and query head h
        sees key kv_idx, both counted from the start of their own: ``kv_idx <= q_idx`` is causal
        from the top left, while `causal=True` counts from the bottom right. Both functions may name
        ``q_len`` and ``kv_len``, the lengths in use.
    block_mask : BlockMask, optional
        Of `create_block_mask`; its mask is applied too. One of torch is taken as well.
    **options
        Those of `attention` without `rope` and `residual`: rotate q and k before. Masks add up: a
        key is seen if all of them leave it.

    Returns
    -------
    array, or (array, lse)
        As `attention` returns.

    Raises
    ------
    TypeError
        If a function does what cannot be written down as an expression, or an option is unknown.
    ValueError
        If a shape, dtype, device or option breaks its rule, or block_mask is for other lengths.
    NotImplementedError
        If no kernel of the device serves the call.
    CompileError
        On CUDA, if a function is to be compiled and NVRTC is not there (`cuattn.flex.nvrtc`).
    """
    refuse_unknown(NAME, options, OPTIONS)
    refuse_jit_trace(NAME)
    if options.get("dropout_p") and is_torch(q):
        options = torch_face().ops.with_dropout_state(q, options)
    arguments = {"q": q, "k": k, "v": v, **options}
    score = None if score_mod is None else trace(score_mod, is_score=True)
    mask = None if mask_mod is None else trace(mask_mod)
    captured = [] if score is None else score.arrays
    refuse_captured_tangents(NAME, captured)
    if wants_gradient(q, (k, v, *options.values(), *captured)):
        from ..torch import flex as torch_flex

        given = mask if block_mask is None else mask_mod  # which is joined with the block mask's
        functions = {"score_mod": score, "mask_mod": given, "block_mask": block_mask}
        return torch_flex.attend(arguments, functions, score)
    of_mask = [] if mask is None else mask.arrays
    if any(map(is_jax_tracer, (k, v, *options.values(), *of_mask, *captured))) or runs_in_xla(q):
        from ..jax.flex import attend

        return attend(arguments, score_mod, mask_mod, block_mask)
    problem = problem_of(q, k, options)
    if problem is None:  # the compiled module says what is wrong with it
        return run(arguments, {})
    given = mask if block_mask is None else mask_mod  # which is joined with the block mask's
    found = find_for(arguments, problem, score, given, block_mask)
    if "kernel" in found:  # which its functor is compiled for
        arguments["backend"] = found.pop("kernel")
    return run(arguments, found)


def wants_gradient(q: Any, others: tuple[Any, ...]) -> bool:
    """Whether q is a tensor of torch, and autograd is to differentiate by one of all."""
    torch: Any = sys.modules.get("torch")
    if not isinstance(q, getattr(torch, "Tensor", ())) or not torch.is_grad_enabled():
        return False
    return any(getattr(x, "requires_grad", False) for x in (q, *others))


def refuse_unknown(name: str, options: dict[str, Any], known: frozenset[str]) -> None:
    """Refuse names that are no arguments."""
    for option in options:
        if option not in known:
            raise TypeError(f"{name}: there is no argument {option}; {meant(name, option)}")


def meant(name: str, option: str) -> str:
    """Say what there is instead of an argument that there is none of."""
    ways = (way_out(op, option) for op in ("attention", "attention_varlen"))
    known = (way for way in ways if not way.startswith(("help(", f"did you mean {option}?")))
    return next(known, f"help(cuattn.{name}) lists what there is")


class Functions(NamedTuple):
    """The traced functions of a call, and its block mask."""

    score: Traced | None
    mask: Traced | None
    block_mask: BlockMask | None


def find_for(
    arguments: dict[str, Any],
    problem: Problem,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    gives: Gives | None = None,
) -> dict[str, Any]:
    """Return the arrays that stand for functions; a mask that is a window joins the arguments.

    What a call of the same functions, shapes and numbers found out is taken again. `gives` is what
    a backward call asks for.
    """
    where = place_of(arguments)
    if where is None:
        found = find(problem, score_mod, mask_mod, block_mask)
        window, arrays = found.window, dict(found.arrays)
    else:
        functions = traced(problem, score_mod, mask_mod, block_mask)

        def planned(form: Form) -> Found:  # once for a forward call and its gradients
            score, mask, block_mask = functions._replace(score=form.score)
            tiles = of_tiles(block_mask, form.arguments)
            size = None if tiles is None else tiles.block_size
            return kept_with(
                Functions(score, mask, block_mask),
                ("plan", *shapes_of(problem), size, form.takes),
                lambda: plan(problem, score, mask, tiles, form.takes),
            )

        def place() -> Placed:
            takes = frozenset() if gives and gives.slots else free_options(arguments)
            form = Form(functions.score, takes, arguments)
            if gives is None:
                _, found = best_form(form, planned, runs_in_sm90)
            else:  # sm80 has every option
                found = planned(form)
            return Placed(arguments, found, gives)

        placed = kept_with(functions, (*shapes_of(problem), where, gives), place)
        window, arrays = placed.window, placed.given(arguments)
        join_options(arguments, placed.options)
        if placed.kernel == "sm90":  # others are chosen anyway
            arrays["kernel"] = placed.kernel
    if window is not None:
        arguments["window"] = narrowed(arguments.get("window", (-1, -1)), window)
    return arrays


def find(
    problem: Problem, score_mod: Any, mask_mod: Any, block_mask: Any, takes: Any = frozenset()
) -> Found:
    """Return what the functions and the block mask of a call become."""
    functions = traced(problem, score_mod, mask_mod, block_mask)
    key = (*shapes_of(problem), takes)
    return kept_with(functions, key, lambda: plan(problem, *functions, takes))


def kept_with(functions: Functions, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return what `make` returns, or returned in a call of the same functions, key and numbers."""
    given = [f for f in functions[:2] if f is not None]
    return remember(given, (functions.block_mask,), key, make) if given else make()


def traced(problem: Problem, score_mod: Any, mask_mod: Any, block_mask: Any) -> Functions:
    """Trace the functions of a call, and hold its block mask against its shapes."""
    score = None if score_mod is None else trace(score_mod, is_score=True)
    if block_mask is not None and hasattr(block_mask, "kv_indices"):
        block_mask = of_torch(block_mask)
    mask = None if mask_mod is None else trace(mask_mod)  # its messages name it
    if block_mask is not None:
        require_fit(block_mask, problem)
        block_mask = block_mask if mask_mod is None else block_mask.within(mask_mod)
        mask = trace(block_mask.mask_mod)
    return Functions(score, mask, block_mask)


def require_fit(block_mask: Any, problem: Problem) -> None:
    """Refuse a block mask that was made for another call."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"{NAME}: block_mask must be a BlockMask, got {type(block_mask).__name__}; "
            "create_block_mask makes one"
        )
    free = block_mask.free()
    for name, got, want, index in zip(
        block_mask.shape._fields, block_mask.shape, problem.shape, ("b", "h", "", ""), strict=True
    ):
        if got != want and not (index and got == 1 and index not in free):
            raise ValueError(
                f"{NAME}: block_mask must be made for {name} {want}, got one for {got}; make it "
                "anew, or pass mask_mod, which has no lengths"
            )
    if problem.starts_q is not None:
        raise ValueError(
            f"{NAME}: block_mask must not be given with cu_seqlens_q, as its blocks count from the "
            "start of a sequence; pass mask_mod"
        )


def run(arguments: dict[str, Any], found: dict[str, Any]) -> Any:
    """Call the compiled module; JAX arrays go by cuattn.jax."""
    result = _core.flex_attention(arguments, found)
    if result is NotImplemented:
        from ..jax.flex import run_on_host

        return run_on_host(NAME, _core.flex_attention, arguments, found)
    return result


def problem_of(q: Any, k: Any, options: dict[str, Any]) -> Problem | None:
    """Return the shapes of a call; None where they do not fit together."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k)]
    given = [options.get(name) for name in (*RAGGED[:2], "seqused_q", "seqused_k")]
    if any(not hasattr(x, "shape") for x in given if x is not None):
        return None  # lists, which the call refuses by name
    if any(
        is_cuda(x) or runs_in_xla(x) for x in given if x is not None
    ):  # lengths that the host does not know
        return unknown_problem(shapes, given, options)
    if options.get("cu_seqlens_q") is not None:
        return ragged_problem(shapes, options)
    if any(len(shape) != 4 for shape in shapes):
        return None
    batch, num_heads, seqlen_q, seqlen_kv = dense_shape(shapes, options)
    used = [
        lengths_of(options.get(name), batch, most)
        for name, most in (("seqused_q", seqlen_q), ("seqused_k", seqlen_kv))
    ]
    if any(x is None for x in used):
        return None
    lengths = list(zip(*used, strict=True))
    return Problem(batch, num_heads, seqlen_q, seqlen_kv, None, lengths, batch * seqlen_q)


def unknown_problem(
    shapes: list[tuple[int, ...]], given: list[Any], options: dict[str, Any]
) -> Problem | None:
    """Return the shapes of a call whose lengths the host does not know: what they are at most."""
    extents, is_ends = next((tuple(x.shape), i < 2) for i, x in enumerate(given) if x is not None)
    if len(extents) != 1:
        return None
    batch = extents[0] - is_ends
    if options.get("cu_seqlens_q") is None:
        if any(len(shape) != 4 for shape in shapes):
            return None
        return Problem(batch, *dense_shape(shapes, options)[1:], None, [], 0)
    if len(shapes[0]) != 3 or not shapes[1]:
        return None
    is_paged = options.get("block_tables") is not None
    keys = capacity_of(shapes[1], options) if is_paged else shapes[1][0]
    return None if keys is None else Problem(batch, shapes[0][1], shapes[0][0], keys, None, [], 0)


def capacity_of(cache: tuple[int, ...], options: dict[str, Any]) -> int | None:
    """Return how many tokens the blocks of a sequence hold; None where shapes are wrong."""
    axis = BLOCK_SIZE_AXIS.get(options.get("kv_layout", "nhd"))
    tables = tuple(getattr(options["block_tables"], "shape", ()))
    if axis is None or len(tables) != 2 or len(cache) not in (4, 5):
        return None
    return int(tables[1] * cache[axis])


def dense_shape(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Shape:
    """Return the shape of a call from those of q and k, which have 4 axes."""
    sequence, heads = (2, 1) if options.get("layout", "bshd") == "bhsd" else (1, 2)
    return Shape(shapes[0][0], shapes[0][heads], shapes[0][sequence], shapes[1][sequence])


def lengths_of(used: Any, batch: int, most: int) -> list[int] | None:
    """Return the lengths in use; None where they break their rule, which is said elsewhere."""
    if used is None:
        return [most] * batch
    used = on_host(used)
    is_right = used.shape == (batch,) and np.all((used >= 0) & (used <= most))
    return [int(n) for n in used] if is_right else None


def ragged_problem(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Problem | None:
    """Return the shapes of packed sequences; None where they do not fit together."""
    if options.get("block_tables") is not None:
        return paged_problem(shapes, options)
    names = ("cu_seqlens_q", "cu_seqlens_k")
    if any(options.get(name) is None for name in names) or any(len(s) != 3 for s in shapes):
        return None
    begins = [on_host(options[name]) for name in names]
    for x, shape in zip(begins, shapes, strict=True):
        is_right = x.ndim == 1 and len(x) >= 1 and x[0] == 0 and x[-1] <= shape[0]
        if not is_right or np.any(x[1:] < x[:-1]) or len(x) != len(begins[0]):
            return None
    batch = len(begins[0]) - 1
    used = []
    for x, name in zip(begins, ("seqused_q", "seqused_k"), strict=True):
        stored = np.diff(x)
        given = options.get(name)
        given = stored if given is None else on_host(given)
        if given.shape != stored.shape or np.any((given < 0) | (given > stored)):
            return None
        used.append([int(n) for n in given])
    most_q, most_kv = (int(np.diff(x).max(initial=0)) for x in begins)
    lengths = list(zip(*used, strict=True))
    return Problem(batch, shapes[0][1], most_q, most_kv, begins[0], lengths, shapes[0][0])


def paged_problem(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Problem | None:
    """Return the shapes of packed queries over caches in blocks; None where they do not fit."""
    capacity = capacity_of(shapes[1], options)
    begins = on_host(options["cu_seqlens_q"])
    is_right = begins.ndim == 1 and len(begins) >= 1 and begins[0] == 0
    if capacity is None or len(shapes[0]) != 3 or not is_right:
        return None
    if np.any(begins[1:] < begins[:-1]) or begins[-1] > shapes[0][0]:
        return None
    used = options.get("seqused_k")
    starts = options.get("cu_seqlens_k")
    if used is None and starts is None:
        return None
    kv_lens = on_host(used) if used is not None else np.diff(on_host(starts))
    q_lens = np.diff(begins)
    given = options.get("seqused_q")
    q_lens = q_lens if given is None else on_host(given)
    if q_lens.shape != kv_lens.shape or np.any((q_lens < 0) | (q_lens > np.diff(begins))):
        return None
    if np.any((kv_lens < 0) | (kv_lens > capacity)):
        return None
    most = int(np.diff(begins).max(initial=0))
    lengths = [(int(n), int(m)) for n, m in zip(q_lens, kv_lens, strict=True)]
    return Problem(len(lengths), shapes[0][1], most, capacity, begins, lengths, shapes[0][0])
