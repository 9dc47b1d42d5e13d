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
#include "cuda/attention/sm90/queries.cuh"
#include "cuda/attention/sm90/schedule.cuh"

namespace cuattn {

// Kernel: a ForwardSm90, for its sizes and its shared storage.
template <class Kernel>
struct RotateSm90 {
  using Shared = typename Kernel::Shared;
  using Work = Sm90Work;
  static constexpr DType kType = Kernel::kOperands;
  static constexpr int kRows = Kernel::kTile.m, kThreads = 32 * Kernel::kRotators;
  static constexpr int kAtOnce = 2;  // rows of a thread, and as many whose angles travel

  // Where the rows of a tile stand in the tables.
  struct Places {
    const int64_t* positions;  // of the sequence, or nullptr
    int32_t row0, last;        // of the tile; of the sequence's queries
    int32_t ahead;             // keys - queries

    __device__ Places(const AttentionParams& p, const Sm90Schedule& s, const Work& w)
        : positions(s.rotation.positions),
          row0(w.row0),
          last(w.queries.used - 1),
          ahead(w.keys.used - w.queries.used) {
      if (p.kv_start != nullptr) ahead += static_cast<int32_t>(w.keys.start);
      if (positions == nullptr) return;
      positions += p.cu_seqlens_q != nullptr ? w.queries.start * s.rotation.positions_seq
                                             : w.batch * s.rotation.positions_batch;
    }
    // Of some rows at once. Whatever lies in device memory, rows of the tables result; of rows
    // without a query that of the last one's.
    __device__ __forceinline__ void find(const Sm90Schedule& s, int32_t (&rows)[kAtOnce]) const {
      const QueryRotation& r = s.rotation;
#pragma unroll
      for (int32_t& row : rows) row += row0;
      if (s.packed > 1)
        for (int32_t& row : rows) row /= s.packed;
#pragma unroll
      for (int32_t& row : rows) row = min(row, last);
      if (positions != nullptr) {
#pragma unroll
        for (int32_t& row : rows) {
          const int64_t place = positions[row * r.positions_seq];
          row = place < 0 ? 0 : static_cast<int32_t>(min(place, int64_t{r.max_position - 1}));
        }
      } else {
#pragma unroll
        for (int32_t& row : rows) row = min(max(row + ahead, 0), r.max_position - 1);
      }
    }
  };

  // What turns four pairs of some rows.
  struct Angles {
    float4 cos[kAtOnce], sin[kAtOnce];
  };

  // Four elements of each row of a tile, from a column on.
  struct Column {
    uint32_t first, chunk;  // in row 0, without its chunk of 16 bytes; that
    __device__ Column(uint32_t tile, int column)
        : first(tile + column / 64 * (kRows * 128) + column % 8 * 2), chunk(column / 8 % 8) {}
    __device__ __forceinline__ uint32_t of(uint32_t row) const {
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

  // What a thread does in each tile: the same four pairs of every `step`-th row.
  struct Share {
    Places places;
    const float *cos, *sin;  // of its pairs
    Column low, high;        // of their elements, end to end where interleaved
    int first, step, last;   // rows

    __device__ Share(const AttentionParams& p, const Sm90Schedule& s, const Work& w, uint32_t tile,
                     int piece, int first, int step)
        : places(p, s, w),
          cos(s.rotation.cos + 4 * piece),
          sin(s.rotation.sin + 4 * piece),
          low(tile, s.rotation.interleaved ? 8 * piece : 4 * piece),
          high(tile, s.rotation.interleaved ? 8 * piece + 4 : 4 * piece + s.rotation.half),
          first(first),
          step(step),
          last(kRows - 1 - (kRows - 1 - first) % step) {}

    __device__ __forceinline__ int row(int at, int i) const { return min(at + i * step, last); }

    // The loads travel together. Behind the last row those of the last.
    __device__ __forceinline__ void ask(const Sm90Schedule& s, int at, Angles& to) const {
      int32_t place[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) place[i] = row(at, i);
      places.find(s, place);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        to.cos[i] =
            __ldg(reinterpret_cast<const float4*>(cos + int64_t{place[i]} * s.rotation.cos_stride));
        to.sin[i] =
            __ldg(reinterpret_cast<const float4*>(sin + int64_t{place[i]} * s.rotation.sin_stride));
      }
    }

    // All are read before one is written: behind the last row it is turned more than once, into the
    // same.
    template <bool kNeighbours>
    __device__ __forceinline__ void turn(int at, const Angles& by) const {
      uint2 a[kAtOnce], b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        device::load_shared(a[i], low.of(row(at, i)));
        device::load_shared(b[i], high.of(row(at, i)));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 cos = by.cos[i], sin = by.sin[i];
        if constexpr (kNeighbours) {
          turn_neighbours(a[i].x, cos.x, sin.x);
          turn_neighbours(a[i].y, cos.y, sin.y);
          turn_neighbours(b[i].x, cos.z, sin.z);
          turn_neighbours(b[i].y, cos.w, sin.w);
        } else {
          turn_halves(a[i].x, b[i].x, {cos.x, cos.y}, {sin.x, sin.y});
          turn_halves(a[i].y, b[i].y, {cos.z, cos.w}, {sin.z, sin.w});
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        device::store_shared(low.of(row(at, i)), a[i]);
        device::store_shared(high.of(row(at, i)), b[i]);
      }
    }

    template <bool kNeighbours>
    __device__ __forceinline__ void turn_all(const Sm90Schedule& s) const {
      Angles next;
      ask(s, first, next);
#pragma unroll 1
      for (int at = first; at < kRows; at += kAtOnce * step) {
        const Angles now = next;
        ask(s, at + kAtOnce * step, next);  // they travel while these turn
        turn<kNeighbours>(at, now);
      }
    }
  };

  static __device__ __forceinline__ void turn_tile(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Work& w, uint32_t tile, int thread) {
    const int pieces = s.rotation.half / 4, step = kThreads / pieces, first = thread / pieces;
    if (first >= step) return;  // as many threads are left over
    const Share share(p, s, w, tile, thread % pieces, first, step);
    if (s.rotation.interleaved) {
      share.template turn_all<true>(s);
    } else {
      share.template turn_all<false>(s);
    }
  }

  // They bring Q themselves, as soon as its work is drawn. Note: brought by who brings keys it comes when
  // those of the tile before are there, which is too late to be turned meanwhile.
  static __device__ __forceinline__ void run(const AttentionParams& p, const Sm90Schedule& s,
                                             const Sm90Maps& maps, const Shared& shared,
                                             int rotator) {
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
      if (rotator == 0 && lane == 0) {
        device::barrier_wait(shared.q_empty(ring.stage()), ring.parity() ^ 1);
        load_sm90_queries<Kernel>(p, s, maps, shared, w, ring.stage(), shared.q_raw(ring.stage()));
      }
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
