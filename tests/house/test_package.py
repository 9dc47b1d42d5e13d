# SPDX-License-Identifier: Apache-2.0
"""What is installed: the files of the wheel, what the library exports and what it needs."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

import cuattn

PACKAGE = Path(cuattn.__file__).parent
LIBRARY = PACKAGE / "lib" / "libcuattn.so"
# The stable-ABI wheel has none, .ci/wheel says where that of its build lies.
BUILD_LOG = Path(os.environ.get("CUATTN_BUILD_LOG") or Path(cuattn.cmake_dir(), "build.log"))
# From the C library and the compiler's own run-time: on every Linux machine.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


def tool(name: str, *arguments: object) -> str:
    """The output of a binutils program."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout


def core_module() -> Path:
    (module,) = PACKAGE.glob("_core*.so")
    return module


@pytest.mark.parametrize(
    "path",
    [
        "py.typed",
        "_core.pyi",
        "lib/libcuattn.so",
        "lib/cmake/cuattn/cuattnConfig.cmake",
        "lib/cmake/cuattn/cuattnConfigVersion.cmake",
        "lib/cmake/cuattn/cuattnTargets.cmake",
        "include/cuattn/attention.h",
        "include/cuattn/block_pool.h",
        "include/cuattn/kv_cache.h",
        "include/cuattn/c_api.h",
        "include/cuattn/c_api_float8.h",
        "include/cuattn/c_api_fused.h",
        "include/cuattn/c_api_mla.h",
        "include/cuattn/dlpack.h",
        "include/cuattn/device/math.cuh",
    ],
)
def test_package_holds(path):
    assert (PACKAGE / path).is_file()


def test_stub_names_what_the_module_has():
    from cuattn import _core

    stub = (PACKAGE / "_core.pyi").read_text()
    names = {name: value for name, value in vars(_core).items() if not name.startswith("__")}
    assert {"attention", "BlockPool", "CudaError", "OutOfBlocksError"} <= set(names)
    for name, value in names.items():
        word = "class" if isinstance(value, type) else "def"
        assert re.search(rf"^{word} {name}\b", stub, re.MULTILINE), f"{name} is not in _core.pyi"


def test_package_holds_no_symbolic_link():
    assert not [path for path in PACKAGE.rglob("*") if path.is_symlink()]


def test_numpy_is_the_only_requirement():
    required = [r for r in metadata.requires("cuattn") or [] if "extra ==" not in r]
    names = {re.match(r"[\w-]+", r)[0] for r in required}
    assert names - {"nanobind-backend"} == {"numpy"}  # the stable-ABI wheel splits nanobind off


def test_notices_of_what_is_compiled_in_are_there():
    files = [path.name for path in metadata.files("cuattn") if "licenses" in path.parts]
    assert sorted(files) == ["LICENSE", "NOTICE"]
    (notice,) = (path for path in metadata.files("cuattn") if path.name == "NOTICE")
    text = notice.locate().read_text()
    for words in ("NVIDIA Corporation", "Wenzel Jakob", "Thibaut Goetghebuer-Planchon"):
        assert words in text


def test_stable_abi_wheel_is_split_and_has_no_build_log():
    split = not BUILD_LOG.is_relative_to(PACKAGE)
    assert split == core_module().name.endswith(".abi3.so")
    assert split == any(r.startswith("nanobind-backend") for r in metadata.requires("cuattn"))
    assert split != Path(cuattn.cmake_dir(), "build.log").exists()


def test_import_brings_in_no_framework():
    code = "import sys, cuattn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "jax", "cupy", "ml_dtypes", "transformers"} & set(done.stdout.split())


def test_import_works_when_no_gpu_is_visible():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = "import cuattn; cuattn.info()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("binary", [LIBRARY, core_module()], ids=lambda path: path.name)
def test_needs_only_system_libraries(binary):
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", binary)))
    assert "libcuda.so.1" not in needed  # importing must work without a driver
    assert needed - SYSTEM_LIBRARIES <= {"libcuattn.so"}


def test_module_finds_the_library_beside_itself():
    assert "[$ORIGIN/lib]" in tool("readelf", "-d", core_module())


def test_library_exports_only_the_c_abi():
    headers = PACKAGE.glob("include/cuattn/c_api*.h")
    declared = "".join(path.read_text() for path in headers)
    functions = set(re.findall(r"^CUATTN_API\b[^;(]*?(\w+)\(", declared, re.MULTILINE))
    symbols = tool("nm", "-D", "--defined-only", LIBRARY).split("\n")
    exported = {line.split()[-1].split("@")[0] for line in symbols if line}
    assert exported == functions


def test_per_isa_objects_define_no_weak_function():
    """The linker keeps one copy of a weak function: the AVX-512 one would kill older CPUs."""
    text = BUILD_LOG.read_text()
    sections = re.findall(r"^== isa (\S+)\n((?:[^=\n].*\n|\n)*)", text, re.MULTILINE)
    assert {name.removeprefix("cuattn_cpu_") for name, _ in sections} >= {"baseline"}
    for name, weak in sections:
        assert not weak.strip(), f"{name} defines weak symbols:\n{weak}"


@pytest.fixture
def build_backend(monkeypatch):
    """cmake/build_backend.py over a stand-in for scikit-build-core."""
    fake = types.ModuleType("scikit_build_core.build")
    fake.get_requires_for_build_wheel = lambda config_settings=None: ["ninja"]
    fake.get_requires_for_build_editable = fake.get_requires_for_build_wheel
    parent = types.ModuleType("scikit_build_core")
    parent.build = fake
    monkeypatch.setitem(sys.modules, "scikit_build_core", parent)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", fake)
    for name in ("CUATTN_CUDA", "CUATTN_ABI3"):
        monkeypatch.delenv(name, raising=False)
    path = Path(__file__).resolve().parents[2] / "cmake" / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cuda", "nvcc", "driver", "asks"),
    [
        (None, False, True, True),  # AUTO on a machine with a GPU and no toolkit
        (None, False, False, False),  # AUTO without a GPU: build for the CPU, download nothing
        (None, True, True, False),
        ("ON", False, False, True),
        ("ON", True, False, False),
        ("OFF", False, True, False),
    ],
)
def test_build_asks_for_the_toolkit_only_when_needed(
    build_backend, monkeypatch, cuda, nvcc, driver, asks
):
    monkeypatch.setattr(build_backend, "_has_nvcc", lambda: nvcc)
    monkeypatch.setattr(build_backend, "_has_driver", lambda: driver)
    settings = {"cmake.define.CUATTN_CUDA": cuda} if cuda else None
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        required = getattr(build_backend, hook)(settings)
        assert required[0] == "ninja"
        assert any(r.startswith("cuda-toolkit[") for r in required) == asks
    if cuda:  # the environment says the same
        monkeypatch.setenv("CUATTN_CUDA", cuda)
        assert len(build_backend.get_requires_for_build_wheel()) == 1 + asks
