# SPDX-License-Identifier: Apache-2.0
"""The CPU backend under each instruction set and number of threads, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Prints the bits of every Nth result; the word "judge" has each held against the reference before.
WORK = """
import hashlib, json, sys
import numpy as np
import cuattn
from cases import FACTORS, case_of, make_problem, pairwise
from harness import Cpu, assert_case, bits, run

digest, every = hashlib.blake2b(), int(sys.argv[1])
for number, row in list(enumerate(pairwise(FACTORS)))[::every]:
    case = case_of(row)
    if "judge" in sys.argv:
        assert_case(Cpu(), "cpu", case, np.random.default_rng(number))
    problem = make_problem(case, np.random.default_rng(number))
    used = case.layout != "ragged"  # rows behind the last sequence are not written
    for result in run(Cpu(), "cpu", problem) if used else ():
        digest.update(bits(result) if result.size else b"")
print(json.dumps({"digest": digest.hexdigest(), **cuattn.info()["cpu"]}))
"""


def work(every, *judge, **environment):
    tests = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", WORK, str(every), *judge],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return result


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_is_right(isa):
    result = work(8, "judge", CUATTN_CPU_ISA=isa)
    if "CUATTN_CPU_ISA must be one of" in result.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["isa"] == isa


def test_an_unknown_instruction_set_is_refused():
    result = work(64, CUATTN_CPU_ISA="sse9")
    assert "ValueError: attention: CUATTN_CPU_ISA must be one of " in result.stderr
    assert "on this machine, got sse9; leave it unset for the fastest" in result.stderr


def test_the_number_of_threads_does_not_change_a_bit():
    """Of results that are held against the reference above: to do it again is slow under TSan."""
    results = [json.loads(work(16, CUATTN_NUM_THREADS=str(n)).stdout) for n in (1, 2, 5)]
    assert [r["threads"] for r in results] == [1, 2, 5]
    assert len({r["digest"] for r in results}) == 1


# Prints what the first call says of each number of threads: it is read until there is one.
SENSELESS = """
import os, sys
import numpy as np
import cuattn

x = np.ones((1, 8, 1, 16), np.float32)
for value in sys.argv[1:]:
    os.environ["CUATTN_NUM_THREADS"] = value
    try:
        cuattn.attention(x, x, x)
    except ValueError as error:
        print(error)
"""


def test_a_senseless_number_of_threads_is_refused():
    values = ["0", "-1", "many", "2x", "1025", "99999999999999999999"]
    text = (
        "CUATTN_NUM_THREADS must be a whole number from 1 to 1024, got '{}'; leave it unset "
        "for the CPUs that this process may use\n"
    )
    command = [sys.executable, "-c", SENSELESS, *values]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.stdout == "".join(map(text.format, values)), said.stderr
    environment = {**os.environ, "CUATTN_NUM_THREADS": "2x"}
    command = [sys.executable, "-m", "cuattn", "info"]
    info = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (info.returncode, info.stderr) == (1, text.format("2x"))


def test_an_empty_number_of_threads_is_none():
    want = json.loads(work(128, CUATTN_NUM_THREADS="").stdout)["threads"]
    assert 1 <= want <= len(os.sched_getaffinity(0))  # less where a cgroup grants less
