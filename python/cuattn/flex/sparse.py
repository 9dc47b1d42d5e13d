# SPDX-License-Identifier: Apache-2.0
"""sparse_attention: attention over the blocks of keys that lists or an array name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._arrays import Array, ArrayT
from .attention import dense_shape, flex_attention
from .block_mask import BlockMask
from .evaluate import on_host

NAME = "sparse_attention"


def sparse_attention(
    q: ArrayT,
    k: Array,
    v: Array,
    blocks: BlockMask | Any,
    *,
    block_size: int | tuple[int, int] = 128,
    mask_mod: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Attend over given blocks of queries and keys; all other blocks are skipped.

    As `flex_attention` with ``block_mask=``. Blocks that serve many calls are better made once, by
    `BlockMask.from_csr`, `from_dense` or `from_torch`.

    Parameters
    ----------
    q, k, v : array
        [batch, seqlen, heads, dim], or as `layout` says.
    blocks : bool array, (starts, columns), or BlockMask
        An array [batch or 1, num_heads_q or 1, query blocks, key blocks], or its last two axes,
        keeps a block where it is true. Two arrays of whole numbers are lists, the same for all
        sequences and heads: query block i sees the key blocks columns[starts[i]:starts[i + 1]],
        which rise. A `BlockMask` of this library or of torch. The host reads them.
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 64; a BlockMask has its own.
    mask_mod : function, optional
        Hides more within the blocks, as in `flex_attention`.
    **options
        Those of `attention`: causal, window, bias, sinks, return_lse and so on. A key is seen if
        all of them leave it; a query without any has a result of zeros.

    Returns
    -------
    array, or (array, lse)
        As `attention` returns.

    Raises
    ------
    ValueError
        If blocks do not fit the lengths, or lists are out of order, out of range, or have a block
        twice; what `flex_attention` raises.

    Examples
    --------
    Each of 4 blocks of 64 queries sees the block of the same keys, and the first:

    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 256, 2, 64), np.float32)
    >>> lists = np.array([0, 1, 3, 5, 7]), np.array([0, 0, 1, 0, 2, 0, 3])
    >>> cuattn.sparse_attention(q, k, v, lists, block_size=64).shape
    (1, 256, 2, 64)
    """
    mask = blocks if is_block_mask(blocks) else made(q, k, blocks, block_size, options)
    return flex_attention(q, k, v, mask_mod=mask_mod, block_mask=mask, **options)


def is_block_mask(blocks: Any) -> bool:
    """Whether it is a block mask already, ours or torch's."""
    return isinstance(blocks, BlockMask) or hasattr(blocks, "kv_indices")


def made(q: Any, k: Any, blocks: Any, block_size: Any, options: dict[str, Any]) -> BlockMask:
    """Make a block mask for the lengths of a call."""
    if options.get("cu_seqlens_q") is not None:
        raise ValueError(
            f"{NAME}: cu_seqlens_q must not be given, as blocks count from the start of a "
            "sequence; pass a padded batch, or flex_attention a mask_mod"
        )
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            f"{NAME}: q and k must have 4 axes, got shapes {shapes[0]} and {shapes[1]}; pass "
            "[batch, seqlen, heads, dim], or say layout='bhsd'"
        )
    batch, num_heads, *lengths = dense_shape(shapes, options)
    if isinstance(blocks, tuple) and len(blocks) == 2:
        starts, columns = (on_host(x if hasattr(x, "dtype") else np.asarray(x)) for x in blocks)
        return BlockMask.from_csr(starts, columns, *lengths, block_size=block_size)
    if not hasattr(blocks, "__dlpack__"):
        raise TypeError(
            f"{NAME}: blocks must be a bool array, (starts, columns) or a BlockMask, got "
            f"{type(blocks).__name__}; BlockMask.from_dense says what an array holds"
        )
    return BlockMask.from_dense(
        on_host(blocks), *lengths, block_size=block_size, batch=batch, num_heads=num_heads
    )
