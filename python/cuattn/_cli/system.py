# SPDX-License-Identifier: Apache-2.0
"""``cuattn info``, ``kernels`` and ``explain``: this build, where it runs, what a call takes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from typing import Any

import cuattn

# package -> (distributions it may come from, how its arrays enter and leave)
FRAMEWORKS = {
    "numpy": (("numpy",), "buffer protocol and DLPack; CPU"),
    "torch": (("torch",), "DLPack C exchange API (2.10 and later), else DLPack; CPU and CUDA"),
    "cupy": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "DLPack; CUDA"),
    "jax": (("jax",), "XLA FFI; CPU and CUDA, eager and jit"),
    "ml_dtypes": (("ml_dtypes",), "bfloat16 for numpy arrays"),
}
ENVIRONMENT = (
    "CUATTN_NUM_THREADS",
    "CUATTN_CPU_ISA",
    "CUATTN_CHECK",
    "CUATTN_CUBLAS_PATH",
    "CUATTN_LOG",
    "CUATTN_RANGES",
    "CUATTN_NVRTC_PATH",
    "CUATTN_CACHE_DIR",
    "CUATTN_DISABLE_JIT",
    "CUATTN_PEER_COPIES",
)


def frameworks() -> dict[str, dict[str, Any] | None]:
    """Find version and route of each array library, None where absent. Imports none of them."""
    found: dict[str, dict[str, Any] | None] = {}
    for package, (distributions, route) in FRAMEWORKS.items():
        found[package] = None
        if importlib.util.find_spec(package) is None:
            continue
        version = None
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(distribution)
                break
        found[package] = {"version": version, "route": route}
    return found


def information() -> dict[str, Any]:
    """cuattn.info() with the Python side added."""
    return {
        **cuattn.info(),
        "python": sys.version.split()[0],
        "path": os.path.dirname(cuattn.__file__),
        "frameworks": frameworks(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def show_info(arguments: argparse.Namespace) -> int:
    """Print the information as text or JSON."""
    try:
        data = information()
    except ValueError as error:  # of an environment variable
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(data, indent=2))
        return 0
    print(f"cuattn {data['version']}, sources {data['source_hash']}, {data['num_kernels']} kernels")
    print(f"  at          {data['path']}, Python {data['python']}, compiler {data['compiler']}")
    cpu = data["cpu"]
    print(f"  CPU         {', '.join(f'{key} {value}' for key, value in cpu.items())}")
    print("  CUDA        " + cuda_line(data))
    for gpu in (data["cuda"] or {}).get("devices", []):
        print(
            f"  GPU {gpu['id']}       {gpu['name']}, "
            f"compute capability {gpu['compute_capability']},"
            f" {gpu['sms']} multiprocessors: {gpu['code']}"
        )
    for package, found in data["frameworks"].items():
        print(
            f"  {package:11s} "
            + (f"{found['version']}: {found['route']}" if found else "not installed")
        )
    for name, value in data["environment"].items():
        print(f"  {name}={value}")
    return 0


def show_kernels(arguments: argparse.Namespace) -> int:
    """Print the compiled kernels, one to a line."""
    rows = cuattn.kernels()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    return 0


def cuda_line(data: dict[str, Any]) -> str:
    """One line on the CUDA side of the build and the driver."""
    cuda = data["cuda"]
    if cuda is None:
        return "not in this build (build with CUATTN_CUDA=ON)"
    line = f"code for {data['cuda_archs']}; runtime {cuda['runtime']}, driver {cuda['driver']}"
    cublas = "found" if cuda["cublas"] else "not found"
    status = "" if cuda["devices"] else f"; no GPU ({cuda['status']})"
    return f"{line}, cuBLAS {cublas}{status}"


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between them, got {text!r}; pass 2,4096,32,128, say"
        ) from None


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``explain``."""
    # As argparse has it from Python 3.14 on: -1,0 is a value and no option.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument(
        "--q", type=numbers, required=True, metavar="B,S,H,D", help="shape of q, e.g. 2,4096,32,128"
    )
    parser.add_argument("--k", type=numbers, metavar="B,S,H,D", help="shape of k (default: q's)")
    parser.add_argument("--v", type=numbers, metavar="B,S,H,D", help="shape of v (default: k's)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window",
        type=numbers,
        default=(-1, -1),
        metavar="LEFT,RIGHT",
        help="-1 is unlimited",
    )
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--alibi", action="store_true", help="with ALiBi slopes")
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--device",
        default="current",
        help="current, cpu, a GPU by number (0), or by name (H200, H100, A100, L4, ...)",
    )
    parser.add_argument("--json", action="store_true")


def show_explain(arguments: argparse.Namespace) -> int:
    """Print which kernel a call of ``attention`` would run, and why."""
    shape_k = arguments.k or arguments.q
    heads = arguments.q[2 if arguments.layout == "bshd" else 1] if len(arguments.q) == 4 else 0
    device = None if arguments.device == "current" else arguments.device
    if device is not None and device.isdecimal():
        device = int(device)
    try:
        plan = cuattn.explain(
            "attention",
            arguments.q,
            shape_k,
            arguments.v or shape_k,
            dtype=arguments.dtype,
            device=device,
            layout=arguments.layout,
            causal=arguments.causal,
            window=arguments.window,
            softcap=arguments.softcap,
            alibi_slopes=(heads,) if arguments.alibi else None,
            backend=arguments.backend,
        )
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    fields = dataclasses.asdict(plan)
    if arguments.json:
        print(json.dumps(fields, indent=2))
        return 0
    ladder = fields.pop("ladder")
    for name, value in fields.items():
        print(f"{name:16s} {value}")
    print("ladder:")
    for line in ladder.strip().splitlines():
        print(f"  {line}")
    return 0
