// SPDX-License-Identifier: Apache-2.0
// Split keys in kernels whose grid has a second axis for the parts (sm80, simt): which tiles a block
// takes, and where its result goes. The launcher hands such a kernel the workspace as out and lse
// (cuda/host/parts.h), and a second kernel merges the parts. One part: the grid's second axis is 1.
#pragma once

#include "cuattn/device/scores.cuh"

namespace cuattn::device {

// The tiles of this block. Row ranges and what a user wrote are not cut.
template <int kTileN, class Policy>
__device__ __forceinline__ auto walk_of_part(const Policy& policy, int32_t row_begin,
                                             int32_t row_end) {
  auto all = policy.template walk<kTileN>(row_begin, row_end);
  if constexpr (Policy::kIsFunctor || Policy::kLoads) {
    return all;
  } else {
    if (gridDim.y == 1) return all;
    return TileWalk(
        split_of(all.range, static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y), 0));
  }
}

// Rows in front of those of this part.
__device__ __forceinline__ int64_t rows_before_part(const AttentionParams& p) {
  return static_cast<int64_t>(blockIdx.y) * p.num_heads_q * p.total_q;
}

// A sink counts in the first part.
__device__ __forceinline__ bool counts_sink() { return blockIdx.y == 0; }

}  // namespace cuattn::device
