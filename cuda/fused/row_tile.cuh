// SPDX-License-Identifier: Apache-2.0
// Rows of x as quantize takes them: a thread block copies a tile of rows to shared memory, whole
// lines at a time, and a thread has 64 channels of one row in registers, so that most of a rotation
// stays inside it. Source: QuaRot, arXiv:2404.00456. Next: quantize_part.cuh.
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
  int lane, row, first, offset;  // the row's offset in the tile

  __device__ explicit RowPlace(const TileShape& shape) {
    int thread = static_cast<int>(threadIdx.x);
    lane = thread >> 3 & (shape.lanes - 1);
    row = (thread & 7) | thread / (8 * shape.lanes) << 3;
    first = lane * kChannels;
    offset = shape.at(row);
  }
};

// Signs of R as the sign bits of two numbers of 16 bits in a word; 0 without R. All threads of a block
// call it, which are no fewer than words.
__device__ __forceinline__ void find_flips(int dim, bool rotates, uint32_t* flips) {
  int channel = 2 * static_cast<int>(threadIdx.x);
  if (channel >= dim) return;
  uint32_t low = rotates && flips_channel(channel) ? 0x8000u : 0;
  flips[channel / 2] = rotates && flips_channel(channel + 1) ? low | 0x80000000u : low;
}

// How threads share a tile by pieces of 8 channels: each has the same piece of every rows_on-th row.
struct PiecePlace {
  int row, piece, rows_on;
  bool is_there;  // else the thread has nothing to copy

  __device__ explicit PiecePlace(const TileShape& shape) {
    int thread = static_cast<int>(threadIdx.x), shift = __ffs(shape.lanes) + 2;  // 8 pieces a lane
    while (shape.dim <= kSpan << (shift - 1)) --shift;
    row = thread >> shift;
    piece = thread & ((1 << shift) - 1);
    rows_on = shape.threads() >> shift;
    is_there = piece * kSpan < shape.dim;
  }
};

// Asks for rows [from, from + shape.rows) of a part, to be committed; those that x has not are zeros.
// `memory` is free when it is called.
template <bool kWide>
__device__ __forceinline__ void load_tile(const QuantizeParams& p, const Step& step,
                                          const Part& part, const TileShape& shape, int64_t from,
                                          char* memory) {
  constexpr int kItem = kWide ? 4 : 2, kBytes = kSpan * kItem;
  PiecePlace place(shape);
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
}

// Asks for a row of float beside a tile, to be committed. `in_pieces`: it lies on 16 bytes.
__device__ __forceinline__ void load_channels(const float* from, int dim, bool in_pieces,
                                              char* to) {
  int first = 4 * static_cast<int>(threadIdx.x);
  if (first >= dim) return;
  if (in_pieces) return cp_async16(smem_address(to + first * 4), from + first, true);
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(to)[first + i] = from[first + i];
}

// Gives it the signs of R: each thread to what it has asked for, as soon as that is there.
__device__ __forceinline__ void flip_channels(const uint32_t* flips, int dim, char* memory) {
  int first = 4 * static_cast<int>(threadIdx.x);
  if (first >= dim) return;
  uint4& four = *reinterpret_cast<uint4*>(memory + first * 4);
  const uint32_t low = flips[first / 2], high = flips[first / 2 + 1];
  four = uint4{four.x ^ flip_of(low, 0), four.y ^ flip_of(low, 1), four.z ^ flip_of(high, 0),
               four.w ^ flip_of(high, 1)};
}

// The 64 channels of a thread, with the signs of R; zeros where it has fewer. Signs of two numbers
// change before they become float. `flips`: those of the channels.
template <DType kType>
__device__ __forceinline__ void read_row(const char* row, const uint32_t* flips, int channels,
                                         float (&x)[kChannels]) {
  constexpr bool kWide = kType == DType::f32;
#pragma unroll
  for (int i = 0; i < kChannels; i += kSpan) {
    RawPiece<kWide> raw;
    raw.clear();
    if (i / kRun * kRun < channels) {
      raw.take(row + i * (kWide ? 4 : 2));
      raw.flip(*reinterpret_cast<const uint4*>(flips + i / 2));
    }
    raw.template unpack<kType>(reinterpret_cast<float (&)[kSpan]>(x[i]));
  }
}

// x less the mean of its channels. Both have the signs of R.
__device__ __forceinline__ void subtract_mean(const float* mean, int channels,
                                              float (&x)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels; i += 4) {
    if (i / kRun * kRun >= channels) continue;
    auto of_four = load_floats<4>(mean + i, true);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] -= of_four.x[j];
  }
}

// x . mean of a row's channels, whose products the signs of R leave, on all of its threads. All lanes of
// a warp call it.
__device__ __forceinline__ double dot_mean(const float* mean, int channels, int lanes,
                                           const float (&x)[kChannels]) {
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kChannels; i += 4) {  // as float, for conversions to double are slow
    if (i / kRun * kRun >= channels) continue;
    auto of_four = load_floats<4>(mean + i, true);
    float four = x[i] * of_four.x[0];
#pragma unroll
    for (int j = 1; j < 4; ++j) four = __fmaf_rn(x[i + j], of_four.x[j], four);
    sum += four;
  }
  for (int lane = 1; lane < lanes; lane *= 2) sum += __shfl_xor_sync(kWarp, sum, 8 * lane);
  return sum;
}

// The largest finite size.
__device__ __forceinline__ float largest_finite(const float (&x)[kChannels]) {
  float of_two[2] = {};
#pragma unroll
  for (int i = 0; i < kChannels; ++i) of_two[i % 2] = fmaxf(of_two[i % 2], fabsf(x[i]));
  float size = fmaxf(of_two[0], of_two[1]);  // no NaN
  if (is_finite(size)) return size;
  size = 0.0f;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    if (is_finite(x[i])) size = fmaxf(size, fabsf(x[i]));
  }
  return size;
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

// A row, which has the signs of R already, times its Hadamard matrices without the last factor
// 1 / sqrt(size), in the order of the CPU. All lanes of a warp call it.
__device__ __forceinline__ void rotate_row(const RowPlace& at, int32_t size,
                                           float (&x)[kChannels]) {
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
