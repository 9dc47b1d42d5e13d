# SPDX-License-Identifier: Apache-2.0
"""The oracle of the gradients, in numpy and float64, straight from the formula.

With ``rounded_to`` the same lines become the plain low-precision formula: products accumulated in
float32, the scores, the probabilities and their gradients rounded to the dtype before the next
product, as the results are. Held against central differences by
backward/test_reference_backward.py. Next: backward_cases.py.
"""

from __future__ import annotations

import numpy as np

import reference
from reference import _product, _round

NAMES = ("dq", "dk", "dv", "dbias", "dsinks", "dslopes")


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    layout="bshd",
    causal=False,
    window=(-1, -1),
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    bias=None,
    seqused_q=None,
    seqused_k=None,
    kv_start=None,
    dlse=None,
    dropout_p=0.0,
    dropout_seed=0,
    dropout_offset=0,
    dropout_row=0,
    dropout_key=0,
    dropout_head=0,
    dropout_heads=0,
    rounded_to=None,
    sizes=None,
):
    """Gradients of sum(dout * out) + sum(dlse * lse) as a dict of NAMES; what the call has no use
    for (a bias of bool, sinks that are not given) is left out. out and lse are the forward pass's.

    The dict `sizes` takes the sums of absolute values of what a gradient adds up, of dq, dk, dv
    the largest.
    """
    sizes = {} if sizes is None else sizes
    compute = np.float64 if rounded_to is None else np.float32
    axes = reference.LAYOUTS[layout]
    dout, q, k, v, out = (np.asarray(x).transpose(axes) for x in (dout, q, k, v, out))
    (batch, heads, rows, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    used_q, used_k, first_k, in_use_q, in_use_k = _in_use(q, k, seqused_q, seqused_k, kv_start)
    # Rows that take no part may hold anything, and 0 * NaN is NaN.
    q, dout, out = (np.where(in_use_q[..., None], x, 0).astype(compute) for x in (q, dout, out))
    k, v = (np.where(in_use_k[..., None], x, 0).astype(compute) for x in (k, v))
    s = reference.score(
        *(q, k, used_q, used_k, first_k),
        *(causal, window, scale, softcap, alibi_slopes, bias, rounded_to),
    )
    lse = np.asarray(lse).astype(compute)
    alive = in_use_q & (lse != -np.inf)  # [batch, heads, rows]
    gradient = np.zeros_like(lse) if dlse is None else np.asarray(dlse).astype(compute)
    delta = np.where(alive, (dout * out).sum(axis=-1, dtype=compute) - gradient, 0).astype(compute)
    delta_size = np.where(alive, np.abs(dout * out).sum(axis=-1) + np.abs(gradient), 0)
    places = (dropout_row, dropout_key, dropout_head, dropout_heads)
    kept = reference.dropout(
        dropout_p, dropout_seed, dropout_offset, (batch, heads), (rows, keys), first_k, places
    )
    kept = compute(1) if kept is None else kept.astype(compute)

    def grouped(x):  # the query heads of a group one behind the other
        return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * rows, x.shape[-1])

    def transposed(x):
        return x.swapaxes(-1, -2)

    with np.errstate(all="ignore"):
        weights = np.where(s.visible, np.exp(s.scores - lse[..., None]), 0)
        weights = _round(weights.astype(compute), rounded_to)
        dweights = _round(_product(grouped(dout), transposed(v), rounded_to), rounded_to)
        dscores = weights * (kept * dweights.reshape(weights.shape) - delta[..., None])
        dscores = np.where(s.visible, dscores, 0).astype(compute)
        parts = abs(kept * dweights.reshape(weights.shape)) + delta_size[..., None]
        parts = np.where(s.visible, weights * parts, 0)
        products = grouped(parts * np.abs(s.slope))
        dproducts = grouped(_round(dscores * s.slope, rounded_to))
        scale = compute(1 / np.sqrt(dim) if scale is None else scale)
        dq = scale * _product(dproducts, k, rounded_to).reshape(q.shape)
        dk = scale * _product(transposed(dproducts), grouped(q), rounded_to)
        kept_weights = grouped(_round(weights * kept, rounded_to))
        dv = _product(transposed(kept_weights), grouped(dout), rounded_to)
        sized = {
            "dq": abs(scale) * _product(products, abs(k), None),
            "dk": abs(scale) * _product(transposed(products), abs(grouped(q)), None),
            "dv": _product(transposed(abs(kept_weights)), abs(grouped(dout)), None),
        }
        sizes.update({name: x.max(initial=0) for name, x in sized.items()})
    found = {
        name: _round(x, rounded_to).transpose(axes)
        for name, x in (("dq", dq), ("dk", dk), ("dv", dv))
    }
    if bias is not None and np.asarray(bias).dtype != np.bool_:
        dbias = _sum_to(dscores, np.asarray(bias).shape)
        sizes["dbias"] = _sum_to(parts, np.asarray(bias).shape)
        found["dbias"] = dbias if rounded_to is None else _round(dbias, np.asarray(bias).dtype)
    if sinks is not None:
        logits = np.asarray(sinks).astype(compute)[None, :, None]
        weights = np.exp(logits - np.where(alive, lse, np.inf))
        found["dsinks"] = -_sum_to(weights * delta, (1, heads, 1)).reshape(heads)
        sizes["dsinks"] = _sum_to(weights * delta_size, (1, heads, 1)).reshape(heads)
    if alibi_slopes is not None:
        shape = np.asarray(alibi_slopes).shape
        found["dslopes"] = -_sum_to_heads(np.where(s.visible, dscores * s.distance, 0), shape)
        sizes["dslopes"] = _sum_to_heads(parts * np.abs(s.distance), shape)
    return found


def _in_use(q, k, seqused_q, seqused_k, kv_start):
    """Rows and keys in use of each sequence, its first key, masks of both [batch, 1, tokens]."""
    (batch, _, rows, _), keys = q.shape, k.shape[2]
    used_q = reference._used(seqused_q, rows, batch)
    used_k = reference._used(seqused_k, keys, batch)
    first_k = reference.first_keys(kv_start, keys, batch)
    in_use_q = (np.arange(rows) < used_q[:, None])[:, None]
    in_use_k = (np.arange(keys) < used_k[:, None])[:, None]
    in_use_k = in_use_k & (np.arange(keys) >= first_k[:, None])[:, None]
    return used_q, used_k, first_k, in_use_q, in_use_k


def attention_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    seqused_q=None,
    seqused_k=None,
    dlse=None,
    **options,
):
    """The same over packed sequences; rows that belong to no sequence get 0."""
    lengths = {"q": (cu_seqlens_q, max_seqlen_q), "k": (cu_seqlens_k, max_seqlen_k)}

    def pad(x, side):
        return reference._pad(np.asarray(x), *lengths[side])

    def pad_lse(x):
        return pad(np.asarray(x).T, "q")[0].swapaxes(1, 2)

    (padded_q, stored_q), (padded_k, stored_k) = pad(q, "q"), pad(k, "k")
    found = attention_backward(
        pad(dout, "q")[0],
        padded_q,
        padded_k,
        pad(v, "k")[0],
        pad(out, "q")[0],
        pad_lse(lse),
        seqused_q=stored_q if seqused_q is None else np.minimum(stored_q, seqused_q),
        seqused_k=stored_k if seqused_k is None else np.minimum(stored_k, seqused_k),
        dlse=None if dlse is None else pad_lse(dlse),
        **options,
    )
    for name, like, side in (("dq", q, "q"), ("dk", k, "k"), ("dv", v, "k")):
        packed = np.zeros(np.shape(like), found[name].dtype)
        stored = stored_q if side == "q" else stored_k
        for b, (start, length) in enumerate(zip(lengths[side][0][:-1], stored, strict=True)):
            packed[start : start + length] = found[name][b, :length]
        found[name] = packed
    return found


def _sum_to_heads(x, shape):
    """Sum x [batch, heads, rows, keys] to [heads] or [batch, heads]."""
    return _sum_to(x, (*([1] * (2 - len(shape))), *shape, 1, 1)).reshape(shape)


def _sum_to(x, shape):
    """Sum over the axes that a broadcast from `shape` repeated, one term after the other.

    numpy adds pairwise, which in float32 no kernel does.
    """
    shape = (1,) * (x.ndim - len(shape)) + tuple(shape), shape
    for axis, extent in enumerate(shape[0]):
        if extent == 1 and x.shape[axis] != 1:
            total = np.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
            for i in range(x.shape[axis]):
                total = total + x.take([i], axis)
            x = total
    return x.reshape(shape[1])
