# SPDX-License-Identifier: Apache-2.0
"""What is kept for a group ends with it; ranks that hang are seen."""

import gc
import os
import sys
import weakref
from unittest import mock

import pytest

from frameworks import require

torch = require("torch")
dist = require("torch.distributed")

from pool import Pool  # noqa: E402

from cuattn import parallel  # noqa: E402


def test_a_group_that_is_destroyed_is_freed(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        q = torch.randn(1, 8, 2, 16)
        assert parallel.attention(q, q, q, causal=True).shape == q.shape
        group = weakref.ref(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert group() is None


def wait_for_nobody(ranks):
    """Rank 1 waits for a message that rank 0 never sends."""
    if ranks.rank == 1:
        dist.recv(torch.zeros(1), 0, group=ranks.group)


def gather_beside_nccl(ranks):
    """Gather as beside NCCL, which moves no host memory."""
    from cuattn.parallel.team import Team

    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        team = Team(ranks.group)
        found = team.gather_on_host(torch.tensor([ranks.rank]))
        assert team.host() is not ranks.group
    return found.flatten().tolist(), len(dist.distributed_c10d._world.pg_names)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_in_different_numbers_of_groups_meet_on_the_host(size, gloo):
    found, groups = zip(*gloo.run(size, gather_beside_nccl), strict=True)
    assert found == (list(range(size)),) * size
    assert len(set(groups)) == size  # by which torch would name a group of a part of the ranks


def look_for_peers(ranks, case):
    """What a rank finds where all share memory, one cannot, or they lie on several hosts."""
    from cuattn.parallel import board, team

    def make(*_):
        if case == "one fails" and ranks.rank == 1:
            raise RuntimeError("no such memory\nat all")
        return object()

    wanted = {"CUATTN_PEER_COPIES": "0"} if case == "unwanted" else {}
    with (
        mock.patch.object(team, "make_peers", make),
        mock.patch.dict(os.environ, wanted),
    ):
        digest = board.neighbour_digest()
        assert len(digest) == 32
        assert digest == board.neighbour_digest()
        if case == "apart":
            digest = bytes(31) + bytes([ranks.rank])
        with mock.patch.object(team, "neighbour_digest", return_value=digest):
            found = team.Team(ranks.group)
            found.look_for_peers(torch.device("cpu"))
            found.look_for_peers(None)  # asked once
    return found.peers is not None, found.transport


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("all share", "copy engines"),
        ("one fails", "NCCL: ranks cannot read each other's memory here"),
        ("apart", "NCCL: the ranks share no host, or CUATTN_PEER_COPIES=0"),
        ("unwanted", "NCCL: the ranks share no host, or CUATTN_PEER_COPIES=0"),
    ],
)
def test_all_ranks_find_alike_whether_they_read_each_others_memory(case, words, gloo):
    found = gloo.run(2, look_for_peers, case)
    assert {has_peers for has_peers, _ in found} == {case == "all share"}
    assert all(said.startswith(words) for _, said in found)
    if case == "one fails":
        assert found[1][1] == f"{words} (no such memory)"


def has_loaded_the_compiler(ranks):
    return "torch._dynamo" in sys.modules


def test_ranks_that_hang_say_where_and_are_started_anew():
    pool = Pool(2)
    try:
        pool.seconds = 2
        with pytest.raises(pytest.fail.Exception, match=r"ranks \[1\] hang") as failed:
            pool.run(2, wait_for_nobody)
        text = str(failed.value).split("-- rank 1")[1]
        assert "in wait_for_nobody" in text
        assert "the group is here" in text
        pool.seconds = 60
        # Importing cuattn.parallel leaves alone what takes as long to load as torch itself.
        assert pool.run(2, has_loaded_the_compiler) == [False, False]
    finally:
        pool.close()


def test_a_rank_that_is_gone_at_the_first_call_is_told_of():
    from cuattn.parallel.plan import limit_memory
    from cuattn.parallel.team import Team

    team = Team.__new__(Team)
    team.size, team._free = 2, {}
    team.has_nccl = lambda: False
    allgather = mock.Mock(side_effect=RuntimeError("Connection closed by peer\nand where"))
    team.host = lambda: mock.Mock(allgather=allgather)
    words = (
        r"^parallel\.attention: a rank .* not answer when all told their free .*closed by peer\)"
    )
    with pytest.raises(RuntimeError, match=words):
        limit_memory("parallel.attention", {"q": None, "memory_limit": None}, None, team)


def test_what_fails_on_this_rank_is_not_told_of_another():
    """A device that cannot say its free memory, or NCCL, whose error says more."""
    from cuattn.parallel.plan import limit_memory

    own = RuntimeError("CUDA error: an illegal memory access was encountered\nand where")
    team = mock.Mock(free_bytes=mock.Mock(side_effect=own))
    with pytest.raises(RuntimeError) as found:
        limit_memory("parallel.attention", {"q": None, "memory_limit": None}, None, team)
    assert found.value is own
