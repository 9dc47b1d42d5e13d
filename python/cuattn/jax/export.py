# SPDX-License-Identifier: Apache-2.0
"""What jax.export has to be told of cuattn. Next: call.py."""

from __future__ import annotations

from .. import _core
from .call import register


def export_targets() -> tuple[str, ...]:
    """Return the names of cuattn's custom calls, which jax.export takes when they are allowed.

    Calling it also makes them known to XLA, which the process has to do that runs a program which
    another one exported.

    Returns
    -------
    tuple of str
        For ``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in ...]``.
        An exported program runs under the same version of cuattn; no other is promised. A call that
        lacks what this version reads is refused when it runs, and is to be exported again.
    """
    register()
    return tuple(sorted({name for names in _core.xla_handlers().values() for name in names}))
