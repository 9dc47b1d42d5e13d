// SPDX-License-Identifier: Apache-2.0
// quantize and dequantize as the kernels receive them: rows of numbers to float8_e4m3fn codes and
// back. stored = round((row - mean) R / scale), to nearest even, at most 448 (int8: 127); R is signs
// times Hadamard matrices, or nothing. Next: cpu/quantize.cpp.
#pragma once

#include "cuattn/params/float8.h"

namespace cuattn {

constexpr float kLargestE4m3 = 448.0f;
CUATTN_HOST_DEVICE constexpr float largest_code(DType dtype) {
  return dtype == DType::i8 ? 127.0f : kLargestE4m3;
}

// What a scale with three axes is of.
enum class ScalePart : int32_t { none, rows, channels };

// One array [batch, rows, heads, dim] in any order of the first three; strides in elements.
struct QuantizeArray {
  void* data;
  DType dtype;
  Strides strides;
  int64_t channel;  // stride of the last axis
};

struct QuantizeParams {
  QuantizeArray x, out;  // of dequantize x is e4m3 or i8, of quantize out
  int32_t batch, heads, dim;
  int64_t rows, out_rows;  // of a sequence; rows of out beyond those of x become 0

  Float8Scale scale;
  ScalePart part;
  bool gives_scale;  // it is written first: the largest size of its elements / 448, or 127

  float* mean;                    // float32 [batch, heads, dim], subtracted from rows; or nullptr
  int64_t mean_batch, mean_head;  // strides; those of dim are 1
  bool gives_mean;                // it is written first
  bool rotates;                   // rows are multiplied by R

  // Beside: shift[b, h, row] = x[b, row, h] . shift_mean[b, h / shift_group]; or nullptr.
  float* shift;
  int64_t shift_batch, shift_head, shift_row;
  const float* shift_mean;
  int64_t shift_mean_batch, shift_mean_head;
  int32_t shift_group;
};

// The sign of channel i in R, by a hash: the same everywhere and for ever, because codes that are
// stored were rotated by it. Source of the constants: MurmurHash3's last step.
CUATTN_HOST_DEVICE bool flips_channel(int32_t i) {
  uint32_t x = static_cast<uint32_t>(i + 1) * 0x9e3779b1u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return ((x ^ x >> 16) & 1u) != 0;
}

// The size of the Hadamard matrices in R, which stand along its diagonal: the largest power of two
// that divides dim.
CUATTN_HOST_DEVICE int32_t hadamard_size(int32_t dim) { return dim & -dim; }

}  // namespace cuattn
