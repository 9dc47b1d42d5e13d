# SPDX-License-Identifier: Apache-2.0
"""Processes that were forked or spawned: right results, threads of their own, a clean exit.

Each case runs in a fresh interpreter with four CPU threads. A child that hangs is ended by its
alarm, and one that leaves does so through the destructors of the library, unlike os._exit.
"""

import os
import subprocess
import sys

import pytest

COMMON = """
import multiprocessing, os, signal, sys, threading
import numpy as np
import cuattn

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 256, 8, 64), np.float32)

def attend():
    return cuattn.attention(q, k, v, causal=True)

def in_child(check):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(0 if check() else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def is_right():
    return np.array_equal(attend(), want)
"""


def run(path, code):
    path.write_text(COMMON + code, encoding="utf-8")
    environment = {**os.environ, "CUATTN_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_forked_child_makes_threads_of_its_own_and_exits(tmp_path):
    code = """
def works_alone():
    alone = len(os.listdir("/proc/self/task")) == 1
    return alone and is_right() and len(os.listdir("/proc/self/task")) == 4

want = attend()
assert len(os.listdir("/proc/self/task")) == 4
assert in_child(works_alone) == 0
assert in_child(lambda: in_child(works_alone) == 0 and works_alone()) == 0
assert in_child(lambda: True) == 0  # one that computes nothing
assert is_right()
"""
    run(tmp_path / "fork.py", code)


def test_a_child_may_be_forked_before_the_first_call(tmp_path):
    code = """
def computes():
    first = attend()
    return np.array_equal(first, attend()) and len(os.listdir("/proc/self/task")) == 4

assert in_child(computes) == 0
want = attend()
assert in_child(is_right) == 0
"""
    run(tmp_path / "first.py", code)


def test_children_may_be_forked_while_other_threads_compute(tmp_path):
    code = """
def loop():
    while not stop.is_set():
        results.append(is_right())

want, stop, results = attend(), threading.Event(), []
threads = [threading.Thread(target=loop) for _ in range(2)]
for thread in threads:
    thread.start()
assert [in_child(is_right) for _ in range(20)] == [0] * 20
stop.set()
for thread in threads:
    thread.join()
assert results and all(results)
"""
    run(tmp_path / "busy.py", code)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_give_the_same_bits(method, tmp_path):
    code = f"""
def compute(_):
    return attend()

if __name__ == "__main__":
    want = attend()
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        results = pool.map_async(compute, range(6)).get(timeout=120)
    assert all(np.array_equal(result, want) for result in results)
    assert is_right()
"""
    run(tmp_path / "workers.py", code)
