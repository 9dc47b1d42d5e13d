// SPDX-License-Identifier: Apache-2.0
// What the passes of the sm80 backward kernels do with a tile: the products of fragments, and the
// stores. A warp owns 16 rows of the left operand; the letters are those of cpu/backward.cpp. Used
// by queries.cuh, keys.cuh and bias.cuh.
#pragma once

#include "cuattn/device/tile_sm80.cuh"
#include "cuattn/tiles.h"
#include "cuda/backward/weigh.cuh"

namespace cuattn::backward {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileRows = 16 * kWarps;  // of the operand that stays

// One lane's share of 16 rows and 8 * kBlocks columns: rows g and g + 8, columns 8 n + 2 q and the
// next, lane = 4 g + q.
template <int kBlocks>
using Fragment = float[kBlocks][4];

template <int kBlocks>
__device__ __forceinline__ void clear(Fragment<kBlocks>& x) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = 0.0f;
  }
}

// result = left right^T: the warp's 16 rows of `left` with all 8 * kBlocks rows of `right`, both of
// kDim columns. The operands of step k + 1 are fetched before the products of step k.
template <DType kType, int kDim, int kBlocks>
__device__ __forceinline__ void multiply_rows(Fragment<kBlocks>& result, uint32_t left,
                                              uint32_t right) {
  constexpr int kBytes = kDim * 2, kSteps = kDim / 16;
  uint32_t lane = threadIdx.x % 32;
  uint32_t a_row = threadIdx.x / 32 * 16 + lane % 16, b_row = lane % 8 + lane / 16 * 8;
  uint32_t a_base = left + a_row * kBytes, b_base = right + b_row * kBytes;
  uint32_t a_phase = device::swizzle_phase<kBytes>(a_row, lane / 16);
  uint32_t b_phase = device::swizzle_phase<kBytes>(b_row, lane / 8 % 2);
  uint32_t a[2][4], b[2][kBlocks / 2][4];
  auto fetch = [&](int step) {
    device::ldmatrix_x4(a[step % 2], device::chunk_address<kBytes>(a_base, a_phase, 2 * step));
    uint32_t chunk = device::chunk_address<kBytes>(b_base, b_phase, 2 * step);
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n)
      device::ldmatrix_x4(b[step % 2][n], chunk + n * 16 * kBytes);
  };
  clear<kBlocks>(result);
  fetch(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) fetch(step + 1);
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n) {
      const uint32_t (&right_frag)[4] = b[step % 2][n];
      device::mma_m16n8k16<kType>(result[2 * n], a[step % 2], right_frag[0], right_frag[1]);
      device::mma_m16n8k16<kType>(result[2 * n + 1], a[step % 2], right_frag[2], right_frag[3]);
    }
  }
}

// sum += weights right: weights from registers, rounded to the dtype; `right` has 8 * kBlocks rows
// of kDim columns.
template <DType kType, int kDim, int kBlocks>
__device__ __forceinline__ void add_weighted(Fragment<kDim / 8>& sum,
                                             const Fragment<kBlocks>& weights, uint32_t right) {
  constexpr int kBytes = kDim * 2, kPairs = kDim / 16, kSteps = kBlocks / 2;
  uint32_t lane = threadIdx.x % 32;
  uint32_t base = right + lane % 16 * kBytes;
  uint32_t phase = device::swizzle_phase<kBytes>(lane % 16, lane / 16);
  uint32_t b[2][4];
  auto fetch = [&](int index) {  // pair `index % kPairs` of step `index / kPairs`
    uint32_t address = device::chunk_address<kBytes>(base, phase, 2 * (index % kPairs));
    device::ldmatrix_x4_trans(b[index % 2], address + index / kPairs * 16 * kBytes);
  };
  fetch(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float (&low)[4] = weights[2 * step];
    const float (&high)[4] = weights[2 * step + 1];
    uint32_t a[4] = {device::pack2<kType>(low[0], low[1]), device::pack2<kType>(low[2], low[3]),
                     device::pack2<kType>(high[0], high[1]),
                     device::pack2<kType>(high[2], high[3])};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      int index = step * kPairs + pair;
      if (index + 1 < kSteps * kPairs) fetch(index + 1);
      const uint32_t (&right_frag)[4] = b[index % 2];
      device::mma_m16n8k16<kType>(sum[2 * pair], a, right_frag[0], right_frag[1]);
      device::mma_m16n8k16<kType>(sum[2 * pair + 1], a, right_frag[2], right_frag[3]);
    }
  }
}

// A fragment times Z of dropout; its rows are queries, `row` and row + 8 of this lane.
template <int kBlocks>
__device__ __forceinline__ void drop_rows(Fragment<kBlocks>& x, const device::HeadDropout& dropout,
                                          int32_t row, int32_t key0) {
  static_assert(kBlocks % 4 == 0, "four blocks are drawn at a time");
#pragma unroll
  for (int n = 0; n < kBlocks; n += 4) {
    uint32_t kept = dropout.kept_of_rows(row, key0 + n * 8);
    device::apply_kept(x, n, kept, dropout.params.factor());
  }
}

// Stores the warp's 16 rows of `sum` times `factor`, 16-bit, as whole rows by way of `staging`:
// shared memory of 16 rows that no other warp reads. Rows in [used, stored) become zeros. `to`: row
// 0 of the sequence and head.
template <DType kType, int kDim>
__device__ __forceinline__ void store_rows(const Fragment<kDim / 8>& sum, float factor,
                                           uint32_t staging, char* to, int64_t row_bytes,
                                           int32_t row0, const Span& span, int32_t dim) {
  constexpr int kBytes = kDim * 2, kChunks = kDim / 8;
  uint32_t lane = threadIdx.x % 32;
  __syncwarp();  // every lane has read its last operand there
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::store_shared(
          staging + device::swizzled<kBytes>(half * 8 + lane / 4, n) + lane % 4 * 4,
          device::pack2<kType>(sum[n][2 * half] * factor, sum[n][2 * half + 1] * factor));
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * kChunks / 32; ++i) {
    int32_t warp_row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
    int32_t row = row0 + warp_row;
    uint4 values = device::load_shared16(staging + device::swizzled<kBytes>(warp_row, chunk));
    if (row >= span.used) values = uint4{};
    if (row < span.stored && chunk * 8 < dim)
      *reinterpret_cast<uint4*>(to + row * row_bytes + chunk * 16) = values;
  }
}

// The same in float32, from registers.
template <int kDim>
__device__ __forceinline__ void store_float_rows(const Fragment<kDim / 8>& sum, float factor,
                                                 char* to, int64_t row_bytes, int32_t row0,
                                                 const Span& span, int32_t dim) {
  int32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t row = row0 + half * 8 + lane / 4;
    bool used = row < span.used;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float2 values = {used ? sum[n][2 * half] * factor : 0.0f,
                       used ? sum[n][2 * half + 1] * factor : 0.0f};
      if (row < span.stored && n * 8 < dim)
        *reinterpret_cast<float2*>(to + row * row_bytes + (n * 8 + lane % 4 * 2) * 4) = values;
    }
  }
}

}  // namespace cuattn::backward
