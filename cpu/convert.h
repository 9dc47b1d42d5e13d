// SPDX-License-Identifier: Apache-2.0
// float16, bfloat16 and float8_e4m3fn in software: exact to float, round to nearest even from
// float; infinities and NaN stay what they are, but in e4m3, which saturates. Everything is static:
// flash.cpp is compiled once per instruction set and must not emit shared (weak) functions. Next:
// attention.cpp.
#pragma once

#include <cstdint>

#include "cuattn/params/types.h"

namespace cuattn::cpu {

static inline float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float bf16_to_float(uint16_t x) {
  return bits_to_float(static_cast<uint32_t>(x) << 16);
}

static inline uint16_t float_to_bf16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays quiet NaN
  bits +=
      0x7fffu + (bits >> 16 &
                 1u);  // ties to even; a carry out of the mantissa is the next power of two, or inf
  return static_cast<uint16_t>(bits >> 16);
}

static inline float f16_to_float(uint16_t x) {
  uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  uint32_t exponent = x >> 10 & 0x1fu, mantissa = x & 0x3ffu;
  if (exponent == 0x1f) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(subnormal));
}

static inline uint16_t float_to_f16(float value) {
  uint32_t bits = float_to_bits(value);
  uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  if (bits >= 0x477ff000u)
    return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (bits < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to in the
                             // last bits
    float shifted = bits_to_float(bits) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13);
}

// Sign, 4 bits of exponent (bias 7), 3 of mantissa. As float16 the bits mean the value / 256,
// subnormals included; only NaN is another.
static inline float e4m3_to_float(uint8_t x) {
  uint32_t magnitude = x & 0x7fu;
  if (magnitude == 0x7f) return bits_to_float(0x7fffffffu);
  return f16_to_float(static_cast<uint16_t>((x & 0x80u) << 8 | magnitude << 7)) * 256.0f;
}

// What is larger than 448, infinity included, becomes 448; NaN stays NaN.
static inline uint8_t float_to_e4m3(float value) {
  uint32_t bits = float_to_bits(value);
  uint32_t sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7f;
  if (bits >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and above
  if (bits < 0x3c800000u) {  // below 2^-6: a multiple of 2^-9, which adding 2^14 rounds to
    float shifted = bits_to_float(bits) + 0x1p14f;
    return static_cast<uint8_t>(sign | (float_to_bits(shifted) - 0x46800000u));
  }
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<uint8_t>(sign | (bits - 0x3c000000u) >> 20);
}

// To nearest even; what is larger than 127, infinity included, becomes 127, NaN becomes 0.
static inline int8_t float_to_i8(float value) {
  if (value != value) return 0;
  float bounded = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
  return static_cast<int8_t>(__builtin_nearbyintf(bounded));
}

// Element `index` of an array of f32, f16, bf16, e4m3 or i8.
static inline float load_element(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::f16: return f16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::bf16: return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::e4m3: return e4m3_to_float(static_cast<const uint8_t*>(data)[index]);
    case DType::i8: return static_cast<const int8_t*>(data)[index];
    default: return static_cast<const float*>(data)[index];
  }
}

static inline void store_element(void* data, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::f16: static_cast<uint16_t*>(data)[index] = float_to_f16(value); break;
    case DType::bf16: static_cast<uint16_t*>(data)[index] = float_to_bf16(value); break;
    case DType::e4m3: static_cast<uint8_t*>(data)[index] = float_to_e4m3(value); break;
    case DType::i8: static_cast<int8_t*>(data)[index] = float_to_i8(value); break;
    default: static_cast<float*>(data)[index] = value;
  }
}

}  // namespace cuattn::cpu
