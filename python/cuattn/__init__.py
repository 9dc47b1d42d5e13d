# SPDX-License-Identifier: Apache-2.0
"""Attention on any array: numpy on the CPU, PyTorch, CuPy and JAX on CPU and CUDA.

>>> import numpy as np, cuattn
>>> q = k = v = np.ones((1, 4, 2, 8), np.float32)  # [batch, seqlen, num_heads, head_dim]
>>> cuattn.attention(q, k, v, causal=True).shape
(1, 4, 2, 8)
"""

from typing import TYPE_CHECKING, Any

from . import flex
from ._core import CudaError, OutOfBlocksError
from ._core import version as _version
from ._explain import explain
from ._explain.build import cmake_dir, info, kernels
from ._explain.plan import Plan
from ._ranges import wrap_if_wanted as _wrap_if_wanted
from ._tracing import tell_torch_compile as _tell_torch_compile
from .append import append_attention
from .attention import attention, attention_varlen
from .backward import attention_backward, attention_varlen_backward
from .block_pool import BlockPool
from .cascade import cascade_attention
from .flex import (
    BlockMask,
    create_block_mask,
    flex_attention,
    flex_attention_backward,
    sparse_attention,
)
from .float8 import QuantizedQKV, dequantize, quantize, quantize_like
from .fused import act_mul, bias_act, layer_norm, rms_norm
from .kv_bytes import kv_cache_bytes
from .kv_cache import copy_blocks, gather_cache, pinned_empty, reshape_and_cache, swap_blocks
from .merge import merge_states
from .mla import mla_attention, mla_decode, mla_project, mla_write
from .paged import paged_attention, paged_attention_v1, paged_attention_v2, paged_plan
from .paged_kv_cache import PagedKVCache
from .rope import apply_rope, rope_attention, rope_table
from .sampling import sample, speculative_verify

if TYPE_CHECKING:
    from . import jax as jax
    from . import parallel as parallel
    from . import torch as torch

__version__: str = _version()

__all__ = [
    "BlockMask",
    "BlockPool",
    "CudaError",
    "OutOfBlocksError",
    "PagedKVCache",
    "Plan",
    "QuantizedQKV",
    "__version__",
    "act_mul",
    "append_attention",
    "apply_rope",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "bias_act",
    "cascade_attention",
    "cmake_dir",
    "copy_blocks",
    "create_block_mask",
    "dequantize",
    "explain",
    "flex",
    "flex_attention",
    "flex_attention_backward",
    "gather_cache",
    "info",
    "kernels",
    "kv_cache_bytes",
    "layer_norm",
    "merge_states",
    "mla_attention",
    "mla_decode",
    "mla_project",
    "mla_write",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_plan",
    "pinned_empty",
    "quantize",
    "quantize_like",
    "reshape_and_cache",
    "rms_norm",
    "rope_attention",
    "rope_table",
    "sample",
    "sparse_attention",
    "speculative_verify",
    "swap_blocks",
]


# Note: beside a `__getattr__` CPython does not cache where `cuattn.attention` is: 0.04 us a call,
# none after `from cuattn import attention`.
if not TYPE_CHECKING:  # to whom any name would be an attribute

    def __getattr__(name: str) -> Any:
        """Import cuattn.torch, cuattn.jax and cuattn.parallel when they are first asked for."""
        import importlib.util

        needs = {"jax": "jax", "torch": "torch", "parallel": "torch"}
        if name not in needs:
            part = {"compat": "flash_attn", "integrations": "transformers"}.get(name)
            way_out = f"; import a module of it, as {__name__}.{name}.{part}" if part else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way_out}")
        if importlib.util.find_spec(needs[name]) is None:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}: {needs[name]} is not installed; "
                f"pip install {needs[name]}"
            )
        return importlib.import_module(f"{__name__}.{name}")


_wrap_if_wanted(globals())
_tell_torch_compile()
