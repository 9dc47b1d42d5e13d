// SPDX-License-Identifier: Apache-2.0
// How quantize deals a call out: parts of 128 rows of a head, which thread blocks take in turn. Next:
// quantize_part.cuh.
#pragma once

#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

constexpr int kChannels = 64;  // of a thread

// How a tile lies in shared memory: two rows of float, what is subtracted from each row and what each
// is multiplied by for its shift, then the rows.
struct TileShape {
  int lanes, rows, pitch, dim;  // threads of a row; rows of a tile; bytes from one row to the next

  TileShape() = default;
  // 128 wide rows of float32 are more than some devices have.
  CUATTN_HOST_DEVICE constexpr TileShape(int dim, int item)
      : lanes(dim <= kChannels       ? 1
              : dim <= 2 * kChannels ? 2
                                     : 4),
        rows(lanes == 4 && item == 4 ? kScaleRows / 2 : kScaleRows),
        pitch(dim * item + 16),
        dim(dim) {}
  CUATTN_HOST_DEVICE constexpr int threads() const { return lanes * rows; }
  CUATTN_HOST_DEVICE constexpr int shift_mean() const { return dim * 4; }
  // 16 rows begin 4 banks on, for who reads them by columns.
  CUATTN_HOST_DEVICE constexpr int at(int row) const {
    return dim * 8 + row * pitch + row / 16 * 16;
  }
  CUATTN_HOST_DEVICE constexpr int bytes() const { return at(rows); }
};

// 128 rows of a head, or how far it is from one such to another. Heads follow each other first: where
// rows of all heads lie side by side, blocks that run together take memory that does.
struct Part {
  uint32_t b, h, block;

  Part() = default;
  CUATTN_HOST_DEVICE Part(uint32_t index, uint32_t heads, uint32_t blocks)
      : b(index / heads / blocks), h(index % heads), block(index / heads % blocks) {}
  // The sum of two, of which each is less than all parts; it begins anew behind the last.
  __device__ void advance(const Part& on, uint32_t heads, uint32_t blocks, uint32_t batch) {
    h += on.h;
    block += on.block;
    b += on.b;
    if (h >= heads) h -= heads, ++block;
    if (block >= blocks) block -= blocks, ++b;
    if (b >= batch) b -= batch;
  }
  __device__ int64_t first() const { return int64_t{block} * kScaleRows; }
  __device__ int64_t offset(const QuantizeArray& array, int64_t row) const {
    return b * array.strides.batch + row * array.strides.seq + h * array.strides.head;
  }
};

// What one kernel does to all parts.
struct Step {
  bool measures, writes;  // both where each part has its own scale
  int64_t rows;           // of a head: those of x to be measured, of out to be written
  uint32_t blocks;        // of 128 rows, in a head
  uint32_t parts;
  bool from_last;   // the last part comes first
  Part on;          // from a thread block's part to its next one
  TileShape shape;  // of a tile
  float norm;       // of R: 1 / sqrt(size), 1 without it
  bool prefetches;  // shared memory holds two tiles, and one comes while the other is worked on
  int stage, mean_at, shift_at;  // bytes of a RowStage, and where copies of means lie in it
  bool in_pieces, out_pieces, by_columns, mean_pieces, shift_pieces;

  __device__ int64_t last(const Part& part) const { return min(part.first() + kScaleRows, rows); }
};

}  // namespace
}  // namespace cuattn
