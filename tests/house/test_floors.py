# SPDX-License-Identifier: Apache-2.0
"""A line may only look down: #include and import against the floors of docs/design.md."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STD = r"<[a-z_0-9]+>|<(stddef|stdint|pthread|sched|unistd|fcntl|dlfcn|immintrin|sys/[a-z]+)\.h>"
CUDA = r"<(cuda\w*|library_types|mma)\.h>|<cuda/std/\w+>"
F0 = r'"cuattn/(params/)?\w+\.h"'
F1 = r'"cuattn/device/(paged/)?\w+\.cuh"'
PYTHON = r"<Python\.h>|<nanobind/[\w/]+\.h>"
HOST = r'"cuda/host/\w+\.h"'
ROWS = r'"cuda/attention/(products|softmax_rows|float8)\.cuh"'  # of all naive kernels
FUNCTORS = r'"cuda/attention/(simt|sm80/forward)\.cuh"'  # kernels that functors are compiled into
GRADIENTS = r'"cuda/backward/\w+\.cuh"'
INSTANCES = r'"instances\.inc"'  # which cmake/instances.cmake writes into the build folder

# Path (the first match holds), floor, and what a file there may include; own room last. A kernel
# sees its own folder, what all kernels of its op share, and never another kernel.
INCLUDES = [
    (r"include/cuattn/device/", "F1", [CUDA, F1, r'"cuattn/params/\w+\.h"']),
    (r"include/cuattn/", "F0", [STD, r"<dlpack/dlpack\.h>", F0]),
    (r"cuda/host/", "F2", [STD, CUDA, F0, F1, HOST]),
    (r"cuda/attention/sm80/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/attention/sm80/\w+\.cuh"']),
    (r"cuda/attention/sm90/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/attention/sm90/\w+\.cuh"']),
    (r"cuda/attention/functor\.cu", "F2", [STD, CUDA, F0, HOST, FUNCTORS]),
    (r"cuda/attention/", "F2", [STD, CUDA, F0, F1, HOST, ROWS]),
    (
        r"cuda/backward/sm80/",
        "F2",
        [STD, CUDA, F0, F1, HOST, GRADIENTS, r'"cuda/backward/sm80/\w+\.cuh"'],
    ),
    (
        r"cuda/backward/simt/",
        "F2",
        [STD, CUDA, F0, F1, HOST, GRADIENTS, r'"cuda/backward/simt/\w+\.cuh"'],
    ),
    (
        r"cuda/backward/sm90/",
        "F2",
        [STD, CUDA, F0, F1, HOST, GRADIENTS, r'"cuda/backward/sm90/\w+\.cuh"'],
    ),
    (r"cuda/backward/", "F2", [STD, CUDA, F0, F1, HOST, ROWS, GRADIENTS]),
    (r"cuda/paged/sm90/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/paged/sm90/\w+\.cuh"']),
    (r"cuda/paged/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/paged/sm80/\w+\.cuh"']),
    (r"cuda/cache/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/cache/\w+\.cuh"']),
    (r"cuda/fused/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/fused/\w+\.cuh"']),
    (r"cuda/mla/sm90/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/mla/sm90/\w+\.cuh"']),
    (r"cuda/mla/sm80/", "F2", [STD, CUDA, F0, F1, HOST, r'"cuda/mla/sm80/\w+\.cuh"']),
    (r"cuda/(merge|mla)/", "F2", [STD, CUDA, F0, F1, HOST]),
    (r"cuda/backend/", "F3", [STD, CUDA, F0, HOST, INSTANCES, r'"cuda/backend/\w+\.h"']),
    (r"cpu/", "F3", [STD, F0, r'"(cpu/)?\w+\.(h|inc)"']),
    (r"src/instances\.cpp", "F4", [STD, F0, INSTANCES]),
    (r"src/", "F4", [STD, F0, r'"src/(\w+/)?\w+\.h"']),
    (r"bindings/", "F5", [STD, F0, PYTHON, r'"bindings/(\w+/)?\w+\.h"']),
]

# Path (the first match holds) and its modules beyond the standard library, numpy and cuattn. They
# are imported inside functions: test_package.py holds that `import cuattn` brings none of them in.
PEERS = {"torch", "jax", "cupy", "flash_attn", "flash_attn_interface", "flashinfer", "ml_dtypes"}
IMPORTS = [
    (r"python/cuattn/torch/", {"torch"}),
    (r"python/cuattn/jax/", {"jax"}),
    (r"python/cuattn/parallel/", {"torch"}),
    (r"python/cuattn/integrations/", {"torch", "transformers", "diffusers", "jax"}),
    (r"python/cuattn/compat/", {"torch"}),
    (r"python/cuattn/(_bench/|_cli/place)", PEERS),
    (r"python/cuattn/_types\.py", {"typing_extensions"}),  # for type checkers, which bring it
    (r"python/cuattn/_cli/plot\.py", {"matplotlib"}),
    (r"python/cuattn/kv_cache\.py", {"ml_dtypes"}),
    (r"python/cuattn/_cli/(demo|minilm)\.py", {"safetensors", "tokenizers"}),
    (r"python/cuattn/_ranges\.py", {"nvtx"}),
    (r"python/cuattn/_memory\.py", {"ml_dtypes"}),
    (r"python/cuattn/", set()),
]


def files(*patterns: str) -> list[str]:
    """The project's files, as paths from its root."""
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found)


ROOMS = ["include/cuattn", "cuda", "cpu", "src", "bindings"]
SOURCES = files(*(f"{room}/**/*.{kind}" for room in ROOMS for kind in ("h", "cuh", "cpp", "cu")))
MODULES = files("python/cuattn/**/*.py")


@pytest.mark.parametrize("path", SOURCES)
def test_source_includes_only_lower_floors(path):
    _, floor, allowed = next(row for row in INCLUDES if re.match(row[0], path))
    rule = re.compile("|".join(allowed))
    offending = []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*([<"][^>"]+[>"])', line)
        if include and not rule.fullmatch(include[1]):
            offending.append(f"{path}:{number}: {line.strip()}")
    assert not offending, f"{floor} may not include:\n" + "\n".join(offending)


@pytest.mark.parametrize("path", files("include/cuattn/device/**/*.cuh"))
def test_device_header_calls_no_host_library(path):
    text = re.sub(r"//.*", "", (ROOT / path).read_text())
    assert not re.findall(r"(?<!cuda::)\bstd::\w+|\bprintf\s*\(|\bassert\s*\(", text)


@pytest.mark.parametrize("path", MODULES)
def test_module_imports_only_lower_floors(path):
    allowed = next(modules for pattern, modules in IMPORTS if re.match(pattern, path))
    allowed = {*allowed, *sys.stdlib_module_names, "numpy", "cuattn"}
    offending = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        else:
            continue
        offending += [f"{path}:{node.lineno}: {n}" for n in names if n.split(".")[0] not in allowed]
    assert not offending, "may not import:\n" + "\n".join(offending)


def circles(uses: dict[str, set[str]]) -> list[str]:
    """The ways from a place back to itself, each said once."""
    found: list[str] = []
    done: set[str] = set()

    def follow(place: str, way: list[str]) -> None:
        if place in way:
            found.append(" -> ".join([*way[way.index(place) :], place]))
        elif place not in done:
            for used in sorted(uses.get(place, set()) - {place}):
                follow(used, [*way, place])
            done.add(place)

    for place in sorted(uses):
        follow(place, [])
    return found


def included(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a source and a source that it includes, by path."""
    for path in paths:
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (ROOT / path).read_text(), re.M):
            for target in (name, f"include/{name}", str(Path(path).parent / name)):
                if target in SOURCES:
                    yield path, target
                    break


def imported(path: str) -> Iterator[str]:
    """The modules of this package that a module imports as it is loaded, by path."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        home = Path(path).parents[node.level - 1] if node.level else Path("python")
        home = home.joinpath(*(node.module or "").split("."))
        for name in {alias.name for alias in node.names} - {"_core"}:  # which is compiled
            for target in (home / f"{name}.py", home / name / "__init__.py"):
                if str(target) in MODULES:
                    yield str(target)
                    break
            else:
                whole = (home.with_suffix(".py"), home / "__init__.py")
                yield from (str(target) for target in whole if str(target) in MODULES)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c", "b"}, "c": {"a"}, "d": {"a"}}) == ["a -> b -> c -> a"]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}) == []
    assert "python/cuattn/_call.py" in set(imported("python/cuattn/attention.py"))
    assert "python/cuattn/attention.py" in set(imported("python/cuattn/torch/ops.py"))


def test_no_module_imports_one_that_imports_it():
    assert not circles({path: set(imported(path)) for path in MODULES})


@pytest.mark.parametrize("room", ROOMS)
def test_no_source_and_no_folder_includes_one_that_includes_it(room):
    pairs = [p for p in included(SOURCES) if all(path.startswith(f"{room}/") for path in p)]
    for place in (str, lambda path: str(Path(path).parent)):
        uses: dict[str, set[str]] = {}
        for path, target in pairs:
            uses.setdefault(place(path), set()).add(place(target))
        assert not circles(uses)


def compile_alone(compiler: str, standard: str, header: str) -> str:
    """The compiler's complaints about a file that includes nothing but the header."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    language = {"c++": "c++", "cc": "c"}[compiler]
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", "include"]
    done = subprocess.run(
        [compiler, *flags, "-x", language, "-"],
        input=f'#include "{header}"\n',
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stderr


@pytest.mark.parametrize("path", files("include/cuattn/**/*.h"))
def test_public_header_compiles_alone(path):
    assert compile_alone("c++", "c++17", path.removeprefix("include/")) == ""


def test_c_api_is_c():
    for name in ("c_api", "c_api_float8", "c_api_fused", "c_api_mla"):
        assert compile_alone("cc", "c11", f"cuattn/{name}.h") == ""


def test_generated_headers_are_what_their_program_writes():
    program = runpy.run_path(str(ROOT / "cmake/generate_wgmma.py"))
    assert program["DEVICE"] == ROOT / "include/cuattn/device"
    for name in program["FILES"]:
        text = (program["DEVICE"] / name).read_text()
        assert text == program["header"](name), "run cmake/generate_wgmma.py"
