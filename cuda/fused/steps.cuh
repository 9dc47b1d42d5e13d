// SPDX-License-Identifier: Apache-2.0
// How quantize deals a call out: parts of 128 rows of a head, which thread blocks take in turn. Next:
// quantize.cu.
#pragma once

#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

constexpr int kChannels = 64;  // of a thread

// How rows lie in shared memory.
struct TileShape {
  int lanes, rows, pitch;  // threads of a row; rows of a tile; bytes from one row to the next

  TileShape() = default;
  // 128 wide rows of float32 are more than some devices have.
  CUATTN_HOST_DEVICE TileShape(int dim, int item)
      : lanes(dim <= kChannels       ? 1
              : dim <= 2 * kChannels ? 2
                                     : 4),
        rows(lanes == 4 && item == 4 ? kScaleRows / 2 : kScaleRows),
        pitch(dim * item + 16) {}
  CUATTN_HOST_DEVICE int threads() const { return lanes * rows; }
  // 16 rows begin 4 banks on, for who reads them by columns.
  CUATTN_HOST_DEVICE int at(int row) const { return row * pitch + row / 16 * 16; }
  CUATTN_HOST_DEVICE int bytes() const { return at(rows); }
};

// What one kernel does to all parts.
struct Step {
  bool measures, writes;  // both where each part has its own scale
  int64_t rows;           // of a head: those of x to be measured, of out to be written
  uint32_t blocks;        // of 128 rows, in a head
  uint32_t parts;
  TileShape shape;  // of a tile
  float norm;       // of R: 1 / sqrt(size), 1 without it
  bool from_last;   // the last part comes first
  bool prefetches;  // shared memory holds two tiles, and one comes while the other is worked on
  bool in_pieces, out_pieces, by_columns, mean_pieces, shift_pieces;
};

// 128 rows of a head. Heads follow each other first: where rows of all heads lie side by side, blocks
// that run together take memory that does.
struct Part {
  uint32_t b, h, block;

  Part() = default;
  __device__ Part(const QuantizeParams& p, const Step& step, uint32_t index) {
    if (step.from_last) index = step.parts - 1 - index;
    auto heads = static_cast<uint32_t>(p.heads);
    h = index % heads;
    index /= heads;
    block = index % step.blocks;
    b = index / step.blocks;
  }
  __device__ int64_t first() const { return int64_t{block} * kScaleRows; }
  __device__ int64_t last(const Step& step) const { return min(first() + kScaleRows, step.rows); }
  __device__ int64_t offset(const QuantizeArray& array, int64_t row) const {
    return b * array.strides.batch + row * array.strides.seq + h * array.strides.head;
  }
};

}  // namespace
}  // namespace cuattn
