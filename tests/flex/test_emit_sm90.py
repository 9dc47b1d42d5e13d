# SPDX-License-Identifier: Apache-2.0
"""What sources of `sm90` make of masks: their text, and on the emulator what each score's thread
sees, with lanes that compute for each other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flex_cases
from cuattn.flex import emit_sm90
from cuattn.flex.emit import Function, Kernel, source
from cuattn.flex.trace import dtype_name, trace

ROOT = Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX") or shutil.which("g++")
SM90 = Kernel("sm90", "bfloat16", 128, 128)
Q_LEN, KV_LEN, BATCH, HEAD = 75, 395, 1, 2


def of_mask(mask):
    traced = trace(mask)
    return Function(traced.expr, traced.scalars, 0, traced.arrays)


def parts(mask):
    """The members of a functor that compute of a key, of a row, and what they see."""
    text = source(SM90, {"mask": of_mask(mask)}, False, True)
    found = re.findall(r" (of_key|of_row|sees)\(.*?\{\n(.*?)  \}\n", text, re.DOTALL)
    return {name: body for name, body in found[:3]}


def test_what_hangs_on_one_index_is_read_once():
    ids, valid, blocks = np.arange(9), np.ones(9, bool), np.ones((3, 5), bool)
    text = parts(lambda b, h, q, k: (ids[q] == ids[k]) & valid[k] & (k <= q))
    assert [text[n].count("device::load") for n in ("of_key", "of_row", "sees")] == [2, 1, 0]
    text = parts(lambda b, h, q, k: blocks[q // 128, k // 128])
    assert "load" not in text["of_key"] + text["of_row"]
    assert "key_quotient<128>(at)" in text["sees"]


def test_few_values_are_kept_for_masks_of_many_arrays():
    """Registers hold two of a key beside S, O and P."""
    x, y, z = (np.arange(9) + i for i in range(3))
    text = parts(lambda b, h, q, k: (x[q] == x[k]) & (y[q] != y[k]) & (z[q] < z[k]))
    assert [text[n].count("device::load") for n in ("of_key", "of_row", "sees")] == [1, 1, 4]


def test_scores_that_load_are_asked_early():
    """Where a tile has many elements; in two rounds, where nothing else holds registers."""
    ids, drawn = np.arange(9), np.ones((9, 9), bool)
    given = {
        "false": (lambda b, h, q, k: ids[q] == ids[k], lambda b, h, q, k: drawn[q // 64, k // 64]),
        "true; 8": (lambda b, h, q, k: drawn[q, k] & (ids[q] < 7),),
        "true; 4": (lambda b, h, q, k: drawn[k, q] & (q > 7), lambda b, h, q, k: drawn[q, k // 32]),
    }
    for what, some in given.items():
        loads, _, count = what.partition("; ")
        for mask in some:
            text = source(SM90, {"mask": of_mask(mask)}, False, True)
            assert f"kLoads = {loads};" in text
            assert f"kAtOnce = {count}" in text


def test_what_is_compared_elsewhere_is_exact():
    """k / 49 == 1.0 holds at 49, by no reciprocal; the comparison stands in another function."""
    x = np.arange(9, dtype=np.float32)
    text = parts(lambda b, h, q, k: k / 49 == x[q])
    assert " / " in text["of_key"]
    assert "1.0f /" not in text["of_key"]
    assert "score_quotient" not in text["of_key"]


def test_what_may_be_negative_is_rounded_down():
    text = parts(lambda b, h, q, k: (q - k) // 3 != (k - q) % 5)
    assert "uint32_t" not in text["sees"]
    assert text["sees"].count("device::floor_") == 2


def masks():
    rng = np.random.default_rng(4)
    ids, ids2 = (rng.integers(0, 4, 400).astype(np.int32) for _ in range(2))
    valid, reals = rng.random(400) < 0.7, rng.standard_normal(400).astype(np.float32)
    blocks, drawn = rng.random((60, 60)) < 0.5, rng.random((75, 395)) < 0.5
    of_head = rng.integers(0, 4, (16, 400)).astype(np.int32)
    n, strided = 50, rng.integers(0, 4, 800).astype(np.int32)[::2]
    return {
        "ids": lambda b, h, q, k: ids[q] == ids[k],
        "strided": lambda b, h, q, k: strided[q] == strided[k],
        "two": lambda b, h, q, k: (ids[q] == ids[k]) & valid[k],
        "many": lambda b, h, q, k: (
            (ids[q] == ids[k]) & (ids2[q] <= ids2[k]) | valid[k] & (reals[q] < reals[k])
        ),
        "of a head": lambda b, h, q, k: of_head[h, q] == of_head[h, k],
        "key of a head": lambda b, h, q, k: (of_head[h, k] < 2) | (k % 3 == q % 2),
        "128": lambda b, h, q, k: blocks[q // 128, k // 128],
        "64": lambda b, h, q, k: blocks[q // 64, k // 64],
        "8": lambda b, h, q, k: blocks[q // 8, k // 8],
        "24": lambda b, h, q, k: blocks[q // 24, k // 24],
        "256": lambda b, h, q, k: (k // 256 + q // 2) % 2 == 0,
        "7": lambda b, h, q, k: blocks[q // 7, k // 7],
        "n": lambda b, h, q, k: blocks[q // n, k // n],
        "remainders": lambda b, h, q, k: k % 7 != q % 5,
        "negative": lambda b, h, q, k: (q - k) // 64 % 2 == (k - q) % 3,
        "quotient": lambda b, h, q, k: (k / 49 == 1.0) | (k // 49 == ids[q]),
        "drawn": lambda b, h, q, k: drawn[np.minimum(q, 74), np.minimum(k, 394)],
        "chained": lambda b, h, q, k: ids[ids[k] + q] == ids2[k // 2],
        "mixed": lambda b, h, q, k: ids[k // 24 + k // 256 + k % 3] == ids[q],
        "lengths": lambda b, h, q, k, q_len, kv_len: ids[kv_len - 1 - k] == ids[q_len - 1 - q],
        "none": lambda b, h, q, k: (k <= q + 9) & ((q - k < 60) | (k < 5)),
    }


PROGRAM = """\
#include <cstdio>
#include "cuattn/device/functor.cuh"
#include "cuda/attention/sm90/seen.cuh"
namespace cuattn {
%(functors)s
template <class Given, bool kIsFirst>
__global__ void ask_tile(const FunctorParams p, int32_t row, int32_t tile, char* seen) {
  constexpr int kKeys = Given::kKeys, kPacked = Given::kPacked;
  const int32_t lane = threadIdx.x %% 32, at_row = row + lane / 4;
  const int32_t k = tile * kKeys + lane %% 4 * 2;
  const int32_t q = at_row / kPacked, head = %(head)d / kPacked * kPacked + at_row %% kPacked;
  float scores[kKeys / 2] = {};
  KeyRange visible[2];
  for (int half = 0; half < 2; ++half) {
    const int eight = row / 8 + half;
    visible[half] = {eight * 37 %% 150, %(kv_len)d - eight * 29 %% 140};
  }
  const device::ScorePlace first{%(batch)d, kPacked == 1 ? %(head)d : head, q, k,
                                 %(q_len)d, %(kv_len)d, static_cast<float>(q - k)};
  Answers<Given> answers;
  answers.template find<kIsFirst>(first, p);
  answers.hide(scores, first, p);
  hide_unseen(scores, bits_within<kKeys>(visible, k));
  for (int i = 0; i < kKeys / 2; ++i) {
    const int at = (at_row + i / 2 %% 2 * 8) * 512 + k + i / 4 * 8 + i %% 2;
    seen[at] = scores[i] == 0.0f ? '1' : '0';
  }
}
}  // namespace cuattn
using namespace cuattn;
static char seen[80 * 512 + 1];
template <class Given>
void run(const FunctorParams& p) {
  for (int row = 0; row < 80; row += 16) {
    for (int tile = 0; tile < 512 / Given::kKeys; ++tile)
      tile %% 2 ? ask_tile<Given, true><<<1, 32>>>(p, row, tile, seen)
               : ask_tile<Given, false><<<1, 32>>>(p, row, tile, seen);
  }
  std::puts(seen);
}
int main() {
%(runs)s}
"""
TYPES = {"bool": ("uint8_t", "boolean"), "int32": ("int32_t", "i32"), "float32": ("float", "f32")}


def array_of(i, j, x):
    """Statements that give functor i its array j."""
    kind, dtype = TYPES[dtype_name(x)]
    memory = x.base if x.base is not None and x.base.ndim == x.ndim else x
    values = ", ".join(str(float(v) if kind == "float" else int(v)) for v in memory.ravel())
    strides = ", ".join(str(s // x.itemsize) for s in x.strides)
    return (
        f"  static const {kind} x{i}_{j}[] = {{{values}}};\n"
        f"  p{i}.arrays[{j}] = {{x{i}_{j}, DType::{dtype}, {x.ndim}, "
        f"{{{', '.join(map(str, x.shape))}}}, {{{strides}}}}};\n"
    )


def program(given):
    """A program that prints of each (mask, keys of a tile, packed heads) which scores are seen."""
    functors, runs = [], []
    for i, (mask, keys, packed) in enumerate(given):
        head = "static constexpr bool kMask = true;\n"
        head += f"  static constexpr int kKeys = {keys}, kPacked = {packed};"
        function = of_mask(mask)
        text = emit_sm90.members(function, 0, packed > 1)
        functors.append(f"struct F{i} {{\n  {head}\n{text}}};\n")
        runs.append(f"  static FunctorParams p{i};\n")
        runs += [array_of(i, j, x) for j, x in enumerate(function.arrays)]
        runs += [f"  p{i}.numbers[{j}] = {x};\n" for j, x in enumerate(function.scalars)]
        runs.append(f"  run<F{i}>(p{i});\n")
    where = {"batch": BATCH, "head": HEAD, "q_len": Q_LEN, "kv_len": KV_LEN}
    return PROGRAM % {"functors": "".join(functors), "runs": "".join(runs), **where}


FEW = ("ids", "128", "64", "24", "256", "drawn", "lengths", "none")
FEW_PACKED = ("ids", "of a head", "key of a head", "24", "drawn", "none")
FORMS = {(128, 1): None, (64, 1): FEW, (128, 4): FEW_PACKED, (64, 16): FEW_PACKED}  # None: all


@pytest.mark.skipif(CXX is None, reason="the emulator needs g++")
def test_each_thread_sees_what_its_scores_do(tmp_path):
    """64 keys of a tile are those of head_dim_v above 128."""
    (tmp_path / "made").mkdir()
    asked = {(n, *f): masks()[n] for f, names in FORMS.items() for n in names or masks()}
    (tmp_path / "made/ask.cu").write_text(program([(m, *n[1:]) for n, m in asked.items()]))
    into, flags = tmp_path / "into", ["-std=c++20", "-O1", "-w", "-D__CUDA_ARCH__=800"]
    flags += ["-D__CUDA_ARCH_LIST__=800", "-include", "cuda_runtime.h", "-Iemulate/include"]
    flags += [f"-I{into}", f"-I{into}/include", "-Iinclude", "-I."]
    translate = [sys.executable, "emulate/translate.py"]
    sources = ("emulate/block.cpp", "emulate/runtime.cpp", "src/error.cpp")
    commands = (
        [*translate, ROOT, into, "cuda", "include/cuattn/device"],
        [*translate, tmp_path, into, "made"],
        [CXX, *flags, into / "made/ask.cu.cpp", *sources, "-o", tmp_path / "ask"],
        [tmp_path / "ask"],
    )
    for command in commands:
        done = subprocess.run(
            [str(x) for x in command], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split()
    for ((*name, packed), mask), line in zip(asked.items(), lines, strict=True):
        got = np.array([*line]).reshape(80, 512) == "1"
        heads = slice(HEAD, HEAD + 1) if packed == 1 else slice(HEAD // packed * packed, None)
        want = flex_cases.dense_mask(mask, BATCH + 1, max(HEAD + 1, packed), Q_LEN, KV_LEN)
        want = want[BATCH, heads].swapaxes(0, 1).reshape(-1, KV_LEN)[:Q_LEN]  # token, head
        eight, keys = np.arange(Q_LEN)[:, None] // 8, np.arange(KV_LEN)
        want &= (keys >= eight * 37 % 150) & (keys < KV_LEN - eight * 29 % 140)
        np.testing.assert_array_equal(got[:Q_LEN, :KV_LEN], want, err_msg=name)
        assert not got[:, KV_LEN:].any(), name
