// SPDX-License-Identifier: Apache-2.0
// mla_project: rows of each head times the matrix of that head. Clean under NVRTC. Next:
// cpu/project.cpp (all of it in plain loops).
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

// out[b, i, h, :] = x[b, i, h, :] W[h], in float32 and rounded once; then the columns of `tail`
// behind it. Without proj, x is copied.
struct ProjectParams {
  const void* x;     // [batch, rows, num_heads, inner]; a head stride of 0: all heads have the same
  const void* proj;  // [num_heads, latent, head_dim]; nullptr: inner = outer, a copy
  void* out;         // [batch, rows, num_heads, outer + tail_dim]
  Strides x_strides, out_strides;
  int64_t proj_stride_head, proj_stride_row;
  const void* tail;  // [batch, rows, num_heads, tail_dim], or nullptr
  Strides tail_strides;
  DType dtype;
  bool transpose;  // W[h] = proj[h]^T [head_dim, latent], else proj[h] [latent, head_dim]
  int32_t batch, rows, num_heads;
  int32_t inner, outer, tail_dim;
};

}  // namespace cuattn
