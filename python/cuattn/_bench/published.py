# SPDX-License-Identifier: Apache-2.0
"""Figures of peers that a run does not have, so that a row has its bar without them.

All were taken on one H200 with the others idle (driver 580, CUDA 13.0, torch 2.11): medians of
about 100 calls with a cold L2, flash-attn 4.0.0b36 on sm_90, fa3-fwd 0.0.3, torch FlexAttention.
That chip was not this one, and power decides its clock. So a figure is scaled to the run: by what
FlashAttention-3, of gradients cuDNN, reaches on the same row where both figures exist (a kernel of
the same kind on the same work), else by the bfloat16 matmul rate. Figures of decode are KV bytes /
time and are scaled by the copy rate.
"""

from __future__ import annotations

from typing import Any

DEVICE = "H200"
COPY_TBPS = 4.28  # bytes read and written
MATMUL_TFLOPS = 694.0  # bfloat16, 8192^3, under sustained load, in the minute of the figures

ANCHORS = ("fa3", "cudnn")  # no bars: the run measures them, cuDNN in the backward pass
# (family, workload): TFLOP/s
FIGURES: dict[tuple[str, str], dict[str, float]] = {
    ("forward", "d64 s2048 full"): {"fa3": 463.5, "fa4": 497.4},
    ("forward", "d64 s2048 causal"): {"fa3": 392.5, "fa4": 387.7},
    ("forward", "d64 s16384 full"): {"fa3": 512.3, "fa4": 538.3},
    ("forward", "d64 s16384 causal"): {"fa3": 497.0, "fa4": 523.9},
    ("forward", "d128 s2048 full"): {"fa3": 622.5, "fa4": 628.4},
    ("forward", "d128 s2048 causal"): {"fa3": 533.3, "fa4": 524.8},
    ("forward", "d128 s16384 full"): {"fa3": 670.0, "fa4": 672.2},
    ("forward", "d128 s16384 causal"): {"fa3": 648.5, "fa4": 644.3},
    ("forward", "d256 s2048 full"): {"fa3": 674.4, "fa4": 685.1},
    ("forward", "d256 s2048 causal"): {"fa3": 563.6, "fa4": 574.5},
    ("forward", "d256 s16384 full"): {"fa3": 730.6, "fa4": 732.7},
    ("forward", "d256 s16384 causal"): {"fa3": 698.7, "fa4": 705.8},
    ("masks", "causal"): {"flex": 393.1},
    ("masks", "window 256"): {"flex": 241.4},
    ("masks", "causal window 256"): {"fa4": 174.5},
    ("masks", "causal window 1024"): {"flex": 330.4, "fa4": 512.8},
    ("masks", "causal softcap 30"): {"flex": 187.5, "fa4": 300.1},
    ("masks", "causal alibi"): {"flex": 362.0},
    ("backward", "d64 s2048 full"): {"cudnn": 400.6, "fa4": 479.0},
    ("backward", "d64 s2048 causal"): {"cudnn": 328.4, "fa4": 408.7},
    ("backward", "d64 s16384 full"): {"cudnn": 447.9, "fa4": 530.3},
    ("backward", "d64 s16384 causal"): {"cudnn": 427.7, "fa4": 526.9},
    ("backward", "d128 s2048 full"): {"cudnn": 477.5, "fa4": 546.9},
    ("backward", "d128 s2048 causal"): {"cudnn": 390.3, "fa4": 461.2},
    ("backward", "d128 s16384 full"): {"cudnn": 539.6, "fa4": 619.7},
    ("backward", "d128 s16384 causal"): {"cudnn": 526.7, "fa4": 611.5},
    ("backward", "d256 s2048 full"): {"cudnn": 347.6, "fa4": 346.2},
    ("backward", "d256 s2048 causal"): {"cudnn": 311.4, "fa4": 302.3},
    ("backward", "d256 s16384 full"): {"cudnn": 361.0, "fa4": 381.8},
    ("backward", "d256 s16384 causal"): {"cudnn": 378.3, "fa4": 371.4},
}

VLLM = ("vllm_v1", "vllm_v2")  # PagedAttention V1 and V2 of vLLM 0.6.6, blocks of 16
SHAPES = (
    "1 x 8192",
    "16 x 8192",
    "32 x 128",
    "32 x 512",
    "32 x 2048",
    "64 x 8192",
    "128 x 1024",
)
# Of each dtype and number of heads, for these shapes: TB/s of V1, then of V2.
VLLM_TBPS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "fp16 32/32": (
        (0.505, 4.153, 2.189, 3.343, 4.021, 4.125, 4.220),
        (2.536, 4.169, 1.922, 3.110, 3.914, 4.360, 4.173),
    ),
    "fp16 32/8": (
        (0.128, 1.752, 0.839, 1.287, 1.707, 1.912, 1.932),
        (0.917, 1.759, 0.673, 1.109, 1.585, 1.884, 1.738),
    ),
    "bf16 32/32": (
        (0.254, 3.067, 1.749, 2.592, 2.997, 3.110, 3.344),
        (2.155, 3.540, 1.640, 2.560, 3.267, 3.771, 3.538),
    ),
    "bf16 32/8": (
        (0.065, 0.946, 0.560, 0.774, 0.896, 1.018, 1.103),
        (0.670, 1.175, 0.517, 0.771, 1.064, 1.270, 1.169),
    ),
}
# (family, workload): TB/s
DECODE_FIGURES: dict[tuple[str, str], dict[str, float]] = {
    ("paged_vllm", f"{kind} {shape}"): dict(zip(VLLM, pair, strict=True))
    for kind, columns in VLLM_TBPS.items()
    for shape, pair in zip(SHAPES, zip(*columns, strict=True), strict=True)
}


def add_bars(family: str, row: dict[str, Any], ceilings: dict[str, float], device: str) -> None:
    """Add to a measured row the scaled figures of peers that it lacks, and our ratios to them."""
    place = (family, row["workload"]["name"])
    if DEVICE not in device:
        return
    measured = {result["name"]: result for result in row["results"] if "ms" in result}
    if place in DECODE_FIGURES:
        bars, quantity = copy_bars(DECODE_FIGURES[place], ceilings), "gbps"
    else:
        bars, quantity = matmul_bars(FIGURES.get(place, {}), measured, ceilings), "tflops"
    bars = {peer: bar for peer, bar in bars.items() if peer not in measured}
    if not bars:
        return
    row["published"] = bars
    for result in measured.values():
        if result["ours"]:
            result["ratio_to_published"] = {
                peer: result[quantity] / bar[quantity] for peer, bar in bars.items()
            }


def matmul_bars(
    figures: dict[str, float], measured: dict[str, dict[str, Any]], ceilings: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """TFLOP/s, scaled by the anchor's of the row or else by the matmul rate."""
    matmul = ceilings.get("matmul_bfloat16_tflops")
    anchor = next((name for name in ANCHORS if name in figures and name in measured), None)
    if anchor is not None:
        factor, by = measured[anchor]["tflops"] / figures[anchor], f"{anchor} of this row"
    elif matmul is not None:
        factor, by = matmul / MATMUL_TFLOPS, "the matmul rate"
    else:
        return {}
    return {
        peer: {"tflops": figure * factor, "figure": figure, "scaled_by": by}
        for peer, figure in figures.items()
        if peer not in ANCHORS
    }


def copy_bars(figures: dict[str, float], ceilings: dict[str, float]) -> dict[str, dict[str, Any]]:
    """TB/s, scaled by the copy rate."""
    factor = ceilings["copy_gbps"] / COPY_TBPS
    return {
        peer: {"gbps": figure * factor, "figure": figure, "scaled_by": "the copy rate"}
        for peer, figure in figures.items()
    }
