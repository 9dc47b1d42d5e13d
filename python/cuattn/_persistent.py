# SPDX-License-Identifier: Apache-2.0
"""Decode by a kernel that stays on the device, for benchmarks/decode_ladder.py; experimental."""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import Array


class PersistentDecode:
    """Paged attention as steps of one kernel, which is launched once and waits for them.

    Each step adds `grow` to all of context_lens and runs ``paged_attention(q, k_cache, v_cache,
    block_tables, context_lens, out=out)`` over what the arrays then hold. The kernel fills the
    device until `close`, or until no step was posted for `idle_seconds`; leaving the ``with`` block
    closes it. Not for use by two threads at once.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, context_lens, kv_layout, scale, num_splits, out
        As in `paged_attention`, on CUDA: float16 or bfloat16, "nhd" or "hnd", head_dim 72 to 128,
        up to 8 queries times heads of a group. num_splits 0 cuts the keys for one wave of blocks.
    grow : int
        Tokens that a step adds to every context; a context ends at what its table can name.
    idle_seconds : float
        Above 0, at most 60: the kernel ends after so long without a step.
    stream
        A stream of its own: what comes after the kernel on it waits for its end.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, CudaError, MemoryError
        As in `paged_attention`; ValueError also from `post` after the end.
    """

    def __init__(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        block_tables: Array,
        context_lens: Array,
        *,
        stream: Any,
        kv_layout: str = "nhd",
        scale: float | None = None,
        num_splits: int = 0,
        out: Array | None = None,
        grow: int = 0,
        idle_seconds: float = 1.0,
    ) -> None:
        self._decode = _core.PersistentDecode(
            q,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            kv_layout,
            scale,
            num_splits,
            out,
            grow,
            idle_seconds,
            stream,
        )

    @property
    def out(self) -> Any:
        """The results of the last step, like q."""
        return self._decode.out

    def post(self, steps: int = 1) -> int:
        """Let `steps` more steps run, one after another; return how many were posted in all."""
        return self._decode.post(steps)

    def wait(self, step: int, seconds: float = 10.0) -> None:
        """Wait until `step` steps are done; their results are then seen by host and device.

        Raises
        ------
        TimeoutError
            The step is not done within `seconds`.
        RuntimeError
            The kernel ended before it: stopped, or idle_seconds without a step.
        """
        state = self._decode.wait(step, seconds)
        if state == "running":
            raise TimeoutError(f"PersistentDecode: step {step} is not done within {seconds} s")
        if state != "done":
            why = "was stopped" if state == "stopped" else "ended without a step for idle_seconds"
            raise RuntimeError(
                f"PersistentDecode: the kernel {why} before step {step}; start another"
            )

    def stop(self) -> None:
        """End the kernel before its next step, without waiting for the end."""
        self._decode.stop()

    def close(self) -> None:
        """Stop and wait for the end of the kernel. A second call does nothing."""
        self._decode.close()

    def __enter__(self) -> PersistentDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
