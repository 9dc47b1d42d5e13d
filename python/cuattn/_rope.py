# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries, in a pass before attention."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _checks, _core
from ._arrays import wants_gradient
from ._options import OPS, ROWS, options_of

TURNED = {op: tuple(o.name for o in options_of(op, kinds=("turned",))) for op in OPS}


def turned(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take rope and what belongs to it out of the arguments of a call, and rotate q by it."""
    rest = {name: value for name, value in arguments.items() if name not in TURNED[op]}
    if not TURNED[op] or not has_rope(op, arguments):
        return rest
    cos, sin = arguments["rope"]
    lengths = dense_lengths(arguments) if op in ROWS else paged_lengths(arguments)
    q = rotation(
        op, "q", arguments["q"], cos, sin, arguments["rope_positions"],
        arguments["rope_interleaved"], False, 0, lengths, None, arguments["stream"],
    )  # fmt: skip
    return {**rest, "q": q}


def has_rope(op: str, arguments: dict[str, Any]) -> bool:
    """Whether q is to be rotated; refuses a rope that is no pair, and what belongs to none."""
    rope = arguments.get("rope")
    if rope is None:
        for name in ("rope_positions", "rope_interleaved"):
            value = arguments.get(name)
            if value is not None and value is not False:
                given = value if isinstance(value, bool) else type(value).__name__
                raise ValueError(
                    f"{op}: {name} must be left out without rope, got {given}; pass rope=(cos, sin)"
                )
        return False
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise TypeError(no_pair(op, rope))
    return True


def no_pair(op: str, rope: Any) -> str:
    """Say what a rope is that is no pair of tables."""
    found, way_out = type(rope).__name__, "pass a tuple"
    if isinstance(rope, (tuple, list)):
        found, way_out = f"a {found} of {len(rope)}", "pass what rope_table gives"
    return f"{op}: rope must be two arrays (cos, sin), got {found}; {way_out}"


class Turn(NamedTuple):
    """What a rotation of the array `name` of a call is told beside its arrays."""

    op: str
    name: str
    interleaved: bool
    inverse: bool
    offset: int
    lengths: dict[str, Any]  # places follow from, where there are no positions

    def run(
        self, x: Any, cos: Any, sin: Any, positions: Any, out: Any = None, stream: Any = None
    ) -> Any:
        """Rotate x; NotImplemented for JAX arrays."""
        return _core.apply_rope(
            self.op, self.name, x, cos, sin, positions, self.interleaved, self.inverse, self.offset,
            self.lengths, out, stream,
        )  # fmt: skip


def rotation(
    op: str,
    name: str,
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: bool,
    inverse: bool,
    offset: int,
    lengths: dict[str, Any],
    out: Any,
    stream: Any,
) -> Any:
    """Rotate an array of a call, with a gradient where torch or JAX want one."""
    for word, table in (("cos", cos), ("sin", sin)):
        if wants_gradient(table):
            raise NotImplementedError(
                f"{op}: {word} requires grad, but no gradient goes through it; pass {word}.detach()"
            )
    turn = Turn(op, name, interleaved, inverse, offset, lengths)
    arrays = x, cos, sin, positions
    try:
        if wants_gradient(x):
            from .torch import rope as torch_rope

            return torch_rope.rotate(turn, *arrays, out, stream)
        found = turn.run(*arrays, out, stream)
        if found is NotImplemented:
            from .jax import rope as jax_rope

            found = jax_rope.rotate(turn, *arrays, out, stream)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(in_words_of(op, name, str(error))) from None
    return found


def in_words_of(op: str, name: str, message: str) -> str:
    """Put the function and argument of another call in place of those of `apply_rope`."""
    if op == "apply_rope" or message.partition(": ")[0] not in ("apply_rope", op):
        return message  # of a producer of arrays
    its = "rope_positions" if name == "q" else "positions_k"
    words = {"x": name, "positions": its, "interleaved": "rope_interleaved"}
    return _checks.in_words_of(op, words, message)


def dense_lengths(arguments: dict[str, Any]) -> dict[str, Any]:
    """Say where the queries of attention and attention_varlen stand among their keys."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    lengths = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if "layout" not in arguments:
        return lengths
    axis = 1 if arguments["layout"] == "bshd" else 2
    shape = tuple(getattr(arguments["k"], "shape", ()))
    if len(shape) == 4:  # else it is refused later
        lengths["seqlen_k"] = int(shape[axis])
    return {**lengths, "layout": arguments["layout"]}


def paged_lengths(arguments: dict[str, Any]) -> dict[str, Any]:
    """Say where the queries of paged_attention stand in their contexts."""
    lengths = {"seqused_k": arguments["context_lens"], "seqlen_k": MOST_KEYS}
    if len(getattr(arguments["q"], "shape", ())) == 3:
        lengths["one_token"] = True
    return lengths


MOST_KEYS = 2**31 - 1024  # of a sequence


def rotated(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool,
    stream: Any = None,
) -> Any:
    """Rotate x [..., heads, dim], token i by row positions[i] of the float32 tables."""
    rows = x.reshape(-1, *x.shape[-2:])
    if rows.shape[0] == 0:  # the tables may be empty too
        return x
    found = rotation(
        "apply_rope", "q", rows, cos, sin, positions, interleaved, False, 0, {}, None, stream
    )
    return found.reshape(*x.shape)
