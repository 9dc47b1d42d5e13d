# SPDX-License-Identifier: Apache-2.0
"""What ptxas said when the installed library was built: no kernel spills, no pipeline serialised.

The build keeps it in build.log beside cuattnConfig.cmake (cmake/nvcc_log.sh, cmake/record.cmake),
so the test judges the library that is installed, wherever it was built.
"""

import os
import re
from pathlib import Path

import pytest

import cuattn

# What ptxas says of lost performance: setmaxnreg ignored (C7508), wgmma serialised (C7510 to
# C7515), a wait or fence put in (C7517, C7519). A code that must stay is listed with its reason.
LOSS = re.compile(r"\((C75\d\d)\)")
ALLOWED: dict[str, str] = {}

SECTION = re.compile(r"^== (\w+) (\S+)$", re.MULTILINE)
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


# The stable-ABI wheel has none, .ci/wheel says where that of its build lies.
BUILD_LOG = Path(os.environ.get("CUATTN_BUILD_LOG") or Path(cuattn.cmake_dir(), "build.log"))


def build_log() -> dict[str, str]:
    """The log of each CUDA object, by name."""
    text = BUILD_LOG.read_text()
    parts = SECTION.split(text)[1:]
    sections = zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
    return {name: log for kind, name, log in sections if kind == "cuda"}


@pytest.fixture(scope="module")
def logs():
    found = build_log()
    if not found:
        assert os.environ.get("CUATTN_CUDA") != "ON", "CUATTN_CUDA=ON, but nothing was compiled"
        pytest.skip("cuattn was built without CUDA: there is no ptxas log to judge")
    return found


def test_every_instance_has_a_log(logs):
    instances = {name for name in logs if name.startswith("instances/")}
    assert instances, "no source of the instance table was compiled"
    silent = [name for name in instances if not ENTRY.search(logs[name])]
    assert not silent, f"no ptxas report in {silent}: is -Xptxas=-v still given?"


def test_no_source_holds_more_than_six_kernels(logs):
    sources = [name for name in logs if name.startswith("instances/forward_")]
    assert sources, "no source of attention was compiled"
    for name in sources:
        archs = [arch for _, arch in ENTRY.findall(logs[name])]
        assert max(map(archs.count, archs)) <= 6, f"{name}: split it, it compiles for too long"


def spills(log: str) -> list[str]:
    """The entry functions of a log that spill."""
    found, entry = [], "?"
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry = f"{match[1]} ({match[2]})"
        if (match := SPILL.search(line)) and match.groups() != ("0", "0"):
            found.append(f"{entry}: {match[0]}")
    return found


def losses(log: str) -> list[str]:
    """The lines of a log in which ptxas warns of lost performance."""
    return [x for x in log.splitlines() if (m := LOSS.search(x)) and m[1] not in ALLOWED]


def test_no_kernel_spills_registers(logs):
    assert not [f"{name}: {spill}" for name, log in logs.items() for spill in spills(log)]


def test_ptxas_gave_no_performance_warning(logs):
    assert not [f"{name}: {line}" for name, log in logs.items() for line in losses(log)]


def test_hopper_sources_are_compiled_for_90a_alone(logs):
    hopper = {name: log for name, log in logs.items() if "_sm90_" in name}
    assert bool(hopper) == any("90a" in row["arch"] for row in cuattn.kernels())
    for name, log in hopper.items():
        assert {arch for _, arch in ENTRY.findall(log)} == {"sm_90a"}, name


# What nvcc 13.0 says of a kernel with too few registers, without launch bounds, that reads pending
# accumulators.
BAD = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine \
register count at entry.
ptxas info    : (C7517) warpgroup.wait is injected in around line 173 by compiler to allow use of \
registers defined by GMMA in function '_Z3badPfmm'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 429 by compiler to allow use \
of registers in GMMA in function '_Z3badPfmm'
ptxas info    : Compiling entry function '_Z3badPfmm' for 'sm_90a'
ptxas info    : Function properties for _Z3badPfmm
    16 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_the_judge_sees_spills_and_warnings_of_90a_code():
    assert spills(BAD) == ["_Z3badPfmm (sm_90a): 16 bytes spill stores, 24 bytes spill loads"]
    assert [LOSS.search(line)[1] for line in losses(BAD)] == ["C7508", "C7517", "C7519"]
    clean = BAD.replace("16 bytes spill stores, 24", "0 bytes spill stores, 0")
    assert not spills(clean)
    assert not losses(clean.replace("(C75", "C75"))  # a symbol's name is no warning
