# SPDX-License-Identifier: Apache-2.0
"""How many bytes the keys and values of a model take."""

from __future__ import annotations

from typing import Any

from ._kv_shapes import ITEM_BYTES, dtype_name, whole


def kv_cache_bytes(
    num_tokens: int,
    *,
    num_layers: int,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    latent_dim: int | None = None,
    rope_dim: int = 0,
    dtype: Any = "float16",
    num_seqs: int = 1,
    block_size: int = 1,
) -> int:
    """Count the bytes of the KV cache of `num_seqs` sequences of `num_tokens` tokens each.

    With heads, num_layers x tokens x num_heads_kv x (head_dim + head_dim_v) x item size. The number
    of query heads does not enter: MHA has as many key heads as query heads, GQA fewer, MQA one.
    With a latent (MLA), num_layers x tokens x (latent_dim + rope_dim) x item size: keys and values
    are made from one and the same latent.

    Parameters
    ----------
    num_tokens : int
        Of each sequence.
    num_layers : int
    num_heads_kv, head_dim, head_dim_v : int, optional
        Key heads and their sizes; head_dim_v defaults to head_dim.
    latent_dim, rope_dim : int, optional
        Sizes of the latent and of the key part with positions beside it (DeepSeek: 512 and 64).
    dtype : str or dtype
        float32, float16, bfloat16 or float8_e4m3fn.
    num_seqs : int
    block_size : int
        Tokens in a block: each sequence takes whole blocks.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        A negative size, or both heads and a latent, or neither.

    Examples
    --------
    >>> kv_cache_bytes(2048, num_layers=32, num_heads_kv=32, head_dim=128)
    1073741824
    >>> kv_cache_bytes(2048, num_layers=32, num_heads_kv=8, head_dim=128)
    268435456
    >>> kv_cache_bytes(2048, num_layers=32, latent_dim=512, rope_dim=64)
    75497472
    """
    op = "kv_cache_bytes"
    has_heads = num_heads_kv is not None and head_dim is not None
    some_heads = any(size is not None for size in (num_heads_kv, head_dim, head_dim_v))
    if has_heads == (latent_dim is not None) or (some_heads and not has_heads):
        raise ValueError(
            f"{op}: give either num_heads_kv and head_dim or latent_dim, got num_heads_kv = "
            f"{num_heads_kv}, head_dim = {head_dim}, latent_dim = {latent_dim}; MHA, GQA and MQA "
            "have heads, MLA has a latent"
        )
    if rope_dim and has_heads:
        raise ValueError(
            f"{op}: rope_dim must be 0 beside heads, got {rope_dim}; it is a part of head_dim there"
        )
    if has_heads:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"num_heads_kv": num_heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    else:
        sizes = {"latent_dim": latent_dim}
    sizes |= {"num_tokens": num_tokens, "num_layers": num_layers, "rope_dim": rope_dim}
    sizes |= {"num_seqs": num_seqs, "block_size": block_size}
    n = {name: whole(op, name, size) for name, size in sizes.items()}
    for name, size in n.items():
        least = 1 if name == "block_size" else 0
        if size < least:
            raise ValueError(f"{op}: {name} must be >= {least}, got {size}; give the real number")
    if has_heads:
        numbers = n["num_heads_kv"] * (n["head_dim"] + n["head_dim_v"])
    else:
        numbers = n["latent_dim"] + n["rope_dim"]
    slots = n["num_seqs"] * -(-n["num_tokens"] // n["block_size"]) * n["block_size"]
    return slots * n["num_layers"] * numbers * ITEM_BYTES[dtype_name(op, dtype)]
