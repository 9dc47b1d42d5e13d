# SPDX-License-Identifier: Apache-2.0
"""PEP 517 back-end: scikit-build-core, plus the CUDA toolkit wheels where a build needs them.

They are 105 MB, so they are asked for only when there is no nvcc and CUDA is wanted: by
CUATTN_CUDA=ON, or by AUTO (the default) on a machine with an NVIDIA driver.
"""

import os
import platform
import shutil
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  (re-exports the hooks)

_TOOLKIT = "cuda-toolkit[nvcc,cccl]==13.0.*"  # runs on every driver from 580 on
_SPLIT_MODE = "nanobind-backend>=1.0"  # at run time, and when the stub generator imports it


def _define(config_settings, name, default):
    value = (config_settings or {}).get(f"cmake.define.{name}") or os.environ.get(name) or default
    return str(value).upper()


def _has_nvcc():
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return (
        bool(os.environ.get("CUDACXX"))
        or shutil.which("nvcc") is not None
        or any(home and Path(home, "bin", "nvcc").exists() for home in homes)
    )


def _has_driver():
    return Path("/proc/driver/nvidia").exists()


def _extra(config_settings):
    extra = []
    wanted = _define(config_settings, "CUATTN_CUDA", "AUTO")
    if wanted == "AUTO":
        wanted = "ON" if _has_driver() else "OFF"
    if wanted in ("ON", "1", "TRUE", "YES") and platform.system() == "Linux" and not _has_nvcc():
        extra.append(_TOOLKIT)
    if _define(config_settings, "CUATTN_ABI3", "OFF") == "ON":
        extra.append(_SPLIT_MODE)
    return extra


def get_requires_for_build_wheel(config_settings=None):
    """Build requirements of a wheel."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_extra(config_settings)]


def get_requires_for_build_editable(config_settings=None):
    """Build requirements of an editable install."""
    return [*_build.get_requires_for_build_editable(config_settings), *_extra(config_settings)]


def dynamic_metadata(settings, project):
    """Add to the requirements at run time of pyproject.toml, for scikit-build-core."""
    split = _define(None, "CUATTN_ABI3", "OFF") == "ON"
    return {"dependencies": [_SPLIT_MODE] if split else []}
