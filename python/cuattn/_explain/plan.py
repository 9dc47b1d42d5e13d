# SPDX-License-Identifier: Apache-2.0
"""What explain gives back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call would run; ``print(plan)`` shows every rung of the ladder with its verdict.

    num_splits is the number of parts that keys are cut into and that are merged through memory;
    0: by a plan made on the device. cluster thread blocks share the keys of a part and merge what
    they find on the chip; 1: none do. packed_heads query heads of a group share a tile; schedule
    says which CTA computes which tile. Of cascade_attention, kernel names those of the prefix and
    of the pages, and tile, splits and schedule are the pages'; the ladder has both.
    """

    kernel: str
    mask: str
    score: str
    tile_m: int
    tile_n: int
    stages: int
    warps: int
    head_dim: int
    head_dim_v: int
    num_splits: int
    cluster: int
    packed_heads: int
    schedule: str
    workspace_bytes: int
    reason: str
    ladder: str

    def __str__(self) -> str:
        return self.ladder
