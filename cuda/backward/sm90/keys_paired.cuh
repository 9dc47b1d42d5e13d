// SPDX-License-Identifier: Apache-2.0
// The keys pass where dK and dV of 64 keys are too many registers for one group of consumers
// (head_dim from 192 on): both groups work on the same keys, and P^T goes from one to the other
// through shared memory, in the order of the accumulators: a thread reads what the same thread of
// the other group wrote. Else as keys.cuh.
//
//   group 0 | S0 | P0 ->  | S1  dV += P0 dO0 | P1 ->  | S2  dV += P1 dO1 | ..
//   group 1 | dP0 | P0, dx0 | dP1  dK += dx0 Q0 | P1, dx1 | dP2  dK += dx1 Q1 | ..
#pragma once

#include "cuda/backward/sm90/key_tiles.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
struct PairedKeysPass : KeyTiles<kType, kHeadDim, kHeadDimV, kMask, kForm> {
  using Base = KeyTiles<kType, kHeadDim, kHeadDimV, kMask, kForm>;
  using typename Base::Shared;
  using typename Base::Work;
  static constexpr Tile kTile = Base::kTile;
  using Kept = device::Kept<true, kTile.m>;
  static_assert(kTile.n == 64 && kTile.m <= 64, "a thread has one word of what dropout keeps");
  // Named barriers, and the next ones for the second buffer: it is there, it has been read.
  static constexpr uint32_t kFilled = 6, kRead = 8, kBoth = 256;

  // The tiles of all heads, one after the other; both groups walk the same way.
  struct Walk {
    int32_t head, tile, begin, end, left, stage_number = 0;
    __device__ __forceinline__ explicit Walk(const Work& work)
        : head(work.kv_head * work.group),
          tile(work.range.begin),
          begin(work.range.begin),
          end(work.range.end),
          left(work.group * max(work.range.end - work.range.begin, 0)) {}
    __device__ __forceinline__ void next() {
      ++stage_number;
      --left;
      if (++tile == end) {
        tile = begin;
        ++head;
      }
    }
    __device__ __forceinline__ uint32_t buffer() const { return stage_number & 1; }
    __device__ __forceinline__ bool is_masked(const Work& work) const {
      return tile < work.range.full_begin || tile >= work.range.full_end;
    }
    // Rows behind the last one of the sequence may hold anything.
    __device__ __forceinline__ bool clears(const Work& work) const {
      return work.clears && (tile + 1) * kTile.m > work.queries.used;
    }
  };

  static __device__ __forceinline__ void release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) device::barrier_arrive(barrier);
  }
  static __device__ __forceinline__ uint32_t crossing(const Shared& shared, uint32_t buffer) {
    return shared.crossing + buffer * Shared::kCrossingBytes + threadIdx.x % 128 * 16;
  }

  // P^T (with the derivative of the score) as float16, which suits what is at most 1.
  static __device__ __forceinline__ void send(uint32_t to, const float (&weights)[kTile.m / 2],
                                              const uint32_t (&probs)[kTile.m / 4], uint32_t kept) {
    constexpr bool kSame = kType == DType::f16 && kForm == ScoreForm::plain;
#pragma unroll
    for (int chunk = 0; chunk < kTile.m / 16; ++chunk) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * chunk + i;
        words[i] =
            kSame ? probs[at] : device::pack2<DType::f16>(weights[2 * at], weights[2 * at + 1]);
        if constexpr (Base::kDrops) words[i] |= ~Kept::mask(kept, at / 2, at % 2) & 0x80008000u;
      }
      device::store_shared16(to + chunk * 2048, {words[0], words[1], words[2], words[3]});
    }
  }
  // With dropout the sign tells what is not kept.
  static __device__ __forceinline__ void receive(float (&weights)[kTile.m / 2], uint32_t from) {
#pragma unroll
    for (int chunk = 0; chunk < kTile.m / 16; ++chunk) {
      const uint4 read = device::load_shared16(from + chunk * 2048);
      const uint32_t words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const device::Half half{static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)};
        weights[8 * chunk + i] = device::to_float(half);
      }
    }
  }

  // Group 0: S and dV.
  static __device__ __forceinline__ void gather_dv(const BackwardParams& p, const Work& work,
                                                   const Shared& shared,
                                                   float (&dv)[kHeadDimV / 2]) {
    using namespace device;
    const AttentionParams& f = p.forward;
    Walk at(work);
    if (at.left == 0) return;
    const auto sight = Base::lane_sight(f, work, 0);
    Ring<kTile.stages> ring(0);
    float scores[kTile.m / 2];
    uint32_t probs[kTile.m / 4];
    auto multiply_scores = [&](int stage) {
      claim(scores);
      wgmma_fence();
      multiply_rows<kType, kHeadDim, kTile.n, kTile.m>(scores, shared.k, shared.q_stage(stage));
      wgmma_commit();
    };
    barrier_wait(shared.q_full(0), 0);
    pin(dv);
    multiply_scores(0);
    uint32_t behind = 0;  // the dO whose product is under way, or nothing
#pragma unroll 1
    for (; at.left > 0; at.next()) {
      const int stage = ring.stage();
      const uint32_t parity = ring.parity(), dout = shared.dout_stage(stage);
      wgmma_wait<0>();
      pin(scores);
      pin(dv);
      pin(probs);
      if (behind != 0) release(behind);
      behind = shared.dout_empty(stage);
      typename Base::Mod mod(f, work.batch, at.head, work.queries.used, work.keys.used);
      Base::make_probs(scores, probs, f, work, mod, shared, stage, sight, at.tile,
                       at.is_masked(work));
      release(shared.q_empty(stage));
      if constexpr (Base::kDrops) barrier_wait(shared.dout_full(stage), parity);
      named_barrier_sync(kRead + at.buffer(), kBoth);
      if constexpr (Base::kDrops) {
        const uint32_t kept = Base::kept_of(shared, stage).word(0);
        send(crossing(shared, at.buffer()), scores, probs, kept);
        Kept::drop(kept, 0, probs);
      } else {
        send(crossing(shared, at.buffer()), scores, probs, 0);
      }
      named_barrier_arrive(kFilled + at.buffer(), kBoth);
      if constexpr (!Base::kDrops) barrier_wait(shared.dout_full(stage), parity);
      if (at.clears(work)) {
        clear_tile<kTile.m, Base::kPanelsV>(dout, work.queries.used - at.tile * kTile.m);
        finish_clearing(0);
      }
      ring.next();
      // Note: behind the last tile it multiplies junk, for a branch would serialise all products.
      if (at.left > 1) barrier_wait(shared.q_full(ring.stage()), ring.parity());
      pin(dv);
      pin(probs);
      multiply_scores(ring.stage());
      add_weighted<kType, kHeadDimV, kTile.m>(dv, probs, dout);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(scores);
    pin(dv);
    pin(probs);
  }

  // Group 1: dP and dK.
  static __device__ __forceinline__ void gather_dk(const BackwardParams& p, const Work& work,
                                                   const Shared& shared,
                                                   float (&dk)[kHeadDim / 2]) {
    using namespace device;
    Walk at(work);
    if (at.left == 0) return;
    Ring<kTile.stages> ring(0);
    float dout_v[kTile.m / 2];
    uint32_t grads[kTile.m / 4];
    auto multiply_dout = [&](int stage) {
      claim(dout_v);
      wgmma_fence();
      multiply_rows<kType, kHeadDimV, kTile.n, kTile.m>(dout_v, shared.v, shared.dout_stage(stage));
      wgmma_commit();
    };
    for (int buffer = 0; buffer < min(at.left, 2); ++buffer)
      named_barrier_arrive(kRead + buffer, kBoth);
    barrier_wait(shared.dout_full(0), 0);
    pin(dk);
    multiply_dout(0);
    uint32_t behind = 0;  // the Q whose product is under way, or nothing
#pragma unroll 1
    for (; at.left > 0; at.next()) {
      const int stage = ring.stage();
      const uint32_t parity = ring.parity(), q = shared.q_stage(stage);
      wgmma_wait<0>();
      pin(dout_v);
      pin(dk);
      pin(grads);
      if (behind != 0) release(behind);
      behind = shared.q_empty(stage);
      named_barrier_sync(kFilled + at.buffer(), kBoth);
      float weights[kTile.m / 2];
      receive(weights, crossing(shared, at.buffer()));
      if (at.left > 2) named_barrier_arrive(kRead + at.buffer(), kBoth);
      if constexpr (Base::kDrops) {
#pragma unroll
        for (int i = 0; i < kTile.m / 2; ++i) {
          if (__float_as_int(weights[i]) < 0) dout_v[i] = 0.0f;
          weights[i] = fabsf(weights[i]);
        }
      }
      Base::make_grads(dout_v, weights, shared.delta(stage), at.is_masked(work));
      pack<kType>(grads, dout_v);
      release(shared.dout_empty(stage));
      barrier_wait(shared.q_full(stage), parity);
      if (at.clears(work)) {
        clear_tile<kTile.m, Base::kPanelsQk>(q, work.queries.used - at.tile * kTile.m);
        finish_clearing(1);
      }
      ring.next();
      if (at.left > 1) barrier_wait(shared.dout_full(ring.stage()), ring.parity());
      pin(dk);
      pin(grads);
      multiply_dout(ring.stage());
      add_weighted<kType, kHeadDim, kTile.m>(dk, grads, q);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(dout_v);
    pin(dk);
    pin(grads);
  }

  static __device__ __forceinline__ void consume(const BackwardParams& p, const Work& work,
                                                 const Shared& shared, int group) {
    const AttentionParams& f = p.forward;
    if (group == 0) {
      float dv[kHeadDimV / 2];
#pragma unroll
      for (float& x : dv) x = 0.0f;
      gather_dv(p, work, shared, dv);
      Base::template store<kHeadDimV>(dv, Base::factor_of(f), p.dv, p.dv_strides, p.dv_dtype, work,
                                      0, f.head_dim_v);
    } else {
      float dk[kHeadDim / 2];
#pragma unroll
      for (float& x : dk) x = 0.0f;
      gather_dk(p, work, shared, dk);
      Base::template store<kHeadDim>(dk, f.scores.scale * Base::factor_of(f), p.dk, p.dk_strides,
                                     p.dk_dtype, work, 0, f.head_dim);
    }
  }
};

}  // namespace cuattn::backward
