// SPDX-License-Identifier: Apache-2.0
// How a slice of K and V, kKeys (16 or 32) keys of one kv head, lies in shared memory for mma.sync,
// and how operands are read from it. Keys are the rows of S^T = K Q^T and the columns of O^T = V^T
// P^T. Next: cuda/paged/sm80/decode.cuh (its only user), mma_sm80.cuh (fragments).
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuattn/device/mma_sm80.cuh"

namespace cuattn::device {

// kXsplit: vLLM's layout, K [head_dim / x, block_size, x] and V [head_dim, block_size] in a block.
template <DType kCache, int kHeadDim, int kKeys, bool kXsplit>
struct PagedSlice {
  static constexpr bool kFp8 = kCache == DType::e4m3;
  static constexpr int kItem = kFp8 ? 1 : 2;          // bytes
  static constexpr int kRowBytes = kHeadDim * kItem;  // of one key
  static constexpr int kKBytes = kKeys * kRowBytes;   // V has as many
  static constexpr int kAtOnce = kFp8 ? 2 : 1;        // steps that one ldmatrix loads
  using Fragments = uint32_t[kAtOnce][4];

  // A slice of K in shared memory: rows of keys, swizzled. x-split: as in the cache, 16 bytes of
  // each key next to each other; 8 keys of one chunk are the 128 bytes that ldmatrix reads.
  static __device__ __forceinline__ uint32_t k_chunk(uint32_t key, uint32_t chunk) {
    return kXsplit ? (chunk * kKeys + key) * 16 : swizzled<kRowBytes>(key, chunk);
  }

  // x-split V in shared memory: rows of d with 16 keys; of 32 bytes, the halves of every other four
  // rows are exchanged, so that 8 rows of one half fall into different banks.
  static __device__ __forceinline__ uint32_t v_row(uint32_t d, uint32_t piece) {
    return kFp8 ? (piece / 2 * kHeadDim + d) * 16 + piece % 2 * 8
                : d * 32 + ((piece ^ (d >> 2 & 1)) << 4);
  }

  // Which key of the slice stands in row g (high 0) or g + 8 (high 1) of S^T. x-split e4m3: a
  // lane's register holds four neighbouring keys of V, and P follows.
  static __device__ __forceinline__ int32_t slot_key(int32_t g, int32_t high) {
    return kXsplit && kFp8 ? g / 2 * 4 + g % 2 + 2 * high : g + 8 * high;
  }

  // Which d stands in row g or g + 8 of m16 block `step` of O^T. e4m3 rows: a transposed pair of
  // bytes is two neighbouring d.
  static __device__ __forceinline__ int32_t out_column(int32_t step, int32_t g, int32_t high) {
    return 16 * step + (kFp8 && !kXsplit ? 2 * g + high : g + 8 * high);
  }

  // The A operands of K Q^T, steps `step` to step + kAtOnce - 1: keys down, d across.
  static __device__ __forceinline__ void load_keys(int lane, uint32_t k_tile, int block, int step,
                                                   Fragments& a) {
    int32_t slot = lane % 16, row = 16 * block + slot_key(slot % 8, slot / 8);
    if constexpr (kFp8) {
      uint32_t bytes[4];
      ldmatrix_x4(bytes, k_tile + k_chunk(row, step + lane / 16));
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        unpack_e4m3(bytes[2 * odd], a[odd][0], a[odd][2]);
        unpack_e4m3(bytes[2 * odd + 1], a[odd][1], a[odd][3]);
      }
    } else {
      ldmatrix_x4(a[0], k_tile + k_chunk(row, 2 * step + lane / 16));
    }
  }

  // The A operands of O^T blocks `step` (and step + 1 under e4m3): d down, keys across.
  static __device__ __forceinline__ void load_values(int lane, uint32_t v_tile, int block, int step,
                                                     Fragments& a) {
    int32_t in_matrix = lane % 8, second = lane / 8 % 2, upper = lane / 16;
    uint32_t bytes[4];
    if constexpr (kXsplit && !kFp8) {
      ldmatrix_x4(a[0], v_tile + v_row(16 * step + in_matrix + 8 * second, upper));
    } else if constexpr (!kFp8) {
      ldmatrix_x4_trans(a[0],
                        v_tile + swizzled<kRowBytes>(in_matrix + 8 * upper, 2 * step + second));
    } else if constexpr (kXsplit) {
      ldmatrix_x4(bytes, v_tile + v_row(16 * step + lane, 2 * block));
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        unpack_e4m3(bytes[2 * odd], a[odd][0], a[odd][2]);
        unpack_e4m3(bytes[2 * odd + 1], a[odd][1], a[odd][3]);
      }
    } else {
      ldmatrix_x4_trans(
          bytes, v_tile + swizzled<kRowBytes>(16 * block + in_matrix + 8 * second, step + upper));
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        // Bytes: (key, d) (key, d + 1) (key + 1, d) (key + 1, d + 1); pairs of keys are wanted.
        unpack_e4m3(__byte_perm(bytes[2 * odd], 0, 0x3120), a[odd][0], a[odd][1]);
        unpack_e4m3(__byte_perm(bytes[2 * odd + 1], 0, 0x3120), a[odd][2], a[odd][3]);
      }
    }
  }

  // Zeroes the keys of an x-split V slice outside [first, last): a copy of 8 keys may hold both
  // kinds, and 0 * NaN is NaN. Elsewhere the copies wrote zeros.
  static __device__ __forceinline__ void clear_values(int lane, uint32_t v_tile, int32_t first,
                                                      int32_t last) {
#pragma unroll 1
    for (int32_t i = lane; i < kHeadDim * kKeys; i += 32) {
      int32_t d = i / kKeys, key = i % kKeys;
      if (key >= first && key < last) continue;
      store_shared_zero<kItem>(v_tile + v_row(d, key / 8) + key % 8 * kItem);
    }
    __syncwarp();
  }
};

}  // namespace cuattn::device
