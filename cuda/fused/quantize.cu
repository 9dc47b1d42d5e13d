// SPDX-License-Identifier: Apache-2.0
// quantize and dequantize on CUDA: a thread block takes 128 rows of a head, a thread 8 channels of
// four rows at a time, and the lanes that share a row exchange what the rotation adds. The largest size goes to its
// scale by an atomic maximum of its bits, which no order changes, so that codes and scales are those
// of the CPU. Source: QuaRot, arXiv:2404.00456; SageAttention, arXiv:2410.02367. The same on the
// CPU: cpu/quantize.cpp.
#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 256;
constexpr int kSpan = 8;  // channels of a thread
constexpr int kMostDim = 256;
constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr int kAhead = 4;      // rows of a thread, side by side: all are loaded before one is used
constexpr int kMeanRows = 8;   // the same of write_means, which nothing else keeps busy
constexpr int kMeanLanes = 4;  // of a row there: 64 bytes in 16 bits
constexpr int kColumnWords = kScaleRows / 4 + 1;  // of a channel in shared memory: four rows a word

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

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

// x R, in the order of the CPU: runs of 1, 2 and 4 channels inside a thread, longer ones between
// lanes. All lanes of a warp call it.
__device__ __forceinline__ void rotate_row(const Part& part, int32_t dim, float (&x)[kSpan]) {
  int32_t size = hadamard_size(dim);
#pragma unroll
  for (int i = 0; i < kSpan; ++i) x[i] = flips_channel(part.channel + i) ? -x[i] : x[i];
#pragma unroll
  for (int half = 1; half < kSpan; half *= 2) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if ((i & half) != 0) continue;
      float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  for (int half = kSpan; half < size; half *= 2) {
    bool upper = (part.channel & half) != 0;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      float other = __shfl_xor_sync(0xffffffffu, x[i], half / kSpan);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
  float norm = 1.0f / sqrtf(static_cast<float>(size));
#pragma unroll
  for (int i = 0; i < kSpan; ++i) x[i] *= norm;
}

// Rows as they are rounded, not yet divided by their scales; zeros where this thread has none.
template <DType kType>
__device__ __forceinline__ void prepare_rows(const QuantizeParams& p, const Part& part,
                                             bool in_pieces, int64_t row,
                                             float (&x)[kAhead][kSpan]) {
  int64_t last = part.active ? min(part.last, p.rows) : 0;
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) x[a][i] = 0.0f;
    if (row + a < last) load_row<kType>(p.x, in_pieces, part.offset(p.x, row + a), x[a]);
  }
  if (p.mean != nullptr && part.active) {
    const float* mean = p.mean + part.b * p.mean_batch + part.h * p.mean_head + part.channel;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      float of_channel = mean[i];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (row + a < last) x[a][i] -= of_channel;
      }
    }
  }
  if (!p.rotates) return;
#pragma unroll
  for (int a = 0; a < kAhead; ++a) rotate_row(part, p.dim, x[a]);
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

// Of the finite elements of each channel of a head; 0 where there are none. A block takes a few
// channels of a head, of all rows.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    write_means(const __grid_constant__ QuantizeParams p, bool in_pieces) {
  constexpr int kWidth = kMeanLanes * kSpan, kStep = kThreads / kMeanLanes;
  __shared__ double sums[kStep][kWidth];
  __shared__ int counts[kStep][kWidth];
  int slices = ceil_div(p.dim, kWidth), head = blockIdx.x / slices;
  int b = head / p.heads, h = head % p.heads;
  int lane = threadIdx.x % kMeanLanes * kSpan, first = threadIdx.x / kMeanLanes;
  int channel = blockIdx.x % slices * kWidth + lane;
  int64_t at = b * p.x.strides.batch + h * p.x.strides.head + channel * p.x.channel;
  double sum[kSpan] = {};
  int count[kSpan] = {};
  for (int64_t row = first; channel < p.dim && row < p.rows; row += kStep * kMeanRows) {
    float x[kMeanRows][kSpan];
#pragma unroll
    for (int a = 0; a < kMeanRows; ++a) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) x[a][i] = nanf("");
      int64_t next = row + a * kStep;
      if (next < p.rows) load_row<kType>(p.x, in_pieces, at + next * p.x.strides.seq, x[a]);
    }
#pragma unroll
    for (int a = 0; a < kMeanRows; ++a) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        if (!is_finite(x[a][i])) continue;
        sum[i] += x[a][i];
        ++count[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    sums[first][lane + i] = sum[i];
    counts[first][lane + i] = count[i];
  }
  __syncthreads();
  int of = threadIdx.x;
  channel = blockIdx.x % slices * kWidth + of;
  if (of >= kWidth || channel >= p.dim) return;
  double total = 0.0;
  int64_t number = 0;
  for (int row = 0; row < kStep; ++row) {
    total += sums[row][of];
    number += counts[row][of];
  }
  p.mean[b * p.mean_batch + h * p.mean_head + channel] =
      static_cast<float>(number == 0 ? 0.0 : total / static_cast<double>(number));
}

// One thread an element of the scale: 0 before the maxima, then what they give.
__global__ void __launch_bounds__(kThreads)
    set_scales(const __grid_constant__ Float8Scale s, bool is_last) {
  int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= s.extents[0] * s.extents[1] * s.extents[2]) return;
  int64_t line = index / s.extents[2];
  float& scale = const_cast<float*>(
      s.data)[line / s.extents[1] * s.strides[0] + line % s.extents[1] * s.strides[1] +
              index % s.extents[2] * s.strides[2]];
  if (!is_last || scale == 0.0f) {
    scale = is_last ? 1.0f : 0.0f;
  } else {
    scale = fmaxf(scale / kLargestE4m3, kSmallestNormal);
  }
}

// The largest finite size of a block of rows, or of each of its channels, into its scale.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    find_sizes(const __grid_constant__ QuantizeParams p, bool in_pieces) {
  __shared__ int sizes[kMostDim];
  Part part(p, p.rows);
  bool by_channel = p.part == ScalePart::channels;
  int width = by_channel ? p.dim : 1;
  for (int i = threadIdx.x; i < width; i += kThreads) sizes[i] = 0;
  float size[kSpan] = {};
  for (int64_t row = part.first + part.row; row - part.row < part.last; row += part.step) {
    float x[kAhead][kSpan];
    prepare_rows<kType>(p, part, in_pieces, row, x);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        float abs = fabsf(x[a][i]);
        if (is_finite(abs)) size[i] = fmaxf(size[i], abs);
      }
    }
  }
  __syncthreads();
  if (part.active && by_channel) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) atomicMax(&sizes[part.channel + i], __float_as_int(size[i]));
  } else if (part.active) {
#pragma unroll
    for (int i = 1; i < kSpan; ++i) size[0] = fmaxf(size[0], size[i]);
    atomicMax(&sizes[0], __float_as_int(size[0]));
  }
  __syncthreads();
  const Float8Scale& s = p.scale;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    int64_t place = p.part == ScalePart::rows ? part.block : i;
    const float* scale =
        s.data + part.b * s.strides[0] + part.h / s.group * s.strides[1] + place * s.strides[2];
    atomicMax(reinterpret_cast<int*>(const_cast<float*>(scale)), sizes[i]);
  }
}

// shift[row] = x[row] . shift_mean, from the row as it is given.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    write_shifts(const __grid_constant__ QuantizeParams p, bool in_pieces) {
  Part part(p, p.rows);
  const float* mean = p.shift_mean + part.b * p.shift_mean_batch +
                      part.h / p.shift_group * p.shift_mean_head + part.channel;
  for (int64_t row = part.first + part.row; row - part.row < part.last; row += part.step) {
    float x[kAhead][kSpan] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (part.active && row + a < part.last)
        load_row<kType>(p.x, in_pieces, part.offset(p.x, row + a), x[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      double dot = 0.0;
      if (part.active && row + a < part.last) {
#pragma unroll
        for (int i = 0; i < kSpan; ++i) dot += static_cast<double>(x[a][i]) * mean[i];
      }
      for (int lane = part.lanes / 2; lane > 0; lane /= 2)
        dot += __shfl_xor_sync(0xffffffffu, dot, lane);
      if (part.channel == 0 && row + a < part.last)
        p.shift[part.b * p.shift_batch + part.h * p.shift_head + (row + a) * p.shift_row] =
            static_cast<float>(dot);
    }
  }
}

// Codes of 8 channels, side by side or apart.
__device__ __forceinline__ void store_codes(const QuantizeParams& p, bool out_pieces, int64_t at,
                                            const float (&x)[kSpan]) {
  E4m3* to = static_cast<E4m3*>(p.out.data) + at;
  if (out_pieces) {
    store_piece(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) to[i * p.out.channel] = from_float<E4m3>(x[i]);
  }
}

// Where a channel begins in shared memory: lanes, 8 channels apart, fall on banks of their own.
__device__ __forceinline__ int column_start(int channel) {
  return channel * kColumnWords + channel / kSpan;
}
constexpr int column_words(int channels) {
  return channels * kColumnWords + (channels + kSpan - 1) / kSpan;
}

// `by_columns`: the rows of a channel lie side by side in out, on 16 bytes, and go there through
// shared memory.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    write_codes(const __grid_constant__ QuantizeParams p, bool in_pieces, bool out_pieces,
                bool by_columns) {
  extern __shared__ __align__(16) uint32_t columns[];
  Part part(p, p.out_rows);
  float scale[kSpan];
  load_scales(p, part, scale);
  for (int64_t row = part.first + part.row; row - part.row < part.last; row += part.step) {
    float x[kAhead][kSpan];
    prepare_rows<kType>(p, part, in_pieces, row, x);
    if (!part.active || row >= part.last) continue;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) x[a][i] = row + a < p.rows ? x[a][i] / scale[i] : 0.0f;
    }
    if (!by_columns) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (row + a < part.last) store_codes(p, out_pieces, part.offset(p.out, row + a), x[a]);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) word |= uint32_t{from_float<E4m3>(x[a][i]).bits} << 8 * a;
      columns[column_start(part.channel + i) + (row - part.first) / kAhead] = word;
    }
  }
  if (!by_columns) return;
  __syncthreads();
  constexpr int kPieces = kScaleRows / 16;
  uint8_t* out = static_cast<uint8_t*>(p.out.data) + part.b * p.out.strides.batch +
                 part.h * p.out.strides.head + part.first;
  for (int i = threadIdx.x; i < p.dim * kPieces; i += kThreads) {
    int channel = i / kPieces, row = i % kPieces * 16;
    const uint32_t* from = columns + column_start(channel) + row / 4;
    uint8_t* to = out + channel * p.out.channel + row;
    if (part.first + row + 16 <= part.last) {
      *reinterpret_cast<uint4*>(to) = uint4{from[0], from[1], from[2], from[3]};
    } else {
      for (int j = 0; part.first + row + j < part.last; ++j)
        to[j] = static_cast<uint8_t>(from[j / 4] >> j % 4 * 8);
    }
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

// Whether 8 channels of a row lie side by side on `bytes`.
bool lies_in_pieces(const QuantizeArray& array, int item, uintptr_t bytes) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.seq, array.strides.head})
    bits |= static_cast<uint64_t>(stride * item);
  return array.channel == 1 && bits % bytes == 0;
}

bool lies_by_columns(const QuantizeArray& array) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.head, array.channel})
    bits |= static_cast<uint64_t>(stride);
  return array.strides.seq == 1 && array.channel != 1 && bits % 16 == 0;
}

int item_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::e4m3 ? 1 : 2; }

}  // namespace

void launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  const char* fn = "quantize";
  int64_t heads = int64_t{p.batch} * p.heads;
  const Float8Scale& s = p.scale;
  int64_t scales = s.extents[0] * s.extents[1] * s.extents[2];
  bool in_pieces = lies_in_pieces(p.x, item_of(p.x.dtype), 16);
  bool out_pieces = lies_in_pieces(p.out, 1, 8), by_columns = lies_by_columns(p.out);
  auto blocks = [&](int64_t rows) {
    return blocks_of(fn, heads * device::ceil_div<int64_t>(rows, kScaleRows));
  };
  auto set = [&](bool is_last) {
    if (scales == 0) return;
    unsigned count = blocks_of(fn, device::ceil_div<int64_t>(scales, kThreads));
    set_scales<<<count, kThreads, 0, stream>>>(s, is_last);
  };
  with_dtype(fn, p.x.dtype, [&]<DType kType>() {
    if (p.gives_mean && heads > 0)
      write_means<kType><<<blocks_of(fn, heads * device::ceil_div(p.dim, kMeanLanes * kSpan)),
                           kThreads, 0, stream>>>(p, in_pieces);
    if (p.gives_scale) {
      set(false);
      if (heads * p.rows > 0)
        find_sizes<kType><<<blocks(p.rows), kThreads, 0, stream>>>(p, in_pieces);
      set(true);
    }
    if (p.shift != nullptr && heads * p.rows > 0)
      write_shifts<kType><<<blocks(p.rows), kThreads, 0, stream>>>(p, in_pieces);
    if (heads * p.out_rows > 0) {
      int shared = by_columns ? column_words(p.dim) * 4 : 0;
      write_codes<kType>
          <<<blocks(p.out_rows), kThreads, shared, stream>>>(p, in_pieces, out_pieces, by_columns);
    }
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

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
