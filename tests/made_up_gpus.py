# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not here, for explain(), and what it says of attention on them."""

from __future__ import annotations

import pytest

import cuattn

# Compute capability, multiprocessors, shared memory that a block can opt in to; 1: machine code
# for it is in the build, 0: it runs from PTX, -1: it cannot run.
GPUS = {
    "A100": dict(major=8, minor=0, num_sms=108, smem_per_block_optin=166912, native=1),
    "A10": dict(major=8, minor=6, num_sms=72, smem_per_block_optin=101376, native=1),
    "L4": dict(major=8, minor=9, num_sms=58, smem_per_block_optin=101376, native=1),
    "H100": dict(major=9, minor=0, num_sms=132, smem_per_block_optin=232448, native=1),
    "H200": dict(major=9, minor=0, num_sms=132, smem_per_block_optin=232448, native=1),
    "B200": dict(major=10, minor=0, num_sms=148, smem_per_block_optin=232448, native=0),
    "RTX5090": dict(major=12, minor=0, num_sms=170, smem_per_block_optin=101376, native=0),
}
V100 = dict(major=7, minor=0, num_sms=80, smem_per_block_optin=98304, native=-1, name="V100")
HALF = ("float16", "bfloat16")
HOPPER = ("H100", "H200")
TENSOR_CORES = {gpu: "sm90" if gpu in HOPPER else "sm80" for gpu in GPUS}
on_every_gpu = pytest.mark.parametrize("gpu", GPUS)


def explain(gpu, *, shape=(2, 512, 8, 64), kv=None, v=None, dtype="float16", **options):
    kv = shape if kv is None else kv
    device = GPUS[gpu] if isinstance(gpu, str) else gpu
    return cuattn.explain(
        "attention", shape, kv, kv if v is None else v, device=device, dtype=dtype, **options
    )


def cut(plan):
    """What fixes the order of a row's sums."""
    return plan.tile_m, plan.tile_n, plan.num_splits
