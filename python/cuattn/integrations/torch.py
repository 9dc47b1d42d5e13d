# SPDX-License-Identifier: Apache-2.0
"""cuattn as a flash attention implementation of torch.

Importing this module changes nothing; `register` adds the name "cuattn" to torch's table, and
`torch.nn.attention.activate_flash_attention_impl("cuattn")` puts cuattn's kernels under the aten
ops of torch's flash backend, until `restore_flash_attention_impl()`. What they refuse goes to
torch's own kernels. Next: torch_kernels.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import cuattn

from .torch_kernels import KERNELS, Refused

NAME = "cuattn"
WANTED = "torch>=2.11"
NEEDED = (
    ("nn.attention", "register_flash_attention_impl"),
    ("nn.attention", "activate_flash_attention_impl"),
    ("nn.attention", "restore_flash_attention_impl"),
    ("library", "get_kernel"),
)

told: set[str] = set()


def register() -> None:
    """Make "cuattn" known to `torch.nn.attention.activate_flash_attention_impl`.

    Nothing runs by cuattn before that is called. A second call changes nothing.

    Raises
    ------
    ImportError
        torch is too old; the message says which version is wanted.
    """
    check_version()
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def check_version() -> None:
    """Refuse a torch without the interface, by what it lacks."""
    import torch.nn.attention

    places = {"nn.attention": torch.nn.attention, "library": torch.library}
    missing = [
        f"torch.{place}.{name}" for place, name in NEEDED if not hasattr(places[place], name)
    ]
    if missing:
        raise ImportError(
            f"register: torch must be {WANTED[5:]}, got {torch.__version__}, which lacks "
            f"{', '.join(missing)}; pip install '{WANTED}'"
        )


class Handle:
    """What torch keeps while cuattn is active; `remove` gives the ops back to torch's kernels."""

    def __init__(self, library: Any):
        self.library = library

    def remove(self) -> None:
        """Take cuattn's kernels away; a second call changes nothing."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Put cuattn's kernels under torch's flash ops; torch calls it.

    Parameters
    ----------
    dispatch_key : str
        "CUDA"; tests use "CPU", for which torch has no kernel of its own.

    Raises
    ------
    RuntimeError
        This build of cuattn has no CUDA.
    """
    if dispatch_key == "CUDA" and not cuattn.info()["cuda_archs"]:
        raise RuntimeError(
            "activate_flash_attention_impl: cuattn was built without CUDA, and torch's flash ops "
            "are CUDA ops; `cuattn doctor` says what to install"
        )
    library = torch.library.Library("aten", "IMPL")
    for name, run in KERNELS.items():
        if hasattr(torch.ops.aten, name):
            kernel = make_kernel(name, run, own_kernel(name, dispatch_key))
            library.impl(name, kernel, dispatch_key, with_keyset=True)
    return Handle(library)


def own_kernel(name: str, dispatch_key: str) -> Any:
    """Return torch's kernel of an op, to call it behind ours; None where there is none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", dispatch_key)
    except RuntimeError:
        return None


def make_kernel(name: str, run: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """Make the kernel of an op: cuattn's, and torch's for what cuattn refuses."""

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        try:
            with torch.no_grad():  # autograd is above, and cuattn would ask for it again
                return run(*arguments, **options)
        except (Refused, NotImplementedError, ValueError) as refusal:
            if own is None:
                raise
            tell(name, refusal)
        return own.call_boxed(keyset, *arguments, **options)

    return kernel


def tell(name: str, refusal: Exception) -> None:
    """Say once for each rule why torch's own kernel runs."""
    rule = str(refusal) if isinstance(refusal, Refused) else f"{name}: {type(refusal).__name__}"
    if rule in told:
        return
    told.add(rule)
    warnings.warn(
        f"cuattn refuses a call of aten::{name}, and torch's own kernel runs it (said once): "
        f"{refusal}",
        stacklevel=3,
    )
