// SPDX-License-Identifier: Apache-2.0
// Flash attention forward on Hopper (sm_90a) over float8_e4m3fn q, k and v with scales: as
// forward.cuh, with products of e4m3 and P rounded to it. Values come by columns. Source:
// FlashAttention-3, arXiv:2407.08608, section 3.3; two levels of sums: DeepSeek-V3,
// arXiv:2412.19437, section 3.3.2. Next: float8_maps.cuh, the order of keys;
// float8_step.cuh; docs/fp8.md.
//
//   producer   | Q K3  | K2 V3 | K1 V2 | K0 V1 | V0 | Q' K' | ...       (next query tile)
//   group 0    | QK3 | softmax | QK2 T=PV3 | softmax, O+=T | QK1 T=PV2 | ... | O out | QK'
//   group 1         | QK3 | softmax | QK2 T=PV3 | softmax, ..         (the tensor cores alternate)
#pragma once

#include "cuattn/device/wgmma_float8_sm90.cuh"
#include "cuda/attention/sm90/float8_maps.cuh"
#include "cuda/attention/sm90/float8_step.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/attention/sm90/store.cuh"
#include "cuda/attention/sm90/turn_values.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {

template <int kHeadDim, int kHeadDimV, MaskKind kMaskKind>
struct Float8Sm90 {
  // 1. Types and sizes
  static constexpr Tile kTile = sm90_float8_tile({kHeadDim, kHeadDimV});
  static constexpr MaskKind kMask = kMaskKind;
  static constexpr int kConsumers = kTile.m / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kPanelsQk = (kHeadDim + 127) / 128;
  static constexpr int kQBytes = kTile.m * kPanelsQk * 128;  // of one stage
  static constexpr int kKBytes = kTile.n * kPanelsQk * 128;
  static constexpr int kVBytes = kHeadDimV * 128;
  static constexpr int kQStages = kSm90Float8QStages;
  static constexpr int kSmemBytes = sm90_float8_smem_bytes({kHeadDim, kHeadDimV}, kTile);
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kVisibleBytes = kConsumers * 128 * 16;
  static constexpr int kScoreCount = kTile.n / 2, kOutCount = kHeadDimV / 2;  // of a thread
  static constexpr int kKeyAlign = kFloat8KeyAlign;
  static constexpr int kWantedBefore = 2;  // key tiles, before the last one of an item is loaded
  static_assert(kTile.n == 128, "a row of V^T is one panel");
  using Work = Sm90Work;
  using Asked = NoFunctor;
  using Qk = device::Wgmma<DType::e4m3, kTile.n>;
  using Pv = device::Wgmma<DType::e4m3, kHeadDimV>;
  using Natural = KeyOrder<true, kTile.n>;
  using ByFours = KeyOrder<false, kTile.n>;
  template <DType kType>
  using Store = StoreSm90<kType, ScoreKind::identity, kHeadDimV, kTile.m, false>;

  // 2. Shared storage, in address order: Q (stage, panel, m, 128); K (stage, panel, n, 128); V
  // (stage, channel, 128 keys); the keys that each thread's rows see; barriers; the work items that the producer draws.
  struct Shared {
    uint32_t q, k, v, barriers;
    __device__ explicit Shared(const void* base) {
      q = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      k = q + kQStages * kQBytes;
      v = k + kTile.stages * kKBytes;
      barriers = device::opaque(v + kTile.stages * kVBytes + kVisibleBytes);
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
    __device__ uint32_t work(int s) const { return other(9) + s * static_cast<int>(sizeof(Work)); }
    __device__ uint32_t visible(int thread) const { return barriers - kVisibleBytes + 16 * thread; }
  };
  static_assert(8 * (4 * kTile.stages + 9) + 2 * sizeof(Work) <= kSm90SmallBytes);

  // 3. Roles. Two threads of the producer keep the rings full, one with Q and K, one with V; another
  // warp draws the work. `load(w, keys, row0)`: of an item whose tile 0 begins at that row of memory.
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

  static __device__ __forceinline__ void load_keys(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Float8Maps& maps, const Shared& shared) {
    using namespace device;
    tma_prefetch(&maps.q);
    tma_prefetch(&maps.k);
    device::Ring<kTile.stages> ring(1);
    device::Ring<kQStages> q_ring(1);
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
          const int first = w.range.begin, last = w.range.end - 1;
#pragma unroll 1
          for (int tile = last; tile >= first; --tile) {
            barrier_wait(shared.k_empty(ring.stage()), ring.parity());
            uint32_t full = shared.k_full(ring.stage()), to = shared.k + ring.stage() * kKBytes;
            int32_t row = row0 + tile * kTile.n;
            barrier_arrive_expect(full, kKBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsQk; ++panel, to += kTile.n * 128) {
              if (tile == last) {  // in its natural order
                tma_load(to, &maps.k, full, panel * 128, row, keys.head, batch, 0, kEvictLast);
                continue;
              }
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                tma_load(to + half * kTile.n * 64, &maps.fours, full, panel * 128, 2 * half,
                         row / 4, keys.head, batch, kEvictLast);
              }
            }
            ring.next();
            if (tile == min(last, first + kWantedBefore)) barrier_arrive(shared.wanted());
          }
        });
  }

  static __device__ __forceinline__ void load_values(const AttentionParams& p,
                                                     const Sm90Schedule& s, const Float8Maps& maps,
                                                     const Shared& shared) {
    using namespace device;
    tma_prefetch(&maps.v);
    device::Ring<kTile.stages> ring(1);
    each_item(p, s, shared, false,
              [&](const Work& w, const Sm90Keys& keys, int32_t row0, int32_t batch) {
#pragma unroll 1
                for (int tile = w.range.end - 1; tile >= w.range.begin; --tile) {
                  barrier_wait(shared.v_empty(ring.stage()), ring.parity());
                  uint32_t full = shared.v_full(ring.stage());
                  barrier_arrive_expect(full, kVBytes);
                  tma_load(shared.v + ring.stage() * kVBytes, &maps.v, full, row0 + tile * kTile.n,
                           0, keys.head, batch, 0, kEvictLast);
                  ring.next();
                }
              });
  }

  // 4. Steps of the main loop. The lambdas that they call are those of consume.
  using Ring = device::Ring<kTile.stages>;
  using QRing = device::Ring<kQStages>;

  // What wgmma reads and writes of a thread: O, T, S, and P in the order of an A operand.
  struct Tiles {
    float out[kOutCount], part[kOutCount], scores[kScoreCount];
    uint32_t probs[kScoreCount / 4];
  };

  // S = Q K^T, begun.
  static __device__ __forceinline__ void multiply_qk(uint64_t a, uint64_t b,
                                                     float (&scores)[kScoreCount]) {
    using namespace device;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 32; ++step) {
      Qk::ss(scores, advance(a, step / 4 * kTile.m * 128 + step % 4 * 32),
             advance(b, step / 4 * kTile.n * 128 + step % 4 * 32), step != 0);
    }
    wgmma_commit();
  }

  // T = P V, begun.
  static __device__ __forceinline__ void multiply_pv(const uint32_t (&probs)[kScoreCount / 4],
                                                     uint64_t b, float (&part)[kOutCount]) {
    using namespace device;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.n / 32; ++step) {
      const uint32_t (&a)[4] = *reinterpret_cast<const uint32_t (*)[4]>(&probs[4 * step]);
      Pv::rs(part, a, advance(b, step * 32), step != 0);
    }
    wgmma_commit();
  }

  // S of the first key tile, begun.
  static __device__ __forceinline__ void begin_first(const Shared& shared, Tiles& tiles,
                                                     const Ring& ring, const QRing& q_ring,
                                                     auto& multiply_qk, auto& my_turn,
                                                     auto& your_turn) {
    device::barrier_wait(shared.q_full(q_ring.stage()), q_ring.parity());
    device::barrier_wait(shared.k_full(ring.stage()), ring.parity());
    my_turn();
    device::claim(tiles.scores);
    multiply_qk();
    your_turn();
  }

  // T of this key tile; S and softmax of the next, to the left, and O += T.
  static __device__ __forceinline__ void add_tile(const Sm90Schedule& s, const Shared& shared,
                                                  Tiles& tiles, const uint32_t& sees, Ring& ring,
                                                  int& tile, bool masked, Float8Softmax& state,
                                                  const float& to_log2, auto& multiply_qk,
                                                  auto& multiply_pv, auto& my_turn, auto& your_turn,
                                                  auto& release) {
    using namespace device;
    auto& [out, part, scores, probs] = tiles;
    --tile;
    int v_stage = ring.stage();
    barrier_wait(shared.v_full(v_stage), ring.parity());
    ring.next();
    barrier_wait(shared.k_full(ring.stage()), ring.parity());
    my_turn();
    pin(scores);
    claim(part);
    pin(probs);
    multiply_qk();
    multiply_pv(v_stage);
    your_turn();
    wgmma_wait<1>();
    pin(scores);
    release(shared.k_empty(ring.stage()));
    if (masked) mask<ByFours>(scores, sees, tile);
    float8_softmax_step<ByFours>(state, scores, probs, out, part, to_log2, s.zero, [&] {
      wgmma_wait<0>();
      pin(part);
      pin(probs);
      release(shared.v_empty(v_stage));
      return true;
    });
  }

  // The key tiles behind the first one: masked ones to the right, full ones, masked ones to the left.
  static __device__ __forceinline__ void walk_tiles(const uint32_t& work, Work& w, const int& tile,
                                                    int& until, auto& step) {
#pragma unroll 1
    while (tile > until) step(true);
    const uint32_t range = work + uint32_t{offsetof(Work, range)};
    device::load_shared(w.range, range);
    until = max(w.range.begin, w.range.full_begin);
#pragma unroll 1
    while (tile > until) step(false);
    device::load_shared(w.range, range);
#pragma unroll 1
    while (tile > w.range.begin) step(true);
  }

  // T of the last key tile.
  static __device__ __forceinline__ void add_last(const Shared& shared, Tiles& tiles,
                                                  const Ring& ring, auto& multiply_pv,
                                                  auto& my_turn, auto& your_turn, auto& release) {
    using namespace device;
    auto& [out, part, scores, probs] = tiles;
    my_turn();
    claim(part);
    pin(probs);
    multiply_pv(ring.stage());
    your_turn();
    wgmma_wait<0>();
    pin(part);
    pin(probs);
    release(shared.v_empty(ring.stage()));
  }

  // 5. Main loop. A consumer warpgroup owns 64 rows of every query tile.
  static __device__ __forceinline__ void consume(const AttentionParams& p, const Sm90Schedule& s,
                                                 const Float8Maps& maps, const Shared& shared,
                                                 int group) {
    using namespace device;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Ring ring(0);
    QRing q_ring(0);
    device::Ring<2> slot(0);
    Tiles tiles;
    auto& [out, part, scores, probs] = tiles;
    const uint64_t q_desc = wgmma_descriptor(shared.q + group * 64 * 128, 0);
    const uint64_t k_desc = wgmma_descriptor(shared.k, 0), v_desc = wgmma_descriptor(shared.v, 0);
    auto release = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    auto multiply_qk = [&] {  // S = Q K^T
      uint64_t a = advance(q_desc, q_ring.stage() * kQBytes);
      uint64_t b = advance(k_desc, ring.stage() * kKBytes);
      Float8Sm90::multiply_qk(a, b, scores);
    };
    auto multiply_pv = [&](int stage) {  // T = P V
      Float8Sm90::multiply_pv(probs, advance(v_desc, stage * kVBytes), part);
    };
    auto my_turn = [&] { named_barrier_sync(1 + group, 256); };
    auto your_turn = [&] { named_barrier_arrive(1 + (group + 1) % kConsumers, 256); };
    if (group == 0) named_barrier_arrive(1, 256);
#pragma unroll 1
    for (;; slot.next()) {
      Work w;
      barrier_wait(shared.work_full(slot.stage()), slot.parity());
      load_shared(w, shared.work(slot.stage()));
      if (w.kind == Work::kNone) break;
      if (w.kind == Work::kEmpty) {
        Store<DType::bf16>::store_empty(p, s, w, group);
        release(shared.work_empty(slot.stage()));
        continue;
      }
      const uint32_t sees = shared.visible(threadIdx.x - 128);
      find_visible(p, s, w, w.row0 + group * 64 + warp * 16 + lane / 4, sees);
      int tile = w.range.end - 1, until = max(w.range.begin, w.range.full_end);
      begin_first(shared, tiles, ring, q_ring, multiply_qk, my_turn, your_turn);
      const float to_log2 = exponent_factor(p, s, w);
      Float8Softmax state;
#pragma unroll
      for (int i = 0; i < kOutCount; ++i) out[i] = 0.0f;
      wgmma_wait<0>();
      pin(scores);
      release(shared.k_empty(ring.stage()));
      if (tile >= w.range.full_end || tile < w.range.full_begin) mask<Natural>(scores, sees, tile);
      float8_softmax_step<Natural>(state, scores, probs, out, part, to_log2, s.zero,
                                   [] { return false; });
      const int before = tile == 0 ? lead(w) : 0, end = w.keys.used + lead(w) - tile * kTile.n;
      if (before > 0 || (s.clears && end < kTile.n)) {
        barrier_wait(shared.v_full(ring.stage()), ring.parity());
        keep_columns<kHeadDimV>(shared.v + ring.stage() * kVBytes, before, end, group);
      }
      auto step = [&](bool masked) {
        add_tile(s, shared, tiles, sees, ring, tile, masked, state, to_log2, multiply_qk,
                 multiply_pv, my_turn, your_turn, release);
      };
      walk_tiles(shared.work(slot.stage()), w, tile, until, step);
      release(shared.q_empty(q_ring.stage()));
      barrier_wait(shared.v_full(ring.stage()), ring.parity());
      load_shared(w, shared.work(slot.stage()));
      if (tile == 0 && w.range.end > 1 && lead(w) > 0)
        keep_columns<kHeadDimV>(shared.v + ring.stage() * kVBytes, lead(w), kTile.n, group);
      add_last(shared, tiles, ring, multiply_pv, my_turn, your_turn, release);
      ring.next();
      q_ring.next();
#pragma unroll
      for (int i = 0; i < kOutCount; ++i) out[i] += part[i];
      load_shared(w, shared.work(slot.stage()));
      release(shared.work_empty(slot.stage()));
      finish(p, s, maps, w, group * 64 + warp * 16, out, state);
    }
  }

  // Keys of tile 0 that are not of the sequence.
  static __device__ __forceinline__ int32_t lead(const Work& w) {
    return static_cast<int32_t>(w.keys.start) % kKeyAlign;
  }

  // What a thread's two rows see, as places in tiles, stands in shared memory, for the registers are full.
  static __device__ __forceinline__ void find_visible(const AttentionParams& p,
                                                      const Sm90Schedule& s, const Work& w,
                                                      int32_t row0, uint32_t smem) {
    KeyRange visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t row = row0 + half * 8, token = s.packed == 1 ? row : row / s.packed;
      visible[half] = {0, w.keys.used};
      if constexpr (kMask != MaskKind::none) {
        visible[half] =
            visible_keys(kMask == MaskKind::causal ? static_cast<int32_t>(kUnlimited) : p.mask.left,
                         p.mask.right, token, w.queries.used, w.keys.used);
      }
      visible[half].begin += lead(w);
      visible[half].end += lead(w);
      device::store_shared(smem + half * 8, visible[half]);
    }
  }
  template <class Order>
  static __device__ __forceinline__ void mask(float (&scores)[kScoreCount], uint32_t smem,
                                              int32_t tile) {
    KeyRange visible[2];
    device::load_shared(visible[0], smem);
    device::load_shared(visible[1], smem + 8);
    mask_float8_scores<Order>(scores, visible, tile);
  }

  // What makes a dot product of codes an exponent in base 2. A scale of 0 gives what zeros give.
  static __device__ __forceinline__ float exponent_factor(const AttentionParams& p,
                                                          const Sm90Schedule& s, const Work& w) {
    constexpr float kLeast = 1.2e-38f;  // times it, -inf is -inf
    int32_t head = w.head * s.packed, head_kv = head / (p.num_heads_q / p.num_heads_kv);
    float factor = p.float8.of_query(w.batch, head, 0) * p.float8.of_key(w.batch, head_kv, 0) *
                   p.scores.scale * device::kLog2e;
    return factor == 0.0f ? kLeast : factor;
  }

  // 6. Epilogue: the scale of the values, and the shift of P back.
  static __device__ __forceinline__ void finish(const AttentionParams& p, const Sm90Schedule& s,
                                                const Float8Maps& maps, const Work& w, int32_t row,
                                                float (&out)[kOutCount], Float8Softmax& state) {
    constexpr float kUnshift = 1.0f / (1 << kFloat8Shift);
    int32_t head_kv = w.head * s.packed / (p.num_heads_q / p.num_heads_kv);
    state.sum[0] *= kUnshift;
    state.sum[1] *= kUnshift;
    float factor = p.float8.of_value(w.batch, head_kv, 0) * kUnshift;
    const bool by_channel = p.float8.v.extents[2] > 1;
#pragma unroll
    for (int i = 0; i < kOutCount; ++i) {
      if (by_channel && (i & 2) == 0) {
        int32_t channel = i / 4 * 8 + static_cast<int32_t>(threadIdx.x % 4) * 2 + (i & 1);
        float scale =
            p.float8.of_value(w.batch, head_kv, min(channel, p.head_dim_v - 1)) * kUnshift;
        out[i] *= scale;
        out[i + 2] *= scale;
      } else if (!by_channel) {
        out[i] *= factor;
      }
    }
    int32_t first_row = w.row0 + row;
    if (p.out_dtype == DType::f16)
      return Store<DType::f16>::store(p, s, maps, w, first_row, out, state, 0);
    Store<DType::bf16>::store(p, s, maps, w, first_row, out, state, 0);
  }

  // 7. Kernel: nothing but the barriers and the split into roles.
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
        device::barrier_init(shared.work_empty(i), kWarps + 2);
      }
      for (int i = 0; i < kTile.stages; ++i) {
        device::barrier_init(shared.k_full(i), 1);
        device::barrier_init(shared.v_full(i), 1);
        device::barrier_init(shared.k_empty(i), kWarps);
        device::barrier_init(shared.v_empty(i), kWarps);
      }
      device::barrier_init(shared.wanted(), 1);
      device::barrier_init_fence();
    }
    __syncthreads();
    if (group == 0) {
      device::registers_shrink<kProducerRegisters>();
      int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      if (warp == 1) {
        schedule_sm90_work<Float8Sm90>(p, s, Shared(smem));
      } else if (warp == 0 && device::elect_one()) {
        load_keys(p, s, maps, Shared(smem));
      } else if (warp == 2 && device::elect_one()) {
        load_values(p, s, maps, Shared(smem));
      }
    } else {
      device::registers_grow<kConsumerRegisters>();
      consume(p, s, maps, shared, group - 1);
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

// 8. Launcher
template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
  requires(kType == DType::e4m3 && kScore == ScoreKind::identity)
void launch_forward_sm90(const AttentionLaunch& launch, cudaStream_t stream) {
  AttentionParams p = launch.params;
  const AttentionSchedule& schedule = launch.schedule;
  if (schedule.turned != nullptr) launch_turn_values(p, schedule.turned, stream);
  using Kernel = Float8Sm90<kHeadDim, kHeadDimV, kMask>;
  Sm90Schedule s = make_sm90_schedule(p, schedule, Kernel::kTile);
  Float8Maps maps = make_float8_maps(p, s, Kernel::kTile, kHeadDimV);
  static uint64_t allowed = 0;
  allow_shared_memory(float8_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  int32_t grid = schedule.num_ctas > 0 && schedule.num_ctas < s.total ? schedule.num_ctas : s.total;
  if (s.counter != nullptr) launch_clear_counter(s.counter, stream);
  launch_overlapping(float8_sm90_kernel<Kernel>, grid, Kernel::kThreads, Kernel::kSmemBytes,
                     s.counter != nullptr ? 9 : 0, stream, p, s, maps);
  if (s.splits > 1) merge_parts(p, schedule, 9, stream);
}

}  // namespace cuattn
