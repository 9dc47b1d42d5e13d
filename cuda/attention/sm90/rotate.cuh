// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of Q in shared memory, by the two warps of the producers that forward.cuh leaves
// idle: between the TMA, which brings a tile, and the groups, which multiply it. It costs no memory
// traffic but the tables', and no time where the next tile of Q travels while this one is at work.
// Source: arXiv:2104.09864. The bits are those of cuda/fused/rope.cu.
//
//   TMA       | Q0 | Q1 |      | Q2 |          (a stage each)
//   rotators       | Q0 | Q1 |      | Q2 |     q_raw -> q_full
//   groups              |  Q0 K V       |  Q1 K V      |
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuattn/device/rope.cuh"
#include "cuda/attention/sm90/schedule.cuh"

namespace cuattn {

// Kernel: a ForwardSm90, for its sizes and its shared storage.
template <class Kernel>
struct RotateSm90 {
  using Shared = typename Kernel::Shared;
  using Work = Sm90Work;
  static constexpr DType kType = Kernel::kOperands;
  static constexpr int kRows = Kernel::kTile.m, kThreads = 32 * Kernel::kRotators;
  static constexpr int kAtOnce = Kernel::kConsumers == 3 ? 1 : 2;  // rows of a thread, as registers allow

  // Where the rows of a tile stand in the tables.
  struct Places {
    int64_t first_position;  // in `positions`, of the sequence
    int32_t row0, queries;   // of the tile; of the sequence
    int32_t ahead;           // keys - queries

    __device__ Places(const AttentionParams& p, const Sm90Schedule& s, const Work& w)
        : first_position(p.cu_seqlens_q != nullptr ? w.queries.start * s.rotation.positions_seq
                                                   : w.batch * s.rotation.positions_batch),
          row0(w.row0),
          queries(w.queries.used),
          ahead(w.keys.used - w.queries.used) {
      if (p.kv_start != nullptr) ahead += static_cast<int32_t>(w.keys.start);
    }
    // Whatever lies in device memory, a row of the tables results.
    __device__ __forceinline__ int32_t of(const Sm90Schedule& s, int row) const {
      int32_t token = row0 + row;
      if (s.packed > 1) token /= s.packed;
      token = min(token, queries - 1);  // the others are nobody's
      int64_t place = token + ahead;
      if (s.rotation.positions != nullptr)
        place = s.rotation.positions[first_position + token * s.rotation.positions_seq];
      return place < 0 ? 0 : static_cast<int32_t>(min(place, int64_t{s.rotation.max_position - 1}));
    }
  };

  // What turns four pairs.
  struct Angles {
    float4 cos, sin;
    __device__ Angles() {}
    __device__ Angles(const QueryRotation& r, int64_t place, int piece)
        : cos(__ldg(reinterpret_cast<const float4*>(r.cos + place * r.cos_stride) + piece)),
          sin(__ldg(reinterpret_cast<const float4*>(r.sin + place * r.sin_stride) + piece)) {}
  };

  // Four elements of each row of a tile, from a column on.
  struct Column {
    uint32_t first, chunk;  // in row 0, without its chunk of 16 bytes; that
    __device__ Column(uint32_t tile, int column)
        : first(tile + column / 64 * (kRows * 128) + column % 8 * 2), chunk(column / 8 % 8) {}
    __device__ __forceinline__ uint32_t of(int row) const {
      return first + row * 128 + ((chunk ^ row % 8) << 4);
    }
  };

  // Elements 0 and 1 of a register.
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    if constexpr (kType == DType::bf16) return device::unpack_bf16(pair);
    return {device::to_float(device::Half{static_cast<uint16_t>(pair)}),
            device::to_float(device::Half{static_cast<uint16_t>(pair >> 16)})};
  }

  static __device__ __forceinline__ void turn_halves(uint32_t& low, uint32_t& high, float2 cos,
                                                     float2 sin) {
    const float2 a = unpack(low), b = unpack(high);
    const device::Rotated x = device::rotated(a.x, b.x, cos.x, sin.x);
    const device::Rotated y = device::rotated(a.y, b.y, cos.y, sin.y);
    low = device::pack2<kType>(x.a, y.a);
    high = device::pack2<kType>(x.b, y.b);
  }
  static __device__ __forceinline__ void turn_neighbours(uint32_t& pair, float cos, float sin) {
    const float2 a = unpack(pair);
    const device::Rotated x = device::rotated(a.x, a.y, cos, sin);
    pair = device::pack2<kType>(x.a, x.b);
  }

  static __device__ __forceinline__ void turn(const Angles& by, bool interleaved, uint32_t low_at,
                                              uint32_t high_at) {
    uint2 low, high;
    device::load_shared(low, low_at);
    device::load_shared(high, high_at);
    if (interleaved) {
      turn_neighbours(low.x, by.cos.x, by.sin.x);
      turn_neighbours(low.y, by.cos.y, by.sin.y);
      turn_neighbours(high.x, by.cos.z, by.sin.z);
      turn_neighbours(high.y, by.cos.w, by.sin.w);
    } else {
      turn_halves(low.x, high.x, {by.cos.x, by.cos.y}, {by.sin.x, by.sin.y});
      turn_halves(low.y, high.y, {by.cos.z, by.cos.w}, {by.sin.z, by.sin.w});
    }
    device::store_shared(low_at, low);
    device::store_shared(high_at, high);
  }

  // Thread `thread` of the rotators turns the same four pairs of every rows_on-th row.
  static __device__ __forceinline__ void turn_tile(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Work& w, uint32_t tile, int thread) {
    const QueryRotation& r = s.rotation;
    const Places places(p, s, w);
    const int pieces = r.half / 4, piece = thread % pieces, rows_on = kThreads / pieces;
    const Column low(tile, r.interleaved ? 8 * piece : 4 * piece);
    const Column high(tile, r.interleaved ? 8 * piece + 4 : 4 * piece + r.half);
    const int first = thread / pieces;
    if (first >= rows_on) return;  // as many threads are left over
#pragma unroll 1
    for (int row = first; row < kRows; row += kAtOnce * rows_on) {
      Angles by[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)  // the loads travel together; behind the last row junk
        by[i] = Angles(r, places.of(s, row + i * rows_on), piece);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = row + i * rows_on;
        if (at < kRows) turn(by[i], r.interleaved, low.of(at), high.of(at));
      }
    }
  }

  static __device__ __forceinline__ void run(const AttentionParams& p, const Sm90Schedule& s,
                                             const Shared& shared, int rotator) {
    device::Ring<2> slot(0);
    device::Ring<Kernel::kQStages> ring(0);
    const int lane = threadIdx.x % 32;
    while (true) {
      Work w;
      device::barrier_wait(shared.work_full(slot.stage()), slot.parity());
      device::load_shared(w, shared.work(slot.stage()));
      __syncwarp();  // every lane has read it
      if (lane == 0) device::barrier_arrive(shared.work_empty(slot.stage()));
      slot.next();
      if (w.kind == Work::kNone) break;
      if (w.kind == Work::kEmpty) continue;
      device::barrier_wait(shared.q_raw(ring.stage()), ring.parity());
      turn_tile(p, s, w, shared.q + ring.stage() * Kernel::kQBytes, 32 * rotator + lane);
      device::async_proxy_fence();
      __syncwarp();  // every lane has written its pieces
      if (lane == 0) device::barrier_arrive(shared.q_full(ring.stage()));
      ring.next();
    }
  }
};

}  // namespace cuattn
