# SPDX-License-Identifier: Apache-2.0
"""What is refused before the compiled module is asked."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_flag(op: str, name: str, value: Any) -> None:
    """Refuse what is not True or False, arrays too."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}; pass a bool")


def check_ragged(cu_seqlens_q: Any, cu_seqlens_k: Any, block_tables: Any, kv_layout: str) -> None:
    """Raise for what attention_varlen cannot do without."""
    if block_tables is None and not (isinstance(kv_layout, str) and kv_layout == "nhd"):
        raise ValueError(
            "attention_varlen: kv_layout belongs to paged caches and must be 'nhd' without "
            f"block_tables, got {kv_layout!r}; leave it out"
        )
    if cu_seqlens_q is None or (cu_seqlens_k is None and block_tables is None):
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"attention_varlen: {name} must be an int32 array [batch + 1], got None")


def in_words_of(op: str, words: dict[str, str], message: str) -> str:
    """Put a caller and its arguments in place of what begins a message: function and argument."""
    text = message.partition(": ")[2]
    argument, space, rule = text.partition(" ")
    return f"{op}: {words.get(argument, argument)}{space}{rule}"
