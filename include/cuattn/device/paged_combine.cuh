// SPDX-License-Identifier: Apache-2.0
// One row of paged attention from the partial results of its unit. The warps of a block share the
// parts: all loads are on their way at once. The order of the sum is fixed. Source:
// arXiv:2307.08691, section 3.1 (merging softmax states). Next: cuda/paged_combine.cu.
#pragma once

#include "cuattn/device/paged.cuh"

namespace cuattn::device {

constexpr int kCombineWarps = 4;      // of a block
constexpr int kCombineColumns = 128;  // of a block, four a lane

// The parts of a unit: from partial slots, or V2's partitions.
enum class Parts { partial, partitions };

template <DType kType, Parts kParts>
struct RowParts {
  const PagedParams& p;
  PagedSlots slots;
  int32_t row;         // partial: within the unit
  int64_t first_part;  // partitions

  __device__ int64_t index(int32_t part) const {
    if constexpr (kParts == Parts::partial) return slots.slot(part) * p.work.rows + row;
    return first_part + part;
  }
  // Log-sum-exp in base 2.
  __device__ float lse(int32_t part) const {
    int64_t at = index(part);
    if constexpr (kParts == Parts::partial) return p.partial_lse[at];
    return fmaf(p.max_logits[at], kLog2e, log2_approx(p.exp_sums[at]));
  }
  // Four columns of the normalised output.
  __device__ float4 values(int32_t part, int32_t column) const {
    int64_t at = index(part) * p.head_dim + column;
    if constexpr (kParts == Parts::partial || kType == DType::f32) {
      const void* from = kParts == Parts::partial ? p.partial_out : p.tmp_out;
      return *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    } else {
      using T = Element<kType>;
      struct alignas(8) Four {
        T x[4];
      };
      Four four = *reinterpret_cast<const Four*>(static_cast<const T*>(p.tmp_out) + at);
      return {to_float(four.x[0]), to_float(four.x[1]), to_float(four.x[2]), to_float(four.x[3])};
    }
  }
};

template <DType kType>
__device__ __forceinline__ void store4(void* to, int32_t column, const float4& v) {
  if constexpr (kType == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(to) + column) = v;
  } else {
    uint2 packed = {pack2<kType>(v.x, v.y), pack2<kType>(v.z, v.w)};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + column) = packed;
  }
}

struct CombineShared {
  float4 merged[kCombineWarps][32];
  float sum[kCombineWarps];
};

// Columns first_column to first_column + 127 of one row. All threads of the block call it; before
// the next call they meet.
template <DType kType, Parts kParts>
__device__ __forceinline__ void combine_row(const PagedParams& p,
                                            const RowParts<kType, kParts>& parts, int32_t count,
                                            int32_t b, const UnitRow& row, int32_t first_column,
                                            CombineShared& shared) {
  constexpr int kAhead = 8;  // parts that a warp loads at once
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t column = first_column + lane * 4;
  float4 values[kAhead];
  float lses[kAhead];
  auto load = [&](int32_t first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int32_t part = first + i * kCombineWarps;
      lses[i] = part < count ? parts.lse(part) : negative_infinity();
      values[i] = part < count && column < p.head_dim ? parts.values(part, column) : float4{};
    }
  };
  load(warp);
  float maximum = negative_infinity();  // a NaN leaves it and enters the sum
  for (int32_t part = lane; part < count; part += 32) maximum = fmaxf(maximum, parts.lse(part));
  maximum = warp_max(maximum);
  float reference = maximum == negative_infinity() ? 0.0f : maximum;

  float sum = 0.0f;
  float4 merged = {};
  auto add = [&](float weight, const float4& v) {
    // A part without keys: its values may be anything, even NaN.
    merged.x = weight == 0.0f ? merged.x : fmaf(weight, v.x, merged.x);
    merged.y = weight == 0.0f ? merged.y : fmaf(weight, v.y, merged.y);
    merged.z = weight == 0.0f ? merged.z : fmaf(weight, v.z, merged.z);
    merged.w = weight == 0.0f ? merged.w : fmaf(weight, v.w, merged.w);
  };
  for (int32_t first = warp; first < count;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float weight = exp2_approx(lses[i] - reference);
      sum += weight;
      add(weight, values[i]);
    }
    first += kCombineWarps * kAhead;
    if (first < count) load(first);
  }
  shared.merged[warp][lane] = merged;
  if (lane == 0) shared.sum[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < kCombineWarps; ++other) {
    sum += shared.sum[other];
    float4 v = shared.merged[other][lane];
    merged = {merged.x + v.x, merged.y + v.y, merged.z + v.z, merged.w + v.w};
  }
  RowOutput out = final_output(p, b, row, maximum, sum, lane == 0 && first_column == 0);
  float f = out.factor;  // 0 without a key, and then nothing was merged
  float4 scaled = {merged.x * f, merged.y * f, merged.z * f, merged.w * f};
  if (column < p.head_dim) store4<kType>(out.to, column, scaled);
}

}  // namespace cuattn::device
