// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit rows in swizzled shared memory for mma.sync kernels: the copy from global memory,
// and the addresses that ldmatrix takes. Next: mma_sm80.cuh (the swizzle and the fragments).
#pragma once

#include "cuattn/device/mma_sm80.cuh"

namespace cuattn::device {

// Copies rows [row0, row0 + kRows) of a matrix with kDim columns in shared memory, `dim` of them
// in global memory; what lies beyond row `limit` or column `dim` becomes zero. By kThreads threads.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_tile(uint32_t smem, const char* global, int64_t row_bytes,
                                          int32_t row0, int32_t limit, int32_t dim) {
  constexpr int kLanes =
      kDim % 64 == 0 ? 8 : 4;  // threads on one row, 16 bytes each: full 128-byte lines if possible
  constexpr int kPassRows = kThreads / kLanes;
  static_assert(kRows % kPassRows == 0 && kPassRows % 8 == 0,
                "passes cover the tile and keep the swizzle phase");
  int32_t row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
  const char* from = global + (row0 + row) * row_bytes + chunk * 16;
  uint32_t to = smem + swizzled<kDim * 2>(row, chunk);
#pragma unroll
  for (int pass = 0; pass < kRows / kPassRows; ++pass) {
    bool row_valid = row0 + row + pass * kPassRows < limit;
#pragma unroll
    for (int group = 0; group < kDim / (8 * kLanes); ++group) {
      bool valid = row_valid && (chunk + group * kLanes) * 8 < dim;
      cp_async16(to + pass * kPassRows * kDim * 2 + group * kLanes * 16, from + group * kLanes * 16,
                 valid);
    }
    from += kPassRows * row_bytes;
  }
}

// The address a lane gives to ldmatrix: its row is fixed, and the swizzle of its row turns step
// `chunk` (even) into an XOR of constants. `row_base`: address of the lane's row; `phase`: the
// lane's chunk bit XOR the row's swizzle.
template <int kRowBytes>
__device__ __forceinline__ uint32_t chunk_address(uint32_t row_base, uint32_t phase, int chunk) {
  constexpr int kMaskBits = kRowBytes % 128 == 0 ? 7 : 3;
  return row_base + (((chunk & kMaskBits) ^ phase) << 4) + (chunk & ~kMaskBits) * 16;
}
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzle_phase(uint32_t row, uint32_t chunk_bit) {
  return chunk_bit ^ (kRowBytes % 128 == 0 ? row & 7 : (row >> 1) & 3);
}

}  // namespace cuattn::device
