// SPDX-License-Identifier: Apache-2.0
// The pass of the sm90 backward kernels that makes dbias: ds again, from lse and Delta that the
// passes before have left. A CTA owns 128 rows and 128 keys of dbias, a group of consumers 64 of the
// rows, and walks, in order, the tiles of ds that are summed there (bias_tiles.cuh); the tile of the
// bias is the same for all of them and stays in shared memory. No atomics: the same bits in every
// run. Before: queries.cuh or fused.cuh.
//
//   producer | bias | Q K | dO V | Q K | dO V | ..  of the first tile of ds, the second, ..
//   group 0  | S = Q K^T | dP = dO V^T | sum += P (dP - Delta) | ..
//   group 1  |    the same: one multiplies while the other makes ds
#pragma once

#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/sm90/scores.cuh"
#include "cuda/host/launchers.h"

namespace cuattn::backward {

template <DType kType, int kHeadDim>
struct BiasSums {
  // 1. Types and sizes
  static constexpr HeadDims kDims = {kHeadDim, kHeadDim};
  static constexpr Tile kTile = sm90_bias_tile(kDims);
  static constexpr int kSmemBytes = sm90_bias_smem_bytes(kDims, kTile);
  static constexpr int kPanels = kHeadDim / 64, kKeys = kTile.n;
  static constexpr int kRowsBytes = kTile.m * kPanels * 128;
  static constexpr int kStageBytes = kRowsBytes + kTile.n * kPanels * 128;
  static constexpr int kBiasBytes = kTile.m * kTile.n * 2;
  static_assert(kSmemBytes <= 227 * 1024, "sm_90 gives a CTA at most 227 KiB");
  static_assert(kTile.m == 64 * kConsumers && kTile.m == kRowPad);
  using Scores = float[kKeys / 2];

  // 2. A tile of ds
  using Step = BiasStep<kTile.m, kTile.n>;
  struct Work : Step {
    using Step::Step, Step::queries, Step::range, Step::row0, Step::tile;
    // Whether each of its rows is in use and sees all of its keys.
    __device__ __forceinline__ bool is_full() const {
      return row0 + kTile.m <= queries.used && tile() >= range.full_begin &&
             tile() < range.full_end;
    }
  };
  // To the next tile that some row sees; false: there is none.
  static __device__ __forceinline__ bool find(const AttentionParams& f, BiasWork& bias) {
    for (; bias.left > 0; bias.advance()) {
      if (Work(f, bias).is_seen()) return true;
    }
    return false;
  }

  // 3. Shared storage, in address order: stages of Q and K, or dO and V (panel, row, 64); the bias
  // (panel, row, 64); barriers.
  struct Shared {
    uint32_t stages, bias, barriers;
    __device__ explicit Shared(const void* base)
        : stages((device::smem_address(base) + 1023) & ~1023u),
          bias(stages + kTile.stages * kStageBytes),
          barriers(bias + kBiasBytes) {}
    __device__ uint32_t rows(int s) const { return stages + s * kStageBytes; }
    __device__ uint32_t keys(int s) const { return rows(s) + kRowsBytes; }
    __device__ uint32_t bias_full() const { return barriers; }
    __device__ uint32_t full(int s) const { return barriers + 8 * (1 + s); }
    __device__ uint32_t empty(int s) const { return full(kTile.stages + s); }

    __device__ void init_barriers() const {
      if (threadIdx.x != 0) return;
      device::barrier_init(bias_full(), 1);
      for (int s = 0; s < kTile.stages; ++s) {
        device::barrier_init(full(s), 1);
        device::barrier_init(empty(s), kConsumers * 4);
      }
      device::barrier_init_fence();
    }
  };

  // 4. The producer: one thread.
  static __device__ __forceinline__ void produce(const AttentionParams& f, const Maps& maps,
                                                 BiasWork bias, const Shared& shared) {
    using namespace device;
    Ring<kTile.stages> ring(1);
    auto load = [&](const TensorMap& of_rows, const TensorMap& of_keys, const Work& work) {
      const BoxPlace rows(f.cu_seqlens_q != nullptr, work.queries, work.batch, work.row0);
      const BoxPlace keys(f.cu_seqlens_kv != nullptr, work.keys, work.batch, work.key0);
      const int s = ring.stage();
      barrier_wait(shared.empty(s), ring.parity());
      barrier_arrive_expect(shared.full(s), kStageBytes);
      load_tile<kTile.m, kPanels>(shared.rows(s), of_rows, shared.full(s), rows, work.head,
                                  kEvictLast);
      load_tile<kTile.n, kPanels>(shared.keys(s), of_keys, shared.full(s), keys,
                                  work.head / (f.num_heads_q / f.num_heads_kv), kEvictLast);
      ring.next();
    };
    bool fresh = true;
#pragma unroll 1
    for (; find(f, bias); bias.advance()) {
      const Work work(f, bias);
      if (fresh) {
        barrier_arrive_expect(shared.bias_full(), kBiasBytes);
        load_bias<kTile.m, kTile.n>(shared.bias, maps, shared.bias_full(), f.scores, work.key0,
                                    work.row0, work.head, work.batch);
        fresh = false;
      }
      load(maps.q, maps.k, work);
      load(maps.dout, maps.v, work);
    }
  }

  // 5. Of a tile, the states of a lane's two rows, and S as P. What a row does not see is 0, whatever
  // the operands hold.
  struct LaneRows {
    int32_t row;  // and row + 8
    float lse[2], delta[2];
    __device__ __forceinline__ LaneRows(const AttentionParams& f, const RowStates& states,
                                        const Work& work, int32_t first)
        : row(work.row0 + first) {
      const int64_t place = states.place(f, work.queries, work.batch, work.head) + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse[half] = states.lse[place + 8 * half];
        delta[half] = states.delta[place + 8 * half];
      }
    }
  };
  static __device__ __forceinline__ void make_probs(Scores& scores, const AttentionParams& f,
                                                    const Work& work, const LaneRows& rows,
                                                    uint32_t bias) {
    using namespace device;
    const BiasedScores<kType> mod(f, 0, 0, 0, 0);
    mod.template add<kTile.m>(scores, bias);
    if (!work.is_full()) {
      KeyRange keys[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = rows.row + 8 * half;
        keys[half] =
            visible_keys(f.mask.left, f.mask.right, row, work.queries.used, work.keys.used);
        if (row >= work.queries.used) keys[half].end = 0;
      }
      hide_outside<MaskKind::window>(
          scores, keys, work.key0 + 2 * static_cast<int32_t>(threadIdx.x % 4), mod.hidden());
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const float exponent = fmaf(scores[i], mod.to_log2, -rows.lse[i / 2 % 2]);
      scores[i] = exp2_approx(at_most(exponent, 0.0f));
    }
  }

  // 6. All sums of a group of consumers.
  static __device__ __forceinline__ void gather(const AttentionParams& f, const RowStates& states,
                                                BiasWork bias, const Shared& shared, int group,
                                                Scores& sums) {
    using namespace device;
    const int32_t first = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const uint32_t of_group = group * 64 * 128;
    Ring<kTile.stages> ring(0);
    Scores scores, dout_v;
    auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(stage));
    };
    bool fresh = true;
#pragma unroll 1
    for (; find(f, bias); bias.advance()) {
      const Work work(f, bias);
      const LaneRows rows(f, states, work, first);
      const int s_stage = ring.stage();
      barrier_wait(shared.full(s_stage), ring.parity());
      ring.next();
      const int dp_stage = ring.stage();
      claim(scores);
      claim(dout_v);
      wgmma_fence();
      multiply_rows<kType, kHeadDim, kTile.m, kKeys>(scores, shared.rows(s_stage) + of_group,
                                                     shared.keys(s_stage));
      wgmma_commit();
      barrier_wait(shared.full(dp_stage), ring.parity());
      ring.next();
      wgmma_fence();
      multiply_rows<kType, kHeadDim, kTile.m, kKeys>(dout_v, shared.rows(dp_stage) + of_group,
                                                     shared.keys(dp_stage));
      wgmma_commit();
      if (fresh) barrier_wait(shared.bias_full(), 0);
      fresh = false;
      wgmma_wait<1>();
      pin(scores);
      release(s_stage);
      make_probs(scores, f, work, rows, shared.bias);
      wgmma_wait<0>();
      pin(dout_v);
      release(dp_stage);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float ds = scores[i] * (dout_v[i] - rows.delta[i / 2 % 2]);
        sums[i] += scores[i] != 0.0f ? ds : 0.0f;
      }
    }
  }

  // 7. Epilogue: to dbias, or to the parts. 16 bytes at a time where dbias lies so.
  static __device__ __forceinline__ void store(const BackwardParams& p, const BiasWork& work,
                                               const Scores& sums, float* parts, int group) {
    const BiasGradient& to = p.dbias;
    const int32_t key0 = work.item[3] * kTile.n;
    const bool whole = parts == nullptr && to.strides[3] == 1 && to.extents[3] % 8 == 0 &&
                       (to.strides[0] | to.strides[1] | to.strides[2]) % 8 == 0 &&
                       reinterpret_cast<uint64_t>(to.data) % 16 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = work.item[2] * int64_t{kTile.m} + group * 64 + threadIdx.x / 32 % 4 * 16 +
                          threadIdx.x % 32 / 4 + 8 * half;
      const bool stored = row < to.extents[2];
      const int64_t at =
          work.item[0] * to.strides[0] + work.item[1] * to.strides[1] + row * to.strides[2];
      if (whole) {
        store_row<kType, kKeys>(sums, half, 1.0f, static_cast<char*>(to.data) + 2 * at, key0,
                                static_cast<int32_t>(to.extents[3]), true, stored);
        continue;
      }
      const int64_t plane = (int64_t{work.part} * to.extents[0] + work.item[0]) * to.extents[1];
      const int64_t of_parts = ((plane + work.item[1]) * to.extents[2] + row) * to.extents[3];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int32_t key = key0 + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const float sum = sums[i / 2 * 4 + 2 * half + i % 2];
        if (!stored || key >= to.extents[3]) continue;
        if (parts != nullptr)
          parts[of_parts + key] = sum;
        else
          store_dbias(p, at + key * to.strides[3], sum);
      }
    }
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, 1)
    bias_sm90_kernel(const __grid_constant__ BackwardParams params,
                     const __grid_constant__ RowStates states, float* part_sums, int32_t parts,
                     const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const typename Pass::Shared shared(smem);
  const BiasWork bias(params, Pass::kTile, parts);
  shared.init_barriers();
  __syncthreads();
  if (group == 0) {
    device::registers_shrink<Registers<false>::kOfProducer>();
    if (threadIdx.x < 32 && device::elect_one()) Pass::produce(params.forward, maps, bias, shared);
  } else {
    device::registers_grow<Registers<false>::kOfConsumer>();
    typename Pass::Scores sums;
#pragma unroll
    for (float& x : sums) x = 0.0f;
    Pass::gather(params.forward, states, bias, shared, group - 1, sums);
    Pass::store(params, bias, sums, parts > 1 ? part_sums : nullptr, group - 1);
  }
}

}  // namespace cuattn::backward

namespace cuattn {

// `part_sums`: where the sums have several parts.
template <DType kType, int kHeadDim>
void launch_bias_sm90(const BackwardParams& p, const backward::RowStates& states, float* part_sums,
                      cudaStream_t stream) {
  using Pass = backward::BiasSums<kType, kHeadDim>;
  if (!p.needs(kNeedDbias)) return;
  const int32_t parts = sm90_bias_parts(p);
  const unsigned blocks = grid_blocks(backward::bias_blocks(p, Pass::kTile, parts), "sm90");
  if (blocks == 0) return;
  auto* kernel = backward::bias_sm90_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  kernel<<<blocks, backward::kThreads, Pass::kSmemBytes, stream>>>(
      p, states, part_sums, parts,
      backward::make_maps(p, Pass::kTile.m, Pass::kTile.n, ScoreForm::biased));
  CUATTN_CUDA_TRY(cudaGetLastError());
  if (parts > 1) launch_bias_sums(p, part_sums, parts, stream);
}

}  // namespace cuattn
