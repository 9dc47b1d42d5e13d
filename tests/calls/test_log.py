# SPDX-License-Identifier: Apache-2.0
"""CUATTN_LOG=1: each new plan, once, on stderr."""

import os
import subprocess
import sys

import pytest

CALLS = """
import numpy as np, cuattn
q, k = np.ones((2, 5, 4, 16), np.float32), np.ones((2, 7, 2, 16), np.float32)
ends = np.array([0, 3], np.int32)
cache, table, lengths = np.ones((2, 8, 2, 16), np.float32), ends[None, :1], ends[1:]
for _ in range(3):
    out, lse = cuattn.attention(q, k, k, causal=True, return_lse=True)
    cuattn.attention(q, k, k, backend="naive")
    cuattn.attention_varlen(q[0, :3], k[0, :3], k[0, :3], ends, ends, 3, 3)
    cuattn.paged_attention(q[:1, 0], cache, cache, table, lengths)
    cuattn.attention_backward(out, q, k, k, out, lse, causal=True)
"""
PLANS = [
    "attention float32 on cpu: batch 2, queries 5, keys 7, heads 4 / 2, head_dim 16, mask causal, "
    "scores identity -> cpu",
    "attention float32 on cpu: batch 2, queries 5, keys 7, heads 4 / 2, head_dim 16, mask none, "
    "scores identity -> naive",
    "attention_varlen float32 on cpu: batch 1, queries up to 3, keys up to 3, heads 4 / 2, "
    "head_dim 16, mask none, scores identity -> cpu",
    "paged_attention float32 over float32 on cpu: sequences 1, queries 1, keys up to 8, blocks of "
    "8, heads 4 / 2, head_dim 16, mask none, scores identity -> cpu",
    "attention_backward float32 on cpu: batch 2, queries 5, keys 7, heads 4 / 2, head_dim 16, "
    "mask causal, scores identity -> ",
]


def logged(code, value):
    environment = {**os.environ, "CUATTN_LOG": value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_each_new_plan_is_printed_once():
    lines = logged(CALLS, "1")
    assert len(lines) == len(PLANS)
    for line, plan in zip(lines, PLANS, strict=True):
        assert line.startswith("cuattn: " + plan)
        assert ": " in line.split(" -> ")[1]  # the reason
    assert "workspace" in lines[1]


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_printed_when_it_is_off(value):
    assert logged(CALLS, value) == []


def test_a_refused_call_and_explain_print_nothing():
    code = """
import numpy as np, cuattn
q = np.ones((2, 5, 4, 16), np.float32)
cuattn.explain("attention", q, q, q)
try:
    cuattn.attention(q, q, q, backend="sm90")
except NotImplementedError:
    pass
"""
    assert logged(code, "1") == []


def test_the_log_ends_before_it_fills_a_disk():
    code = """
import numpy as np, cuattn
for n in range(1, 1100):
    q = np.ones((1, n % 37 + 1, 1, 8), np.float32)
    k = np.ones((1, n // 37 + 1, 1, 8), np.float32)
    cuattn.attention(q, k, k)
"""
    lines = logged(code, "1")
    assert len(lines) == len(set(lines)) == 1001
    assert lines[-1] == "cuattn: CUATTN_LOG has printed 1000 plans and prints no more"


def test_calls_through_xla_are_printed():
    pytest.importorskip("jax")
    code = """
import jax, jax.numpy as jnp, cuattn
q = jnp.ones((1, 5, 2, 16))
step = jax.jit(lambda q: cuattn.attention(q, q, q))
step(q), step(q).block_until_ready()
"""
    lines = [line for line in logged(code, "1") if line.startswith("cuattn: ")]
    assert len(lines) == 1
    assert " queries 5, keys 5, heads 2 / 2, head_dim 16" in lines[0]
