# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from logits, and drafts of tokens held against them; docs/fused.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._arrays import Array, ArrayT
from ._call import either

if TYPE_CHECKING:
    from ._types import FilterOrder


def sample(
    logits: ArrayT,
    *,
    seed: int | Array,
    offset: int | Array = 0,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
    order: FilterOrder = "top_k_first",
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Draw one token from each row of logits.

    The token of a row depends on its logits, options, seed and offset alone: not on its place in
    the batch, not on the other rows, and not on the device. Probabilities are sums of integers, in
    units of 2^-40 of the likeliest token; what is less likely is never drawn.

    Parameters
    ----------
    logits : array, [batch, vocabulary]
        float32, float16 or bfloat16; a vocabulary of up to 4194304.
    seed : int or int64 array, [batch]
        The key of Philox-4x32-10, from 0 on; of each request its own.
    offset : int or int64 array, [batch] or one element
        Which number of the seed's is used: the step of the request. An array of one element on the
        device may be advanced between replays of a CUDA graph.
    temperature : float or float32 array, [batch]
        Divides the logits. 0: the largest, and of equals the first.
    top_k : int or int32 array, [batch], optional
        Keeps the tokens that are at least as likely as the k-th likeliest; 0: all.
    top_p : float or float32 array, [batch], optional
        Keeps the fewest of the likeliest whose probabilities sum to top_p or more, and what is as
        likely as the last of them. Above 0, at most 1.
    min_p : float or float32 array, [batch], optional
        Keeps tokens with at least min_p of the probability of the likeliest.
    order : {"top_k_first", "joint"}
        Whether top_p counts probabilities among what top_k leaves, or among all.
    out : int32 array, [batch], optional
        Written and returned.
    stream : optional
        As in `attention`; the library of logits decides.

    Returns
    -------
    tokens : int32 array, [batch]
        -1 for a row with NaN or +inf, or with nothing above -inf.

    Raises
    ------
    ValueError, TypeError, CudaError
        As in `attention`; nothing was written. Arrays of options are not judged: a temperature
        that is not above 0 is 0, a top_k below 1 and a top_p above 1 keep all.
    NotImplementedError
        out= of JAX arrays; a torch tensor that requires grad, in grad mode.

    References
    ----------
    Philox: Salmon et al., SC 2011; top_p: arXiv:1904.09751; min_p: arXiv:2407.01082.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits = np.log(np.float32([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    >>> cuattn.sample(logits, seed=7, temperature=0.0)
    array([0, 2], dtype=int32)
    >>> cuattn.sample(logits, seed=np.array([7, 8]), top_k=1)
    array([0, 2], dtype=int32)
    """
    if not isinstance(order, str) or order not in ("top_k_first", "joint"):
        raise ValueError(
            f"sample: order must be 'top_k_first' or 'joint', got {order!r}; choose one of these"
        )
    return either(
        "sample",
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        order == "joint",
        seed,
        offset,
        out,
        stream,
    )


def speculative_verify(
    draft_probs: Array,
    target_probs: Array,
    draft_tokens: Array,
    *,
    seed: int | Array,
    offset: int | Array = 0,
    out: Array | None = None,
    accepted_out: Array | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Accept as much of a chain of drafted tokens as keeps the distribution of the target model.

    Token i is accepted with probability ``min(1, target / draft)``. In place of the first that is
    not, one is drawn from ``max(0, target - draft)``; if all are accepted, one more is drawn from
    the last row of target_probs. Random numbers are those of `sample`.

    Parameters
    ----------
    draft_probs : float32 array, [batch, n, vocabulary]
        The probabilities that token i of the draft was drawn from.
    target_probs : float32 array, [batch, n + 1, vocabulary]
        Those of the target model, before each token and behind the last.
    draft_tokens : int32 array, [batch, n]
        What was drafted. Tokens outside of the vocabulary raise on the CPU, and are not accepted on
        CUDA.
    seed, offset
        As in `sample`.
    out : int32 array, [batch, n + 1], optional
        Written and returned.
    accepted_out : int32 array, [batch], optional
        Written and returned.
    stream : optional
        As in `attention`; the library of target_probs decides.

    Returns
    -------
    tokens : int32 array, [batch, n + 1]
        The accepted tokens, the one that was drawn, then -1. It is -1 too where nothing can be
        drawn: a row of zeros and NaN.
    accepted : int32 array, [batch]
        How many tokens of the draft were accepted.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `sample`.

    References
    ----------
    arXiv:2211.17192.
    """
    return either(
        "speculative_verify",
        draft_probs,
        target_probs,
        draft_tokens,
        seed,
        offset,
        out,
        accepted_out,
        stream,
    )
