// SPDX-License-Identifier: Apache-2.0
// Rows of x as quantize takes them: a thread block copies a tile of rows to shared memory, whole
// lines at a time, and a thread has 64 channels of one row in registers, so that most of a rotation
// stays inside it. Source: QuaRot, arXiv:2404.00456. Next: quantize.cu.
//
//   memory            shared memory          registers of 1, 2 or 4 threads
//   row 0  |~~~~~~|   row 0  |~~~~~~|..|     x[0..63], x[0..63]    signs, butterflies
//   row 1  |~~~~~~|   row 1  |~~~~~~|..|     x[0..63], x[0..63]    of 1, 2, 4 .. channels
//                     (16 bytes between rows, so that 8 threads read 8 rows without conflict)
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuda/fused/codes.cuh"
#include "cuda/fused/steps.cuh"

namespace cuattn {
namespace {

constexpr int kRun = 16;  // channels that are there or not together

// Which channels of which row of a tile a thread has. The threads of a row are 8 apart, so that 8
// neighbours are in 8 rows.
struct RowPlace {
  int lane, row, first, channels;

  __device__ RowPlace(const TileShape& shape, int dim) {
    int thread = static_cast<int>(threadIdx.x);
    lane = thread >> 3 & (shape.lanes - 1);
    row = (thread & 7) | thread / (8 * shape.lanes) << 3;
    first = lane * kChannels;
    channels = max(min(dim - first, kChannels), 0);
  }
};

// Signs of R: bit i of a word is that of channel 32 * word + i. All threads of a block call it, which
// are no fewer than channels.
__device__ __forceinline__ void find_flips(int dim, uint32_t* flips) {
  int channel = static_cast<int>(threadIdx.x), word = channel / 32;
  if (word * 32 >= dim) return;
  uint32_t signs = __ballot_sync(kWarp, flips_channel(channel));
  if (channel % 32 == 0) flips[word] = signs;
}

// How threads share a tile by pieces of 8 channels: each has the same piece of every rows_on-th row.
struct PiecePlace {
  int row, piece, rows_on;
  bool is_there;  // else the thread has nothing to copy

  __device__ PiecePlace(const TileShape& shape, int dim) {
    int thread = static_cast<int>(threadIdx.x), shift = __ffs(shape.lanes) + 2;  // 8 pieces a lane
    while (dim <= kSpan << (shift - 1)) --shift;
    row = thread >> shift;
    piece = thread & ((1 << shift) - 1);
    rows_on = shape.threads() >> shift;
    is_there = piece * kSpan < dim;
  }
};

// Asks for rows [from, from + shape.rows) of a part; those that x has not are zeros. `memory` is free
// when it is called.
template <bool kWide>
__device__ __forceinline__ void load_tile(const QuantizeParams& p, const Step& step,
                                          const Part& part, const TileShape& shape, int64_t from,
                                          char* memory) {
  constexpr int kItem = kWide ? 4 : 2, kBytes = kSpan * kItem;
  PiecePlace place(shape, p.dim);
  if (!place.is_there) return;
  int there = static_cast<int>(max(min(p.rows - from, int64_t{shape.rows}), int64_t{0}));
  char* to = memory + place.piece * kBytes;
  int64_t first = part.offset(p.x, from) + place.piece * kSpan * p.x.channel;
  if (!step.in_pieces) {
    for (int row = place.row; row < shape.rows; row += place.rows_on) {
      RawPiece<kWide> raw;
      raw.clear();
      if (row < there) raw.load(p.x, false, first + row * p.x.strides.seq);
      raw.store(to + shape.at(row));
    }
    return;
  }
  const char* source = static_cast<const char*>(p.x.data) + first * kItem;
  const char* at = source + place.row * p.x.strides.seq * kItem;
  int64_t on = place.rows_on * p.x.strides.seq * kItem;
  uint32_t tile = smem_address(to);
#pragma unroll 4
  for (int row = place.row; row < shape.rows; row += place.rows_on, at += on) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 16)
      cp_async16(tile + shape.at(row) + i, row < there ? at + i : source, row < there);
  }
  cp_async_commit();
}

__device__ __forceinline__ void await_tile() {
  cp_async_wait<0>();
  __syncthreads();
}

template <DType kType>
__device__ __forceinline__ void read_row(const TileShape& shape, const RowPlace& at,
                                         const char* memory, float (&x)[kChannels]) {
  constexpr bool kWide = kType == DType::f32;
  const char* row = memory + shape.at(at.row) + at.first * (kWide ? 4 : 2);
#pragma unroll
  for (int run = 0; run < kChannels; run += kRun) {
#pragma unroll
    for (int i = run; i < run + kRun; i += kSpan) {
      RawPiece<kWide> raw;
      raw.clear();
      if (run < at.channels) raw.take(row + i * (kWide ? 4 : 2));
      raw.template unpack<kType>(reinterpret_cast<float (&)[kSpan]>(x[i]));
    }
  }
}

__device__ __forceinline__ void subtract_mean(const QuantizeParams& p, const Step& step,
                                              const Part& part, const RowPlace& at,
                                              float (&x)[kChannels]) {
  const float* mean = p.mean + part.b * p.mean_batch + part.h * p.mean_head + at.first;
#pragma unroll
  for (int run = 0; run < kChannels; run += kRun) {
    if (run >= at.channels) continue;
    auto of_run = load_floats<kRun>(mean + run, step.mean_pieces);
#pragma unroll
    for (int i = 0; i < kRun; ++i) x[run + i] -= of_run.x[i];
  }
}

template <int kHalf>
__device__ __forceinline__ void mix(float (&x)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    if ((i & kHalf) != 0) continue;
    float a = x[i], b = x[i + kHalf];
    x[i] = a + b;
    x[i + kHalf] = a - b;
  }
}

// The same between threads of a row.
template <int kHalf>
__device__ __forceinline__ void mix_lanes(const RowPlace& at, float (&x)[kChannels]) {
  float sign = (at.lane & kHalf) == 0 ? 1.0f : -1.0f;
#pragma unroll
  for (int i = 0; i < kChannels; ++i)
    x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(kWarp, x[i], 8 * kHalf));  // exact but for the sum
}

// x R without the last factor 1 / sqrt(size), in the order of the CPU. All lanes of a warp call it.
// `signs` lie in shared memory: of registers ptxas would keep 64 signs from tile to tile.
__device__ __forceinline__ void rotate_row(const RowPlace& at, const uint32_t* signs, int32_t size,
                                           float (&x)[kChannels]) {
  uint32_t flips[] = {signs[at.first / 32], signs[at.first / 32 + 1]};
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    uint32_t sign = flips[i / 32] << (31 - i % 32) & 0x80000000u;
    x[i] = __uint_as_float(__float_as_uint(x[i]) ^ sign);
  }
  mix<1>(x);
  mix<2>(x);
  mix<4>(x);
  mix<8>(x);
  if (size >= 32) mix<16>(x);
  if (size >= 64) mix<32>(x);
  if (size >= 128) mix_lanes<1>(at, x);
  if (size >= 256) mix_lanes<2>(at, x);
}

}  // namespace
}  // namespace cuattn
