// SPDX-License-Identifier: Apache-2.0
// dequantize on CUDA: a thread takes 8 channels of four rows, a thread block up to 128 rows of a head.
// Codes by columns, whose rows lie side by side, are turned on the way: a block takes 64 channels of
// 128 rows. The same on the CPU: cpu/quantize.cpp.
#include "cuattn/device/overlap.cuh"
#include "cuda/fused/codes.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kAhead = 4;     // rows of a thread, side by side: all are loaded before one is used
constexpr int kColumns = 64;  // channels of a block, where codes lie by columns
constexpr int kWhole = 3;     // a block takes 128 rows of 1 << kWhole threads at once
static_assert(kThreads * kAhead == kScaleRows << kWhole);

// Where codes lie by rows: a row has 1 << shift threads, a part of 128 rows 1 << split blocks.
struct RowShare {
  int shift = 1, split;

  explicit RowShare(int dim) {
    while (kSpan << shift < dim) ++shift;
    split = shift > kWhole ? shift - kWhole : 0;
  }
};

// Rows [first, last) of one head that may have a scale of their own, and this thread's channels.
struct Part {
  uint32_t b, h;
  int64_t block, first, last;
  int channel;

  // Heads follow each other first, as in steps.cuh.
  __device__ Part(const QuantizeParams& p, uint32_t index, int channel) : channel(channel) {
    const auto blocks = static_cast<uint32_t>(ceil_div<int64_t>(p.rows, kScaleRows)),
               line = index / p.heads;
    h = index % p.heads;
    b = line / blocks;
    block = line % blocks;
    first = block * kScaleRows;
    last = min(first + kScaleRows, p.rows);
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
#pragma unroll
  for (int i = 0; i < kSpan; i += 4) {
    uint32_t word = i == 0 ? codes.x : codes.y;
    if (is_int8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = to_float(Int8{static_cast<int8_t>(word >> 8 * j)});
    } else {
      uint32_t pairs[2];
      unpack_e4m3(word, pairs[0], pairs[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[i + j] = to_float(Half{static_cast<uint16_t>(pairs[j / 2] >> j % 2 * 16)});
    }
  }
}

// The scales of a thread's channels, in this block of rows.
__device__ __forceinline__ void load_scales(const QuantizeParams& p, const Part& part,
                                            float (&scale)[kSpan]) {
  const int b = static_cast<int>(part.b), h = static_cast<int>(part.h);
  const bool by_channel = p.part == ScalePart::channels && p.scale.data != nullptr;
  scale[0] = p.scale.at(b, h, by_channel ? part.channel : part.block);
  const float* from =
      p.scale.data + b * p.scale.strides[0] + h / p.scale.group * p.scale.strides[1];
#pragma unroll
  for (int i = 1; i < kSpan; ++i)
    scale[i] = by_channel ? from[min(part.channel + i, p.dim - 1) * p.scale.strides[2]] : scale[0];
}

// 8 codes of a row become numbers of `out`; `out_pieces`: they lie side by side on 16 bytes.
template <DType kType>
__device__ __forceinline__ void write_numbers(const QuantizeParams& p, bool out_pieces, uint2 codes,
                                              const float (&scale)[kSpan], int64_t at) {
  float x[kSpan];
  unpack_codes(codes, p.x.dtype == DType::i8, x);
#pragma unroll
  for (int i = 0; i < kSpan; ++i) x[i] *= scale[i];
  auto* to = static_cast<Element<kType>*>(p.out.data) + at;
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

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    read_rows(const __grid_constant__ QuantizeParams p, RowShare share, bool in_pieces,
              bool out_pieces) {
  wait_for_previous_kernel();
  release_next_kernel();
  const int thread = static_cast<int>(threadIdx.x), rows = kScaleRows >> share.split;
  const Part part(p, blockIdx.x >> share.split, (thread & ((1 << share.shift) - 1)) * kSpan);
  const int below = (thread >> share.shift) * kAhead;
  const int64_t row = part.first + (blockIdx.x & ((1 << share.split) - 1)) * rows + below;
  if (part.channel >= p.dim || below >= rows) return;
  uint2 codes[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (row + a < part.last) codes[a] = load_codes(p.x, in_pieces, part.offset(p.x, row + a));
  }
  float scale[kSpan];
  load_scales(p, part, scale);
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (row + a < part.last)
      write_numbers<kType>(p, out_pieces, codes[a], scale, part.offset(p.out, row + a));
  }
}

// Copies 16 rows of a channel; of those from `rows` on, which may not be there, it makes 0.
__device__ __forceinline__ uint4 load_rows(const uint8_t* from, int64_t rows) {
  if (rows >= 16) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < rows) words[i / 4] |= static_cast<uint32_t>(from[i]) << i % 4 * 8;
  }
  return {words[0], words[1], words[2], words[3]};
}

// The same of codes by columns, on 16 bytes. In shared memory a channel has 8 pieces of 16 rows, and
// those of 8 channels stand where the number of the eight, as bits, moves them: 8 threads with
// channels of their own and 4 with rows of their own then read from 32 banks.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    read_columns(const __grid_constant__ QuantizeParams p, bool out_pieces) {
  constexpr int kPieces = kScaleRows / 16;
  __shared__ uint4 tile[kColumns * kPieces];
  wait_for_previous_kernel();
  release_next_kernel();
  const int first = blockIdx.y * kColumns, thread = static_cast<int>(threadIdx.x);
  Part part(p, blockIdx.x, first);
  const auto* from = static_cast<const uint8_t*>(p.x.data) + part.offset(p.x, part.first);
#pragma unroll
  for (int i = thread; i < kColumns * kPieces; i += kThreads) {
    int piece = i % kPieces, channel = i / kPieces;
    int64_t rows = part.last - part.first - piece * 16;
    if (first + channel < p.dim && rows > 0)
      tile[channel * kPieces + (piece ^ channel / kSpan)] =
          load_rows(from + channel * p.x.channel + piece * 16, rows);
  }
  __syncthreads();
  const int span = thread % (kColumns / kSpan), row = thread / (kColumns / kSpan) * kAhead;
  part.channel += span * kSpan;
  if (part.channel >= p.dim) return;
  float scale[kSpan];
  load_scales(p, part, scale);
  uint32_t turned[kAhead][4];  // [row][four channels]
  const auto* words =
      reinterpret_cast<const uint32_t*>(tile) + span * kSpan * kPieces * 4 + (row / 4 ^ span * 4);
  turn_bytes(words, kPieces * 4, 0, turned);
  turn_bytes(words + 4 * kPieces * 4, kPieces * 4, 1, turned);
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (part.first + row + a < part.last)
      write_numbers<kType>(p, out_pieces, {turned[a][0], turned[a][1]}, scale,
                           part.offset(p.out, part.first + row + a));
  }
}

}  // namespace

void launch_dequantize(const QuantizeParams& p, cudaStream_t stream) {
  const char* fn = "dequantize";
  int64_t parts = int64_t{p.batch} * p.heads * device::ceil_div<int64_t>(p.rows, kScaleRows);
  if (parts == 0) return;
  bool out_pieces = lies_in_pieces(p.out, item_of(p.out.dtype), 16);
  with_dtype(fn, p.out.dtype, [&]<DType kType>() {
    if (lies_by_columns(p.x)) {
      dim3 grid(blocks_of(fn, parts), static_cast<unsigned>(device::ceil_div(p.dim, kColumns)));
      launch_overlapping(read_columns<kType>, grid, kThreads, 0, device_major(), stream, p,
                         out_pieces);
    } else {
      const RowShare share(p.dim);
      unsigned grid = blocks_of(fn, parts << share.split);
      launch_overlapping(read_rows<kType>, grid, kThreads, 0, device_major(), stream, p, share,
                         lies_in_pieces(p.x, 1, 8), out_pieces);
    }
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
