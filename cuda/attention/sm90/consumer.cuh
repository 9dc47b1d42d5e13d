// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of forward.cuh: it owns 64 rows of every query tile. S of the next key tile is
// multiplied while the softmax of this one runs; the groups take turns on the tensor cores. Next:
// softmax.cuh, store.cuh (how O leaves).
#pragma once

#include "cuattn/device/dropout_sm90.cuh"
#include "cuda/attention/sm90/boxes.cuh"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/scores.cuh"
#include "cuda/attention/sm90/seen.cuh"
#include "cuda/attention/sm90/softmax.cuh"
#include "cuda/attention/sm90/store.cuh"

namespace cuattn {

// Kernel: a ForwardSm90, for its sizes and its shared storage.
template <class Kernel>
struct ConsumerSm90 {
  // 1. Types and state
  using Shared = typename Kernel::Shared;
  using Work = Sm90Work;
  using Functor = typename Kernel::Asked;
  using Walk = typename Kernel::Walk;
  using Stop = typename Walk::Stop;
  using Store = typename Kernel::Store;
  using Bias = typename Kernel::Bias;
  static constexpr DType kType = Kernel::kOperands;
  static constexpr ScoreKind kScore = Kernel::kScores;
  static constexpr MaskKind kMask = Kernel::kMask;
  static constexpr Tile kTile = Kernel::kTile;
  static constexpr int kConsumers = Kernel::kConsumers;
  static constexpr int kQStages = Kernel::kQStages;
  static constexpr int kHeadDim = Kernel::kDims.qk, kHeadDimV = Kernel::kDims.v;
  static constexpr int kScoreCount = kTile.n / 2, kOutCount = kHeadDimV / 2;  // of a thread
  static constexpr int kQBytes = Kernel::kQBytes, kKBytes = Kernel::kKBytes;
  static constexpr int kVBytes = Kernel::kVBytes;
  static constexpr bool kStagesBias = Kernel::kStagesBias, kDrops = Kernel::kDrops;
  // Note: beyond 128 columns the wait for a turn costs more than the overlap brings.
  static constexpr bool kTakeTurns = kHeadDimV <= 128 && kConsumers > 1;
  // A group passes its turn on only when it knows whether its softmax takes a new reference: 1 to
  // 6 % faster at head_dim 64, slower for three groups under a mask, no difference at 128.
  static constexpr bool kPassesLate =
      kHeadDim <= 64 && kScore != ScoreKind::scored && (kConsumers == 2 || kMask == MaskKind::none);
  // One loop over key tiles, each of which is asked whether a mask cuts it: 0 to 3 % faster than three
  // loops under windows, 1 % slower than two without.
  static constexpr bool kOneLoop = kBegins<kMask> || Functor::kGiven;
  static constexpr bool kCaps =  // where a softcap alone bounds the scores: see SoftcapAlone
      kScore == ScoreKind::scored && !Functor::kGiven && kType == DType::bf16;
  // With a single Q tile the next Q comes late, so a group stores O before it waits for Q. Note:
  // score options leave no registers for that order.
  static constexpr bool kOutFirst = kQStages == 1 && kScore == ScoreKind::identity;
  using Mod =
      typename device::Either<Functor::kScore, Sm90FunctorMod,
                              device::ScoreMod<kType, kDrops ? ScoreKind::identity : kScore>>::Type;

  using Ring = device::Ring<kTile.stages>;
  using QRing = device::Ring<kQStages>;
  using Softmax = Sm90Softmax<kScore>;
  using Answers = cuattn::Answers<Functor>;

  // The two rows of a thread in a query tile, and the keys that they see.
  struct Rows {
    int32_t row;  // and row + 8
    KeyRange visible[2];
  };

  // What wgmma reads and writes of a thread.
  struct Tiles {
    float out[kOutCount], scores[kScoreCount];
    uint32_t probs[kScoreCount / 2];  // P in the order of a wgmma A operand
  };

  // Who computes.
  struct Lane {
    const AttentionParams& p;
    const Sm90Schedule& s;
    const Sm90Maps& maps;
    const Shared& shared;
    int group, lane, warp;

    __device__ __forceinline__ Lane(const AttentionParams& p, const Sm90Schedule& s,
                                    const Sm90Maps& maps, const Shared& shared, int group)
        : p(p),
          s(s),
          maps(maps),
          shared(shared),
          group(group),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32 % 4) {}
    __device__ __forceinline__ void release(uint32_t barrier) const {
      if (lane == 0) device::barrier_arrive(barrier);
    }
    __device__ __forceinline__ void my_turn() const {
      if (kTakeTurns) device::named_barrier_sync(1 + group, 256);
    }
    __device__ __forceinline__ void your_turn(bool late) const {
      if (kTakeTurns && late == kPassesLate)
        device::named_barrier_arrive(1 + (group + 1) % kConsumers, 256);
    }
    // Q and K of the first step.
    __device__ __forceinline__ void await_first(const Ring& ring, const QRing& q_ring) const {
      device::barrier_wait(shared.q_full(q_ring.stage()), q_ring.parity());
      device::barrier_wait(shared.k_full(ring.stage()), ring.parity());
    }
    __device__ __forceinline__ void take_work(device::Ring<2>& slot, uint32_t mine, Work& w) const {
      device::load_shared(w, shared.work(slot.stage()));
      __syncwarp();  // every lane has read it, and the last one's copy
      device::store_shared(mine, w);
      if (lane == 0) device::barrier_arrive(shared.work_empty(slot.stage()));
      slot.next();
    }
  };

  // 2. Work
  static __device__ __forceinline__ void find_visible(const AttentionParams& p,
                                                      const Sm90Schedule& s, const Work& w,
                                                      bool more, Rows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t row = rows.row + half * 8;
      const int32_t packed = packed_heads<Functor>(s.packed);
      int32_t token = packed == 1 ? row : row / packed;
      rows.visible[half] = {0, w.keys.used};
      if constexpr (kMask != MaskKind::none) {
        rows.visible[half] =
            visible_keys(kMask == MaskKind::causal ? static_cast<int32_t>(kUnlimited) : p.mask.left,
                         p.mask.right, token, w.queries.used, w.keys.used);
      }
      if (kMask == MaskKind::rows && more) limit_to_row(rows.visible[half], p, w, token);
    }
  }

  static __device__ __forceinline__ void find_rows(const Lane& me, const Work& w, const bool& more,
                                                   Rows& rows) {
    rows.row = w.row0 + me.group * 64 + me.warp * 16 + me.lane / 4;
    find_visible(me.p, me.s, w, more, rows);
  }

  // Whether the limits of rows cut a tile.
  static __device__ __forceinline__ bool is_cut(const device::TileRange& range, const Stop& at) {
    return at.tile >= range.full_end || at.tile < range.full_begin;
  }

  // 3. Products, begun
  // S = Q K^T.
  static __device__ __forceinline__ void multiply_qk(uint64_t a, uint64_t b,
                                                     float (&scores)[kScoreCount]) {
    using namespace device;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Kernel::Qk::template ss<0>(scores, advance(a, step / 4 * kTile.m * 128 + step % 4 * 32),
                                 advance(b, step / 4 * kTile.n * 128 + step % 4 * 32), step != 0);
    }
    wgmma_commit();
  }

  // O += P V. `fresh`: O holds nothing yet.
  static __device__ __forceinline__ void multiply_pv(const uint32_t (&probs)[kScoreCount / 2],
                                                     uint64_t b, bool fresh,
                                                     float (&out)[kOutCount]) {
    using namespace device;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.n / 16; ++step) {
      const uint32_t (&a)[4] = *reinterpret_cast<const uint32_t (*)[4]>(&probs[4 * step]);
      Kernel::Pv::template rs<1>(out, a, advance(b, step * 16 * 128), step != 0 || !fresh);
    }
    wgmma_commit();
  }

  // 4. Scores
  // The first key of a thread in a tile. Note: called in modify, it changes the library's kernels.
  static __device__ __forceinline__ int32_t first_key(int tile) {
    return tile * kTile.n + 2 * static_cast<int32_t>(threadIdx.x % 4);
  }

  // The first score of a thread in a tile, as a functor is asked of it.
  static __device__ __forceinline__ device::ScorePlace first_place(const Shared& shared,
                                                                   int32_t row, int32_t first) {
    constexpr int kPacked = Functor::kPacked;
    Work w;
    device::load_shared(w, shared.copy(threadIdx.x / 32 - 4));
    const int32_t token = row / kPacked, head = w.head * kPacked + row % kPacked;
    const float ahead = static_cast<float>(token - first);
    return {w.batch, head, token, first, w.queries.used, w.keys.used, ahead};
  }

  // A mask finds what it can while S is multiplied; modify asks it for the rest. `more`: there is work.
  template <bool kIsFirst>
  static __device__ __forceinline__ Answers ask_early(const Lane& me, const Rows& rows,
                                                      const Stop& at, bool more = true) {
    Answers answers;
    if constexpr (Functor::kMask) {
      if (more && at.asks)
        answers.template find<kIsFirst>(first_place(me.shared, rows.row, first_key(at.tile)),
                                        static_cast<const FunctorParams&>(me.p));
    }
    return answers;
  }

  // Softcap, ALiBi, bias; -inf for keys that a row does not see. `asks`: lists leave the tile to the
  // mask of a functor; `cut`: limits of the rows end within it.
  static __device__ __forceinline__ void modify(float (&scores)[kScoreCount],
                                                const AttentionParams& p, const Sm90Schedule& s,
                                                const Shared& shared, const Mod& mod,
                                                const Rows& rows, int group, int tile, bool asks,
                                                bool cut, int stage, const Answers& answers) {
    int32_t first = tile * kTile.n + 2 * static_cast<int32_t>(threadIdx.x % 4);
    if constexpr (Functor::kGiven) {
      const auto& given = static_cast<const FunctorParams&>(p);
      const device::ScorePlace place = first_place(shared, rows.row, first);
      if constexpr (Functor::kScore) call_score<Functor>(scores, mod.scale, place, given);
      if (asks) answers.hide(scores, place, given);
      if (cut) hide_unseen(scores, bits_within<kTile.n>(rows.visible, first));
      return;
    } else if constexpr (kScore == ScoreKind::scored) {
      float factor = modify_scores(scores, mod, rows.row, first);
      if (kStagesBias && s.stages_bias) {
        device::barrier_wait(shared.bias_full(group), stage % 2);
        Bias::add(scores, factor, shared.bias(), threadIdx.x / 32 * 16 - 64);
        __syncwarp();  // every lane has read its rows
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
    if (cut) mask_scores<kMask>(scores, rows.visible, first);
  }

  // Dropout: what is not kept of P becomes 0. The sums of the rows have it all.
  static __device__ __forceinline__ void drop(uint32_t (&probs)[kScoreCount / 2],
                                              const Shared& shared, const Ring& ring) {
    if constexpr (kDrops) {
      device::barrier_wait(shared.kept_full(ring.stage()), ring.parity());
      device::Kept<false, kTile.n>(shared.kept(ring.stage()), threadIdx.x - 128, kConsumers * 128)
          .drop_all(probs);
      __syncwarp();  // every lane has read its bits
      if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.kept_empty(ring.stage()));
    }
  }

  // 5. Steps of the main loop. The lambdas that they call are those of run.
  // The last PV of a query tile, and behind it the first QK of the next: O leaves meanwhile. Note:
  // before the first and after the last tile these multiply junk, for a branch around them would
  // serialise wgmma.
  static __device__ __forceinline__ void join_tiles(const Lane& me, Tiles& tiles, const Ring& ring,
                                                    const QRing& q_ring, const int& v_stage,
                                                    const bool& more, auto& multiply_qk,
                                                    auto& multiply_pv) {
    using namespace device;
    auto& [out, scores, probs] = tiles;
    if (more && kScore == ScoreKind::scored) me.await_first(ring, q_ring);
    me.my_turn();
    claim(scores);
    pin(out);
    pin(probs);
    multiply_pv(v_stage);
    if constexpr (!kOutFirst) {
      if (more && kScore != ScoreKind::scored) me.await_first(ring, q_ring);
      multiply_qk();
      me.your_turn(kPassesLate);
      wgmma_wait<1>();
    } else {
      me.your_turn(kPassesLate);
      wgmma_wait<0>();
    }
    pin(out);
    pin(probs);
  }

  // The first QK by itself, where O leaves before it.
  static __device__ __forceinline__ void begin_first(const Lane& me, Tiles& tiles, const Ring& ring,
                                                     const QRing& q_ring, auto& multiply_qk) {
    me.await_first(ring, q_ring);
    me.my_turn();
    device::claim(tiles.scores);
    multiply_qk();
    me.your_turn(kPassesLate);
  }

  // Rows whose scores a softcap bounds have their reference before the first of them.
  static __device__ __forceinline__ void settle_bounded(const Mod& mod, Softmax& state) {
    if constexpr (kCaps) {
      if (const SoftcapAlone cap(mod); cap.bounds(mod)) state.settle(cap.reference());
    }
  }

  // S of the first key tile becomes P.
  static __device__ __forceinline__ void weigh_first(const Lane& me, Tiles& tiles,
                                                     const device::TileRange& range,
                                                     const Rows& rows, const Stop& last,
                                                     const Ring& ring, Softmax& state,
                                                     const Mod& mod, const Answers& answers) {
    auto& [p, s, maps, shared, group, lane, warp] = me;
    auto& [out, scores, probs] = tiles;
    modify(scores, p, s, shared, mod, rows, group, last.tile, last.asks, is_cut(range, last),
           ring.stage(), answers);
    softmax_step<kType, Functor::kGiven>(
        state, scores, probs, out, mod.to_log2, s.zero, [] {}, [] { return false; });
    drop(probs, shared, ring);
  }

  static __device__ __forceinline__ void clear_unused(const Lane& me, const Work& w, int tile,
                                                      const Ring& ring) {
    device::barrier_wait(me.shared.v_full(ring.stage()), ring.parity());
    clear_rows<kTile.n, Kernel::kPanelsV>(me.shared.v + ring.stage() * kVBytes,
                                          w.keys.used - tile * kTile.n, me.group);
  }

  // PV of this key tile; QK and softmax of the next, to the left.
  static __device__ __forceinline__ void add_tile(const Lane& me, Tiles& tiles,
                                                  const device::TileRange& range, const Walk& walk,
                                                  const Rows& rows, Ring& ring, int& tile, bool cut,
                                                  Softmax& state, const Mod& mod, auto& multiply_qk,
                                                  auto& multiply_pv, auto& release_scores) {
    using namespace device;
    auto& [p, s, maps, shared, group, lane, warp] = me;
    auto& [out, scores, probs] = tiles;
    --tile;
    const auto at = walk.at(tile);
    if (kOneLoop) cut = is_cut(range, at);
    int v_stage = ring.stage();
    uint32_t v_parity = ring.parity();
    ring.next();
    // opaque: else the compiler finds it in the middle of the softmax, long after S is there.
    const uint32_t k_empty = opaque(shared.k_empty(ring.stage()));
    barrier_wait(shared.v_full(v_stage), v_parity);
    barrier_wait(shared.k_full(ring.stage()), ring.parity());
    me.my_turn();
    pin(scores);
    pin(out);
    pin(probs);
    multiply_qk();
    multiply_pv(v_stage);
    me.your_turn(false);
    const Answers answers = ask_early<false>(me, rows, at);
    wgmma_wait<1>();
    pin(scores);
    release_scores(k_empty);
    auto pv_done = [&] {
      wgmma_wait<0>();
      pin(out);
      pin(probs);
      me.release(shared.v_empty(v_stage));
      return true;
    };
    if constexpr (kCaps) {
      if (!cut && state.is_settled())
        return capped_step<kType>(state, scores, probs, SoftcapAlone(mod), s.zero, pv_done);
    }
    modify(scores, p, s, shared, mod, rows, group, at.tile, at.asks, cut, ring.stage(), answers);
    auto begun = [&] { me.your_turn(true); };
    softmax_step<kType>(state, scores, probs, out, mod.to_log2, s.zero, begun, pv_done);
    drop(probs, shared, ring);
  }

  // The key tiles behind the first one: those that a mask cuts to the right, then whole ones; or one loop,
  // where add_tile finds out. Note: without the maximum of `full` float16 spills at 128.
  static __device__ __forceinline__ void walk_tiles(const device::TileRange& range, const int& tile,
                                                    auto& step) {
    if constexpr (!kOneLoop) {
      const int first = range.begin, full = max(first, range.full_begin);
      const int right = max(first, range.full_end);
#pragma unroll 1
      while (tile > right) step(true);
#pragma unroll 1
      while (tile > full) step(false);
    } else {
#pragma unroll 1
      while (tile > range.begin) step(false);
    }
  }

  static __device__ __forceinline__ int previous_q(const QRing& q_ring) {
    return q_ring.stage() == 0 ? kQStages - 1 : q_ring.stage() - 1;
  }

  // O has left the Q tile before this one.
  static __device__ __forceinline__ void release_q(const Shared& shared, const QRing& q_ring) {
    device::tma_store_wait_read<0>();
    device::barrier_arrive(shared.q_empty(previous_q(q_ring)));
  }

  // 6. Main loop: query tiles, and the key tiles of each from right to left.
  static __device__ __forceinline__ void run(const Lane& me) {
    using namespace device;
    auto& [p, s, maps, shared, group, lane, warp] = me;
    Ring ring(0);
    QRing q_ring(0);
    device::Ring<2> slot(0);
    Tiles tiles;
    auto& [out, scores, probs] = tiles;
    const uint64_t k_desc = wgmma_descriptor(shared.k, 0);
    const uint64_t v_desc = wgmma_descriptor(shared.v, kTile.n * 128);
    auto multiply_qk = [&] {
      uint64_t a = wgmma_descriptor(shared.q + q_ring.stage() * kQBytes + group * 64 * 128, 0);
      uint64_t b = advance(k_desc, ring.stage() * kKBytes);
      ConsumerSm90::multiply_qk(a, b, scores);
    };
    bool fresh = true;
    auto multiply_pv = [&](int stage) {
      ConsumerSm90::multiply_pv(probs, advance(v_desc, stage * kVBytes), fresh, out);
      fresh = false;
    };
    const uint32_t mine = shared.copy(threadIdx.x / 32 - 4);  // its work, for registers are full
    if (kTakeTurns && group == 0) named_barrier_arrive(1, 256);
    Softmax state;
    Mod mod(p, 0, 0, 1, 1);
    bool at_work = false, first_item = true;
#pragma unroll 1
    while (true) {
      bool more = Store::find_more(p, s, shared, group, slot);
      int v_stage = ring.stage();
      if (at_work) {
        barrier_wait(shared.v_full(v_stage), ring.parity());
        ring.next();
      }
      join_tiles(me, tiles, ring, q_ring, v_stage, more, multiply_qk, multiply_pv);
      if (at_work) {
        me.release(shared.v_empty(v_stage));
        Work done;
        load_shared(done, mine);
        int rows = group * 64 + warp * 16;
        Store::store(p, s, maps, done, done.row0 + rows, out, state,
                     shared.q + previous_q(q_ring) * kQBytes + rows * 128);
      }
      if constexpr (kOutFirst) {
        if (!more) break;
        begin_first(me, tiles, ring, q_ring, multiply_qk);
      }
      Work w;
      me.take_work(slot, mine, w);
      state = Softmax();
      mod = Mod(p, w.batch, w.head, w.queries.used, w.keys.used);
      settle_bounded(mod, state);
      Rows rows;
      find_rows(me, w, more, rows);
      const Walk walk(p, w.list);
      int tile = w.range.end - 1;  // a place, where there are lists: asked early, as it lies afar
      Stop last = Functor::kLists && more ? walk.at(tile) : Stop{tile, Functor::kMask};
      auto release_scores = [&](uint32_t k_empty) {  // S is done: so are K, and a single Q at last
        me.release(k_empty);
        if (kQStages == 1 && tile == w.range.begin) me.release(shared.q_empty(0));
      };
      const Answers answers = ask_early<true>(me, rows, last, more);
      wgmma_wait<0>();
      pin(scores);
      if (!kOutFirst && !more) break;
      at_work = true;
      release_scores(shared.k_empty(ring.stage()));
      weigh_first(me, tiles, w.range, rows, last, ring, state, mod, answers);
      fresh = true;
      if (kQStages > 1 && lane == 0 && !first_item) release_q(shared, q_ring);
      first_item = false;
      if (s.clears && (last.tile + 1) * kTile.n > w.keys.used) clear_unused(me, w, last.tile, ring);
      auto step = [&](bool masked) {
        add_tile(me, tiles, w.range, walk, rows, ring, tile, masked, state, mod, multiply_qk,
                 multiply_pv, release_scores);
      };
      walk_tiles(w.range, tile, step);
      q_ring.next();
    }
    if (!kOutFirst) tma_store_wait_read<0>();
  }
};

}  // namespace cuattn
