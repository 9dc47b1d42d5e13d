// SPDX-License-Identifier: Apache-2.0
// What the keys passes of sm90 have in common, whether or not a pair of groups shares its keys: who
// works on which keys, shared memory, the producer, P^T and dx^T of a tile, and how dK and dV leave.
// Next: keys.cuh, keys_paired.cuh.
#pragma once

#include "cuda/backward/sm90/scores.cuh"

namespace cuattn::backward {

// The order of work: (batch, KV head) pairs in sections whose Q and dO fit in L2 together; within
// one, where tiles weigh differently, the first key tiles of all pairs come first, for those are
// seen by most rows. Else pair after pair.
struct KeySchedule {
  int32_t tiles, pairs, section;  // key tiles of the longest sequence; pairs in all, of a section
  bool clears;                    // what lies behind the last row of a sequence is not zeros

  // ordered: those that wait for each other are few of many pairs, whose sums of dq fit in L2, too.
  KeySchedule(const AttentionParams& f, Tile tile, MaskKind mask, bool ordered = false)
      : tiles(device::ceil_div(f.seqlen_kv, tile.n)),
        pairs(static_cast<int32_t>(grid_blocks(int64_t{f.batch} * f.num_heads_kv, "sm90"))),
        section(1),
        clears(f.cu_seqlens_q != nullptr || f.seqused_q != nullptr) {
    if (pairs == 0) return;  // without heads nothing is launched
    const int64_t bytes = int64_t{16 << 20} << (ordered && f.seqlen_q > 1024);  // measured
    int64_t pair_bytes = (ordered ? 4 : 2) * (int64_t{f.seqlen_q} + 1) *
                         (f.head_dim + f.head_dim_v) * f.num_heads_q / f.num_heads_kv;
    if (mask != MaskKind::none) section = static_cast<int32_t>(device::ceil_div(bytes, pair_bytes));
    if (section > pairs) section = pairs;
  }
};

// kFused: of the fused pass (fused.cuh), whose tiles are others.
template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm,
          bool kFused = false>
struct KeyTiles {
  // 1. Types and sizes
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Tile kTile =  // n keys stay, m queries come
      kFused ? sm90_fused_tile(kDims, kForm) : sm90_keys_tile(kDims, kForm);
  static constexpr int kSmemBytes = kFused ? sm90_fused_smem_bytes(kDims, kTile, kForm)
                                           : sm90_keys_smem_bytes(kDims, kTile, kForm);
  // Which way the work goes where it has an order; else first keys and first rows first, and a head
  // after the other.
  static constexpr bool kOrders = sm90_is_ordered(kForm);
  static constexpr bool kMixesHeads = kForm == ScoreForm::ordered_heads;
  static constexpr bool kLastKeysFirst = kOrders && kTile.m == 128;
  static constexpr bool kLastRowsFirst = kOrders && !kLastKeysFirst;
  static constexpr int kPartBytes = sm90_part_bytes(kDims, kTile, kForm);  // a part of dQ
  static constexpr bool kDrops = kForm == ScoreForm::dropped;
  static constexpr int kKeptBytes = sm90_kept_bytes(kTile.n, kTile.m, kForm);  // a stage of dO
  static constexpr bool kIsBiased = kForm == ScoreForm::biased;
  static constexpr int kBiasBytes = sm90_bias_bytes(kTile.m, kTile.n, kForm);  // a stage of Q
  // P^T is packed when dx^T is made: registers are few.
  static constexpr bool kPacksLate = (kDrops || kOrders) && kFused && kTile.m == 128;
  static constexpr bool kCrosses = kFused || sm90_keys_are_paired(kDims);
  static constexpr int kPanelsQk = (kHeadDim + 63) / 64, kPanelsV = (kHeadDimV + 63) / 64;
  static constexpr int kKBytes = kTile.n * kPanelsQk * 128, kVBytes = kTile.n * kPanelsV * 128;
  static constexpr int kQBytes = kTile.m * kPanelsQk * 128, kDoutBytes = kTile.m * kPanelsV * 128;
  static constexpr int kPlaneBytes = kTile.m * 4;  // of lse, or Delta
  static_assert(kSmemBytes <= 227 * 1024, "sm_90 gives a CTA at most 227 KiB");
  static_assert(kTile.m % 16 == 0 && kTile.m <= kRowPad);
  using Mod = typename ScoresOf<kType, kMask, kForm>::Type;

  // 2. Shared storage, in address order: K, V (panel, n, 64); Q, dO (stage, panel, m, 64); a bias
  // (stage, panel, m, 64), which comes with Q; what crosses between the groups, and parts of dQ that
  // wait for their turn; lse, Delta (stage, m); what dropout keeps, which comes with dO; barriers. K
  // comes with the first Q, V with the first dO.
  struct Shared {
    uint32_t k, v, q, dout, bias, crossing, planes, kept_bits, barriers;
    __device__ explicit Shared(const void* base) {
      k = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      v = k + kKBytes;
      q = v + kVBytes;
      dout = q + kTile.stages * kQBytes;
      bias = dout + kTile.stages * kDoutBytes;
      crossing = bias + kTile.stages * kBiasBytes;
      planes = crossing + (kCrosses ? kCrossings * kCrossingBytes + 2 * kPartBytes : 0);
      kept_bits = planes + kTile.stages * 2 * kPlaneBytes;
      barriers = kept_bits + kTile.stages * kKeptBytes;
    }
    static constexpr int kCrossings = kOrders ? 1 : 2;
    static constexpr int kCrossingBytes = kTile.m * kTile.n * 2;  // of one of these buffers
    __device__ uint32_t q_stage(int s) const { return q + s * kQBytes; }
    __device__ uint32_t dout_stage(int s) const { return dout + s * kDoutBytes; }
    __device__ uint32_t bias_stage(int s) const { return bias + s * kBiasBytes; }
    __device__ uint32_t lse(int s) const { return planes + 2 * s * kPlaneBytes; }
    __device__ uint32_t delta(int s) const { return lse(s) + kPlaneBytes; }
    __device__ uint32_t kept(int s) const { return kept_bits + s * kKeptBytes; }
    __device__ uint32_t q_full(int s) const { return barriers + 8 * s; }
    __device__ uint32_t q_empty(int s) const { return q_full(kTile.stages + s); }
    __device__ uint32_t dout_full(int s) const { return q_full(2 * kTile.stages + s); }
    __device__ uint32_t dout_empty(int s) const { return q_full(3 * kTile.stages + s); }
    // Ordered: two parts of dQ; both groups have read dx; behind the barriers the CTA's ticket.
    __device__ uint32_t part(int s) const { return crossing + kCrossingBytes + s * kPartBytes; }
    __device__ uint32_t part_full(int s) const { return q_full(4 * kTile.stages + s); }
    __device__ uint32_t part_empty(int s) const { return q_full(4 * kTile.stages + 2 + s); }
    __device__ uint32_t crossing_empty() const { return q_full(4 * kTile.stages + 4); }
    __device__ uint32_t ticket() const { return q_full(4 * kTile.stages + 5); }

    __device__ void init_barriers() const {
      if (threadIdx.x != 0) return;
      for (int s = 0; s < kTile.stages; ++s) {
        device::barrier_init(q_full(s), 1);
        device::barrier_init(dout_full(s), kDrops ? 1 + kDrawers : 1);
        device::barrier_init(q_empty(s), kConsumers * 4);
        device::barrier_init(dout_empty(s), kConsumers * 4);
      }
      device::barrier_init_fence();
    }
  };
  static_assert(32 * kTile.stages + 48 + kThreads / 32 * 8 <= kSm90BackwardSmallBytes);

  // 3. What a CTA works on
  struct Work {
    int32_t batch, kv_head, key0, group;  // group: query heads that share the keys
    bool clears;
    Span queries, keys;
    device::TileRange range;  // of queries

    __device__ __forceinline__ Work(const AttentionParams& f, const KeySchedule& s, int32_t item) {
      int32_t per_section = s.section * s.tiles, within = item % per_section;
      int32_t first = item / per_section * s.section, width = min(s.section, s.pairs - first);
      int32_t pair = first + within % width;
      batch = pair / f.num_heads_kv;
      kv_head = pair % f.num_heads_kv;
      key0 = within / width * kTile.n;
      if constexpr (kLastKeysFirst) key0 = (s.tiles - 1) * kTile.n - key0;
      group = f.num_heads_q / f.num_heads_kv;
      clears = s.clears;
      queries = query_span(f, batch);
      keys = key_span(f, batch);
      range = device::query_tile_range<kTile.m>(
          left(f), right(f), key0, min(key0 + kTile.n, keys.used), queries.used, keys.used);
    }
  };

  // Row ranges: the first and the last row that sees a key of the CTA, of any head. All threads look,
  // each warp leaves what it found; then the range is known.
  static constexpr bool kLooksForRows = kMask == MaskKind::rows;
  static constexpr int kWarps = kThreads / 32;
  static __device__ __forceinline__ int2* found_rows(char* smem, const Shared& shared) {
    uint32_t behind_barriers = shared.barriers + 32 * kTile.stages;
    return reinterpret_cast<int2*>(smem + (behind_barriers - device::smem_address(smem)));
  }
  static __device__ __forceinline__ void look_for_rows(const AttentionParams& f, const Work& work,
                                                       int2* found) {
    const int32_t key_end = min(work.key0 + kTile.n, work.keys.used);
    const int32_t heads = f.rows.strides.head == 0 ? 1 : work.group;
    int32_t first = INT32_MAX, last = -1;
    for (int32_t head = work.kv_head * work.group, i = 0; i < heads; ++i) {
      const Mod mod(f, work.batch, head + i, work.queries.used, work.keys.used);
#pragma unroll 4
      for (int32_t row = threadIdx.x; row < work.queries.used; row += kThreads) {
        KeyRange seen = mod.visible(row);
        if (max(seen.begin, work.key0) >= min(seen.end, key_end)) continue;
        first = min(first, row);
        last = max(last, row);
      }
    }
    first = __reduce_min_sync(0xffffffffu, first);
    last = __reduce_max_sync(0xffffffffu, last);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = {first, last};
  }
  static __device__ __forceinline__ device::TileRange range_of_rows(const int2* found) {
    int32_t first = INT32_MAX, last = -1;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      first = min(first, found[warp].x);
      last = max(last, found[warp].y);
    }
    if (last < 0) return {0, 0, 0, 0};
    return {first / kTile.m, last / kTile.m + 1, 0, 0};
  }
  // Whether a row of a tile does not see all of the 64 keys from key0 + `first` on.
  static __device__ __forceinline__ bool hides(const Mod& mod, const Work& work, int first,
                                               int tile) {
    bool sees_all = true;
#pragma unroll
    for (int row = threadIdx.x % 32; row < kTile.m; row += 32) {
      KeyRange seen = mod.visible(tile * kTile.m + row);
      int32_t key = work.key0 + first;
      sees_all = sees_all && seen.begin <= key && seen.end >= key + 64;
    }
    return !__all_sync(0xffffffffu, sees_all);
  }

  static __device__ __forceinline__ int32_t left(const AttentionParams& f) {
    return kMask == MaskKind::window ? f.mask.left : static_cast<int32_t>(kUnlimited);
  }
  static __device__ __forceinline__ int32_t right(const AttentionParams& f) {
    return kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : f.mask.right;
  }

  // 4. The producer: one thread.
  static __device__ __forceinline__ void produce(const AttentionParams& f, const RowStates& states,
                                                 const Maps& maps, const Work& work,
                                                 const Shared& shared) {
    using namespace device;
    if (work.range.begin >= work.range.end) return wait_for_previous_kernel();
    for (const TensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) tma_prefetch(map);
    const BoxPlace keys(f.cu_seqlens_kv != nullptr, work.keys, work.batch, work.key0);
    const BoxPlace rows(f.cu_seqlens_q != nullptr, work.queries, work.batch, 0);
    const int32_t first_head = work.kv_head * work.group;
    Ring<kTile.stages> ring(1);
    bool fresh = true;
#pragma unroll 1
    for (int32_t outer = kMixesHeads ? work.range.begin : first_head;
         outer < (kMixesHeads ? work.range.end : first_head + work.group); ++outer) {
      int32_t head = outer;
      int64_t place = kMixesHeads ? 0 : states.place(f, work.queries, work.batch, head);
#pragma unroll 1
      for (int32_t inner = kMixesHeads ? first_head : work.range.begin;
           inner < (kMixesHeads ? first_head + work.group : work.range.end); ++inner) {
        const int32_t at = kMixesHeads ? outer : inner;
        const int32_t tile = kLastRowsFirst ? work.range.begin + work.range.end - 1 - at : at;
        if constexpr (kMixesHeads) {
          head = inner;
          place = states.place(f, work.queries, work.batch, head);
        }
        BoxPlace box = rows;
        box.row += tile * kTile.m;
        const int s = ring.stage();
        barrier_wait(shared.q_empty(s), ring.parity());
        barrier_arrive_expect(shared.q_full(s),
                              kQBytes + kPlaneBytes + kBiasBytes + (fresh ? kKBytes : 0));
        if (fresh)
          load_tile<kTile.n, kPanelsQk>(shared.k, maps.k, shared.q_full(s), keys, work.kv_head,
                                        kEvictFirst);
        load_tile<kTile.m, kPanelsQk>(shared.q_stage(s), maps.q, shared.q_full(s), box, head,
                                      kEvictLast);
        if constexpr (kIsBiased)
          load_bias<kTile.m, kTile.n>(shared.bias_stage(s), maps, shared.q_full(s), f.scores,
                                      work.key0, tile * kTile.m, head, work.batch);
        if (fresh) wait_for_previous_kernel();  // it wrote the states
        bulk_load(shared.lse(s), states.lse + place + tile * kTile.m, kPlaneBytes,
                  shared.q_full(s));
        barrier_wait(shared.dout_empty(s), ring.parity());
        barrier_arrive_expect(shared.dout_full(s),
                              kDoutBytes + kPlaneBytes + (fresh ? kVBytes : 0));
        if (fresh)
          load_tile<kTile.n, kPanelsV>(shared.v, maps.v, shared.dout_full(s), keys, work.kv_head,
                                       kEvictFirst);
        load_tile<kTile.m, kPanelsV>(shared.dout_stage(s), maps.dout, shared.dout_full(s), box,
                                     head, kEvictLast);
        bulk_load(shared.delta(s), states.delta + place + tile * kTile.m, kPlaneBytes,
                  shared.dout_full(s));
        fresh = false;
        ring.next();
      }
    }
  }

  // Warps that draw what is kept.
  static __device__ __forceinline__ void draw(const AttentionParams& f, const Work& work,
                                              const Shared& shared, int drawer) {
    constexpr int kGroups = kTile.n / 64, kBlocks = kTile.m < 64 ? kTile.m / 8 : 8;
    constexpr int kParts = kGroups * device::kept_words(kTile.m);
    static_assert(kTile.m < 64 || kTile.m % 64 == 0);
    device::Ring<kTile.stages> ring(1);
    const int32_t first_head = work.kv_head * work.group;
    int part = drawer;
#pragma unroll 1
    for (int32_t head = first_head; head < first_head + work.group; ++head) {
      const device::TileDropout dropout(f, work.batch, head);
#pragma unroll 1
      for (int32_t tile = work.range.begin; tile < work.range.end; ++tile) {
        device::barrier_wait(shared.dout_empty(ring.stage()), ring.parity());
#pragma unroll 1
        for (; part < kParts; part += kDrawers) {
          const int group = part % kGroups, word = part / kGroups;
          dropout.template draw_keys<kBlocks>(
              shared.kept(ring.stage()) + word * kTile.n * 8 + group * 512,
              tile * kTile.m + word * 64, work.key0 + group * 64);
        }
        part -= kParts;
        hand_over(shared.dout_full(ring.stage()));
        ring.next();
      }
    }
  }

  // What dropout keeps of a stage, in a thread's transposed fragment.
  static __device__ __forceinline__ device::Kept<true, kTile.m> kept_of(const Shared& shared,
                                                                        int stage) {
    return {shared.kept(stage), static_cast<int>(threadIdx.x) - 128, kTile.n * 2};
  }
  // What dQ, dK and dV are multiplied by.
  static __device__ __forceinline__ float factor_of(const AttentionParams& f) {
    return kDrops ? f.dropout.factor() : 1.0f;
  }

  // Rows of Q and dO behind the last one of the sequence.
  static __device__ __forceinline__ void clear_behind(const Work& work, uint32_t q, uint32_t dout,
                                                      int tile) {
    clear_tile<kTile.m, kPanelsQk>(q, work.queries.used - tile * kTile.m);
    clear_tile<kTile.m, kPanelsV>(dout, work.queries.used - tile * kTile.m);
  }

  // 5. A tile: S^T and dP^T become P^T and dx^T. A lane has the keys `key` and key + 8, and in each
  // block of 8 columns the rows 2 (lane % 4) and the next.
  struct Sight {
    int32_t key;
    KeyRange rows[2];  // that see the keys
  };
  static __device__ __forceinline__ Sight lane_sight(const AttentionParams& f, const Work& work,
                                                     int first) {
    Sight sight;
    sight.key = work.key0 + first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sight.rows[half] = visible_queries(left(f), right(f), sight.key + 8 * half, work.queries.used,
                                         work.keys.used);
    }
    return sight;
  }

  static __device__ __forceinline__ float2 load_pair(uint32_t plane, int block) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(plane + 32 * block + threadIdx.x % 4 * 8));
    return pair;
  }

  // P^T, also packed; what nobody sees is 0, whatever the operands hold. The exponent is clamped for
  // a score and an lse so large that they are rounded apart; not in whole tiles of the fused pass,
  // where that costs 2 to 5 %. With score options `scores` keeps P^T times the derivative of the
  // score.
  template <bool kMasked, bool kCapped = false>
  static __device__ __forceinline__ void make_probs_of(float (&scores)[kTile.m / 2],
                                                       uint32_t (&probs)[kTile.m / 4],
                                                       const Work& work, const Mod& mod,
                                                       float to_log2, uint32_t lse,
                                                       const Sight& sight, int32_t row0) {
    using namespace device;
    const int32_t first = row0 + 2 * static_cast<int32_t>(threadIdx.x % 4);
    int32_t begin[2], end[2];
#pragma unroll
    for (int half = 0; kMasked && kMask != MaskKind::rows && half < 2; ++half) {
      begin[half] = sight.rows[half].begin - first;
      end[half] = sight.rows[half].end - first;
    }
#pragma unroll
    for (int block = 0; block < kTile.m / 8; ++block) {
      const float2 states = load_pair(lse, block);
      [[maybe_unused]] KeyRange keys[2];  // that the two rows see
      if constexpr (kMasked && kMask == MaskKind::rows) {
        keys[0] = mod.visible(first + 8 * block);
        keys[1] = mod.visible(first + 8 * block + 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* s = &scores[4 * block + 2 * half];
        float prob[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * block + i;
          float score = s[i];
          if constexpr (kForm == ScoreForm::general) {  // clamped: no load leaves the bias
            score = mod(score, min(first + column, work.queries.used - 1),
                        min(sight.key + 8 * half, work.keys.used - 1));
          }
          float exponent = fmaf(score, to_log2, i == 0 ? -states.x : -states.y);
          if constexpr (kMasked || !kFused || kIsBiased) exponent = at_most(exponent, 0.0f);
          if constexpr (kMasked && kMask == MaskKind::rows) {
            const int32_t key = sight.key + 8 * half;
            exponent = key >= keys[i].begin && key < keys[i].end ? exponent : negative_infinity();
          } else if constexpr (kMasked) {
            bool seen = column < end[half];
            if constexpr (kMask != MaskKind::none) seen = seen && column >= begin[half];
            exponent = seen ? exponent : negative_infinity();
          }
          prob[i] = exp2_approx(exponent);
        }
        if constexpr (!kPacksLate) probs[2 * block + half] = pack2<kType>(prob[0], prob[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kCapped)
            s[i] = kMasked && prob[i] == 0.0f ? 0.0f : prob[i] * mod.derivative(s[i]);
          else if constexpr (kForm == ScoreForm::general)
            s[i] = prob[i] != 0.0f ? prob[i] * mod.derivative(s[i]) : 0.0f;
          else
            s[i] = prob[i];
        }
      }
    }
  }
  static __device__ __forceinline__ void make_probs(float (&scores)[kTile.m / 2],
                                                    uint32_t (&probs)[kTile.m / 4],
                                                    const AttentionParams& f, const Work& work,
                                                    const Mod& mod, const Shared& shared, int stage,
                                                    const Sight& sight, int tile, bool masked) {
    const uint32_t lse = shared.lse(stage);
    if constexpr (kIsBiased) {
      mod.template add_transposed<kTile.m>(scores, shared.bias_stage(stage));
      const int32_t first = tile * kTile.m + 2 * static_cast<int32_t>(threadIdx.x % 4);
      if (masked) hide_outside<kMask>(scores, sight.rows, first, mod.hidden());
      make_probs_of<false>(scores, probs, work, mod, mod.to_log2, lse, sight, tile * kTile.m);
      return;
    }
    if constexpr (kForm == ScoreForm::smooth) {
      const int32_t first = tile * kTile.m + 2 * static_cast<int32_t>(threadIdx.x % 4);
      const int32_t distance = first + work.keys.used - work.queries.used - sight.key;
      mod.template modify<true>(scores, distance);
      auto make = [&](auto hidden) {
        const float to_log2 = exponent_of(mod);
        if (mod.caps()) {
          make_probs_of<hidden.value, true>(scores, probs, work, mod, to_log2, lse, sight,
                                            tile * kTile.m);
        } else {
          make_probs_of<hidden.value>(scores, probs, work, mod, to_log2, lse, sight,
                                      tile * kTile.m);
        }
      };
      if constexpr (kRowPad % kTile.m == 0) {  // each row of a tile has a state
        if (masked) {
          if constexpr (kFused)  // rows behind the last one have scores of 0 and an lse of +inf
            hide_left(scores, distance, right(f), [&] { return mod.hidden(); });
          else
            hide_outside<kMask>(scores, sight.rows, first, mod.hidden());
        }
        make(std::false_type{});
      } else if (masked) {
        make(std::true_type{});
      } else {
        make(std::false_type{});
      }
      return;
    }
    if constexpr (kPacksLate) {
      const int32_t first = tile * kTile.m + 2 * static_cast<int32_t>(threadIdx.x % 4);
      const int32_t distance = first + work.keys.used - work.queries.used - sight.key;
      if (masked) hide_left(scores, distance, right(f), device::negative_infinity);
      make_probs_of<false>(scores, probs, work, mod, exponent_of(mod), lse, sight, tile * kTile.m);
    } else if (masked) {
      make_probs_of<true>(scores, probs, work, mod, exponent_of(mod), lse, sight, tile * kTile.m);
    } else {
      make_probs_of<false>(scores, probs, work, mod, exponent_of(mod), lse, sight, tile * kTile.m);
    }
  }

  // dP^T becomes dx^T; where P^T is masked to 0, so is dx^T.
  static __device__ __forceinline__ void make_grads(float (&dout_v)[kTile.m / 2],
                                                    const float (&weights)[kTile.m / 2],
                                                    uint32_t delta, bool masked) {
    auto each = [&](auto select) {
#pragma unroll
      for (int block = 0; block < kTile.m / 8; ++block) {
        const float2 deltas = load_pair(delta, block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = weights[4 * block + i];
          float& x = dout_v[4 * block + i];
          float product = weight * (x - (i % 2 == 0 ? deltas.x : deltas.y));
          x = select.value && weight == 0.0f ? 0.0f : product;
        }
      }
    };
    if (kIsBiased || masked) {  // a bias may be -inf
      each(std::true_type{});
    } else {
      each(std::false_type{});
    }
  }

  // 6. Epilogue: 64 rows of dK or dV from the accumulators of a group, from key key0 + `first` on.
  // Rows in [used, stored) become zeros.
  template <int kDim>
  static __device__ __forceinline__ void store(const float (&sum)[kDim / 2], float factor,
                                               void* data, const Strides& s, DType dtype,
                                               const Work& work, int first, int32_t dim) {
    if (data == nullptr) return;
    const int lane = threadIdx.x % 32;
    const int64_t base = work.batch * s.batch + work.kv_head * s.head + work.keys.start * s.seq;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = work.key0 + first + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * half;
      const bool used = row < work.keys.used, stored = row < work.keys.stored;
      const int64_t at = base + row * s.seq;
      if (dtype != DType::f32) {
        store_row<kType, kDim>(sum, half, factor, static_cast<char*>(data) + 2 * at, 0, dim, used,
                               stored);
        continue;
      }
      float* to = static_cast<float*>(data) + at + lane % 4 * 2;
#pragma unroll
      for (int block = 0; block < kDim / 8; ++block) {
        const float* from = &sum[4 * block + 2 * half];
        if (stored && block * 8 < dim)
          *reinterpret_cast<float2*>(to + 8 * block) =
              used ? float2{from[0] * factor, from[1] * factor} : float2{};
      }
    }
  }
};

}  // namespace cuattn::backward
