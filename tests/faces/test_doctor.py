# SPDX-License-Identifier: Apache-2.0
"""``cuattn doctor``, the console script and ``cuattn kernels``."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cuattn
from cuattn._cli import doctor

ROOT = Path(__file__).resolve().parents[2]


def run(*words, code=0, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUATTN_")}
    done = subprocess.run(
        [sys.executable, "-m", "cuattn", *words],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def verdicts(findings):
    return {finding.subject: finding.verdict for finding in findings}


def test_the_console_script_is_installed_and_says_its_version():
    site = Path(cuattn.__file__).parents[1]  # pip install --target puts scripts in its bin
    folders = [sysconfig.get_path("scripts"), site / "bin", *os.get_exec_path()]
    scripts = [Path(folder, "cuattn") for folder in folders]
    command = next((script for script in scripts if script.is_file()), None)
    assert command is not None, "install the package again"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"cuattn {cuattn.__version__}\n"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: cuattn ")


def test_kernels_lists_what_the_function_does():
    rows = cuattn.kernels()
    lines = run("kernels").splitlines()
    assert lines[0].split() == list(rows[0])
    assert [line.split() for line in lines[1:]] == [
        [str(cell) for cell in row.values()] for row in rows
    ]
    assert json.loads(run("kernels", "--json")) == rows


def test_a_good_installation_is_called_good():
    found = json.loads(run("doctor", "--json"))
    by_subject = {row["subject"]: row for row in found}
    assert by_subject["cuattn"]["verdict"] == "good"
    assert by_subject["CPU"]["verdict"] == "good"
    assert by_subject["numpy"]["verdict"] == "good"
    assert {"CUDA", "torch", "jax", "cupy"} <= set(by_subject)
    assert run("doctor").endswith("nothing is wrong\n")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CUATTN_NUM_THREAD", "2", "is no variable of cuattn; is CUATTN_NUM_THREADS meant?"),
        ("CUATTN_NUM_THREADS", "0", "which must be from 1 to 1024"),
        ("CUATTN_CPU_ISA", "sse2", "which must be baseline, avx2 or avx512"),
        ("CUATTN_CUBLAS_PATH", "/nowhere/libcublas.so.13", "which is no file"),
        ("CUATTN_LOG", "yes", "which counts as on; 1 is on, 0 is off"),
    ],
)
def test_a_wrong_variable_is_named_with_what_to_type(name, value, told):
    text = run("doctor", code=1, **{name: value})
    assert re.search(rf"^wrong  {name} .*{re.escape(told)}", text, re.MULTILINE)
    assert f"type: unset {name}\n" in text


def test_check_is_noted_and_wrong_for_nobody():
    text = run("doctor", CUATTN_CHECK="1", CUATTN_CUDA="OFF")
    assert re.search("^note   CUATTN_CHECK is on: calls on CUDA wait", text, re.MULTILINE)
    assert "CUATTN_CUDA " not in text  # of the build, and known


def test_every_documented_variable_is_known():
    page = (ROOT / "docs/design.md").read_text()
    section = page.split("## Environment variables")[1].split("\n## ")[0]
    of_cmake = ("PYTHON", "TESTS", "SANITIZE", "WATCHDOG", "TESTS_CUDA")  # never in a process
    of_cmake += ("EMULATE", "EMULATE_HEAD_DIMS", "CPU_AVX")
    documented = set(re.findall(r"^\| `(CUATTN_\w+)", section, re.MULTILINE))
    known = {*doctor.ENVIRONMENT, *doctor.OTHER_VARIABLES}
    assert documented - {f"CUATTN_{name}" for name in of_cmake} == known


def cuda_info(code=None, capability="9.0", status="cudaSuccess"):
    gpu = {"id": 0, "name": "made up", "compute_capability": capability, "sms": 1, "code": code}
    return {
        "cuda_archs": "8.0, 9.0a",
        "cuda": {
            "driver": "12.4",
            "runtime": "13.0",
            "status": status,
            "cublas": True,
            "devices": [gpu] if code else [],
        },
    }


@pytest.mark.parametrize(
    ("info", "driver", "visible", "verdict", "told"),
    [
        ({"cuda": None}, False, None, "good", ""),
        ({"cuda": None}, True, None, "wrong", "CUATTN_CUDA=ON pip install"),
        (cuda_info("native"), True, None, "good", ""),
        (cuda_info("ptx", "12.0"), True, None, "note", "CUATTN_CUDA_ARCHS=120 pip install"),
        (cuda_info("unsupported", "8.6"), True, None, "wrong", "CUATTN_CUDA_ARCHS=86 pip"),
        (cuda_info("unsupported", "7.5"), True, None, "wrong", "move arrays to the CPU"),
        (cuda_info(status="cudaErrorNoDevice"), True, "", "wrong", "unset CUDA_VISIBLE_DEVICES"),
        (cuda_info(status="cudaErrorInsufficientDriver"), True, None, "wrong", "nvidia-smi"),
        (cuda_info(status="cudaErrorInsufficientDriver"), False, None, "note", ""),
    ],
)
def test_the_cuda_side_is_judged(info, driver, visible, verdict, told):
    *_, last = doctor.cuda(info, driver, visible)
    assert last.verdict == verdict
    assert told in last.way_out
    assert bool(last.way_out) == bool(told)


def test_array_libraries_are_judged_by_their_versions():
    def library(version):
        return {"version": version, "route": "DLPack"}

    found = {
        "torch": library("2.8.0+cu128"),
        "jax": library("0.5.3"),
        "numpy": library("2.3.1"),
        "cupy": None,
    }
    assert verdicts(doctor.libraries(found)) == {
        "torch": "wrong",
        "jax": "wrong",
        "numpy": "good",
        "cupy": "good",
    }
    (old,) = doctor.libraries({"torch": library("2.9.1")})
    assert (old.verdict, old.way_out) == ("note", "pip install 'torch>=2.10'")
    assert verdicts(doctor.libraries({"torch": library("2.10.0")})) == {"torch": "good"}


def test_a_package_of_another_version_than_pip_installed_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.0.1")
    first, cpu = doctor.installation(cuattn.info())
    assert (first.verdict, cpu.verdict) == ("wrong", "good")
    assert "pip has installed 0.0.1" in first.text


def test_a_wrong_result_on_the_cpu_is_found(monkeypatch):
    monkeypatch.setattr(doctor.cuattn, "attention", lambda q, k, v: q)
    _, cpu = doctor.installation(cuattn.info())
    assert cpu.verdict == "wrong"
