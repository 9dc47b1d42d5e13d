// SPDX-License-Identifier: Apache-2.0
// Merges attention results over disjoint keys into the result over their union: out = sum_i out_i
// exp(lse_i) / sum_i exp(lse_i), for two parts that lie apart or many that are stacked. A lane owns
// 16 bytes of a row. Up to eight parts are added by one warp, more by eight, which take them in turn:
//
//   12 parts   warp 0 | 0 8      sums of the warps, in order, in warp 0
//              warp 1 | 1 9
//              ...
//              warp 7 | 7
//
// Parts without keys, also behind the last, change no bit: one warp adds as eight would. Source:
// FlashInfer's merge operator, arXiv:2501.01005, section 2.2. The same on the CPU: cpu/merge.cpp.
#include <algorithm>

#include "cuattn/device/convert.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"
#include "cuda/merge/states.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kWarps = 8, kThreads = kWarps * 32;

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

// Where the parts and the result of a row lie.
struct Row {
  int64_t batch, row, head;
  bool exists;
};

// The parts of a row, and what they weigh. A warp together.
template <DType kPart>
struct RowParts {
  using Part = Element<kPart>;
  static constexpr int kSize = 16 / sizeof(Part);  // elements of a lane
  const MergeParams& p;
  const Row& at;
  int32_t count;
  float reference, sum;  // the largest lse; of the weights, which are relative to it

  __device__ RowParts(const MergeParams& p, const Row& at)
      : p(p), at(at), count(at.exists ? p.num_parts : 0) {
    const int lane = threadIdx.x % 32;
    float max = negative_infinity();  // a NaN leaves it and enters the sum
    for (int32_t part = lane; part < count; part += 32) max = fmaxf(max, lse_of(part));
    max = warp_max(max);
    // No part has keys: 0 in place of -inf keeps -inf - -inf out of the weights.
    reference = max == negative_infinity() ? 0.0f : max;
    sum = 0.0f;
    for (int32_t part = lane; part < count; part += 32) sum += weight_of(part);
    sum = warp_sum(sum);
  }
  // -inf: the part saw no key. +inf too, as FlashAttention-2 and vLLM write rows without keys.
  __device__ float lse_of(int32_t part) const {
    Side side = side_of(p, part, p.lse_part_stride);
    float lse =
        p.lses[side.side][side.first + offset(p.lse_strides[side.side], at.batch, at.row, at.head)];
    return lse == -negative_infinity() ? negative_infinity() : lse;
  }
  __device__ float weight_of(int32_t part) const {
    return exp2_approx((lse_of(part) - reference) * kLog2e);
  }
  __device__ Chunk<Part, kSize> load(int32_t part, int32_t column) const {
    Side side = side_of(p, part, p.out_part_stride);
    const Part* out = static_cast<const Part*>(p.outs[side.side]) + side.first +
                      offset(p.out_strides[side.side], at.batch, at.row, at.head);
    return *reinterpret_cast<const Chunk<Part, kSize>*>(out + column);
  }
};

// This lane's columns of parts first, first + kStep, ..., weighed. Sums begin with -0.0, which leaves a
// lone part's zero its sign. kStep == 1: each part is a sum of its own, as the first of each of eight
// warps is.
template <int kStep, DType kPart>
__device__ auto add_parts(const RowParts<kPart>& parts, int32_t first, int32_t column) {
  constexpr int kSize = RowParts<kPart>::kSize;
  constexpr int kAhead = sizeof(Element<kPart>) == 4 ? 4 : 2;  // loads on their way together
  const int lane = threadIdx.x % 32;
  const bool is_mine = column < parts.p.head_dim;
  const int32_t mine = (parts.count - first + kStep - 1) / kStep;
  Chunk<float, kSize> merged;
#pragma unroll
  for (int i = 0; i < kSize; ++i) merged.x[i] = -0.0f;
  float weights = 0.0f;  // of 32 parts, one a lane
  for (int32_t number = 0; number < mine; number += kAhead) {
    if (number % 32 == 0) {
      weights = number + lane < mine ? parts.weight_of(first + (number + lane) * kStep) : 0.0f;
    }
    float weight[kAhead];
    Chunk<Element<kPart>, kSize> chunks[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      weight[i] = __shfl_sync(0xffffffffu, weights, (number + i) % 32);
      if (!is_mine || weight[i] == 0.0f) continue;
      chunks[i] = parts.load(first + (number + i) * kStep, column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      // A part without keys: its out may be anything, even NaN.
      if (!is_mine || weight[i] == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float value = to_float(chunks[i].x[j]);
        merged.x[j] = kStep == 1 ? __fadd_rn(merged.x[j], __fmul_rn(weight[i], value))
                                 : fmaf(weight[i], value, merged.x[j]);
      }
    }
  }
  return merged;
}

// One warp of a row: the only one, or the `warp`-th of kWarps (kTogether), which wait for each other
// and leave their sums in `sums`.
template <DType kPart, DType kType, bool kTogether>
__device__ void merge_row(const MergeParams& p, const Row& at, int32_t warp,
                          Chunk<float, RowParts<kPart>::kSize> (*sums)[32]) {
  using T = Element<kType>;
  constexpr int kSize = RowParts<kPart>::kSize;
  const int lane = threadIdx.x % 32;
  const RowParts<kPart> parts(p, at);
  const bool empty = parts.sum == 0.0f;
  const float inverse = empty ? -0.0f : 1.0f / parts.sum;  // -0.0 times -0.0 is 0.0
  for (int32_t column = lane * kSize; column - lane * kSize < p.head_dim; column += 32 * kSize) {
    auto merged = add_parts<kTogether ? kWarps : 1>(parts, warp, column);
    if constexpr (kTogether) {
      sums[warp][lane] = merged;
      __syncthreads();
      for (int32_t other = 1; warp == 0 && other < kWarps; ++other) {
        const Chunk<float, kSize> added = sums[other][lane];
#pragma unroll
        for (int j = 0; j < kSize; ++j) merged.x[j] = __fadd_rn(merged.x[j], added.x[j]);
      }
      __syncthreads();  // the next columns may be written
    }
    if (column >= p.head_dim || warp > 0 || !at.exists) continue;
    Chunk<T, kSize> result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) result.x[i] = from_float<T>(merged.x[i] * inverse);
    T* out =
        static_cast<T*>(p.merged_out) + offset(p.merged_out_strides, at.batch, at.row, at.head);
    *reinterpret_cast<Chunk<T, kSize>*>(out + column) = result;
  }
  __syncwarp();  // merged_lse may be one of lses: it is written when all have read them
  if (lane == 0 && warp == 0 && at.exists && p.merged_lse != nullptr) {
    p.merged_lse[offset(p.merged_lse_strides, at.batch, at.row, at.head)] =
        empty ? negative_infinity() : parts.reference + log2_approx(parts.sum) * kLn2;
  }
}

// Row `number` of all rows, [batch, seqlen, num_heads].
__device__ Row row_of(const MergeParams& p, const MergeSpans& spans, int64_t number) {
  const int64_t of_sequence = number / p.num_heads;
  Row row = {of_sequence / p.seqlen, of_sequence % p.seqlen, number % p.num_heads,
             number < p.batch * p.seqlen * p.num_heads};
  if (spans.cu_seqlens == nullptr || !row.exists) return row;
  const Span span = make_span(spans.cu_seqlens, nullptr, static_cast<int32_t>(row.batch),
                              static_cast<int32_t>(p.seqlen), spans.total);
  return {0, span.start + row.row, row.head, row.row < span.stored};
}

template <DType kPart, DType kType, bool kTogether>
__global__ void __launch_bounds__(kThreads)
    merge_states(const __grid_constant__ MergeParams p, MergeSpans spans) {
  __shared__ Chunk<float, 16 / sizeof(Element<kPart>)> sums[kTogether ? kWarps : 1][32];
  constexpr int64_t kRows = kTogether ? 1 : kWarps;  // of a block
  const int32_t warp = threadIdx.x / 32;
  wait_for_previous_kernel();
  const int64_t rows = p.batch * p.seqlen * p.num_heads, step = gridDim.x * kRows;
  for (int64_t first = blockIdx.x * kRows; first < rows; first += step) {
    const Row row = row_of(p, spans, first + (kTogether ? 0 : warp));
    merge_row<kPart, kType, kTogether>(p, row, kTogether ? warp : 0, sums);
  }
}

template <DType kPart, DType kType>
void launch(const MergeParams& p, const MergeSpans& spans, int32_t major, cudaStream_t stream) {
  const int64_t rows = p.batch * p.seqlen * p.num_heads;
  if (rows == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 30;  // beyond that, a block takes several rows
  const bool together = p.num_parts > kWarps;
  const int64_t blocks = together ? rows : ceil_div<int64_t>(rows, kWarps);
  auto kernel = together ? merge_states<kPart, kType, true> : merge_states<kPart, kType, false>;
  launch_overlapping(kernel, static_cast<unsigned>(std::min(blocks, kMaxBlocks)), kThreads, 0,
                     major, stream, p, spans);
}

}  // namespace

void launch_merge(const MergeParams& p, cudaStream_t stream) {
  launch_merge_behind(p, {}, 0, stream);
}

void launch_merge_behind(const MergeParams& p, const MergeSpans& spans, int32_t major,
                         cudaStream_t stream) {
  bool wide = p.part_dtype == DType::f32;  // parts of a kernel that splits the keys
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32, DType::f32>(p, spans, major, stream);
    case DType::f16:
      return wide ? launch<DType::f32, DType::f16>(p, spans, major, stream)
                  : launch<DType::f16, DType::f16>(p, spans, major, stream);
    case DType::bf16:
      return wide ? launch<DType::f32, DType::bf16>(p, spans, major, stream)
                  : launch<DType::bf16, DType::bf16>(p, spans, major, stream);
    default: CUATTN_ASSERT(false, "merge_states: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
