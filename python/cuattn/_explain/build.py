# SPDX-License-Identifier: Apache-2.0
"""What is compiled, and where this package is."""

from __future__ import annotations

import json
import os
from typing import Any

from .. import _core


def kernels() -> list[dict[str, Any]]:
    """List every compiled kernel instance.

    Returns
    -------
    list of dict
        With the keys op, kernel, arch, dtype, head_dim, head_dim_v (the largest the instance
        takes), mask and score; "any" means that the axis is decided at run time.
    """
    return _core.kernels()


def info() -> dict[str, Any]:
    """Describe this build and where it runs.

    Returns
    -------
    dict
        version, source_hash, compiler, cuda_archs, num_kernels, cpu (instruction set, threads) and
        cuda (runtime, driver, devices and how the build serves each), which is None in a build
        without CUDA.
    """
    return json.loads(_core.info_json())


def cmake_dir() -> str:
    """Return the folder of cuattnConfig.cmake, for ``cmake -Dcuattn_DIR=...`` of a C++ project."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, "lib", "cmake", "cuattn")
