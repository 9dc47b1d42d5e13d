// SPDX-License-Identifier: Apache-2.0
// Vectors of one instruction set in GCC's vector extension: 2^x, tanh, conversion of rows,
// transposition. For flash.cpp alone, which says why everything here is in an anonymous namespace;
// CUATTN_ISA names the set. Next: flash.cpp.
#pragma once

#include <cstddef>

#include "cpu/convert.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace cuattn::cpu::CUATTN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using Vec = float __attribute__((vector_size(kWidth * sizeof(float)), may_alias));
using LooseVec = float __attribute__((vector_size(kWidth * sizeof(float)), may_alias, aligned(4)));
using IntVec = int32_t __attribute__((vector_size(kWidth * sizeof(float)), may_alias));

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kInfinity = __builtin_inff();

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline Vec splat(float x) { return x - Vec{}; }  // not +, which would lose the sign of -0
inline Vec load(const float* x) { return *reinterpret_cast<const LooseVec*>(x); }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where a is NaN

// 2^(factor x) for x <= 0 and factor > 0, to 8e-8 relative; 0 from factor x = -127 on, exactly 1 at
// 0, NaN for NaN. The product enters by multiply-adds and is never rounded itself.
inline Vec exp2_negative(Vec x, float factor) {
  constexpr float kShift =
      12582912.0f + 127.0f;  // 1.5 * 2^23: a sum keeps round(factor x) + 127 low
  float least = -127.0f / factor;
  x = x < least ? splat(least) : x;
  Vec shifted = x * factor + kShift;
  Vec f = x * factor - (shifted - kShift);  // within [-0.5, 0.5]
  Vec power = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(shifted) << 23);
  // Minimax in the relative error, fitted to 2^f with the constant term held at 1.
  Vec p = splat(1.5345812e-4f);
  p = p * f + 1.3399931e-3f;
  p = p * f + 9.6184891e-3f;
  p = p * f + 5.5503286e-2f;
  p = p * f + 2.4022646e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return p * power;
}

inline Vec tanh(Vec x) {
  Vec a = x < 0.0f ? -x : x;
  Vec e = exp2_negative(-a, 2.0f * kLog2e);
  Vec large = (1.0f - e) / (1.0f + e);
  Vec z = x * x;
  // Minimax for (tanh(x) / x - 1) / x^2 on |x| <= 0.625, where `large` would cancel.
  Vec p = splat(-6.0968976e-3f);
  p = p * z + 2.0997329e-2f;
  p = p * z - 5.3850949e-2f;
  p = p * z + 1.3332771e-1f;
  p = p * z - 3.3333328e-1f;
  Vec small = x + x * z * p;
  return a < 0.625f ? small : (x < 0.0f ? -large : large);
}

// Dropout's random bits

using UintVec = uint32_t __attribute__((vector_size(kWidth * sizeof(float)), may_alias));
using Uint64Vec = uint64_t __attribute__((vector_size(kWidth * sizeof(float)), may_alias));

// The products of the even lanes, 64 bits each.
inline Uint64Vec multiply_even(UintVec x, uint32_t factor) {
#if defined(__AVX512F__)
  // Note: of _mm512_mul_epu32 GCC 12 warns that it reads a vector that was never set.
  return reinterpret_cast<Uint64Vec>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), _mm512_set1_epi64(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<Uint64Vec>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(x), _mm256_set1_epi64x(factor)));
#else
  return (reinterpret_cast<Uint64Vec>(x) & 0xffffffffu) * factor;
#endif
}

inline void multiply_wide(UintVec x, uint32_t factor, UintVec& low, UintVec& high) {
  constexpr uint64_t kLow = 0xffffffffu;
  Uint64Vec even = multiply_even(x, factor);
  Uint64Vec odd =
      multiply_even(reinterpret_cast<UintVec>(reinterpret_cast<Uint64Vec>(x) >> 32), factor);
  low = reinterpret_cast<UintVec>((even & kLow) | odd << 32);
  high = reinterpret_cast<UintVec>(even >> 32 | (odd & ~kLow));
}

// cuattn::philox for a counter in each lane.
inline void philox(uint32_t x, UintVec y, UintVec z, uint32_t w, uint64_t key, UintVec words[4]) {
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  UintVec c[4] = {UintVec{} + x, y, z, UintVec{} + w};
  for (int round = 0; round < 10; ++round) {
    UintVec a_low, a_high, b_low, b_high;
    multiply_wide(c[0], 0xd2511f53u, a_low, a_high);
    multiply_wide(c[2], 0xcd9e8d57u, b_low, b_high);
    c[0] = b_high ^ c[1] ^ key_low;
    c[1] = b_low;
    c[2] = a_high ^ c[3] ^ key_high;
    c[3] = a_low;
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  for (int i = 0; i < 4; ++i) words[i] = c[i];
}

// Conversion of rows, eight elements at a time

using Float8 = float __attribute__((vector_size(32), may_alias, aligned(4)));
using Uint8x32 = uint32_t __attribute__((vector_size(32), may_alias, aligned(4)));
using Uint8x16 = uint16_t __attribute__((vector_size(16), may_alias, aligned(2)));
using Uint8x8 = uint8_t __attribute__((vector_size(8), may_alias, aligned(1)));

inline Float8 widen_f16(Uint8x16 raw) {
#if defined(__F16C__)
  return reinterpret_cast<Float8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(raw)));
#else
  Uint8x32 bits = __builtin_convertvector(raw, Uint8x32);
  Uint8x32 sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  // Moving the exponent by a multiplication also makes the subnormal numbers right.
  Float8 value = reinterpret_cast<Float8>(rest) * 0x1p112f;
  Uint8x32 finite = reinterpret_cast<Uint8x32>(value);
  return reinterpret_cast<Float8>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
#endif
}

inline Float8 widen(const uint16_t* in, DType dtype) {
  Uint8x16 raw = *reinterpret_cast<const Uint8x16*>(in);
  if (dtype != DType::bf16) return widen_f16(raw);
  return reinterpret_cast<Float8>(__builtin_convertvector(raw, Uint8x32) << 16);
}

// As e4m3_to_float: the bits mean the value / 256 in float16, but for NaN.
inline Float8 widen_e4m3(const uint8_t* in) {
  Uint8x16 bits = __builtin_convertvector(*reinterpret_cast<const Uint8x8*>(in), Uint8x16);
  Uint8x16 magnitude = bits & 0x7f, scaled = (bits & 0x80) << 8 | magnitude << 7;
  return widen_f16(magnitude == 0x7f ? scaled | 0x7e00 : scaled) * 256.0f;
}

inline void narrow(Float8 value, uint16_t* out, DType dtype) {
  Uint8x16* stored = reinterpret_cast<Uint8x16*>(out);
  if (dtype == DType::bf16) {  // as float_to_bf16
    Uint8x32 bits = reinterpret_cast<Uint8x32>(value);
    Uint8x32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    Uint8x32 nan = bits | 0x400000u;
    *stored = __builtin_convertvector((value != value ? nan : rounded) >> 16, Uint8x16);
    return;
  }
#if defined(__F16C__)
  // 0: to nearest even
  *stored = reinterpret_cast<Uint8x16>(_mm256_cvtps_ph(reinterpret_cast<__m256>(value), 0));
#else
  for (int i = 0; i < 8; ++i) out[i] = float_to_f16(value[i]);
#endif
}

// `count` elements to float.
inline void load_row(const void* in, int count, DType dtype, float* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  int i = 0;
  if (dtype == DType::e4m3) {
    const uint8_t* codes = static_cast<const uint8_t*>(in);
    for (; i + 8 <= count; i += 8) *reinterpret_cast<Float8*>(out + i) = widen_e4m3(codes + i);
    for (; i < count; ++i) out[i] = e4m3_to_float(codes[i]);
    return;
  }
  if (dtype == DType::i8) {
    const int8_t* codes = static_cast<const int8_t*>(in);
    for (; i < count; ++i) out[i] = codes[i];
    return;
  }
  const uint16_t* raw = static_cast<const uint16_t*>(in);
  for (; i + 8 <= count; i += 8) *reinterpret_cast<Float8*>(out + i) = widen(raw + i, dtype);
  for (; i < count; ++i) out[i] = load_element(raw, i, dtype);
}

// `count` elements, a multiple of 8, from float.
inline void store_row(const float* in, int count, DType dtype, void* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* raw = static_cast<uint16_t*>(out);
  for (int i = 0; i < count; i += 8) {
    narrow(*reinterpret_cast<const Float8*>(in + i), raw + i, dtype);
  }
}

using Float4 = float __attribute__((vector_size(16), may_alias, aligned(4)));

inline void transpose4(Float4 x[4]) {
  Float4 a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  Float4 b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  Float4 c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  Float4 d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// out[c][r] = in[r][c], or += ; rows and columns are multiples of 4, strides in elements.
template <bool kAdd>
void transpose(const float* in, int in_stride, int rows, int columns, float* out, int out_stride) {
  for (int r = 0; r < rows; r += 4) {
    for (int c = 0; c < columns; c += 4) {
      Float4 x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = *reinterpret_cast<const Float4*>(in + (r + i) * in_stride + c);
      }
      transpose4(x);
      for (int i = 0; i < 4; ++i) {
        Float4* to = reinterpret_cast<Float4*>(out + (c + i) * out_stride + r);
        *to = kAdd ? *to + x[i] : x[i];
      }
    }
  }
}

}  // namespace
}  // namespace cuattn::cpu::CUATTN_ISA
