// SPDX-License-Identifier: Apache-2.0
// How quantize deals a call out: groups of heads that share scales, the slices of them that a kernel
// measures and writes, and the 128 rows of a head that a block takes. Next: quantize.cu.
#pragma once

#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

// Heads that share scales, and the order of blocks of rows: those of a head, of the heads of a
// group, of its batches.
struct Groups {
  int32_t batches, heads, across;  // of a group, twice; groups of a batch
  int64_t count;
};

// What one kernel does: blocks of slice `measures`, and of the slice before it.
struct Step {
  Groups groups;
  int64_t first_measured, first_written;  // groups
  uint32_t measured, written;             // blocks
  uint32_t lead;                          // of those that measure: they come before any that writes
  uint64_t ratio;     // 2^32 times the share of the rest of them in the rest of all, rounded up
  bool starts_early;  // what measures needs nothing of the kernel before
  bool alone;         // each block of rows has its own scale: who writes it measures it first
  bool in_pieces, out_pieces, by_columns, mean_pieces;
};

// 128 rows of a head.
struct Part {
  int32_t b, h;
  int64_t block, first, last;

  __device__ Part(const Groups& groups, int64_t first_group, uint32_t unit, int64_t rows) {
    auto blocks = static_cast<uint32_t>(ceil_div<int64_t>(rows, kScaleRows));
    block = unit % blocks;
    unit /= blocks;
    int64_t group = first_group + unit / (groups.heads * groups.batches);
    auto across = static_cast<int32_t>(group % groups.across);
    b = static_cast<int32_t>(group / groups.across) * groups.batches +
        static_cast<int32_t>(unit / groups.heads % groups.batches);
    h = across * groups.heads + static_cast<int32_t>(unit % groups.heads);
    first = block * kScaleRows;
    last = min(first + kScaleRows, rows);
  }
  // Of a grid of blocks of rows, heads and batches.
  __device__ explicit Part(int64_t rows) : b(blockIdx.z), h(blockIdx.y), block(blockIdx.x) {
    first = block * kScaleRows;
    last = min(first + kScaleRows, rows);
  }
  __device__ int64_t offset(const QuantizeArray& array, int64_t row) const {
    return b * array.strides.batch + row * array.strides.seq + h * array.strides.head;
  }
};

}  // namespace
}  // namespace cuattn
