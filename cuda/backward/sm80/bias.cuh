// SPDX-License-Identifier: Apache-2.0
// The pass of the sm80 backward kernels that makes dbias: ds again, from lse and Delta that the
// queries pass has left, a tile of dbias for each CTA (bias_tiles.cuh). Two products, as many as a
// pass spends on P and dP; the other passes know nothing of dbias, and any pattern of broadcast is
// the same loop. Before: keys.cuh.
//
//   sum of the tile stays |  Q dO K V of a tile of ds  ->  the next one that is summed  ->  ..
//                         |  S = Q K^T   dP = dO V^T   ds = P (Z dP - Delta)   sum += ds
#pragma once

#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/sm80/products.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, int kHeadDimV, class Policy>
struct BiasPass {
  // 1. Types and sizes
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Tile kTile = sm80_bias_tile(kDims);
  static constexpr int kSmemBytes = sm80_queries_smem_bytes(kDims, kTile);
  static constexpr int kCtasPerSm = 2;
  static constexpr int kKeyBlocks = kTile.n / 8;
  static constexpr int kQkBytes = kHeadDim * 2, kVBytes = kHeadDimV * 2;  // of one row
  static_assert(kTile.m == kTileRows && kTile.m * kTile.n * 4 <= kSmemBytes, "sums take its place");

  // 2. What comes: a tile of ds.
  using Step = BiasStep<kTile.m, kTile.n>;
  struct Work : Step {
    using Step::Step, Step::range, Step::row0, Step::tile;
    __device__ bool is_full() const {
      return tile() >= range.full_begin && tile() < range.full_end;
    }
    __device__ int32_t lane_row(int half) const {
      return row0 + threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
    }
  };

  // 3. Shared storage, in address order: Q, dO, K, V; swizzled. In the end the tile of sums.
  struct Shared {
    uint32_t q, dout, k, v;
    __device__ explicit Shared(const void* base)
        : q(device::smem_address(base)),
          dout(q + kTile.m * kQkBytes),
          k(dout + kTile.m * kVBytes),
          v(k + kTile.n * kQkBytes) {}
  };

  static __device__ __forceinline__ void load(const BackwardParams& p, const Work& work,
                                              const Shared& shared) {
    const AttentionParams& f = p.forward;
    int32_t kv_head = work.head / (f.num_heads_q / f.num_heads_kv);
    auto base = [&](const void* data, const Strides& s, int32_t head, int64_t start) {
      return static_cast<const char*>(data) +
             2 * (work.batch * s.batch + head * s.head + start * s.seq);
    };
    device::load_tile<kThreads, kTile.m, kHeadDim>(
        shared.q, base(f.q, f.q_strides, work.head, work.queries.start), 2 * f.q_strides.seq,
        work.row0, work.queries.used, f.head_dim);
    device::load_tile<kThreads, kTile.m, kHeadDimV>(
        shared.dout, base(p.dout, p.dout_strides, work.head, work.queries.start),
        2 * p.dout_strides.seq, work.row0, work.queries.used, f.head_dim_v);
    device::load_tile<kThreads, kTile.n, kHeadDim>(
        shared.k, base(f.k, f.k_strides, kv_head, work.keys.start), 2 * f.k_strides.seq, work.key0,
        work.keys.used, f.head_dim);
    device::load_tile<kThreads, kTile.n, kHeadDimV>(
        shared.v, base(f.v, f.v_strides, kv_head, work.keys.start), 2 * f.v_strides.seq, work.key0,
        work.keys.used, f.head_dim_v);
    device::cp_async_commit();
  }

  // 4. A tile: S and dP become ds, which is added.
  static __device__ __forceinline__ void add_tile(Fragment<kKeyBlocks>& sums,
                                                  const Fragment<kKeyBlocks>& scores,
                                                  Fragment<kKeyBlocks>& dout_v,
                                                  const RowState* rows, const BackwardParams& p,
                                                  const Work& work) {
    const AttentionParams& f = p.forward;
    if (f.dropout.is_on()) {
      device::HeadDropout dropout(f, work.batch, work.head);
      drop_rows(dout_v, dropout, work.lane_row(0), work.key0);
    }
    const Policy policy(policy_params<Policy>(p), work.batch, work.head, work.queries.used,
                        work.keys.used);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t row = min(work.lane_row(half), work.queries.used - 1);
      RowState state = rows[row_index(f, work.batch, work.head, work.queries.start + row)];
      KeyRange visible{0, work.keys.used};
      if (Policy::kIsFunctor || !work.is_full()) visible = policy.visible(row);
      if (row != work.lane_row(half)) visible.end = 0;  // past the last row
      int32_t first = work.key0 + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int32_t key = first + n * 8 + i;
          bool seen = key >= visible.begin && key < visible.end;
          key = min(key, work.keys.used - 1);
          if constexpr (Policy::kAsks) seen = seen && policy.sees(row, key);
          sums[n][2 * half + i] +=
              weigh<ScoreKind::scored>(scores[n][2 * half + i], dout_v[n][2 * half + i], state,
                                       policy, f.scores.scale, row, key, seen)
                  .ds;
        }
      }
    }
  }

  // 5. Main loop and kernel
  static __device__ __forceinline__ void run(const BackwardParams& p, const Memory& memory,
                                             int32_t parts, char* smem) {
    Shared shared(smem);
    BiasWork bias(p, kTile, parts);
    Fragment<kKeyBlocks> sums;
    clear<kKeyBlocks>(sums);
    for (; bias.left > 0; bias.advance()) {
      Work work(p.forward, bias);
      if (!work.is_seen()) continue;
      __syncthreads();  // every warp is done with the tile before
      load(p, work, shared);
      device::cp_async_wait<0>();
      __syncthreads();
      Fragment<kKeyBlocks> scores, dout_v;
      multiply_rows<kType, kHeadDim, kKeyBlocks>(scores, shared.q, shared.k);
      multiply_rows<kType, kHeadDimV, kKeyBlocks>(dout_v, shared.dout, shared.v);
      add_tile(sums, scores, dout_v, memory.rows, p, work);
    }
    __syncthreads();
    float* tile = reinterpret_cast<float*>(smem);
    int32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        tile[(row + i / 2 * 8) * kTile.n + n * 8 + column + i % 2] = sums[n][i];
    }
    store_bias_tile<kThreads, kTile.m, kTile.n>(p, bias, tile,
                                                parts > 1 ? memory.bias_parts : nullptr);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, Pass::kCtasPerSm)
    bias_sm80_kernel(const __grid_constant__ BackwardParams params, const Memory memory,
                     int32_t parts) {
  extern __shared__ __align__(1024) char smem[];
  Pass::run(params, memory, parts, smem);
}

}  // namespace cuattn::backward
