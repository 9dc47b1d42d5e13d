# SPDX-License-Identifier: Apache-2.0
"""What attention_backward and its explain share: names, and the options of the forward call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._options import OPS, Option, options_of

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks", "dslopes")
SOURCES = dict(zip(GRADIENTS, ("q", "k", "v", "bias", "sinks", "alibi_slopes"), strict=True))
GRADIENT_OF = {source: gradient for gradient, source in SOURCES.items()}
DIFFERENTIABLE = tuple(GRADIENT_OF)
FORWARD = {
    "attention_backward": "attention",
    "attention_varlen_backward": "attention_varlen",
}
POSITIONAL = {
    op: ("dout", "q", "k", "v", "out", "lse", *OPS[forward].positional[3:])
    for op, forward in FORWARD.items()
}
# Of the forward call alone: gradients go through rows, not pages, no backward kernel splits the
# keys, and none goes through float8.
NOT_TAKEN = ("block_tables", "kv_layout", "dtype", "accumulate", "num_splits", "return_lse")


def forward_options(op: str) -> Iterator[Option]:
    """List the options of the forward call that its backward pass takes by name."""
    kinds = ("flag", "count", "length", "number", "pair", "word", "text", "array")
    for option in options_of(FORWARD[op], kinds=kinds):
        if option.name not in (*POSITIONAL[op], *NOT_TAKEN):
            yield option


def check_need(
    op: str, need: Sequence[str], given: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Refuse what is no sequence of different gradients, and a result it does not name."""
    names = tuple(need) if isinstance(need, (tuple, list)) else (need,)
    are_words = all(isinstance(name, str) for name in names)  # others may have no hash
    if (
        not are_words
        or not names
        or len(set(names)) < len(names)
        or not set(names) <= set(GRADIENTS)
    ):
        raise ValueError(
            f"{op}: need must name one or more of {', '.join(GRADIENTS)}, each once, got {need!r}; "
            "pass a tuple of names"
        )
    for name in GRADIENTS:
        if name not in names and given is not None and given.get(name) is not None:
            raise ValueError(
                f"{op}: {name} must be named by need to be written, got need={names}; add it "
                f"there, or leave {name} out"
            )
    return names
