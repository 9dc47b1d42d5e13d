// SPDX-License-Identifier: Apache-2.0
// The middle step of the rungs that keep their scores in memory: each row of dot products becomes a
// row of probabilities. Score mods, masks, sinks, dropout and lse all happen here. One warp a row, two
// passes over it: the running maximum and sum of arXiv:1805.02867, then the probabilities. Used by
// naive.cu and cublas.cu.
#pragma once

#include "cuattn/device/mask.cuh"
#include "cuda/host/launch.h"

namespace cuattn {

constexpr int kSoftmaxRowsPerBlock = 4;  // one warp each

// The row of a warp; it may lie behind the last.
struct WarpRow {
  int32_t b, head, row;
};

__device__ __forceinline__ WarpRow row_of_warp(const AttentionParams& p) {
  uint32_t tiles = device::ceil_div<uint32_t>(p.seqlen_q, kSoftmaxRowsPerBlock);
  uint32_t b_head = blockIdx.x / tiles, heads = p.num_heads_q;
  uint32_t row = blockIdx.x % tiles * kSoftmaxRowsPerBlock + threadIdx.x / 32;
  return {static_cast<int32_t>(b_head / heads), static_cast<int32_t>(b_head % heads),
          static_cast<int32_t>(row)};
}

inline unsigned softmax_blocks(const AttentionParams& p) {
  int64_t tiles = device::ceil_div<int64_t>(p.seqlen_q, kSoftmaxRowsPerBlock);
  return grid_blocks(int64_t{p.batch} * p.num_heads_q * tiles, "softmax");
}

// dots, probs [batch, num_heads_q, seqlen_q, seqlen_kv]; they may be the same memory (a lane
// rewrites what it read). A row of probs is written whole, zeros where a key is not seen, because a
// GEMM reads it whole.
template <DType kType, ScoreKind kScore, class Prob>
__global__ void __launch_bounds__(kSoftmaxRowsPerBlock * 32)
    softmax_rows(const __grid_constant__ AttentionParams p, const float* dots, Prob* probs) {
  using namespace device;
  int lane = threadIdx.x % 32;
  const auto [b, head, row] = row_of_warp(p);
  if (row >= p.seqlen_q) return;
  int64_t at = (int64_t{b} * p.num_heads_q + head) * p.seqlen_q + row;
  dots += at * p.seqlen_kv;
  probs += at * p.seqlen_kv;

  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.stored) return;  // a ragged batch: this sequence is shorter than the longest
  bool used = row < queries.used;
  KeyRange seen{0, 0};
  if (used) {
    seen = p.mask.visible(row, queries.used, keys.used);
    seen = p.rows.limit(seen, b, head, queries.start + row);
  }
  ScoreMod<kType, kScore> score(p, b, head, queries.used, keys.used);

  float max = negative_infinity(), sum = 0.0f;  // of scores, and of exponentials relative to it
  for (int32_t key = seen.begin + lane; key < seen.end; key += 32) {
    float x = score(dots[key], row, key);
    float new_max = fmaxf(max, x);  // a NaN leaves the maximum and enters the sum
    float reference = new_max == negative_infinity() ? 0.0f : new_max;
    sum = sum * exp2_approx((max - reference) * score.to_log2) +
          exp2_approx((x - reference) * score.to_log2);
    max = new_max;
  }

  float row_max = warp_max(max);
  float reference = row_max == negative_infinity() ? 0.0f : row_max;
  float row_sum = warp_sum(sum * exp2_approx((max - reference) * score.to_log2));
  // The sink is one more score, without a value.
  float sink = p.scores.sinks != nullptr && used ? p.scores.sinks[head * p.scores.sinks_stride]
                                                 : negative_infinity();
  float exponent = finite_product(row_max, score.to_log2), sink_exponent = sink_in_base2(sink);
  float larger = fmaxf(exponent, sink_exponent);
  if (larger == negative_infinity()) larger = 0.0f;
  float keys_share = exp2_approx(exponent - larger);
  row_sum = fmaf(row_sum, keys_share, exp2_approx(sink_exponent - larger));
  bool empty = row_sum == 0.0f;
  float factor = empty ? 0.0f : keys_share / row_sum;

  const DropoutParams dropout = p.dropout.resolved();
  const uint32_t index = dropout.head(b, head);
  for (int32_t key = lane; key < p.seqlen_kv; key += 32) {
    float prob = 0.0f;
    if (key >= seen.begin && key < seen.end) {
      prob = exp2_approx((score(dots[key], row, key) - reference) * score.to_log2) * factor;
      prob *= kept_factor(dropout, index, row, key);
    }
    probs[key] = from_float<Prob>(prob);
  }
  if (lane == 0 && p.lse != nullptr) {
    int64_t place = b * p.lse_strides.batch + head * p.lse_strides.head +
                    (queries.start + row) * p.lse_strides.seq;
    p.lse[place] = empty ? negative_infinity() : (larger + log2_approx(row_sum)) * kLn2;
  }
}

template <DType kType, class Prob>
void launch_softmax_rows(const AttentionParams& p, const float* dots, Prob* probs,
                         cudaStream_t stream) {
  auto kernel = p.scores.kind == ScoreKind::identity
                    ? softmax_rows<kType, ScoreKind::identity, Prob>
                    : softmax_rows<kType, ScoreKind::scored, Prob>;
  kernel<<<softmax_blocks(p), kSoftmaxRowsPerBlock * 32, 0, stream>>>(p, dots, probs);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
