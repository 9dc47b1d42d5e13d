// SPDX-License-Identifier: Apache-2.0
// How a launcher of attention cuts its problem: what the plan has found, and the memory for it. No
// kernel receives it. Next: src/attention/plan.cpp, which fills it.
#pragma once

#include "cuattn/params/backward.h"
#include "cuattn/tiles.h"

namespace cuattn {

struct AttentionSchedule {
  Tile tile;             // where a kernel is compiled for several
  int32_t num_splits;    // parts of the keys; 1 = whole
  int32_t split_keys;    // 0: even shares of what is seen; else parts of whole tiles, this long or
  int32_t most_splits;   // longer, so that a sequence has so many at most
  int32_t packed_heads;  // query heads of a group that share a tile; 1 = none
  int32_t num_ctas;      // grid of a persistent kernel; 0 = a CTA for each tile
  bool draws_tiles;      // persistent: each CTA draws its next tile; else a fixed order
  void* workspace;       // as large as the plan says, 256-byte aligned; contents undefined
};

// What a launcher receives.
struct AttentionLaunch {
  const AttentionParams& params;
  const AttentionSchedule& schedule;
};

struct BackwardLaunch {
  const BackwardParams& params;
  const BackwardSchedule& schedule;
};

}  // namespace cuattn
