# SPDX-License-Identifier: Apache-2.0
"""Decode over a context whose blocks are dealt to ranks in turn, with one exchange.

Every rank attends with all heads over the keys it has; results and their lse go to the ranks that
want them in one message, and are merged there in order of ranks, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cuattn

from .._kv_shapes import BLOCK_SIZE_AXIS
from .._tracing import keep_out_of_graphs
from .check import Said, agree
from .exchange import exchange
from .plan import shape_words
from .team import Team, gather_into, team_of

if TYPE_CHECKING:
    from .._types import KvLayout

CACHE, SCALES = ("k_cache", "v_cache", "block_tables"), ("k_scale", "v_scale")


def local_lens(context_lens: Tensor, *, rank: int, size: int, interleave: int) -> Tensor:
    """Count the tokens of each context that lie on a rank.

    Tokens are dealt to ranks in turn, `interleave` at a time: token t lies on rank
    ``t // interleave % size``, as number ``t // (interleave * size) * interleave + t % interleave``
    of its own.

    Parameters
    ----------
    context_lens : int32 tensor, [num_seqs]
        Of the whole contexts.
    rank, size : int
        The rank, of so many.
    interleave : int
        Tokens of a turn, a multiple of the block size.

    Returns
    -------
    int32 tensor, [num_seqs]
    """
    turn = interleave * size
    full = torch.div(context_lens, turn, rounding_mode="floor") * interleave
    own = (context_lens % turn - rank * interleave).clamp(0, interleave)
    return (full + own).to(torch.int32)


def local_slots(
    positions: Tensor,
    block_tables: Tensor,
    *,
    rank: int,
    size: int,
    block_size: int,
    interleave: int | None = None,
) -> Tensor:
    """Say where a rank writes new tokens: their slots for `reshape_and_cache`, -1 for others'.

    Parameters
    ----------
    positions : int tensor, [num_seqs]
        The place of a new token in each context.
    block_tables : int32 tensor, [num_seqs, max_blocks_per_seq]
        The blocks of this rank.
    rank, size : int
        The rank, of so many.
    block_size : int
        Tokens of a block.
    interleave : int, optional
        Tokens of a turn; None is block_size.

    Returns
    -------
    int64 tensor, [num_seqs]
    """
    turn = interleave or block_size
    place = positions.long()
    mine = torch.div(place, turn, rounding_mode="floor") % size == rank
    local = torch.div(place, turn * size, rounding_mode="floor") * turn + place % turn
    column = torch.div(local, block_size, rounding_mode="floor").where(mine, 0)
    block = block_tables.long().gather(1, column[:, None])[:, 0]
    return (block * block_size + local % block_size).where(mine, -1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    group: Any = None,
    interleave: int | None = None,
    reduce: str = "heads",
    kv_layout: KvLayout = "nhd",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    partial_dtype: str = "float32",
    check: bool | None = None,
) -> Tensor:
    """Attend with the newest token of each sequence over a context that lies on several ranks.

    All ranks call it together. Token t of a context lies on rank ``t // interleave % size``.

    Parameters
    ----------
    q : tensor, [num_seqs, num_heads_q, head_dim]
        Queries of all heads, the same on all ranks.
    k_cache, v_cache : tensor
        Blocks of this rank, as `cuattn.paged_attention` takes them.
    block_tables : int32 tensor, [num_seqs, max_blocks_per_seq]
        The blocks of this rank: column j holds its tokens from ``j * block_size`` on.
    context_lens : int32 tensor, [num_seqs]
        Tokens of the whole contexts, the newest included: the same on all ranks.
    group : torch.distributed.ProcessGroup, optional
        None is the default group.
    interleave : int, optional
        Tokens that a rank has in turn, a multiple of the block size; None is the block size.
    reduce : {"heads", "all"}
        "heads": each rank gets its share of the heads, as the output projection of a tensor-
        parallel layer takes it. "all": every rank gets all, the same bits.
    kv_layout, scale, softcap, k_scale, v_scale
        As in `cuattn.paged_attention`.
    sinks : float32 tensor, [num_heads_q], optional
        The same on all ranks.
    partial_dtype : {"float32", "input"}
        What is merged; "input" is rounded to q's dtype first.
    check : bool, optional
        As in `attention`.

    Returns
    -------
    out : tensor, [num_seqs, num_heads_q / size or num_heads_q, head_dim]
        Of q's dtype.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, RuntimeError
        As in `attention`.

    References
    ----------
    PagedAttention, arXiv:2309.06180.
    """
    return run(locals())


def run(given: dict[str, Any]) -> Tensor:
    """Check a call on all ranks, and run it."""
    team = given["team"] = team_of("parallel.paged_attention", given["group"])
    q, context_lens, sinks = (given[name] for name in ("q", "context_lens", "sinks"))
    plans: list[tuple[int, torch.dtype]] = []

    def contract() -> Said:
        plans.append(read(given))
        names = ("reduce", "kv_layout", "scale", "softcap", "partial_dtype")
        values = {
            "q": (tuple(q.shape), q.dtype, q.device.type),
            "interleave": plans[0][0],
            "context_lens": shape_words(context_lens),
            "sinks": shape_words(sinks),
            **{name: given[name] for name in names},
        }
        return Said("parallel.paged_attention", values)

    agree("parallel.paged_attention", team, given["check"], contract)
    turn, wide = plans[0]
    lens = local_lens(context_lens, rank=team.rank, size=team.size, interleave=turn)
    part = torch.empty(q.shape, dtype=wide, device=q.device)
    options = {name: given[name] for name in ("kv_layout", "scale", "softcap", *SCALES)}
    k_cache, v_cache, block_tables = (given[name] for name in CACHE)
    _, lse = cuattn.paged_attention(
        q, k_cache, v_cache, block_tables, lens, **options,
        sinks=sinks if team.rank == 0 else None, causal=False, return_lse=True, out=part,
    )  # fmt: skip
    message = torch.cat([part.float(), lse.unsqueeze(-1)], -1)  # [num_seqs, heads, head_dim + 1]
    parts = spread(team, message, given["reduce"])
    outs, lses = parts[..., :-1].contiguous(), parts[..., -1].contiguous()
    out, _ = cuattn.merge_states(outs, lses, layout="nhd")
    return out.to(q.dtype)


def spread(team: Team, message: Tensor, reduce: str) -> Tensor:
    """Return the parts of all ranks, of all heads or of those that are this rank's."""
    if reduce == "all":
        box = message.new_empty(team.size * len(message), *message.shape[1:])
        gather_into(box, message, team.group)
        return box.view(team.size, *message.shape)
    sent = list(message.chunk(team.size, 1))
    mine = sent[team.rank]
    found = exchange(team, sent, [mine.numel()] * team.size)
    return torch.stack([x.view(mine.shape) for x in found])


def read(given: dict[str, Any]) -> tuple[int, torch.dtype]:
    """Check a call as this rank sees it: tokens of a turn, dtype of the parts."""
    function, team, q = "parallel.paged_attention", given["team"], given["q"]
    if not isinstance(q, Tensor) or q.ndim != 3:
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(
            f"{function}: q must be a tensor [num_seqs, num_heads_q, head_dim], got {got}; several "
            "queries a sequence go by parallel.attention_varlen"
        )
    if given["reduce"] not in ("heads", "all"):
        raise ValueError(f"{function}: reduce must be 'heads' or 'all', got {given['reduce']!r}")
    if given["partial_dtype"] not in ("float32", "input"):
        raise ValueError(
            f"{function}: partial_dtype must be 'float32' or 'input', got "
            f"{given['partial_dtype']!r}"
        )
    if given["reduce"] == "heads" and q.shape[1] % team.size != 0:
        raise ValueError(
            f"{function}: q must have a multiple of {team.size} heads to share them out, got "
            f"{q.shape[1]}; pass reduce='all'"
        )
    wide = torch.float32 if given["partial_dtype"] == "float32" else q.dtype
    options = ("kv_layout", "scale", "softcap", "sinks", *SCALES)
    arrays = [given[name] for name in (*CACHE, "context_lens")]
    cuattn.explain("paged_attention", q, *arrays, **{name: given[name] for name in options})
    block_size = arrays[0].shape[BLOCK_SIZE_AXIS[given["kv_layout"]]]
    turn = block_size if given["interleave"] is None else given["interleave"]
    if turn < 1 or turn % block_size != 0:
        raise ValueError(
            f"{function}: interleave must be a multiple of the block size {block_size}, got {turn}"
        )
    return turn, wide


keep_out_of_graphs(globals(), "run")
