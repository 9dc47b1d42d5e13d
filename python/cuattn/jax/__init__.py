# SPDX-License-Identifier: Apache-2.0
"""cuattn on JAX arrays, eagerly, under jax.jit and jax.vmap: XLA calls the library by itself.

XLA owns the memory and the stream, so ``out=``, ``lse_out=``, ``workspace=`` and ``stream=`` are
refused here. Next: call.py, attention.py.
"""

from .attention import attention, attention_varlen
from .backward import attention_backward, attention_varlen_backward
from .cache import gather_cache, reshape_and_cache
from .dot_product import dot_product_attention
from .export import export_targets
from .merge import merge_states
from .paged import paged_attention
from .parallel import parallel_attention, token_order

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "dot_product_attention",
    "export_targets",
    "gather_cache",
    "merge_states",
    "paged_attention",
    "parallel_attention",
    "reshape_and_cache",
    "token_order",
]
