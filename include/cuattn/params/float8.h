// SPDX-License-Identifier: Apache-2.0
// The scales of float8 arrays: value = stored * scale. One number for an array, or float32 on the
// device: a number for each head, for each block of rows, or for each channel of the values. Next:
// attention.h.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

constexpr int32_t kScaleRows = 128;  // rows of a sequence that share a scale of a block

// Whether arrays of a dtype are codes, whose scales a call takes.
CUATTN_HOST_DEVICE constexpr bool is_code(DType dtype) {
  return dtype == DType::e4m3 || dtype == DType::i8;
}
// That of the values of a call, by that of its queries and keys: only these may be int8.
CUATTN_HOST_DEVICE constexpr DType value_dtype(DType dtype) {
  return dtype == DType::i8 ? DType::e4m3 : dtype;
}

struct Float8Scale {
  const float* data;  // or nullptr: `number` holds everywhere
  float number;
  int32_t group;       // heads of the array that share a scale
  int64_t extents[3];  // of data: batch, heads, blocks or channels; those it lacks are 1
  int64_t strides[3];  // 0 along the axes that it lacks

  CUATTN_HOST_DEVICE float at(int32_t b, int32_t head, int64_t place) const {
    if (data == nullptr) return number;
    return data[b * strides[0] + head / group * strides[1] + place * strides[2]];
  }
};

// Of the arrays of attention. Arrays of another dtype have scales of 1.
struct Float8Scales {
  Float8Scale q, k, v;

  // `row` and `key` count from the first of their sequence in the arrays.
  CUATTN_HOST_DEVICE float of_query(int32_t b, int32_t head, int32_t row) const {
    return q.at(b, head, row / kScaleRows);
  }
  CUATTN_HOST_DEVICE float of_key(int32_t b, int32_t head_kv, int32_t key) const {
    return k.at(b, head_kv, key / kScaleRows);
  }
  CUATTN_HOST_DEVICE float of_value(int32_t b, int32_t head_kv, int32_t channel) const {
    return v.at(b, head_kv, channel);
  }
};

}  // namespace cuattn
