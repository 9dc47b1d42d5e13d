# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): keys and values of all heads from one latent per token."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _core
from ._arrays import Array, ArrayT, ShapedArray, ShapedT, is_jax, wants_gradient
from ._call import refuse_tables_of_jax
from ._checks import check_flag
from ._mla_costs import choose, read_extents
from ._overlap import refuse_shared
from .attention import attention

if TYPE_CHECKING:
    from ._types import Backend


def mla_decode(
    q_nope: ArrayT,
    q_pe: ArrayT | None,
    ckv_cache: Array,
    kpe_cache: Array | None,
    block_tables: Array | None,
    context_lens: Array | None,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    indices: Array | None = None,
    topk_lens: Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: Array | None = None,
    workspace: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Attend to a paged cache of latents in the absorbed form, as DeepSeek's models decode.

    ``score = scale * (q_nope . ckv + q_pe . kpe)``, ``out = sum of softmax(score) * ckv``: the
    latent is key and value of every head, read once for all of them. q_nope is the query times the
    transposed key projection, and out goes times the value projection: `mla_project` does both.

    Parameters
    ----------
    q_nope : array, [num_seqs, num_heads, latent] or [num_seqs, q_len, num_heads, latent]
        float32, float16 or bfloat16. latent is a multiple of 16 up to 1024 (DeepSeek: 512).
    q_pe : array, like q_nope with rope columns, or None
        The rotated columns, a multiple of 8 up to 128 (DeepSeek: 64).
    ckv_cache : array, [num_blocks, block_size, latent]
        Latents of q_nope's dtype, normalised; block_size is 1 to 256. Blocks and tokens may lie
        apart: ``cache[..., :512]`` of a joined cache [num_blocks, block_size, 576] is taken. Of
        uint8 and 656 bytes: FlashMLA's packed latents with their rope columns, which kpe_cache None
        goes with; q_nope is bfloat16 then.
    kpe_cache : array, [num_blocks, block_size, rope columns], or None
        Rotated columns that all heads share; may be ``cache[..., 512:]`` of the joined cache.
    block_tables : int32 array, [num_seqs, max_blocks_per_seq], or None with `indices`
        Physical block of each logical block; entries past the context may be anything.
    context_lens : int32 array, [num_seqs], or None with `indices`
        Tokens in the cache, the newest included; 0 gives out 0 and lse -inf.
    scale : float
        Factor of the scores. It has no default: the head_dim before the projection decides it,
        1 / sqrt(128 + 64) in DeepSeek's models (times YaRN's factor), not 1 / sqrt(576).
    causal : bool
        Query i sees keys ``j <= i + context_len - q_len``.
    window : (int, int)
        (left, right) around that diagonal; -1 is unlimited.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``; 0 is off.
    sinks : float32 array, [num_heads], optional
        One more logit per head in the softmax denominator.
    indices : int32 array, [num_seqs, topk] or [num_seqs, q_len, topk], optional
        Slots, block * block_size + token in the block, of the tokens that each query sees: its
        list alone, whatever `causal` says, in any order, one listed twice counting twice. -1, and
        every slot that the cache does not have, is left out, anywhere in the list. Blocks may have
        any size then, and `window` must be left out.
    topk_lens : int32 array, [num_seqs] or [num_seqs, q_len], optional
        Entries of each list that count; those behind may be anything. None: topk.
    num_splits : int
        Parts of the keys, a wish; 0 is chosen.
    batch_invariant : bool
        The bits of a sequence do not depend on the others of the batch.
    return_lse : bool
        Also return the log-sum-exp of the scores, natural logarithm.
    out, lse_out : array, optional
        Written in place and returned; lse_out implies return_lse.
    workspace : array, optional
        Contiguous memory of ``explain("mla_decode", ...).workspace_bytes``.
    backend : {"auto", "sm90", "sm80", "simt", "cpu"}
        "auto" or one named kernel.
    stream : optional
        As in `attention`.

    Returns
    -------
    out : array, like q_nope
    lse : float32 array, [num_seqs, num_heads] or [num_seqs, num_heads, q_len]
        If asked for.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `paged_attention`. NotImplementedError for torch tensors that require grad, in grad
        mode.

    Notes
    -----
    JAX arrays are taken eagerly, under jax.jit and jax.vmap, without out, lse_out, workspace and
    stream.

    References
    ----------
    DeepSeek-V2, arXiv:2405.04434.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cache = np.ones((4, 16, 576), np.float32)  # 4 blocks of 16 tokens, joined
    >>> q_nope, q_pe = np.ones((2, 8, 512), np.float32), np.ones((2, 8, 64), np.float32)
    >>> tables, lens = np.array([[0, 1], [3, 2]], np.int32), np.array([20, 7], np.int32)
    >>> ckv, kpe = cache[..., :512], cache[..., 512:]
    >>> cuattn.mla_decode(q_nope, q_pe, ckv, kpe, tables, lens, scale=192**-0.5).shape
    (2, 8, 512)
    """
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        if array is None and indices is None:
            raise TypeError(
                f"mla_decode: {name} must be an int32 array, got None; with indices it may be None"
            )
    if scale is None:
        raise ValueError(
            "mla_decode: scale must be a number, got None; it is 1 / sqrt(head_dim + rope columns) "
            "of the head before the projection, 192**-0.5 for DeepSeek"
        )
    arguments = locals()
    result = _core.mla_decode(arguments)
    return jax_face().mla_decode(**arguments) if result is NotImplemented else result


def jax_face() -> Any:
    """Import what runs on JAX arrays."""
    from .jax import mla

    return mla


def mla_write(
    ckv: ArrayT,
    kpe: ArrayT | None,
    ckv_cache: ArrayT,
    kpe_cache: ArrayT | None,
    slot_mapping: Array | None = None,
    *,
    block_tables: Array | None = None,
    context_lens: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    rope_interleaved: bool = True,
    stream: Any = None,
) -> tuple[ArrayT, ArrayT | None]:
    """Write new latents and their rope columns into their slots of a paged cache, in one launch.

    Parameters
    ----------
    ckv : array, [num_tokens, latent]
        Latents, normalised: float32, float16 or bfloat16; latent is a multiple of 8 up to 1024.
    kpe : array, [num_tokens, rope columns], or None
        Of ckv's dtype; rotated on the way where cos, sin and positions are given. None, with
        kpe_cache: latents without rope columns.
    ckv_cache, kpe_cache : array, [num_blocks, block_size, latent] and [..., rope columns], written
        Of ckv's dtype; two caches, or two views of one joined cache. Or ckv_cache uint8
        [num_blocks, block_size, 656] and kpe_cache None: ckv, bfloat16, is quantised to FlashMLA's
        packed latents, kpe, not rotated, stored beside.
    slot_mapping : int64 array, [num_tokens], optional
        Slot = block * block_size + token in the block; -1 skips the row.
    block_tables, context_lens : int32 array, optional
        In place of slot_mapping, for the newest tokens of sequences, as in `reshape_and_cache`.
    cos, sin : float32 array, [max_position, rotary_dim / 2], optional
        Rotate the first rotary_dim columns of kpe.
    positions : int64 array, [num_tokens], optional
        The row of cos and sin of each token; with them or not at all. With block_tables they may
        be left out, for the place of each token in its sequence.
    rope_interleaved : bool
        Pairs are (2 i, 2 i + 1), DeepSeek's order; False: (i, i + rotary_dim / 2). Without cos and
        sin it says nothing.
    stream : optional
        As in `attention`; ckv's library decides.

    Returns
    -------
    ckv_cache, kpe_cache : array
        The arrays given.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `reshape_and_cache`; nothing was written then.
    """
    if rope_interleaved is True and cos is None and sin is None and positions is None:
        rope_interleaved = False
    arrays = (ckv, kpe, ckv_cache, kpe_cache, slot_mapping)
    options = (cos, sin, positions, rope_interleaved, stream)
    result: tuple[ArrayT, ArrayT | None] = _core.mla_write(
        *arrays, block_tables, context_lens, *options
    )
    if result is not NotImplemented:
        return result
    refuse_tables_of_jax("mla_write", block_tables, context_lens)
    return jax_face().mla_write(*arrays, *options)


def mla_project(
    x: ArrayT,
    proj: Array,
    *,
    transpose: bool = False,
    out: ArrayT | None = None,
    stream: Any = None,
) -> ArrayT:
    """Multiply the rows of each head by the matrix of that head, in float32, rounded once.

    Parameters
    ----------
    x : array, [..., num_heads, columns]
        Up to two axes before the heads; float32, float16 or bfloat16. With `transpose` queries of
        head_dim columns, without latents (such as the out of `mla_decode`).
    proj : array, [num_heads, latent, head_dim]
        Of x's dtype; latent and head_dim are multiples of 8 up to 1024.
    transpose : bool
        True: ``x @ proj^T``, from head_dim to latent columns. False: ``x @ proj``.
    out : array, optional
        Written in place and returned.
    stream : optional
        As in `attention`.

    Returns
    -------
    out : array, [..., num_heads, latent or head_dim]

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q, k_proj = np.ones((2, 4, 8), np.float32), np.ones((4, 16, 8), np.float32)
    >>> cuattn.mla_project(q, k_proj, transpose=True).shape
    (2, 4, 16)
    """
    if proj is None:
        raise TypeError("mla_project: proj must be an array, got None; pass one")
    result: ArrayT = _core.mla_project(
        "mla_project", x, proj, None, transpose, "heads", "heads", "heads", out, stream
    )
    if result is NotImplemented:
        return jax_face().mla_project(x, proj, transpose, out, stream)
    return result


def mla_attention(
    q: ShapedT,
    k_latent: ShapedArray,
    v_latent: ShapedArray,
    k_proj: ShapedArray,
    v_proj: ShapedArray,
    *,
    q_rope: ShapedArray | None = None,
    k_rope: ShapedArray | None = None,
    causal: bool = True,
    scale: float | None = None,
    form: str | None = None,
    return_lse: bool = False,
    out: ShapedT | None = None,
    lse_out: Array | None = None,
    backend: Backend = "auto",
    stream: Any = None,
) -> Any:
    """Attend to keys and values that are projections of latents: a whole prompt, or new tokens.

    ``k = k_latent @ k_proj[h]``, ``v = v_latent @ v_proj[h]``, then attention, in one of two forms
    that are equal but for rounding. "explicit" projects each token once. "absorbed" projects
    queries and outputs instead and reads the latents; with few queries on many keys it has far
    fewer products. ``explain("mla_attention", ...)`` shows what both cost.

    Parameters
    ----------
    q : array, [batch, num_heads, seqlen_q, head_dim]
        float32, float16 or bfloat16; head_dim is a multiple of 8.
    k_latent : array, [batch, seqlen_kv, latent_k]
        Of q's dtype; a multiple of 8 up to 1024 columns.
    v_latent : array, [batch, seqlen_kv, latent_v]
        Latents of the values; the same array where one latent is both.
    k_proj : array, [num_heads, latent_k, head_dim]
        Key projection of each head.
    v_proj : array, [num_heads, latent_v, head_dim_v]
        Value projection of each head.
    q_rope, k_rope : array, [batch, num_heads, seqlen_q, rope_dim] and [batch, seqlen_kv, rope_dim]
        Rotated columns that scores have beside, the keys' shared by all heads; both or neither.
    causal : bool
        Query i sees keys ``j <= i + seqlen_kv - seqlen_q``.
    scale : float, optional
        Factor of the scores; None is ``1 / sqrt(head_dim + rope_dim)``.
    form : {"explicit", "absorbed"}, optional
        None: the one whose estimate is the smaller.
    return_lse : bool
        Also return the log-sum-exp of the scores, natural logarithm.
    out, lse_out : array, optional
        Written in place and returned; lse_out implies return_lse. They share no memory with each
        other or another argument.
    backend : str
        As in `attention`: of the kernel of that form.
    stream : optional
        As in `attention`.

    Returns
    -------
    out : array, [batch, num_heads, seqlen_q, head_dim_v]
    lse : float32 array, [batch, num_heads, seqlen_q]
        If asked for.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention`. NotImplementedError also for a form that cannot run the call, and for
        torch tensors that require grad, in grad mode.

    Notes
    -----
    What lies between the steps is allocated by q's library: keys and values of all heads, or the
    projected queries and outputs.

    >>> import numpy as np, cuattn
    >>> q, latent = np.ones((1, 4, 3, 8), np.float32), np.ones((1, 5, 16), np.float32)
    >>> proj = np.ones((4, 16, 8), np.float32)
    >>> cuattn.mla_attention(q, latent, latent, proj, proj).shape
    (1, 4, 3, 8)
    """
    op = "mla_attention"
    arrays: dict[str, Any] = {"q": q, "k_latent": k_latent, "v_latent": v_latent, "k_proj": k_proj,
              "v_proj": v_proj, "q_rope": q_rope, "k_rope": k_rope}  # fmt: skip
    for name, array in arrays.items():
        if array is None and "rope" in name:
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(
                f"{op}: {name} must be an array, got {type(array).__name__}; pass numpy, torch, "
                "CuPy or JAX arrays"
            )
        if wants_gradient(array):
            raise NotImplementedError(
                f"{op}: {name} requires grad, but no gradient goes through {op}; call it under "
                f"torch.no_grad() or pass {name}.detach()"
            )
        dtype = arrays["q"].dtype
        if str(array.dtype) != str(dtype):
            raise ValueError(f"{op}: {name} must be {dtype} like q, got {array.dtype}; cast it")
    check_flag(op, "causal", causal)
    check_flag(op, "return_lse", return_lse)
    shapes = {name: None if a is None else a.shape for name, a in arrays.items()}
    extents = read_extents(op, shapes, causal, v_latent is k_latent)
    chosen = choose(op, form, extents, dtype.itemsize, backend)
    if scale is None:
        scale = 1 / math.sqrt(extents.head_dim + extents.rope_dim)
    if is_jax(q):
        return jax_face().mla_attention(
            chosen, arrays, out=out, lse_out=lse_out, stream=stream, causal=causal, scale=scale,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    refuse_shared(op, {"lse_out": lse_out, "out": out}, arrays)
    attend = explicit if chosen == "explicit" else absorbed
    return attend(
        arrays, out, lse_out, stream, causal=causal, scale=scale, return_lse=return_lse,
        backend=backend,
    )  # fmt: skip


def explicit(arrays: dict[str, Any], out: Any, lse_out: Any, stream: Any, **options: Any) -> Any:
    """Project keys and values of all heads, then attend."""
    layouts = ("shared", "shared", "heads")  # of x, of the tail, and of out
    keys = project(arrays, "k_latent", "k_proj", "k_rope", False, layouts, stream)
    values = project(arrays, "v_latent", "v_proj", None, False, layouts, stream)
    # [batch, heads, rows, columns] of arrays whose rows come before the heads
    keys, values = (x.swapaxes(1, 2) for x in (keys, values))
    queries = arrays["q"]
    if arrays["q_rope"] is not None:
        queries = project(arrays, "q", None, "q_rope", False, ("bhsd",) * 3, stream)
    with words_of("attention"):
        return attention(
            queries, keys, values, layout="bhsd", out=out, lse_out=lse_out, stream=stream,
            **options,
        )  # fmt: skip


def absorbed(arrays: dict[str, Any], out: Any, lse_out: Any, stream: Any, **options: Any) -> Any:
    """Project queries, attend to the latents, project what comes out."""
    k_latent, v_latent = arrays["k_latent"], arrays["v_latent"]
    queries = project(arrays, "q", "k_proj", None, True, ("bhsd", "", "heads"), stream)
    # out is refused before lse_out is written: queries have the shape of what is projected to it.
    last = {**arrays, "queries": queries.swapaxes(1, 2)}
    layouts = ("bhsd", "", "bhsd")
    out = project(last, "queries", "v_proj", None, False, layouts, stream, out, lse_out, True)
    names = {"q_nope": "q", "q_pe": "q_rope", "ckv_cache": "k_latent", "kpe_cache": "k_rope",
             "v_cache": "v_latent", "mla_decode": "mla_attention"}  # fmt: skip
    with words_of("mla_decode", names):
        results = _core.mla_decode(
            {
                "q_nope": queries,
                "q_pe": None if arrays["q_rope"] is None else arrays["q_rope"].swapaxes(1, 2),
                "ckv_cache": k_latent,
                "kpe_cache": arrays["k_rope"],
                "v_cache": None if v_latent is k_latent else v_latent,
                "lse_out": lse_out,
                "stream": stream,
                **options,
            }
        )
    has_lse = options["return_lse"] or lse_out is not None
    last["queries"] = (results[0] if has_lse else results).swapaxes(1, 2)
    project(last, "queries", "v_proj", None, False, layouts, stream, out)
    return (out, results[1]) if has_lse else out


def project(
    arrays: dict[str, Any],
    x: str,
    proj: str | None,
    tail: str | None,
    transpose: bool,
    layouts: tuple[str, ...],
    stream: Any,
    out: Any = None,
    lse_out: Any = None,
    check_only: bool = False,
) -> Any:
    """Run a step of mla_attention over its arrays of these names; out, x and tail by layouts."""
    given = [None if name is None else arrays[name] for name in (x, proj, tail)]
    names = {"x": x, "proj": proj or "proj", "tail": tail or "tail"}
    with words_of("mla_project", names):
        return _core.mla_project(
            "mla_attention", *given, transpose, *layouts, out, stream, lse_out, check_only
        )


@contextlib.contextmanager
def words_of(step: str, names: dict[str, str] | None = None) -> Iterator[None]:
    """Raise what a step refuses in the words of mla_attention."""
    op, words = "mla_attention", names or {}
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        said = re.compile("|".join([f"^{step}", *(rf"\b{word}\b" for word in words)]))
        error.args = (said.sub(lambda found: words.get(found[0], op), str(error)),)
        raise
