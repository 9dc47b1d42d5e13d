# SPDX-License-Identifier: Apache-2.0
"""Calls whose keys are cut into parts: options of cases.Case by name; what is asked of results."""

from __future__ import annotations

import dataclasses

import numpy as np

import cuattn
from harness import bits

SPLIT: dict[str, dict[str, object]] = {
    "decode": dict(num_heads_q=8, num_heads_kv=1, seqlen_q=1, seqlen_kv=900, head_dim=128),
    "chunk": dict(seqlen_q=70, seqlen_kv=777, causal=True),
    "full": dict(seqlen_q=200, seqlen_kv=513, head_dim=96, layout="bhsd"),
    "window": dict(seqlen_q=190, seqlen_kv=641, window=(210, 30), head_dim=128),
    "empty_rows": dict(seqlen_q=400, seqlen_kv=300, causal=True, head_dim=256),
    "no_keys": dict(seqlen_q=5, seqlen_kv=0),
    "sinks": dict(seqlen_q=9, seqlen_kv=600, sinks=True, causal=True, num_heads_kv=1),
    "empty_rows_with_sinks": dict(seqlen_q=300, seqlen_kv=150, sinks=True, causal=True),
    "scored": dict(seqlen_q=33, seqlen_kv=400, softcap=15.0, alibi="batch", bias="full"),
    "lengths": dict(batch=4, seqlen_q=40, seqlen_kv=700, seqused="both", causal=True, sinks=True),
    "latent": dict(seqlen_q=60, seqlen_kv=500, head_dim=192, head_dim_v=128),
    "padded": dict(seqlen_q=60, seqlen_kv=500, head_dim=72, head_dim_v=104, storage="padded"),
    "ragged": dict(layout="ragged", batch=5, seqlen_q=90, seqlen_kv=700, head_dim=128, causal=True),
    "ragged_scored": dict(
        layout="ragged", batch=3, seqlen_q=150, seqlen_kv=400, softcap=9.0, bias="full"
    ),
    "ragged_lengths": dict(
        layout="ragged", batch=6, seqlen_q=40, seqlen_kv=600, seqused="both", sinks=True
    ),
    "ragged_group": dict(
        layout="ragged", batch=4, num_heads_q=8, num_heads_kv=1, seqlen_q=30, seqlen_kv=900
    ),
}


def with_options(problem, **options):
    return dataclasses.replace(problem, options={**problem.options, **options})


def plan_of(case, **options):
    """What the GPU that is here would run for a dense case."""
    q = (case.batch, case.seqlen_q, case.num_heads_q, case.head_dim)
    k = (case.batch, case.seqlen_kv, case.num_heads_kv, case.head_dim)
    return cuattn.explain(
        "attention",
        q,
        k,
        (*k[:3], case.dim_v),
        device=0,
        dtype=case.dtype,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        **options,
    )


def tile_of(case, **options):
    plan = plan_of(case, **options)
    return plan.tile_m, plan.tile_n


def same_bits(a, b):
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
