# SPDX-License-Identifier: Apache-2.0
"""cuattn with gradients and inside torch.compile, and torch's scaled_dot_product_attention.

In eager code without gradients these functions call the library at once; else they become the
registered ops ``torch.ops.cuattn.attention`` and ``attention_varlen``. Next: ops.py, gradients.py,
sdpa.py.
"""

from . import batching, flops, functional, gradients  # noqa: F401  what torch asks of the ops
from .ops import attention, attention_varlen
from .sdpa import scaled_dot_product_attention

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention"]
