// SPDX-License-Identifier: Apache-2.0
// Flash attention forward on Hopper (sm_90a): float16 and bfloat16, every option of the API. One
// producer warpgroup feeds K and V tiles by TMA to two or three consumer warpgroups of 64 query
// rows each, which multiply by wgmma; CTAs are persistent. Source: FlashAttention-3,
// arXiv:2407.08608, sections 3.1-3.2. Primitives: device/mma_sm90.cuh. Tiles: tiles.h.
// Deep dive: docs/notes/20261121-prefill-sm90.md. Next: src/attention/plan.cpp, which picks it.
//
//   producer   | Q K3  | K2 V3 | K1 V2 | K0 V1 | V0 | Q' K' | ...       (next query tile)
//   group 0    | QK3 | softmax | QK2 PV3 | softmax | QK1 PV2 | ... | PV0 QK' | O out | softmax
//   group 1         | QK3 | softmax | QK2 PV3 | softmax | ...        (the tensor cores alternate)
#pragma once

#include "cuattn/device/dropout_sm90.cuh"
#include "cuattn/device/mask.cuh"
#include "cuattn/device/wgmma_sm90.cuh"
#include "cuattn/tiles.h"
#include "cuda/attention/sm90/producer.cuh"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/scores.cuh"
#include "cuda/attention/sm90/softmax.cuh"
#include "cuda/attention/sm90/store.cuh"

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMaskKind, ScoreKind kScore,
          Tile kTileSize, class Functor = NoFunctor>
struct ForwardSm90 {
  // 1. Types and sizes
  static constexpr Tile kTile = kTileSize;  // query rows, keys, stages
  static constexpr MaskKind kMask = kMaskKind;
  using Asked = Functor;
  using Walk = Sm90Walk<Functor, kTile.n>;
  static constexpr ScoreKind kRoom =  // a functor takes no bias
      Functor::kGiven ? ScoreKind::identity : kScore;
  static constexpr int kConsumers = kTile.m / 64;
  // Warps that draw what dropout keeps: a group of their own, one for each scheduler. A group more
  // leaves too few registers for wgmma of more columns; then two warps of the producers draw.
  static constexpr bool kDrops = kScore == ScoreKind::dropped;
  static constexpr bool kHasDrawGroup = kDrops && kHeadDimV <= 128;
  static constexpr int kDrawers = !kDrops ? 0 : kHasDrawGroup ? 4 : 2;
  static constexpr int kThreads = (kConsumers + 1 + kHasDrawGroup) * 128;
  static constexpr int kPanelsQk = (kHeadDim + 63) / 64, kPanelsV = (kHeadDimV + 63) / 64;
  static constexpr int kQBytes = kTile.m * kPanelsQk * 128;  // of one stage
  static constexpr int kKBytes = kTile.n * kPanelsQk * 128;
  static constexpr int kVBytes = kTile.n * kPanelsV * 128;
  static constexpr int kQStages = sm90_q_stages({kHeadDim, kHeadDimV}, kTile, kRoom);
  static constexpr int kSmemBytes = sm90_smem_bytes({kHeadDim, kHeadDimV}, kTile, kRoom, kQStages);
  // Registers of a thread. The groups share what the CTA was launched with, 168 * 3 or 128 * 4: a
  // group that asks for more than is left waits for ever.
  // With row ranges, who draws the work needs more.
  static constexpr bool kLongDraw = kMask == MaskKind::rows;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160
                                            : kHasDrawGroup ? 208
                                            : kLongDraw     ? 224
                                                            : 232;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kLongDraw ? 56 : 40;
  static constexpr int kDrawerRegisters = kHasDrawGroup ? 56 : 0;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters + kDrawerRegisters <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));
  static constexpr int kScoreCount = kTile.n / 2, kOutCount = kHeadDimV / 2;  // of a thread
  static constexpr int kKeyAlign = 1;                                         // see find_sm90_work
  static constexpr int kWantedBefore = 2;  // key tiles, before the last one of an item is loaded
  // Note: beyond 128 columns the wait for a turn costs more than the overlap brings.
  static constexpr bool kTakeTurns = kHeadDimV <= 128;
  // A group passes its turn on only when it knows whether its softmax takes a new reference: 1 to
  // 6 % faster at head_dim 64, slower for three groups under a mask, no difference at 128.
  static constexpr bool kPassesLate =
      kHeadDim <= 64 && kScore != ScoreKind::scored && (kConsumers == 2 || kMask == MaskKind::none);
  // The producer loads V after K of the next tile, for that is the order of their use.
  static constexpr int kLag = 1;
  // With a single Q tile the next Q comes late, so a group stores O before it waits for Q. Note:
  // score options leave no registers for that order.
  static constexpr bool kOutFirst = kQStages == 1 && kScore == ScoreKind::identity;
  // What dropout keeps: a stage for a stage of K and V.
  static constexpr int kKeptBytes = kDrops ? sm90_kept_bytes(kTile.m, kTile.n) : 0;
  static constexpr int kBarriers = 4 * kTile.stages + 15 + (kDrops ? 2 * kTile.stages : 0);
  static_assert(8 * kBarriers + sizeof(Sm90Work) * (2 + 4 * kConsumers) +
                    kPageLoaders * BlockIds<kTile.n>::kBytes <=
                kSm90SmallBytes);
  static_assert(kSmemBytes <= 227 * 1024, "sm_90 gives a CTA at most 227 KiB");
  using Work = Sm90Work;
  using Qk = device::Wgmma<kType, kTile.n>;
  using Pv = device::Wgmma<kType, kHeadDimV>;
  using Ids = BlockIds<kTile.n>;
  static_assert(Ids::kSlots > Ids::kAhead + kLag, "a slot is filled when its tile is behind");
  using Bias = BiasTile<kType, kTile.m, kTile.n>;
  static_assert(kTile.stages % 2 == 0, "a bias has one stage, and its parity is the lowest bit");
  static constexpr bool kStagesBias = sm90_stages_bias({kHeadDim, kHeadDimV}, kRoom);
  static constexpr int kBiasBytes = kStagesBias ? Bias::kBytes : 0;
  using Store = StoreSm90<kType, kScore, kHeadDimV, kTile.m, (kQStages > 1)>;

  // 2. Shared storage, in address order: Q (stage, panel, m, 64); K (stage, panel, n, 64); V
  // likewise; a bias (panel, m, 64); what dropout keeps (stage); barriers, those of the main loop
  // first; the work items that the producer draws; block ids.
  struct Shared {
    uint32_t q, k, v, barriers;
    __device__ explicit Shared(const void* base) {
      q = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      k = q + kQStages * kQBytes;
      v = k + kTile.stages * kKBytes;
      barriers = device::opaque(v + kTile.stages * (kVBytes + kKeptBytes) + kBiasBytes);
    }
    __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
    __device__ uint32_t k_full(int s) const { return barrier(s); }
    __device__ uint32_t k_empty(int s) const { return barrier(kTile.stages + s); }
    __device__ uint32_t v_full(int s) const { return barrier(2 * kTile.stages + s); }
    __device__ uint32_t v_empty(int s) const { return barrier(3 * kTile.stages + s); }
    __device__ uint32_t q_full(int s) const { return other(s); }
    __device__ uint32_t q_empty(int s) const { return other(3 + s); }
    __device__ uint32_t work_full(int s) const { return other(6 + s); }
    __device__ uint32_t work_empty(int s) const { return other(8 + s); }
    __device__ uint32_t wanted() const { return other(10); }
    __device__ uint32_t bias() const { return barriers - kBiasBytes; }
    __device__ uint32_t bias_full(int g) const { return other(11 + g); }
    __device__ uint32_t bias_empty(int g) const { return other(13 + g); }
    __device__ uint32_t other(int index) const { return barrier(4 * kTile.stages + index); }
    __device__ uint32_t kept(int s) const { return barriers - (kTile.stages - s) * kKeptBytes; }
    __device__ uint32_t kept_full(int s) const { return other(15 + s); }
    __device__ uint32_t kept_empty(int s) const { return other(15 + kTile.stages + s); }
    __device__ uint32_t work(int s) const {
      return barrier(kBarriers) + s * static_cast<int>(sizeof(Work));
    }
    __device__ uint32_t copy(int warp) const { return work(2 + warp); }
    __device__ uint32_t ids(int loader) const {
      return copy(4 * kConsumers) + loader * Ids::kBytes;
    }
  };

  // 3. Roles. The producer's: producer.cuh.
  using Mod =
      typename device::Either<Functor::kScore, Sm90FunctorMod,
                              device::ScoreMod<kType, kDrops ? ScoreKind::identity : kScore>>::Type;

  // The two rows of a thread in a query tile, and the keys that they see.
  struct Rows {
    int32_t row;  // and row + 8
    KeyRange visible[2];
  };

  // Softcap, ALiBi, bias; -inf for keys that a row does not see.
  static __device__ __forceinline__ void modify(float (&scores)[kScoreCount],
                                                const AttentionParams& p, const Sm90Schedule& s,
                                                const Shared& shared, const Mod& mod,
                                                const Rows& rows, int group, int tile, bool masked,
                                                int stage) {
    int32_t first = tile * kTile.n + 2 * static_cast<int32_t>(threadIdx.x % 4);
    if constexpr (Functor::kGiven) {
      Work w;
      device::load_shared(w, shared.copy(threadIdx.x / 32 - 4));
      const device::ScorePlace at = {w.batch,
                                     w.head,
                                     rows.row,
                                     first,
                                     w.queries.used,
                                     w.keys.used,
                                     static_cast<float>(rows.row - first)};
      const auto& given = static_cast<const FunctorParams&>(p);
      if constexpr (Functor::kScore) call_score<Functor>(scores, mod.scale, at, given);
      if constexpr (Functor::kMask) {
        if (masked) call_mask<Functor>(scores, at, given);
      }
    } else if constexpr (kScore == ScoreKind::scored) {
      float factor = modify_scores(scores, mod, rows.row, first);
      if (kStagesBias && s.stages_bias) {
        device::barrier_wait(shared.bias_full(group), stage % 2);
        Bias::add(scores, factor, shared.bias(), threadIdx.x / 32 * 16 - 64);
        if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.bias_empty(group));
      } else {
        multiply(scores, factor);
      }
      if (p.scores.bias != nullptr && !(kStagesBias && s.stages_bias)) {
        Work w;
        device::load_shared(w, shared.copy(threadIdx.x / 32 - 4));
        add_bias(scores, mod, rows.row, first, w.queries.used - 1, w.keys.used - 1);
      }
    }
    if (masked) mask_scores<kMask>(scores, rows.visible, first);
  }

  // Dropout: what is not kept of P becomes 0. The sums of the rows have it all.
  static __device__ __forceinline__ void drop(uint32_t (&probs)[kScoreCount / 2],
                                              const Shared& shared,
                                              const device::Ring<kTile.stages>& ring) {
    if constexpr (kDrops) {
      device::barrier_wait(shared.kept_full(ring.stage()), ring.parity());
      device::Kept<false, kTile.n>(shared.kept(ring.stage()), threadIdx.x - 128, kConsumers * 128)
          .drop_all(probs);
      __syncwarp();  // every lane has read its bits
      if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.kept_empty(ring.stage()));
    }
  }

  // 4. Main loop. A consumer warpgroup owns 64 rows of every query tile. S of the next key tile is
  // multiplied while the softmax of this one runs; the groups take turns on the tensor cores.
  static __device__ __forceinline__ void consume(const AttentionParams& p, const Sm90Schedule& s,
                                                 const Sm90Maps& maps, const Shared& shared,
                                                 int group) {
    using namespace device;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    device::Ring<kTile.stages> ring(0);
    device::Ring<kQStages> q_ring(0);
    device::Ring<2> slot(0);
    float out[kOutCount], scores[kScoreCount];
    uint32_t probs[kScoreCount / 2];  // P in the order of a wgmma A operand
    const uint64_t k_desc = wgmma_descriptor(shared.k, 0);
    const uint64_t v_desc = wgmma_descriptor(shared.v, kTile.n * 128);

    auto previous_q = [&] { return q_ring.stage() == 0 ? kQStages - 1 : q_ring.stage() - 1; };
    auto release = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    auto multiply_qk = [&] {  // S = Q K^T
      uint64_t a = wgmma_descriptor(shared.q + q_ring.stage() * kQBytes + group * 64 * 128, 0);
      uint64_t b = advance(k_desc, ring.stage() * kKBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        Qk::template ss<0>(scores, advance(a, step / 4 * kTile.m * 128 + step % 4 * 32),
                           advance(b, step / 4 * kTile.n * 128 + step % 4 * 32), step != 0);
      }
      wgmma_commit();
    };
    bool fresh = true;                   // O holds nothing yet
    auto multiply_pv = [&](int stage) {  // O += P V
      uint64_t b = advance(v_desc, stage * kVBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTile.n / 16; ++step) {
        const uint32_t (&a)[4] = *reinterpret_cast<const uint32_t (*)[4]>(&probs[4 * step]);
        Pv::template rs<1>(out, a, advance(b, step * 16 * 128), step != 0 || !fresh);
      }
      wgmma_commit();
      fresh = false;
    };
    auto my_turn = [&] {
      if (kTakeTurns) named_barrier_sync(1 + group, 256);
    };
    auto your_turn = [&](bool late) {
      if (kTakeTurns && late == kPassesLate)
        named_barrier_arrive(1 + (group + 1) % kConsumers, 256);
    };
    // Is there more? Rows without keys are answered at once; work stays in its slot for take_work,
    // when the registers of the last one are free.
    auto more_work = [&] {
      while (true) {
        barrier_wait(shared.work_full(slot.stage()), slot.parity());
        Work w;
        load_shared(w, shared.work(slot.stage()));
        if (w.kind == Work::kFull) return true;
        if (w.kind == Work::kNone) return false;
        Store::store_empty(p, s, w, group);
        release(shared.work_empty(slot.stage()));
        slot.next();
      }
    };
    auto await_first = [&] {  // Q and K of the first step
      barrier_wait(shared.q_full(q_ring.stage()), q_ring.parity());
      barrier_wait(shared.k_full(ring.stage()), ring.parity());
    };
    // Each warp keeps a copy of its work in shared memory, for the registers are full.
    const uint32_t mine = shared.copy(threadIdx.x / 32 - 4);
    auto take_work = [&](Work& w) {
      load_shared(w, shared.work(slot.stage()));
      store_shared(mine, w);
      release(shared.work_empty(slot.stage()));
      slot.next();
    };

    if (kTakeTurns && group == 0) named_barrier_arrive(1, 256);
    Sm90Softmax<kScore> state;
    Mod mod(p, 0, 0, 1, 1);
    bool at_work = false, first_item = true;
#pragma unroll 1
    while (true) {
      // The last PV of a query tile, and behind it the first QK of the next: O leaves meanwhile.
      // Note: before the first and after the last tile these multiply junk, for a branch around
      // them would serialise wgmma.
      bool more = more_work();
      int v_stage = ring.stage();
      if (at_work) {
        barrier_wait(shared.v_full(v_stage), ring.parity());
        ring.next();
      }
      if (more && kScore == ScoreKind::scored) await_first();
      my_turn();
      claim(scores);
      pin(out);
      pin(probs);
      multiply_pv(v_stage);
      if constexpr (!kOutFirst) {
        if (more && kScore != ScoreKind::scored) await_first();
        multiply_qk();
        your_turn(kPassesLate);
        wgmma_wait<1>();
      } else {
        your_turn(kPassesLate);
        wgmma_wait<0>();
      }
      pin(out);
      pin(probs);
      if (at_work) {
        release(shared.v_empty(v_stage));
        Work done;
        load_shared(done, mine);
        int rows = group * 64 + warp * 16;
        Store::store(p, s, maps, done, done.row0 + rows, out, state,
                     shared.q + previous_q() * kQBytes + rows * 128);
      }
      if constexpr (kOutFirst) {
        if (!more) break;
        await_first();
        my_turn();
        claim(scores);
        multiply_qk();
        your_turn(kPassesLate);
      }
      Work w;
      take_work(w);
      state = Sm90Softmax<kScore>();
      mod = Mod(p, w.batch, w.head, w.queries.used, w.keys.used);
      Rows rows;
      rows.row = w.row0 + group * 64 + warp * 16 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int32_t row = rows.row + half * 8;
        int32_t token = s.packed == 1 ? row : row / s.packed;
        rows.visible[half] = {0, w.keys.used};
        if constexpr (kMask != MaskKind::none) {
          rows.visible[half] = visible_keys(
              kMask == MaskKind::causal ? static_cast<int32_t>(kUnlimited) : p.mask.left,
              p.mask.right, token, w.queries.used, w.keys.used);
        }
        if (kMask == MaskKind::rows && more) limit_to_row(rows.visible[half], p, w, token);
      }
      const Walk walk(p, w.list);
      int tile = w.range.end - 1;  // a place, where there are lists
      typename Walk::Stop last = {tile, Functor::kMask};
      if (Functor::kLists && more) last = walk.at(tile);  // early: it may come from afar
      auto is_masked = [&](const typename Walk::Stop& at) {
        return at.asks || at.tile >= w.range.full_end || at.tile < w.range.full_begin;
      };
      auto release_scores = [&](uint32_t k_empty) {  // S is done: so are K, and a single Q at last
        release(k_empty);
        if (kQStages == 1 && tile == w.range.begin) release(shared.q_empty(0));
      };

      wgmma_wait<0>();
      pin(scores);
      if (!kOutFirst && !more) {
        tma_store_wait_read<0>();
        break;
      }
      at_work = true;
      release_scores(shared.k_empty(ring.stage()));
      modify(scores, p, s, shared, mod, rows, group, last.tile, is_masked(last), ring.stage());
      softmax_step<kType>(
          state, scores, probs, out, mod.to_log2, s.zero, [] {}, [] { return false; });
      drop(probs, shared, ring);
      fresh = true;
      if (kQStages > 1 && lane == 0 && !first_item) {  // O has left the Q tile before this one
        tma_store_wait_read<0>();
        barrier_arrive(shared.q_empty(previous_q()));
      }
      first_item = false;
      if (s.clears && (last.tile + 1) * kTile.n > w.keys.used) {
        barrier_wait(shared.v_full(ring.stage()), ring.parity());
        clear_rows<kTile.n, kPanelsV>(shared.v + ring.stage() * kVBytes,
                                      w.keys.used - last.tile * kTile.n, group);
      }
      auto step = [&](bool masked) {
        --tile;
        const auto at = walk.at(tile);
        if (Functor::kGiven) masked = is_masked(at);
        int v_stage = ring.stage();
        uint32_t v_parity = ring.parity();
        ring.next();
        // opaque: else the compiler finds it in the middle of the softmax, long after S is there.
        const uint32_t k_empty = opaque(shared.k_empty(ring.stage()));
        barrier_wait(shared.v_full(v_stage), v_parity);
        barrier_wait(shared.k_full(ring.stage()), ring.parity());
        my_turn();
        pin(scores);
        pin(out);
        pin(probs);
        multiply_qk();
        multiply_pv(v_stage);
        your_turn(false);
        wgmma_wait<1>();
        pin(scores);
        release_scores(k_empty);
        modify(scores, p, s, shared, mod, rows, group, at.tile, masked, ring.stage());
        auto begun = [&] { your_turn(true); };
        softmax_step<kType>(state, scores, probs, out, mod.to_log2, s.zero, begun, [&] {
          wgmma_wait<0>();
          pin(out);
          pin(probs);
          release(shared.v_empty(v_stage));
          return true;
        });
        drop(probs, shared, ring);
      };
      const int first = w.range.begin, full = max(first, w.range.full_begin);
      const int right = max(first, w.range.full_end);
      if constexpr (!Functor::kGiven) {
#pragma unroll 1
        while (tile > right) step(true);
#pragma unroll 1
        while (tile > full) step(false);
      }
      if constexpr (kBegins<kMask> || Functor::kGiven) {
#pragma unroll 1
        while (tile > first) step(true);
      }
      q_ring.next();
    }
  }

  // 5. Kernel: nothing but the barriers and the split into roles.
  static __device__ __forceinline__ void run(const AttentionParams& p, const Sm90Schedule& s,
                                             const Sm90Maps& maps, void* smem) {
    constexpr uint32_t kWarps = kConsumers * 4;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    // Here, for where roles part its values would leave uniform registers.
    const Shared shared(smem);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kQStages; ++i) {
        device::barrier_init(shared.q_full(i), 1);
        device::barrier_init(shared.q_empty(i), kWarps);
      }
      for (int i = 0; i < 2; ++i) {
        device::barrier_init(shared.work_full(i), 1);
        device::barrier_init(shared.work_empty(i),
                             kWarps + (p.pages.block_tables != nullptr ? kPageLoaders : 1) +
                                 (kStagesBias && s.stages_bias) + kDrawers);
      }
      for (int i = 0; i < kTile.stages; ++i) {
        device::barrier_init(shared.k_full(i), 1);
        device::barrier_init(shared.v_full(i), 1);
        device::barrier_init(shared.k_empty(i), kWarps);
        device::barrier_init(shared.v_empty(i), kWarps);
        if constexpr (kDrops) {
          device::barrier_init(shared.kept_full(i), kDrawers);
          device::barrier_init(shared.kept_empty(i), kWarps);
        }
      }
      device::barrier_init(shared.wanted(), 1);
      for (int group = 0; kStagesBias && group < kConsumers; ++group) {
        device::barrier_init(shared.bias_full(group), 1);
        device::barrier_init(shared.bias_empty(group), 4);
      }
      device::barrier_init_fence();
    }
    __syncthreads();
    if (group == 0) {
      using Producer = ProducerSm90<ForwardSm90>;
      device::registers_shrink<kProducerRegisters>();
      int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      if (warp == 1) {
        schedule_sm90_work<ForwardSm90>(p, s, Shared(smem));
      } else if (kDrops && !kHasDrawGroup &&
                 warp >= 2) {  // keys in blocks are gathered first: no loaders there
        Producer::draw(p, Shared(smem), warp - 2);
      } else if (!Functor::kGiven && p.pages.block_tables != nullptr) {
        Producer::template load_tiles<true>(p, s, maps, Shared(smem), warp == 0 ? 0 : warp - 1);
      } else if (kStagesBias && warp == 2) {
        if (s.stages_bias && device::elect_one()) Producer::load_bias(s, maps, Shared(smem));
      } else if (warp == 0 && device::elect_one()) {
        Producer::template load_tiles<false>(p, s, maps, Shared(smem));
      }
    } else if (kHasDrawGroup && group > kConsumers) {
      device::registers_shrink<kDrawerRegisters>();
      ProducerSm90<ForwardSm90>::draw(p, Shared(smem), threadIdx.x / 32 % 4);
    } else {
      device::registers_grow<kConsumerRegisters>();
      consume(p, s, maps, shared, group - 1);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ AttentionParams params,
                        const __grid_constant__ Sm90Schedule schedule,
                        const __grid_constant__ Sm90Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, schedule, maps, smem);
}

}  // namespace cuattn
