// SPDX-License-Identifier: Apache-2.0
// The keys of mla_decode side by side in rows, for the vector kernel of attention. Next: paged.cpp.
#pragma once

#include <cstring>

#include "cpu/convert.h"
#include "cuattn/params/paged.h"

namespace cuattn::cpu {

inline int32_t bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::e4m3 ? 1 : 2;
}

// The latent of a packed one, in bfloat16.
inline void unpack_latent(const char* from, char* to) {
  float scale = 1.0f;
  for (int32_t d = 0; d < PackedLatent::kLatent; ++d) {
    int32_t part = d / PackedLatent::kScaled;
    if (d % PackedLatent::kScaled == 0)
      std::memcpy(&scale, from + PackedLatent::kScalesAt + part * 4, 4);
    float value = e4m3_to_float(static_cast<uint8_t>(from[d])) * scale;
    reinterpret_cast<uint16_t*>(to)[d] = float_to_bf16(value);
  }
}

// Keys of mla_decode: the latent, then the rope columns; and values, where they are not latents.
// Keys of a list that are none are left out; returns how many there are.
inline int32_t gather_latents(const PagedParams& p, int32_t b, int32_t first, int32_t count,
                              char* k, char* v) {
  const LatentParams& latent = p.latent;
  int64_t itemsize = bytes_of(p.dtype), head_bytes = p.head_dim * itemsize;
  int64_t rope_bytes = latent.rope_dim * itemsize;
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    LatentPlace place = latent_place(p, b, first + i);
    if (!place.exists) continue;
    auto copy = [&](const void* cache, const CacheStrides& strides, int64_t bytes, char* to) {
      std::memcpy(to, static_cast<const char*>(cache) + place.at(strides) * itemsize,
                  static_cast<size_t>(bytes));
    };
    if (p.kv_dtype == DType::e4m3) {
      unpack_latent(static_cast<const char*>(p.k_cache) + place.at(p.k_strides), k);
    } else {
      copy(p.k_cache, p.k_strides, head_bytes, k);
    }
    if (rope_bytes > 0) copy(latent.rope_cache, latent.strides, rope_bytes, k + head_bytes);
    if (latent.own_values) copy(p.v_cache, p.v_strides, head_bytes, v + found * head_bytes);
    k += head_bytes + rope_bytes;
    ++found;
  }
  return found;
}

}  // namespace cuattn::cpu
