// SPDX-License-Identifier: Apache-2.0
// What the two passes of sm80 and simt share: the state of a row of queries in the workspace, and the
// step from a score and dout v to P, ds and dx. The letters are those of cpu/backward.cpp. Next:
// sums.h (the gradients that are sums), sm80/queries.cuh.
#pragma once

#include "cuattn/device/dropout.cuh"
#include "cuattn/device/scores.cuh"
#include "cuattn/params/functor.h"
#include "cuattn/tiles.h"

namespace cuattn::backward {

// What a row of queries brings: its lse, +inf where it takes no part, so that P is 0; and Delta =
// dout . out - dlse.
struct RowState {
  float lse, delta;
};

// What the passes leave for each other and for the sums (TwoPassLayout).
struct Memory {
  RowState* rows;
  float* slope_terms;  // of dslopes, a float for each row
  float* bias_parts;

  Memory(const BackwardParams& p, void* workspace) {
    TwoPassLayout at = two_pass_layout_of(p);
    float* floats = static_cast<float*>(workspace);
    rows = reinterpret_cast<RowState*>(floats);
    slope_terms = floats + at.slope_terms;
    bias_parts = floats + at.bias_parts;
  }
};

// Where the workspace holds that of row `stored` (Span) of a head.
CUATTN_HOST_DEVICE int64_t row_index(const AttentionParams& f, int32_t batch, int32_t head,
                                     int64_t stored) {
  int64_t row = f.cu_seqlens_q != nullptr ? stored : int64_t{batch} * f.seqlen_q + stored;
  return head * f.total_q + row;
}

__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }

// What the policy of a pass is made of.
template <class Policy>
__device__ __forceinline__ const AttentionParams& policy_params(const BackwardParams& p) {
  if constexpr (Policy::kIsFunctor) return static_cast<const FunctorBackwardParams&>(p).functor;
  return p.forward;
}

// What a query and a key make together.
struct Weighed {
  float prob, ds, dx;
};

// From the dot products q k and (with dropout, times Z) dout v. What nobody sees is 0, whatever the
// operands hold. The exponent is clamped for a score and an lse so large that they are rounded
// apart; NaN stays NaN.
template <ScoreKind kScore, class Mod>
__device__ __forceinline__ Weighed weigh(float dot, float dout_v, const RowState& of_row,
                                         const Mod& mod, float scale, int32_t row, int32_t key,
                                         bool seen) {
  float exponent;
  if constexpr (kScore == ScoreKind::scored) {
    exponent = mod(dot, row, key) - of_row.lse;
  } else {
    exponent = fmaf(dot, scale, -of_row.lse);
  }
  exponent = exponent > 0.0f ? 0.0f : exponent;
  float prob = seen ? device::exp2_approx(exponent * device::kLog2e) : 0.0f;
  float ds = prob != 0.0f ? prob * (dout_v - of_row.delta) : 0.0f;
  float dx = ds;
  if constexpr (kScore == ScoreKind::scored) dx = mod.through(ds, dot, row, key);
  return {prob, ds, dx};
}

}  // namespace cuattn::backward
