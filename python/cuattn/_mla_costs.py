# SPDX-License-Identifier: Apache-2.0
"""The two forms of latent attention: shapes, products, bytes, and which of them is the faster.

explicit: keys and values are projected once per token, then attention runs over them. absorbed: the
projections go to the queries and to the outputs, and attention runs over the latents themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

FORMS = ("explicit", "absorbed")
RATE, BANDWIDTH = 600e12, 4.28e12  # of an H200: products in FLOP/s, memory in bytes/s
MOST_HEAD_DIM = 256  # of attention


@dataclasses.dataclass(frozen=True)
class Extents:
    """The sizes of a call of mla_attention."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    rope_dim: int
    latent_k: int
    latent_v: int
    head_dim_v: int
    causal: bool
    same_latents: bool

    @property
    def pairs(self) -> int:
        """Queries times the keys each of them sees, in one sequence and head."""
        if not self.causal:
            return self.queries * self.keys
        rows = min(self.queries, self.keys)  # those before the first key see nothing
        return rows * self.keys - rows * (rows - 1) // 2


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a form costs: floating-point operations, bytes moved, bytes of arrays in between."""

    flops: int
    bytes: int
    between: int

    @property
    def seconds(self) -> float:
        """An estimate, of a device with the rates of an H200."""
        return max(self.flops / RATE, self.bytes / BANDWIDTH)


def cost_of(form: str, e: Extents, itemsize: int) -> Cost:
    """Count one form."""
    latents = e.keys * (e.latent_k + e.rope_dim + (0 if e.same_latents else e.latent_v))
    if form == "explicit":
        rows, pair = e.keys, e.head_dim + e.rope_dim + e.head_dim_v
        between = e.keys * e.heads * pair  # written once, read about twice
        moved = latents + 3 * between
    else:
        rows, pair = e.queries, e.latent_k + e.rope_dim + e.latent_v
        between = e.queries * e.heads * (e.latent_k + e.latent_v)
        moved = latents + 2 * between + 2 * e.queries * e.heads * (e.head_dim + e.head_dim_v)
    projected = rows * e.heads * (e.latent_k * e.head_dim + e.latent_v * e.head_dim_v)
    flops = 2 * (projected + e.pairs * e.heads * pair)
    return Cost(e.batch * flops, e.batch * moved * itemsize, e.batch * between * itemsize)


def crossover(e: Extents) -> float:
    """Count the queries on a long cache from which on the explicit form has fewer products."""
    saved = e.latent_k + e.latent_v - e.head_dim - e.head_dim_v
    projected = e.latent_k * e.head_dim + e.latent_v * e.head_dim_v
    return projected / saved if saved > 0 else float("inf")


ATTENTION_BACKENDS = ("naive", "cublas", "tiled")  # of attention alone


def refusal(form: str, e: Extents, backend: str = "auto") -> str | None:
    """Say why a form cannot run, if it cannot."""
    if form == "explicit":
        if max(e.head_dim + e.rope_dim, e.head_dim_v) > MOST_HEAD_DIM:
            return f"attention takes head dims up to {MOST_HEAD_DIM}"
        return None
    if backend in ATTENTION_BACKENDS:
        return f"mla_decode has no backend {backend!r}"
    if e.latent_k != e.latent_v:
        return "its kernels take latents of keys and values of one width"
    if e.latent_k % 16:
        return "its kernels take latents of a multiple of 16 columns"
    if backend == "sm90" and not (e.same_latents and (e.latent_k, e.rope_dim) == (512, 64)):
        return "its sm90 takes one latent of 512 columns for keys and values, and 64 rope columns"
    return None


def choose(op: str, form: str | None, e: Extents, itemsize: int, backend: str = "auto") -> str:
    """Return the form that was asked for, or else the one whose estimate is the smaller."""
    if form is not None and not (isinstance(form, str) and form in FORMS):
        raise ValueError(
            f"{op}: form must be 'explicit', 'absorbed' or None, got {form!r}; None chooses by cost"
        )
    refusals = {name: refusal(name, e, backend) for name in FORMS}
    if form is not None and refusals[form] is not None:
        raise NotImplementedError(
            f"{op}: form {form!r} cannot run this call: {refusals[form]}; use form=None"
        )
    can = [name for name in FORMS if refusals[name] is None]
    if not can:
        raise NotImplementedError(
            f"{op}: no form can run this call: explicit: {refusals['explicit']}; absorbed: "
            f"{refusals['absorbed']}; pad the latents to one width, a multiple of 16"
        )
    if form is not None:
        return form
    return min(can, key=lambda name: cost_of(name, e, itemsize).seconds)


AXES = {
    "q": ("batch", "num_heads", "seqlen_q", "head_dim"),
    "k_latent": ("batch", "seqlen_kv", "latent_k"),
    "v_latent": ("batch", "seqlen_kv", "latent_v"),
    "k_proj": ("num_heads", "latent_k", "head_dim"),
    "v_proj": ("num_heads", "latent_v", "head_dim_v"),
    "q_rope": ("batch", "num_heads", "seqlen_q", "rope_dim"),
    "k_rope": ("batch", "seqlen_kv", "rope_dim"),
}


def read_extents(op: str, shapes: dict[str, Any], causal: bool, same_latents: bool) -> Extents:
    """Hold the shapes of a call against each other; q_rope and k_rope may be None."""
    if (shapes["q_rope"] is None) != (shapes["k_rope"] is None):
        name = "q_rope" if shapes["q_rope"] is None else "k_rope"
        raise ValueError(
            f"{op}: q_rope and k_rope must be given together, got no {name}; leave out both where "
            "there are no rope columns"
        )
    found: dict[str, tuple[int, str]] = {}
    for name, axes in AXES.items():
        shape = shapes[name]
        if shape is None:
            continue
        if len(shape) != len(axes):
            raise ValueError(
                f"{op}: {name} must have axes [{', '.join(axes)}], got shape {tuple(shape)}; "
                "reshape it"
            )
        for axis, extent in zip(axes, shape, strict=True):
            known, first = found.setdefault(axis, (int(extent), name))
            if known != extent:
                raise ValueError(
                    f"{op}: {name} must have {axis} {known} like {first}, got {extent}; pass "
                    "arrays of one call"
                )
    size = {axis: extent for axis, (extent, _) in found.items()}
    for axis in ("head_dim", "head_dim_v", "latent_k", "latent_v", "rope_dim"):
        columns = size.setdefault(axis, 0) if axis == "rope_dim" else size[axis]
        most = 1024 if "latent" in axis else MOST_HEAD_DIM
        if columns % 8 or columns > most or (columns == 0 and axis != "rope_dim"):
            raise ValueError(
                f"{op}: {found[axis][1]} must have {axis} a multiple of 8 up to {most}, got "
                f"{columns}; pad it with zeros and pass scale="
            )
    return Extents(
        size["batch"], size["num_heads"], size["seqlen_q"], size["seqlen_kv"], size["head_dim"],
        size["rope_dim"], size["latent_k"], size["latent_v"], size["head_dim_v"], causal,
        same_latents,
    )  # fmt: skip
