# SPDX-License-Identifier: Apache-2.0
"""Merging the results of attention over disjoint sets of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core
from ._arrays import ArrayT
from ._call import jax_face

if TYPE_CHECKING:
    from ._types import MergeLayout


def merge_states(
    out_a: ArrayT,
    lse_a: ArrayT,
    out_b: ArrayT | None = None,
    lse_b: ArrayT | None = None,
    *,
    layout: MergeLayout | None = None,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge attention results over disjoint sets of keys into the result over their union.

    ``out = (out_a * exp(lse_a) + out_b * exp(lse_b)) / (exp(lse_a) + exp(lse_b))``, computed
    relative to the larger lse. With two arguments, ``merge_states(outs, lses)``, the parts are
    stacked on a new first axis.

    Parameters
    ----------
    out_a, out_b : array
        Results of `attention`: [batch, seqlen, num_heads, head_dim] ("bshd"), [batch, num_heads,
        seqlen, head_dim] ("bhsd"), [n, num_heads, head_dim] ("nhd") or [total, num_heads, head_dim]
        ("thd", ragged).
    lse_a, lse_b : float32 array
        Their log-sum-exp: [batch, num_heads, seqlen], for "nhd" [n, num_heads], for "thd"
        [num_heads, total]. A part with lse = -inf, or +inf as FlashAttention-2 and vLLM
        write it, has no keys and leaves the others unchanged.
    layout : {"bshd", "bhsd", "nhd", "thd"}, optional
        Order of the axes; None is "bshd" for four axes and "nhd" for three.
    out, lse_out : array, optional
        Written in place and returned. out may be one of the parts itself, lse_out one of their lse;
        else they share no memory with another argument. Of float32 parts out may be float16 or
        bfloat16.
    stream : optional
        As in `attention`.

    Returns
    -------
    out, lse : array
        Like one part.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `attention`.

    References
    ----------
    Online softmax, arXiv:1805.02867.
    """
    if (out_b is None) != (lse_b is None):
        name, other = ("lse_b", "out_b") if lse_b is None else ("out_b", "lse_b")
        raise TypeError(
            f"merge_states: {name} must be given with {other}; leave out both for stacked parts"
        )
    result = _core.merge_states(out_a, lse_a, out_b, lse_b, layout, out, lse_out, stream)
    if result is not NotImplemented:
        return result
    return jax_face().merge_states(
        out_a, lse_a, out_b, lse_b, layout=layout, out=out, lse_out=lse_out, stream=stream
    )
