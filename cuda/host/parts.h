// SPDX-License-Identifier: Apache-2.0
// Host side of split keys: what a kernel leaves of each part, and how the parts become the result. Parts
// are rows of out [splits, heads, total_q, head_dim_v] and lse without the last axis, float32, one
// behind the other in the workspace.
#pragma once

#include "cuattn/params/merge.h"
#include "cuattn/schedule.h"
#include "cuda/host/launchers.h"

namespace cuattn {

// The call that writes them: the kernel adds what lies in front of its part.
inline AttentionParams as_parts(const AttentionParams& p, const AttentionSchedule& schedule) {
  AttentionParams parts = p;
  const int64_t rows = p.total_q, width = p.head_dim_v;
  const int64_t batch = p.cu_seqlens_q != nullptr ? 0 : p.seqlen_q;
  parts.out = schedule.workspace;
  parts.out_dtype = DType::f32;
  parts.out_strides = {batch * width, width, rows * width};
  parts.lse = static_cast<float*>(schedule.workspace) +
              schedule.num_splits * rows * p.num_heads_q * p.head_dim_v;
  parts.lse_strides = {batch, 1, rows};
  return parts;
}

// Behind the kernel that writes them. `major`: see launchers.h.
inline void merge_parts(const AttentionParams& p, const AttentionSchedule& schedule, int32_t major,
                        cudaStream_t stream) {
  const AttentionParams parts = as_parts(p, schedule);
  MergeParams m{};
  m.outs[0] = parts.out;
  m.lses[0] = parts.lse;
  m.out_strides[0] = parts.out_strides;
  m.lse_strides[0] = parts.lse_strides;
  m.lse_part_stride = p.total_q * p.num_heads_q;
  m.out_part_stride = m.lse_part_stride * p.head_dim_v;
  m.num_parts = schedule.num_splits;
  m.stacked = true;
  m.merged_out = p.out;
  m.merged_lse = p.lse;
  m.merged_out_strides = p.out_strides;
  m.merged_lse_strides = p.lse_strides;
  m.dtype = p.out_dtype;
  m.part_dtype = DType::f32;
  m.batch = p.batch;
  m.seqlen = p.seqlen_q;
  m.num_heads = p.num_heads_q;
  m.head_dim = p.head_dim_v;
  m.cu_seqlens = p.cu_seqlens_q;
  m.total = p.total_q;
  launch_merge(m, major, stream);
}

}  // namespace cuattn
