// SPDX-License-Identifier: Apache-2.0
// Scalar mathematics and reductions of the kernels. Base 2 inside, natural units at the edges.
// No includes but params/attention.h: compiles under nvcc and NVRTC. Next: convert.cuh.
#pragma once

#include "cuattn/params/scores.h"

namespace cuattn::device {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <bool kFirst, class First, class Second>
struct Either {
  using Type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using Type = Second;
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// ex2.approx: at most 2 ulp; 0 for -inf. Subnormal results flush to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Finite where both factors are: rounded toward zero, and with it to the largest float.
__device__ __forceinline__ float finite_product(float x, float y) { return __fmul_rz(x, y); }

// Whether exponents relative to `reference` (base 2) take two roundings. Most are one FFMA,
// score * to_log2 - reference: the product is exact, the reference rounded, so the exponent of the
// maximum itself is off by half a unit in its last place. That is up to 4 here, and beyond it may
// leave the range of a float16, or any. Then the difference comes first: 0 for the maximum.
__device__ __forceinline__ bool is_large_reference(float reference) {
  return fabsf(reference) > 1 << 26;
}

constexpr float kLargest = 3.4028234664e38f;

// A sink in base 2, finite where it is no float there.
__device__ __forceinline__ float sink_in_base2(float sink) {
  sink = finite_sink(sink);
  float exponent = __fmul_rn(sink, kLog2e);
  return fabsf(exponent) > kLargest ? finite_product(sink, kLog2e) : exponent;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) = 1 - 2 / (1 + e^(2x)): absolute error about 1e-7, and right at both infinities.
__device__ __forceinline__ float tanh_exp2(float x) {
  return 1.0f - 2.0f * rcp_approx(1.0f + exp2_approx(x * (2.0f * kLog2e)));
}

// The same for arguments of any size: what is small is right to 2e-6 of itself, where an error of
// 1e-7 times a large softcap would be many times the score. For softcaps above kLargeSoftcap.
constexpr float kLargeSoftcap = 256.0f;
__device__ __forceinline__ float tanh_of_small(float x) {
  float square = x * x;
  float series = fmaf(square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
  return fabsf(x) < 0.0625f ? x * series : tanh_exp2(x);
}

// Relative error 2^-11, in one instruction.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the 4 lanes of a quad, which share one row of an MMA accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The 4 x 4 words of four lanes that lie kStride apart: x[i] of the q-th becomes x[q] of the i-th.
template <int kStride>
__device__ __forceinline__ void lanes_transpose(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & kStride, high = threadIdx.x & 2 * kStride;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], kStride);
    (odd ? x[i] : x[i + 1]) = theirs;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t theirs = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2 * kStride);
    (high ? x[i] : x[i + 2]) = theirs;
  }
}
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4]) { lanes_transpose<1>(x); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

template <class T>
CUATTN_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Divides by a number that the host knows, at least 2. Source: Granlund and Montgomery, Division by
// invariant integers using multiplication, 1994.
struct Divisor {
  uint32_t multiplier;
  int32_t shift;

  static CUATTN_HOST_DEVICE Divisor of(int32_t divisor) {
    int32_t shift = 0;
    while (int64_t{2} << shift < divisor) ++shift;
    uint64_t power = uint64_t{1} << (32 + shift), d = static_cast<uint64_t>(divisor);
    return {static_cast<uint32_t>((power + d - 1) / d), shift};
  }
  __device__ __forceinline__ int32_t quotient(int32_t x) const {  // 0 <= x
    return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(x), multiplier) >> shift);
  }
};

}  // namespace cuattn::device
