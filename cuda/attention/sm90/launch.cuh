// SPDX-License-Identifier: Apache-2.0
// The launcher of forward.cuh. Apart, for NVRTC compiles the kernel without it. Next: host.cuh.
#pragma once

#include "cuda/attention/sm90/forward.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {

template <class Kernel>
void launch_forward_sm90_tile(const AttentionParams& p, const AttentionSchedule& schedule,
                              Tile tile, cudaStream_t stream) {
  Sm90Schedule s = make_sm90_schedule(p, schedule, tile);
  Sm90Maps maps = make_sm90_maps(p, s, tile, Kernel::kQStages);
  s.stages_bias = Kernel::kStagesBias && p.scores.bias != nullptr && has_bias_map(p);
  if (s.stages_bias) maps.bias = bias_map(p);
  static uint64_t allowed = 0;
  allow_shared_memory(forward_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  if (s.counter != nullptr) launch_clear_counter(s.counter, stream);
  launch_overlapping(forward_sm90_kernel<Kernel>, sm90_grid(s, schedule), Kernel::kThreads,
                     Kernel::kSmemBytes, s.counter != nullptr ? 9 : 0, stream, p, s, maps);
  if (s.splits > 1) merge_parts(p, schedule, 9, stream);
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_forward_sm90(const AttentionLaunch& launch, cudaStream_t stream) {
  const auto& [p, schedule] = launch;
  constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  constexpr Tile kTile = sm90_tile(kDims, kMask, kScore);
  constexpr Tile kOther = sm90_other_tile(kDims, kMask, kScore);
  if constexpr (kOther.m > 0) {
    if (schedule.tile.m == kOther.m && schedule.tile.n == kOther.n) {
      return launch_forward_sm90_tile<
          ForwardSm90<kType, kHeadDim, kHeadDimV, kMask, kScore, kOther>>(p, schedule, kOther,
                                                                          stream);
    }
  }
  launch_forward_sm90_tile<ForwardSm90<kType, kHeadDim, kHeadDimV, kMask, kScore, kTile>>(
      p, schedule, kTile, stream);
}

}  // namespace cuattn
