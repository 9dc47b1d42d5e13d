# SPDX-License-Identifier: Apache-2.0
"""Which callable stands for a registered op. Next: ops.py, gradients.py, functional.py."""

from __future__ import annotations

from typing import Any

import torch

FUNCTIONAL: dict[str, Any] = {}  # by functional.py


def op_of(name: str) -> Any:
    """Return a registered op, or while torch.func transforms what it goes through."""
    if torch._C._are_functorch_transforms_active():
        return FUNCTIONAL[name]
    return getattr(torch.ops.cuattn, name)
