# SPDX-License-Identifier: Apache-2.0
"""Quantisation of q, k and v to float8_e4m3fn; docs/fp8.md has the formulas and when it pays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _checks, _core
from ._arrays import Array, ArrayT, is_jax, operations
from ._quantize_checks import (
    check_agreement,
    check_layout,
    check_mean,
    check_modes,
    check_smoothing,
    sizes_of,
)
from .attention import attention

if TYPE_CHECKING:
    from ._types import Layout

NUMBERS = ("float32", "float16", "bfloat16")
BLOCK = 128  # rows that share a scale in mode "block"


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """What `quantize` gives: codes, their scales, and what the smoothing of keys owes to lse.

    ``value = stored * scale``. lse_shift, float32 of the shape of lse, is None without smoothing;
    scale is the factor of the scores that it was made for, None for ``1 / sqrt(head_dim)``.
    """

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    lse_shift: Any
    layout: str
    scale: float | None

    def __reduce__(self) -> Any:
        """Copy and pickle columns of v with their padding, which copies of numpy's view lose."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        codes, v = getattr(self.v, "base", None), self.v
        if isinstance(v, np.ndarray) and isinstance(codes, np.ndarray) and codes.dtype == v.dtype:
            same = rows_of(codes, v.shape, self.layout) if codes.ndim == v.ndim else codes
            if place_of(same) == place_of(v):
                return with_columns, (codes, v.shape, {**fields, "v": None})
        return QuantizedQKV, tuple(fields.values())

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Codes of q, k and v, as `attention` takes them."""
        return self.q, self.k, self.v

    @property
    def scales(self) -> dict[str, Any]:
        """The options of `attention` that belong to them."""
        return {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def attention(self, **options: Any) -> Any:
        """`cuattn.attention` of these arrays; with return_lse that of the keys as they were.

        Raises
        ------
        ValueError
            Packed arrays; `scale`, `layout` or a scale of float8, which are settled; after
            smoothing also softcap and sinks, for which scores less a constant are not the same.
        """
        if len(self.q.shape) == 3:
            more = "" if self.lse_shift is None else ", and add lse_shift to its lse"
            raise ValueError(
                "QuantizedQKV.attention: q must have 4 axes, got packed arrays of shape "
                f"{tuple(self.q.shape)}; call attention_varlen(*qkv.arrays, ..., scale=qkv.scale, "
                f"**qkv.scales){more}"
            )
        for name in ("scale", "layout", *self.scales):
            given = options.pop(name, None)
            if given is not None:
                raise ValueError(
                    f"QuantizedQKV.attention: {name} was settled by quantize, got {given!r}; pass "
                    "it there"
                )
        if self.lse_shift is not None:
            for name in ("softcap", "sinks"):
                given = options.get(name)
                if given is not None and not (name == "softcap" and given == 0):
                    raise ValueError(
                        f"QuantizedQKV.attention: {name} must be left out after smoothing, which "
                        "takes a constant from all scores of a query; pass smooth_k=False to "
                        "quantize"
                    )
        settled: dict[str, Any] = {"layout": self.layout, "scale": self.scale, **self.scales}
        attend: Any = attention  # whose overloads do not follow names in dicts
        result = attend(*self.arrays, **settled, **options)
        if self.lse_shift is None or not isinstance(result, tuple):
            return result
        out, lse = result
        if options.get("lse_out") is not None:
            lse += self.lse_shift
            return out, lse
        return out, lse + self.lse_shift


def place_of(x: np.ndarray) -> tuple[Any, ...]:
    """Where an array of numpy lies."""
    return x.ctypes.data, x.shape, x.strides


def with_columns(codes: Any, shape: tuple[int, ...], fields: dict[str, Any]) -> QuantizedQKV:
    """Make what `QuantizedQKV.__reduce__` took apart."""
    return QuantizedQKV(**{**fields, "v": rows_of(codes, shape, fields["layout"])})


def quantize(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    layout: Layout = "bshd",
    mode: str = "head",
    v_mode: str | None = None,
    hadamard: bool = True,
    smooth_k: bool = True,
    key_mean: Array | None = None,
    scale: float | None = None,
    stream: Any = None,
) -> QuantizedQKV:
    """Make float8_e4m3fn codes and scales of q, k and v, for `attention` and `attention_varlen`.

    ``stored = round((x - mean) R / scale)`` to nearest even, with sizes above 448 set to 448 and
    NaN kept; ``scale`` is the largest finite size of its part / 448, and 1 where all of it is 0.

    Parameters
    ----------
    q, k, v : array, [batch, seqlen, heads, dim]
        float32, float16 or bfloat16, in `layout`, of any strides; or [total, heads, dim] for
        `attention_varlen`, packed. Dims are multiples of 16 up to 256. On the CPU or a
        CUDA device; JAX arrays anywhere, by jax.numpy.
    layout : {"bshd", "bhsd"}
        Order of the axes.
    mode : {"tensor", "head", "block", "int8"}
        What shares a scale: all of an array, [1]; a key head (for q the heads that read it),
        [batch, num_heads_kv], packed [num_heads_kv]; or 128 rows of a head, [batch, heads,
        ceil(seqlen / 128)], v then by head. No blocks of packed arrays. "int8": as "block", and q
        and k become int8 codes up to 127 (NaN 0), a third of the error of float8 ones.
    v_mode : {"tensor", "head", "channel"}, optional
        The same of v; channel is [batch, num_heads_kv, head_dim_v]. None: as mode, blocks by head.
    hadamard : bool
        Rotate q and k by the same orthogonal matrix, signs times Hadamard: scores stay, outliers
        are spread. Keys that are kept for later queries need it for these too.
    smooth_k : bool
        Take the mean over the sequence from the keys of each head: softmax does not see it, and
        channels with a bias cost no precision. For whole sequences; not with softcap or sinks.
    key_mean : float32 array, [num_heads_kv, head_dim], optional
        The mean to take instead, measured before, for caches; whatever smooth_k says.
    scale : float, optional
        That of `attention`, for lse_shift; None is ``1 / sqrt(head_dim)``.
    stream : optional
        As in `attention`.

    Returns
    -------
    QuantizedQKV
        Codes in the library of q, numpy's by ml_dtypes. v lies with the sequence as its contiguous
        axis, padded to 16 rows, as kernels of float8 want it; JAX's, which has no strides, by rows.

    Raises
    ------
    ValueError, TypeError
        As in `attention`.
    NotImplementedError
        A torch tensor that requires grad, in grad mode.

    References
    ----------
    FlashAttention-3, arXiv:2407.08608; QuaRot, arXiv:2404.00456; SageAttention, arXiv:2410.02367.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> x = np.random.default_rng(0).standard_normal((1, 64, 2, 64), np.float32)
    >>> qkv = cuattn.quantize(x, x, x)
    >>> qkv.attention(causal=True).dtype
    dtype(bfloat16)
    """
    check_layout(layout)
    check_modes(mode, v_mode, q)
    check_smoothing(smooth_k, key_mean, scale)
    v_mode = v_mode or ("tensor" if mode == "tensor" else "head")
    of_q, of_k, of_v = sizes_of("q", q, layout), sizes_of("k", k, layout), sizes_of("v", v, layout)
    check_agreement(of_q, of_k, of_v)
    batch, _, heads_kv, dim = of_k
    check_mean(key_mean, batch, heads_kv, dim)
    int8 = mode == "int8"
    mean: Any = key_mean
    if key_mean is not None:
        mean = mean[None] if len(mean.shape) == 2 else mean
    elif smooth_k:
        mean = (batch, heads_kv, dim)
    shape = shape_of(mode, of_k, heads_kv, k)
    k_codes, k_scale, made_mean, _ = run_as(
        "quantize", "k", k, layout, hadamard, shape, mean=mean, int8=int8, stream=stream
    )
    shape = shape_of(mode, of_q, heads_kv, q)
    shift_mean = made_mean if key_mean is None else mean
    q_codes, q_scale, _, shift = run_as(
        "quantize", "q", q, layout, hadamard, shape, shift_mean=shift_mean, int8=int8, stream=stream
    )
    shape, channels = shape_of(v_mode, of_v, heads_kv, v), v_mode == "channel"
    v_codes, v_scale, _, _ = run_as(
        "quantize", "v", v, layout, False, shape, channels, columns=True, stream=stream
    )
    if shift is not None:
        shift = scaled(shift, dim**-0.5 if scale is None else scale, stream)
        shift = shift[0] if len(getattr(q, "shape", ())) == 3 else shift
    v_codes = rows_of(v_codes, tuple(getattr(v, "shape", ())), layout)
    return QuantizedQKV(q_codes, k_codes, v_codes, q_scale, k_scale, v_scale, shift, layout, scale)


def quantize_like(
    x: ArrayT, scale: Any, *, layout: Layout = "bshd", hadamard: bool = False, stream: Any = None
) -> Any:
    """Make float8_e4m3fn codes by a scale that is known: ``round(x / scale)``, saturating.

    Parameters
    ----------
    x : array, [batch, seqlen, heads, dim] or [total, heads, dim]
        float32, float16 or bfloat16, as in `quantize`.
    scale : float or float32 array
        Above 0: one number, [heads / n], [batch, heads / n] or [batch, heads, ceil(seqlen / 128)].
    layout : {"bshd", "bhsd"}
        Order of the axes.
    hadamard : bool
        Rotate the rows first, as `quantize` does.
    stream : optional
        As in `attention`.

    Returns
    -------
    array like x
        float8_e4m3fn; sizes above ``448 * scale`` become 448, NaN stays NaN.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `quantize`.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.quantize_like(np.full((1, 1, 16), 3.0, np.float32), 0.5)[0, 0, :2].tolist()
    [6.0, 6.0]
    """
    if isinstance(scale, (tuple, list)):  # a tuple is a shape to `run`
        raise TypeError(
            f"quantize_like: scale must be a number or a float32 array, got {scale!r}; make an "
            "array of it, in the library of x"
        )
    return run_as("quantize_like", "x", x, layout, hadamard, scale, stream=stream)[0]


def dequantize(
    x: ArrayT,
    scale: Any,
    *,
    layout: Layout = "bshd",
    channels: bool = False,
    dtype: str = "bfloat16",
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Make numbers of float8_e4m3fn codes: ``stored * scale``, rounded once to `dtype`.

    Parameters
    ----------
    x : array, [batch, seqlen, heads, dim] or [total, heads, dim]
        float8_e4m3fn, or uint8 that holds it, or int8; any strides.
    scale : float or float32 array
        As in `quantize_like`, or [batch, heads, dim] with channels.
    layout : {"bshd", "bhsd"}
        Order of the axes.
    channels : bool
        A scale of three axes is one of channels, as that of v.
    dtype : {"float32", "float16", "bfloat16"}
        Of the result.
    out : array like x, optional
        Its dtype counts then, not `dtype`.
        Written and returned.
    stream : optional
        As in `attention`.

    Returns
    -------
    array like x, of `dtype`
        A rotation and a mean of `quantize` are not undone.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `quantize`.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> codes = cuattn.quantize_like(np.full((1, 1, 16), 3.0, np.float32), 0.5)
    >>> cuattn.dequantize(codes, 0.5, dtype="float32")[0, 0, :2].tolist()
    [3.0, 3.0]
    """
    if not isinstance(dtype, str):
        raise TypeError(f"dequantize: dtype must be a string, got {dtype!r}; pass a str")
    if dtype not in NUMBERS:
        raise ValueError(
            f"dequantize: dtype must be float32, float16 or bfloat16, got {dtype!r}; choose one of "
            "these"
        )
    arguments = x, scale, layout, channels, dtype, out, stream
    result = _core.dequantize(*arguments)
    if result is not NotImplemented:
        return result
    from .jax import float8

    return float8.dequantize(*arguments)


def run(
    x: Any,
    layout: str,
    hadamard: bool,
    scale: Any,
    channels: bool = False,
    mean: Any = None,
    shift_mean: Any = None,
    columns: bool = False,
    int8: bool = False,
    stream: Any = None,
) -> Any:
    """Quantise one array: codes, scale, mean and shift; a tuple for scale or mean is a shape."""
    result = _core.quantize(
        x, layout, hadamard, scale, channels, mean, shift_mean, columns, int8, stream
    )
    if result is not NotImplemented:
        return result
    from .jax import float8

    return float8.quantize(x, layout, hadamard, scale, channels, mean, shift_mean, int8, stream)


def run_as(op: str, name: str, *arguments: Any, **options: Any) -> Any:
    """Run for a function that calls the array `name`, and raise in its words."""
    try:
        return run(*arguments, **options)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        message = str(error)
        words = in_words_of(op, name, message)
        if words == message:  # an error of another library may take more than a message
            raise
        raise type(error)(words) from None


def in_words_of(op: str, name: str, message: str) -> str:
    """Put the function and arguments of a caller in place of those of `run`."""
    if not message.startswith("quantize: "):
        return message  # of a producer of arrays
    words = {"x": name, "mean": "key_mean", "shift_mean": "key_mean"}
    return _checks.in_words_of(op, words, message.replace(" like x", f" like {name}"))


def scaled(shift: Any, factor: Any, stream: Any) -> Any:
    """Multiply in place, where the library can, on the stream that `shift` was made on."""
    if stream is None or is_jax(shift):
        shift *= factor
        return shift
    with operations("quantize", shift, stream):
        shift *= factor
    return shift


def shape_of(mode: str, sizes: tuple[int, int, int, int], heads_kv: int, x: Any) -> tuple[int, ...]:
    """Return the shape of the scale of an array."""
    batch, rows, heads, dim = sizes
    if mode == "tensor":
        return (1,)
    if mode == "head":
        return (batch, heads_kv) if len(x.shape) == 4 else (heads_kv,)
    return (batch, heads, dim if mode == "channel" else -(-rows // BLOCK))


def rows_of(codes: Any, shape: tuple[int, ...], layout: str) -> Any:
    """View codes [batch, heads, dim, padded rows] as rows of v's shape."""
    if not hasattr(codes, "strides") and not hasattr(codes, "stride"):
        return codes  # JAX, whose arrays have no strides
    axis = 0 if len(shape) == 3 else 1 if layout == "bshd" else 2
    order = ((2, 0, 1), (0, 3, 1, 2), (0, 1, 3, 2))[axis]
    if shape[axis] != codes.shape[-1]:
        codes = codes[..., : shape[axis]]
    return codes.permute(order) if hasattr(codes, "permute") else codes.transpose(order)
