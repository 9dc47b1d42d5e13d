// SPDX-License-Identifier: Apache-2.0
// The keys pass of the backward kernels on Hopper (sm_90a): dK and dV. A CTA owns a tile of keys of
// one KV head and walks the query tiles of the G query heads that share it, head after head. Scores
// are transposed: rows are keys, columns queries, so dK and dV stay in registers, P^T and dx^T are A
// operands from registers, and every sum has a fixed order. A group of consumers owns 64 keys and
// never meets the other. Before: queries.cuh, which wrote lse and Delta of the rows.
//
//   producer | K Q0 lse0 | V dO0 Delta0 | Q1 lse1 | dO1 Delta1 | ..  of head 0, 1, .. G - 1
//   group 0  | S^T = K Q^T  dP^T = V dO^T | P^T = exp2(S^T - lse) | dV += P^T dO  dK += dx^T Q | ..
//   group 1  |    the same: one multiplies while the other makes P^T and dx^T = P^T (dP^T - Delta)
#pragma once

#include "cuda/backward/sm90/key_tiles.cuh"
#include "cuda/backward/sm90/keys_paired.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
struct KeysPass : KeyTiles<kType, kHeadDim, kHeadDimV, kMask, kForm> {
  using Base = KeyTiles<kType, kHeadDim, kHeadDimV, kMask, kForm>;
  using typename Base::Shared;
  using typename Base::Work;
  static constexpr Tile kTile = Base::kTile;
  static_assert(kTile.n == 64 * kConsumers);

  // All sums of a group of consumers; a branch around a product would serialise all of them.
  static __device__ __forceinline__ void gather(const BackwardParams& p, const Work& work,
                                                const Shared& shared, int group,
                                                float (&dk)[kHeadDim / 2],
                                                float (&dv)[kHeadDimV / 2]) {
    using namespace device;
    const AttentionParams& f = p.forward;
    const int per_head = work.range.end - work.range.begin;
    const int32_t first_head = work.kv_head * work.group;
    const uint32_t k = shared.k + group * 64 * 128, v = shared.v + group * 64 * 128;
    const auto sight = Base::lane_sight(f, work, group * 64);
    Ring<kTile.stages> ring(0);
    float scores[kTile.m / 2], dout_v[kTile.m / 2];
    uint32_t probs[kTile.m / 4], grads[kTile.m / 4];
    auto release = [](uint32_t barrier) {
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
#pragma unroll 1
    for (int32_t head = first_head; head < first_head + work.group; ++head) {
      typename Base::Mod mod(f, work.batch, head, work.queries.used, work.keys.used);
#pragma unroll 1
      for (int tile = work.range.begin; tile < work.range.begin + per_head; ++tile) {
        const int stage = ring.stage();
        const uint32_t q = shared.q_stage(stage), dout = shared.dout_stage(stage);
        bool masked = tile < work.range.full_begin || tile >= work.range.full_end;
        if constexpr (kMask == MaskKind::rows) masked = Base::hides(mod, work, group * 64, tile);
        barrier_wait(shared.q_full(stage), ring.parity());
        if (work.clears && (tile + 1) * kTile.m > work.queries.used) {
          barrier_wait(shared.dout_full(stage), ring.parity());
          Base::clear_behind(work, q, dout, tile);
          finish_clearing(group);
        }
        pin(dk);
        pin(dv);
        claim(scores);
        claim(dout_v);
        wgmma_fence();
        multiply_rows<kType, kHeadDim, kTile.n, kTile.m>(scores, k, q);
        wgmma_commit();
        barrier_wait(shared.dout_full(stage), ring.parity());
        wgmma_fence();
        multiply_rows<kType, kHeadDimV, kTile.n, kTile.m>(dout_v, v, dout);
        wgmma_commit();
        wgmma_wait<1>();
        pin(scores);
        Base::make_probs(scores, probs, f, work, mod, shared, stage, sight, tile, masked);
        wgmma_wait<0>();
        pin(dout_v);
        if constexpr (Base::kDrops) Base::kept_of(shared, stage).drop_all(probs, dout_v);
        pin(dv);
        pin(probs);
        wgmma_fence();
        add_weighted<kType, kHeadDimV, kTile.m>(dv, probs, dout);
        wgmma_commit();
        Base::make_grads(dout_v, scores, shared.delta(stage), masked);
        pack<kType>(grads, dout_v);
        pin(dk);
        pin(grads);
        wgmma_fence();
        add_weighted<kType, kHeadDim, kTile.m>(dk, grads, q);
        wgmma_commit();
        wgmma_wait<1>();
        pin(dv);
        pin(probs);
        release(shared.dout_empty(stage));
        wgmma_wait<0>();
        pin(dk);
        pin(grads);
        release(shared.q_empty(stage));
        ring.next();
      }
    }
  }

  static __device__ __forceinline__ void consume(const BackwardParams& p, const Work& work,
                                                 const Shared& shared, int group) {
    float dk[kHeadDim / 2], dv[kHeadDimV / 2];
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    gather(p, work, shared, group, dk, dv);
    const AttentionParams& f = p.forward;
    const float factor = Base::factor_of(f);
    Base::template store<kHeadDim>(dk, f.scores.scale * factor, p.dk, p.dk_strides, p.dk_dtype,
                                   work, group * 64, f.head_dim);
    Base::template store<kHeadDimV>(dv, factor, p.dv, p.dv_strides, p.dv_dtype, work, group * 64,
                                    f.head_dim_v);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, 1)
    keys_sm90_kernel(const __grid_constant__ BackwardParams params,
                     const __grid_constant__ RowStates states,
                     const __grid_constant__ KeySchedule schedule,
                     const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  using Shared = typename Pass::Shared;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Shared shared(smem);  // here: behind the branch its values would leave uniform registers
  typename Pass::Work work(params.forward, schedule, static_cast<int32_t>(blockIdx.x));
  if (work.key0 >= work.keys.stored) {
    device::wait_for_previous_kernel();  // all do: else this kernel could end before that one
    return;
  }
  shared.init_barriers();
  if constexpr (Pass::kLooksForRows) {
    int2* found = Pass::found_rows(smem, shared);
    Pass::look_for_rows(params.forward, work, found);
    __syncthreads();
    work.range = Pass::range_of_rows(found);
  } else {
    __syncthreads();
  }
  if (group == 0) {
    device::registers_shrink<Registers<Pass::kDrops>::kOfProducer>();
    if (threadIdx.x < 32) {
      if (device::elect_one()) Pass::produce(params.forward, states, maps, work, shared);
    } else if constexpr (Pass::kDrops) {
      if (int drawer = drawer_number(); drawer >= 0)
        Pass::draw(params.forward, work, shared, drawer);
    }
  } else {
    device::registers_grow<Registers<Pass::kDrops>::kOfConsumer>();
    Pass::consume(params, work, shared, group - 1);
  }
}

}  // namespace cuattn::backward

namespace cuattn {

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreForm kForm>
void launch_keys_sm90(const BackwardLaunch& launch, const backward::RowStates& states,
                      cudaStream_t stream) {
  using namespace backward;
  using Pass = std::conditional_t<sm90_keys_are_paired({kHeadDim, kHeadDimV}),
                                  PairedKeysPass<kType, kHeadDim, kHeadDimV, kMask, kForm>,
                                  KeysPass<kType, kHeadDim, kHeadDimV, kMask, kForm>>;
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  if (p.dk == nullptr && p.dv == nullptr) return;
  const KeySchedule schedule(f, Pass::kTile, kMask);
  unsigned blocks = grid_blocks(int64_t{schedule.pairs} * schedule.tiles, "sm90");
  if (blocks == 0) return;
  auto* kernel = keys_sm90_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  // Without rows no kernel of this call waited for what is before it: then this one does not overlap it.
  launch_overlapping(kernel, blocks, kThreads, Pass::kSmemBytes, f.seqlen_q > 0 ? 9 : 0, stream, p,
                     states, schedule, make_maps(p, Pass::kTile.m, Pass::kTile.n, kForm));
}

}  // namespace cuattn
