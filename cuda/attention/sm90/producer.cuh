// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup of forward.cuh: one warp draws work items, one (three where keys are in
// blocks) brings Q, K and V by TMA, one a bias, two or four draw what dropout keeps. Next: consumer.cuh, who
// multiplies.
#pragma once

#include "cuattn/device/dropout_sm90.cuh"
#include "cuda/attention/sm90/boxes.cuh"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/store.cuh"

namespace cuattn {

// Kernel: a ForwardSm90, for its sizes and its shared storage.
template <class Kernel>
struct ProducerSm90 {
  using Shared = typename Kernel::Shared;
  using Work = Sm90Work;
  using Ids = typename Kernel::Ids;
  using Bias = typename Kernel::Bias;
  static constexpr Tile kTile = Kernel::kTile;
  static constexpr int kQStages = Kernel::kQStages, kLag = Kernel::kLag;
  static constexpr int kPanelsQk = Kernel::kPanelsQk, kPanelsV = Kernel::kPanelsV;

  template <bool kPages, int kPanels>
  using KeyBox =
      typename device::Either<kPages, PageBox<kTile.n, kPanels>, RowBox<kTile.n, kPanels>>::Type;

  // One thread keeps the rings full. Where keys are in blocks, three warps: a box for each lane,
  // for a warp issues one after the other.
  template <bool kPages>
  static __device__ __forceinline__ void load_tiles(const AttentionParams& p, const Sm90Schedule& s,
                                                    const Sm90Maps& maps, const Shared& shared,
                                                    int loader = 0) {
    const bool speaks = !kPages || threadIdx.x % 32 == 0;  // for its warp
    const bool leads = loader == 0 && speaks;
    if (leads) {
      device::tma_prefetch(&maps.q);
      device::tma_prefetch(&maps.k);
      device::tma_prefetch(&maps.v);
    }
    device::Ring<kTile.stages> k_ring(1), v_ring(1);
    device::Ring<kQStages> q_ring(1);
    device::Ring<2> slot(0);
    auto load_keys = [&](const auto& box, const device::TensorMap& map, uint32_t smem,
                         uint32_t empty, uint32_t full, auto& ring) {
      device::barrier_wait(empty + 8 * ring.stage(), ring.parity());
      if (leads) device::barrier_arrive_expect(full + 8 * ring.stage(), box.kBytes);
      if (kPages) __syncwarp();
      box.load(map, smem + ring.stage() * box.kBytes, full + 8 * ring.stage());
      ring.next();
    };
    const Ids ids{shared.ids(loader)};
    Work w;
    const int32_t packed = packed_heads<typename Kernel::Asked>(s.packed);
    auto load_queries = [&] {
      device::barrier_wait(shared.q_empty(q_ring.stage()), q_ring.parity());
      uint32_t full = shared.q_full(q_ring.stage());
      if (leads) device::barrier_arrive_expect(full, Kernel::kQBytes);
#pragma unroll
      for (int panel = 0; leads && panel < kPanelsQk; ++panel) {
        device::tma_load(shared.q + q_ring.stage() * Kernel::kQBytes + panel * kTile.m * 128,
                         &maps.q, full, panel * 64, 0, w.queries.start + w.row0 / packed, w.head,
                         p.cu_seqlens_q ? 0 : w.batch, device::kEvictFirst);
      }
      q_ring.next();
    };
    // With several Q tiles the next one travels while this one is at work.
    auto take_work = [&] {
      do {
        device::barrier_wait(shared.work_full(slot.stage()), slot.parity());
        device::load_shared(w, shared.work(slot.stage()));
        if (kPages) __syncwarp();  // every lane has read it
        if (speaks) device::barrier_arrive(shared.work_empty(slot.stage()));
        if (leads && w.kind == Work::kEmpty) device::barrier_arrive(shared.wanted());
        slot.next();
      } while (w.kind == Work::kEmpty);
      if (kQStages > 1 && w.kind == Work::kFull) load_queries();
    };
    take_work();
    while (w.kind != Work::kNone) {
      const Sm90Keys keys(p, s, w);
      const int first = w.range.begin, last = w.range.end - 1;
      const typename Kernel::Walk walk(p, w.list);
      for (int tile = last; kPages && tile > last - Ids::kAhead; --tile) {
        ids.ask(p, keys, s, tile, first);
      }
#pragma unroll 1
      for (int tile = last; tile >= first - kLag; --tile) {
        if (tile >= first) {
          if (kPages) {
            ids.ask(p, keys, s, tile - Ids::kAhead, first);
            ids.await();
          }
          const KeyBox<kPages, kPanelsQk> k(p, keys, s, ids.slot(tile),
                                            walk.at(tile).tile * kTile.n, loader);
          load_keys(k, maps.k, shared.k, shared.k_empty(0), shared.k_full(0), k_ring);
          if (kQStages == 1 && tile == last) load_queries();
          if (leads && tile == min(last, first + Kernel::kWantedBefore)) {
            device::barrier_arrive(shared.wanted());
          }
        }
        if (tile + kLag <= last) {
          const KeyBox<kPages, kPanelsV> v(p, keys, s, ids.slot(tile + kLag),
                                           walk.at(tile + kLag).tile * kTile.n, loader);
          load_keys(v, maps.v, shared.v, shared.v_empty(0), shared.v_full(0), v_ring);
        }
      }
      take_work();
    }
  }

  // One thread brings what each group adds to its scores.
  static __device__ __forceinline__ void load_bias(const Sm90Schedule& s, const Sm90Maps& maps,
                                                   const Shared& shared) {
    device::tma_prefetch(&maps.bias);
    device::Ring<2> slot(0);
    uint32_t parity = 1;
    while (true) {
      Work w;
      device::barrier_wait(shared.work_full(slot.stage()), slot.parity());
      device::load_shared(w, shared.work(slot.stage()));
      device::barrier_arrive(shared.work_empty(slot.stage()));
      slot.next();
      if (w.kind == Work::kNone) break;
      if (w.kind == Work::kEmpty) continue;
      for (int tile = w.range.end - 1; tile >= w.range.begin; --tile) {
        for (int group = 0; group < Kernel::kConsumers; ++group) {
          device::barrier_wait(shared.bias_empty(group), parity);
          device::barrier_arrive_expect(shared.bias_full(group), Bias::kBytes / Kernel::kConsumers);
          for (int panel = 0; panel < Bias::kPanels; ++panel) {
            device::tma_load(shared.bias() + (panel * kTile.m + group * 64) * 128, &maps.bias,
                             shared.bias_full(group), tile * kTile.n + panel * 64,
                             w.row0 + group * 64, w.head * s.bias_heads, w.batch * s.bias_batches,
                             0, device::kEvictNormal);
          }
        }
        parity ^= 1;
      }
    }
  }

  // Dropout: a warp draws every kDrawers-th part of a tile, 32 rows of 64 keys.
  static __device__ __forceinline__ void draw(const AttentionParams& p, const Shared& shared,
                                              int drawer) {
    static_assert(!Kernel::kDrops || (kTile.m % 32 == 0 && kTile.n % 64 == 0));
    constexpr int kRowParts = kTile.m / 32, kParts = kRowParts * device::kept_words(kTile.n);
    device::Ring<2> slot(0);
    device::Ring<kTile.stages> ring(1);
    while (true) {
      Work w;
      device::barrier_wait(shared.work_full(slot.stage()), slot.parity());
      device::load_shared(w, shared.work(slot.stage()));
      __syncwarp();  // every lane has read it
      if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.work_empty(slot.stage()));
      slot.next();
      if (w.kind == Work::kNone) break;
      if (w.kind == Work::kEmpty) continue;
      const device::TileDropout dropout(p, w.batch, w.head);
#pragma unroll 1
      for (int tile = w.range.end - 1; tile >= w.range.begin; --tile) {
        device::barrier_wait(shared.kept_empty(ring.stage()), ring.parity());
#pragma unroll 1
        for (int part = drawer; part < kParts; part += Kernel::kDrawers) {
          const int rows = part % kRowParts * 32, word = part / kRowParts;
          dropout.template draw_rows<4>(shared.kept(ring.stage()) + 8 * (word * kTile.m + rows),
                                        w.row0 + rows, tile * kTile.n + word * 64);
        }
        __syncwarp();  // every lane has written its bits
        if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.kept_full(ring.stage()));
        ring.next();
      }
    }
  }
};

}  // namespace cuattn
