# SPDX-License-Identifier: Apache-2.0
"""cuattn as an attention implementation of Hugging Face transformers.

Importing this module changes nothing; `register` adds the name "cuattn" to transformers' tables of
attention functions and of mask functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention
from ..torch.sdpa_arguments import STEP, pad, readable
from . import transformers_masks as masks

NAME = "cuattn"
OLDEST, TOO_NEW = (5, 17), (6, 0)  # the tests pass with 5.17 and with 5.24

# What transformers hands to an attention function and cuattn does not do, and the way out.
REFUSED = {
    "output_attentions": "no kernel writes the probabilities; use attn_implementation='eager'",
    "head_mask": "no kernel scales heads; use attn_implementation='eager'",
    "cache": "continuous batching is not wired up; use generate(), or attn_implementation='sdpa'",
    "sinks": "sinks of each query are not read; use attn_implementation='eager'",
    "indices": "sparse selections are not read; use attn_implementation='eager'",
    "block_indices": "sparse selections are not read; use attn_implementation='eager'",
}


def register() -> None:
    """Make ``attn_implementation="cuattn"`` known to transformers; a second call changes nothing.

    A mask is registered beside the function, or transformers would drop a batch's padding.

    Raises
    ------
    ImportError
        transformers is missing, too old or too new; the message says which version is wanted.
    """
    wanted = f"transformers>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}"
    try:
        import transformers
    except ImportError as missing:
        raise ImportError(
            f"register: transformers is not installed; pip install '{wanted}'"
        ) from missing
    found = version_of(transformers.__version__)
    if not OLDEST <= found < TOO_NEW:
        too = "too old" if found < OLDEST else "newer than what cuattn knows"
        raise ImportError(
            f"register: transformers must be >={OLDEST[0]}.{OLDEST[1]} and <{TOO_NEW[0]}, got "
            f"{transformers.__version__}, which is {too}; pip install '{wanted}'"
        )
    from transformers.masking_utils import AttentionMaskInterface

    transformers.AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, masks.mask)


def version_of(text: str) -> tuple[int, int]:
    """Read the first two numbers of a version: "5.24.0.dev0" is (5, 24)."""
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa_attention_forward does, softcap and sinks included.

    Parameters
    ----------
    module : torch.nn.Module
        The layer, whose `is_causal` counts where the argument is None.
    query, key, value : tensor, [batch, num_heads, seqlen, head_dim]
        key and value may have fewer heads than query, value another head_dim. A head_dim that is no
        multiple of 8, and rows that no kernel reads, cost copies. A batch of 1 stands for all.
    attention_mask : tensor, optional
        bool (True keeps the key) from the registered mask function, or the user's own, added. It
        holds the sliding window too. One that says no more than padding and a window becomes
        `kv_start`, `seqused_k` and `window`. None is causal for more than one query of a causal
        layer, counted from the first key as sdpa does, else full.
    dropout : float
        Share of the probabilities that are dropped.
    scaling : float, optional
        Factor of the scores; None is ``1 / sqrt(head_dim)``.
    is_causal : bool, optional
        Counts where attention_mask is None.
    position_bias : tensor, optional
        Added to the scaled scores.
    softcap : float, optional
        As in `cuattn.attention`.
    s_aux : tensor, [num_heads], optional
        The sinks, one logit per head.
    **kwargs
        What else transformers passes: `sliding_window` is in the mask already, the rest is of no
        use here, and a value for an argument of `REFUSED` raises.

    Returns
    -------
    (tensor, None)
        [batch, seqlen, num_heads, head_dim_v], contiguous; there are no attention weights.

    Raises
    ------
    NotImplementedError
        An argument that cuattn cannot honour, by transformers' name.
    """
    for name, way_out in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"attn_implementation='cuattn': {name}: {way_out}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    queries, keys = query.shape[2], key.shape[2]
    causal = attention_mask is None and bool(is_causal) and queries > 1
    sight = masks.noted(attention_mask, queries, keys)
    excess = max(queries - keys, 0) if causal else 0  # sdpa counts from the top left
    # An empty static cache: the queries are the first ones, and nothing lies behind them yet.
    used = sight.used if sight else queries if causal and keys > queries else keys
    if used < keys:
        key, value = key[:, :, :used], value[:, :, :used]
        position_bias = None if position_bias is None else position_bias[..., :used]
    options: dict[str, Any] = {
        "causal": causal and not excess,
        "window": (-1, excess) if excess else (-1, -1),
        "scale": query.shape[-1] ** -0.5 if scaling is None and query.shape[-1] % STEP else scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
        "bias": position_bias if sight else joined(attention_mask, position_bias),
        **(sight.options if sight else {}),
    }
    head_dim_v = value.shape[-1]
    batch = max(x.shape[0] for x in (query, key, value))  # 1 of one of them: for all, as in sdpa
    query, key, value = (
        readable(pad(x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x).transpose(1, 2))
        for x in (query, key, value)
    )
    try:
        out = attention(query, key, value, dropout_p=dropout, **options)
    except NotImplementedError as refusal:
        if dropout:
            raise NotImplementedError(
                f"attn_implementation='cuattn': dropout={dropout} goes through no kernel here "
                f"({refusal}); set attention_dropout=0 in the model's config, or use "
                "attn_implementation='sdpa' for this training"
            ) from refusal
        raise
    out = out[..., :head_dim_v] if head_dim_v % STEP else out
    return out.contiguous(), None


def joined(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Put mask and position bias into the one bias of cuattn; what a bool mask hides has -inf."""
    if position_bias is None or attention_mask is None:
        return attention_mask if position_bias is None else position_bias
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, -torch.inf)
    return position_bias + attention_mask
