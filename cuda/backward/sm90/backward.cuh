// SPDX-License-Identifier: Apache-2.0
// The launcher of the sm90 backward kernels: the fused pass, or the queries pass (Delta, dQ) and the
// keys pass (dK, dV), which starts under the tail of the first; then zeros for the rows of ragged
// arrays that belong to no sequence. Two passes make seven products of tiles for the five of the
// formula, and in return no atomics and no sums in memory: the same bits each time. Next: fused.cuh,
// queries.cuh, keys.cuh.
#pragma once

#include "cuattn/schedule.h"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/sm90/fused.cuh"
#include "cuda/backward/sm90/keys.cuh"
#include "cuda/backward/sm90/queries.cuh"

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_backward_sm90(const BackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  const backward::RowStates states = backward::row_states(f, launch.schedule.workspace);
  constexpr bool kHasFused = sm90_has_fused({kHeadDim, kHeadDimV}, kMask, kScore);
  if (kHasFused && launch.schedule.num_chunks > 0) {  // keys are cut in parts, whose dq are summed
    if constexpr (kHasFused) launch_fused_sm90<kType, kHeadDim, kMask>(launch, states, stream);
  } else {
    launch_queries_sm90<kType, kHeadDim, kHeadDimV, kMask, kScore>(launch, states, stream);
    launch_keys_sm90<kType, kHeadDim, kHeadDimV, kMask, kScore>(launch, states, stream);
  }
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
