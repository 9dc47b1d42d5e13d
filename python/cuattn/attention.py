# SPDX-License-Identifier: Apache-2.0
"""The public operations: attention, attention_varlen, merge_states.

Each passes its arguments in order to the compiled module, which validates, allocates the result in
the caller's own library and runs; JAX arrays, which only XLA may touch, go through cuattn.jax. In
front of the two attentions stand builtins of the same signatures, for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core
from ._arrays import Array, ArrayT, find_cublas


def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    workspace: Array | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Attend with every query to the keys and average the values by softmax.

    ``out = softmax(mask(bias + alibi + softcap(scale * q @ k.T))) @ v`` for each batch entry and
    head, with scores, softmax and accumulation in float32.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim]
        Queries: float32, float16 or bfloat16; on the CPU or a CUDA device, in any library with
        DLPack. head_dim is a multiple of 8 up to 256. Any strides, if the last axis is contiguous
        (and rows start on 16 bytes, on CUDA).
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim]
        Keys, of q's dtype. num_heads_q is a multiple of num_heads_kv: query head h reads key head
        ``h // (num_heads_q // num_heads_kv)``.
    v : array, [batch, seqlen_kv, num_heads_kv, head_dim_v]
        Values, of q's dtype.
    layout : {"bshd", "bhsd"}
        Order of the axes; "bhsd" has the heads before the sequence, in q, k, v and out alike.
    causal : bool
        Query i sees key j when ``j <= i + seqlen_kv - seqlen_q``: the last query sees every key.
    window : (int, int)
        (left, right): query i sees ``i + seqlen_kv - seqlen_q - left <= j <= i + seqlen_kv -
        seqlen_q + right``; -1 is unlimited. Composes with causal.
    scale : float, optional
        Factor of the scores; None is ``1 / sqrt(head_dim)``.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``, after scale, before bias and masks; 0 is
        off.
    alibi_slopes : float32 array, [num_heads_q] or [batch, num_heads_q], optional
        Adds ``-slope * abs(i + seqlen_kv - seqlen_q - j)``.
    sinks : float32 array, [num_heads_q], optional
        One more logit per head in the softmax denominator, without a value; lse includes it.
    bias : array, optional
        Added to the scores: float32 or q's dtype, or bool (True keeps the key); broadcastable to
        [batch, num_heads_q, seqlen_q, seqlen_kv].
    q_scale, k_scale, v_scale : optional
        Scales of float8_e4m3fn inputs; no kernel takes these yet.
    seqused_q, seqused_k : int32 array, [batch], optional
        Lengths in use of a padded batch; query rows beyond give out 0 and lse -inf, keys beyond are
        not seen, and causal and window count from the lengths in use.
    num_splits : int
        Parts that the keys are cut into; 0 lets the library choose. A wish: a kernel takes at most
        one for each tile of keys, and all but "sm90" with a dense batch take 1. `explain` says how
        many there are.
    batch_invariant : bool
        The bits of a sequence's result do not depend on the rest of the batch: keys are not split
        unless num_splits says so.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Written in place and returned; giving lse_out implies return_lse. They share no memory with
        each other or another argument, q included; slices of one packed array do not.
    workspace : array, optional
        Contiguous device memory for kernels that need some: ``explain(...).workspace_bytes``, of
        any dtype. By default it comes from q's library.
    backend : str
        "auto", or one named rung of the ladder: "naive", "cublas", "tiled", "simt", "sm80", "sm90"
        on CUDA, "naive", "cpu" on the CPU. A rung that cannot run the call raises and says why.
    stream : optional
        None is the current stream of q's library; else a raw pointer (int) or an object with
        ``cuda_stream``, ``ptr`` or ``__cuda_stream__``, on which the inputs must already be
        ordered.

    Returns
    -------
    out : array like q, [batch, seqlen_q, num_heads_q, head_dim_v]
        In the library of q. A query without visible key gives 0.
    lse : float32 array, [batch, num_heads_q, seqlen_q]
        With return_lse only: natural logarithm; -inf for a query without visible key.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or number that no kernel can take.
    TypeError
        An argument of the wrong kind, such as a list for an array.
    NotImplementedError
        A valid call that no kernel serves; a torch tensor that requires grad, while grad mode is
        on.
    CudaError
        A CUDA call failed.
    MemoryError
        The workspace cannot be had, or the given one is too small.

    References
    ----------
    Online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 4, 2, 8), (1, 2, 4))
    """
    if isinstance(backend, str) and backend == "cublas":
        find_cublas()
    if q_scale is not None or k_scale is not None or v_scale is not None:
        refuse_scales("attention")
    result = _core.attention(
        q,
        k,
        v,
        layout,
        causal,
        window,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        bias,
        seqused_q,
        seqused_k,
        num_splits,
        batch_invariant,
        return_lse,
        out,
        lse_out,
        workspace,
        backend,
        stream,
    )
    if result is not NotImplemented:
        return result
    return jax_face().attention(
        q,
        k,
        v,
        layout=layout,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        bias=bias,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        out=out,
        lse_out=lse_out,
        workspace=workspace,
        backend=backend,
        stream=stream,
    )


def signature_and_doc(function: Any) -> str:
    """Return the docstring of a builtin: the signature in front, where Python reads it."""
    code = function.__code__
    positional = ", ".join(code.co_varnames[: code.co_argcount])
    defaults = ", ".join(f"{name}={value!r}" for name, value in function.__kwdefaults__.items())
    return f"{function.__name__}({positional}, *, {defaults})\n--\n\n{function.__doc__}"


if not TYPE_CHECKING:
    # A call of the function above would first fill in its 20 defaults and pass them all on; the
    # builtin of the same signature touches what the caller gave, and calls the function otherwise.
    attention = _core.attention_front(attention, signature_and_doc(attention))


def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_tables: Array | None = None,
    kv_layout: str = "nhd",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    workspace: Array | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Attend within sequences of different lengths that are packed end to end, without padding.

    Sequence b owns the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; the formula is that of
    `attention`.

    Parameters
    ----------
    q : array, [total_q, num_heads_q, head_dim]
        Queries of all sequences; dtypes, devices and strides as in `attention`.
    k : array, [total_kv, num_heads_kv, head_dim]
        Keys of all sequences.
    v : array, [total_kv, num_heads_kv, head_dim_v]
        Values of all sequences.
    cu_seqlens_q, cu_seqlens_k : int32 array, [batch + 1]
        Offsets of the sequences, beginning with 0, on the device of q. Not monotonic offsets raise
        on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped to the rows there
        are.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths, known on the host; query rows beyond are not written.
    block_tables : int32 array, [batch, max_blocks_per_seq], optional
        k and v are then caches in blocks, of q's dtype, as `paged_attention` takes them: chunked
        prefill, and mixed batches of prefill and decode. cu_seqlens_k may be None where seqused_k
        says the lengths. Few queries a sequence run paged_attention's kernels; sm90 reads blocks
        of a multiple of 16 tokens, "nhd" and "hnd", where they lie; else the keys are gathered
        into the workspace first, 2 * batch * max_seqlen_k rows of num_heads_kv heads
        (docs/layouts.md). Entries past a sequence are never read. Ids and lengths that do not
        exist raise on the CPU, and on CUDA under CUATTN_CHECK=1; without it they are clamped.
    kv_layout : {"nhd", "hnd", "vllm"}
        Order of the axes of these caches.
    causal, window, scale, softcap, alibi_slopes, sinks, bias, q_scale, k_scale, v_scale
        As in `attention`; bias broadcasts to [batch, num_heads_q, max_seqlen_q, max_seqlen_k].
    seqused_q, seqused_k : int32 array, [batch], optional
        Rows in use of each sequence.
    num_splits, batch_invariant, return_lse, out, lse_out, workspace, backend, stream
        As in `attention`.

    Returns
    -------
    out : array like q, [total_q, num_heads_q, head_dim_v]
        In the library of q.
    lse : float32 array, [num_heads_q, total_q]
        With return_lse only.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `attention`.

    References
    ----------
    FlashAttention-2, arXiv:2307.08691.
    """
    if isinstance(backend, str) and backend == "cublas":
        find_cublas()
    if q_scale is not None or k_scale is not None or v_scale is not None:
        refuse_scales("attention_varlen")
    check_ragged(cu_seqlens_q, cu_seqlens_k, block_tables, kv_layout)
    result = _core.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        block_tables,
        kv_layout,
        causal,
        window,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        bias,
        seqused_q,
        seqused_k,
        num_splits,
        batch_invariant,
        return_lse,
        out,
        lse_out,
        workspace,
        backend,
        stream,
    )
    if result is not NotImplemented:
        return result
    return jax_face().attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        block_tables=block_tables,
        kv_layout=kv_layout,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        bias=bias,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        out=out,
        lse_out=lse_out,
        workspace=workspace,
        backend=backend,
        stream=stream,
    )


if not TYPE_CHECKING:
    attention_varlen = _core.attention_varlen_front(
        attention_varlen, signature_and_doc(attention_varlen)
    )


def merge_states(
    out_a: ArrayT,
    lse_a: ArrayT,
    out_b: ArrayT | None = None,
    lse_b: ArrayT | None = None,
    *,
    layout: str | None = None,
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
        else they share no memory with another argument.
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


def jax_face() -> Any:
    """Import cuattn.jax, which needs JAX."""
    from . import jax

    return jax


def check_ragged(cu_seqlens_q: Any, cu_seqlens_k: Any, block_tables: Any, kv_layout: str) -> None:
    """Raise for what attention_varlen cannot do without."""
    if block_tables is None and kv_layout != "nhd":
        raise ValueError(
            "attention_varlen: kv_layout belongs to paged caches and must be 'nhd' without "
            f"block_tables, got {kv_layout!r}; leave it out"
        )
    if cu_seqlens_q is None or (cu_seqlens_k is None and block_tables is None):
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"attention_varlen: {name} must be an int32 array [batch + 1], got None")


def refuse_scales(op: str) -> None:
    """Raise for scales, which only float8 kernels take."""
    raise NotImplementedError(
        f"{op}: q_scale, k_scale and v_scale belong to float8_e4m3fn arrays, for which no kernel "
        "is built yet; cast to bfloat16"
    )
