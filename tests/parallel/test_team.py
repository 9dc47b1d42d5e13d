# SPDX-License-Identifier: Apache-2.0
"""What is kept for a group ends with it; ranks that hang are seen."""

import gc
import weakref

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


def sizes(ranks):
    return ranks.size


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
        assert pool.run(2, sizes) == [2, 2]
    finally:
        pool.close()
