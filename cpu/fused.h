// SPDX-License-Identifier: Apache-2.0
// The rows of fused_rows.cpp, which is compiled once for each instruction set. Next:
// fused_rows.cpp, fused.cpp.
#pragma once

#include "cuattn/params/fused.h"

namespace cuattn::cpu {

// Weights of a norm, once a call as floats.
struct NormVectors {
  const float *weight, *bias;  // [columns]; the offset is in the weight. bias: or nullptr
};

struct RowsKernel {
  const char* isa;
  // All heads of a token: x, out and the tables at their rows.
  void (*rotate)(const RotateParams& p, const void* x, void* out, const float* cos,
                 const float* sin);
  // All heads of a token.
  void (*add)(const AddParams& p, const void* x, const void* residual, void* out);
  // One row; `h` has room for its columns.
  void (*norm)(const NormParams& p, const NormVectors& vectors, int64_t row, float* h);
  void (*activate)(const ActivationParams& p, int64_t row);
  // `count` elements from `first` on, to float.
  void (*widen)(const void* from, int64_t first, int64_t count, DType dtype, float* to);
};

}  // namespace cuattn::cpu
