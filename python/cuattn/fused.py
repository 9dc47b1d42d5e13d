# SPDX-License-Identifier: Apache-2.0
"""Norms and activations, which stand before and after attention; docs/fused.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._arrays import Array, ArrayT
from ._call import either

if TYPE_CHECKING:
    from ._types import Act


def rms_norm(
    x: ArrayT,
    weight: Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: ArrayT | None = None,
    out: ArrayT | None = None,
    residual_out: ArrayT | None = None,
    stream: Any = None,
) -> Any:
    """Divide each row by its root mean square, after a residual was added; multiply by a weight.

    ``h = x + residual``, rounded to the dtype and kept; ``out = h / sqrt(mean(h * h) + eps) *
    (weight + weight_offset)`` over the last axis, computed in float32 and rounded once.

    Parameters
    ----------
    x : array, [..., n]
        float32, float16 or bfloat16. Rows begin at even steps.
    weight : array, [n]
        Of x's dtype or float32.
    eps : float
        Keeps rows of zeros finite.
    weight_offset : float
        1 for models that store the weight less 1.
    residual : array like x, optional
        Is added to x first. **Written**, with the sum, unless residual_out is given; of JAX the sum
        is a new array.
    out : array like x, optional
        Written and returned; may be x itself.
    residual_out : array like x, optional
        Takes the sum in place of residual.
    stream : optional
        As in `attention`; x's library decides.

    Returns
    -------
    out : array like x
    residual : array like x
        The sum; with residual only.

    Raises
    ------
    ValueError, TypeError, CudaError
        As in `attention`; nothing was written.
    NotImplementedError
        out= and residual_out= of JAX arrays; a torch tensor that requires grad, in grad mode.

    References
    ----------
    arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.rms_norm(np.float32([[3, 4]]), np.ones(2, np.float32), eps=0)
    array([[0.84852815, 1.1313709 ]], dtype=float32)
    """
    return either("norm", False, x, weight, None, eps, weight_offset, residual, out, residual_out,
                  stream)  # fmt: skip


def layer_norm(
    x: ArrayT,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: ArrayT | None = None,
    out: ArrayT | None = None,
    residual_out: ArrayT | None = None,
    stream: Any = None,
) -> Any:
    """Normalise each row to mean 0 and variance 1, after a residual was added.

    ``h = x + residual``, rounded to the dtype and kept; ``out = (h - mean(h)) / sqrt(var(h) + eps)
    * (weight + weight_offset) + bias`` over the last axis, computed in float32 and rounded once.

    Parameters
    ----------
    x : array, [..., n]
        float32, float16 or bfloat16. Rows begin at even steps.
    weight : array, [n]
        Of x's dtype or float32.
    bias : array, [n], optional
        Of the weight's dtype.
    eps : float
        Keeps rows without variance finite.
    weight_offset, residual, out, residual_out, stream
        As in `rms_norm`.

    Returns
    -------
    out, residual
        As in `rms_norm`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `rms_norm`.

    References
    ----------
    arXiv:1607.06450.
    """
    return either("norm", True, x, weight, bias, eps, weight_offset, residual, out, residual_out,
                  stream)  # fmt: skip


def act_mul(
    x: ArrayT,
    *,
    act: Act = "silu",
    bias: Array | None = None,
    out: ArrayT | None = None,
    stream: Any = None,
) -> ArrayT:
    """Multiply one half of each row, after an activation, by the other half.

    ``out = act(x[..., :n]) * x[..., n:]``, computed in float32 and rounded once: the middle of a
    gated feed-forward layer.

    Parameters
    ----------
    x : array, [..., 2 n]
        float32, float16 or bfloat16. Rows begin at even steps.
    act : {"silu", "gelu", "gelu_tanh"}
        "gelu" is the exact one, by the error function.
    bias : array, [2 n], optional
        Of x's dtype; added to x first.
    out : array, [..., n], optional
        Written and returned; shares no memory with x.
    stream : optional
        As in `attention`; x's library decides.

    Returns
    -------
    out : array, [..., n]
        Of x's dtype.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `rms_norm`.

    References
    ----------
    arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.act_mul(np.float32([[0, 100, 5, 7]]))
    array([[  0., 700.]], dtype=float32)
    """
    return either("activate", True, x, bias, act, out, stream)


def bias_act(
    x: ArrayT,
    bias: Array | None = None,
    *,
    act: Act = "gelu",
    out: ArrayT | None = None,
    stream: Any = None,
) -> ArrayT:
    """Add a bias and apply an activation, ``act(x + bias)``.

    Parameters
    ----------
    x : array, [..., n]
        float32, float16 or bfloat16. Rows begin at even steps.
    bias : array, [n], optional
        Of x's dtype.
    act : {"silu", "gelu", "gelu_tanh"}
        As in `act_mul`.
    out : array like x, optional
        Written and returned; may be x itself.
    stream : optional
        As in `attention`; x's library decides.

    Returns
    -------
    out : array like x

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `rms_norm`.

    References
    ----------
    arXiv:1606.08415.
    """
    return either("activate", False, x, bias, act, out, stream)
