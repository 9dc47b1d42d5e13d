# SPDX-License-Identifier: Apache-2.0
"""cuattn as the attention backend CUSTOM of vLLM. Next: backend.py."""

from __future__ import annotations

import warnings

WANTED = (0, 33)  # the release whose interface backend.py has


def register() -> None:
    """Name the backend to vLLM, which calls this in each of its processes; more calls are harmless.

    With another release than the one wanted it registers nothing and warns: an exception here would
    stop a vLLM whose user asks for another backend.
    """
    import vllm

    if version_of(vllm.__version__) != WANTED:
        wanted = ".".join(map(str, WANTED))
        warnings.warn(
            f"cuattn_vllm: vLLM must be {wanted}, got {vllm.__version__}: the backend CUSTOM is "
            f"not registered; pip install 'vllm=={wanted}.*'",
            stacklevel=2,
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "cuattn_vllm.backend.CuattnBackend")


def version_of(text: str) -> tuple[int, ...]:
    """Read the first two numbers of a version: "0.33.0rc1+cu130" is (0, 33)."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:2])
