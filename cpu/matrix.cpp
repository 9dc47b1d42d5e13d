// SPDX-License-Identifier: Apache-2.0
// Rows times the matrix of a head, in float: four rows against two vectors of columns at a time, the
// inner axis in order, so that the bits of a row do not depend on its neighbours. Compiled once per
// instruction set, as flash.cpp is, which says why nothing here may be a weak function. Next:
// project.cpp (the units).
#include "cpu/flash.h"
#include "cpu/tiles.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

constexpr int kColumns = 2 * kWidth;  // of a tile
constexpr int kRows = 4;

int padded(int outer) { return (outer + kColumns - 1) / kColumns * kColumns; }

// W as floats [inner][padded(outer)]; the columns behind outer are zero.
void load_matrix(const MatrixUnit& u, float* w, float* buffer) {
  int width = padded(u.outer);
  int64_t bytes = u.w_stride * (u.dtype == DType::f32 ? 4 : 2);
  const char* row = static_cast<const char*>(u.w);
  if (!u.transpose) {
    for (int d = 0; d < u.inner; ++d, row += bytes) {
      load_row(row, u.outer, u.dtype, w + d * width);
      for (int c = u.outer; c < width; ++c) w[d * width + c] = 0.0f;
    }
    return;
  }
  for (int c = 0; c < width; c += 4) {
    for (int i = 0; i < 4; ++i, row += bytes) {
      float* to = buffer + i * u.inner;
      if (c + i < u.outer) {
        load_row(row, u.inner, u.dtype, to);
      } else {
        for (int d = 0; d < u.inner; ++d) to[d] = 0.0f;
      }
    }
    transpose<false>(buffer, u.inner, 4, u.inner, w + c, width);
  }
}

// Columns [c, c + kColumns) of four rows.
void multiply_tile(const float* x, const float* w, int inner, int width, float* out) {
  Vec acc[kRows][2] = {};
  for (int d = 0; d < inner; ++d) {
    Vec low = load(w + d * width), high = load(w + d * width + kWidth);
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] += low * x[r * inner + d];
      acc[r][1] += high * x[r * inner + d];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<LooseVec*>(out + r * width + i * kWidth) = acc[r][i];
  }
}

}  // namespace

size_t matrix_floats(int32_t inner, int32_t outer) {
  size_t width = static_cast<size_t>(padded(outer)), rows = kRows;
  return static_cast<size_t>(inner) * (width + rows) + rows * width + 64;
}

void multiply(const MatrixUnit& u) {
  int width = padded(u.outer);
  int64_t itemsize = u.dtype == DType::f32 ? 4 : 2;
  float* w = u.scratch;
  float* out = w + static_cast<int64_t>(u.inner) * width;
  float* x = out + kRows * width;
  load_matrix(u, w, x);
  for (int row = 0; row < u.rows; row += kRows) {
    int count = min(kRows, u.rows - row);
    for (int r = 0; r < kRows; ++r) {  // rows behind the last repeat it, and are not stored
      const char* from = static_cast<const char*>(u.x);
      load_row(from + (row + min(r, count - 1)) * u.x_stride * itemsize, u.inner, u.dtype,
               x + r * u.inner);
    }
    for (int c = 0; c < width; c += kColumns) multiply_tile(x, w + c, u.inner, width, out + c);
    for (int r = 0; r < count; ++r) {
      char* to = static_cast<char*>(u.out);
      store_row(out + r * width, u.outer, u.dtype, to + (row + r) * u.out_stride * itemsize);
    }
  }
}

}  // namespace cuattn::cpu::CUATTN_ISA
