# SPDX-License-Identifier: Apache-2.0
"""flex_attention_backward: the gradients of flex_attention, and of the arrays its score reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from .._arrays import Array, ArrayT
from .._gradients import GRADIENTS, check_need
from .attention import OPTIONS, PAGED, find_for, problem_of, refuse_unknown
from .block_mask import BlockMask
from .device import Gives, is_cuda, on_its_stream
from .evaluate import on_host
from .expression import FLOAT, SCORE
from .program import gradient_program
from .trace import KINDS, Traced, dtype_name, trace
from .tracers import original, runs_in_xla

NAME = "flex_attention_backward"
FORWARD_ALONE = frozenset(("num_splits", "return_lse", "out", "lse_out", *PAGED))
TAKES = (OPTIONS - FORWARD_ALONE) | {"dlse", "deterministic", *GRADIENTS}


def flex_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | Any = None,
    need: Sequence[str] = ("dq", "dk", "dv"),
    arrays: Sequence[Array] = (),
    **options: Any,
) -> Any:
    """Differentiate a loss through `flex_attention`, given its gradient with respect to the output.

    The derivative of score_mod is worked out on its expression. Bits are the same each time,
    whatever the number of threads, those of captured arrays included: their sums are float64, and
    added up in an order that the shapes alone decide. On CUDA gradients of captured arrays are
    summed in float32 by atomics, in any order: theirs may differ in the last bits.

    Parameters
    ----------
    dout : array, [batch, seqlen_q, num_heads_q, head_dim_v], packed [total_q, num_heads_q, dim]
        Gradient of the loss with respect to out, of its shape and dtype.
    q, k, v, score_mod, mask_mod, block_mask
        As in the forward call.
    out, lse : array
        What it gave with return_lse=True.
    need : sequence of {"dq", "dk", "dv", "dbias", "dsinks", "dslopes"}
        The gradients to compute, in the order in which they are returned.
    arrays : sequence of arrays
        Arrays of floats that score_mod captures, whose gradients are wanted, too.
    **options
        Those of the forward call, `dlse` (float32, the gradient of lse), and results to be written
        in place (dq, dk, dv, dbias, dsinks, dslopes), as `attention_backward` takes them.

    Returns
    -------
    named tuple
        What `need` names; with `arrays` also `darrays`, a tuple of a gradient for each, of its
        shape, dtype and library.

    Raises
    ------
    TypeError
        If a function does what cannot be written down as an expression, or an option is unknown.
    ValueError
        If a shape, dtype, device or option breaks its rule, or one of `arrays` is not captured by
        score_mod or holds no floats.
    NotImplementedError
        On CUDA, if deterministic=True or batch_invariant=True meets `arrays`, or functions that
        are to be compiled meet a head_dim above 256.
    CompileError
        On CUDA, if a function is to be compiled and NVRTC is not there (`cuattn.flex.nvrtc`).

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> bias = np.zeros(4, np.float32)
    >>> mod = lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]
    >>> out, lse = cuattn.flex_attention(q, k, v, score_mod=mod, return_lse=True)
    >>> g = cuattn.flex_attention_backward(out, q, k, v, out, lse, score_mod=mod, arrays=[bias])
    >>> g.darrays[0].round(2).tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    refuse_unknown(NAME, options, TAKES)
    need = check_need(NAME, need, options)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "need": need}
    arguments |= options
    if not isinstance(arrays, tuple | list):
        raise TypeError(
            f"{NAME}: arrays must be a tuple or list of arrays that score_mod captures, got "
            f"{type(arrays).__name__}; () is none"
        )
    if runs_in_xla(q):
        from ..jax.flex import go_back

        found = go_back(arguments, score_mod, mask_mod, block_mask, arrays)
        if found is not None:
            return named(need, found, len(arrays))
    score = None if score_mod is None else trace(score_mod, is_score=True)
    slots = slots_of(score, arrays, options, is_cuda(q))
    captured = [] if score is None else score.arrays
    wanted: dict[int, Any]
    wanted = {slot: np.zeros(tuple(captured[slot].shape), np.float32) for slot in slots}
    # A score that is left as it is loads its arrays in vain.
    live = set() if score is None or score.expr is SCORE else set(slots)
    problem, found = problem_of(q, k, options), {}
    if problem is not None:
        gives = Gives(frozenset(live), "dbias" in need)
        found = find_for(arguments, problem, score_mod, mask_mod, block_mask, gives)
    if score is not None and "score_program" in found:
        found["score_gradient"] = gradient_program(score, set(slots))
    if "functor" in found:
        wanted |= {slot: room_for(arguments, wanted[slot].shape) for slot in live}
    if score is not None and ("score_program" in found or "functor" in found):
        count = len(found.get("arrays", ()))
        given = wanted if "score_program" in found else {slot: wanted[slot] for slot in live}
        found["array_gradients"] = [given.get(slot) for slot in range(count)]
    results = run(arguments, found)
    darrays = [like(array, wanted[slot]) for array, slot in zip(arrays, slots, strict=True)]
    return named(need, [*results, *darrays], len(arrays))


def named(need: tuple[str, ...], found: list[Any], num_arrays: int) -> Any:
    """Return gradients by name, those of arrays, which stand last, as a tuple of their own."""
    from ..backward import result_type

    if not num_arrays:
        return result_type(need)(*found)
    results, darrays = found[: len(need)], tuple(found[len(need) :])
    return result_type((*need, "darrays"))(*results, darrays)


def run(arguments: dict[str, Any], found: dict[str, Any]) -> Any:
    """Call the compiled module; JAX arrays go by cuattn.jax."""
    results = _core.flex_attention_backward(arguments, found)
    if results is NotImplemented:
        from ..jax.flex import run_on_host

        return run_on_host(NAME, _core.flex_attention_backward, arguments, found)
    return results


def slots_of(
    score: Traced | None, arrays: Sequence[Any], options: dict[str, Any], on_cuda: bool
) -> list[int]:
    """Return the places of arrays among those that a score function captures; refuse an order."""
    slots = [slot_of(score, array) for array in arrays]
    for name in ("deterministic", "batch_invariant"):
        if arrays and on_cuda and options.get(name):
            raise NotImplementedError(
                f"{NAME}: {name} must not be True on CUDA where arrays are given, whose gradients "
                f"are summed in any order, got one of shape {tuple(arrays[0].shape)}; leave {name} "
                "out, or move the arrays to the CPU"
            )
    return slots


def slot_of(score: Traced | None, array: Any) -> int:
    """Return the place of an array among those that a score function captures."""
    captured = [] if score is None else score.arrays
    for slot, other in enumerate(captured):
        if other is array or original(other) is array:
            if KINDS[dtype_name(array)] != FLOAT:
                raise ValueError(
                    f"{NAME}: arrays must hold floats, got {dtype_name(array)} of shape "
                    f"{tuple(array.shape)}, which has no gradient; leave it out"
                )
            return slot
    raise ValueError(
        f"{NAME}: arrays must be captured by score_mod, got one of shape "
        f"{tuple(getattr(array, 'shape', ()))} among {len(captured)} that it captures; pass the "
        "same object that the function reads"
    )


def room_for(arguments: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """Return memory on the device of q, which the call clears."""
    with on_its_stream(arguments) as at:
        if at.namespace.__name__ == "torch":
            empty, dtype = at.namespace.empty, at.namespace.float32
            return empty(shape, dtype=dtype, device=arguments["q"].device)
        return at.namespace.empty(shape, dtype=np.float32)


def like(array: Any, x: Any) -> Any:
    """Return numbers, of the host or of q's library, as the captured array has them."""
    if hasattr(array, "new_tensor"):
        is_tensor = hasattr(x, "new_tensor")
        return x.to(array.device, array.dtype) if is_tensor else array.new_tensor(x)
    if isinstance(array, np.ndarray):
        return on_host(x).astype(array.dtype, copy=False)
    if type(x) is type(array):
        return x if x.dtype == array.dtype else x.astype(array.dtype)
    return array.__array_namespace__().asarray(x, dtype=array.dtype)
