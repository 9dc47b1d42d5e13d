// SPDX-License-Identifier: Apache-2.0
// Merges attention results over disjoint keys into the result over their union: out = sum_i out_i
// exp(lse_i) / sum_i exp(lse_i), for two parts that lie apart or many that are stacked. One warp a
// row; a lane owns 16 bytes of it. Source: FlashInfer's merge operator, arXiv:2501.01005,
// section 2.2. The same on the CPU: cpu/merge.cpp.
#include <algorithm>

#include "cuattn/device/convert.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kRowsPerBlock = 8;  // one warp each
constexpr int kThreads = kRowsPerBlock * 32;

__device__ int64_t offset(const Strides& strides, int64_t b, int64_t row, int64_t head) {
  return b * strides.batch + row * strides.seq + head * strides.head;
}

// Part `part` of a row, from where the row lies in each of the two arrays.
struct Side {
  int32_t side;
  int64_t first;
};
__device__ Side side_of(const MergeParams& p, int32_t part, int64_t part_stride) {
  return p.stacked ? Side{0, part * part_stride} : Side{part, 0};
}

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Chunk {
  T x[kSize];
};

template <DType kPart, DType kType>
__device__ void merge_row(const MergeParams& p, int64_t b, int64_t row, int64_t head) {
  using Part = Element<kPart>;
  using T = Element<kType>;
  constexpr int kSize = 16 / sizeof(Part);
  // Parts whose loads are on their way together: those that a kernel left are many.
  constexpr int kAhead = sizeof(Part) > sizeof(T) ? 4 : 1;
  int lane = threadIdx.x % 32;
  // -inf: the part saw no key. +inf too, as FlashAttention-2 and vLLM write rows without keys.
  auto lse_of = [&](int32_t part) {
    Side at = side_of(p, part, p.lse_part_stride);
    float lse = p.lses[at.side][at.first + offset(p.lse_strides[at.side], b, row, head)];
    return lse == -negative_infinity() ? negative_infinity() : lse;
  };

  float max = negative_infinity();  // of all lse; a NaN leaves it and enters the sum
  for (int32_t part = lane; part < p.num_parts; part += 32) max = fmaxf(max, lse_of(part));
  max = warp_max(max);
  // No part has keys: 0 in place of -inf keeps -inf - -inf out of the weights.
  float reference = max == negative_infinity() ? 0.0f : max;
  auto weight_of = [&](int32_t part) { return exp2_approx((lse_of(part) - reference) * kLog2e); };
  float sum = 0.0f;
  for (int32_t part = lane; part < p.num_parts; part += 32) sum += weight_of(part);
  sum = warp_sum(sum);
  bool empty = sum == 0.0f;
  // Sums begin with -0.0, which leaves a lone part's zero its sign; times -0.0 it is 0.0.
  float inverse = empty ? -0.0f : 1.0f / sum;

  for (int32_t first = 0; first < p.head_dim; first += 32 * kSize) {
    const int32_t column = first + lane * kSize;
    const bool is_mine = column < p.head_dim;
    float merged[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) merged[i] = -0.0f;
    float weights = 0.0f;  // of 32 parts, one a lane
    for (int32_t part = 0; part < p.num_parts; part += kAhead) {
      if (part % 32 == 0) weights = part + lane < p.num_parts ? weight_of(part + lane) : 0.0f;
      float weight[kAhead];
      Chunk<Part, kSize> chunks[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        weight[i] = __shfl_sync(0xffffffffu, weights, (part + i) % 32);
        if (!is_mine || weight[i] == 0.0f) continue;
        Side at = side_of(p, part + i, p.out_part_stride);
        const Part* out = static_cast<const Part*>(p.outs[at.side]) + at.first +
                          offset(p.out_strides[at.side], b, row, head);
        chunks[i] = *reinterpret_cast<const Chunk<Part, kSize>*>(out + column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        // A part without keys: its out may be anything, even NaN.
        if (!is_mine || weight[i] == 0.0f) continue;
#pragma unroll
        for (int j = 0; j < kSize; ++j)
          merged[j] = fmaf(weight[i], to_float(chunks[i].x[j]), merged[j]);
      }
    }
    if (!is_mine) continue;
    Chunk<T, kSize> result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) result.x[i] = from_float<T>(merged[i] * inverse);
    T* out = static_cast<T*>(p.merged_out) + offset(p.merged_out_strides, b, row, head);
    *reinterpret_cast<Chunk<T, kSize>*>(out + column) = result;
  }
  __syncwarp();  // merged_lse may be one of lses: it is written when every lane has read them
  if (lane == 0 && p.merged_lse != nullptr) {
    p.merged_lse[offset(p.merged_lse_strides, b, row, head)] =
        empty ? negative_infinity() : reference + log2_approx(sum) * kLn2;
  }
}

template <DType kPart, DType kType>
__global__ void __launch_bounds__(kThreads) merge_states(const __grid_constant__ MergeParams p) {
  int64_t rows = p.batch * p.seqlen * p.num_heads;
  int64_t step = int64_t{gridDim.x} * kRowsPerBlock;
  for (int64_t at = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32; at < rows; at += step) {
    merge_row<kPart, kType>(p, at / p.num_heads / p.seqlen, at / p.num_heads % p.seqlen,
                            at % p.num_heads);
  }
}

template <DType kPart, DType kType>
void launch(const MergeParams& p, cudaStream_t stream) {
  int64_t rows = p.batch * p.seqlen * p.num_heads;
  if (rows == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 30;  // beyond that, a warp takes several rows
  auto blocks = static_cast<unsigned>(std::min(ceil_div<int64_t>(rows, kRowsPerBlock), kMaxBlocks));
  merge_states<kPart, kType><<<blocks, kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_merge(const MergeParams& p, cudaStream_t stream) {
  bool wide = p.part_dtype == DType::f32;  // parts of a kernel that splits the keys
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32, DType::f32>(p, stream);
    case DType::f16:
      return wide ? launch<DType::f32, DType::f16>(p, stream)
                  : launch<DType::f16, DType::f16>(p, stream);
    case DType::bf16:
      return wide ? launch<DType::f32, DType::bf16>(p, stream)
                  : launch<DType::bf16, DType::bf16>(p, stream);
    default: CUATTN_ASSERT(false, "merge_states: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
