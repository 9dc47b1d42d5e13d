# SPDX-License-Identifier: Apache-2.0
"""What a test builds once for all workers of pytest-xdist."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

# For CMake, where only what is built matters: quickly, or as it was built before where a launcher
# such as ccache finds that again.
FLAGS = (
    []
    if "CMAKE_CXX_COMPILER_LAUNCHER" in os.environ
    else ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
)


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """Hold others off a build folder; who comes next finds it built."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
