# SPDX-License-Identifier: Apache-2.0
"""Seeds, devices and the one-line reproduction of a failure.

Every run draws a fresh seed; CUATTN_TEST_SEED=n repeats an earlier one. CUATTN_REQUIRE_CUDA=1 turns
missing CUDA into an error. `pytest --skip-passed` runs what has not passed here yet: once torch and
JAX are installed, what was skipped without them.
"""

from __future__ import annotations

import gc
import getpass
import os
import secrets
import sys
import tempfile
import zlib
from pathlib import Path

# Before CUDA is: workers of pytest-xdist share several GPUs out, each its own and a second one for
# the tests that need two.
if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES"):
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    mine = dict.fromkeys(gpus[(number + i) % len(gpus)] for i in range(2))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    os.environ["CUATTN_TEST_GPUS"] = ",".join(gpus)  # for what runs in a process of its own

# Before torch is loaded: it collects garbage before a capture, for a graph of an earlier test that
# is collected during one breaks it (docs/notes/20261127-captures-that-break.md).
os.environ.setdefault("TORCH_CUDAGRAPH_GC", "1")

# Before numpy is loaded: the matrices of the reference are small, and BLAS threads that wait for
# each other on a busy machine make it ten times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each core
    os.environ.setdefault("CUATTN_NUM_THREADS", "2")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    # Else torch.compile starts a process for each core, in each worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Of two workers that compile one graph into one folder, one loads what the other still writes.
    graphs = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    graphs = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", graphs))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(graphs / os.environ["PYTEST_XDIST_WORKER"])

import hypothesis
import numpy as np
import pytest

import harness

hypothesis.settings.register_profile("cuattn", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("cuattn")


PASSED = "cuattn/passed"  # in pytest's cache: the tests that passed in the last run
PASSED_BEFORE = pytest.StashKey[set]()  # in that before this one


def pytest_addoption(parser):
    text = "leave out what passed in the last run"
    parser.addoption("--skip-passed", action="store_true", help=text)
    text = "leave out the cases of the CPU backend, which find the same without a GPU"
    parser.addoption("--no-cpu-cases", action="store_true", help=text)


# Files that build libraries. A worker of pytest-xdist begins with the first of its tests, and the
# others take from its last: what takes minutes is to come first, or one worker ends alone.
LONGEST = ("test_emulator.py", "test_cpp.py")


@pytest.hookimpl(trylast=True)  # of what -m, -k and --deselect leave
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in LONGEST)
    if config.getoption("--no-cpu-cases"):
        leave_out(config, items, _runs_on_the_cpu)
    if config.getoption("--skip-passed"):
        leave_out(config, items, lambda item: item.nodeid in config.stash[PASSED_BEFORE])


def leave_out(config, items, is_out):
    config.hook.pytest_deselected(items=[item for item in items if is_out(item)])
    items[:] = [item for item in items if not is_out(item)]


def _runs_on_the_cpu(item):
    return hasattr(item, "callspec") and "cpu" in item.callspec.id.split("-")


def pytest_collection_finish():
    # A garbage collection looks at all that there is: a quarter of a second for the tests alone.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return
    stats = terminalreporter.stats
    passed = {report.nodeid for report in stats.get("passed", []) if report.when == "call"}
    passed -= {report.nodeid for report in stats.get("error", [])}  # in the teardown
    if config.getoption("--skip-passed"):
        passed |= config.stash[PASSED_BEFORE]
    config.cache.set(PASSED, sorted(passed))


def pytest_configure(config):
    # At once: read at the end, it was not there in one run of twenty on a busy machine.
    cache = getattr(config, "cache", None)  # -p no:cacheprovider
    config.stash[PASSED_BEFORE] = set(cache.get(PASSED, [])) if cache is not None else set()
    # In the environment, so that the workers of pytest-xdist share it.
    os.environ.setdefault("CUATTN_TEST_SEED", str(secrets.randbelow(2**31)))


def pytest_report_header(config):
    cuda = harness.why_no_cuda()
    return [
        f"cuattn: CUATTN_TEST_SEED={os.environ['CUATTN_TEST_SEED']}, CUDA cases "
        + ("run" if cuda is None else f"skipped: {cuda}")
    ]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("reproduce", _command(item)))


def _command(item):
    node = item.nodeid.replace("'", "'\\''")
    seed = os.environ["CUATTN_TEST_SEED"]
    return f"CUATTN_TEST_SEED={seed} {Path(sys.executable).name} -m pytest '{node}'"


@pytest.fixture
def rng(request):
    """Random numbers from the run's seed and the test's name; the same for every backend."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    case = [f"{k}={v}" for k, v in sorted(params.items()) if k not in ("device", "backend")]
    name = f"{request.node.path.name}::{request.node.originalname}{case}"
    return np.random.default_rng([int(os.environ["CUATTN_TEST_SEED"]), zlib.crc32(name.encode())])


@pytest.fixture
def torch():
    """torch in a CUDA test, the device idle before and after."""
    import torch

    torch.cuda.synchronize()
    yield torch
    torch.cuda.synchronize()


@pytest.fixture(params=harness.devices(), ids=lambda device: str(device))
def device(request):
    """cpu: numpy arrays; cuda: torch tensors."""
    return request.param
