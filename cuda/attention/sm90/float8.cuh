// SPDX-License-Identifier: Apache-2.0
// Flash attention forward on Hopper (sm_90a) over float8_e4m3fn q, k and v with scales: as
// forward.cuh, with products of e4m3 and P rounded to it. Values come by columns, or by rows, which
// two warps of the producer turn into columns (kByRows). Source: FlashAttention-3, arXiv:2407.08608,
// section 3.3; two levels of sums: DeepSeek-V3, arXiv:2412.19437, section 3.3.2. Next:
// float8_maps.cuh, the order of keys; float8_consumer.cuh, the main loop; docs/fp8.md.
//
//   producer   | Q K3  | K2 V3 | K1 V2 | K0 V1 | V0 | Q' K' | ...       (next query tile)
//   group 0    | QK3 | softmax | QK2 T=PV3 | softmax, O+=T | QK1 T=PV2 | ... | T=PV0 | O out | QK'
//   group 1         | QK3 | softmax | QK2 T=PV3 | softmax, ..         (the tensor cores alternate)
//
// With two levels above head_dim 64 T takes the registers of S, so that T=PV3, O+=T come before QK2. With
// sums of one level there is no T, O += PV, and the end is | O+=PV0 QK' | O out.
#pragma once

#include "cuattn/device/wgmma_float8_sm90.cuh"
#include "cuda/attention/sm90/float8_consumer.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMaskKind, ScoreKind kScore,
          bool kValuesByRows>
struct Float8Sm90 {
  // 1. Types and sizes
  static constexpr DType kCodes = kType;  // of q and k; P and V are e4m3
  static constexpr bool kInt8 = kType == DType::i8;
  static constexpr bool kHasParts = kScore == ScoreKind::parts;  // each 128 rows have a scale
  static constexpr bool kIsFast = kScore == ScoreKind::fast;     // sums of P V have one level
  static constexpr Tile kTile = sm90_float8_tile({kHeadDim, kHeadDimV}, kScore);
  static constexpr MaskKind kMask = kMaskKind;
  static constexpr int kQkColumns = kHeadDim, kVColumns = kHeadDimV;
  static constexpr int kConsumers = kTile.m / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kPanelsQk = (kHeadDim + 127) / 128;
  static constexpr int kQBytes = kTile.m * kPanelsQk * 128;  // of one stage
  static constexpr int kKBytes = kTile.n * kPanelsQk * 128;
  static constexpr bool kCounts = kIsFast;  // sums of rows of P are products with ones
  static constexpr int kPanelsV = (kTile.n + 127) / 128;  // of 128 keys
  static constexpr int kVPanelBytes = kHeadDimV * 128;
  static constexpr int kVBytes = kPanelsV * kVPanelBytes;
  static constexpr bool kThroughSmem = sm90_float8_sends_out({kHeadDim, kHeadDimV}, kScore);
  static constexpr int kOBytes = kThroughSmem ? 64 * kHeadDimV * 2 : 0;  // of a group
  static constexpr int kQStages = kSm90Float8QStages;
  static constexpr bool kByRows = kValuesByRows;  // so values lie, and are turned here
  static constexpr int kRawStages = kByRows ? kHeadDimV > 128 ? 3 : 6 : 0;
  static constexpr int kRawPanels = (kHeadDimV + 127) / 128;
  static constexpr int kRawBytes = kRawPanels * kTurnedRows * 128;  // of one stage
  static constexpr int kNoMore = -(1 << 30);  // rows of a stage that ends the kernel
  static constexpr int kSmemBytes =
      sm90_float8_smem_bytes({kHeadDim, kHeadDimV}, kScore) + kRawStages * kRawBytes;
  static_assert(kSmemBytes <= 227 * 1024);
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (kConsumers + 1));  // what a launch has, else it hangs
  static constexpr int kVisibleBytes = kConsumers * 128 * 16;
  static constexpr int kKeyAlign = kByRows ? 1 : kFloat8KeyAlign;
  static constexpr int kWantedBefore = 2;  // key tiles, before the last one of an item is loaded
  static_assert(kTile.n % 32 == 0);
  using Work = Sm90Work;
  using Asked = NoFunctor;
  using Consumer = ConsumerFloat8<Float8Sm90>;

  // 2. Shared storage, in address order: Q (stage, panel, m, 128); K (stage, panel, n, 128); V
  // (stage, panel, channel, 128 keys); rows of V as they come (stage, panel, 32, 128), if they are
  // turned; O (group, panel, 64, 64), if it leaves so; ones (8, 128); the keys that each thread's rows
  // see; barriers; the rows from each stage of rows on; the work items that the producer draws, and
  // each warp's copy.
  struct Shared {
    uint32_t q, k, v, raw, o, ones, barriers;
    __device__ explicit Shared(const void* base) {
      q = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      k = q + kQStages * kQBytes;
      v = k + kTile.stages * kKBytes;
      raw = v + kTile.stages * kVBytes;
      o = raw + kRawStages * kRawBytes;
      ones = o + kConsumers * kOBytes;
      barriers = device::opaque(ones + 1024 + kVisibleBytes);
    }
    __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
    __device__ uint32_t k_full(int s) const { return barrier(s); }
    __device__ uint32_t k_empty(int s) const { return barrier(kTile.stages + s); }
    __device__ uint32_t v_full(int s) const { return barrier(2 * kTile.stages + s); }
    __device__ uint32_t v_empty(int s) const { return barrier(3 * kTile.stages + s); }
    __device__ uint32_t q_full(int s) const { return other(s); }
    __device__ uint32_t q_empty(int s) const { return other(2 + s); }
    __device__ uint32_t work_full(int s) const { return other(4 + s); }
    __device__ uint32_t work_empty(int s) const { return other(6 + s); }
    __device__ uint32_t wanted() const { return other(8); }
    __device__ uint32_t other(int index) const { return barrier(4 * kTile.stages + index); }
    __device__ uint32_t raw_full(int s) const { return other(9 + s); }
    __device__ uint32_t raw_empty(int s) const { return other(9 + kRawStages + s); }
    __device__ uint32_t raw_rows(int s) const { return other(9 + 2 * kRawStages + s); }
    __device__ uint32_t work(int s) const {
      return other(9 + 3 * kRawStages) + s * static_cast<int>(sizeof(Work));
    }
    __device__ uint32_t copy(int warp) const { return work(2 + warp); }
    // What makes dot products of a stage's keys exponents in base 2, for a group's queries.
    __device__ uint32_t factor(int s, int group) const {
      return work(2 + 4 * kConsumers) + 4 * (s * kConsumers + group);
    }
    __device__ uint32_t visible(int thread) const { return barriers - kVisibleBytes + 16 * thread; }
  };
  static_assert(8 * (4 * kTile.stages + 9 + 3 * kRawStages) + (2 + 4 * kConsumers) * sizeof(Work) +
                    (kHasParts ? 4 * kTile.stages * kConsumers : 0) <=
                kSm90SmallBytes);
  static_assert(!kHasParts || kTile.n == kScaleRows);

  // 3. Roles. Values by columns: one thread loads Q and K, another V. By rows: one loads all three, and
  // two warps turn V. Another warp draws the work. `load(w, keys, row0, batch)`: of an item whose tile 0
  // begins at that row of memory.
  template <class Load>
  static __device__ __forceinline__ void each_item(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Shared& shared, bool asks, Load load) {
    device::Ring<2> slot(0);
#pragma unroll 1
    for (;; slot.next()) {
      Work w;
      device::barrier_wait(shared.work_full(slot.stage()), slot.parity());
      device::load_shared(w, shared.work(slot.stage()));
      device::barrier_arrive(shared.work_empty(slot.stage()));
      if (w.kind == Work::kNone) break;
      if (w.kind == Work::kFull) {
        const Sm90Keys keys(p, s, w);
        load(w, keys, keys.start - keys.start % kKeyAlign, p.cu_seqlens_kv ? 0 : keys.batch);
      } else if (asks) {
        device::barrier_arrive(shared.wanted());
      }
    }
  }

  // What makes dot products of codes exponents in base 2: for each group's 64 queries of an item, which
  // have one scale, and with a key tile's, which has one.
  struct Factors {
    float of_queries[kConsumers];
    __device__ __forceinline__ Factors(const AttentionParams& p, const Sm90Schedule& s,
                                       const Work& w) {
      if constexpr (!kHasParts) return;
#pragma unroll
      for (int group = 0; group < kConsumers; ++group) {
        const int32_t row = min((w.row0 + group * 64) / s.packed, w.queries.used - 1);
        of_queries[group] =
            p.float8.of_query(w.batch, w.head * s.packed, row) * (p.scores.scale * device::kLog2e);
      }
    }
    static __device__ __forceinline__ float of_tile(const AttentionParams& p, const Work& w,
                                                    int32_t head_kv, int tile) {
      return kHasParts ? p.float8.of_key(w.batch, head_kv, tile * kTile.n) : 1.0f;
    }
    __device__ __forceinline__ void store(const Shared& shared, int stage, float of_keys) const {
      constexpr float kLeast = 1e-30f;  // a scale of 0 gives what zeros give
#pragma unroll
      for (int group = 0; group < kConsumers; ++group) {
        const float factor = of_queries[group] * of_keys;
        device::store_shared(shared.factor(stage, group),
                             __float_as_uint(fabsf(factor) < kLeast ? kLeast : factor));
      }
    }
  };

  static __device__ __forceinline__ void load_queries_and_keys(const AttentionParams& p,
                                                               const Sm90Schedule& s,
                                                               const Float8Maps& maps,
                                                               const Shared& shared) {
    using namespace device;
    tma_prefetch(&maps.q);
    tma_prefetch(&maps.k);
    if constexpr (kByRows) tma_prefetch(&maps.v);
    device::Ring<kTile.stages> ring(1);
    device::Ring<kQStages> q_ring(1);
    device::Ring<kByRows ? kRawStages : 1> raw(1);
    auto load_q = [&](const Work& w) {
      barrier_wait(shared.q_empty(q_ring.stage()), q_ring.parity());
      uint32_t full = shared.q_full(q_ring.stage());
      barrier_arrive_expect(full, kQBytes);
#pragma unroll
      for (int panel = 0; panel < kPanelsQk; ++panel) {
        tma_load(shared.q + q_ring.stage() * kQBytes + panel * kTile.m * 128, &maps.q, full,
                 panel * 128, 0, w.queries.start + w.row0 / s.packed, w.head,
                 p.cu_seqlens_q ? 0 : w.batch, kEvictFirst);
      }
      q_ring.next();
    };
    each_item(
        p, s, shared, true, [&](const Work& w, const Sm90Keys& keys, int32_t row0, int32_t batch) {
          load_q(w);
          const Factors factors(p, s, w);
          const int first = w.range.begin, last = w.range.end - 1;
          float of_keys = factors.of_tile(p, w, keys.head, last);
#pragma unroll 1
          for (int tile = last; tile >= first; --tile) {
            barrier_wait(shared.k_empty(ring.stage()), ring.parity());
            uint32_t full = shared.k_full(ring.stage()), to = shared.k + ring.stage() * kKBytes;
            int32_t row = row0 + tile * kTile.n;
            if constexpr (kHasParts) factors.store(shared, ring.stage(), of_keys);
            barrier_arrive_expect(full, kKBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsQk; ++panel, to += kTile.n * 128) {
              if (kByRows || tile == last) {  // in its natural order
                tma_load(to, &maps.k, full, panel * 128, row, keys.head, batch, 0, kEvictLast);
              } else if constexpr (!kByRows) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  tma_load(to + half * kTile.n * 64, &maps.fours, full, panel * 128, 2 * half,
                           row / 4, keys.head, batch, kEvictLast);
                }
              }
            }
            ring.next();
            of_keys = factors.of_tile(p, w, keys.head, max(tile - 1, first));  // comes meanwhile
            if (tile == min(last, first + kWantedBefore)) barrier_arrive(shared.wanted());
            if constexpr (kByRows) {
#pragma unroll 1
              for (int at = 0; at < kTile.n; at += kTurnedRows, raw.next()) {
                barrier_wait(shared.raw_empty(raw.stage()), raw.parity());
                if (at == 0) {
                  store_shared(shared.raw_rows(raw.stage()),
                               static_cast<uint32_t>(keys.used - tile * kTile.n));
                }
                const uint32_t raw_full = shared.raw_full(raw.stage());
                barrier_arrive_expect(raw_full, kRawBytes);
#pragma unroll
                for (int panel = 0; panel < kRawPanels; ++panel) {
                  tma_load(shared.raw + raw.stage() * kRawBytes + panel * kTurnedRows * 128,
                           &maps.v, raw_full, panel * 128, row + at, keys.head, batch, 0,
                           kEvictLast);
                }
              }
            }
          }
        });
    if constexpr (kByRows) {
      barrier_wait(shared.raw_empty(raw.stage()), raw.parity());
      store_shared(shared.raw_rows(raw.stage()), static_cast<uint32_t>(kNoMore));
      barrier_arrive(shared.raw_full(raw.stage()));
    }
  }

  static __device__ __forceinline__ void load_values(const AttentionParams& p,
                                                     const Sm90Schedule& s, const Float8Maps& maps,
                                                     const Shared& shared) {
    using namespace device;
    tma_prefetch(&maps.v);
    device::Ring<kTile.stages> ring(1);
    each_item(
        p, s, shared, false, [&](const Work& w, const Sm90Keys& keys, int32_t row0, int32_t batch) {
#pragma unroll 1
          for (int tile = w.range.end - 1; tile >= w.range.begin; --tile) {
            barrier_wait(shared.v_empty(ring.stage()), ring.parity());
            uint32_t full = shared.v_full(ring.stage());
            barrier_arrive_expect(full, kVBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsV; ++panel) {
              tma_load(shared.v + ring.stage() * kVBytes + panel * kVPanelBytes, &maps.v, full,
                       row0 + tile * kTile.n + panel * 128, 0, keys.head, batch, 0, kEvictLast);
            }
            ring.next();
          }
        });
  }

  // Values by rows: two warps turn what has come, 16 rows of each 32. With the first stage of a tile comes
  // how many rows the sequence has from there on. Whatever these warps do delays the consumers' on the same
  // schedulers.
  static __device__ __forceinline__ void turn_values(const Shared& shared) {
    using namespace device;
    PackedRing<kTile.stages> ring(1);
    PackedRing<kRawStages> raw(0);
    static_assert(kTile.n <= 128);
    const RowTurner<kHeadDimV> turner(shared.raw, shared.v);
    auto turn_tile = [&](auto cut, int rows) {
#pragma unroll(cut.value ? 1 : kTile.n)
      for (int at = 0; at < kTile.n; at += kTurnedRows, raw.next()) {
        const uint32_t full = shared.raw_full(raw.stage());
        if (at > 0) barrier_wait(full, raw.parity());
        turner.template turn<cut.value>(raw.stage() * kRawBytes, ring.stage() * kVBytes, at,
                                        rows - at);
        __syncwarp();
        if (elect_one()) barrier_arrive(full + 8 * kRawStages);  // raw_empty
      }
    };
#pragma unroll 1
    for (;; ring.next()) {
      barrier_wait(shared.raw_full(raw.stage()), raw.parity());
      const int rows = static_cast<int>(load_shared4(shared.raw_rows(raw.stage())));
      if (rows == kNoMore) break;
      barrier_wait(shared.v_empty(ring.stage()), ring.parity());
      if (rows >= kTile.n) {
        turn_tile(std::false_type{}, rows);
      } else {
        turn_tile(std::true_type{}, rows);
      }
      async_proxy_fence();
      __syncwarp();
      if (elect_one()) barrier_arrive(shared.v_full(ring.stage()));
    }
  }

  // 4. Eight rows of 128 bytes, K-major: the first is ones, the others are zeros.
  static __device__ __forceinline__ void fill_ones(const Shared& shared) {
    if (threadIdx.x < 64) {
      const uint32_t ones = threadIdx.x < 8 ? 0x38383838u : 0u;  // 1 in e4m3
      device::store_shared16(shared.ones + threadIdx.x * 16, uint4{ones, ones, ones, ones});
    }
    device::async_proxy_fence();
  }

  // 5. Kernel: nothing but the barriers and the split into roles.
  static __device__ __forceinline__ void run(const AttentionParams& p, const Sm90Schedule& s,
                                             const Float8Maps& maps, void* smem) {
    constexpr uint32_t kWarps = kConsumers * 4;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const Shared shared(smem);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        device::barrier_init(shared.q_full(i), 1);
        device::barrier_init(shared.q_empty(i), kWarps);
        device::barrier_init(shared.work_full(i), 1);
        device::barrier_init(shared.work_empty(i), kWarps + (kByRows ? 1 : 2));
      }
      for (int i = 0; i < kTile.stages; ++i) {
        device::barrier_init(shared.k_full(i), 1);
        device::barrier_init(shared.v_full(i), kByRows ? 2 : 1);
        device::barrier_init(shared.k_empty(i), kWarps);
        device::barrier_init(shared.v_empty(i), kWarps);
      }
      for (int i = 0; i < kRawStages; ++i) {
        device::barrier_init(shared.raw_full(i), 1);
        device::barrier_init(shared.raw_empty(i), 2);
      }
      device::barrier_init(shared.wanted(), 1);
      device::barrier_init_fence();
    }
    if constexpr (kCounts) fill_ones(shared);
    __syncthreads();
    if (group == 0) {
      device::registers_shrink<kProducerRegisters>();
      int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      if (warp == 1) {
        schedule_sm90_work<Float8Sm90>(p, s, Shared(smem));
      } else if (warp == 0 && device::elect_one()) {
        load_queries_and_keys(p, s, maps, Shared(smem));
      } else if (kByRows && warp >= 2) {
        if constexpr (kByRows) turn_values(Shared(smem));
      } else if (warp == 2 && device::elect_one()) {
        if constexpr (!kByRows) load_values(p, s, maps, Shared(smem));
      }
    } else {
      device::registers_grow<kConsumerRegisters>();
      Consumer::run({p, s, maps, shared, group - 1, static_cast<int>(threadIdx.x % 32),
                     static_cast<int>(threadIdx.x / 32 % 4)});
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    float8_sm90_kernel(const __grid_constant__ AttentionParams params,
                       const __grid_constant__ Sm90Schedule schedule,
                       const __grid_constant__ Float8Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, schedule, maps, smem);
}

// 6. Launcher
template <class Kernel>
void launch_float8_sm90(const AttentionParams& p, const AttentionSchedule& schedule,
                        cudaStream_t stream) {
  Sm90Schedule s = make_sm90_schedule(p, schedule, Kernel::kTile);
  Float8Maps maps = make_float8_maps(p, s, Kernel::kTile, Kernel::kVColumns, Kernel::kThroughSmem,
                                     Kernel::kByRows);
  static uint64_t allowed = 0;
  allow_shared_memory(float8_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  if (s.counter != nullptr) launch_clear_counter(s.counter, stream);
  launch_overlapping(float8_sm90_kernel<Kernel>, sm90_grid(s, schedule), Kernel::kThreads,
                     Kernel::kSmemBytes, s.counter != nullptr ? 9 : 0, stream, p, s, maps);
  if (s.splits > 1) merge_parts(p, schedule, 9, stream);
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
  requires(kType == DType::e4m3 || kType == DType::i8)
void launch_forward_sm90(const AttentionLaunch& launch, cudaStream_t stream) {
  const AttentionParams& p = launch.params;
  if constexpr (kScore != ScoreKind::parts) {
    if (p.v_channel_stride == 1) {
      using Kernel = Float8Sm90<kType, kHeadDim, kHeadDimV, kMask, kScore, true>;
      return launch_float8_sm90<Kernel>(p, launch.schedule, stream);
    }
  }
  using Kernel = Float8Sm90<kType, kHeadDim, kHeadDimV, kMask, kScore, false>;
  launch_float8_sm90<Kernel>(p, launch.schedule, stream);
}

}  // namespace cuattn
