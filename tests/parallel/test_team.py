# SPDX-License-Identifier: Apache-2.0
"""What is kept for a group ends with it."""

import gc
import weakref

from frameworks import require

torch = require("torch")
dist = require("torch.distributed")

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
