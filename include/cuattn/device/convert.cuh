// SPDX-License-Identifier: Apache-2.0
// The element types of the kernels: storage, and conversion to and from float (round to nearest
// even). PTX instead of cuda_fp16.h and cuda_bf16.h: half the compile time, and NVRTC needs no
// header path. Next: mma_sm80.cuh.
#pragma once

#include "cuattn/device/arch.cuh"
#include "cuattn/device/math.cuh"

namespace cuattn::device {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
struct E4m3 {  // float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity
  uint8_t bits;
};

struct Int8 {
  int8_t value;
};

template <DType kType>
struct ElementOf;
template <>
struct ElementOf<DType::f32> {
  using type = float;
};
template <>
struct ElementOf<DType::f16> {
  using type = Half;
};
template <>
struct ElementOf<DType::bf16> {
  using type = Bfloat16;
};
template <>
struct ElementOf<DType::e4m3> {
  using type = E4m3;
};
template <>
struct ElementOf<DType::i8> {
  using type = Int8;
};
template <DType kType>
using Element = typename ElementOf<kType>::type;

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ float to_float(Bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

// Exact. As float16 the bits mean the value / 256, subnormals included; only NaN is another.
__device__ __forceinline__ float to_float(E4m3 x) {
  uint32_t magnitude = x.bits & 0x7fu;
  Half scaled{static_cast<uint16_t>((x.bits & 0x80u) << 8 | magnitude << 7)};
  return magnitude == 0x7fu ? __int_as_float(0x7fffffff) : to_float(scaled) * 256.0f;
}

__device__ __forceinline__ float to_float(Int8 x) { return static_cast<float>(x.value); }

template <class T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
__device__ __forceinline__ Bfloat16 from_float<Bfloat16>(float x) {
  Bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Saturates: what is larger than 448, infinity included, becomes 448; NaN stays NaN.
template <>
__device__ __forceinline__ E4m3 from_float<E4m3>(float x) {
  the_kind_of_this_row_must_be_each();
#if __CUDA_ARCH__ >= 890
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
  return E4m3{static_cast<uint8_t>(y)};
#else
  uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return E4m3{0x7f};
  float magnitude = fminf(__uint_as_float(bits), 448.0f);
  bits = __float_as_uint(magnitude);
  uint32_t y = magnitude < 0x1p-6f  // a multiple of 2^-9
                   ? static_cast<uint32_t>(__float2int_rn(magnitude * 512.0f))
                   : (bits + 0x7ffffu + (bits >> 20 & 1u) - (120u << 23)) >> 20;
  return E4m3{static_cast<uint8_t>(sign | y)};
#endif
}

// Two neighbours in one register, the lower column in the lower half: an MMA operand register.
template <DType kType>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  static_assert(kType == DType::f16 || kType == DType::bf16, "pack2 packs 16-bit types");
  uint32_t y;
  if constexpr (kType == DType::f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

// Two neighbours in 16 bits, the lower column in the lower byte; each as from_float gives it.
__device__ __forceinline__ uint16_t pack2_e4m3(float low, float high) {
  the_kind_of_this_row_must_be_each();
#if __CUDA_ARCH__ >= 890
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
#else
  uint32_t bits = from_float<E4m3>(high).bits;
  return static_cast<uint16_t>(bits << 8 | from_float<E4m3>(low).bits);
#endif
}

// Two bfloat16 neighbours; x is the lower column.
__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Four e4m3 neighbours become two pairs of float16: exact, NaN stays NaN.
__device__ __forceinline__ void unpack_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  the_kind_of_this_row_must_be_each();
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
#else
  uint32_t* pairs[2] = {&low, &high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t bytes = __byte_perm(x, 0, i == 0 ? 0x1404 : 0x3424);  // each above 8 zero bits
    uint32_t magnitude = bytes & 0x7f007f00u;
    uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;  // 0x7f: its exponent becomes all ones
    uint32_t scaled = (bytes & 0x80008000u) | magnitude >> 1 | nan >> 1;  // the value / 256
    asm("mul.f16x2 %0, %1, %2;" : "=r"(*pairs[i]) : "r"(scaled), "r"(0x5c005c00u));
  }
#endif
}

// Eight columns of a packed latent: e4m3 neighbours times their scale, rounded to bfloat16.
__device__ __forceinline__ uint4 unpack_latents(uint32_t low, uint32_t high, float scale) {
  uint32_t halves[4], pairs[4];
  unpack_e4m3(low, halves[0], halves[1]);
  unpack_e4m3(high, halves[2], halves[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x = to_float(Half{static_cast<uint16_t>(halves[i])});
    float y = to_float(Half{static_cast<uint16_t>(halves[i] >> 16)});
    pairs[i] = pack2<DType::bf16>(__fmul_rn(x, scale), __fmul_rn(y, scale));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

}  // namespace cuattn::device
