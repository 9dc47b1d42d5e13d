# SPDX-License-Identifier: Apache-2.0
"""Threads and the interpreter: the first call of a process, its end, and Ctrl-C in a call.

Each case is a process of its own, killed and failed where it does not end in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import frameworks

# ThreadSanitizer sees a race whichever thread comes first, but takes seconds for each process, and
# as long for a call of a quarter of the work.
REPEATS, ROWS = (1, 1024) if "TSAN_OPTIONS" in os.environ else (3, 2048)
SECONDS = 120  # of a process that takes one to five, on a machine as busy as it may be


def run(program: str) -> subprocess.CompletedProcess:
    """Run a program in a fresh interpreter; fails where it hangs or dies."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the process hangs:\n{program}")
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}\n{program}"
    return done


ARRAYS = """
import numpy as np

import cuattn

rng = np.random.default_rng(3)
q, k, v = (rng.standard_normal((1, 4, 2, 8), np.float32) for _ in range(3))
scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
weights = np.exp(scores)
want = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
lse = np.log(weights.sum(-1))
half = np.zeros((4, 2, 8), np.float32), np.zeros((4, 2), np.float32)
"""
SETUPS = {
    "numpy": ARRAYS,
    "torch": ARRAYS + "import torch\nq, k, v = map(torch.from_numpy, (q, k, v))\n",
    "jax": ARRAYS + "import jax\nq, k, v = map(jax.numpy.asarray, (q, k, v))\n",
    "pool": ARRAYS + "pool = cuattn.BlockPool(8, 4)\ntokens = list(range(9))\n",
    "cache": ARRAYS + "cache = cuattn.PagedKVCache(1, 64, 4, 1, 8, 'float32', like=q)\n",
    "pages": ARRAYS + "tables, lens = np.array([[0]], np.int32), np.array([4], np.int32)\n",
}
# Name: what it needs, the call, and what holds for its result.
FIRST_CALLS = {
    "attention": ("numpy", "cuattn.attention(q, k, v)", "np.allclose(result, want, atol=1e-5)"),
    "torch": ("torch", "cuattn.attention(q, k, v)", "np.allclose(result, want, atol=1e-5)"),
    "jax": ("jax", "cuattn.attention(q, k, v)", "np.allclose(result, want, atol=1e-5)"),
    "attention_backward": (
        "numpy",
        "cuattn.attention_backward(q, q, k, v, *(x.astype('f4') for x in (want, lse)))",
        "np.allclose(result.dv, np.einsum('bhqk,bqhd->bkhd', np.exp(scores - lse[..., None]), q), "
        "atol=1e-5)",
    ),
    "paged_attention": (
        "pages",
        "cuattn.paged_attention(q[:, -1], k, v, tables, lens)",
        "np.allclose(result, want[:, -1], atol=1e-5)",
    ),
    "merge_states": (
        "numpy",
        "cuattn.merge_states(v[0], half[1], half[0], half[1])",
        "np.allclose(result[0], v[0] / 2) and np.allclose(result[1], np.log(2))",
    ),
    "explain": (
        "numpy",
        "cuattn.explain('attention', q, k, v)",
        "result.kernel == 'cpu'",
    ),
    "match_prefix": ("pool", "pool.match_prefix(tokens)", "result == ([], 0)"),
    "cache_add": ("cache", "cache.add(list(range(9)))", "cache.context_len(result) == 0"),
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_the_first_call_may_come_from_many_threads_at_once(name):
    library, call, holds = FIRST_CALLS[name]
    if library in ("torch", "jax"):
        frameworks.require(library)
    program = f"""
import threading
{SETUPS[library]}
count = 8
barrier = threading.Barrier(count)
results, errors = [], []

def work():
    barrier.wait()
    try:
        results.append({call})
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work) for _ in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(results) == count
for result in results:
    assert {holds}, result
"""
    run(program)


def test_the_binding_gives_the_interpreter_lock_up_in_one_way():
    """nanobind's own way aborts the process where the interpreter ends meanwhile."""
    sources = sorted((Path(__file__).resolve().parents[2] / "bindings").rglob("*.*"))
    assert len(sources) > 10
    assert [path.name for path in sources if "gil_scoped" in path.read_text()] == []


LARGE = """
import numpy as np

import cuattn

x, lse = np.ones((1, 256, 8, 64), np.float32), np.zeros((1, 8, 256), np.float32)
q, cache = np.ones((16, 8, 64), np.float32), np.ones((16, 16, 8, 64), np.float32)
tables = np.tile(np.arange(16, dtype=np.int32), (16, 1))
written = np.ones((5, 2, 16, 16, 8, 64), np.float32)  # two caches of each thread
lens, ends = np.full(16, 256, np.int32), np.array([0, 256], np.int32)
slots, pairs = np.arange(256), np.stack([np.arange(8), np.arange(8, 16)], axis=1)
sequences = cuattn.PagedKVCache(1, 256, 4, 1, 8, "float32", like=x)
"""
# Calls in which threads are when the interpreter ends: on small arrays they keep its lock.
LAST_CALLS = {
    "attention": (LARGE, "cuattn.attention(x, x, x)"),
    "short_attention": (ARRAYS, "cuattn.attention(q, k, v)"),
    "attention_backward": (LARGE, "cuattn.attention_backward(x, x, x, x, x, lse)"),
    "merge_states": (LARGE, "cuattn.merge_states(x, lse, x, lse)"),
    "paged_attention": (LARGE, "cuattn.paged_attention(q, cache, cache, tables, lens)"),
    "reshape_and_cache": (LARGE, "cuattn.reshape_and_cache(x[0], x[0], *written[i], slots)"),
    "gather_cache": (LARGE, "cuattn.gather_cache(cache, cache, tables[:1], ends)"),
    "copy_blocks": (LARGE, "cuattn.copy_blocks([written[i, 0]], [written[i, 1]], pairs)"),
    "swap_blocks": (LARGE, "cuattn.swap_blocks([written[i, 0]], [written[i, 1]], pairs)"),
    "paged_kv_cache": (LARGE, "sequences.free(sequences.add([1, 2, 3, 4, 5]))"),
}


@pytest.mark.parametrize("name", LAST_CALLS)
@pytest.mark.parametrize("first", ["first_call_before", "first_call_then"])
def test_the_interpreter_may_end_while_daemon_threads_are_in_a_call(name, first):
    setup, call = LAST_CALLS[name]
    program = f"""
import threading
{setup}
started = threading.Barrier(5)

def call(i):
    {call}

def work(i):
    started.wait()
    while True:
        call(i)

if {first == "first_call_before"}:
    call(4)
for i in range(4):
    threading.Thread(target=work, args=[i], daemon=True).start()
started.wait()
if {first == "first_call_before"}:
    threading.Event().wait(0.05)  # they are in the middle of it now
"""
    for _ in range(REPEATS):
        assert run(program).stderr == ""


LONG_CALLS = {
    "attention": "cuattn.attention(x, x, x, out=out)",
    "attention_varlen": "cuattn.attention_varlen(x[0], x[0], x[0], ends, ends, n, n, out=out[0])",
    "paged_attention": "cuattn.paged_attention(x, cache, cache, tables, ends[1:], out=out)",
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_ctrl_c_in_a_call_comes_after_it_and_its_result_is_whole(name):
    program = f"""
import os
import signal
import threading
import time

import numpy as np

import cuattn

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
n = {ROWS}
x = np.ones((1, n, 8, 64), np.float32)
cache, tables = x.reshape(n // 64, 64, 8, 64), np.arange(n // 64, dtype=np.int32)[None]
ends = np.array([0, n], np.int32)

def call(out):
    {LONG_CALLS[name]}

def interrupt():
    while np.isnan(out).all():  # until the call is at work
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

out, interrupted = np.full_like(x, np.nan), False
threading.Thread(target=interrupt).start()
try:
    call(out)
    threading.Event().wait(60)  # a faster machine: the signal comes here
except KeyboardInterrupt:
    interrupted = True
assert interrupted
np.testing.assert_allclose(out, 1, atol=1e-5)
again = np.full_like(x, np.nan)
call(again)
np.testing.assert_array_equal(again, out)
"""
    run(program)


HALF_IMPORTED = {
    "attention": "cuattn.attention(x, x, x)",
    "append_attention": "cuattn.append_attention(y, y, y, pages, pages.copy(), table, ones)",
    "PagedKVCache": "cuattn.PagedKVCache(1, 64, 16, 2, 16, 'float32', like=x)",
    "rope_table": "cuattn.rope_table(64, 16, like=x)",
    "quantize": "cuattn.quantize(x, x, x, key_mean=x[0, 0])",
    "explain": "cuattn.explain('attention', x, x, x, dropout_p=0.5, dropout_seed=1)",
    "dropout": "cuattn.attention(x, x, x, dropout_p=0.5, dropout_seed=1)",
    "flex": "cuattn.flex_attention(x, x, x, mask_mod=lambda b, h, i, j: i >= j)",
    "lists": "cuattn.flex_attention(x, x, x, mask_mod=lambda b, h, i, j: z[i] == z[j])",
}


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_calls_on_numpy_take_no_notice_of_a_half_imported_library(library):
    """It is in sys.modules from the first line of its import on, before it has any name."""
    run(f"""
        import sys
        import types

        import numpy as np

        import cuattn

        sys.modules[{library!r}] = types.ModuleType({library!r})
        x, pages = np.ones((1, 40, 2, 16), np.float32), np.zeros((4, 16, 2, 16), np.float32)
        y, table, ones = x[:, 0], np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        z = np.zeros(40, np.int32)
        for call in {list(HALF_IMPORTED.values())!r}:
            eval(call)
    """)
