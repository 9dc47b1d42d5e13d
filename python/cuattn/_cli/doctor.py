# SPDX-License-Identifier: Apache-2.0
"""``cuattn doctor``: what is wrong with this installation, and what to type."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuattn

from .system import ENVIRONMENT, frameworks

# Those of the build and of the tests, which the library does not read: docs/design.md.
OTHER_VARIABLES = (
    "CUATTN_CUDA",
    "CUATTN_CUDA_ARCHS",
    "CUATTN_ABI3",
    "CUATTN_SOURCE_HASH",
    "CUATTN_TEST_GPUS",
    "CUATTN_TEST_SEED",
    "CUATTN_FLEX_CASES",
    "CUATTN_BUILD_LOG",
    "CUATTN_REQUIRE_CUDA",
    "CUATTN_REQUIRE_FRAMEWORKS",
    "CUATTN_GPU_OUT",
    "CUATTN_GPU_SECONDS",
    "CUATTN_GPU_WIDTH",
)
OLDEST = {"torch": (2, 9), "jax": (0, 6, 1), "numpy": (1, 26)}  # what the tests run with
MOST_THREADS = 1024
TOLERANCE = 1e-5


class Finding(NamedTuple):
    """One line: "good", "note" (it works, but) or "wrong", and what to type."""

    verdict: str
    subject: str
    text: str
    way_out: str = ""


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the variables CUATTN_*."""
    for name in sorted(name for name in variables if name.startswith("CUATTN_")):
        value = variables[name]
        if name not in (*ENVIRONMENT, *OTHER_VARIABLES):
            close = difflib.get_close_matches(name, ENVIRONMENT, n=1)
            meant = f"; is {close[0]} meant?" if close else ""
            yield Finding("wrong", name, f"is no variable of cuattn{meant}", f"unset {name}")
        elif why := odd_value(name, value):
            yield Finding("wrong", name, f"is {value!r}, {why}", f"unset {name}")
        elif name == "CUATTN_CHECK" and value not in ("", "0"):
            text = "is on: calls on CUDA wait for the device, to check lengths and tables"
            yield Finding("note", name, text, f"unset {name}")
        elif name in ENVIRONMENT:
            yield Finding("good", name, f"is {value!r}")


def odd_value(name: str, value: str) -> str:
    """Say what is wrong with the value of a known variable; "" if nothing is."""
    if name == "CUATTN_NUM_THREADS":
        is_count = re.fullmatch(r"\d{1,4}", value) and 1 <= int(value) <= MOST_THREADS
        return "" if is_count else f"which must be from 1 to {MOST_THREADS}: calls on the CPU raise"
    if name == "CUATTN_CPU_ISA" and value not in ("", "baseline", "avx2", "avx512"):
        return "which must be baseline, avx2 or avx512: calls on the CPU raise"
    if name == "CUATTN_CUBLAS_PATH" and value and not Path(value).is_file():
        return "which is no file: backend='cublas' does not find cuBLAS there"
    if name == "CUATTN_NVRTC_PATH" and value and not Path(value).exists():
        return "which is not there: flex_attention does not find NVRTC there"
    if name in ("CUATTN_CHECK", "CUATTN_LOG", "CUATTN_RANGES") and value not in ("", "0", "1"):
        return "which counts as on; 1 is on, 0 is off"
    return ""


def installation(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the package with what was installed, and try a call on the CPU."""
    where = os.path.dirname(cuattn.__file__)
    try:
        installed = importlib.metadata.version("cuattn")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != cuattn.__version__:
        text = f"{cuattn.__version__} at {where}, but pip has installed {installed}"
        yield Finding(
            "wrong", "cuattn", text, "pip install --force-reinstall --no-deps .  (in its sources)"
        )
    else:
        yield Finding("good", "cuattn", f"{installed} at {where}, Python {sys.version.split()[0]}")
    x = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), np.float32)
    error = float(np.abs(cuattn.attention(*x) - plain_attention(*x)).max())
    cpu = info["cpu"]
    text = f"{cpu['isa']}, {cpu['threads']} threads; a call differs from numpy by {error:.0e}"
    if error < TOLERANCE:
        yield Finding("good", "CPU", text)
    else:
        yield Finding("wrong", "CPU", text, "CUATTN_CPU_ISA=baseline, and please report it")


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention by its formula, [batch, seqlen, num_heads, head_dim]."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


def has_driver() -> bool:
    """Whether an NVIDIA driver runs here."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))


def cuda(info: Mapping[str, Any], driver_runs: bool, visible: str | None) -> Iterator[Finding]:
    """Judge the CUDA side: the build, the driver, each device."""
    found = info["cuda"]
    if found is None:
        if driver_runs:
            text = "a driver is here, but this build has no CUDA kernels"
            yield Finding(
                "wrong",
                "CUDA",
                text,
                "CUATTN_CUDA=ON pip install --force-reinstall --no-deps .  (in its sources)",
            )
        else:
            yield Finding("good", "CUDA", "not in this build, and no NVIDIA driver is here")
        return
    built = f"code for {info['cuda_archs']}, runtime {found['runtime']}, driver {found['driver']}"
    if not found["devices"]:
        yield without_devices(f"{built}; no GPU ({found['status']})", driver_runs, visible)
        return
    yield Finding("good", "CUDA", built)
    for gpu in found["devices"]:
        name = f"GPU {gpu['id']}"
        arch = gpu["compute_capability"].replace(".", "")
        text = f"{gpu['name']}, compute capability {gpu['compute_capability']}"
        rebuild = (
            f"CUATTN_CUDA=ON CUATTN_CUDA_ARCHS={arch} pip install --force-reinstall --no-deps .  "
            "(in its sources)"
        )
        if gpu["code"] == "native":
            yield Finding("good", name, f"{text}: machine code is in this build")
        elif gpu["code"] == "ptx":
            text += ": runs from PTX, which the driver compiles at the first call"
            yield Finding("note", name, text, rebuild)
        elif int(arch) < 80:
            text += ": older than 8.0, for which there are no kernels"
            yield Finding("wrong", name, text, "move arrays to the CPU")
        else:
            yield Finding("wrong", name, f"{text}: this build has no code for it", rebuild)


def without_devices(built: str, driver_runs: bool, visible: str | None) -> Finding:
    """Say why a build with CUDA sees no GPU."""
    if visible is not None and driver_runs:
        text = f"{built}; CUDA_VISIBLE_DEVICES is {visible!r}"
        return Finding("wrong", "CUDA", text, "unset CUDA_VISIBLE_DEVICES")
    if driver_runs:
        return Finding("wrong", "CUDA", built, "nvidia-smi, which says what the driver lacks")
    return Finding("note", "CUDA", f"{built}: calls on the CPU work; a GPU needs NVIDIA's driver")


def libraries(found: Mapping[str, dict[str, Any] | None]) -> Iterator[Finding]:
    """Judge the array libraries by their versions; none is imported."""
    for package, known in found.items():
        if known is None:
            yield Finding("good", package, "not installed, and not needed")
            continue
        version, text = known["version"] or "", f"{known['version']}: {known['route']}"
        numbers = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
        oldest = OLDEST.get(package)
        if oldest is not None and numbers and numbers < oldest:
            wanted = ".".join(map(str, oldest))
            text = f"{version} is older than {wanted}, the oldest that is tested"
            yield Finding("wrong", package, text, f"pip install '{package}>={wanted}'")
        elif package == "torch" and numbers and numbers < (2, 10):
            text += "; 2.10 has the faster way in"
            yield Finding("note", package, text, "pip install 'torch>=2.10'")
        else:
            yield Finding("good", package, text)


def examine() -> Iterator[Finding]:
    """List all findings."""
    yield from environment(os.environ)
    try:
        info = cuattn.info()
        yield from installation(info)
    except ValueError as error:  # of an environment variable
        yield Finding("wrong", "library", str(error))
        return
    yield from cuda(info, has_driver(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield from libraries(frameworks())


def main(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if something is wrong."""
    findings = list(examine())
    wrong = sum(finding.verdict == "wrong" for finding in findings)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return 1 if wrong else 0
    for finding in findings:
        print(f"{finding.verdict:5s}  {finding.subject:11s} {finding.text}")
        if finding.way_out:
            print(f"       type: {finding.way_out}")
    print("nothing is wrong" if not wrong else f"{wrong} wrong")
    return 1 if wrong else 0
