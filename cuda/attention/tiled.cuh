// SPDX-License-Identifier: Apache-2.0
// Rung two, backend="tiled": attention that never writes its scores to memory. A block keeps a tile
// of query rows, walks over tiles of keys and values in shared memory, and corrects its running
// result whenever a larger score turns up: the online softmax of arXiv:1805.02867, and algorithm 1
// of FlashAttention-2, arXiv:2307.08691, in its plainest form. Every dtype, head dims to 128,
// masks, GQA, ragged batches; no score mods, no sinks. Next: cublas.cu.
#pragma once

#include "cuattn/device/finish.cuh"
#include "cuattn/device/scores.cuh"
#ifndef __CUDACC_RTC__
#include "cuda/host/launch.h"
#endif
#include "cuattn/schedule.h"
#include "cuattn/tiles.h"

namespace cuattn {

template <DType kType, int kHeadDim, class Policy>
struct ForwardTiled {
  // 1. Types and sizes
  //
  // A warp owns kRows query rows. While it computes scores, a lane is a key; while it adds up
  // values, a lane is a column of the output (and the columns 32, 64, ... further on):
  //
  //              keys of the tile                        columns of V
  //              lane 0  1 ... 31                        lane 0  1 ... 31   0  1 ... 31
  //   row        s s s s s s s s s    softmax over   row      o o o o o o   o o o o o o
  //   (a warp's) s s s s s s s s s    the lanes      (same)   o o o o o o   o o o o o o
  using T = device::Element<kType>;
  static constexpr int kWarps = kTiledTile.warps, kThreads = kWarps * 32;
  static constexpr int kTileM = kTiledTile.m, kTileN = kTiledTile.n;
  static constexpr int kRows =
      kTileM / kWarps;  // rows that share each value read from shared memory
  static constexpr int kColumns = kHeadDim / 32;  // of a lane
  static constexpr int kPad = 4;  // floats: 8 rows at one column then fall into 8 groups of banks

  // 2. Shared storage: float32 copies, zeros past the last row and past head_dim
  struct Shared {
    alignas(16) float q[kTileM][kHeadDim + kPad];
    alignas(16) float k[kTileN][kHeadDim + kPad];
    alignas(16) float v[kTileN][kHeadDim + kPad];
  };
  static_assert(sizeof(Shared) <= 99 * 1024,
                "compute capabilities 8.6, 8.9 and 12.x give a block 99 KiB at most");

  // 3. Roles: every thread loads, every warp computes its own rows.
  // Rows [first, first + kCount) of a matrix with `columns` columns and `rows` rows.
  template <int kCount>
  static __device__ void load(float (&shared)[kCount][kHeadDim + kPad], const T* matrix,
                              int64_t stride, int32_t first, int32_t rows, int32_t columns) {
    constexpr int kPiece = 16 / sizeof(T);  // elements read at once; rows are 16-byte aligned
    struct alignas(16) Piece {
      T x[kPiece];
    };
#pragma unroll 2
    for (int i = threadIdx.x; i < kCount * kHeadDim / kPiece; i += kThreads) {
      int row = i / (kHeadDim / kPiece), column = i % (kHeadDim / kPiece) * kPiece;
      Piece piece{};  // all bits zero is the number zero in every dtype
      if (first + row < rows && column < columns) {
        piece = *reinterpret_cast<const Piece*>(matrix + (first + row) * stride + column);
      }
#pragma unroll
      for (int c = 0; c < kPiece; ++c) shared[row][column + c] = device::to_float(piece.x[c]);
    }
  }

  // The running result of a warp's rows, relative to the maximum so far.
  struct State {
    float out[kRows][kColumns];
    float max[kRows], sum[kRows];  // max: of scores; the same in all lanes
  };

  // 4. Main loop
  // scores[i] = q_i . k_lane, in two sums of half the length: less latency, and less rounding where
  // large products cancel.
  static __device__ void dot_products(float (&scores)[kRows], const Shared& s, int32_t head_dim) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float second[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) scores[i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < head_dim; d += 4) {
      float4 k = *reinterpret_cast<const float4*>(&s.k[lane][d]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // One address for the whole warp.
        float4 q = *reinterpret_cast<const float4*>(&s.q[warp * kRows + i][d]);
        scores[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, scores[i]));
        second[i] = fmaf(q.z, k.z, fmaf(q.w, k.w, second[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) scores[i] += second[i];
  }

  // Scores become probabilities 2^((score - maximum) * scale_log2), scale_log2 > 0. A larger
  // maximum shrinks what was added up before. The rounding error of an exponent is that of a
  // difference, which is small where the probability is large, however large the scores.
  static __device__ void softmax(float (&scores)[kRows], State& state, float scale_log2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // A NaN leaves the maximum and enters the sum.
      float max = fmaxf(state.max[i], device::warp_max(scores[i]));
      // No key seen yet: 0 in place of -inf keeps -inf - -inf out of the exponents.
      float reference = max == device::negative_infinity() ? 0.0f : max;
      float shrink = device::exp2_approx((state.max[i] - reference) * scale_log2);
      scores[i] = device::exp2_approx((scores[i] - reference) * scale_log2);
      state.max[i] = max;
      state.sum[i] = state.sum[i] * shrink + device::warp_sum(scores[i]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state.out[i][c] *= shrink;
    }
  }

  // out_i += sum over the tile's keys of probability * v. The tile is summed apart and then added:
  // one sum over all keys would round more.
  static __device__ void add_values(State& state, const float (&probs)[kRows], const Shared& s) {
    int lane = threadIdx.x % 32;
    float sum[kRows][kColumns] = {};
#pragma unroll 2
    for (int key = 0; key < kTileN; ++key) {
      float v[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) v[c] = s.v[key][lane + 32 * c];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float prob = __shfl_sync(0xffffffffu, probs[i], key);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[i][c] = fmaf(prob, v[c], sum[i][c]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state.out[i][c] += sum[i][c];
    }
  }

  static __device__ void run(const AttentionParams& p, Shared& s) {
    // Which tile of which head of which sequence: blockIdx.x counts [batch, head, tile].
    uint32_t row_tiles = device::ceil_div(p.seqlen_q, kTileM);
    int32_t row_begin = blockIdx.x % row_tiles * kTileM;
    int32_t head = blockIdx.x / row_tiles % p.num_heads_q;
    int32_t b = blockIdx.x / row_tiles / p.num_heads_q;
    int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
    Span queries = query_span(p, b), keys = key_span(p, b);
    if (row_begin >= queries.stored) return;

    const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch +
                 queries.start * p.q_strides.seq + head * p.q_strides.head;
    const T* k = static_cast<const T*>(p.k) + b * p.k_strides.batch + keys.start * p.k_strides.seq +
                 head_kv * p.k_strides.head;
    const T* v = static_cast<const T*>(p.v) + b * p.v_strides.batch + keys.start * p.v_strides.seq +
                 head_kv * p.v_strides.head;

    const Policy policy(p, b, head, queries.used, keys.used);
    int32_t row_end = min(row_begin + kTileM, queries.used);
    device::TileRange tiles = policy.template range<kTileN>(row_begin, row_end);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t warp_row = row_begin + warp * kRows;  // the warp's first row
    State state;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      state.max[i] = device::negative_infinity();
      state.sum[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state.out[i][c] = 0.0f;
    }

    // Lane i knows which keys the warp's row i sees.
    KeyRange seen = policy.visible(warp_row + lane % kRows);
    load(s.q, q, p.q_strides.seq, row_begin, queries.used, p.head_dim);
    for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      __syncthreads();  // every warp is done with the previous tile
      load(s.k, k, p.k_strides.seq, tile * kTileN, keys.used, p.head_dim);
      load(s.v, v, p.v_strides.seq, tile * kTileN, keys.used, p.head_dim_v);
      __syncthreads();  // the tile (and, the first time, Q) is there for every warp

      float scores[kRows];
      dot_products(scores, s, p.head_dim);
      int32_t key = tile * kTileN + lane;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        int32_t begin = __shfl_sync(0xffffffffu, seen.begin, i);
        int32_t end = __shfl_sync(0xffffffffu, seen.end, i);
        if (key < begin || key >= end) scores[i] = device::negative_infinity();
      }
      softmax(scores, state, policy.to_log2);
      add_values(state, scores, s);
    }

    // 5. Epilogue: stored rows past the used ones, and rows without keys, become 0 and -inf.
    const device::Finish finish(p.scores, head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int32_t row = warp_row + i;
      if (row >= queries.stored) break;
      device::RowEnd end = finish.end(device::finite_product(state.max[i], policy.to_log2),
                                      state.sum[i], row < queries.used);
      T* out = static_cast<T*>(p.out) + b * p.out_strides.batch +
               (queries.start + row) * p.out_strides.seq + head * p.out_strides.head;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (lane + 32 * c < p.head_dim_v) {
          out[lane + 32 * c] =
              device::from_float<T>(end.alive ? state.out[i][c] * end.factor : 0.0f);
        }
      }
      if (p.lse != nullptr && lane == 0) {
        p.lse[b * p.lse_strides.batch + head * p.lse_strides.head +
              (queries.start + row) * p.lse_strides.seq] = end.lse;
      }
    }
  }
};

// 6. Kernel. No number of blocks is asked for: it takes 127 or 128 registers by itself, two blocks
// fit, and asked for two of them ptxas orders the same code for sm_80 so that it spills four bytes.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    forward_tiled(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Kernel::run(p, *reinterpret_cast<typename Kernel::Shared*>(dynamic_shared));
}

// 7. Launcher
#ifndef __CUDACC_RTC__
template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_forward_tiled(const AttentionLaunch& launch, cudaStream_t stream) {
  const AttentionParams& p = launch.params;
  static_assert(kHeadDim == kHeadDimV && kScore == ScoreKind::identity,
                "tiled has square head dims, no score mods");
  using Kernel = ForwardTiled<kType, kHeadDim, device::OptionPolicy<kType, kMask, kScore>>;
  CUATTN_ASSERT(p.head_dim <= kHeadDim && p.head_dim_v <= kHeadDim && p.scores.sinks == nullptr,
                "tiled: head dims ", p.head_dim, ", ", p.head_dim_v, " or sinks");
  int64_t blocks = int64_t{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, Kernel::kTileM);
  if (blocks == 0) return;
  static uint64_t opted_in = 0;
  constexpr int kSharedBytes = sizeof(typename Kernel::Shared);
  allow_shared_memory(forward_tiled<Kernel>, kSharedBytes, opted_in);
  forward_tiled<Kernel>
      <<<grid_blocks(blocks, "tiled"), Kernel::kThreads, kSharedBytes, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}
#endif

}  // namespace cuattn
