# SPDX-License-Identifier: Apache-2.0
"""cuattn as the native attention of Hugging Face diffusers.

Importing this module changes nothing; `enable` puts cuattn's kernels in the place of torch's
scaled_dot_product_attention behind diffusers' backend "native", which is its default. What they
have no kernel for, or refuse, goes to diffusers' own function.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor

from ..torch import scaled_dot_product_attention
from .transformers import version_of

OLDEST, TOO_NEW = (0, 42), (0, 43)  # the table of backends is private there, and changes

told: set[str] = set()


class Handle:
    """What `enable` returns; also a context manager, which removes it at the end."""

    def __init__(self, table: dict[Any, Any], name: Any):
        self.table, self.name, self.own = table, name, table[name]

    def remove(self) -> None:
        """Give the backend back to diffusers' own function; a second call changes nothing."""
        if getattr(self.table[self.name], "handle", None) is self:
            self.table[self.name] = self.own

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def enable() -> Handle:
    """Let models that go by diffusers' backend "native" run on cuattn.

    These are the models whose attention is `dispatch_attention_fn`, such as Flux, Qwen-Image and
    Wan, unless `set_attention_backend` gave them another. Where cuattn is enabled already, a
    handle comes back that removes nothing.

    Returns
    -------
    Handle
        With `remove()`; it may stand in a `with`.

    Raises
    ------
    ImportError
        diffusers is missing, too old or too new; the message says which version is wanted.
    """
    wanted = f"diffusers>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"
    try:
        import diffusers
    except ImportError as missing:
        raise ImportError(
            f"enable: diffusers is not installed; pip install '{wanted}'"
        ) from missing
    if not OLDEST <= version_of(diffusers.__version__) < TOO_NEW:
        raise ImportError(
            f"enable: diffusers must be >={OLDEST[0]}.{OLDEST[1]} and <{TOO_NEW[0]}.{TOO_NEW[1]}, "
            f"got {diffusers.__version__}; pip install '{wanted}'"
        )
    from diffusers.models import attention_dispatch as theirs

    table = theirs._AttentionBackendRegistry._backends
    handle = Handle(table, theirs.AttentionBackendName.NATIVE)
    if not hasattr(handle.own, "handle"):
        table[handle.name] = native(handle)
    return handle


def native(handle: Handle) -> Any:
    """Make the function that stands in the table: the arguments are diffusers'."""
    own = handle.own

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Attend; query, key and value are [batch, seqlen, num_heads, head_dim]."""
        words: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if return_lse or _parallel_config is not None:
            words |= {"return_lse": return_lse, "_parallel_config": _parallel_config}
            return own(query, key, value, attn_mask, **words)
        mask = attn_mask
        if mask is not None and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # a row for each sequence, as diffusers reads it
        try:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, **words)
        except (NotImplementedError, ValueError) as refusal:  # torch takes more, or says why not
            tell_once(str(refusal))
            return own(query, key, value, attn_mask, **words)
        return out.transpose(1, 2)

    vars(attend)["handle"] = handle
    return attend


def tell_once(refusal: str) -> None:
    """Warn of a call that goes to diffusers' own function, once for each reason."""
    rule = re.sub(r"\d+", "", refusal)  # of whatever extents
    if rule not in told:
        told.add(rule)
        warnings.warn(f"cuattn: diffusers' own attention runs: {refusal}", stacklevel=4)
