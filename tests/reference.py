# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention in numpy, float64, straight from the formula; it shares no code with the
library.

With ``rounded_to`` the same lines become the *plain low-precision formula* that the tolerance rule
compares with: everything in float32, the scores, the probabilities and the output rounded to the
dtype. Next: cases.py (the rule), reference_backward.py (the gradients).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

LAYOUTS = {
    "bshd": (0, 2, 1, 3),
    "bhsd": (0, 1, 2, 3),
}  # to and from heads first; both are their own inverse


def attention(
    q,
    k,
    v,
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
    dropout_p=0.0,
    dropout_seed=0,
    dropout_offset=0,
    dropout_row=0,
    dropout_key=0,
    dropout_head=0,
    dropout_heads=0,
    rounded_to=None,
):
    """Attention over a padded batch; returns out and lse, lse [batch, num_heads_q, seqlen_q]."""
    axes = LAYOUTS[layout]
    q, k, v = (np.asarray(x).transpose(axes) for x in (q, k, v))
    batch, stored_q, stored_k = q.shape[0], q.shape[2], k.shape[2]
    first_k = first_keys(kv_start, stored_k, batch)
    out, lse = _attend(
        q,
        k,
        v,
        _used(seqused_q, stored_q, batch),
        _used(seqused_k, stored_k, batch),
        first_k,
        causal,
        window,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        bias,
        dropout(
            dropout_p,
            dropout_seed,
            dropout_offset,
            (batch, q.shape[1]),
            (stored_q, stored_k),
            first_k,
            (dropout_row, dropout_key, dropout_head, dropout_heads),
        ),
        rounded_to,
    )
    return out.transpose(axes), lse


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    seqused_q=None,
    seqused_k=None,
    **options,
):
    """Attention over packed sequences; returns out like q and lse [num_heads_q, total_q].

    Rows that belong to no sequence hold NaN in both: the library leaves them unwritten.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    heads = options.pop("dropout_heads", 0) or q.shape[1]
    first_head = options.pop("dropout_head", 0)
    dtype = np.float64 if options.get("rounded_to") is None else np.float32
    out = np.full((*q.shape[:2], v.shape[2]), np.nan, dtype)
    lse = np.full((q.shape[1], q.shape[0]), np.nan, dtype)
    for b, (queries, keys) in enumerate(
        zip(_spans(cu_seqlens_q, max_seqlen_q), _spans(cu_seqlens_k, max_seqlen_k), strict=True)
    ):
        of_sequence, of_sequence_lse = attention(
            q[None, queries],
            k[None, keys],
            v[None, keys],
            **{name: _of_sequence(name, x, b, q[queries], k[keys]) for name, x in options.items()},
            seqused_q=None if seqused_q is None else np.asarray(seqused_q)[b : b + 1],
            seqused_k=None if seqused_k is None else np.asarray(seqused_k)[b : b + 1],
            dropout_head=first_head + b * heads,
        )
        out[queries], lse[:, queries] = of_sequence[0], of_sequence_lse[0]
    return out, lse


def _spans(cu_seqlens, max_seqlen):
    """The rows of each sequence in packed ones."""
    ends = np.asarray(cu_seqlens).astype(np.int64)
    return [slice(a, min(b, a + max_seqlen)) for a, b in itertools.pairwise(ends)]


def _of_sequence(name, x, b, q, k):
    """An option of one sequence: of some each has its own, and a bias is as long as the longest."""
    if name == "kv_start" or (name == "alibi_slopes" and np.ndim(x) == 2):
        return None if x is None else x[b : b + 1]
    if name != "bias" or x is None:
        return x
    if x.ndim == 4 and len(x) > 1:
        x = x[b : b + 1]
    rows, keys = (slice(1 if n == 1 else len(y)) for n, y in zip(x.shape[-2:], (q, k), strict=True))
    return x[..., rows, keys]


def paged_attention(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    *,
    kv_layout="nhd",
    k_scale=None,
    v_scale=None,
    causal=True,
    **options,
):
    """Attention over paged caches, which may be of any float type; returns out and lse as the
    library does.
    """
    q, lens = np.asarray(q), np.asarray(context_lens)
    decode = q.ndim == 3
    queries = q[:, None] if decode else q
    k, v = (
        _gather(unpaged(cache, kv_layout, is_k), block_tables, lens, scale)
        for cache, is_k, scale in ((k_cache, True, k_scale), (v_cache, False, v_scale))
    )
    out, lse = attention(queries, k, v, causal=causal, seqused_k=lens, **options)
    return (out[:, 0], lse[:, :, 0]) if decode else (out, lse)


def paged_partitions(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    *,
    scale,
    partition_size,
    kv_layout="vllm",
    alibi_slopes=None,
    k_scale=None,
    v_scale=None,
):
    """What PagedAttention V2 keeps of each partition: max_logits, exp_sums, tmp_out, in float64.

    Partitions past the context hold NaN.
    """
    q, lens = np.asarray(q).astype(np.float64), np.asarray(context_lens)
    k = _gather(unpaged(k_cache, kv_layout, True), block_tables, lens, k_scale).astype(np.float64)
    v = _gather(unpaged(v_cache, kv_layout, False), block_tables, lens, v_scale).astype(np.float64)
    seqs, heads, head_dim = q.shape
    capacity = np.asarray(block_tables).shape[1] * unpaged(k_cache, kv_layout, True).shape[1]
    partitions = -(-capacity // partition_size)
    max_logits, exp_sums = (np.full((seqs, heads, partitions), np.nan) for _ in range(2))
    tmp_out = np.full((seqs, heads, partitions, head_dim), np.nan)
    for b, h in np.ndindex(seqs, heads):
        keys, values = (x[b, : lens[b], h // (heads // k.shape[2])] for x in (k, v))
        scores = scale * keys @ q[b, h]
        if alibi_slopes is not None:
            slope = np.broadcast_to(alibi_slopes, (seqs, heads))[b, h].astype(np.float64)
            scores = scores - slope * (lens[b] - 1 - np.arange(lens[b]))
        for part in range(-(-int(lens[b]) // partition_size)):
            these = slice(part * partition_size, (part + 1) * partition_size)
            weights = np.exp(scores[these] - scores[these].max())
            max_logits[b, h, part], exp_sums[b, h, part] = scores[these].max(), weights.sum()
            tmp_out[b, h, part] = weights @ values[these] / weights.sum()
    return max_logits, exp_sums, tmp_out


def unpaged(cache, kv_layout, is_k):
    """A cache as [num_blocks, block_size, num_heads_kv, head_dim], whatever its layout."""
    cache = np.asarray(cache)
    if kv_layout == "nhd":
        return cache
    if kv_layout == "hnd":
        return cache.transpose(0, 2, 1, 3)
    if is_k:  # [num_blocks, heads, head_dim / x, block_size, x]
        blocks, heads, chunks, size, x = cache.shape
        return cache.transpose(0, 3, 1, 2, 4).reshape(blocks, size, heads, chunks * x)
    return cache.transpose(0, 3, 1, 2)


def _gather(cache, block_tables, lens, scale):
    """The keys of each sequence as [num_seqs, capacity, num_heads_kv, head_dim], float32; 0 past
    its context.
    """
    tables = np.asarray(block_tables)
    size, heads, head_dim = cache.shape[1:]
    dense = np.zeros((len(tables), tables.shape[1] * size, heads, head_dim), np.float32)
    for b, length in enumerate(lens):
        blocks = tables[b, : -(-int(length) // size)]
        rows = cache[blocks].reshape(-1, heads, head_dim).astype(np.float32)
        dense[b, :length] = rows[:length]
    if scale is None:
        return dense
    scale = np.asarray(scale, np.float32)
    return dense * (scale if scale.ndim == 0 else scale.reshape(-1, 1, heads, 1))


def merge_states(outs, lses, *, layout="bshd", rounded_to=None):
    """Merge attention results over disjoint keys; parts lie along a new first axis of outs and
    lses.
    """
    compute = np.float64 if rounded_to is None else np.float32
    outs, lses = np.asarray(outs).astype(compute), np.asarray(lses).astype(compute)
    with np.errstate(all="ignore"):
        top = np.max(lses, axis=0)
        top = np.where(top == -np.inf, compute(0), top)
        weights = np.exp(lses - top)
        total = weights.sum(axis=0)
        lse = top + np.log(total)
        weights = weights / np.where(total == 0, compute(1), total)
        if layout in ("bshd", "thd"):  # lse has heads before rows there, out behind them
            weights = weights.swapaxes(-1, -2)
        out = np.where(weights[..., None] == 0, compute(0), weights[..., None] * outs).sum(axis=0)
    return _round(out, rounded_to), lse


def _attend(
    q,
    k,
    v,
    used_q,
    used_k,
    first_k,
    causal,
    window,
    scale,
    softcap,
    alibi_slopes,
    sinks,
    bias,
    kept,
    rounded_to,
):
    """The formula. q, k, v have heads first; used_q, used_k int64 [batch] are the lengths that
    take part, first_k the first key that does; kept is what dropout() gives.
    """
    with np.errstate(all="ignore"):  # NaN and infinities are cases under test
        s = score(
            *(q, k, used_q, used_k, first_k),
            *(causal, window, scale, softcap, alibi_slopes, bias, rounded_to),
        )
        compute, v = s.scores.dtype.type, np.ascontiguousarray(v, s.scores.dtype)
        sink = -np.inf
        if sinks is not None:
            sink = np.asarray(sinks).astype(compute)[None, :, None]
            sink = np.where((np.arange(q.shape[2]) < used_q[:, None])[:, None], sink, -np.inf)
        top = np.maximum(s.scores.max(axis=-1, initial=-np.inf), sink)
        top = np.where(top == -np.inf, compute(0), top)
        weights = np.where(s.visible, np.exp(s.scores - top[..., None]), compute(0))
        total = weights.sum(axis=-1) + np.exp(sink - top)
        lse = (top + np.log(total)).astype(compute)
        weights = weights / np.where(total == 0, compute(1), total)[..., None]
        if kept is not None:
            weights = weights * kept.astype(compute)
        out = _weighted_sum(_round(weights, rounded_to), v, s.visible, rounded_to)
    return _round(out, rounded_to), lse


@dataclasses.dataclass
class Scores:
    """Of every query and key, [batch, num_heads_q, seqlen_q, seqlen_kv]."""

    scores: np.ndarray  # -inf where not visible
    visible: np.ndarray
    slope: np.ndarray  # of the softcap: d(capped) / d(scaled); 1 without
    distance: np.ndarray  # |i + used_k - used_q - j|, [batch, 1, seqlen_q, seqlen_kv]


def score(
    q, k, used_q, used_k, first_k, causal, window, scale, softcap, alibi_slopes, bias, rounded_to
):
    """What stands in the softmax; q and k have heads first."""
    compute = np.float64 if rounded_to is None else np.float32
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    q, k = (np.ascontiguousarray(x, compute) for x in (q, k))
    scale = compute(1 / np.sqrt(head_dim) if scale is None else scale)
    row, key = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    diagonal = (
        row + (used_k - used_q)[:, None, None]
    )  # [batch, seqlen_q, 1]: the key that stands at the query

    visible = (row < used_q[:, None, None]) & (key < used_k[:, None, None])
    visible = visible & (key >= first_k[:, None, None])
    left, right = window
    if left >= 0:
        visible = visible & (key >= diagonal - left)
    if right >= 0:
        visible = visible & (key <= diagonal + right)
    if causal:
        visible = visible & (key <= diagonal)
    visible = np.broadcast_to(visible[:, None], (batch, heads, seqlen_q, seqlen_k))

    grouped = q.reshape(batch, kv_heads, heads // max(kv_heads, 1) * seqlen_q, head_dim)
    scores = _round(scale * _product(grouped, k.swapaxes(-1, -2), rounded_to), rounded_to).reshape(
        visible.shape
    )
    slope = np.ones_like(scores)
    if softcap:
        tanh = np.tanh(scores / compute(softcap))
        scores, slope = compute(softcap) * tanh, 1 - tanh * tanh
    distance = np.abs(diagonal - key).astype(compute)[:, None]
    if alibi_slopes is not None:
        slopes = np.broadcast_to(np.asarray(alibi_slopes).astype(compute), (batch, heads))
        scores = scores - slopes[:, :, None, None] * distance
    if bias is not None and np.asarray(bias).dtype == np.bool_:
        visible = visible & bias
    elif bias is not None:
        scores = scores + np.asarray(bias).astype(compute)
    visible = visible & (scores != -np.inf)
    return Scores(np.where(visible, scores, -np.inf), visible, slope, distance)


def philox(counter, key):
    """Philox-4x32-10 (Salmon et al., SC 2011): four words of 32 bits for a counter of four and a
    key of two; each word is an integer or an array of them.
    """
    c0, c1, c2, c3 = (np.asarray(x, np.uint64) for x in counter)
    k0, k1 = (int(x) for x in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [x.astype(np.uint32) for x in np.broadcast_arrays(c0, c1, c2, c3)]


def dropout(p, seed, offset, heads, lengths, first_k=(), places=(0, 0, 0, 0)):
    """The factor of each probability, 0 or 1 / keep_prob, float64 [batch, num_heads_q, seqlen_q,
    seqlen_kv]; None without dropout.

    Byte j % 16 of the Philox words of counter (j // 16, i, b * num_heads_q + h, offset) keeps key
    j when it is below T = round(256 (1 - p)); keep_prob is T / 256. Keys count from first_k, and
    row, key and head from those of `places`, where a sequence has as many heads as its last says.
    """
    if p == 0:
        return None
    (batch, num_heads), (rows, keys) = heads, lengths
    threshold = max(1, int(np.floor(256 * (1 - p) + 0.5)))
    row, key, first, all_heads = places
    head = first + np.arange(batch)[:, None] * (all_heads or num_heads) + np.arange(num_heads)
    chunks = np.arange(key // 16, -(-(key + keys) // 16))
    row = np.arange(row, row + rows)[:, None]
    words = philox((chunks, row, head[..., None, None], offset), (seed & 0xFFFFFFFF, seed >> 32))
    drawn = np.stack([(w >> (8 * x)) & 0xFF for w in words for x in range(4)], axis=-1)
    drawn = drawn.reshape(batch, num_heads, rows, len(chunks) * 16)[..., key % 16 :][..., :keys]
    factors = (drawn < threshold) * (256 / threshold)
    for b, first in enumerate(first_k):
        factors[b] = np.roll(factors[b], first, axis=-1)
    return factors


def _weighted_sum(weights, v, visible, rounded_to):
    """weights @ v per query head; a NaN or infinity in v reaches only the rows that see its key."""
    batch, heads, seqlen_q, seqlen_k = weights.shape
    shape = (batch, v.shape[1], heads // max(v.shape[1], 1) * seqlen_q, seqlen_k)
    finite = np.isfinite(v)
    if finite.all():
        out = _product(weights.reshape(shape), v, rounded_to)
    else:
        v = np.where(visible.any(axis=(1, 2))[:, None, :, None], v, v.dtype.type(0))  # never seen
        finite = np.isfinite(v)
        out = _product(weights.reshape(shape), np.where(finite, v, v.dtype.type(0)), rounded_to)
        seen = visible.reshape(shape).astype(v.dtype)
        nan, high, low = (
            (seen @ x.astype(v.dtype)) > 0 for x in (np.isnan(v), v == np.inf, v == -np.inf)
        )
        out = np.where(high, np.inf, np.where(low, -np.inf, out))
        out = np.where(nan | (high & low), np.nan, out).astype(v.dtype)
    return out.reshape(batch, heads, seqlen_q, v.shape[3])


def _product(a, b, rounded_to):
    """a @ b; in plain float32 one term after the other, so that the rule asks the same anywhere.

    A BLAS adds in an order of its own, which differs between machines. In 16 bits the rounding of
    scores and probabilities hides that.
    """
    if rounded_to != np.float32:
        return a @ b
    b = np.ascontiguousarray(b)
    return _in_order(a, b) if b.shape[-1] < 2 or not _is_einsum_in_order() else _einsum(a, b)


def _einsum(a, b):
    """Rows of b, each times one element of a, in turn: the last axis of b is innermost."""
    return np.einsum("...ik,...kj->...ij", a, b)


def _in_order(a, b):
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    term = np.empty_like(total)
    for i in range(a.shape[-1]):
        total += np.multiply(a[..., i, None], b[..., i, None, :], out=term)
    return total


@functools.cache
def _is_einsum_in_order():
    """Whether np.einsum, which takes a third of the time, rounds each product and each sum here."""
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((2, 37, 300), (2, 300, 41)))
    return np.array_equal(_einsum(a, b), _in_order(a, b))


def _round(x, rounded_to):
    return x if rounded_to is None else x.astype(rounded_to).astype(np.float32)


def _used(seqused, stored, batch):
    used = np.full(batch, stored) if seqused is None else np.asarray(seqused)
    return np.clip(used, 0, stored).astype(np.int64)


def first_keys(kv_start, stored, batch):
    """The first key in use of each sequence, int64 [batch]."""
    return np.zeros(batch, np.int64) if kv_start is None else np.clip(kv_start, 0, stored)


def _pad(packed, cu_seqlens, max_seqlen):
    """Packed rows [total, ...] as [batch, max_seqlen, ...], and the number of rows of each
    sequence.
    """
    stored = np.minimum(np.diff(np.asarray(cu_seqlens).astype(np.int64)), max_seqlen)
    padded = np.zeros((len(stored), max_seqlen, *packed.shape[1:]), packed.dtype)
    for b, length in enumerate(stored):
        padded[b, :length] = packed[cu_seqlens[b] : cu_seqlens[b] + length]
    return padded, stored
