# SPDX-License-Identifier: Apache-2.0
"""The emulator (docs/emulator.md): kernels that break a rule are caught, mistakes planted in the
sm80 kernel show, and the suite's own cases pass on a library whose CUDA device is the emulator.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import builds

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
CXX = os.environ.get("CXX") or shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="the emulator needs g++")


def planting(find, old, new, count=-1):
    """Return a change of translated sources: in the file that `find` returns, `old` to `new`."""

    def change(into):
        path = find(into)
        text = path.read_text()
        assert old in text, f"{path} has no {old!r} any more"
        path.write_text(text.replace(old, new, count) if old else text)

    return change


def run(*command, **environment):
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, **environment},
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


FLAGS = ["-std=c++20", "-Og", "-w", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing",
         "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
         "-D__CUDA_ARCH__=800", "-D__CUDA_ARCH_LIST__=800", "-Iemulate/include"]  # fmt: skip
# What most sources include is compiled once for all programs.
HEADERS = ("cuda_runtime.h", "algorithm", "cmath", "cstdio", "cstring", "string", "vector")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The translated sources; objects of the emulator and of what sources throw; common headers."""
    folder = tmp_path_factory.mktemp("emulator")
    # Once for all programs: it takes as long as to compile one of them.
    translated = folder / "translated"
    rooms = ["cuda", "include/cuattn/device", "tests/emulated"]
    run(sys.executable, "emulate/translate.py", ROOT, translated, *rooms)
    common = folder / "common.h"
    common.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
    run(CXX, *FLAGS, "-x", "c++-header", common, "-o", f"{common}.gch")
    objects = []
    for source in ("emulate/block.cpp", "emulate/runtime.cpp", "src/error.cpp"):
        objects.append(folder / f"{Path(source).stem}.o")
        run(CXX, *FLAGS, "-include", common, "-Iinclude", "-I.", "-c", source, "-o", objects[-1])
    return translated, objects, common


def build(folder, emulator, name, change=lambda into: None):
    """Change a copy of the translated sources, and compile tests/emulated/NAME.cu with them."""
    translated, objects, common = emulator
    shutil.copytree(translated, folder, dirs_exist_ok=True)
    change(folder)
    program = folder / name
    source = folder / f"tests/emulated/{name}.cu.cpp"
    includes = ["-include", common, f"-I{folder}", f"-I{folder}/include", "-Iinclude", "-I."]
    run(CXX, *FLAGS, *includes, source, *objects, "-o", program)
    return program


@pytest.fixture(scope="module")
def rules(tmp_path_factory, emulator):
    return build(tmp_path_factory.mktemp("rules"), emulator, "rules")


@pytest.mark.parametrize("name", ["reverse", "reverse_twice", "copy"])
def test_a_kernel_that_breaks_no_rule_runs(rules, name):
    sums = {"copy": sum(4 * (i % 32) for i in range(128))}
    assert run(rules, name) == f"sum {sums.get(name, sum(range(128)))}\n"


BROKEN = {
    "no_barrier": "sum nan",
    "no_second_barrier": "sum",
    "no_wait": "sum nan",
    "part": "the lanes of a warp part: some are at",
    "outside_of_mask": "__shfl_sync by a lane that is not in its mask",
    "half_a_warp_multiplies": "mma.m16n8k16 without all 32 lanes of the warp",
    "wait_for_nobody": "deadlock: threads 0-31 wait at bar.sync at tests/emulated/rules.cu:",
    "read_beyond": "ldmatrix.x4 beyond the block's shared memory",
    "read_unaligned": "ld.shared.v4.b32 at an address that is not aligned to its size",
    "load_unaligned": "a load or store that is not aligned to the size of its type",
    "no_memory": "an access of memory that is not there",
    "write_beyond": "bytes beyond dynamic shared memory were written, 0 behind its end",
    "unasked_memory": "more dynamic shared memory than cudaFuncSetAttribute has allowed",
    "too_many_threads": "a grid or block that no device takes",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_caught(rules, name):
    said = run(rules, name)
    assert BROKEN[name] in said.replace("-nan", "nan")
    assert said != f"sum {sum(range(128))}\n"
    if said.startswith("cudaErrorLaunchFailure"):
        assert "; block (0, 0, 0)" in said
        assert f" of void {{anonymous}}::{name}(float*)" in said


FORWARD = "cuda/attention/sm80/forward.cuh"
MISTAKES = {  # what is replaced, by what, and at which of its places
    "none": ("", "", 0),
    "no_wait": ("device::cp_async_wait<0>();", "", 0),
    "no_barrier": ("__syncthreads();", "", 0),
    "no_barrier_before_v": ("__syncthreads();", "", 1),
    "no_syncwarp_in_epilogue": ("__syncwarp();", "", 1),
    "halves_of_k_exchanged": ("k_frag[0], k_frag[1]", "k_frag[1], k_frag[0]", 0),
    "rows_of_a_quad_repeated": ("(left[2], left[3])", "(left[0], left[1])", 0),
    "wrong_pair_of_v": ("v_frag[2], v_frag[3]", "v_frag[0], v_frag[1]", 0),
    "a_key_too_many": ("work.keys.used, p.head_dim)", "work.keys.used - 1, p.head_dim)", 0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_sm80_kernel_shows(tmp_path, emulator, name):
    old, new, which = MISTAKES[name]

    def plant(into):
        parts = (into / FORWARD).read_text().split(old) if old else []
        assert not old or len(parts) > which + 1, f"{FORWARD} has no {old!r} any more"
        if old:
            left, right = old.join(parts[: which + 1]), old.join(parts[which + 1 :])
            (into / FORWARD).write_text(left + new + right)

    said = run(build(tmp_path, emulator, "forward", plant))
    error = float(said.split()[1])
    assert (error < 2e-3) if name == "none" else (math.isnan(error) or error > 1e-2), said


PACKED_MISTAKES = {  # of the loader of paged/sm80, or of the lengths
    "none": ("sm80/loader.cuh", "", ""),
    "blocks_side_by_side": ("sm80/loader.cuh", "existing(id) * strides.block", "existing(id) * 0"),
    "all_rows_as_keys": (
        "apart.cu",
        "p.max_seqlen, p.total).used",
        "p.max_seqlen, p.total).used + 1",
    ),
}


@pytest.mark.parametrize("name", PACKED_MISTAKES)
def test_packed_rows_are_pages_of_the_sm80_kernel(tmp_path, emulator, name):
    file, old, new = PACKED_MISTAKES[name]

    def find(into):
        paths = (into / "cuda/paged").rglob(f"*{Path(file).name}*")
        return next(path for path in paths if file in path.as_posix())

    plant = planting(find, old, new)
    error = float(run(build(tmp_path, emulator, "packed", plant)).split()[1])
    assert (error < 2e-3) if name == "none" else (math.isnan(error) or error > 1e-2), error


LATENT_MISTAKES = {  # of mla/sm80 over packed latents and lists: what is replaced, by what
    "none": ("packed", "", ""),
    "scale_of_the_first_part": ("packed", "column / PackedLatent::kScaled * 4", "0"),
    "scale_of_the_first_key": ("packed", "(0xffffffffu, own, key)", "(0xffffffffu, own, 0)"),
    "halves_exchanged": ("packed", "half == 0 ? c.x : c.z", "half != 0 ? c.x : c.z"),
    "not_unpacked": ("decode", "if constexpr (kPacked) Packed::", "if (false) Packed::"),
    "holes_seen": ("decode", "(there >> (8 * n + i % 2) & 1) != 0", "true"),
    "holes_of_the_other_tile": ("decode", "there[0] = there[1];", ""),
    "the_first_tile_twice": ("decode", "task.begin + (stage + 1) * kKeys", "task.begin"),
    "not_waited_for": ("decode", "cp_async_wait<kStages - 1>", "cp_async_wait<kStages>"),
}


@pytest.mark.parametrize("name", LATENT_MISTAKES)
def test_packed_latents_and_lists_of_tokens(tmp_path, emulator, name):
    file, old, new = LATENT_MISTAKES[name]
    plant = planting(lambda into: into / f"cuda/mla/sm80/{file}.cuh", old, new, 1)
    said = run(build(tmp_path, emulator, "latents", plant)).split()[1]
    error = float(said)
    assert (error < 6e-3) if name == "none" else (math.isnan(error) or error > 2e-2), error


APART_MISTAKES = {  # of paged/apart.cu
    "none": ("", ""),
    "empty_as_single": ("0xffffffffu, queries == 1)", "0xffffffffu, queries <= 1)"),
    "threads_in_front": (">> lane << lane", ""),
    "keys_for_all": ("queries == 1 ? keys : 0;", "keys;"),
}


@pytest.mark.parametrize("name", APART_MISTAKES)
def test_single_queries_are_parted_from_the_others(tmp_path, emulator, name):
    plant = planting(lambda into: into / "cuda/paged/apart.cu.cpp", *APART_MISTAKES[name])
    wrong = int(run(build(tmp_path, emulator, "apart", plant)).split()[1])
    assert (wrong == 0) if name == "none" else wrong > 0


FLOAT8_MISTAKES = {  # in which file, what is replaced, by what
    "none": ("float8", "", ""),
    "block_of_the_query": ("products", "first_key(p, b) + key)", "row)"),
    "channels_side_by_side": ("float8", "channel * p.v_channel_stride", "channel"),
}


@pytest.mark.parametrize("name", FLOAT8_MISTAKES)
def test_naive_over_float8_and_mistakes_in_it(tmp_path, emulator, name):
    file, old, new = FLOAT8_MISTAKES[name]
    plant = planting(lambda into: into / f"cuda/attention/{file}.cuh", old, new, 1)
    error = float(run(build(tmp_path, emulator, "float8", plant)).split()[1])
    assert (error < 1e-5) if name == "none" else (math.isnan(error) or error > 1e-2)


@pytest.fixture(scope="module")
def library():
    """build/emulated, where `import cuattn` has the emulated device; kept for the next run."""
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=PATH) is None:
            pytest.fail(f"{tool} is not installed; install the extra 'test'")
    nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
    folder = ROOT / "build" / "emulated"
    with builds.one_at_a_time(folder):
        run("cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, "-DCUATTN_EMULATE=ON",
            "-DCUATTN_PYTHON=ON", f"-Dnanobind_DIR={nanobind}",
            *builds.FLAGS,  # of what is not emulated
            f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip
        run("cmake", "--build", folder)
    return os.pathsep.join([str(folder), str(ROOT / "tests" / "emulated" / "modules")])


SELECTIONS = {  # files, and what of them
    "attention/test_prefill.py attention/test_prefill_values.py": "test_value_head or "
    "test_rows_without or (test_a_number_of and not tiled) or test_bias_may or test_nan_prop or "
    "255_257-causal",
    "paged/test_paged.py": "test_layouts_and or test_head_dims or test_groups or test_forced or "
    "test_with_a_plan",
    "backward/test_two_pass_backward.py": "test_what_ or test_float32 or test_dead or test_our or "
    "test_a_seq or (test_head_dims and bfloat16 and (causal or bias))",
    "backward/test_backward.py": "naive and (test_head_dims or test_dead or test_a_bias or "
    "test_what_is)",
    "merge/test_merge.py attention/test_splits.py": "not test_any_number or "
    "chunk-0 or lengths-0 or sinks-0",
    "fused": "not test_rope_gradients",  # its arrays are of torch and JAX
    "mla/test_mla_indices.py mla/test_mla_packed.py": "(test_lists_against and auto) or test_blocks"
    "_of_one or test_a_list_does or test_rows_are or test_decode_has",
    "float8/test_quantize_shapes.py float8/test_float8_attention.py": "(test_every_option "
    "and not naive-0) or test_int8 or auto-16 or auto-64 or auto-112 or auto-128 or auto-192 or "
    "(auto-256 and not test_the_mean)",
    "float8/test_float8_pages.py": "test_the_same_bits or test_values_of or test_single_queries or "
    "(test_layouts and seqused) or test_no_key or (test_float8_queries and parts and mixed)",
    "float8/test_float8_queries.py": "test_the_bits or test_codes or test_with_a or test_the_work "
    "or (test_every and auto) or (test_ragged and head)",
    "cache/test_cache_rows.py cache/test_cache_blocks.py cache/test_cache_newest.py "
    "paged/test_paged_prefill.py": "test_newest_keys or (test_newest_tokens_go and 5) or test_"
    "blocks_are_copied or (test_sequences_come and not float16) or test_quantising_scales or "
    "(single_queries and default)",
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_the_suite_on_the_emulated_device(library, name):
    files = [f"tests/{file}" for file in name.split()]
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files,
               "-k", f"emulated and ({SELECTIONS[name]})", PYTHONPATH=library)  # fmt: skip
    passed = int(said.rsplit(" passed", 1)[0].split()[-1])
    assert passed > 20, said[-500:]
