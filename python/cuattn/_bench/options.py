# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark, apart from it so that ``--help`` imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import pathlib

# `invariant` is auto with batch_invariant=True. Over pages: `replan` makes the plan in every call,
# `wide` keeps float8 numbers in q's dtype, `v1` and `v2` are PagedAttention, `dense` has its keys
# packed beforehand, `cascade` is cascade_attention. Of gradients: `deterministic` is auto with
# deterministic=True. Around attention: `unfused` is the same work in separate calls of ours,
# `plain` what is left without the rotation. Of latents: the two forms.
# Of float8: `fast` is auto with accumulate="fast", `bf16` the same numbers in 16 bits, `quantised`
# those with `quantize` in the call; `blocks` and `int8` are codes of these modes of it, and
# `quantised_blocks` has the first in the call.
# Over ranks: `gather`, `heads` and `ring` are schemes,
# `unchecked` is auto with check=False, `one` is one rank alone.
BACKENDS = (
    "auto",
    "invariant",
    "naive",
    "cublas",
    "tiled",
    "simt",
    "sm80",
    "sm90",
    "cpu",
    "replan",
    "wide",
    "codes",
    "rows",
    "v1",
    "v2",
    "dense",
    "cascade",
    "deterministic",
    "one",
    "unchecked",
    "gather",
    "heads",
    "ring",
    "unfused",
    "plain",
    "explicit",
    "absorbed",
    "fast",
    "bf16",
    "quantised",
    "blocks",
    "int8",
    "quantised_blocks",
)
PEERS = (
    "torch",
    "math",
    "efficient",
    "flash",
    "cudnn",
    "varlen",
    "flex",
    "fa2",
    "fa3",
    "fa3_bf16",
    "fa3_columns",
    "fa4",
    "flashinfer",
    "eager",
    "compiled",
    "memcpy",
    "context_parallel",
    "context_cudnn",
    "context_ring",
    "yunchang",
    "numpy",
)


def positive_number(text: str) -> float:
    """Read a number above zero, below infinity."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")


def positive_count(text: str) -> int:
    """Read a whole number above zero."""
    with contextlib.suppress(ValueError):
        if (count := int(text)) > 0:
            return count
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", nargs="?", default=argparse.SUPPRESS, help="the same as --family")
    parser.add_argument("--family", help="comma list (default: smoke); --list shows all")
    parser.add_argument(
        "--list", action="store_true", help="list families and their workloads, and stop"
    )
    parser.add_argument("--workload", default="", help="only workloads whose name contains this")
    parser.add_argument(
        "--backend", help=f"comma list of ours, of {', '.join(BACKENDS)} (default: the family's)"
    )
    parser.add_argument(
        "--peer", help=f"comma list of {', '.join(PEERS)}, all or none (default: the family's)"
    )
    parser.add_argument(
        "--jit", choices=("marked", "all", "none"), default="marked", help="peers that compile"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--rounds", type=positive_count, default=7, help="rounds of shuffled order (default 7)"
    )
    parser.add_argument(
        "--budget",
        type=positive_number,
        metavar="S",
        help="seconds for a family (default 150; backward 100)",
    )
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=10.0,
        metavar="S",
        help="longest single call (default 10)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds, 20 seconds a family: a look, not a result"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that <family>.json has already, each with its commit; measure the rest",
    )
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, help="folder for <family>.json (default: none written)"
    )
