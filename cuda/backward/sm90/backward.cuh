// SPDX-License-Identifier: Apache-2.0
// The launcher of the sm90 backward kernels: the fused pass, or the queries pass (Delta, dQ) and the
// keys pass (dK, dV), which starts under the tail of the first; then dsinks, and zeros for the rows
// of ragged arrays that belong to no sequence. Two passes make seven products of tiles for the five of the
// formula, and in return no atomics and no sums in memory: the same bits each time. Next: fused.cuh,
// queries.cuh, keys.cuh.
#pragma once

#include "cuattn/schedule.h"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/sm90/bias.cuh"
#include "cuda/backward/sm90/fused.cuh"
#include "cuda/backward/sm90/keys.cuh"
#include "cuda/backward/sm90/queries.cuh"
#include "cuda/backward/sm90/sinks.cuh"

namespace cuattn {

// Whatever the mask: limits of a causal one may lie past the end. CTAs of few rows would wait at each
// head of a group for those of many: they take the heads of a tile together. What a loop keeps is made
// anew around it, so of one head tiles are the inner loop; at 64 columns that costs nothing.
template <DType kType, int kHeadDim>
void launch_ordered_sm90(const BackwardLaunch& launch, const backward::RowStates& states,
                         cudaStream_t stream) {
  const AttentionParams& f = launch.params.forward;
  if constexpr (kHeadDim > 64) {
    if (f.num_heads_q == f.num_heads_kv)
      return launch_fused_sm90<kType, kHeadDim, MaskKind::causal, ScoreForm::ordered>(
          launch, states, stream);
  }
  launch_fused_sm90<kType, kHeadDim, MaskKind::causal, ScoreForm::ordered_heads>(launch, states,
                                                                                 stream);
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
void launch_passes_sm90(const BackwardLaunch& launch, const backward::RowStates& states,
                        float* slope_terms, cudaStream_t stream) {
  // Compiled for a window, these forms serve every mask; fused there is none with a window.
  constexpr bool kServesAll = kForm != ScoreForm::plain && kForm != ScoreForm::general;
  constexpr MaskKind kFusedMask = kServesAll ? MaskKind::causal : kMask;
  constexpr bool kHasFused = sm90_has_fused({kHeadDim, kHeadDimV}, kFusedMask, kForm);
  if (kHasFused && launch.schedule.num_chunks > 0) {  // a part of keys a CTA, whose dq are summed
    if constexpr (kHasFused && kForm == ScoreForm::plain) {
      if (launch.schedule.in_order)
        return launch_ordered_sm90<kType, kHeadDim>(launch, states, stream);
    }
    if constexpr (kHasFused)
      launch_fused_sm90<kType, kHeadDim, kFusedMask, kForm>(launch, states, stream);
  } else {
    launch_queries_sm90<kType, kHeadDim, kHeadDimV, kMask, kForm>(launch, states, slope_terms,
                                                                  stream);
    launch_keys_sm90<kType, kHeadDim, kHeadDimV, kMask, kForm>(launch, states, stream);
  }
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_backward_sm90(const BackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  const backward::RowStates states = backward::row_states(f, launch.schedule.workspace);
  const int64_t floats = sm90_floats_of_head(f, launch.schedule.num_chunks > 1 ? kHeadDim : 0) +
                         (launch.schedule.in_order ? sm90_order_words_of_head(f) : 0);
  float* sink_terms = states.lse + floats * f.num_heads_q;
  float* sums =  // of dbias its parts, of dslopes the terms
      sink_terms + (p.needs(kNeedDsinks) ? int64_t{f.batch} * f.num_heads_q : 0);
  auto passes = [&](auto form) {
    launch_passes_sm90<kType, kHeadDim, kHeadDimV, kMask, form.value>(launch, states, sums, stream);
  };
  if constexpr (kScore == ScoreKind::identity) {
    passes(std::integral_constant<ScoreForm, ScoreForm::plain>{});
  } else {
    switch (sm90_score_form(f)) {
      case ScoreForm::dropped:
        passes(std::integral_constant<ScoreForm, ScoreForm::dropped>{});
        break;
      case ScoreForm::biased:
        if constexpr (sm90_has_biased({kHeadDim, kHeadDimV})) {
          passes(std::integral_constant<ScoreForm, ScoreForm::biased>{});
          launch_bias_sm90<kType, kHeadDim>(p, states, sums, stream);
        }
        break;
      case ScoreForm::smooth: passes(std::integral_constant<ScoreForm, ScoreForm::smooth>{}); break;
      default: passes(std::integral_constant<ScoreForm, ScoreForm::general>{});
    }
  }
  if (p.needs(kNeedDslopes)) launch_slope_sums(p, sums, stream);
  backward::launch_sinks_sm90(p, states, sink_terms, stream);
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
