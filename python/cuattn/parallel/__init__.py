# SPDX-License-Identifier: Apache-2.0
"""Attention whose sequence lies on several ranks of torch.distributed: docs/parallel.md.

>>> import cuattn.parallel
>>> cuattn.parallel.Layout("zigzag", 1000, 2).rows(1)
512
"""

from .attention import attention, attention_varlen, explain
from .cost import Choice, calibrate
from .decode import local_lens, local_slots, paged_attention
from .layout import Layout

__all__ = [
    "Choice",
    "Layout",
    "attention",
    "attention_varlen",
    "calibrate",
    "explain",
    "local_lens",
    "local_slots",
    "paged_attention",
]
