# SPDX-License-Identifier: Apache-2.0
"""Compiles functors for the emulator (docs/emulator.md), in NVRTC's place: by g++, to a library."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = """
namespace emulate {
void set_error(cudaError_t, const std::string& text) {
  std::fprintf(stderr, "%s\\n", text.c_str());
  std::abort();
}
size_t allowed_shared_memory(const void*) { return 163 << 10; }
}
"""
KERNEL = """
extern "C" void {name}_emulated(const cudaLaunchConfig_t* c, void** arguments) {{
  emulate::launch(emulate::Config(c->gridDim, c->blockDim, c->dynamicSmemBytes), {name},
                  {arguments});
}}
"""
FLAGS = (
    *("-shared", "-fPIC", "-std=c++20", "-O1", "-w", "-march=native", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-include", "cuda_runtime.h"),
    "-D__CUDA_ARCH__=800",
    "-D__CUDA_ARCH_LIST__=800",
)


def launches(source: str) -> str:
    """Return what launches each kernel of a source with an array of its arguments."""
    text = LAUNCH
    for name, takes in re.findall(r"\b(cuattn_\w+)\(([^{]*)\) \{", source):
        kinds = [
            one.replace("const __grid_constant__ ", "").rsplit(" ", 1)[0].strip()
            for one in takes.split(",")
        ]
        arguments = [f"*static_cast<{kind}*>(arguments[{i}])" for i, kind in enumerate(kinds)]
        text += KERNEL.format(name=name, arguments=", ".join(arguments))
    return text


def machine_code(source: str, build: Path, into: Path, planted: Path | None = None) -> bytes:
    """Return the path of a library, as the emulated cudaLibraryLoadData takes it.

    Headers in the folder `planted` stand for those of the build.
    """
    sys.path.insert(0, str(ROOT / "emulate"))
    from translate import translate

    path = into / (hashlib.sha256(source.encode()).hexdigest()[:24] + ".cpp")
    head = "#include <cstdio>\n#include <cstdlib>\n#include <string>\n"
    path.write_text(head + translate(source, "functor.cu") + launches(source))
    folders = [] if planted is None else [planted]
    folders += [ROOT / "emulate/include", build / "emulated", build / "emulated/include"]
    library = path.with_suffix(".so")
    parts = [path, ROOT / "emulate/block.cpp"]
    command = ["g++", *FLAGS, *(f"-I{f}" for f in [*folders, ROOT / "include", ROOT])]
    subprocess.run([*command, *map(str, parts), "-o", str(library)], check=True)
    return str(library).encode() + b"\0"
