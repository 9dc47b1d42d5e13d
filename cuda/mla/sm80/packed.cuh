// SPDX-License-Identifier: Apache-2.0
// Packed latents of 656 bytes (params/pages.h) for decode.cuh: a warp copies codes and scales of its
// columns to a stage as they lie in the cache, and, once they have landed, makes bfloat16 of them in
// place. So the products are those of a bfloat16 cache, bit for bit.
//
//   in a stage    codes [key, column]  |  scales [key, 4]  |  nothing yet
//   and then      latents [key, column], 16 bits, swizzled
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/params/pages.h"

namespace cuattn {

template <int kKeys, int kColumns>
struct PackedTile {
  static constexpr int kChunks = kColumns / 16;  // of 16 codes, of a key
  static constexpr int kPassKeys = 32 / kChunks, kPasses = kKeys / kPassKeys;
  static constexpr int kScales = kKeys * kColumns;  // behind the codes
  static_assert(kColumns <= PackedLatent::kScaled && kKeys <= 32 && kColumns > 16,
                "a warp has one scale of a key, a lane at most one key");

  // Lane i says where key i lies, in bytes, and whether it is there; one that is not becomes zero.
  static __device__ __forceinline__ void copy(const void* cache, int64_t place, bool exists,
                                              int32_t column, int lane, uint32_t to) {
    const char* from = static_cast<const char*>(cache) + column + lane % kChunks * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      int key = pass * kPassKeys + lane / kChunks;
      int64_t at = __shfl_sync(0xffffffffu, place, key);
      bool valid = __shfl_sync(0xffffffffu, exists, key);
      device::cp_async16(to + (pass * 32 + lane) * 16, valid ? from + at : cache, valid);
    }
    const char* scales = static_cast<const char*>(cache) + PackedLatent::kScalesAt;
    if (lane < kKeys)
      device::cp_async16(to + kScales + lane * 16, exists ? scales + place : cache, exists);
  }

  static __device__ __forceinline__ void unpack(int32_t column, int lane, uint32_t tile) {
    uint4 codes[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      codes[pass] = device::load_shared16(tile + (pass * 32 + lane) * 16);
    const uint32_t scales = tile + kScales + column / PackedLatent::kScaled * 4;
    float own = __uint_as_float(device::load_shared4(scales + lane % kKeys * 16));
    __syncwarp();  // every lane has what latents are written over
    const int chunk = lane % kChunks;
    // Lanes whose first halves would meet in a bank write the other half first.
    const int turn = chunk / 4;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = pass * kPassKeys + lane / kChunks;
      const float scale = __shfl_sync(0xffffffffu, own, key);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int half = i ^ turn;
        const uint4& c = codes[pass];
        device::store_shared16(
            tile + device::swizzled<kColumns * 2>(key, 2 * chunk + half),
            device::unpack_latents(half == 0 ? c.x : c.z, half == 0 ? c.y : c.w, scale));
      }
    }
    __syncwarp();  // before others read them
  }
};

}  // namespace cuattn
