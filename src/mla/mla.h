// SPDX-License-Identifier: Apache-2.0
// What the functions of latent attention share. Next: decode.cpp, project.cpp.
#pragma once

#include <cstdint>

#include "cuattn/params/pages.h"
#include "src/check/arrays.h"

namespace cuattn {

constexpr int32_t kMaxLatent = 1024;  // columns

// Packed latents come as bytes.
inline bool is_packed(const TensorView& cache) {
  return cache.dtype.code == kDLUInt && cache.dtype.bits == 8 && cache.dtype.lanes == 1;
}

// The columns of packed latents, which kernels read 16 bytes at a time, and of their rows.
inline void check_packed(const char* function, const TensorView& cache, int64_t latent,
                         int64_t rope, const char* latents, const char* ropes, bool output,
                         bool check_data) {
  require_extent(function, "ckv_cache", "bytes of a packed latent", cache.shape[2],
                 PackedLatent::kBytes, "FlashMLA's");
  require_extent(function, latents, "columns", latent, PackedLatent::kLatent, "packed latents");
  require_extent(function, ropes, "columns", rope, PackedLatent::kRope, "packed latents");
  require_rows(function, "ckv_cache", cache, output, check_data);
  require_aligned(function, "ckv_cache", "a packed latent", cache, 2, check_data);
}

}  // namespace cuattn
