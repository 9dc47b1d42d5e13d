# SPDX-License-Identifier: Apache-2.0
"""Decode over a context whose blocks are dealt to ranks in turn, with one exchange.

Every rank attends with all heads over the keys it has; results and their lse go to the ranks that
want them in one message, and are merged there in order of ranks, in float32. Where ranks read each
other's memory (peers.py) the message stays where it was written, and whoever merges reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import cuattn

from .._kv_shapes import BLOCK_SIZE_AXIS
from .._tracing import keep_out_of_graphs
from .check import Said, agree, no_answer
from .plan import KEPT, TAKEN, shape_words
from .team import NoAnswer, Team, gather_into, team_of

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
    left = context_lens - rank * interleave if rank else context_lens
    own = (left % turn).clamp_(max=interleave)
    full = torch.div(left, turn, rounding_mode="floor")
    return torch.add(own, full, alpha=interleave).to(torch.int32)


MOST_PLACES = 1 << 22  # of tokens of a rank that are kept in a list
_lists: dict[tuple[Any, ...], Tensor] = {}  # by what they depend on; graphs may read each for ever


def list_places(count: int, how: tuple[int, int, int], device: torch.device) -> Tensor | None:
    """List where the first tokens of a rank stand in the whole, `count` or more.

    `how`: rank, size, turn. None where they are too many, or a graph is captured, in whose memory a
    new list would be.
    """
    count = 1 << max(count - 1, 1023).bit_length()  # contexts grow
    found = _lists.get(key := (count, how, device))
    if found is None and count <= MOST_PLACES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        rank, size, turn = how
        own = torch.arange(count, device="cpu")
        places = (own // turn * size + rank) * turn + own % turn
        with torch.inference_mode(False):  # it is used in other modes, too
            # A copy from the host, which waits: other streams read it.
            found = places.clamp(max=2**31 - 1).to(torch.int32).to(device)
        _lists[key] = found
    return found


def lens_of_rank(given: dict[str, Any], turn: int) -> Tensor:
    """Count local lengths by one kernel: how many of the rank's tokens stand before the end."""
    team, lens, tables = given["team"], given["context_lens"], given["block_tables"]
    block_size = given["k_cache"].shape[BLOCK_SIZE_AXIS[given["kv_layout"]]]
    how = team.rank, team.size, turn
    places = list_places(tables.shape[1] * block_size, how, lens.device)
    if places is None:
        return local_lens(lens, rank=team.rank, size=team.size, interleave=turn)
    return torch.bucketize(lens, places, out_int32=True)


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
    given = locals()
    return run(given) if torch.compiler.is_compiling() else run_planned(given)


def run(given: dict[str, Any]) -> Tensor:
    """Run a call; a graph of torch.compile breaks here."""
    return run_planned(given)


def run_planned(given: dict[str, Any]) -> Tensor:
    """Check a call on all ranks, and run it."""
    team = given["team"] = team_of("parallel.paged_attention", given["group"])
    try:
        team.find_out_about_peers(given["q"])
    except NoAnswer as error:
        when = "all looked whether they share a host"
        raise no_answer("parallel.paged_attention", when, error) from error
    q = given["q"]
    plans: list[tuple[int, torch.dtype, Said]] = []

    def contract() -> Said:
        plans.append(kept_plan(given))
        return plans[0][2]

    agree("parallel.paged_attention", team, given["check"], contract)
    turn, wide, _ = plans[0]
    lens = lens_of_rank(given, turn)
    takes_all = given["reduce"] == "all"
    num_seqs, num_heads, head_dim = q.shape
    share = Share(num_seqs, num_heads, head_dim, 1 if takes_all else team.size)
    peers = peers_for(team, q.device, share)
    if peers is None:
        message = q.new_empty(share.ranks, share.elements, dtype=torch.float32)
        write_part(given, lens, wide, list(zip(*share.views(message), strict=True)))
        parts = share.views(exchanged(team, message, takes_all))
        return merged(parts, q.dtype)
    mine = [share.places(peers, team.rank, row) for row in range(share.ranks)]
    peers.enter()
    try:
        try:
            write_part(given, lens, wide, mine)
        except BaseException:  # the others go on
            for _, part_lse in mine:
                part_lse.fill_(torch.nan)
            raise
        finally:
            peers.meet()
        row = 0 if takes_all else team.rank
        found = [share.places(peers, rank, row) for rank in range(team.size)]
        if team.size == 2:  # are read where they lie; more are copied
            return merged((*found[0], *found[1]), q.dtype)
        return merged([torch.stack(x) for x in zip(*found, strict=True)], q.dtype)
    finally:
        peers.leave()


def write_part(
    given: dict[str, Any], lens: Tensor, wide: torch.dtype, places: list[tuple[Tensor, Tensor]]
) -> None:
    """Attend to the keys that are here: results and their lse, each where a rank will want it."""
    q, team = given["q"], given["team"]
    is_packed = len(places) == 1 and wide == torch.float32  # as it is written
    if is_packed:
        part, lse = places[0]
    else:
        part = torch.empty(q.shape, dtype=wide, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    options = {name: given[name] for name in ("kv_layout", "scale", "softcap", *SCALES)}
    k_cache, v_cache, block_tables = (given[name] for name in CACHE)
    cuattn.paged_attention(
        q, k_cache, v_cache, block_tables, lens, **options,
        sinks=given["sinks"] if team.rank == 0 else None, causal=False, return_lse=True, out=part,
        lse_out=lse,
    )  # fmt: skip
    if not is_packed:
        heads = q.shape[1] // len(places)
        for (to, lse_to), x, y in zip(
            places, part.split(heads, 1), lse.split(heads, 1), strict=True
        ):
            to.copy_(x)
            lse_to.copy_(y)


def merged(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Merge what `merge_states` takes: two parts with their lse, or a stack of any number."""
    shape = parts[0].shape[-3:]
    out = torch.empty(shape, dtype=dtype, device=parts[0].device)
    cuattn.merge_states(*parts, layout="nhd", out=out)
    return out


def peers_for(team: Team, device: torch.device, share: Share) -> Any:
    """Return the buffers by which messages travel; None: torch.distributed moves them."""
    size = 4 * share.ranks * share.elements
    if size == 0 or not team.reads_on(device):
        return None
    return team.peers_with(size)


def exchanged(team: Team, message: Tensor, goes_to_all: bool) -> Tensor:
    """Send a message, or each rank its row; returns what came from all, in order of ranks."""
    box = message.new_empty(team.size, message.shape[1])
    if goes_to_all:
        gather_into(box.view(-1), message.view(-1), team.group)
    else:
        dist.all_to_all_single(box, message, group=team.group)
    return box


class Share(NamedTuple):
    """The message to each rank: results of its heads, float32, behind them their lse."""

    num_seqs: int
    num_heads: int
    head_dim: int
    ranks: int  # that the heads are shared out to

    @property
    def elements(self) -> int:
        """Of a message, which begins on 16 bytes as all rows do."""
        rows = self.num_seqs * self.heads
        return rows * self.head_dim + -(-rows // 4) * 4

    @property
    def heads(self) -> int:
        """Of a message."""
        return self.num_heads // self.ranks

    def views(self, box: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is in messages, [n, elements]: [n, num_seqs, heads, head_dim] and lse."""
        shape = self.num_seqs, self.heads
        rows = shape[0] * shape[1]
        end = rows * self.head_dim
        outs = box[:, :end].unflatten(1, (*shape, self.head_dim))
        return outs, box[:, end : end + rows].unflatten(1, shape)

    def places(self, peers: Any, rank: int, row: int) -> tuple[Tensor, Tensor]:
        """Return what the buffer of a rank holds for some rank: its results and their lse."""
        shape = self.num_seqs, self.heads
        first = 4 * row * self.elements
        outs = peers.view(rank, first, (*shape, self.head_dim), torch.float32)
        first += 4 * shape[0] * shape[1] * self.head_dim
        return outs, peers.view(rank, first, shape, torch.float32)


def key_of(given: dict[str, Any]) -> Any:
    """Say what a plan depends on; None where it is not kept: arrays may hold other values."""
    arrays = [given[name] for name in ("q", *CACHE, "context_lens")]
    words = [given[name] for name in ("interleave", *WORDS)]
    is_kept = all(isinstance(x, Tensor) for x in arrays)
    is_kept &= all(x is None or isinstance(x, (str, int, float)) for x in words)
    is_kept &= all(given[name] is None for name in ("sinks", *SCALES))
    if not is_kept:
        return None
    seen = tuple(
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.data_ptr() % 16) for x in arrays
    )
    return "decode", seen, *words, shape_words(given["context_lens"]), torch.is_grad_enabled()


WORDS = ("reduce", "kv_layout", "scale", "softcap", "partial_dtype")


def kept_plan(given: dict[str, Any]) -> tuple[int, torch.dtype, Said]:
    """Return what `read` says of a call, or said of one alike, and what all ranks say alike.

    The layers of a step call alike.
    """
    key = key_of(given)
    plans = given["team"].plans
    if key is not None and key in plans:
        found: tuple[int, torch.dtype, Said] = plans[key]
        return found
    turn, wide = read(given)
    q = given["q"]
    values = {
        "q": (tuple(q.shape), q.dtype, q.device.type),
        "memory of others": given["team"].reads_on(q.device),
        "interleave": turn,
        **{name: shape_words(given[name]) for name in ("context_lens", "sinks")},
        **{name: given[name] for name in WORDS},
    }
    plan = turn, wide, Said("parallel.paged_attention", values)
    if key is not None:
        if len(plans) >= KEPT:
            plans.clear()
        plans[key] = plan
    return plan


def read(given: dict[str, Any]) -> tuple[int, torch.dtype]:
    """Check a call as this rank sees it: tokens of a turn, dtype of the parts."""
    function, team, q = "parallel.paged_attention", given["team"], given["q"]
    if not isinstance(q, Tensor) or q.ndim != 3:
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(
            f"{function}: q must be a tensor [num_seqs, num_heads_q, head_dim], got {got}; several "
            "queries a sequence go by parallel.attention_varlen"
        )
    if q.dtype not in TAKEN:
        raise ValueError(
            f"{function}: q must be float32, float16 or bfloat16, got {q.dtype}; cast it"
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
