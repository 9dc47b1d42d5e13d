# SPDX-License-Identifier: Apache-2.0
"""The C++ side: `cuattn_tests` and examples/cpp built against the installed package, and run."""

import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import builds
import cuattn
import harness

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None and "CXX" not in os.environ,
    reason="no C++ compiler",
)


# cmake and ninja of the virtual environment come first, activated or not.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def run(command, **options):
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": PATH},
        **options,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(source, directory, *definitions):
    """Configure and build a CMake project that calls find_package(cuattn)."""
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=PATH) is None:
            pytest.fail(f"{tool} is not installed; install the extra 'test'")
    run(["cmake", "-G", "Ninja", "-S", source, "-B", directory, *definitions])
    run(["cmake", "--build", directory])
    return directory


# Where no GPU will run the CUDA cases they are compiled and assembled, but not optimised, nor for
# several GPUs.
QUICK = (
    f"-DCMAKE_PROJECT_cuattn_tests_INCLUDE={ROOT / 'tests' / 'cuattn_tests_quick.cmake'}",
    "-DCMAKE_CUDA_ARCHITECTURES=90-real",
    "-DCMAKE_CUDA_FLAGS=-Xcicc=-O0 -Xptxas=-O0",
)


@pytest.fixture(scope="module")
def tests_build(pytestconfig, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        folder = folder.parent  # all workers of pytest-xdist have this one
    with builds.one_at_a_time(folder / "cuattn_tests"):
        return build(
            ROOT / "tests" / "cpp",
            folder / "cuattn_tests",
            f"-Dcuattn_DIR={cuattn.cmake_dir()}",
            *(QUICK if harness.why_no_cuda() else ()),
        )


def counts(output):
    """(passed, failed, skipped) of each run of cuattn_tests in the output."""
    pattern = r"^(?:\d+: )?(\d+) passed, (\d+) failed, (\d+) skipped$"
    found = re.findall(pattern, output, re.MULTILINE)
    assert found, output[-2000:]
    return [tuple(map(int, numbers)) for numbers in found]


def test_cuattn_tests_pass_with_every_cpu_instruction_set(tests_build):
    output = run(["ctest", "--test-dir", tests_build, "--verbose"])
    assert "100% tests passed" in output
    whole, *isas = counts(output)
    assert whole[0] >= 30
    assert len(isas) >= 2
    assert all(passed >= 5 and failed == 0 for passed, failed, _ in [whole, *isas])


def test_cuattn_tests_have_one_case_per_kernel_instance(tests_build):
    listed = run([tests_build / "cuattn_tests", "--list"]).split()
    names = [name for name in listed if name.startswith("instance/")]
    assert len(set(names)) == len(names)
    cuda = [
        row for row in cuattn.kernels() if row["op"] == "attention" and row["arch"][0].isdigit()
    ]
    if not cuda or "device_mma_maps_float16_fragments" not in listed:
        pytest.skip("no CUDA in this build, or no CUDA compiler here")
    for row in cuda:
        # Cases of C++ reach none of these: tests/flex/test_flex_cuda.py, test_dropout.py and
        # test_float8_sm90.py and test_float8_parts.py do.
        if row["mask"] == "rows" or row["score"] == "dropped" or "8" in row["dtype"]:
            continue
        wide = f"{row['head_dim']}x{row['head_dim_v']}"
        masks = ("none", "causal", "window") if row["mask"] == "any" else (row["mask"],)
        scores = ("identity", "scored") if row["score"] == "any" else (row["score"],)
        for mask, score in itertools.product(masks, scores):
            assert f"instance/{row['kernel']}/{row['dtype']}/{wide}/{mask}/{score}" in names


def test_cuattn_tests_filter_seed_and_failure_are_honoured(tests_build):
    binary = tests_build / "cuattn_tests"
    assert counts(run([binary, "--filter", "tensor_view", "--seed", "7"]))[0][0] == 3
    nothing = subprocess.run([binary, "--filter", "no such case"], capture_output=True, text=True)
    assert nothing.returncode != 0  # a filter that selects nothing is not a success
    unknown = subprocess.run([binary, "--fast"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "--fast" in unknown.stderr


def test_every_case_belongs_to_a_part_of_the_gpu_record(tests_build, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    parts = importlib.import_module("parts")
    binary = tests_build / "cuattn_tests"

    def listed(*arguments):
        return set(run([binary, "--list", *arguments]).split())

    of = {
        name: listed(*parts.stage_arguments(name, "cpp"))
        for name, part in parts.PARTS.items()
        if "cpp" in part.stages
    }
    assert listed() == set().union(*of.values())
    assert sum(map(len, of.values())) == len(listed())
    if "device_mma_maps_float16_fragments" in listed():
        assert all(len(cases) > 8 for cases in of.values())  # one at least in each shard
    core = listed("--filter", "block_pool,tensor_view")
    assert core > listed("--filter", "block_pool,tensor_view", "--filter", "view") > set()
    assert listed("--filter", "view", "--exclude", "tensor_view,block_pool") < of["core"]


def largest_errors(built):
    """What each program of examples/cpp says about its own result."""
    outputs = [run([built / program]) for program in ("example", "paged_decode")]
    return [float(re.search(r"largest error (\S+)", output).group(1)) for output in outputs]


def test_examples_build_against_the_package_and_agree_with_plain_loops(tmp_path):
    built = build(ROOT / "examples" / "cpp", tmp_path, f"-Dcuattn_DIR={cuattn.cmake_dir()}")
    assert max(largest_errors(built)) < 1e-5


def test_examples_build_against_a_plain_cmake_install(tmp_path):
    prefix = tmp_path / "prefix"
    options = ("-DCUATTN_CUDA=OFF", *builds.FLAGS, f"-DCMAKE_INSTALL_PREFIX={prefix}")
    build(ROOT, tmp_path / "library", *options)
    run(["cmake", "--install", tmp_path / "library"])
    built = build(ROOT / "examples" / "cpp", tmp_path / "example", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert max(largest_errors(built)) < 1e-5
