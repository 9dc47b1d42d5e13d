# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: its tables, and their use on any array; docs/fused.md."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

from ._arrays import Array, ArrayT, library_module
from ._rope import rotation
from ._rope_scaling import attention_factor, frequencies, is_number
from .attention import attention

# What `attention` calls the arguments that `rope_attention` has.
NAMES_OF_ATTENTION = {
    "rope": "the tables are called cos and sin",
    "rope_positions": "they are called positions_q and positions_k",
    "rope_interleaved": "it is called interleaved",
}


def rope_table(
    max_position: int,
    rotary_dim: int,
    theta: float | None = None,
    *,
    scaling: Mapping[str, Any] | None = None,
    like: Any = None,
) -> tuple[Any, Any]:
    """Compute cos and sin of each position and pair of elements.

    ``angle = position * inv_freq`` in float32, as models compute it, with ``inv_freq = theta ** (-2
    i / rotary_dim)``, changed as `scaling` says.

    Parameters
    ----------
    max_position : int
        Rows of the tables.
    rotary_dim : int
        How many elements of a head are turned, an even number.
    theta : float, optional
        The base; None: that of `scaling` ("rope_theta", where configurations of today have it), or
        10000.
    scaling : dict, optional
        How a model was stretched to longer texts, in the words of Hugging Face's configurations:
        "rope_type" is "default", "linear", "dynamic", "ntk", "yarn", "llama3" or "longrope", beside
        "factor" and what else it needs. "dynamic" is computed for max_position tokens. "longrope"
        without "factor" and "attention_factor", as Phi-3 has it, needs the
        "max_position_embeddings" of the model beside. Where layer types have rules of their own,
        as in Gemma-3, pass that of one.
    like : array, optional
        The tables are of its library and on its device; None: numpy.

    Returns
    -------
    cos, sin : float32 array, [max_position, rotary_dim / 2]

    Raises
    ------
    ValueError, TypeError
        Numbers that cannot be, a rope_type that is not known, what it needs and does not get, words
        that no rope_type has.

    References
    ----------
    arXiv:2104.09864; YaRN: arXiv:2309.00071.

    Examples
    --------
    >>> import cuattn
    >>> cos, sin = cuattn.rope_table(4096, 128, 500000.0, scaling={"rope_type": "llama3",
    ...     "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    ...     "original_max_position_embeddings": 8192})
    >>> cos.shape
    (4096, 64)
    """
    import numpy as np

    max_position = whole("max_position", max_position)
    rotary_dim = whole("rotary_dim", rotary_dim)
    if rotary_dim % 2 != 0:
        raise ValueError(
            f"rope_table: rotary_dim must be even, got {rotary_dim}; elements are turned in pairs"
        )
    if not isinstance(scaling, (Mapping, type(None))):
        raise TypeError(
            f"rope_table: scaling must be a dict, got {type(scaling).__name__}; pass that of a "
            "model's configuration"
        )
    rule = dict(scaling or {})
    of_rule = rule.get("rope_theta")
    if theta is not None and of_rule is not None and theta != of_rule:
        raise ValueError(
            f"rope_table: theta must be the rope_theta of scaling, {of_rule!r}, or None, got "
            f"{theta!r}; leave theta out"
        )
    base: Any = next((x for x in (theta, of_rule) if x is not None), 10000.0)
    if not is_number(base) or base <= 0.0:
        name = "theta" if theta is not None else "rope_theta of scaling"
        raise ValueError(
            f"rope_table: {name} must be positive and finite, got {base!r}; models have 10000.0 or "
            "more"
        )
    inverse = frequencies(rule, rotary_dim, float(base), max_position)
    positions = np.arange(max_position, dtype=np.float32)
    angles = (positions[:, None] * inverse[None, :]).astype(np.float64)
    factor = attention_factor(rule, max_position)
    tables = [(f(angles) * factor).astype(np.float32) for f in (np.cos, np.sin)]
    return in_library_of(like, tables[0]), in_library_of(like, tables[1])


def whole(name: str, number: Any) -> int:
    """Read an extent of the tables; numpy's integers are taken too."""
    try:
        value = 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(
            f"rope_table: {name} must be an integer from 1 on, got {number!r}; pass an int"
        )
    return value


def in_library_of(like: Any, table: Any) -> Any:
    """Copy a numpy array to the library and the device of another array."""
    if like is None:
        return table
    if type(like).__module__.partition(".")[0] in ("jax", "jaxlib"):
        jax = sys.modules["jax"]
        return jax.device_put(table, next(iter(like.devices())))
    library = library_module(like)
    name = getattr(library, "__name__", None)
    if name == "torch":
        return library.from_numpy(table).to(like.device)
    if name == "cupy":
        with like.device:
            return library.asarray(table)
    if name == "numpy":
        return table
    raise NotImplementedError(
        f"rope_table: like must be an array of numpy, torch, CuPy or JAX, got "
        f"{type(like).__name__}; leave it out and convert the numpy tables"
    )


def apply_rope(
    x: ArrayT,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    offset: int = 0,
    out: ArrayT | None = None,
    stream: Any = None,
) -> ArrayT:
    """Turn pairs of elements of each head by the angles of its token's position.

    The pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``, each product and sum rounded
    to float32, the result to x's dtype: the bits of `reshape_and_cache`, on every device.

    Parameters
    ----------
    x : array, [batch, seqlen, num_heads, head_dim] or [n, num_heads, head_dim]
        float32, float16 or bfloat16. Any strides that are not negative, if the last axis is
        contiguous (and rows start on 16 bytes, on CUDA). Gradients of torch and JAX reach it.
    cos, sin : float32 array, [max_position, rotary_dim / 2]
        As `rope_table` gives them; rotary_dim elements of a head are turned.
    positions : int64 array, [batch, seqlen] or [n], optional
        The row of the tables of each token, or None: its index on the axis before the heads. Rows
        that are not there raise on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are
        clamped.
    interleaved : bool
        Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
    inverse : bool
        Turns back.
    offset : int
        The first element that is turned; the others are copied.
    out : array like x, optional
        Written and returned; may be x itself.
    stream : optional
        As in `attention`; x's library decides.

    Returns
    -------
    out : array like x

    Raises
    ------
    ValueError, TypeError, CudaError
        As in `attention`; nothing was written.
    NotImplementedError
        out= and stream= of JAX arrays, and of a torch tensor whose gradient is wanted; a gradient
        of the tables.

    References
    ----------
    arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cos, sin = cuattn.rope_table(16, 8)
    >>> x = np.ones((2, 5, 3, 8), np.float32)
    >>> y = cuattn.apply_rope(x, cos, sin)
    >>> bool(np.allclose(cuattn.apply_rope(y, cos, sin, inverse=True), x))
    True
    """
    found: ArrayT = rotation(
        "apply_rope", "x", x, cos, sin, positions, interleaved, inverse, offset, {}, out, stream
    )
    return found


def rope_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    positions_q: Array | None = None,
    positions_k: Array | None = None,
    **options: Any,
) -> Any:
    """Rotate q and k, then attend.

    The bits are those of `apply_rope` for q and for k, and `attention`: both are rotated in a pass
    before it, into memory of their library.

    Parameters
    ----------
    q, k, v : array
        As in `attention`.
    cos, sin : float32 array, [max_position, rotary_dim / 2]
        As in `apply_rope`.
    interleaved : bool
        As in `apply_rope`.
    positions_q, positions_k : int64 array, [batch, seqlen], optional
        The rows of the tables, or None: keys stand at their index, query i at ``i + seqlen_kv -
        seqlen_q``, where lengths in use count if they are given.
    **options
        As in `attention`, rope and what belongs to it apart.

    Returns
    -------
    out, lse
        As in `attention`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `apply_rope` and `attention`.

    References
    ----------
    arXiv:2104.09864.
    """
    for name, ours in NAMES_OF_ATTENTION.items():
        if name in options:
            raise TypeError(f"rope_attention: there is no argument {name}; here {ours}")
    layout = {"layout": options["layout"]} if "layout" in options else {}
    k = rotation(
        "rope_attention", "k", k, cos, sin, positions_k, interleaved, False, 0, layout, None,
        options.get("stream"),
    )  # fmt: skip
    options |= {"rope_positions": positions_q, "rope_interleaved": interleaved}
    return attention(q, k, v, rope=(cos, sin), **options)
