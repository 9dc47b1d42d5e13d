# SPDX-License-Identifier: Apache-2.0
"""Attention whose sequence lies on several ranks of torch.distributed: docs/parallel.md.

>>> import cuattn.parallel
>>> cuattn.parallel.Layout("zigzag", 1000, 2).rows(1)
512
"""

import warnings

from .._tracing import when_torch_compiles
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


def _load_ops() -> None:
    try:
        from . import ops as ops
    except Exception as error:  # torch.compile itself must work in any case
        warnings.warn(
            f"cuattn: torch.compile breaks the graph at cuattn.parallel.attention, as this torch "
            f"cannot hold its op ({error}); results are the same",
            stacklevel=2,
        )


when_torch_compiles(_load_ops)
