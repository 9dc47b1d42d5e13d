// SPDX-License-Identifier: Apache-2.0
// Merges attention results over disjoint keys into the result over their union: out = sum_i out_i
// exp(lse_i) / sum_i exp(lse_i), for two parts that lie apart or many that are stacked. A lane owns 16
// bytes of a row. Few parts are added by one warp, many by up to eight, which take them in turn:
//
//   12 parts   warp 0 | 0 2 4 6 8 10      sums of the warps, in order, in warp 0
//              warp 1 | 1 3 5 7 9 11
//
// The number of parts alone decides, so that bits do not depend on how many rows there are. Source:
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
constexpr int kPartsPerWarp = 8;  // all on their way at once

// That add the parts of one row.
int32_t warps_of_row(int32_t num_parts) {
  int32_t warps = 1;
  while (warps < kWarps && num_parts > warps * kPartsPerWarp) warps *= 2;
  return warps;
}

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

// One warp of `warps`, the `warp`-th. Rows of a block are merged at the same time, for they wait for
// each other; `sums` is where warps leave theirs.
template <DType kPart, DType kType>
__device__ void merge_row(const MergeParams& p, const Row& at, int32_t warp, int32_t warps,
                          Chunk<float, 16 / sizeof(Element<kPart>)> (*sums)[32]) {
  using Part = Element<kPart>;
  using T = Element<kType>;
  constexpr int kSize = 16 / sizeof(Part);
  // Parts whose loads are on their way together: those that a kernel left, in float32, are many.
  constexpr int kAhead = sizeof(Part) == 4 ? kPartsPerWarp : 2;
  const int lane = threadIdx.x % 32;
  // -inf: the part saw no key. +inf too, as FlashAttention-2 and vLLM write rows without keys.
  auto lse_of = [&](int32_t part) {
    Side side = side_of(p, part, p.lse_part_stride);
    float lse =
        p.lses[side.side][side.first + offset(p.lse_strides[side.side], at.batch, at.row, at.head)];
    return lse == -negative_infinity() ? negative_infinity() : lse;
  };
  const int32_t num_parts = at.exists ? p.num_parts : 0;

  float max = negative_infinity();  // of all lse; a NaN leaves it and enters the sum
  for (int32_t part = lane; part < num_parts; part += 32) max = fmaxf(max, lse_of(part));
  max = warp_max(max);
  // No part has keys: 0 in place of -inf keeps -inf - -inf out of the weights.
  float reference = max == negative_infinity() ? 0.0f : max;
  auto weight_of = [&](int32_t part) { return exp2_approx((lse_of(part) - reference) * kLog2e); };
  float sum = 0.0f;
  for (int32_t part = lane; part < num_parts; part += 32) sum += weight_of(part);
  sum = warp_sum(sum);
  bool empty = sum == 0.0f;
  // Sums begin with -0.0, which leaves a lone part's zero its sign; times -0.0 it is 0.0.
  float inverse = empty ? -0.0f : 1.0f / sum;

  const int32_t mine = (num_parts - warp + warps - 1) / warps;  // parts warp, warp + warps, ...
  for (int32_t first = 0; first < p.head_dim; first += 32 * kSize) {
    const int32_t column = first + lane * kSize;
    const bool is_mine = column < p.head_dim;
    Chunk<float, kSize> merged;
#pragma unroll
    for (int i = 0; i < kSize; ++i) merged.x[i] = -0.0f;
    float weights = 0.0f;  // of 32 parts, one a lane
    for (int32_t number = 0; number < mine; number += kAhead) {
      if (number % 32 == 0) {
        weights = number + lane < mine ? weight_of(warp + (number + lane) * warps) : 0.0f;
      }
      float weight[kAhead];
      Chunk<Part, kSize> chunks[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        weight[i] = __shfl_sync(0xffffffffu, weights, (number + i) % 32);
        if (!is_mine || weight[i] == 0.0f) continue;
        Side side = side_of(p, warp + (number + i) * warps, p.out_part_stride);
        const Part* out = static_cast<const Part*>(p.outs[side.side]) + side.first +
                          offset(p.out_strides[side.side], at.batch, at.row, at.head);
        chunks[i] = *reinterpret_cast<const Chunk<Part, kSize>*>(out + column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        // A part without keys: its out may be anything, even NaN.
        if (!is_mine || weight[i] == 0.0f) continue;
#pragma unroll
        for (int j = 0; j < kSize; ++j)
          merged.x[j] = fmaf(weight[i], to_float(chunks[i].x[j]), merged.x[j]);
      }
    }
    if (warps > 1) {
      if (warp > 0) sums[warp][lane] = merged;
      __syncthreads();
      for (int32_t other = 1; warp == 0 && other < warps; ++other) {
        const Chunk<float, kSize> added = sums[other][lane];
#pragma unroll
        for (int j = 0; j < kSize; ++j) merged.x[j] += added.x[j];
      }
      __syncthreads();  // the next columns may be written
    }
    if (!is_mine || warp > 0 || !at.exists) continue;
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
        empty ? negative_infinity() : reference + log2_approx(sum) * kLn2;
  }
}

template <DType kPart, DType kType>
__global__ void __launch_bounds__(kThreads)
    merge_states(const __grid_constant__ MergeParams p, MergeSpans spans, int32_t warps) {
  __shared__ Chunk<float, 16 / sizeof(Element<kPart>)> sums[kWarps][32];
  wait_for_previous_kernel();
  const int64_t rows = p.batch * p.seqlen * p.num_heads, rows_of_block = kWarps / warps;
  const int32_t of_block = threadIdx.x / 32 / warps;
  const int64_t step = gridDim.x * rows_of_block;
  for (int64_t first = blockIdx.x * rows_of_block; first < rows; first += step) {
    const int64_t at = first + of_block;
    Row row = {at / p.num_heads / p.seqlen, at / p.num_heads % p.seqlen, at % p.num_heads,
               at < rows};
    if (spans.cu_seqlens != nullptr && row.exists) {
      const Span span = make_span(spans.cu_seqlens, nullptr, static_cast<int32_t>(row.batch),
                                  static_cast<int32_t>(p.seqlen), spans.total);
      row = {0, span.start + row.row, row.head, row.row < span.stored};
    }
    merge_row<kPart, kType>(p, row, threadIdx.x / 32 % warps, warps, sums + of_block * warps);
  }
}

template <DType kPart, DType kType>
void launch(const MergeParams& p, const MergeSpans& spans, int32_t major, cudaStream_t stream) {
  int64_t rows = p.batch * p.seqlen * p.num_heads;
  if (rows == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 30;  // beyond that, a warp takes several rows
  const int32_t warps = warps_of_row(p.num_parts);
  auto blocks =
      static_cast<unsigned>(std::min(ceil_div<int64_t>(rows, kWarps / warps), kMaxBlocks));
  launch_overlapping(merge_states<kPart, kType>, blocks, kThreads, 0, major, stream, p, spans,
                     warps);
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
