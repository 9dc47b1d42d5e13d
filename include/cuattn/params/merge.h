// SPDX-License-Identifier: Apache-2.0
// The problem of merge_states: parts of an attention over different keys become the whole. Next:
// cpu/merge.cpp.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

// out = sum_i out_i exp(lse_i) / sum_i exp(lse_i); lse = log sum_i exp(lse_i). A part with lse =
// -inf has no weight, nor has one with +inf, which other libraries write for a row without keys.
// Two parts may lie apart (outs[0], outs[1]); many parts are stacked: part i at outs[0] + i *
// out_part_stride.
struct MergeParams {
  const void* outs[2];  // rows [batch, seqlen, num_heads] of head_dim elements
  const float* lses[2];
  Strides out_strides[2], lse_strides[2];
  int64_t out_part_stride, lse_part_stride;
  int32_t num_parts;
  bool stacked;  // false: exactly two parts

  void* merged_out;
  float* merged_lse;  // or nullptr
  Strides merged_out_strides, merged_lse_strides;

  // Packed sequences of up to `seqlen` rows, of which no other row is written: parts and result have an
  // axis of `total` rows in place of batch and seqlen. nullptr: there are none.
  const int32_t* cu_seqlens;  // [batch + 1]
  int64_t total;

  DType dtype;       // of merged_out
  DType part_dtype;  // of outs: dtype, or f32
  int64_t batch, seqlen, num_heads;
  int32_t head_dim;
};

}  // namespace cuattn
