// SPDX-License-Identifier: Apache-2.0
// The three passes of the float32 backward kernels, which are those of sm80 on CUDA cores: dQ and
// the terms of dslopes by CTAs that own query rows, dK and dV by CTAs that own keys, dbias by CTAs
// that own a tile of it. Every mask and option is decided at run time: a score costs little beside
// its products. What a user wrote comes by the policy. Before: tiles.cuh. Next: backward.cuh, and of
// functors device/functor_gradient.cuh.
#pragma once

#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/simt/tiles.cuh"

namespace cuattn::backward {

// Where a tile of scores lies.
struct Place {
  int32_t batch, head, row0, key0;
  Span queries, keys;

  __device__ int32_t kv_head(const AttentionParams& f) const {
    return head / (f.num_heads_q / f.num_heads_kv);
  }
  __device__ FloatRows q(const AttentionParams& f) const {
    return float_rows(f.q, f.q_strides, batch, head, queries, row0, f.head_dim);
  }
  __device__ FloatRows dout(const BackwardParams& p) const {
    return float_rows(p.dout, p.dout_strides, batch, head, queries, row0, p.forward.head_dim_v);
  }
  __device__ FloatRows k(const AttentionParams& f) const {
    return float_rows(f.k, f.k_strides, batch, kv_head(f), keys, key0, f.head_dim);
  }
  __device__ FloatRows v(const AttentionParams& f) const {
    return float_rows(f.v, f.v_strides, batch, kv_head(f), keys, key0, f.head_dim_v);
  }
};

// What the library's own kernels take; row ranges they find in the parameters.
using SimtOptions = device::OptionPolicy<DType::f32, MaskKind::window, ScoreKind::scored>;

// A tile of scores: the CTA owns its query rows, or its keys.
template <int kHeadDim, class Policy, bool kOwnsKeys>
struct SimtScores : SimtTiles<kHeadDim, kOwnsKeys> {
  using Base = SimtTiles<kHeadDim, kOwnsKeys>;
  using Base::kTile, Base::kRows, Base::kColumns;
  using typename Base::Scores;
  using typename Base::Shared;

  static __device__ int32_t query_of(const Place& at, int i, int j) {
    return at.row0 + (kOwnsKeys ? Base::column_of(j) : Base::row_of(i));
  }
  static __device__ int32_t key_of(const Place& at, int i, int j) {
    return at.key0 + (kOwnsKeys ? Base::row_of(i) : Base::column_of(j));
  }

  // Dropout: which elements of this lane are kept, bit i * kColumns + j. A warp draws for its own
  // rows, and passes the bytes round in its own rows of shared memory.
  static __device__ uint32_t find_kept(const device::HeadDropout& dropout, const Place& at,
                                       Shared& shared) {
    constexpr int kDrawsOfRow = kOwnsKeys ? 1 : kTile.n / 16;
    constexpr int kDraws = kOwnsKeys ? kTile.n : 2 * kRows * kDrawsOfRow;
    static_assert(kRows * kColumns <= 32, "a bit each");
    int32_t first = threadIdx.x / 32 * (2 * kRows);  // of the warp
    auto* draws = reinterpret_cast<PhiloxWords*>(shared.prob[first]);
    int32_t row0 = kOwnsKeys ? at.row0 : at.row0 + first;
    int32_t key0 = kOwnsKeys ? at.key0 + first : at.key0;
    for (int n = threadIdx.x % 32; n < kDraws; n += 32)
      draws[n] = dropout.draw(row0 + n / kDrawsOfRow, key0 / 16 + n % kDrawsOfRow);
    __syncwarp();
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        int draw = kOwnsKeys ? Base::column_of(j) : (Base::row_of(i) - first) * kDrawsOfRow + j;
        uint8_t byte = reinterpret_cast<const uint8_t*>(draws + draw)[key_of(at, i, j) % 16];
        kept |= uint32_t{byte < dropout.params.threshold()} << (i * kColumns + j);
      }
    }
    return kept;
  }

  // What the row or key that the CTA owns sees of the other side.
  static __device__ KeyRange visible(const AttentionParams& f, const Place& at, int i) {
    if constexpr (kOwnsKeys) {
      return visible_queries(f.mask.left, f.mask.right, key_of(at, i, 0), at.queries.used,
                             at.keys.used);
    }
    int32_t row = query_of(at, i, 0);
    if (row >= at.queries.used) return {0, 0};
    return f.mask.visible(row, at.queries.used, at.keys.used);
  }

  static __device__ Policy policy_of(const BackwardParams& p, const Place& at) {
    return Policy(policy_params<Policy>(p), at.batch, at.head, at.queries.used, at.keys.used);
  }

  // Of a functor: whether the row ranges and lists of blocks leave something of a tile; `asks` learns
  // whether its mask is to be asked there. Every warp finds the same.
  static __device__ bool is_left(const BackwardParams& p, const Place& at, bool& asks) {
    constexpr int kQueries = kOwnsKeys ? kTile.n : kTile.m, kKeys = kOwnsKeys ? kTile.m : kTile.n;
    const Policy policy = policy_of(p, at);
    const int32_t row_end = min(at.row0 + kQueries, at.queries.used);
    if constexpr (Policy::kMaskKind == MaskKind::rows) {
      bool sees = false;
      for (int32_t row = at.row0 + threadIdx.x % 32; row < row_end; row += 32) {
        KeyRange seen = policy.visible(row);
        sees |= max(seen.begin, at.key0) < min(seen.end, at.key0 + kKeys);
      }
      if (!__any_sync(0xffffffffu, sees)) return false;
    }
    return policy.lists(at.row0, row_end, at.key0, asks);
  }

  // The dot products become ds (P Z where the CTA owns keys) and dx.
  template <bool kGives = false>
  static __device__ void weigh_tile(Scores& dots, Scores& dout_v, const BackwardParams& p,
                                    const RowState* rows, const Place& at,
                                    [[maybe_unused]] bool asks, Shared& shared) {
    const AttentionParams& f = p.forward;
    const Policy policy = policy_of(p, at);
    const bool drops = f.dropout.is_on();
    uint32_t kept = 0xffffffffu;
    if (drops) kept = find_kept(device::HeadDropout(f, at.batch, at.head), at, shared);
    const float factor = drops ? f.dropout.factor() : 1.0f;
    const RowState* states = rows + row_index(f, at.batch, at.head, at.queries.start);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      KeyRange seen = visible(f, at, i);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        int32_t row = query_of(at, i, j), key = key_of(at, i, j), other = kOwnsKeys ? row : key;
        bool is_seen = other >= seen.begin && other < seen.end;
        if (f.rows.begin != nullptr && is_seen) {
          KeyRange of_row =
              f.rows.limit({0, at.keys.used}, at.batch, at.head, at.queries.start + row);
          is_seen = key >= of_row.begin && key < of_row.end;
        }
        float z = kept >> (i * kColumns + j) & 1u ? factor : 0.0f;
        row = min(row, at.queries.used - 1);  // no load leaves the arrays
        key = min(key, at.keys.used - 1);
        if constexpr (Policy::kAsks) is_seen = is_seen && (!asks || policy.sees(row, key));
        float dp = z == 0.0f ? 0.0f : dout_v[i][j] * z;
        Weighed weighed = weigh<Policy::kScoreKind>(dots[i][j], dp, states[row], policy,
                                                    f.scores.scale, row, key, is_seen);
        if constexpr (kGives) policy.give(weighed.ds, dots[i][j], row, key);
        dots[i][j] = kOwnsKeys ? weighed.prob * z : weighed.ds;
        dout_v[i][j] = weighed.dx;
      }
    }
  }
};

// Who owns rows or keys [first, first + kTile.m) of a head of a sequence.
struct SimtWork {
  int32_t batch, head, first;

  __device__ SimtWork(int32_t tiles, int32_t heads, int32_t tile_rows, bool last_first) {
    int32_t tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
    batch = pair / heads;
    head = pair % heads;
    first = (last_first ? tiles - 1 - tile : tile) * tile_rows;
  }
};

template <int kHeadDim, class Policy>
struct SimtQueriesPass : SimtScores<kHeadDim, Policy, false> {
  using Base = SimtScores<kHeadDim, Policy, false>;
  using Base::kTile, Base::kRows, Base::kColumns;
  using typename Base::Feed;
  using typename Base::Operands;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::Sum;

  static __device__ void add_slope_terms(float (&terms)[kRows], const Scores& ds, const Place& at) {
    int32_t diagonal = at.keys.used - at.queries.used;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        int32_t distance = Base::query_of(at, i, j) + diagonal - Base::key_of(at, i, j);
        terms[i] = fmaf(-ds[i][j], fabsf(static_cast<float>(distance)), terms[i]);
      }
    }
  }

  static __device__ void store_slope_terms(const AttentionParams& f, const Place& at, float* to,
                                           const float (&terms)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = terms[i];
#pragma unroll
      for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      int32_t row = Base::query_of(at, i, 0);
      if (Base::lane_x() == 0 && row < at.queries.stored)
        to[row_index(f, at.batch, at.head, at.queries.start + row)] = sum;
    }
  }

  static __device__ void run(const BackwardParams& p, const Memory& memory, int32_t tiles,
                             Shared& shared) {
    const AttentionParams& f = p.forward;
    SimtWork work(tiles, f.num_heads_q, kTile.m, Policy::kIsFunctor || f.mask.right >= 0);
    Place at{
        work.batch, work.head, work.first, 0, query_span(f, work.batch), key_span(f, work.batch)};
    if (at.row0 >= at.queries.stored) return;
    Sum dq;
    Base::clear(dq);
    float slope_terms[kRows] = {};
    device::TileRange range = device::tile_range<kTile.n>(f.mask.left, f.mask.right, at.row0,
                                                          min(at.row0 + kTile.m, at.queries.used),
                                                          at.queries.used, at.keys.used);
#pragma unroll 1
    for (int32_t tile = range.begin; tile < range.end; ++tile) {
      at.key0 = tile * kTile.n;
      bool asks = false;
      if constexpr (Policy::kIsFunctor) {
        if (!Base::is_left(p, at, asks)) continue;
      }
      Operands operands{at.q(f), at.dout(p), at.k(f), at.v(f), false, p.dq != nullptr};
      Feed feed(operands, shared);
      Scores dots, dout_v;
      Base::multiply(dots, dout_v, feed);
      Base::template weigh_tile<Policy::kGives>(dots, dout_v, p, memory.rows, at, asks, shared);
      if (p.needs(kNeedDslopes)) add_slope_terms(slope_terms, dots, at);
      if (p.dq == nullptr) continue;
      Base::write_weights(shared.dx, dout_v);
      Base::add_weighted(dq, shared.dx, feed);
    }
    if (p.dq != nullptr) {
      Base::store(dq, f.scores.scale, p.dq, p.dq_strides, at.batch, at.head, at.queries, at.row0,
                  f.head_dim);
    }
    if (p.needs(kNeedDslopes)) store_slope_terms(f, at, memory.slope_terms, slope_terms);
  }
};

// Both of dK and dV where the registers hold them, else one of them.
template <int kHeadDim, class Policy, bool kMakesDk, bool kMakesDv>
struct SimtKeysPass : SimtScores<kHeadDim, Policy, true> {
  using Base = SimtScores<kHeadDim, Policy, true>;
  using Base::kTile;
  using typename Base::Feed;
  using typename Base::Operands;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::Sum;

  static __device__ void run(const BackwardParams& p, const Memory& memory, int32_t tiles,
                             Shared& shared) {
    const AttentionParams& f = p.forward;
    const bool makes_dk = kMakesDk && p.dk != nullptr, makes_dv = kMakesDv && p.dv != nullptr;
    SimtWork work(tiles, f.num_heads_kv, kTile.m, false);
    int32_t group = f.num_heads_q / f.num_heads_kv, first_head = work.head * group;
    Place at{
        work.batch, first_head, 0, work.first, query_span(f, work.batch), key_span(f, work.batch)};
    if (at.key0 >= at.keys.stored) return;
    Sum dk, dv;
    Base::clear(dk);
    Base::clear(dv);
    device::TileRange range = device::query_tile_range<kTile.n>(
        f.mask.left, f.mask.right, at.key0, min(at.key0 + kTile.m, at.keys.used), at.queries.used,
        at.keys.used);
#pragma unroll 1
    for (; at.head < first_head + group; ++at.head) {
#pragma unroll 1
      for (int32_t tile = range.begin; tile < range.end; ++tile) {
        at.row0 = tile * kTile.n;
        bool asks = false;
        if constexpr (Policy::kIsFunctor) {
          if (!Base::is_left(p, at, asks)) continue;
        }
        Operands operands{at.k(f), at.v(f), at.q(f), at.dout(p), makes_dv, makes_dk};
        if (!makes_dk) operands.b.dim = 0;  // dV needs no dP
        Feed feed(operands, shared);
        Scores dots, dout_v;
        Base::multiply(dots, dout_v, feed);
        Base::weigh_tile(dots, dout_v, p, memory.rows, at, asks, shared);
        __syncwarp();  // the drawn bytes are read
        Base::write_weights(shared.prob, dots);
        Base::write_weights(shared.dx, dout_v);
        if (makes_dv) Base::add_weighted(dv, shared.prob, feed);
        if (makes_dk) Base::add_weighted(dk, shared.dx, feed);
      }
    }
    if (makes_dk) {
      Base::store(dk, f.scores.scale, p.dk, p.dk_strides, at.batch, work.head, at.keys, at.key0,
                  f.head_dim);
    }
    if (makes_dv) {
      Base::store(dv, 1.0f, p.dv, p.dv_strides, at.batch, work.head, at.keys, at.key0,
                  f.head_dim_v);
    }
  }
};

template <int kHeadDim, class Policy>
struct SimtBiasPass : SimtScores<kHeadDim, Policy, false> {
  using Base = SimtScores<kHeadDim, Policy, false>;
  using Base::kTile, Base::kRows, Base::kColumns;
  using typename Base::Feed;
  using typename Base::Operands;
  using typename Base::Scores;
  using typename Base::Shared;

  static __device__ void run(const BackwardParams& p, const Memory& memory, int32_t parts,
                             Shared& shared) {
    const AttentionParams& f = p.forward;
    BiasWork bias(p, kTile, parts);
    Scores sums;
    Base::clear(sums);
    for (; bias.left > 0; bias.advance()) {
      Place at{bias.at(0),
               bias.at(1),
               bias.at(2) * kTile.m,
               bias.at(3) * kTile.n,
               query_span(f, bias.at(0)),
               key_span(f, bias.at(0))};
      device::TileRange range = device::tile_range<kTile.n>(f.mask.left, f.mask.right, at.row0,
                                                            min(at.row0 + kTile.m, at.queries.used),
                                                            at.queries.used, at.keys.used);
      if (bias.at(3) < range.begin || bias.at(3) >= range.end) continue;
      bool asks = false;
      if constexpr (Policy::kIsFunctor) {
        if (!Base::is_left(p, at, asks)) continue;
      }
      Operands operands{at.q(f), at.dout(p), at.k(f), at.v(f), false, false};
      Feed feed(operands, shared);
      Scores dots, dout_v;
      Base::multiply(dots, dout_v, feed);
      Base::weigh_tile(dots, dout_v, p, memory.rows, at, asks, shared);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[i][j] += dots[i][j];
      }
    }
    float* tile = shared.prob[0];
    __syncthreads();  // nobody draws there any more
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        tile[Base::row_of(i) * kTile.n + Base::column_of(j)] = sums[i][j];
    }
    store_bias_tile<Base::kThreads, kTile.m, kTile.n>(p, bias, tile,
                                                      parts > 1 ? memory.bias_parts : nullptr);
  }
};

// `count`: tiles of the longest sequence, or parts of a sum of dbias.
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads, Pass::kCtasPerSm)
    backward_simt_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ Memory memory, int32_t count) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Pass::run(params, memory, count, *reinterpret_cast<typename Pass::Shared*>(dynamic_shared));
}

}  // namespace cuattn::backward
