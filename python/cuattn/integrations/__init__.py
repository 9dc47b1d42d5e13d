# SPDX-License-Identifier: Apache-2.0
"""cuattn inside other libraries, each in a module of its own that `import cuattn` does not load."""
