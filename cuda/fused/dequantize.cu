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

// 8 codes of a row; `in_pieces`: they lie side by side on 8 bytes.
__device__ __forceinline__ uint2 load_codes(const QuantizeArray& array, bool in_pieces,
                                            int64_t at) {
  const auto* from = static_cast<const uint8_t*>(array.data) + at;
  if (in_pieces) return *reinterpret_cast<const uint2*>(from);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kSpan; ++i)
    words[i / 4] |= static_cast<uint32_t>(from[i * array.channel]) << i % 4 * 8;
  return {words[0], words[1]};
}

__device__ __forceinline__ void unpack_codes(uint2 codes, bool is_int8, float (&x)[kSpan]) {
  auto code = [&](int i) { return static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> i % 4 * 8); };
  if (is_int8) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) x[i] = to_float(Int8{static_cast<int8_t>(code(i))});
  } else {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) x[i] = to_float(E4m3{code(i)});
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
  bool is_int8 = p.x.dtype == DType::i8;
  if (!part.active) return;
  float scale[kSpan];
  load_scales(p, part, scale);
  for (int64_t row = part.first + part.row; row < part.last; row += part.step) {
    uint2 codes[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (row + a < part.last) codes[a] = load_codes(p.x, in_pieces, part.offset(p.x, row + a));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (row + a >= part.last) break;
      float x[kSpan];
      unpack_codes(codes[a], is_int8, x);
#pragma unroll
      for (int i = 0; i < kSpan; ++i) x[i] *= scale[i];
      auto* to = static_cast<Element<kType>*>(p.out.data) + part.offset(p.out, row + a);
      if (out_pieces) {
        constexpr int kSize = kType == DType::f32 ? 4 : kSpan;
#pragma unroll
        for (int i = 0; i < kSpan; i += kSize)
          store_piece(to + i, reinterpret_cast<const float (&)[kSize]>(x[i]));
      } else {
#pragma unroll
        for (int i = 0; i < kSpan; ++i) to[i * p.out.channel] = from_float<Element<kType>>(x[i]);
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
