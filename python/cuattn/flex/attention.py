# SPDX-License-Identifier: Apache-2.0
"""flex_attention: attention with masks and scores that are written as Python functions."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from .._arrays import Array, ArrayT, operations
from .._options import DENSE, options_of
from .._other_names import way_out
from .block_mask import BlockMask
from .emit import Kernel, numbers, source
from .evaluate import on_host
from .functors import functor
from .plan import Found, Problem, narrowed, plan
from .trace import dtype_name, is_jax_tracer, trace

NAME = "flex_attention"
PROGRAMS = ("score_program", "mask_program")  # which the CPU runs
RAGGED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPTIONS: frozenset[str] = frozenset(option.name for option in options_of(*DENSE)) | {*RAGGED}


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
        As `attention` takes them: on the CPU; [batch, seqlen, heads, dim], or packed [total, heads,
        dim] with cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k among the options.
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
        Those of `attention`. Masks add up: a key is seen if all of them leave it.

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
    arguments = {"q": q, "k": k, "v": v, **options}
    refuse_unknown(NAME, options, OPTIONS)
    captured = [] if score_mod is None else trace(score_mod, is_score=True).arrays
    if wants_gradient(q, (k, v, *options.values(), *captured)):
        from ..torch.flex import attend

        functions = {"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask}
        return attend(arguments, functions, captured)
    if any(map(is_jax_tracer, (q, k, v, *options.values(), *captured_by(mask_mod), *captured))):
        from ..jax.flex import attend_traced

        return attend_traced(arguments, score_mod, mask_mod, block_mask)
    problem = problem_of(q, k, options)
    if problem is None:  # the compiled module says what is wrong with it
        return _core.flex_attention(arguments, {})
    return run(arguments, find_for(arguments, problem, score_mod, mask_mod, block_mask))


def captured_by(mask_mod: Any) -> list[Any]:
    """Return the arrays that a mask function reads."""
    return [] if mask_mod is None else trace(mask_mod).arrays


def wants_gradient(q: Any, others: tuple[Any, ...]) -> bool:
    """Whether q is a tensor of torch, and autograd is to differentiate by one of all."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor) or not torch.is_grad_enabled():
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


def find_for(
    arguments: dict[str, Any], problem: Problem, score_mod: Any, mask_mod: Any, block_mask: Any
) -> dict[str, Any]:
    """Return the arrays that stand for functions; a mask that is a window joins the arguments."""
    if block_mask is not None and is_cuda(arguments["q"]):
        block_mask = of_tiles(block_mask, arguments)
    found = find(problem, score_mod, mask_mod, block_mask)
    if found.window is not None:
        arguments["window"] = narrowed(arguments.get("window", (-1, -1)), found.window)
    if is_cuda(arguments["q"]):
        return on_cuda(arguments, found)
    return found.arrays


def find(problem: Problem, score_mod: Any, mask_mod: Any, block_mask: Any) -> Found:
    """Return what the functions and the block mask of a call become."""
    score = None if score_mod is None else trace(score_mod, is_score=True)
    if block_mask is not None and hasattr(block_mask, "kv_indices"):
        block_mask = BlockMask.from_torch(block_mask)
    mask = None if mask_mod is None else trace(mask_mod)  # its messages name it
    if block_mask is not None:
        require_fit(block_mask, problem)
        block_mask = block_mask if mask_mod is None else block_mask.within(mask_mod)
        mask = trace(block_mask.mask_mod)
    return plan(problem, score, mask, block_mask)


def require_fit(block_mask: Any, problem: Problem) -> None:
    """Refuse a block mask that was made for another call."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"{NAME}: block_mask must be a BlockMask, got {type(block_mask).__name__}; "
            "create_block_mask makes one"
        )
    free = trace(block_mask.mask_mod).expr.free
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


def on_cuda(arguments: dict[str, Any], found: Found) -> dict[str, Any]:
    """Return what was found as arrays of q's library and device, and functions as a functor."""
    if not found.arrays:
        return {}
    q = arguments["q"]
    why, way_out = "row ranges, lists and captured arrays must be on the device", "numpy arrays"
    with operations(NAME, q, arguments.get("stream"), why, way_out) as at:
        placed = {"device": q.device} if at.namespace.__name__ == "torch" else {}

        def copy(x: Any) -> Any:
            return at.namespace.asarray(x, **placed) if isinstance(x, np.ndarray) else x

        ours = {n: copy(x) for n, x in found.arrays.items() if n not in (*PROGRAMS, "arrays")}
        originals = [x for f in found.functions.values() for x in f.arrays]
        pairs = zip(originals, found.arrays.get("arrays", ()), strict=True)
        ours["arrays"] = [detached(x) if lies_with(q, x) else copy(host) for x, host in pairs]
    if found.functions or "block_starts" in ours:
        ours["functor"] = functor_of(arguments, found)
        ours["numbers"] = numbers(found.functions)
    return ours


def lies_with(q: Any, array: Any) -> bool:
    """Whether a kernel can read a captured array where it is."""
    is_same = type(array) is type(q) and array.__dlpack_device__() == q.__dlpack_device__()
    return is_same and dtype_name(array) in ("bool", "int32", "float32")


def detached(x: Any) -> Any:
    """Return an array that autograd does not look on."""
    return x.detach() if hasattr(x, "detach") else x


def functor_of(arguments: dict[str, Any], found: Found) -> int:
    """Return the number of the machine code that computes scores and masks in a kernel."""
    arch, kernel, _ = kernel_of(arguments)
    has_rows, has_lists = ("row_begin" in found.arrays, "block_starts" in found.arrays)
    plain = "score" not in found.functions and is_plain(arguments)
    return functor(source(kernel, found.functions, has_rows, has_lists, plain), arch)


def is_plain(arguments: dict[str, Any]) -> bool:
    """Whether the options leave a score its scaled dot product."""
    names = ("softcap", "alibi_slopes", "bias", "dropout_p", "dropout_state")
    scale = arguments.get("scale")
    is_positive = scale is None or (isinstance(scale, (int, float)) and 0 < scale < 1e38)
    return is_positive and not any(is_asked(arguments.get(name)) for name in names)


def is_asked(option: Any) -> bool:
    """Whether an option is given, and no number that switches it off."""
    return option is not None and not (isinstance(option, (int, float)) and option == 0)


def of_tiles(block_mask: Any, arguments: dict[str, Any]) -> Any:
    """Return a block mask in blocks that the kernel of the call can skip."""
    if hasattr(block_mask, "kv_indices"):
        block_mask = BlockMask.from_torch(block_mask)
    if not isinstance(block_mask, BlockMask) or not block_mask.states.size:
        return block_mask
    return block_mask.of_tiles(kernel_of(arguments)[2])


def kernel_of(arguments: dict[str, Any]) -> tuple[str, Kernel, tuple[int, int]]:
    """Return what takes the functors of a call."""
    q, v = arguments["q"], arguments["v"]
    head_dims = (int(q.shape[-1]), int(v.shape[-1]))
    return kernel_for(int(q.__dlpack_device__()[1]), dtype_name(q), *head_dims)


@functools.lru_cache(maxsize=256)
def kernel_for(
    device: int, dtype: str, head_dim: int, head_dim_v: int
) -> tuple[str, Kernel, tuple[int, int]]:
    """Return the architecture of a device, the kernel that takes functors of a dtype, its tile."""
    from .._explain import explain

    gpus = json.loads(_core.info_json())["cuda"]["devices"]
    arch = "sm_" + gpus[device]["compute_capability"].replace(".", "")
    name = "simt" if dtype == "float32" else "sm80"
    shapes = [(1, 8, 1, d) for d in (head_dim, head_dim, head_dim_v)]
    plan = explain("attention", *shapes, device=device, dtype=dtype, softcap=1.0, backend=name)
    tile = (plan.tile_m, plan.tile_n)
    return arch, Kernel(name, dtype, plan.head_dim, plan.head_dim_v), tile


def run(arguments: dict[str, Any], found: dict[str, Any]) -> Any:
    """Call the compiled module; JAX arrays go by cuattn.jax."""
    result = _core.flex_attention(arguments, found)
    if result is NotImplemented:
        from ..jax.flex import run_on_host

        return run_on_host(NAME, _core.flex_attention, arguments, found)
    return result


def is_cuda(q: Any) -> bool:
    """Whether an array lies on a CUDA device, of a library other than JAX."""
    if type(q).__module__.startswith(("jax", "numpy")):
        return False
    return int(getattr(q, "__dlpack_device__", lambda: (1, 0))()[0]) == 2


def problem_of(q: Any, k: Any, options: dict[str, Any]) -> Problem | None:
    """Return the shapes of a call; None where they do not fit together."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k)]
    given = [options.get(name) for name in (*RAGGED[:2], "seqused_q", "seqused_k")]
    if any(is_cuda(x) for x in given if x is not None):  # lengths that the host does not know
        batch = next(len(x) - (i < 2) for i, x in enumerate(given) if x is not None)
        return Problem(batch, 0, 0, 0, None, [], 0)
    if options.get("cu_seqlens_q") is not None:
        return ragged_problem(shapes, options)
    if any(len(shape) != 4 for shape in shapes):
        return None
    sequence, heads = (2, 1) if options.get("layout", "bshd") == "bhsd" else (1, 2)
    batch, seqlen_q, seqlen_kv = shapes[0][0], shapes[0][sequence], shapes[1][sequence]
    used = [
        lengths_of(options.get(name), batch, most)
        for name, most in (("seqused_q", seqlen_q), ("seqused_k", seqlen_kv))
    ]
    if any(x is None for x in used):
        return None
    lengths = list(zip(*used, strict=True))
    return Problem(batch, shapes[0][heads], seqlen_q, seqlen_kv, None, lengths, batch * seqlen_q)


def lengths_of(used: Any, batch: int, most: int) -> list[int] | None:
    """Return the lengths in use; None where they break their rule, which is said elsewhere."""
    if used is None:
        return [most] * batch
    used = on_host(used)
    is_right = used.shape == (batch,) and np.all((used >= 0) & (used <= most))
    return [int(n) for n in used] if is_right else None


def ragged_problem(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Problem | None:
    """Return the shapes of packed sequences; None where they do not fit together."""
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
