# SPDX-License-Identifier: Apache-2.0
"""What type checkers make of calls: mypy --strict reads this file, nothing runs it.

An `ignore` that ignores nothing is an error there, so each one is a call that must be refused.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import cuattn
import cuattn.jax
import cuattn.torch

F32 = npt.NDArray[np.float32]


def rows(q: F32, ends: npt.NDArray[np.int32], flag: bool) -> None:
    assert_type(cuattn.attention(q, q, q), F32)
    assert_type(cuattn.attention(q, q, q, causal=True, layout="bhsd", backend="cpu"), F32)
    assert_type(cuattn.attention(q, q, q, return_lse=False), F32)
    assert_type(cuattn.attention(q, q, q, return_lse=True, window=(3, 0)), tuple[F32, Any])
    assert_type(cuattn.attention(q, q, q, lse_out=q), tuple[F32, Any])
    assert_type(cuattn.attention(q, q, q, return_lse=flag), F32 | tuple[F32, Any])
    assert_type(cuattn.attention_varlen(q, q, q, ends, ends, 3, 3), F32)
    assert_type(
        cuattn.attention_varlen(q, q, q, ends, None, 3, 3, block_tables=ends, return_lse=True),
        tuple[F32, Any],
    )


def pages(q: F32, cache: F32, ids: npt.NDArray[np.int32], flag: bool) -> None:
    assert_type(cuattn.paged_attention(q, cache, cache, ids, ids), F32)
    assert_type(cuattn.paged_attention(q, cache, cache, ids, ids, kv_layout="hnd"), F32)
    both = cuattn.paged_attention(q, cache, cache, ids, ids, return_lse=True)
    assert_type(both, tuple[F32, Any])
    assert_type(
        cuattn.paged_attention(q, cache, cache, ids, ids, return_lse=flag), F32 | tuple[F32, Any]
    )


def refused(q: F32, ids: npt.NDArray[np.int32]) -> None:
    cuattn.attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    cuattn.attention(q, q, q, backend="fast")  # type: ignore[call-overload]
    cuattn.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    cuattn.attention(q, q, [1.0])  # type: ignore[call-overload]
    cuattn.attention(q, q, q, kv_layout="nhd")  # type: ignore[call-overload]
    cuattn.paged_attention(q, q, q, ids, ids, kv_layout="bhsd")  # type: ignore[call-overload]
    cuattn.paged_attention(q, q, q, ids, ids, kv_dtype="float8")  # type: ignore[call-overload]
    cuattn.nosuch(q, q, q)  # type: ignore[attr-defined]
