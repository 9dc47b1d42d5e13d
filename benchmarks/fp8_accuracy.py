# SPDX-License-Identifier: Apache-2.0
"""What quantisation to float8 costs in accuracy, on the CPU: each mode of cuattn.quantize on four
distributions, against float64 of the numbers before they were quantised.

    python benchmarks/fp8_accuracy.py            # benchmarks/results/fp8_accuracy.json, docs/fp8.md
    python benchmarks/fp8_accuracy.py --check    # whether both are what this program writes now

4 heads of 128, 4096 keys, every 16th query; seed 0. out is float32, so that it is not rounded;
that of the bfloat16 row is bfloat16. The kernel keeps P in float32: one that rounds P to float8, as
those of Hopper do, has the errors of the column "model" (a numpy model of such a kernel, given
here).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cuattn

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/fp8_accuracy.json"
PAGE = ROOT / "docs/fp8.md"
MARKS = ("<!-- accuracy:begin -->\n", "<!-- accuracy:end -->\n")
HEADS, LENGTH, DIM, STEP = 4, 4096, 128, 16
DISTRIBUTIONS = ("plain", "outliers", "channels", "sink")
MODES: dict[str, dict[str, Any]] = {
    "tensor": {"mode": "tensor", "hadamard": False, "smooth_k": False},
    "head": {"hadamard": False, "smooth_k": False},
    "block": {"mode": "block", "hadamard": False, "smooth_k": False},
    "head, Hadamard": {"smooth_k": False},
    "head, smoothing": {"hadamard": False},
    "head, both (default)": {},
    "block, both": {"mode": "block"},
    "block, both, v by channel": {"mode": "block", "v_mode": "channel"},
    "int8, both, v by channel": {"mode": "int8", "v_mode": "channel"},
}
# Relative errors of a kernel that rounds P to e4m3, by a numpy model, by DISTRIBUTIONS.
MODEL = {
    "tensor": (0.053, 0.087, 0.114, 0.021),
    "head": (0.053, 0.087, 0.108, 0.023),
    "block": (0.053, 0.071, 0.108, 0.023),
    "head, Hadamard": (0.053, 0.041, 0.120, 0.022),
    "head, smoothing": (0.053, 0.086, 0.054, 0.022),
    "block, both": (0.053, 0.039, 0.052, 0.022),
    "block, both, v by channel": (0.052, 0.039, 0.053, 0.020),
}


def draw(name: str, rng: np.random.Generator, heads: int = HEADS, length: int = LENGTH) -> Any:
    """Draw q, k and v, [1, length, heads, 128] in float32.

    plain: N(0, 1). outliers: one in a thousand has N(0, 100) added. channels: 6 channels of the
    keys have biases of 15 N(0, 1), those of the values uneven sizes. sink: 4 keys have half of the
    weight.
    """
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    q, k, v = (normal(1, length, heads, DIM) for _ in range(3))
    if name == "outliers":
        q, k, v = (
            x + 10 * normal(*x.shape) * (rng.random(x.shape) < 0.001).astype(np.float32)
            for x in (q, k, v)
        )
    if name == "channels":
        bias = np.zeros((1, 1, heads, DIM), np.float32)
        bias[..., rng.choice(DIM, 6, replace=False)] = 15 * normal(1, 1, heads, 6)
        k = k + bias
        v = v * np.exp(0.8 * normal(1, 1, heads, DIM))
    if name == "sink":
        along = normal(1, 1, heads, DIM)
        along /= np.linalg.norm(along, axis=-1, keepdims=True)
        size = np.float32(math.log(length / 4) * math.sqrt(DIM) / 10 + 2)
        k[:, :4] = 0.3 * k[:, :4] + size * along
        v += 0.5
        v[:, :4] *= 0.1
        q = q + 10 * along
    return q, k, v


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in float64."""
    found = np.empty((*q.shape[:-1], v.shape[-1]))
    for h in range(q.shape[2]):
        s = q[0, :, h].astype(np.float64) @ k[0, :, h].astype(np.float64).T / math.sqrt(DIM)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        found[0, :, h] = p / p.sum(axis=1, keepdims=True) @ v[0, :, h].astype(np.float64)
    return found


def errors(out: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """Root mean square of the error, and its size relative to the result's."""
    error = out.astype(np.float64) - wanted
    relative = np.linalg.norm(error) / np.linalg.norm(wanted)
    return {"rmse": float(np.sqrt((error**2).mean())), "relative": float(relative)}


def quantised(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Attention in float32 out of what quantize gives."""
    out = np.empty((*q.shape[:-1], v.shape[-1]), np.float32)
    return np.asarray(cuattn.quantize(q, k, v, **options).attention(out=out))


def measure() -> dict[str, Any]:
    """Errors of each choice on each distribution."""
    rng = np.random.default_rng(0)
    rows: dict[str, dict[str, Any]] = {}
    for name in DISTRIBUTIONS:
        q, k, v = draw(name, rng)
        wanted = exact(q[:, ::STEP], k, v)
        bf16 = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
        found = {"bfloat16": cuattn.attention(*bf16)}
        found |= {mode: quantised(q, k, v, options) for mode, options in MODES.items()}
        for mode, out in found.items():
            rows.setdefault(mode, {})[name] = errors(out[:, ::STEP], wanted)
    return rows


def cell(found: dict[str, float]) -> str:
    return f"{found['rmse']:.1e} {found['relative']:.3f}"


def table(result: dict[str, Any]) -> str:
    """Write the rows as a table of the page."""
    lines = [f"| choice | {' | '.join(DISTRIBUTIONS)} | model |", "| --- " * 6 + "|"]
    for mode, row in result["rows"].items():
        model = " ".join(f"{x:.3f}" for x in MODEL.get(mode, ()))
        lines.append(f"| {mode} | {' | '.join(cell(row[n]) for n in DISTRIBUTIONS)} | {model} |")
    cpu = result["machine"]["cpu"]
    machine = f"{cpu['isa']}, {cpu['threads']} threads"
    lines += ["", f"CPU figures: {machine}, commit {result['commit']}, `{result['command']}`."]
    return "\n".join(lines) + "\n"


def page(result: dict[str, Any]) -> str:
    """Return docs/fp8.md with the table in its place."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    return before + MARKS[0] + table(result) + MARKS[1] + rest.partition(MARKS[1])[2]


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    rows = measure()
    if parser.parse_args().check:
        known = json.loads(RESULT.read_text(encoding="utf-8"))
        pairs = ((rows[m][n]["rmse"], known["rows"][m][n]["rmse"]) for m in rows for n in rows[m])
        return int(any(abs(a - b) > 0.02 * b for a, b in pairs) or page(known) != PAGE.read_text())
    result = {
        "family": "fp8_accuracy",
        "command": "python benchmarks/fp8_accuracy.py",
        "commit": commit(),
        "machine": {"cpu": cuattn.info()["cpu"], "python": platform.python_version()},
        "shape": {"heads": HEADS, "length": LENGTH, "head_dim": DIM, "step": STEP, "seed": 0},
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(result), encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
