// SPDX-License-Identifier: Apache-2.0
// dequantize on CUDA: a thread block takes 128 rows of a head, a thread 8 channels of four rows at a
// time. The same on the CPU: cpu/quantize.cpp.
#include "cuda/fused/codes.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kAhead = 4;  // rows of a thread, side by side: all are loaded before one is used

// Rows [first, last) of one head, and the channels and rows of them that this thread has.
struct Part {
  int32_t b, h;
  int64_t block, first, last;
  int lanes, channel, row, step;  // first row, and rows of the block, of one round
  bool active;

  __device__ Part(const QuantizeParams& p, int64_t rows) {
    int64_t blocks = ceil_div<int64_t>(rows, kScaleRows), head = blockIdx.x / blocks;
    b = static_cast<int32_t>(head / p.heads);
    h = static_cast<int32_t>(head % p.heads);
    block = blockIdx.x % blocks;
    first = block * kScaleRows;
    last = min(first + kScaleRows, rows);
    lanes = 2;
    while (lanes * kSpan < p.dim) lanes *= 2;
    channel = threadIdx.x % lanes * kSpan;
    row = threadIdx.x / lanes * kAhead;
    step = kThreads / lanes * kAhead;
    active = channel < p.dim;
  }
  __device__ int64_t offset(const QuantizeArray& array, int64_t row) const {
    return b * array.strides.batch + row * array.strides.seq + h * array.strides.head +
           channel * array.channel;
  }
};

// 8 channels of a row as float; `in_pieces`: they lie side by side on 16 bytes (on 8 of float8).
template <DType kType>
__device__ __forceinline__ void load_row(const QuantizeArray& array, bool in_pieces, int64_t at,
                                         float (&x)[kSpan]) {
  const auto* from = static_cast<const Element<kType>*>(array.data) + at;
  constexpr int kSize = kType == DType::f32 ? 4 : kSpan;
#pragma unroll
  for (int i = 0; i < kSpan; i += kSize) {
    if (in_pieces) {
      auto piece = load_piece<kSize>(from + i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[i + j] = to_float(piece.x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[i + j] = to_float(from[(i + j) * array.channel]);
    }
  }
}

// The scales of a thread's channels, in this block of rows.
__device__ __forceinline__ void load_scales(const QuantizeParams& p, const Part& part,
                                            float (&scale)[kSpan]) {
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    int64_t place = p.part == ScalePart::rows ? part.block : min(part.channel + i, p.dim - 1);
    scale[i] = p.scale.at(part.b, part.h, place);
  }
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    read_codes(const __grid_constant__ QuantizeParams p, bool in_pieces, bool out_pieces) {
  Part part(p, p.rows);
  if (!part.active) return;
  float scale[kSpan];
  load_scales(p, part, scale);
  for (int64_t row = part.first + part.row; row < part.last; row += part.step) {
    float x[kAhead][kSpan];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (row + a < part.last)
        load_row<DType::e4m3>(p.x, in_pieces, part.offset(p.x, row + a), x[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (row + a >= part.last) break;
#pragma unroll
      for (int i = 0; i < kSpan; ++i) x[a][i] *= scale[i];
      auto* to = static_cast<Element<kType>*>(p.out.data) + part.offset(p.out, row + a);
      if (out_pieces) {
        constexpr int kSize = kType == DType::f32 ? 4 : kSpan;
#pragma unroll
        for (int i = 0; i < kSpan; i += kSize)
          store_piece(to + i, reinterpret_cast<const float (&)[kSize]>(x[a][i]));
      } else {
#pragma unroll
        for (int i = 0; i < kSpan; ++i) to[i * p.out.channel] = from_float<Element<kType>>(x[a][i]);
      }
    }
  }
}

}  // namespace

void launch_dequantize(const QuantizeParams& p, cudaStream_t stream) {
  const char* fn = "dequantize";
  int64_t blocks = int64_t{p.batch} * p.heads * device::ceil_div<int64_t>(p.rows, kScaleRows);
  if (blocks == 0) return;
  bool in_pieces = lies_in_pieces(p.x, 1, 8);
  bool out_pieces = lies_in_pieces(p.out, item_of(p.out.dtype), 16);
  with_dtype(fn, p.out.dtype, [&]<DType kType>() {
    read_codes<kType><<<blocks_of(fn, blocks), kThreads, 0, stream>>>(p, in_pieces, out_pieces);
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
