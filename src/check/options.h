// SPDX-License-Identifier: Apache-2.0
// The options that attention and paged attention share: read, checked, and put into params. Next:
// attention/validate.cpp and paged/validate.cpp (the callers).
#pragma once

#include "cuattn/params/attention.h"
#include "src/check/arrays.h"

namespace cuattn {

// head_dim of attention over keys of `kv_dtype`, up to `most`, float8 up to kMostHeadDim; `axis`:
// "head_dim" or "head_dim_v".
void require_head_dim(const char* function, const char* argument, const char* axis,
                      int64_t head_dim, DType kv_dtype, int32_t most = kMostHeadDim);
void require_heads(const char* function, int64_t num_heads_q, int64_t num_heads_kv);

// float32 [heads], [batch, heads] where `batch_axis` is not nullptr, or one number for all heads
// where it may be; no tensor: no data.
struct HeadVector {
  const float* data;
  int64_t stride_batch, stride_head;
};
HeadVector read_heads(const char* function, const char* argument, const DLTensor* tensor,
                      const char* axis, int64_t heads, const char* batch_axis, int64_t batch,
                      DLDevice device, bool check_data, bool may_be_one = false);

// A side of the window that reaches past all `longest` queries or keys is kUnlimited.
MaskParams read_mask(const char* function, bool causal, int64_t window_left, int64_t window_right,
                     int32_t longest_q, int32_t longest_kv);

// The extents of q that options of scores are held against; `batch_axis` is what the caller calls
// the batch.
struct ScoreShape {
  int32_t batch, num_heads_q, head_dim;
  const char* batch_axis;
};

float read_scale(const char* function, bool is_given, double scale, int32_t head_dim);
float read_softcap(const char* function, double softcap);

// All of ScoreParams but the bias itself, whose shape the caller checks. Options is
// cuattn_attention_options or cuattn_paged_options. Here, and nowhere else, is it decided whether a
// score is more than its dot product times a scale: kernels are compiled for one or the other.
template <class Options>
ScoreParams read_scores(const char* function, const Options& o, bool has_bias, const ScoreShape& q,
                        DLDevice device, bool check_data) {
  ScoreParams s{};
  s.scale = read_scale(function, o.has_scale, o.scale, q.head_dim);
  s.softcap = read_softcap(function, o.softcap);
  s.inv_softcap = inverse_softcap(s.softcap, s.scale);
  auto heads = [&](const char* name, const DLTensor* tensor, const char* batch_axis) {
    return read_heads(function, name, tensor, "num_heads_q", q.num_heads_q, batch_axis, q.batch,
                      device, check_data);
  };
  HeadVector slopes = heads("alibi_slopes", o.alibi_slopes, q.batch_axis);
  s.alibi_slopes = slopes.data;
  s.alibi_stride_batch = slopes.stride_batch;
  s.alibi_stride_head = slopes.stride_head;
  s.has_bias = has_bias;
  s.has_slopes = o.alibi_slopes != nullptr;
  HeadVector sinks = heads("sinks", o.sinks, nullptr);
  s.sinks = sinks.data;
  s.sinks_stride = sinks.stride_head;
  // A scale that is not positive turns the running maximum around: the scored kernels apply it
  // before the maximum. explain() gives arrays without data.
  bool scored = s.softcap > 0.0f || s.has_slopes || s.has_bias || !is_plain_scale(s.scale);
  s.kind = scored ? ScoreKind::scored : ScoreKind::identity;
  return s;
}

}  // namespace cuattn
