# SPDX-License-Identifier: Apache-2.0
"""What attention_varlen over caches in blocks refuses: messages, and that nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import harness
import paged_cases

REFUSALS = {
    "float8": (
        {"k": np.ones((5, 8, 2, 64), np.uint8).view(paged_cases.E4M3)},
        ValueError,
        "q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; cast it",
    ),
    "dtype": (
        {"k": np.ones((5, 8, 2, 64), np.float16)},
        ValueError,
        "k must be float32 like q, got float16; cast it",
    ),
    "axes": (
        {"v": np.ones((5, 8, 64), np.float32)},
        ValueError,
        "v must have 4 axes [num_blocks, block_size, num_heads_kv, head_dim], got 3 with shape "
        "(5, 8, 64); reshape it",
    ),
    "table_rows": (
        {"block_tables": np.zeros((3, 4), np.int32)},
        ValueError,
        "block_tables must have num_seqs 2 like cu_seqlens_q, got 3; make them equal",
    ),
    "no_lengths": (
        {"cu_seqlens_k": None},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must both be given, got one; pass int32 [batch + 1] for "
        "each, or seqused_k [batch]",
    ),
    "id": (
        {"block_tables": np.array([[0, 5], [0, 0]], np.int32)},
        ValueError,
        "block_tables must name blocks in [0, 5), got 5 at (0, 1); entries past the sequence may "
        "hold anything",
    ),
    "id_negative": (
        {"block_tables": np.array([[0, 1], [-1, 0]], np.int32)},
        ValueError,
        "block_tables must name blocks in [0, 5), got -1 at (1, 0); entries past the sequence may "
        "hold anything",
    ),
    "too_narrow": (
        {"block_tables": np.zeros((2, 1), np.int32)},
        ValueError,
        "block_tables must have room for every sequence, got a length of 9 for sequence 0 with 1 "
        "blocks of 8; widen the table",
    ),
    "too_narrow_for_seqused": (
        {"cu_seqlens_k": None, "seqused_k": np.array([9, 17], np.int32), "max_seqlen_k": 99},
        ValueError,
        "block_tables must have room for every sequence, got a length of 17 for sequence 1 with 2 "
        "blocks of 8; widen the table",
    ),
    "longer_than_max_seqlen": (
        {"cu_seqlens_k": np.array([0, 9, 19], np.int32)},
        ValueError,
        "max_seqlen_k must be at least the longest sequence, got 9 with a length of 10 for "
        "sequence 1; pass an upper bound",
    ),
    "decreasing": (
        {"cu_seqlens_k": np.array([0, 9, 8], np.int32)},
        ValueError,
        "cu_seqlens_k must not decrease, got 8 after 9 at index 2; pass the running sum of the "
        "sequence lengths",
    ),
    "negative_seqused": (
        {"cu_seqlens_k": None, "seqused_k": np.array([9, -1], np.int32)},
        ValueError,
        "seqused_k must lie within [0, 9], got -1 at index 1; it counts the rows in use of each "
        "sequence",
    ),
    "table_int64": (
        {"block_tables": np.zeros((2, 2), np.int64)},
        ValueError,
        "block_tables must be int32, got int64; cast it, by x.astype('int32') or torch's x.int()",
    ),
    "table_axes": (
        {"block_tables": np.zeros(4, np.int32)},
        ValueError,
        "block_tables must have 2 axes [num_seqs, max_blocks_per_seq], got 1 with shape (4,); "
        "reshape it",
    ),
    "table_strided": (
        {"block_tables": np.zeros((2, 4), np.int32)[:, ::2]},
        ValueError,
        "block_tables must be contiguous in its last axis, got strides (4, 2) in elements; make a "
        "contiguous copy",
    ),
    "head_dim": (
        {"k": np.ones((5, 8, 2, 32), np.float32)},
        ValueError,
        "k must have head_dim 64 like q, got 32; make them equal",
    ),
    "heads": (
        {name: np.ones((5, 8, 3, 64), np.float32) for name in "kv"},
        ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 4 and 3; repeat or drop heads",
    ),
    "blocks_differ": (
        {"v": np.ones((4, 8, 2, 64), np.float32)},
        ValueError,
        "v must have num_blocks 5 like k, got 4; make them equal",
    ),
    "block_size": (
        {name: np.ones((5, 300, 2, 64), np.float32) for name in "kv"},
        ValueError,
        "k must have block_size from 1 to 256, got 300; cut the cache into blocks of such a size",
    ),
    "no_blocks": (
        {name: np.ones((0, 8, 2, 64), np.float32) for name in "kv"},
        ValueError,
        "k must hold at least one block, got 0; allocate one",
    ),
    "kv_layout": (
        {"kv_layout": "dhn"},
        ValueError,
        "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'dhn'; choose one of these",
    ),
    "layout_without_table": (
        {"block_tables": None, "kv_layout": "hnd"},
        ValueError,
        "kv_layout belongs to paged caches and must be 'nhd' without block_tables, got 'hnd'; "
        "leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    changes, exception, message = REFUSALS[name]
    given = {
        "q": np.ones((5, 4, 64), np.float32),
        "k": np.ones((5, 8, 2, 64), np.float32),
        "v": np.ones((5, 8, 2, 64), np.float32),
        "cu_seqlens_q": np.array([0, 2, 5], np.int32),
        "cu_seqlens_k": np.array([0, 9, 12], np.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 9,
        "block_tables": np.zeros((2, 2), np.int32),
    }
    cuattn.attention_varlen(**given)
    with pytest.raises(exception) as caught:
        cuattn.attention_varlen(**{**given, **changes})
    assert str(caught.value) == f"attention_varlen: {message}"


def test_a_refused_call_writes_nothing():
    out = np.full((2, 4, 64), 7, np.float32)
    k = np.ones((5, 8, 2, 64), np.float32)
    table = np.array([[0, 1], [2, 9]], np.int32)
    ends, used = np.array([0, 1, 2], np.int32), np.array([9, 16], np.int32)
    for max_seqlen_q in (1, 40):  # a kernel of paged_attention, and one of prefill
        with pytest.raises(ValueError, match=r"got 9 at \(1, 1\)"):
            cuattn.attention_varlen(
                out * 0,
                k,
                k,
                ends,
                None,
                max_seqlen_q,
                16,
                block_tables=table,
                seqused_k=used,
                out=out,
            )
    assert (out == 7).all()


CHECKED = """
import torch, cuattn
i32 = lambda *rows: torch.tensor(rows, dtype=torch.int32, device="cuda")
q = torch.ones(80, 4, 64, device="cuda", dtype=torch.float16)
k = torch.ones(5, 16, 2, 64, device="cuda", dtype=torch.float16)
for max_seqlen_q, ends in ((1, (0, 1, 2)), (40, (0, 40, 80))):
    for table, used in (([0, 9], (16, 32)), ([3, 4], (16, 33)), ([3, 4], (-1, 32))):
        try:
            pages = {"block_tables": i32([0, 1], table), "seqused_k": i32(*used)}
            cuattn.attention_varlen(q, k, k, i32(*ends), None, max_seqlen_q, 32, **pages)
            torch.cuda.synchronize()
        except ValueError as error:
            print(error)
"""


@pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")
@pytest.mark.gpu
def test_tables_on_the_device_are_checked_on_request():
    """CUATTN_CHECK=1 reads tables and lengths back; without it they are clamped."""
    for checked in ("1", "0"):
        environment = {**os.environ, "CUATTN_CHECK": checked}
        command = [sys.executable, "-c", CHECKED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        messages = [
            "attention_varlen: block_tables must name blocks in [0, 5), got 9 at (1, 1); entries "
            "past the sequence may hold anything",
            "attention_varlen: block_tables must have room for every sequence, got a length of 33 "
            "for sequence 1 with 2 blocks of 16; widen the table",
            "attention_varlen: seqused_k must lie within [0, 32], got -1 at index 0; it counts the "
            "rows in use of each sequence",
        ]
        assert done.stdout.splitlines() == (messages * 2 if checked == "1" else [])
