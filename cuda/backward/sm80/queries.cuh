// SPDX-License-Identifier: Apache-2.0
// The queries pass of the backward kernels on mma.sync (sm_80 and later): Delta and dQ. A CTA owns
// 64 query rows of one head, a warp 16 of them, and walks the key tiles right to left. It writes
// Delta and lse of its rows to the workspace, where the other passes read them, and the terms of
// dslopes. No atomics: the same bits in every run. Next: keys.cuh.
//
//   Q, dO, Delta, lse stay |  K2 V2  ->  K1 V1  ->  K0 V0
//                          |  S = Q K^T   dP = dO V^T   P = exp(S - lse)   dx = P (Z dP - Delta)
//                          |  dQ += dx K
//   stages = 2, one barrier a tile:    copy | K1 V1    | K0 V0    |          |
//                                      math | tile 2   | tile 1   | tile 0   |
//   stages = 1, two barriers a tile:   the copy of a tile follows the products of the one before.
#pragma once

#include "cuda/backward/sm80/products.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, int kHeadDimV, class Policy>
struct QueriesPass {
  // 1. Types and sizes
  static constexpr ScoreKind kScore = Policy::kScoreKind;
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Tile kTile =
      sm80_queries_tile(kDims, Policy::kIsFunctor ? ScoreKind::scored : kScore);
  static constexpr int kSmemBytes = sm80_queries_smem_bytes(kDims, kTile);
  static constexpr int kCtasPerSm = 2;  // 128 threads leave 255 registers each
  static constexpr int kKeyBlocks = kTile.n / 8;
  static constexpr int kQkBytes = kHeadDim * 2, kVBytes = kHeadDimV * 2;  // of one row
  static_assert(kTile.m == kTileRows && kTile.n % 16 == 0, "tiles are made of m16n8k16");

  // 2. Shared storage, in address order: Q, dO, K (stage), V (stage); swizzled.
  struct Shared {
    uint32_t q, dout, k, v;
    __device__ explicit Shared(const void* base)
        : q(device::smem_address(base)),
          dout(q + kTile.m * kQkBytes),
          k(dout + kTile.m * kVBytes),
          v(k + kTile.stages * kTile.n * kQkBytes) {}
    __device__ uint32_t k_stage(int stage) const { return k + stage * kTile.n * kQkBytes; }
    __device__ uint32_t v_stage(int stage) const { return v + stage * kTile.n * kVBytes; }
  };

  // 3. What a CTA works on
  struct Work {
    int32_t batch, head, row0;
    Span queries, keys;
  };

  static __device__ Work find_work(const AttentionParams& f, int32_t tiles) {
    int32_t tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
    if (Policy::kHeavyLast) tile = tiles - 1 - tile;  // the heaviest first
    Work work{pair / f.num_heads_q, pair % f.num_heads_q, tile * kTile.m, {}, {}};
    work.queries = query_span(f, work.batch);
    work.keys = key_span(f, work.batch);
    return work;
  }

  // Row (within the sequence) of this lane's register pair `half`.
  static __device__ __forceinline__ int32_t lane_row(const Work& work, int half) {
    return work.row0 + threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // dout . out of a row, by the four lanes of its quad.
  static __device__ __forceinline__ float dot_of_row(const BackwardParams& p, const Work& work,
                                                     int32_t row) {
    const AttentionParams& f = p.forward;
    int64_t stored = work.queries.start + row;
    const char* dout = static_cast<const char*>(p.dout) +
                       2 * (work.batch * p.dout_strides.batch + work.head * p.dout_strides.head +
                            stored * p.dout_strides.seq);
    const char* out = static_cast<const char*>(f.out) +
                      2 * (work.batch * f.out_strides.batch + work.head * f.out_strides.head +
                           stored * f.out_strides.seq);
    float sum = 0.0f;
    for (int32_t chunk = threadIdx.x % 4; chunk * 8 < f.head_dim_v; chunk += 4) {
      struct alignas(16) Chunk {
        device::Element<kType> x[8];
      };
      Chunk a = reinterpret_cast<const Chunk*>(dout)[chunk];
      Chunk b = reinterpret_cast<const Chunk*>(out)[chunk];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum = fmaf(device::to_float(a.x[i]), device::to_float(b.x[i]), sum);
    }
    return sum;
  }

  // lse and Delta of a row, which the quad leaves in the workspace, of stored rows past the used
  // ones too.
  static __device__ __forceinline__ RowState find_row(const BackwardParams& p, const Work& work,
                                                      RowState* rows, int32_t row) {
    const AttentionParams& f = p.forward;
    RowState state{positive_infinity(), 0.0f};
    bool used = row < work.queries.used;
    int64_t stored = work.queries.start + row;
    float dot = used ? dot_of_row(p, work, row) : 0.0f;
    dot = device::quad_sum(dot);
    float lse = device::negative_infinity();
    if (used) {
      lse = f.lse[work.batch * f.lse_strides.batch + work.head * f.lse_strides.head +
                  stored * f.lse_strides.seq];
    }
    if (lse != device::negative_infinity()) {
      float dlse = p.dlse == nullptr
                       ? 0.0f
                       : p.dlse[work.batch * p.dlse_strides.batch +
                                work.head * p.dlse_strides.head + stored * p.dlse_strides.seq];
      state = {lse, dot - dlse};
    }
    if (threadIdx.x % 4 == 0 && row < work.queries.stored)
      rows[row_index(f, work.batch, work.head, stored)] = state;
    return state;
  }

  // 4. A tile: S and dP become ds and dx.
  template <bool kMasked>
  static __device__ __forceinline__ void weigh_tile(Fragment<kKeyBlocks>& scores,
                                                    Fragment<kKeyBlocks>& dout_v,
                                                    const RowState (&states)[2],
                                                    const AttentionParams& f, const Work& work,
                                                    const Policy& policy, int32_t key0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t row = lane_row(work, half);
      KeyRange visible{0, work.keys.used};
      if constexpr (kMasked) visible = policy.visible(row);
      int32_t first = key0 + 2 * (threadIdx.x % 4);
      row = min(row, work.queries.used - 1);  // no load leaves the bias
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int32_t key = first + n * 8 + i;
          bool seen = !kMasked || (key >= visible.begin && key < visible.end);
          key = min(key, work.keys.used - 1);
          if constexpr (kMasked && Policy::kAsks) seen = seen && policy.sees(row, key);
          float &dot = scores[n][2 * half + i], &dp = dout_v[n][2 * half + i];
          Weighed weighed =
              weigh<kScore>(dot, dp, states[half], policy, f.scores.scale, row, key, seen);
          if constexpr (Policy::kGives) policy.give(weighed.ds, dot, row, key);
          dot = weighed.ds;
          dp = weighed.dx;
        }
      }
    }
  }

  // What a tile adds to the terms of dslopes.
  static __device__ __forceinline__ void add_slope_terms(float (&terms)[2],
                                                         const Fragment<kKeyBlocks>& ds,
                                                         const Work& work, const Policy& policy,
                                                         int32_t key0) {
    if constexpr (kScore == ScoreKind::scored) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            int32_t key = key0 + n * 8 + 2 * (threadIdx.x % 4) + i;
            float distance = policy.distance(lane_row(work, half), key);
            terms[half] = fmaf(-ds[n][2 * half + i], distance, terms[half]);
          }
        }
      }
    }
  }

  // 5. Main loop
  static __device__ __forceinline__ void gather(const BackwardParams& p, const Work& work,
                                                const Shared& shared, const RowState (&states)[2],
                                                Fragment<kHeadDim / 8>& dq,
                                                float (&slope_terms)[2]) {
    const AttentionParams& f = p.forward;
    const Policy policy(policy_params<Policy>(p), work.batch, work.head, work.queries.used,
                        work.keys.used);
    auto walk =
        policy.template walk<kTile.n>(work.row0, min(work.row0 + kTile.m, work.queries.used));
    if (!walk.more()) return;
    int32_t kv_head = work.head / (f.num_heads_q / f.num_heads_kv);
    auto base = [&](const void* data, const Strides& s, int32_t head, int64_t start) {
      return static_cast<const char*>(data) +
             2 * (work.batch * s.batch + head * s.head + start * s.seq);
    };
    const char* k = base(f.k, f.k_strides, kv_head, work.keys.start);
    const char* v = base(f.v, f.v_strides, kv_head, work.keys.start);
    auto load = [&](int32_t tile, int stage) {
      device::load_tile<kThreads, kTile.n, kHeadDim>(shared.k_stage(stage), k, 2 * f.k_strides.seq,
                                                     tile * kTile.n, work.keys.used, f.head_dim);
      device::load_tile<kThreads, kTile.n, kHeadDimV>(shared.v_stage(stage), v, 2 * f.v_strides.seq,
                                                      tile * kTile.n, work.keys.used, f.head_dim_v);
      device::cp_async_commit();
    };
    device::load_tile<kThreads, kTile.m, kHeadDim>(
        shared.q, base(f.q, f.q_strides, work.head, work.queries.start), 2 * f.q_strides.seq,
        work.row0, work.queries.used, f.head_dim);
    device::load_tile<kThreads, kTile.m, kHeadDimV>(
        shared.dout, base(p.dout, p.dout_strides, work.head, work.queries.start),
        2 * p.dout_strides.seq, work.row0, work.queries.used, f.head_dim_v);
    device::HeadDropout dropout(f, work.batch, work.head);
    int stage = 0;
    load(walk.tile, stage);
    for (; walk.more(); walk.next()) {
      device::cp_async_wait<0>();
      __syncthreads();
      if (kTile.stages == 2 && walk.has_next()) load(walk.next_tile(), stage ^ 1);
      const int32_t key0 = walk.tile * kTile.n;
      Fragment<kKeyBlocks> scores, dout_v;
      multiply_rows<kType, kHeadDim, kKeyBlocks>(scores, shared.q, shared.k_stage(stage));
      multiply_rows<kType, kHeadDimV, kKeyBlocks>(dout_v, shared.dout, shared.v_stage(stage));
      if constexpr (kScore == ScoreKind::scored) {
        if (f.dropout.is_on()) drop_rows(dout_v, dropout, lane_row(work, 0), key0);
      }
      if (walk.masked()) {
        weigh_tile<true>(scores, dout_v, states, f, work, policy, key0);
      } else {
        weigh_tile<false>(scores, dout_v, states, f, work, policy, key0);
      }
      if (p.needs(kNeedDslopes)) add_slope_terms(slope_terms, scores, work, policy, key0);
      add_weighted<kType, kHeadDim, kKeyBlocks>(dq, dout_v, shared.k_stage(stage));
      if constexpr (kTile.stages == 2) {
        stage ^= 1;
      } else if (walk.has_next()) {
        __syncthreads();
        load(walk.next_tile(), 0);
      }
    }
  }

  // 6. Epilogue
  static __device__ __forceinline__ void store(const BackwardParams& p, const Work& work,
                                               const Shared& shared,
                                               const Fragment<kHeadDim / 8>& dq) {
    char* to = static_cast<char*>(p.dq) +
               2 * (work.batch * p.dq_strides.batch + work.head * p.dq_strides.head +
                    work.queries.start * p.dq_strides.seq);
    int32_t warp = threadIdx.x / 32;
    store_rows<kType, kHeadDim>(dq, p.forward.scores.scale, shared.q + warp * 16 * kQkBytes, to,
                                2 * p.dq_strides.seq, work.row0 + warp * 16, work.queries,
                                p.forward.head_dim);
  }

  static __device__ __forceinline__ void store_slope_terms(const AttentionParams& f,
                                                           const Work& work, float* to,
                                                           const float (&terms)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = device::quad_sum(terms[half]);
      int32_t row = lane_row(work, half);
      if (threadIdx.x % 4 == 0 && row < work.queries.stored)
        to[row_index(f, work.batch, work.head, work.queries.start + row)] = sum;
    }
  }

  // 7. Kernel
  static __device__ __forceinline__ void run(const BackwardParams& p, const Memory& memory,
                                             int32_t tiles, const void* smem) {
    Work work = find_work(p.forward, tiles);
    if (work.row0 >= work.queries.stored) return;
    Shared shared(smem);
    RowState states[2] = {find_row(p, work, memory.rows, lane_row(work, 0)),
                          find_row(p, work, memory.rows, lane_row(work, 1))};
    if (!Policy::kGives && !p.needs(kNeedDq | kNeedDslopes)) return;
    Fragment<kHeadDim / 8> dq;
    clear<kHeadDim / 8>(dq);
    float slope_terms[2] = {};
    gather(p, work, shared, states, dq, slope_terms);
    if (p.dq != nullptr) store(p, work, shared, dq);
    if (p.needs(kNeedDslopes)) store_slope_terms(p.forward, work, memory.slope_terms, slope_terms);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, Pass::kCtasPerSm)
    queries_sm80_kernel(const __grid_constant__ BackwardParams params,
                        const __grid_constant__ Memory memory, int32_t tiles) {
  extern __shared__ __align__(1024) char smem[];
  Pass::run(params, memory, tiles, smem);
}

}  // namespace cuattn::backward
