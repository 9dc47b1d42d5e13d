// SPDX-License-Identifier: Apache-2.0
// What a warpgroup of consumers does in float8.cuh: 64 rows of every query tile, with their key tiles
// from right to left.
//
//   QK(j)  T = P V(j + 1) | S(j) of row 0 | O += T | S(j) of row 1 becomes P(j) | QK(j - 1)  T = P V(j) ..
//
// So with sums of two levels at head_dim 64. Above, there are no registers for T: it takes those of S, by
// some columns at a time:
//
//   QK(j) | S(j) becomes P(j) | T = P V(j), O += T | T = P V(j), O += T | .. | QK(j - 1) | ..
//
// With sums of one level T is O. Between query tiles the last PV of one and the first QK of the next are
// issued together, and O leaves meanwhile; where registers are full, one after the other. P stays in
// registers: through shared memory it was 3 % slower, although its products are all issued at once
// then. Next: float8_products.cuh, float8_step.cuh.
#pragma once

#include "cuda/attention/sm90/float8_maps.cuh"
#include "cuda/attention/sm90/float8_products.cuh"
#include "cuda/attention/sm90/float8_step.cuh"
#include "cuda/attention/sm90/store.cuh"

namespace cuattn {

template <class Kernel>
struct ConsumerFloat8 {
  static constexpr Tile kTile = Kernel::kTile;
  static constexpr MaskKind kMask = Kernel::kMask;
  static constexpr int kHeadDim = Kernel::kQkColumns, kHeadDimV = Kernel::kVColumns;
  static constexpr bool kIsFast = Kernel::kIsFast, kCounts = Kernel::kCounts;
  static constexpr int kConsumers = Kernel::kConsumers;
  // Some exponentials by FMA pipes: 2 to 3 % faster at head_dim 64, slower for three groups at 128.
  static constexpr bool kByPairs = kIsFast && kHeadDimV <= 64;
  static constexpr bool kOutFirst = !kIsFast;  // before the next S: registers are full
  using Products = ProductsFloat8<Kernel>;
  using Softmax = Float8Softmax<Kernel::kInt8, Kernel::kHasParts>;
  using Operands = typename Products::Operands;
  using Tiles = typename Products::Tiles;
  static constexpr int kScoreCount = Products::kScoreCount, kOutCount = Products::kOutCount;
  static constexpr bool kHasPart = Products::kHasPart, kTakesScores = Products::kTakesScores;
  using Work = Sm90Work;
  using Shared = typename Kernel::Shared;
  using Ring = device::Ring<kTile.stages>;
  using QRing = device::Ring<Kernel::kQStages>;
  static constexpr bool kByRows = Kernel::kByRows;
  using FirstOrder = std::conditional_t<kByRows, TurnedOrder<kTile.n>, KeyOrder<true, kTile.n>>;
  using RestOrder = std::conditional_t<kByRows, TurnedOrder<kTile.n>, KeyOrder<false, kTile.n>>;
  template <DType kType>
  using Store = StoreSm90<kType, ScoreKind::identity, kHeadDimV, 64, Kernel::kThroughSmem>;

  // 1. Who computes, and what it holds
  struct Lane {
    const AttentionParams& p;
    const Sm90Schedule& s;
    const Float8Maps& maps;
    const Shared& shared;
    int group, lane, warp;

    __device__ __forceinline__ void release(uint32_t barrier) const {
      if (lane == 0) device::barrier_arrive(barrier);
    }
    __device__ __forceinline__ void my_turn() const { device::named_barrier_sync(1 + group, 256); }
    __device__ __forceinline__ void your_turn() const {
      device::named_barrier_arrive(1 + (group + 1) % kConsumers, 256);
    }
    // Where stands what its rows see.
    __device__ __forceinline__ uint32_t sees() const { return shared.visible(threadIdx.x - 128); }
  };

  // Where it stands in the rings.
  struct Place {
    Ring ring{0};
    QRing q_ring{0};
    device::Ring<2> slot{0};
  };

  // 2. Work
  // Its work stands in shared memory, for registers are full: in its slot, or where the next work is
  // wanted before this one ends, in a copy.
  static __device__ __forceinline__ uint32_t mine(const Lane& me, const Place& at) {
    return kOutFirst ? me.shared.work(at.slot.stage())
                     : me.shared.copy(device::opaque(threadIdx.x) / 32 - 4);
  }
  static __device__ __forceinline__ void release_slot(const Lane& me, Place& at) {
    __syncwarp();  // every lane has read it, and the last one's copy
    me.release(me.shared.work_empty(at.slot.stage()));
    at.slot.next();
  }
  static __device__ __forceinline__ void take_work(const Lane& me, Place& at, Work& w) {
    device::load_shared(w, me.shared.work(at.slot.stage()));
    if constexpr (!kOutFirst) {
      release_slot(me, at);
      device::store_shared(mine(me, at), w);
    }
  }

  // Keys of tile 0 that are not of the sequence.
  static __device__ __forceinline__ int32_t lead(const Work& w) {
    return static_cast<int32_t>(w.keys.start) % Kernel::kKeyAlign;
  }

  // What a thread's two rows see, as places in tiles.
  static __device__ __forceinline__ void find_visible(const Lane& me, const Work& w) {
    const AttentionParams& p = me.p;
    KeyRange visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t row = w.row0 + me.group * 64 + me.warp * 16 + me.lane / 4 + half * 8;
      int32_t token = me.s.packed == 1 ? row : row / me.s.packed;
      visible[half] = {0, w.keys.used};
      if constexpr (kMask != MaskKind::none) {
        visible[half] =
            visible_keys(kMask == MaskKind::causal ? static_cast<int32_t>(kUnlimited) : p.mask.left,
                         p.mask.right, token, w.queries.used, w.keys.used);
      }
      visible[half].begin += lead(w);
      visible[half].end += lead(w);
      device::store_shared(me.sees() + half * 8, visible[half]);
    }
  }

  template <class Order>
  static __device__ __forceinline__ void mask(const Lane& me, float (&scores)[kScoreCount],
                                              int32_t tile) {
    KeyRange visible[2];
    device::load_shared(visible[0], me.sees());
    device::load_shared(visible[1], me.sees() + 8);
    mask_float8_scores<Order>(scores, visible, tile);
  }

  static __device__ __forceinline__ int32_t first_head(const Lane& me, const Work& w) {
    return w.head * me.s.packed;
  }
  static __device__ __forceinline__ int32_t head_kv(const Lane& me, const Work& w) {
    return first_head(me, w) / (me.p.num_heads_q / me.p.num_heads_kv);
  }

  // What makes a dot product of codes an exponent in base 2. A scale of 0 gives what zeros give. With
  // parts it comes with each key tile.
  static __device__ __forceinline__ float exponent_factor(const Lane& me, const Work& w) {
    constexpr float kLeast = 1.2e-38f;  // times it, -inf is -inf
    if constexpr (Kernel::kHasParts) return kLeast;
    const AttentionParams& p = me.p;
    float factor = p.float8.of_query(w.batch, first_head(me, w), 0) *
                   p.float8.of_key(w.batch, head_kv(me, w), 0) * p.scores.scale * device::kLog2e;
    return factor == 0.0f ? kLeast : factor;
  }
  // That of the key tile at which the ring stands, whose keys are there.
  static __device__ __forceinline__ float tile_factor(const Lane& me, const Place& at,
                                                      float of_all) {
    if constexpr (!Kernel::kHasParts) return of_all;
    return __uint_as_float(device::load_shared4(me.shared.factor(at.ring.stage(), me.group)));
  }

  // 3. Steps of the main loop
  // Q and K of the first step.
  static __device__ __forceinline__ void await_first(const Lane& me, const Place& at) {
    device::barrier_wait(me.shared.q_full(at.q_ring.stage()), at.q_ring.parity());
    device::barrier_wait(me.shared.k_full(at.ring.stage()), at.ring.parity());
  }

  // V of the last key tile, whose first columns may be of another sequence. By rows none are: the look
  // stays at head_dim 256, where ptxas spills without it.
  static __device__ __forceinline__ void await_last(const Lane& me, const Place& at) {
    device::barrier_wait(me.shared.v_full(at.ring.stage()), at.ring.parity());
    if constexpr (kByRows && kHeadDimV <= 128) return;
    Work w;
    device::load_shared(w, mine(me, at));
    if (w.range.begin == 0 && w.range.end > 1 && lead(w) > 0) {
      keep_columns<kHeadDimV, Kernel::kPanelsV, Kernel::kVPanelBytes>(
          me.shared.v + at.ring.stage() * Kernel::kVBytes, lead(w), kTile.n, me.group);
    }
  }

  // The last PV of a query tile, and behind it the first QK of the next: O leaves meanwhile. Note:
  // before the first and after the last tile these multiply junk, for a branch around them would
  // serialise wgmma.
  static __device__ __forceinline__ void join_tiles(const Lane& me, const Operands& from,
                                                    Tiles& tiles, const Place& at, int v_stage,
                                                    bool more) {
    using namespace device;
    me.my_turn();
    claim(tiles.scores);
    tiles.claim_product();
    Products::multiply_pv(from, v_stage, tiles);
    if (more) await_first(me, at);
    Products::multiply_qk(from, at, tiles.scores);
    me.your_turn();
    wgmma_wait<1>();
    tiles.pin_product();
  }

  // The last PV by itself, where O leaves before the next S.
  static __device__ __forceinline__ void end_tile(const Lane& me, const Operands& from,
                                                  Tiles& tiles, int v_stage) {
    me.my_turn();
    if constexpr (kTakesScores) {  // by 128 columns the end of an item spills
      Products::template add_slices<64>(from, v_stage, tiles, me.s.zero);
      me.your_turn();
    } else {
      tiles.claim_product();
      Products::multiply_pv(from, v_stage, tiles);
      me.your_turn();
      device::wgmma_wait<0>();
      tiles.pin_product();
    }
  }

  // And the first QK.
  static __device__ __forceinline__ void begin_tile(const Lane& me, const Operands& from,
                                                    Tiles& tiles, const Place& at) {
    await_first(me, at);
    me.my_turn();
    device::claim(tiles.scores);
    Products::multiply_qk(from, at, tiles.scores);
    me.your_turn();
  }

  // T joins O, and the sums of P those of the rows.
  static __device__ __forceinline__ void add_product(Softmax& state, Tiles& tiles) {
    if constexpr (kCounts) {  // the first lane of a quad has the column of ones
      state.sum[0] += tiles.counts[0];
      state.sum[1] += tiles.counts[2];
    }
    if constexpr (kHasPart) {
#pragma unroll
      for (int i = 0; i < kOutCount; ++i) tiles.out[i] += tiles.part[i];
    }
  }

  // PV of this key tile; QK and softmax of the next, to the left.
  static __device__ __forceinline__ void add_tile(const Lane& me, const Operands& from,
                                                  Tiles& tiles, Place& at, int& tile, bool masked,
                                                  Softmax& state, float factor) {
    using namespace device;
    --tile;
    const int v_stage = at.ring.stage();
    barrier_wait(me.shared.v_full(v_stage), at.ring.parity());
    at.ring.next();
    barrier_wait(me.shared.k_full(at.ring.stage()), at.ring.parity());
    const float to_log2 =
        tile_factor(me, at, factor);  // before the warp meets, and keys are released
    me.my_turn();
    if constexpr (kTakesScores) {
      Products::template add_slices<Products::kSlice>(from, v_stage, tiles, me.s.zero);
      me.release(me.shared.v_empty(v_stage));
      pin(tiles.scores);
      Products::multiply_qk(from, at, tiles.scores, me.s.zero);
      me.your_turn();
      wgmma_wait<0>();
    } else {
      pin(tiles.scores);
      tiles.claim_product();
      Products::multiply_qk(from, at, tiles.scores);
      Products::multiply_pv(from, v_stage, tiles);
      me.your_turn();
      wgmma_wait<1>();
    }
    pin(tiles.scores);
    me.release(me.shared.k_empty(at.ring.stage()));
    if constexpr (Kernel::kHasParts) follow_factor(state, to_log2);
    if (masked) mask<RestOrder>(me, tiles.scores, tile);
    auto join = [&](const float (&rescale)[2], bool moves) {
      if constexpr (!kTakesScores) {
        wgmma_wait<0>();
        tiles.pin_product();
        me.release(me.shared.v_empty(v_stage));
        add_product(state, tiles);
      }
      if (!moves) return;
#pragma unroll
      for (int i = 0; i < kOutCount; ++i) tiles.out[i] *= rescale[i >> 1 & 1];
      if constexpr (kCounts) {
        state.sum[0] *= rescale[0];
        state.sum[1] *= rescale[1];
      }
    };
    float8_softmax_step<RestOrder, kCounts, kByPairs>(state, tiles.scores, tiles.probs, to_log2,
                                                      me.s.zero, join);
  }

  // S of the first key tile becomes P.
  static __device__ __forceinline__ void weigh_first(const Lane& me, Tiles& tiles, const Place& at,
                                                     const Work& w, int tile, Softmax& state,
                                                     float to_log2) {
    if (tile >= w.range.full_end || tile < w.range.full_begin)
      mask<FirstOrder>(me, tiles.scores, tile);
    auto join = [](const float (&)[2], bool) {};
    float8_softmax_step<FirstOrder, kCounts, kByPairs>(state, tiles.scores, tiles.probs, to_log2,
                                                       me.s.zero, join);
    if constexpr (kByRows) return;
    const int before = tile == 0 ? lead(w) : 0, end = w.keys.used + lead(w) - tile * kTile.n;
    if (before > 0 || (me.s.clears && end < kTile.n)) {
      device::barrier_wait(me.shared.v_full(at.ring.stage()), at.ring.parity());
      keep_columns<kHeadDimV, Kernel::kPanelsV, Kernel::kVPanelBytes>(
          me.shared.v + at.ring.stage() * Kernel::kVBytes, before, end, me.group);
    }
  }

  // The key tiles behind the first one: masked ones to the right, full ones, masked ones to the left. One
  // loop is 1 to 2 % faster where a mask cuts tiles and sums have one level, else 2 to 3 % slower.
  static __device__ __forceinline__ void walk_tiles(const Lane& me, const Place& at, Work& w,
                                                    const int& tile, auto& step) {
    constexpr uint32_t kRange = offsetof(Work, range);
    if constexpr (kIsFast && kMask != MaskKind::none) {
#pragma unroll 1
      while (tile > w.range.begin) {
        device::TileRange range;
        device::load_shared(range, mine(me, at) + kRange);
        step(tile - 1 >= range.full_end || tile - 1 < range.full_begin);
      }
    } else {
      int until = max(w.range.begin, w.range.full_end);
#pragma unroll 1
      while (tile > until) step(true);
      device::load_shared(w.range, mine(me, at) + kRange);
      until = max(w.range.begin, w.range.full_begin);
#pragma unroll 1
      while (tile > until) step(false);
      device::load_shared(w.range, mine(me, at) + kRange);
#pragma unroll 1
      while (tile > w.range.begin) step(true);
    }
  }

  // 4. The end of a query tile: O times the scale of the values, and the shift of P back.
  static constexpr float kUnshift = 1.0f / (1 << kFloat8Shift);

  static __device__ __forceinline__ void scale_values(const Lane& me, const Work& w, float scale,
                                                      float (&out)[kOutCount]) {
    const Float8Scale& v = me.p.float8.v;
    const bool by_channel = v.extents[2] > 1;
    const float* from = v.data + w.batch * v.strides[0] + head_kv(me, w) / v.group * v.strides[1];
#pragma unroll
    for (int first = 0; first < kOutCount / 4; first += 4) {
      if (by_channel) {  // asked for each 32 columns: more loads at once would spill
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int channel = (first + i / 4) * 8 + me.lane % 4 * 2 + i % 2;
          out[4 * first + i] *= from[min(channel, me.p.head_dim_v - 1) * v.strides[2]] * kUnshift;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) out[4 * first + i] *= scale;
      }
    }
  }

  static __device__ __forceinline__ void leave(const Lane& me, const Work& w, float scale,
                                               Tiles& tiles, Softmax& state) {
    const AttentionParams& p = me.p;
    auto& out = tiles.out;
    state.sum[0] *= kUnshift;
    state.sum[1] *= kUnshift;
    scale_values(me, w, scale, out);
    const int row = me.warp * 16;
    const uint32_t place = me.shared.o + me.group * Kernel::kOBytes + row * 128;
    if constexpr (Kernel::kThroughSmem) {  // the TMA has taken the rows before
      if (me.lane == 0) device::tma_store_wait_read<0>();
      __syncwarp();
    }
    const int32_t first_row = w.row0 + me.group * 64 + row;
    if (p.out_dtype == DType::f16)
      return Store<DType::f16>::store(p, me.s, me.maps, w, first_row, out, state, place);
    Store<DType::bf16>::store(p, me.s, me.maps, w, first_row, out, state, place);
  }

  // 5. Main loop
  // The scale of the values of its work, asked for before O is there.
  static __device__ __forceinline__ float value_scale(const Lane& me, const Place& at) {
    Work w;
    device::load_shared(w, mine(me, at));
    return me.p.float8.of_value(w.batch, head_kv(me, w), 0) * kUnshift;
  }

  static __device__ __forceinline__ void give_out(const Lane& me, const Place& at, Tiles& tiles,
                                                  int v_stage, float scale, Softmax& state) {
    me.release(me.shared.v_empty(v_stage));
    add_product(state, tiles);
    Work w;
    device::load_shared(w, mine(me, at));
    leave(me, w, scale, tiles, state);
  }

  static __device__ __forceinline__ void run(const Lane& me) {
    using namespace device;
    Place at;
    const Operands from(me.shared, me.group);
    Tiles tiles;
    Softmax state;
    if (me.group == 0) named_barrier_arrive(1, 256);
    bool at_work = false;
#pragma unroll 1
    while (true) {
      const bool more = Store<DType::bf16>::find_more(me.p, me.s, me.shared, me.group, at.slot);
      if constexpr (kOutFirst) {
        if (!more) break;
        begin_tile(me, from, tiles, at);
      } else {
        const int v_stage = at.ring.stage();
        float scale = 1.0f;
        if (at_work) {
          await_last(me, at);
          at.ring.next();
          scale = value_scale(me, at);
        }
        join_tiles(me, from, tiles, at, v_stage, more);
        if (at_work) give_out(me, at, tiles, v_stage, scale, state);
      }
      Work w;
      take_work(me, at, w);
      find_visible(me, w);
      const float factor = exponent_factor(me, w);
      state = Softmax();
      wgmma_wait<0>();
      pin(tiles.scores);
      if (!more) break;
      at_work = true;
#pragma unroll
      for (int i = 0; i < kOutCount; ++i) tiles.out[i] = 0.0f;
      const float to_log2 = tile_factor(me, at, factor);
      me.release(me.shared.k_empty(at.ring.stage()));
      int tile = w.range.end - 1;
      weigh_first(me, tiles, at, w, tile, state, to_log2);
      auto step = [&](bool masked) { add_tile(me, from, tiles, at, tile, masked, state, factor); };
      walk_tiles(me, at, w, tile, step);
      me.release(me.shared.q_empty(at.q_ring.stage()));
      at.q_ring.next();
      if constexpr (kOutFirst) {
        await_last(me, at);
        const float scale = value_scale(me, at);
        end_tile(me, from, tiles, at.ring.stage());
        give_out(me, at, tiles, at.ring.stage(), scale, state);
        at.ring.next();
        release_slot(me, at);
      }
    }
    if constexpr (Kernel::kThroughSmem) {
      if (me.lane == 0) tma_store_wait_read<0>();
    }
  }
};

}  // namespace cuattn
