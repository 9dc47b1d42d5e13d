# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU record: families of kernels, their tests, and the sources that reach them.

A part stays recorded until a source that can reach it changes. What an object was compiled from is
asked of the build (ninja -t deps). A file counts for the parts of the objects that include it; a
file of which this table says nothing, or that no object includes, counts for every part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PYTHON_STAGES = ("pytest", "limits")
STAGES = (*PYTHON_STAGES, "cpp", *SANITIZERS, "watchdog")


@dataclasses.dataclass(frozen=True)
class Part:
    """Objects are named by the path of their source, generated ones as instances/NAME.cu."""

    about: str
    stages: tuple[str, ...]
    objects: tuple[str, ...] = ()
    python: tuple[str, ...] = ()  # files of tests/; () in the part that reaches all: what is left
    calls: tuple[str, ...] = ()  # parts whose kernels the Python tests call besides
    cases: str = ""  # cuattn_tests --filter; "" in the part that reaches all: what is left
    no_cases: str = ""  # --exclude
    reaches_all: bool = False


NATIVE = ("pytest", "cpp", *SANITIZERS)
SM90 = ("instances/forward_sm90_*", "cuda/attention/sm90/clear_counter.cu", "cuda/merge/states.cu")
SM90 += ("src/attention/sm90_tile.cpp",)
PORTABLE = ("instances/forward_sm80_*", "instances/forward_simt_*", "instances/forward_tiled_*")
PORTABLE += ("cuda/attention/naive.cu", "cuda/attention/cublas.cu", "cuda/merge/states.cu")
BACKWARD = ("instances/backward_*", "cuda/backward/*.cu", "src/attention/backward*.cpp")
BACKWARD += ("src/abi/backward.cpp", "cpu/backward*.cpp")
PAGED = ("instances/paged_*", "cuda/paged/*.cu", "src/paged/*.cpp", "src/abi/paged.cpp")
PAGED += ("cpu/paged.cpp", "src/cache/checks.cpp")
PAGED += ("instances/mla_*", "cuda/mla/*.cu", "src/mla/*.cpp", "src/abi/mla.cpp", "cpu/project.cpp")
GATHER = ("cuda/cache/gather.cu", "src/cache/rows.cpp", "src/cache/checks.cpp", "cpu/cache.cpp")
CORE_TESTS = ("test_device_math.cu", "test_device_tiles.cu", "test_cuda.cpp", "test_core.cpp")
CORE_TESTS += ("test_errors.cpp", "test_cache_rows.cpp", "test_cache_blocks.cpp")
CORE_TESTS += ("test_cache_errors.cpp", "test_merge.cpp", "test_paged.cpp", "test_struct_size.cpp")
CORE_TESTS += ("faults.cu", "test_around.cpp", "test_prepared.cpp")
FUSED = ("cuda/fused/*.cu", "src/fused/*.cpp", "src/abi/fused.cpp", "cpu/fused*.cpp")
FUSED += ("cpu/sampling.cpp", "cpu/quantize.cpp")
FLEX = ("cuda/attention/functor.cu", "cuda/attention/sm90/functor.cu", "src/attention/flex.cpp")
FLEX += ("cpu/flex.cpp",)
PAGED_TESTS = ("paged.cpp", "test_page_maps.cu")

PARTS = {
    "forward-sm90": Part(
        "`attention` on Hopper's own instructions",
        stages=(*NATIVE, "watchdog"),
        objects=(*SM90, "test_attention.cpp", "perf.cpp", "test_*_sm90.cu", "test_tensor_maps.cu"),
        python=(
            "test_prefill_sm90.py",
            "test_splits_sm90.py",
            "test_float8_sm90.py",
            "test_float8_rows.py",
        ),
        calls=("forward-portable",),
        cases="instance/sm90/,sm90_",
        no_cases="cuda_,page_maps,decode_maps",
    ),
    "forward-portable": Part(
        "`attention` by sm80, simt, tiled, naive and cublas",
        stages=NATIVE,
        objects=(*PORTABLE, "test_attention.cpp", "perf.cpp"),
        python=(
            "test_prefill.py",
            "test_prefill_values.py",
            "test_properties.py",
            "test_splits.py",
        ),
        calls=("forward-sm90",),
        cases="instance/",
        no_cases="/sm90/",
    ),
    "backward": Part(
        "`attention_backward`, and dropout of `attention`",
        stages=(*NATIVE, "watchdog"),
        objects=(*BACKWARD, "test_backward_*.cpp", "stress.cu"),
        python=(
            "test_backward.py",
            "test_two_pass_backward.py",
            "test_fused_backward.py",
            "test_short_backward.py",
            "test_dropout.py",
        ),
        calls=("forward-portable",),
        cases="cuda_backward_",
    ),
    "over-pages": Part(
        "`attention_varlen` over pages",
        stages=(*NATIVE, "watchdog"),
        objects=(*SM90, *PORTABLE, *PAGED, *GATHER, *PAGED_TESTS, "test_paged_cuda.cpp"),
        python=("test_paged_prefill.py", "test_paged_prefill_errors.py"),
        calls=("core",),  # through PagedKVCache
        cases="cuda_prefill_over_pages_,page_maps",
    ),
    "paged": Part(
        "`paged_attention`, V1, V2, plans",
        stages=(*NATIVE, "watchdog"),
        objects=(*PAGED, *PAGED_TESTS, "test_p*_cuda.cpp"),
        python=(
            "test_paged.py",
            "test_paged_versions.py",
            "test_paged_explain.py",
            "test_paged_errors.py",
            "test_mla_decode.py",
            "test_mla_indices.py",
            "test_mla_packed.py",
            "test_mla_attention.py",
            "test_mla_errors.py",
        ),
        cases="cuda_paged_s,cuda_paged_versions_,decode_maps",
    ),
    "cache": Part(
        "cache writes, gathers, copies and swaps",
        stages=NATIVE,
        objects=(*GATHER, "cuda/cache/*.cu", "src/cache/blocks.cpp", "test_cache_cuda.cpp"),
        python=("test_cache_rows.py", "test_cache_blocks.py", "test_cache_cuda.py"),
        cases="cuda_cache_,cuda_blocks_",
    ),
    "core": Part(
        "merging, device primitives, frameworks, streams, graphs, threads and all other tests",
        stages=NATIVE,
        objects=(
            "src/merge/merge.cpp",
            "cpu/merge.cpp",
            "src/cache/pool.cpp",
            *FUSED,
            *FLEX,
            "*block_pool.cpp",
            *CORE_TESTS,
        ),
        reaches_all=True,
    ),
    "large": Part(
        "sizes beyond 2^16 and 2^31",
        stages=("limits",),
        python=("test_limits*.py",),
        reaches_all=True,
    ),
}

LIBRARY = ("include", "cuda", "src", "cpu", "cmake", "CMakeLists.txt", "pyproject.toml")
# Only tests of the part `core` come by these.
ONLY_CORE = ("python/cuattn/_bench/*", "python/cuattn/_cli/*", "python/cuattn/__main__.py")
ONLY_CORE += ("python/cuattn/flex/*", "python/cuattn/parallel/*")


def matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def files(names: Iterable[str], root: Path = ROOT) -> list[Path]:
    found: list[Path] = []
    for name in names:
        path = root / name
        found += [path] if path.is_file() else path.rglob("*")
    return [f for f in found if f.is_file() and "__pycache__" not in f.parts]


# Folders of tests that find the same without a GPU, and take minutes: the emulator runs kernels on
# the CPU, and the house reads the tree; .ci/run has them. But the samples of pages run on the GPU.
NO_GPU, ON_GPU = ("emulated", "house"), ("test_docs.py",)


# What reaches a part ------------------------------------------------------------------------------


def objects_of(build: Path) -> Iterator[tuple[str, list[Path]]]:
    """Each object of a Ninja build by its source, and the files it was compiled from."""
    command = ["ninja", "-C", str(build), "-t", "deps"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for block in text.split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        if found := re.match(r"(?:.*/)?CMakeFiles/[^/]+\.dir/(.*)\.o: .*\(VALID\)$", head):
            yield found[1], [(build / line.strip()).resolve() for line in lines]


def in_tree(file: Path, root: Path = ROOT) -> str | None:
    """The path in the repository of a file that a build read; installed headers are copies."""
    if "include/cuattn/" in file.as_posix():
        copied = "include/cuattn/" + file.as_posix().rpartition("include/cuattn/")[2]
        return copied if (root / copied).exists() else None
    if not file.is_relative_to(root) or file.is_relative_to(root / "build"):
        return None
    return file.relative_to(root).as_posix()


def scan(builds: Iterable[Path], root: Path = ROOT) -> dict[str, set[str]]:
    """The parts that each file reaches by the objects of these builds."""
    reach: dict[str, set[str]] = {}
    for build in builds:
        for source, needed in objects_of(build):
            parts = {name for name, part in PARTS.items() if matches(source, part.objects)}
            for file in needed:
                if path := in_tree(file, root):
                    reach.setdefault(path, set()).update(parts or PARTS)
    if not reach:
        raise RuntimeError("the builds do not say what their objects were compiled from")
    return reach


def selective(reach: dict[str, set[str]]) -> dict[str, set[str]]:
    """Only the files that do not count for every part."""
    every = {name for name, part in PARTS.items() if not part.reaches_all}
    return {path: parts for path, parts in sorted(reach.items()) if not parts >= every}


def reaches(path: str, parts: Iterable[str], reach: dict[str, set[str]]) -> bool:
    return path not in reach or any(PARTS[p].reaches_all or p in reach[path] for p in parts)


# Tests --------------------------------------------------------------------------------------------


def python_tests(name: str, root: Path = ROOT) -> list[Path]:
    tests = sorted((root / "tests").rglob("test_*.py"))
    if PARTS[name].python:
        return [test for test in tests if matches(test.name, PARTS[name].python)]
    taken = [pattern for part in PARTS.values() for pattern in part.python]
    taken.append("test_cpp.py")  # the stage cpp runs what it builds
    left = [test for test in tests if not matches(test.name, taken)]
    return [test for test in left if test.parent.name not in NO_GPU or test.name in ON_GPU]


def imported(file: Path) -> set[str]:
    """All words of its import lines, module names among them."""
    lines = re.findall(r"^\s*(?:from|import)\s.*", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {word for line in lines for word in re.findall(r"\w+", line)}


def with_imports(tests: Iterable[Path], root: Path = ROOT) -> set[Path]:
    """Tests, conftest.py, and the modules beside them that they import."""
    modules = {file.stem: file for file in (root / "tests").rglob("*.py")}
    found: set[Path] = set()
    waiting = [*tests, root / "tests" / "conftest.py"]
    while waiting:
        file = waiting.pop()
        if file not in found and file.exists():
            found.add(file)
            waiting += [modules[name] for name in imported(file) if name in modules]
    return found


def cases(name: str) -> tuple[str, str]:
    """The --filter and --exclude of a part's cases; the part that reaches all has what is left."""
    part = PARTS[name]
    if part.cases:
        return part.cases, part.no_cases
    return "", ",".join(other.cases for other in PARTS.values() if other.cases)


def stage_arguments(name: str, stage: str, root: Path = ROOT) -> list[str]:
    """What a stage is told of a part: Python files, or which cases of cuattn_tests."""
    if stage in PYTHON_STAGES:
        return [test.relative_to(root).as_posix() for test in python_tests(name, root)]
    wanted, unwanted = cases(name)
    both = zip(("--filter", "--exclude"), (wanted, unwanted), strict=True)
    return [word for option, text in both if text for word in (option, text)]


# Hashes -------------------------------------------------------------------------------------------


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def blob(file: Path) -> str:
    return git_blob(file.read_bytes())


def sources(name: str, stage: str, reach: dict[str, set[str]], root: Path = ROOT) -> list[Path]:
    """The files that can change what a stage of a part finds."""
    part = PARTS[name]
    python = stage in PYTHON_STAGES
    parts = [name, *part.calls] if python else [name]
    found = files((*LIBRARY, "bindings") if python else (*LIBRARY, "tests/cpp"), root)
    chosen = {f for f in found if reaches(f.relative_to(root).as_posix(), parts, reach)}
    if python:
        chosen |= with_imports(python_tests(name, root), root)
        for file in (root / "python").rglob("*.py"):
            if name == "core" or not matches(file.relative_to(root).as_posix(), ONLY_CORE):
                chosen.add(file)
    return sorted(chosen)


def hashes(name: str, reach: dict[str, set[str]], root: Path = ROOT) -> dict[str, str]:
    """Of each stage of a part. Of contents alone: a file may move. Of the cases too."""
    found: dict[tuple[str, ...], str] = {}
    for stage in PARTS[name].stages:
        which = () if stage in PYTHON_STAGES else tuple(stage_arguments(name, stage, root))
        if which not in found:
            blobs = sorted(git_blob(f.read_bytes()) for f in sources(name, stage, reach, root))
            found[which] = git_blob("\n".join([*which, *blobs]).encode())
        found[stage] = found[which]
    return {stage: found[stage] for stage in PARTS[name].stages}
