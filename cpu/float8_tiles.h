// SPDX-License-Identifier: Apache-2.0
// Tiles of float8 (or int8) keys and float8 values as float rows, their scales multiplied in. For flash.cpp alone,
// which says why everything here is in an anonymous namespace. Next: flash.cpp.
#pragma once

#include "cpu/flash.h"
#include "cpu/tiles.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

void scale_row(float scale, int dim, float* row) {
  if (scale == 1.0f) return;
  for (int d = 0; d < dim; ++d) row[d] *= scale;
}

// Keys [first, first + count) into the buffer, each times the scale of its block.
KeyTile load_float8_keys(const FlashUnit& u, int first, int count, float* buffer) {
  const uint8_t* row = static_cast<const uint8_t*>(u.k) + first * u.k_stride;
  for (int j = 0; j < count; ++j, row += u.k_stride) {
    int64_t part = (u.float8.first_key + first + j) / kScaleRows;
    load_row(row, u.head_dim, u.dtype, buffer + j * u.head_dim);
    scale_row(u.float8.k_scale[part * u.float8.k_scale_stride], u.head_dim,
              buffer + j * u.head_dim);
  }
  return {buffer, u.head_dim};
}

// Values whose keys lie side by side: four channels at a time through `columns`, which holds
// kBuffer floats.
void load_columns(const FlashUnit& u, int first, int count, float* buffer, float* columns) {
  static_assert(4 * kTileKeys <= kBuffer);
  const uint8_t* column = static_cast<const uint8_t*>(u.v) + first;
  int padded = (count + 3) / 4 * 4;
  for (int c = 0; c < u.head_dim_v; c += 4) {
    for (int i = 0; i < 4; ++i, column += u.float8.v_channel_stride) {
      float* to = columns + i * kTileKeys;
      load_row(column, count, DType::e4m3, to);
      for (int j = count; j < padded; ++j) to[j] = 0.0f;
    }
    transpose<false>(columns, kTileKeys, 4, padded, buffer + c, u.head_dim_v);
  }
}

KeyTile load_float8_values(const FlashUnit& u, int first, int count, float* values,
                           float* scratch) {
  int dim = u.head_dim_v;
  if (u.float8.v_channel_stride != 1) {
    load_columns(u, first, count, values, scratch);
  } else {
    const uint8_t* row = static_cast<const uint8_t*>(u.v) + first * u.v_stride;
    for (int j = 0; j < count; ++j, row += u.v_stride)
      load_row(row, dim, DType::e4m3, values + j * dim);
  }
  for (int c = 0; c < dim; ++c) scratch[c] = u.float8.v_scale[c * u.float8.v_scale_stride];
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < dim; ++c) values[j * dim + c] *= scratch[c];
  }
  return {values, dim};
}

}  // namespace
}  // namespace cuattn::cpu::CUATTN_ISA
