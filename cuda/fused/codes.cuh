// SPDX-License-Identifier: Apache-2.0
// What quantize and dequantize share: pieces of 8 channels, scales, quotients, codes. Next:
// row_tile.cuh, quantize.cu.
#pragma once

#include <type_traits>

#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

constexpr int kThreads = 256;
constexpr int kSpan = 8;  // channels of a piece
constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr uint32_t kWarp = 0xffffffffu;

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// 1 where all elements are 0: no code but 0 is written then, and no scale is 0.
__device__ __forceinline__ float scale_of(float largest, DType codes) {
  return largest == 0.0f ? 1.0f : fmaxf(largest / largest_code(codes), kSmallestNormal);
}

// The signs of R lie as the sign bits of two channels in a word; this is one of them, as a float's.
__device__ __forceinline__ uint32_t flip_of(uint32_t flips, int channel) {
  return (channel % 2 == 0 ? flips << 16 : flips) & 0x80000000u;
}

// 8 channels as they lie in memory: 16 bytes, or 32 (kWide). Of 16 bits it matters to unpack alone
// whether they are float16 or bfloat16, and so no kernel is compiled for each.
template <bool kWide>
struct RawPiece {
  static constexpr int kWords = kWide ? 2 : 1;
  uint4 words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = uint4{0, 0, 0, 0};
  }

  // From and to shared memory.
  __device__ __forceinline__ void take(const char* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ __forceinline__ void store(char* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }

  // The signs of R, `flips`, into them.
  __device__ __forceinline__ void flip(const uint4& flips) {
    if constexpr (kWide) {
      words[0].x ^= flip_of(flips.x, 0), words[0].y ^= flip_of(flips.x, 1);
      words[0].z ^= flip_of(flips.y, 0), words[0].w ^= flip_of(flips.y, 1);
      words[1].x ^= flip_of(flips.z, 0), words[1].y ^= flip_of(flips.z, 1);
      words[1].z ^= flip_of(flips.w, 0), words[1].w ^= flip_of(flips.w, 1);
    } else {
      words[0].x ^= flips.x, words[0].y ^= flips.y, words[0].z ^= flips.z, words[0].w ^= flips.w;
    }
  }

  // `in_pieces`: they lie side by side on 16 bytes.
  __device__ __forceinline__ void load(const QuantizeArray& array, bool in_pieces, int64_t at) {
    using Bits = std::conditional_t<kWide, uint32_t, uint16_t>;
    const auto* from = static_cast<const Bits*>(array.data) + at;
    if (in_pieces) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    uint32_t lone[4 * kWords];
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if constexpr (kWide) {
        lone[i] = from[i * array.channel];
      } else {
        uint32_t high = from[(2 * i + 1) * array.channel];
        lone[i] = high << 16 | from[2 * i * array.channel];
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = uint4{lone[4 * i], lone[4 * i + 1], lone[4 * i + 2], lone[4 * i + 3]};
  }

  template <DType kType>
  __device__ __forceinline__ void unpack(float (&x)[kSpan]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kType == DType::f32) {
          x[4 * i + j] = __uint_as_float(word[j]);
        } else if constexpr (kType == DType::bf16) {
          float2 pair = unpack_bf16(word[j]);
          x[2 * j] = pair.x;
          x[2 * j + 1] = pair.y;
        } else {
          x[2 * j] = to_float(Half{static_cast<uint16_t>(word[j])});
          x[2 * j + 1] = to_float(Half{static_cast<uint16_t>(word[j] >> 16)});
        }
      }
    }
  }
  // `is_half`: float16, where not kWide; the same for all threads.
  __device__ __forceinline__ void unpack(bool is_half, float (&x)[kSpan]) const {
    if constexpr (kWide) {
      unpack<DType::f32>(x);
    } else if (is_half) {
      unpack<DType::f16>(x);
    } else {
      unpack<DType::bf16>(x);
    }
  }
};

// norm x / scale: x (high + low), where high + low is norm / scale to 2^-47 of itself, in one rounding
// behind an exact product. Off the quotient's own rounding for one in 10^7, which then moves a code
// only at a tie. Signs of zeros stay, for low has the sign of high; what is not finite goes where a
// quotient would. `factor`: a power of two and the sign of scale, by which x is multiplied first, so
// that nothing leaves the range of float.
struct Divisor {
  float factor, high, low;

  Divisor() = default;
  __device__ Divisor(float scale, float norm) {
    float size = fabsf(scale);
    factor = size < 0x1p-60f ? 0x1p66f : size > 0x1p60f ? 0x1p-66f : 1.0f;
    size *= factor;
    factor = copysignf(factor, scale);
    high = norm / size;
    low = high;
    if (!(size > 0.0f && is_finite(size))) return;  // of 0, infinity and NaN
    float left = __fmaf_rn(-size, high, norm);
    if (left < 0.0f) {
      high = __uint_as_float(__float_as_uint(high) - 1);
      left = __fmaf_rn(-size, high, norm);
    }
    low = fmaxf(left / size, kSmallestNormal);  // times infinity it is to be infinity
  }

  // Of factor * x.
  __device__ __forceinline__ float quotient(float x) const { return __fmaf_rn(x, high, x * low); }
};

// 4 codes in a word.
__device__ __forceinline__ uint32_t pack_e4m3(const float* x) {
  return pack2_e4m3(x[0], x[1]) | static_cast<uint32_t>(pack2_e4m3(x[2], x[3])) << 16;
}
__device__ __forceinline__ uint32_t pack_int8(const float* x) {
  int code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = max(min(__float2int_rn(x[i]), 127), -127);  // NaN is 0
  return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040),
                     0x5410);
}

// Turns 4 rows of 4 bytes, `pitch` words apart, into words of 4 rows, one of each channel.
__device__ __forceinline__ void turn_bytes(const uint32_t* from, int pitch, int four,
                                           uint32_t (&turned)[4][4]) {
  uint32_t a = from[0], b = from[pitch], c = from[2 * pitch], d = from[3 * pitch];
  uint32_t low0 = __byte_perm(a, b, 0x5140), low1 = __byte_perm(c, d, 0x5140);
  uint32_t high0 = __byte_perm(a, b, 0x7362), high1 = __byte_perm(c, d, 0x7362);
  turned[0][four] = __byte_perm(low0, low1, 0x5410);
  turned[1][four] = __byte_perm(low0, low1, 0x7632);
  turned[2][four] = __byte_perm(high0, high1, 0x5410);
  turned[3][four] = __byte_perm(high0, high1, 0x7632);
}

inline int item_of(DType number) { return number == DType::f32 ? 4 : 2; }

// Whether 8 channels of a row lie side by side on `bytes`.
inline bool lies_in_pieces(const QuantizeArray& array, int item, uintptr_t bytes) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.seq, array.strides.head})
    bits |= static_cast<uint64_t>(stride * item);
  return array.channel == 1 && bits % bytes == 0;
}

// Whether the rows of a channel lie side by side on 16 bytes.
inline bool lies_by_columns(const QuantizeArray& array) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.head, array.channel})
    bits |= static_cast<uint64_t>(stride);
  return array.strides.seq == 1 && array.channel != 1 && bits % 16 == 0;
}

}  // namespace
}  // namespace cuattn
