# SPDX-License-Identifier: Apache-2.0
"""Figures of peers that a run does not have, so that a row has its bar without them.

All were taken on one H200 with the others idle (driver 580, CUDA 13.0, torch 2.11): medians of
about 100 calls with a cold L2, flash-attn 4.0.0b36 on sm_90, fa3-fwd 0.0.3, torch FlexAttention.
That chip was not this one, and power decides its clock. So a figure is scaled to the run: by what
FlashAttention-3 reaches on the same row where both figures exist (a kernel of the same kind on the
same work), else by the bfloat16 matmul rate.
"""

from __future__ import annotations

DEVICE = "H200"
MATMUL_TFLOPS = 694.0  # bfloat16, 8192^3, under sustained load, in the minute of the figures

# (family, workload): TFLOP/s. FlashAttention-3 is the anchor, not a bar: the run measures it.
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
}


def add_bars(family: str, row: dict, ceilings: dict[str, float], device: str) -> None:
    """Add to a measured row the scaled figures of peers that it lacks, and our ratios to them."""
    figures = FIGURES.get((family, row["workload"]["name"]))
    matmul = ceilings.get("matmul_bfloat16_tflops")
    if figures is None or matmul is None or DEVICE not in device:
        return
    measured = {result["name"]: result["tflops"] for result in row["results"] if "ms" in result}
    anchored = "fa3" in figures and "fa3" in measured
    factor = measured["fa3"] / figures["fa3"] if anchored else matmul / MATMUL_TFLOPS
    bars = {
        peer: {
            "tflops": tflops * factor,
            "figure": tflops,
            "scaled_by": "fa3 of this row" if anchored else "the matmul rate",
        }
        for peer, tflops in figures.items()
        if peer != "fa3" and peer not in measured
    }
    if not bars:
        return
    row["published"] = bars
    for result in row["results"]:
        if result["ours"] and "ms" in result:
            result["ratio_to_published"] = {
                peer: result["tflops"] / bar["tflops"] for peer, bar in bars.items()
            }
