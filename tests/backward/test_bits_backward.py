# SPDX-License-Identifier: Apache-2.0
"""Bits of the gradients on the CPU: the same for any number of threads and in every repeat, right
under every instruction set; dropout's are those of the rule.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cases
import cuattn
import reference
from backward_cases import FACTORS, BackwardCase, case_of, make_problem, run
from harness import Cpu, bits

# Holds the results of the cases in a file against the reference.
RIGHT = """
import json, pickle, sys
import cuattn, numpy
from backward_cases import assert_case
from harness import Cpu

with open(sys.argv[1], "rb") as file:
    chosen = pickle.load(file)
for number, case in chosen:
    assert_case(Cpu(), "cpu", case, numpy.random.default_rng(number))
print(json.dumps(cuattn.info()["cpu"]))
"""

# Prints the bits of the results of problems in a file: the references of a problem take seconds.
BITS = """
import hashlib, json, pickle, sys
import cuattn
from backward_cases import run
from harness import Cpu, bits

digest = hashlib.blake2b()
with open(sys.argv[1], "rb") as file:
    problems = pickle.load(file)
for problem in problems:
    for result in run(Cpu(), "cpu", problem).values():
        digest.update(bits(result) if result.size else b"")
print(json.dumps({"digest": digest.hexdigest(), **cuattn.info()["cpu"]}))
"""


def chosen(every):
    """Number and case of every Nth of the cases, and a long one."""
    rows = list(enumerate(cases.pairwise(FACTORS)))
    one = dict(batch=1, num_heads_q=2, num_heads_kv=1, head_dim=24, causal=True, bias="rows")
    long = BackwardCase(**one, alibi="head", sinks=True, seqlen_q=300, seqlen_kv=1300)
    return [*((number, case_of(row)) for number, row in rows[::every]), (len(rows), long)]


def work(program, *arguments, **environment):
    tests = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_is_right(isa, tmp_path):
    file = tmp_path / "cases"
    file.write_bytes(pickle.dumps(chosen(every=4)))
    result = work(RIGHT, str(file), CUATTN_CPU_ISA=isa)
    if "CUATTN_CPU_ISA must be one of" in result.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["isa"] == isa


def test_the_number_of_threads_does_not_change_a_bit(tmp_path):
    file = tmp_path / "problems"
    problems = [make_problem(case, np.random.default_rng(i)) for i, case in chosen(every=16)]
    file.write_bytes(pickle.dumps(problems))
    results = [
        json.loads(work(BITS, str(file), CUATTN_NUM_THREADS=str(n)).stdout) for n in (1, 2, 5)
    ]
    assert [r["threads"] for r in results] == [1, 2, 5]
    assert len({r["digest"] for r in results}) == 1


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_repeats_have_the_same_bits(backend, rng):
    case = BackwardCase(bias="rows", alibi="head", sinks=True, dropout=0.2, dlse=True)
    problem = make_problem(case, rng)
    first = run(Cpu(), backend, problem, deterministic=True)
    for _ in range(20):
        for name, x in run(Cpu(), backend, problem).items():
            assert np.array_equal(bits(x), bits(first[name]))


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_dropout_keeps_what_the_rule_says(backend, place):
    """With q = 0 all probabilities are 1 / keys; dv of one-hot dout then shows what was kept."""
    p, seed, offset, rows, keys, batch, heads = 0.3, 2**45 + 77, 2**32 - 1, 24, 1100, 2, 3
    b, h = place
    zeros = np.zeros((batch, rows, heads, 8), np.float32)
    kv = np.zeros((batch, keys, heads, 8), np.float32)
    lse = np.full((batch, heads, rows), np.log(keys), np.float32)
    kept = reference.dropout(p, seed, offset, (batch, heads), (rows, keys))[b, h]
    for row in range(0, rows, 8):
        dout = zeros.copy()
        for c in range(8):
            dout[b, row + c, h, c] = keys
        for given in (
            {"dropout_seed": seed, "dropout_offset": offset},
            {"dropout_state": np.array([seed, offset])},
        ):
            (dv,) = cuattn.attention_backward(
                dout,
                zeros,
                kv,
                kv,
                zeros,
                lse,
                dropout_p=p,
                **given,
                need=("dv",),
                backend=backend,
            )
            want = kept[row : row + 8].T
            assert np.array_equal(dv[b, :, h] != 0, want != 0)
            assert np.allclose(dv[b, :, h], want, rtol=1e-5)
