// SPDX-License-Identifier: Apache-2.0
// The problem of attention as every kernel receives it, CPU and CUDA alike: arrays, lengths, pages,
// mask and scores. How it is cut stands in schedule.h. Next: plan.h (which kernel),
// cpu/attention.cpp (the mathematics in plain loops).
#pragma once

#include "cuattn/params/dropout.h"
#include "cuattn/params/flex.h"
#include "cuattn/params/float8.h"
#include "cuattn/params/pages.h"
#include "cuattn/params/rows.h"
#include "cuattn/params/scores.h"

namespace cuattn {

// head_dim and head_dim_v at most: of a forward pass over rows; over pages, of float8 and backward.
constexpr int32_t kMostForwardDim = 512, kMostHeadDim = 256;

// Forward attention: O = softmax(mask(bias + alibi + softcap(scale * Q K^T))) V, one row per query
// and head.
struct AttentionParams {
  // Shapes: dense                                       ragged
  // q       [batch, seqlen_q, num_heads_q, head_dim]    [total_q, num_heads_q, head_dim]
  // k       [batch, seqlen_kv, num_heads_kv, head_dim]  [total_kv, num_heads_kv, head_dim]
  // lse     [batch, num_heads_q, seqlen_q]              [num_heads_q, total_q]
  const void* q;
  const void* k;
  const void* v;  // like k, last dimension head_dim_v
  void* out;      // like q, last dimension head_dim_v
  float* lse;     // natural log; or nullptr
  Strides q_strides, k_strides, v_strides, out_strides;
  Strides lse_strides;  // of lse: batch, seq (query row), head

  int64_t v_channel_stride;  // 1, but of float8 values whose sequence axis is the contiguous one

  DType dtype;  // of q, k and v, and on CUDA, but for float8, of out
  int32_t batch, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int32_t seqlen_q, seqlen_kv;  // dense: the lengths; ragged: max_seqlen_q, max_seqlen_k
  int64_t total_q, total_kv;    // rows stored: dense batch * seqlen, ragged the first extent

  const int32_t* cu_seqlens_q;   // [batch + 1] or nullptr (dense)
  const int32_t* cu_seqlens_kv;  // [batch + 1] or nullptr
  const int32_t* seqused_q;      // [batch] or nullptr: rows in use
  const int32_t* seqused_kv;     // [batch] or nullptr
  const int32_t* kv_start;       // [batch] or nullptr: keys before it take no part; dense alone
  // Read by sm90 alone, which follows the block tables; the strides of k and v then step over
  // blocks (batch), places (seq) and heads. For the other kernels the keys are gathered into rows.
  Pages pages;

  MaskParams mask;
  ScoreParams scores;
  Float8Scales float8;
  DropoutParams dropout;
  RowRanges rows;          // or none
  const FlexParams* flex;  // what a user wrote, in host memory, or nullptr
  DType out_dtype;         // dtype or float32; float8: bf16, f16 or f32
};

CUATTN_HOST_DEVICE Span query_span(const AttentionParams& p, int32_t b) {
  return make_span(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q, p.total_q);
}

CUATTN_HOST_DEVICE Span key_span(const AttentionParams& p, int32_t b) {
  Span span = make_span(p.cu_seqlens_kv, p.seqused_kv, b, p.seqlen_kv, p.total_kv);
  return p.kv_start == nullptr ? span : without_first(span, p.kv_start[b]);
}

// The key of the arrays that key 0 of key_span is. Masks, ALiBi and dropout count keys from there;
// a bias and its gradient have a column for each key of the arrays.
CUATTN_HOST_DEVICE int32_t first_key(const AttentionParams& p, int32_t b) {
  return p.kv_start == nullptr ? 0 : static_cast<int32_t>(key_span(p, b).start);
}

// Whether the TMA of sm_90 can bring the bias: a legal tensor map, and a warp that is free for it.
CUATTN_HOST_DEVICE bool has_bias_map(const AttentionParams& p) {
  const ScoreParams& s = p.scores;
  return p.pages.block_size == 0 && p.kv_start == nullptr && s.bias_dtype == p.dtype &&
         s.bias_stride_kv == 1 && s.bias_stride_q > 0 && s.bias_stride_batch >= 0 &&
         s.bias_stride_head >= 0 && reinterpret_cast<uint64_t>(s.bias) % 16 == 0 &&
         (s.bias_stride_batch | s.bias_stride_head | s.bias_stride_q) % 8 == 0;
}

}  // namespace cuattn
