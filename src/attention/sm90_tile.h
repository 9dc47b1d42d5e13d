// SPDX-License-Identifier: Apache-2.0
// Which of two tiles sm90 takes, and how many heads of a group share one. Next: plan.cpp, who asks.
#pragma once

#include <cstdint>

#include "cuattn/plan.h"

namespace cuattn {

inline int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// Work items of a call in tiles of m rows; of a packed batch at most, for each sequence leaves its
// last tile unfilled. `packed`: heads that share a tile.
int64_t items_of(const AttentionRequest& r, int32_t m, int32_t packed);

// Query heads of a group that share tiles of m rows, which would else stay half empty; 1 = none.
int32_t packed_heads_of(const AttentionRequest& r, int32_t m, ScoreKind score);

// Whether the tiles of a plan share a multiprocessor.
inline bool has_small_tiles(const Plan& plan) {
  return plan.kernel == Kernel::sm90 && sm90_ctas_per_sm(plan.tile) > 1;
}

// Whether tiles that share a multiprocessor (sm90_ctas_per_sm) are sooner done than large ones.
bool small_tile_pays(const AttentionRequest& r, Tile large, Tile small, ScoreKind score,
                     int32_t num_sms);

}  // namespace cuattn
