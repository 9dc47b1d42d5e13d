// SPDX-License-Identifier: Apache-2.0
// The queries pass of the backward kernels on Hopper (sm_90a): Delta and dQ. A CTA owns 128 query
// rows of one head, a group of consumers 64 of them, and walks the key tiles right to left. It
// leaves lse and Delta of its rows in the workspace for the keys pass. No atomics: the same bits in
// every run. Next: keys.cuh.
//
//   producer | Q dO | K2 V2 | K1 V1 | K0 V0
//   group 0  | Delta | S = Q K^T  dP = dO V^T | P = exp2(S - lse)  dx = P (dP - Delta) | dQ += dx K | ..
//   group 1  |    the same half a step later: the groups take turns to queue S and dP, so that one
//            |    multiplies while the other makes P and dx
#pragma once

#include "cuda/backward/sm90/row_states.cuh"
#include "cuda/backward/sm90/scores.cuh"

namespace cuattn::backward {

// The order of work: (batch, query head) pairs in sections whose K and V fit in L2 together; within
// one, where tiles weigh differently, the last query tiles of all pairs come first, for those see
// most keys. Else pair after pair.
struct QuerySchedule {
  int32_t tiles, pairs, section;  // query tiles of the longest sequence; pairs in all, of a section
  bool clears;                    // what lies behind the last key of a sequence is not zeros

  QuerySchedule(const AttentionParams& f, Tile tile, MaskKind mask)
      : tiles(device::ceil_div(f.seqlen_q, tile.m)),
        pairs(static_cast<int32_t>(grid_blocks(int64_t{f.batch} * f.num_heads_q, "sm90"))),
        section(1),
        clears(f.cu_seqlens_kv != nullptr || f.seqused_kv != nullptr) {
    constexpr int64_t kSectionBytes = 16 << 20;
    int64_t group = f.num_heads_q / f.num_heads_kv;
    int64_t head_bytes = 2 * (int64_t{f.seqlen_kv} + 1) * (f.head_dim + f.head_dim_v);
    if (mask != MaskKind::none)
      section = static_cast<int32_t>(device::ceil_div(kSectionBytes, head_bytes) * group);
    if (section > pairs) section = pairs;
  }
};

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
struct QueriesPass {
  // 1. Types and sizes
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Tile kTile = sm90_queries_tile(kDims, kForm);  // m rows stay, n keys come
  static constexpr int kVStages = sm90_queries_v_stages(kDims, kTile);
  static constexpr int kSmemBytes = sm90_queries_smem_bytes(kDims, kTile, kForm);
  static constexpr bool kDrops = kForm == ScoreForm::dropped;
  static constexpr int kKeptBytes = sm90_kept_bytes(kTile.m, kTile.n, kForm);  // a stage of V
  static constexpr bool kIsBiased = kForm == ScoreForm::biased;
  static constexpr int kBiasBytes = sm90_bias_bytes(kTile.m, kTile.n, kForm);  // a stage of K
  static constexpr int kPanelsQk = (kHeadDim + 63) / 64, kPanelsV = (kHeadDimV + 63) / 64;
  static constexpr int kQBytes = kTile.m * kPanelsQk * 128, kDoutBytes = kTile.m * kPanelsV * 128;
  static constexpr int kKBytes = kTile.n * kPanelsQk * 128, kVBytes = kTile.n * kPanelsV * 128;
  static_assert(kTile.m == 64 * kConsumers && kTile.m == kRowPad);
  static_assert(kTile.n % 16 == 0 && kSmemBytes <= 227 * 1024);
  using Mod = typename ScoresOf<kType, kMask, kForm>::Type;

  // 2. Shared storage, in address order: Q, dO (panel, m, 64); K (stage, panel, n, 64), V; a bias
  // (stage, panel, m, 64), which comes with K; what dropout keeps, which comes with V; barriers.
  struct Shared {
    uint32_t q, dout, k, v, bias, kept_bits, barriers;
    __device__ explicit Shared(const void* base) {
      q = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      dout = q + kQBytes;
      k = dout + kDoutBytes;
      v = k + kTile.stages * kKBytes;
      bias = v + kVStages * kVBytes;
      kept_bits = bias + kTile.stages * kBiasBytes;
      barriers = kept_bits + kVStages * kKeptBytes;
    }
    __device__ uint32_t k_stage(int s) const { return k + s * kKBytes; }
    __device__ uint32_t v_stage(int s) const { return v + s * kVBytes; }
    __device__ uint32_t bias_stage(int s) const { return bias + s * kBiasBytes; }
    __device__ uint32_t kept(int s) const { return kept_bits + s * kKeptBytes; }
    __device__ uint32_t rows_full() const { return barriers; }
    __device__ uint32_t k_full(int s) const { return barriers + 8 * (1 + s); }
    __device__ uint32_t k_empty(int s) const { return k_full(kTile.stages + s); }
    __device__ uint32_t v_full(int s) const { return k_full(2 * kTile.stages + s); }
    __device__ uint32_t v_empty(int s) const { return v_full(kVStages + s); }

    __device__ void init_barriers() const {
      if (threadIdx.x != 0) return;
      device::barrier_init(rows_full(), 1);
      for (int s = 0; s < kTile.stages; ++s) {
        device::barrier_init(k_full(s), 1);
        device::barrier_init(k_empty(s), kConsumers * 4);
      }
      for (int s = 0; s < kVStages; ++s) {
        device::barrier_init(v_full(s), kDrops ? 1 + kDrawers : 1);
        device::barrier_init(v_empty(s), kConsumers * 4);
      }
      device::barrier_init_fence();
    }
  };
  static_assert(8 * (1 + 2 * kTile.stages + 2 * kVStages) <= kSm90BackwardSmallBytes);

  // 3. What a CTA works on
  struct Work {
    int32_t batch, head, kv_head, row0;
    bool clears;
    Span queries, keys;
    device::TileRange range;  // of keys

    __device__ __forceinline__ Work(const AttentionParams& f, const QuerySchedule& s,
                                    int32_t item) {
      int32_t per_section = s.section * s.tiles, within = item % per_section;
      int32_t first = item / per_section * s.section, width = min(s.section, s.pairs - first);
      int32_t pair = first + within % width, tile = within / width;
      if constexpr (kMask != MaskKind::none) tile = s.tiles - 1 - tile;
      batch = pair / f.num_heads_q;
      head = pair % f.num_heads_q;
      kv_head = head / (f.num_heads_q / f.num_heads_kv);
      row0 = tile * kTile.m;
      clears = s.clears;
      queries = query_span(f, batch);
      keys = key_span(f, batch);
      const int32_t end = min(row0 + kTile.m, queries.used);
      if constexpr (kMask == MaskKind::rows) {
        range = Mod(f, batch, head, queries.used, keys.used).template range<kTile.n>(row0, end);
      } else {
        range = device::tile_range<kTile.n>(left(f), right(f), row0, end, queries.used, keys.used);
      }
    }
  };

  static __device__ __forceinline__ int32_t left(const AttentionParams& f) {
    return kMask == MaskKind::window ? f.mask.left : static_cast<int32_t>(kUnlimited);
  }
  static __device__ __forceinline__ int32_t right(const AttentionParams& f) {
    return kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : f.mask.right;
  }

  // 4. The producer: one thread.
  static __device__ __forceinline__ void produce(const AttentionParams& f, const Maps& maps,
                                                 const Work& work, const Shared& shared) {
    using namespace device;
    if (work.range.begin >= work.range.end) return;
    const BoxPlace rows(f.cu_seqlens_q != nullptr, work.queries, work.batch, work.row0);
    barrier_arrive_expect(shared.rows_full(), kQBytes + kDoutBytes);
    load_tile<kTile.m, kPanelsQk>(shared.q, maps.q, shared.rows_full(), rows, work.head,
                                  kEvictFirst);
    load_tile<kTile.m, kPanelsV>(shared.dout, maps.dout, shared.rows_full(), rows, work.head,
                                 kEvictFirst);
    Ring<kTile.stages> k_ring(1);
    Ring<kVStages> v_ring(1);
#pragma unroll 1
    for (int32_t tile = work.range.end - 1; tile >= work.range.begin; --tile) {
      const BoxPlace keys(f.cu_seqlens_kv != nullptr, work.keys, work.batch, tile * kTile.n);
      barrier_wait(shared.k_empty(k_ring.stage()), k_ring.parity());
      barrier_arrive_expect(shared.k_full(k_ring.stage()), kKBytes + kBiasBytes);
      load_tile<kTile.n, kPanelsQk>(shared.k_stage(k_ring.stage()), maps.k,
                                    shared.k_full(k_ring.stage()), keys, work.kv_head, kEvictLast);
      if constexpr (kIsBiased)
        load_bias<kTile.m, kTile.n>(shared.bias_stage(k_ring.stage()), maps,
                                    shared.k_full(k_ring.stage()), f.scores, tile * kTile.n,
                                    work.row0, work.head, work.batch);
      barrier_wait(shared.v_empty(v_ring.stage()), v_ring.parity());
      barrier_arrive_expect(shared.v_full(v_ring.stage()), kVBytes);
      load_tile<kTile.n, kPanelsV>(shared.v_stage(v_ring.stage()), maps.v,
                                   shared.v_full(v_ring.stage()), keys, work.kv_head, kEvictLast);
      k_ring.next();
      v_ring.next();
    }
  }

  // Warps that draw what is kept.
  static __device__ __forceinline__ void draw(const AttentionParams& f, const Work& work,
                                              const Shared& shared, int drawer) {
    constexpr int kPairs = kTile.m / 32, kWords = device::kept_words(kTile.n);
    const device::TileDropout dropout(f, work.batch, work.head);
    device::Ring<kVStages> ring(1);
    int pair = drawer;
#pragma unroll 1
    for (int32_t tile = work.range.end - 1; tile >= work.range.begin; --tile) {
      device::barrier_wait(shared.v_empty(ring.stage()), ring.parity());
#pragma unroll 1
      for (; pair < kPairs; pair += kDrawers) {
        auto draw_word = [&](auto word) {
          constexpr int kCalls = (kTile.n - 64 * word.value) / 16;
          dropout.template draw_rows<(kCalls < 4 ? kCalls : 4)>(
              shared.kept(ring.stage()) + word.value * kTile.m * 8 + pair * 256,
              work.row0 + pair * 32, tile * kTile.n + word.value * 64);
        };
        draw_word(std::integral_constant<int, 0>{});
        if constexpr (kWords == 2) draw_word(std::integral_constant<int, 1>{});
      }
      pair -= kPairs;
      hand_over(shared.v_full(ring.stage()));
      ring.next();
    }
    static_assert(kWords <= 2);
  }

  // 5. The state of the two rows of a lane: `row` and row + 8.
  struct LaneRows {
    int32_t row;
    float lse[2], delta[2];
  };

  // All 128 rows are left in the workspace, used or not.
  static __device__ __forceinline__ LaneRows find_rows(const BackwardParams& p,
                                                       const RowStates& states, const Work& work,
                                                       int group) {
    const RowsOfHead of_head{work.batch, work.head, work.queries};
    LaneRows rows;
    rows.row = work.row0 + group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 state = make_row_state<kType>(p, states, of_head, rows.row + 8 * half);
      rows.lse[half] = state.x;
      rows.delta[half] = state.y;
    }
    return rows;
  }

  // 6. A tile: S and dP become dx. What a row does not see is 0, whatever the operands hold. The
  // exponent is clamped for a score and an lse so large that they are rounded apart. make_probs
  // leaves P in `scores`, with score options times the derivative of the score.
  template <bool kMasked, bool kCapped = false>
  static __device__ __forceinline__ void make_probs_of(float (&scores)[kTile.n / 2],
                                                       const AttentionParams& f, const Work& work,
                                                       const Mod& mod, const LaneRows& rows,
                                                       int32_t key0) {
    using namespace device;
    const int32_t first = key0 + 2 * static_cast<int32_t>(threadIdx.x % 4);
    const float to_log2 = exponent_of(mod);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = rows.row + 8 * half;
      const float lse = rows.lse[half];
      int32_t begin = 0, end = 0;
      if constexpr (kMasked) {
        KeyRange keys;
        if constexpr (kMask == MaskKind::rows)
          keys = mod.visible(row);
        else
          keys = visible_keys(left(f), right(f), row, work.queries.used, work.keys.used);
        begin = keys.begin - first;
        end = keys.end - first;
      }
#pragma unroll
      for (int block = 0; block < kTile.n / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = scores[4 * block + 2 * half + i];
          const int column = 8 * block + i;
          float score = s;
          if constexpr (kForm == ScoreForm::general) {  // clamped: no load leaves the bias
            score = mod(score, min(row, work.queries.used - 1),
                        min(first + column, work.keys.used - 1));
          }
          float exponent = at_most(fmaf(score, to_log2, -lse), 0.0f);
          if constexpr (kMasked) {
            bool seen = column < end;
            if constexpr (kMask != MaskKind::none) seen = seen && column >= begin;
            exponent = seen ? exponent : negative_infinity();
          }
          const float prob = exp2_approx(exponent);
          if constexpr (kCapped)
            s = prob * mod.derivative(s);
          else if constexpr (kForm == ScoreForm::general)
            s = prob != 0.0f ? prob * mod.derivative(s) : 0.0f;
          else
            s = prob;
        }
      }
    }
  }
  static __device__ __forceinline__ void make_probs(float (&scores)[kTile.n / 2],
                                                    const AttentionParams& f, const Work& work,
                                                    const Mod& mod, const LaneRows& rows,
                                                    uint32_t bias, int32_t key0, bool masked) {
    if constexpr (kForm == ScoreForm::smooth || kIsBiased) {
      const int32_t first = key0 + 2 * static_cast<int32_t>(threadIdx.x % 4);
      if constexpr (kIsBiased)
        mod.template add<kTile.m>(scores, bias);
      else
        mod.template modify<false>(scores, rows.row + work.keys.used - work.queries.used - first);
      if (masked) {
        KeyRange keys[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          keys[half] = visible_keys(left(f), right(f), rows.row + 8 * half, work.queries.used,
                                    work.keys.used);
        hide_outside<kMask>(scores, keys, first, mod.hidden());
      }
      if constexpr (!kIsBiased)
        if (mod.caps()) return make_probs_of<false, true>(scores, f, work, mod, rows, key0);
      return make_probs_of<false>(scores, f, work, mod, rows, key0);
    }
    if (masked) {
      make_probs_of<true>(scores, f, work, mod, rows, key0);
    } else {
      make_probs_of<false>(scores, f, work, mod, rows, key0);
    }
  }

  // dP becomes dx; where P is masked to 0, so is dx.
  template <bool kMasked>
  static __device__ __forceinline__ void make_grads(float (&dout_v)[kTile.n / 2],
                                                    const float (&weights)[kTile.n / 2],
                                                    const LaneRows& rows) {
#pragma unroll
    for (int i = 0; i < kTile.n / 2; ++i) {
      const float product = weights[i] * (dout_v[i] - rows.delta[i / 2 % 2]);
      dout_v[i] = kMasked && weights[i] == 0.0f ? 0.0f : product;
    }
  }

  // 7. All sums of a group of consumers; a branch around a product would serialise all of them.
  static constexpr uint32_t kTurnBarrier = 1;  // and the next one: named barriers of the groups
  static_assert(kTurnBarrier + kConsumers <= kClearBarrier);

  static __device__ __forceinline__ void gather(const BackwardParams& p, const Work& work,
                                                const Shared& shared, const LaneRows& rows,
                                                int group, float (&dq)[kHeadDim / 2],
                                                float (&slope_terms)[2]) {
    using namespace device;
    const AttentionParams& f = p.forward;
    const uint32_t q = shared.q + group * 64 * 128, dout = shared.dout + group * 64 * 128;
    const Mod mod(f, work.batch, work.head, work.queries.used, work.keys.used);
    Ring<kTile.stages> k_ring(0);
    Ring<kVStages> v_ring(0);
    float scores[kTile.n / 2], dout_v[kTile.n / 2];
    uint32_t grads[kTile.n / 4];
    auto release = [](uint32_t barrier) {
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    if (group == 1) named_barrier_arrive(kTurnBarrier, 256);  // group 0 begins
    barrier_wait(shared.rows_full(), 0);
#pragma unroll 1
    for (int32_t tile = work.range.end - 1; tile >= work.range.begin; --tile) {
      const uint32_t k = shared.k_stage(k_ring.stage()), v = shared.v_stage(v_ring.stage());
      const int32_t key0 = tile * kTile.n;
      barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity());
      if (work.clears && key0 + kTile.n > work.keys.used) {
        clear_tile<kTile.n, kPanelsQk>(k, work.keys.used - key0);
        finish_clearing(group);
      }
      named_barrier_sync(kTurnBarrier + group, 256);
      pin(dq);
      claim(scores);
      claim(dout_v);
      wgmma_fence();
      multiply_rows<kType, kHeadDim, kTile.m, kTile.n>(scores, q, k);
      wgmma_commit();
      barrier_wait(shared.v_full(v_ring.stage()), v_ring.parity());
      wgmma_fence();
      multiply_rows<kType, kHeadDimV, kTile.m, kTile.n>(dout_v, dout, v);
      wgmma_commit();
      named_barrier_arrive(kTurnBarrier + (group ^ 1), 256);
      wgmma_wait<1>();
      pin(scores);
      const bool masked = tile < work.range.full_begin || tile >= work.range.full_end;
      make_probs(scores, f, work, mod, rows, shared.bias_stage(k_ring.stage()), key0, masked);
      wgmma_wait<0>();
      pin(dout_v);
      if constexpr (kDrops) {
        Kept<false, kTile.n>(shared.kept(v_ring.stage()), threadIdx.x - 128, kTile.m * 2)
            .drop_all(dout_v);
        __syncwarp();  // every lane has read its bits
      }
      release(shared.v_empty(v_ring.stage()));
      if (kIsBiased || masked) {  // a bias may be -inf
        make_grads<true>(dout_v, scores, rows);
      } else {
        make_grads<false>(dout_v, scores, rows);
      }
      if constexpr (kForm == ScoreForm::smooth) {
        if (p.needs(kNeedDslopes)) {
          const int32_t first = key0 + 2 * static_cast<int32_t>(threadIdx.x % 4);
          Mod::add_slope_terms(slope_terms, dout_v,
                               rows.row + work.keys.used - work.queries.used - first);
        }
      }
      pack<kType>(grads, dout_v);
      pin(dq);
      pin(grads);
      wgmma_fence();
      add_weighted<kType, kHeadDim, kTile.n>(dq, grads, k);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
      pin(grads);
      release(shared.k_empty(k_ring.stage()));
      k_ring.next();
      v_ring.next();
    }
  }

  static __device__ __forceinline__ void consume(const BackwardParams& p, const RowStates& states,
                                                 const Work& work, const Shared& shared,
                                                 float* terms, int group) {
    const AttentionParams& f = p.forward;
    const LaneRows rows = find_rows(p, states, work, group);
    if (!walks(p)) return;
    float dq[kHeadDim / 2];
#pragma unroll
    for (float& x : dq) x = 0.0f;
    float slope_terms[2] = {};
    if (work.range.begin < work.range.end) gather(p, work, shared, rows, group, dq, slope_terms);
    if constexpr (kForm == ScoreForm::smooth) {
      if (p.needs(kNeedDslopes)) store_slope_terms(slope_terms, f, work, rows.row, terms);
      if (p.dq == nullptr) return;
    }
    store(dq, f.scores.scale * (kDrops ? f.dropout.factor() : 1.0f), p, work, rows.row);
  }

  // Whether there is more to do than to leave the states.
  static __device__ __forceinline__ bool walks(const BackwardParams& p) {
    return kForm == ScoreForm::smooth ? p.needs(kNeedDq | kNeedDslopes) : p.dq != nullptr;
  }

  // `to`: [num_heads_q, total_q]
  static __device__ __forceinline__ void store_slope_terms(const float (&terms)[2],
                                                           const AttentionParams& f,
                                                           const Work& work, int32_t first,
                                                           float* to) {
    const int64_t row0 =
        f.cu_seqlens_q != nullptr ? work.queries.start : int64_t{work.batch} * f.seqlen_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = device::quad_sum(terms[half]);
      const int32_t row = first + 8 * half;
      if (threadIdx.x % 4 == 0 && row < work.queries.stored)
        to[work.head * f.total_q + row0 + row] = row < work.queries.used ? sum : 0.0f;
    }
  }

  // 8. Epilogue: dQ of the rows of a group. Rows in [used, stored) become zeros.
  static __device__ __forceinline__ void store(const float (&dq)[kHeadDim / 2], float scale,
                                               const BackwardParams& p, const Work& work,
                                               int32_t first) {
    const Strides& s = p.dq_strides;
    const int64_t base = work.batch * s.batch + work.head * s.head + work.queries.start * s.seq;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first + 8 * half;
      store_row<kType, kHeadDim>(
          dq, half, scale, static_cast<char*>(p.dq) + 2 * (base + row * s.seq), 0,
          p.forward.head_dim, row < work.queries.used, row < work.queries.stored);
    }
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, 1)
    queries_sm90_kernel(const __grid_constant__ BackwardParams params,
                        const __grid_constant__ RowStates states,
                        const __grid_constant__ QuerySchedule schedule,
                        const __grid_constant__ Maps maps, float* slope_terms) {
  extern __shared__ __align__(1024) char smem[];
  using Shared = typename Pass::Shared;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Shared shared(smem);  // here: behind the branch its values would leave uniform registers
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  const typename Pass::Work work(params.forward, schedule, static_cast<int32_t>(blockIdx.x));
  if (work.row0 >= work.queries.stored) return;
  shared.init_barriers();
  __syncthreads();
  if (group == 0) {
    device::registers_shrink<Registers<Pass::kDrops>::kOfProducer>();
    if (!Pass::walks(params)) return;
    if (threadIdx.x < 32) {
      if (device::elect_one()) Pass::produce(params.forward, maps, work, shared);
    } else if constexpr (Pass::kDrops) {
      if (int drawer = drawer_number(); drawer >= 0)
        Pass::draw(params.forward, work, shared, drawer);
    }
  } else {
    device::registers_grow<Registers<Pass::kDrops>::kOfConsumer>();
    Pass::consume(params, states, work, shared, slope_terms, group - 1);
  }
}

}  // namespace cuattn::backward

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
void launch_queries_sm90(const BackwardLaunch& launch, const backward::RowStates& states,
                         float* slope_terms, cudaStream_t stream) {
  using Pass = backward::QueriesPass<kType, kHeadDim, kHeadDimV, kMask, kForm>;
  const BackwardParams& p = launch.params;
  const backward::QuerySchedule schedule(p.forward, Pass::kTile, kMask);
  unsigned blocks = grid_blocks(int64_t{schedule.pairs} * schedule.tiles, "sm90");
  if (blocks == 0) return;
  auto* kernel = backward::queries_sm90_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  launch_overlapping(kernel, blocks, backward::kThreads, Pass::kSmemBytes, 9, stream, p, states,
                     schedule, backward::make_maps(p, Pass::kTile.m, Pass::kTile.n, kForm),
                     slope_terms);
}

}  // namespace cuattn
