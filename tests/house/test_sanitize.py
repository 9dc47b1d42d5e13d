# SPDX-License-Identifier: Apache-2.0
"""cmake/sanitize.cmake: what a build under a sanitizer optimises."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = {f"tests/cpp/{name}.cpp" for name in ("paged", "problem", "reference")}


def test_kernels_and_references_are_optimised_under_a_sanitizer_and_nothing_else(tmp_path):
    if shutil.which("ninja") is None or shutil.which("cmake") is None:
        pytest.skip("no cmake or no ninja")
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, "-DCUATTN_SANITIZE=thread"]
    command += ["-DCUATTN_TESTS=ON", "-DCUATTN_CUDA=OFF", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    subprocess.run(command, check=True, capture_output=True)
    command = ["ninja", "-C", tmp_path, "-t", "commands", "cuattn", "cuattn_tests"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    levels = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if words[-1].endswith(".cpp"):
            source = Path(words[-1]).relative_to(ROOT).as_posix()
            assert "-fsanitize=thread" in words, source
            levels[source] = [word for word in words if word.startswith("-O")][-1]
    optimised = {source for source, level in levels.items() if level != "-O0"}
    assert {"cpu/flash.cpp", "cpu/paged.cpp", "tests/cpp/reference.cpp"} <= optimised
    assert not [x for x in optimised if not x.startswith("cpu/") and x not in REFERENCES]
    assert {"src/abi/c_api.cpp", "tests/cpp/test_core.cpp"} <= levels.keys() - optimised
