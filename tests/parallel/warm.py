# SPDX-License-Identifier: Apache-2.0
"""What the ranks need, imported once in the process that they are forked from."""

import cuattn.parallel  # noqa: F401
