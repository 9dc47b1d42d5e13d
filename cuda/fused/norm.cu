// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm, at the rate of memory: a row is read once, by a warp or by a block, and
// stays in registers; all loads of a thread are under way before the first is used. Rows too long
// for that are read again. Sums are taken in one order, so that bits do not move. Source:
// arXiv:1910.07467, arXiv:1607.06450. The same on the CPU: cpu/fused_rows.cpp.
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kWarpPieces = 4;  // 64 bytes of each array a lane: rows of up to 2 KB
constexpr int kWarpsPerBlock = 4;
constexpr int kMostThreads = 1024, kRowThreads = 512;  // of a block, where it keeps a row
constexpr int kRowColumns = 32;                        // of a thread there: rows of up to 16384

// Who shares a row: the lanes of a warp, or the threads of a block.
template <bool kWarp>
struct Team {
  static __device__ int rank() { return kWarp ? threadIdx.x % 32 : threadIdx.x; }
  static __device__ int size() { return kWarp ? 32 : blockDim.x; }
  static __device__ int64_t row() {
    return kWarp ? int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32 : blockIdx.x;
  }
  // The sum over the team, the same in each thread.
  static __device__ float sum(float x) {
    x = warp_sum(x);
    if constexpr (!kWarp) {
      __shared__ float parts[kMostThreads / 32];
      __syncthreads();  // all have read the sum before
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
      __syncthreads();
      x = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f);
    }
    return x;
  }
};

// One row, in pieces of kSize elements.
template <DType kType, int kSize>
struct NormRow {
  using T = Element<kType>;

  const NormParams& p;
  const T *x, *residual;
  T *out, *residual_out;

  __device__ NormRow(const NormParams& p, int64_t row)
      : p(p),
        x(static_cast<const T*>(p.x) + row * p.x_stride),
        residual(p.residual == nullptr
                     ? nullptr
                     : static_cast<const T*>(p.residual) + row * p.residual_stride),
        out(static_cast<T*>(p.out) + row * p.out_stride),
        residual_out(static_cast<T*>(p.residual_out) + row * p.residual_out_stride) {}

  // h of a piece, as it is stored.
  __device__ void add(const Piece<T, kSize>& a, const Piece<T, kSize>& b, float (&h)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      h[i] = residual == nullptr ? to_float(a.x[i])
                                 : to_float(from_float<T>(to_float(a.x[i]) + to_float(b.x[i])));
  }
  template <class W>
  static __device__ void load_weights(const void* from, int64_t column, bool aligned,
                                      float (&w)[kSize]) {
    if constexpr (sizeof(W) == 4) {
      auto piece = load_floats<kSize>(static_cast<const float*>(from) + column, aligned);
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = piece.x[i];
    } else if (aligned) {
      auto piece = load_piece<kSize>(static_cast<const W*>(from) + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = to_float(piece.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = to_float(static_cast<const W*>(from)[column + i]);
    }
  }
  __device__ void load_vector(const void* from, int64_t column, float (&w)[kSize]) const {
    bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    p.weight_dtype == DType::f32 ? load_weights<float>(from, column, aligned, w)
                                 : load_weights<T>(from, column, aligned, w);
  }
  __device__ void finish(int64_t column, float (&h)[kSize], float mean, float inverse) const {
    float w[kSize], bias[kSize];
    load_vector(p.weight, column, w);
    if (p.bias != nullptr) load_vector(p.bias, column, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      h[i] = (h[i] - mean) * inverse * (w[i] + p.weight_offset);
      if (p.bias != nullptr) h[i] += bias[i];
    }
    store_piece(out + column, h);
  }
  __device__ float inverse_of(float sum_of_squares) const {
    return 1.0f / sqrtf(sum_of_squares / static_cast<float>(p.columns) + p.eps);
  }
};

// Rows of up to kPieces pieces a thread, which keep h as it is stored: half of the registers that
// floats take, so that a multiprocessor has rows enough on their way while others are summed.
template <DType kType, int kSize, int kPieces, bool kWarp>
__global__ void __launch_bounds__(kWarp ? 32 * kWarpsPerBlock : kRowThreads,
                                  sizeof(Element<kType>) == 4 ? 1
                                  : kWarp ? 8
                                          : 2) norm(const __grid_constant__ NormParams p) {
  using Rows = Team<kWarp>;
  int64_t index = Rows::row();
  if (index >= p.rows) return;
  NormRow<kType, kSize> row(p, index);
  auto column_of = [](int i) { return (i * Rows::size() + Rows::rank()) * kSize; };
  int columns = static_cast<int>(p.columns);

  using P = PackedPiece<kType, kSize>;
  P h[kPieces] = {};
  float y[kSize];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (column_of(i) < columns) h[i] = P::load(row.x + column_of(i));
  }
  if (row.residual != nullptr) {
    P b[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (column_of(i) < columns) b[i] = P::load(row.residual + column_of(i));
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (column_of(i) >= columns) continue;
      float addend[kSize];
      h[i].unpack(y), b[i].unpack(addend);
#pragma unroll
      for (int j = 0; j < kSize; ++j) y[j] += addend[j];
      h[i].pack(y);
      h[i].store(row.residual_out + column_of(i));
    }
  }
  float mean = 0.0f, squares = 0.0f;
  if (p.centred) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      h[i].unpack(y);
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum += y[j];
    }
    mean = Rows::sum(sum) / static_cast<float>(columns);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (column_of(i) >= columns) continue;
    h[i].unpack(y);
#pragma unroll
    for (int j = 0; j < kSize; ++j) squares = fmaf(y[j] - mean, y[j] - mean, squares);
  }
  float inverse = row.inverse_of(Rows::sum(squares));
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (column_of(i) >= columns) continue;
    h[i].unpack(y);
    row.finish(column_of(i), y, mean, inverse);
  }
}

// Rows of any length, read two or three times: what a thread writes, no other reads.
template <DType kType, int kSize>
__global__ void __launch_bounds__(kMostThreads) norm_long(const __grid_constant__ NormParams p) {
  using Rows = Team<false>;
  NormRow<kType, kSize> row(p, Rows::row());
  int64_t begin = int64_t{threadIdx.x} * kSize, step = int64_t{blockDim.x} * kSize;
  float sum = 0.0f, h[kSize];
  for (int64_t column = begin; column < p.columns; column += step) {
    auto a = load_piece<kSize>(row.x + column);
    row.add(a, row.residual != nullptr ? load_piece<kSize>(row.residual + column) : a, h);
    if (row.residual != nullptr) store_piece(row.residual_out + column, h);
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum += p.centred ? h[j] : h[j] * h[j];
  }
  sum = Rows::sum(sum);
  float mean = p.centred ? sum / static_cast<float>(p.columns) : 0.0f;
  auto load = [&](int64_t column) {
    auto piece = load_piece<kSize>((row.residual != nullptr ? row.residual_out : row.x) + column);
#pragma unroll
    for (int j = 0; j < kSize; ++j) h[j] = to_float(piece.x[j]);
  };
  if (p.centred) {
    float squares = 0.0f;
    for (int64_t column = begin; column < p.columns; column += step) {
      load(column);
#pragma unroll
      for (int j = 0; j < kSize; ++j) squares = fmaf(h[j] - mean, h[j] - mean, squares);
    }
    sum = Rows::sum(squares);
  }
  float inverse = row.inverse_of(sum);
  for (int64_t column = begin; column < p.columns; column += step) {
    load(column);
    row.finish(column, h, mean, inverse);
  }
}

template <DType kType>
void launch(const NormParams& p, cudaStream_t stream) {
  constexpr int kItem = sizeof(Element<kType>), kSize = 16 / kItem;
  constexpr int kBlockPieces = kRowColumns / kSize;
  bool wide =
      has_16_byte_pieces(kItem, {p.x, p.residual, p.out, p.residual_out}, p.columns, p.x_stride,
                         p.residual_stride, p.out_stride, p.residual_out_stride);
  unsigned blocks = blocks_of("rms_norm", p.rows);
  if (!wide) {
    norm_long<kType, 1><<<blocks, 256, 0, stream>>>(p);
  } else if (p.columns <= 32 * kSize * kWarpPieces) {
    blocks = ceil_div(blocks, unsigned{kWarpsPerBlock});
    norm<kType, kSize, kWarpPieces, true><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(p);
  } else if (p.columns <= int64_t{kRowThreads} * kSize * kBlockPieces) {
    int lanes = static_cast<int>(ceil_div<int64_t>(p.columns, kSize * kBlockPieces));
    norm<kType, kSize, kBlockPieces, false><<<blocks, ceil_div(lanes, 32) * 32, 0, stream>>>(p);
  } else {
    norm_long<kType, kSize><<<blocks, kMostThreads, 0, stream>>>(p);
  }
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_norm(const NormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return;
  with_dtype("rms_norm", p.dtype, [&]<DType kType>() { launch<kType>(p, stream); });
}

}  // namespace cuattn
