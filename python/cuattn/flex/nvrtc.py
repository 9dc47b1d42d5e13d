# SPDX-License-Identifier: Apache-2.0
"""NVRTC, NVIDIA's compiler as a library: found at run time, called by ctypes.

It needs no toolkit and no GPU. Headers come with the package. Next: functors.py (the cache).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

MAJOR = 13  # whose machine code the drivers run that cuattn is built for
NAME = f"libnvrtc.so.{MAJOR}"
WAY_OUT = (
    "pip install nvidia-cuda-nvrtc, or set CUATTN_NVRTC_PATH to the library; masks that are "
    "options or one interval of keys a row need none"
)
# Its own cache would keep a second copy of what functors.py keeps, without a word of ptxas.
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
    "--no-cache",
)


class CompileError(RuntimeError):
    """NVRTC refused a source, or is not there."""


def candidates() -> list[str]:
    """List where the library may lie, best first."""
    given = os.environ.get("CUATTN_NVRTC_PATH")
    if given:
        path = Path(given)
        return [str(path / NAME if path.is_dir() else path)]
    folders = [Path(p) / "nvidia" / f"cu{MAJOR}" / "lib" for p in sys.path]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders += [Path(home) / "lib64" for home in (*homes, "/usr/local/cuda") if home]
    return [*(str(f / NAME) for f in folders if (f / NAME).exists()), NAME]


def opened(path: str) -> ctypes.CDLL:
    """Load the library at a path, behind the part of it that it would not find beside itself."""
    for part in sorted(Path(path).parent.glob(f"libnvrtc-builtins.so.{MAJOR}*")):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


class Nvrtc:
    """The library, and its version."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(self, status: int, log: str = "") -> None:
        """Raise what a status says."""
        if status:
            text = self.library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"flex_attention: NVRTC {self.version} says {text}\n{log}")

    def read(self, name: str, program: Any) -> bytes:
        """Return the log or the machine code of a program."""
        size = ctypes.c_size_t()
        self.check(getattr(self.library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
        memory = ctypes.create_string_buffer(max(size.value, 1))
        self.check(getattr(self.library, f"nvrtcGet{name}")(program, memory))
        return memory.raw[: size.value]

    def compile(self, source: str, arch: str, folders: list[Path]) -> tuple[bytes, str]:
        """Return the machine code of a source for an architecture ("sm_90"), and what ptxas says.

        Raises
        ------
        CompileError
            If NVRTC refuses it; with its log.
        """
        program = ctypes.c_void_p()
        options = [f"--gpu-architecture={arch}", *OPTIONS, *(f"-I{folder}" for folder in folders)]
        texts = (ctypes.c_char_p * len(options))(*(text.encode() for text in options))
        create = self.library.nvrtcCreateProgram
        name = b"functor.cu"
        self.check(create(ctypes.byref(program), source.encode(), name, 0, None, None))
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), texts)
            log = self.read("ProgramLog", program).decode(errors="replace").strip("\0\n ")
            self.check(status, log)
            return self.read("CUBIN", program), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.lru_cache(maxsize=1)
def nvrtc() -> Nvrtc:
    """Return the library.

    Raises
    ------
    CompileError
        If there is none, or one of another major version.
    """
    tried = []
    try:
        found = Nvrtc(ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD))  # another package has loaded it
    except OSError:
        found = None
    for path in candidates() if found is None or os.environ.get("CUATTN_NVRTC_PATH") else ():
        try:
            found = Nvrtc(opened(path))
            break
        except (OSError, AttributeError) as error:
            tried.append(f"{path} ({error})")
            found = None
    if found is None:
        raise CompileError(
            f"flex_attention: masks and scores of your own are compiled by {NAME}, which was not "
            f"found: {'; '.join(tried)}; {WAY_OUT}"
        )
    if found.version[0] != MAJOR:
        raise CompileError(
            f"flex_attention: NVRTC must be of CUDA {MAJOR}, got {found.version[0]}."
            f"{found.version[1]}; {WAY_OUT}"
        )
    return found
