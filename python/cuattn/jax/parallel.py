# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is cut over an axis of a mesh, inside jax.shard_map.

JAX's own collectives move the bytes, and jax.grad goes through all of it. Next: attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attention

OP = "parallel_attention"
LAYOUTS = ("contiguous", "zigzag")
SCHEMES = ("auto", "gather", "heads", "ring")
State = tuple[jax.Array, jax.Array]  # out [batch, rows, heads, size] in float32, lse


class Cut(NamedTuple):
    """How a sequence lies: over which axis, of how many devices, and in which order."""

    axis: str
    size: int
    layout: str
    window: tuple[int, int]  # keys left and right of a query; -1 is all
    options: dict[str, Any]  # of each call

    @property
    def plain(self) -> bool:
        """Tell whether every query sees every key."""
        return self.window == (-1, -1)


def token_order(seqlen: int, size: int, layout: str = "zigzag") -> np.ndarray[Any, Any]:
    """Return the order in which the tokens of a sequence lie on the devices of an axis.

    Parameters
    ----------
    seqlen : int
        Tokens of the whole sequence, a multiple of size, with zigzag of 2 size.
    size : int
        Devices along the axis.
    layout : {"zigzag", "contiguous"}
        zigzag gives device r the chunks r and 2 size - 1 - r of 2 size, which balances causal
        attention; contiguous gives it the tokens from r seqlen / size on.

    Returns
    -------
    int32 array, [seqlen]
        ``x[:, order]`` is what goes into shard_map, ``order.reshape(size, -1)[r]`` are the
        positions of device r (for rotary embedding), ``np.argsort(order)`` is the way back.

    Raises
    ------
    ValueError
        For another layout, or a length that does not divide.
    """
    choose("token_order", "layout", layout, LAYOUTS)
    chunks = 2 * size if layout == "zigzag" else size
    if size < 1 or seqlen % chunks:
        raise ValueError(
            f"token_order: seqlen must be a multiple of {chunks} for {layout} over {size} devices, "
            f"got {seqlen}; pad the sequence"
        )
    parts = np.arange(seqlen, dtype=np.int32).reshape(chunks, -1)
    if layout == "zigzag":
        parts = parts[[chunk for r in range(size) for chunk in (r, chunks - 1 - r)]]
    return parts.reshape(-1)


def choose(op: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse a word that is none of those known."""
    if value not in known:
        words = ", ".join(map(repr, known[:-1])) + f" or {known[-1]!r}"
        raise ValueError(f"{op}: {name} must be {words}, got {value!r}; choose one of these")


def cannot(what: str, got: str, way_out: str) -> ValueError:
    """Make the error of a rule that is broken."""
    return ValueError(f"{OP}: {what}, got {got}; {way_out}")


def size_of(axis: Any) -> int:
    """Return the devices along an axis of the shard_map around the call."""
    if not isinstance(axis, str):
        raise TypeError(
            f"{OP}: axis must be the name of one axis of the mesh, got {axis!r}; reshape the mesh"
        )
    try:
        return int(jax.lax.axis_size(axis))
    except NameError:
        raise ValueError(
            f"{OP}: axis must be an axis of a jax.shard_map around the call, got {axis!r}; call it "
            "inside one"
        ) from None


# What each scheme refuses; a string says why not.


def no_heads(q: jax.Array, k: jax.Array, cut: Cut) -> str | None:
    """Say why heads cannot be dealt."""
    heads_q, heads_k = q.shape[2], k.shape[2]
    if heads_q % cut.size or (heads_k % cut.size and cut.size % heads_k):
        return (
            f"scheme 'heads' needs heads of q, and of k or its copies, for each of {cut.size} "
            f"devices, got {heads_q} and {heads_k}"
        )
    return None


def no_gather(q: jax.Array, k: jax.Array, cut: Cut) -> str | None:
    """Say why gathered keys cannot be masked."""
    if cut.window[1] > 0 or (cut.window[1] < 0 <= cut.window[0]):
        return f"scheme 'gather' needs causal windows or none, got window {cut.window}"
    if cut.plain and cut.options["alibi_slopes"] is not None:
        return "scheme 'gather' needs causal for alibi_slopes, got a full mask"
    return None


def no_ring(q: jax.Array, k: jax.Array, cut: Cut) -> str | None:
    """Say why keys cannot travel."""
    if cut.options["alibi_slopes"] is not None:
        return "scheme 'ring' needs alibi_slopes None, got slopes"
    if cut.layout == "zigzag" and cut.window not in ((-1, -1), (-1, 0)):
        return f"scheme 'ring' needs layout 'contiguous' for windows, got 'zigzag' and {cut.window}"
    return None


NOT = {"heads": no_heads, "gather": no_gather, "ring": no_ring}


def scheme_of(scheme: str, q: jax.Array, k: jax.Array, cut: Cut) -> str:
    """Take the scheme that was asked for, or the first one that can do the call."""
    choose(OP, "scheme", scheme, SCHEMES)
    reasons = []
    for one in NOT if scheme == "auto" else (scheme,):
        why = NOT[one](q, k, cut)
        if why is None:
            return one
        reasons.append(why)
    raise ValueError(f"{OP}: {'; '.join(reasons)}; choose another scheme or layout")


def check(q: Any, k: Any, v: Any, cut: Cut) -> None:
    """Refuse parts of sequences that do not fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(array) != 4:
            raise cannot(
                f"{name} must be [batch, rows, heads, head size]",
                f"shape {jnp.shape(array)}",
                "pass this device's part of a dense batch",
            )
        if cut.layout == "zigzag" and array.shape[1] % 2:
            raise cannot(
                f"{name} must have an even number of rows for zigzag",
                str(array.shape[1]),
                "pad the sequence, or take layout='contiguous'",
            )
    if not cut.plain and q.shape[1] != k.shape[1]:
        raise cannot(
            "q and k must have the same number of rows for causal attention and windows",
            f"{q.shape[1]} and {k.shape[1]}",
            "gather k and v and call cuattn.attention",
        )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut, **more: Any) -> State:
    """Run one call of one device."""
    options = {"window": cut.window, **cut.options, **more}
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse


# gather


def by_gather(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut, groups: int) -> State:
    """Bring all keys here, group by group of heads, so that XLA can gather one beside the last."""
    heads_q, heads_k = q.shape[2], k.shape[2]
    if groups < 1 or heads_k % groups:
        raise cannot(f"head_groups must divide k's {heads_k} heads", str(groups), "choose another")
    found = []
    for i in range(groups):
        mine = slice(i * heads_k // groups, (i + 1) * heads_k // groups)
        rows = slice(i * heads_q // groups, (i + 1) * heads_q // groups)
        keys, values = (in_order(gather(x[:, :, mine], cut), cut) for x in (k, v))
        part = {n: x[..., rows] for n, x in per_head(cut).items()}
        one = cut._replace(options={**cut.options, **part})
        found.append(own_rows(q[:, :, rows], keys, values, one))
    return jnp.concatenate([o for o, _ in found], 2), jnp.concatenate([x for _, x in found], 1)


def gather(x: jax.Array, cut: Cut) -> jax.Array:
    """Bring the parts of all devices here, along the rows."""
    return jax.lax.all_gather(x, cut.axis, axis=1, tiled=True)


def per_head(cut: Cut) -> dict[str, jax.Array]:
    """Return the options that have a number for each head of q."""
    given = {name: cut.options[name] for name in ("sinks", "alibi_slopes")}
    return {name: x for name, x in given.items() if x is not None}


def in_order(x: jax.Array, cut: Cut, back: bool = False) -> jax.Array:
    """Put the rows of the devices in the order of tokens, or back."""
    if cut.layout == "contiguous":
        return x
    order = token_order(x.shape[1], cut.size)
    chunk = x.shape[1] // (2 * cut.size)
    places = order[::chunk] // chunk
    if not back:
        places = np.argsort(places)
    parts = jnp.split(x, 2 * cut.size, axis=1)
    return jnp.concatenate([parts[i] for i in places], axis=1)


def own_rows(q: jax.Array, keys: jax.Array, values: jax.Array, cut: Cut) -> State:
    """Attend from this device's rows to all keys: those in use end with a chunk's own."""
    if cut.plain:
        return attend(q, keys, values, cut)
    rank = jax.lax.axis_index(cut.axis)
    count = 2 if cut.layout == "zigzag" else 1
    chunk = q.shape[1] // count
    found = []
    for part, number in zip(
        jnp.split(q, count, axis=1), (rank, 2 * cut.size - 1 - rank), strict=False
    ):
        used = jnp.full(q.shape[0], (number + 1) * chunk, jnp.int32)
        found.append(attend(part, keys, values, cut, seqused_k=used))
    return jnp.concatenate([o for o, _ in found], 1), jnp.concatenate([x for _, x in found], 2)


# heads


def by_heads(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut) -> State:
    """Trade parts of all heads for all of some heads, attend, and trade back."""
    if copies := cut.size // k.shape[2] if k.shape[2] % cut.size else 0:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    trade = functools.partial(jax.lax.all_to_all, axis_name=cut.axis, tiled=True)
    heads = q.shape[2] // cut.size
    q, k, v = (in_order(trade(x, split_axis=2, concat_axis=1), cut) for x in (q, k, v))
    first = jax.lax.axis_index(cut.axis) * heads
    mine = {
        n: jax.lax.dynamic_slice_in_dim(x, first, heads, axis=-1) for n, x in per_head(cut).items()
    }
    out, lse = attend(q, k, v, cut, **mine)
    out = in_order(out, cut, back=True)
    lse = in_order(lse.swapaxes(1, 2), cut, back=True).swapaxes(1, 2)
    return (
        trade(out, split_axis=1, concat_axis=2),
        trade(lse, split_axis=2, concat_axis=1),
    )


# ring


def by_ring(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut) -> State:
    """Let keys travel and merge what each device's part gives; sinks are added at the end."""
    sinks = cut.options["sinks"]
    cut = cut._replace(options={**cut.options, "sinks": None})
    run = zigzag_ring if cut.layout == "zigzag" and not cut.plain else plain_ring
    out, lse = run(q, k, v, cut)
    if sinks is not None:
        none = jnp.zeros_like(out), jnp.broadcast_to(sinks[:, None], lse.shape)
        out, lse = merge((out, lse), none)
    return out.astype(q.dtype), lse


def merge(a: State, b: State) -> State:
    """Merge two states in float32, by operations that jax.grad goes through."""
    top = jax.lax.stop_gradient(jnp.maximum(a[1], b[1]))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(lse - top) for _, lse in (a, b)]
    total = weights[0] + weights[1]
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    shares = [(w / total).swapaxes(1, 2)[..., None] for w in weights]
    out = sum(w * x.astype(jnp.float32) for w, (x, _) in zip(shares, (a, b), strict=True))
    return jnp.asarray(out), jnp.where(seen, top + jnp.log(total), -jnp.inf)


def passed_on(cut: Cut) -> Callable[[jax.Array], jax.Array]:
    """Return the step that hands an array to the next device."""
    pairs = [(i, (i + 1) % cut.size) for i in range(cut.size)]
    return lambda x: jax.lax.ppermute(x, cut.axis, pairs)


def pair(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut, ahead: int, on: Any) -> State:
    """Attend from queries to keys that begin `ahead` tokens before them, some of which are seen.

    ``on`` says, traced, whether this device has such keys. Rows that see nothing are cut off.
    """
    rows = q.shape[1]
    left, right = cut.window[0] - ahead, cut.window[1] + ahead
    late = max(0, -left) if cut.window[0] >= 0 else 0  # the first keys that anybody sees
    early = max(0, -right) if cut.window[1] >= 0 else 0  # the first queries that see a key
    shift = late or early
    left = -1 if cut.window[0] < 0 or left >= rows else max(0, left - early)
    right = -1 if cut.window[1] < 0 or right >= rows else max(0, right - late)
    q, k, v = q[:, early : rows - late], *(x[:, late : rows - early] for x in (k, v))
    used = jnp.full(q.shape[0], jnp.where(on, rows - shift, 0), jnp.int32)
    found = attend(q, k, v, cut, window=(left, right), seqused_k=used)
    return padded(*found, early, late)


def padded(out: jax.Array, lse: jax.Array, before: int, after: int) -> State:
    """Add rows that see nothing."""
    out = jnp.pad(out, ((0, 0), (before, after), (0, 0), (0, 0)))
    return out, jnp.pad(lse, ((0, 0), (0, 0), (before, after)), constant_values=-jnp.inf)


def plain_ring(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut) -> State:
    """Go round with whole parts; without a mask their order does not matter."""
    state = attend(q, k, v, cut)
    rank, rows, onward = jax.lax.axis_index(cut.axis), q.shape[1], passed_on(cut)
    travelled = 0
    for step in range(1, cut.size):
        parts: list[Callable[[jax.Array, jax.Array], State]] = []
        if cut.plain:
            parts = [functools.partial(attend, q, cut=cut)]
        else:
            for ahead, on in ((step, rank >= step), (step - cut.size, rank < step)):
                if sees(rows, ahead * rows, cut.window):
                    call = functools.partial(pair, cut=cut, ahead=ahead * rows, on=on)
                    parts.append(functools.partial(call, q))
        if not parts:
            continue  # nobody sees these keys: they travel with the next ones that are seen
        for _ in range(step - travelled):
            k, v = onward(k), onward(v)
        travelled = step
        for part in parts:
            state = merge(state, part(k, v))
    return state


def sees(rows: int, ahead: int, window: tuple[int, int]) -> bool:
    """Tell whether a query sees any of the keys that begin `ahead` tokens before the queries."""
    left, right = window
    return (left < 0 or ahead - left < rows) and (right < 0 or -ahead - right < rows)


def zigzag_ring(q: jax.Array, k: jax.Array, v: jax.Array, cut: Cut) -> State:
    """Causal: each step is one full pair and one of two, the same work on every device.

    Late queries see the early keys of anybody; early queries see those of earlier devices, late
    queries the late keys of later ones.
    """
    full = cut._replace(window=(-1, -1))
    rank, half, onward = jax.lax.axis_index(cut.axis), q.shape[1] // 2, passed_on(cut)

    def cut_up(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x[:, :half], x[:, half:]

    q_early, q_late = cut_up(q)
    (k_early, k_late), (v_early, v_late) = cut_up(k), cut_up(v)
    early = attend(q_early, k_early, v_early, cut)
    late = attend(q_late, k_late, v_late, cut)
    late = merge(late, attend(q_late, k_early, v_early, full))
    for step in range(1, cut.size):
        k, v = onward(k), onward(v)
        (k_early, k_late), (v_early, v_late) = cut_up(k), cut_up(v)
        late = merge(late, attend(q_late, k_early, v_early, full))
        earlier = rank >= step
        pick = functools.partial(jnp.where, earlier)
        part = attend(pick(q_early, q_late), pick(k_early, k_late), pick(v_early, v_late), full)
        nothing = jnp.zeros_like(part[0]), jnp.full_like(part[1], -jnp.inf)
        early = merge(early, (pick(part[0], nothing[0]), pick(part[1], nothing[1])))
        late = merge(late, (pick(nothing[0], part[0]), pick(nothing[1], part[1])))
    return jnp.concatenate([early[0], late[0]], 1), jnp.concatenate([early[1], late[1]], 2)


def parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    scheme: str = "auto",
    layout: str = "contiguous",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    head_groups: int = 1,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Attend over a sequence that is cut over an axis of a mesh; inside jax.shard_map.

    Gradients reach q, k, v, alibi_slopes and sinks.

    Parameters
    ----------
    q, k, v : array, [batch, rows, heads, head size]
        This device's part, as `cuattn.attention` takes it: every device the same shape.
    axis : str
        The axis of the mesh along which the sequence is cut.
    scheme : {"auto", "gather", "heads", "ring"}
        gather brings all keys to every device (all_gather); heads trades parts of all heads for
        whole sequences of some (all_to_all); ring lets keys travel (ppermute) and merges in
        float32. auto takes the first of heads, gather and ring that can do the call.
    layout : {"contiguous", "zigzag"}
        How the tokens lie, see `token_order`; zigzag balances causal attention.
    causal, window, scale, softcap, alibi_slopes, sinks
        As in `cuattn.attention`, of the whole sequence; gather takes causal windows only and
        no slopes without causal, ring no slopes, and windows only in the contiguous layout.
    head_groups : int
        gather: so many groups of heads are gathered one after the other.
    batch_invariant, return_lse, backend
        As in `cuattn.attention`.

    Returns
    -------
    out, or (out, lse) with return_lse
        This device's rows; lse [batch, heads, rows].

    Raises
    ------
    ValueError, TypeError
        For an axis that is not around the call, a scheme that cannot do the call, rows that do not
        fit, and as in `cuattn.attention`; while tracing.
    """
    choose(OP, "layout", layout, LAYOUTS)
    left, right = window
    options = {"scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks}
    options |= {"batch_invariant": batch_invariant, "backend": backend}
    mask = (left, 0) if causal else (left, right)
    cut = Cut(axis, size_of(axis), layout, mask, options)
    check(q, k, v, cut)
    match scheme_of(scheme, q, k, cut):
        case "heads":
            out, lse = by_heads(q, k, v, cut)
        case "gather":
            out, lse = by_gather(q, k, v, cut, head_groups)
        case _:
            out, lse = by_ring(q, k, v, cut)
    return (out, lse) if return_lse else out
