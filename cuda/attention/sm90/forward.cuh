// SPDX-License-Identifier: Apache-2.0
// Flash attention forward on Hopper (sm_90a): float16 and bfloat16, every option of the API. One
// producer warpgroup feeds K and V tiles by TMA to two or three consumer warpgroups of 64 query
// rows each, which multiply by wgmma; CTAs are persistent. Small tiles have one consumer, and three
// CTAs share a multiprocessor. Source: FlashAttention-3,
// arXiv:2407.08608, sections 3.1-3.2. Primitives: device/mma_sm90.cuh. Tiles: tiles.h.
// Deep dive: docs/notes/20261121-prefill-sm90.md. Next: src/attention/plan.cpp, which picks it.
//
//   producer   | Q K3  | K2 V3 | K1 V2 | K0 V1 | V0 | Q' K' | ...       (next query tile)
//   group 0    | QK3 | softmax | QK2 PV3 | softmax | QK1 PV2 | ... | PV0 QK' | O out | softmax
//   group 1         | QK3 | softmax | QK2 PV3 | softmax | ...        (the tensor cores alternate)
#pragma once

#include "cuattn/device/wgmma_sm90.cuh"
#include "cuattn/tiles.h"
#include "cuda/attention/sm90/consumer.cuh"
#include "cuda/attention/sm90/producer.cuh"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/scores.cuh"

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMaskKind, ScoreKind kScore,
          Tile kTileSize, class Functor = NoFunctor>
struct ForwardSm90 {
  // 1. Types and sizes
  static constexpr Tile kTile = kTileSize;  // query rows, keys, stages
  static constexpr MaskKind kMask = kMaskKind;
  using Asked = Functor;
  static constexpr DType kOperands = kType;
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr ScoreKind kScores = kScore;
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
  static constexpr int kCtasPerSm = sm90_ctas_per_sm(kTile);
  // Registers of a thread. The groups share what the CTA was launched with, 168 * 3, 128 * 4 or, three
  // times, 80 * 2: a group that asks for more than is left waits for ever.
  // With row ranges, who draws the work needs more.
  static constexpr bool kLongDraw = kMask == MaskKind::rows;
  static constexpr int kConsumerRegisters = kConsumers == 1   ? 128
                                            : kConsumers == 3 ? 160
                                            : kHasDrawGroup   ? 208
                                            : kLongDraw       ? 224
                                                              : 232;
  static constexpr int kProducerRegisters = kConsumers != 2 ? 32 : kLongDraw ? 56 : 40;
  static constexpr int kDrawerRegisters = kHasDrawGroup ? 56 : 0;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters + kDrawerRegisters <=
                kThreads / 128 * (65536 / kCtasPerSm / kThreads / 8 * 8));
  static constexpr int kKeyAlign = 1;      // see find_sm90_work
  static constexpr int kWantedBefore = 2;  // key tiles, before the last one of an item is loaded
  // The producer loads V after K of the next tile, for that is the order of their use.
  static constexpr int kLag = 1;
  // What dropout keeps: a stage for a stage of K and V.
  static constexpr int kKeptBytes = kDrops ? sm90_kept_bytes(kTile.m, kTile.n) : 0;
  static constexpr int kBarriers = 4 * kTile.stages + 15 + (kDrops ? 2 * kTile.stages : 0);
  static_assert(8 * kBarriers + sizeof(Sm90Work) * (2 + 4 * kConsumers) +
                    kPageLoaders * BlockIds<kTile.n>::kBytes <=
                kSm90SmallBytes);
  static_assert(kCtasPerSm * (kSmemBytes + 1024) <= 228 * 1024, "shared memory of sm_90");
  using Work = Sm90Work;
  using Qk = device::Wgmma<kType, kTile.n>;
  using Pv = device::Wgmma<kType, kHeadDimV>;
  using Ids = BlockIds<kTile.n>;
  static_assert(Ids::kSlots > Ids::kAhead + kLag, "a slot is filled when its tile is behind");
  using Bias = BiasTile<kType, kTile.m, kTile.n>;
  static_assert(kTile.stages % 2 == 0, "a bias has one stage, and its parity is the lowest bit");
  static constexpr bool kStagesBias = sm90_stages_bias({kHeadDim, kHeadDimV}, kRoom);
  static constexpr int kBiasBytes = kStagesBias ? Bias::kBytes : 0;
  using Store = StoreSm90<kType, kScore, kHeadDimV, kTile.m, (kQStages > 1),
                          (Functor::kGiven && Functor::kPacked == 1 && kQStages > 1)>;

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

  // 3. Kernel: nothing but the barriers and the split into roles.
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
      } else if (Functor::kPages && p.pages.block_tables != nullptr) {
        Producer::template load_tiles<true>(p, s, maps, Shared(smem), warp == 0 ? 0 : warp - 1);
      } else if (kStagesBias && warp == 2) {
        if (s.stages_bias && device::elect_one()) Producer::load_bias(s, maps, shared);
      } else if (warp == 0 && device::elect_one()) {
        Producer::template load_tiles<false>(p, s, maps, Shared(smem));
      }
    } else if (kHasDrawGroup && group > kConsumers) {
      device::registers_shrink<kDrawerRegisters>();
      ProducerSm90<ForwardSm90>::draw(p, Shared(smem), threadIdx.x / 32 % 4);
    } else {
      device::registers_grow<kConsumerRegisters>();
      using Consumer = ConsumerSm90<ForwardSm90>;
      Consumer::run(typename Consumer::Lane(p, s, maps, shared, group - 1));
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    forward_sm90_kernel(const __grid_constant__ AttentionParams params,
                        const __grid_constant__ Sm90Schedule schedule,
                        const __grid_constant__ Sm90Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, schedule, maps, smem);
}

}  // namespace cuattn
