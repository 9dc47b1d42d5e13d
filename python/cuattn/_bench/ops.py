# SPDX-License-Identifier: Apache-2.0
"""The operations that workloads call, and the modules that make their calls."""

from __future__ import annotations

import importlib
from typing import Any

# Modules with the calls of operations other than dense and ragged attention. They need torch.
ATTENTION = ("attention", "attention_varlen")
BACKWARD = ("attention_backward", "attention_varlen_backward", "training_step")
CACHE = ("reshape_and_cache", "gather_cache", "copy_blocks", "swap_blocks")
OTHER_OPS = {
    **dict.fromkeys(("paged_attention", "paged_prefill"), "paged_inputs"),
    **dict.fromkeys(CACHE, "cache_inputs"),
    **dict.fromkeys(BACKWARD, "backward_inputs"),
    "parallel": "parallel_inputs",
}
DIFFERENTIATED = (*ATTENTION, *BACKWARD)


def other_calls(op: str) -> Any:
    return importlib.import_module(f".{OTHER_OPS[op]}", __package__)
