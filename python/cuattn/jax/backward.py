# SPDX-License-Identifier: Apache-2.0
"""attention_backward and attention_varlen_backward on JAX arrays: plain functions, no derivative.

jax.grad of attention needs neither. Next: ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._gradients import GRADIENTS, POSITIONAL, SOURCES, check_need, forward_options
from .._options import PLACES
from ..backward import result_type
from .call import check_arrays, plain_window, possible_devices, refuse, register, static_of
from .ops import ARRAYS, NUMBERS, run_backward


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Check what is Python's to check, then run."""
    need = check_need(op, arguments["need"])
    places = [name for name in PLACES if name != "out"]
    refuse(op, **{name: arguments[name] for name in (*places, *GRADIENTS) if name in arguments})
    required = {name: arguments[name] for name in POSITIONAL[op][:6]}
    optional = {name: arguments.get(name) for name in (*ARRAYS, "dlse")}
    given = check_arrays(op, required, **optional)
    for name in need:
        if SOURCES[name] not in given:
            raise ValueError(
                f"{op}: need must name gradients of what is given, got {name!r} without "
                f"{SOURCES[name]}; leave it out"
            )
    options = {option.name: arguments.get(option.name, option.default) for option in NUMBERS}
    options["window"] = plain_window(options["window"])
    in_order = tuple(name for name in GRADIENTS if name in need)  # as the handler gives them
    options |= {"need": in_order, "deterministic": arguments["deterministic"]}
    static = static_of(op, **options, devices=possible_devices(op, given))
    register()
    found = dict(zip(in_order, run_backward(given, static), strict=True))
    return result_type(need)(*map(found.get, need))


def checked(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of a call and refuse unknown names."""
    known = {option.name: option.default for option in forward_options(op)}
    known |= dict.fromkeys((*GRADIENTS, *PLACES))
    known |= {"dlse": None, "deterministic": None, "need": GRADIENTS[:3], "backend": "auto"}
    unknown = set(given) - set(known)
    if unknown:
        raise TypeError(f"{op}() got an unexpected keyword argument '{min(unknown)}'")
    return known | given


def attention_backward(
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *,
    need: Sequence[str] = ("dq", "dk", "dv"),
    **options: Any,
) -> Any:
    """`cuattn.attention_backward` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    dout, q, k, v, out, lse, need, **options
        As in `cuattn.attention_backward`; numbers are static under jax.jit; None for the arrays
        that a call would write, whose memory is XLA's.

    Returns
    -------
    named tuple
        As in `cuattn.attention_backward`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `cuattn.attention_backward`, while tracing.
    """
    arguments = checked("attention_backward", {**options, "need": need})
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    return call("attention_backward", arguments | arrays)


def attention_varlen_backward(
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    need: Sequence[str] = ("dq", "dk", "dv"),
    **options: Any,
) -> Any:
    """`cuattn.attention_varlen_backward` on JAX arrays; traceable by jax.jit and jax.vmap.

    Parameters
    ----------
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, need, **options
        As in `cuattn.attention_varlen_backward`; numbers are static under jax.jit.

    Returns
    -------
    named tuple
        As in `cuattn.attention_varlen_backward`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `attention_backward`.
    """
    arguments = checked("attention_varlen_backward", {**options, "need": need})
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return call("attention_varlen_backward", arguments | arrays | lengths)
