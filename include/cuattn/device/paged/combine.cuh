// SPDX-License-Identifier: Apache-2.0
// One row of paged attention from the partial results of its unit. The parts make kCombineWarps
// shares, for the warps of a block or for one warp: all loads are on their way at once, and the
// order of the sum is fixed. Source:
// arXiv:2307.08691, section 3.1 (merging softmax states). Next: cuda/paged/combine.cu.
#pragma once

#include "cuattn/device/paged/tasks.cuh"

namespace cuattn::device {

constexpr int kCombineWarps = 4;      // of a block; shares of a row
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

// What the shares of one row bring together for kCombineColumns columns.
struct CombineShared {
  float4 merged[kCombineWarps][32];
  float sum[kCombineWarps];
  float maximum;
};

// One share: part `share` and every kCombineWarps-th after it, kAhead of them loaded at once. The
// loads begin with the object, so that several rows or shares may have theirs on the way.
template <DType kType, Parts kParts, int kAhead = 8>
class CombineShare {
 public:
  __device__ __forceinline__ CombineShare(const PagedParams& p,
                                          const RowParts<kType, kParts>& parts, int32_t count,
                                          int32_t first_column, int share)
      : parts_(parts),
        count_(count),
        column_(first_column + lane() * 4),
        width_(p.head_dim),
        share_(share) {
    load(share);
    maximum_ = negative_infinity();  // a NaN leaves it and enters the sum
    for (int32_t part = lane(); part < count; part += 32) {
      maximum_ = fmaxf(maximum_, parts.lse(part));
    }
  }

  // Then those who hold the shares meet, and finish_row follows.
  __device__ __forceinline__ void put(CombineShared& shared) {
    float maximum = warp_max(maximum_);
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
    for (int32_t first = share_; first < count_;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        float weight = exp2_approx(lses_[i] - reference);
        sum += weight;
        add(weight, values_[i]);
      }
      first += kCombineWarps * kAhead;
      if (first < count_) load(first);
    }
    shared.merged[share_][lane()] = merged;
    if (lane() == 0) shared.sum[share_] = sum;
    if (lane() == 0 && share_ == 0) shared.maximum = maximum;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void load(int32_t first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int32_t part = first + i * kCombineWarps;
      lses_[i] = part < count_ ? parts_.lse(part) : negative_infinity();
      values_[i] = part < count_ && column_ < width_ ? parts_.values(part, column_) : float4{};
    }
  }

  RowParts<kType, kParts> parts_;
  int32_t count_, column_, width_, share_;
  float maximum_;
  float4 values_[kAhead];
  float lses_[kAhead];
};

// The output of a row from what all shares have put, by one warp.
template <DType kType>
__device__ __forceinline__ void finish_row(const PagedParams& p, const CombineShared& shared,
                                           int32_t b, const UnitRow& row, int32_t first_column) {
  int lane = threadIdx.x % 32;
  int32_t column = first_column + lane * 4;
  float sum = shared.sum[0];
  float4 merged = shared.merged[0][lane];
#pragma unroll
  for (int other = 1; other < kCombineWarps; ++other) {
    sum += shared.sum[other];
    float4 v = shared.merged[other][lane];
    merged = {merged.x + v.x, merged.y + v.y, merged.z + v.z, merged.w + v.w};
  }
  bool leads = lane == 0 && first_column == 0;
  RowOutput out = final_output(p, b, row, shared.maximum, sum, leads);
  float f = out.factor;  // 0 without a key, and then nothing was merged
  float4 scaled = {merged.x * f, merged.y * f, merged.z * f, merged.w * f};
  if (column >= p.head_dim) return;
  if (out.type == DType::f32) {
    store4<DType::f32>(out.to, column, scaled);
  } else {
    store4<kType>(out.to, column, scaled);
  }
}

}  // namespace cuattn::device
