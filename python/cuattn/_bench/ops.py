# SPDX-License-Identifier: Apache-2.0
"""The operations that workloads call, and the modules that make their calls."""

from __future__ import annotations

import importlib
from typing import Any

# Modules with the calls of operations other than dense and ragged attention. They need torch.
ATTENTION = ("attention", "attention_varlen")
BACKWARD = ("attention_backward", "attention_varlen_backward", "training_step")
CACHE = ("reshape_and_cache", "gather_cache", "copy_blocks", "swap_blocks")
AROUND = ("rms_norm", "layer_norm", "act_mul", "bias_act", "sample", "apply_rope")
ROTATED = ("attention_rope", "append_attention")
FLOAT8 = ("float8_attention", "quantize")
LATENT = ("mla_decode", "mla_attention", "mla_project")
OTHER_OPS = {
    **dict.fromkeys(("paged_attention", "paged_prefill"), "paged_inputs"),
    **dict.fromkeys(CACHE, "cache_inputs"),
    **dict.fromkeys(BACKWARD, "backward_inputs"),
    **dict.fromkeys(AROUND, "fused_inputs"),
    **dict.fromkeys(ROTATED, "rope_inputs"),
    **dict.fromkeys(LATENT, "mla_inputs"),
    **dict.fromkeys(FLOAT8, "float8_inputs"),
    "parallel": "parallel_inputs",
    "flex_attention": "flex_inputs",
}
DIFFERENTIATED = (*ATTENTION, *BACKWARD)


def other_calls(op: str) -> Any:
    return importlib.import_module(f".{OTHER_OPS[op]}", __package__)
