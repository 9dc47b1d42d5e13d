// SPDX-License-Identifier: Apache-2.0
// The keys pass of the backward kernels on mma.sync (sm_80 and later): dK and dV. A CTA owns 64
// keys of one KV head, a warp 16 of them, and walks the query tiles of the G query heads that share
// them, head after head. Scores are transposed: rows are keys, columns queries, so dK and dV stay
// in registers and every sum has a fixed order. Where both do not fit (head_dim from 192 on), a CTA
// makes one of them. Before: queries.cuh, which wrote lse and Delta of the rows.
//
//   K, V stay |  Q0 dO0  ->  Q1 dO1  ->  ..  of head 0  ->  Q0 dO0  ->  ..  of head G - 1
//             |  S^T = K Q^T   P^T = exp(S^T - lse)             dV += P^T Z dO
//             |  dP^T = V dO^T   dx^T = P^T (Z dP^T - Delta)    dK += dx^T Q
//   The copies run as in queries.cuh; lse and Delta of a tile come with its Q.
#pragma once

#include "cuda/backward/sm80/products.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, int kHeadDimV, class Policy>
struct KeysPass {
  // 1. Types and sizes
  static constexpr MaskKind kMask = Policy::kMaskKind;
  static constexpr ScoreKind kScore = Policy::kScoreKind;
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Tile kTile =  // n keys stay, m queries come
      sm80_keys_tile(kDims, Policy::kIsFunctor ? ScoreKind::scored : kScore);
  static constexpr int kSmemBytes = sm80_keys_smem_bytes(kDims, kTile);
  static constexpr int kCtasPerSm = 2;  // 128 threads leave 255 registers each
  static constexpr bool kMakesOne = sm80_keys_makes_one(kDims);
  static constexpr int kRowBlocks = kTile.m / 8;
  static constexpr int kQkBytes = kHeadDim * 2, kVBytes = kHeadDimV * 2;  // of one row
  static_assert(kTile.n == kTileRows && kTile.m % 16 == 0, "tiles are made of m16n8k16");

  // 2. Shared storage, in address order: K, V, Q (stage), dO (stage), swizzled; RowState (stage).
  struct Shared {
    uint32_t k, v, q, dout, rows;
    const RowState* row_states;
    __device__ explicit Shared(const char* base)
        : k(device::smem_address(base)),
          v(k + kTile.n * kQkBytes),
          q(v + kTile.n * kVBytes),
          dout(q + kTile.stages * kTile.m * kQkBytes),
          rows(dout + kTile.stages * kTile.m * kVBytes),
          row_states(reinterpret_cast<const RowState*>(base + (rows - k))) {}
    __device__ uint32_t q_stage(int stage) const { return q + stage * kTile.m * kQkBytes; }
    __device__ uint32_t dout_stage(int stage) const { return dout + stage * kTile.m * kVBytes; }
  };

  // 3. What a CTA works on
  struct Work {
    int32_t batch, kv_head, key0;
    Span queries, keys;
    device::TileRange range;  // of queries
  };

  static __device__ Work find_work(const AttentionParams& f, uint32_t item, int32_t tiles) {
    int32_t pair = item / tiles;
    Work work{pair / f.num_heads_kv,
              pair % f.num_heads_kv,
              static_cast<int32_t>(item % tiles) * kTile.n,
              {},
              {},
              {}};
    work.queries = query_span(f, work.batch);
    work.keys = key_span(f, work.batch);
    int32_t key_end = min(work.key0 + kTile.n, work.keys.used);
    if constexpr (kMask == MaskKind::rows) {  // all tiles, of which advance() passes some over
      if (work.key0 < key_end) work.range.end = device::ceil_div(work.queries.used, kTile.m);
    } else {
      work.range = device::query_tile_range<kTile.m>(
          kMask == MaskKind::window ? f.mask.left : static_cast<int32_t>(kUnlimited),
          kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : f.mask.right, work.key0,
          key_end, work.queries.used, work.keys.used);
    }
    return work;
  }

  // Where a CTA is on its way through the query tiles of its heads.
  struct Place {
    int32_t head, tile;
    bool masked;
  };

  // Moves on to the next tile that sees a key of the CTA; false where there is none.
  static __device__ __forceinline__ bool advance(const BackwardParams& p, const Work& work,
                                                 int32_t last_head, Place& at) {
    for (;;) {
      if (++at.tile >= work.range.end) {
        at.tile = work.range.begin;
        if (++at.head > last_head) return false;
      }
      at.masked = at.tile < work.range.full_begin || at.tile >= work.range.full_end;
      if constexpr (kMask != MaskKind::rows && !Policy::kIsFunctor) return true;
      const Policy policy = policy_of(p, work, at.head);
      bool sees = true;
      if constexpr (kMask == MaskKind::rows) sees = sees_keys(policy, work, at);
      if constexpr (Policy::kIsFunctor)
        sees = sees && policy.lists(at.tile * kTile.m, work.key0, at.masked);
      if (sees) return true;
    }
  }

  static __device__ __forceinline__ Policy policy_of(const BackwardParams& p, const Work& work,
                                                     int32_t head) {
    return Policy(policy_params<Policy>(p), work.batch, head, work.queries.used, work.keys.used);
  }

  // Row ranges: whether a row of the tile sees a key of the CTA, and if not all see all the tile is
  // masked. Each warp asks for itself, its lanes share the rows out.
  static __device__ __forceinline__ bool sees_keys(const Policy& policy, const Work& work,
                                                   Place& at) {
    bool some = false, all = true;
#pragma unroll
    for (int32_t row = threadIdx.x % 32; row < kTile.m; row += 32) {
      KeyRange seen = policy.visible(at.tile * kTile.m + row);
      some |= max(seen.begin, work.key0) < min(seen.end, work.key0 + kTile.n);
      all &= seen.begin <= work.key0 && seen.end >= work.key0 + kTile.n;
    }
    at.masked = __any_sync(0xffffffffu, !all);
    return __any_sync(0xffffffffu, some);
  }

  // Key (within the sequence) of this lane's register pair `half`.
  static __device__ __forceinline__ int32_t lane_key(const Work& work, int half) {
    return work.key0 + threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // Brings a tile of Q and dO of `head`, with what the queries pass left of its rows.
  static __device__ __forceinline__ void load(const BackwardParams& p, const RowState* rows,
                                              const Work& work, const Shared& shared, int32_t head,
                                              int32_t row0, int stage) {
    const AttentionParams& f = p.forward;
    auto base = [&](const void* data, const Strides& s) {
      return static_cast<const char*>(data) +
             2 * (work.batch * s.batch + head * s.head + work.queries.start * s.seq);
    };
    device::load_tile<kThreads, kTile.m, kHeadDim>(shared.q_stage(stage), base(f.q, f.q_strides),
                                                   2 * f.q_strides.seq, row0, work.queries.used,
                                                   f.head_dim);
    device::load_tile<kThreads, kTile.m, kHeadDimV>(
        shared.dout_stage(stage), base(p.dout, p.dout_strides), 2 * p.dout_strides.seq, row0,
        work.queries.used, f.head_dim_v);
    int32_t row = row0 + threadIdx.x;
    uint32_t to = shared.rows + (stage * kTile.m + threadIdx.x) * sizeof(RowState);
    if (threadIdx.x < kTile.m) {
      if (row < work.queries.used) {
        const RowState* from = rows + row_index(f, work.batch, head, work.queries.start + row);
        device::cp_async8(to, from, true);
      } else {  // takes no part
        device::store_shared(to, __float_as_uint(positive_infinity()));
        device::store_shared(to + 4, 0);
      }
    }
    device::cp_async_commit();
  }

  // 4. A tile: S^T and dP^T become P^T and dx^T.
  template <bool kMasked>
  static __device__ __forceinline__ void weigh_tile(Fragment<kRowBlocks>& scores,
                                                    Fragment<kRowBlocks>& dout_v,
                                                    const RowState* states,
                                                    const AttentionParams& f, const Work& work,
                                                    const Policy& policy, int32_t row0) {
    KeyRange seeing[2];
    if constexpr (kMasked && kMask != MaskKind::rows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seeing[half] = visible_queries(
            kMask == MaskKind::window ? f.mask.left : static_cast<int32_t>(kUnlimited),
            kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : f.mask.right,
            lane_key(work, half), work.queries.used, work.keys.used);
      }
    }
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int32_t column = n * 8 + 2 * (threadIdx.x % 4) + i, row = row0 + column;
        RowState state = states[column];
        [[maybe_unused]] KeyRange keys;
        if constexpr (kMasked && kMask == MaskKind::rows) keys = policy.visible(row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bool seen = !kMasked || (row >= seeing[half].begin && row < seeing[half].end);
          if constexpr (kMasked && kMask == MaskKind::rows)
            seen = lane_key(work, half) >= keys.begin && lane_key(work, half) < keys.end;
          // Clamped: no load leaves the bias.
          const int32_t query = min(row, work.queries.used - 1);
          const int32_t key = min(lane_key(work, half), work.keys.used - 1);
          if constexpr (kMasked && Policy::kAsks) seen = seen && policy.sees(query, key);
          float &dot = scores[n][2 * half + i], &dp = dout_v[n][2 * half + i];
          Weighed weighed = weigh<kScore>(dot, dp, state, policy, f.scores.scale, query, key, seen);
          dot = weighed.prob;
          dp = weighed.dx;
        }
      }
    }
  }

  // Which elements dropout keeps, a bit each for four blocks of rows, and both fragments times Z:
  // dP before P and dx are made of it, P after.
  using Kept = uint32_t[kRowBlocks / 4];
  static __device__ __forceinline__ void find_kept(Kept& kept, const AttentionParams& f,
                                                   const Work& work, int32_t head, int32_t row0) {
    device::HeadDropout dropout(f, work.batch, head);
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += 4) {
      int32_t key0 = work.key0 + threadIdx.x / 32 * 16;
      kept[n / 4] = dropout.kept_of_keys(row0 + n * 8, key0);
    }
  }
  static __device__ __forceinline__ void drop(Fragment<kRowBlocks>& x, const Kept& kept,
                                              float factor) {
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += 4) device::apply_kept(x, n, kept[n / 4], factor);
  }

  // 5. Main loop
  template <bool kMakesDk, bool kMakesDv>
  static __device__ __forceinline__ void gather(const BackwardParams& p, const RowState* rows,
                                                const Work& work, const Shared& shared,
                                                Fragment<kHeadDim / 8>& dk,
                                                Fragment<kHeadDimV / 8>& dv) {
    const AttentionParams& f = p.forward;
    if (work.range.end <= work.range.begin) return;
    int32_t group = f.num_heads_q / f.num_heads_kv, last_head = (work.kv_head + 1) * group - 1;
    Place at{work.kv_head * group, work.range.begin - 1, true};
    if (!advance(p, work, last_head, at)) return;
    auto base = [&](const void* data, const Strides& s) {
      return static_cast<const char*>(data) +
             2 * (work.batch * s.batch + work.kv_head * s.head + work.keys.start * s.seq);
    };
    device::load_tile<kThreads, kTile.n, kHeadDim>(shared.k, base(f.k, f.k_strides),
                                                   2 * f.k_strides.seq, work.key0, work.keys.used,
                                                   f.head_dim);
    if constexpr (kMakesDk) {
      device::load_tile<kThreads, kTile.n, kHeadDimV>(shared.v, base(f.v, f.v_strides),
                                                      2 * f.v_strides.seq, work.key0,
                                                      work.keys.used, f.head_dim_v);
    }
    int stage = 0;
    load(p, rows, work, shared, at.head, at.tile * kTile.m, stage);
    for (bool more = true; more;) {
      Place next = at;
      more = advance(p, work, last_head, next);
      device::cp_async_wait<0>();
      __syncthreads();
      if (kTile.stages == 2 && more)
        load(p, rows, work, shared, next.head, next.tile * kTile.m, stage ^ 1);
      Fragment<kRowBlocks> scores, dout_v;
      multiply_rows<kType, kHeadDim, kRowBlocks>(scores, shared.k, shared.q_stage(stage));
      if constexpr (kMakesDk) {
        multiply_rows<kType, kHeadDimV, kRowBlocks>(dout_v, shared.v, shared.dout_stage(stage));
      } else {
        clear<kRowBlocks>(dout_v);
      }
      const Policy policy = policy_of(p, work, at.head);
      const RowState* states = shared.row_states + stage * kTile.m;
      [[maybe_unused]] Kept kept;
      const bool drops = kScore == ScoreKind::scored && f.dropout.is_on();
      if (drops) {
        find_kept(kept, f, work, at.head, at.tile * kTile.m);
        drop(dout_v, kept, f.dropout.factor());
      }
      if (at.masked) {
        weigh_tile<true>(scores, dout_v, states, f, work, policy, at.tile * kTile.m);
      } else {
        weigh_tile<false>(scores, dout_v, states, f, work, policy, at.tile * kTile.m);
      }
      if (drops) drop(scores, kept, f.dropout.factor());
      if constexpr (kMakesDv)
        add_weighted<kType, kHeadDimV, kRowBlocks>(dv, scores, shared.dout_stage(stage));
      if constexpr (kMakesDk)
        add_weighted<kType, kHeadDim, kRowBlocks>(dk, dout_v, shared.q_stage(stage));
      if constexpr (kTile.stages == 2) {
        stage ^= 1;
      } else if (more) {
        __syncthreads();
        load(p, rows, work, shared, next.head, next.tile * kTile.m, 0);
      }
      at = next;
    }
  }

  // 6. Epilogue: one of the two results, by way of the warp's own rows of `staging`.
  template <int kDim>
  static __device__ __forceinline__ void store(const Fragment<kDim / 8>& sum, float factor,
                                               uint32_t staging, void* data, const Strides& s,
                                               DType dtype, const Work& work, int32_t dim) {
    if (data == nullptr) return;
    int64_t bytes = dtype == DType::f32 ? 4 : 2;
    char* to = static_cast<char*>(data) +
               bytes * (work.batch * s.batch + work.kv_head * s.head + work.keys.start * s.seq);
    int32_t warp = threadIdx.x / 32, row0 = work.key0 + warp * 16;
    if (dtype == DType::f32)
      return store_float_rows<kDim>(sum, factor, to, bytes * s.seq, row0, work.keys, dim);
    store_rows<kType, kDim>(sum, factor, staging + warp * 16 * kDim * 2, to, bytes * s.seq, row0,
                            work.keys, dim);
  }

  template <bool kMakesDk, bool kMakesDv>
  static __device__ __forceinline__ void make(const BackwardParams& p, const RowState* rows,
                                              const Work& work, const Shared& shared) {
    const AttentionParams& f = p.forward;
    Fragment<kHeadDim / 8> dk;
    Fragment<kHeadDimV / 8> dv;
    clear<kHeadDim / 8>(dk);
    clear<kHeadDimV / 8>(dv);
    gather<kMakesDk, kMakesDv>(p, rows, work, shared, dk, dv);
    if constexpr (kMakesDk) {
      store<kHeadDim>(dk, f.scores.scale, shared.k, p.dk, p.dk_strides, p.dk_dtype, work,
                      f.head_dim);
    }
    if constexpr (kMakesDv) {
      store<kHeadDimV>(dv, 1.0f, shared.v, p.dv, p.dv_strides, p.dv_dtype, work, f.head_dim_v);
    }
  }

  // 7. Kernel. `results`: 2 where the CTAs of a tile make one result each.
  static __device__ __forceinline__ void run(const BackwardParams& p, const RowState* rows,
                                             int32_t tiles, int32_t results, const char* smem) {
    Work work = find_work(p.forward, blockIdx.x / results, tiles);
    if (work.key0 >= work.keys.stored) return;
    Shared shared(smem);
    if constexpr (!kMakesOne) {
      make<true, true>(p, rows, work, shared);
    } else if (results == 2 ? blockIdx.x % 2 == 0 : p.dk != nullptr) {
      make<true, false>(p, rows, work, shared);
    } else {
      make<false, true>(p, rows, work, shared);
    }
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, Pass::kCtasPerSm)
    keys_sm80_kernel(const __grid_constant__ BackwardParams params, const RowState* rows,
                     int32_t tiles, int32_t results) {
  extern __shared__ __align__(1024) char smem[];
  Pass::run(params, rows, tiles, results, smem);
}

}  // namespace cuattn::backward
