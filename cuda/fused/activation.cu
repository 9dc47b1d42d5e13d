// SPDX-License-Identifier: Apache-2.0
// act_mul and bias_act: an activation, times the other half of the row or not, at the rate of
// memory. Source: arXiv:1606.08415, arXiv:2002.05202. The same on the CPU: cpu/fused_rows.cpp.
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 2;  // of each half, a thread: 64 bytes in flight

// x times the logistic function of z.
__device__ __forceinline__ float times_logistic(float x, float z) {
  return x * rcp_approx(1.0f + exp2_approx(-kLog2e * z));
}

// x times the normal distribution function of x, which half_erfcx_term makes right far below 0, too.
template <int kTerms>
__device__ __forceinline__ float gelu(float x) {
  float t = rcp_approx(fmaf(fabsf(x), 0.35355339f, 1.0f)), q = half_erfcx_term<kTerms>(kTerms - 1);
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) q = fmaf(q, t, half_erfcx_term<kTerms>(i));
  float tail = q * t * exp2_approx(-0.5f * kLog2e * x * x);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <DType kType, Activation kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == Activation::silu) return times_logistic(x, x);
  if constexpr (kActivation == Activation::gelu)
    return gelu<kType == DType::f32 ? kErfcxTerms : kNarrowErfcxTerms>(x);
  // tanh(y) = 2 logistic(2 y) - 1
  return times_logistic(x, kGeluTanh * fmaf(kGeluCube * x * x, x, x));
}

// Adds the bias of a piece, which is read by 16 bytes where `aligned` says that it lies so.
template <DType kType, int kSize>
__device__ __forceinline__ void add_bias(const Element<kType>* bias, bool aligned,
                                         float (&x)[kSize]) {
  float y[kSize];
  if (aligned) {
    PackedPiece<kType, kSize>::load(bias).unpack(y);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = to_float(bias[j]);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] += y[j];
}

template <DType kType, int kSize, Activation kActivation, bool kGated>
__global__ void __launch_bounds__(kThreads) activate(const __grid_constant__ ActivationParams p) {
  using T = Element<kType>;
  using P = PackedPiece<kType, kSize>;
  int64_t pieces = p.columns / kSize, total = p.rows * pieces;
  int64_t first = int64_t{blockIdx.x} * (kThreads * kPieces) + threadIdx.x;
  bool is_small = total <= 0xffffffff;  // division of 64 bits takes three times as long
  bool aligned = reinterpret_cast<uintptr_t>(p.bias) % alignof(P) == 0;
  P a[kPieces], b[kPieces];
  int64_t row[kPieces], column[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    int64_t index = first + i * kThreads;
    if (index >= total) continue;
    row[i] =
        is_small ? static_cast<uint32_t>(index) / static_cast<uint32_t>(pieces) : index / pieces;
    column[i] = (index - row[i] * pieces) * kSize;
    const T* x = static_cast<const T*>(p.x) + row[i] * p.x_stride + column[i];
    a[i] = P::load(x);
    if constexpr (kGated) b[i] = P::load(x + p.columns);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (first + i * kThreads >= total) continue;
    const T* bias = static_cast<const T*>(p.bias) + column[i];
    float y[kSize];
    a[i].unpack(y);
    if (p.bias != nullptr) add_bias<kType>(bias, aligned, y);
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = activated<kType, kActivation>(y[j]);
    if constexpr (kGated) {
      float right[kSize];
      b[i].unpack(right);
      if (p.bias != nullptr) add_bias<kType>(bias + p.columns, aligned, right);
#pragma unroll
      for (int j = 0; j < kSize; ++j) y[j] *= right[j];
    }
    a[i].pack(y);
    a[i].store(static_cast<T*>(p.out) + row[i] * p.out_stride + column[i]);
  }
}

template <DType kType, int kSize, Activation kActivation, bool kGated>
void launch(const ActivationParams& p, cudaStream_t stream) {
  int64_t pieces = p.rows * (p.columns / kSize);
  unsigned blocks = blocks_of("act_mul", ceil_div<int64_t>(pieces, kThreads * kPieces));
  activate<kType, kSize, kActivation, kGated><<<blocks, kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType, int kSize, Activation kActivation>
void launch(const ActivationParams& p, cudaStream_t stream) {
  p.gated ? launch<kType, kSize, kActivation, true>(p, stream)
          : launch<kType, kSize, kActivation, false>(p, stream);
}

template <DType kType, int kSize>
void launch(const ActivationParams& p, cudaStream_t stream) {
  switch (p.activation) {
    case Activation::silu: return launch<kType, kSize, Activation::silu>(p, stream);
    case Activation::gelu: return launch<kType, kSize, Activation::gelu>(p, stream);
    case Activation::gelu_tanh: return launch<kType, kSize, Activation::gelu_tanh>(p, stream);
  }
}

}  // namespace

void launch_activation(const ActivationParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return;
  with_dtype("act_mul", p.dtype, [&]<DType kType>() {
    constexpr int kItem = sizeof(Element<kType>), kSize = 16 / kItem;
    bool wide = has_16_byte_pieces(kItem, {p.x, p.out}, p.columns, p.x_stride, p.out_stride);
    wide ? launch<kType, kSize>(p, stream) : launch<kType, 1>(p, stream);
  });
}

}  // namespace cuattn
