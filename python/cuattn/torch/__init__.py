# SPDX-License-Identifier: Apache-2.0
"""cuattn inside torch.compile, and torch's scaled_dot_product_attention in cuattn's hands.

In eager code these functions call the library at once; while torch traces (torch.compile, fake
tensors) they become the registered ops ``torch.ops.cuattn.attention`` and ``attention_varlen``.
Next: ops.py, sdpa.py.
"""

from .ops import attention, attention_varlen
from .sdpa import scaled_dot_product_attention

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention"]
