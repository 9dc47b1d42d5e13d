// SPDX-License-Identifier: Apache-2.0
// Merges attention results over disjoint keys into the result over their union: out = sum_i out_i
// exp(lse_i) / sum_i exp(lse_i), for two parts that lie apart or many that are stacked. A lane owns
// 16 bytes of a row. Parts are added in eight sums, which are then added in order:
//
//   12 parts   sum 0 | 0 8
//              sum 1 | 1 9
//              ...
//              sum 7 | 7
//
// Up to eight parts, one warp makes all sums; two, four or eight warps of a block make those of more. The
// order is the same whoever does it, and parts without keys, also behind the last, change no bit. Source:
// FlashInfer's merge operator, arXiv:2501.01005, section 2.2. The same on the CPU: cpu/merge.cpp.
#include <algorithm>

#include "cuattn/device/convert.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kSums = 8, kWarps = 8, kThreads = kWarps * 32;

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

template <int kSize>
__device__ Chunk<float, kSize> no_sum() {  // -0.0 leaves a lone part's zero its sign
  Chunk<float, kSize> sum;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum.x[i] = -0.0f;
  return sum;
}

// The columns of a lane, weighed and added by one warp: up to kSums parts, each of which is a sum.
template <DType kPart>
__device__ auto add_few(const RowParts<kPart>& parts, int32_t column) {
  constexpr int kSize = RowParts<kPart>::kSize;
  constexpr int kAhead = sizeof(Element<kPart>) == 4 ? 4 : 2;  // loads on their way together
  const int lane = threadIdx.x % 32;
  const float weights = lane < parts.count ? parts.weight_of(lane) : 0.0f;
  auto merged = no_sum<kSize>();
  for (int32_t first = 0; first < parts.count; first += kAhead) {
    float weight[kAhead];
    Chunk<Element<kPart>, kSize> chunks[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      weight[i] = __shfl_sync(0xffffffffu, weights, first + i);
      if (column < parts.p.head_dim && weight[i] != 0.0f) chunks[i] = parts.load(first + i, column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (weight[i] == 0.0f) continue;  // a part without keys: its out may be anything, even NaN
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float part = __fmul_rn(weight[i], to_float(chunks[i].x[j]));
        merged.x[j] = __fadd_rn(merged.x[j], part);
      }
    }
  }
  return merged;
}

// The same of more parts by kTeam warps, the `warp`-th of which makes the sums warp, warp + kTeam, ...
template <int kTeam, DType kPart>
__device__ void add_many(const RowParts<kPart>& parts, int32_t warp, int32_t column,
                         Chunk<float, RowParts<kPart>::kSize> (*sums)[32]) {
  constexpr int kSize = RowParts<kPart>::kSize;
  constexpr int kMine = kSums / kTeam, kRounds = kTeam / 2;  // four loads on their way
  const int lane = threadIdx.x % 32;
  Chunk<float, kSize> mine[kMine];
#pragma unroll
  for (int j = 0; j < kMine; ++j) mine[j] = no_sum<kSize>();
  float weights = 0.0f;  // of 32 parts, one a lane
  for (int32_t first = 0; first < parts.count; first += kRounds * kSums) {
    if (first % 32 == 0) {
      weights = first + lane < parts.count ? parts.weight_of(first + lane) : 0.0f;
    }
    float weight[kRounds * kMine];
    Chunk<Element<kPart>, kSize> chunks[kRounds * kMine];
#pragma unroll
    for (int i = 0; i < kRounds * kMine; ++i) {  // of sum i % kMine of this warp
      const int32_t sum = i % kMine * kTeam + warp, part = first + i / kMine * kSums + sum;
      weight[i] = __shfl_sync(0xffffffffu, weights, part % 32);
      if (column < parts.p.head_dim && weight[i] != 0.0f) chunks[i] = parts.load(part, column);
    }
#pragma unroll
    for (int i = 0; i < kRounds * kMine; ++i) {
      if (weight[i] == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        float& sum = mine[i % kMine].x[j];
        sum = fmaf(weight[i], to_float(chunks[i].x[j]), sum);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kMine; ++j) sums[j * kTeam + warp][lane] = mine[j];
}

template <int kSize>
__device__ auto add_sums(const Chunk<float, kSize> (*sums)[32]) {
  auto merged = no_sum<kSize>();
  for (int i = 0; i < kSums; ++i) {
    const Chunk<float, kSize> sum = sums[i][threadIdx.x % 32];
#pragma unroll
    for (int j = 0; j < kSize; ++j) merged.x[j] = __fadd_rn(merged.x[j], sum.x[j]);
  }
  return merged;
}

// One warp of the kTeam of a row. Rows of a block are merged at the same time, for they wait for each
// other; `sums` is where the team of a row leaves its sums.
template <DType kPart, DType kType, int kTeam>
__device__ void merge_row(const MergeParams& p, const Row& at, int32_t warp,
                          Chunk<float, RowParts<kPart>::kSize> (*sums)[32]) {
  using T = Element<kType>;
  constexpr int kSize = RowParts<kPart>::kSize;
  const int lane = threadIdx.x % 32;
  const RowParts<kPart> parts(p, at);
  const bool empty = parts.sum == 0.0f;
  const float inverse = empty ? -0.0f : 1.0f / parts.sum;  // -0.0 times -0.0 is 0.0
  for (int32_t first = 0; first < p.head_dim; first += 32 * kSize) {
    const int32_t column = first + lane * kSize;
    Chunk<float, kSize> merged;
    if constexpr (kTeam == 1) {
      merged = add_few(parts, column);
    } else {
      add_many<kTeam>(parts, warp, column, sums);
      __syncthreads();
      if (warp == 0) merged = add_sums(sums);
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

// Rows of the result, [batch, seqlen, num_heads] or [total, num_heads].
__host__ __device__ int64_t count_rows(const MergeParams& p) {
  return (p.cu_seqlens != nullptr ? p.total : p.batch * p.seqlen) * p.num_heads;
}

// Whether a packed row is of the sequence that begins at it or is the last to begin before it.
__device__ bool is_in_sequence(const MergeParams& p, int64_t row) {
  int32_t sequence = 0, end = static_cast<int32_t>(p.batch);
  while (end - sequence > 1) {
    const int32_t middle = sequence + (end - sequence) / 2;
    (p.cu_seqlens[middle] <= row ? sequence : end) = middle;
  }
  const Span span =
      make_span(p.cu_seqlens, nullptr, sequence, static_cast<int32_t>(p.seqlen), p.total);
  return row >= span.start && row - span.start < span.stored;
}

__device__ Row row_of(const MergeParams& p, int64_t number) {
  const int64_t row = number / p.num_heads, head = number % p.num_heads;
  const bool exists = number < count_rows(p);
  if (p.cu_seqlens == nullptr) return {row / p.seqlen, row % p.seqlen, head, exists};
  return {0, row, head, exists && is_in_sequence(p, row)};
}

template <DType kPart, DType kType, int kTeam>
__global__ void __launch_bounds__(kThreads, kTeam == 1 ? 4 : 2)
    merge_states(const __grid_constant__ MergeParams p) {
  constexpr int kRows = kWarps / kTeam;  // of a block
  __shared__ Chunk<float, RowParts<kPart>::kSize> sums[kTeam == 1 ? 1 : kRows * kSums][32];
  const int32_t warp = threadIdx.x / 32, of_block = warp / kTeam;
  const int64_t rows = count_rows(p), step = int64_t{gridDim.x} * kRows;
  for (int64_t first = int64_t{blockIdx.x} * kRows; first < rows; first += step) {
    const Row row = row_of(p, first + of_block);
    wait_for_previous_kernel();  // which had waited for whoever wrote cu_seqlens
    merge_row<kPart, kType, kTeam>(p, row, warp % kTeam,
                                   sums + (kTeam == 1 ? 0 : of_block * kSums));
  }
}

template <DType kPart, DType kType, int kTeam>
void launch_team(const MergeParams& p, int32_t major, cudaStream_t stream) {
  const int64_t rows = count_rows(p);
  if (rows == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 30;  // beyond that, a block takes several rows
  const int64_t blocks = std::min(ceil_div<int64_t>(rows, kWarps / kTeam), kMaxBlocks);
  launch_overlapping(merge_states<kPart, kType, kTeam>, static_cast<unsigned>(blocks), kThreads, 0,
                     major, stream, p);
}

template <DType kPart, DType kType>
void launch(const MergeParams& p, int32_t major, cudaStream_t stream) {
  auto run = p.num_parts <= 8    ? launch_team<kPart, kType, 1>
             : p.num_parts <= 16 ? launch_team<kPart, kType, 2>
             : p.num_parts <= 32 ? launch_team<kPart, kType, 4>
                                 : launch_team<kPart, kType, 8>;
  run(p, major, stream);
}

}  // namespace

void launch_merge(const MergeParams& p, int32_t major, cudaStream_t stream) {
  bool wide = p.part_dtype == DType::f32;  // parts of a kernel that splits the keys
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32, DType::f32>(p, major, stream);
    case DType::f16:
      return wide ? launch<DType::f32, DType::f16>(p, major, stream)
                  : launch<DType::f16, DType::f16>(p, major, stream);
    case DType::bf16:
      return wide ? launch<DType::f32, DType::bf16>(p, major, stream)
                  : launch<DType::bf16, DType::bf16>(p, major, stream);
    default: CUATTN_ASSERT(false, "merge_states: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
