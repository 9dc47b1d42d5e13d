# SPDX-License-Identifier: Apache-2.0
"""What paged attention refuses, and in which words: function, argument, rule, value, way out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cuattn
import frameworks
import harness
import paged_cases
from paged_cases import E4M3, PagedCase

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64
TOO_WIDE = (
    "no kernel holds such rows: call the attention of your own library, such as torch's "
    "scaled_dot_product_attention or jax.nn.dot_product_attention"
)
GROW = "pad it with zeros and pass scale= of the true head_dim"
V1, V2 = "paged_attention_v1", "paged_attention_v2"


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def arguments(function):
    """A valid call: 3 sequences, 4 heads over 2, head_dim 16, blocks of 8 tokens."""
    caches = [ones(5, 8, 2, 16), ones(5, 8, 2, 16)]
    names = ["k_cache", "v_cache"]
    if function in (V1, V2):
        caches = [ones(5, 2, 4, 8, 4), ones(5, 2, 16, 8)]
        names = ["key_cache", "value_cache"]
    base = {
        "q": ones(3, 4, 16),
        **dict(zip(names, caches, strict=True)),
        "block_tables": np.array([[0, 1], [2, 3], [4, 0]], I32),
        "context_lens": np.array([16, 9, 0], I32),
    }
    if function in (V1, V2):
        base = {"out": ones(3, 4, 16), **base, "scale": 0.25}
    if function == "paged_plan":
        base = {name: base[name] for name in ("block_tables", "context_lens")}
        base |= {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16, "block_size": 8}
    return base


# fmt: off
REFUSALS = {
    # Shapes
    "q_of_2_axes": ("", {"q": ones(3, 64)}, ValueError,
        "q must have axes [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, "
        "head_dim], got 2 with shape (3, 64); reshape it"),
    "v1_q_of_4_axes": (V1, {"q": ones(3, 1, 4, 16)}, ValueError,
        "q must have 3 axes [num_seqs, num_heads_q, head_dim], got 4 with shape (3, 1, 4, 16); "
        "reshape it"),
    "head_dim_12": ("", {"q": ones(3, 4, 12)}, ValueError,
        f"q must have head_dim a multiple of 8 up to 256, got 12; {GROW}"),
    "head_dim_264": ("", {"q": ones(3, 4, 264)}, ValueError,
        f"q must have head_dim a multiple of 8 up to 256, got 264; {TOO_WIDE}"),
    "head_dim_24_fp8": (
        "", {"q": ones(3, 4, 24, dtype=F16), "k_cache": ones(5, 8, 2, 24, dtype=np.uint8),
             "v_cache": ones(5, 8, 2, 24, dtype=np.uint8), "kv_dtype": "float8_e4m3fn"}, ValueError,
        f"q must have head_dim a multiple of 16 up to 256 for float8, got 24; {GROW}"),
    "k_of_3_axes": ("", {"k_cache": ones(5, 8, 16)}, ValueError,
        "k_cache must have 4 axes [num_blocks, block_size, num_heads_kv, head_dim], got 3 with "
        "shape (5, 8, 16); reshape it"),
    "k_of_4_axes_vllm": (V2, {"key_cache": ones(5, 2, 16, 8)}, ValueError,
        "key_cache must have 5 axes [num_blocks, num_heads_kv, head_dim / x, block_size, x], got 4 "
        "with shape (5, 2, 16, 8); reshape it"),
    "wrong_x": (V1, {"key_cache": ones(5, 2, 2, 8, 8)}, ValueError,
        "key_cache must have x = 4 (16 bytes) as its last axis in kv_layout 'vllm', got 8; view it "
        "as [num_blocks, num_heads_kv, head_dim / x, block_size, x]"),
    "wrong_chunks": (V1, {"key_cache": ones(5, 2, 5, 8, 4)}, ValueError,
        "key_cache must have head_dim 16 like q, got 20; make them equal"),
    "blocks_of_v": ("", {"v_cache": ones(4, 8, 2, 16)}, ValueError,
        "v_cache must have num_blocks 5 like k_cache, got 4; make them equal"),
    "heads_of_v": (V1, {"value_cache": ones(5, 1, 16, 8)}, ValueError,
        "value_cache must have num_heads_kv 2 like key_cache, got 1; make them equal"),
    "block_size_of_v": ("", {"v_cache": ones(5, 4, 2, 16)}, ValueError,
        "v_cache must have block_size 8 like k_cache, got 4; make them equal"),
    "head_dim_of_v": ("", {"v_cache": ones(5, 8, 2, 24)}, ValueError,
        "v_cache must have head_dim 16 like q, got 24; make them equal"),
    "heads_do_not_divide": ("", {"q": ones(3, 5, 16)}, ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 5 and 2; repeat or drop heads"),
    "block_size_257": ("", {"k_cache": ones(2, 257, 2, 16), "v_cache": ones(2, 257, 2, 16)},
        ValueError,
        "k_cache must have block_size from 1 to 256, got 257; cut the cache into blocks of such "
        "a size"),
    "block_size_0": ("", {"k_cache": ones(2, 0, 2, 16), "v_cache": ones(2, 0, 2, 16)}, ValueError,
        "k_cache must have block_size from 1 to 256, got 0; cut the cache into blocks of such "
        "a size"),
    "block_size_12_vllm": (V1, {"key_cache": ones(5, 2, 4, 12, 4),
                                "value_cache": ones(5, 2, 16, 12)}, ValueError,
        "key_cache must have block_size 8, 16 or 32 in kv_layout 'vllm', got 12; use 'nhd' or "
        "'hnd' for others"),
    "no_blocks": ("", {"k_cache": ones(0, 8, 2, 16), "v_cache": ones(0, 8, 2, 16)}, ValueError,
        "k_cache must hold at least one block, got 0; allocate one"),
    "rows_of_tables": ("", {"block_tables": ones(2, 2, dtype=I32)}, ValueError,
        "block_tables must have num_seqs 3 like q, got 2; make them equal"),
    "tables_of_1_axis": ("", {"block_tables": ones(3, dtype=I32)}, ValueError,
        "block_tables must have 2 axes [num_seqs, max_blocks_per_seq], got 1 with shape (3,); "
        "reshape it"),
    "count_of_lens": ("", {"context_lens": ones(4, dtype=I32)}, ValueError,
        "context_lens must have num_seqs 3 like q, got 4; make them equal"),
    "too_many_tokens": ("", {"block_tables": np.broadcast_to(np.zeros((), I32), (3, 2**29))},
        ValueError, "block_tables must be contiguous in its last axis, got strides (0, 0) in "
        "elements; make a contiguous copy"),
    # Dtypes
    "float64": ("", {"q": ones(3, 4, 16, dtype=np.float64)}, ValueError,
        "q must be float32, float16 or bfloat16, got float64; cast it first"),
    "dtype_of_k": ("", {"k_cache": ones(5, 8, 2, 16, dtype=F16)}, ValueError,
        "k_cache must be float32 like q, got float16; cast it"),
    "dtype_of_v": ("", {"v_cache": ones(5, 8, 2, 16, dtype=ml_dtypes.bfloat16)}, ValueError,
        "v_cache must be float32 like k_cache, got bfloat16; cast it"),
    "fp8_under_float32": ("", {"k_cache": ones(5, 8, 2, 16, dtype=ml_dtypes.float8_e4m3fn)},
        ValueError, "q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; "
        "cast it"),
    "bytes_without_kv_dtype": ("", {"k_cache": ones(5, 8, 2, 16, dtype=np.uint8)}, ValueError,
        "k_cache must be float32 like q, got uint8; cast it"),
    "kv_dtype_unknown": ("", {"kv_dtype": "int8"}, ValueError,
        "kv_dtype must be None or 'float8_e4m3fn', got 'int8'; it says what uint8 caches hold, "
        "other caches say so themselves"),
    "kv_dtype_of_float_caches": ("", {"kv_dtype": "float8_e4m3fn"}, ValueError,
        "kv_dtype float8_e4m3fn asks for caches of that dtype or of uint8, got float32; leave "
        "kv_dtype out"),
    "tables_int64": ("", {"block_tables": ones(3, 2, dtype=I64)}, ValueError,
        "block_tables must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    "lens_int64": (V2, {"context_lens": ones(3, dtype=I64)}, ValueError,
        "context_lens must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    # Data
    "negative_length": ("", {"context_lens": np.array([3, -1, 0], I32)}, ValueError,
        "context_lens must lie within [0, 16], got -1 at index 1; the table names "
        "max_blocks_per_seq * block_size tokens, and a max_context_len may allow fewer"),
    "table_too_narrow": (V1, {"context_lens": np.array([3, 0, 17], I32)}, ValueError,
        "context_lens must lie within [0, 16], got 17 at index 2; the table names "
        "max_blocks_per_seq * block_size tokens, and a max_context_len may allow fewer"),
    "id_too_large": ("", {"block_tables": np.array([[0, 1], [5, 3], [4, 0]], I32)}, ValueError,
        "block_tables must hold block ids within [0, 4], got 5 at (1, 0); entries past the context "
        "may be anything"),
    "id_negative": (V2, {"block_tables": np.array([[0, -1], [2, 3], [4, 0]], I32)}, ValueError,
        "block_tables must hold block ids within [0, 4], got -1 at (0, 1); entries past the "
        "context may be anything"),
    "longer_than_max_context_len": (V2, {"max_context_len": 15}, ValueError,
        "context_lens must lie within [0, 15], got 16 at index 0; the table names "
        "max_blocks_per_seq * block_size tokens, and a max_context_len may allow fewer"),
    # Strides
    "k_not_contiguous": ("", {"k_cache": ones(5, 8, 2, 32)[..., ::2]}, ValueError,
        "k_cache must be contiguous in its last axis, got strides (512, 64, 32, 2) in elements; "
        "make a contiguous copy"),
    "slab_not_contiguous": (V1, {"value_cache": ones(5, 2, 16, 16)[..., :8]}, ValueError,
        "value_cache must be contiguous within a block and head, got strides (512, 256, 16, 1); "
        "make a contiguous copy"),
    "lens_not_contiguous": ("", {"context_lens": np.zeros(6, I32)[::2]}, ValueError,
        "context_lens must be contiguous, got strides (2,); make a contiguous copy"),
    # Options
    "kv_layout_unknown": ("", {"kv_layout": "dhn"}, ValueError,
        "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'dhn'; choose one of these"),
    "window": ("", {"window": (-2, 0)}, ValueError,
        "window must hold two integers >= -1 (-1 = unlimited), got (-2, 0); pass (left, right)"),
    "scale": (V1, {"scale": float("inf")}, ValueError,
        "scale must be a finite number, got inf; pass None for 1 / sqrt(head_dim)"),
    "softcap": ("", {"softcap": -1.0}, ValueError,
        "softcap must be >= 0 and finite in float32, got -1; pass 0 to switch it off"),
    "slopes": (V2, {"alibi_slopes": ones(2)}, ValueError,
        "alibi_slopes must have shape (num_heads_q,) = (4,) or (num_seqs, num_heads_q) = (3, 4), "
        "got (2,); give one number per head"),
    "sinks": ("", {"sinks": ones(3, 4)}, ValueError,
        "sinks must have shape (num_heads_q,) = (4,), got (3, 4); give one number per head"),
    "k_scale_of_float_caches": ("", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to float8_e4m3fn caches, these are float32; leave it out"),
    "v_scale_of_float_caches": (V1, {"v_scale": ones(2)}, ValueError,
        "v_scale belongs to float8_e4m3fn caches, these are float32; leave it out"),
    "num_splits": ("", {"num_splits": -1}, ValueError,
        "num_splits must be >= 0, got -1; pass 0 to let cuattn choose"),
    "invariant_splits": ("", {"num_splits": 2, "batch_invariant": True}, ValueError,
        "batch_invariant fixes the length of a split, so num_splits must be 0, got 2; leave one "
        "out"),
    "plan_and_splits": ("", {"plan": ones(73, dtype=I32), "num_splits": 2}, ValueError,
        "plan says how keys are cut, so num_splits must be 0 and batch_invariant False, got 2 and "
        "False; leave one out"),
    "plan_of_another_call": ("", {"plan": ones(5, dtype=I32)}, ValueError,
        "plan must have 73 entries for backend 'cpu', got shape (5,); make it with paged_plan for "
        "the shapes, kv_layout and backend of this call"),
    "plan_of_another_step": ("", {"plan": ones(73, dtype=I32)}, ValueError,
        "plan must be what paged_plan makes of these context_lens, got another; make it anew in "
        "every step, with the options of this call"),
    "partition_size": (V2, {"partition_size": 128}, ValueError,
        "partition_size must be 256, 512 or 1024, got 128; vLLM's is 512"),
    "exp_sums": (V2, {"exp_sums": ones(3, 4, 2)}, ValueError,
        "exp_sums must have shape (3, 4, 1), got (3, 4, 2); allocate it with that shape"),
    "max_logits": (V2, {"max_logits": ones(3, 4, 1, dtype=F16)}, ValueError,
        "max_logits must be float32, got float16; cast it"),
    "tmp_out": (V2, {"tmp_out": ones(3, 4, 1, 8)}, ValueError,
        "tmp_out must have shape (3, 4, 1, 16), got (3, 4, 1, 8); allocate it with that shape"),
    "max_context_len": (V2, {"max_context_len": -1}, ValueError,
        "max_context_len must be >= 0, got -1; pass None for what block_tables can name"),
    "backend": ("", {"backend": "flash"}, ValueError,
        "backend must be 'auto', 'cpu', 'simt', 'sm80' or 'sm90', got 'flash'; use 'auto' for the "
        "fastest that serves the call"),
    "backend_of_cuda": ("", {"backend": "sm80"}, NotImplementedError,
        "backend 'sm80' cannot run this call: it runs on CUDA arrays, these are on the CPU; use "
        "backend='cpu' or 'auto'"),
    # Outputs
    "out": ("", {"out": ones(3, 4, 8)}, ValueError,
        "out must have shape (3, 4, 16), got (3, 4, 8); allocate it with that shape"),
    "out_v1": (V1, {"out": ones(3, 4, 16, dtype=F16)}, ValueError,
        "out must be float32, got float16; cast it"),
    "lse_out": ("", {"lse_out": ones(3, 4, 1)}, ValueError,
        "lse_out must have shape (3, 4), got (3, 4, 1); allocate it with that shape"),
    # paged_plan
    "plan_dtype": ("paged_plan", {"dtype": "int32"}, ValueError,
        "dtype must be float32, float16 or bfloat16, got int32; cast it first"),
    "plan_heads": ("paged_plan", {"num_heads_kv": 3}, ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 4 and 3; repeat or drop heads"),
    "plan_rows": ("paged_plan", {"block_tables": ones(2, 2, dtype=I32)}, ValueError,
        "block_tables must have num_seqs 3 like context_lens, got 2; make them equal"),
    "plan_block_size": ("paged_plan", {"block_size": 0}, ValueError,
        "the cache must have block_size from 1 to 256, got 0; cut the cache into blocks of such "
        "a size"),
    "plan_length": ("paged_plan", {"context_lens": np.array([1, 2, 99], I32)}, ValueError,
        "context_lens must lie within [0, 16], got 99 at index 2; the table names "
        "max_blocks_per_seq * block_size tokens, and a max_context_len may allow fewer"),
    "plan_out": ("paged_plan", {"out": ones(3, dtype=I32)}, ValueError,
        "out must have shape (73,), got (3,); allocate it with that shape"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    function, changes, exception, message = REFUSALS[name]
    function = function or "paged_attention"
    call = getattr(cuattn, function)
    given = arguments(function)
    call(**given)  # valid as it stands
    with pytest.raises(exception) as caught:
        call(**{**given, **changes})
    assert str(caught.value) == f"{function}: {message}"


def test_an_id_is_checked_under_the_longest_context_there_is():
    """The count of its blocks must not overflow 32 bits."""
    tables = np.zeros((1, 2**23), I32)
    tables[0, 5] = -1
    cache = ones(2, 256, 1, 8)
    longest = 2**31 - 1024
    lens = np.array([longest], I32)
    with pytest.raises(ValueError, match=r"block ids within \[0, 1\], got -1 at \(0, 5\)"):
        cuattn.paged_attention_v2(
            ones(1, 1, 8), ones(1, 1, 8), cache, cache, tables, lens, 1.0,
            max_context_len=longest, kv_layout="nhd", partition_size=1024,
        )  # fmt: skip


def test_a_refused_call_writes_nothing():
    given = arguments(V1)
    given["out"][:] = 7
    given["context_lens"][1] = 99
    with pytest.raises(ValueError, match="context_lens"):
        cuattn.paged_attention_v1(**given)
    assert (given["out"] == 7).all()


# Data that only the device sees. The cases run with CUATTN_CHECK=1, which must say what the CPU
# says, and without, where ids and lengths are clamped.

on_cuda = pytest.mark.skipif(harness.why_no_cuda() is not None, reason="needs a CUDA device")

CHECKED = """
import sys, torch, cuattn
device = sys.argv[1]
lent = []
def lend(*shape, dtype=torch.float16):
    # An array of 7 between 512 elements of NaN.
    array = torch.ones(shape, dtype=dtype)
    memory = torch.full((array.numel() + 1024,), float("nan"), dtype=dtype, device=device)
    lent.append(memory)
    return memory[512:-512].view(shape).fill_(7)
def i32(rows): return torch.tensor(rows, dtype=torch.int32, device=device)
q = lend(3, 4, 64).fill_(1)
nhd = [lend(5, 8, 2, 64).fill_(1) for _ in range(2)]
vllm = [lend(5, 2, 8, 8, 8).fill_(1), lend(5, 2, 64, 8).fill_(1)]
shape = dict(num_heads_q=4, num_heads_kv=2, head_dim=64, block_size=8, dtype="float16")
def decode(tables, lens, out, **options):
    cuattn.paged_attention(q, *nhd, tables, lens, out=out, **options)
def planned(tables, lens, out):
    decode(tables, lens, out, plan=cuattn.paged_plan(tables, lens, **shape))
def v1(tables, lens, out): cuattn.paged_attention_v1(out, q, *vllm, tables, lens, 0.125)
def v2(tables, lens, out):
    parts = {name: lend(3, 4, 1, dtype=torch.float32) for name in ("exp_sums", "max_logits")}
    parts["tmp_out"] = lend(3, 4, 1, 64)
    cuattn.paged_attention_v2(out, q, *vllm, tables, lens, 0.125, **parts)
tables, lens = [[0, 1], [2, 3], [4, 0]], [16, 9, 0]
changes = [
    (tables, lens),
    ([[0, 1], [5, 3], [4, 0]], lens),
    ([[0, -1], [2, 3], [4, 0]], lens),
    ([[0, 1], [2, 2**31 - 1], [4, 0]], lens),
    (tables, [16, -1, 0]),
    (tables, [16, 9, 17]),
    (tables, [16, 2**31 - 1, 0]),
]
for call in (decode, planned, v1, v2):
    for tables, lens in changes:
        out, want = lend(3, 4, 64), torch.ones(3, 4, 64)
        want[[n <= 0 for n in lens]] = 0
        try:
            call(i32(tables), i32(lens), out)
        except ValueError as error:
            print(error)
            want[:] = 7
        print(torch.equal(out.float().cpu(), want))
for memory in lent:
    assert memory[:512].isnan().all() and memory[-512:].isnan().all(), "written outside"
"""

TABLES = "entries past the context may be anything"
LENS = (
    "the table names max_blocks_per_seq * block_size tokens, and a max_context_len may allow fewer"
)
WRONG_ID = [
    f"block_tables must hold block ids within [0, 4], got 5 at (1, 0); {TABLES}",
    f"block_tables must hold block ids within [0, 4], got -1 at (0, 1); {TABLES}",
    f"block_tables must hold block ids within [0, 4], got 2147483647 at (1, 1); {TABLES}",
]
WRONG_LENGTH = [
    f"context_lens must lie within [0, 16], got -1 at index 1; {LENS}",
    f"context_lens must lie within [0, 16], got 17 at index 2; {LENS}",
    f"context_lens must lie within [0, 16], got 2147483647 at index 1; {LENS}",
]


@pytest.mark.parametrize(
    ("device", "checked"),
    [("cpu", "0"), *(pytest.param("cuda", x, marks=[on_cuda, pytest.mark.gpu]) for x in "10")],
)
def test_tables_and_lengths_are_checked_on_request(device, checked):
    """A refused call writes nothing; an unchecked one reads what exists and writes its output."""
    frameworks.require("torch")
    done = subprocess.run(
        [sys.executable, "-c", CHECKED, device],
        env={**os.environ, "CUATTN_CHECK": checked},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refused = (device, checked) != ("cuda", "0")
    expected = []
    for of_ids, of_lens in (
        ("paged_attention", "paged_attention"),
        ("paged_attention", "paged_plan"),
        (V1, V1),
        (V2, V2),
    ):
        messages = [f"{of_ids}: {rule}" for rule in WRONG_ID]
        messages += [f"{of_lens}: {rule}" for rule in WRONG_LENGTH]
        expected += ["True"]
        for message in messages:
            expected += [message, "True"] if refused else ["True"]
    assert done.stdout.splitlines() == expected


WRONG = [(2**31 - 1, 40), (-(2**31), 40), (77, 40), (7, 2**31 - 1), (7, -5), (-1, 10**6)]
over_wrong_data = pytest.mark.parametrize(("block", "length"), WRONG)
over_layouts = pytest.mark.parametrize("kv_layout", ["nhd", "hnd", "vllm"])


def wrong_problem(case, block, length, rng):
    """`case` with another length and one block id throughout for its second sequence, every slot of
    the caches filled; and the problem that a kernel must solve instead, of what was clamped.
    """
    problem = paged_cases.make(case, rng)
    arrays = problem.arrays
    for name in ("k_cache", "v_cache"):
        values = rng.standard_normal(arrays[name].shape, F32)
        dtype = arrays[name].dtype
        arrays[name] = values.astype(E4M3).view(dtype) if case.fp8 else values.astype(dtype)
    num_blocks = len(arrays["k_cache"])
    assert 7 < num_blocks <= 77
    arrays["block_tables"][1], arrays["context_lens"][1] = block, length
    capacity = arrays["block_tables"].shape[1] * case.block_size
    clamped = {
        "block_tables": np.clip(arrays["block_tables"], 0, num_blocks - 1),
        "context_lens": np.clip(arrays["context_lens"], 0, capacity),
    }
    return problem, dataclasses.replace(problem, arrays={**arrays, **clamped})


def lent_workspace(arena, problem, backend, **options):
    """A workspace of exactly the size that the call needs."""
    arrays = problem.arrays
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
    shapes = [(str(arrays[name].dtype), *arrays[name].shape) for name in names]
    options |= {"device": 0, "backend": backend, "kv_layout": problem.case.kv_layout}
    plan = cuattn.explain("paged_attention", *shapes, **options)
    return arena.output((plan.workspace_bytes,), np.uint8, name="workspace", align=256)


@on_cuda
@pytest.mark.gpu
@over_wrong_data
@over_layouts
@pytest.mark.parametrize("backend", paged_cases.CUDA_BACKENDS)
def test_wrong_data_on_the_device_is_clamped(backend, kv_layout, block, length, rng):
    """However the keys are cut: no access leaves the arrays, and the result is the clamped one."""
    device, dtype = harness.Cuda(), "float32" if backend == "simt" else "float16"
    case = PagedCase(lens=(40, 40, 600), kv_layout=kv_layout, dtype=dtype)

    def attempt():
        problem, clamped = wrong_problem(case, block, length, rng)
        paged_cases.run(device, backend, problem)  # skips where the rung does not serve it
        plan = paged_cases.plan_of(device, backend, problem)
        for options in ({}, {"num_splits": 3}, {"batch_invariant": True}, {"plan": plan}):
            arena = harness.Arena(device)
            lent = lent_workspace(arena, problem, backend, **options)
            result = paged_cases.run(
                device, backend, problem, give_out=True, workspace=lent, **options
            )
            paged_cases.judge(clamped, *result)
            arena.verify()

    harness.assert_by_draws(dtype, attempt)


@on_cuda
@pytest.mark.gpu
@over_wrong_data
@over_layouts
@pytest.mark.parametrize("fp8", [False, True])
def test_wrong_data_of_v1_and_v2_is_clamped(fp8, kv_layout, block, length, rng):
    device = harness.Cuda()
    case = PagedCase(lens=(40, 40, 600), kv_layout=kv_layout, fp8=fp8, options=(("scale", 0.125),))
    problem, clamped = wrong_problem(case, block, length, rng)
    _, lse = clamped.reference()
    paged_cases.judge(clamped, paged_cases.run_version(1, device, problem), lse)
    capacity = problem.arrays["block_tables"].shape[1] * case.block_size
    arena, shape = harness.Arena(device), (3, case.num_heads_q, -(-capacity // 256))
    buffers = {
        "exp_sums": arena.output(shape, F32),
        "max_logits": arena.output(shape, F32),
        "tmp_out": arena.output((*shape, case.head_dim), F16),
    }
    out = paged_cases.run_version(2, device, problem, partition_size=256, **buffers)
    paged_cases.judge(clamped, out, lse)
    arena.verify()


@on_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("backend", paged_cases.CUDA_BACKENDS)
def test_a_wrong_plan_on_the_device_writes_nothing_outside(backend, rng):
    """That of another step, and numbers that no plan has; what is in the output means nothing."""
    device, dtype = harness.Cuda(), "float32" if backend == "simt" else "float16"
    case = PagedCase(lens=(40, 700, 300), dtype=dtype)
    problem = paged_cases.make(case, rng)
    paged_cases.run(device, backend, problem)  # skips where the rung does not serve it
    other = paged_cases.make(dataclasses.replace(case, lens=(700, 0, 5)), rng)
    plan = device.numpy(paged_cases.plan_of(device, backend, other))
    for values in (
        plan,
        rng.permutation(plan),
        rng.integers(-(2**31), 2**31, plan.shape),
        np.full(plan.shape, 2**31 - 1),
        np.full(plan.shape, -1),
        np.zeros(plan.shape),
        np.ones(plan.shape),
    ):
        arena = harness.Arena(device)
        placed = arena.put(values.astype(I32), align=4)
        lent = lent_workspace(arena, problem, backend, plan=placed)
        paged_cases.run(device, backend, problem, give_out=True, workspace=lent, plan=placed)
        arena.verify()
    paged_cases.judge(problem, *paged_cases.run(device, backend, problem))
