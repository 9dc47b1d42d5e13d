// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of q within an attention kernel: the tables, and where queries stand in them. Clean
// under NVRTC. Next: cuda/attention/sm90/rotate.cuh, src/attention/rotation.cpp.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

// The first 2 * half elements of each row of q are turned in pairs, (i, i + half), or (2 i, 2 i + 1)
// where interleaved, as apply_rope does. half is a multiple of 4, rows of the tables begin at multiples
// of 16 bytes. Token i of a sequence stands where it has its last key, i + keys - queries, or where
// positions say.
struct QueryRotation {
  const float *cos, *sin;                  // [max_position, half]; nullptr: q is not turned
  int32_t cos_stride, sin_stride;          // between rows
  const int64_t* positions;                // [batch, seqlen_q], ragged [total_q]; or nullptr
  int64_t positions_batch, positions_seq;  // strides
  int32_t max_position, half;
  bool interleaved;
};

}  // namespace cuattn
