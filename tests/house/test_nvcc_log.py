# SPDX-License-Identifier: Apache-2.0
"""cmake/nvcc_log.sh, through which CUDA sources are compiled: the log of ptxas, with ccache too."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "cmake" / "nvcc_log.sh"
PTXAS_SAYS = "ptxas info    : Used 8 registers\n"
KERNEL = """\
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#include "value.h"
#else
#define VALUE 2
#endif
__global__ void kernel(int* p) { *p = VALUE; }
"""


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def nvcc() -> str:
    found = shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    return found or pytest.skip("no nvcc")


def test_the_log_is_kept_and_warnings_are_shown(tmp_path):
    says = f"{PTXAS_SAYS}a.cu(1): warning: something\n"
    fake = program(tmp_path / "nvcc", f"printf '%s' '{says}' >&2; exit 3")
    command = [LAUNCHER, fake, "-c", "a.cu", "-o", "a.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == "a.cu(1): warning: something\n"
    *log, seconds = (tmp_path / "a.o.ptxas").read_text().splitlines(keepends=True)
    assert "".join(log) == says
    assert seconds.startswith("seconds ")


def test_the_launcher_of_the_user_runs_inside_ours(tmp_path):
    compiler = nvcc()
    if shutil.which("ninja") is None or shutil.which("cmake") is None:
        pytest.skip("no cmake or no ninja")
    theirs = program(tmp_path / "theirs", 'exec "$@"')
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build"]
    command += [f"-DCMAKE_CUDA_COMPILER_LAUNCHER={theirs}", "-DCUATTN_CUDA_ARCHS=90-real"]
    environment = {**os.environ, "CUDACXX": compiler}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    command = ["ninja", "-C", tmp_path / "build", "-t", "commands", "cuattn"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if str(LAUNCHER) in line]
    assert lines
    assert all(f"{LAUNCHER} {theirs} " in line for line in lines)


def test_ci_compiles_without_line_numbers_tight_packing_and_fast_code_of_the_host():
    given = ["echo", "-O3", "-lineinfo", "--compress-mode=size", "a b.cu"]
    done = subprocess.run([ROOT / ".ci/nvcc_quick", *given], check=True, capture_output=True)
    assert done.stdout == b"a b.cu -O0\n"


def test_a_hit_of_ccache_leaves_the_same_log_and_a_changed_header_is_no_hit(tmp_path):
    compiler = nvcc()
    if shutil.which("ccache") is None:
        pytest.skip("no ccache")
    (tmp_path / "a.cu").write_text(KERNEL)
    flags = [f"--generate-code=arch=compute_{n},code=[sm_{n}]" for n in (80, 90)]
    flags += [
        "-Xptxas=-v",
        "-MD",
        "-MT",
        "a.o",
        "-MF",
        "a.d",
        "-x",
        "cu",
        "-c",
        "a.cu",
        "-o",
        "a.o",
    ]
    environment = {**os.environ, "CCACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CCACHE_DISABLE", None)

    def compiled(value: int) -> tuple[bytes, str, int]:
        """The object, its log without the seconds, and the number of hits so far."""
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        subprocess.run(
            [LAUNCHER, "ccache", compiler, *flags], cwd=tmp_path, env=environment, check=True
        )
        command = ["ccache", "--print-stats"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        counts = dict(line.split("\t") for line in done.stdout.splitlines())
        log = (tmp_path / "a.o.ptxas").read_text().split("seconds ")[0]
        return (tmp_path / "a.o").read_bytes(), log, int(counts["direct_cache_hit"])

    first, log, hits = compiled(7)
    assert log.count("Compiling entry function") == 2
    assert hits == 0
    (tmp_path / "a.o").unlink()
    (tmp_path / "a.o.ptxas").unlink()
    assert compiled(7) == (first, log, 1)
    changed, _, hits = compiled(9)  # which only the pass for sm_90 reads
    assert changed != first
    assert hits == 1
