// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper (sm_90a): 64 rows (queries x heads) of one sequence, latents of 512 columns
// and 64 of rope, 16 bits. Keys come in blocks of 32, which two warpgroups take in turns: each makes
// the scores and weights P of every other block, and half of the columns of O for all of them.
// While one is at its softmax, the tensor cores have the other's products. Sources: FlashMLA's
// seesaw and FlashAttention-4's references that hardly move; PTX ISA, wgmma. Storage and copies:
// copy.cuh. Tasks, rows and results: device/paged/tasks.cuh. Next: paged/combine.cu.
//
//   warpgroup 0  | S0 | softmax, P0 | O_L += P0 V0 | S2 |  O_L += P1 V1 | softmax, P2 | ...
//   warpgroup 1  | S1 |        O_R += P0 V0 | softmax, P1 | O_R += P1 V1 | S3 | ...
//                    P and references of a block pass from the one to the other
#pragma once

#include "cuda/host/launch.h"
#include "cuda/mla/sm90/copy.cuh"

namespace cuattn {

template <DType kType>
struct MlaSm90 : MlaSm90Tiles {
  // 1. Types and sizes
  using T = device::Element<kType>;
  using ScoreMma = device::Wgmma<kType, kKeys>;
  using OutMma = device::Wgmma<kType, kOutColumns>;
  static constexpr int kKeyBlocks = kKeys / 8;  // n8 of S
  static constexpr int kKeySteps = kKeys / 16;  // k16 of O
  static constexpr int kOutBlocks = kOutColumns / 8;
  static constexpr float kSlackLog2 = 8.0f;  // exponentials up to 256

  // A thread has rows `row` and `row` + 8 of the tile.
  struct Lane {
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int row = 16 * warp + lane / 4;
  };
  struct State {
    float out[kOutBlocks * 4];
    float scores[kKeyBlocks * 4];
    uint32_t held[kHeldPanels > 0 ? kHeldPanels * 4 : 1][4];  // panels of Q, k16 each
    float reference[2], sum[2];                                // base 2; sum: of own blocks and keys
    Cursor here, ahead;                                        // blocks of P V, and of S
    int32_t key0;                                              // of `here`
    bool any;                                                  // some block of the task was used
  };

  // 2. Rows of Q
  static __device__ __forceinline__ const uint16_t* query(const PagedParams& p,
                                                          const device::KeyTask& task,
                                                          const device::UnitRow& row, bool rope) {
    const Strides& s = rope ? p.latent.q_strides : p.q_strides;
    return static_cast<const uint16_t*>(rope ? p.latent.q_rope : p.q) + task.b * s.batch +
           row.place * s.seq + row.head * s.head;
  }

  // Panels of Q to shared memory, by both warpgroups; padding rows are zeros.
  static __device__ __forceinline__ void load_rows(const PagedParams& p,
                                                   const device::KeyTask& task,
                                                   const Shared& shared) {
    sync_math();  // the rows of the task before are read
    constexpr int kChunks = kSharedPanels * 8;  // of 16 bytes
    for (int i = threadIdx.x; i < kRows * kChunks; i += kMathThreads) {
      int row = i / kChunks, chunk = i % kChunks, panel = kHeldPanels + chunk / 8;
      device::UnitRow unit = device::unit_row(p, task.b, 0, task.row0, row);
      uint4 value = {};
      if (unit.valid) {
        bool rope = panel == kPanels;
        const uint16_t* from = query(p, task, unit, rope) + (rope ? 0 : panel * 64);
        value = *reinterpret_cast<const uint4*>(from + chunk % 8 * 8);
      }
      device::store_shared16(
          shared.q + chunk / 8 * kRowPanelBytes + device::swizzled<128>(row, chunk % 8), value);
    }
    device::async_proxy_fence();
    sync_math();
  }

  // The first panels straight to registers, as A operands.
  static __device__ __forceinline__ void hold_rows(const PagedParams& p,
                                                   const device::KeyTask& task, const Lane& me,
                                                   State& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::UnitRow unit = device::unit_row(p, task.b, 0, task.row0, me.row + 8 * half);
      const uint16_t* from = query(p, task, unit, false) + 2 * (me.lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 0; step < kHeldPanels * 4; ++step) {
          state.held[step][half + 2 * i] =
              unit.valid ? *reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * i) : 0;
        }
      }
    }
  }

  // 3. Products
  static __device__ __forceinline__ void start_scores(const Shared& shared, State& state) {
    using namespace device;
    uint32_t stage = shared.stage(state.ahead.stage);
    barrier_wait(shared.full(state.ahead.stage), state.ahead.parity);
    uint64_t k = wgmma_descriptor(opaque(stage), 0);
    uint64_t q = wgmma_descriptor(opaque(shared.q), 0);
    pin(state.scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < (kPanels + 1) * 4; ++step) {
      uint64_t key = advance(k, step / 4 * kPanelBytes + step % 4 * 32);
      if (step < kHeldPanels * 4) {
        ScoreMma::template rs<0>(state.scores, state.held[step], key, step != 0);
      } else {
        int at = step - kHeldPanels * 4;
        ScoreMma::template ss<0>(state.scores, advance(q, at / 4 * kRowPanelBytes + at % 4 * 32),
                                 key, step != 0);
      }
    }
    wgmma_commit();
    state.ahead.next();
    state.ahead.next();
  }

  // The block of `here` as values, the own columns. P of the own scores is in registers.
  template <int kGroup>
  static __device__ __forceinline__ uint64_t values(const Shared& shared, const State& state) {
    uint32_t stage = shared.stage(state.here.stage) + kGroup * kOutPanels * kPanelBytes;
    return device::wgmma_descriptor(device::opaque(stage), kPanelBytes);
  }
  template <int kGroup>
  static __device__ __forceinline__ void start_own(const Shared& shared, State& state,
                                                   uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
    uint64_t v = values<kGroup>(shared, state);
    pin(state.out);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) pin(weights[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      OutMma::template rs<1>(state.out, weights[step], advance(v, step * 16 * 128), 1);
    wgmma_commit();
  }
  template <int kGroup>
  static __device__ __forceinline__ void start_others(const Shared& shared, State& state) {
    using namespace device;
    uint64_t v = values<kGroup>(shared, state);
    uint64_t weights = plain_descriptor(opaque(shared.weights(state.here.stage)));
    pin(state.out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      OutMma::template ss<1>(state.out, advance(weights, step * 2 * kChunkBytes),
                             advance(v, step * 16 * 128), 1);
    }
    wgmma_commit();
  }

  // 4. Softmax of an own block
  // Dot products become scores in base 2. `to_log2`: of a plain scale.
  static __device__ __forceinline__ void score_keys(const PagedParams& p, float to_log2,
                                                    State& state) {
    const ScoreParams& s = p.scores;
    if (s.scored()) {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) {
        float score = state.scores[i] * s.scale;
        if (s.softcap > 0.0f)
          score = s.softcap * device::capped<kType>(score, s.softcap, s.inv_softcap);
        state.scores[i] = device::finite_product(score, device::kLog2e);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i)
        state.scores[i] = device::finite_product(state.scores[i], to_log2);
    }
  }

  // Whether a row of the tile may not see all keys of the block.
  static __device__ __forceinline__ bool has_edge(const PagedParams& p,
                                                  const device::KeyTask& task, int32_t key0) {
    const PagedWork& w = p.work;
    return key0 < w.mask.visible(w.q_len - 1, w.q_len, task.context).begin ||
           key0 + kKeys > w.mask.visible(0, w.q_len, task.context).end;
  }

  static __device__ __forceinline__ void mask_scores(const PagedParams& p,
                                                     const device::KeyTask& task, const Lane& me,
                                                     State& state) {
    const PagedWork& w = p.work;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t query = (task.row0 + me.row + 8 * half) / w.group;
      KeyRange visible = w.mask.visible(min(query, w.q_len - 1), w.q_len, task.context);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int32_t key = state.key0 + 8 * n + 2 * (me.lane % 4) + i;
          float& score = state.scores[4 * n + 2 * half + i];
          if (key < visible.begin || key >= visible.end) score = device::negative_infinity();
        }
      }
    }
  }

  // 0 x NaN is NaN: latents that nobody sees become zeros, before they are read as values.
  static __device__ __forceinline__ void clear_keys(const device::KeyTask& task, const Lane& me,
                                                    uint32_t stage, int32_t key0) {
#pragma unroll 1
    for (int i = me.thread; i < kKeys * kPanels * 8; i += 128) {
      int row = i / 8 % kKeys, panel = i / (8 * kKeys), key = key0 + row;
      if (key < task.low || key >= task.end)
        device::store_shared16(stage + panel * kPanelBytes + row * 128 + i % 8 * 16, {});
    }
  }

  // By how much O and the sums shrink where the reference of a row moves to `to`.
  static __device__ __forceinline__ float move_reference(State& state, int half, float to) {
    float base = to == device::negative_infinity() ? 0.0f : to;
    float factor = device::exp2_approx(state.reference[half] - base);
    state.reference[half] = to;
    state.sum[half] *= factor;
    return factor;
  }

  // Weights of the scores, relative to references that move only where a score is far above them.
  static __device__ __forceinline__ void weigh(State& state, float (&factor)[2],
                                               uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = negative_infinity();
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        largest = fmaxf(largest, fmaxf(state.scores[4 * n + 2 * half],
                                       state.scores[4 * n + 2 * half + 1]));
      }
      largest = quad_max(largest);
      float old = state.reference[half];
      factor[half] = move_reference(state, half, largest > old + kSlackLog2 ? largest : old);
      float base = state.reference[half] == negative_infinity() ? 0.0f : state.reference[half];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        float low = exp2_approx(state.scores[4 * n + 2 * half] - base);
        float high = exp2_approx(state.scores[4 * n + 2 * half + 1] - base);
        state.sum[half] += low + high;
        weights[n / 2][n % 2 * 2 + half] = pack2<kType>(low, high);
      }
    }
  }

  // P as blocks of 8 rows x 16 bytes, and the references, for the other warpgroup.
  static __device__ __forceinline__ void publish(const Shared& shared, const Lane& me,
                                                 const State& state,
                                                 const uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
    int32_t stage = state.here.stage;
    uint32_t to = shared.weights(stage) + me.lane / 16 * kChunkBytes +
                  (16 * me.warp + me.lane % 16) * 16;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const uint32_t(&w)[4] = weights[step];
      stmatrix_x4(to + step * 2 * kChunkBytes, w[0], w[1], w[2], w[3]);
    }
    if (me.lane % 4 == 0) {
      uint32_t at = shared.references(stage) + me.row * 4;
      store_shared(at, __float_as_uint(state.reference[0]));
      store_shared(at + 32, __float_as_uint(state.reference[1]));
    }
    async_proxy_fence();
    __syncwarp();
    if (me.lane == 0) barrier_arrive(shared.weighed(stage));
  }

  static __device__ __forceinline__ void scale_out(State& state, const float (&factor)[2]) {
    if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOutBlocks * 4; ++i) state.out[i] *= factor[i / 2 % 2];
    }
  }

  // The block before `here` is done with.
  static __device__ __forceinline__ void release_before(const Shared& shared, const Lane& me,
                                                        const State& state) {
    if (state.any && me.lane == 0)
      device::barrier_arrive(shared.empty(state.here.stage_before()));
  }

  // 5. Main loop
  // A block whose scores are there, and, with kMore, the start of those of the next but one.
  template <int kGroup, bool kMore>
  static __device__ __forceinline__ void add_own(const PagedParams& p, const device::KeyTask& task,
                                                 const Shared& shared, const Lane& me,
                                                 float to_log2, State& state) {
    using namespace device;
    score_keys(p, to_log2, state);
    bool edge = has_edge(p, task, state.key0);
    if (edge) mask_scores(p, task, me, state);
    float factor[2];
    uint32_t weights[kKeySteps][4];
    weigh(state, factor, weights);
    named_barrier_sync(2 + kGroup, 128);  // all four warps have their scores: keys may be written to
    if (edge) clear_keys(task, me, shared.stage(state.here.stage), state.key0);
    publish(shared, me, state, weights);
    if (edge) barrier_wait(shared.weighed(state.here.stage), state.here.parity);  // all have cleared
    wgmma_wait<0>();
    pin(state.out);
    release_before(shared, me, state);
    scale_out(state, factor);
    start_own<kGroup>(shared, state, weights);
    if constexpr (kMore) start_scores(shared, state);
    next_block(state);
  }

  // A block whose weights the other warpgroup makes. kPending: own scores are under way; behind it
  // they are there, and the product may be under way.
  template <int kGroup, bool kPending>
  static __device__ __forceinline__ void add_others(const Shared& shared, const Lane& me,
                                                    State& state) {
    using namespace device;
    wgmma_wait<kPending ? 1 : 0>();
    pin(state.out);
    release_before(shared, me, state);
    barrier_wait(shared.weighed(state.here.stage), state.here.parity);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t at = shared.references(state.here.stage) + (me.row + 8 * half) * 4;
      factor[half] = move_reference(state, half, __uint_as_float(load_shared4(at)));
    }
    scale_out(state, factor);
    start_others<kGroup>(shared, state);
    if constexpr (kPending) {
      wgmma_wait<1>();
      pin(state.scores);
    }
    next_block(state);
  }
  static __device__ __forceinline__ void next_block(State& state) {
    state.here.next();
    state.key0 += kKeys;
    state.any = true;
  }

  template <int kGroup>
  static __device__ __forceinline__ void attend(const PagedParams& p, const device::KeyTask& task,
                                                const Shared& shared, const Lane& me,
                                                State& state) {
    using namespace device;
    load_rows(p, task, shared);
    hold_rows(p, task, me, state);
#pragma unroll
    for (int i = 0; i < kOutBlocks * 4; ++i) state.out[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.reference[half] = negative_infinity();
      state.sum[half] = 0.0f;
    }
    state.any = false;
    state.key0 = task.begin;
    int32_t pairs = num_pairs(task);
    if (pairs == 0) return;
    state.ahead = state.here;
    if constexpr (kGroup == 1) state.ahead.next();
    float to_log2 = p.scores.scale * kLog2e;
    start_scores(shared, state);
    if constexpr (kGroup == 0) {
      wgmma_wait<0>();
      pin(state.scores);
    } else {
      add_others<kGroup, true>(shared, me, state);
    }
#pragma unroll 1
    for (; pairs > 1; --pairs) {
      add_own<kGroup, true>(p, task, shared, me, to_log2, state);
      add_others<kGroup, true>(shared, me, state);
    }
    add_own<kGroup, false>(p, task, shared, me, to_log2, state);
    if constexpr (kGroup == 0) add_others<kGroup, false>(shared, me, state);
    wgmma_wait<0>();
    pin(state.out);
    release_before(shared, me, state);
  }

  // 6. Epilogue: straight from the fragments.
  static __device__ __forceinline__ void store_row(const device::RowOutput& out, const State& state,
                                                   int half, int column) {
#pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
      float low = state.out[4 * n + 2 * half], high = state.out[4 * n + 2 * half + 1];
      low = out.factor == 0.0f ? 0.0f : low * out.factor;  // whatever was accumulated
      high = out.factor == 0.0f ? 0.0f : high * out.factor;
      int at = column + 8 * n;
      if (out.type == DType::f32) {
        *reinterpret_cast<float2*>(static_cast<float*>(out.to) + at) = {low, high};
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out.to) + at) =
            device::pack2<kType>(low, high);
      }
    }
  }

  template <int kGroup>
  static __device__ __forceinline__ void end_task(const PagedParams& p, const device::KeyTask& task,
                                                  const Shared& shared, const Lane& me,
                                                  State& state) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = state.sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (me.lane % 4 == 0)
        store_shared(shared.sums(kGroup) + (me.row + 8 * half) * 4, __float_as_uint(sum));
    }
    sync_math();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = me.row + 8 * half;
      // In the same order by both.
      float sum = __uint_as_float(load_shared4(shared.sums(0) + row * 4)) +
                  __uint_as_float(load_shared4(shared.sums(1) + row * 4));
      UnitRow unit = unit_row(p, task.b, 0, task.row0, row);
      if (!unit.valid) continue;
      RowOutput out = task_output(p, task, unit, row, state.reference[half], sum,
                                  kGroup == 0 && me.lane % 4 == 0);
      store_row(out, state, half, kGroup * kOutColumns + 2 * (me.lane % 4));
    }
  }

  template <int kGroup>
  static __device__ __forceinline__ void compute(const PagedParams& p, const Shared& shared) {
    const Lane me;
    State state;
    device::KeyTasks tasks(p.work);
    device::KeyTask task;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      attend<kGroup>(p, task, shared, me, state);
      end_task<kGroup>(p, task, shared, me, state);
    }
  }
};

// 7. Kernel
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    mla_sm90_kernel(const __grid_constant__ PagedParams p,
                    const __grid_constant__ MlaSm90Maps maps) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const typename Kernel::Shared shared(smem);
  int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      device::barrier_init(shared.full(stage), 1);
      device::barrier_init(shared.empty(stage), 8);    // a lane of each math warp
      device::barrier_init(shared.weighed(stage), 4);  // of one warpgroup
    }
    device::barrier_init_fence();
  }
  __syncthreads();
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  if (group == 2) {
    device::registers_shrink<Kernel::kCopyRegisters>();
    if (threadIdx.x < Kernel::kMathThreads + 32) Kernel::copy(p, maps, shared);
  } else {
    device::registers_grow<Kernel::kMathRegisters>();
    if (group == 0) {
      Kernel::template compute<0>(p, shared);
    } else {
      Kernel::template compute<1>(p, shared);
    }
  }
}

// 8. Launcher
template <DType kType, int kHeadDim, int kHeadDimV>
void launch_mla_sm90(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV && kHeadDim == MlaSm90Tiles::kPanels * 64);
  using Kernel = MlaSm90<kType>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(mla_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  MlaSm90Maps maps = mla_sm90_maps(p);
  launch_overlapping(mla_sm90_kernel<Kernel>, grid_blocks(num_key_tasks(p.work), "sm90"),
                     Kernel::kThreads, Kernel::kSmemBytes, 9, stream, p, maps);
}

}  // namespace cuattn
