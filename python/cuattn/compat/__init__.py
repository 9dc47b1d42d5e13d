# SPDX-License-Identifier: Apache-2.0
"""The functions of other attention libraries, by their names and signatures, on cuattn's kernels.

Each library has a module of its own, which `import cuattn` does not load: flash_attn.
"""
