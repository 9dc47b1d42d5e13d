# SPDX-License-Identifier: Apache-2.0
"""Compiles functors for the emulator (docs/emulator.md), in NVRTC's place: by g++, to a library."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = """
namespace emulate {{
void set_error(cudaError_t, const std::string& text) {{
  std::fprintf(stderr, "%s\\n", text.c_str());
  std::abort();
}}
size_t allowed_shared_memory(const void*) {{ return 163 << 10; }}
}}
extern "C" void cuattn_functor_emulated(const cudaLaunchConfig_t* c, void** arguments) {{
  emulate::launch(emulate::Config(c->gridDim, c->blockDim, c->dynamicSmemBytes), cuattn_functor,
                  {arguments});
}}
"""
ARGUMENTS = (
    "*static_cast<cuattn::FunctorParams*>(arguments[0])",
    "*static_cast<cuattn::Sm80Schedule*>(arguments[1])",
)
FLAGS = (
    *("-shared", "-fPIC", "-std=c++20", "-O1", "-w", "-march=native", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-include", "cuda_runtime.h"),
    "-D__CUDA_ARCH__=800",
    "-D__CUDA_ARCH_LIST__=800",
)


def machine_code(source: str, build: Path, into: Path) -> bytes:
    """Return the path of a library, as the emulated cudaLibraryLoadData takes it."""
    sys.path.insert(0, str(ROOT / "emulate"))
    from translate import translate

    is_sm80 = "ForwardSm80" in source
    launch = LAUNCH.format(arguments=", ".join(ARGUMENTS[: 2 if is_sm80 else 1]))
    path = into / (hashlib.sha256(source.encode()).hexdigest()[:24] + ".cpp")
    head = "#include <cstdio>\n#include <cstdlib>\n#include <string>\n"
    path.write_text(head + translate(source, "functor.cu") + launch)
    folders = [ROOT / "emulate/include", build / "emulated", build / "emulated/include"]
    library = path.with_suffix(".so")
    parts = [path, ROOT / "emulate/block.cpp"]
    command = ["g++", *FLAGS, *(f"-I{f}" for f in [*folders, ROOT / "include", ROOT])]
    subprocess.run([*command, *map(str, parts), "-o", str(library)], check=True)
    return str(library).encode() + b"\0"
