// SPDX-License-Identifier: Apache-2.0
// What becomes of a dot product before the softmax: scale, softcap, ALiBi, a bias; and the sink.
// One struct for attention and paged attention. Next: device/mask.cuh (the arithmetic).
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

// score = bias + alibi + softcap * tanh(scale * dot / softcap)
struct ScoreParams {
  float scale;                // natural units
  float softcap;              // 0 = off
  const float* alibi_slopes;  // [num_heads_q] or [batch, num_heads_q], or nullptr
  int64_t alibi_stride_batch, alibi_stride_head;
  const void* bias;           // broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv], or nullptr
  DType bias_dtype;           // f32, the dtype of q, or boolean (true = keep)
  bool has_bias, has_slopes;  // given; in explain() without data
  int64_t bias_stride_batch, bias_stride_head, bias_stride_q, bias_stride_kv;

  const float* sinks;  // [num_heads_q] logits in natural units, or nullptr; enters a row once
  int64_t sinks_stride;

  float inv_softcap;  // see inverse_softcap
  ScoreKind kind;     // identity: a score is its dot product times a plain scale, and no more

  CUATTN_HOST_DEVICE bool scored() const { return kind == ScoreKind::scored; }
  CUATTN_HOST_DEVICE float slope(int32_t b, int32_t head) const {  // of ALiBi, 0 = off
    if (alibi_slopes == nullptr) return 0.0f;
    return alibi_slopes[b * alibi_stride_batch + head * alibi_stride_head];
  }
};

// Whether a dot product times scale * log2 e is an exponent, and the largest dot product the
// largest score. Other scales are for kernels that make a score before they take its maximum.
CUATTN_HOST_DEVICE bool is_plain_scale(float scale) { return scale > 0.0f && scale < 0x1p127f; }

// 1 / softcap, or so little less that times the scale it is a float: no infinity, which times a
// score of 0 would be NaN. Beyond, tanh is at 1.
CUATTN_HOST_DEVICE float inverse_softcap(float softcap, float scale) {
  float size = scale < 0.0f ? -scale : scale;
  float most = 1e38f / (size > 1.0f ? size : 1.0f);
  if (softcap <= 0.0f) return 0.0f;
  return softcap * most > 1.0f ? 1.0f / softcap : most;
}

// A sink of +inf counts as the largest float: out is 0, its limit, and lse a number. NaN stays.
CUATTN_HOST_DEVICE float finite_sink(float sink) {
  constexpr float kLargest = 3.4028234664e38f;
  return sink > kLargest ? kLargest : sink;
}

}  // namespace cuattn
