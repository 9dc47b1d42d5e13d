// SPDX-License-Identifier: Apache-2.0
// Scalar mathematics and reductions of the kernels. Base 2 inside, natural units at the edges.
// No includes but params.h: compiles under nvcc and NVRTC. Next: convert.cuh.
#pragma once

#include "cuattn/params.h"

namespace cuattn::device {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// ex2.approx: at most 2 ulp; 0 for -inf. Subnormal results flush to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Finite where both factors are: rounded toward zero, and with it to the largest float.
__device__ __forceinline__ float finite_product(float x, float y) { return __fmul_rz(x, y); }

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

// The 4 x 4 words of a quad: x[i] of lane q becomes x[q] of lane i.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = theirs;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t theirs = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = theirs;
  }
}

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
