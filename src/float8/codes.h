// SPDX-License-Identifier: Apache-2.0
// Codes that become numbers of 16 bits, by dequantize, before a kernel reads these. Next:
// ../attention/numbers.h, ../paged/call.cpp (who has them made).
#pragma once

#include "cuattn/backend.h"
#include "cuattn/params/quantize.h"

namespace cuattn {

// An array [batch, rows, heads, dim] of codes.
struct Codes {
  const void* data;
  Strides strides;
  int64_t channel;  // stride of the last axis
  DType dtype;
  Float8Scale scale;
  ScalePart part;  // what its third axis counts
  int32_t batch;
  int64_t rows;
  int32_t heads, dim;
};

// Makes numbers of them at `place`, of a dtype and without gaps; returns their strides.
Strides make_numbers(const Codes& from, DType numbers, void* place, const Backend& backend,
                     int32_t device_id, Stream stream);

}  // namespace cuattn
