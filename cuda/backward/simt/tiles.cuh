// SPDX-License-Identifier: Apache-2.0
// What the passes of the float32 backward kernels do with a tile, on CUDA cores. Both operands of a
// product stream through two stages of shared memory, as in a classic SGEMM, so that a tile takes
// the same room for every head_dim. The letters are those of cpu/backward.cpp. Next: passes.cuh.
//
//   scores   S  = A X^T   chunks of kChunk dims of A and X      A, B: the operands whose rows the
//            dP = B Y^T   chunks of B and Y                     CTA owns; X, Y: those that pass by
//   sums     += P  Y      parts of kPart rows of Y, all dims    queries pass: A Q, B dO, X K, Y V
//            += dx X      parts of X                            keys pass:    A K, B V, X Q, Y dO
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/tiles.h"
#include "cuda/backward/weigh.cuh"

namespace cuattn::backward {

// Rows of a matrix of float32 in global memory, of one head of one sequence.
struct FloatRows {
  const float* data;  // row 0
  int64_t stride;
  int32_t begin, end, dim;  // rows from `begin` on; from `end` on there are zeros
};

__device__ __forceinline__ FloatRows float_rows(const void* data, const Strides& s, int32_t batch,
                                                int32_t head, const Span& span, int32_t begin,
                                                int32_t dim) {
  const float* row0 =
      static_cast<const float*>(data) + batch * s.batch + span.start * s.seq + head * s.head;
  return {row0, s.seq, begin, span.used, dim};
}

// A warp is 2 lane rows (y) of 16 lanes (x). Lane (y, x) of warp w holds
//
//   rows     w * 2 kRows + 2 i + y    i = 0..kRows-1, of those that the CTA owns
//   columns  x + 16 j                 j = 0..kColumns-1, of those that pass by
//   dims     4 x + 64 g + 0..3        g = 0..kGroups-1, of a sum
template <int kHeadDim, bool kOwnsKeys>
struct SimtTiles {
  static constexpr Tile kTile = simt_backward_tile(kHeadDim, kOwnsKeys);
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kRows = kTile.m / (2 * kTile.warps), kColumns = kTile.n / 16;
  static constexpr int kGroups = kHeadDim / 64;
  static constexpr int kChunk = 32, kPart = 4096 / kHeadDim, kParts = kTile.n / kPart;
  static constexpr int kPad = 4;  // floats: 8 rows at one column then fall into 8 groups of banks
  static constexpr int kCtasPerSm = 2;

  // What is on its way to a product.
  union Stage {
    struct {
      float own[kTile.m][kChunk + kPad], other[kTile.n][kChunk + kPad];
    } chunk;
    float part[kPart][kHeadDim];
  };

  using Scores = float[kRows][kColumns];
  using Sum = float[kRows][kGroups][4];

  static __device__ int row_of(int i) {
    return threadIdx.x / 32 * (2 * kRows) + 2 * i + threadIdx.x % 32 / 16;
  }
  static __device__ int lane_x() { return threadIdx.x % 16; }
  static __device__ int column_of(int j) { return lane_x() + 16 * j; }
  static __device__ float4 read4(const float* shared) {
    return *reinterpret_cast<const float4*>(shared);
  }
  static __device__ void clear(Scores& x) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] = 0.0f;
    }
  }
  static __device__ void clear(Sum& x) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[i][g][c] = 0.0f;
      }
    }
  }

  // Copies [kCount, kWidth] floats from row rows.begin + first and column `column` on.
  template <int kCount, int kWidth>
  static __device__ void load(float* shared, int pitch, const FloatRows& rows, int32_t first,
                              int32_t column) {
    constexpr int kPieces = kWidth / 4;            // of a row, 16 bytes each
    constexpr int kPassRows = kThreads / kPieces;  // rows that the CTA copies at once
    static_assert(kThreads % kPieces == 0 && kCount % kPassRows == 0, "passes cover the tile");
    int32_t offset = column + threadIdx.x % kPieces * 4, in_tile = threadIdx.x / kPieces;
    int32_t row = rows.begin + first + in_tile;
    const float* from = rows.data + row * rows.stride + offset;
    uint32_t to = device::smem_address(shared + in_tile * pitch + threadIdx.x % kPieces * 4);
#pragma unroll
    for (int pass = 0; pass < kCount / kPassRows; ++pass) {
      bool valid = offset < rows.dim && row + pass * kPassRows < rows.end;
      device::cp_async16(to + pass * kPassRows * pitch * sizeof(float), from, valid);
      from += kPassRows * rows.stride;
    }
  }
  static __device__ void load_chunk(Stage& to, const FloatRows& own, const FloatRows& other,
                                    int chunk) {
    load<kTile.m, kChunk>(to.chunk.own[0], kChunk + kPad, own, 0, chunk * kChunk);
    load<kTile.n, kChunk>(to.chunk.other[0], kChunk + kPad, other, 0, chunk * kChunk);
  }
  static __device__ void load_part(Stage& to, const FloatRows& rows, int part) {
    load<kPart, kHeadDim>(to.part[0], kHeadDim, rows, part * kPart, 0);
  }

  // The operands of one tile, in the order in which they pass through the stages.
  struct Operands {
    FloatRows a, b, x, y;
    bool sums_y, sums_x;  // what follows the scores

    __device__ int chunks_a() const { return device::ceil_div(a.dim, kChunk); }
    __device__ int chunks_b() const { return device::ceil_div(b.dim, kChunk); }
    __device__ int steps() const {
      return chunks_a() + chunks_b() + (int{sums_y} + int{sums_x}) * kParts;
    }
    __device__ void load_step(Stage& to, int step) const {
      if (step < chunks_a()) return load_chunk(to, a, x, step);
      step -= chunks_a();
      if (step < chunks_b()) return load_chunk(to, b, y, step);
      step -= chunks_b();
      if (sums_y && step < kParts) return load_part(to, y, step);
      load_part(to, x, sums_y ? step - kParts : step);
    }
  };

  // Shared storage. A warp writes and reads its own rows of the weights only.
  using Weights = float[kTile.m][kTile.n + kPad];
  struct Shared {
    alignas(16) Stage stages[2];
    alignas(16) Weights dx, prob;  // prob: P Z, where the CTA owns keys; or drawn bytes
    Operands operands;             // of the tile: here they take no registers
  };
  static_assert(sizeof(Shared) <= 99 * 1024, "what a block gets on 8.6, 8.9 and 12.x");

  // While one stage is computed on, the next one is on its way.
  struct Feed {
    Shared& shared;
    int step = 0;

    __device__ Feed(const Operands& operands, Shared& shared) : shared(shared) {
      __syncthreads();  // nobody reads the tile before any more
      if (threadIdx.x == 0) shared.operands = operands;
      __syncthreads();
      shared.operands.load_step(shared.stages[0], 0);
      device::cp_async_commit();
    }
    // The oldest load, complete for all threads; nobody reads the other stage any more.
    __device__ const Stage& take() {
      device::cp_async_wait<0>();
      __syncthreads();
      const Stage& ready = shared.stages[step % 2];
      const Operands& from = shared.operands;
      if (++step < from.steps()) from.load_step(shared.stages[step % 2], step);
      device::cp_async_commit();
      return ready;
    }
  };

  static __device__ void add_dots(Scores& scores, const Stage& stage) {
#pragma unroll 1
    for (int d = 0; d < kChunk; d += 4) {
      float4 other[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) other[j] = read4(&stage.chunk.other[column_of(j)][d]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float4 own = read4(&stage.chunk.own[row_of(i)][d]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          scores[i][j] = fmaf(own.x, other[j].x, scores[i][j]);
          scores[i][j] = fmaf(own.y, other[j].y, scores[i][j]);
          scores[i][j] = fmaf(own.z, other[j].z, scores[i][j]);
          scores[i][j] = fmaf(own.w, other[j].w, scores[i][j]);
        }
      }
    }
  }

  // The dot products of a tile: q k, then dout v.
  static __device__ void multiply(Scores& dots, Scores& dout_v, Feed& feed) {
    clear(dots);
    clear(dout_v);
#pragma unroll 1
    for (int chunk = feed.shared.operands.chunks_a(); chunk > 0; --chunk)
      add_dots(dots, feed.take());
#pragma unroll 1
    for (int chunk = feed.shared.operands.chunks_b(); chunk > 0; --chunk)
      add_dots(dout_v, feed.take());
  }

  static __device__ void write_weights(Weights& weights, const Scores& x) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) weights[row_of(i)][column_of(j)] = x[i][j];
    }
  }

  // sum += weights times the rows that come next. Note: a tile is summed apart and then added: one
  // sum over all rows would have several times the rounding error at 4096 of them.
  static __device__ void add_weighted(Sum& sum, const Weights& weights, Feed& feed) {
    Sum of_tile;
    clear(of_tile);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const Stage& stage = feed.take();  // whose barrier shows the weights to the warp
#pragma unroll 1
      for (int row = 0; row < kPart; row += 4) add_four(of_tile, weights, stage, part, row);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[i][g][c] += of_tile[i][g][c];
      }
    }
  }

  static __device__ __forceinline__ void add_four(Sum& sum, const Weights& weights,
                                                  const Stage& stage, int part, int row) {
    float w[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4 four = read4(&weights[row_of(i)][part * kPart + row]);
      w[i][0] = four.x, w[i][1] = four.y, w[i][2] = four.z, w[i][3] = four.w;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float4 x = read4(&stage.part[row + n][4 * lane_x() + 64 * g]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          sum[i][g][0] = fmaf(w[i][n], x.x, sum[i][g][0]);
          sum[i][g][1] = fmaf(w[i][n], x.y, sum[i][g][1]);
          sum[i][g][2] = fmaf(w[i][n], x.z, sum[i][g][2]);
          sum[i][g][3] = fmaf(w[i][n], x.w, sum[i][g][3]);
        }
      }
    }
  }

  // The rows that the CTA owns, times `factor`; zeros from `used` on.
  static __device__ void store(const Sum& sum, float factor, void* data, const Strides& s,
                               int32_t batch, int32_t head, const Span& span, int32_t row0,
                               int32_t dim) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int32_t row = row0 + row_of(i);
      if (row >= span.stored) continue;
      float* to =
          static_cast<float*>(data) + batch * s.batch + (span.start + row) * s.seq + head * s.head;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        int column = 4 * lane_x() + 64 * g;
        const float (&x)[4] = sum[i][g];
        if (column >= dim) continue;
        *reinterpret_cast<float4*>(to + column) =
            row < span.used ? float4{x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor}
                            : float4{};
      }
    }
  }
};

}  // namespace cuattn::backward
