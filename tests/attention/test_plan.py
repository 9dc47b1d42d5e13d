# SPDX-License-Identifier: Apache-2.0
"""The chooser on GPUs that are not here: explain() with made-up devices, no GPU and no data. How
sm90 cuts its work is in test_plan_sm90.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from made_up_gpus import GPUS, HALF, HOPPER, TENSOR_CORES, V100, explain, on_every_gpu


@on_every_gpu
@pytest.mark.parametrize("dtype", HALF)
def test_sixteen_bit_types_run_on_tensor_cores_at_every_head_dim(gpu, dtype):
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 8, 128, 256}:
            plan = explain(gpu, shape=(2, 512, 8, head_dim), v=(2, 512, 8, head_dim_v), dtype=dtype)
            assert plan.kernel == TENSOR_CORES[gpu]
            assert plan.head_dim >= head_dim
            assert plan.head_dim_v >= head_dim_v
            if gpu not in HOPPER:
                assert (plan.num_splits, plan.packed_heads, plan.workspace_bytes) == (1, 1, 0)


@on_every_gpu
def test_wide_heads_have_one_kernel_of_each_dtype(gpu):
    for head_dim, head_dim_v in ((264, 264), (512, 64), (64, 512), (512, 512)):
        for dtype, kernel in (*((half, "sm80") for half in HALF), ("float32", "simt")):
            for options in ({}, {"causal": True}, {"window": (5, 5)}, {"softcap": 3.0}):
                extents = {"shape": (2, 512, 8, head_dim), "v": (2, 512, 8, head_dim_v)}
                plan = explain(gpu, **extents, dtype=dtype, **options)
                assert (plan.kernel, plan.head_dim, plan.head_dim_v) == (kernel, 512, 512)


@on_every_gpu
@pytest.mark.parametrize("score", [{}, {"softcap": 30.0}], ids=["identity", "scored"])
def test_the_tile_fits_the_shared_memory_of_a_block(gpu, score):
    for head_dim in (*range(8, 257, 8), 264, 512):
        plan = explain(gpu, shape=(2, 512, 8, head_dim), **score)
        width = plan.head_dim + plan.head_dim_v
        used = 2 * (plan.tile_m * plan.head_dim + plan.stages * plan.tile_n * width)
        assert 0 < used <= GPUS[gpu]["smem_per_block_optin"]
        assert plan.warps in (4, 8, 12, 16)
        if plan.kernel == "sm90":
            assert plan.warps == 4 * (plan.tile_m // 64 + 1)


@pytest.mark.parametrize("accumulate", ["exact", "fast"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float8_has_a_group_of_warps_for_64_rows(accumulate, head_dim):
    plan = explain(
        "H100", shape=(2, 512, 8, head_dim), dtype="float8_e4m3fn", accumulate=accumulate
    )
    assert plan.kernel == "sm90"
    assert plan.warps == 4 * (plan.tile_m // 64 + 1)
    assert "codes become numbers" not in plan.reason


@on_every_gpu
def test_float32_runs_on_cuda_cores(gpu):
    for head_dim, compiled in ((8, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)):
        plan = explain(gpu, shape=(2, 512, 8, head_dim), dtype="float32")
        assert (plan.kernel, plan.head_dim, plan.head_dim_v) == ("simt", compiled, compiled)


@on_every_gpu
def test_the_smallest_compiled_head_is_taken(gpu):
    for head_dim, head_dim_v, compiled in (
        (8, 8, (64, 64) if gpu in HOPPER else (32, 32)),
        (40, 40, (64, 64)),
        (80, 80, (96, 96)),
        (120, 120, (128, 128)),
        (192, 128, (192, 128)),
        (192, 192, (192, 192)),
        (200, 8, (256, 256)),
        (64, 128, (128, 128)),
    ):
        plan = explain(gpu, shape=(1, 64, 8, head_dim), v=(1, 64, 8, head_dim_v))
        assert (plan.head_dim, plan.head_dim_v) == compiled


def test_an_unsupported_gpu_is_refused_by_name():
    with pytest.raises(RuntimeError) as caught:
        explain(V100)
    message = str(caught.value)
    assert message.startswith("attention: device cuda:0 (V100, compute capability 7.0) is not")
    assert "CUATTN_CUDA_ARCHS" in message


@on_every_gpu
def test_every_rung_can_be_named(gpu):
    for backend in {"naive", "cublas", "tiled", "sm80", TENSOR_CORES[gpu]}:
        assert explain(gpu, backend=backend).kernel == backend
    for backend in ("naive", "cublas", "tiled", "simt"):
        assert explain(gpu, backend=backend, dtype="float32").kernel == backend


REFUSED = {
    "sm80-float32": (
        dict(backend="sm80", dtype="float32"),
        "backend 'sm80' cannot run this call: it takes float16 and bfloat16, not float32; "
        "use backend='simt' or 'auto'",
    ),
    "sm90-float32": (
        dict(backend="sm90", dtype="float32"),
        "backend 'sm90' cannot run this call: it takes float16 and bfloat16, not float32; "
        "use backend='simt' or 'auto'",
    ),
    "sm90-elsewhere": (
        dict(backend="sm90", gpu="B200"),
        "backend 'sm90' cannot run this call: it is for compute capability 9.0 alone; "
        "use backend='sm80' or 'auto'",
    ),
    "sm90-not-built": (
        dict(backend="sm90", gpu={**GPUS["H100"], "native": 0}),
        "backend 'sm90' cannot run this call: this build has no machine code for 9.0; "
        "use backend='sm80' or 'auto'",
    ),
    "simt-float16": (
        dict(backend="simt"),
        "backend 'simt' cannot run this call: it takes float32 only; use backend='sm90' or 'auto'",
    ),
    "tiled-head-dim": (
        dict(backend="tiled", shape=(1, 64, 8, 136)),
        "backend 'tiled' cannot run this call: it takes head_dim and head_dim_v up to 128; "
        "use backend='sm90' or 'auto'",
    ),
    "tiled-scored": (
        dict(backend="tiled", softcap=10.0),
        "backend 'tiled' cannot run this call: it has no softcap, ALiBi, bias or negative scale; "
        "use backend='sm90' or 'auto'",
    ),
    "tiled-sinks": (
        dict(backend="tiled", sinks=(8,)),
        "backend 'tiled' cannot run this call: it has no sinks; use backend='sm90' or 'auto'",
    ),
    "cublas-seqused": (
        dict(backend="cublas", seqused_k=(2,)),
        "backend 'cublas' cannot run this call: it takes dense batches only, without cu_seqlens, "
        "seqused and kv_start; use backend='sm90' or 'auto'",
    ),
    "cublas-kv-start": (
        dict(backend="cublas", kv_start=(2,)),
        "backend 'cublas' cannot run this call: it takes dense batches only, without cu_seqlens, "
        "seqused and kv_start; use backend='sm90' or 'auto'",
    ),
    "cublas-invariant": (
        dict(backend="cublas", batch_invariant=True),
        "backend 'cublas' cannot run this call: its order of summation may change with the batch; "
        "use backend='sm90' or 'auto'",
    ),
    "cublas-missing": (
        dict(gpu={**GPUS["H100"], "has_cublas": False}, backend="cublas"),
        "backend 'cublas' cannot run this call: the cuBLAS library was not found; install "
        "nvidia-cublas or set CUATTN_CUBLAS_PATH; use backend='sm90' or 'auto'",
    ),
    "cpu-on-cuda": (
        dict(backend="cpu"),
        "backend 'cpu' cannot run this call: it runs on CPU arrays, these are on a CUDA device; "
        "use backend='sm90' or 'auto'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rung_that_cannot_run_the_call_says_why(name):
    options, message = REFUSED[name]
    with pytest.raises(NotImplementedError) as caught:
        explain(**{"gpu": "H100", **options})
    assert str(caught.value) == f"attention: {message}"


def test_auto_takes_every_option_on_every_gpu():
    options = dict(
        causal=True,
        window=(5, 2),
        softcap=3.0,
        alibi_slopes=(8,),
        sinks=(8,),
        bias=(1, 1, 512, 512),
        seqused_k=(2,),
        kv_start=(2,),
        return_lse=True,
    )
    for gpu in GPUS:
        assert explain(gpu, **options).kernel == TENSOR_CORES[gpu]
        assert explain(gpu, **options, dtype="float32").kernel == "simt"


def test_ragged_calls():
    def ragged(gpu="A100", **options):
        arrays = [(1000, 8, 64), (1200, 2, 64), (1200, 2, 64), (4,), (4,), 700, 900]
        return cuattn.explain("attention_varlen", *arrays, device=GPUS[gpu], **options)

    assert ragged().kernel == "sm80"
    assert ragged("H100").kernel == "sm90"
    assert ragged(dtype="float32").kernel == "simt"
    assert ragged(backend="naive").workspace_bytes == 4 * 3 * 8 * 700 * 900
    with pytest.raises(NotImplementedError, match="it takes dense batches only"):
        ragged(backend="cublas")
    asked = ragged("H100", num_splits=2)
    assert (asked.kernel, asked.num_splits) == ("sm90", 2)
    assert asked.workspace_bytes == 4 * 2 * 8 * 1000 * (64 + 1)
    assert ragged("H100", batch_invariant=True).num_splits == 1


@on_every_gpu
@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_empty_calls_have_a_plan(gpu, shape):
    plan = explain(gpu, shape=shape, kv=(shape[0], 700, *shape[2:]))
    assert (plan.num_splits, plan.workspace_bytes) == (1, 0)


def test_workspace_is_what_the_scores_need():
    shape, kv = (2, 300, 8, 64), (2, 500, 2, 64)
    scores = 4 * 2 * 8 * 300 * 500
    assert explain("H100", shape=shape, kv=kv).workspace_bytes == 0
    assert explain("H100", shape=shape, kv=kv, backend="tiled").workspace_bytes == 0
    assert explain("H100", shape=shape, kv=kv, backend="naive").workspace_bytes == scores
    for dtype, probabilities in (("float32", 0), ("float16", scores // 2)):
        plan = explain("H100", shape=shape, kv=kv, backend="cublas", dtype=dtype)
        assert plan.workspace_bytes >= scores + probabilities
    huge = (64, 65536, 64, 64)  # 2^44 bytes: counted in 64 bits
    assert explain("H100", shape=huge, backend="naive").workspace_bytes == 4 * 64 * 64 * 65536**2


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, "none"),
        ({"causal": True}, "causal"),
        ({"window": (-1, 0)}, "causal"),
        ({"causal": True, "window": (-1, 9)}, "causal"),
        ({"window": (-1, 9)}, "window"),
        ({"window": (9, -1)}, "window"),
        ({"causal": True, "window": (9, -1)}, "window"),
        ({"window": (0, 0)}, "window"),
        ({"window": (511, 511)}, "none"),  # reaches every key of 512
        ({"window": (510, 511)}, "window"),
        ({"window": (2**40, -1)}, "none"),
    ],
)
def test_the_mask_is_the_narrowest_kind(options, mask):
    assert explain("H100", **options).mask == mask


@pytest.mark.parametrize(
    ("options", "score"),
    [
        ({}, "identity"),
        ({"scale": 3.0}, "identity"),
        ({"sinks": (8,)}, "identity"),
        ({"softcap": 1.0}, "scored"),
        ({"alibi_slopes": (8,)}, "scored"),
        ({"alibi_slopes": (2, 8)}, "scored"),
        ({"bias": (512, 512)}, "scored"),
        ({"scale": -1.0}, "scored"),
    ],
)
def test_scores_are_plain_unless_an_option_changes_them(options, score):
    assert explain("H100", **options).score == score


def test_how_a_bias_is_reached():
    def clause(keys=512, head_dim=128, gpu="H100", dtype="float16", **options):
        shape = (2, keys, 8, head_dim)
        options = {"bias": (1, 8, keys, keys), **options}
        reason = explain(gpu, shape=shape, dtype=dtype, **options).reason
        return reason.split("; ", 1)[1] if "; " in reason else ""

    assert clause() == "the TMA brings the bias"
    assert clause(dtype="bfloat16", bias=(512, 512)) == "the TMA brings the bias"
    assert clause(bias=None, softcap=2.0) == ""
    assert clause(gpu="A100") == ""
    assert clause(dtype="float32") == ""
    assert clause(head_dim=192) == "threads read the bias"
    unfit = "threads read the bias: its dtype, strides or alignment do not suit the TMA"
    assert clause(keys=500) == unfit  # a stride that is no multiple of 8
    assert clause(bias=(512, 1)) == unfit


def test_the_ladder_names_every_rung_once_and_stars_the_chosen():
    plan = explain("H100", softcap=2.0)
    lines = plan.ladder.strip().splitlines()
    assert [line[2:].split(":")[0] for line in lines] == [
        "sm90",
        "sm80",
        "simt",
        "tiled",
        "cublas",
        "naive",
    ]
    assert [line for line in lines if line.startswith("*")] == [
        f"* sm90: runs: {plan.reason}",
    ]
    elsewhere = explain("A100").ladder.splitlines()
    assert elsewhere[0] == "  sm90: cannot: it is for compute capability 9.0 alone"
    assert elsewhere[1].startswith("* sm80: runs: ")
    assert "  simt: cannot: it takes float32 only" in lines
    assert str(plan) == plan.ladder


def test_the_same_request_gives_the_same_plan():
    assert explain("A100", causal=True) == explain("A100", causal=True)


def test_numpy_arrays_run_on_the_cpu():
    q = np.zeros((1, 8, 2, 16), np.float32)
    plan = cuattn.explain("attention", q, q, q)
    assert plan.kernel == "cpu"
    assert plan.workspace_bytes == 0
    plan = cuattn.explain("attention", q, q, q, backend="naive")
    assert (plan.kernel, plan.workspace_bytes) == ("naive", 4 * 2 * 8 * 8)
    plan = cuattn.explain("attention", q.shape, q.shape, q.shape, device="cpu")
    assert plan.kernel == "cpu"


def test_gpus_are_known_by_name():
    for name in ("a100", "L4", "H100"):
        assert explain(name.upper() if name.upper() in GPUS else "A100") == cuattn.explain(
            "attention", *[(2, 512, 8, 64)] * 3, device=name
        )


DEVICES = "None, 'cpu', a CUDA device number, a GPU's name or a dict"


@pytest.mark.parametrize(
    ("device", "exception", "text"),
    [
        ("gtx", ValueError, "explain: device must be None, 'cpu', a CUDA device number"),
        ({"major": 9}, ValueError, "missing ['minor', 'num_sms', 'smem_per_block_optin']"),
        ({**GPUS["A100"], "memory": 80}, ValueError, "unknown ['memory']"),
        ({**GPUS["A100"], 1: 80, "x": 1}, ValueError, "unknown ['x', 1]"),
        ({**GPUS["A100"], "major": "8"}, TypeError, "an integer as major, got '8'; pass an int"),
        ({**GPUS["A100"], "name": 3}, TypeError, "a string as name, got 3; pass a str"),
        ((9, 0), TypeError, f"explain: device must be {DEVICES}, got (9, 0); known names are a100"),
        (1.5, TypeError, f"explain: device must be {DEVICES}, got 1.5; known"),
        (b"h100", TypeError, f"explain: device must be {DEVICES}, got b'h100'; known"),
        (True, TypeError, f"explain: device must be {DEVICES}, got True; known"),
        (-1, ValueError, f"explain: device must be {DEVICES}, got -1; count GPUs from 0, and pass"),
        (np.int32(-2), ValueError, "got -2; count GPUs from 0, and pass 'cpu' for the CPU"),
        (2**40, ValueError, "got 1099511627776; count GPUs from 0"),
    ],
)
def test_devices_that_explain_cannot_read(device, exception, text):
    with pytest.raises(exception) as caught:
        explain(device) if isinstance(device, dict) else cuattn.explain(
            "attention", *[(2, 512, 8, 64)] * 3, device=device
        )
    assert text in str(caught.value)


def test_arguments_that_explain_cannot_read():
    shape = (1, 2, 3, 8)
    with pytest.raises(
        ValueError, match="explain: op must be one of 'attention', 'attention_varlen'"
    ):
        cuattn.explain("softmax", shape, shape, shape)
    q = np.zeros(shape, np.float32)
    for op in (q, cuattn.attention):
        with pytest.raises(TypeError, match=r"explain: op must be the name .* 'attention', .*got"):
            cuattn.explain(op, q, q, q)
    with pytest.raises(ValueError, match=r"dtype must be float32, .* got bf16; pass one of these"):
        cuattn.explain("attention", shape, shape, shape, dtype="bf16")
    with pytest.raises(TypeError, match="explain: attention takes q, k, v, got 1 arguments"):
        cuattn.explain("attention", shape)
    with pytest.raises(TypeError, match="explain: attention has no option colour"):
        cuattn.explain("attention", shape, shape, shape, colour=1)
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16, got int8"):
        cuattn.explain("attention", shape, shape, shape, dtype="int8")


def test_kernels_lists_every_instance_once():
    rows = cuattn.kernels()
    assert {"op", "kernel", "arch", "dtype", "head_dim", "head_dim_v", "mask", "score"} <= set(
        rows[0]
    )
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    on_cpu = {(row["op"], row["dtype"]) for row in rows if row["arch"] in ("any", "cpu")}
    assert {dtype for op, dtype in on_cpu if op == "attention"} >= {
        "float32",
        "float16",
        "bfloat16",
    }
    assert any(row["op"] == "merge_states" for row in rows)
    if cuattn.info()["cuda"] is not None:
        assert {"sm80", "simt", "tiled"} <= {row["kernel"] for row in rows}


def test_info_describes_the_build():
    info = cuattn.info()
    assert info["version"] == cuattn.__version__
    assert info["cpu"]["threads"] >= 1
    assert info["cpu"]["isa"] in ("baseline", "avx2", "avx512")
    assert info["num_kernels"] == len(cuattn.kernels())


TOO_LARGE = {
    "scores": ("attention", [(1, 2**31 - 1024, 16, 8)] * 3, dict(backend="naive"), MemoryError,
        "attention: the workspace would have to hold 2.95148e+20 bytes, more than there can be; "
        "split the call"),
    "parts": ("attention", [(2**20, 2**20, 2**8, 128)] * 3, dict(num_splits=2**12), MemoryError,
        "attention: the workspace would have to hold 5.94"),
    "gathered": ("attention_varlen",
        [(8, 64, 128), *[(9, 16, 64, 128)] * 2, (2**20 + 1,), None, 1, 2**31 - 1],
        dict(block_tables=(2**20, 2**27 - 64), seqused_k=(2**20,), num_splits=0, backend="sm80"),
        MemoryError, "attention_varlen: the workspace would have to hold 3.68"),
    "rows": ("paged_attention", [(1, 2**28, 16, 8), *[(9, 16, 1, 8)] * 2, (1, 9), (1,)], {},
        ValueError, "paged_attention: q must have q_len * num_heads_q from 0 to 2147483647, got "
        "4294967296; split the call"),
    "units": ("paged_attention", [(2**27, 32, 8), *[(9, 16, 32, 8)] * 2, (2**27, 1), (2**27,)],
        dict(num_splits=2), ValueError,
        "paged_attention: q must make at most 2147483647 splits of its sequences and heads, got "
        "4.29497e+09; split the call"),
    "tiles": ("paged_attention", [(2**20, 8, 8), *[(9, 256, 1, 8)] * 2, (2**20, 2**22), (2**20,)],
        {}, ValueError, "paged_attention: block_tables must name at most 2147483647 tiles of "),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_beyond_every_count_are_refused(name):
    op, shapes, options, exception, message = TOO_LARGE[name]
    with pytest.raises(exception) as caught:
        cuattn.explain(op, *shapes, device="h100", **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("options", [dict(backend="fast"), dict(backend="sm80", dtype="float32")])
def test_a_refusal_names_the_function_that_was_called(options):
    arrays = [(8, 4, 64)] * 3 + [(3,), (3,), 4, 4]
    with pytest.raises((ValueError, NotImplementedError), match=r"^attention_varlen: "):
        cuattn.explain("attention_varlen", *arrays, device="h100", **options)
