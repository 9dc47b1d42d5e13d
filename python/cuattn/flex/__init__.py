# SPDX-License-Identifier: Apache-2.0
"""Masks and scores as Python functions: what they are written with, and ready ones.

>>> import cuattn
>>> from cuattn import flex
>>> near = lambda b, h, q_idx, kv_idx: flex.abs(q_idx - kv_idx) <= 64
>>> soft = lambda score, b, h, q_idx, kv_idx: 30.0 * flex.tanh(score / 30.0)

Both are arguments of `cuattn.flex_attention`. `flex.masks` and `flex.scores` have ready ones.
"""

from . import masks, scores
from .attention import flex_attention
from .backward import flex_attention_backward
from .block_mask import BlockMask, create_block_mask
from .expression import TraceError, abs, exp, log, maximum, minimum, sigmoid, sqrt, tanh, where
from .sparse import sparse_attention
from .trace import trace

__all__ = [
    "BlockMask",
    "TraceError",
    "abs",
    "create_block_mask",
    "exp",
    "flex_attention",
    "flex_attention_backward",
    "log",
    "masks",
    "maximum",
    "minimum",
    "scores",
    "sigmoid",
    "sparse_attention",
    "sqrt",
    "tanh",
    "trace",
    "where",
]
